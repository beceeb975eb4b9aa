"""The kill campaign of push: a homeserver and the sender are killed at random, under load.

    python -m tests.embedded.kills [--kills 200] [--seed N]

`small_homeserver` appends to a real `fedsender run`, which sends to real receiving servers.
`kill -9` takes the one or the other, or both, at moments that the seed and the machine choose. In
the end every event is stored once and in order, every server has what it should have, room by room
in order, and nothing else. Prints a line of figures; exit code 1 if anything is amiss.
"""

import argparse
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio
from tests.embedded import small_homeserver

from fedsender.config.policy import GAP_EVENTS
from fedsender.runtime import real_runtime
from fedsender_lab.demo import process
from fedsender_lab.demo.report import still_owed
from fedsender_lab.small_homeserver import VERSION
from fedsender_lab.testing.receiver import ReceivedTransaction, Receivers, open_receivers
from fedsender_lab.testing.rules import pdu_reader

SERVERS = 4
PATIENCE_S = 120.0
"""For anything to get on, on a machine that is busy with other things."""
MODULE = small_homeserver.__name__


@dataclass
class Figures:
    """What a campaign came to.

    Attributes:
        kills: by whom they took.
        amiss: what should not be, one text each.
    """

    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    events: int = 0
    nonsense: int = 0
    deliveries: int = 0
    repeats: int = 0
    amiss: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} of the {name}" for name, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({kills}) in {self.seconds:.0f} s:"
            f" {self.events:,} events stored once and in order, {self.nonsense} records set aside,"
            f" {self.deliveries:,} deliveries in order and {self.repeats} repeats;"
            f" {len(self.amiss)} things amiss"
        )


class SmallProcess:
    """The homeserver in a process of its own."""

    def __init__(self, command: list[str], directory: Path, nursery: trio.Nursery) -> None:
        self._command = command
        self._directory = directory
        self._nursery = nursery
        self._process: trio.Process

    async def start(self) -> None:
        with (self._directory / "small.log").open("ab") as log:
            run = partial(trio.run_process, self._command, stdin=subprocess.DEVNULL, stderr=log)
            self._process = await self._nursery.start(partial(run, check=False))

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def finish(self) -> int:
        """Nothing happens any more; its exit code once its outbox is empty."""
        (self._directory / "stop").touch()
        with trio.fail_after(PATIENCE_S):
            return await self._process.wait()


