"""A server's end of one connection: tasks that end together, and an ERROR as the last word."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from fedsender.replication.commands import Error
from fedsender.replication.endpoint import Disconnected
from fedsender.replication.formatting import UnsendableCommand
from fedsender.replication.parsing import BadLine
from fedsender.replication.wire import TooSlow, Wire

log = structlog.get_logger()

FAREWELL_S = 1.0


class Refused(Exception):
    """The client gets an ERROR with this text and is disconnected."""


class Conversation:
    """One connection, from the server's side; a subclass has `listen`.

    Attributes:
        name: what the client calls itself.
        over: why it has ended; None: it has not.
        slow: it has ended because the client took nothing.
    """

    def __init__(self, wire: Wire) -> None:
        self.name = "?"
        self.over: str | None = None
        self.slow = False
        self.wire = wire
        self._refusal: str | None = None
        self._refused = trio.Event()

    async def listen(self) -> None:
        """Greet, and obey the client for ever; runs as a part."""
        raise AssertionError("a subclass has it")

    def end(self, refusal: str) -> None:
        """Stop with an ERROR, behind the line that is being sent."""
        if self._refusal is None:
            self._refusal = refusal
            self._refused.set()

    async def run(self, refusal: str | None) -> None:
        """From the greeting to the end, or just the refusal; raises nothing that is the client's
        fault."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._leave)
            if refusal is None:
                self.start(self.listen)
            else:
                self.end(refusal)

    def start(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run one of the connection's tasks; none ends but by an error, and then all do."""
        self._nursery.start_soon(self.part, part)

    async def part(self, part: Callable[[], Awaitable[None]]) -> None:
        """One of the connection's tasks, and what its errors mean."""
        try:
            await part()
        except Disconnected as gone:
            log.debug("replication_client_gone", client=self.name, reason=str(gone))
            self.slow |= isinstance(gone, TooSlow)
            self._close(str(gone))
        except (BadLine, Refused) as refused:
            self.end(str(refused))
        except UnsendableCommand as unsendable:
            # Ours to mend: the client will come back for it for ever.
            log.error("replication_row_unsendable", client=self.name, reason=str(unsendable))
            self.end("a row that cannot be sent")

    async def _leave(self) -> None:
        await self._refused.wait()
        log.info("replication_client_refused", client=self.name, reason=self._refusal)
        with trio.move_on_after(FAREWELL_S):
            try:
                await self.wire.send_last(Error(self._refusal or ""))
            except (Disconnected, UnsendableCommand):
                log.debug("replication_farewell_lost", client=self.name)
        self._close(self._refusal or "")

    def _close(self, why: str) -> None:
        if self.over is None:
            self.over = why
        self._nursery.cancel_scope.cancel()
