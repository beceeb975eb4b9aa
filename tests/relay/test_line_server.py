"""The TCP server, talked to by hand and by its own client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from tests.relay.lines import Log, Netcat
from tests.relay.log_support import open_replication_server
from tests.replication.support import SERVER

from fedsender.replication.commands import RemoteServerUp
from fedsender.runtime import listen_tcp, listen_unix, real_runtime
from fedsender_relay.line_server import (
    MAX_WAITING,
    StreamServer,
    TooFarBehind,
)
from fedsender_relay.protocol import MAX_LINE_BYTES

NO_SECRET = "ERROR AUTH a secret is needed, before anything else"


@asynccontextmanager
async def serving(
    streams: Mapping[str, Log], **options: Any
) -> AsyncIterator[tuple[StreamServer, trio.Nursery]]:
    """A server without a listener; clients are connected by `join`."""
    async with (
        open_replication_server(SERVER, streams, [], real_runtime(), **options) as server,
        trio.open_nursery() as nursery,
    ):
        yield server, nursery
        nursery.cancel_scope.cancel()


async def join(
    server: StreamServer,
    nursery: trio.Nursery,
    *,
    trusted: bool = True,
    lockstep: bool = False,
) -> Netcat:
    make = trio.testing.lockstep_stream_pair if lockstep else trio.testing.memory_stream_pair
    ours, theirs = make()
    nursery.start_soon(lambda: server.serve(theirs, trusted=trusted))
    client = Netcat.on(ours)
    assert await client.hear() == f"SERVER {SERVER}"
    return client


# --- subscribing ----------------------------------------------------------------------------------


async def test_client_gets_what_it_missed_then_its_position_then_what_comes() -> None:
    log = Log()
    log.say(53, ["old"])
    log.say(54, ["a"])
    log.say(56, ["b1"], ["b2"], ["b3"])
    async with serving({"events": log}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("NAME netcat", "REPLICATE events 53")
        assert await client.hear_lines(5) == [
            'RDATA events 54 ["a"]',
            'RDATA events batch ["b1"]',
            'RDATA events batch ["b2"]',
            'RDATA events 56 ["b3"]',
            "POSITION events 56",
        ]
        log.say(57, ["c"])
        log.say(59)
        assert await client.hear_lines(2) == ['RDATA events 57 ["c"]', "POSITION events 59"]
        assert [session.name for session in server.sessions] == ["netcat"]


async def test_greeting_has_a_ping_with_the_time() -> None:
    async with serving({}) as (server, nursery):
        client = await join(server, nursery)
        ping = await client.hear_any()
        assert ping is not None
        assert ping.startswith("PING ")
        assert int(ping.removeprefix("PING ")) > 1_600_000_000_000


async def test_now_skips_what_was_and_all_takes_every_stream() -> None:
    events, caches = Log(), Log()
    events.say(5, ["old"])
    async with serving({"events": events, "caches": caches}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("", "REPLICATE ALL NOW\r")
        assert sorted(map(str, await client.hear_lines(2))) == [
            "POSITION caches 0",
            "POSITION events 5",
        ]
        caches.say(2, ["x"])
        assert await client.hear() == 'RDATA caches 2 ["x"]'


async def test_rows_that_come_while_missed_ones_are_read_are_sent_once_and_in_order() -> None:
    log = Log()
    for token in range(1, 121):
        log.say(token, [token])

    async def say_more(after: int, upto: int) -> None:
        if log.watermark.value < 200:
            log.say(log.watermark.value + 1, [log.watermark.value + 1])

    log.before_read = say_more
    async with serving({"events": log}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("REPLICATE events 0")
        with trio.fail_after(60):
            lines: list[str] = []
            while not lines or "200" not in lines[-1]:
                lines.append(str(await client.hear()))
                log.say(min(200, log.watermark.value + 1), [min(200, log.watermark.value + 1)])
    tokens = [int(line.split()[2]) for line in lines if line.startswith("RDATA")]
    assert tokens == sorted(set(tokens))
    assert set(range(1, 201)) == set(tokens)


async def test_bare_replicate_gets_every_stream_in_todays_form() -> None:
    log = Log()
    log.say(53, ["old"])
    async with serving({"events": log}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("REPLICATE ")
        assert await client.hear() == "POSITION events master 53 53"
        log.say(54, ["a"], ["b"])
        assert await client.hear_lines(2) == [
            'RDATA events master batch ["a"]',
            'RDATA events master 54 ["b"]',
        ]
        log.say(60)
        assert await client.hear() == "POSITION events master 54 60"


async def test_position_below_the_clients_token_is_told_as_it_is() -> None:
    log = Log()
    log.say(5, ["a"])
    async with serving({"events": log}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("REPLICATE events 9")
        assert await client.hear() == "POSITION events 5"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("FOO bar", "invalid command"),
        ("RDATA events 1 []", "invalid command: RDATA"),
        ("SERVER other.example", "invalid command: SERVER"),
        ("REPLICATE events x", "failed to parse line: REPLICATE: the token is not a number"),
        ("PING " + "x" * MAX_LINE_BYTES, "Line length exceeded"),
    ],
)
async def test_bad_line_is_answered_and_the_connection_closed(line: str, error: str) -> None:
    async with serving({"events": Log()}) as (server, nursery):
        client = await join(server, nursery)
        await client.say(line)
        assert await client.hear_rest() == [f"ERROR {error}"]
        assert not server.sessions


async def test_of_a_stream_that_is_not_here_nothing_is_missed() -> None:
    """A worker of a homeserver asks for all streams that it knows."""
    log = Log()
    log.say(5, ["a"])
    async with serving({"events": log}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("REPLICATE backfill 7", "REPLICATE caches NOW", "REPLICATE events 4")
        assert await client.hear_lines(4) == [
            "POSITION backfill 7",
            "POSITION caches 0",
            'RDATA events 5 ["a"]',
            "POSITION events 5",
        ]


async def test_second_subscription_to_a_stream_is_refused() -> None:
    async with serving({"events": Log()}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("REPLICATE events NOW", "REPLICATE events NOW")
        rest = await client.hear_rest()
        assert rest[-1] == "ERROR failed to handle replicate: already subscribed: events"


async def test_token_that_is_too_old_is_an_error() -> None:
    log = Log()
    log.say(5, ["a"])

    async def collected(after: int, upto: int) -> None:
        raise TooFarBehind(f"nothing before 4 is kept, and {after} was asked for")

    log.before_read = collected
    async with serving({"events": log}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("REPLICATE events 1")
        assert await client.hear_rest() == [
            "ERROR failed to handle replicate: nothing before 4 is kept, and 1 was asked for"
        ]


@pytest.mark.slow
async def test_one_clients_broken_stream_does_not_disturb_the_others() -> None:
    broken, log = Log(), Log()

    async def fail(after: int, upto: int) -> None:
        raise RuntimeError("disk on fire")

    broken.before_read = fail
    async with serving({"broken": broken, "events": log}) as (server, nursery):
        first, second = await join(server, nursery), await join(server, nursery)
        await first.say("REPLICATE broken 0")
        assert await first.hear() == "POSITION broken 0"
        await second.say("REPLICATE events 0")
        assert await second.hear() == "POSITION events 0"
        broken.say(1, ["x"])
        assert await first.hear_rest() == []
        log.say(1, ["y"])
        assert await second.hear() == 'RDATA events 1 ["y"]'


async def test_row_that_makes_too_long_a_line_ends_the_connection_with_an_error() -> None:
    log = Log()
    log.say(1, ["x" * MAX_LINE_BYTES])
    async with serving({"events": log}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("REPLICATE events 0")
        assert await client.hear_rest() == ["ERROR a row that cannot be sent"]


async def test_all_clients_are_told_when_the_server_stops() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    client = Netcat.on(ours)
    async with trio.open_nursery() as nursery:
        async with open_replication_server(SERVER, {}, [], real_runtime()) as server:
            nursery.start_soon(server.serve, theirs)
            assert await client.hear() == f"SERVER {SERVER}"
        assert await client.hear_rest() == ["ERROR server shutting down"]


# --- time -----------------------------------------------------------------------------------------


async def test_something_is_sent_every_five_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving({}) as (server, nursery):
        client = await join(server, nursery)
        times = []
        for _ in range(4):
            assert str(await client.hear_any()).startswith("PING ")
            times.append(trio.current_time())
    assert [round(later - times[0]) for later in times] == [0, 5, 10, 15]


async def test_client_that_has_sent_a_ping_and_falls_silent_is_dead_after_15_s(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving({}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("PING 1")
        await trio.sleep(10)
        await client.say("NAME still here")
        since = trio.current_time()
        assert await client.hear_rest() == []
        assert trio.current_time() - since == pytest.approx(15)


async def test_person_with_netcat_may_stay_silent(
    autojump_clock: trio.testing.MockClock,
) -> None:
    log = Log()
    async with serving({"events": log}) as (server, nursery):
        client = await join(server, nursery)
        await client.say("REPLICATE events NOW")
        assert await client.hear() == "POSITION events 0"
        await trio.sleep(3600)
        log.say(1, ["a"])
        assert await client.hear() == 'RDATA events 1 ["a"]'


async def test_slow_client_is_cut_off_and_comes_back_for_the_rest(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nothing is queued for it: the rows are still in the stream when it asks again."""
    log = Log()
    async with serving({"events": log}) as (server, nursery):
        slow = await join(server, nursery, lockstep=True)
        assert str(await slow.hear_any()).startswith("PING ")
        await slow.say("REPLICATE events 0")
        assert await slow.hear() == "POSITION events 0"
        for token in range(1, 1001):
            log.say(token, ["x" * 1000])
        first = str(await slow.hear()).split()[2]
        await trio.sleep(60)
        assert not server.sessions
        again = await join(server, nursery)
        await again.say(f"REPLICATE events {first}")
        lines = await again.hear_lines(1000 - int(first))
        assert [str(line).split()[2] for line in lines] == [
            str(token) for token in range(int(first) + 1, 1001)
        ]


