"""The part of RESP2, the protocol of Redis, that pub/sub needs; without any I/O.

Requests are arrays of byte strings. Replies are byte strings, integers, errors, and flat arrays of
these; every size in them is checked against a bound before anything is kept. That is why hiredis
does not read them: `*1000000000` alone costs it 8 GB of address space, and seconds to drop them.
"""

from __future__ import annotations

from dataclasses import dataclass

# Commands of a homeserver are lines of some kilobytes; Redis itself would allow 512 MiB.
MAX_BULK = 8 * 2**20
# A `message` is an array of three; nothing we ask for answers with more.
MAX_ITEMS = 1024
# A line holds a number or an error text.
MAX_LINE = 8192


class BadReply(ValueError):
    """The answer is not RESP2, or beyond a bound; the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Redis refuses; the text begins with a word such as `NOAUTH` or `WRONGPASS`."""

    text: str


Reply = bytes | int | ErrorReply | list["Reply"]


def request(*arguments: str | bytes) -> bytes:
    """The bytes of one command with its arguments."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        raw = argument.encode() if isinstance(argument, str) else argument
        parts.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(parts)


class _Incomplete(Exception):
    """The rest of the reply has not come yet."""


class ReplyReader:
    """Bytes in by `receive_data`, whole replies out by `next_reply`."""

    def __init__(self, *, max_bulk: int = MAX_BULK) -> None:
        self._max_bulk = max_bulk
        self._buffer = bytearray()

    def receive_data(self, data: bytes) -> None:
        """Take bytes of the server, in any pieces; then call `next_reply` until it is None."""
        self._buffer += data

    def next_reply(self) -> Reply | None:
        """The next reply; None: it is not complete yet. Raises BadReply."""
        try:
            reply, end = self._read(0)
        except _Incomplete:
            if len(self._buffer) > 2 * self._max_bulk:
                raise BadReply(f"a reply of more than {len(self._buffer)} bytes") from None
            return None
        del self._buffer[:end]
        return reply

    def _read(self, start: int, *, item: bool = False) -> tuple[Reply, int]:
        """The reply that begins at `start`, and its end; `item`: it is one of an array."""
        line, at = self._upto(self._buffer.find(b"\r\n", start, start + MAX_LINE), start)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest, at
        if kind == b"-":
            return ErrorReply(rest.decode(errors="replace")), at
        if kind == b":":
            return _number(rest), at
        if kind == b"$":
            size = _number(rest)
            if not 0 <= size <= self._max_bulk:
                raise BadReply(f"a string of {size} bytes")
            return self._upto(at + size, at)
        if kind != b"*" or item:
            raise BadReply(f"a reply that begins with {kind!r}")
        count, items = _number(rest), []
        if not 0 <= count <= MAX_ITEMS:
            raise BadReply(f"an array of {count}")
        for _ in range(count):
            one, at = self._read(at, item=True)
            items.append(one)
        return items, at

    def _upto(self, end: int, start: int) -> tuple[bytes, int]:
        """The bytes from `start` to the CRLF that stands at `end` (-1: none is found)."""
        if end < 0 and len(self._buffer) - start >= MAX_LINE:
            raise BadReply("a line that does not end")
        if end < 0 or len(self._buffer) < end + 2:
            raise _Incomplete
        if self._buffer[end : end + 2] != b"\r\n":
            raise BadReply("a string longer than it says")
        return bytes(self._buffer[start:end]), end + 2


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not (digits.isdigit() and len(digits) <= 19):
        raise BadReply("a size or number that is none")
    return int(text)
