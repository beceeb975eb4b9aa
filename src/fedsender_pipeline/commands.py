"""The commands of `fedsender pipeline`, one for each job. Exit codes are the command line's."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from fedsender.admin.commands import DONE, WRONG, AsJson, ConfigFile
from fedsender.console import Mistake, say, say_answer, say_text
from fedsender_pipeline import Busy, PipelineError, Usage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fedsender.config import Config
    from fedsender_pipeline.lake import Lake
    from fedsender_pipeline.session import Steps

BUSY: Final = os.EX_TEMPFAIL
"""Exit code 75: another job works on the lake. Code 1 would mean that deliveries are missing."""

EXTRA: Final = ("pyarrow", "pyspark", "jinja2")
"""The packages of the extra `pipeline`, which commands import when they are called."""


@contextmanager
def needing_extra() -> Iterator[None]:
    """For what a plain install has, too, without what it needs.

    Raises:
        Usage: a package of the extra is missing, and the body imports it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        how = "install it with `pip install 'fedsender[pipeline]'`"
        raise Usage(f"the pipeline needs {package}: {how}") from error


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with needing_extra():
            return super().invoke(ctx)


app = typer.Typer(help="Proof of delivery, and what the ledger knows, by Spark.", cls=_Commands)


def add_to(whole: typer.Typer) -> None:
    """Add `fedsender pipeline` to the command line."""
    whole.add_typer(app, name="pipeline")


@contextmanager
def job(
    name: str, config: Path, *, ingests: bool = False, writes: bool = False
) -> Iterator[tuple["SparkSession", "Lake", "Config", "Steps"]]:
    """The parts of a job: a Spark session, the lake, the configuration, and its display.

    A job that ingests makes the lake if there is none. It and one that `writes` hold the lake, so
    that no other job can come in between.
    """
    from fedsender_pipeline.ingest import rows_to_read, rows_to_work_on
    from fedsender_pipeline.session import showing, spark_session

    with opened(name, config, create=ingests) as (lake, loaded), ExitStack() as stack:
        if name in ("health", "run"):
            _check_target("pipeline.health", loaded.pipeline.health)
        if name == "run":
            _check_target("pipeline.textfile", loaded.pipeline.textfile)
        if ingests or writes:
            stack.enter_context(lake.held())
        steps = stack.enter_context(showing())
        unread = rows_to_read(lake, loaded) if ingests else 0
        if unread is None:
            rows = None
        elif name in ("ingest", "audit", "run"):
            rows = rows_to_work_on(lake, unread)
        else:
            rows = lake.rows() + unread
        with steps.step("starting Spark"):
            session = spark_session(loaded.pipeline.spark, name, lake.directory, rows)
            spark = stack.enter_context(session)
        yield spark, lake, loaded, steps


@contextmanager
def opened(name: str, config: Path, *, create: bool = False) -> Iterator[tuple["Lake", "Config"]]:
    """The lake and the configuration of a command.

    The command line shows errors of the pipeline. It exits with 1, with 2 for usage, or with 75
    where another job works on the lake. SIGTERM ends it as Ctrl-C does: uncommitted changes are
    discarded, and Java ends.
    """
    from fedsender.config import load
    from fedsender_pipeline.lake import open_lake

    loaded = load(config)
    code = WRONG
    try:
        with _interrupted_by_sigterm():
            yield open_lake(loaded.pipeline.lake, loaded.server_name, create=create), loaded
    except Usage:
        raise
    except Busy as error:
        text, code = f"{error}; try again when it has ended", BUSY
    except PipelineError as error:
        text = str(error)
    except KeyboardInterrupt:
        text = "interrupted; what it has committed stays, and the next run goes on from there"
    else:
        return
    say(f"fedsender: pipeline {name}: {text}", error=True)
    raise typer.Exit(code)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def ingest(config: ConfigFile, as_json: AsJson = False) -> int:
    """Bring new rows of the homeserver's database, and new ledger lines, into the lake."""
    from fedsender_pipeline.ingest import ingest as run

    with job("ingest", config, ingests=True) as (spark, lake, loaded, steps):
        told = run(spark, lake, loaded, steps)
        position = lake.position("events")
        lines = [
            f"{told.events} events up to {position}, {told.attempts} attempts with {told.pdus} PDUs"
            f" from {told.segments} segments, {told.rejects} lines rejected"
        ]
        if told.unknown_fields:
            lines.append(f"{told.unknown_fields} lines have fields that this version does not know")
        say_answer({"position": position, **asdict(told)}, as_json, *lines)
        _tidy(lake, loaded, steps)
    return DONE


