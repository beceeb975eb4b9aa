"""Connections in memory: two ends, bounded in both directions, that can be cut."""

import trio

CAPACITY = 65_536
"""Bytes that have left one end and were not read at the other: as much as a socket buffers."""


class _Pipe:
    """One direction of a connection.

    Attributes:
        ended: the writer has closed; what is here can still be read.
        broken: nothing goes through any more, and what is here is lost.
    """

    __slots__ = ("_changed", "broken", "data", "ended")

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False
        self.broken = False
        self._changed = trio.Event()

    def tell(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = trio.Event()

    async def changed(self) -> None:
        await self._changed.wait()


class MemoryStream(trio.abc.Stream):
    """One end of a connection.

    Attributes:
        certificate: the names that the far end can prove in TLS.
        handshake_fails: TLS breaks off.
    """

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self.certificate: tuple[str, ...] = ()
        self.handshake_fails = False
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        await trio.lowlevel.checkpoint()
        pipe = self._outgoing
        while rest:
            if self._closed:
                raise trio.ClosedResourceError("closed on this side")
            if pipe.broken:
                raise trio.BrokenResourceError("connection reset by peer")
            room = CAPACITY - len(pipe.data)
            if room > 0:
                pipe.data += rest[:room]
                rest = rest[room:]
                pipe.tell()
            else:
                await pipe.changed()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
        while not (self._closed or self._outgoing.broken or len(self._outgoing.data) < CAPACITY):
            await self._outgoing.changed()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        pipe = self._incoming
        while not (pipe.data or self.readable or self._closed):
            await pipe.changed()
        if self._closed:
            raise trio.ClosedResourceError("closed on this side")
        if pipe.broken:
            raise trio.BrokenResourceError("connection reset by peer")
        data = bytes(pipe.data[:max_bytes])
        del pipe.data[:max_bytes]
        pipe.tell()
        return data

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    @property
    def readable(self) -> bool:
        """Whether `receive_some` would not wait."""
        pipe = self._incoming
        return bool(pipe.data) or pipe.ended or pipe.broken

    @property
    def peer_gone(self) -> bool:
        """Whether the other end has closed, or the connection was cut."""
        return self._incoming.ended or self._incoming.broken

    async def wait_peer_gone(self) -> None:
        """Return once the other end has closed. What it sent before stays unread."""
        await trio.lowlevel.checkpoint()
        while not (self.peer_gone or self._closed):
            await self._incoming.changed()

    def close(self) -> None:
        """Close without a goodbye: the other end reads what was sent, and then the end."""
        if not self._closed:
            self._closed = True
            self._outgoing.ended = True
            self._incoming.broken = True
            self._outgoing.tell()
            self._incoming.tell()

    def reset(self) -> None:
        """Break the connection both ways at once; what was on its way is lost."""
        self.close()
        self._outgoing.broken = True
        for pipe in (self._outgoing, self._incoming):
            pipe.data.clear()
            pipe.tell()


def memory_connection() -> tuple[MemoryStream, MemoryStream]:
    """Both ends of a new connection."""
    there, back = _Pipe(), _Pipe()
    return MemoryStream(back, there), MemoryStream(there, back)
