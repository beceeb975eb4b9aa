"""How soon `fedsender pipeline health --follow` has what the ledger has.

    python -m tests.benchmarks.health_lag [SERVERS] [BATCHES]

The ledger has an attempt for each of SERVERS (1,000). The command, with `--follow 1`, runs in a
process of its own. BATCHES (30) times a tenth of the servers has an attempt more in the open
segment, two seconds after the last ones were counted. The lag is from the write until the health
file counts them.
"""

import json
import sqlite3
import statistics
import subprocess
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.pipeline.lakes import lake_of
from tests.pipeline.test_health import attempt
from tests.pipeline.worlds import US

from fedsender_lab.bench.meter import cpu_s_of

PATIENCE_S = 120
BETWEEN_S = 2


def counted(path: Path) -> int:
    """The attempts that the health file counts."""
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT sum(attempts) FROM servers").fetchone()[0] or 0)


def until_counted(path: Path, number: int) -> float:
    """Wait until the file counts so many; the seconds that it took."""
    began = time.monotonic()
    while counted(path) != number:
        assert time.monotonic() < began + PATIENCE_S, f"{path} does not count {number}"
        time.sleep(0.02)
    return time.monotonic() - began


def main(servers: int = 1_000, batches: int = 30) -> None:
    """Follow, and print the lags in a line of JSON."""
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        directory = Path(name)
        lake_of(directory, {}, 1)
        config = directory / "config.yaml"
        config.write_text(f"server_name: {US}\nsigning_key: key\n")
        segment = directory / "ledger" / "bench.1.000001.open"
        health = directory / "health.sqlite3"
        minutes = count()

        def write(number: int) -> None:
            minute = next(minutes)
            with segment.open("a") as file:
                for server in range(number):
                    file.write(json.dumps(attempt(f"s{server}.example", minute)) + "\n")

        write(servers)
        command = [sys.executable, "-m", "fedsender", "pipeline", "health", "-c", str(config)]
        follower = subprocess.Popen([*command, "--follow", "1"], stderr=subprocess.DEVNULL)
        try:
            start_s = until_counted(health, servers)
            cpu_s, lags = cpu_s_of_all(follower.pid), []
            for batch in range(1, batches + 1):
                time.sleep(BETWEEN_S)
                write(servers // 10)
                lags.append(until_counted(health, servers + batch * (servers // 10)))
            cpu_s = cpu_s_of_all(follower.pid) - cpu_s
        finally:
            follower.terminate()
            follower.wait()
    figures = {
        "servers": servers,
        "start_s": start_s,
        "lag_p50_s": statistics.median(lags),
        "lag_max_s": max(lags),
        "cpu_s_per_batch": cpu_s / batches,
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


def cpu_s_of_all(pid: int) -> float:
    """The CPU seconds of a process and of those that it has started, Java among them."""
    try:
        found = cpu_s_of(pid)
        started = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except FileNotFoundError:  # It has ended.
        return 0.0
    return found + sum(cpu_s_of_all(int(child)) for text in started for child in text.split())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
