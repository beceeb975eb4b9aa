"""The commands of Synapse's processes, as they publish them: a line each, without any I/O.

A line is a word, a space, and fields that depend on the word. Streams may have several writers, so
`RDATA events master 54 <row>` and `POSITION events master 53 54` name the instance. Rows that share
one token come one after the other, all but the last with the word `batch` in the token's place;
`RdataBatches` collects them.

Each command is one frozen value, and `SPOKEN` is the table of their lines, both ways. A word that
is not in it is `Unknown`. An error of `parse` is the fault of who sent the line (`BadLine`), one of
`format` is ours (`UnsendableCommand`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import call
from typing import Any, Final, Generic, NamedTuple, TypeVar

from fedsender.streams import Json


class BadLine(ValueError):
    """The peer sent a line that is no command; the text has its word, never the row's content."""


class UnsendableCommand(ValueError):
    """A command of ours that cannot be a line: a space in a field, or more bytes than allowed."""


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replicate:
    """Asks every writer for its POSITION."""


@dataclass(frozen=True, slots=True)
class Position:
    """A writer stands at `token`, and wrote nothing in (previous, token]."""

    stream: str
    instance: str
    previous: int
    token: int


@dataclass(frozen=True, slots=True)
class Rdata:
    """One row of a stream.

    Attributes:
        token: None is `batch`: the token comes with a later row of the same writer.
        size: characters of its line; 0 for a row that was made here.
    """

    stream: str
    instance: str
    token: int | None
    row: Json
    size: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class FederationAck:
    """A sender has the `federation` stream up to `token`; the main process may forget it."""

    instance: str
    token: int


@dataclass(frozen=True, slots=True)
class RemoteServerUp:
    """A sign of life of this server."""

    server: str


@dataclass(frozen=True, slots=True)
class LockReleased:
    """A lock between workers is free."""

    instance: str
    lock: str
    key: str

    @property
    def names(self) -> list[str]:
        """The three names, as the line has them."""
        return [self.instance, self.lock, self.key]

    @classmethod
    def of_row(cls, names: Json) -> LockReleased:
        """The command of a line's JSON. Raises BadLine."""
        if isinstance(names, list) and len(names) == 3:
            instance, lock, key = names
            if isinstance(instance, str) and isinstance(lock, str) and isinstance(key, str):
                return cls(instance, lock, key)
        raise BadLine("expected three names")


@dataclass(frozen=True, slots=True)
class Unknown:
    """A word without meaning for us; new ones appear over time."""

    word: str
    rest: str = field(default="", repr=False)


Command = Replicate | Position | Rdata | FederationAck | RemoteServerUp | LockReleased | Unknown


# --- fields ---------------------------------------------------------------------------------------

_MAX_TOKEN = 2**63 - 1
_INTEGER_TEXT = re.compile(r"-?[0-9]{1,19}\Z")


class Kind(NamedTuple):
    """One kind of field: the functions from a text to its value, and back."""

    read: Callable[[str], Any]
    write: Callable[[Any], str]


def _read_word(text: str) -> str:
    if " " in text:
        raise BadLine("expected one word")
    return text


def write_word(text: str) -> str:
    """The text of a field that is one word. Raises UnsendableCommand."""
    if not text or " " in text:
        raise UnsendableCommand("a field that is empty or has a space in it")
    return text


def read_integer(text: str) -> int:
    """The number of a field. Raises BadLine."""
    if not _INTEGER_TEXT.match(text) or abs(int(text)) > _MAX_TOKEN:
        # Without the text: where a field is missing it is the row, which may hold an access token.
        raise BadLine("the token is not a number")
    return int(text)


def _no_constant(name: str) -> Json:
    raise BadLine(f"{name} is not JSON")


_decode_json = json.JSONDecoder(parse_constant=_no_constant).decode


def _read_json(text: str) -> Json:
    # A line of only '[' exhausts the stack of the parser; that too is the peer's mistake.
    try:
        return _decode_json(text)
    except (ValueError, RecursionError) as bad:
        raise BadLine("the row is not JSON") from bad


def _write_json(value: Json) -> str:
    if isinstance(value, bytes):  # JSON text already.
        return value.decode()
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as bad:
        raise UnsendableCommand(f"a row that is not JSON: {bad}") from bad


WORD = Kind(str, write_word)
LAST_WORD = Kind(_read_word, write_word)
"""A word after which no other field follows: a split does not find the spaces in it."""
INTEGER = Kind(read_integer, str)
TOKEN = Kind(
    lambda text: None if text == "batch" else read_integer(text),
    lambda token: "batch" if token is None else str(token),
)
ROW = Kind(_read_json, _write_json)

