"""Answers of status 200 that say nothing: some homeservers answer so to what has no PDUs."""

import json

import pytest
import trio
from tests.sender.harness import Reply, Request, World, answer
from tests.store.rooms import queue_to_device
from trio.testing import MockClock

from fedsender.federation.transport import Answer, Response, answer_of

A = "a.example"
ROOM = "!r:hs.example"
NOTHING = [b"", b" \n", b"null", b"[]", b'{"pdus":null}', b'{"pdus":[],"edus":[]}']
DAY_S = 86_400


def saying(body: bytes) -> Answer:
    return answer_of(Response(200, (), body), [], reused=True, now_ms=lambda: 0)


def blank_without_pdus(body: bytes = b"") -> Reply:
    """Matrix-org/synapse#9065."""
    return lambda request: answer(200, {}) if request.event_ids else saying(body)


async def messages_left(world: World) -> list[str]:
    rows = await world.store.homeserver.to_device(A, 0, None, 1000)
    return [json.loads(content)["n"] for _, content in rows]


async def to_device(world: World, number: int) -> None:
    await queue_to_device(world.store.homeserver, A, number, json.dumps({"n": str(number)}))
    world.sender.to_device_changed(A)


def messages(requests: list[Request]) -> list[str]:
    contents = [edu["content"] for request in requests for edu in request.edus]
    return [content["n"] for content in contents if "n" in content]


@pytest.fixture
def world(tmp_path: object) -> World:
    return World(tmp_path)  # type: ignore[arg-type]  # pytest's own


@pytest.mark.slow
@pytest.mark.parametrize("body", NOTHING)
async def test_a_homeserver_that_says_nothing_to_what_has_no_pdus_gets_everything(
    world: World, autojump_clock: MockClock, body: bytes
) -> None:
    server = world.server(A, reply=blank_without_pdus(body))
    async with world.run() as sender:
        await world.join(ROOM, A)
        await trio.sleep(10)
        sender.edus.typing(ROOM, ["@a:hs.example"], 1)
        await trio.sleep(1)
        await to_device(world, 1)
        await trio.sleep(1)
        await world.say(ROOM, "one")
        await trio.sleep(10)

        assert server.got[-1:] == ["one"]
        assert messages(server.requests) == ["1"]
        assert await messages_left(world) == []
    assert {line["outcome"] for line in world.ledger(A)} == {"delivered"}


@pytest.mark.slow
async def test_a_proxy_that_says_nothing_to_everything_takes_no_keys(
    world: World, autojump_clock: MockClock
) -> None:
    """In maintenance: the messages come again once the homeserver is behind it."""
    server = world.server(A, reply=lambda _: saying(b""), version=False)
    async with world.run():
        await world.join(ROOM, A)
        await to_device(world, 1)
        await world.say(ROOM, "one")
        await trio.sleep(DAY_S)

        assert await messages_left(world) == ["1"]
        assert 4 < len(server.attempts) <= 60
        server.reply, server.version = blank_without_pdus(), True
        before = len(server.requests)
        await trio.sleep(10 * 3600)
        assert await messages_left(world) == []
    assert messages(server.requests[before:]) == ["1"]
    assert server.got[-1:] == ["one"]


@pytest.mark.slow
@pytest.mark.parametrize("version", [True, False])
async def test_keys_do_not_wait_behind_events_that_were_answered_by_nothing(
    world: World, autojump_clock: MockClock, version: bool
) -> None:
    server = world.server(
        A, reply=lambda r: saying(b"") if r.event_ids else answer(200, {}), version=version
    )
    async with world.run():
        await world.join(ROOM, A)
        await world.say(ROOM, "one")
        await trio.sleep(3 * 3600)
        assert server.got == []
        for number in range(3):
            await to_device(world, number + 1)
            await trio.sleep(3600)
            assert await messages_left(world) == []
        assert len(server.attempts) < 40
        server.reply = lambda _: answer(200, {})
        await trio.sleep(6 * 3600)
    assert server.got[-1:] == ["one"]


@pytest.mark.slow
async def test_events_do_not_wait_behind_keys_that_were_answered_by_nothing(
    world: World, autojump_clock: MockClock
) -> None:
    """As long as it is unknown whether a homeserver said it: its /version is closed to us."""
    server = world.server(A, reply=blank_without_pdus(), version=False)
    async with world.run():
        await world.join(ROOM, A)
        await trio.sleep(10)
        await to_device(world, 1)
        for number in range(3):
            await trio.sleep(3600)
            await world.say(ROOM, str(number))
            await trio.sleep(60)
            assert server.got[-1:] == [str(number)]
        assert await messages_left(world) == ["1"]


@pytest.mark.slow
async def test_for_typing_a_homeserver_is_asked_once_a_day_and_for_keys_each_time(
    world: World, autojump_clock: MockClock
) -> None:
    server = world.server(A, reply=blank_without_pdus())
    async with world.run() as sender:
        await world.join(ROOM, A)
        for token in range(1, 25):
            sender.edus.typing(ROOM, ["@a:hs.example"] if token % 2 else [], token)
            await trio.sleep(1800)
        assert server.versions_asked == 1
        for number in range(3):
            await to_device(world, number + 1)
            await trio.sleep(10)
    assert server.versions_asked == 1 + 3


@pytest.mark.slow
async def test_a_suspect_is_not_acquitted_by_nothing_and_others_go_past_it(
    world: World, autojump_clock: MockClock
) -> None:
    poison = True

    def reply(request: Request) -> Answer:
        if poison and "1" in messages([request]):
            return answer(400)
        return blank_without_pdus()(request)

    server = world.server(A, reply=reply)
    async with world.run():
        await world.join(ROOM, A)
        for number in range(4):
            await to_device(world, number + 1)
        await world.say(ROOM, "one")
        await trio.sleep(3600)
        # Nor do such answers convict it.
        assert await messages_left(world) == ["1"]
        assert await world.store.sender.quarantine_size() == 0
        poison = False
        await trio.sleep(6 * 3600)
        await to_device(world, 5)
        await world.say(ROOM, "two")
        await trio.sleep(6 * 3600)
        assert await messages_left(world) == ["1"]
        assert await world.store.sender.quarantine_size() == 0
        assert len(server.attempts) < 60
        server.reply = lambda _: answer(200, {})
        await trio.sleep(2 * 3600)
        assert await messages_left(world) == []
    assert server.got[-2:] == ["one", "two"]
