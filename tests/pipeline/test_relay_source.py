"""A relay's log and snapshots as a source: what its senders are told, read beside it."""

import json
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sqlalchemy as sa
from tests.pipeline.test_ingest import contents
from tests.pipeline.worlds import SERVERS, US
from tests.relay.log_support import Clock, append, open_log, runtime

from fedsender.config import Config, ConfigError, from_values
from fedsender.embedded import feeding
from fedsender.store import positions, tables
from fedsender.store.event_rows import membership_in
from fedsender.store.migrations import upgrade
from fedsender.store.records import History
from fedsender.streams import Json
from fedsender_pipeline import PipelineError, ingest, relay_source
from fedsender_pipeline.database import open_source
from fedsender_pipeline.ingest import Ingested
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.session import showing
from fedsender_relay.feed import read_rows
from fedsender_relay.line_feed import parse_record
from fedsender_relay.load import load
from fedsender_relay.log import RelayLog
from fedsender_relay.snapshot import Row, SnapshotInfo, write_snapshot

INSTANCE = "sender-1"
MS = 1_800_000_000_000
ROOM = f"!a:{US}"
Records = Sequence[Sequence[Json]]
Found = dict[str, list[dict[str, Any]]]


def config_of(directory: Path, *, relay: bool) -> Config:
    values = {
        "server_name": US,
        "signing_key": "key",
        "instance_name": INSTANCE,
        "feed": {"kind": "relay", "relay": {"address": "unix:/relay.sock"}},
        "pipeline": {"relay": str(directory / "relay/relay.sqlite3")} if relay else {},
    }
    return from_values(values, directory=directory)


def random_records(random: Random, count: int) -> list[list[Json]]:
    """Messages, people who come, go and are turned away, servers that come and go, EDUs."""
    records: list[list[Json]] = []
    last_of: dict[tuple[str, str], str] = {}
    for number in range(1, count + 1):
        room, rows = f"!{random.choice('abc')}:{US}", []
        if random.random() < 0.85:
            rows.append(random_event(random, number, room, last_of))
        if not rows or random.random() < 0.3:
            some = random.sample(SERVERS[1:], 2)
            rows.append(["hosts", [room, some[: random.randint(0, 1)], some[1:]]])
        if random.random() < 0.1:
            rows.append(["edu", ["to_device", SERVERS[1], f"m{number}", {}]])
        records.append(rows)
    return records


def random_event(
    random: Random, number: int, room: str, last_of: dict[tuple[str, str], str]
) -> Json:
    event_id = f"$e{number}"
    event: dict[str, Json] = {
        "type": "m.room.message",
        "sender": f"@me:{US}",
        "content": {},
        "prev_events": ["$before"],
    }
    if random.random() < 0.5:
        user = f"@{random.choice('xy')}:{random.choice(SERVERS)}"
        membership = random.choice(("invite", "join", "leave", "ban", "knock"))
        before = last_of.get((room, user))
        event |= {"type": "m.room.member", "state_key": user}
        event |= {"content": {"membership": membership}, "auth_events": [before] if before else []}
        last_of[room, user] = event_id
    about: dict[str, Json] = {"room_version": "11"}
    if random.random() < 0.3:
        about |= {"plus": [random.choice(SERVERS)], "minus": random.sample(SERVERS, 1)}
    if random.random() < 0.1:
        about["internal_metadata"] = {"send_on_behalf_of": random.choice(SERVERS)}
    return ["pdu", [room, event_id, event, about]]


@asynccontextmanager
async def relay_of(directory: Path, records: Records, seed: int = 0) -> AsyncIterator[RelayLog]:
    """A relay's log that holds these, open for more."""
    clock = Clock(MS)
    async with open_log(directory / "relay", runtime(seed, now_ms=clock), US) as log:
        clock.now_ms += 1_000 * log.head
        for rows in records:
            clock.now_ms += 1_000
            await append(log, *rows)
        yield log


def sender_store(directory: Path, records: Records) -> str:
    """The store of a sender that was told all of them, and has fanned out nothing yet."""
    url = f"sqlite:///{directory / 'homeserver.sqlite3'}"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        upgrade(connection, "homeserver")
        positions.set_feed_history(connection, History("0" * 16, 0))
        for token, rows in enumerate(records, 1):
            facts = [(token, parse_record(token, rows, lambda _: True))]
            feeding.apply_tokens(connection, facts, MS + 1_000 * token)
    engine.dispose()
    return url


