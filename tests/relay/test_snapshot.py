"""Snapshot files: what is written is what is read, in little memory, or nothing is there."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedsender_relay import snapshot
from fedsender_relay.snapshot import (
    COLUMNS,
    MANIFEST,
    PARTS,
    BadSnapshot,
    Row,
    SnapshotInfo,
    decode_table,
    part_of,
    stream_part,
    write_snapshot,
)
from fedsender_relay.snapshots import list_snapshots

EPOCH = "0123456789abcdef"
MANY = 100_000


@dataclass
class Tables:
    """Rows of a database."""

    found: Mapping[str, Sequence[Row]]
    token: int = 7
    epoch: str = EPOCH

    def rows(self, table: str) -> Iterator[Row]:
        return iter(self.found.get(table, ()))


ROOMS = range(40)
FEW = Tables(
    {
        "hosts": [(f"!{room}", f"{host}.x", room, None) for room in range(40) for host in "ab"]
        + [("!9:ü", "c.x", 1, 5)],
        "events": [(f"!{room}", 3, '["pdu",{"x":"\\n\\ud800"}]') for room in range(40)],
        "edus": [("a.x", 4, 0, "to_device", False, "[]")],
    }
)


def nothing() -> None: ...


def read(info: SnapshotInfo, table: str) -> list[Row]:
    return [row for file in info.files if file.table == table for row in stream_part(info, file)]


def test_what_is_written_is_read_part_by_part_and_the_same_rows_make_the_same_files(
    tmp_path: Path,
) -> None:
    """Each row is in the part of its key; a part that did not change keeps its name, so whoever has
    it need not fetch it again."""
    info = write_snapshot(tmp_path / "snap", FEW, 5, nothing)
    assert (info.token, info.epoch, info.created_ms) == (7, EPOCH, 5)
    for table in COLUMNS:
        assert sorted(read(info, table), key=str) == sorted(FEW.rows(table), key=str)
        for file in info.files:
            if file.table == table:
                rows = list(stream_part(info, file))
                assert {part_of(row[0]) for row in rows} == {file.part}
                assert rows == [row for row in FEW.rows(table) if row in rows]
    assert list_snapshots(tmp_path / "snap") == [info]
    found = {**FEW.found, "events": [*FEW.found["events"][1:], ("!0", 8, "[]")]}
    later = write_snapshot(tmp_path / "snap", replace(FEW, found=found, token=8), 6, nothing)
    assert len({file.name for file in later.files} - {file.name for file in info.files}) == 1
    assert list_snapshots(tmp_path / "snap") == [info, later]


def test_one_of_the_same_name_is_replaced_whatever_is_wrong_with_it(tmp_path: Path) -> None:
    """And what a making that was killed has left is removed."""
    info = write_snapshot(tmp_path, FEW, 5, nothing)
    info.path(info.files[0].name).unlink()
    (tmp_path / f"{info.id}.unfinished").mkdir()
    (tmp_path / f"{info.id}.unfinished" / "hosts-00").touch()
    assert write_snapshot(tmp_path, FEW, 5, nothing) == info
    assert list_snapshots(tmp_path) == [info]
    assert [path.name for path in tmp_path.iterdir()] == [info.id]


class GivenUp(Exception):
    pass


@pytest.mark.slow
def test_08_a_making_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """8: at each time that it asks; and so does a table that breaks off."""
    calls: list[None] = []
    write_snapshot(tmp_path / "all", FEW, 5, lambda: calls.append(None))
    assert len(calls) > 2 * PARTS
    for limit in range(len(calls)):
        left = iter(calls[:limit])

        def give_up(left: Iterator[None] = left) -> None:
            for _ in left:
                return
            raise GivenUp

        with pytest.raises(GivenUp):
            write_snapshot(tmp_path / "snap", FEW, 5, give_up)
        assert list((tmp_path / "snap").iterdir()) == []


def pairs(number: int) -> Iterator[Row]:
    return ((f"!room{each // 40}", f"server{each % 40}.example", 3, None) for each in range(number))


@dataclass
class Streamed(Tables):
    def rows(self, table: str) -> Iterator[Row]:
        return pairs(MANY) if table == "hosts" else iter(())


@pytest.mark.slow
def test_it_is_written_and_read_in_little_memory(tmp_path: Path) -> None:
    """100,000 pairs are 30 MB as objects."""
    tracemalloc.start()
    try:
        info = write_snapshot(tmp_path, Streamed({}), 5, nothing)
        made = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        rows = sum(1 for file in info.files for _ in stream_part(info, file))
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == MANY
    assert made < 8 * 2**20
    assert taken < 4 * 2**20


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1]", "no row"),
        (b'["!r","[]",3]', "token is not of the type int"),
        (b'["!r",true,"[]"]', "token is not of the type int"),
        (b'["!r",9223372036854775808,"[]"]', "out of range"),
        (b'["!r",1,null]', "pdu is not of the type str"),
        (b'["!r",1,"\\ud800"]', "not JSON"),
        (b"[" * 2000, "not JSON"),
        (b"", "not JSON"),
        (b'["!r",1,"[]"]\n["!r"', "no row|not JSON"),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_its_reason(content: bytes, reason: str) -> None:
    with pytest.raises(BadSnapshot, match=reason):
        list(decode_table("events", [gzip.compress(content + b"\n")], Path("events-00")))


@pytest.mark.slow
def test_a_file_that_is_cut_or_goes_on_or_unpacks_to_too_much_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound holds for what is in it, too: a megabyte of it may be a gigabyte of spaces."""
    line = b'["!r",1,"[]"]\n'
    good = gzip.compress(line)
    assert list(decode_table("events", [good[:9], good[9:]], Path("x"))) == [("!r", 1, "[]")]
    assert list(decode_table("events", [gzip.compress(b"")], Path("x"))) == []
    for bad in (good[:-1], b"", good + b"x", good + good, gzip.compress(line[:-1])):
        with pytest.raises(BadSnapshot):
            list(decode_table("events", [bad], Path("x")))
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = [packer.compress(b" " * 2**20) for _ in range(64)]
    tracemalloc.start()
    try:
        with pytest.raises(BadSnapshot, match="too long"):
            list(decode_table("events", [b"".join(bomb)], Path("x")))
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(snapshot, "MAX_FILE_BYTES", 2**20)
    with pytest.raises(BadSnapshot, match="too long"):
        list(decode_table("events", [gzip.compress(line * 100_000)], Path("x")))


def test_the_manifest_is_compared_with_what_is_read(tmp_path: Path) -> None:
    """More rows, fewer, or other bytes."""
    info = write_snapshot(tmp_path, FEW, 5, nothing)
    file = next(file for file in info.files if file.table == "hosts")
    for wrong in (replace(file, rows=file.rows - 1), replace(file, rows=file.rows + 1)):
        with pytest.raises(BadSnapshot, match="rows that the manifest says"):
            list(stream_part(info, wrong))
    path = info.path(file.name)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 9))
    with pytest.raises(BadSnapshot, match="SHA-256"):
        list(stream_part(info, file))
    assert info.path(MANIFEST).exists()
