"""The kill campaign of the relay: it and its consumers are killed at random, under load.

    python -m tests.relay.kills [--postgresql] [--kills 300] [--seconds N] [--seed N]

Writers append to a real `fedsender relay` with the client, break requests off, and send again what
is stored already. `small_consumer` follows it, twice. `kill -9` takes the one or the other, or
several, at moments that the seed and the machine choose. With `--postgresql` two relays share a
database, which is killed as well. In the end each record that was answered is at each consumer
once, as it was said and in order, and nothing else is; its id is still known, and so is who is in
which room. Prints a line of figures, as JSON; exit code 1 if anything is amiss.
"""

import argparse
import json
import math
import random
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio
from tests.embedded.kills import PATIENCE_S, SmallProcess
from tests.relay import small_consumer
from tests.servers import Postgres, open_postgres

from fedsender_lab.demo import process
from fedsender_lab.intake_client import IntakeClient, NewRecord

CONSUMERS = ("consumer-1", "consumer-2")
RELAYS = ("relay-1", "relay-2")
"""So many of them as can share a database; SQLite has one."""
DATABASE = "postgresql"
WRITERS = 8
MOST_AT_ONCE = 20
PAUSE_S = 0.03
"""Between two requests of a writer, on average."""
ROOMS, SERVERS = 8, 12
IDS_ASKED = 2_000
"""Ids of so many records are sent once more in the end."""


@dataclass
class Figures:
    """What a campaign came to.

    Attributes:
        kills: by whom they took.
        records, rows: that were answered, and are at each consumer.
        repeats: records that were sent again after their answer.
        broken_off: requests that were, whose answer nobody saw.
        first: the oldest token that was left in the log.
        amiss: what should not be, one text each.
    """

    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    records: int = 0
    rows: int = 0
    repeats: int = 0
    broken_off: int = 0
    first: int = 0
    amiss: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return json.dumps({"all_kills": self.kills.total(), **vars(self)})


class Writers:
    """The homeserver: what it says, and what it was answered.

    Attributes:
        said: the rows of each record, by its id.
        answered: the token of each.
    """

    def __init__(self, client: IntakeClient, rng: random.Random, figures: Figures) -> None:
        self.said: dict[str, list[Any]] = {}
        self.answered: dict[str, int] = {}
        self.heard = trio.Event()
        self._client = client
        self._random = rng
        self._figures = figures
        self._quiet = trio.Event()

    async def run(self) -> None:
        """Until told to be quiet, and all is answered."""
        async with trio.open_nursery() as nursery:
            for _ in range(WRITERS):
                nursery.start_soon(self._write)

    def be_quiet(self) -> None:
        self._quiet.set()

    def rooms(self) -> dict[str, set[str]]:
        """Who is in which room, by what was said."""
        rooms: dict[str, set[str]] = {}
        for name in sorted(self.answered, key=lambda name: self.answered[name]):
            for kind, (room_id, *more) in self.said[name]:
                if kind == "hosts":
                    joined, left = more
                    rooms[room_id] = (rooms.get(room_id, set()) - {*left}) | {*joined}
                elif kind == "servers":
                    rooms[room_id] = {*more[0]}
        return rooms

    async def _write(self) -> None:
        while not self._quiet.is_set():
            names = [self._say() for _ in range(self._random.randint(1, MOST_AT_ONCE))]
            await self.append(names)
            if self._random.random() < 0.1:
                known = len(self.answered)
                await self.repeat(self._random.sample(list(self.answered), min(5, known)))
            with trio.move_on_after(self._random.expovariate(1 / PAUSE_S)):
                await self._quiet.wait()

    async def append(self, names: Sequence[str]) -> None:
        """Until they are answered; now and then nobody waits for the answer, and asks again."""
        records = [NewRecord(self.said[name], name) for name in names]
        while True:
            hurried = self._random.random() < 0.1
            with trio.move_on_after(self._random.uniform(0, 0.05) if hurried else math.inf):
                tokens = await self._client.append_all(records)
                break
            self._figures.broken_off += 1
        for name, token in zip(names, tokens, strict=True):
            if self.answered.setdefault(name, token or 0) != token:
                self._figures.amiss.append(f"{name} was {self.answered[name]}, and is {token}")
        self.heard.set()
        self.heard = trio.Event()

    async def repeat(self, names: Sequence[str]) -> None:
        """Send again what is stored: the tokens are the same."""
        self._figures.repeats += len(names)
        await self.append(names)

    def _say(self) -> str:
        rng, number = self._random, len(self.said)
        name = f"$record{number}"
        room = f"!room{rng.randrange(ROOMS)}:{process.SERVER_NAME}"
        server, user = f"s{rng.randrange(SERVERS)}.example", f"@u:{process.SERVER_NAME}"
        content = {"number": number, "text": "x" * rng.choice((10, 200, 3_000))}
        event = {
            "type": "m.room.message",
            "room_id": room,
            "sender": user,
            "prev_events": ["$p"],
            "auth_events": [],
            "depth": number,
            "origin_server_ts": number,
            "content": content,
        }
        pdu = ["pdu", [room, name, event, {"room_version": "11"}]]
        comes, goes = ["hosts", [room, [server], []]], ["hosts", [room, [], [server]]]
        here = rng.sample(range(SERVERS), 3)
        choices: list[list[Any]] = [
            [pdu],
            [pdu, comes],
            [pdu, goes],
            [comes, goes],
            [["servers", [room, [f"s{at}.example" for at in here]]]],
            [["edu", ["to_device", server, name, content]]],
            [["edu", ["device_list", server, user, "DEVICE", content]]],
        ]
        (rows,) = rng.choices(choices, weights=(12, 1, 1, 1, 1, 2, 2))
        self.said[name] = rows
        return name


