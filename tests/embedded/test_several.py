"""Several senders of one homeserver that appends: one takes the appends, and all of them send."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from tests.embedded.test_push import pushed_to, record, stored
from tests.relay.log_support import hosts, pdu, to_device
from tests.replication.support import RecordingSink
from tests.sender.harness import StepsOf
from tests.servers import Databases

from fedsender import fairness
from fedsender.config import Config, ConfigError, UnixAddress, from_values
from fedsender.daemon import Daemon, open_core
from fedsender.embedded import appends
from fedsender.embedded.endpoint import PREFIX, serve_intake
from fedsender.embedded.facts import Elsewhere, KeyReused
from fedsender.embedded.feeding import Steps
from fedsender.embedded.intake import Append, ReservationGone
from fedsender.embedded.push import PushFeed
from fedsender.embedded.store import own_store
from fedsender.matrix import ROOM_VERSIONS
from fedsender.runtime import real_runtime
from fedsender.store import (
    HomeserverSettings,
    LockHeld,
    Store,
    StoreConfig,
    open_store,
    positions,
    store_config,
    tables,
)
from fedsender.store.records import PresenceState
from fedsender.store.statements import insert_rows
from fedsender.switching.handback import hand_back
from fedsender_lab.demo.process import write_signing_key
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.appends import append_of
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import open_receivers
from fedsender_lab.testing.rooms import new_timeline
from fedsender_lab.testing.rules import pdu_reader

HS = "hs.example"
NAMES = ("a", "b")


# --- one SQLite, one sender -----------------------------------------------------------------------


def daemon_config(directory: Path, name: str, **more: Any) -> Config:
    values: dict[str, Any] = {
        "server_name": HS,
        "instance_name": name,
        "signing_key": str(directory / "signing.key"),
        "homeserver": {"database": f"sqlite:///{directory}/homeserver.db"},
        "sender_database": f"sqlite:///{directory}/{name}.db",
        "feed": {
            "kind": "push",
            "push": {"listen": f"unix:{directory}/{name}.sock", "token_file": "token"},
        },
        "ledger": {"directory": str(directory / f"ledger-{name}")},
    }
    return from_values(values | more, directory=directory)


@pytest.mark.slow
async def test_an_sqlite_is_for_one_sender(tmp_path: Path) -> None:
    """Of another name, too: a second one would give out tokens twice, or go by the first one's
    records."""
    write_signing_key(tmp_path, b"s" * 32)
    runtime = real_runtime()
    shared = daemon_config(tmp_path, "a").sender_database
    for file, more in (
        ("homeserver", {}),
        ("a", {"sender_database": shared, "homeserver": {"database": "sqlite:///other.db"}}),
    ):
        async with open_core(daemon_config(tmp_path, "a"), runtime):
            with pytest.raises(LockHeld, match=rf"another daemon .*/{file}\.db, and an SQLite is"):
                async with open_core(daemon_config(tmp_path, "b", **more), runtime):
                    pass
    async with open_core(daemon_config(tmp_path, "b"), runtime):
        pass


def config_of(homeserver: str, sender: str, name: str, names: Sequence[str] = ()) -> StoreConfig:
    of = HomeserverSettings("embedded", name, tuple(names) or (name,))
    return StoreConfig(of, homeserver, sender, synchronous="OFF")


async def test_tokens_are_the_stores_and_not_a_senders(tmp_path: Path) -> None:
    """Who takes over from a sender of another name goes on where that one was."""
    homeserver, sender = (f"sqlite:///{tmp_path}/{name}.db" for name in ("homeserver", "sender"))
    async with pushed_to(config_of(homeserver, sender, "a")) as (feed, _):
        assert await feed.intake.append([record(1), record(2)]) == [1, 2]
    async with pushed_to(config_of(homeserver, sender, "b")) as (feed, store):
        assert await feed.intake.append([record(2), record(3)]) == [2, 3]
        assert await stored(store) == [(1, "$e1"), (2, "$e2"), (3, "$e3")]


# --- one PostgreSQL, several ----------------------------------------------------------------------


class Gate:
    """Where a thread of a sender's waits before it commits, while the gate is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()

    def shut(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self, point: str) -> None:
        if point == "homeserver: before commit" and not self._open.is_set():
            self.reached.set()
            self._open.wait(30)


@dataclass
class Sender:
    """A feed on the store that all share, and what it tells its sender."""

    feed: PushFeed
    store: Store
    sink: RecordingSink
    gate: Gate
    scope: trio.CancelScope

    @property
    def takes_appends(self) -> bool:
        return self.feed.intake.closed is None

    async def append(self, *appends: Append) -> list[int | None]:
        return await self.feed.intake.append(appends)

    def end(self) -> None:
        self.scope.cancel()