# --- for other programs ---------------------------------------------------------------------------


@app.command()
def vacuum(config: ConfigFile, as_json: AsJson = False) -> int:
    """Merge small files of the lake, let old lines go, delete what is of no use any more."""
    from fedsender_pipeline import vacuum as module

    with opened("vacuum", config) as (lake, loaded), lake.held():
        told = module.vacuum(lake, loaded.pipeline.keep)
    say_answer(
        asdict(told),
        as_json,
        f"{told.merged} files merged, {told.let_go} lines of the ledger let go,"
        f" {told.freed / 2**20:.1f} MiB freed; the lake has {told.files} files",
    )
    return DONE


@app.command()
def schemas() -> int:
    """Print the tables of the lake and their columns, as Markdown."""
    from fedsender_pipeline.schemas import PAGE

    say_text(PAGE)
    return DONE


# --- what came of it ------------------------------------------------------------------------------


@app.command()
def audit(
    config: ConfigFile,
    repair: Annotated[
        bool, typer.Option("--repair", help="Have the daemon send again what is missing.")
    ] = False,
    accept: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What you accept as not delivered, from now on."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Compare the expected deliveries with those that the ledger proves."""
    from fedsender_pipeline import accepted
    from fedsender_pipeline import audit as module
    from fedsender_pipeline import repair as repair_module
    from fedsender_pipeline.ledger_lines import read_ledger

    repaired = failed = None
    rows = None if accept is None else accepted.read_accepted(accept)
    with job("audit", config, writes=True) as (spark, lake, loaded, steps):
        if rows is not None:
            accepted.accept(lake, rows)
        read_ledger(spark, lake, loaded, steps)
        found = module.audit(spark, lake, loaded, steps)
        if repair:
            pages = repair_module.missing_pairs(spark, lake)
            try:
                repaired = repair_module.repair(pages, found.missing, loaded, steps)
            except PipelineError as error:
                # What was found out is told all the same.
                failed = error
    answer = asdict(found)
    lines = [
        str(found),
        f"{found.expected} deliveries expected, of events up to {found.upto}",
    ]
    lines.append(f"{found.stray:>9} delivered that should not have been, or not so late")
    lines += [f"{n:>9} {fate.replace('_', ' ')}" for fate, n in found.counts.items()]
    if found.unknown_hosts:
        lines.append(f"{found.unknown_hosts} events have servers that cannot be told")
    for row in found.shown:
        lines.append(f"missing: {row['server']} {row['event_id']}: {'; '.join(row['reasons'])}")
    if found.missing > len(found.shown):
        lines.append(f"and {found.missing - len(found.shown)} more: see the table `missing`")
    for row in found.strays:
        lines.append(f"stray: {row['server']} {row['event_id']}: {row['why']}; line {row['line']}")
    if found.stray > len(found.strays):
        lines.append(f"and {found.stray - len(found.strays)} more: see the table `stray`")
    for row in found.repeats:
        lines.append(
            f"repeated: {row['server']} {row['event_id']}: {row['why']}:"
            f" {', '.join(row['transactions'])}"
        )
    if repaired is not None:
        answer |= asdict(repaired)
        lines.append(f"accepted by the daemon: {repaired.accepted}")
        lines += [f"refused: {' '.join(map(str, each.values()))}" for each in repaired.refused]
    say_answer(answer, as_json, *lines)
    if failed is not None:
        say(f"fedsender: pipeline audit: --repair: {failed}", error=True)
        return WRONG
    if repaired is not None:
        return WRONG if repaired.refused or found.stray else DONE
    return WRONG if found.is_red else DONE


@app.command()
def health(config: ConfigFile, as_json: AsJson = False) -> int:
    """Compute the health of the servers from the ledger, for the daemon."""
    from fedsender_pipeline import health as module
    from fedsender_pipeline.ledger_lines import read_ledger

    with job("health", config, writes=True) as (spark, lake, loaded, steps):
        read_ledger(spark, lake, loaded, steps)
        known = module.health(spark, lake, loaded, steps)
        with steps.spark("the week, and what is usual", spark):
            level = module.service_level(spark, lake)
            today = module.last_24_hours(*module.recent_hours(spark, lake))
            worse = module.worse(spark, lake, today)
    week, unusual = asdict(level), [asdict(each) for each in worse]
    say_answer(
        asdict(known) | {"service_level": week, "worse_than_usual": unusual},
        as_json,
        f"{known.servers} servers, of which {known.ill} ill",
        f"this week {level}",
        *(f"worse than usual: {each}" for each in worse),
    )
    return DONE


ReportFile = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="The page; else report.html in the lake."),
]