def fan_out(url: str, upto: int, base: int = 0, epoch: str | None = None) -> None:
    """The sender has fanned out up to there; it follows the relay that is there now."""
    relay = Path(url.removeprefix("sqlite:///")).parent / "relay/relay.sqlite3"
    found = None
    if relay.exists():
        with closing(sqlite3.connect(relay)) as database, database:
            ((found,),) = database.execute("SELECT epoch FROM stream_epoch")
    name = epoch or found or "0" * 16
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        positions.set_position(connection, "events", INSTANCE, upto)
        positions.set_feed_history(connection, History(name, base))
    engine.dispose()


def read(lake: Lake, url: str, config: Config) -> Ingested:
    told = Ingested()
    with (
        showing(quiet=True) as steps,
        open_source(url, "homeserver") as main,
        ingest._rooms(lake, main, config, steps, told) as rooms,
    ):
        ingest.HomeserverReader(lake, rooms, config, steps, told).read()
    return told


@pytest.mark.slow
async def test_what_the_relay_told_is_what_a_sender_that_lost_nothing_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, while the relay runs, each time only what is new and up to where the sender is,
    and a second time nothing."""
    monkeypatch.setattr(relay_source, "BYTES_AT_ONCE", 1_000)
    records = random_records(Random(5), 120)
    url = sender_store(tmp_path, records)
    lake = open_lake(tmp_path / "lake", US, create=True)
    config = config_of(tmp_path, relay=True)
    events = 0
    for seed, some, positions_ in ((0, records[:60], (50, 51)), (1, records[60:], (90, 120))):
        # The second time the relay was started again, and its epoch is another.
        async with relay_of(tmp_path, some, seed):
            for upto in positions_:
                fan_out(url, upto)
                events += read(lake, url, config).events
                assert lake.position("events") == upto
            commit = lake.manifest.commit
            assert read(lake, url, config).events == 0
            assert lake.manifest.commit == commit
    whole = open_lake(tmp_path / "whole", US, create=True)
    assert read(whole, url, config_of(tmp_path, relay=False)).events == events
    found, expected = contents(lake), contents(whole)
    assert told(found) == told(expected)
    assert stays(found) == stays(expected)
    assert len(stays(found)) > 10


async def test_what_a_sender_lost_is_in_the_relay(tmp_path: Path) -> None:
    """It was told of three events and stored two: the lake knows of three."""
    records = [
        [["pdu", ["!r", f"$e{n}", {"type": "t", "sender": f"@me:{US}"}, {"room_version": "11"}]]]
        for n in range(3)
    ]
    url = sender_store(tmp_path, [*records[:1], [["hosts", ["!r", [], []]]], *records[2:]])
    lake = open_lake(tmp_path / "lake", US, create=True)
    async with relay_of(tmp_path, records):
        fan_out(url, 3)
        assert read(lake, url, config_of(tmp_path, relay=True)).events == 3


@pytest.mark.slow
async def test_what_the_relay_let_go_the_sender_tells(tmp_path: Path) -> None:
    """Each event of it and who was there then, and it is counted; so for a lake that was begun
    before, whose position the log does not reach back to any more, as for a new one. The newest of
    each room is still in the relay, whatever the sender has."""
    records = random_records(Random(6), 120)
    quiet = f"!quiet:{US}"
    event = {"type": "t", "sender": f"@me:{US}", "prev_events": ["$before"]}
    records[9] = [["hosts", [quiet, [SERVERS[1]], []]]]
    records[10] = [["pdu", [quiet, "$quiet", event, {"room_version": "11"}]]]
    url = sender_store(tmp_path, records)
    config = config_of(tmp_path, relay=True)
    whole = open_lake(tmp_path / "whole", US, create=True)
    fan_out(url, 120)
    read(whole, url, config_of(tmp_path, relay=False))
    expected = contents(whole)
    older = open_lake(tmp_path / "older", US, create=True)
    async with relay_of(tmp_path, records) as log:
        fan_out(url, 5)
        read(older, url, config)
        await log.drop_through(90)
        fan_out(url, 100)
        assert read(older, url, config).from_sender == events_in(expected, 5, 90)
        fan_out(url, 120)
        assert read(older, url, config).from_sender == 0
        assert told(contents(older)) == told(expected)
        forget(url, 11)
        new = open_lake(tmp_path / "new", US, create=True)
        assert read(new, url, config).from_sender == events_in(expected, 0, 90) - 1
        assert told(contents(new)) == told(expected)
        assert stays(contents(new)) == stays(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("late", "begun"), [(False, True), (True, False), (True, True)])
async def test_another_history_goes_on_where_the_first_ended(
    tmp_path: Path, late: bool, begun: bool
) -> None:
    """The relay was replaced: its tokens begin anew, and the sender counts on from what it had.
    What was before is the sender's to say; of what is told again, nothing is there twice. Where the
    log is whole, each event is known for which the sender has a snapshot's alone."""
    before = random_records(Random(8), 60)
    again: list[Json] = [["hosts", [f"!z:{US}", ["again.example"], []]]]
    before[20] = again
    anew = json.loads(json.dumps(random_records(Random(9), 80)).replace("$e", "$f"))
    alone = {"type": "t", "sender": f"@me:{US}"}
    anew[5] = [["pdu", [f"!z:{US}", "$alone", alone, {"room_version": "11"}]]]
    anew[6], anew[7] = again, [["pdu", [f"!z:{US}", "$both", alone, {"room_version": "11"}]]]
    records = [*before[:20], *anew]
    url = sender_store(tmp_path, before)
    lake = open_lake(tmp_path / "lake", US, create=True)
    config = config_of(tmp_path, relay=True)
    async with relay_of(tmp_path, before):
        if begun:
            fan_out(url, 40)
            read(lake, url, config)
    (tmp_path / "relay").rename(tmp_path / "first")
    token = 70
    async with relay_of(tmp_path, records[:token], seed=1) as log:
        # It follows the new one, and has not fanned out what the first one said.
        fan_out(url, 50, epoch="f" * 16)
        with pytest.raises(
            PipelineError, match=r"the sender follows history f{16}, .* has yet to come"
        ):
            read(lake, url, config)
        fan_out(url, 50, base=60)
        read(lake, url, config)
        assert lake.position("events") == 50
        take_snapshot(url, await snapshot(tmp_path, log), History(log.epoch, 60))
        for rows in records[token:]:
            await append(log, *rows)
        follow(url, records, token, base=60)
        if late:
            await log.drop_through(45)
        fan_out(url, len(records) + 60, base=60)
        read(lake, url, config)
        assert read(lake, url, config).events == 0
    whole = open_lake(tmp_path / "whole", US, create=True)
    read(whole, url, config_of(tmp_path, relay=False))
    found, expected = contents(lake), contents(whole)
    ids = [each["event_id"] for each in found["events"]]
    assert len(set(ids)) == len(ids)
    assert heads(found) == heads(expected)
    assert present(found) == present(expected)
    assert set(ids) > {each["event_id"] for each in expected["events"]}
    if not late:
        servers = {each[1]: each[-1] for each in told(found)}
        assert (servers["$alone"], servers["$both"]) == (frozenset(), {"again.example"})
    fan_out(url, 60, base=0)
    with pytest.raises(PipelineError, match=r"other ones up to \d+: the sender's database is"):
        read(lake, url, config)


