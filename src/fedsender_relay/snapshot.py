"""Snapshots: the state that a sender without the log needs, as of one token.

A snapshot is a directory of files and a manifest that names each with its size and SHA-256. It
never changes. Files are written first, the manifest last, and then the directory gets its name. A
directory without a manifest is unfinished, and is removed. A file's name has the beginning of its
hash. So a file that is the same in two snapshots has the same name in both, and need not be fetched
again. A file is lines of JSON, one array for each row, compressed with gzip.

Tables, each cut into 16 parts by a hash of the first column: the room, the destination of `edus`,
the target of `redactions`. The rows of a room stand together in each of its tables:

- `hosts`: the stays of servers in rooms: for events above `joined_token`, up to and with
  `left_token` (NULL: still there).
- `events`: the `pdu` rows of the homeserver's own events that are the newest of their room, or were
  the newest that some server was to get there in the last 30 days.
- `edus`: the durable EDUs that some consumer may not have.
- `redactions`: the events that are to be sent pruned.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import orjson

from fedsender.files import flush

MANIFEST: Final = "manifest.json"
UNFINISHED: Final = ".unfinished"
"""The end of a directory's name until it is a snapshot."""
FORMAT: Final = 3
PARTS: Final = 16
MAX_MANIFEST_BYTES: Final = 2**20
MAX_FILE_BYTES: Final = 4 * 2**30
"""Bytes of a file, both compressed and decompressed."""
MAX_LINE_BYTES: Final = 2**20
"""Bytes of a row: a row of the log has up to 256 KiB, as a JSON string up to twice as many."""
ROWS_AT_ONCE: Final = 1000
PIECE_BYTES: Final = 2**18

COLUMNS: Final[Mapping[str, tuple[tuple[str, type, bool], ...]]] = {
    "hosts": (
        ("room_id", str, False),
        ("host", str, False),
        ("joined_token", int, False),
        ("left_token", int, True),
    ),
    "events": (
        ("room_id", str, False),
        ("token", int, False),
        ("pdu", str, False),
    ),
    "edus": (
        ("destination", str, False),
        ("token", int, False),
        ("number", int, False),
        ("kind", str, False),
        ("resync", bool, False),
        ("row", str, False),
    ),
    "redactions": (
        ("target", str, False),
        ("event_id", str, False),
        ("ms", int, False),
    ),
}
"""The columns of each table: name, type, whether it may be NULL. An int has 64 bits.

Tokens are the relay's; `ms` are milliseconds since the epoch.
"""

Row = tuple[Any, ...]


