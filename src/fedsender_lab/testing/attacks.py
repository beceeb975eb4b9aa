"""How a hostile server answers: each attack is one coroutine over one connection.

The demo plays them over real TLS, the simulation over streams in memory. An attack gets a request
that has arrived whole, writes any bytes, and returns whether the connection stays open. None of
them needs more than one connection: how often it is repeated is for the sender to bound.
"""

import gzip
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import orjson
import trio

from fedsender_lab.testing.http import Ended, Play

PIECE = 16_384
"""Bytes per write of an answer without end."""
ENDLESS_BYTES = 64 * 2**20
"""An answer "without end" ends here, so that a receiver without a bound shows, and the run ends."""
LATE_S = 55.0
"""Below the default `request_timeout` of 60 s: the answer counts, and is as late as can be."""
BOMB_BYTES = 256 * 2**20
JSON_BYTES = 10 * 2**20 - 1_000
"""Below the limit of 10 MiB that many HTTP clients have."""
DRIP_S = 1.0


class Stream(Protocol):
    """One connection, from the server's side."""

    async def send_all(self, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as an attack sees it.

    Attributes:
        pdus: how many a transaction has; 0 for any other request.
        items: its PDUs and EDUs.
        number: requests that came before it over all connections of this server.
    """

    pdus: int
    items: int
    number: int


Attack = Callable[[Stream, Incoming], Awaitable[bool]]
"""Answers one request; False: the connection is of no more use. Raises the stream's errors."""


def read_transaction(body: bytes, number: int) -> Incoming:
    """The request's contents, as far as an attack cares."""
    try:
        document = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:
        document = {}
    pdus, edus = len(document.get("pdus", ())), len(document.get("edus", ()))
    return Incoming(pdus, pdus + edus, number)


def play(attack: Attack, incoming: Incoming) -> Play:
    """The attack as a reply; a proper answer in it is noticed as such."""

    async def played(stream: Stream, ended: Ended) -> bool:
        return await attack(_Overheard(stream, ended), incoming)

    return played


class _Overheard:
    """A stream that tells with which status an answer begins, and whether it is a proper one."""

    def __init__(self, stream: Stream, ended: Ended) -> None:
        self._stream = stream
        self._ended: Ended | None = ended
        self._begun = b""

    async def send_all(self, data: bytes) -> None:
        if self._ended is not None:
            self._begun = (self._begun + data)[: len(OK)]
            proper = self._begun == OK
            if proper or not OK.startswith(self._begun):
                digits = self._begun[9:12]
                self._ended(int(digits) if digits.isdigit() else None, proper)
                self._ended = None
        await self._stream.send_all(data)


def answer(status: int, body: bytes, *headers: str) -> bytes:
    """A whole answer."""
    lines = [f"HTTP/1.1 {status} X", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = answer(200, b'{"pdus":{}}')
FORBIDDEN = answer(403, b'{"errcode":"M_FORBIDDEN","error":"' + b"no " * 100 + b'"}')


async def _without_end(stream: Stream, beginning: bytes, piece: bytes) -> bool:
    await stream.send_all(beginning)
    piece *= max(1, PIECE // len(piece))
    for _ in range(ENDLESS_BYTES // len(piece)):
        await stream.send_all(piece)
    return False


# --- bytes that are no body -----------------------------------------------------------------------


async def endless_trailer(stream: Stream, _: Incoming) -> bool:
    """A trailer that never ends."""
    return await _without_end(stream, CHUNKED + b"2\r\n{}\r\n0\r\nX: ", b"a")


async def many_trailers(stream: Stream, _: Incoming) -> bool:
    """Trailers, one after the other."""
    return await _without_end(stream, CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-Y: z\r\n")


async def endless_headers(stream: Stream, _: Incoming) -> bool:
    """Headers, one after the other."""
    return await _without_end(stream, b"HTTP/1.1 200 OK\r\n", b"X-Y: z\r\n")


async def interim_answers(stream: Stream, _: Incoming) -> bool:
    """Answers with status 102, one after the other."""
    return await _without_end(stream, b"", b"HTTP/1.1 102 Processing\r\n\r\n")


async def chunk_extensions(stream: Stream, _: Incoming) -> bool:
    """Chunks of one byte, each with an extension of some hundred."""
    return await _without_end(stream, CHUNKED, b"1;" + b"e" * 400 + b"\r\n \r\n")


# --- bodies ---------------------------------------------------------------------------------------


async def tiny_chunks(stream: Stream, _: Incoming) -> bool:
    """White space in chunks of two bytes."""
    return await _without_end(stream, CHUNKED, b"2\r\n  \r\n")


async def endless_body(stream: Stream, _: Incoming) -> bool:
    """A body without a length and without an end."""
    return await _without_end(stream, b"HTTP/1.1 200 OK\r\n\r\n", b" ")


@cache
def _brackets() -> bytes:
    return answer(200, b'{"a":[' + b"[]," * ((JSON_BYTES - 20) // 3) + b"[]]}")


async def brackets(stream: Stream, _: Incoming) -> bool:
    """JSON that takes three hundred times its size in memory."""
    await stream.send_all(_brackets())
    return True


async def small_brackets(stream: Stream, _: Incoming) -> bool:
    """The same in 60 KB."""
    await stream.send_all(answer(200, b'{"a":[' + b"[]," * 20_000 + b"[]]}"))
    return True


@cache
def _flood() -> bytes:
    entries = ",".join(f'"${n:043d}":{{"error":"{"e " * 150}"}}' for n in range(16_000))
    return answer(200, f'{{"pdus":{{{entries}}}}}'.encode())


async def error_flood(stream: Stream, _: Incoming) -> bool:
    """Errors for 16,000 events that were not in the transaction."""
    await stream.send_all(_flood())
    return True


@cache
def _bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(2**20)
    inner = b"".join(packer.compress(zeros) for _ in range(BOMB_BYTES // 2**20)) + packer.flush()
    packed = gzip.compress(inner, 9)
    layers = ("Content-Encoding: identity", "Content-Encoding: gzip", "Content-Encoding: gzip")
    return answer(200, packed, *layers)


async def gzip_bomb(stream: Stream, _: Incoming) -> bool:
    """Some KB that become 256 MiB, packed twice."""
    await stream.send_all(_bomb())
    return True


# --- time -----------------------------------------------------------------------------------------


async def late(stream: Stream, _: Incoming) -> bool:
    """A proper answer, just before the sender would give up."""
    await trio.sleep(LATE_S)
    await stream.send_all(OK)
    return True


async def silence(stream: Stream, _: Incoming) -> bool:
    """No answer."""
    await trio.sleep_forever()
    raise AssertionError


async def drip(stream: Stream, _: Incoming) -> bool:
    """A proper answer, a byte each second."""
    for at in range(len(OK)):
        await stream.send_all(OK[at : at + 1])
        await trio.sleep(DRIP_S)
    return True


async def closes(stream: Stream, _: Incoming) -> bool:
    """A proper answer, and then the connection ends: each transaction costs a handshake."""
    await stream.send_all(OK)
    return False


# --- verdicts -------------------------------------------------------------------------------------


async def picky(stream: Stream, incoming: Incoming) -> bool:
    """Only empty transactions are taken."""
    await stream.send_all(FORBIDDEN if incoming.items else OK)
    return True


async def refuses_pdus(stream: Stream, incoming: Incoming) -> bool:
    """400 for each transaction with a PDU."""
    await stream.send_all(answer(400, b"{}") if incoming.pdus else OK)
    return True


async def times_out(stream: Stream, incoming: Incoming) -> bool:
    """504 for each transaction with a PDU."""
    await stream.send_all(answer(504, b"{}") if incoming.pdus else OK)
    return True


async def flapping(stream: Stream, incoming: Incoming) -> bool:
    """Every other request is refused, whatever is in it."""
    await stream.send_all(FORBIDDEN if incoming.number % 2 else OK)
    return True


async def not_a_homeserver(stream: Stream, _: Incoming) -> bool:
    """200 with a page, and a redirect's header."""
    await stream.send_all(answer(200, b"<html>It works!</html>", "Location: https://127.0.0.1/"))
    return True


async def redirects(stream: Stream, _: Incoming) -> bool:
    """A redirect to the sender's own machine."""
    await stream.send_all(answer(307, b"", "Location: http://127.0.0.1:9090/metrics"))
    return True


async def leave_me_alone(stream: Stream, _: Incoming) -> bool:
    """429 with a `Retry-After` of 30 years."""
    body = b'{"errcode":"M_LIMIT_EXCEEDED","retry_after_ms":1e300}'
    await stream.send_all(answer(429, body, "Retry-After: 999999999"))
    return True


async def two_answers(stream: Stream, _: Incoming) -> bool:
    """An answer to a request that was not made yet."""
    await stream.send_all(OK + OK)
    return True


ATTACKS: Mapping[str, Attack] = {
    attack.__name__: attack
    for attack in (
        endless_trailer,
        many_trailers,
        endless_headers,
        interim_answers,
        chunk_extensions,
        tiny_chunks,
        endless_body,
        brackets,
        small_brackets,
        error_flood,
        gzip_bomb,
        late,
        silence,
        drip,
        closes,
        picky,
        refuses_pdus,
        times_out,
        flapping,
        not_a_homeserver,
        redirects,
        leave_me_alone,
        two_answers,
    )
}
"""By name; reports use these names."""
