"""Snapshots: what a sender must know that has none of the log, as of one token.

A snapshot is a directory of Parquet files and a manifest that names each with its size and SHA-256.
It never changes. Files are written first, the manifest last, and then the directory gets its name:
one without a manifest is unfinished, and removed. A file's name holds the beginning of its hash, so
that one that stayed the same from one snapshot to the next has the same name in both, and who has
it need not fetch it again. It is a copy all the same: what spoils one must not spoil the other.

Tables, each cut into 16 parts by a hash of the room (of the destination for `edus`, of the target
for `redactions`), ordered inside a part:

- `hosts`: who is in which room (`left_token` NULL), since after `joined_token`; and who was in it
  up to and with `left_token`, with the newest event that this server was to get until then.
- `heads`: the newest event of the homeserver's own per room.
- `events`: the `pdu` rows of the events that the two name.
- `edus`: the durable EDUs that some consumer may not have.
- `redactions`: which events are to go out pruned.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from fedsender.relay.disk import Disk, read_file

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
PARTS: Final = 16
MAX_MANIFEST_BYTES: Final = 2**20
MAX_FILE_BYTES: Final = 4 * 2**30

COLUMNS: Final[Mapping[str, tuple[tuple[str, str, bool], ...]]] = {
    "hosts": (
        ("room_id", "string", False),
        ("host", "string", False),
        ("joined_token", "int64", False),
        ("left_token", "int64", True),
        ("left_ms", "int64", True),
        ("left_event_id", "string", True),
    ),
    "heads": (
        ("room_id", "string", False),
        ("token", "int64", False),
        ("event_id", "string", False),
    ),
    "events": (
        ("event_id", "string", False),
        ("room_id", "string", False),
        ("token", "int64", False),
        ("pdu", "string", False),
    ),
    "edus": (
        ("destination", "string", False),
        ("token", "int64", False),
        ("number", "int32", False),
        ("kind", "string", False),
        ("resync", "bool", False),
        ("row", "string", False),
    ),
    "redactions": (
        ("target", "string", False),
        ("event_id", "string", False),
        ("ms", "int64", False),
    ),
}
"""The columns of each table: name, type, whether it may be NULL.

Tokens are the relay's; `ms` are milliseconds since the epoch.
"""

Row = tuple[Any, ...]


class BadSnapshot(Exception):
    """A manifest or a file of a snapshot is not what it should be; names the file, and why."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a snapshot.

    Attributes:
        oldest_ms: of the rows that leave the snapshot by age the oldest one's time, if any.
    """

    name: str
    table: str
    part: int
    rows: int
    bytes: int
    sha256: str
    oldest_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A finished snapshot.

    Attributes:
        token: it holds what the log said up to and with this one.
        files: without the manifest; `bytes` is the sum of theirs.
        sha256: of the manifest, in hexadecimal.
        base: it holds rooms that there were before the log began, so the log alone, though it
            may begin at 1, does not make it anew.
    """

    id: str
    token: int
    epoch: str
    directory: Path
    files: tuple[FileInfo, ...]
    bytes: int
    sha256: str
    created_ms: int
    base: bool = False

    def path(self, name: str) -> Path:
        """Where a file of it, or its manifest, is; raises KeyError for any other name."""
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


def format_manifest(
    token: int, epoch: str, created_ms: int, files: Iterable[FileInfo], *, base: bool = False
) -> bytes:
    """The bytes of a manifest."""
    listed = [
        {
            "name": file.name,
            "table": file.table,
            "part": file.part,
            "rows": file.rows,
            "bytes": file.bytes,
            "sha256": file.sha256,
            "oldest_ms": file.oldest_ms,
        }
        for file in files
    ]
    document = {
        "format": FORMAT,
        "epoch": epoch,
        "token": token,
        "created_ms": created_ms,
        "base": base,
        "files": listed,
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def parse_manifest(content: bytes, directory: Path) -> SnapshotInfo:
    """The snapshot that a manifest describes. Raises BadSnapshot.

    Of its files nothing is looked at; but none of their names leads out of the directory.
    """
    where = directory / MANIFEST
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise BadSnapshot(f"{where}: not JSON") from None
    if isinstance(document, dict):
        document.setdefault("base", True)  # Who does not say so may have one.
    match document:
        case {
            "format": int(version),
            "epoch": str(epoch),
            "token": int(token),
            "created_ms": int(created_ms),
            "base": bool(base),
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
        base=base,
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
            "oldest_ms": (int() | None) as oldest_ms,
        } if table in COLUMNS and 0 <= part < PARTS and rows > 0 and 0 < size <= MAX_FILE_BYTES:
            if _is_hex(digest, 64) and name == file_name(table, part, digest):
                return FileInfo(name, table, part, rows, size, digest, oldest_ms)
    raise BadSnapshot(f"{where}: an entry that describes no file")


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and set(text) <= set("0123456789abcdef")


def file_name(table: str, part: int, digest: str) -> str:
    """The name of a file by what is in it."""
    return f"{table}-{part:02d}-{digest[:16]}.parquet"


# --- files ----------------------------------------------------------------------------------------


def _schema(table: str) -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field(name, pa.type_for_alias(kind), nullable=nullable)
            for name, kind, nullable in COLUMNS[table]
        ]
    )


def encode_table(table: str, rows: Sequence[Row]) -> bytes:
    """Rows, in their order, as a Parquet file: the same rows make the same bytes."""
    # Here and below: who only follows a log need not hold these libraries in memory.
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(table)
    columns = zip(*rows, strict=True)
    arrays = [
        pa.array(column, type=kind.type) for column, kind in zip(columns, schema, strict=True)
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode_table(table: str, content: bytes, where: Path) -> list[Row]:
    """The rows of a Parquet file. Raises BadSnapshot."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(table)
    try:
        found = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
        columns = [found.column(field.name).cast(field.type).to_pylist() for field in schema]
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        what = f"not a file of the table {table}: {type(error).__name__}"
        raise BadSnapshot(f"{where}: {what}") from error
    for field, column in zip(schema, columns, strict=True):
        if not field.nullable and None in column:
            raise BadSnapshot(f"{where}: {field.name} without a value")
    return list(zip(*columns, strict=True))


def read_checked(disk: Disk, info: SnapshotInfo, file: FileInfo) -> bytes:
    """The bytes of one file. Raises BadSnapshot where the hash is another; OSError."""
    path = info.path(file.name)
    content = read_file(disk, path, MAX_FILE_BYTES)
    if sha256(content).hexdigest() != file.sha256:
        raise BadSnapshot(f"{path}: its SHA-256 is not the manifest's")
    return content


def read_part(disk: Disk, info: SnapshotInfo, file: FileInfo) -> list[Row]:
    """The rows of one file. Raises BadSnapshot, also where the hash is another; OSError."""
    path = info.path(file.name)
    rows = decode_table(file.table, read_checked(disk, info, file), path)
    if len(rows) != file.rows:
        raise BadSnapshot(f"{path}: {len(rows)} rows, and the manifest says {file.rows}")
    return rows