class BadSnapshot(Exception):
    """A manifest or a file of a snapshot is damaged. The text names the file and the reason."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a snapshot."""

    name: str
    table: str
    part: int
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A finished snapshot.

    Attributes:
        token: it covers the log up to and with this one.
        files: all but the manifest; `bytes` is the sum of their sizes.
        sha256: the manifest's, in hexadecimal.
    """

    id: str
    token: int
    epoch: str
    directory: Path
    files: tuple[FileInfo, ...]
    bytes: int
    sha256: str
    created_ms: int

    def path(self, name: str) -> Path:
        """The path of one of its files, or of its manifest. Raises KeyError for any other name."""
        if name != MANIFEST and all(file.name != name for file in self.files):
            raise KeyError(name)
        return self.directory / name

    def parts(self, table: str) -> dict[int, FileInfo]:
        """The files of one table; a part without rows has none."""
        return {file.part: file for file in self.files if file.table == table}


def snapshot_id(token: int, epoch: str) -> str:
    """The name of the snapshot of a history at a token."""
    return f"{token:020d}.{epoch[:8]}"


def part_of(key: str) -> int:
    """The part that holds the rows of this room (or destination, or target)."""
    return zlib.crc32(key.encode()) % PARTS


# --- the manifest ---------------------------------------------------------------------------------


def format_manifest(token: int, epoch: str, created_ms: int, files: Iterable[FileInfo]) -> bytes:
    """The bytes of a manifest."""
    document = {
        "format": FORMAT,
        "epoch": epoch,
        "token": token,
        "created_ms": created_ms,
        "files": [asdict(file) for file in files],
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def parse_manifest(content: bytes, directory: Path) -> SnapshotInfo:
    """The snapshot that a manifest describes. Raises BadSnapshot.

    The files themselves are not looked at, but none of their names leads out of the directory.
    """
    where = directory / MANIFEST
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise BadSnapshot(f"{where}: not JSON") from None
    match document:
        case {
            "format": int(version),
            "epoch": str(epoch),
            "token": int(token),
            "created_ms": int(created_ms),
            "files": list(listed),
        } if version == FORMAT and token >= 0 and _is_hex(epoch, 16):
            files = tuple(_parse_file(entry, where) for entry in listed)
        case {"format": int(version)} if version != FORMAT:
            raise BadSnapshot(f"{where}: of format {version}, and {FORMAT} is known")
        case _:
            raise BadSnapshot(f"{where}: not a manifest")
    if len({(file.table, file.part) for file in files}) < len(files):
        raise BadSnapshot(f"{where}: one part of a table has two files")
    return SnapshotInfo(
        id=snapshot_id(token, epoch),
        token=token,
        epoch=epoch,
        directory=directory,
        files=files,
        bytes=sum(file.bytes for file in files),
        sha256=sha256(content).hexdigest(),
        created_ms=created_ms,
    )


def _parse_file(entry: object, where: Path) -> FileInfo:
    match entry:
        case {
            "name": str(name),
            "table": str(table),
            "part": int(part),
            "rows": int(rows),
            "bytes": int(size),
            "sha256": str(digest),
        } if table in COLUMNS and 0 <= part < PARTS and rows > 0 and 0 < size <= MAX_FILE_BYTES:
            if _is_hex(digest, 64) and name == file_name(table, part, digest):
                return FileInfo(name, table, part, rows, size, digest)
    raise BadSnapshot(f"{where}: an entry that describes no file")


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and set(text) <= set("0123456789abcdef")


def file_name(table: str, part: int, digest: str) -> str:
    """The name of a file, from its table, its part and its hash."""
    return f"{table}-{part:02d}-{digest[:16]}.jsonl.gz"


# --- files ----------------------------------------------------------------------------------------


_GZIP: Final = 31
"""zlib's number for a window of 32 KiB in gzip's format; the header then has no time."""


def decode_table(table: str, pieces: Iterable[bytes], where: Path) -> Iterator[Row]:
    """The rows of a file that comes in pieces; holds one of them at a time. Raises BadSnapshot."""
    columns = COLUMNS[table]
    for line in _lines(pieces, where):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise BadSnapshot(f"{where}: a line that is not JSON") from error
        if not (isinstance(row, list) and len(row) == len(columns)):
            raise BadSnapshot(f"{where}: a line that is no row of the table {table}")
        for value, (name, kind, nullable) in zip(row, columns, strict=True):
            if type(value) is not kind and not (nullable and value is None):
                raise BadSnapshot(f"{where}: {name} is not of the type {kind.__name__}")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise BadSnapshot(f"{where}: {name} is out of range")
        yield tuple(row)


def _lines(pieces: Iterable[bytes], where: Path) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(_GZIP)
    rest, size = b"", 0
    for piece in pieces:
        packed = piece
        while True:
            try:
                text = unpacker.decompress(packed, PIECE_BYTES)
            except zlib.error as error:
                raise BadSnapshot(f"{where}: not a file of rows: {error}") from error
            packed = unpacker.unconsumed_tail
            size += len(text)
            *lines, rest = (rest + text).split(b"\n")
            yield from lines
            if len(rest) > MAX_LINE_BYTES or size > MAX_FILE_BYTES:
                raise BadSnapshot(f"{where}: a row, or all of them, are too long")
            if not packed and len(text) < PIECE_BYTES:
                break
        if unpacker.unused_data:
            raise BadSnapshot(f"{where}: more bytes than its end")
    if not unpacker.eof or rest:
        raise BadSnapshot(f"{where}: it ends too early")


def stream_part(info: SnapshotInfo, file: FileInfo) -> Iterator[Row]:
    """The rows of one file, read piece by piece.

    Raises BadSnapshot: at an invalid row, or at the end if the hash or the number of rows is not
    the manifest's. Raises OSError.
    """
    path = info.path(file.name)
    digest = sha256()
    rows = 0
    with path.open("rb") as opened:

        def pieces() -> Iterator[bytes]:
            while piece := opened.read(PIECE_BYTES):
                digest.update(piece)
                yield piece

        for row in decode_table(file.table, pieces(), path):
            rows += 1
            if rows > file.rows:
                break
            yield row
    if rows != file.rows:
        raise BadSnapshot(f"{path}: not the {file.rows} rows that the manifest says")
    if digest.hexdigest() != file.sha256:
        raise BadSnapshot(f"{path}: its SHA-256 is not the manifest's")


# --- making one -----------------------------------------------------------------------------------


class SnapshotTables(Protocol):
    """The contents of a snapshot, as of one moment.

    Attributes:
        token: the newest record's.
        epoch: the history that it belongs to, 16 hexadecimal digits.
    """

    @property
    def token(self) -> int: ...
    @property
    def epoch(self) -> str: ...

    def rows(self, table: str) -> Iterator[Row]:
        """The rows of a table of COLUMNS, always in the same order, a room's together. Blocks."""
        ...


