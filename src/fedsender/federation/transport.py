"""HTTP/1.1 over one keep-alive TLS connection, for federation and for nothing else.

There is no pool here, on purpose. A shared pool of thousands of origins looks through all of them
for each request, shares connections between servers that have one address, and is left with
half-open slots after a cancellation. A `Connection` belongs to one server. It carries one exchange
at a time and is closed after any error or cancellation. So a request finds either a connection in a
known state or none.

The answer to a transaction is checked before it is used. It has only facts: the sender's failure
table decides on their consequences.

`HttpsTransport` puts such connections behind httpx, for requests where redirects and URLs matter
more than speed. This is the only module of the daemon that imports httpx.
"""

import email.utils
import json
import os
import re
import ssl
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Literal, NamedTuple

import httptools
import httpx
import orjson
import trio

from fedsender.tls import close_now, receive_into

Header = tuple[bytes, bytes]
FailureKind = Literal["timeout", "closed", "protocol", "too_large", "crowded"]

# Above this, a peer that answers 413 at once and closes may reset the connection while we still
# write; we then listen while writing. Smaller bodies fit into the kernel's socket buffers.
_LISTEN_WHILE_WRITING_BYTES: Final = 262_144
_MAX_CAUSES: Final = 8
_TARGET: Final = re.compile(r"/[!-~]*", re.ASCII)
# The headers that say how the body is to be read.
_TELLING: Final = frozenset((b"content-encoding", b"transfer-encoding", b"content-length"))
_HEADER_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
MAX_TEXT: Final = 300
_PIECE_BYTES: Final = 128
# Answers of this size are always read: there are only so many connections.
_UNCOUNTED_BYTES: Final = 16_384
_COUNTED_BYTES: Final = 32 * 1024 * 1024
# A sanity cap; `failure.RULES` has the real bound.
MAX_RETRY_AFTER_S: Final = 30 * 86_400.0
_MAX_DATE: Final = 100
_MAX_REFUSED: Final = 50
_MAX_ERROR_BYTES: Final = 200
_ANSWER_BYTES: Final = 65_536
_ANSWER_BYTES_PER_PDU: Final = 4_096
# What an object or a list costs to parse is far more than its bytes.
_PARTS: Final = 1_000
_PARTS_PER_PDU: Final = 64


class Bounds(NamedTuple):
    """The bounds on an answer; beyond them it counts as abuse.

    Attributes:
        body_bytes: its body.
        framing_bytes: all else: status line, headers, chunk sizes, trailers and 1xx answers; a
            piece in which it arrives counts as 128 bytes at least, because it costs work too.
        headers: the most headers in one answer, trailers included.
    """

    body_bytes: int
    framing_bytes: int = 32_768
    headers: int = 200


class Response(NamedTuple):
    """One whole answer; header names are lower case."""

    status: int
    headers: tuple[Header, ...]
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """The first header with that (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)


class ExchangeFailed(Exception):
    """A request got no whole answer; its connection is closed.

    Attributes:
        kind: the class of the failure; "crowded": our memory for answers was full.
        text: the reason in words, which need no `kind` beside them; at most 300 characters.
    """

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind: FailureKind = kind
        self.text = words(text)


class AnswerMemory:
    """Bounds the bytes of all answers that are being read at a time, over all connections.

    When there is no more room, the long answer that was begun first is given up. No answer waits
    for room, so an attacker gains nothing by filling it: honest answers end soon after they begin,
    and are never the oldest for long.

    Attributes:
        held: bytes of the answers that are being read, the first 16 KiB of each left out.
    """

    def __init__(self, maximum: int = _COUNTED_BYTES) -> None:
        self.held = 0
        self._maximum = maximum
        self._oldest_first: dict[Connection, int] = {}

    def grown(self, connection: "Connection", size: int) -> None:
        """Note that the answer on this connection has so many bytes now."""
        counted = size - _UNCOUNTED_BYTES
        if counted <= 0:
            return
        self.held += counted - self._oldest_first.get(connection, 0)
        self._oldest_first[connection] = counted
        while self.held > self._maximum:
            oldest = next(iter(self._oldest_first))
            self.ended(oldest)
            most = self._maximum
            text = f"our memory for answers was full ({most} bytes), this one the oldest"
            oldest.cut("crowded", text)

    def ended(self, connection: "Connection") -> None:
        """Note that the answer on this connection was read, or given up."""
        self.held -= self._oldest_first.pop(connection, 0)


class _Refused(Exception):
    """Raised inside a parser callback, where httptools wraps it."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind: FailureKind = kind


