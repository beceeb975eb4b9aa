"""The ledger: lines that outlive crashes, full disks and time."""

import dataclasses
import os
import random
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
from trio.testing import MockClock

from fedsender.config.sections import Ledger as Settings
from fedsender.ledger import (
    LINE_VERSION,
    NOTES,
    DevicePoke,
    Ledger,
    Line,
    SentPdu,
    TransactionRecord,
    open_ledger,
)
from fedsender.runtime import Runtime
from fedsender.segments import (
    close_torn_segments,
    expired,
    last_answers,
    read_lines,
    segments,
    segments_of,
    torn_segments,
)
from fedsender.telemetry import Count
from fedsender_lab.testing.clock import virtual_runtime

SCHEMA = Path(__file__).parents[1] / "docs" / "ledger.md"


def runtime() -> Runtime:
    return virtual_runtime(random.Random(0), now_ms=lambda: 1_800_000_000_000)


def settings(directory: Path, **others: float) -> Settings:
    """Also those below the bounds of a configuration."""
    return Settings(directory=directory).model_copy(update=others)


def a_daemons(directory: Path, **others: float) -> AbstractAsyncContextManager[Ledger]:
    return open_ledger(settings(directory, **others), "fed1", "b00t", runtime(), Count())


def ledger(directory: Path, *, seconds: float = 3600, size: int = 2**20) -> Ledger:
    return Ledger(
        settings(directory), "fed1", "b00t", Count(), segment_s=seconds, segment_bytes=size
    )


def line(destination: str = "a.example", **values: Any) -> Line:
    return Line(ms=5, destination=destination, outcome="delivered", **values)


async def test_a_line_has_these_fields_and_no_others(tmp_path: Path) -> None:
    """What others script against; raise LINE_VERSION when one changes its meaning."""
    written = ledger(tmp_path)
    written.record(
        Line(
            ms=5,
            destination="a.example",
            outcome="delivered",
            transaction_id="t.1",
            attempt=2,
            record=TransactionRecord(
                pdus=[SentPdu("$e", "!r", 7, "catch_up", (3, 7)), SentPdu("$f", "!r", 8, "live")],
                edus={"m.typing": 1},
                outbox=[40],
                device_lists=[DevicePoke(41, "@a:hs.example", "PHONE")],
            ),
            bytes=100,
            status=200,
            refused={"$f": "no"},
            lsso=8,
            took_ms=12,
            reused=True,
        )
    )
    written.settled("a.example")
    written.close()
    (path,) = segments(tmp_path)

    assert list(read_lines(path)) == [
        {
            "v": LINE_VERSION,
            "ms": 5,
            "instance": "fed1",
            "destination": "a.example",
            "transaction_id": "t.1",
            "attempt": 2,
            "outcome": "delivered",
            "status": 200,
            "reason": None,
            "pdus": [
                {
                    "event_id": "$e",
                    "room_id": "!r",
                    "stream_ordering": 7,
                    "lane": "catch_up",
                    "supersedes": [3, 7],
                },
                {"event_id": "$f", "room_id": "!r", "stream_ordering": 8, "lane": "live"},
            ],
            "edus": {"m.typing": 1},
            "outbox": [40],
            "device_lists": [[41, "@a:hs.example", "PHONE"]],
            "refused": {"$f": "no"},
            "lsso": 8,
            "bytes": 100,
            "took_ms": 12,
            "reused": True,
            "position": None,
        }
    ]
    assert path.name == "fed1.b00t.000001.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_line_is_in_the_file_before_record_returns(tmp_path: Path) -> None:
    """I9: what the databases say afterwards can be read here."""
    written = ledger(tmp_path)
    written.record(line())

    (path,) = segments(tmp_path)
    assert path.suffix == ".open"
    assert len(list(read_lines(path))) == 1
    written.close()


