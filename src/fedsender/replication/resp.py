"""The part of RESP2, the protocol of Redis, that pub/sub needs; without any I/O.

Requests are arrays of byte strings. Replies are byte strings, integers, errors, nulls and arrays
of these; every size in them is checked against a bound before anything is kept.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Commands of a homeserver are lines of some kilobytes; Redis itself would allow 512 MiB.
MAX_BULK = 8 * 2**20
# A `message` is an array of three; nothing we ask for answers with more.
MAX_ITEMS = 1024
# A line holds a number or an error text.
MAX_LINE = 8192
MAX_DEPTH = 4


class BadReply(ValueError):
    """The answer is not RESP2, or beyond a bound; the connection is of no more use."""


class Missing(enum.Enum):
    """`NEED_DATA`: the next reply is not complete yet."""

    NEED_DATA = "need data"


NEED_DATA = Missing.NEED_DATA


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Redis refuses; the text begins with a word such as `NOAUTH` or `WRONGPASS`."""

    text: str


Reply = bytes | int | ErrorReply | None | list["Reply"]


def request(*arguments: str | bytes) -> bytes:
    """The bytes of one command with its arguments."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        raw = argument.encode() if isinstance(argument, str) else argument
        parts.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(parts)


class ReplyReader:
    """Bytes in by `receive_data`, whole replies out by `next_reply`."""

    def __init__(self, *, max_bulk: int = MAX_BULK) -> None:
        self._max_bulk = max_bulk
        self._buffer = bytearray()
        self._at = 0

    def receive_data(self, data: bytes) -> None:
        """Take bytes of the server, in any pieces; then call `next_reply` until it needs more."""
        self._buffer += data

    def next_reply(self) -> Reply | Missing:
        """The next whole reply, or NEED_DATA. Raises BadReply."""
        self._at = 0
        reply = self._parse(MAX_DEPTH)
        if reply is not NEED_DATA:
            del self._buffer[: self._at]
        elif len(self._buffer) > 2 * self._max_bulk:
            raise BadReply(f"a reply of more than {len(self._buffer)} bytes")
        return reply

    def _parse(self, depth: int) -> Reply | Missing:
        line = self._line()
        if line is None:
            return NEED_DATA
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest.decode(errors="replace"))
        number = _number(rest)
        if kind == b":":
            return number
        if kind == b"$":
            return self._bulk(number)
        if kind == b"*":
            return self._array(number, depth)
        raise BadReply(f"a reply that begins with {kind!r}")

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", self._at, self._at + MAX_LINE)
        if end < 0:
            if len(self._buffer) - self._at >= MAX_LINE:
                raise BadReply("a line that does not end")
            return None
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line

    def _bulk(self, size: int) -> Reply | Missing:
        if size == -1:
            return None
        if not 0 <= size <= self._max_bulk:
            raise BadReply(f"a string of {size} bytes")
        end = self._at + size
        if len(self._buffer) < end + 2:
            return NEED_DATA
        if self._buffer[end : end + 2] != b"\r\n":
            raise BadReply("a string longer than it says")
        content = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return content

    def _array(self, count: int, depth: int) -> Reply | Missing:
        if count == -1:
            return None
        if not 0 <= count <= MAX_ITEMS or not depth:
            raise BadReply(f"an array of {count}, or one too deep")
        items: list[Reply] = []
        for _ in range(count):
            item = self._parse(depth - 1)
            if item is NEED_DATA:
                return NEED_DATA
            items.append(item)
        return items


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not (digits.isdigit() and len(digits) <= 19):
        raise BadReply("a size or number that is none")
    return int(text)
