"""A forward proxy for the demo, in a process of its own: CONNECT to addresses, and nothing else."""

import ipaddress

import trio

from fedsender_lab.testing.children import Order, serve_orders

HEAD_BYTES = 8_192
PIECE = 65_536


class ConnectProxy:
    """The proxy; it connects to whatever address it is asked for."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._connected = 0

    async def begin(self) -> Order:
        """Listen on a free port of 127.0.0.1; tells the port."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self._nursery.start_soon(trio.serve_listeners, self._serve, listeners)
        return {"port": listeners[0].socket.getsockname()[1]}

    async def tell(self) -> Order:
        """How many connections went through it."""
        return {"connected": self._connected}

    async def _serve(self, client: trio.SocketStream) -> None:
        async with client:
            try:
                server = await self._connect(client)
                if server is not None:
                    await _join(client, server)
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # Either side may leave at any time.

    async def _connect(self, client: trio.SocketStream) -> trio.SocketStream | None:
        """The connection that the client asks for; None: it was told that there is none."""
        head = b""
        while b"\r\n\r\n" not in head:
            piece = await client.receive_some(PIECE)
            if not piece or len(head) > HEAD_BYTES:
                return None
            head += piece
        method, _, rest = head.partition(b" ")
        host, _, port = rest.split(b" ")[0].decode("latin-1").rpartition(":")
        try:
            if method != b"CONNECT":
                raise ValueError(method)
            address = str(ipaddress.ip_address(host.strip("[]")))
            server = await trio.open_tcp_stream(address, int(port))
        except (OSError, ValueError):
            await client.send_all(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return None
        await client.send_all(b"HTTP/1.1 200 Connection established\r\n\r\n")
        self._connected += 1
        return server


async def _join(client: trio.SocketStream, server: trio.SocketStream) -> None:
    """Carry bytes both ways until one side ends."""
    async with server, trio.open_nursery() as nursery:

        async def carry(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            try:
                while piece := await source.receive_some(PIECE):
                    await sink.send_all(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            nursery.cancel_scope.cancel()

        nursery.start_soon(carry, client, server)
        nursery.start_soon(carry, server, client)


async def main() -> None:
    """Be the proxy until told to end."""
    async with trio.open_nursery() as nursery:
        proxy = ConnectProxy(nursery)
        await serve_orders({"begin": proxy.begin, "tell": proxy.tell})
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