async def test_a_new_segment_begins_by_time_and_by_size(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    written = ledger(tmp_path, seconds=60, size=700)
    for _ in range(3):
        written.record(line())
    assert len(segments(tmp_path)) == 1
    written.record(line())
    assert len(segments(tmp_path)) == 2
    await trio.sleep(61)
    written.record(line())
    written.settled("a.example")
    written.close()

    assert [len(list(read_lines(path))) for path in segments(tmp_path)] == [3, 1, 1]


@pytest.mark.parametrize("closed_at", range(6))
def test_a_segment_that_is_closed_while_we_look_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_at: int
) -> None:
    """Whenever the daemon renames it. A directory that is read meanwhile may have neither name."""
    (tmp_path / "f.b.000001.jsonl").write_text("{}")
    (tmp_path / "f.b.000002.open").write_text("{}")
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls == closed_at + 1:
            os.replace(tmp_path / "f.b.000002.open", tmp_path / "f.b.000002.jsonl")

    listing, status = Path.iterdir, Path.stat

    def iterdir(directory: Path) -> Any:
        before = {path.name for path in listing(directory)}
        step()
        after = {path.name for path in listing(directory)}
        return iter([directory / name for name in sorted(before & after)])

    def stat(path: Path, **options: Any) -> os.stat_result:
        step()
        return status(path, **options)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(Path, "stat", stat)
    found = [path.name.rpartition(".")[0] for path in segments(tmp_path)]
    monkeypatch.undo()
    assert sorted(found) == ["f.b.000001", "f.b.000002"]


async def test_a_segment_left_by_a_crash_is_cut_to_whole_lines_and_closed(tmp_path: Path) -> None:
    torn = tmp_path / "fed1.dead.000003.open"
    torn.write_bytes(b'{"a":1}\n{"b":2}\n{"c":')
    other = tmp_path / "fed2.dead.000001.open"
    other.write_bytes(b'{"a":1}\n')

    found = torn_segments(tmp_path, "fed1")
    assert close_torn_segments(found) == [tmp_path / "fed1.dead.000003.jsonl"]
    assert list(read_lines(tmp_path / "fed1.dead.000003.jsonl")) == [{"a": 1}, {"b": 2}]
    assert other.exists()


async def test_rubbish_in_a_segment_costs_only_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "fed1.b00t.000001.jsonl"
    path.write_bytes(b'{"a":1}\nnot json\n[1]\n\xff\xfe\n{"b":2}\n{"torn":')

    assert list(read_lines(path)) == [{"a": 1}, {"b": 2}]


def text(destination: str, outcome: str, lsso: int) -> bytes:
    return orjson.dumps({"destination": destination, "outcome": outcome, "lsso": lsso}) + b"\n"


def test_the_last_answer_of_each_destination_survives_a_crash(tmp_path: Path) -> None:
    """From all segments that were left open, in the order in which they were written."""
    (tmp_path / "fed1.b.000001.jsonl").write_bytes(text("old", "delivered", 1))
    (tmp_path / "fed1.b.000009.open").write_bytes(
        text("a", "delivered", 1) + text("b", "delivered", 2)
    )
    (tmp_path / "fed1.b.000010.open").write_bytes(text("a", "delivered", 5) + text("a", "busy", 6))

    answers = last_answers(torn_segments(tmp_path, "fed1"))
    assert {name: answer["lsso"] for name, answer in answers.items()} == {"a": 5, "b": 2}


def test_an_instance_finds_its_own_segments_only(tmp_path: Path) -> None:
    """Also where its name begins another's, and whatever a pattern would make of it."""
    for name in ("a.b.0001", "a.b.b.000001", "a.boot.000001", "[a].boot.000001", "a.boot.x"):
        (tmp_path / f"{name}.open").write_bytes(b"")

    def found(instance: str) -> list[str]:
        return [path.name for path in torn_segments(tmp_path, instance)]

    assert found("a") == ["a.b.0001.open", "a.boot.000001.open"]
    assert found("a.b") == ["a.b.b.000001.open"]
    assert found("[a]") == ["[a].boot.000001.open"]
    assert found("*") == []


def test_a_torn_tail_is_cut_however_long_it_is(tmp_path: Path) -> None:
    """A line of a full transaction can be longer than what is read at once."""
    for number, content in enumerate([b'{"a":1}\n' + b"x" * 200_000, b"x" * 70_000, b"", b"\n"]):
        (tmp_path / f"fed1.b.{number:06d}.open").write_bytes(content)
    closed = close_torn_segments(torn_segments(tmp_path, "fed1"))

    assert [path.read_bytes() for path in closed] == [b'{"a":1}\n', b"", b"", b"\n"]


def names(directory: Path) -> list[str]:
    return sorted(path.name.removeprefix("fed1.b00t.") for path in directory.iterdir())


