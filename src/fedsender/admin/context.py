"""The objects that the endpoints use. It imports nothing that only an answer needs."""

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from fedsender.config import Config, Policies
from fedsender.federation.signing import KeyRing
from fedsender.matrix import shard_of
from fedsender.outcomes import Outcomes
from fedsender.runtime import Runtime
from fedsender.sender.sender import Sender
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.requests import Past
from fedsender.store.sender import SenderStore
from fedsender.streams import FeedStatus
from fedsender.telemetry import Metrics, Minute, Standing


class Follows(Protocol):
    """The feed."""

    def status(self) -> FeedStatus: ...


class Failing(Protocol):
    """The ledger."""

    @property
    def failing(self) -> str | None: ...


class Gate(Protocol):
    """Shut while this daemon may not send."""

    @property
    def open(self) -> bool: ...
    @property
    def lack(self) -> str | None: ...


MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The daemon as the endpoints see it.

    Attributes:
        homeserver: the homeserver's database.
        store: the sender's own database.
        senders: those that share our database, ourselves among them: see `together`.
        past: of an order that was handed on, see `store.requests`.
        asked_no_more: set where we are the only sender, and nothing waits that was handed on to us.
        gate: shut while this daemon may not send.
        rendering: for the thread that writes the metrics out; two at once would not be faster.
        ledger_reading: the same for reading the ledger.
        outcomes: of the ledger, for readers that wait.
        host: the name of this machine.
        began: the start, on Trio's clock.
        hour: the last hour, the latest minute last.
    """

    policies: Policies
    keys: KeyRing
    sender: Sender
    homeserver: HomeserverStore
    store: SenderStore
    feed: Follows
    ledger: Failing
    outcomes: Outcomes
    gate: Gate
    runtime: Runtime
    metrics: Metrics
    senders: Sequence[str]
    past: Sequence[Past] = ()
    asked_no_more: trio.Event = field(default_factory=trio.Event)
    host: str = field(default_factory=socket.gethostname)
    began: float = field(default_factory=trio.current_time)
    hour: deque[Minute] = field(default_factory=lambda: deque(maxlen=60))
    rendering: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    ledger_reading: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))

    @property
    def config(self) -> Config:
        """The configuration that holds now."""
        return self.policies.config

    def handles(self, server: str) -> bool:
        """Whether what we are asked for is for this server."""
        return self.config.handles(server) and all(
            senders[shard_of(server, len(senders))] == sender for sender, senders in self.past
        )


async def remember_for_ever(context: AdminContext) -> None:
    """Note each minute in `AdminContext.hour`."""
    registry = context.sender.registry
    while True:
        await trio.sleep(MINUTE_S)
        owed = 0
        async for _, debt in context.sender.debts():
            owed += debt.counted or debt.rooms
        rates, standings = context.metrics.rates(), registry.counts()
        context.hour.append(
            Minute(
                context.runtime.now_ms(),
                0.0 if rates is None else rates.pdus_per_s,
                None if rates is None else rates.p50_ms,
                None if rates is None else rates.p99_ms,
                standings.total() - standings[Standing.LEVEL],
                owed,
                len(registry.failing()),
            )
        )
