"""A relay's database: the log, and what it says in sum."""

import json
import random
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from sqlalchemy import Connection, Select, func, select, update
from tests.servers import NewUrl

from fedsender.embedded import appends
from fedsender.embedded.facts import (
    KeyReused,
    Outdated,
    Record,
    prepare,
)
from fedsender.runtime import real_runtime
from fedsender.store import HomeserverSettings, Store, StoreConfig, connections, open_store, tables
from fedsender.store.connections import WrongDatabase
from fedsender.store.engine import open_database
from fedsender.store.leases import LEASE_S, LeaseLost
from fedsender.store.lock import LockHeld
from fedsender.streams import Json
from fedsender_lab.simulation.relay_checks import newest_in
from fedsender_relay import database as module
from fedsender_relay.database import (
    KEEP_LEFT_MS,
    Consumer,
    DamagedLog,
    Handed,
    RelayStore,
    SnapshotTables,
    open_relay_store,
)

MIB = 2**20
SERVER = "hs.example"
ROOMS = [f"!{number}:{SERVER}" for number in range(3)]
SERVERS = [f"s{number}.example" for number in range(5)]
DAY_MS = 86_400_000


class Clock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_790_000_000_000
        self.runtime = replace(real_runtime(), now_ms=lambda: self.ms)


def pdu(room_id: str, event_id: str, plus: Sequence[str] = (), minus: Sequence[str] = ()) -> Json:
    """A row of an event of ours."""
    event: dict[str, Json] = {
        "type": "m.room.message",
        "room_id": room_id,
        "sender": f"@a:{SERVER}",
        "content": {},
        "prev_events": ["$before"],
        "auth_events": [],
        "depth": 1,
        "origin_server_ts": 1,
    }
    about: dict[str, Json] = {"room_version": "10", "plus": list(plus), "minus": list(minus)}
    about["internal_metadata"] = {}
    return ["pdu", [room_id, event_id, event, about]]


def record(key: str, *rows: Json) -> Record:
    """A record as the intake hands it on."""
    return prepare(rows, key=key.encode().rjust(16, b"k")[-16:])


async def rows_of_snapshot(store: RelayStore) -> dict[str, list[tuple[Any, ...]]]:
    """All tables of a snapshot of now."""

    def read(snapshot: SnapshotTables) -> dict[str, list[tuple[Any, ...]]]:
        names = ("hosts", "events", "edus", "redactions")
        return {name: list(snapshot.rows(name)) for name in names}

    return await store.with_tables(read)