# --- commands that are not rows -------------------------------------------------------------------


async def test_remote_server_up_goes_to_all_but_who_said_it() -> None:
    async with serving({}) as (server, nursery):
        one, two, three = [await join(server, nursery) for _ in range(3)]
        # What is no name of a server is told to nobody: a thousand of these may wait for each.
        await one.say("NAME one", f"REMOTE_SERVER_UP {'b' * 200_000}")
        await one.say("REMOTE_SERVER_UP b.example:8448")
        assert await two.hear() == "REMOTE_SERVER_UP b.example:8448"
        assert await three.hear() == "REMOTE_SERVER_UP b.example:8448"
        await two.say("FEDERATION_ACK 5", "REMOTE_SERVER_UP c.example")
        assert await one.hear() == "REMOTE_SERVER_UP c.example"


async def test_client_that_takes_no_commands_fails_to_keep_up() -> None:
    async with serving({}) as (server, nursery):
        stuck = await join(server, nursery, lockstep=True)
        assert str(await stuck.hear_any()).startswith("PING ")
        for number in range(MAX_WAITING + 2):
            server.announce(RemoteServerUp(f"s{number}.example"))
        with trio.fail_after(60):
            assert (await stuck.hear_rest())[-1] == "ERROR Failed to keep up"


# --- who may connect ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_secret_must_come_first() -> None:
    async with serving({"events": Log()}, secrets=lambda: {"sender-1": "s3cret"}) as (
        server,
        nursery,
    ):
        good, bad, none = [await join(server, nursery, trusted=False) for _ in range(3)]
        await good.say("AUTH s3cret", "REPLICATE events NOW")
        assert await good.hear() == "POSITION events 0"
        await bad.say("AUTH guess", "REPLICATE events NOW")
        assert await bad.hear_rest() == [NO_SECRET]
        await none.say("REPLICATE events NOW")
        assert await none.hear_rest() == [NO_SECRET]


