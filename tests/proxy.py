"""A TCP proxy that stands in front of a server and makes its network bad.

It moves bytes and knows nothing of TLS or HTTP, so what the two ends see is a slow, stalled, cut or
refused connection and nothing else.
"""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

Address = tuple[str, int]
_CHUNK = 16_384


def reserve(host: str) -> socket.socket:
    """Take a free port of `host` (an IPv4 literal) and keep it: refused until somebody listens.

    The socket is bound and never listens. A proxy can listen on the same port beside it, go away
    and come back, and no other process of the machine gets the port in between.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, 0))
    return held


@dataclass(slots=True)
class Way:
    """One direction of every connection through the proxy.

    Attributes:
        delay: seconds that each piece of at most 16 KiB waits before it is passed on.
        bytes_per_second: the rate it is passed on at; None is as fast as it comes.
    """

    delay: float = 0.0
    bytes_per_second: float | None = None
    _open: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self._open.set()

    def stall(self) -> None:
        """Pass nothing on from now, and close nothing."""
        self._open = trio.Event()

    def flow(self) -> None:
        """Pass on what was held back and all that follows."""
        self._open.set()

    async def carry(self, source: trio.SocketStream, sink: trio.SocketStream) -> None:
        """Move bytes until the source ends, then end the sink."""
        while data := await source.receive_some(_CHUNK):
            while not self._open.is_set():
                await self._open.wait()
            pause = self.delay
            if self.bytes_per_second is not None:
                pause += len(data) / self.bytes_per_second
            if pause:
                await trio.sleep(pause)
            await sink.send_all(data)
        await sink.send_eof()


class Proxy:
    """A door in front of `upstream`; made by `open_proxy`.

    Attributes:
        address: where it listens.
        to_server, to_client: the two directions, changed at any time.
    """

    def __init__(self, upstream: Address, listen: Address, nursery: trio.Nursery) -> None:
        self.address = listen
        self.to_server = Way()
        self.to_client = Way()
        self._upstream = upstream
        self._nursery = nursery
        self._listening: trio.CancelScope | None = None
        self._connections: set[trio.CancelScope] = set()

    def listen(self) -> None:
        """Take connections (again)."""
        if self._listening is not None:
            return
        listener = self._bind()
        self._listening = trio.CancelScope()
        self._nursery.start_soon(self._serve, listener, self._listening)

    def refuse(self) -> None:
        """Refuse new connections; those there are go on."""
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None

    def cut(self) -> None:
        """Drop every connection there is; new ones are taken."""
        for scope in self._connections:
            scope.cancel()

    def _bind(self) -> trio.SocketListener:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        plain.bind(self.address)
        plain.listen(64)
        self.address = plain.getsockname()
        return trio.SocketListener(trio.socket.from_stdlib_socket(plain))

    async def _serve(self, listener: trio.SocketListener, scope: trio.CancelScope) -> None:
        with scope:
            await trio.serve_listeners(self._connection, [listener], handler_nursery=self._nursery)

    async def _connection(self, client: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            self._connections.add(scope)
            try:
                await self._relay(client)
            finally:
                self._connections.discard(scope)

    async def _relay(self, client: trio.SocketStream) -> None:
        async with client:
            try:
                server = await trio.open_tcp_stream(*self._upstream)
            except OSError:
                return
            async with server, trio.open_nursery() as nursery:
                nursery.start_soon(self._carry, self.to_server, client, server, nursery)
                nursery.start_soon(self._carry, self.to_client, server, client, nursery)

    @staticmethod
    async def _carry(
        way: Way, source: trio.SocketStream, sink: trio.SocketStream, nursery: trio.Nursery
    ) -> None:
        try:
            await way.carry(source, sink)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_proxy(upstream: Address, listen: Address = ("127.0.0.1", 0)) -> AsyncIterator[Proxy]:
    """A proxy to `upstream`, listening at `listen` (port 0: any), until the body is left."""
    async with trio.open_nursery() as nursery:
        proxy = Proxy(upstream, listen, nursery)
        proxy.listen()
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
