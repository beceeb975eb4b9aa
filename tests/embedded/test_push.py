"""A homeserver that appends to the sender itself: each id once, durable before the answer, and
whatever is taken can be stored. On SQLite and on PostgreSQL."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.embedded.support import whole_daemon
from tests.relay.log_support import hosts, pdu, to_device
from tests.replication.support import RecordingSink

from fedsender.config import UnixAddress
from fedsender.embedded import intake
from fedsender.embedded.appends import KEPT_MS, forget_appends
from fedsender.embedded.endpoint import PREFIX, serve_intake
from fedsender.embedded.facts import (
    Answer,
    BadRow,
    Elsewhere,
    Full,
    KeyReused,
    Outdated,
    Record,
    prepare,
)
from fedsender.embedded.intake import Append, Intake, OtherEpoch, key_of
from fedsender.embedded.push import PushFeed
from fedsender.embedded.store import EmbeddedStore, own_store
from fedsender.runtime import real_runtime
from fedsender.sender.edus.device_lists import SIGNING_KEYS, compose
from fedsender.store import (
    Store,
    StoreConfig,
    StoreError,
    open_store,
    tables,
)
from fedsender.store.edus import KEYS_KNOWN
from fedsender.store.engine import Faults
from fedsender_lab.testing.appends import append_of
from fedsender_lab.testing.clock import until

ALICE = "@alice:hs.example"


@asynccontextmanager
async def pushed_to(
    config: StoreConfig,
    sink: RecordingSink | None = None,
    around: Callable[[EmbeddedStore], Any] = lambda store: store,
    faults: Faults | None = None,
) -> AsyncIterator[tuple[PushFeed, Store]]:
    runtime = real_runtime()
    async with (
        open_store(config, runtime, faults=faults) as store,
        trio.open_nursery() as nursery,
    ):
        feed = PushFeed(runtime, around(own_store(store.homeserver)), sink or RecordingSink())
        nursery.start_soon(feed.run)
        await feed.connected.wait()
        yield feed, store
        nursery.cancel_scope.cancel()


def record(number: int, *rows: Any) -> Append:
    return append_of(f"id{number}", rows or [pdu(number)])


async def stored(store: Store) -> list[tuple[int, str]]:
    rows = await store.homeserver.read_events(0, 2**62, 100)
    return [(row.stream_ordering, row.event_id) for row in rows]


async def test_what_is_answered_is_stored_and_the_sender_sees_it(config: StoreConfig) -> None:
    sink = RecordingSink()
    async with pushed_to(config, sink) as (feed, store):
        assert await feed.intake.append([record(1), record(2, hosts(1), pdu(2), to_device(3))]) == [
            1,
            2,
        ]
        assert await stored(store) == [(1, "$e1"), (2, "$e2")]
        assert (sink.events.value, feed.head) == (2, 2)
        assert sink.to_device == ["b.example"]
        assert await store.homeserver.to_device("b.example", 0, None, 9)
        assert feed.status().level
        # Only who has something new to say of devices is looked for.
        none_yet = sink.edus.device_lists.value
        device = ["edu", ["device_list", "b.example", "@u:hs.example", "DEVICE", None]]
        assert (none_yet, await feed.intake.append([record(3, device)])) == (0, [3])
        assert (sink.events.value, sink.edus.device_lists.value) == (3, 3)


async def test_the_newest_version_of_a_room_holds(config: StoreConfig) -> None:
    """A first one that was wrong keeps nothing back that comes with the right one."""

    def of(number: int, version: str) -> Any:
        _, (room_id, event_id, event, _) = pdu(number)
        return ["pdu", [room_id, event_id, event, {"room_version": version}]]

    async with pushed_to(config) as (feed, store):

        async def versions() -> set[str | None]:
            return {row.room_version for row in await store.homeserver.read_events(0, 99, 99)}

        await feed.intake.append([record(1, of(1, "99"))])
        assert await versions() == {"99"}
        await feed.intake.append([record(2, of(2, "10"))])
        assert await versions() == {"10"}
        await feed.intake.append([record(3, of(3, "11")), record(4, of(4, "10")), record(5)])
        await feed.intake.append([record(1, of(1, "99")), record(6, hosts(6))])
        assert len(await versions()) == 1
        assert await versions() == {pdu(5)[1][3]["room_version"]}


async def test_a_server_that_the_homeserver_heard_from_is_up(config: StoreConfig) -> None:
    sink = RecordingSink()
    async with pushed_to(config, sink) as (feed, _):
        await feed.intake.ephemeral([("server_up", "b.example"), ("server_up", "c.example:8448")])
        with pytest.raises(BadRow):
            await feed.intake.ephemeral([("server_up", "d.example"), ("server_up", "../x")])
    assert sink.up == ["b.example", "c.example:8448"]


async def test_an_append_that_comes_again_has_the_token_it_had(config: StoreConfig) -> None:
    """Also after a restart, and in one call; an id with other rows is refused, others are not."""
    async with pushed_to(config) as (feed, _):
        assert await feed.intake.append([record(1), record(1), record(2)]) == [1, 1, 2]
        epoch = feed.epoch
    async with pushed_to(config) as (feed, store):
        assert feed.epoch != epoch
        assert feed.head == 2
        assert await feed.intake.append([record(2), record(3), record(1)]) == [2, 3, 1]
        with pytest.raises(KeyReused):
            await feed.intake.append([record(1, pdu(9))])
        with pytest.raises(KeyReused):
            await feed.intake.append([record(4), record(4, pdu(9))])
        assert await feed.intake.append([record(5)]) == [4]
        assert await stored(store) == [(1, "$e1"), (2, "$e2"), (3, "$e3"), (4, "$e5")]


async def test_an_append_of_an_epoch_that_is_over_is_not_stored(config: StoreConfig) -> None:
    """Else it would come before what a restored store lacks."""
    async with pushed_to(config) as (feed, store):
        epoch = feed.epoch
        assert await feed.intake.append([record(1)], epoch) == [1]
    async with pushed_to(config) as (feed, store):
        with pytest.raises(OtherEpoch):
            await feed.intake.append([record(2)], epoch)
        assert [token for token, _ in await stored(store)] == [1]
        assert await feed.intake.append([record(2)], feed.epoch) == [2]


async def test_what_is_stored_is_not_told_before_it_has_been_read(config: StoreConfig) -> None:
    """A homeserver would append everything again."""
    runtime = real_runtime()
    async with open_store(config, runtime) as store:
        feed = PushFeed(runtime, own_store(store.homeserver), RecordingSink())

        with pytest.raises(Full):
            feed.intake.recorder.stored()


async def test_requests_that_wait_share_a_transaction(config: StoreConfig) -> None:
    points: list[str] = []
    tokens: list[int | None] = []
    async with pushed_to(config, faults=points.append) as (feed, store):

        async def append(number: int) -> None:
            tokens.extend(await feed.intake.append([record(number)]))

        points.clear()
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(append, number)
        assert sorted(tokens) == list(range(1, 101))  # type: ignore[type-var]
        assert points.count("homeserver: after commit") < 10
        assert len(await stored(store)) == 100


async def test_places_are_taken_in_their_order_and_known_when_a_retry_comes(
    config: StoreConfig,
) -> None:
    async with pushed_to(config) as (feed, store):
        intake: Intake = feed.intake
        first, second = intake.reserve("worker", 2)
        async with trio.open_nursery() as nursery:
            later = append_of("b", [pdu(2)], second)
            nursery.start_soon(intake.append, [later])
            await trio.sleep(0.1)
            assert feed.head == 0
            assert await intake.append([append_of("a", [pdu(1)], first)]) == [1]
        assert await stored(store) == [(1, "$e1"), (2, "$e2")]
        intake.reserve("worker", 1)
        assert await intake.append([later]) == [2], "its place is gone, and it is stored"


def cross_signing(*, server: str = "b.example", **public: str) -> list[Any]:
    keys = {
        f"{kind}_key": {"user_id": ALICE, "usage": [kind], "keys": {f"ed25519:{key}": key}}
        for kind, key in public.items()
    }
    return ["edu", ["signing_key", server, ALICE, keys]]


async def test_cross_signing_keys_are_told_as_they_are_now_to_each_server(
    config: StoreConfig,
) -> None:
    """Both kinds together, whichever changed; a key that was replaced is not taken for a device."""
    both = {"master": "M1", "self_signing": "S1"}
    async with pushed_to(config) as (feed, store):
        servers = ("b.example", "c.example")
        await feed.intake.append(
            [
                record(1, *(cross_signing(server=server, **both) for server in servers)),
                record(2, cross_signing(self_signing="S2"), cross_signing(self_signing="S2")),
                record(3, cross_signing(master="M2"), cross_signing(master="M3")),
                record(4, cross_signing(self_signing="S1")),
            ]
        )
        for server in servers:
            changes = await store.edus.device_changes(server, feed.head)
            ((stable, unstable),) = compose(changes, 100)
            said = json.loads(stable.wire)["content"]
            assert said["master_key"]["keys"] == {"ed25519:M3": "M3"}
            assert said["self_signing_key"]["keys"] == {"ed25519:S1": "S1"}
            assert json.loads(unstable.wire) == {
                "edu_type": "org.matrix.signing_key_update",
                "content": said,
            }
            assert changes.cross_signing[ALICE].public_keys == {"M1", "M2", "M3", "S1", "S2"}


async def test_of_a_user_who_replaces_keys_without_end_the_last_ones_are_kept(
    config: StoreConfig,
) -> None:
    """Of 10,000 each one was read and parsed for each server and change: 0.14 s, and twice more."""
    async with pushed_to(config) as (feed, store):
        for number in range(KEYS_KNOWN + 20):
            await feed.intake.append([record(number, cross_signing(master=f"M{number}"))])
        changes = await store.edus.device_changes("b.example", feed.head)
        last = {f"M{number}" for number in range(20, KEYS_KNOWN + 20)}
        assert changes.cross_signing[ALICE].public_keys == last
        master = changes.cross_signing[ALICE].master
        assert master is not None
        assert list(master["keys"].values()) == [f"M{KEYS_KNOWN + 19}"]


@pytest.mark.slow
async def test_a_change_of_cross_signing_keys_arrives_under_both_names(tmp_path: Path) -> None:
    async with whole_daemon(tmp_path) as (client, server, _):
        await client.append([cross_signing(server=server.name, master="M1", self_signing="S1")])
        await until(lambda: server.transactions)
        assert server.transactions[0].edu_types == SIGNING_KEYS


async def _lacks_a_value(store: EmbeddedStore) -> None:
    await store._database.write(
        lambda connection: connection.execute(tables.event_json.insert().values(event_id="$e3"))
    )


async def _overflows(store: EmbeddedStore) -> None:
    raise OverflowError("Python int too large to convert to SQLite INTEGER")


async def _is_odd(store: EmbeddedStore) -> None:
    raise StoreError("homeserver database: something that may pass")


class _Stumbling:
    """A store that fails whenever this event is among what is to be stored."""

    def __init__(
        self,
        store: EmbeddedStore,
        event_id: str,
        fail: Callable[[EmbeddedStore], Awaitable[None]],
    ) -> None:
        self._store = store
        self._event_id = event_id
        self._fail = fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append_records(self, records: Sequence[Record]) -> list[Answer]:
        if any(getattr(row, "event_id", "") == self._event_id for r in records for row in r.rows):
            await self._fail(self._store)
        return await self._store.append_records(records)


@pytest.mark.parametrize(
    ("fail", "answer"), [(_lacks_a_value, BadRow), (_overflows, BadRow), (_is_odd, Full)]
)
async def test_a_record_that_the_database_refuses_is_refused_alone(
    config: StoreConfig,
    fail: Callable[[EmbeddedStore], Awaitable[None]],
    answer: type[Exception],
) -> None:
    """For good where it is the record's fault: who is told to come again would do so for ever."""
    answers: dict[int, Any] = {}
    around = partial(_Stumbling, event_id="$e3", fail=fail)
    async with pushed_to(config, around=around) as (feed, store):

        async def append(number: int) -> None:
            try:
                answers[number] = await feed.intake.append([record(number)])
            except (BadRow, Full) as refused:
                answers[number] = type(refused)

        async with trio.open_nursery() as nursery:
            for number in range(1, 6):
                nursery.start_soon(append, number)
        assert answers[3] is answer
        assert len(await stored(store)) == 4
        assert sorted(answers[number] for number in (1, 2, 4, 5)) == [[1], [2], [3], [4]]


