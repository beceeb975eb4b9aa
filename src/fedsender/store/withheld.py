"""What a server does not get, and what it gets once more: the quarantine and the redelivery lane.

A part of `sender.SenderStore`. Every method is one hop into a worker thread.
"""

from collections.abc import Sequence

from sqlalchemy import Connection

from fedsender.outside import Outside
from fedsender.store import quarantine as held
from fedsender.store.engine import Database
from fedsender.store.records import Quarantined, Redelivery

MAX_REASON = 500


class WithheldStore:
    """See the module."""

    def __init__(self, database: Database, outside: Outside, instance: str) -> None:
        """`instance`: whose records we write."""
        self._database = database
        self._now_ms = outside.now_ms
        self._instance = instance

    # --- quarantine -------------------------------------------------------------------------------

    async def quarantine_item(
        self,
        *,
        destination: str | None,
        kind: str,
        reason: str,
        event_id: str | None = None,
        room_id: str | None = None,
        stream_ordering: int | None = None,
        content: bytes | None = None,
    ) -> int:
        """Put an item into quarantine; its id. An event that is there already keeps its entry."""
        values = {
            "destination": destination,
            "kind": kind,
            "event_id": event_id,
            "room_id": room_id,
            "stream_ordering": stream_ordering,
            "content": content,
            # It may quote what no database holds.
            "reason": reason.replace("\0", "\ufffd")[:MAX_REASON],
            "at_ms": self._now_ms(),
            "instance_name": self._instance,
        }
        return await self._database.write(lambda connection: held.put(connection, values))

    async def quarantined_rooms(self) -> dict[str, int]:
        """Rooms with an event that no server got, and its stream ordering: what is behind waits."""
        instance = self._instance
        return await self._database.read(lambda connection: held.rooms(connection, instance))

    async def quarantined_for_all(self) -> int:
        """How many events no server got, of those that we hold."""
        instance = self._instance
        return await self._database.read(lambda connection: held.of_all(connection, instance))

    async def quarantined_of(self, destination: str) -> int:
        """How many items of this destination are in quarantine."""
        return await self._database.read(lambda connection: held.count(connection, destination))

    async def quarantined_events(self, destination: str) -> set[str]:
        """Events that this destination does not get."""
        return await self._database.read_together(held.events, destination)

    async def quarantine_list(
        self, destination: str | None, limit: int, after: int = 0
    ) -> list[Quarantined]:
        """Our items with an id above `after`, ascending; of one destination, or of all."""
        instance = self._instance
        return await self._database.read(
            lambda connection: held.page(connection, instance, destination, limit, after)
        )

    async def quarantined(self, ids: Sequence[int]) -> list[Quarantined]:
        """Those of our items that have these ids, ascending."""
        instance = self._instance
        return await self._database.read(lambda connection: held.find(connection, instance, ids))

    async def release(self, ids: Sequence[int]) -> list[Quarantined]:
        """Let items go: PDUs of one destination into its redelivery lane, in this transaction.

        Returns the items. An EDU, and an event that no server got, are for the caller to send on;
        their entries are gone.
        """
        items = await self.quarantined(ids)
        pdus = [
            Redelivery(item.destination, item.event_id, item.room_id, item.stream_ordering)
            for item in items
            if item.destination is not None
            and item.event_id is not None
            and item.room_id is not None
            and item.stream_ordering is not None
        ]
        await self.add_redeliveries(pdus, released=[item.id for item in items])
        return items

    async def drop(self, ids: Sequence[int]) -> list[Quarantined]:
        """Throw items away for good; returns them, for the ledger."""
        items = await self.quarantined(ids)
        ours = [item.id for item in items]
        await self._database.write(lambda connection: held.remove(connection, ours))
        return items

    # --- redeliveries -----------------------------------------------------------------------------

    async def add_redeliveries(
        self, pairs: Sequence[Redelivery], *, released: Sequence[int] = ()
    ) -> None:
        """Queue events for redelivery; one that is queued already stays as it is.

        `released`: items that leave quarantine in the same transaction. If they left later, an
        event that its server refuses again at once would find its old entry, and go with it.
        """
        now_ms, instance = self._now_ms(), self._instance

        def add(connection: Connection) -> None:
            held.add_redeliveries(connection, pairs, instance, now_ms)
            held.remove(connection, released)

        await self._database.write(add)

    async def redeliveries(self, destination: str, limit: int) -> list[Redelivery]:
        """The destination's redeliveries, room by room, in stream order."""
        return await self._database.read_together(held.redeliveries, (destination, limit))

    async def redelivered(
        self, destination: str, event_ids: Sequence[str], *, upto_ms: int | None = None
    ) -> None:
        """These were answered; of them, those that were asked for up to `upto_ms`."""
        await self._database.write(
            lambda connection: held.remove_redeliveries(connection, destination, event_ids, upto_ms)
        )

    async def destinations_with_redeliveries(self) -> list[str]:
        """Destinations with something to redeliver, by name."""
        return await self._database.read(held.redelivery_destinations)