def write_snapshot(
    root: Path, tables: SnapshotTables, now_ms: int, check: Callable[[], None]
) -> SnapshotInfo:
    """Make a snapshot below `root`, in place of any of the same name. Blocks; for a worker thread.

    Args:
        root: the directory of all snapshots.
        now_ms: the time of making it, in milliseconds since the epoch.
        check: called repeatedly; an error of it ends the making.

    Raises OSError, and the errors of `check` and `tables`; then no snapshot was made.
    """
    directory = root / snapshot_id(tables.token, tables.epoch)
    unfinished = directory.with_name(directory.name + UNFINISHED)
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove(unfinished)
    unfinished.mkdir(mode=0o700)
    try:
        files = [
            file for table in COLUMNS for file in _write_table(unfinished, table, tables, check)
        ]
        files.sort(key=lambda file: file.name)
        manifest = format_manifest(tables.token, tables.epoch, now_ms, files)
        with (unfinished / MANIFEST).open("xb") as target:
            target.write(manifest)
            _sync(target)
        check()
        flush(unfinished)
        _remove(directory)
        unfinished.rename(directory)
    except BaseException:
        # What cannot be removed now is removed at the next start.
        with suppress(OSError):
            _remove(unfinished)
        raise
    flush(root)
    return parse_manifest(manifest, directory)


def _write_table(
    directory: Path, table: str, tables: SnapshotTables, check: Callable[[], None]
) -> list[FileInfo]:
    """The files of a table, made side by side in one pass over its rows."""
    parts: dict[int, _Part] = {}
    rows = tables.rows(table)
    with ExitStack() as opened:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            check()
            for row in some:
                part = part_of(row[0])
                if part not in parts:
                    target = opened.enter_context((directory / f"{table}-{part:02d}").open("xb"))
                    parts[part] = _Part(target)
                parts[part].add(row)
        files = []
        for part, writing in sorted(parts.items()):
            check()
            digest, size = writing.finish()
            name = file_name(table, part, digest)
            (directory / f"{table}-{part:02d}").rename(directory / name)
            files.append(FileInfo(name, table, part, writing.rows, size, digest))
    return files


class _Part:
    """A file in the making. Attributes: rows: their number so far."""

    def __init__(self, target: BinaryIO) -> None:
        self.rows = 0
        self._target = target
        self._packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
        self._digest = sha256()
        self._waiting = bytearray()

    def add(self, row: Row) -> None:
        self.rows += 1
        self._waiting += orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        if len(self._waiting) >= PIECE_BYTES // 4:
            self._flush()

    def _flush(self) -> None:
        self._write(self._packer.compress(self._waiting))
        self._waiting.clear()

    def _write(self, packed: bytes) -> None:
        self._digest.update(packed)
        self._target.write(packed)

    def finish(self) -> tuple[str, int]:
        """Make the file durable; return its SHA-256 and its size in bytes."""
        self._flush()
        self._write(self._packer.flush())
        _sync(self._target)
        return self._digest.hexdigest(), self._target.tell()


def _sync(target: BinaryIO) -> None:
    target.flush()
    os.fdatasync(target.fileno())


def _remove(directory: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
