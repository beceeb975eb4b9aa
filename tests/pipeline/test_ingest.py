"""Reading a homeserver's database: from SQLite and PostgreSQL, in pieces, after a crash."""

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from tests.pipeline.worlds import US, driver_url, embedded_world, set_position, synapse_world
from tests.servers import Databases
from tests.store import synapse_schema

from fedsender.config import Config, from_values
from fedsender.store import tables
from fedsender_pipeline import PipelineError, database, ingest, schemas, sources
from fedsender_pipeline.database import open_source
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.session import Steps

ROOM_TABLES = (
    schemas.EVENTS,
    schemas.STATE_GROUPS,
    schemas.STATE_MEMBERS,
    schemas.ROOM_SERVERS,
    schemas.TOLD_SERVERS,
)


class Killed(BaseException):
    """The process ended here."""


def config_of(
    directory: Path, kind: str, pipeline: dict[str, Any] | None = None, **homeserver: Any
) -> Config:
    return from_values(
        {
            "server_name": US,
            "signing_key": "key",
            "instance_name": "master" if kind == "synapse" else "fedsender",
            "homeserver": {"kind": kind, "database": "unused", **homeserver},
            "feed": {"kind": "redis" if kind == "synapse" else "tcp"},
            "pipeline": pipeline or {},
        },
        directory=directory,
    )


def read(lake: Lake, url: str, config: Config) -> int:
    """Read what is new: the number of events."""
    before = lake.rows(schemas.EVENTS)
    other, steps = config.homeserver.state_database, Steps(quiet=True)
    with (
        open_source(url, "homeserver") as main,
        nullcontext(main) if other is None else open_source(other, "state") as state,
    ):
        now = sources.standing(main, None, config)
        ingest.HomeserverReader(lake, main, state, config, steps).read(now)
    return lake.rows(schemas.EVENTS) - before


def contents(lake: Lake) -> dict[str, list[dict[str, Any]]]:
    """The rows about rooms, each once, without the commit that brought them."""
    found = {}
    for table in ROOM_TABLES:
        rows = lake.read(table).to_pylist()
        for row in rows:
            row.pop("version", None)
        unique = {repr(row): row for row in rows}
        found[table.name] = [unique[key] for key in sorted(unique)]
    return found


def move(url: str, instance: str, position: int) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        set_position(connection, instance, position)
    engine.dispose()


def test_postgresql_and_sqlite_give_the_same(tmp_path: Path, postgres: Databases) -> None:
    config = config_of(tmp_path, "synapse")
    found = []
    for name, url in (("l", f"sqlite:///{tmp_path}/a.db"), ("p", postgres.create_database())):
        world = synapse_world(driver_url(url), 7, rooms=5, steps=40)
        lake = open_lake(tmp_path / name, US, create=True)
        assert read(lake, url, config) == world.ordering
        found.append(contents(lake))
    assert found[0] == found[1]
    assert all(found[0][table.name] for table in ROOM_TABLES if table.name != "room_servers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synapse", "embedded"])
