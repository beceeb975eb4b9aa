"""The data pipeline's figures: a made-up homeserver's lake and ledger (`pipeline_input`), and the
cost of each job on two cores, in one session as `fedsender pipeline run` has it.

`jobs` is the first run, over all of it; `hour` is the next one, in a session of its own, with an
hour's thousand events more.

The jobs' results are known beforehand. `broken` names each result that differs, and says so if Java
and Python together took more memory than a small box has.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from fedsender.config import Config, from_values
from fedsender_lab.bench.meter import Options, cpu_s_of, rss_kb
from fedsender_lab.bench.pipeline_input import INSTANCE, US, Made, Shape, add_hour, make
from fedsender_pipeline import audit, health, ingest, ledger_lines, report, schemas
from fedsender_pipeline.database import open_source
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.session import Steps, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_BOX_MB: Final = 4096


async def pipeline(
    options: Options,
    master: str = "local[2]",
    *,
    whole_ledger: bool = False,
    one_server: bool = False,
) -> dict[str, Any]:
    """The cost of the jobs; `events` and `servers` of `Options` are the input's."""
    # Spark's own scratch files go where the input is, which can be a disk of its own (TMPDIR).
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        directory = Path(name)
        shape = Shape(
            servers=options.servers,
            events=options.events,
            whole_ledger=whole_ledger,
            one_server=one_server,
        )
        config = from_values(
            {
                "server_name": US,
                "instance_name": INSTANCE,
                "signing_key": "key",
                "homeserver": {"database": f"sqlite:///{directory}/homeserver.db"},
                "ledger": {"directory": str(directory / "ledger")},
                "pipeline": {
                    "lake": str(directory / "lake"),
                    # The default would pause for most of the first read.
                    "rows_per_second": 10_000_000,
                    "spark": {
                        "master": master,
                        "settings": {"spark.local.dir": str(directory / "spark")},
                    },
                },
            },
            directory=directory,
        )
        lake = open_lake(config.pipeline.lake, US, create=True)
        began = time.perf_counter()
        homeserver = sa.create_engine(config.homeserver.database, poolclass=sa.NullPool)
        with spark_session(config.pipeline.spark, "bench input", directory) as spark:
            made = make(spark, lake, config.ledger.directory, homeserver, shape)
        figures: dict[str, Any] = {
            "events": made.events,
            "servers": options.servers,
            "rooms": made.rooms,
            "pairs": made.pairs,
            "state_members": lake.rows(schemas.STATE_MEMBERS),
            "generate_s": round(time.perf_counter() - began, 1),
        }
        figures |= _measure(lake, config, directory, made)
        figures |= _measure_hour(config, directory, homeserver, shape, figures)
        return figures | {"broken": _broken(figures, made)}


async def pipeline_16(options: Options) -> dict[str, Any]:
    """The same, with sixteen tasks at once in the same heap."""
    return await pipeline(options, "local[16]")


async def pipeline_whole(options: Options) -> dict[str, Any]:
    """The same, with every delivery in the ledger."""
    return await pipeline(options, whole_ledger=True)


async def pipeline_one_server(options: Options) -> dict[str, Any]:
    """The same, with one server that half of all deliveries are for."""
    return await pipeline(options, whole_ledger=True, one_server=True)


def _measure(lake: Lake, config: Config, directory: Path, made: Made) -> dict[str, Any]:
    began = time.perf_counter()
    rows = lake.rows() + sum(made.fates.values()) - made.fates["before_ledger"]
    steps = Steps()
    with spark_session(config.pipeline.spark, "bench", directory, rows) as spark:
        meter = _Jobs(spark)
        start_s = round(time.perf_counter() - began, 1)
        found = _jobs(spark, lake, config, steps, meter, directory)
    return {
        "start_s": start_s,
        "jobs": meter.jobs,
        "peak_mb": max(job["java_peak_mb"] + job["python_peak_mb"] for job in meter.jobs.values()),
        "intervals": lake.rows(schemas.INTERVALS),
        "audit_rows": lake.rows(schemas.AUDIT),
        "lake_bytes": sum(file.bytes for files in lake.manifest.tables.values() for file in files),
        **found,
    }


def _measure_hour(
    config: Config,
    directory: Path,
    homeserver: sa.Engine,
    shape: Shape,
    before: dict[str, Any],
) -> dict[str, Any]:
    """The same jobs after an hour more."""
    lake = open_lake(config.pipeline.lake, US)
    with spark_session(config.pipeline.spark, "bench hour input", directory) as spark:
        more = add_hour(spark, lake, config.ledger.directory, homeserver, shape)
    ledgers = [config.ledger.directory]
    rows = ingest.rows_to_work_on(lake, ledgers, lake.position("audit_version"))
    python_s = cpu_s_of(os.getpid())
    steps = Steps()
    with spark_session(config.pipeline.spark, "bench", directory, rows) as spark:
        meter = _Jobs(spark)
        # Without what the measuring itself takes between the jobs.
        cpu_s = meter.cpu_s() - python_s
        found = _jobs(spark, lake, config, steps, meter, directory)
        cpu_s += sum(job["cpu_s"] for job in meter.jobs.values())
    fates = Counter({**before["fates"]})
    fates.update(more)
    first = sum(before["jobs"][name]["shuffle_mb"] for name in meter.jobs)
    return {
        "hour": meter.jobs,
        "hour_cpu_s": round(cpu_s, 1),
        "hour_shuffle_share": round(
            sum(job["shuffle_mb"] for job in meter.jobs.values()) / first, 4
        ),
        "hour_fates": found["fates"],
        "hour_fates_to_be": {fate: n for fate, n in fates.items() if n},
    }


