"""What slow servers cost quick ones, on a real Synapse: with the daemon, or Synapse's own worker.

    python -m tests.synapse.slow [--worker] [--servers 620] [--messages 100]

600 of 620 servers are in one room and answer after 30 s; the other 20 are in another and answer at
once. Messages to these are timed, from the time that Synapse gave the event to its arrival, first
alone and then while the others are sent messages too. Prints one JSON line; what it printed last is
in docs/figures.md.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import trio
import trustme
from tests.servers import Postgres, free_port, open_postgres, open_valkey
from tests.synapse.client import User
from tests.synapse.daemon import Daemon, open_daemon
from tests.synapse.homeserver import (
    Database,
    Homeserver,
    open_homeserver_in_thread,
    open_worker_in_thread,
)
from tests.synapse.recorder import Recording, Sent
from tests.synapse.remote import Remote, open_remote
from tests.synapse.world import INSTANCE

A_HOST = "127.0.0.2"
QUICK = 20
ANSWER_S = 30.0
EVERY_S = 0.5
MESSAGES_BETWEEN = 10
"""To the quick servers, for each message to the slow ones."""
PATIENCE_S = 180
GOAL = {"beside_p50_ms": 150.0, "beside_p99_ms": 1000.0}
POLL_S = 0.05


class PatientHomeserver(Homeserver):
    """Its own worker waits for an answer as long as Synapse does by itself."""

    def _config(self) -> Mapping[str, object]:
        return {**super()._config(), "federation": {}}


@dataclass
class Town:
    """A Synapse, a user of it with two public rooms, and servers made for the occasion."""

    a: PatientHomeserver
    alice: User
    rooms: list[str]
    _authority: trustme.CA
    _postgres: Postgres
    _stack: AsyncExitStack

    async def remote(self, number: int) -> Remote:
        """A new server, which is in no room yet."""
        host = f"127.9.{number // 250}.{number % 250 + 1}"
        return await self._stack.enter_async_context(open_remote(host, self.a, self._authority))

    def owe_nothing(self) -> None:
        """What was sent until now is owed to nobody. Blocks."""
        with self._postgres.connect("a") as connection:
            connection.execute(
                b"UPDATE federation_stream_position SET stream_id ="
                b" (SELECT max(stream_ordering) FROM events) WHERE type = 'events'"
            )
            connection.execute(
                b"INSERT INTO federation_stream_position (type, instance_name, stream_id)"
                b" SELECT 'events', %s, max(stream_ordering) FROM events"
                b" ON CONFLICT DO NOTHING",
                (INSTANCE,),
            )


@asynccontextmanager
async def open_town(directory: Path, postgres: Postgres, redis_port: int) -> AsyncIterator[Town]:
    """Until the body is left; the Synapse leaves its sending to `INSTANCE`."""
    authority, port = trustme.CA(), free_port(A_HOST)
    postgres.create_database("a")
    a = PatientHomeserver(
        name=f"{A_HOST}:{port}",
        directory=directory / "a",
        listens_at=(A_HOST, port),
        authority=authority,
        database=Database(postgres.host, postgres.port, postgres.user, "a"),
        redis_port=redis_port,
        senders=[INSTANCE],
    )
    async with open_homeserver_in_thread(a), AsyncExitStack() as stack:
        alice = await a.register("alice")
        stack.push_async_callback(alice.aclose)
        rooms = [await alice.create_room(preset="public_chat") for _ in range(2)]
        yield Town(a, alice, rooms, authority, postgres, stack)


class Timed(Recording):
    """Milliseconds from the time of each message to its arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.delays: dict[str, float] = {}

    def add(self, sent: Sent) -> None:
        now_ms = time.time() * 1000
        for pdu in sent.content.get("pdus", ()):
            if pdu["type"] == "m.room.message":
                self.delays.setdefault(pdu["content"]["body"], now_ms - pdu["origin_server_ts"])


