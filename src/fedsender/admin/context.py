"""What the endpoints can reach."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import trio
from fastapi import Depends, Request

from fedsender.config import Config, Policies
from fedsender.runtime import Runtime
from fedsender.sender.sender import Sender
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.sender import SenderStore


class Exposition(Protocol):
    """The daemon's metrics."""

    def exposition(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class AdminContext:
    """The daemon as the endpoints see it.

    Attributes:
        appends: who takes what the homeserver appends, as in `FeedStatus`.
        observe: sets the gauges that are only worth setting when somebody asks.
        problems: why the daemon is not ready, one sentence each; none: it is.
        rendering: for the thread that writes the metrics out; two at once would not be faster.
        ledger_reading: the same for reading the ledger.
    """

    policies: Policies
    sender: Sender
    homeserver: HomeserverStore
    store: SenderStore
    runtime: Runtime
    metrics: Exposition
    observe: Callable[[], None]
    ledger_directory: Path
    problems: Callable[[], Iterable[str]]
    appends: Callable[[], str | None] = lambda: None
    rendering: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))
    ledger_reading: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))

    @property
    def config(self) -> Config:
        """The configuration that holds now."""
        return self.policies.config


# Async, or FastAPI would go through a thread for it.
async def _parts_of(request: Request) -> AdminContext:
    context = request.app.state.context
    assert isinstance(context, AdminContext)
    return context


Reach = Annotated[AdminContext, Depends(_parts_of)]
