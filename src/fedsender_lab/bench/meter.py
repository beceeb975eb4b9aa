"""Readings of a process and a machine, and the way from rounds to one figure."""

import os
import platform
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio


@dataclass(frozen=True, slots=True)
class Options:
    """The size of a benchmark; each benchmark defines its own event and round.

    Attributes:
        database: URL of an empty PostgreSQL database, for those that can use one; None: SQLite.
        room, size_kb, receipts, table: of `return`.
    """

    servers: int
    events: int
    rounds: int
    database: str | None = None
    room: int = 1_000
    size_kb: int = 1
    receipts: int = 0
    table: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a stretch: this process's CPU time, all threads, user and system; and time."""

    cpu_s: float
    wall_s: float


class Meter:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._cpu = _cpu_s()
        self._wall = trio.current_time()

    def read(self) -> Usage:
        """The cost so far."""
        return Usage(_cpu_s() - self._cpu, trio.current_time() - self._wall)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rss_kb(pid: int | None = None, name: str = "VmRSS") -> int:
    """Resident memory of a process (this one), in KiB; VmHWM: its peak. Linux only."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def cpu_s_of(pid: int) -> float:
    """User and system time of all threads of a process, in seconds. Linux only; raises OSError."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def fsync_ms(directory: Path, times: int = 20) -> float:
    """How long it takes to make 4 KiB durable, in ms: the median."""
    path = directory / "fsync"
    seconds = []
    with path.open("wb") as file:
        for _ in range(times):
            started = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - started)
    path.unlink()
    return statistics.median(seconds) * 1000


def median(values: Sequence[float], digits: int = 3) -> float:
    """The middle one, rounded for reading."""
    return round(statistics.median(values), digits)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> dict[str, Any]:
    """Where this was measured, and how busy it was: load of the last minute, ours included."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