@pytest.mark.parametrize("group", [512, 4])
async def test_what_follows_a_refused_record_of_the_same_call_is_not_stored_before_it(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """Also where it is in a later transaction; other calls go on."""
    monkeypatch.setattr(intake, "GROUP_RECORDS", group)
    refused: list[Exception] = []
    around = partial(_Stumbling, event_id="$e3", fail=_overflows)
    async with pushed_to(config, around=around) as (feed, store):

        async def append(*numbers: int) -> None:
            try:
                await feed.intake.append([record(number) for number in numbers])
            except (BadRow, Full) as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append, 2, 3, 4, 5, 6)
            nursery.start_soon(append, 7, 8)
        assert [type(error) for error in refused] == [BadRow]
        assert {name for _, name in await stored(store)} == {"$e2", "$e7", "$e8"}


class _Gated(_Stumbling):
    """Such a store, whose first transaction takes until `gate` is set. `groups`: their sizes."""

    def __init__(self, store: EmbeddedStore, gate: trio.Event, groups: list[int]) -> None:
        super().__init__(store, "$e3", _overflows)
        self._gate = gate
        self._groups = groups

    async def append_records(self, records: Sequence[Record]) -> list[Answer]:
        self._groups.append(len(records))
        if len(self._groups) == 1:
            await self._gate.wait()
        return await super().append_records(records)