async def test_a_segment_stays_open_until_its_answers_are_settled(tmp_path: Path) -> None:
    """And those after it: what a start finds open is then the last answer of each server."""
    written = ledger(tmp_path, size=1)
    written.record(line("a"))
    written.record(Line(ms=5, destination="b", outcome="failing"))
    written.record(line("c"))
    written.record(line("d"))
    assert names(tmp_path) == [f"{number:06d}.open" for number in (1, 2, 3, 4)]
    written.settled("c")
    written.settled("nobody")
    assert names(tmp_path) == [f"{number:06d}.open" for number in (1, 2, 3, 4)]
    written.settled("a")
    assert names(tmp_path) == [
        "000001.jsonl",
        "000002.jsonl",
        "000003.jsonl",
        "000004.open",
    ]
    written.record(line("d"))
    written.settled("d")
    written.close()
    assert {path.suffix for path in segments(tmp_path)} == {".jsonl"}


async def test_a_daemon_that_ends_with_unsettled_answers_leaves_them_to_the_next(
    tmp_path: Path,
) -> None:
    """A drain has a limit, and a database may be away for longer."""
    written = ledger(tmp_path)
    written.record(line("a"))
    written.record(line("b"))
    written.settled("b")
    written.close()

    assert names(tmp_path) == ["000001.open"]
    assert "a" in last_answers(torn_segments(tmp_path, "fed1"))


