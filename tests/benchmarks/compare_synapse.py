"""Synapse's own federation sender and ours, in turns, on one live Synapse.

    fedsender bench compare-synapse [--servers 300] [--events 16] [--rounds 4]

`--servers` homeservers are in a large room, 20 of them also in a small one. In each round Synapse's
worker and our daemon run one after the other, with nothing else changed; the one that was last goes
first in the next round, so that a drift of the homeserver is nobody's gain. Each of them gets five
times `--events` messages to the small room, five a second, and `--events` to the large one, two a
second. In the last round, six times `--events` to the large room as fast as the client API takes
them.

A delay begins with the client's request and ends with the arrival of the event at a server. The
homeserver's own time is in it: until a subscriber of Redis, neither of the two, sees the event's
RDATA line. Both delays are told, with and without it. A percentile is of the deliveries of all
rounds: of one round the 99th would be that of a single message.
"""

import resource
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trio
from tests.servers import Postgres, open_postgres, open_valkey
from tests.synapse.client import User
from tests.synapse.daemon import Daemon, open_daemon
from tests.synapse.homeserver import (
    open_worker_in_thread,
)
from tests.synapse.recorder import Recording, Sent
from tests.synapse.slow import PatientHomeserver, open_town
from tests.synapse.world import INSTANCE

from fedsender.console import say
from fedsender.replication.commands import SPOKEN, Rdata
from fedsender.replication.resp import ReplyReader, request
from fedsender_lab.bench.meter import Options, cpu_s_of, percentile, rss_kb
from fedsender_lab.testing.children import BenchFailed

SMALL: Final = 20
EVERY_S: Final = 0.5
"""Between two messages to the large room."""
SMALL_EVERY_S: Final = 0.2
SMALL_TIMES: Final = 5
"""Messages to the small room, for each to the large one."""
BURST_TIMES: Final = 6
"""Messages at once, for each of a round to the large room."""
REST_S: Final = 2.0
"""Between two measurements, for what a sender still writes."""
PATIENCE_S: Final = 900.0
WARM_UPS: Final = 20
WARM_UP_S: Final = 10.0
POLL_S: Final = 0.02


class Arrivals(Recording):
    """The time at which each message arrived, and the number of transactions.

    Attributes:
        at: text of the message -> time, in seconds since the epoch.
        count: transactions so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, float] = {}
        self.count = 0

    def add(self, sent: Sent) -> None:
        self.count += 1
        now = time.time()
        for pdu in sent.content.get("pdus", ()):
            if pdu["type"] == "m.room.message":
                self.at.setdefault(pdu["content"]["body"], now)


@dataclass
class Measured:
    """What was measured in one room.

    Attributes:
        whole: delay of each delivery, in ms.
        own: the same without the homeserver's own time.
    """

    cpu_s: float = 0.0
    transactions: int = 0
    wall_s: float = 0.0
    whole: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    def add(self, other: "Measured") -> None:
        """Take the other's deliveries in."""
        self.cpu_s += other.cpu_s
        self.transactions += other.transactions
        self.wall_s += other.wall_s
        self.whole += other.whole
        self.own += other.own

    def figures(self, where: str) -> Mapping[str, float]:
        """CPU per transaction and delays, in ms, by name."""
        return {
            f"{where}_cpu_ms": round(1000 * self.cpu_s / self.transactions, 3),
            f"{where}_p50_ms": round(percentile(self.whole, 0.5), 1),
            f"{where}_p99_ms": round(percentile(self.whole, 0.99), 1),
            f"{where}_own_p50_ms": round(percentile(self.own, 0.5), 1),
            f"{where}_own_p99_ms": round(percentile(self.own, 0.99), 1),
        }


