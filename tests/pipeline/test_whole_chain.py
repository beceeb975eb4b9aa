"""The whole chain, as a user goes through it: a chaotic demo, and every job on what it left."""

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.pipeline.oracle import found_by_audit, judge

from fedsender.cli import run_command
from fedsender_lab.planted import open_scene
from fedsender_pipeline import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEDSENDER = (sys.executable, "-m", "fedsender")
DEMO = ("--chaos", "--servers", "10", "--rooms", "4", "--events", "100")
REMOVED = 5


def forget(store: Path, server: str, event_id: str) -> None:
    """Take two rows out of destination_rooms: that by which the server is owed the event, and one
    whose events were all answered."""
    room = "SELECT room_id FROM events WHERE event_id = ?"
    others = "SELECT max(rowid) FROM destination_rooms WHERE destination != ?"
    connection = sqlite3.connect(store)
    with closing(connection), connection:
        taken = connection.execute(
            f"DELETE FROM destination_rooms WHERE rowid = ({others})"
            f" OR destination = ? AND room_id = ({room})",
            (server, server, event_id),
        )
        assert taken.rowcount == 2


@contextmanager
def daemon(directory: Path) -> Iterator[None]:
    """It runs; the demo's homeserver and servers have gone."""
    command = [*FEDSENDER, "run", "-c", str(directory / "config.yaml")]
    with (directory / "run.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            if (directory / "admin.sock").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()


@pytest.mark.long
def test_every_job_on_what_a_chaotic_demo_left(
    spark: "SparkSession",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was taken out of the ledger by hand is missing, each with its name, and nothing else,
    also where `destination_rooms` has lost the row; one that it has lost of what was answered is no
    loss. The page and the health are there. A daemon is given
    what is missing, and then it is not. Another engine finds the same."""
    demo = ["demo", *DEMO, "--keep", str(tmp_path / "demo")]
    played = subprocess.run(
        [*FEDSENDER, *demo], capture_output=True, text=True, timeout=300, check=False
    )
    assert played.returncode == 0, played.stderr + played.stdout
    scene = open_scene(tmp_path / "demo")
    removed = {scene.lose() for _ in range(REMOVED)}
    scene.write(scene.half)
    forget(tmp_path / "demo" / "homeserver.sqlite3", *min(removed))
    config = tmp_path / "demo" / "config.yaml"
    values = yaml.safe_load(config.read_text())
    figures = tmp_path / "fedsender.prom"
    values["pipeline"] = values.get("pipeline", {}) | {"textfile": str(figures)}
    config.write_text(yaml.safe_dump(values))

    @contextmanager
    def one_for_all(*_: object, **__: object) -> Iterator["SparkSession"]:
        yield spark

    # Starting Java for each would be most of this test.
    monkeypatch.setattr(session, "spark_session", one_for_all)

    def fedsender(job: str, *options: str) -> tuple[int, str]:
        code = run_command(["pipeline", job, "-c", str(config), *options])
        return code, capsys.readouterr().out

    page = tmp_path / "page.html"
    code, out = fedsender("run", "--json", "-o", str(page))
    ran: dict[str, Any] = json.loads(out)
    ingested, audited = ran["ingest"], ran["audit"]
    assert (code, ingested["rejects"]) == (1, 0)
    named = {(each["server"], each["event_id"]) for each in audited["shown"]}
    assert named == removed
    assert audited["counts"]["missing"] == REMOVED
    assert audited["counts"]["unknown"] == audited["counts"]["before_ledger"] == 0
    assert audited["counts"]["superseded"] > 0
    assert ran["health"]["servers"] == 10
    assert f"<b>{REMOVED} missing of " in page.read_text()
    assert any(event_id in page.read_text() for _, event_id in removed)
    assert (
        f'{{fate="missing",sender="fedsender",server_name="{values["server_name"]}"}} {REMOVED}.0'
        in (figures.read_text())
    )
    left = tmp_path / "demo"
    found = found_by_audit(next(left.rglob("views.sql")).parent)
    assert found.missing == removed
    stores = (left / "homeserver.sqlite3", left / "fedsender.sqlite3")
    assert found == judge(*stores, left / "ledger", values["server_name"])

    with daemon(tmp_path / "demo"):
        code, out = fedsender("audit", "--repair")
        assert (code, out.splitlines()[-1]) == (0, f"accepted by the daemon: {REMOVED}")
    fedsender("ingest")
    code, out = fedsender("audit", "--json")
    repaired: dict[str, Any] = json.loads(out)["counts"]
    assert (code, repaired["missing"], repaired["pending"]) == (0, 0, REMOVED)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_a_job_that_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    """At any moment, `KILLS` times: the run that ends finds what another engine finds."""
    seed = int(os.environ.get("SEED", time.time_ns()))
    print("SEED", seed)
    rng, home = random.Random(seed), tmp_path / "demo"
    demo = [*FEDSENDER, "demo", "--servers", "6", "--events", "100", "--keep", str(home)]
    played = subprocess.run(demo, capture_output=True, text=True, check=False)
    assert played.returncode == 0, played.stderr + played.stdout
    run = [*FEDSENDER, "pipeline", "run", "-c", str(home / "config.yaml")]
    for _ in range(int(os.environ.get("KILLS", "3"))):
        with subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            with suppress(subprocess.TimeoutExpired):
                # Nothing but a kill ends it before.
                assert job.wait(timeout=rng.uniform(1, 25)) == 0
            job.kill()
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    found = found_by_audit(next(home.rglob("views.sql")).parent)
    stores = (home / "homeserver.sqlite3", home / "fedsender.sqlite3")
    name = yaml.safe_load((home / "config.yaml").read_text())["server_name"]
    assert found == judge(*stores, home / "ledger", name)
