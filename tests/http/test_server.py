"""What a client of the HTTP endpoints may do, on streams in memory and the virtual clock."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import structlog
import trio
from starlette.types import ASGIApp, Receive, Scope, Send
from trio.testing import MockClock, lockstep_stream_pair

from fedsender.fairness import PASS_S, Turns
from fedsender.http.server import (
    GRACE_SECONDS,
    HEAD_BYTES,
    HEAD_SECONDS,
    LINGER_SECONDS,
    PATIENCE_SECONDS,
    SEND_SECONDS,
    serve_http,
)
from fedsender_lab.testing.clock import turns_cpu

GET = b"GET /x%20y?a=b HTTP/1.1\r\nHost: localhost\r\n\r\n"
MOST = 4


class Door(trio.abc.Listener[Any]):
    """A listener without a socket. What is written to a connection waits until it is read."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](100)

    async def accept(self) -> Any:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise trio.ClosedResourceError from None

    async def aclose(self) -> None:
        await self._receive.aclose()

    def connect(self) -> Any:
        ours, theirs = lockstep_stream_pair()
        self._send.send_nowait(theirs)
        return ours


@asynccontextmanager
async def served(app: ASGIApp, turns: Turns | None = None) -> AsyncIterator[Door]:
    async def load() -> ASGIApp:
        return app

    door: Any = Door()
    turns, server = turns or Turns(turns_cpu()), ("127.0.0.1", 9009)
    async with serve_http(load, [door], server, now_ms=lambda: 0, turns=turns, most=MOST):
        yield door


async def test_requests_are_read_in_turns() -> None:
    """One with 3,900 headers takes 9 ms: 64 clients took one pass of 460 ms. It may be in one piece
    with the request before it."""
    turns = Turns(turns_cpu(2 * PASS_S))
    large, got = GET[:-2] + b"a:\r\n" * 1000 + b"\r\n", b""
    async with served(greet, turns) as door:
        stream = door.connect()
        await stream.send_all(GET + large)
        while got.count(b"HTTP/1.1 200 ") < 2:
            got += await stream.receive_some()
        assert turns.waited == 1
        await trio.aclose_forcefully(stream)


class Passes(trio.abc.Instrument):
    """Counts the passes of the event loop."""

    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