# --- lines ----------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """The line of one command.

    Attributes:
        parse: makes the command from what follows the word and its space. Raises BadLine.
        format: makes what follows the word and its space. Raises UnsendableCommand.
    """

    word: str
    command: type
    parse: Callable[[str], Any]
    format: Callable[[Any], str]


def layout(
    word: str,
    command: type,
    *fields: tuple[str, Kind],
    make: Callable[..., Any] | None = None,
) -> Layout:
    """The line of a command as fields with a space between them, in this order.

    Args:
        fields: attributes of the command, with their kinds.
        make: the command of the values of these fields; by default the command's class.
    """
    made, count = make or command, len(fields)
    readers = [kind.read for _, kind in fields]
    writers = [(name, kind.write) for name, kind in fields]

    def parse(rest: str) -> Any:
        parts = rest.split(" ", count - 1)
        if len(parts) != count or "" in parts:
            raise BadLine(f"expected {count} fields")
        return made(*map(call, readers, parts))

    def format(value: Any) -> str:
        return " ".join([write(getattr(value, name)) for name, write in writers])

    return Layout(word, command, parse, format)


C = TypeVar("C")


class Vocabulary(Generic[C]):
    """Commands and their lines, both ways.

    Of two layouts of one word, or of one command, the later one counts.
    """

    def __init__(self, *layouts: Layout) -> None:
        self._parsers = {each.word: each.parse for each in layouts}
        self._formatters = {each.command: (each.word, each.format) for each in layouts}

    def parse(self, line: str) -> C | Unknown | None:
        """The command in one line without its end; None for a blank one.

        An unknown word is `Unknown`, with any rest. Raises BadLine, which names the word and the
        fault but not the content.
        """
        if not line.strip():
            return None
        word, _, rest = line.partition(" ")
        parser = self._parsers.get(word)
        if parser is None:
            return Unknown(word, rest)
        try:
            command: C = parser(rest)
        except BadLine as bad:
            raise BadLine(f"failed to parse line: {word}: {bad}") from bad
        if isinstance(command, Rdata):
            # Not by `replace`: this is done for every row of a burst.
            object.__setattr__(command, "size", len(line))
        return command

    def format(self, command: C | Unknown) -> str:
        """The line of a command, without its end. Raises UnsendableCommand."""
        if isinstance(command, Unknown):
            line = f"{write_word(command.word)} {command.rest}"
        else:
            word, format = self._formatters[type(command)]
            line = f"{word} {format(command)}"
        if "\n" in line or "\r" in line:
            raise UnsendableCommand(f"{type(command).__name__} with a line end in it")
        return line


_STREAM, _INSTANCE = ("stream", WORD), ("instance", WORD)
LAYOUTS: Final = (
    # Synapse writes the space, and ignores what follows it.
    Layout("REPLICATE", Replicate, lambda rest: Replicate(), lambda command: ""),
    layout("POSITION", Position, _STREAM, _INSTANCE, ("previous", INTEGER), ("token", INTEGER)),
    layout("RDATA", Rdata, _STREAM, _INSTANCE, ("token", TOKEN), ("row", ROW)),
    layout("FEDERATION_ACK", FederationAck, _INSTANCE, ("token", INTEGER)),
    layout("REMOTE_SERVER_UP", RemoteServerUp, ("server", LAST_WORD)),
    layout("LOCK_RELEASED", LockReleased, ("names", ROW), make=LockReleased.of_row),
)
SPOKEN: Final = Vocabulary[Command](*LAYOUTS)


# --- batches --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _OpenBatch:
    rows: list[Json] = field(default_factory=list)
    size: int = 0


class RdataBatches:
    """Collects the rows of one token, separately for each stream and writer.

    Two writers' batches may come interleaved, so rows are never kept by stream alone.

    Args:
        max_rows: rows in one batch.
        max_bytes: bytes of lines in all open batches together.
    """

    def __init__(self, *, max_rows: int = 50_000, max_bytes: int = 8 * 2**20) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._open: dict[tuple[str, str], _OpenBatch] = {}
        self._bytes = 0

    def add(self, rdata: Rdata) -> tuple[int, tuple[Json, ...]] | None:
        """The token and all its rows once the last one is here; None before that.

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

    def is_open(self, stream: str, instance: str) -> bool:
        """Whether rows of this writer wait for their token."""
        return (stream, instance) in self._open

    def discard(self, stream: str, instance: str) -> None:
        """Forget the collected rows of a batch, if there are any: they come again."""
        batch = self._open.pop((stream, instance), None)
        if batch is not None:
            self._bytes -= batch.size

    def clear(self) -> None:
        """Forget all open batches: their connection is gone."""
        self._open.clear()
        self._bytes = 0
