"""The receiving half of HTTP/1.1: bytes in, requests out; no I/O."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import httptools

MAX_BODY = 64 * 2**20


@dataclass(slots=True, eq=False)
class Request:
    """One request as it arrives.

    Attributes:
        headers: names in lower case; of a repeated one the last.
        number: how many requests came before it on its connection.
        complete: its last byte is there.
    """

    number: int
    method: str = ""
    target: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False


class RequestReader:
    """Reads the requests of one connection.

    Attributes:
        arriving: the one that is not there in whole.
        whole: those that are, oldest first.
    """

    def __init__(self, began: Callable[[Request], None]) -> None:
        """`began` is called as soon as a request's head is there."""
        self.arriving: Request | None = None
        self.whole: deque[Request] = deque()
        self._began = began
        self._count = 0
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Take in what arrived; raises httptools.HttpParserError."""
        self._parser.feed_data(data)

    # --- called by the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.arriving = Request(self._count)
        self._count += 1

    def on_url(self, url: bytes) -> None:
        self._request.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._request.method = self._parser.get_method().decode("latin-1")
        self._began(self._request)

    def on_body(self, piece: bytes) -> None:
        self._request.body += piece
        if len(self._request.body) > MAX_BODY:
            raise ValueError("body too large")

    def on_message_complete(self) -> None:
        self._request.complete = True
        self.whole.append(self._request)
        self.arriving = None

    @property
    def _request(self) -> Request:
        assert self.arriving is not None
        return self.arriving


def encode_answer(status: int, body: bytes, **headers: object) -> bytes:
    """The bytes of an answer; underscores in the names of headers stand for hyphens."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
