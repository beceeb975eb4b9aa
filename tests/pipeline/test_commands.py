"""The commands as an operator runs them, on a cluster of two workers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest
import sqlalchemy as sa
import yaml
from tests.pipeline.cluster import SETTINGS, Killer, open_cluster
from tests.pipeline.lakes import NOW_MS, line, write
from tests.pipeline.test_ingest import config_of, read
from tests.pipeline.worlds import US, driver_url, synapse_world
from tests.servers import Databases

from fedsender import __main__ as fedsender_main
from fedsender.cli import run_command
from fedsender.config import load
from fedsender.store import tables
from fedsender_pipeline import audit, health, ingest, ledger_lines, report, session, vacuum
from fedsender_pipeline.lake import Lake, locked, open_lake
from fedsender_pipeline.schemas import FATES, INTERVALS, MISSING
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def config_file(
    directory: Path, homeserver: Mapping[str, str] | None = None, **spark: object
) -> Path:
    values = {
        "server_name": US,
        "signing_key": "key",
        "instance_name": "master",
        "homeserver": {"kind": "synapse", "database": "homeserver.db", **(homeserver or {})},
        "feed": {"kind": "redis"},
        "pipeline": {"spark": spark},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def fedsender(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fedsender", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def spark_submit(
    directory: Path, master: str, settings: Mapping[str, str], *arguments: str
) -> "subprocess.CompletedProcess[str]":
    """As docs/pipeline.md has it; the Java is one that Spark finds by itself."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    command = [str(program), "--master", master, *options, fedsender_main.__file__, *arguments]
    python = {"PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(directory / "java")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | python,
        cwd=directory,
    )


