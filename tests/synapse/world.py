"""What the black-box tests see: two homeservers, the daemon for one, the door of the other."""

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
import trustme
from tests.proxy import Proxy
from tests.servers import Postgres, Valkey
from tests.synapse.client import User
from tests.synapse.daemon import Daemon
from tests.synapse.homeserver import Homeserver, open_worker_in_thread
from tests.synapse.recorder import Recording, open_recorder

INSTANCE = "fed1"
POLL_S = 0.05
STALL_S = 30
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Room:
    """A room of A's with one user of each homeserver in it."""

    id: str
    alice: User
    bob: User


@dataclass(frozen=True, slots=True)
class Progress:
    """How far A's database says a destination is.

    Attributes:
        owed: the newest stream ordering that it should get, over all rooms.
        lsso: `last_successful_stream_ordering`.
    """

    owed: int | None
    lsso: int | None


@dataclass(slots=True)
class World:
    """Two homeservers of which A leaves its sending to `fed1`.

    Attributes:
        a: on PostgreSQL and Valkey.
        b: on SQLite, behind `door`.
        door: the proxy at the address of B's name.
        daemon: what runs as `fed1` when a test opens it; its directory is new for each test.
    """

    a: Homeserver
    b: Homeserver
    door: Proxy
    postgres: Postgres
    valkey: Valkey
    daemon: Daemon
    _users: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def user(self, homeserver: Homeserver, name: str) -> User:
        """A new user of `homeserver`, logged in until the end of the test."""
        user = await homeserver.register(f"{name}{next(_numbers)}")
        self._users.push_async_callback(user.aclose)
        return user

    async def room(self, **settings: object) -> Room:
        """A new private room of A's that a new user of B's has joined by invitation."""
        alice = await self.user(self.a, "alice")
        bob = await self.user(self.b, "bob")
        room_id = await alice.create_room(preset="private_chat", **settings)
        await alice.invite(room_id, bob.mxid)
        await bob.join(room_id, via=self.a.name)
        return Room(room_id, alice, bob)

    async def stop_b(self) -> None:
        """B is down as a machine is that was switched off: its address refuses connections."""
        self.door.refuse()
        self.door.cut()
        await trio.to_thread.run_sync(self.b.stop)

    async def start_b(self) -> None:
        """B is up again at the same address."""
        await trio.to_thread.run_sync(self.b.start)
        self.door.listen()

    def synapse_worker(self) -> AbstractAsyncContextManager[int]:
        """Synapse's own `fed1`, until the body is left."""
        return open_worker_in_thread(self.a, INSTANCE)

    async def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """What a query answers in A's database, as it is committed now."""
        database = self.a.database
        assert database is not None

        def ask() -> list[tuple[Any, ...]]:
            with self.postgres.connect(database.name) as connection:
                return connection.execute(sql.encode(), values).fetchall()

        return await trio.to_thread.run_sync(ask)

    async def change(self, sql: str, *values: object) -> None:
        """Execute a statement in A's database, as a mischievous administrator might."""
        database = self.a.database
        assert database is not None

        def execute() -> None:
            with self.postgres.connect(database.name) as connection:
                connection.execute(sql.encode(), values)

        await trio.to_thread.run_sync(execute)

    async def events_position(self) -> int:
        """Up to where `fed1` has recorded who gets what."""
        sql = (
            "SELECT stream_id FROM federation_stream_position"
            " WHERE type = 'events' AND instance_name = %s"
        )
        return int((await self.rows(sql, INSTANCE))[0][0])

    async def newest_event(self) -> int:
        """The newest stream ordering of A. Nothing is being written when a test asks."""
        return int((await self.rows("SELECT max(stream_ordering) FROM events"))[0][0])

    async def stream_ordering(self, event_id: str) -> int:
        sql = "SELECT stream_ordering FROM events WHERE event_id = %s"
        return int((await self.rows(sql, event_id))[0][0])

    async def owed_in(self, room_id: str, destination: str) -> int | None:
        """The stream ordering in `destination_rooms`, if there is one."""
        sql = (
            "SELECT stream_ordering FROM destination_rooms WHERE room_id = %s AND destination = %s"
        )
        found = await self.rows(sql, room_id, destination)
        return int(found[0][0]) if found else None

    async def progress(self, destination: str) -> Progress:
        """What `destination` is owed and what it has answered for."""
        sql = "SELECT max(stream_ordering) FROM destination_rooms WHERE destination = %s"
        owed = (await self.rows(sql, destination))[0][0]
        sql = "SELECT last_successful_stream_ordering FROM destinations WHERE destination = %s"
        found = await self.rows(sql, destination)
        return Progress(owed, found[0][0] if found else None)

    async def wait_until_settled(self, destination: str, event_id: str) -> None:
        """Return once the database says that `destination` has the event and all before it."""
        ordering = await self.stream_ordering(event_id)

        async def settled() -> bool:
            lsso = (await self.progress(destination)).lsso
            return lsso is not None and lsso >= ordering

        await until(settled)

    async def wait_until_fanned_out(self, event_id: str) -> None:
        """Return once the events position has reached the event."""
        ordering = await self.stream_ordering(event_id)

        async def reached() -> bool:
            return await self.events_position() >= ordering

        await until(reached)

    async def wait_for_failure(self, destination: str) -> None:
        """Return once the daemon's ledger has an attempt at `destination` that failed."""

        async def failed() -> bool:
            attempts = self.daemon.attempts(destination)
            return any(attempt["outcome"] != "delivered" for attempt in attempts)

        await until(failed)