@app.command()
def report(config: ConfigFile, output: ReportFile = None) -> int:
    """Write one HTML page about the deliveries."""
    from fedsender_pipeline import report as module

    _check_target("-o", output)
    with job("report", config, writes=True) as (spark, lake, loaded, steps):
        path = (output or lake.directory / "report.html").absolute()
        module.report(spark, lake, loaded, steps, path)
    say(path)
    return DONE


def _check_target(option: str, path: Path | None) -> None:
    """Check, before the job starts, that a file can be written there."""
    if path is None:
        return
    directory = path.absolute().parent
    if path.is_dir():
        raise Mistake(f"{option}: {path}: is a directory")
    if not directory.is_dir():
        raise Mistake(f"{option}: {path}: there is no directory {directory}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise Mistake(f"{option}: {path}: {directory} may not be written to")


@app.command()
def run(config: ConfigFile, output: ReportFile = None, as_json: AsJson = False) -> int:
    """Do a scheduled run: ingest, audit, health, report. Exits with 1 if an event is missing, or
    went where it should not, or came out of order."""
    from fedsender_pipeline import audit as audit_module
    from fedsender_pipeline import health as health_module
    from fedsender_pipeline import ingest as ingest_module
    from fedsender_pipeline import report as report_module
    from fedsender_pipeline.textfile import write_textfile

    _check_target("-o", output)
    with opened("run", config, create=True) as (lake, loaded), lake.held():
        page = (output or lake.directory / "report.html").absolute()
        known = health_module.known(lake, loaded.pipeline.health)
        is_known = known is not None and page.is_file() and audit_module.still_holds(lake, loaded)
        if is_known and ingest_module.is_level(lake, loaded):
            told, found = ingest_module.Ingested(), audit_module.summed_up(lake, loaded)
            write_textfile(loaded, lake, found)
            say_answer(
                _run_as_json(told, found, known, page),
                as_json,
                f"nothing new; {found}",
            )
            return WRONG if found.is_red else DONE
    with job("run", config, ingests=True) as (spark, lake, loaded, steps):
        told = ingest_module.ingest(spark, lake, loaded, steps)
        found = audit_module.audit(spark, lake, loaded, steps)
        if not as_json:
            say(f"{told.events} events, {told.attempts} attempts taken in; {found}")
        known = health_module.health(spark, lake, loaded, steps)
        report_module.report(spark, lake, loaded, steps, page)
        write_textfile(loaded, lake, found)
        say_answer(
            _run_as_json(told, found, known, page),
            as_json,
            f"{known.ill} of {known.servers} servers ill; {page}",
        )
        _tidy(lake, loaded, steps)
    return WRONG if found.is_red else DONE


def _run_as_json(told: Any, found: Any, known: Any, page: Path) -> dict[str, Any]:
    answer = {"ingest": asdict(told), "audit": asdict(found), "report": str(page)}
    return answer | {"health": asdict(known)}


def _tidy(lake: "Lake", config: "Config", steps: "Steps") -> None:
    """Vacuum, once the answer is said."""
    from fedsender_pipeline.vacuum import vacuum as tidy

    with steps.step("files of the lake") as step:
        files = tidy(lake, config.pipeline.keep)
        step.say(f"{files.merged:,} merged, {files.files:,} now")
