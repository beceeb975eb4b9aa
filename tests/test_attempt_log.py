"""What is under way when the process is killed is on record, and nothing else is (I9)."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsender.ledger import (
    SLOTS_AT_ONCE,
    AttemptLog,
    Line,
    SentPdu,
    TransactionRecord,
    cut_off,
    open_attempt_log,
)


def line_of(destination: str, number: int, *, pdus: int = 1, ms: int = 0) -> Line:
    record = TransactionRecord(
        [SentPdu(f"${number}.{n}" + "x" * 40, "!r:hs", n, "live") for n in range(pdus)],
        {"m.typing": 1},
        [number],
    )
    return Line(ms, destination, "unknown", f"boot.{number}", attempt=1, record=record)


class Killed(BaseException):
    """The process is."""


@contextmanager
def until_killed(directory: Path, instance: str = "fedsender") -> Iterator[AttemptLog]:
    """The process is killed where the body ends."""
    with suppress(Killed), open_attempt_log(directory, instance, "boot") as under_way:
        yield under_way
        raise Killed


def test_a_kill_leaves_those_that_have_no_line(tmp_path: Path) -> None:
    """More at once than the file begins with room for; slots are used again."""
    with until_killed(tmp_path) as under_way:
        slots = [
            under_way.begin(line_of(f"{n}.example", n, ms=n)) for n in range(3 * SLOTS_AT_ONCE)
        ]
        assert len(set(slots)) == len(slots)
        assert None not in slots
        for slot in slots[5:-5]:
            under_way.end(slot)
        assert under_way.begin(line_of("again.example", 999, ms=999)) in slots
    lines, files = cut_off(tmp_path, "fedsender", [])
    first, last = range(5), range(3 * SLOTS_AT_ONCE - 5, 3 * SLOTS_AT_ONCE)
    assert [line.transaction_id for line in lines] == [f"boot.{n}" for n in (*first, *last, 999)]
    record = lines[1].record
    assert record.pdus[0].event_id == "$1.0" + "x" * 40
    assert (lines[1].outcome, record.edus, record.outbox) == ("unknown", {"m.typing": 1}, [1])
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600]


def test_what_does_not_fit_is_noted_without_its_content(tmp_path: Path) -> None:
    with until_killed(tmp_path) as under_way:
        assert under_way.begin(line_of("a.example", 1, pdus=500, ms=7)) is not None
    (line,), _ = cut_off(tmp_path, "fedsender", [])
    assert (line.destination, line.transaction_id, line.ms, line.record.pdus) == (
        "a.example",
        "boot.1",
        7,
        [],
    )


def test_an_end_in_order_leaves_nothing(tmp_path: Path) -> None:
    with open_attempt_log(tmp_path, "fedsender", "boot") as under_way:
        under_way.end(under_way.begin(line_of("a.example", 1)))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_nothing_is_of_no_consequence(tmp_path: Path) -> None:
    with open_attempt_log(tmp_path / "absent", "fedsender", "boot") as under_way:
        assert under_way.begin(line_of("a.example", 1)) is None
        under_way.end(None)
