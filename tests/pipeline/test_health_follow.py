"""`health --follow`, as a service runs it: it takes up what comes, and ends when it is told to."""

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.pipeline.test_audit import lake_of
from tests.pipeline.test_health import A, attempt, rows, run
from tests.pipeline.test_ledger_lines import write
from tests.pipeline.worlds import US

from fedsender.cli import run_command
from fedsender.pipeline import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S = 600.0
COUNTED = "SELECT COUNT(*), COALESCE(SUM(attempts), 0) FROM windows"


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, "it does not get there"
        time.sleep(0.1)


@pytest.mark.usefixtures("ignored_sigterm")
def test_it_follows_the_ledger_ends_at_sigterm_and_goes_on_where_it_was(
    spark: "SparkSession",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A new file comes in the old one's place, never a half one; who has the old one open reads
    that. After the end the next run takes up only what is new."""
    lake, ledger = lake_of(tmp_path, {}, 1), tmp_path / "ledger"
    config, health = tmp_path / "config.yaml", tmp_path / "health.sqlite3"
    config.write_text(f"server_name: {US}\nsigning_key: key\n")
    write(ledger, "f.b.000001.jsonl", *(attempt(A, minute) for minute in range(3)))
    seen: list[object] = []

    def operate() -> None:
        """What happens beside it; the end of this is the end of that."""
        try:
            until(lambda: health.exists() and rows(tmp_path, COUNTED) == [(1, 3)])
            with closing(sqlite3.connect(f"file:{health}?mode=ro", uri=True)) as before:
                inode = health.stat().st_ino
                before.execute(COUNTED).fetchone()
                write(ledger, "f.b.000002.jsonl", attempt(A, 4), attempt(A, 61, "failing"))
                until(lambda: rows(tmp_path, COUNTED) == [(2, 5)])
                seen.append(health.stat().st_ino != inode)
                seen.append(before.execute(COUNTED).fetchone())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def this_one(*_: object) -> Iterator["SparkSession"]:
        with session._noise_in(tmp_path / "noise"):
            yield spark

    monkeypatch.setattr(session, "spark_session", this_one)
    operator = threading.Thread(target=operate)
    operator.start()
    code = run_command(["pipeline", "health", "-c", str(config), "--follow", "1"])
    operator.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    out, err = capfd.readouterr()
    assert seen == [True, (1, 3)]
    assert (code, out) == (0, "1 servers, of which 1 ill; 2 batches taken up\n")
    assert err == "starting Spark\nhealth: 1 servers, 1 ill\n"

    write(ledger, "f.b.000003.jsonl", attempt(A, 62))
    assert run(spark, lake, tmp_path).batches == 1
    assert rows(tmp_path, COUNTED) == [(2, 6)]
    assert [path.name for path in tmp_path.glob("health*")] == ["health.sqlite3"]