@pytest.mark.parametrize(("chunks", "least", "most"), [(1, 0, 0), (1000, 1000 // 16, 1000)])
async def test_a_body_that_has_come_takes_a_pass_for_many_chunks(
    chunks: int, least: int, most: int
) -> None:
    """While others are busy a pass takes long. A small append waited through four of them."""
    passes, took = Passes(), []

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        began = passes.count
        while (await receive())["more_body"]:
            pass
        took.append(passes.count - began)
        await say(send, b"")

    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    trio.lowlevel.add_instrument(passes)
    async with served(count) as door:
        stream = door.connect()
        await stream.send_all(head + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        await trio.aclose_forcefully(stream)
    trio.lowlevel.remove_instrument(passes)
    assert least <= took[0] <= most


async def answer_of(stream: Any) -> bytes:
    """All that comes until the connection ends."""
    got = b""
    with suppress(trio.BrokenResourceError):
        while part := await stream.receive_some():
            got += part
    return got


async def send_all(stream: Any, data: bytes) -> None:
    with suppress(trio.BrokenResourceError):
        await stream.send_all(data)


async def say(send: Send, body: bytes, *, length: bool = True) -> None:
    headers = [(b"content-length", b"%d" % len(body))] if length else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def greet(scope: Scope, receive: Receive, send: Send) -> None:
    await say(send, f"{scope['path']}?{scope['query_string'].decode()}".encode())


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await say(send, body, length=False)


async def hang(scope: Scope, receive: Receive, send: Send) -> None:
    await trio.sleep_forever()


# --- answers --------------------------------------------------------------------------------------


async def test_requests_of_one_connection_are_answered_in_turn(autojump_clock: MockClock) -> None:
    async with served(greet) as door, trio.open_nursery() as nursery:
        stream = door.connect()
        head = GET.replace(b"GET", b"HEAD").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        nursery.start_soon(stream.send_all, GET * 2 + head)
        got = await answer_of(stream)
    assert got.count(b"HTTP/1.1 200 ") == 3
    assert got.count(b"/x y?a=b") == 2
    assert got.count(b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\n") == 3
    assert got.endswith(b"\r\n\r\n")


async def test_a_body_comes_by_length_in_chunks_and_after_100_continue(
    autojump_clock: MockClock,
) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    for said in (
        head + b"Content-Length: 4\r\n\r\nbody",
        head + b"Transfer-Encoding: chunked\r\n\r\n1\r\nb\r\n3\r\nody\r\n0\r\n\r\n",
    ):
        async with served(echo) as door, trio.open_nursery() as nursery:
            stream = door.connect()
            nursery.start_soon(stream.send_all, said)
            got = await answer_of(stream)
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b"\r\n4\r\nbody\r\n0\r\n\r\n" in got
    async with served(echo) as door:
        stream = door.connect()
        await stream.send_all(head + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100 ")
        await stream.send_all(b"body")
        assert (await answer_of(stream)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * HEAD_BYTES, 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
async def test_what_is_not_a_request_of_http_1_1_is_refused_and_the_connection_closed(
    autojump_clock: MockClock, said: bytes, status: int
) -> None:
    async with served(echo) as door, trio.open_nursery() as nursery:
        stream = door.connect()
        nursery.start_soon(send_all, stream, said)
        got = await answer_of(stream)
    assert got.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close\r\n" in got.lower()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"HEAD / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"HEAD http://evil.example/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (
            b"HEAD / HTTP/1.1\r\nHost: a\r\n"
            b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
    ],
)
async def test_a_head_that_is_refused_is_answered_without_a_body_and_without_a_log_line(
    autojump_clock: MockClock, said: bytes, status: int
) -> None:
    """28 bytes of anybody, without a token, must not become a traceback in the log."""
    with structlog.testing.capture_logs() as lines:
        async with served(echo) as door, trio.open_nursery() as nursery:
            stream = door.connect()
            nursery.start_soon(send_all, stream, said)
            got = await answer_of(stream)
    assert got.startswith(b"HTTP/1.1 %d " % status)
    assert got.endswith(b"\r\n\r\n")
    assert lines == []


async def test_a_change_of_protocol_is_passed_over(autojump_clock: MockClock) -> None:
    async with served(greet) as door, trio.open_nursery() as nursery:
        stream = door.connect()
        upgrade = GET[:-2] + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
        nursery.start_soon(send_all, stream, upgrade + b"x")
        assert (await answer_of(stream)).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_nobody_wants_is_not_parsed_and_its_sender_gets_the_answer(
    autojump_clock: MockClock,
) -> None:
    async with served(greet) as door, trio.open_nursery() as nursery:
        stream = door.connect()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        nursery.start_soon(stream.send_all, head + b"1\r\nx\r\n" * 300_000)
        got = await answer_of(stream)
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close\r\n" in got.lower()


async def test_an_error_ends_the_connection_it_comes_from_and_nothing_else(
    autojump_clock: MockClock,
) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/break":
            raise RuntimeError("of ours")
        await greet(scope, receive, send)

    async with served(broken) as door:
        other, stream = door.connect(), door.connect()
        await stream.send_all(b"GET /break HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await answer_of(stream) == b""
        await other.send_all(GET)
        assert (await other.receive_some()).startswith(b"HTTP/1.1 200 ")


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drip", [b"", b"X: y\r\n"])
async def test_a_request_that_does_not_come_is_waited_for_so_long(
    autojump_clock: MockClock, drip: bytes
) -> None:
    async with served(greet) as door, trio.open_nursery() as nursery:
        stream = door.connect()

        async def dribble() -> None:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(GET[:-2])
                while drip:
                    await trio.sleep(1)
                    await stream.send_all(drip)

        nursery.start_soon(dribble)
        assert await answer_of(stream) == b""
        assert trio.current_time() == pytest.approx(HEAD_SECONDS)


async def test_an_answer_that_is_not_read_is_given_up(autojump_clock: MockClock) -> None:
    async with served(greet) as door:
        stream = door.connect()
        await stream.send_all(GET)
        await trio.sleep(SEND_SECONDS - 1)
        assert await stream.receive_some(1) == b"H"
        await trio.sleep(2)
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(GET)


async def test_a_client_that_does_not_close_is_left(autojump_clock: MockClock) -> None:
    async with served(greet) as door:
        stream = door.connect()
        await stream.send_all(GET[:-2] + b"Connection: close\r\n\r\n")
        assert (await answer_of(stream)).startswith(b"HTTP/1.1 200 ")
        await trio.sleep(LINGER_SECONDS + 1)
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(GET)


async def test_the_end_waits_for_no_client_and_a_moment_for_what_is_under_way(
    autojump_clock: MockClock,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(1 if scope["path"] == "/soon" else 0 if scope["path"] == "/now" else 1e6)
        await greet(scope, receive, send)

    async with trio.open_nursery() as nursery:
        got: list[bytes] = []

        async def listen(stream: Any) -> None:
            got.append(await answer_of(stream))

        async with served(app) as door:
            unread, half, soon, never = (door.connect() for _ in range(MOST))
            await unread.send_all(b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n")
            await half.send_all(GET[:9])
            await never.send_all(GET)
            await soon.send_all(b"GET /soon HTTP/1.1\r\nHost: x\r\n\r\n")
            nursery.start_soon(listen, soon)
            await trio.testing.wait_all_tasks_blocked()
            began = trio.current_time()
        assert trio.current_time() - began == pytest.approx(GRACE_SECONDS)
        await trio.testing.wait_all_tasks_blocked()
        assert got[0].startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in got[0].lower()


async def test_without_a_request_under_way_the_end_is_at_once(autojump_clock: MockClock) -> None:
    async with served(greet) as door:
        idle, half = door.connect(), door.connect()
        await half.send_all(GET[:9])
        await trio.sleep(1)
    assert trio.current_time() == 1
    assert await answer_of(idle) == b""


# --- number ---------------------------------------------------------------------------------------


async def test_one_connection_too_many_takes_the_place_of_whose_client_is_waited_for_longest(
    autojump_clock: MockClock,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(20 if scope["path"] == "/long" else 0)
        await greet(scope, receive, send)

    async with served(app) as door:
        long = door.connect()
        await long.send_all(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        others = []
        for _ in range(MOST - 1):
            await trio.sleep(1)
            others.append(door.connect())
        await trio.sleep(1)
        newest = door.connect()
        await newest.send_all(GET)
        assert (await newest.receive_some()).startswith(b"HTTP/1.1 200 ")
        assert await answer_of(others[0]) == b""
        for stream in (*others[1:], long):
            if stream is not long:
                await stream.send_all(GET)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")


async def test_while_all_places_are_at_work_one_more_waits_and_answers_are_the_last_ones(
    autojump_clock: MockClock,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(2)
        await greet(scope, receive, send)

    async with served(app) as door, trio.open_nursery() as nursery:
        busy = [door.connect() for _ in range(MOST)]
        for stream in busy:
            await stream.send_all(GET)
        await trio.sleep(1)
        newest = door.connect()
        nursery.start_soon(newest.send_all, GET)
        for stream in busy:
            assert b"connection: close\r\n" in await stream.receive_some()
            await stream.aclose()
        got = await newest.receive_some()
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in got
        assert trio.current_time() == pytest.approx(4)


@pytest.mark.slow
async def test_who_connects_is_heard_however_many_keep_all_places_busy(
    autojump_clock: MockClock,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(0.05)
        await greet(scope, receive, send)

    async with served(app) as door, trio.open_nursery() as nursery:

        async def flood() -> None:
            while True:
                stream = door.connect()
                with suppress(trio.BrokenResourceError):
                    while True:
                        await stream.send_all(GET)
                        if not await stream.receive_some():
                            break
                await stream.aclose()
                await trio.sleep(0.001)

        for _ in range(5 * MOST):
            nursery.start_soon(flood)
        await trio.sleep(1)
        for _ in range(10):
            began = trio.current_time()
            ours = door.connect()
            nursery.start_soon(send_all, ours, GET)
            assert (await ours.receive_some()).startswith(b"HTTP/1.1 200 ")
            await ours.aclose()
            assert trio.current_time() - began < 2
        nursery.cancel_scope.cancel()


async def test_a_place_is_kept_until_its_client_had_a_moment_to_speak(
    autojump_clock: MockClock,
) -> None:
    async with served(hang) as door, trio.open_nursery() as nursery:
        for _ in range(MOST - 1):
            await door.connect().send_all(GET)
        quick = door.connect()
        await trio.testing.wait_all_tasks_blocked()
        late = door.connect()
        await trio.sleep(PATIENCE_SECONDS / 2)
        await quick.send_all(GET)
        nursery.start_soon(send_all, late, GET)
        with trio.move_on_after(5) as scope:
            await quick.receive_some()
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()


async def test_a_request_refused_after_a_head_is_answered_with_a_body(
    autojump_clock: MockClock,
) -> None:
    async with served(greet) as door, trio.open_nursery() as nursery:
        stream = door.connect()
        await stream.send_all(GET.replace(b"GET", b"HEAD"))
        await stream.receive_some()
        nursery.start_soon(send_all, stream, b"GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"not a path" in await answer_of(stream)


async def test_a_lack_of_descriptors_is_told_once_and_who_connects_waits(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told ten times a second, with a traceback."""
    left = 20

    class Poor(Door):
        async def accept(self) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return await super().accept()

    async def load() -> ASGIApp:
        return greet

    door: Any = Poor()
    stream = door.connect()
    with structlog.testing.capture_logs() as logs:
        turns, server = Turns(turns_cpu()), ("127.0.0.1", 1)
        async with serve_http(load, [door], server, now_ms=lambda: 0, turns=turns, most=MOST):
            await stream.send_all(GET)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
            await stream.aclose()
    assert [each["event"] for each in logs] == ["connection_not_accepted"]
    assert caplog.records == []