class ResponseReader:
    """Reads one answer: bytes in, a `Response` out; no I/O.

    Interim answers (1xx) and trailers are skipped. Bytes after the answer on the same connection
    were not asked for: the answer stands, but the connection is not used again.

    A 2xx answer with a body longer than its bound is no answer. With another status the body is cut
    there: the status has the needed information, and the body is an error page.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.complete = False
        self.keep_alive = False
        self._bounds = bounds
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._framing = 0
        self._headers: list[Header] = []
        self._telling: dict[bytes, list[bytes]] = {}
        self._header_count = 0
        self._headers_done = False
        self._until_eof = False
        self._interim = False
        self._body = bytearray()

    @property
    def size(self) -> int:
        """The number of bytes of the body that are held."""
        return len(self._body)

    def feed(self, data: bytes | bytearray) -> None:
        """Take bytes from the peer; raises ExchangeFailed."""
        self._framing += max(len(data), _PIECE_BYTES)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise ExchangeFailed("protocol", "the server switched protocols unasked") from error
        except httptools.HttpParserError as error:
            self._failed(error)
        # What has no end stays inside the parser, so it is the input that is counted.
        most = self._bounds.framing_bytes
        if not self.complete and self._framing > most:
            text = f"answer with more than {most} bytes of headers and framing, or in tiny pieces"
            raise ExchangeFailed("protocol", text)

    def end(self) -> None:
        """Note that the peer closed; raises ExchangeFailed unless the answer may end so."""
        if self.complete:
            return
        if self._headers_done and self._until_eof:
            self.complete = True
            return
        where = "in the middle of its answer" if self._framing else "without an answer"
        raise ExchangeFailed("closed", f"the server closed the connection {where}")

    def close(self) -> None:
        """Drop the parser: it refers to us, and only the garbage collector would free the two."""
        del self._parser

    def response(self) -> Response:
        """The answer, once `complete`."""
        return Response(self._status, tuple(self._headers), bytes(self._body))

    def _failed(self, error: httptools.HttpParserError) -> None:
        self.keep_alive = False
        if self.complete:
            return
        cause = error.__context__ if error.__cause__ is None else error.__cause__
        if isinstance(cause, _Refused):
            raise ExchangeFailed(cause.kind, str(cause)) from error
        raise ExchangeFailed("protocol", f"not an HTTP answer: {error}") from error

    # --- what httptools calls ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise _Refused("protocol", "a second answer to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > self._bounds.headers:
            raise _Refused("protocol", f"answer with more than {self._bounds.headers} headers")
        if self._headers_done:
            return
        key = name.lower()
        self._headers.append((key, value))
        if key in _TELLING:
            self._telling.setdefault(key, []).append(value)

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._interim = self._status < 200
        if self._interim:
            return
        self._headers_done = True
        if self._values(b"content-encoding") not in ([], [b"identity"]):
            # Unpacked, it could be of any size; and we said that we take none.
            raise _Refused("protocol", "answer compressed, though not asked for")
        transfer = self._values(b"transfer-encoding")
        if transfer not in ([], [b"chunked"]):
            raise _Refused("protocol", "answer with a transfer encoding other than chunked")
        # The parser has checked that it is one number.
        lengths = self._telling.get(b"content-length")
        self._until_eof = not transfer and not lengths
        if lengths and self._successful and int(lengths[0][:20]) > self._bounds.body_bytes:
            self._too_large()

    def _values(self, name: bytes) -> list[bytes]:
        """The members of such a header, in lower case, over all headers of that name."""
        found = self._telling.get(name)
        if found is None:
            return []
        return [part.strip() for part in b",".join(found).lower().split(b",") if part.strip()]

    @property
    def _successful(self) -> bool:
        return self._status < 300

    def on_body(self, data: bytes) -> None:
        self._framing -= len(data)
        room = self._bounds.body_bytes - len(self._body)
        if len(data) <= room:
            self._body += data
            return
        if self._successful:
            self._too_large()
        self._body += data[:room]
        self.complete = True
        raise _Refused("too_large", "the rest is not read")

    def _too_large(self) -> None:
        raise _Refused("too_large", f"answer larger than {self._bounds.body_bytes} bytes")

    def on_message_complete(self) -> None:
        if self._interim:
            self._headers.clear()
            self._telling.clear()
            return
        self.complete = True
        # Asked later, the parser says no: it has moved on to the next message.
        self.keep_alive = self._parser.should_keep_alive()


class Connection:
    """A connection to one server, with at most one exchange on it at a time.

    Attributes:
        sent: the first byte of the latest request may have left.
        heard: a byte of its answer has arrived.
        reusable: another exchange may follow. False during one, and for ever after a failed one.
    """

    __slots__ = ("_cut", "heard", "reusable", "sent", "stream")

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.sent = False
        self.heard = False
        self.reusable = True
        # Not the error itself. Once raised, it would keep its frames, and they us, with OpenSSL's
        # 31 KB, until Python's next search for cycles, which may be an hour away.
        self._cut: tuple[FailureKind, str] | None = None

    async def exchange(
        self,
        method: str,
        target: str,
        lines: bytes,
        body: bytes | None = None,
        *,
        bounds: Bounds,
        memory: AnswerMemory,
    ) -> Response:
        """Send one request and read its answer; redirects are answers like any other.

        The deadline is the caller's. After an error or a cancellation the connection is closed;
        `sent` and `heard` then show its progress.

        Args:
            lines: the headers, as `header_lines` makes them.

        Raises:
            ExchangeFailed: there is no whole answer.
        """
        self.sent = self.heard = False
        if not self.reusable:
            raise ExchangeFailed("closed", "the connection is closed")
        head = request_head(method, target, lines, body)
        self.reusable = False
        reader = ResponseReader(bounds)
        try:
            self.sent = True
            if body is None or len(body) <= _LISTEN_WHILE_WRITING_BYTES:
                await self.stream.send_all(head + (body or b""))
                await self._read(reader, memory)
            else:
                await self._converse(head, body, reader, memory)
        except trio.BrokenResourceError as error:
            raise ExchangeFailed("closed", f"the connection broke: {reason(error)}") from error
        except trio.ClosedResourceError as error:
            kind, text = self._cut or ("closed", "closed on this side")
            raise ExchangeFailed(kind, text) from error
        finally:
            if not (reader.complete and reader.keep_alive):
                close_now(self.stream)
            reader.close()
        self.reusable = reader.keep_alive and self._cut is None
        return reader.response()

    def cut(self, kind: FailureKind, text: str) -> None:
        """End the exchange under way: it raises `ExchangeFailed` with these."""
        self._cut = kind, text
        close_now(self.stream)

    def close(self) -> None:
        """Close without a goodbye and without a wait."""
        self.reusable = False
        close_now(self.stream)

    async def _converse(
        self, head: bytes, body: bytes, reader: ResponseReader, memory: AnswerMemory
    ) -> None:
        """Listen while writing. Hundreds do so at once: the body is not copied behind its head."""
        written = False
        failure: ExchangeFailed | trio.BrokenResourceError | trio.ClosedResourceError | None = None

        async def write() -> None:
            nonlocal written
            # What broke while writing shows to the reader, who may still find the answer to why.
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.stream.send_all(body)
                written = True

        # In the caller's own task, and so in the turn in which it has looked whether we may send.
        await self.stream.send_all(head)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            try:
                await self._read(reader, memory)
            except (ExchangeFailed, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # Nor may it and this frame keep each other.
        # Half a request lies behind an answer that came before the body was out.
        reader.keep_alive &= written

    async def _read(self, reader: ResponseReader, memory: AnswerMemory) -> None:
        def take(data: bytes) -> None:
            if not data:
                reader.end()
                return
            self.heard = True
            reader.feed(data)
            if not reader.complete:
                memory.grown(self, reader.size)

        try:
            while not reader.complete:
                await receive_into(self.stream, take)
        finally:
            memory.ended(self)


def request_head(method: str, target: str, lines: bytes, body: bytes | None) -> bytes:
    """The bytes of a request before its body; `lines`: its headers, as `header_lines` makes them.

    Raises:
        ValueError: `target` would break out of its line.
    """
    if not _TARGET.fullmatch(target):
        raise ValueError("request target with characters that need escaping")
    start = f"{method} {target} HTTP/1.1\r\n".encode("ascii")
    if body is None:
        return b"%b%b\r\n" % (start, lines)
    return b"%b%bcontent-length: %d\r\n\r\n" % (start, lines, len(body))


def header_lines(headers: Iterable[Header]) -> bytes:
    """The lines of these headers.

    Raises:
        ValueError: a header would break out of its line.
    """
    for name, value in headers:
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"header {name.decode('latin-1')} with a control character")
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def words(text: str) -> str:
    """`text` fit for a log line: one line, no control characters, at most 300 characters."""
    printable = "".join(char if char.isprintable() else " " for char in text[: 4 * MAX_TEXT])
    line = " ".join(printable.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "\N{HORIZONTAL ELLIPSIS}"


def reason(error: BaseException) -> str:
    """The reason of an error in words: those of its innermost cause that has any.

    Stream errors have few words themselves; those of OpenSSL or the system are in their causes.
    """
    text = ""
    for cause in causes(error):
        text = _own_words(cause) or text
    return words(text or type(error).__name__)


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and its chain of causes, from the outside in; of a group the first error."""
    seen: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if seen is None:
            return
        yield seen
        seen = seen.exceptions[0] if isinstance(seen, BaseExceptionGroup) else seen.__cause__


