"""What one server is owed besides its live PDUs: keys, EDUs, events to be sent again.

To-device messages, device lists and redeliveries are always in a database; memory only knows that
there are some. Receipts are in memory or are a debt; typing and presence are in memory only.
"""

import json
from collections.abc import Mapping
from functools import partial

import structlog
import trio

from fedsender.config import EduKinds, Policy
from fedsender.matrix import BadEvent, canonical_json
from fedsender.sender.edus import device_lists
from fedsender.sender.edus.presence import PresenceQueue
from fedsender.sender.edus.receipts import ReceiptQueue
from fedsender.sender.queue import EphemeralQueue
from fedsender.sender.transaction import Draft, Edu, Key, Transaction
from fedsender.store.edus import EduStore
from fedsender.store.homeserver import HomeserverStore, Settlement
from fedsender.store.records import Receipt
from fedsender.store.sender import SenderStore
from fedsender.streams import Watermark
from fedsender.telemetry import Metrics

log = structlog.get_logger()

EPHEMERAL_KEYS = 1000
PRESENCE_USERS = 1000
RECEIPTS = 1000
RECEIPT_PAGE = 500
RECEIPT_PAGES = 20
"""So many pages are looked through for one transaction."""
RESERVED_EDUS = 10
"""So many EDUs of a transaction are kept from to-device messages while device lists wait."""
TO_DEVICE = "m.direct_to_device"


