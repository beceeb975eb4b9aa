"""The attempts at one server, and the new ones live, from the files of a ledger."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.admin.desk import open_desk
from tests.admin.test_endpoints import settle, with_a_dead_server
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.admin import attempts
from fedsender.admin.attempts import Attempts, follow, read_attempts
from fedsender.config.sections import Ledger as Settings
from fedsender.ledger import Ledger, Line, SentPdu, TransactionRecord
from fedsender.segments import open_segment
from fedsender.telemetry import Count

A, B = "a.example", "b.example"
NOW_MS = 1_800_000_000_000


class NoCount(Count):
    def inc(self, amount: float = 1) -> None:
        raise AssertionError("a line was lost")


def a_ledger(
    directory: Path, *, boot: str = "b00t", size: int = 2**20, last_number: int = 0
) -> Ledger:
    settings = Settings(directory=directory)
    return Ledger(settings, "fed1", boot, NoCount(), last_number, segment_bytes=size)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


def line(ms: int, destination: str = A, outcome: str = "failing", **values: Any) -> Line:
    return Line(ms, destination, outcome, **values)


def times(found: Attempts) -> list[int]:
    return [each.at_ts for each in found.attempts]


def ask(directory: Path, **asked: Any) -> Attempts:
    return read_attempts(directory, A, **{"since_ms": 0, "failed": False, "limit": 100, **asked})


# --- those of one server --------------------------------------------------------------------------


async def test_an_attempt_says_what_it_carried_and_how_it_ended(tmp_path: Path) -> None:
    written = a_ledger(tmp_path)
    record = TransactionRecord(
        [SentPdu("$1", "!r", 1, "live"), SentPdu("$2", "!r", 2, "live")],
        {"m.receipt": 2, "m.typing": 1},
    )
    written.record(line(NOW_MS, B))
    written.record(
        line(
            NOW_MS + 1,
            transaction_id="t.1",
            attempt=3,
            status=502,
            reason="answered 502",
            record=record,
            took_ms=17,
        )
    )
    written.record(line(NOW_MS + 2, outcome="owned"))
    written.record(line(NOW_MS + 3, outcome="delivered", refused={"$1": "no"}, status=200))

    found = ask(tmp_path)
    assert found.cut is None
    first, second = found.attempts
    assert (first.at_ts, first.transaction_id, first.attempt) == (NOW_MS + 1, "t.1", 3)
    assert (first.pdus, first.edus, first.took_ms) == (2, 3, 17)
    assert first.edu_types == {"m.receipt": 2, "m.typing": 1}
    assert (first.outcome, first.status, first.reason) == ("failing", 502, "answered 502")
    assert (second.outcome, second.refused, second.failed) == ("delivered", 1, False)
    assert times(ask(tmp_path, failed=True)) == [NOW_MS + 1]
    for path in files(tmp_path):
        os.utime(path, ns=(0, (NOW_MS + 3) * 10**6))
    assert times(ask(tmp_path, since_ms=NOW_MS + 2)) == [NOW_MS + 3]


async def test_the_newest_are_shown_whatever_segment_they_are_in(tmp_path: Path) -> None:
    """Two daemons write into one directory, and lines are longer than a piece that is read."""
    one, two = a_ledger(tmp_path, size=2000), a_ledger(tmp_path, boot="b11t", size=5000)
    for number in range(60):
        (one if number % 3 else two).record(line(NOW_MS + number, reason="x" * (number * 7)))
        for path in files(tmp_path):
            if path.suffix == ".open":
                os.utime(path, ns=(0, (NOW_MS + number) * 10**6))
    assert len(files(tmp_path)) > 5

    assert times(ask(tmp_path)) == [NOW_MS + number for number in range(60)]
    for limit in (1, 7, 59):
        found = ask(tmp_path, limit=limit)
        assert times(found) == [NOW_MS + number for number in range(60 - limit, 60)]
        assert found.cut == f"only the newest {limit} attempts are shown"
    assert ask(tmp_path, limit=60).cut is None


async def test_lines_are_whole_over_all_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = a_ledger(tmp_path)
    for number in range(20):
        written.record(line(NOW_MS + number, reason="\u00e9" * number))
    [segment] = files(tmp_path)
    with segment.open("ab") as file:
        file.write(
            b'not json "destination":"a.example"\n{"v":2,"ms":1800000000999,"destination":"a'
        )
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr(attempts, "_PIECE_BYTES", size)
        assert times(ask(tmp_path)) == [NOW_MS + number for number in range(20)]


async def test_no_more_is_read_than_the_bound_and_the_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = a_ledger(tmp_path, size=1000)
    for number in range(40):
        written.record(line(NOW_MS + number))
    monkeypatch.setattr(attempts, "MAX_READ_BYTES", 2 * 2**20)
    assert len(ask(tmp_path).attempts) == 40
    monkeypatch.setattr(attempts._Reading, "read", spending(attempts._Reading.read, 3000))
    found = ask(tmp_path)
    assert 0 < len(found.attempts) < 40
    assert times(found)[-1] == NOW_MS + 39
    assert found.cut == "only the newest 2 MiB of the ledger were read"


def spending(read: Any, at_most: int) -> Any:
    """`read`, in a reading that may read so many bytes from its beginning on."""

    def limited(self: Any, file: Any) -> None:
        self.left = min(self.left, at_most)
        read(self, file)

    return limited


async def test_what_is_too_old_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = a_ledger(tmp_path, size=1)
    for number in range(5):
        written.record(line(NOW_MS + number * 3_600_000))
    for number, path in enumerate(files(tmp_path)):
        os.utime(path, ns=(0, (NOW_MS + number * 3_600_000) * 10**6))
    opened: list[Path] = []

    def counted(name: Path) -> Any:
        opened.append(name)
        return open_segment(name)

    monkeypatch.setattr("fedsender.admin.attempts.open_segment", counted)
    assert len(ask(tmp_path, since_ms=NOW_MS + 3 * 3_600_000).attempts) == 2
    assert len(opened) == 3  # The third is the first that is too old.


@pytest.mark.slow
async def test_the_endpoint_answers_from_the_daemons_ledger(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_desk(World(tmp_path)) as desk:
        await with_a_dead_server(desk)
        desk.world.servers[B].down = False
        await desk.post("notify_remote_server_up", {"servers": [B]})
        await settle()
        found = await desk.get(f"attempts/{B}")
        assert (found["destination"], found["cut"]) == (B, None)
        outcomes = [each["outcome"] for each in found["attempts"]]
        assert outcomes[-1] == "delivered"
        assert set(outcomes[:-1]) == {"unreachable"}
        assert found["attempts"][-1]["pdus"] == 1
        failed = await desk.get(f"attempts/{B}", failed="true", limit=1)
        assert [each["outcome"] for each in failed["attempts"]] == ["unreachable"]
        assert failed["cut"] == "only the newest 1 attempts are shown"
        assert (await desk.get("attempts/c.example"))["attempts"] == []
        await desk.get(f"attempts/{B}", 400, limit=10_001)
        await desk.get("attempts/no_server", 400)


# --- live -----------------------------------------------------------------------------------------


def following(directory: Path, *given: Any, **asked: Any) -> Callable[[], list[int]]:
    """A function that returns the times of the new attempts, in NOW_MS's milliseconds."""
    look = partial(next, follow(directory, "fed1", *given, **asked))
    assert look() is None
    return lambda: [each.at_ts - NOW_MS for each in iter(look, None)]