@asynccontextmanager
async def open_world(world: World) -> AsyncIterator[World]:
    """`world`, whose users are logged out of their connections at the end."""
    async with world._users:
        yield world


@asynccontextmanager
async def recorded(world: World, authority: trustme.CA) -> AsyncIterator[Recording]:
    """What B is sent while the body runs."""
    world.door.refuse()
    world.door.cut()
    async with open_recorder(world.door.address, world.b.listens_at, authority) as recording:
        yield recording
    world.door.listen()


@dataclass(frozen=True, slots=True)
class Stalled:
    """What alice has said when B has a transaction and its answer does not come back.

    Attributes:
        before: the texts that B has answered for.
        texts: those after them; the first is in the transaction, the others wait behind it.
        event_ids: of `texts`.
    """

    before: Sequence[str]
    texts: Sequence[str]
    event_ids: Sequence[str]


async def stall_with_a_transaction_at_b(world: World, room: Room, messages: int) -> Stalled:
    """Let alice send so many messages such that B's answer to the first does not come back.

    Returns once all of them are fanned out.
    """
    before: list[str] = []
    for attempt in itertools.count():
        # Its answer is back: there is a connection, so that no handshake is half done.
        before.append(f"warm {attempt}")
        await world.wait_until_settled(world.b.name, await room.alice.send(room.id, before[-1]))
        texts = [f"message {attempt}.{number}" for number in range(messages)]
        world.door.to_client.stall()
        event_ids = [await room.alice.send(room.id, texts[0])]
        with trio.move_on_after(STALL_S):
            await room.bob.read_until(room.id, texts[0])
            break
        # An EDU, say presence, went just before it, and it is that one's answer that is missing.
        world.door.to_client.flow()
        before.append(texts[0])
    event_ids += await room.alice.send_all(room.id, texts[1:])
    await world.wait_until_fanned_out(event_ids[-1])
    return Stalled(before, texts, event_ids)


class ReplicationLines:
    """What is published on A's Redis channel, from the moment this was opened."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = b""

    async def wait_for(self, start: str) -> str:
        """The next line that begins with `start`."""
        while True:
            line, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                data = await self._stream.receive_some()
                assert data, "Redis hung up"
                self._buffer += data
                continue
            self._buffer = rest
            if line.startswith(start.encode()):
                return line.decode()

    async def cache_invalidation(self, destination: str) -> int:
        """The stream id of the next line by which `fed1` says: forget how `destination` fares."""
        while True:
            line = await self.wait_for(f"RDATA caches {INSTANCE} ")
            stream_id, row = line.split(" ", 4)[3:]
            function, keys, _ = json.loads(row)
            if (function, keys) == ("get_destination_retry_timings", [destination]):
                return int(stream_id)


@asynccontextmanager
async def open_replication_lines(world: World) -> AsyncIterator[ReplicationLines]:
    """Subscribed to A's channel, until the body is left."""
    stream = await trio.open_tcp_stream(world.valkey.host, world.valkey.port)
    async with stream:
        await stream.send_all(f"SUBSCRIBE {world.a.name}\r\n".encode())
        lines = ReplicationLines(stream)
        await lines.wait_for("subscribe")
        yield lines


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Return once `true` is; the caller sets the deadline.

    A database and a ledger have nothing to wait on, so they are looked at again and again.
    """
    while not await true():  # noqa: ASYNC110
        await trio.sleep(POLL_S)
