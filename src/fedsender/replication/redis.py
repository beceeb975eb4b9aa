"""Replication over Redis pub/sub, as Synapse with workers speaks it.

Every process of a homeserver publishes to, and is subscribed to, one channel: the homeserver's
name. One message is one command. Redis keeps nothing, so messages that are published while we are
away are lost to us. So a new connection begins with `Subscribed`. After that no position is known
until its writer has announced it.

A connection that has subscribed may not publish, so there are two. They live and die together: when
one is lost both are made anew. A subscriber is confirmed before anything is published.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import structlog
import trio

from fedsender.replication.commands import SPOKEN, BadLine, Command
from fedsender.replication.endpoint import Disconnected, Endpoint, connect
from fedsender.replication.resp import (
    BadReply,
    ErrorReply,
    Reply,
    ReplyReader,
    request,
)
from fedsender.runtime import Runtime
from fedsender.waiting import again, doubling

log = structlog.get_logger()

PING_EVERY_S = 30.0
# For an answer, and for the other side to take what is written.
REPLY_S = 30.0
# The log has one message in this time that is no command: a broken writer says thousands.
TOLD_EACH_S = 60.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
RECEIVE_PIECE = 65_536
# What errors begin with. Of an error nothing else is told: some quote what was asked, AUTH with its
# password too, and others come from servers that only look like Redis.
ERROR_KINDS = (
    "ERR max number of clients reached",
    "ERR unknown command",
    "ERR Client sent AUTH, but no password is set",
    "ERR AUTH <password> called without any password configured",
    "ERR",
    "WRONGPASS",
    "NOAUTH",
    "NOPERM",
    "LOADING",
    "BUSY",
    "MASTERDOWN",
    "MISCONF",
    "OOM",
    "READONLY",
)


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The address of Redis, and the channel: the homeserver's name as configured, port included."""

    endpoint: Endpoint
    channel: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A new connection stands; all messages since the last one ended were missed."""


class _Redis:
    """One connection to Redis: requests out, replies in."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._replies = ReplyReader()
        self._sending = trio.Lock()

    async def send(self, *arguments: str) -> None:
        """Send one request; raises Disconnected. If cancelled half-way, the connection is lost."""
        async with self._sending:
            try:
                with trio.fail_after(REPLY_S):
                    await self._stream.send_all(request(*arguments))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Disconnected("the connection to Redis broke") from error
            except trio.TooSlowError as error:
                raise Disconnected("Redis takes nothing") from error
            except BaseException:
                await self.aclose()
                raise

    async def receive(self) -> Reply:
        """Wait for the next reply of any kind; raises Disconnected."""
        try:
            while (reply := self._replies.next_reply()) is None:
                with trio.fail_after(PING_EVERY_S + REPLY_S):
                    data = await self._stream.receive_some(RECEIVE_PIECE)
                if not data:
                    raise Disconnected("Redis closed the connection")
                self._replies.receive_data(bytes(data))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Disconnected("the connection to Redis broke") from error
        except trio.TooSlowError as error:
            raise Disconnected("Redis does not answer") from error
        except BadReply as error:
            raise Disconnected(f"what answers is not Redis: {error}") from error
        return reply

    async def ask(self, *arguments: str) -> Reply:
        """Send one request and return its reply; raises Disconnected, also when Redis refuses."""
        await self.send(*arguments)
        reply = await self.receive()
        if isinstance(reply, ErrorReply):
            kinds = (kind for kind in ERROR_KINDS if reply.text.startswith(kind))
            kind = next(kinds, "an error of no known kind")
            raise Disconnected(f"Redis refuses {arguments[0]}: {kind}")
        return reply

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)


@dataclass(frozen=True, slots=True)
class _Session:
    """Both connections, in use."""

    publisher: _Redis
    subscriber: _Redis

    async def aclose(self) -> None:
        async with aclosing(self.publisher), aclosing(self.subscriber):
            pass