class Lanes:
    """See the module; the half of an `Outbox` that knows nothing of catch-up.

    Attributes:
        ephemeral: typing.
        presence: the states of users.
        receipts: those that wait in memory, and whether more wait in the database.
    """

    def __init__(
        self,
        destination: str,
        *,
        origin: str,
        homeserver: HomeserverStore,
        store: SenderStore,
        edus: EduStore,
        device_lists: Watermark,
        metrics: Metrics,
        owes: bool,
    ) -> None:
        """`owes`: there may be something for it in the databases."""
        self.destination = destination
        # No method of ours: it would know us, and who has left would wait for Python's search for
        # cycles, hundreds at a time.
        self._count_dropped = partial(_count_dropped, metrics)
        self.ephemeral = EphemeralQueue(EPHEMERAL_KEYS, self._count_dropped)
        self.presence = PresenceQueue(PRESENCE_USERS, self._count_dropped)
        self.receipts = ReceiptQueue(RECEIPTS)
        self._origin = origin
        self._homeserver = homeserver
        self._store = store
        self._edus = edus
        self._device_lists = device_lists
        self._metrics = metrics
        self._owes_to_device = self._owes_device_lists = owes
        self._owes_redeliveries = owes

    # --- Taking in: synchronous -------------------------------------------------------------------

    def owe_keys(self) -> None:
        """There may be to-device messages, or device lists, in the database."""
        self._owes_to_device = self._owes_device_lists = True

    def owe_to_device(self) -> None:
        """There are to-device messages in the database."""
        self._owes_to_device = True

    def owe_device_lists(self) -> None:
        """There are changed devices or keys in the database."""
        self._owes_device_lists = True

    def owe_redeliveries(self) -> None:
        """There are events to send again."""
        self._owes_redeliveries = True

    def put_edu(
        self, key: Key, edu_type: str, content: Mapping[str, object], *, lifetime_s: float
    ) -> None:
        """Send this EDU, unless a newer one of the same key replaces it or it grows too old."""
        wire = canonical_json({"content": content, "edu_type": edu_type})
        expires_at = trio.current_time() + lifetime_s
        self.ephemeral.put(key, edu_type, wire, expires_at=expires_at)

    def take_back(self, transaction: Transaction) -> None:
        """This transaction will not be repeated; what was in it waits again."""
        self._owes_to_device |= bool(transaction.outbox_ids)
        self._owes_device_lists |= bool(transaction.pokes)

    def give_back(self, draft: Draft) -> None:
        """This draft was filled, and is not sent; what was in it waits again."""
        self._owes_to_device |= any(edu.outbox_ids for edu in draft.edus)
        self._owes_device_lists |= any(edu.pokes for edu in draft.edus)

    @property
    def edus_waiting(self) -> int:
        """How many EDUs wait in memory."""
        return len(self.ephemeral) + len(self.receipts) + len(self.presence)

    def expire(self) -> None:
        """Let go of EDUs that have outlived their use."""
        now = trio.current_time()
        self.ephemeral.expire(now)
        self.presence.expire(now)

    def close(self) -> None:
        """It leaves memory, and with it typing and presence that could not be sent."""
        waiting = len(self.ephemeral) + len(self.presence)
        if waiting:
            self._count_dropped("expired", waiting)

    # --- Filling a transaction --------------------------------------------------------------------

    def _drop_unwanted(self, kinds: EduKinds) -> None:
        """Kinds that the policy has switched off since they were queued."""
        if not kinds.receipts:
            self.receipts.clear()
        if not kinds.typing:
            self.ephemeral.clear()
        if not kinds.presence:
            self.presence.clear()

    async def _fill_to_device(self, draft: Draft, policy: Policy) -> None:
        # Cleared before the read, so that a message that arrives during it asks for another look.
        self._owes_to_device = False
        if not policy.edus.to_device:
            return
        room = draft.max_edus
        if self._owes_device_lists:
            room = max(1, room - RESERVED_EDUS)
        rows = await self._homeserver.to_device(self.destination, 0, None, room)
        for row_id, content in rows:
            try:
                # What a homeserver stores is JSON, but hardly ever in canonical form.
                wire = canonical_json(
                    {"content": json.loads(content), "edu_type": TO_DEVICE},
                    allow_fractions=True,
                    allow_big_integers=True,
                )
            except (BadEvent, ValueError, RecursionError) as error:
                await self._quarantine_row(row_id, content, str(error))
                continue
            edu = Edu(TO_DEVICE, wire, outbox_ids=(row_id,))
            if not draft.add_edu(edu):
                # Rows are deleted by id: those of one id leave together or not at all.
                self._owes_to_device = True
                if draft.drop_outbox(row_id):
                    return
                draft.add_edu(edu, anyway=True)
        self._owes_to_device |= len(rows) >= room

    async def _fill_device_lists(self, draft: Draft, policy: Policy) -> None:
        room = draft.edu_room
        if not room:
            return
        self._owes_device_lists = False
        if not policy.edus.device_lists:
            return
        changes = await self._edus.device_changes(self.destination, self._device_lists.value)
        self._owes_device_lists |= not changes.complete or device_lists.count(changes) > room
        for together in device_lists.compose(changes, room):
            if not draft.add_edu(*together):
                self._owes_device_lists = True
                return

    async def _quarantine_row(self, row_id: int, content: str, reason: str) -> None:
        await self._store.quarantine_item(
            destination=self.destination, kind=TO_DEVICE, content=content.encode(), reason=reason
        )
        await self._homeserver.settle([Settlement(self.destination, None, (row_id,))])
        self._metrics.quarantined.inc()
        log.error("to-device message quarantined", destination=self.destination, row=row_id)

    async def _owed_receipts(self, policy: Policy) -> tuple[list[Receipt], int] | None:
        """Of the next page above the debt that has any, this server's; and where the page ends."""
        queue, origin = self.receipts, self._origin
        if not policy.edus.receipts:
            queue.clear()
            return None
        for _ in range(RECEIPT_PAGES):
            offered = queue.begin_page()
            if queue.debt is None:
                return None
            page = await self._edus.receipts(origin, queue.debt, None, RECEIPT_PAGE)
            if not page:
                queue.none_found(offered)
                return None
            servers = await self._homeserver.servers_now([item.room_id for item in page])
            mine = [item for item in page if self.destination in servers[item.room_id]]
            if mine:
                return mine, page[-1].stream_id
            queue.pay(page[-1].stream_id)
        return None


def _count_dropped(metrics: Metrics, reason: str, count: int) -> None:
    metrics.dropped_edus.labels(reason).inc(count)