class Stage:
    """Two rooms of A's, and who is in them."""

    def __init__(self, town: Town) -> None:
        self.a = town.a
        self.alice = town.alice
        self.quick_room, self.slow_room = town.rooms
        self.quick: list[Timed] = []
        self.slow: list[Timed] = []

    async def delays(self, name: str, messages: int, *, beside: bool = False) -> list[float]:
        """How long so many messages took to each of the quick servers."""
        bodies = [f"{name} {number}" for number in range(messages)]
        due = trio.current_time()
        for number, body in enumerate(bodies):
            if beside and number % MESSAGES_BETWEEN == 0:
                await self.alice.send(self.slow_room, f"to slow ones {number}")
            due += EVERY_S
            await trio.sleep_until(due)
            await self.alice.send(self.quick_room, body)
        await heard(self.quick, bodies)
        return [each.delays[body] for each in self.quick for body in bodies]


async def heard(servers: list[Timed], bodies: list[str]) -> None:
    """Return once all of these servers have all of these messages."""
    with trio.fail_after(PATIENCE_S):
        while not all(body in each.delays for each in servers for body in bodies):  # noqa: ASYNC110
            await trio.sleep(POLL_S)


@asynccontextmanager
async def open_stage(
    directory: Path, servers: int, postgres: Postgres, redis_port: int
) -> AsyncIterator[Stage]:
    """Synapse, and everybody in the rooms; what was sent until then is owed to nobody."""
    async with open_town(directory, postgres, redis_port) as town:
        stage = Stage(town)
        for number in range(servers):
            quick = number < QUICK
            remote = await town.remote(number)
            remote.recording = timed = Timed()
            remote.latency_s = 0.0 if quick else ANSWER_S
            await remote.join(stage.quick_room if quick else stage.slow_room, remote.user("bob"))
            (stage.quick if quick else stage.slow).append(timed)
        town.owe_nothing()
        yield stage


async def measure(servers: int, messages: int, *, worker: bool) -> Mapping[str, Any]:
    """The figures."""
    with (
        tempfile.TemporaryDirectory(prefix="fedsender-slow-") as name,
        open_postgres() as postgres,
        open_valkey() as valkey,
    ):
        directory = Path(name)
        async with open_stage(directory, servers, postgres, valkey.port) as stage:
            home = directory / "daemon"
            home.mkdir()
            daemon = Daemon(stage.a, INSTANCE, home, valkey.port)
            async with open_worker_in_thread(stage.a, INSTANCE) if worker else open_daemon(daemon):
                await stage.delays("warm up", 3)
                alone = await stage.delays("alone", messages)
                await stage.alice.send(stage.slow_room, "the first")
                await heard(stage.slow, ["the first"])
                beside = await stage.delays("beside", messages, beside=True)
    return {
        "sender": "synapse" if worker else "fedsender",
        "servers": [QUICK, servers - QUICK],
        "answer_s": ANSWER_S,
        "messages": messages,
        **_figures("alone", alone),
        **_figures("beside", beside),
        "goal": GOAL,
        "load": round(os.getloadavg()[0], 1),
    }


def _figures(prefix: str, delays: list[float]) -> Mapping[str, float]:
    ordered = sorted(delays)
    return {
        f"{prefix}_p50_ms": round(median(ordered), 1),
        f"{prefix}_p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
        f"{prefix}_longest_ms": round(ordered[-1], 1),
    }


def main() -> int:
    """The command; its exit code: 1 if the daemon missed the goal."""
    parser = argparse.ArgumentParser(prog="tests.synapse.slow")
    parser.add_argument("--worker", action="store_true", help="measure Synapse's own sender")
    parser.add_argument("--servers", type=int, default=620)
    parser.add_argument("--messages", type=int, default=100)
    chosen = parser.parse_args()
    # Two sockets for each server that listens, and connections.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def run() -> Mapping[str, Any]:
        return await measure(chosen.servers, chosen.messages, worker=chosen.worker)

    figures = trio.run(run)
    print(json.dumps(figures))
    good = all(figures[name] <= most_ms for name, most_ms in GOAL.items())
    return 0 if good or chosen.worker else 1


if __name__ == "__main__":
    sys.exit(main())
