"""The context that all destinations of one sender share, and the phases of a destination."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from fedsender.config import Presence, Sending
from fedsender.federation.client import FederationClient
from fedsender.ledger import (
    EVERY_SERVER,
    AttemptLog,
    Ledger,
    Line,
    SentPdu,
    TransactionRecord,
)
from fedsender.runtime import Runtime, SteadyClock
from fedsender.sender.admission import Admission
from fedsender.sender.edus.receipts import ReceiptPage
from fedsender.sender.failure import ServerState
from fedsender.sender.pages import Pages
from fedsender.sender.room_pages import RoomPage
from fedsender.sender.routing import Bad, Router
from fedsender.sender.transaction import Debts, PduPool, TransactionIds
from fedsender.store.edus import EduStore
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.sender import ReceiptRecords, SenderStore
from fedsender.streams import HeardPositions
from fedsender.telemetry import Metrics
from fedsender.waiting import Alarms, Signal, Steps


class Announcer(Protocol):
    """The announcer: tells the homeserver's other workers that a server fails, or is up again."""

    async def publish_backoff(self, server: str, stream_id: int, now_ms: int) -> None: ...
    async def publish_server_up(self, server: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Context:
    """The context that all destinations of one sender share.

    Attributes:
        clock: has the times of servers' states.
        connect_deadline: seconds for finding and reaching a server, all its addresses included.
        device_lists: the stream id up to which rows of device lists may be read.
        pdu_pool: the PDUs of all queues.
        full: servers with no room in quarantine for an item that is convicted.
        receipt_debts: for servers that are not active, the stream id above which each is owed
            receipts.
        receipt_pages: from which debts of receipts are paid.
        room_pages: from which catch-ups take what is owed.
        seen_homeservers: servers with answers that say nothing, and when `/version` last answered
            there as a homeserver's (trio's clock, seconds).
        receipts_unsaved: set when receipts that are owed may have changed.
        troubles: loops that an error has stopped for a moment, and when (trio's clock, seconds).
    """

    origin: str
    sending: Sending
    connect_deadline: float
    runtime: Runtime
    clock: SteadyClock
    homeserver: HomeserverStore
    store: SenderStore
    edus: EduStore
    receipts: ReceiptRecords
    instance: str
    device_lists: HeardPositions
    presence: Presence
    router: Router
    client: FederationClient
    admission: Admission
    ledger: Ledger
    attempt_log: AttemptLog
    metrics: Metrics
    ids: TransactionIds
    announcer: Announcer
    pdu_pool: PduPool
    receipt_pages: Pages[None, ReceiptPage]
    room_pages: Pages[str, RoomPage]
    steps: Steps
    debts: Debts = field(default_factory=Debts)
    alarms: Alarms = field(default_factory=Alarms)
    full: set[str] = field(default_factory=set)
    receipt_debts: dict[str, int] = field(default_factory=dict)
    seen_homeservers: dict[str, float] = field(default_factory=dict)
    receipts_unsaved: Signal = field(default_factory=Signal)
    troubles: dict[str, float] = field(default_factory=dict)

    async def quarantine(
        self, bad: Bad, destination: str | None = None, transaction_id: str | None = None
    ) -> None:
        """Put an event that cannot be sent into the quarantine of one server, or of all (None).

        A line of the ledger says so first: a kill in between has it said twice, and never not.

        Args:
            transaction_id: of the transaction that the server refused for it.
        """
        self.metrics.quarantined.inc()
        pdu = SentPdu(bad.event_id, bad.room_id, bad.stream_ordering, "quarantine")
        self.ledger.record(
            Line(
                self.runtime.now_ms(),
                destination or EVERY_SERVER,
                "quarantined",
                transaction_id,
                record=TransactionRecord([pdu]),
                reason=bad.reason,
            )
        )
        await self.store.quarantine_item(
            destination=destination,
            kind="pdu",
            event_id=bad.event_id,
            room_id=bad.room_id,
            stream_ordering=bad.stream_ordering,
            reason=bad.reason,
            content=bad.content,
        )

    async def save(self, state: ServerState) -> None:
        """Put a server's new state on record."""
        self.note(state)
        await self.store.save_server_state(state.moved(self.clock.set_by_ms))

    def note(self, state: ServerState) -> None:
        """Note a server's new state: whether its quarantine is full."""
        if any(search.full for search in state.searches):
            self.full.add(state.destination)
        else:
            self.full.discard(state.destination)


class Phase(Enum):
    """What the task of a destination does now, in the operator's words."""

    IDLE = "idle"
    CONNECTING = "connecting"
    SENDING = "sending"
    WAITING = "waiting"
    LOCKED = "waiting for a lock in the homeserver's database"
    QUEUED = "waiting for a free place"
    CATCHING_UP = "catching up"
    LEAVING = "leaving"
