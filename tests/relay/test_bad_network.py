"""A relay and a sender as processes of their own, and between them a network that is bad.

Numbers are those of the scenarios in docs/relay.md. A receiving server at the other end says what
came of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import yaml
from tests.proxy import Proxy, open_proxy
from tests.relay.relay_world import Hands
from tests.service import TOKEN, Service, World, open_service, open_world

from fedsender_lab.demo import process
from fedsender_lab.demo.process import write_secret
from fedsender_lab.intake_client import IntakeClient, NewRecord
from fedsender_lab.testing.clock import until
from fedsender_relay.feed import RETRY_S, TRIES

pytestmark = pytest.mark.slow

ROOMS = 24
SECRET = "correct horse battery staple"
MAKER_SECRET = "another horse battery staple"
SLOW = 2_000
"""Bytes a second that a slow network passes on, on each connection."""
PATIENCE_S = 300.0


@dataclass
class Network:
    """A homeserver, its relay, one sender and a receiving server; each start is a process.

    Attributes:
        newest: the newest event of each room.
    """

    directory: Path
    world: World
    newest: list[str] = field(default_factory=list)
    told: int = 0
    starts: int = 0

    @property
    def hub(self) -> Path:
        return self.directory / "hub"

    @property
    def fetched(self) -> Path:
        """Where the sender puts what it fetches."""
        return self.directory / "fetched"

    @property
    def received(self) -> Mapping[str, object]:
        return self.world.servers[0].received

    @asynccontextmanager
    async def relay(self, **settings: object) -> AsyncIterator[tuple[Service, tuple[str, int]]]:
        """The relay, level with the homeserver; and where it listens."""
        self.starts += 1
        relay = {
            "listen": ["127.0.0.1:0"],
            "consumers": {
                "fedsender": {"secret_file": "relay.secret"},
                "maker": {"secret_file": "maker.secret"},
            },
            "intake": f"unix:{self.hub}/intake.sock",
            "intake_token_file": "intake.token",
            "disk_reserve": 0,
            "keep_min": 0,
            **settings,
        }
        values = {
            "server_name": process.SERVER_NAME,
            "relay": relay,
            "admin": {"listen": f"unix:{self.hub}/admin.sock", "token_file": "admin.token"},
        }
        config = self.hub / "relay.yaml"
        config.write_text(yaml.safe_dump(values))
        arguments = ["relay", "-c", str(config)]
        async with open_service(self.hub, arguments, self.starts) as service:
            await service.manager.ready()
            (line,) = service.logged("relay_listens")
            port = int(str(line["address"]).rpartition(":")[2])
            await self.tell()
            await self._forget_log(port)
            yield service, ("127.0.0.1", port)

    async def _forget_log(self, port: int) -> None:
        """So that one that has nothing does not begin with the log."""
        first, head = 1, 2
        while first < head:
            hands = Hands.on(await trio.open_tcp_stream("127.0.0.1", port))
            await hands.say(f"AUTH {MAKER_SECRET}", f"SERVER {process.SERVER_NAME}", "NAME maker")
            *_, first, head = map(int, (await hands.until("RELAY ")).split()[4:])
            await hands.say("JOIN events")
            await hands.until("SNAPSHOT ")
            await hands.stream.aclose()
            await trio.sleep(0.2)

    async def tell(self) -> None:
        """Let the relay know what has happened at the homeserver since."""
        steps = self.world.homeserver.steps[self.told :]
        socket = f"unix:{self.hub / 'intake.sock'}"
        async with IntakeClient.at(socket, TOKEN) as client:
            for begin in range(0, len(steps), 100):
                some = steps[begin : begin + 100]
                await client.append_all(
                    [NewRecord(step.rows, f"step {step.token}") for step in some]
                )
        self.told += len(steps)

    @asynccontextmanager
    async def sender(self, door: Proxy) -> AsyncIterator[Service]:
        """The sender, which finds its relay behind this door."""
        host, port = door.address
        where = {
            "address": f"{host}:{port}",
            "secret_file": "hub/relay.secret",
        }
        feed = {"kind": "relay", "relay": {**where, "directory": str(self.fetched)}}
        values = process.configuration(self.directory, feed, self.world.receivers.ca_file)
        named = {**values}
        self.world.config.write_text(yaml.safe_dump(named))
        async with self.world.service() as service:
            await service.manager.ready()
            yield service

    def whole_files(self) -> list[str]:
        """What the sender has fetched to the end."""
        if not self.fetched.exists():
            return []
        return [path.name for path in self.fetched.iterdir() if path.suffix == ".gz"]

    async def delivered(self) -> None:
        """The newest event of each room has arrived, and one that is said now arrives too."""
        await until(lambda: set(self.newest) <= self.received.keys())
        said = self.world.say()
        await self.tell()
        await until(lambda: said in self.received)


@asynccontextmanager
async def network(directory: Path) -> AsyncIterator[Network]:
    """Rooms in which something was said twice; nothing runs yet."""
    with trio.fail_after(PATIENCE_S):
        async with open_world(directory, told=False) as world:
            found = Network(directory, world)
            found.hub.mkdir(mode=0o700)
            write_secret(found.hub / "relay.secret", SECRET)
            write_secret(found.hub / "maker.secret", MAKER_SECRET)
            write_secret(found.hub / "intake.token", TOKEN)
            write_secret(found.hub / "admin.token", TOKEN)
            names = [server.name for server in world.servers]
            for _ in range(ROOMS):
                room = world.homeserver.create_room(names)
                for _ in range(2):
                    newest = world.homeserver.say(room).event.event_id
                found.newest.append(newest)
            yield found


async def test_06_a_relay_that_restarts_in_mid_fetch_is_asked_for_the_rest_only(
    tmp_path: Path,
) -> None:
    """6: the network is slow, the relay is killed in the middle of a fetch, and comes back. Files
    that were whole are not fetched again, the newest events arrive."""
    async with (
        network(tmp_path) as net,
        net.relay() as (relay, address),
        open_proxy(address) as door,
    ):
        door.to_client.bytes_per_second = SLOW
        async with net.sender(door) as sender:
            await until(net.whole_files)
            assert not sender.logged("relay_snapshot_loaded")
            relay.running.kill()
            await relay.ended()
            door.refuse()
            door.cut()
            whole = net.whole_files()
            assert whole
            # Longer than one fetch tries.
            await trio.sleep(2 * TRIES * RETRY_S)
            async with net.relay() as (_, again), open_proxy(again, door.address):
                await net.delivered()
            (loaded,) = sender.logged("relay_snapshot_loaded")
            assert loaded["skipped_files"] >= len(whole)
            assert net.whole_files() == []


async def test_39_a_relay_that_vanishes_in_mid_fetch_holds_up_nobody_who_asks_elsewhere(
    tmp_path: Path,
) -> None:
    """39: nothing comes any more, and no end either. The operator stops the sender, points it
    elsewhere and starts it: it does not wait for the dead, and goes on with what it has."""
    async with (
        network(tmp_path) as net,
        net.relay() as (_, address),
        open_proxy(address) as dead,
        open_proxy(address) as elsewhere,
    ):
        dead.to_client.bytes_per_second = SLOW
        async with net.sender(dead) as sender:
            await until(net.whole_files)
            dead.to_client.stall()
            assert await sender.stop() == 0
            assert not sender.logged("relay_disconnected"), "it waited until it was sure"
        whole = net.whole_files()
        assert whole
        async with net.sender(elsewhere) as sender:
            await net.delivered()
            (loaded,) = sender.logged("relay_snapshot_loaded")
            assert loaded["skipped_files"] >= len(whole)


async def test_31_38_a_network_that_delays_and_cuts_costs_neither_events_nor_a_snapshot(
    tmp_path: Path,
) -> None:
    """31, 38: links that are slow, that are cut while rows flow, and that pass on nothing for a
    while: each event arrives, by the log alone."""
    async with (
        network(tmp_path) as net,
        net.relay() as (relay, address),
        open_proxy(address) as door,
        net.sender(door) as sender,
    ):
        await net.delivered()
        door.to_client.delay = 0.05
        said = []
        for number in range(6):
            said.append(net.world.say())
            await net.tell()
            if number % 2:
                door.cut()
        door.to_client.stall()
        said += [net.world.say() for _ in range(20)]
        await net.tell()
        door.cut()
        door.to_client.flow()
        await until(lambda: set(said) <= net.received.keys())
        assert len(sender.logged("relay_snapshot_loaded")) == 1
        assert [line["reason"] for line in relay.logged("relay_resync")] == ["GAP"]
