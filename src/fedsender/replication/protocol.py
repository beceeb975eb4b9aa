"""The replication line protocol, without any I/O.

One command is one line: a word, a space, and fields that depend on the word. It has been spoken in
two dialects, and both are in use:

- `OLD`: over TCP only. A client names a stream and the token that it has (`REPLICATE events 53`)
  and the server sends what it missed. `RDATA events 54 <row>`, `POSITION events 54`.
- `TODAY`: over Redis pub/sub, and on TCP by a bare `REPLICATE`. Streams have several writers, so
  `RDATA events master 54 <row>` and `POSITION events master 53 54` name the instance; readers fetch
  what they missed themselves.

Rows that share one token are sent one after the other, all but the last with the word `batch` in
the token's place.

`parse_command` and `format_command` know the words, in modules of their own, and `Connection` knows
where lines end. Bytes go
in by `receive_data`, commands come out of `next_command`, and `encode` makes the bytes of a
command. An error from `next_command` is the peer's fault (`BadLine`), one from `encode` is ours
(`UnsendableCommand`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsender.facts import MAX_LINE_BYTES
from fedsender.replication.commands import Command, Rdata
from fedsender.replication.formatting import UnsendableCommand, format_command
from fedsender.replication.parsing import BadLine, Dialect, parse_command
from fedsender.streams import Json

__all__ = [
    "OWN_MAX_LINE",
    "SYNAPSE_MAX_LINE",
    "BadLine",
    "Batches",
    "Connection",
    "Dialect",
    "UnsendableCommand",
    "format_command",
    "parse_command",
]

# Synapse's own limit on both sides, without the newline.
SYNAPSE_MAX_LINE = 16_384
# Rows of our own kind hold a whole PDU: 65,536 bytes by the specification, up to three times that
# when every character is escaped.
OWN_MAX_LINE = MAX_LINE_BYTES


class Connection:
    """One side's view of a connection: bytes in, commands out, and the reverse.

    Args:
        dialect: how the peer's lines are read; may be changed between two commands.
        max_line: bytes in a line without its end, both ways.
    """

    def __init__(self, *, dialect: Dialect = Dialect.OLD, max_line: int = SYNAPSE_MAX_LINE) -> None:
        self.dialect = dialect
        self._max_line = max_line
        self._buffer = bytearray()
        self._searched = 0

    def receive_data(self, data: bytes) -> None:
        """Take bytes of the peer, in any pieces; ask `next_command` until it says None."""
        self._buffer += data

    def next_command(self) -> Command | None:
        """The next command, or None when more bytes are needed. Blank lines are passed over.

        Raises BadLine for a line that is too long, not UTF-8 or not a command. That line is gone
        then; but after one that is too long nothing that follows makes sense.
        """
        while (line := self._next_line()) is not None:
            command = parse_command(line, self.dialect)
            if isinstance(command, Rdata):
                return Rdata(
                    command.stream, command.instance, command.token, command.row, len(line)
                )
            if command is not None:
                return command
        return None

    def take_raw(self, most: int) -> bytes:
        """Up to `most` of the bytes that are here, as they are: those behind a `File`."""
        piece = bytes(self._buffer[:most])
        del self._buffer[:most]
        self._searched = 0
        return piece

    def encode(self, command: Command) -> bytes:
        """The bytes of a command, line end included. Raises UnsendableCommand."""
        try:
            line = format_command(command).encode()
        except UnicodeEncodeError as bad:
            raise UnsendableCommand(f"{type(command).__name__} is not Unicode") from bad
        if len(line) > self._max_line:
            raise UnsendableCommand(
                f"{type(command).__name__} of {len(line)} bytes, and {self._max_line} are allowed"
            )
        return line + b"\n"

    def _next_line(self) -> str | None:
        end = self._buffer.find(b"\n", self._searched)
        # One more for the carriage return that netcat and telnet may leave.
        if (end if end >= 0 else len(self._buffer)) > self._max_line + 1:
            self._buffer.clear()
            self._searched = 0
            raise BadLine("Line length exceeded")
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        self._searched = 0
        try:
            return line.decode()
        except UnicodeDecodeError as bad:
            raise BadLine("failed to parse line: not UTF-8") from bad


# --- batches --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenBatch:
    rows: list[Json] = field(default_factory=list)
    size: int = 0


class Batches:
    """Collects the rows of one token, for each stream and writer apart.

    Two writers' batches may come interleaved, so rows are never kept by stream alone.

    Args:
        max_rows: rows in one batch.
        max_bytes: bytes of lines in all open batches together.
    """

    def __init__(self, *, max_rows: int = 50_000, max_bytes: int = 8 * 2**20) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._open: dict[tuple[str, str | None], _OpenBatch] = {}
        self._bytes = 0

    def add(self, rdata: Rdata) -> tuple[int, tuple[Json, ...]] | None:
        """The token and all its rows once the last one is here; None while it is a batch.

        Raises BadLine when a bound is passed.
        """
        key = (rdata.stream, rdata.instance)
        batch = self._open.get(key)
        if batch is None:
            if rdata.token is not None:
                return rdata.token, (rdata.row,)
            batch = self._open[key] = _OpenBatch()
        batch.rows.append(rdata.row)
        if rdata.token is not None:
            self.discard(*key)
            return rdata.token, tuple(batch.rows)
        batch.size += rdata.size
        self._bytes += rdata.size
        if len(batch.rows) > self._max_rows or self._bytes > self._max_bytes:
            raise BadLine(f"a batch of {rdata.stream} that does not end")
        return None

    def is_open(self, stream: str, instance: str | None) -> bool:
        """Whether rows of this writer wait for their token."""
        return (stream, instance) in self._open

    def discard(self, stream: str, instance: str | None) -> None:
        """Forget what was collected of a batch, if anything: its rows come again."""
        batch = self._open.pop((stream, instance), None)
        if batch is not None:
            self._bytes -= batch.size

    def clear(self) -> None:
        """Forget all open batches: the connection that they came by is gone."""
        self._open.clear()
        self._bytes = 0