class Site:
    """A PostgreSQL, and the senders on it.

    Attributes:
        ended: the names under which nobody acts any more.
    """

    def __init__(self, directory: Path, postgres: Databases, nursery: trio.Nursery) -> None:
        self.homeserver = postgres.create_database()
        self.ended: set[str] = set()
        self._directory = directory
        self._nursery = nursery

    async def start(self, name: str) -> Sender:
        sender: Sender = await self._nursery.start(self._run, name)
        return sender

    async def _run(self, name: str, *, task_status: trio.TaskStatus[Sender]) -> None:
        own = f"sqlite:///{self._directory}/{name}.db"
        config = config_of(self.homeserver, own, name, NAMES)
        gate, sink, runtime = Gate(), RecordingSink(), real_runtime()
        with trio.CancelScope() as scope:
            async with open_store(config, runtime, faults=gate) as store:
                store.homeserver.ended = self._has_ended
                self.ended.discard(name)
                feed = PushFeed(runtime, own_store(store.homeserver), sink)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(feed.run)
                    await feed.connected.wait()
                    task_status.started(Sender(feed, store, sink, gate, scope))
        self.ended.add(name)

    async def _has_ended(self, name: str) -> bool:
        await trio.lowlevel.checkpoint()
        return name in self.ended


@pytest.fixture
async def site(tmp_path: Path, postgres: Databases, nursery: trio.Nursery) -> Site:
    return Site(tmp_path, postgres, nursery)


async def test_one_takes_the_appends_and_the_others_see_them(site: Site) -> None:
    a, b = await site.start("a"), await site.start("b")
    with pytest.raises(Elsewhere) as refused:
        await b.append(record(1))
    assert refused.value.instance == "a"
    redaction = ["redaction", ["$elsewhere", "$e1"]]
    tokens = await a.append(record(1), record(2, hosts(1), pdu(2), to_device(3), redaction))
    assert tokens == [1, 2]
    await until(lambda: b.sink.events.value == 2)
    assert b.sink.edus.device_lists.value == 2
    assert b.sink.to_device == ["b.example"]
    assert b.sink.redactions == ["$e1"]
    assert await stored(b.store) == [(1, "$e1"), (2, "$e2")]
    await a.feed.intake.ephemeral(
        [
            ("typing", ["!r:hs.example", ["@a:hs.example"]]),
            ("presence", ["@a:hs.example", "online", 5, None, True, ["c.example"]]),
            ("server_up", "d.example"),
            ("receipts", ["!r:hs.example", "m.read", "@a:hs.example", "$e1", None, {"ts": 5}]),
        ]
    )
    await until(lambda: b.sink.edus.receipts.value == a.sink.edus.receipts.value == 1)
    for each in (a, b):
        typed = [row[:2] for row in each.sink.edus.typed[1:]]
        assert typed == [("!r:hs.example", ["@a:hs.example"])]
        assert each.sink.edus.states == [PresenceState("@a:hs.example", "online", 5, None, True)]
        assert each.sink.up == ["d.example"]
        assert each.sink.edus.wanted == [("c.example", "@a:hs.example")]