class RedisLink:
    """A link to a channel, which always connects again; see `open_redis_link`.

    Attributes:
        last_error: the reason why the last connection ended or could not be made.
    """

    def __init__(self, settings: RedisSettings, runtime: Runtime, nursery: trio.Nursery) -> None:
        self.last_error: str | None = None
        self._settings = settings
        self._runtime = runtime
        self._nursery = nursery
        self._session: _Session | None = None
        self._publishing = trio.Lock()
        self._pause = doubling(FIRST_PAUSE_S, LONGEST_PAUSE_S, runtime.random)
        self._tells_at = -math.inf
        # In a row: also of connections that came about and ended before a command came.
        self._failures = 0

    @property
    def connected(self) -> bool:
        """Whether both connections stand."""
        return self._session is not None

    async def next(self) -> Command | Subscribed:
        """Wait for the next command, or for a new connection, without a time limit."""
        return await again(self._hear, Disconnected, self._next_pause)

    def _next_pause(self, _: int) -> float:
        self._failures += 1
        return self._pause(self._failures - 1)

    async def publish(self, command: Command) -> int | None:
        """Publish a command; returns the number of subscribers it reached, None without Redis.

        Nothing is queued: the next POSITION makes up for a command that was not sent. Raises
        UnsendableCommand.
        """
        line = SPOKEN.format(command)
        async with self._publishing:
            session = self._session
            if session is None:
                return None
            try:
                reached = await session.publisher.ask("PUBLISH", self._settings.channel, line)
            except Disconnected as error:
                gone = error
            except BaseException:
                # A reply that nobody has read would be taken for the next one's.
                await session.aclose()
                raise
            else:
                return reached if isinstance(reached, int) else None
            await self._drop(session, str(gone))
        return None

    async def _hear(self) -> Command | Subscribed:
        if self._session is None:
            await self._connect()
            return Subscribed()
        session = self._session
        try:
            while True:
                command = self._command_in(await session.subscriber.receive())
                if command is not None:
                    self._failures = 0
                    return command
        except Disconnected as gone:
            await self._drop(session, str(gone))
            raise

    def _command_in(self, reply: Reply) -> Command | None:
        """The command in a message; None for other pushed replies, or an unreadable message."""
        match reply:
            case [b"message", bytes(channel), bytes(line)]:
                pass
            case _:
                return None
        if channel != self._settings.channel.encode():
            return None
        try:
            return SPOKEN.parse(line.decode())
        except (BadLine, UnicodeDecodeError) as bad:
            reason = str(bad) if isinstance(bad, BadLine) else "not UTF-8"
            now = trio.current_time()
            tells = now >= self._tells_at
            if tells:
                self._tells_at = now + TOLD_EACH_S
            log.log(
                logging.WARNING if tells else logging.DEBUG,
                "replication_bad_message",
                reason=reason,
            )
            return None

    async def _connect(self) -> None:
        try:
            publisher = await self._log_in()
            try:
                subscriber = await self._log_in(subscribe=True)
            except BaseException:
                await publisher.aclose()
                raise
        except Disconnected as failed:
            if self.last_error != str(failed):
                # Said once: the next tries fail alike.
                log.warning("redis_connect_failed", reason=str(failed))
            self.last_error = str(failed)
            raise
        session = self._session = _Session(publisher, subscriber)
        self._nursery.start_soon(self._keep_alive, session)
        log.info("redis_connected", to=str(self._settings.endpoint.address))

    async def _log_in(self, *, subscribe: bool = False) -> _Redis:
        connection = _Redis(await connect(self._settings.endpoint, self._runtime))
        try:
            if self._settings.password is not None:
                user = [self._settings.username] if self._settings.username else []
                await connection.ask("AUTH", *user, self._settings.password)
            await connection.ask("PING")
            if subscribe:
                answer = await connection.ask("SUBSCRIBE", self._settings.channel)
                if not (isinstance(answer, list) and answer[:1] == [b"subscribe"]):
                    raise Disconnected("Redis did not confirm the subscription")
        except BaseException:
            await connection.aclose()
            raise
        return connection

    async def _keep_alive(self, session: _Session) -> None:
        """Own the session: both connections are closed when this ends, for any reason."""
        async with aclosing(session):
            try:
                while True:
                    await trio.sleep(PING_EVERY_S)
                    # The answer of the subscriber is read, and passed over, by whoever listens.
                    await session.subscriber.send("PING")
                    async with self._publishing:
                        await session.publisher.ask("PING")
            except Disconnected as gone:
                await self._drop(session, str(gone))

    async def _drop(self, session: _Session, reason: str) -> None:
        if self._session is session:
            log.info("redis_disconnected", reason=reason)
            self.last_error = reason
            self._session = None
        await session.aclose()


@asynccontextmanager
async def open_redis_link(settings: RedisSettings, runtime: Runtime) -> AsyncIterator[RedisLink]:
    """A link to the homeserver's channel; it connects when `next` is first awaited."""
    async with trio.open_nursery() as nursery:
        yield RedisLink(settings, runtime, nursery)
        nursery.cancel_scope.cancel()
