"""What a homeserver is sent: a door in front of it that reads along.

TLS ends at the door, with a certificate of the homeserver's name, and begins anew behind it. The
bytes are passed on as they are, so that signatures hold.
"""

import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
import trustme
from tests.proxy import Address

from fedsender_lab.testing.http import RequestReader
from fedsender_lab.testing.rules import SEND

_CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class Sent:
    """A transaction that reached the homeserver's door."""

    transaction_id: str
    content: Mapping[str, Any]


@dataclass(slots=True)
class Recording:
    """All transactions, in the order in which they were complete."""

    transactions: list[Sent] = field(default_factory=list)

    def add(self, sent: Sent) -> None:
        """One more has arrived."""
        self.transactions.append(sent)

    def pdus(self, *room_ids: str) -> list[Mapping[str, Any]]:
        """The PDUs of these rooms, in order, each as often as it was sent."""
        found = [pdu for sent in self.transactions for pdu in sent.content.get("pdus", ())]
        return [pdu for pdu in found if pdu["room_id"] in room_ids]

    def edus(self, edu_type: str) -> list[Mapping[str, Any]]:
        """The contents of the EDUs of a type, in order."""
        found = [edu for sent in self.transactions for edu in sent.content.get("edus", ())]
        return [edu["content"] for edu in found if edu["edu_type"] == edu_type]


@asynccontextmanager
async def open_recorder(
    address: Address, upstream: Address, authority: trustme.CA
) -> AsyncIterator[Recording]:
    """Listening at `address` in front of the homeserver at `upstream`, until the body is left.

    Somebody else may hold the address without listening (`tests.proxy.reserve`).
    """
    recording = Recording()
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(address[0]).configure_cert(server_side)
    client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client_side)

    async def serve(client: trio.SSLStream[trio.SocketStream]) -> None:
        reader = RequestReader()

        def note(data: bytes | bytearray) -> None:
            reader.feed(data)
            while reader.whole:
                request = reader.whole.popleft()
                _, found, transaction_id = request.target.partition(SEND)
                if found:
                    recording.add(Sent(transaction_id, json.loads(request.body)))

        try:
            async with client:
                plain = await trio.open_tcp_stream(*upstream)
                server = trio.SSLStream(plain, client_side, server_hostname=upstream[0])
                async with server, trio.open_nursery() as nursery:
                    nursery.start_soon(_carry, client, server, note, nursery)
                    await _carry(server, client, None, nursery)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # Either end may leave when it likes.

    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        plain.bind(address)
        plain.listen(64)
        listener = trio.SSLListener(
            trio.SocketListener(trio.socket.from_stdlib_socket(plain)), server_side
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve, [listener])
            yield recording
            nursery.cancel_scope.cancel()


async def _carry(
    source: trio.SSLStream[trio.SocketStream],
    sink: trio.SSLStream[trio.SocketStream],
    note: Callable[[bytes | bytearray], None] | None,
    nursery: trio.Nursery,
) -> None:
    """Pass bytes on until the source ends; then the whole connection does."""
    while data := await source.receive_some(_CHUNK):
        if note is not None:
            note(data)
        await sink.send_all(data)
    nursery.cancel_scope.cancel()