@pytest.mark.slow
async def test_what_the_lake_has_is_not_kept_twice(tmp_path: Path) -> None:
    """But invitations and knocks; a lake that is begun anew gets all of it again."""
    records = random_records(Random(5), 120)
    url = sender_store(tmp_path, records)
    config = config_of(tmp_path, relay=True)
    async with relay_of(tmp_path, records):
        fan_out(url, 120)
        lake = open_lake(tmp_path / "lake", US, create=True)
        events = read(lake, url, config).events
        store = tmp_path / "lake" / "relay" / relay_source.STORE
        assert store.stat().st_mode & 0o777 == 0o600
        engine = sa.create_engine(f"sqlite:///{store}")
        with engine.begin() as connection:
            texts = connection.execute(sa.select(tables.event_json.c.json)).scalars().all()
            left = connection.execute(sa.select(tables.room_servers.c.left)).scalars().all()
            number = connection.execute(sa.select(sa.func.count()).select_from(tables.events))
            assert number.scalar() == len(texts)
        engine.dispose()
        assert 0 < len(texts) < events / 3
        assert {membership_in(text) for text in texts} == {"invite", "knock"}
        assert {each for each in left if each is not None} <= {120}
        found = contents(lake)
        for path in (tmp_path / "lake").iterdir():
            if path.name != "relay":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        lake = open_lake(tmp_path / "lake", US, create=True)
        assert read(lake, url, config).events == events
        assert told(contents(lake)) == told(found)


async def snapshot(directory: Path, log: RelayLog) -> SnapshotInfo:
    """One of all that the relay was told."""
    root = directory / "snap"
    return await log._store.with_tables(lambda found: write_snapshot(root, found, MS, lambda: None))


@dataclass(frozen=True)
class _Taken:
    """A snapshot as a store takes it over."""

    token: int
    history: History
    info: SnapshotInfo

    def read(self, table: str, part: int) -> Iterator[Row]:
        return read_rows(self.info, table, part)


