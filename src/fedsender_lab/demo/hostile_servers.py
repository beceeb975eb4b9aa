"""Hostile servers, in a process of their own: real sockets, real TLS, and a name server for them.

Each server has an address and a port, or a name below `.test` that only this process can look up.
Each plays one attack, in answer to every request, for as long as the process runs.
"""

import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final

import dns.exception
import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset
import trio

from fedsender_lab.testing.attacks import (
    ATTACKS,
    Attack,
    closes,
    gzip_bomb,
    late,
    play,
    read_transaction,
)
from fedsender_lab.testing.certificates import Authority
from fedsender_lab.testing.children import Handler, Order, serve_orders
from fedsender_lab.testing.http import FOREVER, Conversation, Reply, Request, TlsStream
from fedsender_lab.testing.tls_records import UpdatingStream

HOST = "127.66.0.1"
HTTPS = 443
WELL_KNOWN, WELL_KNOWN_DOMAIN = "well_known", "well-known.test"
"""Names below it have this process's address, and their `.well-known` is a bomb."""
WELL_KNOWN_SERVERS = 4
TARPIT = "tarpit"
"""DNS questions for names with this in them are never answered."""

UPDATES: Final = 600
"""Key updates at once: 16 KB."""
UPDATING: Final = {"updates_before_answers": (UPDATES, 0), "updates_when_idle": (0, UPDATES)}
UPDATING_SERVERS, UPDATING_HOST = 20, "127.66.250.1"
GROUPS: Final = {"group_p384": "secp384r1", "group_p521": "secp521r1", "group_ffdhe4096": None}
"""Servers that shake hands with this group alone, once for each transaction. None: the group
of the process, which its environment names (`OPENSSL_CONF`); Python can name only curves."""
GROUP_SERVERS, GROUP_HOST = 20, "127.66.251.1"
USUAL_GROUP: Final = "X25519"
HELD, HELD_SERVERS, HELD_HOST = "holds_places", 200, "127.66.252.1"
"""Names of one address that answers as late as can be: half below one domain, the rest each below
its own."""
DEAR_DNS, DEAR_DNS_SERVERS = "dear-dns", 40
"""DNS questions for names with this in them have the dearest answer, by TCP."""
DEAR_LABELS, DEAR_RECORDS = 105, 40
SPEAKS_FIRST, SPEAKS_FIRST_SERVERS = "speaks_first", 6


class Hostile:
    """One hostile server."""

    def __init__(
        self, name: str, attack: Attack | None, context: ssl.SSLContext, counts: Counter[str]
    ) -> None:
        """`counts` has the number of attacks made, by `name`.

        Without an `attack` its answers are proper; then the connection is the attack.
        """
        self._name = name
        self._attack = attack
        self._context = context
        self._counts = counts
        self._requests = 0

    async def converse(self, raw: trio.SocketStream) -> None:
        """Attack one connection, until one side ends it."""
        stream = TlsStream(raw, self._context)
        await Conversation(stream, self, idle_s=FOREVER).run()

    async def shake_hands(self, raw: trio.SocketStream) -> None:
        """As `converse`; the attack is the handshake."""
        self._counts[self._name] += 1
        await self.converse(raw)

    async def renew_keys(self, raw: trio.SocketStream) -> None:
        """As `converse`, with records that renew the key."""
        before, idle = UPDATING[self._name]
        stream = UpdatingStream(raw, self._context, before=before, idle=idle)
        await Conversation(stream, self, idle_s=FOREVER).run()

    def request_began(self, request: Request) -> None:
        """Do nothing: a request is counted when it is complete."""

    def request_ended(self, request: Request, status: int | None) -> None:
        """Do nothing: the result of a request is not counted."""

    def reply_to(self, request: Request) -> Reply:
        """The attack on this request."""
        incoming = read_transaction(bytes(request.body), self._requests)
        self._requests += 1
        self._counts[self._name] += 1
        if self._attack is None:
            return Reply(200, b'{"pdus":{}}')
        return Reply(play=play(self._attack, incoming))


