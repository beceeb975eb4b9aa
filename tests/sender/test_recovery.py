"""A start takes over the records of a killed daemon, or of another sender."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
from tests.sender.harness import World
from tests.test_attempt_log import line_of, until_killed
from trio.testing import MockClock

from fedsender.config.sections import Ledger as Settings
from fedsender.ledger import Ledger, Line, SentPdu, TransactionRecord, cut_off, open_ledger
from fedsender.runtime import real_runtime
from fedsender.sender.failure import ServerState, states_of
from fedsender.sender.recovery import _Recovery, hand_over, take_over
from fedsender.store import HomeserverSettings, Store, StoreConfig, open_store
from fedsender.store.positions import SetBack, set_feed_position
from fedsender.store.records import FrozenRecord, Redelivery
from fedsender.telemetry import Count

A, B, R = "a.example", "b.example", "!r:hs"


@asynccontextmanager
async def a_store(directory: Path, *instances: str) -> AsyncIterator[Store]:
    config = StoreConfig(
        homeserver=HomeserverSettings("embedded", "fed1", instances or ("fed1",)),
        homeserver_url=f"sqlite:///{directory}/homeserver.db",
        sender_url=f"sqlite:///{directory}/sender.db",
        synchronous="OFF",
    )
    async with open_store(config, real_runtime()) as store:
        yield store


@asynccontextmanager
async def a_ledger(directory: Path, boot: str) -> AsyncIterator[Ledger]:
    settings = Settings(directory=directory / "ledger")
    async with open_ledger(settings, "fed1", boot, real_runtime(), Count()) as ledger:
        yield ledger


def answered(**values: Any) -> Line:
    carried = {name: values.pop(name) for name in ("pdus",) if name in values}
    record = TransactionRecord(lsso=values.get("lsso"), **carried)
    given = {"ms": 1_000, "destination": A, "transaction_id": "t", "attempt": 1, **values}
    return Line(outcome="delivered", record=record, **given)


async def start(
    store: Store, directory: Path, boot: str, is_mine: Callable[[str], bool] = lambda _: True
) -> set[str]:
    async with a_ledger(directory, boot) as ledger:
        return await take_over(store, ledger, real_runtime(), "fed1", is_mine)


def frozen(manifest: Mapping[str, Any]) -> FrozenRecord:
    return FrozenRecord(A, "t2", b"{}", manifest, 5, 1)


async def fan_out_upto(store: Store, token: int) -> None:
    """The feed is stored up to this token, and has nothing for anybody."""
    await store.homeserver.events_position()
    await store.homeserver._database.write(partial(set_feed_position, token=token))
    await store.homeserver.commit_fan_out(token, {})


async def test_extremities_ahead_of_the_fan_out_are_no_sign_of_a_move(tmp_path: Path) -> None:
    """I3: catch-up sends forward extremities, which may be newer than all that is fanned out. Who
    is killed while his fan-out lags repeats what was frozen, and knows what was answered."""
    ahead = SentPdu("$e", R, 900, "catch_up", (3, 10))
    async with a_store(tmp_path) as store:
        await fan_out_upto(store, 10)
        await start(store, tmp_path, "b1")
        async with a_ledger(tmp_path, "b2") as ledger:
            ledger.record(answered(pdus=[ahead], lsso=10))
        record = orjson.loads(orjson.dumps(TransactionRecord([ahead], lsso=10).as_json()))
        manifest = {**record, "lsso_before": 10}
        await store.sender.save_frozen(frozen(manifest))
        assert await start(store, tmp_path, "b3") == {A}
        assert await store.homeserver.lsso(A) == 10


async def test_a_sender_that_has_not_started_yet_sets_nobody_back(tmp_path: Path) -> None:
    """I1: a sender looks at its own position, and leaves it alone, while another one is added."""
    async with a_store(tmp_path, "fed1", "fed2", "fed3") as store:
        await fan_out_upto(store, 50)
        await start(store, tmp_path, "b1")
        # fed2 lags; fed3 has no row before its first start.
        await store.homeserver._database.write(
            lambda connection: connection.exec_driver_sql(
                "INSERT INTO federation_stream_position (type, instance_name, stream_id)"
                " VALUES ('events', 'fed2', 7), ('federation', 'fed2', 7)"
            )
        )
        await hand_over(store, "fed1")
        assert (await store.homeserver.generation()).position == 50
        left = await store.sender.load_generation("fed1")
        assert left is not None
        assert left.events_position == 50


async def test_what_is_to_be_sent_once_more_outlives_a_kill(tmp_path: Path) -> None:
    """A redelivery that was asked for after the last answer is not what that answer was for."""
    async with a_store(tmp_path) as store:
        await store.homeserver.events_position()
        await start(store, tmp_path, "b1")
        async with a_ledger(tmp_path, "b2") as ledger:
            again = SentPdu("$e", R, 3, "redelivery")
            ledger.record(answered(ms=real_runtime().now_ms() - 1_000, pdus=[again]))
        await store.sender.add_redeliveries([Redelivery(A, "$e", R, 3)])
        await start(store, tmp_path, "b3")
        assert [item.event_id for item in await store.sender.redeliveries(A, 9)] == ["$e"]


async def test_the_state_of_anothers_server_is_left_alone(tmp_path: Path) -> None:
    """Whoever has it now knows better what our last answer from it meant."""
    state = ServerState(A, failing_since_ms=1, failures=9, last_attempt_ms=5)
    async with a_store(tmp_path) as store:
        await store.homeserver.events_position()
        await start(store, tmp_path, "b1")
        async with a_ledger(tmp_path, "b2") as ledger:
            ledger.record(answered())
        await store.sender.save_server_state(state)
        await start(store, tmp_path, "b3", lambda _: False)
        assert states_of(await store.sender.all_server_states()).get(A) == state
        async with a_ledger(tmp_path, "b4") as ledger:
            ledger.record(answered())
        await start(store, tmp_path, "b5")
        found = states_of(await store.sender.all_server_states()).get(A)
        assert found is not None
        assert found.healthy


async def test_answers_of_before_we_left_the_list_say_nothing(tmp_path: Path) -> None:
    """I2: others have had the servers since, and a failover may have given the ids again."""
    async with a_store(tmp_path) as store:
        await fan_out_upto(store, 20)
        await start(store, tmp_path, "b1")
        async with a_ledger(tmp_path, "b2") as ledger:
            ledger.record(answered(lsso=10))
        await store.sender._database.write(
            # As a list without us does it, once it is in force.
            lambda connection: connection.exec_driver_sql("DELETE FROM generation")
        )
        await start(store, tmp_path, "b3")
        assert await store.homeserver.lsso(A) is None


async def test_last_answers_are_not_kept_in_memory(tmp_path: Path) -> None:
    """I7: there is one for each server that answered within an hour, with all its events."""
    async with a_store(tmp_path) as store:
        await store.homeserver.events_position()
        async with a_ledger(tmp_path, "b1") as ledger:
            ledger.record(answered())
        async with a_ledger(tmp_path, "b2") as ledger:
            assert ledger.last_words
            await take_over(store, ledger, real_runtime(), "fed1", lambda _: True)
            assert not ledger.last_words


def test_an_instance_whose_name_begins_alike_keeps_its_attempts(tmp_path: Path) -> None:
    """Two senders may write to one directory, and an instance's name may have dots in it."""
    with until_killed(tmp_path, "fed.eu") as under_way:
        under_way.begin(line_of("a.example", 1, ms=7))
    assert cut_off(tmp_path, "fed", []) == ([], [])
    lines, files = cut_off(tmp_path, "fed.eu", [])
    assert (len(lines), len(files)) == (1, 1)