def take_snapshot(url: str, info: SnapshotInfo, history: History) -> None:
    """The sender does."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        steps = load(_Taken(info.token, history, info), lambda _: True, MS)
        step, _ = feeding.run_step(steps, None)
        while step is not None:
            step, _ = feeding.run_step(steps, step(connection))
    engine.dispose()


def follow(url: str, records: Records, after: int, base: int) -> None:
    """The sender takes the records behind a token."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for token, rows in list(enumerate(records, 1))[after:]:
            facts = [(token + base, parse_record(token, rows, lambda _: True))]
            feeding.apply_tokens(connection, facts, MS)
    engine.dispose()


def forget(url: str, ordering: int) -> None:
    """The sender loses an event."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        table = tables.events
        connection.execute(sa.delete(table).where(table.c.stream_ordering == ordering))
    engine.dispose()


def events_in(found: Found, after: int, upto: int) -> int:
    return sum(after < each["stream_ordering"] <= upto for each in found["events"])


def newest_of(found: Found, upto: int) -> list[dict[str, Any]]:
    """The newest event of ours of each room, up to there."""
    mine = [each for each in found["events"] if each["ours"] and each["stream_ordering"] <= upto]
    return list({each["room_id"]: each for each in mine}.values())


def told(found: Found) -> set[tuple[Any, ...]]:
    """Each event, what matters of it, and the servers in its room then."""
    there = stays(found).items()
    return {
        (
            *(each[name] for name in ("stream_ordering", "event_id", "room_id", "ours", "bad")),
            *(tuple(each[name] or ()) for name in ("plus", "minus")),
            each["auth_membership"] in ("invite", "knock") and each["auth_membership"],
            frozenset(
                server
                for (room_id, server, joined), left in there
                if room_id == each["room_id"] and joined < each["stream_ordering"]
                if left is None or each["stream_ordering"] <= left
            ),
        )
        for each in found["events"]
    }


def heads(found: Found) -> dict[str, int]:
    """room -> its newest event of ours."""
    rooms: dict[str, int] = {}
    for each in found["events"]:
        if each["ours"]:
            rooms[each["room_id"]] = max(each["stream_ordering"], rooms.get(each["room_id"], 0))
    return rooms


def stays(found: Found) -> dict[tuple[str, str, int], int | None]:
    """(room, server, since) -> until when; a row that was read again stands as it was read last."""
    last: dict[tuple[str, str, int], int | None] = {}
    for each in found["room_servers"]:
        key = (each["room_id"], each["server"], each["joined"])
        last[key] = last.get(key) or each["left"]
    return last


def present(found: Found) -> set[tuple[str, str]]:
    """Who is in which room now."""
    return {(room, server) for (room, server, _), left in stays(found).items() if left is None}


async def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    records = random_records(Random(7), 30)
    url = sender_store(tmp_path, records)
    fan_out(url, 30)
    config = config_of(tmp_path, relay=True)
    lake = open_lake(tmp_path / "lake", US, create=True)
    with pytest.raises(PipelineError, match=r"relay.sqlite3"):
        read(lake, url, config)
    async with relay_of(tmp_path, records[:20]):
        fan_out(url, 30)
        with pytest.raises(
            PipelineError, match="it has 20 tokens, and the sender has read up to 30"
        ):
            read(lake, url, config)
        fan_out(url, 10)
        read(lake, url, config)
    (tmp_path / "relay").rename(tmp_path / "other")
    async with relay_of(tmp_path, records[:20], seed=1) as log:
        fan_out(url, 20)
        with pytest.raises(
            PipelineError, match=r"its history is .*, and the lake's is .* new lake"
        ):
            read(lake, url, config)
        (tmp_path / "relay").rename(tmp_path / "third")
        (tmp_path / "other").rename(tmp_path / "relay")
        fan_out(url, 20)
        with closing(sqlite3.connect(tmp_path / "relay/relay.sqlite3")) as database, database:
            database.execute("UPDATE relay_log SET checksum = 1 WHERE token = 15")
        with pytest.raises(
            PipelineError, match=r"pipeline.relay: record 15 of the log is not what"
        ):
            read(lake, url, config)
        (tmp_path / "relay").rename(tmp_path / "other")
        (tmp_path / "third").rename(tmp_path / "relay")
        assert log.head == 20
    with pytest.raises(ConfigError, match=r"pipeline.relay: is of use where feed.kind is relay"):
        from_values(
            {"server_name": US, "signing_key": "key", "pipeline": {"relay": "relay"}},
            directory=tmp_path,
        )
