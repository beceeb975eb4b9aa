"""A relay in memory, on the virtual clock, and consumers by hand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio
import trio.testing
from tests.relay.log_support import outside, pdu
from tests.relay.memory_disk import MemoryDisk
from tests.replication.support import Netcat

from fedsender.config import Config, from_values
from fedsender.outside import Outside
from fedsender.relay.daemon import RelayDaemon, open_relay
from fedsender.relay.disk import Disk, File
from fedsender.replication.commands import Json
from fedsender.replication.wire import OWN_KIND, PeerKind
from fedsender.simulation.virtual import now_ms

SERVER = "hs.example"
MIB = 2**20


def config_of(
    directory: Path = Path("/relay"), settings: Mapping[str, object] | None = None
) -> Config:
    """A configuration with these settings of the section `relay`."""
    relay = {
        "directory": str(directory),
        "disk_reserve": 0,
        "keep_min": 0,
        "snapshot_every": "520w",
        **(settings or {}),
    }
    values = {"server_name": SERVER, "signing_key": "key", "relay": relay}
    return from_values(values, directory=directory)


class TouchyDisk(MemoryDisk):
    """A disk whose segments cannot be opened while `unreadable`."""

    unreadable = False

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
        if self.unreadable and path.suffix == ".seg" and not create:
            raise PermissionError(13, "Permission denied", str(path))
        return super().open(path, write=write, create=create)


class Hands(Netcat):
    """A consumer by hand."""

    async def greet(self) -> list[str]:
        """Read SERVER, ask for RELAY; the words of that."""
        assert await self.hear() == f"SERVER {SERVER}"
        await self.say(f"SERVER {SERVER}")
        words = str(await self.hear()).split()
        assert words[:2] == ["RELAY", "1"]
        return words[2:]

    async def introduce(self, name: str) -> str:
        """Be this consumer; the epoch."""
        epoch, *_ = await self.greet()
        await self.say(f"NAME {name}", "PING 1")
        return epoch

    async def resume(self, name: str, token: int | str) -> str:
        """Be this consumer, and ask to be fed; the epoch."""
        epoch = await self.introduce(name)
        await self.say(f"REPLICATE events {token} {epoch}")
        return epoch

    async def ack(self, token: int) -> None:
        """Hold everything up to this token."""
        await self.say(f"ACK events {token}")
        await trio.testing.wait_all_tasks_blocked()

    async def until(self, start: str) -> str:
        """The next line that begins so; what comes before is passed over."""
        while True:
            line = await self.hear_any()
            assert line is not None, f"it ended before {start}"
            if line.startswith(start):
                return line

    async def tokens_until_level(self) -> list[int]:
        """The tokens of the records up to POSITION."""
        tokens: list[int] = []
        while True:
            line = str(await self.hear())
            words = line.split(" ", 3)
            if words[0] == "POSITION":
                return tokens
            assert words[:2] == ["RDATA", "events"], line
            if words[2] != "batch":
                tokens.append(int(words[2]))

    async def fetch(self, snapshot: str, file: str, offset: int = 0) -> bytes:
        """The bytes of a file from `offset` on."""
        await self.say(f"FETCH {snapshot} {file} {offset}")
        _, name, start, length = (await self.until("FILE ")).split()
        assert (name, int(start)) == (file, offset)
        while len(self._buffer) < int(length):
            self._buffer += await self.stream.receive_some(65_536)
        body = bytes(self._buffer[: int(length)])
        del self._buffer[: int(length)]
        return body

    async def error(self) -> str:
        """Its last word, after whatever else."""
        return (await self.until("ERROR ")).removeprefix("ERROR ")

    async def leave(self) -> None:
        """Be gone; returns when the relay has noticed."""
        await self.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()


@dataclass
class World:
    """A relay that can be stopped and started, on one disk.

    Attributes:
        thread_s: what enters a thread takes so long.
    """

    disk: MemoryDisk = field(default_factory=TouchyDisk)
    settings: Mapping[str, object] = field(default_factory=dict)
    kind: PeerKind = OWN_KIND
    thread_s: float = 0.0
    relay: RelayDaemon = field(init=False)
    nursery: trio.Nursery = field(init=False)
    appended: int = 0
    starts: int = 0

    @asynccontextmanager
    async def running(self, **more: Any) -> AsyncIterator[World]:
        """The relay, from its start to its stop."""
        config = config_of(settings=self.settings)
        async with (
            trio.open_nursery() as nursery,
            open_relay(config, self.disk, self._outside(), kind=self.kind, **more) as relay,
        ):
            self.relay, self.nursery = relay, nursery
            await trio.testing.wait_all_tasks_blocked()
            yield self
            nursery.cancel_scope.cancel()

    def _outside(self) -> Outside:
        self.starts += 1
        plain = outside(self.starts, now_ms=now_ms)

        async def run_sync(
            function: Callable[[], Any], /, *, limiter: trio.CapacityLimiter, abandon: bool = False
        ) -> Any:
            async with limiter:
                if self.thread_s:
                    await trio.sleep(self.thread_s)
                return function()

        return Outside(plain.now_ms, plain.random, plain.entropy, run_sync, plain.network)

    # --- the homeserver ---------------------------------------------------------------------------

    async def append(self, count: int = 1, *, size: int = 0) -> int:
        """Some records of one event each; the last one's token."""
        token = 0
        for _ in range(count):
            self.appended += 1
            token = await self.relay.log.append([pdu(self.appended, size)])
        return token

    async def append_rows(self, *rows: Json) -> int:
        """One record of these rows; its token."""
        return await self.relay.log.append(list(rows))

    async def sealed(self, count: int = 1, rounds: int = 1) -> None:
        """Records, then the end of the segment; so many times."""
        for _ in range(rounds):
            await self.append(count)
            await self.relay.log.seal()

    # --- consumers --------------------------------------------------------------------------------

    def connect(self, *, trusted: bool = True, lockstep: bool = False, peer: str = "") -> Hands:
        """A connection, by a Unix socket or not; `lockstep`: nothing is in between."""
        make = trio.testing.lockstep_stream_pair if lockstep else trio.testing.memory_stream_pair
        ours, theirs = make()
        self.nursery.start_soon(partial(self.relay.hub.serve, theirs, trusted=trusted, peer=peer))
        return Hands.on(ours)

    async def follow(self, name: str, token: int | str = 0) -> Hands:
        """A consumer that has read all there is."""
        hands = self.connect()
        await hands.resume(name, token)
        await hands.tokens_until_level()
        return hands

    async def stopped(self, name: str, token: int) -> None:
        """A consumer that was here, holds everything up to this token, and left."""
        hands = await self.follow(name, token)
        await hands.leave()

    async def join(self, name: str) -> tuple[Hands, str, int]:
        """A consumer that was handed a snapshot: its id and token."""
        hands = self.connect()
        await hands.introduce(name)
        await hands.say("JOIN events")
        words = (await hands.until("SNAPSHOT ")).split()
        return hands, words[2], int(words[3])

    # --- what there is ----------------------------------------------------------------------------

    def state(self, name: str) -> str | None:
        """A consumer's state; None: it has no record."""
        consumer = self.relay.registry.get(name)
        return None if consumer is None else str(consumer.state)

    def pin(self, name: str) -> int | None:
        """A consumer's pin."""
        consumer = self.relay.registry.get(name)
        return None if consumer is None else consumer.pin

    @property
    def first(self) -> int:
        """The oldest token in the log."""
        return self.relay.log.first

    def records(self) -> dict[str, Any]:
        """The file of consumers."""
        text = stored(self.disk, Path("/relay/consumers.json"))
        return {one["name"]: one for one in json.loads(text)["consumers"]}


def stored(disk: Disk, path: Path) -> bytes:
    """A file's content."""
    file = disk.open(path)
    try:
        return file.pread(MIB, 0)
    finally:
        file.close()