async def test_only_new_attempts_are_followed_from_segment_to_segment(tmp_path: Path) -> None:
    old = a_ledger(tmp_path, boot="0ld", size=1)
    old.record(line(NOW_MS + 1))
    old.record(line(NOW_MS + 2))
    new = following(tmp_path)
    assert new() == []
    old.record(line(NOW_MS + 3))
    assert new() == [3]
    # The last of these are opened, filled and closed between two looks.
    for number in range(4, 9):
        old.record(line(NOW_MS + number))
    assert sorted(new()) == [4, 5, 6, 7, 8]
    old.close()
    younger = a_ledger(tmp_path, boot="b11t", last_number=8)
    younger.record(line(NOW_MS + 9))
    assert new() == [9]
    assert new() == []


async def test_a_ledger_without_a_segment_is_followed(tmp_path: Path) -> None:
    new = following(tmp_path)
    written = a_ledger(tmp_path, size=1)
    written.record(line(NOW_MS + 1))
    written.close()
    assert [path.suffix for path in files(tmp_path)] == [".jsonl"]
    assert new() == [1]


async def test_servers_and_failures_are_chosen(tmp_path: Path) -> None:
    written = a_ledger(tmp_path)
    new = following(tmp_path, "*.EXAMPLE", failed=True)
    written.record(line(NOW_MS + 1))
    written.record(line(NOW_MS + 2, outcome="delivered"))
    written.record(line(NOW_MS + 3, "elsewhere.test"))
    written.record(line(NOW_MS + 4, outcome="unknown"))
    written.record(line(NOW_MS + 5, "*", outcome="denied"))
    assert new() == [1, 4]


async def test_a_line_is_shown_once_it_is_whole(tmp_path: Path) -> None:
    written = a_ledger(tmp_path)
    written.record(line(NOW_MS + 1))
    [segment] = files(tmp_path)
    text = segment.read_bytes()
    new = following(tmp_path)
    with segment.open("ab", buffering=0) as file:
        file.write(text[:50])
        assert new() == []
        file.write(text[50:])
        assert new() == [1]
        file.write(text[:50])
        assert new() == []
        # The next start cuts it off, and another daemon goes on.
        os.truncate(segment, 2 * len(text))
        assert new() == []
        file.write(text)
        assert new() == [1]
        assert orjson.loads(text)["ms"] == NOW_MS + 1
