"""What the tests of the line protocol share: a stream to serve, a client by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import trio

from fedsender.streams import Fact
from fedsender.waiting import Watermark


class Log:
    """A stream in memory, as a `StreamSource`."""

    def __init__(self) -> None:
        self.watermark = Watermark()
        self.facts: list[Fact] = []
        # Called with (after, upto) before each read.
        self.before_read: Callable[[int, int], Awaitable[None]] | None = None

    def say(self, token: int, *rows: Any) -> None:
        """Append a fact; without rows only the position moves."""
        if rows:
            self.facts.append(Fact("master", token, rows))
        self.watermark.advance(token)

    async def read(self, after: int, upto: int, limit: int) -> Sequence[Fact]:
        if self.before_read is not None:
            await self.before_read(after, upto)
        await trio.lowlevel.checkpoint()
        return [fact for fact in self.facts if after < fact.stream_id <= upto][:limit]


@dataclass(slots=True)
class Netcat:
    """A connection used by hand: lines in, lines out."""

    stream: trio.abc.Stream
    _buffer: bytearray

    @classmethod
    def on(cls, stream: trio.abc.Stream) -> Self:
        return cls(stream, bytearray())

    async def say(self, *lines: str) -> None:
        await self.stream.send_all("".join(line + "\n" for line in lines).encode())

    async def hear(self) -> str | None:
        """The next line that is not a PING; None at the end."""
        while True:
            line = await self.hear_any()
            if line is None or not line.startswith("PING "):
                return line

    async def hear_any(self) -> str | None:
        while b"\n" not in self._buffer:
            try:
                data = await self.stream.receive_some(4096)
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        return line.decode()

    async def hear_lines(self, count: int) -> list[str | None]:
        return [await self.hear() for _ in range(count)]

    async def hear_rest(self) -> list[str]:
        lines: list[str] = []
        while (line := await self.hear()) is not None:
            lines.append(line)
        return lines
