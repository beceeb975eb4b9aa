"""The link to Redis: on a real one, and by hand where time or failure matters."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
import trustme
from tests.replication.pubsub import FakeRedis, Process, forwarding
from tests.replication.support import ANYWHERE, SERVER, HandNetwork, runtime_with
from tests.servers import Valkey

from fedsender.config import TcpAddress, UnixAddress
from fedsender.replication.commands import Position, Rdata, RemoteServerUp, Replicate, Unknown
from fedsender.replication.endpoint import Endpoint
from fedsender.replication.redis import (
    RedisLink,
    RedisSettings,
    Subscribed,
    open_redis_link,
)
from fedsender.runtime import listen_tcp, listen_unix, real_runtime
from fedsender_lab.testing.clock import until
from fedsender_relay.protocol import Command

Heard = list[Command | Subscribed]


async def collect(link: RedisLink, heard: Heard) -> None:
    while True:
        heard.append(await link.next())


@asynccontextmanager
async def hearing(
    settings: RedisSettings,
) -> AsyncIterator[tuple[RedisLink, Heard, trio.Nursery]]:
    """A link on the real network, and what it has heard."""
    heard: Heard = []
    async with open_redis_link(settings, real_runtime()) as link, trio.open_nursery() as nursery:
        nursery.start_soon(collect, link, heard)
        yield link, heard, nursery
        nursery.cancel_scope.cancel()


def at(valkey: Valkey, channel: str) -> RedisSettings:
    return RedisSettings(Endpoint(TcpAddress(valkey.host, valkey.port)), channel)


# --- on a real server -----------------------------------------------------------------------------


async def test_commands_pass_both_ways_on_the_bare_channel(valkey: Valkey) -> None:
    settings = at(valkey, "both.example:8448")
    async with hearing(settings) as (link, heard, nursery):
        main = await Process.join(valkey.host, valkey.port, settings.channel, nursery)
        await until(lambda: heard == [Subscribed()])
        assert await link.publish(Replicate()) == 2
        await main.say('RDATA caches master 5 ["x",null,1]', "", "NEW_WORD what is it")
        await main.ask("PUBLISH", settings.channel + "/USER_IP", "REMOTE_SERVER_UP not.us")
        await main.say("RDATA broken", "POSITION nosuch ext 1 1")
        await until(lambda: len(heard) == 5)
        assert heard[1:] == [
            Replicate(),
            Rdata("caches", "master", 5, ["x", None, 1]),
            Unknown("NEW_WORD", "what is it"),
            Position("nosuch", "ext", 1, 1),
        ]
        assert main.heard[0] == "REPLICATE "


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
async def test_either_connection_lost_makes_both_anew(valkey: Valkey, kind: str) -> None:
    settings = at(valkey, f"lost.{kind}")
    async with hearing(settings) as (link, heard, nursery):
        await until(lambda: heard == [Subscribed()])
        killer = await Process.join(valkey.host, valkey.port, "elsewhere", nursery)
        await killer.ask("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        # A publisher that is gone shows when something is published.
        await link.publish(RemoteServerUp("a.example"))
        await until(lambda: heard.count(Subscribed()) == 2)
        assert await link.publish(RemoteServerUp("b.example")) == 1
        await until(lambda: heard[-1] == RemoteServerUp("b.example"))


async def test_server_that_goes_away_and_comes_back_is_found_again(valkey: Valkey) -> None:
    async with hearing(at(valkey, "away.example")) as (link, heard, _nursery):
        await until(lambda: heard == [Subscribed()])
        await trio.to_thread.run_sync(valkey.stop)
        await until(lambda: not link.connected)
        assert await link.publish(RemoteServerUp("a.example")) is None
        await trio.to_thread.run_sync(valkey.start)
        await until(lambda: heard == [Subscribed(), Subscribed()])


async def test_user_and_password_are_given_and_a_wrong_one_is_named(valkey: Valkey) -> None:
    async with trio.open_nursery() as nursery:
        admin = await Process.join(valkey.host, valkey.port, "admin", nursery)
        rules = ["on", ">s3cret", "allcommands", "allkeys", "allchannels"]
        assert await admin.ask("ACL", "SETUSER", "fed", *rules) == b"+OK\r\n"
        nursery.cancel_scope.cancel()
    good = replace(at(valkey, "acl.example"), username="fed", password="s3cret")
    async with hearing(good) as (_link, heard, _nursery):
        await until(lambda: heard == [Subscribed()])
    async with hearing(replace(good, password="gue55")) as (link, heard, _nursery):
        await until(lambda: link.last_error is not None)
        assert "Redis refuses AUTH: WRONGPASS" in str(link.last_error)
        assert "gue55" not in str(link.last_error) + repr(good)
        assert heard == []


async def test_unix_socket(valkey: Valkey, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    settings = RedisSettings(Endpoint(UnixAddress(path)), "unix.example")
    async with forwarding([await listen_unix(path)], valkey), hearing(settings) as (_, heard, _n):
        await until(lambda: heard == [Subscribed()])


async def test_tls_is_verified(valkey: Valkey) -> None:
    authority = trustme.CA()
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_side)
    (tcp,) = await listen_tcp("127.0.0.1", 0)
    address = TcpAddress("localhost", tcp.socket.getsockname()[1])
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with forwarding([trio.SSLListener(tcp, server_side)], valkey):
        good = RedisSettings(Endpoint(address, trusting), "tls.example")
        async with hearing(good) as (_link, heard, _nursery):
            await until(lambda: heard == [Subscribed()])
        stranger = RedisSettings(Endpoint(address, ssl.create_default_context()), "tls.example")
        async with hearing(stranger) as (link, heard, _nursery):
            await until(lambda: link.last_error is not None)
            assert "certificate refused: unable to get" in str(link.last_error)


# --- by hand --------------------------------------------------------------------------------------


@asynccontextmanager
async def by_hand(
    settings: RedisSettings | None = None,
) -> AsyncIterator[tuple[RedisLink, FakeRedis, HandNetwork, Heard]]:
    network = HandNetwork()
    settings = settings or RedisSettings(ANYWHERE, SERVER)
    async with (
        open_redis_link(settings, runtime_with(network)) as link,
        trio.open_nursery() as nursery,
    ):
        redis = FakeRedis(nursery)
        heard: Heard = []
        nursery.start_soon(collect, link, heard)
        yield link, redis, network, heard
        nursery.cancel_scope.cancel()


async def test_nothing_is_published_before_the_subscription_is_confirmed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with by_hand(RedisSettings(ANYWHERE, SERVER, None, "pw")) as (
        link,
        redis,
        network,
        heard,
    ):
        network.answers += [redis.answer, redis.answer]
        await trio.sleep(1)
        assert heard == [Subscribed()]
        assert redis.asked == [
            ["AUTH", "pw"],
            ["PING"],
            ["AUTH", "pw"],
            ["PING"],
            ["SUBSCRIBE", SERVER],
        ]
        await link.publish(Replicate())
        assert redis.said == ["REPLICATE "]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "ERR unknown command 'AUTH', with args beginning with: 'pw-s3cret' ",
            "ERR unknown command",
        ),
        ("ERR unknown user pw-s3cret", "ERR"),
        ("pw-s3cret", "an error of no known kind"),
        ("WRONGPASS invalid username-password pair pw-s3cret", "WRONGPASS"),
        ("ERR max number of clients reached", "ERR max number of clients reached"),
    ],
)
async def test_an_error_is_told_by_its_kind_and_never_quotes_the_password(
    autojump_clock: trio.testing.MockClock, said: str, shown: str
) -> None:
    settings = RedisSettings(ANYWHERE, SERVER, None, "pw-s3cret")
    async with by_hand(settings) as (link, redis, network, _heard):
        redis.refusal = f"-{said}\r\n".encode()
        network.answers.append(redis.answer)
        with structlog.testing.capture_logs() as lines:
            await trio.sleep(0.1)
        assert link.last_error == f"Redis refuses AUTH: {shown}"
        assert lines
        assert "s3cret" not in repr(lines)


async def test_both_connections_are_pinged_every_thirty_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with by_hand() as (link, redis, network, heard):
        network.answers += [redis.answer, redis.answer]
        await trio.sleep(95)
        assert redis.asked.count(["PING"]) == 2 + 2 * 3
        assert link.connected
        assert heard == [Subscribed()]


async def test_redis_that_answers_nothing_any_more_is_left(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with by_hand() as (link, redis, network, heard):
        network.answers += [redis.answer, redis.answer]
        await trio.sleep(1)
        redis.mute = True
        await trio.sleep(120)
        assert not link.connected
        redis.mute = False
        network.answers += [redis.answer, redis.answer]
        await trio.sleep(10)
        assert heard == [Subscribed(), Subscribed()]


async def test_pauses_begin_at_a_fifth_of_a_second_and_stay_below_five(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with by_hand() as (_link, _redis, network, _heard):
        await trio.sleep(300)
        tried = network.tried_at
        pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
        assert 0.1 <= pauses[0] <= 0.2
        assert max(pauses) <= 5
        assert len(pauses) > 60


async def test_publishing_that_is_cancelled_half_way_does_not_mix_up_the_answers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with by_hand() as (link, redis, network, heard):
        network.answers += [redis.answer, redis.answer, redis.answer, redis.answer]
        await trio.sleep(1)
        redis.mute = True
        with trio.move_on_after(1):
            await link.publish(RemoteServerUp("a.example"))
        redis.mute = False
        await trio.sleep(1)
        assert heard.count(Subscribed()) == 2
        assert await link.publish(RemoteServerUp("b.example")) == 1


async def test_what_is_not_redis_is_said_to_be_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def web_server(stream: trio.abc.Stream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with by_hand() as (link, _redis, network, _heard), trio.open_nursery() as nursery:
        network.answers.append(lambda stream: nursery.start_soon(web_server, stream))
        await trio.sleep(0.01)
        assert "is not Redis" in str(link.last_error)


async def test_a_redis_that_is_away_is_one_warning_not_one_for_each_try(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with by_hand() as (_link, _redis, network, _heard):
            await trio.sleep(300)
            assert len(network.tried_at) > 10
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("redis_connect_failed", "warning")
    ]