def _own_words(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, OSError) and error.strerror:
        # Trio's own text names the address, which the caller names already.
        text = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        # In the middle of our sentences.
        return text[:1].lower() + text[1:]
    return str(error)


# --- httpx ----------------------------------------------------------------------------------------

Lease = Callable[[str, int], AbstractAsyncContextManager[Connection]]
"""Lends a connection that was opened to, and checked for, the given host and port."""


class HttpsTransport(httpx.AsyncBaseTransport):
    """httpx on our own connections; each request gets the one that `lease` lends for its host."""

    def __init__(self, lease: Lease, bounds: Bounds, memory: AnswerMemory) -> None:
        self._lease = lease
        self._bounds = bounds
        self._memory = memory

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run one exchange; raises ExchangeFailed and the errors of `lease`."""
        url = request.url
        if url.scheme != "https":
            raise httpx.UnsupportedProtocol(f"{url.scheme} is not https", request=request)
        body = await request.aread()
        headers = [
            (name, value) for name, value in request.headers.raw if name.lower() not in _FRAMING
        ]
        async with self._lease(url.host, url.port or 443) as connection:
            response = await connection.exchange(
                request.method,
                url.raw_path.decode("ascii"),
                header_lines(headers),
                body or None,
                bounds=self._bounds,
                memory=self._memory,
            )
        if any(len(value) > _MAX_LOCATION for key, value in response.headers if key == b"location"):
            raise ExchangeFailed("protocol", f"a redirect of more than {_MAX_LOCATION} bytes")
        # No cookies, and nothing that tells httpx to unpack or to decode.
        kept = [header for header in response.headers if header[0] in _WANTED]
        return httpx.Response(response.status, headers=kept, content=response.body, request=request)


_FRAMING: Final = (b"content-length", b"transfer-encoding", b"connection")
_WANTED: Final = (b"location", b"cache-control", b"expires")
# Reading a URL takes longer than its length says.
_MAX_LOCATION: Final = 2048


async def get(
    url: str, lease: Lease, bounds: Bounds, memory: AnswerMemory, *, user_agent: str
) -> Response:
    """Fetch `url`, following a few redirects, https to https only. The deadline is the caller's.

    Returns:
        The answer, with the headers that give its lifetime.

    Raises:
        ExchangeFailed: no whole answer, or a redirect that leads nowhere.
    """
    headers = {"user-agent": user_agent, "accept-encoding": "identity"}
    try:
        async with httpx.AsyncClient(
            transport=HttpsTransport(lease, bounds, memory),
            headers=headers,
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            # Proxies and credentials of the environment are not for us, and our caller keeps time.
            trust_env=False,
            timeout=None,
        ) as client:
            answer = await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ExchangeFailed("protocol", reason(error)) from error
    raw = tuple((name.lower(), value) for name, value in answer.headers.raw)
    return Response(answer.status_code, raw, answer.content)


_MAX_REDIRECTS: Final = 5


# --- what an answer says --------------------------------------------------------------------------


class Answer(NamedTuple):
    """A whole answer to a transaction.

    Attributes:
        status: HTTP status.
        is_answer: it is one in the sense of the specification: status 200 and accepted by
            `parse_answer`.
        refused: event id and error of each PDU that the peer refused though it took the
            transaction; of those that were in it, at most 50, each error at most 200 bytes.
        text: the error in the peer's words; "" if it gives none.
        retry_after_s: seconds for which the peer asks to be left alone, if this is no answer.
        reused: its connection had carried an exchange before, or lain idle.
        blank: it is none, but only because it says nothing: status 200, and a body that is empty,
            `null` or `[]`, or has a `pdus` that is `null` or `[]`.
    """

    status: int
    is_answer: bool
    refused: Mapping[str, str]
    text: str
    retry_after_s: float | None
    reused: bool
    blank: bool = False


def longest_answer(pdus: int) -> int:
    """The size limit of an answer to so many PDUs, in bytes."""
    return _ANSWER_BYTES + _ANSWER_BYTES_PER_PDU * pdus


def answer_of(
    response: Response,
    event_ids: Sequence[str],
    *,
    reused: bool,
    now_ms: Callable[[], int],
) -> Answer:
    """`response` as an `Answer`.

    Args:
        event_ids: of the PDUs that the transaction carried.
        now_ms: reads the wall clock, for dates in `Retry-After`.
    """
    content = parse_answer(response.body, len(event_ids)) if response.status == 200 else None
    if content is not None:
        return Answer(200, True, _refused(content, event_ids), "", None, reused)
    wait_s, text = retry_after_s(response, now_ms), _error_text(response)
    blank = response.status == 200 and _says_nothing(response.body)
    return Answer(response.status, False, {}, text, wait_s, reused, blank)


def parse_answer(body: bytes, pdus: int = 0) -> dict[str, Any] | None:
    """The JSON of an answer to a transaction with so many PDUs; None if the body is no such answer.

    An answer is a JSON object with a `pdus` that is absent or an object.
    """
    document = json_object(body, pdus)
    if document is None or not isinstance(document.get("pdus", {}), dict):
        return None
    return document


def _says_nothing(body: bytes) -> bool:
    if not body.strip():
        return True
    try:
        document = _decoded(body)
    except ValueError:
        return False
    if isinstance(document, dict):
        document = document.get("pdus", "")
    return document is None or document == []


def json_object(body: bytes, pdus: int = 0) -> dict[str, Any] | None:
    """The JSON object in `body`; None if there is none, or it has too many parts to be parsed.

    Args:
        pdus: number of PDUs that it answers; each may have some more parts.
    """
    try:
        document = _decoded(body, pdus)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _decoded(body: bytes, pdus: int = 0) -> object:
    """The JSON value in `body`, with the bounds of `json_object`; raises ValueError.

    The parts are counted first: a parser holds the event loop until it is done, in a thread too.
    """
    if body.count(b",") + body.count(b"{") + body.count(b"[") > _PARTS + _PARTS_PER_PDU * pdus:
        raise ValueError("too many parts to be parsed")
    body = body.removeprefix(BOM_UTF8)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass  # It refuses lone surrogates, which a peer may quote from an event that it refused.
    try:
        return _decoder.decode(body.decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("too deep to be parsed") from error


def retry_after_s(response: Response, now_ms: Callable[[], int]) -> float | None:
    """The seconds that `Retry-After`, or Matrix's older `retry_after_ms`, asks us to wait."""
    header = response.header(b"retry-after")
    if header is not None:
        text = header[:_MAX_DATE].decode("latin-1").strip()
        wait = _seconds_until(text, said_at_s(response, now_ms))
        if wait is not None:
            return min(max(wait, 0.0), MAX_RETRY_AFTER_S)
    if response.status in (429, 503):
        asked = (json_object(response.body) or {}).get("retry_after_ms")
        if isinstance(asked, int | float) and not isinstance(asked, bool) and asked >= 0:
            return min(asked, MAX_RETRY_AFTER_S * 1000) / 1000
    return None