async def test_a_line_that_was_not_written_keeps_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, text: bytes) -> int:
        raise OSError(28, "No space left on device")

    written = ledger(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        written.record(line("a"))
    written.close()

    assert names(tmp_path) == ["000001.jsonl"]


def test_old_segments_go_by_age_and_by_size(tmp_path: Path) -> None:
    now_ms = 1_800_000_000_000
    for day in range(5):
        path = tmp_path / f"fed1.b.{day:06d}.jsonl"
        path.write_bytes(b"x" * 1000)
        at = now_ms / 1000 - day * 86_400
        os.utime(path, (at, at))
    by_age = expired(tmp_path, now_ms=now_ms, keep_days=2.5, keep_bytes=10**9)
    by_size = expired(tmp_path, now_ms=now_ms, keep_days=99, keep_bytes=2500)

    (tmp_path / "fed1.b.000009.open").write_bytes(b"x" * 1200)
    beside_open = expired(tmp_path, now_ms=now_ms, keep_days=99, keep_bytes=2500)

    assert [path.name for path in by_age] == ["fed1.b.000004.jsonl", "fed1.b.000003.jsonl"]
    assert len(by_size) == 3
    assert [path.name for path in beside_open] == [
        f"fed1.b.{day:06d}.jsonl" for day in (4, 3, 2, 1)
    ]


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def two_weeks(directory: Path, now_ms: int) -> list[Path]:
    """A segment for each hour of two weeks up to `now_ms`, oldest first."""
    paths = [directory / f"fed1.b.{hour:06d}.jsonl" for hour in range(14 * 24)]
    for hour, path in enumerate(reversed(paths)):
        path.write_bytes(b"{}\n")
        os.utime(path, ns=(0, (now_ms - hour * HOUR_MS) * 1_000_000))
    return paths


def test_a_wall_clock_that_jumps_ahead_takes_a_day_of_the_ledger_at_most(tmp_path: Path) -> None:
    now_ms = 1_800_000_000_000
    paths = two_weeks(tmp_path, now_ms)
    jumped_ms = now_ms + 30 * DAY_MS
    right = expired(tmp_path, now_ms=now_ms, keep_days=14, keep_bytes=10**9)
    jumped = expired(tmp_path, now_ms=jumped_ms, keep_days=14, keep_bytes=10**9)

    # And what is written meanwhile is stamped with it.
    os.utime(paths[-1], ns=(0, jumped_ms * 1_000_000))
    while_ahead = expired(tmp_path, now_ms=jumped_ms, keep_days=14, keep_bytes=10**9)
    back = expired(tmp_path, now_ms=now_ms, keep_days=14, keep_bytes=10**9)

    assert right == []
    for gone in (jumped, while_ahead, back):
        assert gone == paths[: len(gone)]
        assert len(gone) <= 24


@pytest.mark.parametrize("keep_days", [1, 14])
def test_old_segments_go_however_long_nothing_was_written(tmp_path: Path, keep_days: int) -> None:
    """A stretch without a line counts for a day at most, and for something at each time."""
    now_ms = 1_800_000_000_000
    for month in range(20):
        path = tmp_path / f"fed1.b.{month:06d}.jsonl"
        path.write_bytes(b"{}\n")
        os.utime(path, ns=(0, (now_ms - month * 30 * DAY_MS) * 1_000_000))
    gone = expired(tmp_path, now_ms=now_ms, keep_days=keep_days, keep_bytes=10**9)

    assert len(gone) == 20 - max(3, keep_days + 1)


async def test_a_full_disk_is_counted_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, real_write = Count(), os.write
    written = ledger(tmp_path)
    written._lost_lines = lost

    def full(file: int, text: bytes) -> int:
        raise OSError(28, "No space left on device")

    def half(file: int, text: bytes) -> int:
        return real_write(file, text[: len(text) // 2])

    written.record(line("a"))
    monkeypatch.setattr(os, "write", full)
    written.record(line("b"))
    assert written.failing is not None
    monkeypatch.setattr(os, "write", half)
    written.record(line("c"))
    monkeypatch.setattr(os, "write", real_write)
    written.record(line("d"))
    written.close()

    (path,) = segments(tmp_path)
    assert [read["destination"] for read in read_lines(path)] == ["a", "d"]
    assert lost.value == 2
    assert not written.failing


async def test_a_disk_that_has_room_again_is_seen_without_a_line(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has nothing to send would say for ever that the ledger takes no lines."""

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    async with a_daemons(tmp_path) as opened:
        opened.record(line("a"))
        for _ in range(2):
            with monkeypatch.context() as disk:
                disk.setattr(os, "write", full)
                disk.setattr("tempfile._io.open", full)
                opened.record(line("b"))
                await trio.sleep(60)
                assert opened.failing is not None
            await trio.sleep(10)
            assert opened.failing is None

    (path,) = segments(tmp_path)
    assert [read["destination"] for read in read_lines(path)] == ["a"]
    assert os.listdir(tmp_path) == [path.name]


async def test_a_daemon_opens_and_closes_its_ledger(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    (tmp_path / "fed1.dead.000001.open").write_bytes(
        orjson.dumps({"destination": "a", "outcome": "delivered"}) + b"\n"
    )
    async with a_daemons(tmp_path) as opened:
        assert list(opened.last_words) == ["a"]
        opened.record(line())
        opened.close_torn()

        opened.settled("a.example")

    assert {path.suffix for path in segments(tmp_path)} == {".jsonl"}


async def test_the_numbers_of_segments_are_the_order_of_their_lines(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Through starts and kills, whatever the times of the files say."""
    (tmp_path / "fed1.dead.000007.open").write_bytes(text("a", "delivered", 1))
    (tmp_path / "fed1.gone.000009.open").write_bytes(text("a", "delivered", 2))
    (tmp_path / "fed1.gone.000009.jsonl.old").write_bytes(b"")
    (tmp_path / "fed2.dead.000050.jsonl").write_bytes(b"")
    os.utime(tmp_path / "fed1.gone.000009.open", (1, 1))
    async with a_daemons(tmp_path, keep=36_500 * 86_400) as opened:
        assert opened.last_words["a"]["lsso"] == 2
        opened.record(line())

    found = [(each.number, each.boot_id) for each in segments_of(tmp_path, "fed1")]
    assert found == [(7, "dead"), (9, "gone"), (10, "b00t")]


async def test_old_segments_go_when_one_is_closed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A busy daemon may fill the disk long before an hour has passed."""
    async with a_daemons(tmp_path, keep=86_400e6, keep_bytes=1500) as opened:
        for _ in range(100):
            opened.record(line())
            opened.settled("a.example")
            await trio.sleep(0.1)
        assert sum(path.stat().st_size for path in segments(tmp_path)) < 3000


def test_the_schema_is_written_down() -> None:
    """Each field of a line and each note has its row in docs/ledger.md; outcomes: states.md."""
    said = SCHEMA.read_text()
    rows = {row.split("`")[1] for row in said.splitlines() if row.startswith("| `")}
    fields = {"v", "instance"} | (set(Line._fields) - {"record"})
    fields |= set(TransactionRecord._fields)

    assert fields | (set(NOTES) - {"discarded"}) <= rows
    assert {each.name for each in dataclasses.fields(SentPdu) if each.init} <= rows
    assert f"`v` is {LINE_VERSION}" in said
