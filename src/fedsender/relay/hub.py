"""Where consumers connect: the listeners, who may come in, and who is there."""

from __future__ import annotations

import errno
import hmac
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio

from fedsender.admin import CannotListen
from fedsender.config import Address, ConfigError, TcpAddress, UnixAddress, read_secret
from fedsender.config.values import is_loopback
from fedsender.intake.rows import SERVER_UP, Ephemeral
from fedsender.outside import Outside, listen_tcp, listen_unix
from fedsender.relay.log import Log
from fedsender.relay.registry import Registry
from fedsender.relay.retention import Retention
from fedsender.relay.session import Session
from fedsender.relay.shelf import Shelf
from fedsender.replication.conversation import FAREWELL_S
from fedsender.replication.wire import OWN_KIND, PeerKind, Wire

log = structlog.get_logger()

MAX_CONNECTIONS: Final = 256
MAX_PROVING: Final = 32
"""Connections that have not yet given the secret."""
HUNG_S: Final = 15.0
"""A commit that takes longer is taken for one that never ends."""
FIRST_PENANCE_S: Final = 0.5
LONGEST_PENANCE_S: Final = 8.0

Listener = trio.abc.Listener[trio.abc.Stream]


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Who may come, and what is expected of them.

    Attributes:
        secret_file: read whenever somebody gives a secret, so that it can be changed at any time.
        kind: limits of a peer.
        fetch_bytes_per_s: for all files together; 0: no limit.
    """

    server_name: str
    secret_file: Path | None = None
    kind: PeerKind = OWN_KIND
    fetch_bytes_per_s: int = 0


@dataclass(slots=True)
class Counts:
    """What has happened since the start.

    Attributes:
        resyncs: positions refused to consumers, by why.
        refused: other requests, and observers' positions, by why.
        full_syncs: snapshots handed out, by why.
        stale_acks: acknowledgements of what was acknowledged before.
        slow: connections closed because nothing was taken.
        dropped_rows: ephemeral rows that found too many waiting.
    """

    resyncs: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    full_syncs: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    wrong_secrets: int = 0
    stale_acks: int = 0
    slow: int = 0
    dropped_rows: int = 0
    fetched_files: int = 0
    fetched_bytes: int = 0


class Hub:
    """The connections; see `open_hub`.

    Attributes:
        owners: by name the connection that may be fed under it.
        sessions: all connections.
    """

    def __init__(
        self,
        log: Log,
        registry: Registry,
        shelf: Shelf,
        retention: Retention,
        outside: Outside,
        settings: HubSettings,
    ) -> None:
        self.log = log
        self.registry = registry
        self.shelf = shelf
        self.retention = retention
        self.outside = outside
        self.settings = settings
        self.counts = Counts()
        self.owners: dict[str, Session] = {}
        self.sessions: set[Session] = set()
        self._wrong_lately = 0
        self._wrong_at = 0.0
        self._ephemeral = 0
        self._fetch_due = 0.0
        self._limiter = trio.CapacityLimiter(1)

    def hung(self) -> bool:
        """A commit hangs: nobody shall take us for healthy."""
        return self.log.committing_s() > HUNG_S

    def publish(self, row: Ephemeral) -> None:
        """Send an ephemeral row to every consumer that is fed; one that lags does without."""
        if row.stream == SERVER_UP:
            line = b"REMOTE_SERVER_UP %b\n" % row.value.encode()
        else:
            self._ephemeral += 1
            line = b"RDATA %b %d %b\n" % (row.stream.encode(), self._ephemeral, row.row)
        for session in self.sessions:
            if session.follows and not session.offer(line):
                self.counts.dropped_rows += 1

    async def serve(self, stream: trio.abc.Stream, *, trusted: bool) -> None:
        """Talk to one client until it leaves. Without `trusted` it must begin with AUTH."""
        session = Session(
            self, Wire(stream, self.settings.kind, self.outside.now_ms), trusted=trusted
        )
        # Those that are told that they are too many stay for a moment, and take nobody's place.
        full = sum(not each.turned_away for each in self.sessions) >= MAX_CONNECTIONS or (
            not trusted and sum(each.proving for each in self.sessions) >= MAX_PROVING
        )
        self.counts.connections += 1
        if full and len(self.sessions) >= 2 * MAX_CONNECTIONS:
            await trio.aclose_forcefully(stream)
            return
        session.turned_away, session.proving = full, not (full or trusted)
        self.sessions.add(session)
        try:
            await session.run("BUSY too many connections" if full else None)
        except Exception:
            # The unit of isolation: one connection must not take down the others.
            log.exception("relay_connection_failed", consumer=session.name)
        finally:
            self._remove(session)
            await trio.aclose_forcefully(stream)

    def _remove(self, session: Session) -> None:
        self.sessions.discard(session)
        self.counts.slow += session.slow
        name = session.consumer
        if name is None:
            return
        owner = self.owners.get(name) is session
        if owner:
            del self.owners[name]
        self.registry.disconnect(
            name, followed=session.follows, error=session.over if owner else None
        )
        self.retention.look()

    def dismiss(self) -> None:
        """Tell all clients that it is over; they are gone a moment later."""
        for session in list(self.sessions):
            session.end("STOPPING the relay shuts down")

    # --- who may come in --------------------------------------------------------------------------

    async def accepts(self, secret: str) -> bool:
        """Whether this is the secret as it is now; compared in constant time."""
        path = self.settings.secret_file
        if path is None:
            return False
        try:
            expected = await self.outside.run_sync(lambda: read_secret(path), limiter=self._limiter)
        except ConfigError as error:
            log.error("relay_secret_unreadable", reason=str(error))
            return False
        right = hmac.compare_digest(secret.encode(), expected.encode())
        if right:
            self._wrong_lately = 0
        return right

    async def wrong_secret(self) -> None:
        """Count it, and take the longer to say so the more there were lately."""
        now = trio.current_time()
        if now - self._wrong_at > 10 * LONGEST_PENANCE_S:
            self._wrong_lately = 0
        self.counts.wrong_secrets += 1
        self._wrong_at = now
        pause = min(LONGEST_PENANCE_S, FIRST_PENANCE_S * 2.0 ** min(self._wrong_lately, 10))
        self._wrong_lately += 1
        log.warning("relay_wrong_secret", count=self.counts.wrong_secrets)
        await trio.sleep(pause)

    async def throttled(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The same pieces, no faster than all files together may be."""
        rate = self.settings.fetch_bytes_per_s
        async for piece in pieces:
            # Little at a time: any byte is a sign of life, and others wait for their turn.
            size = max(1, rate // 16) if rate else len(piece)
            for begin in range(0, len(piece), size):
                some = piece[begin : begin + size]
                if rate:
                    start = max(self._fetch_due, trio.current_time())
                    self._fetch_due = start + len(some) / rate
                    await trio.sleep_until(start)
                self.counts.fetched_bytes += len(some)
                yield some


# --- listening ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Door:
    """A listener, and where it is: with the port that was taken, where 0 was asked for.

    Attributes:
        trusted: who comes by it needs no secret; so it is with a Unix socket only.
    """

    listener: Listener
    address: Address

    @property
    def trusted(self) -> bool:
        return isinstance(self.address, UnixAddress)


async def listen(addresses: Sequence[Address], tls: ssl.SSLContext | None) -> list[Door]:
    """Listen on all of these; TCP with `tls` if there is any.

    Raises:
        CannotListen: an address is taken, or can be reached from other machines without TLS.
    """
    doors: list[Door] = []
    for address in addresses:
        try:
            doors += await _listen_at(address, tls)
        except OSError as error:
            await close(doors)
            text = f"the relay cannot listen there: {error.strerror or error}"
            raise CannotListen(error.errno, text, str(address)) from error
    return doors


async def _listen_at(address: Address, tls: ssl.SSLContext | None) -> list[Door]:
    if isinstance(address, UnixAddress):
        return [Door(await listen_unix(address.path), address)]
    plain = await listen_tcp(address.host, address.port)
    bound = [TcpAddress(*listener.socket.getsockname()[:2]) for listener in plain]
    if tls is None and not all(is_loopback(where.host) for where in bound):
        for listener in plain:
            await trio.aclose_forcefully(listener)
        raise OSError(errno.EACCES, "other machines can reach that, so it needs TLS")
    listeners = plain if tls is None else [trio.SSLListener(each, tls) for each in plain]
    return [Door(listener, where) for listener, where in zip(listeners, bound, strict=True)]


async def close(doors: Sequence[Door]) -> None:
    """Stop listening; sockets in the file system go."""
    for door in doors:
        await trio.aclose_forcefully(door.listener)
        if isinstance(door.address, UnixAddress):
            await trio.Path(door.address.path).unlink(missing_ok=True)


@asynccontextmanager
async def open_hub(hub: Hub, doors: Sequence[Door]) -> AsyncIterator[Hub]:
    """Serve who comes by `doors` until the body is left; they do not listen any more then."""
    async with trio.open_nursery() as clients, trio.open_nursery() as accepting:
        for door in doors:
            serve = partial(hub.serve, trusted=door.trusted)
            accepting.start_soon(
                partial(trio.serve_listeners, serve, [door.listener], handler_nursery=clients)
            )
        yield hub
        accepting.cancel_scope.cancel()
        hub.dismiss()
        clients.cancel_scope.deadline = trio.current_time() + 2 * FAREWELL_S
