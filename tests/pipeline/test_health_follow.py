"""`health --follow`, as a service runs it: it takes up what comes, and ends when it is told to."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.pipeline.lakes import ingest_ledger, lake_of, write
from tests.pipeline.test_health import A, attempt, open_lake_again, rows, run
from tests.pipeline.worlds import US

from fedsender.cli import run_command
from fedsender_pipeline import ledger_source, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S = 600.0
COUNTED = "SELECT attempts, delivered FROM servers"


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, "it does not get there"
        time.sleep(0.1)


def test_a_place_is_behind_a_whole_line_of_a_segment_by_either_name(tmp_path: Path) -> None:
    """What is planned is read, if the segment is closed meanwhile; and nothing, if it is deleted.
    Of many bytes some wait for the next look."""
    first = write(tmp_path, "f.b.000001.open", "one\n", "two\n", "tor")
    write(tmp_path, "f.b.000002.jsonl", "three\n")
    os.utime(first, (1, 1))
    there = ledger_source.unread(tmp_path, {"f.b.000001": 4, "f.b.000000": 99})
    assert there == {"f.b.000001": 8, "f.b.000002": 6}
    planned = ledger_source.pieces(tmp_path, {"f.b.000001": 4}, there)
    first.rename(first.with_suffix(".jsonl"))
    assert [lines_of(piece) for piece in planned] == [
        [("two", "f.b.000001")], [("three", "f.b.000002")]]  # fmt: skip
    assert ledger_source.unread(tmp_path, there) == there
    assert ledger_source.unread(tmp_path, {}, 1) == {"f.b.000001": 8, "f.b.000002": 0}
    first.with_suffix(".jsonl").unlink()
    assert lines_of(planned[0]) == []
    assert ledger_source.unread(tmp_path, there) == {"f.b.000002": 6}


def lines_of(piece: ledger_source.Piece) -> list[tuple[str, str]]:
    return [
        (row["value"], row["segment"])
        for batch in ledger_source.read(piece)
        for row in batch.to_pylist()
    ]


@pytest.mark.usefixtures("ignored_sigterm")
def test_it_follows_the_open_segment_and_ends_at_sigterm(
    spark: "SparkSession",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """From what the lake has on: lines of a segment that is still written to, half a line once it
    is whole, and nothing again when the segment is closed. A new file comes in the old one's place,
    never a half one; who has the old one open reads that."""
    lake, ledger = lake_of(tmp_path, {}, 1), tmp_path / "ledger"
    config, health = tmp_path / "config.yaml", tmp_path / "health.sqlite3"
    config.write_text(f"server_name: {US}\nsigning_key: key\n")
    write(ledger, "f.b.000001.jsonl", *(attempt(A, minute) for minute in range(3)))
    ingest_ledger(spark, lake, tmp_path)
    open_one = ledger / "f.b.000002.open"
    half = json.dumps(attempt(A, 5))
    seen: list[object] = []

    def now(*counts: int) -> Callable[[], bool]:
        return lambda: health.exists() and rows(tmp_path, COUNTED) == [counts]

    def add(text: str) -> None:
        with open_one.open("a") as segment:
            segment.write(text)

    def operate() -> None:
        """What happens beside it; the end of this is the end of that."""
        try:
            until(now(3, 3))
            with closing(sqlite3.connect(f"file:{health}?mode=ro", uri=True)) as before:
                inode = health.stat().st_ino
                before.execute(COUNTED).fetchone()
                add(json.dumps(attempt(A, 4)) + "\n" + half[:40])
                until(now(4, 4))
                seen.append(health.stat().st_ino != inode)
                seen.append(before.execute(COUNTED).fetchone())
            add(half[40:] + "\n")
            until(now(5, 5))
            open_one.rename(open_one.with_suffix(".jsonl"))
            write(ledger, "f.b.000003.open", attempt(A, 61, "failing"))
            until(now(6, 5))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def this_one(*_: object, **__: object) -> Iterator["SparkSession"]:
        with session._noise_in(tmp_path / "noise"):
            yield spark

    monkeypatch.setattr(session, "spark_session", this_one)
    operator = threading.Thread(target=operate)
    operator.start()
    code = run_command(["pipeline", "health", "-c", str(config), "--follow", "1"])
    operator.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    out, err = capfd.readouterr()
    assert seen == [True, (3, 3)]
    assert (code, out) == (0, "1 servers, of which 1 ill; 3 batches taken up\n")
    assert err == "starting Spark\nhealth: 1 servers, 1 ill\n"
    assert [path.name for path in tmp_path.glob("health*")] == ["health.sqlite3"]


def follower(config: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "fedsender", "pipeline", "health", "-c", str(config)]
    with (config.parent / "follow.log").open("ab") as log:
        return subprocess.Popen([*command, "--follow", "1"], stdout=log, stderr=log)


@pytest.mark.long
def test_a_kill_makes_no_line_count_twice_and_none_is_lost(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """`kill -9` while lines come, an ingest meanwhile, and a start after it."""
    lake, ledger = lake_of(tmp_path, {}, 1), tmp_path / "ledger"
    config = tmp_path / "config.yaml"
    config.write_text(f"server_name: {US}\nsigning_key: key\n")
    for life in range(2):
        path = ledger / f"f.b.{life:06d}.open"
        process = follower(config)
        try:
            for number in range(3 * life, 3 * life + 3):
                with path.open("a") as segment:
                    segment.write(json.dumps(attempt(A, number)) + "\n")
                until_counted(tmp_path, process, number + 1)
        finally:
            process.kill()
            process.wait()
        path.rename(path.with_suffix(".jsonl"))
        lake = open_lake_again(lake)
        ingest_ledger(spark, lake, tmp_path)
    assert run(spark, lake, tmp_path).servers == 1
    assert rows(tmp_path, COUNTED) == [(6, 6)]


def until_counted(directory: Path, process: "subprocess.Popen[bytes]", number: int) -> None:
    def reached() -> bool:
        assert process.poll() is None, (directory / "follow.log").read_text()
        return (directory / "health.sqlite3").exists() and rows(directory, COUNTED) == [
            (number, number)
        ]

    until(reached)