@pytest.mark.long
def test_ingest_and_audit_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: Databases
) -> None:
    """Exit codes, one JSON object on standard output, none of Spark's noise beside it. Two run by
    themselves, one through `spark-submit`, whose master and settings it has then. All of it,
    master, workers and jobs, on the Java of the wheel, wants the cluster's secret.

    The password of the homeserver's PostgreSQL is in no file that any of the processes leaves, and
    in nothing that is said: not where that works, nor where it fails."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    url = postgres.create_database()
    world = synapse_world(driver_url(url), 11, rooms=2, steps=10)
    upto = world.ordering
    secret = tmp_path / "password"
    secret.write_text("Zaunkoenig-im-Dickicht\n")
    secret.chmod(0o600)
    homeserver = {"database": url, "database_password_file": str(secret)}
    engine = sa.create_engine(f"sqlite:///{tmp_path}/fedsender.sqlite3")
    tables.sender.create_all(engine)
    engine.dispose()
    write(tmp_path / "ledger", "master.b.000001.jsonl", line(instance="master"), "{torn\n")
    with open_cluster(tmp_path, workers=2) as master:
        config = str(config_file(tmp_path, homeserver, master=master, settings=SETTINGS))
        rename(url, "rejections", "gone")
        done = fedsender("pipeline", "ingest", "-c", config)
        assert done.returncode == 1
        words = (
            r'homeserver database: relation "rejections" does not exist.* \(events \d+ to \d+\)$'
        )
        assert re.search(words, done.stderr.strip())
        said = done.stdout + done.stderr
        rename(url, "gone", "rejections")
        done = fedsender("pipeline", "ingest", "-c", config, "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["events"], told["position"]) == (world.ordering, upto)
        assert (told["attempts"], told["pdus"], told["rejects"]) == (1, 2, 1)
        assert "WARN" not in done.stderr
        said += done.stdout + done.stderr
        audit = ("pipeline", "audit", "-c", str(config_file(tmp_path)), "--json")
        done = spark_submit(tmp_path, master, SETTINGS, *audit)
        assert done.returncode in (0, 1), done.stderr
        # What a program says on standard error comes on standard output there, so before it.
        found = json.loads(done.stdout.splitlines()[-1])
        assert (found["upto"], found["expected"] > 0) == (upto, True)
    password = secret.read_bytes().strip()
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path != secret]
    forms = (password, ", ".join(map(str, password)).encode(), quoted(password))
    assert not [path for path in left for form in forms if form in path.read_bytes()]
    assert password.decode() not in said


def quoted(password: bytes) -> bytes:
    """As it stands in a URL."""
    return "".join(f"%{byte:02X}" for byte in password).encode()


def rename(url: str, table: str, name: str) -> None:
    engine = sa.create_engine(driver_url(url))
    with engine.begin() as connection:
        connection.execute(sa.text(f"ALTER TABLE {table} RENAME TO {name}"))
    engine.dispose()


@pytest.mark.long
def test_an_executor_that_is_killed_at_any_stage_loses_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: "SparkSession"
) -> None:
    """Ten kills, of one of the two workers' executors each, whenever a stage has been kept. The
    result is that of a job on one machine."""
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    url = f"sqlite:///{tmp_path}/homeserver.db"
    synapse_world(url, 11, rooms=2, steps=60)
    engine = sa.create_engine(f"sqlite:///{tmp_path}/fedsender.sqlite3")
    tables.sender.create_all(engine)
    engine.dispose()
    write(tmp_path / "ledger", "master.b.000001.jsonl", line(instance="master"))
    alone = open_lake(tmp_path / "alone", US, create=True)
    read(alone, url, config_of(tmp_path, "synapse"))
    steps = Steps(quiet=True)
    ingest.derive(spark, alone, US, steps)
    with (
        open_cluster(tmp_path, workers=2) as master,
        Killer(tmp_path, tmp_path / "lake" / "checkpoints") as killer,
    ):
        config = str(config_file(tmp_path, master=master, settings=SETTINGS))
        done = fedsender("pipeline", "ingest", "-c", config)
        assert done.returncode == 0, done.stderr
        # One more line, which the ingest has not read.
        write(tmp_path / "ledger", "master.b.000002.jsonl", line(instance="master"))
        done = fedsender("pipeline", "audit", "-c", config, "--json")
        assert done.returncode in (0, 1), done.stderr
        assert json.loads(done.stdout)["expected"] > 0
    lake = open_lake(tmp_path / "lake", US)
    assert _intervals(lake) == _intervals(alone)
    assert killer.killed >= 10
    assert list((tmp_path / "lake" / "checkpoints").iterdir()) == []


def _intervals(lake: Lake) -> list[str]:
    return sorted(str(row) for row in lake.read(INTERVALS).to_pylist())


@pytest.mark.slow
def test_what_is_wrong_is_said_before_any_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(config_file(tmp_path))
    assert run_command(["pipeline", "audit", "-c", config]) == 2
    assert "there is no lake; `fedsender pipeline ingest` makes it" in capsys.readouterr().err
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "MANIFEST.json").write_text('{"lake": 99}')
    assert run_command(["pipeline", "ingest", "-c", config]) == 1
    assert "the lake has version 99" in capsys.readouterr().err
    (tmp_path / "accepted").write_text("a.example\n")
    accepting = ("--accept", str(tmp_path / "accepted"))
    assert run_command(["pipeline", "audit", "-c", config, *accepting]) == 2
    assert "accepted:1: must be SERVER $EVENT or SERVER FIRST-LAST" in capsys.readouterr().err
    nowhere = str(tmp_path / "none" / "x")
    for job, option in (("report", "-o"), ("run", "-o")):
        assert run_command(["pipeline", job, "-c", config, option, nowhere]) == 2
        assert f"{option}: {nowhere}: there is no directory" in capsys.readouterr().err
        assert run_command(["pipeline", job, "-c", config, option, str(tmp_path)]) == 2
        assert f"{option}: {tmp_path}: is a directory" in capsys.readouterr().err


def test_a_run_says_before_it_starts_that_its_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_file(tmp_path)
    values = yaml.safe_load(config.read_text())
    values["pipeline"]["textfile"] = str(tmp_path / "none" / "file")
    config.write_text(yaml.safe_dump(values))
    with open_lake(tmp_path / "lake", US, create=True).commit():
        pass
    assert run_command(["pipeline", "run", "-c", str(config)]) == 2
    said = f"pipeline.textfile: {tmp_path}/none/file: there is no directory {tmp_path}/none"
    assert capsys.readouterr().err == f"fedsender: {said}\n"


@pytest.mark.usefixtures("ignored_sigterm")
def test_a_job_that_is_told_to_end_says_what_stays(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM in the middle of a commit: nothing of it shows, no traceback, and 1."""

    def work(lake: Lake, *_: object) -> None:
        with lake.commit() as commit:
            commit.set_position("events", 1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    monkeypatch.setattr(ingest, "read_databases", work)
    assert run_command(["pipeline", "ingest", "-c", str(config_file(tmp_path))]) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == (
        "fedsender: pipeline ingest: interrupted; what it has committed stays, and the next run"
        " goes on from there"
    )
    assert open_lake(tmp_path / "lake", US, create=True).position("events") == -1


@pytest.mark.parametrize("job", ["ingest", "run", "audit", "health", "report", "vacuum"])
def test_a_second_job_comes_back_later_and_does_not_end_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """Exit code 1 is for what is missing: it is no fault of anybody's."""
    first = open_lake(tmp_path / "lake", US, create=True)
    with first.commit():
        pass
    monkeypatch.setattr(session, "spark_session", None)
    with locked(first.directory):
        assert run_command(["pipeline", job, "-c", str(config_file(tmp_path))]) == 75
        with first.commit():
            pass
    said = "another job is writing here; try again when it has ended"
    assert said in capsys.readouterr().err


def test_a_run_with_nothing_new_answers_without_spark(
    spark: "SparkSession",
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line of the ledger, a row of the databases, or an accepted delivery is something new."""
    starts = []

    def started(*_: object, **__: object) -> nullcontext["SparkSession"]:
        starts.append(1)
        return nullcontext(spark)

    monkeypatch.setattr(session, "spark_session", started)
    synapse_world(f"sqlite:///{tmp_path}/homeserver.db", 11, rooms=2, steps=10)
    url = f"sqlite:///{tmp_path}/fedsender.sqlite3"
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    tables.sender.create_all(engine)
    write(tmp_path / "ledger", "master.b.000001.jsonl", line(instance="master"))
    command = ["pipeline", "run", "-c", str(config_file(tmp_path)), "--json"]
    assert run_command(command) == 1
    first = json.loads(capsys.readouterr().out)
    assert first["audit"]["counts"]["missing"] > 0
    assert run_command(command) == 1
    second = json.loads(capsys.readouterr().out)
    assert len(starts) == 1
    assert (second["audit"], second["health"]) == (first["audit"], first["health"])
    strays = {(each["server"], each["event_id"]) for each in first["audit"]["strays"]}
    assert strays == {("a.example", "$1"), ("a.example", "$5")}
    assert "<td>$5</td>" in (tmp_path / "lake" / "report.html").read_text()
    write(tmp_path / "ledger", "master.b.000002.jsonl", line(instance="master", ms=NOW_MS + 1))
    monkeypatch.setattr(session, "spark_session", None)
    with pytest.raises(TypeError, match="not callable"):
        run_command(command)
    lake, config = open_lake(tmp_path / "lake", US), load(tmp_path / "config.yaml")

    def is_changed() -> bool:
        before = lake.manifest.commit
        ingest.read_databases(lake, config, Steps(quiet=True))
        return lake.manifest.commit > before

    assert not is_changed()
    assert audit.still_holds(lake, config)
    # What becomes empty is another thing, too.
    for change in (
        sa.insert(tables.catch_ups).values(destination="a.example", floor=1),
        sa.delete(tables.catch_ups),
    ):
        with engine.begin() as connection:
            connection.execute(change)
        assert is_changed()
        assert not is_changed()


def test_a_vacuum_needs_no_spark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(session, "spark_session")
    config = str(config_file(tmp_path))
    assert run_command(["pipeline", "vacuum", "-c", config]) == 2
    lake = open_lake(tmp_path / "lake", US, create=True)
    with lake.commit():
        pass
    with locked(lake.directory):
        assert run_command(["pipeline", "vacuum", "-c", config]) == 75
    capsys.readouterr()
    assert run_command(["pipeline", "vacuum", "-c", config]) == 0
    assert capsys.readouterr().out == (
        "0 files merged, 0 lines of the ledger let go; the lake has 0 files\n"
    )
    assert run_command(["pipeline", "vacuum", "-c", config, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 0


def test_an_audit_without_a_daemon_to_repair_is_told_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(FATES, 0) | {"missing": 1}
    found = audit.Audited(upto=7, expected=3, counts=counts, unknown_hosts=0, shown=[])
    monkeypatch.setattr(session, "spark_session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(ledger_lines, "read_ledger", lambda *_: None)
    monkeypatch.setattr(ledger_lines, "fetched", lambda *_: [])
    monkeypatch.setattr(audit, "audit", lambda *_, **__: found)
    config = config_file(tmp_path)
    lost = {"server": "a.example", "room_id": "!r", "stream_ordering": 1, "event_id": "$1"}
    with open_lake(tmp_path / "lake", US, create=True).commit() as commit:
        commit.append_rows(MISSING, [lost | {"day": date(2026, 1, 1), "reasons": []}])
    assert run_command(["pipeline", "audit", "-c", str(config), "--repair"]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("1 missing of 3 deliveries\n3 deliveries expected, of")
    assert "fedsender: pipeline audit: --repair: after 0 events: " in told.err


def test_a_run_says_its_verdict_before_it_tidies_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And writes the figures: an operator who waits waits for nothing else."""
    config, told = config_file(tmp_path), list[str]()
    values = yaml.safe_load(config.read_text())
    values["pipeline"]["textfile"] = str(tmp_path / "textfile")
    config.write_text(yaml.safe_dump(values))
    counts = dict.fromkeys(FATES, 0) | {"delivered": 3}
    found = audit.Audited(upto=7, expected=3, counts=counts, unknown_hosts=0, shown=[])

    def tidy(*_: object) -> vacuum.Vacuumed:
        assert (tmp_path / "textfile").exists()
        told.append(capsys.readouterr().out)
        return vacuum.Vacuumed(0, 0, 0)

    monkeypatch.setattr(session, "spark_session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(ledger_lines, "fetched", lambda *_: [])
    monkeypatch.setattr(ingest, "read_databases", lambda *_: None)
    monkeypatch.setattr(ingest, "take_in", lambda *_: None)
    monkeypatch.setattr(audit, "audit", lambda *_: found)
    monkeypatch.setattr(health, "health", lambda *_: health.Known(2, 1))
    monkeypatch.setattr(report, "report", lambda *_: None)
    monkeypatch.setattr(vacuum, "vacuum", tidy)
    assert run_command(["pipeline", "run", "-c", str(config)]) == 0
    page = tmp_path / "lake" / "report.html"
    assert told == [f"nothing is lost of 3 deliveries\n1 of 2 servers ill; {page}\n"]
    assert capsys.readouterr().out == ""


def test_the_homeservers_names_are_synapses() -> None:
    """The lake's tables that are taken as they stand have the columns of the databases."""
    from fedsender_pipeline import schemas

    for target, table in (
        (schemas.DESTINATIONS, tables.destinations),
        (schemas.DESTINATION_ROOMS, tables.destination_rooms),
        (schemas.QUARANTINE, tables.quarantine),
        (schemas.SERVER_STATES, tables.server_states),
        (schemas.REDELIVERIES, tables.redeliveries),
    ):
        assert set(target.columns) <= {column.name for column in table.columns}