async def test_client_that_does_not_authenticate_is_not_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving({}, secrets=lambda: {"sender-1": "s3cret"}) as (server, nursery):
        client = await join(server, nursery, trusted=False)
        assert await client.hear_rest() == [NO_SECRET]
        assert trio.current_time() < 15


async def test_listener_that_others_can_reach_needs_secrets() -> None:
    listeners = await trio.open_tcp_listeners(0, host="0.0.0.0")
    with pytest.RaisesGroup(pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="secrets"))):
        async with open_replication_server(SERVER, {}, listeners, real_runtime()):
            pass
    for listener in listeners:
        await listener.aclose()


async def test_real_sockets_unix_needs_no_secret_and_tcp_does(tmp_path: Path) -> None:
    log = Log()
    log.say(1, ["a"])
    path = tmp_path / "replication.sock"
    (tcp,) = await listen_tcp("127.0.0.1", 0)
    unix = await listen_unix(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="somebody listens here"):
        await listen_unix(path)
    async with open_replication_server(
        SERVER, {"events": log}, [tcp, unix], real_runtime(), secrets=lambda: {"sender-1": "s3cret"}
    ):
        async with await trio.open_unix_socket(path) as stream:
            client = Netcat.on(stream)
            await client.say("REPLICATE events 0")
            assert await client.hear_lines(3) == [
                f"SERVER {SERVER}",
                'RDATA events 1 ["a"]',
                "POSITION events 1",
            ]
        async with await trio.testing.open_stream_to_socket_listener(tcp) as stream:
            client = Netcat.on(stream)
            await client.say("REPLICATE events 0")
            assert await client.hear_rest() == [f"SERVER {SERVER}", NO_SECRET]
    await (await listen_unix(path)).aclose()