@dataclass
class Campaign:
    """The parts of a run."""

    directory: Path
    receivers: Receivers
    sender: process.DaemonProcess
    homeserver: SmallProcess
    rng: random.Random
    figures: Figures = field(default_factory=Figures)
    heard: trio.Event = field(default_factory=trio.Event)

    def hear(self, _: ReceivedTransaction) -> None:
        """Somebody was sent something."""
        self.heard.set()
        self.heard = trio.Event()

    def received(self) -> int:
        return self.receivers.totals()["pdus"]

    async def get_on(self) -> None:
        """Wait until somebody has received something more, or for a while."""
        before = self.received()
        with trio.move_on_after(PATIENCE_S):
            while self.received() == before:
                await self.heard.wait()

    async def kill_one(self) -> None:
        """At any moment: also while one of them starts."""
        if self.rng.random() < 0.8:
            await self.get_on()
        await trio.sleep(self.rng.uniform(0, 0.7))
        chance = self.rng.random()
        victims = ["homeserver"] * (chance < 0.6) + ["sender"] * (chance > 0.4)
        for victim in victims:
            self.figures.kills[victim] += 1
            if victim == "homeserver":
                await self.homeserver.kill()
            else:
                await self.sender.kill()
                self.receivers.origin_killed(process.SERVER_NAME)
        await trio.sleep(self.rng.uniform(0, 0.3))
        for victim in victims:
            await (self.homeserver if victim == "homeserver" else self.sender).start()

    def read(self, database: str, query: str) -> list[Any]:
        """Rows of the one or the other's database; single columns as values."""
        with closing(sqlite3.connect(self.directory / database)) as connection:
            rows = connection.execute(query).fetchall()
        return [row[0] if len(row) == 1 else row for row in rows]

    def said(self) -> list[str]:
        """The events that the homeserver has made, in order."""
        return self.read("small.sqlite3", "SELECT event_id FROM events ORDER BY place")

    def truth(self) -> dict[str, dict[str, list[str]]]:
        """Server -> room -> the events that it is to get, in order."""
        query = (
            "SELECT event_id, event ->> 'room_id', servers FROM events JOIN due USING (event_id)"
            " ORDER BY place"
        )
        due: dict[str, dict[str, list[str]]] = {name: {} for name in self.receivers.servers}
        for event_id, room_id, servers in self.read("small.sqlite3", query):
            for name in json.loads(servers):
                due[name].setdefault(room_id, []).append(event_id)
        return due

    async def arrive(self) -> None:
        """Wait until all servers have all, or nothing more comes."""
        due = sum(len(ids) for rooms in self.truth().values() for ids in rooms.values())
        while (before := self.received()) < due:
            await self.get_on()
            if self.received() == before:
                return

    def judge(self) -> None:
        """Hold everything against the homeserver's own tables; both have ended."""
        figures, amiss = self.figures, self.figures.amiss
        said = self.said()
        stored = self.read(
            "homeserver.sqlite3", "SELECT event_id FROM events ORDER BY stream_ordering"
        )
        figures.events = len(stored)
        if stored != said:
            missing, twice = set(said) - set(stored), len(stored) - len(set(stored))
            amiss.append(
                f"{len(missing)} events are not stored, {twice} are twice, or out of order"
            )
        nonsense = self.read("small.sqlite3", "SELECT id FROM nonsense ORDER BY id")
        aside = self.read(
            "small.sqlite3", "SELECT id FROM outbox WHERE refused IS NOT NULL ORDER BY id"
        )
        figures.nonsense = len(aside)
        if nonsense != aside:
            amiss.append(f"{len(nonsense)} records are nonsense, {len(aside)} were set aside")
        for name, rooms in self.truth().items():
            got: dict[str, list[str]] = {}
            for event_id, pdu in self.receivers.servers[name].received.items():
                got.setdefault(pdu.room_id, []).append(event_id)
            for room_id in rooms.keys() | got.keys():
                wanted, there = rooms.get(room_id, []), got.get(room_id, [])
                figures.deliveries += len(there)
                if wanted != there:
                    lost, more = set(wanted) - set(there), set(there) - set(wanted)
                    text = f"{len(lost)} missing, {len(more)} not for it, or out of order"
                    amiss.append(f"{name}, {room_id}: {text}")
        figures.repeats = self.receivers.totals()["repeated_pdus"]
        amiss += [f"{each.rule}: {each.detail}" for each in self.receivers.violations.first]
        amiss += [*still_owed(self.directory), *self.sender.errors()]


@asynccontextmanager
async def open_campaign(directory: Path, seed: int) -> AsyncIterator[Campaign]:
    """Receiving servers, the sender and the homeserver, all under way."""
    runtime, rng = real_runtime(), random.Random(seed)
    signer = process.write_signing_key(directory, b64encode(rng.randbytes(24)))
    process.write_secret(directory / "append.token", rng.randbytes(16).hex())
    async with (
        open_receivers(
            SERVERS,
            [signer.origin],
            pdu_reader(lambda room_id: VERSION),
            directory=directory / "tls",
            now_ms=runtime.now_ms(),
        ) as receivers,
        trio.open_nursery() as nursery,
    ):
        feed = process.push_feed(directory)
        config = dict(process.configuration(directory, feed, receivers.ca_file))
        # What an outage leaves is sent whole: nothing stands in for anything.
        config["destinations"]["defaults"]["catch_up_gap_events"] = GAP_EVENTS
        command = [sys.executable, "-m", MODULE, str(directory), *receivers.servers]
        command.append(f"--seed={seed}")
        homeserver = SmallProcess(command, directory, nursery)
        token = rng.randbytes(16).hex()
        async with process.open_daemon_process(directory, config, token) as sender:
            await homeserver.start()
            campaign = Campaign(directory, receivers, sender, homeserver, rng)
            receivers.on_transaction = campaign.hear
            yield campaign
        nursery.cancel_scope.cancel()


async def run_campaign(directory: Path, kills: int, seed: int) -> Figures:
    """Kill so often, and until ten events were made for each; what it came to."""
    began = trio.current_time()
    async with open_campaign(directory, seed) as campaign:
        figures = campaign.figures
        while figures.kills.total() < kills or len(campaign.said()) <= 10 * kills:
            await campaign.kill_one()
        if code := await campaign.homeserver.finish():
            figures.amiss.append(f"the homeserver ended with {code}")
        await campaign.arrive()
        if code := await campaign.sender.stop():
            figures.amiss.append(f"the sender ended with {code}")
        campaign.judge()
    figures.seconds = trio.current_time() - began
    return figures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = trio.run(run_campaign, Path(directory), given.kills, given.seed)
    for text in figures.amiss:
        print(text)
    print(figures)
    return 1 if figures.amiss else 0


if __name__ == "__main__":
    sys.exit(main())
