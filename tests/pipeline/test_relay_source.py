"""A relay's log and snapshots as a source: what its senders are told, read beside it."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sqlalchemy as sa
from tests.pipeline.test_ingest import contents
from tests.pipeline.worlds import SERVERS, US
from tests.relay.log_support import Clock, outside

from fedsender.config import Config, ConfigError, from_values
from fedsender.pipeline import PipelineError, ingest, relay_source
from fedsender.pipeline.database import open_source
from fedsender.pipeline.ingest import Ingested
from fedsender.pipeline.lake import Lake, open_lake
from fedsender.pipeline.progress import showing
from fedsender.relay import compaction
from fedsender.relay.disk import RealDisk
from fedsender.relay.log import Log, LogSettings, open_log
from fedsender.replication.commands import Json
from fedsender.replication.relay_rows import parse_record
from fedsender.store import embedded, positions
from fedsender.store.migrations import upgrade
from fedsender.store.records import History

INSTANCE = "sender-1"
MS = 1_800_000_000_000
Records = Sequence[Sequence[Json]]
Found = dict[str, list[dict[str, Any]]]


def config_of(directory: Path, *, relay: bool) -> Config:
    values = {
        "server_name": US,
        "signing_key": "key",
        "instance_name": INSTANCE,
        "feed": {"kind": "relay", "relay": {"address": "unix:/relay.sock"}},
        "pipeline": {"relay": str(directory / "relay")} if relay else {},
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
async def relay_of(directory: Path, records: Records, seed: int = 0) -> AsyncIterator[Log]:
    """A relay's log that holds these, open for more, in segments of a few records."""
    clock, settings = Clock(MS), LogSettings(segment_bytes=4_000, group_records=5)
    outer = outside(seed, now_ms=clock)
    async with open_log(directory / "relay", RealDisk(), outer, settings) as log:
        clock.now_ms += 1_000 * log.head
        for rows in records:
            clock.now_ms += 1_000
            await log.append(rows)
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
            embedded.apply_tokens(connection, INSTANCE, facts, MS + 1_000 * token)
    engine.dispose()
    return url


def fan_out(url: str, upto: int, base: int = 0) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        positions.set_position(connection, "events", INSTANCE, upto)
        positions.set_feed_history(connection, History("0" * 16, base))
    engine.dispose()


def read(lake: Lake, url: str, config: Config) -> Ingested:
    told = Ingested()
    with (
        showing(quiet=True) as steps,
        open_source(url, "homeserver") as main,
        ingest._rooms(lake, main, config, steps) as rooms,
    ):
        ingest.read_homeserver(lake, rooms, config, steps, told)
    return told


