"""Hostile servers, in a process of their own: real sockets, real TLS, and a name server for them.

Each server has an address and a port, or a name below `.test` that only this process can look up.
Each plays one attack, in answer to every request, for as long as the process runs.
"""

import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import dns.exception
import dns.message
import dns.rdatatype
import dns.rrset
import trio

from fedsender.testing.attacks import ATTACKS, Attack, gzip_bomb, play, read_transaction
from fedsender.testing.certificates import Authority
from fedsender.testing.children import Handler, Order, serve_orders
from fedsender.testing.http import FOREVER, Conversation, Reply, Request, TlsStream

HOST = "127.66.0.1"
HTTPS = 443
WELL_KNOWN, WELL_KNOWN_DOMAIN = "well_known", "well-known.test"
"""Names below it have this process's address, and their `.well-known` is a bomb; all other
names have the address 127.0.0.1."""
WELL_KNOWN_SERVERS = 4
TARPIT = "tarpit"
"""DNS questions for names with this in them are never answered."""


class Hostile:
    """One hostile server."""

    def __init__(
        self, name: str, attack: Attack, context: ssl.SSLContext, counts: Counter[str]
    ) -> None:
        """`counts` has the number of attacks made, by `name`."""
        self._name = name
        self._attack = attack
        self._context = context
        self._counts = counts
        self._requests = 0

    async def converse(self, raw: trio.SocketStream) -> None:
        """Attack one connection, until one side ends it."""
        stream = TlsStream(raw, self._context)
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
        return Reply(play=play(self._attack, incoming))


class HostileServers:
    """All hostile servers of a run."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._counts: Counter[str] = Counter()
        self._nursery = nursery

    async def begin(self, directory: str, count: int, now_ms: int) -> Order:
        """Listen.

        Returns:
            servers: the names by attack; ca_file: the authority of their certificates;
            nameserver: the port on 127.0.0.1 that answers for the names below `.test`.
            Where this user may not listen on port 443, no server attacks by its `.well-known`.
        """
        authority = Authority(Path(directory), now_ms)
        names = [f"s{number}.{WELL_KNOWN_DOMAIN}" for number in range(WELL_KNOWN_SERVERS)]
        hosts = [f"127.66.{1 + number // 250}.{1 + number % 250}" for number in range(count)]
        # Every other one has an address of its own; a cap per address holds back the rest only.
        hosts[1::2] = [HOST] * (count // 2)
        context = authority.server_context([*dict.fromkeys([HOST, *hosts]), *names])
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
            "servers": servers,
            "ca_file": str(authority.ca_file),
            "nameserver": await self._answer_questions(),
        }

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
        socket = trio.socket.socket(type=trio.socket.SOCK_DGRAM)
        await socket.bind(("127.0.0.1", 0))
        self._nursery.start_soon(self._name_server, socket)
        port: int = socket.getsockname()[1]
        return port

    async def _name_server(self, socket: trio.socket.SocketType) -> None:
        while True:
            data, sender = await socket.recvfrom(4_096)
            try:
                question = dns.message.from_wire(data)
            except dns.exception.DNSException:
                continue
            name, kind = question.question[0].name, question.question[0].rdtype
            text = name.to_text(omit_final_dot=True)
            if TARPIT in text:
                self._counts[TARPIT] += 1
                continue
            reply = dns.message.make_response(question)
            address = HOST if text.endswith(WELL_KNOWN_DOMAIN) else "127.0.0.1"
            if kind == dns.rdatatype.A and not text.startswith("_"):
                reply.answer.append(dns.rrset.from_text(name, 60, "IN", "A", address))
            await socket.sendto(reply.to_wire(), sender)


async def main() -> None:
    """Run the hostile servers until told to end."""
    async with trio.open_nursery() as nursery:
        servers = HostileServers(nursery)
        handlers: dict[str, Handler] = {"begin": servers.begin, "tell": servers.tell}
        await serve_orders(handlers)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