def said_at_s(response: Response, now_ms: Callable[[], int]) -> float:
    """The time of an answer in seconds since the epoch: its own `Date`, by the clock of its other
    dates; by ours if it has none."""
    date = response.header(b"date")
    moment = None if date is None else moment_s(date[:_MAX_DATE].decode("latin-1"))
    return now_ms() / 1000 if moment is None else moment


def moment_s(date: str) -> float | None:
    """An HTTP date in seconds since the epoch; None if it is none."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _seconds_until(value: str, now_s: float) -> float | None:
    """Seconds until the moment in `value`, a number of seconds or an HTTP date; None if neither."""
    if value.isascii() and value.isdigit():
        return float(value[:12])
    moment = moment_s(value)
    return None if moment is None else moment - now_s


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_decoder: Final = json.JSONDecoder(parse_constant=_refuse)


def _refused(content: Mapping[str, Any], event_ids: Sequence[str]) -> dict[str, str]:
    pdus = content.get("pdus")
    if not pdus:
        return {}
    errors = ((each, _pdu_error(pdus[each])) for each in event_ids[:_MAX_REFUSED] if each in pdus)
    return {event_id: error for event_id, error in errors if error is not None}


def _pdu_error(result: object) -> str | None:
    if not isinstance(result, dict):
        return "not an object"
    if "error" not in result:
        return None
    error = result["error"]
    if not isinstance(error, str):
        return "an error that is not text"
    return words(error).encode()[:_MAX_ERROR_BYTES].decode(errors="ignore")


def _error_text(response: Response) -> str:
    """Errcode and error of a Matrix error, or the beginning of any other body."""
    document = json_object(response.body)
    if document is None:
        return words(response.body[:1000].decode("utf-8", errors="replace"))
    parts = [document.get("errcode"), document.get("error")]
    return words(": ".join(part for part in parts if isinstance(part, str)))