async def test_what_the_relay_told_is_what_a_sender_that_lost_nothing_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, while the relay runs, each time only what is new and up to where the sender is,
    and a second time nothing; behind the newest record lies half of another one."""
    monkeypatch.setattr(relay_source, "RECORDS_AT_ONCE", 7)
    records = random_records(Random(5), 120)
    url = sender_store(tmp_path, records)
    lake = open_lake(tmp_path / "lake", US, create=True)
    config = config_of(tmp_path, relay=True)
    events = 0
    for seed, some, positions_ in ((0, records[:60], (50, 51)), (1, records[60:], (90, 120))):
        # The second time the relay was started again, and its epoch is another.
        async with relay_of(tmp_path, some, seed) as log:
            for upto in positions_:
                fan_out(url, upto)
                events += read(lake, url, config).events
                assert lake.position("events") == upto
            newest = log.segments[-1]
            with newest.path.open("ab") as file:
                file.write(b"\0\0\1\0half of a frame")
            commit = lake.manifest.commit
            assert read(lake, url, config).events == 0
            assert lake.manifest.commit == commit
            os.truncate(newest.path, newest.bytes)
    assert len(log.segments) > 3
    whole = open_lake(tmp_path / "whole", US, create=True)
    assert read(whole, url, config_of(tmp_path, relay=False)).events == events
    found, expected = contents(lake), contents(whole)
    assert found["events"] == expected["events"]
    assert stays(found) == stays(expected)
    assert len(stays(found)) > 10


async def test_what_a_sender_lost_is_in_the_relay(tmp_path: Path) -> None:
    """It was told of three events and stored two: the lake knows of three."""
    records = [
        [["pdu", ["!r", f"$e{n}", {"type": "t", "sender": f"@me:{US}"}, {"room_version": "11"}]]]
        for n in range(3)
    ]
    url = sender_store(tmp_path, [*records[:1], [["hosts", ["!r", [], []]]], *records[2:]])
    fan_out(url, 3)
    lake = open_lake(tmp_path / "lake", US, create=True)
    async with relay_of(tmp_path, records):
        assert read(lake, url, config_of(tmp_path, relay=True)).events == 3


async def test_a_log_that_begins_late_is_joined_by_a_snapshot(tmp_path: Path) -> None:
    """Servers are where they are, and each room's newest event is there; so for a lake that was
    begun before, whose position the log does not reach back to any more, as for a new one."""
    records = random_records(Random(6), 120)
    url = sender_store(tmp_path, records)
    config = config_of(tmp_path, relay=True)
    whole = open_lake(tmp_path / "whole", US, create=True)
    fan_out(url, 120)
    read(whole, url, config_of(tmp_path, relay=False))
    older = open_lake(tmp_path / "older", US, create=True)
    async with relay_of(tmp_path, records) as log:
        fan_out(url, 20)
        read(older, url, config)
        await log.seal()
        token = log.segments[-2].last
        compaction.compact(
            RealDisk(), tmp_path / "relay" / "snap", None, log.records(0, token),
            token=token, epoch=log.epoch, now_ms=MS, edu_floor=0, server_name=US,
        )  # fmt: skip
        await log.drop_through(log.segments[-4].last)
        assert log.first > 60
        fan_out(url, token - 1)
        with pytest.raises(PipelineError, match=r"begins at \d+, and the sender has read up to"):
            read(older, url, config)
        fan_out(url, 120)
        for lake in (older, open_lake(tmp_path / "new", US, create=True)):
            read(lake, url, config)
            found, expected = contents(lake), contents(whole)
            assert heads(found) == heads(expected)
            assert present(found) == present(expected)


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
    with pytest.raises(PipelineError, match=r"pipeline.relay: .*/relay: is no relay's directory"):
        read(lake, url, config)
    async with relay_of(tmp_path, records[:20]):
        with pytest.raises(PipelineError, match="ends at token 20, and the sender has read up to"):
            read(lake, url, config)
        fan_out(url, 10)
        read(lake, url, config)
        fan_out(url, 20, base=5)
        with pytest.raises(PipelineError, match="are not the relay's tokens since"):
            read(lake, url, config)
    (tmp_path / "relay").rename(tmp_path / "other")
    fan_out(url, 20)
    async with relay_of(tmp_path, records[:20], seed=1) as log:
        with pytest.raises(
            PipelineError, match=r"its history is .*, and the lake's is .* new lake"
        ):
            read(lake, url, config)
        (tmp_path / "relay").rename(tmp_path / "third")
        (tmp_path / "other").rename(tmp_path / "relay")
        segment = sorted((tmp_path / "relay" / "log").iterdir())[-1]
        content = bytearray(segment.read_bytes())
        content[-300] ^= 1
        segment.write_bytes(content)
        with pytest.raises(PipelineError, match=r"pipeline.relay: .*\.seg: .* where token \d+"):
            read(lake, url, config)
        (tmp_path / "relay").rename(tmp_path / "other")
        (tmp_path / "third").rename(tmp_path / "relay")
        assert log.head == 20
    with pytest.raises(ConfigError, match=r"pipeline.relay: is of use where feed.kind is relay"):
        from_values(
            {"server_name": US, "signing_key": "key", "pipeline": {"relay": "relay"}},
            directory=tmp_path,
        )
