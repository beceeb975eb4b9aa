"""A relay on an SQLite of its own, on the virtual clock, and consumers by hand."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import trio
import trio.testing
from tests.relay.lines import Netcat
from tests.relay.log_support import pdu, runtime
from tests.store.ready_made import lay

from fedsender.config import Config, from_values
from fedsender.embedded.facts import prepare
from fedsender.runtime import Limiter, Runtime
from fedsender.streams import Json
from fedsender_lab.testing.clock import now_ms
from fedsender_relay.daemon import DATABASE, RelayDaemon, open_relay
from fedsender_relay.registry import Patience

SERVER = "hs.example"
MIB = 2**20


def config_of(directory: Path, settings: Mapping[str, object] | None = None) -> Config:
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


def new_directory() -> Path:
    """A directory that goes when the process ends."""
    made = tempfile.TemporaryDirectory(prefix="relay-")
    _directories.append(made)
    return Path(made.name)


_directories: list[tempfile.TemporaryDirectory[str]] = []


@dataclass
class World:
    """A relay that can be stopped and started, on one directory.

    Attributes:
        thread_s: what enters a thread takes so long.
        faults: of its database; see `open_relay`.
        free: bytes of its disk.
        ahead_ms: its wall clock is ahead by so much.
    """

    directory: Path = field(default_factory=new_directory)
    settings: Mapping[str, object] = field(default_factory=dict)
    patience: Patience | None = None
    thread_s: float = 0.0
    faults: Callable[[str], None] = lambda _: None
    free: int = 2**40
    ahead_ms: int = 0
    relay: RelayDaemon = field(init=False)
    nursery: trio.Nursery = field(init=False)
    appended: int = 0
    records: int = 0
    starts: int = 0

    @asynccontextmanager
    async def running(self, **more: Any) -> AsyncIterator[World]:
        """The relay, from its start to its stop."""
        config = config_of(self.directory, self.settings)
        lay(self.directory / DATABASE, "homeserver")
        opened = open_relay(
            config,
            self._runtime(),
            synchronous="OFF",
            faults=lambda point: self.faults(point),
            free=lambda _: self.free,
            patience=self.patience,
            **more,
        )
        async with trio.open_nursery() as nursery, opened as relay:
            self.relay, self.nursery = relay, nursery
            await trio.testing.wait_all_tasks_blocked()
            yield self
            nursery.cancel_scope.cancel()

    def _runtime(self) -> Runtime:
        self.starts += 1
        plain = runtime(self.starts, now_ms=lambda: now_ms() + self.ahead_ms)

        async def run_sync(
            function: Callable[[], Any], /, *, limiter: Limiter, abandon_on_cancel: bool = False
        ) -> Any:
            async with limiter:
                if self.thread_s:
                    await trio.sleep(self.thread_s)
                return function()

        return replace(plain, run_sync=run_sync)

    # --- the homeserver ---------------------------------------------------------------------------

    async def append(self, count: int = 1, *, size: int = 0) -> int:
        """Some records of one event each; the last one's token."""
        token = 0
        for _ in range(count):
            self.appended += 1
            token = await self.append_rows(pdu(self.appended, size))
        return token

    async def append_rows(self, *rows: Json, key: bytes | None = None) -> int:
        """One record of these rows; its token."""
        self.records += 1
        name = key or b"record %9d" % self.records
        (token,) = await self.relay.log.writer.append_all([prepare(rows, key=name)])
        return token

    async def change(self, statement: str) -> None:
        """Change the relay's database behind its back."""
        with closing(sqlite3.connect(self.directory / DATABASE)) as connection, connection:
            connection.execute(statement)

    def copied(self) -> Path:
        """A copy of the directory as it is now."""
        copy = new_directory()
        shutil.copytree(self.directory, copy, dirs_exist_ok=True)
        return copy

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
