"""A Redis by hand for the virtual clock, and a process beside us on a real one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio
from tests.servers import Valkey

from fedsender.replication.resp import Reply, ReplyReader, request


def bulk(*parts: str) -> bytes:
    """An array of strings; a push is written as a request is."""
    return request(*parts)


class FakeRedis:
    """Answers what the link asks, on any number of memory streams.

    Attributes:
        said: all that was published by the link, oldest first.
        asked: every request, with its words.
        mute: nothing is answered any more.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.said: list[str] = []
        self.asked: list[list[str]] = []
        self.mute = False
        self.refusal: bytes | None = None
        self._nursery = nursery
        self._sending = trio.Lock()
        self._subscribers: list[tuple[trio.abc.Stream, str]] = []
        self._streams: list[trio.abc.Stream] = []

    def answer(self, stream: trio.abc.Stream) -> None:
        """Serve one connection; for `HandNetwork.answers`."""
        self._streams.append(stream)
        self._nursery.start_soon(self._serve, stream)

    async def publish(self, *lines: str) -> None:
        """Say something on the channel, as another process does."""
        for line in lines:
            for stream, channel in list(self._subscribers):
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._send(stream, bulk("message", channel, line))

    async def drop(self) -> None:
        """Lose all connections."""
        streams, self._streams, self._subscribers = self._streams, [], []
        for stream in streams:
            await stream.aclose()

    async def _serve(self, stream: trio.abc.Stream) -> None:
        requests = ReplyReader()
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await stream.receive_some(4096):
                requests.receive_data(bytes(data))
                while (one := requests.next_reply()) is not None:
                    await self._obey(stream, words(one))
        self._subscribers = [each for each in self._subscribers if each[0] is not stream]

    async def _obey(self, stream: trio.abc.Stream, asked: list[str]) -> None:
        self.asked.append(asked)
        if self.mute:
            return
        match asked:
            case ["PING"]:
                subscribed = any(each is stream for each, _ in self._subscribers)
                await self._send(stream, bulk("pong", "") if subscribed else b"+PONG\r\n")
            case ["AUTH", *_]:
                await self._send(stream, self.refusal or b"+OK\r\n")
            case ["SUBSCRIBE", channel]:
                self._subscribers.append((stream, channel))
                await self._send(stream, b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n")
            case ["PUBLISH", _, line]:
                self.said.append(line)
                await self.publish(line)
                await self._send(stream, b":%d\r\n" % len(self._subscribers))

    async def _send(self, stream: trio.abc.Stream, data: bytes) -> None:
        async with self._sending:
            await stream.send_all(data)


def words(reply: Reply) -> list[str]:
    assert isinstance(reply, list)
    return [part.decode() for part in reply if isinstance(part, bytes)]


class Process:
    """Another process of the homeserver on a real Redis: hears a channel and publishes to it."""

    def __init__(self, channel: str, publisher: trio.SocketStream) -> None:
        self.heard: list[str] = []
        self._channel = channel
        self._publisher = publisher

    @classmethod
    async def join(cls, host: str, port: int, channel: str, nursery: trio.Nursery) -> Process:
        """Connect, and return once the subscription is confirmed."""
        process = cls(channel, await trio.open_tcp_stream(host, port))
        subscriber = await trio.open_tcp_stream(host, port)
        await subscriber.send_all(request("SUBSCRIBE", channel))
        await subscriber.receive_some(4096)
        nursery.start_soon(process._listen, subscriber)
        return process

    async def say(self, *lines: str) -> None:
        for line in lines:
            await self.ask("PUBLISH", self._channel, line)

    async def ask(self, *asked: str) -> bytes:
        """Any request on the connection that may publish; what came back."""
        await self._publisher.send_all(request(*asked))
        return bytes(await self._publisher.receive_some(4096))

    async def _listen(self, subscriber: trio.SocketStream) -> None:
        replies = ReplyReader()
        async with subscriber, self._publisher:
            with suppress(trio.BrokenResourceError):
                while data := await subscriber.receive_some(4096):
                    replies.receive_data(bytes(data))
                    while (one := replies.next_reply()) is not None:
                        self.heard.append(words(one)[2])
            # Deaf, but it can still speak.
            await trio.sleep_forever()


@asynccontextmanager
async def forwarding(
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]], valkey: Valkey
) -> AsyncIterator[None]:
    """Pass what connects to `listeners` on to the Valkey."""

    async def pump(source: trio.abc.Stream, sink: trio.abc.Stream) -> None:
        while data := await source.receive_some(4096):
            await sink.send_all(data)

    async def carry(stream: trio.abc.Stream) -> None:
        onward = await trio.open_tcp_stream(valkey.host, valkey.port)
        async with stream, onward:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pump, stream, onward)
                    await pump(onward, stream)
                    nursery.cancel_scope.cancel()
            except* trio.BrokenResourceError:
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, carry, list(listeners)))
        yield
        nursery.cancel_scope.cancel()


def is_said(process: Process | FakeRedis, line: str) -> Callable[[], bool]:
    """Whether this line has been heard; for `until`."""
    heard = process.said if isinstance(process, FakeRedis) else process.heard
    return lambda: line in heard