class Room:
    """A room, the servers in it, and what was sent there.

    Attributes:
        asked: text of each message -> time of the client's request.
        event_ids: text of each message -> id of its event.
    """

    def __init__(self, user: User, room_id: str) -> None:
        self.servers: list[Arrivals] = []
        self.room_id = room_id
        self.asked: dict[str, float] = {}
        self.event_ids: dict[str, str] = {}
        self._user = user

    async def send(self, texts: Sequence[str], every_s: float) -> None:
        """Send these messages, so far apart, and return once they are at all servers.

        Raises BenchFailed.
        """
        await self._send(texts, every_s)
        if not await self._heard(texts, PATIENCE_S):
            raise BenchFailed(f"not all messages arrived within {PATIENCE_S:g} s")

    async def warm_up(self, name: str) -> None:
        """Send messages until one is at all servers.

        After its start Synapse's worker catches up with each server by the room's newest event
        alone, so earlier ones do not come. Raises BenchFailed.
        """
        for number in range(WARM_UPS):
            text = f"{name} {self.room_id} warm up {number}"
            await self._send([text], EVERY_S)
            if await self._heard([text], WARM_UP_S):
                return
        raise BenchFailed("the sender does not get warm")

    async def _send(self, texts: Sequence[str], every_s: float) -> None:
        due = trio.current_time()
        for text in texts:
            await trio.sleep_until(due)
            due += every_s
            self.asked[text] = time.time()
            self.event_ids[text] = await self._user.send(self.room_id, text)

    async def _heard(self, texts: Sequence[str], patience_s: float) -> bool:
        with trio.move_on_after(patience_s):
            while not all(text in server.at for server in self.servers for text in texts):  # noqa: ASYNC110
                await trio.sleep(POLL_S)
            return True
        return False

    @property
    def transactions(self) -> int:
        """The number of transactions that its servers got."""
        return sum(server.count for server in self.servers)


class Stage:
    """Synapse, both rooms, and the times at which Redis had each event.

    Attributes:
        seen: event id -> time of its line, in seconds since the epoch.
    """

    def __init__(self, a: PatientHomeserver, small: Room, large: Room) -> None:
        self.a = a
        self.small = small
        self.large = large
        self.seen: dict[str, float] = {}

    async def watch(self, port: int, *, task_status: trio.TaskStatus[None]) -> None:
        """Note when each event's line passes through Redis, for ever."""
        replies = ReplyReader()
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(request("SUBSCRIBE", self.a.name))
            task_status.started()
            while data := await stream.receive_some():
                now = time.time()
                replies.receive_data(bytes(data))
                while (reply := replies.next_reply()) is not None:
                    match reply:
                        case [b"message", _, bytes(line)]:
                            self._note(line.decode(), now)
        raise BenchFailed("Redis closed the connection")

    def _note(self, line: str, now: float) -> None:
        if not line.startswith("RDATA events "):
            return
        command = SPOKEN.parse(line)
        assert isinstance(command, Rdata)
        kind, content = command.row
        if kind == "ev":
            self.seen.setdefault(content[0], now)

    async def measure(self, pid: int, name: str, events: int) -> dict[str, Measured]:
        """The sender that runs as this process, by room: `at_20`, and `at_300` if that is more."""
        plans = [(self.small, SMALL_TIMES * events, SMALL_EVERY_S), (self.large, events, EVERY_S)]
        if len(self.large.servers) == len(self.small.servers):
            plans.pop()
        for room, _, _ in plans:
            await room.warm_up(name)
        await trio.sleep(REST_S)
        return {
            f"at_{len(room.servers)}": await self._measure(
                room, pid, [f"{name} {room.room_id} {n}" for n in range(messages)], every_s
            )
            for room, messages, every_s in plans
        }

    async def _measure(
        self, room: Room, pid: int, texts: Sequence[str], every_s: float
    ) -> Measured:
        cpu_s, before, started = cpu_s_of(pid), room.transactions, trio.current_time()
        await room.send(texts, every_s)
        wall_s = trio.current_time() - started
        await trio.sleep(REST_S)
        measured = Measured(cpu_s_of(pid) - cpu_s, room.transactions - before, wall_s)
        for text in texts:
            asked, seen = room.asked[text], self.seen[room.event_ids[text]]
            arrived = [server.at[text] for server in room.servers]
            measured.whole += [1000 * (at - asked) for at in arrived]
            # A sender that reads on another's notice may be quicker than our own reading of Redis.
            measured.own += [max(0.0, 1000 * (at - seen)) for at in arrived]
        return measured

    async def burst(self, pid: int, name: str, messages: int) -> Mapping[str, float]:
        """The figures of so many messages at once to the large room."""
        texts = [f"{name} burst {n}" for n in range(messages)]
        measured = await self._measure(self.large, pid, texts, 0)
        return {
            "burst_s": round(measured.wall_s, 1),
            "burst_cpu_ms_per_pdu": round(1000 * measured.cpu_s / len(measured.whole), 3),
            "burst_transactions": measured.transactions,
        }