def test_in_pieces_twice_and_after_crashes_it_is_the_same(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events come in commits; between any two steps of them the process may end."""
    monkeypatch.setattr(database, "PAGE", 20)
    monkeypatch.setattr(ingest, "ROWS_PER_COMMIT", 50)
    make: Callable[..., Any] = synapse_world if kind == "synapse" else embedded_world
    url = f"sqlite:///{tmp_path}/a.db"
    world = make(url, 3, rooms=4, steps=40)
    config = config_of(tmp_path, kind)
    whole = open_lake(tmp_path / "whole", US, create=True)
    read(whole, url, config)
    expected = contents(whole)
    expected["told_servers"] = []  # These are of the moment, and said for what is read then.

    steps = 0

    def killed_at(number: int) -> Callable[[str], None]:
        def faults(_: str) -> None:
            nonlocal steps
            steps += 1
            if steps == number:
                raise Killed

        return faults

    for position in (world.ordering // 2, world.ordering):
        move(url, config.instance_name, position)
        number, done = 1, False
        while not done:
            steps = 0
            lake = open_lake(tmp_path / "lake", US, create=True, faults=killed_at(number))
            try:
                read(lake, url, config)
                done = True
            except Killed:
                number += 7
    commit = lake.manifest.commit
    assert read(lake, url, config) == 0
    found = contents(lake)
    found["told_servers"] = []
    assert found == expected
    assert lake.rows(schemas.EVENTS) == world.ordering
    assert lake.manifest.commit == commit


@pytest.mark.slow
def test_state_may_be_in_a_database_of_its_own(tmp_path: Path) -> None:
    """Synapse can be split so; what a membership event says is then in the other one."""
    main, state = f"sqlite:///{tmp_path}/main.db", f"sqlite:///{tmp_path}/state.db"
    synapse_world(main, 5, rooms=3, steps=30)
    whole = open_lake(tmp_path / "whole", US, create=True)
    read(whole, main, config_of(tmp_path, "synapse"))
    engine, other = sa.create_engine(main), sa.create_engine(state)
    split = (tables.state_groups, tables.state_groups_state, tables.state_group_edges)
    with engine.begin() as source, other.begin() as target:
        synapse_schema.create_state(target)
        tables.state_groups.create(target, checkfirst=True)
        for table in split:
            rows = [dict(row._mapping) for row in source.execute(table.select())]
            target.execute(table.insert(), rows)
            source.execute(sa.text(f"DROP TABLE {table.name}"))
    engine.dispose()
    other.dispose()
    lake = open_lake(tmp_path / "lake", US, create=True)
    read(lake, main, config_of(tmp_path, "synapse", state_database=state))
    assert contents(lake) == contents(whole)


@pytest.mark.parametrize("own", [True, False])
def test_the_database_of_state_may_have_a_password_of_its_own(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the daemon: without one, that of the homeserver's database is taken."""
    urls = {}
    monkeypatch.setattr(
        ingest, "open_source", lambda url, name, _: nullcontext(urls.update({name: url}))
    )
    for name in ("main", "state"):
        (tmp_path / name).write_text(name[0])
    settings: dict[str, Any] = {
        "database": "postgresql://u@h/synapse",
        "database_password_file": "main",
        "state_database": "postgresql://u@h/state",
    }
    if own:
        settings["state_database_password_file"] = "state"
    with ingest.opened(config_of(tmp_path, "synapse", **settings)):
        pass
    assert urls["homeserver"] == "postgresql+psycopg://u:%6D@h/synapse"
    assert urls["state"] == f"postgresql+psycopg://u:{'%73' if own else '%6D'}@h/state"


def test_what_stands_in_the_databases_now_is_taken_anew(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/own.db"
    engine = sa.create_engine(url)
    tables.sender.create_all(engine)
    lake = open_lake(tmp_path / "lake", US, create=True)
    for room in ("!a", "!b"):
        with engine.begin() as connection:
            connection.execute(
                tables.catch_ups.insert().prefix_with("OR REPLACE"),
                [{"destination": name, "floor": 3} for name in "xy"],
            )
            connection.execute(
                tables.catch_up_rooms.insert(),
                [{"destination": "x", "room_id": room, "sent_to": 4}],
            )
        steps = Steps(quiet=True)
        with open_source(url, "sender") as source:
            ingest.read_snapshots(lake, source, "sender", steps)
    engine.dispose()
    rows = [tuple(row.values()) for row in lake.read(schemas.CATCH_UPS).to_pylist()]
    assert rows == [("x", 3, "!a", 4), ("x", 3, "!b", 4), ("y", 3, None, None)]
    assert lake.rows(schemas.QUARANTINE) == 0


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_of_the_rows_of_rooms_those_above_the_mark_are_read(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever the order of names, and the pages; without a mark, or a row, of the server, all.
    Where they are the same as before, nothing is written, whatever their order there."""
    url = f"sqlite:///{tmp_path}/main.db" if kind == "sqlite" else postgres.create_schema()
    engine = sa.create_engine(driver_url(url))
    tables.homeserver.create_all(engine)
    lake = open_lake(tmp_path / "lake", US, create=True)
    monkeypatch.setattr(sources, "PAGE", 4)
    marks = {f"{'aZé-'[n % 4]}{n}.example": n if n % 5 else None for n in range(20)}
    rooms = [(name, f"!{'bA_'[n % 3]}{n}", n) for name in marks for n in range(1, 20)]
    with engine.begin() as connection:
        connection.execute(
            tables.destinations.insert(),
            [
                {"destination": name, "last_successful_stream_ordering": mark}
                for name, mark in list(marks.items())[1:]
            ],
        )
    names = ("destination", "room_id", "stream_ordering")
    for order in (rooms, rooms[::-1]):
        with engine.begin() as connection:
            connection.execute(tables.destination_rooms.delete())
            connection.execute(
                tables.destination_rooms.insert(),
                [dict(zip(names, row, strict=True)) for row in order],
            )
        with open_source(url, "homeserver") as source:
            ingest.read_snapshots(lake, source, "homeserver", Steps(quiet=True))
    engine.dispose()
    found = [tuple(row.values()) for row in lake.read(schemas.DESTINATION_ROOMS).to_pylist()]
    assert len(found) > 150
    assert sorted(found) == sorted(row for row in rooms if row[2] > (marks[row[0]] or 0))
    assert {file.commit for file in lake.files(schemas.DESTINATION_ROOMS)} == {1}


@pytest.mark.parametrize("metadata", ["[]", "not json", ""])
def test_an_event_without_metadata_is_as_bad_as_the_fan_out_takes_it(
    tmp_path: Path, metadata: str
) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    synapse_world(url, 1, rooms=1, steps=10)
    lake = open_lake(tmp_path / "lake", US, create=True)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(tables.event_json.update().values(internal_metadata=metadata))
    engine.dispose()
    read(lake, url, config_of(tmp_path, "synapse"))
    bad = {row["bad"] for row in lake.read(schemas.EVENTS).to_pylist() if row["ours"]}
    assert bad == {"the homeserver has no JSON for it"}


def test_a_database_that_went_back_is_not_the_lakes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    synapse_world(url, 1, rooms=1, steps=10)
    lake = open_lake(tmp_path / "lake", US, create=True)
    config = config_of(tmp_path, "synapse")
    read(lake, url, config)
    move(url, "master", 2)
    with pytest.raises(PipelineError, match=r"position is 2, and the lake has read up to \d+"):
        read(lake, url, config)


def test_a_database_that_cannot_be_read_is_named(tmp_path: Path, postgres: Databases) -> None:
    config = config_of(tmp_path, "synapse")
    lake = open_lake(tmp_path / "lake", US, create=True)
    (tmp_path / "text.db").write_text("this is not a database, but it is long enough for one")
    empty = postgres.create_database()
    nowhere = re.sub(r"/[^/?]+(\?|$)", r"/nowhere\1", empty)
    for url, said in (
        (f"sqlite:///{tmp_path}/none.db", "homeserver database: there is no file .*none.db"),
        (f"sqlite:///{tmp_path}/text.db", "homeserver database: file is not a database"),
        (empty, "homeserver database: .*federation_stream_position.* does not exist"),
        (nowhere, "homeserver database: .*nowhere.* does not exist"),
    ):
        with pytest.raises(PipelineError, match=said):
            read(lake, url, config)
    assert lake.manifest.commit == 0


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_database_that_goes_away_in_the_middle(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch, *, comes_back: bool
) -> None:
    """For a moment: it is waited for. For long: that is said, and later it goes on from there."""
    monkeypatch.setattr(database, "PAGE", 20)
    monkeypatch.setattr(ingest, "ROWS_PER_COMMIT", 20)
    url = postgres.create_database()
    world = synapse_world(driver_url(url), 4, rooms=2, steps=40)
    config = config_of(tmp_path, "synapse")
    whole = open_lake(tmp_path / "whole", US, create=True)
    read(whole, url, config)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if comes_back:
            postgres.start()

    monkeypatch.setattr(database, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))

    def stop(point: str) -> None:
        if point == "after commit" and not pauses and postgres.server.running:
            postgres.stop()

    lake = open_lake(tmp_path / "lake", US, create=True, faults=stop)
    if comes_back:
        assert read(lake, url, config) == world.ordering
        assert len(pauses) == 1
    else:
        with pytest.raises(PipelineError, match=r"homeserver database: .*connection"):
            read(lake, url, config)
        assert len(pauses) == 4
        assert 0 < lake.rows(schemas.EVENTS) < world.ordering
        monkeypatch.undo()
        postgres.start()
        assert 0 < read(lake, url, config) < world.ordering
    assert contents(lake) == contents(whole)
    assert lake.rows(schemas.EVENTS) == world.ordering, "each once"


def test_nothing_can_be_written_to_the_homeserver(tmp_path: Path, postgres: Databases) -> None:
    """Whatever the pipeline does with it, the database refuses."""
    sqlite, postgresql = f"sqlite:///{tmp_path}/a.db", postgres.create_database()
    synapse_world(sqlite, 1, rooms=1, steps=3)
    for url in (sqlite, postgresql):
        with (
            open_source(url, "homeserver") as source,
            pytest.raises(PipelineError, match=r"read-?only"),
        ):
            source.read(lambda connection: connection.execute(sa.text("CREATE TABLE x (y INT)")))


def test_what_a_job_works_on_is_estimated(tmp_path: Path) -> None:
    """What was read since the last one, whatever the database, and lines that are not read yet; not
    what jobs have made of it, such as the health of ten thousand servers in each hour."""
    url = f"sqlite:///{tmp_path}/main.db"
    synapse_world(url, 7, rooms=2, steps=10)
    config = config_of(tmp_path, "synapse", database=url)
    ledgers = [config.ledger.directory]
    ledgers[0].mkdir(parents=True)
    lake = open_lake(tmp_path / "lake", US, create=True)
    assert ingest.rows_to_work_on(lake, ledgers, -1) == 0
    read(lake, url, config)
    known = ingest.rows_to_work_on(lake, ledgers, -1)
    assert known == sum(lake.rows(schemas.TABLES[name]) for name in ingest.READ) > 0
    rows = [
        {"server": f"s{n}", "hour_ms": 0, "day": date(1970, 1, 1), "attempts": 1, "delivered": 1,
         "last_ms": 1}
        for n in range(20)
    ]  # fmt: skip
    with lake.commit() as commit:
        commit.append_rows(schemas.HEALTH, rows)
    assert ingest.rows_to_work_on(lake, ledgers, -1) == known
    assert ingest.rows_to_work_on(lake, ledgers, lake.manifest.commit - 1) == 0
    segment = ledgers[0] / f"{config.instance_name}.b.000001.jsonl"
    segment.write_bytes(b" " * ingest.LINE_BYTES * 70)
    assert ingest.rows_to_work_on(lake, ledgers, lake.manifest.commit) == 70