class PostgresProcess:
    """The server, as something that can be killed and started."""

    def __init__(self, server: Postgres) -> None:
        self._server = server

    async def start(self) -> None:
        await trio.to_thread.run_sync(self._server.start)

    async def kill(self) -> None:
        await trio.to_thread.run_sync(self._server.kill)


class Victim(Protocol):
    """What can be killed and started again."""

    async def start(self) -> None: ...
    async def kill(self) -> None: ...


@dataclass
class Campaign:
    """The parts of a run.

    Attributes:
        victims: what can be killed, and how likely it is each time.
    """

    directory: Path
    relays: Sequence[process.DaemonProcess]
    victims: Mapping[str, tuple[Victim, float]]
    client: IntakeClient
    writers: Writers
    rng: random.Random
    figures: Figures

    async def kill_some(self) -> None:
        """At any moment: also while one of them starts."""
        if self.rng.random() < 0.8:
            with trio.move_on_after(PATIENCE_S):
                await self.writers.heard.wait()
        await trio.sleep(self.rng.uniform(0, 0.7))
        killed = [each for each, (_, odds) in self.victims.items() if self.rng.random() < odds]
        for name in killed:
            self.figures.kills[name] += 1
            await self.victims[name][0].kill()
        await trio.sleep(self.rng.uniform(0, 0.3))
        for name in killed:
            await self.victims[name][0].start()

    def read(self, consumer: str, query: str) -> list[Any]:
        """Rows of a consumer's database."""
        path = self.directory / consumer / "consumer.sqlite3"
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute(query).fetchall()

    async def come_level(self) -> None:
        """Wait until all consumers have all, or nothing more comes."""
        head = max(self.writers.answered.values())
        for name in CONSUMERS:
            before, since = -1, trio.current_time()
            while before < head and trio.current_time() < since + PATIENCE_S:
                ((there,),) = self.read(name, "SELECT coalesce(max(token), 0) FROM records")
                if there != before:
                    before, since = there, trio.current_time()
                await trio.sleep(0.1)

    def judge(self) -> None:
        """Hold what each consumer has against what was said and answered."""
        figures, said = self.figures, self.writers.said
        records = {token: name for name, token in self.writers.answered.items()}
        figures.records, figures.rows = len(said), sum(map(len, said.values()))
        tokens = [*range(1, len(said) + 1)]
        if sorted(records) != tokens:
            figures.amiss.append(f"{len(said)} records have {len(records)} tokens, with holes")
        for name in CONSUMERS:
            figures.amiss += [
                f"{name}: {line}" for (line,) in self.read(name, "SELECT line FROM refused")
            ]
            rows = self.read(name, "SELECT token, rows FROM records ORDER BY place")
            got = [token for token, _ in rows]
            if got != tokens:
                lost, twice = len(set(tokens) - set(got)), len(got) - len(set(got))
                more = len(set(got) - set(tokens))
                text = f"{lost} lost, {twice} twice, {more} that nobody said, or out of order"
                figures.amiss.append(f"{name}: {text}")
            other = [at for at, text in rows if json.loads(text) != said.get(records.get(at, ""))]
            if other:
                figures.amiss.append(f"{name}: {len(other)} other than they were, first {other[0]}")

    async def finish(self) -> None:
        """All is said; what came of it."""
        await self.come_level()
        known = list(self.writers.answered)
        for at in range(0, min(len(known), IDS_ASKED), 100):
            await self.writers.repeat(known[at : at + 100])
        await self.check_rooms()
        self.figures.first = (await self.client.position()).first or 0
        for relay in self.relays:
            # One that was started just now does not hear a signal yet.
            await relay.ask("GET", "/health")
            if code := await relay.stop():
                self.figures.amiss.append(f"a relay ended with {code}")
            away = '"event":"database_unavailable"' if self.figures.kills[DATABASE] else None
            self.figures.amiss += [
                line for line in relay.errors() if away is None or away not in line
            ]
        self.judge()

    async def check_rooms(self) -> None:
        """Who is in a room is what the records say of it, in the order of their tokens."""
        for room_id, servers in self.writers.rooms().items():
            stored = await self.client.room_servers(room_id)
            there = set() if stored is None else set(stored.servers)
            if there != servers:
                self.figures.amiss.append(f"{room_id} has {sorted(there)}, not {sorted(servers)}")