async def test_what_another_sender_tells_is_read_in_parts_and_heard_with_breaks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 presence rows for 1,000 servers each, 6 MB, were read at once and told in one step."""
    monkeypatch.setattr(appends, "NOTICES_BYTES", 500)
    monkeypatch.setattr(fairness, "PASS_S", 0.0)
    steps, read = StepsOf(), list[int]()
    news = appends.read_news

    def counted(*args: Any, **values: Any) -> appends.News:
        found = news(*args, **values)
        read.append(len(found.notices))
        return found

    monkeypatch.setattr(appends, "read_news", counted)
    a, b = await site.start("a"), await site.start("b")
    monkeypatch.setattr(b.sink.edus, "typing", steps.counting(b.sink.edus.typing))
    trio.lowlevel.add_instrument(steps)
    rooms = [f"!{number:0>40}:hs.example" for number in range(50)]
    redaction = ["redaction", ["$elsewhere", "$e1"]]
    await a.feed.intake.ephemeral([("typing", [room, ["@a:hs.example"]]) for room in rooms])
    await a.append(record(1), record(2, redaction))
    await until(lambda: b.sink.events.value == 2 and len(b.sink.edus.typed) > len(rooms))

    assert [row[0] for row in b.sink.edus.typed[1:]] == rooms
    assert b.sink.redactions == ["$e1"]
    assert max(read) < 10
    assert steps.most == 1


async def test_what_a_refused_record_redacts_is_told_to_nobody(site: Site) -> None:
    a, b = await site.start("a"), await site.start("b")
    await a.append(record(1), record(2))
    with pytest.raises(KeyReused):
        await a.append(record(1, ["redaction", ["$elsewhere", "$e1"]]))
    assert await a.append(record(3, ["redaction", ["$elsewhere", "$e2"]])) == [3]
    await until(lambda: b.sink.events.value == 3)
    assert a.sink.redactions == b.sink.redactions == ["$e2"]


async def test_who_is_in_a_room_is_read_again_when_another_sender_stored_it(site: Site) -> None:
    a, b = await site.start("a"), await site.start("b")
    for number in (1, 2):
        await a.append(record(number, hosts(number)))
        await until(lambda upto=number: b.sink.events.value == upto)  # type: ignore[misc]
        there = await b.store.homeserver.servers_now(["!r:hs.example"])
        assert len(there["!r:hs.example"]) == number


async def test_another_one_takes_over_from_one_that_ends(site: Site) -> None:
    """What was appended before is known to it by its id; nothing is stored twice."""
    a, b = await site.start("a"), await site.start("b")
    assert await a.append(record(1), record(2, to_device(2))) == [1, 2]
    a.end()
    await until(lambda: b.takes_appends)
    assert b.sink.to_device == ["b.example"], "all that it had not seen before it took over"
    assert await b.append(record(1), record(3)) == [1, 3]
    assert await stored(b.store) == [(1, "$e1"), (3, "$e3")]
    again = await site.start("a")
    assert not again.takes_appends
    assert again.sink.events.value == 3


async def test_who_was_taken_over_stores_nothing_and_says_so(site: Site) -> None:
    """It does not know it: its connections to the tables are whole."""
    a, b = await site.start("a"), await site.start("b")
    assert await a.append(record(1)) == [1]
    (place,) = a.feed.intake.reserve("writer", 1)
    epoch = a.feed.epoch
    answers: list[Exception] = []

    async def wait() -> None:
        try:
            await a.append(record(8))
        except (Elsewhere, ReservationGone) as gone:
            answers.append(gone)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        site.ended.add("a")
        await until(lambda: b.takes_appends)
        with pytest.raises(Elsewhere):
            await a.append(append_of("late", [pdu(9)], place))
    await until(lambda: not a.takes_appends)
    with pytest.raises(Elsewhere) as refused:
        await a.append(record(2))
    assert refused.value.instance == "b"
    assert len(answers) == 1
    await until(lambda: a.feed.epoch == b.feed.epoch != epoch)
    assert await b.append(record(2)) == [2]
    await until(lambda: a.sink.events.value == 2)
    assert await stored(a.store) == [(1, "$e1"), (2, "$e2")]


async def test_a_transaction_under_way_ends_before_another_sender_begins(site: Site) -> None:
    """Paused between its look at the row and its commit, for as long as it likes."""
    a, b = await site.start("a"), await site.start("b")
    answers: list[Any] = []

    async def append() -> None:
        answers.extend(await a.append(record(1), record(2)))

    async with trio.open_nursery() as nursery:
        a.gate.shut()
        nursery.start_soon(append)
        await trio.to_thread.run_sync(a.gate.reached.wait)
        site.ended.add("a")
        await trio.sleep(4)
        assert not b.takes_appends
        a.gate.open()
        await until(lambda: b.takes_appends)
    assert answers == [1, 2]
    assert await b.append(record(3), record(2)) == [3, 2]
    assert b.sink.events.value == 3


async def test_each_step_of_a_snapshot_is_fenced(site: Site) -> None:
    """Who takes the feed in the middle of a load removes its remains; nothing more of it comes."""
    a, b = await site.start("a"), await site.start("b")
    room = {"room_id": "!late:hs.example", "room_version": None}

    def steps() -> Steps[None]:
        yield partial(positions.begin_load, position=0)
        site.ended.add("a")
        trio.from_thread.run(until, lambda: b.takes_appends)
        yield partial(insert_rows, table=tables.rooms, rows=[room])

    with pytest.raises(Elsewhere):
        await own_store(a.store.homeserver).write_in_steps(steps())
    assert await b.append(record(1)) == [1]


async def test_the_endpoint_of_the_others_names_the_one(site: Site, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    a = await site.start("a")
    await a.append(record(1))
    b = await site.start("b")
    listen = UnixAddress(tmp_path / "b.sock")
    serving = serve_intake(b.feed.intake, listen, tmp_path / "token", real_runtime())
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "b.sock"), verify=False)
    headers = {"Authorization": "Bearer secret"}
    async with serving, httpx.AsyncClient(transport=transport, headers=headers) as http:
        for answer in (
            await http.post(
                f"http://b{PREFIX}/append", json={"appends": [{"id": "1", "rows": []}]}
            ),
            await http.post(f"http://b{PREFIX}/reserve", json={"writer": "x"}),
            await http.post(f"http://b{PREFIX}/ephemeral", json={}),
        ):
            assert answer.status_code == 503
            assert answer.json()["errcode"] == "FEDSENDER_ELSEWHERE"
            assert answer.json()["instance"] == "a"
        assert (a.feed.status().appends, b.feed.status().appends) == ("we do", "instance a does")
        position = (await http.get(f"http://b{PREFIX}/position")).json()
        assert (position["epoch"], position["stored"]) == (a.feed.epoch, 1)


async def test_the_client_finds_the_one_and_its_successor(site: Site, tmp_path: Path) -> None:
    """With the addresses of all of them."""
    (tmp_path / "token").write_text("secret")
    senders = {name: await site.start(name) for name in NAMES}

    def serving(name: str) -> AbstractAsyncContextManager[Any]:
        listen, intake = UnixAddress(tmp_path / f"{name}.sock"), senders[name].feed.intake
        return serve_intake(intake, listen, tmp_path / "token", real_runtime())

    addresses = [f"unix:{tmp_path}/{name}.sock" for name in reversed(NAMES)]
    async with serving("b"), IntakeClient.at(addresses, "secret") as client:
        async with serving("a"):
            assert await client.append([pdu(1)], id="1") == 1
        senders["a"].end()
        assert await client.append([pdu(2)], id="2") == 2
        assert await client.append([pdu(1)], id="1") == 1
        assert senders["b"].takes_appends


# --- whole daemons --------------------------------------------------------------------------------


async def test_the_only_sender_of_its_list_has_nobody_to_hand_back_to(tmp_path: Path) -> None:
    config = daemon_config(tmp_path, "b")
    with pytest.raises(ConfigError, match="names no other sender: there is nobody to hand back to"):
        await hand_back(config, store_config(config), real_runtime())


async def test_each_of_two_daemons_sends_its_share(tmp_path: Path, postgres: Databases) -> None:
    """Of what one of them took in; and all goes on when that one ends."""
    signer = write_signing_key(tmp_path, b"s" * 32, HS)
    user = f"@a:{HS}"
    timeline = new_timeline(ROOM_VERSIONS["10"], "r", user)
    runtime = real_runtime()
    database, own = postgres.create_database(), postgres.create_database()
    timeline.append(
        "m.room.create", user, {"room_version": "10"}, signer=signer, now_ms=0, state_key=""
    )
    receiving = open_receivers(
        12,
        [signer.origin],
        pdu_reader(lambda _: "10"),
        directory=tmp_path,
        now_ms=runtime.now_ms(),
    )

    def say(number: int) -> Append:
        event = timeline.append(
            "m.room.message", user, {"n": number}, signer=signer, now_ms=runtime.now_ms()
        )
        row = ["pdu", [event.room_id, event.event_id, event.content, {"room_version": "10"}]]
        return append_of(event.event_id, [row])

    async with receiving as receivers, trio.open_nursery() as nursery:
        servers = sorted(receivers.servers)

        async def run(name: str, *, task_status: trio.TaskStatus[Any]) -> None:
            more = {
                "homeserver": {"database": database, "federation_sender_instances": list(NAMES)},
                "sender_database": own,
                "federation": {"ip_allow": ["127.0.0.0/8"], "ca_file": str(receivers.ca_file)},
            }
            with trio.CancelScope() as scope:
                async with open_core(daemon_config(tmp_path, name, **more), runtime) as daemon:
                    await daemon.feed.connected.wait()
                    task_status.started((daemon, scope))
                    await trio.sleep_forever()

        def intake_of(daemon: Daemon) -> Any:
            assert isinstance(daemon.feed, PushFeed)
            return daemon.feed.intake

        def all_have(count: int) -> Callable[[], bool]:
            return lambda: all(len(each.received) == count for each in receivers.servers.values())

        one, ended = await nursery.start(run, "a")
        two, _ = await nursery.start(run, "b")
        shares = [{name for name in servers if each.config.handles(name)} for each in (one, two)]
        assert all(shares)
        joins = append_of("joins", [["hosts", [timeline.room_id, servers, []]]])
        assert await intake_of(one).append([joins, say(1), say(2)]) == [1, 2, 3]
        await until(all_have(2))
        ended.cancel()
        await until(lambda: intake_of(two).closed is None)
        assert await intake_of(two).append([say(3)]) == [4]
        one, _ = await nursery.start(run, "a")
        await until(all_have(3))
        assert intake_of(one).closed is not None
        assert not receivers.violations.first
        nursery.cancel_scope.cancel()