async def test_the_feed_is_level_while_an_append_is_being_stored(config: StoreConfig) -> None:
    """A busy homeserver always has one that is."""
    gate, groups = trio.Event(), list[int]()
    async with (
        pushed_to(config, around=partial(_Gated, gate=gate, groups=groups)) as (feed, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(feed.intake.append, [record(1)])
        await until(lambda: bool(groups))
        assert feed.status().level
        gate.set()


@pytest.mark.slow
async def test_requests_that_share_a_transaction_with_a_bad_one_are_answered_200(
    config: StoreConfig, tmp_path: Path
) -> None:
    """Over HTTP: what the endpoint refuses by itself, and what only the database does."""
    gate, groups = trio.Event(), list[int]()
    answers: dict[int, tuple[int, Any]] = {}
    around = partial(_Gated, gate=gate, groups=groups)
    secret, listen = tmp_path / "token", UnixAddress(tmp_path / "append.sock")
    secret.write_text("a token")
    transport = httpx.AsyncHTTPTransport(uds=str(listen.path), verify=False)
    headers = {"Authorization": "Bearer a token"}
    async with (
        pushed_to(config, around=around) as (feed, store),
        serve_intake(feed.intake, listen, secret, real_runtime()),
        httpx.AsyncClient(transport=transport, headers=headers) as http,
    ):

        async def post(number: int, row: Any) -> None:
            body = {"appends": [{"id": f"id{number}", "rows": [row]}]}
            answer = await http.post(f"http://x{PREFIX}/append", json=body)
            answers[number] = answer.status_code, answer.json()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, 1, pdu(1))
            await until(lambda: groups == [1])
            nursery.start_soon(post, 2, ["hosts", ["!r\0:hs.example", [], []]])
            await until(lambda: 2 in answers)
            for number in range(3, 23):
                nursery.start_soon(post, number, pdu(number))
            await until(lambda: len(feed._writer._waiting._records) == 21)
            gate.set()
        assert groups[1] == 20
        assert "NUL" in answers[2][1]["error"]
        assert "cannot be stored" in answers[3][1]["error"]
        refused = {number for number, (status, _) in answers.items() if status == 400}
        assert refused == {2, 3}
        tokens = [said["tokens"] for status, said in answers.values() if status == 200]
        assert sorted(tokens) == [[token] for token in range(1, 21)]
        assert len(await stored(store)) == 20


async def _is_taken_over(store: EmbeddedStore) -> None:
    raise Elsewhere("another")


async def test_a_record_that_another_sender_is_to_take_is_not_refused_for_good(
    config: StoreConfig,
) -> None:
    """Alone or with others: a homeserver that is told 400 sets it aside."""
    around = partial(_Stumbling, event_id="$e3", fail=_is_taken_over)
    for records in ([record(3)], [record(2), record(3)]):
        async with pushed_to(config, around=around) as (feed, _):
            with pytest.raises(Elsewhere):
                await feed.intake.append(records)


async def test_ids_are_forgotten_after_a_day_and_not_before(config: StoreConfig) -> None:
    async with pushed_to(config) as (feed, store):
        await feed.intake.append([record(1)])
        key = key_of("id1")
        assert await own_store(store.homeserver).forget_appends() == 0
        assert list(await own_store(store.homeserver).find_appends([key])) == [key]
        day_later_ms = real_runtime().now_ms() + KEPT_MS + 60_000
        forget = partial(forget_appends, now_ms=day_later_ms)
        assert await store.homeserver._database.write(forget) == 1
        assert not await own_store(store.homeserver).find_appends([key])


texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["m.room.message", "@a:b.example", "!r:b.example", "b.example", "$e", ""]),
    st.sampled_from(["\0", "\ud800", "x\0y", "\udfff!", "\U0001f600", "x" * 300]),
)
ids = st.one_of(*[st.sampled_from(["!r:b.example", "$a", "$b", "$c"])] * 4, texts)
numbers = st.one_of(
    st.integers(),
    st.sampled_from([2**63, -(2**63), 2**63 - 1, 2**53, 1.5, float("inf"), float("nan"), True]),
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(texts, numbers, st.none(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
events = st.fixed_dictionaries(
    {
        "type": st.one_of(st.just("m.room.message"), values),
        "sender": st.one_of(st.just("@a:b.example"), values),
    },
    optional={
        "state_key": values,
        "depth": st.one_of(st.just(3), numbers, values),
        "origin_server_ts": st.one_of(st.just(3), numbers, values),
        "content": values,
    },
)
abouts = st.fixed_dictionaries(
    {"room_version": st.one_of(st.just("11"), values)},
    optional={
        "plus": st.one_of(st.lists(texts, max_size=2), values),
        "minus": st.one_of(st.lists(texts, max_size=2), values),
        "internal_metadata": values,
    },
)
servers = st.lists(st.one_of(st.just("b.example"), texts), max_size=2)
public_keys = st.one_of(
    st.fixed_dictionaries(
        {"keys": st.dictionaries(texts, texts, min_size=1, max_size=1)}, optional={"usage": values}
    ),
    values,
)
rows = st.one_of(
    st.tuples(st.just("pdu"), st.tuples(ids, ids, events, abouts)),
    st.tuples(st.just("hosts"), st.tuples(ids, servers, servers)),
    st.tuples(st.just("servers"), st.tuples(ids, servers)),
    st.tuples(
        st.just("servers"), st.tuples(ids, servers, st.fixed_dictionaries({"as_of": numbers}))
    ),
    st.tuples(st.just("redaction"), st.tuples(ids, ids)),
    st.tuples(
        st.just("edu"),
        st.one_of(
            st.tuples(
                st.just("to_device"), texts, texts, st.dictionaries(texts, values, max_size=3)
            ),
            st.tuples(
                st.just("signing_key"),
                st.one_of(st.just("b.example"), texts),
                texts,
                st.dictionaries(st.sampled_from(["master_key", "self_signing_key"]), public_keys),
            ),
            st.tuples(
                st.just("device_list"),
                st.one_of(st.just("b.example"), texts),
                texts,
                texts,
                st.one_of(
                    st.none(),
                    st.fixed_dictionaries(
                        {},
                        optional={"keys": values, "device_display_name": values, "deleted": values},
                    ),
                ),
            ),
        ),
    ),
    values,
)


def _listed(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, tuple | list):
        return [_listed(each) for each in value]
    if isinstance(value, dict):
        return {key: _listed(each) for key, each in value.items()}
    return value


@cache
def taken_records() -> list[list[Record]]:
    """Batches of whatever a homeserver says that the intake takes."""
    batches: list[list[Record]] = []

    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.lists(rows, min_size=1, max_size=3), min_size=20, max_size=20))
    def draw(records: list[list[Any]]) -> None:
        good = []
        for record in records:
            try:
                good.append(prepare(_listed(record)))
            except BadRow:
                continue
        batches.append([replace(each, key=each.checksum.to_bytes(16)) for each in good])

    draw()
    return batches


@pytest.mark.slow
async def test_what_the_intake_takes_a_store_takes(config: StoreConfig) -> None:
    """Whatever a homeserver says: a record is refused with a reason, or it is stored."""
    batches = taken_records()
    assert sum(map(len, batches)) > 100
    async with open_store(config, real_runtime()) as store:
        assert await own_store(store.homeserver).take_feed("0" * 16)
        for batch in batches:
            answers = await own_store(store.homeserver).append_records(batch)
            assert all(isinstance(each, int | Outdated) for each in answers)
        # And what was stored can be read.
        for event in await store.homeserver.read_events(0, 2**62, 10_000):
            json.loads(event.json)