@dataclass
class Model:
    """What was told, said anew: for each room and server its newest event; the EDUs there are."""

    token: int = 0
    here: defaultdict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    heads: dict[str, tuple[int, str]] = field(default_factory=dict)
    newest: dict[tuple[str, str], str] = field(default_factory=dict)
    ended: dict[tuple[str, str], int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    messages: list[tuple[str, int]] = field(default_factory=list)
    lists: dict[tuple[str, str, str], tuple[int, bool]] = field(default_factory=dict)
    redactions: dict[str, tuple[str, int]] = field(default_factory=dict)

    def tell(self, rows: Sequence[Any], floor: int, ms: int) -> None:
        """One record, at that time."""
        self.token += 1
        for kind, row in sorted(rows, key=lambda row: row[0] != "pdu"):
            if kind == "pdu":
                room_id, event_id, event, about = row
                self._come(room_id, event_id, event, about, ms)
            elif kind == "hosts":
                self._move(row[0], row[1], row[2], ms)
            elif kind == "servers":
                self._move(row[0], row[1], self.here[row[0]].keys() - row[1], ms)
            elif kind == "redaction":
                self.redactions.setdefault(row[0], (row[1], ms))
            elif row[0] == "to_device":
                self.messages.append((row[1], self.token))
            else:
                what = row[0]
                if what == "signing_key":
                    what = " ".join([what, *(name.removesuffix("_key") for name in row[3])])
                known = self.lists.get((row[1], what, row[2]))
                missed = known is not None and known[0] > floor
                self.lists[row[1], what, row[2]] = (self.token, row[-1] is None or missed)

    def _come(self, room_id: str, event_id: str, event: Any, about: Any, ms: int) -> None:
        behalf = about["internal_metadata"].get("send_on_behalf_of")
        ours = event["sender"].endswith(f":{SERVER}") or behalf is not None
        if not ours or not event["prev_events"]:
            return
        here, minus = self.here[room_id], {*about["minus"], behalf}
        for server in minus & here.keys():
            self._passed(room_id, server, ms)
        if minus - {None} and room_id in self.heads:
            self.kept[self.heads[room_id][1]] = ms
        for server in {*here, *about["plus"]} - minus:
            self.newest[room_id, server] = event_id
        self.heads[room_id] = (self.token, event_id)
        if about["plus"]:
            self.kept[event_id] = ms
        for server in {*about["plus"]} - here.keys():
            self._passed(room_id, server, ms)

    def _passed(self, room_id: str, server: str, ms: int) -> None:
        """What is the room's newest event may cease to be that of the server."""
        _, head = self.heads.get(room_id, (0, ""))
        if self.newest.get((room_id, server)) == head:
            self.ended[room_id, server] = ms

    def _leave(self, room_id: str, server: str, ms: int) -> None:
        joined = self.here[room_id].pop(server)
        token, head = self.heads.get(room_id, (0, ""))
        if token > joined:
            self._passed(room_id, server, ms)
            self.kept[head] = ms

    def _move(self, room_id: str, joined: Sequence[str], left: Collection[str], ms: int) -> None:
        for server in sorted(left):
            if server in self.here[room_id]:
                self._leave(room_id, server, ms)
        for server in joined:
            self.here[room_id].setdefault(server, self.token)

    def due(self, since_ms: int) -> dict[tuple[str, str], str]:
        """By room and server the newest event for it: of those that it passed before then, none."""
        return {
            (room_id, server): event_id
            for (room_id, server), event_id in self.newest.items()
            if (server in self.here[room_id] and event_id == self.heads[room_id][1])
            or self.ended.get((room_id, server), -1) >= since_ms
        }


def some_rows(rng: random.Random, number: int) -> list[Any]:
    """The rows of a record, of any kind."""
    room_id = rng.choice(ROOMS)
    some = rng.sample(SERVERS, rng.randrange(3))
    others = [server for server in SERVERS if server not in some][: rng.randrange(3)]
    match rng.randrange(17):
        case 0 | 1 | 2 | 3:
            return [pdu(room_id, f"$e{number}")]
        case 10 | 14 | 15 | 16:
            row: Any = pdu(room_id, f"$e{number}")
            kind = rng.randrange(3)
            if kind == 0:
                row[1][2]["prev_events"] = []
            else:
                row[1][2]["sender"] = "@b:other.example"
            if kind == 1:
                row[1][3]["internal_metadata"] = {"send_on_behalf_of": rng.choice(SERVERS)}
            return [row, ["hosts", [room_id, some, others]]]
        case 11:
            return [["redaction", [f"$r{number}", f"$e{rng.randrange(number + 1)}"]]]
        case 12 | 13:
            user = f"@u{rng.randrange(2)}:{SERVER}"
            names = rng.choice(
                [["master_key"], ["self_signing_key"], ["master_key", "self_signing_key"]]
            )
            keys = {name: {"keys": {f"ed25519:{number}": f"{number}"}} for name in names}
            return [["edu", ["signing_key", rng.choice(SERVERS), user, keys]]]
        case 4:
            return [pdu(room_id, f"$e{number}", some, others)]
        case 5 | 6:
            return [pdu(room_id, f"$e{number}"), ["hosts", [room_id, some, others]]]
        case 7:
            return [["servers", [room_id, some]]]
        case 8:
            return [["edu", ["to_device", rng.choice(SERVERS), f"m{number}", {"type": "x"}]]]
        case _:
            user = f"@u{rng.randrange(2)}:{SERVER}"
            content = rng.choice([None, {"user_id": user, "device_id": "D"}])
            return [["edu", ["device_list", rng.choice(SERVERS), user, "D", content]]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new_url", "seed"),
    [("sqlite", 0), ("sqlite", 1), ("sqlite", 2), ("postgresql", 3)],
    indirect=["new_url"],
)
async def test_the_state_is_what_the_records_say_whatever_is_dropped_of_the_log(
    seed: int, new_url: NewUrl
) -> None:
    rng = random.Random(seed)
    model = Model()
    floor = 0
    clock = Clock()
    async with open_relay_store(
        new_url("homeserver"), clock.runtime, SERVER, synchronous="OFF"
    ) as store:
        await store.begin_intake("e" * 16)
        number, since_ms = 0, 0
        for _ in range(40):
            group = [some_rows(rng, number + each) for each in range(rng.randrange(1, 9))]
            tokens = await store.append_records(
                [record(f"r{number + each}", *rows) for each, rows in enumerate(group)]
            )
            assert tokens == [model.token + each for each in range(1, len(group) + 1)]
            number += len(group)
            for rows in group:
                model.tell(json.loads(json.dumps(rows)), floor, clock.ms)
            if rng.random() < 0.3:
                floor = rng.randrange(floor, model.token + 1)
                await store.save_consumers([Consumer("c", 0, 0, acked=floor)])
            if rng.random() < 0.3:
                await store.drop_through(rng.randrange(model.token + 1))
            if rng.random() < 0.3:
                await store.expire(clock.ms, floor, 2**30)
                since_ms = clock.ms - KEEP_LEFT_MS
            clock.ms += rng.choice([1, 1, DAY_MS, 12 * DAY_MS])
            bounds = await store.bounds()
            assert bounds.head == model.token
            kept = await store.read_log(bounds.first - 1, bounds.head, 2**20)
            assert [each.token for each in kept] == list(range(bounds.first, bounds.head + 1))
            assert bounds.bytes == sum(len(each.lines) for each in kept)
            found = await rows_of_snapshot(store)
            told = newest_in(found["hosts"], found["events"])
            assert model.due(clock.ms - KEEP_LEFT_MS).items() <= told.items()
            assert told.items() <= model.newest.items()
            came = {json.loads(row[2])[1][1]: row[1] for row in found["events"]}
            lasting = {event_id for event_id, ms in model.kept.items() if ms >= since_ms}
            assert lasting <= came.keys() <= lasting | {name for _, name in model.heads.values()}
            for _, _, joined, left in found["hosts"]:
                assert left is None or any(joined < came[name] <= left for name in lasting)
            assert {row[1]: (row[0], row[2]) for row in found["redactions"]} == {
                event_id: (target, ms)
                for event_id, (target, ms) in model.redactions.items()
                if ms >= since_ms
            }
            here = {(row[0], row[1]): row[2] for row in found["hosts"] if row[3] is None}
            assert here == {
                (room_id, server): token
                for room_id, servers in model.here.items()
                for server, token in servers.items()
            }
            lacking = {
                (row[0], row[1])
                for row in found["edus"]
                if row[3] == "to_device" and row[1] > floor
            }
            assert lacking == {each for each in model.messages if each[1] > floor}
            lists = {
                (row[0], row[3], json.loads(row[5])[1][2]): (row[1], row[4])
                for row in found["edus"]
                if row[3] != "to_device"
            }
            assert lists == model.lists


async def test_what_nothing_names_goes_from_below_the_first_record(new_url: NewUrl) -> None:
    """Of a hundred messages in a room, one is left; and none, once a newer one is there."""
    url = new_url("homeserver")
    room_id, server = ROOMS[0], SERVERS[0]
    async with open_relay_store(url, real_runtime(), SERVER) as store:
        await store.begin_intake("e" * 16)
        await store.append_records([record("h", ["hosts", [room_id, [server], []]])])
        await store.append_records([record(f"p{n}", pdu(room_id, f"$p{n}")) for n in range(100)])
        await store.append_records([record("x", ["redaction", ["$r", "$t"]])])
        await store.drop_through(101)
        assert await _tokens(url) == [101, 102]
        await store.append_records([record("q", pdu(room_id, "$q"))])
        await store.expire(real_runtime().now_ms(), 0, 2**30)
        assert await _tokens(url) == [102, 103]


def _scalar(connection: Connection, query: Select[Any]) -> Any:
    return connection.execute(query).scalar()


async def _tokens(url: str) -> list[int]:
    async with open_database(url, real_runtime(), name="test") as database:
        query = select(tables.relay_log.c.token).order_by(tables.relay_log.c.token)
        return await database.read(lambda connection: list(connection.execute(query).scalars()))


async def test_ended_stays_and_redactions_are_remembered_for_thirty_days(new_url: NewUrl) -> None:
    clock = Clock()
    async with open_relay_store(new_url("homeserver"), clock.runtime, SERVER) as store:
        await store.begin_intake("e" * 16)
        await store.append_records(
            [
                record("h", ["hosts", [ROOMS[0], [SERVERS[0]], []]]),
                record("p", pdu(ROOMS[0], "$p"), ["hosts", [ROOMS[0], [], [SERVERS[0]]]]),
                record("x", ["redaction", ["$r", "$t"]]),
            ]
        )
        found = await rows_of_snapshot(store)
        assert found["hosts"] == [(ROOMS[0], SERVERS[0], 1, 2)]
        assert [row[:2] for row in found["events"]] == [(ROOMS[0], 2)]
        assert [row[:2] for row in found["redactions"]] == [("$t", "$r")]
        clock.ms += KEEP_LEFT_MS
        await store.expire(clock.ms, 0, 2**30)
        assert await rows_of_snapshot(store) == found
        clock.ms += 1
        await store.expire(clock.ms, 0, 2**30)
        assert await rows_of_snapshot(store) == {name: [] for name in found}
        await store.append_records([record("n", ["redaction", ["$s", "$u"]])])
        await store.drop_through(3)
        await store.expire(clock.ms, 0, 2**30)
        found = await rows_of_snapshot(store)
        assert [row[:2] for row in found["redactions"]] == [("$u", "$s")]


async def test_edus_have_one_bound_and_those_that_all_have_go_first(new_url: NewUrl) -> None:
    """Nor does it matter for how many servers they are."""
    async with open_relay_store(new_url("homeserver"), real_runtime(), SERVER) as store:
        await store.begin_intake("e" * 16)
        user = f"@u:{SERVER}"
        listed = ["device_list", SERVERS[0], user, "D", None]
        await store.append_records([record("l", ["edu", listed])])
        text = "x" * 1_000
        await store.append_records(
            [
                record(f"m{n}", ["edu", ["to_device", SERVERS[n % 5], f"m{n}", {"a": text}]])
                for n in range(20)
            ]
        )
        assert await store.expire(0, 1, 15_000) == 6
        edus = (await rows_of_snapshot(store))["edus"]
        assert sorted(row[1] for row in edus) == list(range(8, 22))
        assert await store.expire(0, 1, 15_000) == 0


async def test_a_device_list_for_which_there_is_no_room_is_asked_for(new_url: NewUrl) -> None:
    """Before any message to a device goes, which nobody can have again from anywhere."""
    async with open_relay_store(new_url("homeserver"), real_runtime(), SERVER) as store:
        await store.begin_intake("e" * 16)
        user, content = f"@u\u00e9:{SERVER}", {"keys": [["x" * 1_000]]}
        message = ["edu", ["to_device", SERVERS[0], "m", {"a": "x" * 1_000}]]
        lists = [["edu", ["device_list", server, user, "D", content]] for server in SERVERS[:3]]
        gone = ["edu", ["device_list", SERVERS[3], user, "D", None]]
        await store.append_records([record("a", message), record("b", *lists), record("c", gone)])
        assert await store.expire(0, 0, 2_000) == 0
        edus = (await rows_of_snapshot(store))["edus"]
        assert sorted((row[1], row[4]) for row in edus) == [
            (1, False),
            (2, True),
            (2, True),
            (2, True),
            (3, True),
        ]
        shorter = [["edu", ["device_list", server, user, "D", None]] for server in SERVERS[:4]]
        told = [json.loads(row[5]) for row in edus]
        assert sorted(told, key=str) == sorted([message, *shorter], key=str)
        # When that is not enough the oldest go, whatever they are.
        assert await store.expire(0, 0, 100) == 4
        assert [row[1] for row in (await rows_of_snapshot(store))["edus"]] == [3]


@pytest.mark.slow
async def test_a_record_for_many_servers_is_not_read_once_for_each_of_them(
    new_url: NewUrl,
) -> None:
    """A user with a new device, in rooms with thousands of servers; and a room that all leave."""
    servers = [f"s{number}.example" for number in range(4_000)]
    user = f"@u:{SERVER}"
    content = {"user_id": user, "device_id": "D", "keys": "x" * 200}
    said = [["edu", ["device_list", server, user, "D", content]] for server in servers]
    last = pdu(ROOMS[0], "$p", servers[:1])
    last[1][2]["content"] = {"body": "x" * 60_000}
    async with open_relay_store(
        new_url("homeserver"), real_runtime(), SERVER, synchronous="OFF"
    ) as store:
        await store.begin_intake("e" * 16)
        await store.append_records(
            [
                record("a", ["servers", [ROOMS[0], servers]]),
                record("b", last, ["servers", [ROOMS[0], []]]),
                record("c", *said),
            ]
        )
        begun = time.perf_counter()
        found = await rows_of_snapshot(store)
        assert time.perf_counter() - begun < 10
        assert len(found["edus"]) == len(found["hosts"]) == len(servers)
        assert len(found["events"]) == 1


@pytest.mark.slow
async def test_what_is_due_to_go_goes_at_once_however_much_it_is(
    new_url: NewUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 5)
    monkeypatch.setattr(appends, "_FORGOTTEN_AT_ONCE", 5)
    clock = Clock()
    url = new_url("homeserver")
    places = [(f"!{number}:{SERVER}", SERVERS[0]) for number in range(23)]
    async with open_relay_store(url, clock.runtime, SERVER) as store:
        await store.begin_intake("e" * 16)
        came = [
            record(f"h{room_id}", ["hosts", [room_id, [server], []]]) for room_id, server in places
        ]
        went = [
            record(f"p{room_id}", pdu(room_id, f"$p{room_id}"), ["servers", [room_id, []]])
            for room_id, _ in places
        ]
        said = [
            record(f"m{n}", ["edu", ["to_device", SERVERS[n % 5], f"m{n}", {"a": "x"}]])
            for n in range(23)
        ]
        await store.append_records([*came, *went, *said])
        await store.append_records(
            [record(f"r{n}", ["redaction", [f"$r{n}", "$t"]]) for n in range(23)]
        )
        await store.drop_through(200)
        assert len(await _tokens(url)) == 23 + 1
        assert await store.expire(clock.ms, 0, 1) == 23
        clock.ms += KEEP_LEFT_MS + 1
        assert await store.expire(clock.ms, 0, 2**30) == 0
        async with open_database(url, real_runtime(), name="test") as database:
            for table in (
                tables.relay_kept,
                tables.room_servers,
                tables.redactions,
                tables.relay_edus,
            ):
                count = select(func.count()).select_from(table)
                assert await database.read(partial(_scalar, query=count)) == 0
        # Each room's newest event is named by its head.
        assert await store.forget_appends() == 92
        await store.append_records(
            [record(f"q{room_id}", pdu(room_id, f"$q{room_id}")) for room_id, _ in places]
        )
        await store.expire(clock.ms, 0, 2**30)
        assert await _tokens(url) == list(range(92, 116))


async def test_each_record_is_stored_once_by_its_id(new_url: NewUrl) -> None:
    clock = Clock()
    first, other = record("a", pdu(ROOMS[0], "$a")), record("a", pdu(ROOMS[0], "$b"))
    async with open_relay_store(new_url("homeserver"), clock.runtime, SERVER) as store:
        await store.begin_intake("e" * 16)
        assert await store.append_records([first, first]) == [1, 1]
        assert await store.append_records([first]) == [1]
        answers = await store.append_records([other, record("b", pdu(ROOMS[0], "$c"))])
        assert isinstance(answers[0], KeyReused)
        assert answers[1] == 2
        clock.ms += 2 * DAY_MS
        assert await store.forget_appends(keep_ms=3 * DAY_MS) == 0
        assert await store.forget_appends(keep_ms=DAY_MS // 2) == 2
        assert await store.append_records([first]) == [3]


async def test_a_list_of_servers_as_of_an_older_token_is_refused(new_url: NewUrl) -> None:
    async with open_relay_store(new_url("homeserver"), real_runtime(), SERVER) as store:
        await store.begin_intake("e" * 16)
        await store.append_records([record("a", ["hosts", [ROOMS[0], SERVERS[:2], []]])])
        await store.append_records([record("b", ["hosts", [ROOMS[0], [], SERVERS[:1]]])])
        answers = await store.append_records(
            [
                record("c", ["servers", [ROOMS[0], SERVERS[:2], {"as_of": 1}]]),
                record("d", ["servers", [ROOMS[1], SERVERS[:2], {"as_of": 1}]]),
            ]
        )
        assert isinstance(answers[0], Outdated)
        assert answers[1] == 3
        stored = await store.room_servers(ROOMS[0])
        assert stored is not None
        assert list(stored.servers) == [SERVERS[1]]


async def test_a_record_that_is_spoiled_or_missing_is_named(new_url: NewUrl) -> None:
    url = new_url("homeserver")
    async with open_relay_store(url, real_runtime(), SERVER) as store:
        await store.begin_intake("e" * 16)
        await store.append_records([record(f"{n}", pdu(ROOMS[0], f"${n}")) for n in range(6)])
        async with open_database(url, real_runtime(), name="test") as database:
            log = tables.relay_log
            spoil = update(log).where(log.c.token == 3).values(lines=b"RDATA events 3 []\n")
            await database.write(lambda connection: connection.execute(spoil) and None)
            gone = log.delete().where(log.c.token == 5)
            await database.write(lambda connection: connection.execute(gone) and None)
        assert [each.token for each in await store.read_log(0, 6, 2**20)] == [1, 2]
        with pytest.raises(DamagedLog, match="record 3 "):
            await store.read_log(2, 6, 2**20)
        assert [each.token for each in await store.read_log(3, 6, 2**20)] == [4]
        with pytest.raises(DamagedLog, match="no record 5"):
            await store.read_log(4, 6, 2**20)


@pytest.mark.parametrize("lines", [b"RDATA events 3 []\n", b"events", None])
async def test_no_snapshot_is_made_of_a_record_that_is_spoiled_or_missing(
    new_url: NewUrl, lines: bytes | None
) -> None:
    url = new_url("homeserver")
    async with open_relay_store(url, real_runtime(), SERVER) as store:
        await store.begin_intake("e" * 16)
        await store.append_records(
            [record(f"{n}", pdu(ROOMS[n], f"${n}", SERVERS[:1])) for n in range(3)]
        )
        async with open_database(url, real_runtime(), name="test") as database:
            log = tables.relay_log
            damage = log.delete() if lines is None else update(log).values(lines=lines)
            await database.write(
                lambda connection: connection.execute(damage.where(log.c.token == 2)) and None
            )
        with pytest.raises(DamagedLog, match="record 2"):
            await rows_of_snapshot(store)


async def test_the_log_is_read_and_measured_by_bytes_and_by_time(new_url: NewUrl) -> None:
    clock = Clock()
    async with open_relay_store(new_url("homeserver"), clock.runtime, SERVER) as store:
        assert await store.bounds() == (1, 0, 0, 0)
        await store.begin_intake("e" * 16)
        for number in range(10):
            clock.ms += 1_000
            if number == 5:
                clock.ms -= 60_000  # The clock is set back; the log's does not go back.
            await store.append_records([record(f"{number}", pdu(ROOMS[0], f"${number}"))])
        whole = await store.read_log(0, 10, 2**20)
        size = len(whole[0].lines)
        assert [len(each.lines) for each in whole[:9]] == 9 * [size]
        begun = whole[0].ms
        assert [each.ms - begun for each in whole] == [0, 1000, 2000, 3000, *(6 * [4000])]
        assert [each.token for each in await store.read_log(2, 10, 3 * size)] == [3, 4, 5, 6]
        assert [each.token for each in await store.read_log(2, 4, 3 * size)] == [3, 4]
        assert await store.last_before(begun + 2_500) == 3
        assert await store.last_before(begun - 1) == 0
        assert await store.last_before(begun + 9_000) == 10
        await store.drop_through(4)
        assert await store.last_within(1) == 5
        assert await store.last_within(2 * size) == 6
        assert await store.last_within(2**30) == 10
        assert (await store.bounds()).bytes == sum(len(each.lines) for each in whole[4:])
        await store.drop_through(10)  # The newest stays.
        assert (await store.bounds())[:2] == (10, 10)
        assert await store.stand(10) == (begun + 4_000, sum(len(each.lines) for each in whole))


async def test_an_epoch_begins_with_each_writer_and_ends_the_one_before(new_url: NewUrl) -> None:
    url = new_url("homeserver")
    async with open_relay_store(url, real_runtime(), SERVER) as store:
        await store.begin_intake("a" * 16)
        await store.append_records([record("a", pdu(ROOMS[0], "$a"))])
    async with open_relay_store(url, real_runtime(), SERVER) as store:
        await store.begin_intake("b" * 16)
        await store.append_records([record("b", pdu(ROOMS[0], "$b"))])
        assert await store.epochs() == [("a" * 16, 1), ("b" * 16, 2)]


async def test_consumers_are_stored(new_url: NewUrl) -> None:
    url = new_url("homeserver")
    one = Consumer("one", 1, 2, 3, Handed("s", 4), True, "gone", {"GAP": 2}, 5)
    two = Consumer("two", 6, 7)
    async with open_relay_store(url, real_runtime(), SERVER) as store:
        await store.begin_intake("a" * 16)
        await store.save_consumers([two, one])
    async with open_relay_store(url, real_runtime(), SERVER) as store:
        await store.begin_intake("b" * 16)
        assert await store.consumers() == [one, two]
        one.handed, one.full_syncs = None, {}
        await store.save_consumers([one], ["two"])
        assert await store.consumers() == [one]


async def test_only_one_relay_writes(new_url: NewUrl) -> None:
    """On SQLite no second one opens it. On PostgreSQL it stands by until the lease has ended."""
    url, clock = new_url("homeserver"), [0.0]
    runtime = replace(real_runtime(), elapsed_s=lambda: clock[0])
    async with open_relay_store(url, runtime, SERVER) as store:
        await store.begin_intake("a" * 16)
        if url.startswith("sqlite"):
            with pytest.raises(LockHeld):
                async with open_relay_store(url, runtime, SERVER):
                    pass
            return
        async with open_relay_store(url, runtime, SERVER) as second:
            async with trio.open_nursery() as nursery:
                told = trio.Event()
                nursery.start_soon(second.begin_intake, "b" * 16, lambda _: told.set())
                await told.wait()
                assert await store.append_records([record("a", pdu(ROOMS[0], "$a"))]) == [1]
                clock[0] += LEASE_S + 1
            with pytest.raises(LeaseLost):
                await store.hold.until_lost()
            with pytest.raises(LeaseLost):
                await store.append_records([record("c", pdu(ROOMS[0], "$c"))])
            assert await second.append_records([record("b", pdu(ROOMS[0], "$b"))]) == [2]


async def test_a_relay_that_does_not_stand_by_is_refused_while_another_one_runs(
    new_url: NewUrl,
) -> None:
    url = new_url("homeserver")
    if url.startswith("sqlite"):
        return
    async with open_relay_store(url, real_runtime(), SERVER) as store:
        await store.begin_intake("a" * 16)
        async with (
            open_relay_store(url, real_runtime(), SERVER) as second,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(store.keep, "a" * 16)
            with pytest.raises(LockHeld, match="another daemon runs as 'relay'"):
                await second.begin_intake("b" * 16)
            nursery.cancel_scope.cancel()


async def test_a_database_belongs_to_one_relay(new_url: NewUrl) -> None:
    url = new_url("homeserver")
    async with open_relay_store(url, real_runtime(), SERVER):
        pass
    with pytest.raises(WrongDatabase, match=r"relay of hs.example: the relay of other.example"):
        async with open_relay_store(url, real_runtime(), "other.example"):
            pass


async def test_neither_a_sender_nor_a_relay_takes_the_other_ones_database(
    tmp_path: Path, new_url: NewUrl
) -> None:
    """What one does to it the other does not expect."""
    relays, senders = new_url(), new_url()
    settings = HomeserverSettings("embedded", "fed1", ("fed1",))

    def open_senders(url: str, name: str) -> AbstractAsyncContextManager[Store]:
        own = f"sqlite:///{tmp_path}/sender-of-mine.db"
        config = StoreConfig(settings, url, own, server_name=name)
        return open_store(config, real_runtime())

    async with open_relay_store(relays, real_runtime(), SERVER):
        pass
    with pytest.raises(WrongDatabase, match=f"the relay of {SERVER}: a sender of {SERVER} needs"):
        async with open_senders(relays, SERVER):
            pass
    for _ in range(2):
        async with open_senders(senders, SERVER):
            pass
    with pytest.raises(WrongDatabase, match=f"of a sender of {SERVER}: a sender of other.example"):
        async with open_senders(senders, "other.example"):
            pass
    with pytest.raises(WrongDatabase, match=f"a sender of {SERVER}: the relay of {SERVER} needs"):
        async with open_relay_store(senders, real_runtime(), SERVER):
            pass


@pytest.mark.slow
async def test_the_write_ahead_log_does_not_grow_without_bound_while_a_snapshot_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is appended meanwhile waits, if it must; the disk has its bytes back afterwards."""
    monkeypatch.setattr(module, "MAX_WAL_BYTES", 2 * MIB)
    monkeypatch.setattr(connections, "SQLITE_WAL_BYTES", MIB)
    wal, over = tmp_path / "relay.db-wal", threading.Event()
    async with open_relay_store(f"sqlite:///{tmp_path}/relay.db", real_runtime(), SERVER) as store:
        await store.begin_intake("e" * 16)
        await store.append_records([record("first", pdu(ROOMS[0], "$0", SERVERS[:1]))])

        def read(tables: SnapshotTables) -> None:
            assert len(list(tables.rows("events"))) == 1
            assert over.wait(30)

        def big(number: int) -> Record:
            return record(
                f"{number}", ["edu", ["to_device", "a.example", f"{number}", {"a": "x" * 200_000}]]
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.with_tables, read)
            await trio.sleep(0.2)
            with trio.move_on_after(3) as waited:
                for number in range(100):
                    await store.append_records([big(number)])
            assert waited.cancelled_caught
            assert 2 * MIB < wal.stat().st_size < 4 * MIB
            over.set()
        for number in range(200, 210):
            await store.append_records([big(number)])
        assert wal.stat().st_size < 3 * MIB


@pytest.mark.slow
async def test_the_file_shrinks_by_what_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "relay.db"
    async with open_relay_store(f"sqlite:///{path}", real_runtime(), SERVER) as store:
        await store.begin_intake("e" * 16)
        text = "x" * 10_000
        for group in range(10):
            await store.append_records(
                [
                    record(f"{group}.{n}", ["edu", ["to_device", "a.example", "m", {"a": text}]])
                    for n in range(100)
                ]
            )
        await store.append_records([record("last", ["redaction", ["$r", "$t"]])])
        with closing(sqlite3.connect(path)) as connection, connection:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
        await store.expire(0, 1_001, 2**30)
        await store.drop_through(1_000)
        await store.give_pages_back()
        with closing(sqlite3.connect(path)) as connection, connection:
            left = connection.execute("PRAGMA page_count").fetchone()[0]
        assert left < pages / 10
