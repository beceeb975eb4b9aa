"""The world beyond the daemon's sockets: names, addresses, connections and listeners."""

import errno
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Protocol

import trio

from fedsender.fairness import Payer, Turns, site_of
from fedsender.runtime import NameNotFound, Records, RecordType, ResolveFailed
from fedsender.tls import MAX_HANDSHAKE_CPU_S, Stream
from fedsender_lab.testing.clock import TurnsByTable, turns_cpu

CAPACITY = 65_536
"""Bytes that have left one end and were not read at the other: as much as a socket buffers."""


class _Pipe:
    """One direction of a connection.

    Attributes:
        ended: the writer has closed; the bytes here can still be read.
        broken: nothing goes through any more, and the bytes here are lost.
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


class MemoryStream(Stream):
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
        self._frozen = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        # As with a socket, what has room leaves before other tasks run.
        await trio.lowlevel.checkpoint_if_cancelled()
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
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
        while not (self._closed or self._outgoing.broken or len(self._outgoing.data) < CAPACITY):
            await self._outgoing.changed()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        pipe = self._incoming
        while not self._closed and (self._frozen or not self.readable):
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
        """Return once the other end has closed. Its earlier bytes stay unread."""
        await trio.lowlevel.checkpoint()
        while not (self.peer_gone or self._closed):
            await self._incoming.changed()

    def freeze(self, frozen: bool) -> None:
        """Let nothing more arrive at this end, as if the other had fallen silent; or let it again.

        The delayed bytes then arrive.
        """
        self._frozen = frozen
        self._incoming.tell()

    def close(self) -> None:
        """Close: the other end reads the sent bytes, and then the end."""
        if not self._closed:
            self._closed = True
            self._outgoing.ended = True
            self._incoming.broken = True
            self._outgoing.tell()
            self._incoming.tell()

    def reset(self) -> None:
        """Break the connection both ways at once; bytes on their way are lost."""
        self.close()
        self._outgoing.broken = True
        for pipe in (self._outgoing, self._incoming):
            pipe.data.clear()
            pipe.tell()


def memory_connection() -> tuple[MemoryStream, MemoryStream]:
    """Both ends of a new connection."""
    there, back = _Pipe(), _Pipe()
    return MemoryStream(back, there), MemoryStream(there, back)


DEAR_LOOKUP_S = 0.004
"""The CPU time of the dearest DNS answer that is read. As dear as can be is a handshake that takes
`MAX_HANDSHAKE_CPU_S`."""
DNS_TTL_S = 300.0
NEVER_S = 7 * 86_400.0


class Listener(Protocol):
    """A listener at an address.

    Attributes:
        certificate: the names that it can prove in TLS.
    """

    @property
    def certificate(self) -> tuple[str, ...]: ...

    def knock(self) -> str:
        """The answer to a connection: "open", "refused", "silent" or "bad tls"."""
        ...

    async def converse(self, stream: MemoryStream) -> None:
        """Serve one connection until it ends; raises nothing."""
        ...


@dataclass(slots=True)
class Internet:
    """Addresses and names of a simulated world.

    Attributes:
        nursery: where connections are served.
        doors: the listeners at Unix sockets.
        unresolvable: (domain, how): names under it get no answer ("silent") or do not exist
            ("gone").
        by_table: what each turn of the daemon's loop costs is told by a table, and that time
            passes; otherwise none does.
        dear: hosts whose handshakes and DNS answers then cost as much as they can.
    """

    rng: Random
    nursery: trio.Nursery
    listeners: dict[tuple[str, int], Listener] = field(default_factory=dict)
    doors: dict[Path, Listener] = field(default_factory=dict)
    records: dict[tuple[str, RecordType], tuple[str, ...]] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)
    by_table: bool = False
    dear: set[str] = field(default_factory=set)

    def round_trip_s(self) -> float:
        """How long a packet takes there and back."""
        return self.rng.uniform(0.01, 0.3)

    async def resolve(self, name: str, rdtype: RecordType) -> Records:
        """Look up a name; raises NameNotFound or ResolveFailed."""
        await trio.sleep(self.round_trip_s())
        for domain, how in self.unresolvable.items():
            if name == domain or name.endswith("." + domain):
                if how == "silent":
                    await trio.sleep(5)
                    raise ResolveFailed(f"{name}: no name server answered")
                raise NameNotFound(f"{name}: no such name", ttl_s=60)
        values = self.records.get((name, rdtype))
        if values is None:
            raise NameNotFound(f"{name}: no {rdtype} record", ttl_s=DNS_TTL_S)
        return Records(values, ttl_s=DNS_TTL_S)

    def is_dear(self, name: str) -> bool:
        """Whether this host, or the one that this name is below, is dear."""
        return name in self.dear or any(name.endswith("." + host) for host in self.dear)

    async def connect(self, address: str, port: int) -> MemoryStream:
        """A connection to whoever listens there; raises OSError."""
        await trio.sleep(self.round_trip_s())
        return await self._meet(self.listeners.get((address, port)))

    async def open_door(self, path: Path) -> MemoryStream:
        """The same for a Unix socket."""
        await trio.lowlevel.checkpoint()
        return await self._meet(self.doors.get(path))

    async def _meet(self, listener: Listener | None) -> MemoryStream:
        answer = "refused" if listener is None else listener.knock()
        if answer == "silent":
            await trio.sleep(NEVER_S)
        if listener is None or answer in ("refused", "silent"):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        near, far = memory_connection()
        near.certificate = listener.certificate
        near.handshake_fails = answer == "bad tls"
        self.nursery.start_soon(listener.converse, far)
        return near


class MemoryNetwork:
    """The network as one life of the daemon sees it; when that life ends, all of it breaks.

    Attributes:
        turns: in which it does what others can make dear.
    """

    def __init__(self, internet: Internet) -> None:
        self.turns = TurnsByTable() if internet.by_table else Turns(turns_cpu())
        self._internet = internet
        self._alive = True
        self._streams: list[MemoryStream] = []

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        return self._take(await self._internet.connect(address, port))

    async def open_unix(self, path: Path) -> trio.abc.Stream:
        return self._take(await self._internet.open_door(path))

    def _take(self, stream: MemoryStream) -> MemoryStream:
        self._streams = [each for each in self._streams if not each.peer_gone]
        self._streams.append(stream)
        if not self._alive:
            stream.close()
        return stream

    async def start_tls(
        self,
        stream: trio.abc.Stream,
        context: ssl.SSLContext,
        server_hostname: str,
        payer: Payer | None = None,
    ) -> trio.abc.Stream:
        assert isinstance(stream, MemoryStream)
        await trio.sleep(self._internet.round_trip_s())
        if payer is not None:
            dear = self._internet.is_dear(server_hostname)
            step = partial(self._work, MAX_HANDSHAKE_CPU_S if dear else 0.0)
            await self.turns.take(payer.accounts, self.turns.handshake, step)
        if stream.handshake_fails:
            raise _tls_error(ssl.SSLError(1, "handshake failure"))
        if server_hostname not in stream.certificate:
            refusal = ssl.SSLCertVerificationError(1, "certificate verify failed")
            refusal.verify_message = f"Hostname mismatch: {server_hostname}"
            raise _tls_error(refusal)
        return stream

    async def resolve(
        self, name: str, rdtype: RecordType, nameservers: Sequence[tuple[str, int]] = ()
    ) -> Records:
        try:
            return await self._internet.resolve(name, rdtype)
        finally:
            step = partial(self._work, DEAR_LOOKUP_S if self._internet.is_dear(name) else 0.0)
            await self.turns.take((site_of(name),), self.turns.lookup, step)

    def _work(self, more_s: float) -> None:
        if isinstance(self.turns, TurnsByTable):
            self.turns.work(more_s)

    async def deserted(self, streams: Sequence[trio.abc.Stream]) -> list[trio.abc.Stream]:
        return [each for each in streams if isinstance(each, MemoryStream) and each.readable]

    def die(self) -> None:
        """The machine is gone: every connection ends, and none is made any more."""
        self._alive = False
        for stream in self._streams:
            stream.close()
        self._streams.clear()


def _tls_error(error: ssl.SSLError) -> ssl.SSLError:
    """As OpenSSL makes it."""
    error.reason = "HANDSHAKE_FAILURE"
    return error