def _jobs(
    spark: "SparkSession",
    lake: Lake,
    config: Config,
    steps: Steps,
    meter: "_Jobs",
    directory: Path,
) -> dict[str, Any]:
    """Run each job; their results."""
    with meter.job("owed"):
        _read_owed(lake, config, steps)
    with meter.job("ledger"):
        ledger_lines.read_ledger(spark, lake, [config.ledger.directory], steps)
    with meter.job("derive"):
        ingest.derive(spark, lake, US, steps)
    with meter.job("audit"):
        audited = audit.audit(spark, lake, config, steps)
    with meter.job("health"):
        well = health.health(spark, lake, steps)
    with meter.job("report"):
        report.report(spark, lake, config, steps, directory / "report.html")
    return {
        "attempts": lake.rows(schemas.ATTEMPTS),
        "pdus": lake.rows(schemas.PDUS),
        "fates": _found(audited),
        "servers_seen": well.servers,
    }


def _found(audited: audit.Audited) -> dict[str, int]:
    """The number of pairs of each fate, and of what went astray."""
    found = audited.counts | {"stray": audited.stray}
    return {fate: number for fate, number in found.items() if number}


def _read_owed(lake: Lake, config: Config, steps: Steps) -> None:
    """Read `destinations` and `destination_rooms`."""
    with open_source(config.homeserver.database, "homeserver") as source:
        ingest.read_snapshots(lake, source, "homeserver", steps)


def _broken(figures: dict[str, Any], made: Made) -> list[str]:
    """The wrong results, in words."""
    found = []
    if figures["fates"] != {fate: number for fate, number in made.fates.items() if number}:
        found.append(f"audit: {made.fates} were to be found")
    if figures["hour_fates"] != figures["hour_fates_to_be"]:
        found.append(f"audit of an hour more: {figures['hour_fates_to_be']} were to be found")
    if figures["peak_mb"] > SMALL_BOX_MB:
        found.append(f"memory: {figures['peak_mb']} MB, and {SMALL_BOX_MB} at most")
    return found


class _Jobs:
    """The cost of each job, read off the processes and off Spark's own records."""

    def __init__(self, spark: "SparkSession") -> None:
        context = spark.sparkContext
        gateway = context._gateway
        assert gateway is not None
        self._gateway = gateway
        self._store = context._jsc.sc().statusStore()
        self._java, self._python = gateway.proc.pid, os.getpid()
        self._stages: set[int] = set()
        self.jobs: dict[str, dict[str, Any]] = {}

    @contextmanager
    def job(self, name: str) -> Iterator[None]:
        """Measure the body: seconds, CPU seconds of both processes, MB of the rest."""
        for process in (self._java, self._python):
            # The peak is that of this job: it is set back to what is in use now.
            Path(f"/proc/{process}/clear_refs").write_text("5")
        self._shuffled_and_spilled()
        cpu, began = self.cpu_s(), time.perf_counter()
        yield
        seconds, cpu_s = time.perf_counter() - began, self.cpu_s() - cpu
        shuffled, spilled = self._shuffled_and_spilled()
        self.jobs[name] = {
            "s": round(seconds, 1),
            "cpu_s": round(cpu_s, 1),
            "java_peak_mb": rss_kb(self._java, "VmHWM") // 1024,
            "python_peak_mb": rss_kb(self._python, "VmHWM") // 1024,
            "shuffle_mb": round(shuffled / 2**20, 1),
            "spilled_mb": round(spilled / 2**20, 1),
        }

    def cpu_s(self) -> float:
        """The CPU seconds of Java since it began, and of this process."""
        return cpu_s_of(self._java) + cpu_s_of(self._python)

    def _shuffled_and_spilled(self) -> tuple[int, int]:
        """Bytes of the stages that are new since the last time."""
        jvm = self._gateway.jvm
        nothing = self._gateway.new_array(jvm.double, 0)
        stages = self._store.stageList(None, False, False, nothing, jvm.java.util.ArrayList())
        shuffled = spilled = 0
        for index in range(stages.size()):
            stage = stages.apply(index)
            if stage.stageId() not in self._stages:
                self._stages.add(stage.stageId())
                shuffled += stage.shuffleWriteBytes()
                spilled += stage.diskBytesSpilled()
        return shuffled, spilled
