"""The receiving servers of a benchmark, in a process of their own.

Thousands of names, each an address of 127.0.0.0/8 with a port, on a few listening sockets. They do
the duties of a receiver and little more, so that on two cores it is the sender that is busy: PDUs
are counted by a member that each has once, and one transaction of `verify_every` is held against
every rule, its signature included. Only transactions that overlap are always noticed.
"""

import re
import ssl
import time
from base64 import b64decode
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender_lab.bench.homeserver import KEY_ID, ROOM_VERSION, SERVER_NAME
from fedsender_lab.testing.certificates import Authority
from fedsender_lab.testing.children import Handler, Order, serve_orders
from fedsender_lab.testing.http import SILENCE, Conversation, Reply, Request, TlsStream
from fedsender_lab.testing.receiver import VERSION
from fedsender_lab.testing.rules import (
    SEND,
    Broken,
    Origin,
    check_signature,
    parse_authorization,
    pdu_reader,
    read_transaction,
)

NAMES_PER_CERTIFICATE = 100
FLOOR = SEND + "floor"
"""A request to this path is not counted, not checked, and answered at once."""
_PDU = b'"auth_events":'
_RECEIPT = b'"event_ids":'
_KEY = b'"m.direct_to_device"'
_DEVICES = b'"m.device_list_update"'
_LARGEST_STAMPED = 65_536
"""A full transaction of messages of the usual size; in larger ones nobody looks for stamps."""
_STAMP = re.compile(rb'"sent_us":([0-9]+)')
TYPIST = "types-"
"""A user who is called so, and then says when it began, is timed."""
_TYPES = re.compile(rf'"typing":true,"user_id":"@{TYPIST}([0-9]+):'.encode())


@dataclass(slots=True)
class Totals:
    """The requests that all of them together got.

    Attributes:
        pdus_of: PDUs by group.
        servers: how many got any transaction, answered or not.
        verified: transactions that were held against every rule.
        largest: PDUs in the fullest transaction.
        stamped: stamped messages, a repeated one once for each server.
        overtaken: those that came to a server behind a later one.
        keys: messages to devices.
        devices: changed device lists.
    """

    transactions: int = 0
    pdus: int = 0
    pdus_of: list[int] = field(default_factory=list)
    receipts: int = 0
    servers: int = 0
    verified: int = 0
    largest: int = 0
    stamped: int = 0
    overtaken: int = 0
    keys: int = 0
    devices: int = 0


class Remote:
    """One server; one object for all of its connections.

    Args:
        latency: seconds to an answer; None: there is none.
        refuses: whether it answers 400 to a PDU without a stamp.
    """

    def __init__(
        self,
        name: str,
        group: int,
        latency: float | None,
        refuses: bool,
        all_of_them: "Receivers",
    ) -> None:
        self.name = name
        self.group = group
        self.refuses = refuses
        self._latency = latency
        self._all = all_of_them
        self._in_flight = 0
        self._known = False
        self.stamps: set[int] = set()
        self.newest_stamp = 0

    def request_began(self, request: Request) -> None:
        self._in_flight += 1
        if self._in_flight > 1 and not request.target.startswith(FLOOR):
            self._all.complain(f"{self.name}: two in flight")

    def request_ended(self, request: Request, status: int | None) -> None:
        self._in_flight -= 1

    def reply_to(self, request: Request) -> Reply:
        """Count it, and answer in time."""
        if request.target == VERSION:
            return Reply(200, b"{}")
        pdus = request.body.count(_PDU)
        if request.target.startswith(FLOOR):
            return Reply(200, answer_for(pdus))
        if self.refuses and pdus > len(_STAMP.findall(request.body)):
            return Reply(400, b'{"errcode":"M_BAD_JSON"}')
        self._all.arrived(self, request, pdus, first=not self._known)
        self._known = True
        if self._latency is None:
            return SILENCE
        return Reply(200, answer_for(pdus), after=self._latency)


@cache
def answer_for(pdus: int) -> bytes:
    """An answer that is as long, and as long to read, as that to so many PDUs."""
    entries = ",".join(f'"${number:043d}":{{}}' for number in range(pdus))
    return f'{{"pdus":{{{entries}}}}}'.encode()


