"""Whatever is wrong with an event that a homeserver appends: it is quarantined by its id, and the
other rooms and servers go on. On SQLite and on PostgreSQL, on the virtual clock."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sender.harness import EPOCH_MS, HS, RemoteServer, World
from tests.sender.test_database_errors import crashes
from trio.testing import MockClock

from fedsender.embedded.facts import BadRow, prepare
from fedsender.embedded.push import PushFeed
from fedsender.embedded.store import own_store
from fedsender.matrix import MAX_NESTING, ROOM_VERSIONS, BadEvent, event_id_of, is_server_name
from fedsender.store import Store, StoreConfig, open_store
from fedsender_lab.testing.appends import append_of

A, B = "a.example", "b.example"
GOOD = "!good:hs.example"
Json = Any


class _Servers(dict[str, RemoteServer]):
    """Any other server is there, and down."""

    def __missing__(self, name: str) -> RemoteServer:
        self[name] = RemoteServer(name, down=True)
        return self[name]


class PushedWorld(World):
    """A world whose homeserver appends."""

    def __init__(self, directory: Path, config: StoreConfig) -> None:
        super().__init__(directory)
        self.stores = config
        self.servers = _Servers()
        self.push: PushFeed
        self.said = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        async with open_store(self.stores, self.runtime) as self.store:
            yield self.store

    @asynccontextmanager
    async def pushed(self) -> AsyncIterator[None]:
        """The sender and its intake; A and B are in the room of good events."""
        for name in (A, B):
            self.server(name)
        async with self.run() as sender, trio.open_nursery() as nursery:
            self.push = PushFeed(self.runtime, own_store(self.store.homeserver), sender)
            nursery.start_soon(self.push.run)
            await self.push.connected.wait()
            await self.append(["hosts", [GOOD, [A, B], []]])
            yield
            nursery.cancel_scope.cancel()

    async def append(self, *rows: Json) -> int:
        """One record; its token."""
        self.said += 1
        (token,) = await self.push.intake.append([append_of(f"id{self.said}", rows)])
        assert token is not None
        return token

    async def say(self, room: str, text: str, **values: Any) -> int:
        return await self.append(pdu(event(room, content={"body": text})))

    def got(self, name: str, room: str) -> list[str]:
        """What a server was told of a room."""
        return [
            each["content"]["body"]
            for request in self.servers[name].answered
            for each in request.content["pdus"]
            if each["room_id"] == room
        ]


@pytest.fixture
def world(config: StoreConfig, tmp_path: Path) -> PushedWorld:
    return PushedWorld(tmp_path, config)


def event(room: str, **members: Json) -> dict[str, Json]:
    """An event; a member that is None is left out."""
    made = {
        "type": "m.room.message",
        "room_id": room,
        "sender": f"@a:{HS}",
        "content": {"body": "bad"},
        "depth": 7,
        "origin_server_ts": EPOCH_MS,
        "prev_events": ["$before"],
        "auth_events": ["$create"],
        "hashes": {"sha256": sha256(repr(members).encode()).hexdigest()},
        **members,
    }
    return {key: value for key, value in made.items() if value is not None}


def pdu(of: dict[str, Json], version: str = "11", *, event_id: str | None = None) -> Json:
    """A row of it, with the id that its content gives it if there is one."""
    if event_id is None:
        try:
            event_id = event_id_of(of, ROOM_VERSIONS[version])
        except (BadEvent, KeyError, ValueError, RecursionError):
            event_id = f"$not the hash {of.get('room_id')}"
    return ["pdu", [of.get("room_id", "!bad:hs.example"), event_id, of, {"room_version": version}]]


def nested(depth: int) -> Json:
    value: Json = 1
    for _ in range(depth):
        value = [value]
    return value


BAD = "!bad:hs.example"
CASES: dict[str, tuple[Callable[[str], Json], str]] = {
    "an id that is not its hash": (
        lambda room: pdu(event(room), event_id="$other"),
        "reference hash",
    ),
    "too large": (lambda room: pdu(event(room, content={"body": "x" * 66_000})), "above the limit"),
    "no auth_events": (lambda room: pdu(event(room, auth_events=None)), "without auth_events"),
    "no prev_events": (lambda room: pdu(event(room, prev_events=None)), "without prev_events"),
    "nothing before it": (lambda room: pdu(event(room, prev_events=[])), "without prev_events"),
    "no content": (lambda room: pdu(event(room, content=None)), "without a content"),
    "half a surrogate pair": (lambda room: pdu(event(room, content={"body": "\ud800"})), "JSON"),
    "nested too deep": (
        lambda room: pdu(event(room, content={"body": nested(MAX_NESTING)})),
        "nest",
    ),
    "a fraction": (lambda room: pdu(event(room, content={"body": 1.5})), "number"),
    "a large integer": (lambda room: pdu(event(room, content={"body": 2**60})), "number"),
    "a room version of nobody": (
        lambda room: pdu(event(room), "org.example.7"),
        "unknown room version",
    ),
    "another room's event": (
        lambda room: ["pdu", [room, *pdu(event("!x:hs.example"))[1][1:]]],
        "another room",
    ),
    "an id of its own with a NUL": (
        lambda room: pdu(event(room, event_id="$a\0b"), "1", event_id="$a-b"),
        "reference hash",
    ),
}


@pytest.mark.slow
async def test_bad_events_are_quarantined_by_name_and_all_else_goes_on(
    world: PushedWorld, autojump_clock: MockClock
) -> None:
    """Each in a room of its own."""
    rows = {case: make(f"!bad {case}:hs.example") for case, (make, _) in CASES.items()}
    rooms = {case: row[1][0] for case, row in rows.items()}
    tokens: dict[str, int] = {}
    async with world.pushed():
        await world.append(*(["hosts", [room, [A, B], []]] for room in rooms.values()))
        await world.say(GOOD, "one")
        for case, row in rows.items():
            tokens[case] = await world.append(row)
        await trio.sleep(1)
        await world.say(GOOD, "two")
        for room in rooms.values():
            await world.append(pdu(event(room, content={"body": "behind"})))
        await trio.sleep(60)

        assert [world.got(name, GOOD) for name in (A, B)] == [["one", "two"]] * 2
        items = await world.store.sender.quarantine_list(None, 100)
        for case, room in rooms.items():
            assert [world.got(name, room) for name in (A, B)] == [[], []], case
            first, _behind = [item for item in items if item.room_id == room]
            assert (first.event_id, first.stream_ordering) == (rows[case][1][1], tokens[case])
            assert CASES[case][1] in first.reason, case
        assert len(items) == 2 * len(CASES)
        assert (world.sender.fan_out.standstill, crashes(world)) == (None, 0)

        await world.sender.operations.drop([item.id for item in items])
        for room in rooms.values():
            await world.append(pdu(event(room, content={"body": "later"})))
        await trio.sleep(10)
        assert [world.got(A, room) for room in rooms.values()] == [["later"]] * len(CASES)


LONG = "".join(random.Random(1).choices("0123456789abcdefghijklmnopqrstuvwxyz", k=60_000))
TARGETS = ["@u:b.example", "@u:b.example:0", "@u:no such name", f"@u:{LONG}", "@u:", "nobody"]
INVITES = {f"$invite{number}": target for number, target in enumerate(TARGETS)}

texts = st.one_of(
    st.sampled_from(["@a:hs.example", "$a", "join", "", "\0", "$a\0", "\ud800", "x" * 300]),
    st.text(max_size=9),
)
values: st.SearchStrategy[Json] = st.recursive(
    st.one_of(texts, st.none(), st.booleans(), st.integers(), st.sampled_from([1.5, 2**63, 1e300])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def mostly(*usual: Json) -> st.SearchStrategy[Json]:
    """One of the usual, or now and then anything."""
    return st.one_of(*[st.sampled_from(usual)] * 9, values)


events = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["m.room.member"] * 3 + ["m.room.message", "m.room.redaction"]),
        "room_id": st.just(""),
        "sender": st.sampled_from([f"@a:{HS}"] * 6 + ["@b:b.example", "@x:" + LONG, "a"]),
        "content": mostly({"membership": "leave"}, {"membership": "ban"}, {"body": "x"}),
        "depth": mostly(7),
        "prev_events": mostly(["$before"], [["$before", {}]]),
        "auth_events": mostly([*INVITES], ["$a\0", *INVITES], [["$a", {}]]),
        "state_key": st.sampled_from(TARGETS),
        "hashes": mostly({}),
    },
    optional={"event_id": texts, "redacts": texts, "unsigned": mostly({})},
)
abouts = st.fixed_dictionaries(
    {"room_version": st.sampled_from(["1", "3", "5", "6", "10", "11", "12", "99"])},
    optional={"internal_metadata": mostly({})},
)


@cache
def drawn_records() -> list[list[Json]]:
    """Of rooms with a server and any event that the intake takes."""
    records: list[list[Json]] = []

    @settings(
        max_examples=200,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.tuples(events, abouts), min_size=5, max_size=5))
    def draw(drawn: list[tuple[dict[str, Json], dict[str, Json]]]) -> None:
        for of, about in drawn:
            room = f"!{len(records)}:hs.example"
            made = {**of, "room_id": room}
            row = pdu(made, about["room_version"])
            row[1][3] = about
            try:
                prepare([row])
            except BadRow:
                continue
            records.append([["hosts", [room, [A], []]]])
            records.append([row])

    draw()
    return records


@pytest.mark.slow
async def test_what_the_intake_takes_the_fan_out_passes(
    world: PushedWorld, autojump_clock: MockClock
) -> None:
    """Whatever a homeserver says: the fan-out gets past it, and the good events go out."""
    records = drawn_records()
    assert len(records) > 500
    async with world.pushed():
        for event_id, target in INVITES.items():
            invite = event(BAD, type="m.room.member", state_key=target)
            invite["content"] = {"membership": "invite"}
            await world.append(pdu(invite, event_id=event_id))
        for start in range(0, len(records), 500):
            some = enumerate(records[start : start + 500], start)
            await world.push.intake.append([append_of(f"drawn{n}", rows) for n, rows in some])
        await world.say(GOOD, "one")
        await trio.sleep(200)
        assert world.sender.fan_out.standstill is None
        assert world.got(A, GOOD) == ["one"]
        assert crashes(world) == 0
        assert [name for name in world.servers if not is_server_name(name)] == []
        quarantined = len(await world.store.sender.quarantine_list(None, 10_000))
        assert quarantined < len(records) / 2, "some can be sent"
