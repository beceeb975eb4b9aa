"""The homeserver's database, as questions and answers in the words of the sender.

One class for both kinds: a Synapse's database, used in place, and the embedded store, which a feed
fills. Every method is one hop into a worker thread; the functions of a connection that it runs
there stand in the modules beside this one.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import trio
from sqlalchemy import Connection

from fedsender.intake.rows import RelayRow, RoomServers, ServersRow
from fedsender.outside import Outside
from fedsender.store import (
    appends,
    delivery,
    device_lists,
    edu_rows,
    embedded,
    intake,
    pages,
    positions,
    relay_load,
    room_servers,
    tables,
)
from fedsender.store.appends import Appended, NewRecord
from fedsender.store.engine import Database, StoreError
from fedsender.store.events import EventStore, HomeserverSettings
from fedsender.store.intake import News, Notice, Place
from fedsender.store.lock import Lock, LockHeld
from fedsender.store.records import (
    Backoff,
    DestinationRoomsPage,
    DestinationsPage,
    EventRow,
    Generation,
    History,
    HostsUnknown,
    Lagging,
    Pending,
    Receipt,
    Settlement,
)
from fedsender.store.relay_load import Handles, Loaded, LoadedSnapshot, Steps
from fedsender.streams import HostsRow, RedactionRow

__all__ = ["EventRow", "HomeserverSettings", "HomeserverStore", "HostsUnknown", "Settlement"]

T = TypeVar("T")
SORTABLE = (
    "destination",
    "retry_last_ts",
    "retry_interval",
    "failure_ts",
    "last_successful_stream_ordering",
)


class HomeserverStore(EventStore):
    """See the module. Errors: StoreError for what waiting does not cure."""

    def __init__(
        self,
        database: Database,
        outside: Outside,
        settings: HomeserverSettings,
        *,
        state_database: Database | None = None,
        intake_lock: Lock | None = None,
    ) -> None:
        """
        Args:
            state_database: where a Synapse keeps `state_groups_state` and its edges apart.
            intake_lock: held while we take appends; None: nobody else can use this store.
        """
        super().__init__(database, outside, settings, state_database=state_database)
        self._outside = outside
        self._intake_lock = intake_lock
        self._epoch: str | None = None

    # --- positions --------------------------------------------------------------------------------

    async def events_position(self) -> int:
        """Up to where everything is fanned out. Reconciles the table with the configured senders.

        Raises StoreError if a Synapse has no position at all.
        """
        settings = self._settings
        return await self._database.write(
            lambda connection: positions.reconcile(
                connection, settings.instance, settings.instances, alone=self.alone
            )
        )

    async def senders(self) -> dict[str, Generation]:
        """Where each of those who send for this homeserver stands; `ours` is that of a fedsender
        that has not handed back."""
        return await self._database.read(positions.senders)

    async def hand_back(self) -> None:
        """Say, to whoever comes after us, that we have no records of our own any more."""
        await self._database.write(partial(positions.give_up, instance=self._settings.instance))

    async def generation(self) -> Generation:
        """Whether anybody else moved our position, and our mark in this database."""
        return await self._database.read(
            lambda connection: positions.generation(
                connection, self._settings.instance, marked=self._embedded
            )
        )

    async def adopt_generation(self, mark: str) -> None:
        """Take the database as it is: from here on it is as we left it.

        Writes the mark where there is room for one (not on a Synapse).
        """
        instance = self._settings.instance

        def adopt(connection: Connection) -> None:
            position = positions.read_position(connection, "events", instance)
            positions.set_position(connection, "federation", instance, position)
            if self._embedded:
                positions.set_mark(connection, instance, mark)

        await self._database.write(adopt)

    async def event_writer_positions(self) -> dict[str, int]:
        """Per configured writer of events a position below which it is done. A lower bound."""
        settings = self._settings
        return await self._database.read(
            lambda connection: positions.event_writer_positions(
                connection, settings.instance, settings.event_writers
            )
        )

    async def stream_positions(self, stream: str) -> dict[str, int]:
        """By writer up to where it has stored rows of a stream (by Synapse's name for it there).

        They lag, and a writer has none before its first write.
        """
        if self._embedded:
            return {}
        return await self._database.read(
            lambda connection: positions.stream_positions(connection, stream)
        )

    async def persisted_upto(self) -> int:
        """A token below which every writer of events is known to be done."""
        if self._embedded:
            return await self.feed_position()
        return min((await self.event_writer_positions()).values())

    # --- what destinations are owed ---------------------------------------------------------------

    async def commit_fan_out(
        self,
        position: int,
        owed: Mapping[tuple[str, str], int],
        first: Mapping[str, int] | None = None,
    ) -> set[str]:
        """Record what each (destination, room) is owed and move the events position, as one (I1).

        Returns the rooms that are gone: nothing is owed there.

        `owed` has the newest event of each; `first` the oldest that each destination is owed now,
        below which a new destination's LSSO begins.

        Stream orderings go upwards only; rooms that were purged are left out. Raises StoreError if
        the position is gone or beyond `position`.
        """

        def commit(connection: Connection) -> set[str]:
            gone = delivery.record_owed(connection, owed, first or {})
            positions.advance_events(connection, self._settings.instance, position)
            return gone

        return await self._database.write(commit)

    async def record_owed(self, owed: Mapping[tuple[str, str], int]) -> None:
        """Record what each (destination, room) is owed, upwards only; purged rooms are left out."""

        def record(connection: Connection) -> None:
            delivery.record_owed(connection, owed, {})

        await self._database.write(record)

    async def owed_rooms(self, destination: str, after: int, limit: int) -> list[tuple[str, int]]:
        """(room, stream ordering) above `after`, ascending by stream ordering."""
        asked = (destination, after, limit)
        return await self._database.read_together(delivery.owed_rooms, asked)

    async def lsso(self, destination: str) -> int | None:
        """The destination's last successful stream ordering; None: unknown."""
        row = await self.backoff(destination)
        return None if row is None else row.lsso

    async def lagging(self) -> list[Lagging]:
        """Every destination that is owed something, by name."""
        found: dict[str, Lagging] = {}
        start: tuple[str, str] | None = ("", "")
        while start is not None:
            look = partial(delivery.lagging_page, start=start)
            page, start = await self._database.read(look)
            for item in page:
                before = found.get(item.destination)
                rooms = item.rooms + (0 if before is None else before.rooms)
                found[item.destination] = replace(item, rooms=rooms)
        owing_keys = await self._owing_keys()
        others = [name for name in owing_keys if name not in found]
        rows = await self.backoffs(others)
        for name, row in rows.items():
            found[name] = Lagging(name, None if row is None else row.lsso, 0, owes_keys=True)
        found.update((name, replace(found[name], owes_keys=True)) for name in owing_keys)
        return [found[name] for name in sorted(found)]

    async def _owing_keys(self) -> list[str]:
        outboxes = [tables.device_federation_outbox, tables.device_lists_outbound_pokes]
        names: set[str] = set()
        for table in outboxes:
            start: str | None = ""
            while start is not None:
                look = partial(delivery.owing_keys_page, table=table, start=start)
                page, start = await self._database.read(look)
                names.update(page)
        return sorted(names)

    async def settle(self, settlements: Sequence[Settlement]) -> dict[str, int]:
        """Write what answered transactions change, in one transaction.

        Returns, on a Synapse with PostgreSQL, per destination whose backoff was cleared the id to
        publish on the `caches` stream; what others settle at the same moment is in it too.
        """
        return await self._database.write_together(self._settle, settlements)

    def _settle(
        self, connection: Connection, groups: Sequence[Sequence[Settlement]]
    ) -> dict[str, int]:
        settlements = [item for group in groups for item in group]
        for item in settlements:
            if item.pokes:
                device_lists.settle(connection, item.destination, item.pokes, resync=item.resync)
        return self._tell(connection, delivery.settle(connection, settlements))

    async def store_backoff(
        self, destination: str, failure_ts: int | None, retry_last_ts: int, retry_interval: int
    ) -> int | None:
        """Write the shared failure columns (ms), unless the row there is later or longer.

        Returns, on a Synapse with PostgreSQL, the id to publish on the `caches` stream.
        """

        def store(connection: Connection) -> int | None:
            written = delivery.store_backoff(
                connection, destination, failure_ts, retry_last_ts, retry_interval
            )
            return self._tell(connection, [destination] if written else []).get(destination)

        return await self._database.write(store)

    def _tell(self, connection: Connection, names: Sequence[str]) -> dict[str, int]:
        if not self._tells_caches:
            return {}
        instance, now_ms = self._settings.instance, self._now_ms()
        return {
            name: delivery.invalidate_backoff_cache(connection, name, instance, now_ms)
            for name in names
        }

    async def backoff(self, destination: str) -> Backoff | None:
        """The destination's row; None if it has none."""
        return await self._database.read_together(delivery.backoffs, destination)

    async def backoffs(self, destinations: Sequence[str]) -> dict[str, Backoff | None]:
        """The rows of these destinations; None for one that has none."""
        return await self._database.read(partial(delivery.backoffs, names=destinations))

    async def changed_backoffs(self, writer: str, after: int, upto: int) -> list[str]:
        """The servers whose backoff `writer` changed, by its rows of the `caches` stream with
        after < stream id <= upto. None where there is no such stream."""
        if not self._tells_caches:
            return []
        return await self._database.read(
            lambda connection: delivery.changed_backoffs(connection, writer, after, upto)
        )

    async def last_cache_write(self, *, of_all: bool = False) -> int | None:
        """The newest id in the `caches` stream that we wrote (or anybody), if we ever did."""
        if not self._tells_caches:
            return None
        writer = None if of_all else self._settings.instance
        return await self._database.read(partial(delivery.last_cache_write, instance=writer))

    async def changed_to_device(self, after: int, upto: int) -> list[str]:
        """The destinations of to-device rows with after < stream id <= upto."""
        return await self._database.read(
            partial(delivery.changed_to_device, after=after, upto=upto)
        )

    async def to_device(
        self, destination: str, after: int, upto: int | None, limit: int
    ) -> list[tuple[int, str]]:
        """(stream id, EDU content as JSON text) above `after`, ascending.

        The rows of one stream id always come together, beyond the limit if they must.
        """
        asked = (destination, after, upto, limit)
        return await self._database.read_together(delivery.to_device, asked)

    async def pending_counts(self, destination: str) -> Pending:
        """How much the destination is owed, and since when."""
        return await self._database.read(lambda connection: pages.pending(connection, destination))

    async def rooms_shared_with(self, destination: str) -> list[str]:
        """The rooms that the server is in now."""
        find = (
            room_servers.embedded_rooms_shared_with
            if self._embedded
            else room_servers.rooms_shared_with
        )
        return await self._database.read(lambda connection: find(connection, destination))

    async def purge(self, destination: str) -> None:
        """Forget the destination: its row, and all that it is owed."""
        await self._database.write(lambda connection: delivery.purge(connection, destination))

    # --- pages for the admin endpoints ------------------------------------------------------------

    async def destinations_page(
        self,
        start: int,
        limit: int,
        order_by: str = "destination",
        direction: Literal["f", "b"] = "f",
        substring: str | None = None,
    ) -> DestinationsPage:
        """Rows `start`.. of `destinations`; `substring` of the name, in any case.

        Raises StoreError if `order_by` is not one of SORTABLE.
        """
        if order_by not in SORTABLE:
            raise StoreError(f"order_by must be one of {', '.join(SORTABLE)}")
        return await self._database.read(
            lambda connection: pages.destinations_page(
                connection,
                start=start,
                limit=limit,
                order_by=order_by,
                backwards=direction == "b",
                substring=substring,
            )
        )

    async def destination_rooms_page(
        self, destination: str, start: int, limit: int, direction: Literal["f", "b"] = "f"
    ) -> DestinationRoomsPage:
        """Rows `start`.. of the rooms in which the destination is owed, or was sent, an event."""
        return await self._database.read(
            lambda connection: pages.destination_rooms_page(
                connection, destination, start=start, limit=limit, backwards=direction == "b"
            )
        )

    # --- the feed (embedded only) -----------------------------------------------------------------

    async def apply_feed(self, rows: Sequence[RelayRow], token: int) -> None:
        """Store a token's rows and the token, as one. Nothing if the token was stored before.

        Raises FeedError for rows that cannot be stored.
        """
        await self.apply_feed_batch([(token, rows)])

    async def apply_feed_batch(self, batch: Sequence[tuple[int, Sequence[RelayRow]]]) -> None:
        """The same for several tokens, ascending, in one transaction."""
        now_ms = self._now_ms()

        def apply(connection: Connection) -> None:
            embedded.apply_tokens(connection, batch, now_ms)

        if _move_hosts(row for _, rows in batch for row in rows):
            with self._hosts_moving():
                await self._database.write(apply)
        else:
            await self._database.write(apply)

    @property
    def alone(self) -> bool:
        """Whether no other sender reads this store."""
        settings = self._settings
        return self._embedded and not (settings.shared and len(settings.instances) > 1)

    @property
    def known_to_others(self) -> bool:
        """Whether senders of other names may have sent what is in this store."""
        shared = self._settings.shared and self._database.dialect == "postgresql"
        return not self._embedded or shared

    async def begin_intake(self, epoch: str) -> bool:
        """Take the homeserver's appends under this epoch, unless another instance takes them."""
        if self._intake_lock is not None:
            try:
                await self._intake_lock.take(await self._database.read(intake.store_key))
            except LockHeld:
                return False
        await self.drop_unfinished_load()
        self._epoch, instance = epoch, self._settings.instance
        await self._database.write(lambda connection: intake.begin(connection, instance, epoch))
        return True

    async def feed_news(self, after: Place | None) -> News:
        """What is new in the store since `after`; None: where everything stands."""
        instance = self._settings.instance
        found = await self._database.read(
            lambda connection: intake.news(connection, instance, after)
        )
        if after is None or found.place.position > after.position:
            self._hosts_moved()
        return found

    async def append_records(self, records: Sequence[NewRecord]) -> list[Appended]:
        """Store records in this order, in one transaction; see `appends`. Raises Elsewhere."""
        instance, epoch, now_ms = self._settings.instance, self._epoch, self._now_ms()

        def append(connection: Connection) -> list[Appended]:
            intake.check(connection, epoch)
            make_rows = partial(embedded.Rows, now_ms)
            answers = appends.append_records(connection, records, now_ms, make_rows)
            if not self.alone:
                told = [
                    intake.redaction(row.target)
                    for row in appends.stored_rows(records, answers)
                    if isinstance(row, RedactionRow)
                ]
                intake.tell(connection, instance, told, now_ms)
            return answers

        if _move_hosts(row for record in records for row in record.rows):
            with self._hosts_moving():
                return await self._database.write(append)
        return await self._database.write(append)

    async def room_servers(self, room_id: str) -> RoomServers | None:
        """The servers that are in a room by what the feed brought; None: it said nothing of it."""
        return await self._database.read(partial(room_servers.embedded_room, room_id=room_id))

    async def find_appends(self, keys: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
        """Key -> (token, checksum) of the records that are stored."""
        return await self._database.read(partial(appends.find_appends, keys=keys))

    async def forget_appends(self) -> int:
        """Delete some of the keys that are old enough, and old notices; returns how many keys."""
        now_ms = self._now_ms()

        def forget(connection: Connection) -> int:
            intake.forget(connection, now_ms)
            return appends.forget_appends(connection, now_ms)

        return await self._database.write(forget)

    async def store_ephemeral(
        self, receipts: Sequence[Receipt], notices: Sequence[Notice]
    ) -> int | None:
        """Keep receipts for those that do not answer now, and notices for other senders.

        The newest stream id that the receipts got; None: there were none. Raises Elsewhere.
        """
        instance, epoch, now_ms = self._settings.instance, self._epoch, self._now_ms()

        def store(connection: Connection) -> int | None:
            intake.check(connection, epoch)
            if not self.alone:
                intake.tell(connection, instance, notices, now_ms)
            return edu_rows.store_receipts(connection, receipts) if receipts else None

        return await self._database.write(store)

    async def feed_position(self) -> int:
        """The token up to which the feed is stored; -1 before the first one."""
        return await self._database.read(positions.feed_position)

    async def feed_history(self) -> History | None:
        """The history that the feed's tokens belong to; None: not known yet."""
        return await self._database.read(positions.feed_history)

    async def begin_history(self, history: History) -> None:
        """Store the history that the feed's tokens belong to from now on."""
        await self._database.write(
            lambda connection: positions.set_feed_history(connection, history)
        )

    async def store_receipts(self, receipts: Sequence[Receipt]) -> int:
        """Keep receipts for those that do not answer now; the newest stream id that they got."""
        return await self._database.write(
            lambda connection: edu_rows.store_receipts(connection, receipts)
        )

    async def load_snapshot(self, snapshot: LoadedSnapshot, handles: Handles) -> Loaded:
        """Take a snapshot over; nothing of it counts until all is stored. See `relay_load`.

        Raises FeedError, and what `snapshot.read` raises.
        """
        return await self._run_steps(relay_load.load(snapshot, handles, self._now_ms()))

    async def drop_unfinished_load(self) -> None:
        """Remove what a load that was broken off has left; before the feed stores anything."""
        await self._run_steps(relay_load.drop())

    async def _run_steps(self, steps: Steps[T]) -> T:
        """Each step in a transaction of its own, which others may share."""
        limiter = trio.CapacityLimiter(1)
        result: Any = None
        with self._hosts_moving(), closing(steps):
            while True:
                go_on = partial(relay_load.run_step, steps, result)
                step, value = await self._outside.run_sync(go_on, limiter=limiter)
                if step is None:
                    return cast(T, value)
                result = await self._database.write(step)

    async def queue_to_device(self, destination: str, stream_id: int, messages: str) -> None:
        """Put a to-device message (EDU content as JSON text) into the outbox."""
        now_ms = self._now_ms()
        await self._database.write(
            lambda connection: delivery.queue_to_device(
                connection, destination, stream_id, messages, now_ms
            )
        )


def _move_hosts(rows: Iterable[RelayRow]) -> bool:
    return any(isinstance(row, HostsRow | ServersRow) for row in rows)