class Looks(dict[str, Any]):
    """The active destinations, and how often somebody looked at all of them."""

    times = 0

    def values(self) -> Any:
        self.times += 1
        return super().values()


@pytest.mark.slow
async def test_a_full_window_does_not_ask_every_queue_about_every_event(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """With 10,000 active destinations that would cost more than the event; and yet what is queued
    stays within its bound (I7), and what had to leave is sent."""
    world = World(tmp_path)
    busy = world.server(B, latency=50)
    async with world.run() as sender:
        await world.join("!a:hs.example", A)
        await world.join("!b:hs.example", A, B)
        await trio.sleep(1)
        await world.say("!b:hs.example", "in flight")
        await trio.sleep(1)
        window = sender.context.pdu_pool
        window._limit = 20 * window.bytes
        sender.registry.active = looks = Looks(sender.registry.active)
        for number in range(60):
            await world.say("!b:hs.example", str(number))
            await trio.sleep(0.1)
            assert window.bytes <= window._limit
        # The receipts look now and then, too.
        assert looks.times < 20
        assert not sender.active[B].outbox.level
        await trio.sleep(200)
    said = [str(number) for number in range(60)]
    assert busy.got[-61:] == ["in flight", *said]
    assert world.servers[A].got[-60:] == said


async def test_a_start_looks_again_with_pauses_while_two_databases_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """Each connection reaches another one, on a timeline of its own, as after a failover that has
    left the old primary running."""
    mock_clock.rate = 100.0
    looks, look = list[float](), _Recovery.look_anew

    async def look_anew(recovery: _Recovery) -> None:
        looks.append(trio.current_time())
        if len(looks) < 4:
            raise ExceptionGroup("", [SetBack("two timelines")])
        await look(recovery)

    monkeypatch.setattr(_Recovery, "look_anew", look_anew)
    async with a_store(tmp_path) as store:
        await start(store, tmp_path, "1")
    assert len(looks) == 4
    assert all(after - before >= 1 for before, after in pairwise(looks))