@asynccontextmanager
async def open_stage(
    directory: Path, servers: int, postgres: Postgres, redis_port: int
) -> AsyncIterator[Stage]:
    """Synapse, and everybody in the rooms; what was sent until then is owed to nobody."""
    async with open_town(directory, postgres, redis_port) as town:
        small, large = (Room(town.alice, room_id) for room_id in town.rooms)
        for number in range(servers):
            remote = await town.remote(number)
            remote.recording = arrivals = Arrivals()
            for room in (small, large) if number < SMALL else (large,):
                await remote.join(room.room_id, remote.user("bob"))
                room.servers.append(arrivals)
        town.owe_nothing()
        stage = Stage(town.a, small, large)
        async with trio.open_nursery() as nursery:
            await nursery.start(stage.watch, redis_port)
            yield stage
            nursery.cancel_scope.cancel()


async def compare_synapse(options: Options) -> dict[str, Any]:
    """Figures of both over all rounds, and ours as a part of Synapse's."""
    # Two sockets for each server that listens, and connections.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rounds: dict[str, list[Mapping[str, Measured]]] = {"synapse": [], "fedsender": []}
    figures: dict[str, dict[str, float]] = {sender: {} for sender in rounds}
    with (
        tempfile.TemporaryDirectory(prefix="fedsender-compare-") as name,
        open_postgres() as postgres,
        open_valkey() as valkey,
    ):
        directory = Path(name)
        async with open_stage(directory, options.servers, postgres, valkey.port) as stage:
            home = directory / "daemon"
            home.mkdir()
            daemon = Daemon(stage.a, INSTANCE, home, valkey.port)
            turns = list(rounds)
            for number in range(options.rounds):
                for sender in turns:
                    async with _running(sender, stage, daemon) as pid:
                        label = f"{sender} {number}"
                        rounds[sender].append(await stage.measure(pid, label, options.events))
                        if number == options.rounds - 1:
                            burst = await stage.burst(pid, label, BURST_TIMES * options.events)
                            figures[sender] |= burst
                            figures[sender]["rss_mb"] = round(rss_kb(pid) / 1024, 1)
                turns.reverse()
    return _told(rounds, figures, options)


@asynccontextmanager
async def _running(sender: str, stage: Stage, daemon: Daemon) -> AsyncIterator[int]:
    """The sender of this name, and its process id."""
    if sender == "synapse":
        async with open_worker_in_thread(stage.a, INSTANCE) as pid:
            yield pid
    else:
        async with open_daemon(daemon):
            yield daemon.pid


def _told(
    rounds: Mapping[str, list[Mapping[str, Measured]]],
    others: Mapping[str, Mapping[str, float]],
    options: Options,
) -> dict[str, Any]:
    """Print the table; the same for JSON, with the figures of each round beside it."""
    figures: dict[str, dict[str, float]] = {}
    for sender, measured in rounds.items():
        figures[sender] = {}
        for where in measured[0]:
            pooled = Measured()
            for each in measured:
                pooled.add(each[where])
            figures[sender] |= pooled.figures(where)
        figures[sender] |= others[sender]
    theirs, ours = figures["synapse"], figures["fedsender"]
    ratios = {name: round(ours[name] / theirs[name], 3) if theirs[name] else None for name in ours}
    say(" ".join([f"{'':24}", *(f"{head:>12}" for head in (*figures, "ratio"))]))
    for name, ratio in ratios.items():
        say(f"{name:24} {theirs[name]:12g} {ours[name]:12g} {ratio or 0:12.3f}")
    return {
        "servers": [min(SMALL, options.servers), options.servers],
        "messages": options.events,
        **figures,
        "ratio": ratios,
        "rounds": {
            sender: [
                {key: value for where in each for key, value in each[where].figures(where).items()}
                for each in measured
            ]
            for sender, measured in rounds.items()
        },
    }
