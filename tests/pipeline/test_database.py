"""Ranges of a database, on SQLite and on PostgreSQL."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from tests.pipeline.test_ingest import config_of, contents
from tests.pipeline.worlds import US, driver_url, synapse_world
from tests.servers import Databases

from fedsender.config import Config
from fedsender.store import connections, tables
from fedsender_pipeline import PipelineError, database, ingest, schemas, sources
from fedsender_pipeline.database import Away, Reading, Source, open_source
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.session import Steps


@pytest.fixture(autouse=True)
def _small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 rows."""
    monkeypatch.setattr(ingest, "ROWS_PER_COMMIT", 40)
    monkeypatch.setattr(sources, "MEMBERS_PER_GROUP", 1)


def read(lake: Lake, url: str, config: Config) -> None:
    steps = Steps(quiet=True)
    with open_source(url, "homeserver") as source:
        ingest.HomeserverReader(lake, source, source, config, steps).read(
            sources.standing(source, None, config)
        )


def types(reading: Reading, upto: int) -> set[str]:
    """The types of the events up to there."""
    return {kind for rows in reading.read(0, upto) for kind in rows["type"].to_pylist()}


def test_all_pages_of_a_commit_see_one_moment(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them, and while they are read, a homeserver goes on and changes what it likes."""
    monkeypatch.setattr(database, "PAGE", 20)
    config = config_of(tmp_path, "synapse")
    url = postgres.create_database()
    world = synapse_world(driver_url(url), 2, rooms=2, steps=30)
    engine = sa.create_engine(driver_url(url))

    def change(kind: str) -> None:
        with engine.begin() as connection:
            connection.execute(tables.events.update().values(type=kind))

    with open_source(url, "homeserver") as source, source.snapshot():
        change("changed")
        pages = sources.events(source, config).read(0, world.ordering)
        seen = set(next(pages)["type"].to_pylist())
        change("changed again")
        seen.update(*(page["type"].to_pylist() for page in pages))
        assert not seen & {"changed", "changed again"}
    with open_source(url, "homeserver") as source:
        assert types(sources.events(source, config), world.ordering) == {"changed again"}
    engine.dispose()


def end_readers(url: str) -> None:
    """End the connections of the pipeline, as PostgreSQL does with one that holds too much."""
    engine = sa.create_engine(driver_url(url))
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'fedsender pipeline' AND datname = current_database()"
            )
        )
    engine.dispose()


def test_when_a_connection_dies_the_commit_is_read_again_from_another_snapshot(
    tmp_path: Path,
    postgres: Databases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, config = postgres.create_database(), config_of(tmp_path, "synapse")
    world = synapse_world(driver_url(url), 3, rooms=3, steps=40)

    def left_alone() -> None:
        with open_source(url, "homeserver") as source, source.snapshot():
            end_readers(url)
            types(sources.events(source, config), world.ordering)

    with pytest.raises(Away, match=r"^homeserver database: .*(terminat|snapshot)"):
        left_alone()
    made, read_of = 0, Reading.read

    def dying(reading: Reading, *arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made == 2:
            end_readers(url)
        return read_of(reading, *arguments)

    monkeypatch.setattr(Reading, "read", dying)
    lakes = [open_lake(tmp_path / name, US, create=True) for name in ("lake", "whole")]
    for lake in lakes:
        read(lake, url, config)
        assert lake.rows(schemas.EVENTS) == world.ordering
    assert contents(lakes[0]) == contents(lakes[1])
    assert made > 2


def test_a_range_that_fails_is_one_error_with_table_and_range(
    tmp_path: Path, postgres: Databases
) -> None:
    sqlite, url = f"sqlite:///{tmp_path}/a.db", postgres.create_database()
    for each in (sqlite, url):
        world = synapse_world(driver_url(each), 4, rooms=4, steps=40)
        assert world.ordering > 100
    broken = {
        sqlite: "UPDATE events SET received_ts = 'soon' WHERE stream_ordering = 70",
        url: "DROP TABLE rejections",
    }
    said = {
        sqlite: r"^events 41 to 80: .*",
        url: r'^homeserver database: relation "rejections" does not exist.* \(events \d+ to \d+\)$',
    }
    for each, statement in broken.items():
        engine = sa.create_engine(driver_url(each))
        with engine.begin() as connection:
            connection.execute(sa.text(statement))
        engine.dispose()
        lake = open_lake(tmp_path / ("s" if each == sqlite else "p"), US, create=True)
        with pytest.raises(PipelineError, match=said[each]) as caught:
            read(lake, each, config_of(tmp_path, "synapse"))
        assert "\n" not in str(caught.value)
        assert lake.rows(schemas.EVENTS) == (40 if each == sqlite else 0)


@contextmanager
def most_connections(url: str, awaited: int) -> Iterator[Callable[[], int]]:
    """The most connections of the pipeline that there were at once, while the body ran.

    All that read events wait until there are as many as awaited.
    """
    over, most = threading.Event(), 0
    query = sa.text(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE application_name = 'fedsender pipeline' AND datname = current_database()"
    )
    engine = sa.create_engine(driver_url(url))
    lock = engine.connect()
    lock.execute(sa.text("LOCK TABLE events"))

    def count() -> None:
        nonlocal most
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while not over.wait(0.01):
                most = max(most, connection.execute(query).scalar_one())
                if most >= awaited:
                    lock.rollback()

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield lambda: most
    finally:
        over.set()
        thread.join()
        lock.close()
        engine.dispose()


def test_one_connection_reads(tmp_path: Path, postgres: Databases) -> None:
    url = postgres.create_database()
    synapse_world(driver_url(url), 5, rooms=3, steps=40)
    lake = open_lake(tmp_path / "lake", US, create=True)
    with most_connections(url, 1) as most:
        read(lake, url, config_of(tmp_path, "synapse"))
    assert most() == 1


def test_a_rate_is_not_exceeded_and_time_lost_not_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(database, "time", clock)
    monkeypatch.setattr(database, "PAGE", 100)
    url = f"sqlite:///{tmp_path}/n.db"
    engine = sa.create_engine(url)
    table = sa.Table("n", sa.MetaData(), sa.Column("n", sa.Integer, primary_key=True))
    table.create(engine)
    with engine.begin() as connection:
        connection.execute(table.insert(), [{"n": n} for n in range(1, 501)])
    engine.dispose()
    with open_source(url, "homeserver", 100) as source:
        pages = source.pages(sa.select(table.c.n), [table.c.n])
        for taken_s in (0.0, 0.0, 0.5, 3.0, 0.0):
            assert len(next(pages)) == 100
            now += taken_s
        assert next(pages, None) is None
    assert slept == [1.0, 1.0, 0.5, 1.0]


def test_a_connection_can_only_read_and_a_page_that_takes_too_long_is_made_smaller(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.create_database()
    engine = sa.create_engine(driver_url(url))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE n AS SELECT generate_series(1, 1500) AS n"))
        connection.execute(sa.text("CREATE UNIQUE INDEX ON n (n)"))
    engine.dispose()
    table = sa.table("n", sa.column("n", sa.BigInteger))
    query = sa.select(table.c.n, sa.func.pg_sleep(0.001))

    def setting(name: str) -> Callable[[sa.Connection], str]:
        return lambda connection: connection.execute(sa.text(f"SHOW {name}")).scalar_one()

    with open_source(url, "homeserver") as source:
        assert source.read(setting("default_transaction_read_only")) == "on"
        assert source.read(setting("transaction_read_only")) == "on"
        assert source.read(setting("statement_timeout")) == "1min"
        assert source.read(setting("max_parallel_workers_per_gather")) == "0"
    monkeypatch.setattr(connections, "STATEMENT_MS", 1_000)
    with closing(Source(url, "homeserver")) as source:
        pages = [len(page) for page in source.pages(query, [table.c.n])]
    assert sum(pages) == 1_500
    assert max(pages) < 1_000


def test_a_table_that_is_locked_may_be_asked_for_again(
    postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the database is away, which it is not."""
    monkeypatch.setattr(connections, "LOCK_MS", 10)
    monkeypatch.setattr(database, "_TRIES", 1)
    url = postgres.create_database()
    with psycopg.connect(url) as holder, closing(Source(url, "homeserver")) as source:
        holder.execute("CREATE TABLE n (n integer)")
        holder.commit()
        holder.execute("LOCK TABLE n IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(Away, match="lock timeout"):
            source.read(lambda connection: connection.execute(sa.text("SELECT n FROM n")).all())
