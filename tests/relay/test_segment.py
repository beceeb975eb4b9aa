"""One file of the log, byte by byte; the disk that it lies on; and fuzzing of all parsers."""

import errno
import os
from pathlib import Path

import pytest
from tests.relay.fuzz_lines import TARGETS, fuzz
from tests.relay.log_support import hosts, key, pdu
from tests.relay.memory_disk import MemoryDisk

from fedsender.intake.rows import prepare
from fedsender.relay.disk import Disk, RealDisk, read_file, write_file
from fedsender.relay.segment import (
    FRAME_BYTES,
    HEADER_BYTES,
    READ_BYTES,
    TRAILER_BYTES,
    BadFrame,
    DamagedSegment,
    Header,
    encode_header,
    encode_mark,
    encode_record,
    encode_trailer,
    examine,
    read_frames,
    read_header,
    read_trailer,
    record_of,
    segment_name,
)

HEADER = Header("9f1c0a77d2e4b358", 7, 3)


def written(directory: Path, *parts: bytes) -> Path:
    path = directory / segment_name(HEADER.first)
    path.write_bytes(encode_header(HEADER) + b"".join(parts))
    return path


def record(token: int, size: int = 0) -> bytes:
    lines = prepare([pdu(token, size), hosts(token)]).lines(token)
    return encode_record(token, 1000 + token, key(token), lines)


def test_a_frame_is_what_the_format_says(tmp_path: Path) -> None:
    """Files on disk outlive versions: the layout is fixed by its bytes."""
    assert encode_header(HEADER) == (
        b"fedsender-log 1 9f1c0a77d2e4b358 00000000000000000007 00000000000000000003 963524de\n"
    )
    assert len(encode_header(HEADER)) == HEADER_BYTES
    frame = encode_record(7, 5, b"k" * 16, b"RDATA events 7 []\n")
    assert (
        frame.hex()
        == ("0000001217b3c4b400000000000000070000000000000005" + "6b" * 16)
        + b"RDATA events 7 []\n".hex()
    )
    assert len(encode_trailer(7, 1, 5)) == TRAILER_BYTES
    assert len(encode_mark(7, 5)) == FRAME_BYTES + len("DURABLE\n")
    disk = RealDisk()
    path = written(tmp_path, record(7), record(8), encode_mark(8, 5), encode_trailer(8, 2, 5))
    file = disk.open(path)
    assert read_header(file, path) == HEADER
    first, *_ = read_frames(file, HEADER_BYTES, file.size())
    assert first.key == key(7)
    assert record_of(first).rows == (pdu(7), hosts(7))
    found = examine(file, path, HEADER)
    assert (found.last, found.sealed, found.torn) == (8, True, False)
    trailer = read_trailer(file)
    assert trailer is not None
    assert trailer.token == 8
    file.close()


def test_frames_across_the_pieces_of_a_read(tmp_path: Path) -> None:
    """A frame may lie across two reads, and be larger than one."""
    path = written(tmp_path, *(record(token, token * 997 % 60_000) for token in range(7, 107)))
    file = RealDisk().open(path)
    assert file.size() > 2 * READ_BYTES
    for chunk in (50, 4096, READ_BYTES):
        tokens = [frame.token for frame in read_frames(file, HEADER_BYTES, file.size(), chunk)]
        assert tokens == list(range(7, 107))
    file.close()


@pytest.mark.parametrize("cut", [1, 39, 40, 41, 200])
def test_what_is_cut_off_was_never_told(tmp_path: Path, cut: int) -> None:
    """Torn tail: the last whole frame is the end, and nothing behind it is believed."""
    path = written(tmp_path, record(7), encode_mark(7, 5), record(8)[:cut])
    file = RealDisk().open(path)
    found = examine(file, path, HEADER)
    assert (found.last, found.sealed, found.torn) == (7, False, True)
    with pytest.raises(BadFrame):
        list(read_frames(file, HEADER_BYTES, file.size()))
    file.close()


@pytest.mark.parametrize("mark", [encode_mark(9, 5), encode_trailer(9, 3, 5), b""])
@pytest.mark.parametrize("far", [False, True])
def test_damage_is_told_from_a_torn_tail(tmp_path: Path, mark: bytes, far: bool) -> None:
    """A mark behind a bad frame proves that it had been durable; holes in a group that was being
    written prove nothing."""
    size = 60_000 * far
    good = [record(token, size) for token in range(7, 10)]
    more = [record(token, 60_000) for token in range(10, 50)] * far
    spoiled = bytearray(good[1])
    spoiled[100] ^= 1
    path = written(tmp_path, good[0], bytes(spoiled), good[2], mark, *more)
    file = RealDisk().open(path)
    if mark:
        with pytest.raises(DamagedSegment) as damage:
            examine(file, path, HEADER)
        assert (damage.value.token, damage.value.offset) == (8, HEADER_BYTES + len(good[0]))
    else:
        assert examine(file, path, HEADER).last == 7
    file.close()


@pytest.mark.parametrize("kind", [RealDisk, MemoryDisk])
def test_the_disks_do_the_same(kind: type[RealDisk | MemoryDisk], tmp_path: Path) -> None:
    """What tests and simulation use behaves as the real one, error for error."""
    disk: Disk = kind()
    root = tmp_path / "a"
    disk.make_directory(root / "b")
    disk.make_directory(root / "b")
    assert disk.list(root) == ["b"]
    assert disk.list(root / "none") == []
    with pytest.raises(FileNotFoundError):
        disk.open(root / "x")
    file = disk.open(root / "x", create=True)
    file.append(b"12345")
    file.append(b"678")
    file.fsync()
    assert (file.pread(3, 1), file.pread(9, 6), file.pread(1, 8), file.size()) == (
        b"234",
        b"78",
        b"",
        8,
    )
    file.truncate(4)
    file.append(b"9")
    file.close()
    assert read_file(disk, root / "x", 5) == b"12349"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_file(disk, root / "x", 4)
    reader = disk.open(root / "x")
    with pytest.raises(OSError, match=r"."):
        reader.append(b"1")
    write_file(disk, root / "b" / "y", b"other")
    write_file(disk, root / "x", b"new")
    assert reader.pread(9, 0) == b"12349"
    reader.close()
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        disk.remove(root / "b")
    disk.rename(root / "b", root / "c")
    assert disk.list(root / "c") == ["y"]
    disk.remove(root / "c" / "y")
    disk.remove(root / "c" / "y")
    disk.remove(root / "c")
    disk.sync_directory(root)
    held = disk.lock(root / "lock")
    with pytest.raises(BlockingIOError):
        disk.lock(root / "lock")
    held.close()
    disk.lock(root / "lock").close()
    assert disk.list(root) == ["lock", "x"]
    assert 0 < disk.space(root).free <= disk.space(root).total
    again = disk.open(root / "x", create=True)
    assert again.size() == 0
    again.close()


def test_files_of_the_log_are_nobody_elses(tmp_path: Path) -> None:
    """I10: files that hold content have mode 0600."""
    disk = RealDisk()
    disk.make_directory(tmp_path / "log")
    disk.open(tmp_path / "log" / "x", create=True).close()
    write_file(disk, tmp_path / "log" / "y", b"")
    disk.lock(tmp_path / "log" / "z").close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "log").iterdir()}
    assert modes == {"x": 0o600, "y": 0o600, "z": 0o600}
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("target", TARGETS)
def test_parsers_take_anything(target: str) -> None:
    """Issue: fuzzing of every parser; the million is `python -m tests.relay.fuzz_lines 1000000`."""
    fuzz(target, 1000, seed=1)
