"""Compaction: the previous snapshot and the log behind it make the next snapshot.

Writers and readers of the log are not disturbed: only sealed segments are read, and nothing is
changed in place. Memory holds one part of the tables at a time, and of the log what the snapshot
will: per room the newest event, and one more for each time that servers came or went.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

import structlog

from fedsender.relay.directories import is_whole, remove_directory, set_aside
from fedsender.relay.disk import Disk
from fedsender.relay.history import Hosts, Pdu, Room, collect, load_rooms
from fedsender.relay.segment import Record
from fedsender.relay.snapshot import (
    MANIFEST,
    PARTS,
    UNFINISHED,
    BadSnapshot,
    FileInfo,
    Row,
    SnapshotInfo,
    encode_table,
    file_name,
    format_manifest,
    parse_manifest,
    part_of,
    read_checked,
    read_part,
    snapshot_id,
)

log = structlog.get_logger()

KEEP_LEFT_MS: Final = 30 * 86_400_000
"""For so long a server that left is told of what made it leave, and a redaction is remembered."""
ROOM_TABLES: Final = ("hosts", "heads", "events")


def compact(
    disk: Disk,
    root: Path,
    previous: SnapshotInfo | None,
    records: Iterator[Record],
    *,
    token: int,
    epoch: str,
    now_ms: int,
    edu_floor: int,
    server_name: str,
    edu_bytes: int = 2**30,
    lenient: bool = False,
    check: Callable[[], None] = lambda: None,
    dropped: Callable[[int], None] = lambda count: None,
) -> SnapshotInfo:
    """Make the snapshot at `token` below `root`. Blocks; for a worker thread.

    Args:
        previous: the snapshot at the token before the first record; None: the records are all.
            It may be of another epoch whose tokens go on in this one.
        records: all up to `token`, ascending.
        edu_floor: every consumer has the EDUs up to this token.
        server_name: the homeserver's.
        edu_bytes: of EDUs no more than this, about, however few consumers take them.
        lenient: of `previous` take what is whole, and do without the rest.
        check: called again and again; what it raises ends the making.
        dropped: told of EDUs for which there was no room, though some consumer may lack them.

    Raises:
        BadSnapshot: `previous` cannot be read; nothing was made.
        DamagedSegment, OSError: nothing was made.
    """
    changes = collect(_checked(records, check), server_name, edu_floor)
    directory = root / snapshot_id(token, epoch)
    with _Making(disk, directory, previous, lenient=lenient, check=check) as making:
        for part in range(PARTS):
            making.rooms(part, changes.rooms.get(part), now_ms)
            lost = making.edus(part, changes.edus.get(part, []), edu_floor, edu_bytes // PARTS)
            if lost:
                dropped(lost)
            making.redactions(part, changes.redactions.get(part, []), now_ms)
        base = previous is not None and previous.base
        check()
        return making.finish(token, epoch, now_ms, base=base)


def import_base(
    disk: Disk,
    root: Path,
    *,
    rooms: Iterable[tuple[str, Sequence[str]]],
    epoch: str,
    now_ms: int,
) -> SnapshotInfo:
    """Make snapshot 0: the rooms there were, and the servers in them, before the log began.

    Blocks; raises OSError.
    """
    parts: defaultdict[int, list[Row]] = defaultdict(list)
    for room_id, hosts in rooms:
        parts[part_of(room_id)] += [(room_id, host, 0, None, None, None) for host in hosts]
    with _Making(disk, root / snapshot_id(0, epoch), None) as making:
        for part in sorted(parts):
            making.write("hosts", part, sorted(set(parts[part])))
        return making.finish(0, epoch, now_ms, base=True)


def _checked(records: Iterator[Record], check: Callable[[], None]) -> Iterator[Record]:
    for record in records:
        check()
        yield record


# --- the new directory ----------------------------------------------------------------------------


class _Making:
    """A snapshot in the making: a directory that goes if it is not finished."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        previous: SnapshotInfo | None,
        *,
        lenient: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk = disk
        self._lenient = lenient
        self._check = check
        self._directory = directory
        self._unfinished = directory.with_name(directory.name + UNFINISHED)
        self._previous = previous
        self._files: list[FileInfo] = []
        self._finished = False

    def __enter__(self) -> _Making:
        root = self._unfinished.parent
        self._disk.make_directory(root)
        self._disk.sync_directory(root.parent)
        remove_directory(self._disk, self._unfinished)
        self._disk.make_directory(self._unfinished)
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._finished:
            # What cannot be removed now is removed at the next start.
            with suppress(OSError):
                remove_directory(self._disk, self._unfinished)

    def _before(self, table: str, part: int) -> FileInfo | None:
        return None if self._previous is None else self._previous.parts(table).get(part)

    def _read(self, table: str, part: int) -> list[Row]:
        self._check()
        file = self._before(table, part)
        if file is None or self._previous is None:
            return []
        try:
            return read_part(self._disk, self._previous, file)
        except (BadSnapshot, FileNotFoundError) as bad:
            if not self._lenient:
                raise
            log.critical("relay_snapshot_part_lost", table=table, part=part, reason=str(bad))
            return []

    def rooms(self, part: int, changes: dict[str, list[Pdu | Hosts]] | None, now_ms: int) -> None:
        """The three tables of rooms, one part of each."""
        hosts = self._before("hosts", part)
        oldest = None if hosts is None else hosts.oldest_ms
        idle = not changes and not self._lenient
        if idle and (oldest is None or oldest >= now_ms - KEEP_LEFT_MS):
            for table in ROOM_TABLES:
                self._keep(self._before(table, part))
            return
        rooms = load_rooms({table: self._read(table, part) for table in ROOM_TABLES})
        if self._lenient:
            for room in rooms.values():
                room.forget_unknown()
        for room_id, story in (changes or {}).items():
            self._check()
            room = rooms.setdefault(room_id, Room())
            for what in story:
                room.apply(what)
        rows: dict[str, list[Row]] = {table: [] for table in ROOM_TABLES}
        for room_id in sorted(rooms):
            self._check()
            rooms[room_id].prune(now_ms - KEEP_LEFT_MS)
            for table, found in rooms[room_id].rows(room_id).items():
                rows[table] += found
        left = [row[4] for row in rows["hosts"] if row[4] is not None]
        self.write("hosts", part, rows["hosts"], min(left, default=None))
        self.write("heads", part, rows["heads"])
        self.write("events", part, rows["events"])

    def edus(self, part: int, new: Sequence[Row], edu_floor: int, room: int) -> int:
        """To-device messages that somebody may lack, and each user's newest device list and keys.

        The oldest go when they are more than `room` bytes; returns how many that somebody may lack.
        """
        rows: list[Row] = []
        newest: dict[tuple[str, str, str], Row] = {}
        for row in [*self._read("edus", part), *new]:
            destination, token, number, kind, resync, text = row
            if kind == "to_device":
                if token > edu_floor:
                    rows.append(row)
                continue
            key = (kind, destination, _user_of(text))
            before = newest.get(key)
            # Who has not got the one before either must be told to ask for all.
            missed = before is not None and before[1] > edu_floor
            newest[key] = (destination, token, number, kind, resync or missed, text)
        rows += newest.values()
        # Newest first; what everybody has comes last.
        rows.sort(key=lambda row: (row[1] > edu_floor, row[1], row[2]), reverse=True)
        kept, lost = _within(rows, room)
        self.write("edus", part, sorted(kept, key=lambda row: row[:3]))
        return sum(row[1] > edu_floor for row in lost)

    def redactions(self, part: int, new: Sequence[Row], now_ms: int) -> None:
        """Redactions of the last weeks."""
        rows = {
            (row[0], row[1]): row
            for row in [*self._read("redactions", part), *new]
            if row[2] >= now_ms - KEEP_LEFT_MS
        }
        self.write("redactions", part, sorted(rows.values()))

    def _keep(self, file: FileInfo | None) -> None:
        """Take a file of the previous snapshot over, if it still is what it was."""
        if file is None or self._previous is None:
            return
        content = read_checked(self._disk, self._previous, file)
        _write(self._disk, self._unfinished / file.name, content)
        self._files.append(file)

    def write(
        self, table: str, part: int, rows: Sequence[Row], oldest_ms: int | None = None
    ) -> None:
        """One part of a table; nothing for no rows."""
        if not rows:
            return
        self._check()
        content = encode_table(rows)
        digest = sha256(content).hexdigest()
        name = file_name(table, part, digest)
        _write(self._disk, self._unfinished / name, content)
        self._files.append(FileInfo(name, table, part, len(rows), len(content), digest, oldest_ms))

    def finish(self, token: int, epoch: str, now_ms: int, *, base: bool) -> SnapshotInfo:
        """Write the manifest and give the directory its name."""
        files = sorted(self._files, key=lambda file: file.name)
        manifest = format_manifest(token, epoch, now_ms, files, base=base)
        _write(self._disk, self._unfinished / MANIFEST, manifest)
        self._disk.sync_directory(self._unfinished)
        # What is damaged may have the same name; it is in the way.
        if self._directory.name in self._disk.list(self._directory.parent):
            set_aside(self._disk, self._directory)
        self._disk.rename(self._unfinished, self._directory)
        self._finished = True
        self._disk.sync_directory(self._directory.parent)
        info = parse_manifest(manifest, self._directory)
        if not is_whole(self._disk, info):
            raise OSError(f"{self._directory}: files are missing")
        return info


def _write(disk: Disk, path: Path, content: bytes) -> None:
    file = disk.open(path, create=True)
    try:
        file.append(content)
        file.fsync()
    finally:
        file.close()


def _within(rows: Sequence[Row], room: int) -> tuple[Sequence[Row], Sequence[Row]]:
    """The first rows, as many as fit, and the others."""
    for number, row in enumerate(rows):
        room -= len(row[5]) + len(row[0])
        if room < 0:
            return rows[:number], rows[number:]
    return rows, ()


def _user_of(text: str) -> str:

    user: str = json.loads(text)[1][2]
    return user
