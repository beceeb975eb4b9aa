"""Random worlds where everything goes wrong, judged by the audit and by another engine.

    python -m tests.pipeline.test_oracle WORLDS

does it with so many worlds of 60 events, in a session as jobs have it, and prints what it took.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from tests.pipeline.lakes import DAY_MS, NOW_MS, note, write
from tests.pipeline.lakes import line as ledger_line
from tests.pipeline.oracle import WHYS, found_by_audit, judge
from tests.pipeline.worlds import US, World

from fedsender.config import Spark, from_values
from fedsender.store import tables
from fedsender.store.migrations import upgrade
from fedsender_pipeline.accepted import accept
from fedsender_pipeline.audit import audit
from fedsender_pipeline.ingest import ingest
from fedsender_pipeline.lake import open_lake
from fedsender_pipeline.schemas import FATES
from fedsender_pipeline.session import Steps, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = 30
"""Of each world, in each of two rounds."""


@dataclass
class Chaos:
    """So many worlds of two rooms and three servers each, in one stream, with one ledger."""

    random: Random
    world: World
    worlds: int
    stays: dict[tuple[str, str], int] = field(default_factory=dict)
    events: dict[int, list[tuple[int, str, str]]] = field(default_factory=dict)
    transactions: int = 0
    free: list[int] = field(default_factory=list)

    @property
    def span(self) -> int:
        """Of as many stream orderings ten are a world's. The ledger begins after the first ones."""
        return 10 * self.worlds

    def servers(self, world: int) -> list[str]:
        return [f"{name}{world}.example" for name in "abc"]

    def round(self, boot: str) -> list[dict[str, Any]]:
        """Events, and what the ledger gets of them."""
        random, new = self.random, {world: [] for world in range(self.worlds)}  # type: ignore[var-annotated]
        for _ in range(EVENTS):
            for world in range(self.worlds):
                new[world].append(self._event(world))
        lines = []
        for world, events in new.items():
            self.events.setdefault(world, []).extend(events)
            for server in self.servers(world):
                lines += self._lines(world, server, boot)
        random.shuffle(lines)
        return [each | {"ms": NOW_MS - DAY_MS + n} for n, each in enumerate(lines)]

    def _event(self, world: int) -> tuple[int, str, str]:
        random, room = self.random, f"!{self.random.choice('pq')}{world}:{US}"
        user = f"@me:{US}" if random.random() < 0.9 else "@you:other.example"
        if random.random() < 0.03:
            self.world.ordering += 1
            if self.world.ordering > self.span:
                self.free.append(self.world.ordering)
        held = {"proactively_send": False} if random.random() < 0.05 else {}
        event_id = self.world.event(room, "m.room.message", user, metadata=held)
        at = self.world.ordering
        servers = self.servers(world)
        if random.random() < 0.1:
            plus, minus = ([random.choice(servers)] for _ in range(2))
            self.world.put(tables.event_servers, event_id=event_id, plus=plus, minus=minus)
        if random.random() < 0.3:
            server = random.choice(servers)
            joined = self.stays.pop((room, server), None)
            if joined is None:
                self.stays[room, server] = at
            else:
                self.world.put(
                    tables.room_servers, room_id=room, server=server, joined=joined, left=at
                )
        return at, event_id, room

    def _pdu(self, event: tuple[int, str, str], lane: str = "live", **more: Any) -> dict[str, Any]:
        at, event_id, room = event
        return {"event_id": event_id, "room_id": room, "stream_ordering": at, "lane": lane, **more}

    def _lines(self, world: int, server: str, boot: str) -> list[dict[str, Any]]:
        """Of events of all rounds; whoever was in a room."""
        random, lines = self.random, []
        told = [each for each in self.events[world] if each[0] > self.span]
        for _ in range(random.randint(4, 12)):
            some = sorted(random.sample(told, random.randint(1, 4)))
            if random.random() < 0.1:
                random.shuffle(some)
            self.transactions += 1
            of = boot if random.random() < 0.9 else "gone0"
            lane = random.choice(("live",) * 6 + ("redelivery", "witness", "catch_up"))
            pdus = [self._pdu(each, lane) for each in some]
            if lane == "catch_up":
                pdus = pdus[:1]
                at = pdus[0]["stream_ordering"]
                pdus[0]["supersedes"] = [max(1, at - random.randint(0, self.span)), at]
            odd = random.random()
            if odd < 0.03:
                pdus[-1]["event_id"] = "$invented"
            elif odd < 0.06:
                pdus[-1]["room_id"] = f"!elsewhere{world}:{US}"
            elif odd < 0.08:
                pdus[-1] |= {"event_id": "$nowhere", "stream_ordering": random.choice(self.free)}
            chance = random.choice((0.0, 0.75)) if 0.03 <= odd < 0.06 else random.random()
            outcome = "delivered" if chance < 0.7 else "unknown" if chance < 0.8 else "failing"
            says_no = random.random() < (0.5 if lane == "catch_up" else 0.1)
            refused = {pdus[0]["event_id"]: "no"} if says_no else {}
            lines.append(
                ledger_line(
                    destination=server,
                    transaction_id=f"{of}.{self.transactions}",
                    pdus=pdus,
                    refused=refused if outcome == "delivered" else {},
                    outcome=outcome,
                )
            )
        if random.random() < 0.1:
            at = random.choice(self.events[world])[0]
            lines.append(note("purged", at, server, lsso=max(0, at - self.span * 2 // 3)))
        if random.random() < 0.15:
            event = random.choice(self.events[world])
            where = self._pdu(event, "quarantine")
            if random.random() < 0.3:
                where["room_id"] = f"!elsewhere{world}:{US}"
            every = random.choice((server, "*"))
            if random.random() < 0.3:
                every, at = server, event[0]
                where |= {"event_id": "", "lane": "catch_up",
                          "supersedes": [max(1, at - self.span), at]}  # fmt: skip
            lines.append(note("dropped", event[0], every, position=None, pdus=[where]))
        return lines

    def store(self, homeserver: sa.Engine, sender: sa.Engine, behind: int) -> list[dict[str, Any]]:
        """Write all tables anew but the events', with whatever is owed now; what is accepted.

        Args:
            behind: so far is the position behind the newest event.
        """
        random, upto = self.random, self.world.ordering
        for (room, server), joined in self.stays.items():
            self.world.put(
                tables.room_servers, room_id=room, server=server, joined=joined, left=None
            )
        own: dict[sa.Table, list[dict[str, Any]]] = {}
        accepted: list[dict[str, Any]] = []
        for world, events in self.events.items():
            for server in self.servers(world):
                mark = random.choice((upto, upto, random.randint(0, upto)))
                self.world.put(
                    tables.destinations, destination=server,
                    last_successful_stream_ordering=random.choice((mark, mark, None)),
                )  # fmt: skip
                for room in sorted({room for _, _, room in events}):
                    newest = max(at for at, _, each in events if each == room)
                    self.world.put(
                        tables.destination_rooms, destination=server, room_id=room,
                        stream_ordering=newest,
                    )  # fmt: skip
                at, event_id, room = random.choice(events)
                item = {"destination": server, "event_id": event_id, "room_id": room,
                        "stream_ordering": at}  # fmt: skip
                what = random.random()
                if what < 0.2:
                    own.setdefault(tables.quarantine, []).append(
                        item | {"kind": "pdu", "reason": "poison", "at_ms": 1}
                    )
                elif what < 0.4:
                    own.setdefault(tables.redeliveries, []).append(item | {"added_ms": 1})
                elif what < 0.5:
                    own.setdefault(tables.server_states, []).append(
                        {"destination": server, "parked": "gone", "failures": 0, "wake_tokens": 1.0,
                         "wake_tokens_ms": 0}
                    )  # fmt: skip
                elif what < 0.6:
                    own.setdefault(tables.catch_ups, []).append(
                        {"destination": server, "floor": at}
                    )
                    own.setdefault(tables.catch_up_rooms, []).append(
                        {"destination": server, "room_id": room,
                         "sent_to": random.randint(0, upto)}
                    )  # fmt: skip
                elif what < 0.7:
                    accepted.append({"server": server, "event_id": event_id})
                elif what < 0.8:
                    accepted.append(
                        {"server": server, "first": at, "last": at + self.span * 2 // 3}
                    )
        with homeserver.begin() as connection:
            for table in (tables.destinations, tables.destination_rooms, tables.room_servers):
                condition = table.c.left.is_(None) if table is tables.room_servers else sa.true()
                connection.execute(sa.delete(table).where(condition))
            self.world.store(connection)
            position = tables.federation_stream_position
            connection.execute(sa.delete(position))
            row = {"type": "events", "stream_id": upto - behind, "instance_name": "fedsender"}
            connection.execute(sa.insert(position), [row])
        with sender.begin() as connection:
            for table in tables.sender.sorted_tables:
                connection.execute(sa.delete(table))
            for table, rows in own.items():
                connection.execute(sa.insert(table), rows)
        return accepted


@pytest.mark.long
def test_another_engine_finds_the_same_in_thirty_worlds(
    spark: "SparkSession", seed: int, tmp_path: Path
) -> None:
    compare(spark, tmp_path, 30, seed)


def compare(spark: "SparkSession", directory: Path, worlds: int, seed: int) -> None:
    """Judge them three times: all at first, later what is new, and then events without any new
    line. There are losses, leaks, reorders, repeats, invented events, and every fate."""
    homeserver, sender = (directory / f"{name}.db" for name in ("homeserver", "sender"))
    urls = [f"sqlite:///{path}" for path in (homeserver, sender)]
    engines = [sa.create_engine(url, poolclass=sa.NullPool) for url in urls]
    with engines[0].begin() as connection:
        upgrade(connection, "homeserver")
    tables.sender.create_all(engines[1])
    config = from_values(
        {
            "server_name": US,
            "signing_key": "key",
            "homeserver": {"database": f"sqlite:///{homeserver}"},
            "sender_database": f"sqlite:///{sender}",
        },
        directory=directory,
    )
    chaos = Chaos(Random(seed), World(Random(seed)), worlds)
    for world in range(worlds):
        for room in "pq":
            chaos.world.put(tables.rooms, room_id=f"!{room}{world}:{US}", room_version="1")
    lake = open_lake(directory / "lake", US, create=True)
    fates, whys, reasons = set[str](), set[str](), set[bool]()
    begun = [note("owned", chaos.span)]
    for number, boot in ((1, "boot0"), (4, "boot1"), (7, None)):
        if boot is not None:
            lines = begun + chaos.round(boot)
            begun = []
            segments(directory / "ledger", boot, number, lines, chaos.random)
        accepted = chaos.store(
            engines[0], engines[1], 0 if boot is None else chaos.random.randint(0, chaos.span)
        )
        steps = Steps(quiet=True)
        ingest(spark, lake, config, steps)
        accept(lake, accepted)
        told = audit(spark, lake, config, steps)
        expected = judge(homeserver, sender, directory / "ledger", US, accepted)
        found = found_by_audit(directory / "lake")
        assert found.missing == expected.missing, (seed, boot)
        assert found.stray == expected.stray, (seed, boot)
        assert found.repeated == expected.repeated, (seed, boot)
        assert found.counts == expected.counts, (seed, boot)
        assert told.missing == len(expected.missing)
        fates |= {fate for _, _, fate in expected.counts}
        whys |= {why for _, _, why in expected.stray}
        reasons |= {has_one for _, _, has_one in expected.repeated}
    assert fates == set(FATES) - {"not_ours"}, seed
    assert whys == set(WHYS), seed
    assert reasons == {True, False}, seed
    json.dumps(asdict(told))


def segments(
    ledger: Path, boot: str, number: int, lines: list[dict[str, Any]], random: Random
) -> None:
    """Write a boot's lines in three segments, the last one open; those of the boot before close."""
    for path in ledger.glob("*.open"):
        path.rename(path.with_suffix(".jsonl"))
    first, second = sorted(random.sample(range(1, len(lines)), 2))
    for suffix, some in (
        ("jsonl", lines[:first]), ("jsonl", lines[first:second]), ("open", lines[second:]),
    ):  # fmt: skip
        write(ledger, f"fedsender.{boot}.{number:06d}.{suffix}", *some)
        number += 1


def main() -> None:
    """The command."""
    worlds, began_s = int(sys.argv[1]), time.monotonic()
    with (
        TemporaryDirectory(prefix="fedsender-oracle-") as name,
        spark_session(Spark(master="local[2]"), "oracle", Path(name)) as spark,
    ):
        compare(spark, Path(name), worlds, 7)
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    figures = {"events": 2 * EVENTS * worlds, "seconds": time.monotonic() - began_s, "cpu_s": cpu_s}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