@asynccontextmanager
async def open_campaign(
    directory: Path, seed: int, postgres: Postgres | None
) -> AsyncIterator[Campaign]:
    """The relay, its consumers and its homeserver, all under way."""
    rng, figures = random.Random(seed), Figures()
    token = rng.randbytes(16).hex()
    relays: list[process.DaemonProcess] = []
    victims: dict[str, tuple[Victim, float]] = {}
    url = None if postgres is None else postgres.url("postgres")
    command = "relay" if url is None else "relay --standby"
    places = [directory / name for name in RELAYS[: 1 if url is None else None]]
    if postgres is not None:
        victims[DATABASE] = (PostgresProcess(postgres), 0.15)
    async with AsyncExitStack() as stack:
        for place in places:
            place.mkdir()
            process.write_secret(place / "intake.token", token)
            shared = {} if url is None else {"database": url}
            config = process.relay_configuration(
                place, keep_min="5s", snapshot_every="5s", **shared
            )
            relay = process.open_daemon_process(place, config, token, command)
            relays.append(await stack.enter_async_context(relay))
            victims[place.name] = (relays[-1], 0.5)
        intakes = [f"unix:{place}/intake.sock" for place in places]
        client = await stack.enter_async_context(IntakeClient.at(intakes, token))
        nursery = await stack.enter_async_context(trio.open_nursery())
        sockets = [str(place / "relay.sock") for place in places]
        for name in CONSUMERS:
            home = directory / name
            home.mkdir()
            program = [sys.executable, "-m", small_consumer.__name__, str(home), name, *sockets]
            consumer = SmallProcess(program, home, nursery)
            await consumer.start()
            victims[name] = (consumer, 0.3)
        writers = Writers(client, rng, figures)
        yield Campaign(directory, relays, victims, client, writers, rng, figures)
        nursery.cancel_scope.cancel()


async def run_campaign(
    directory: Path,
    kills: int,
    seed: int,
    seconds: float = 3_600.0,
    postgres: Postgres | None = None,
) -> Figures:
    """Kill so often, and each once at least, or for so long; what it came to.

    `postgres`: empty, and ours alone.
    """
    began = trio.current_time()
    async with open_campaign(directory, seed, postgres) as campaign:
        figures = campaign.figures
        async with trio.open_nursery() as nursery:
            nursery.start_soon(campaign.writers.run)
            while trio.current_time() < began + seconds and (
                figures.kills.total() < kills or len(figures.kills) < len(campaign.victims)
            ):
                await campaign.kill_some()
            campaign.writers.be_quiet()
        await campaign.finish()
    figures.seconds = round(trio.current_time() - began, 1)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--postgresql", action="store_true")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=3_600.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = stack.enter_context(open_postgres()) if given.postgresql else None
        run = partial(run_campaign, directory, given.kills, given.seed, given.seconds, postgres)
        figures = trio.run(run)
    print(figures)
    return 1 if figures.amiss else 0


if __name__ == "__main__":
    sys.exit(main())
