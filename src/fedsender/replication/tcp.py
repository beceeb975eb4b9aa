"""The line protocol over TCP: a server of streams.

The server holds no queue for a client: see `subscriber`. So a subscription has no moment at which a
row could fall between "what you missed" and "what is new"; and a client that is too slow is cut
off, comes back with its token, and gets the rest. A batch is sent as one for missed rows too.

A person with netcat is a good client: nobody is timed out before they have sent a PING.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog
import trio

from fedsender.outside import Outside
from fedsender.replication.commands import Command, RemoteServerUp
from fedsender.replication.conversation import FAREWELL_S
from fedsender.replication.subscriber import Client, StreamSource, TooFarBehind
from fedsender.replication.wire import OTHERS, PeerKind, Wire

__all__ = ["ReplicationServer", "StreamSource", "TooFarBehind", "open_replication_server"]

log = structlog.get_logger()

MAX_CLIENTS = 256


class ReplicationServer:
    """Serves streams to the connections that it is given; see `open_replication_server`."""

    def __init__(
        self,
        server_name: str,
        streams: Mapping[str, StreamSource],
        outside: Outside,
        *,
        instance: str,
        kind: PeerKind,
        secret: str | None,
        received: Callable[[str, Command], None] | None,
    ) -> None:
        self.server_name = server_name
        self.streams = streams
        self.instance = instance
        self.kind = kind
        self.now_ms = outside.now_ms
        self._secret = secret
        self._received = received
        self._clients: set[Client] = set()

    @property
    def clients(self) -> list[str]:
        """What the connected clients call themselves."""
        return sorted(client.name for client in self._clients)

    def announce(self, command: Command) -> None:
        """Send a command that is not a row to every client; one that lags too far is cut off."""
        for client in list(self._clients):
            client.offer(command)

    def receive(self, origin: Client, command: Command) -> None:
        """Pass a client's command on: REMOTE_SERVER_UP to all the others, all to the owner."""
        if isinstance(command, RemoteServerUp):
            for client in self._clients - {origin}:
                client.offer(command)
        if self._received is not None:
            self._received(origin.name, command)

    def accepts(self, secret: str) -> bool:
        """Whether this is the secret; compared in constant time."""
        expected = self._secret
        return expected is not None and hmac.compare_digest(secret.encode(), expected.encode())

    async def serve(self, stream: trio.abc.Stream, *, trusted: bool = True) -> None:
        """Talk to one client until it leaves. Without `trusted` it must begin with AUTH."""
        client = Client(self, Wire(stream, self.kind, self.now_ms), trusted=trusted)
        full = len(self._clients) >= MAX_CLIENTS
        self._clients.add(client)
        try:
            await client.run("too many connections" if full else None)
        except Exception:
            # The unit of isolation: one client's rows must not take down the others.
            log.exception("replication_client_failed", client=client.name)
        finally:
            self._clients.discard(client)
            await trio.aclose_forcefully(stream)

    def dismiss(self) -> None:
        """Tell all clients that it is over; they are gone a moment later."""
        for client in list(self._clients):
            client.end("server shutting down")


def _check_reach(listener: trio.abc.Listener[trio.abc.Stream], secret: str | None) -> None:
    tls = isinstance(listener, trio.SSLListener)
    below = listener.transport_listener if isinstance(listener, trio.SSLListener) else listener
    if not isinstance(below, trio.SocketListener) or _is_unix(below):
        return
    host: str = below.socket.getsockname()[0]
    if not ipaddress.ip_address(host).is_loopback and (secret is None or not tls):
        raise ValueError(
            f"replication on {host} can be reached from other machines: that needs TLS and a secret"
        )


def _is_unix(listener: object) -> bool:
    if not isinstance(listener, trio.SocketListener):
        return False
    family: int = listener.socket.family
    return family == trio.socket.AF_UNIX


@asynccontextmanager
async def open_replication_server(
    server_name: str,
    streams: Mapping[str, StreamSource],
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
    outside: Outside,
    *,
    homeserver_sends: bool = False,
    instance: str = "master",
    kind: PeerKind = OTHERS,
    secret: str | None = None,
    received: Callable[[str, Command], None] | None = None,
) -> AsyncIterator[ReplicationServer]:
    """Serve `streams` on `listeners` for as long as the body runs.

    Args:
        homeserver_sends: the homeserver still sends to other servers itself. The `federation`
            stream is offered only while it does not, or everything would be sent twice.
        instance: the writer that POSITION names in today's dialect.
        kind: what clients are taken for.
        secret: a client that does not come by a Unix socket must begin with `AUTH <secret>`.
        received: told of every client's name and command that is not about the connection.

    Raises ValueError if a listener can be reached from other machines without TLS and a secret.
    """
    for listener in listeners:
        _check_reach(listener, secret)
    offered = {
        name: source
        for name, source in streams.items()
        if not (homeserver_sends and name == "federation")
    }
    server = ReplicationServer(
        server_name,
        offered,
        outside,
        instance=instance,
        kind=kind,
        secret=secret,
        received=received,
    )
    async with trio.open_nursery() as clients, trio.open_nursery() as accepting:
        for listener in listeners:
            trusted = secret is None or _is_unix(listener)
            serve = partial(server.serve, trusted=trusted)
            accepting.start_soon(
                partial(trio.serve_listeners, serve, [listener], handler_nursery=clients)
            )
        yield server
        accepting.cancel_scope.cancel()
        server.dismiss()
        clients.cancel_scope.deadline = trio.current_time() + 2 * FAREWELL_S