class HostileServers:
    """All hostile servers of a run."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._counts: Counter[str] = Counter()
        self._nursery = nursery
        self._addresses: dict[str, str] = {}

    async def begin(
        self, directory: str, count: int, addresses: Mapping[str, str], now_ms: int
    ) -> Order:
        """Listen; `count` servers take turns with `ATTACKS`, and those that are dear come besides.

        Returns:
            servers: the names by attack; ca_file: the authority of their certificates;
            nameserver: the port on 127.0.0.1 that answers for the names below `.test`, those of
            `addresses` among them.
            Where this user may not listen on port 443, no server attacks by its `.well-known`.
        """
        authority = Authority(Path(directory), now_ms)
        names = [f"s{number}.{WELL_KNOWN_DOMAIN}" for number in range(WELL_KNOWN_SERVERS)]
        self._addresses = {**addresses, **dict.fromkeys(names, HOST)}
        hosts = [f"127.66.{1 + number // 250}.{1 + number % 250}" for number in range(count)]
        # Every other one has an address of its own; a cap per address holds back the rest only.
        hosts[1::2] = [HOST] * (count // 2)
        context = _usual(authority, [*dict.fromkeys([HOST, *hosts]), *names])
        servers: dict[str, list[str]] = {kind: [] for kind in (*ATTACKS, "no_handshake", TARPIT)}
        if await self._listen_on_https(context):
            servers[WELL_KNOWN] = names
            count -= len(names)
        kinds = cycle([*ATTACKS, "no_handshake", TARPIT])
        for number, (kind, host) in enumerate(zip(kinds, hosts[:count], strict=False)):
            if kind == TARPIT:
                # Every other one below one domain, the rest each below its own.
                domain = TARPIT if number % 2 else f"{TARPIT}{number}"
                servers[kind].append(f"s{number}.{domain}.test")
            else:
                port = await self._listen(self._handler(kind, context), host)
                servers[kind].append(f"{host}:{port}")
        return {
            "servers": {**servers, **await self._dear_ones(authority)},
            "ca_file": str(authority.ca_file),
            "nameserver": await self._answer_questions(),
        }

    async def _dear_ones(self, authority: Authority) -> dict[str, list[str]]:
        """Servers whose connections, names or places are what they cost; the names by attack."""
        servers: dict[str, list[str]] = {}
        for kind in UPDATING:
            context = _usual(authority, [UPDATING_HOST])
            context.num_tickets = 0
            context.keylog_filename = str(authority.ca_file.with_name(f"{kind}.keys"))
            handler = Hostile(kind, None, context, self._counts).renew_keys
            servers[kind] = await self._doors(handler, UPDATING_HOST, UPDATING_SERVERS)
        for kind, group in GROUPS.items():
            context = authority.server_context([GROUP_HOST])
            if group is not None:
                context.set_ecdh_curve(group)
            handler = Hostile(kind, closes, context, self._counts).shake_hands
            servers[kind] = await self._doors(handler, GROUP_HOST, GROUP_SERVERS)
        servers[SPEAKS_FIRST] = await self._doors(self._speak, HOST, SPEAKS_FIRST_SERVERS)
        held = [
            f"s{number}.held{number if number % 2 else ''}.test" for number in range(HELD_SERVERS)
        ]
        self._addresses.update(dict.fromkeys(held, HELD_HOST))
        holds = Hostile(HELD, late, _usual(authority, held), self._counts).converse
        port = await self._listen(holds, HELD_HOST)
        servers[HELD] = [f"{name}:{port}" for name in held]
        # Without a port there are more questions to ask.
        servers[DEAR_DNS] = [
            f"s{number}.{DEAR_DNS}{number}.test" + f":{port}" * (number % 2)
            for number in range(DEAR_DNS_SERVERS)
        ]
        return servers

    async def tell(self) -> Order:
        """The number of attacks, by name."""
        return dict(self._counts)

    def _handler(
        self, kind: str, context: ssl.SSLContext
    ) -> Callable[[trio.SocketStream], Awaitable[None]]:
        if kind == "no_handshake":
            return self._say_nothing
        return Hostile(kind, ATTACKS[kind], context, self._counts).converse

    async def _say_nothing(self, stream: trio.SocketStream) -> None:
        self._counts["no_handshake"] += 1
        async with stream:
            await trio.sleep_forever()

    async def _speak(self, stream: trio.SocketStream) -> None:
        """Greet, before the client has said anything."""
        self._counts[SPEAKS_FIRST] += 1
        async with stream:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(b"220 hello\r\n")
                await trio.sleep_forever()

    async def _doors(
        self, handler: Callable[[trio.SocketStream], Awaitable[None]], host: str, count: int
    ) -> list[str]:
        """So many ports; the names of the servers there."""
        return [f"{host}:{await self._listen(handler, host)}" for _ in range(count)]

    async def _listen(
        self, handler: Callable[[trio.SocketStream], Awaitable[None]], host: str
    ) -> int:
        serve = partial(trio.serve_tcp, handler, 0, host=host)
        listeners: list[trio.SocketListener] = await self._nursery.start(serve)
        bound: int = listeners[0].socket.getsockname()[1]
        return bound

    async def _listen_on_https(self, context: ssl.SSLContext) -> bool:
        listeners: list[trio.SocketListener]
        try:
            listeners = await trio.open_tcp_listeners(HTTPS, host=HOST)
        except OSError:
            return False
        bomber = Hostile(WELL_KNOWN, gzip_bomb, context, self._counts)
        self._nursery.start_soon(trio.serve_listeners, bomber.converse, listeners)
        return True

    async def _answer_questions(self) -> int:
        """Start a name server on a free port of 127.0.0.1; return the port."""
        while True:
            tcp = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
            port: int = tcp.socket.getsockname()[1]
            udp = trio.socket.socket(type=trio.socket.SOCK_DGRAM)
            try:
                await udp.bind(("127.0.0.1", port))
            except OSError:  # Free for TCP, and not for UDP.
                udp.close()
                await tcp.aclose()
            else:
                break
        self._nursery.start_soon(self._name_server, udp)
        self._nursery.start_soon(trio.serve_listeners, self._name_server_by_tcp, [tcp])
        return port

    async def _name_server(self, udp: trio.socket.SocketType) -> None:
        while True:
            data, sender = await udp.recvfrom(4_096)
            reply = self._reply(data)
            if reply is not None:
                await udp.sendto(reply, sender)

    async def _name_server_by_tcp(self, stream: trio.SocketStream) -> None:
        """Only those with a dear answer are asked for here."""
        asked = b""
        async with stream:
            with suppress(trio.BrokenResourceError):
                while len(asked) < 2 or len(asked) < 2 + int.from_bytes(asked[:2], "big"):
                    piece = await stream.receive_some(4_096)
                    if not piece:
                        return
                    asked += piece
                self._counts[DEAR_DNS] += 1
                reply = dear_answer(asked[2:])
                await stream.send_all(struct.pack("!H", len(reply)) + reply)

    def _reply(self, data: bytes) -> bytes | None:
        """The answer to a question that came by UDP; None: there is none."""
        try:
            question = dns.message.from_wire(data)
        except dns.exception.DNSException:
            return None
        name, kind = question.question[0].name, question.question[0].rdtype
        text = name.to_text(omit_final_dot=True)
        if TARPIT in text:
            self._counts[TARPIT] += 1
            return None
        reply = dns.message.make_response(question)
        if DEAR_DNS in text:
            reply.flags |= dns.flags.TC
        address = self._addresses.get(text)
        if kind == dns.rdatatype.A and address is not None:
            reply.answer.append(dns.rrset.from_text(name, 60, "IN", "A", address))
        return reply.to_wire()


def _usual(authority: Authority, names: Sequence[str]) -> ssl.SSLContext:
    """A context for these names that shakes hands as others do."""
    context = authority.server_context(names)
    context.set_ecdh_curve(USUAL_GROUP)
    return context


def dear_answer(question: bytes) -> bytes:
    """An alias of as many labels as fit, and as many records of it, each with a packed owner."""
    end = question.index(b"\0", 12) + 5
    asked, kind = question[12:end], struct.unpack("!H", question[end - 4 : end - 2])[0]

    def record(owner: bytes, kind: int, data: bytes) -> bytes:
        return owner + struct.pack("!HHIH", kind, 1, 30, len(data)) + data

    alias = 12 + len(asked) + 12
    records = [record(b"\xc0\x0c", 5, b"\x01a" * DEAR_LABELS + b"\xc0\x0c")]
    for number in range(1, DEAR_RECORDS):
        data = {
            dns.rdatatype.A: struct.pack("!BBBB", 127, 66, 253, number),
            dns.rdatatype.AAAA: bytes(14) + struct.pack("!H", number),
            dns.rdatatype.SRV: struct.pack("!HHH", number, number, 8448)
            + struct.pack("!H", 0xC000 | alias),
        }.get(kind, b"")
        records.append(record(struct.pack("!H", 0xC000 | alias), kind, data))
    head = question[:2] + b"\x81\x80" + struct.pack("!HHHH", 1, len(records), 0, 0)
    return head + asked + b"".join(records)


async def main() -> None:
    """Run the hostile servers until told to end."""
    async with trio.open_nursery() as nursery:
        servers = HostileServers(nursery)
        handlers: dict[str, Handler] = {"begin": servers.begin, "tell": servers.tell}
        await serve_orders(handlers)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