class Receivers:
    """All of them.

    Attributes:
        delays_us: from the making of a stamped event to the arrival of the transaction it was in.
        typing_us: the same of users that type.
        broken: rules that were not kept, the first few.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.totals = Totals()
        self.delays_us: list[int] = []
        self.typing_us: list[int] = []
        self.broken: list[str] = []
        self._nursery = nursery
        self._remotes: dict[str, tuple[Remote, ssl.SSLContext]] = {}
        self._moved = trio.Event()
        self._origin = Origin(SERVER_NAME, {})
        self._verify_every = 1
        self._read_pdu = pdu_reader(lambda _room: ROOM_VERSION)
        self._reserved: list[trio.socket.SocketType] = []

    async def begin(
        self, directory: str, seed: str, groups: list[Order], verify_every: int, now_ms: int
    ) -> Order:
        """Listen; tells the names by group and the authority's file.

        A group is {"count", "latency", "listens", "refuses"}.
        """
        key = Ed25519PrivateKey.from_private_bytes(b64decode(seed)).public_key()
        self._origin = Origin(SERVER_NAME, {KEY_ID: key})
        self._verify_every = verify_every
        authority = Authority(Path(directory), now_ms)
        names: list[list[str]] = []
        number = 0
        for each in groups:
            port = await self._open(listens=each["listens"])
            hosts = [_address(number + index) for index in range(each["count"])]
            number += len(hosts)
            self.totals.pdus_of.append(0)
            names.append(self._furnish(hosts, port, each, authority))
        return {"servers": names, "ca_file": str(authority.ca_file)}

    def _furnish(self, hosts: list[str], port: int, each: Order, authority: Authority) -> list[str]:
        names = []
        for start in range(0, len(hosts), NAMES_PER_CERTIFICATE):
            few = hosts[start : start + NAMES_PER_CERTIFICATE]
            context = authority.server_context(few)
            for host in few:
                name = f"{host}:{port}"
                names.append(name)
                group = len(self.totals.pdus_of) - 1
                remote = Remote(name, group, each["latency"], each["refuses"], self)
                self._remotes[name] = (remote, context)
        return names

    async def _open(self, *, listens: bool) -> int:
        """A port on which every loopback address listens, or (reserved) refuses."""
        if listens:
            # All interfaces, because loopback has more addresses than there may be sockets; who
            # comes to one that is not loopback is not talked to.
            serve = partial(trio.serve_tcp, self._converse, 0, host="0.0.0.0")
            listeners: list[trio.SocketListener] = await self._nursery.start(serve)
            port: int = listeners[0].socket.getsockname()[1]
            return port
        holder = trio.socket.socket()
        await holder.bind(("0.0.0.0", 0))
        self._reserved.append(holder)
        reserved: int = holder.getsockname()[1]
        return reserved

    async def _converse(self, stream: trio.SocketStream) -> None:
        host, port = stream.socket.getsockname()[:2]
        found = self._remotes.get(f"{host}:{port}")
        if found is None:
            await stream.aclose()
            return
        remote, context = found
        await Conversation(TlsStream(stream, context), remote).run()

    # --- counting ---------------------------------------------------------------------------------

    def complain(self, text: str) -> None:
        """A rule was not kept."""
        if len(self.broken) < 20:
            self.broken.append(text)

    def arrived(self, remote: Remote, request: Request, pdus: int, *, first: bool) -> None:
        """A transaction arrived whole."""
        totals = self.totals
        totals.transactions += 1
        totals.pdus += pdus
        totals.pdus_of[remote.group] += pdus
        totals.receipts += request.body.count(_RECEIPT)
        totals.servers += first
        totals.largest = max(totals.largest, pdus)
        if totals.transactions % self._verify_every == 0:
            self._verify(remote.name, request)
        moved, self._moved = self._moved, trio.Event()
        moved.set()
        if len(request.body) < _LARGEST_STAMPED:
            totals.keys += request.body.count(_KEY)
            totals.devices += request.body.count(_DEVICES)
            now_us = time.monotonic_ns() // 1000
            for found in _STAMP.finditer(request.body):
                if (stamp := int(found[1])) not in remote.stamps:
                    remote.stamps.add(stamp)
                    totals.stamped += 1
                    totals.overtaken += stamp < remote.newest_stamp
                    remote.newest_stamp = max(remote.newest_stamp, stamp)
                    self.delays_us.append(now_us - stamp)
            self.typing_us += (now_us - int(each[1]) for each in _TYPES.finditer(request.body))

    def _verify(self, name: str, request: Request) -> None:
        try:
            parameters = parse_authorization(request.headers.get("authorization", ""))
            body = bytes(request.body)
            check_signature(self._origin, parameters, request.method, request.target, name, body)
            read_transaction(body, SERVER_NAME, self._read_pdu)
        except Broken as broken:
            self.complain(f"{name}: {broken}")
        self.totals.verified += 1

    # --- orders -----------------------------------------------------------------------------------

    async def count(self) -> Order:
        """The counts so far, and what was not kept."""
        return {**asdict(self.totals), "broken": self.broken}

    async def tell(self) -> Order:
        """The same, and the delays since it was last told."""
        told = {"delays_us": self.delays_us, "typing_us": self.typing_us}
        self.delays_us, self.typing_us = [], []
        return {**await self.count(), **told}

    async def until(self, seconds: float, pdus: int = 0, servers: int = 0) -> Order:
        """As `tell`, once there were so many, or after so long."""
        totals = self.totals
        with trio.move_on_after(seconds):
            while totals.pdus < pdus or totals.servers < servers:
                await self._moved.wait()
        return await self.tell()

    async def come_back(self) -> Order:
        """Those that refused connections listen from now on, and nobody refuses a PDU."""
        for remote, _ in self._remotes.values():
            remote.refuses = False
        for holder in self._reserved:
            holder.listen(1000)
            serve = partial(trio.serve_listeners, self._converse, [trio.SocketListener(holder)])
            self._nursery.start_soon(serve)
        self._reserved = []
        await trio.lowlevel.checkpoint()
        return {}

    def close(self) -> None:
        """Let the reserved ports go."""
        for holder in self._reserved:
            holder.close()


def _address(number: int) -> str:
    """The loopback address of a server, never 127.0.x.x."""
    number += 1
    return f"127.{1 + (number >> 16)}.{(number >> 8) & 255}.{number & 255}"


async def main() -> None:
    """Be the receiving servers until told to end."""
    async with trio.open_nursery() as nursery:
        receivers = Receivers(nursery)
        handlers: dict[str, Handler] = {
            "begin": receivers.begin,
            "count": receivers.count,
            "tell": receivers.tell,
            "until": receivers.until,
            "come_back": receivers.come_back,
        }
        await serve_orders(handlers)
        receivers.close()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
