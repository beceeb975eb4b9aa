"""Two machines that send for one real Synapse: one sends, the other stands by."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

import pytest
import trio
from sqlalchemy import make_url
from tests.proxy import Proxy, open_proxy
from tests.servers import free_port
from tests.synapse.daemon import Daemon
from tests.synapse.world import World

pytestmark = pytest.mark.slow

FAULTS: Final = ("frozen", "cut off", "killed")
TIMES: Final = 1
"""How often each fault happens: `-s` prints how long the other one took to be ready."""
ROUND_S: Final = 100
SAID: Final = 3
"""Messages in a round."""


class Machine:
    """A machine of its own, with nothing but the databases and Redis in common with others; it
    reaches the databases by a proxy."""

    def __init__(self, daemon: Daemon, proxy: Proxy) -> None:
        self.daemon = daemon
        self._ways = proxy.to_server, proxy.to_client

    async def fail(self, fault: str) -> None:
        if fault == "frozen":
            self.daemon.tell(signal.SIGSTOP)
        elif fault == "killed":
            await self.daemon.kill()
        else:
            for way in self._ways:
                way.stall()

    async def come_back(self, fault: str) -> None:
        if fault == "frozen":
            self.daemon.tell(signal.SIGCONT)
        elif fault == "killed":
            await self.daemon.start()
        else:
            for way in self._ways:
                way.flow()
        await self.daemon.wait_until_standing_by()


@asynccontextmanager
async def open_machine(world: World, home: Path, senders: str) -> AsyncIterator[Machine]:
    """`senders`: the URL of the senders' database."""
    database = world.a.database
    assert database is not None
    async with open_proxy((database.host, database.port)) as proxy:

        def by_proxy(url: str) -> str:
            host, port = proxy.address
            return make_url(url).set(host=host, port=port).render_as_string(hide_password=False)

        homeserver = {
            "kind": "synapse",
            "database": by_proxy(database.url),
            "federation_sender_instances": list(world.a.senders),
        }
        daemon = replace(
            world.daemon,
            home=home,
            admin_port=free_port("127.0.0.1"),
            options=("--standby",),
            settings={"sender_database": by_proxy(senders), "homeserver": homeserver},
        )
        await daemon.start()
        try:
            yield Machine(daemon, proxy)
        finally:
            with trio.CancelScope(shield=True):
                await daemon.stop()


async def test_a_stand_by_goes_on_for_a_synapse(world: World, tmp_path: Path) -> None:
    """The one that sends is frozen, cut off from the databases and killed in its turn, and comes
    back as the one that stands by."""
    world.postgres.create_database("senders")
    senders = world.postgres.url("senders")
    homes = tmp_path / "1", tmp_path / "2"
    for home in homes:
        home.mkdir()
    texts: list[str] = []
    took_s: list[float] = []
    with trio.fail_after(ROUND_S * (1 + len(FAULTS) * TIMES)):
        room = await world.room()
        async with open_machine(world, homes[0], senders) as holder:
            await holder.daemon.wait_until_ready()
            async with open_machine(world, homes[1], senders) as other:
                await other.daemon.wait_until_standing_by()
                for fault in ("", *FAULTS * TIMES):
                    began = trio.current_time()
                    if fault:
                        await holder.fail(fault)
                    new = [f"message {len(texts) + number}" for number in range(SAID)]
                    event_ids = await room.alice.send_all(room.id, new)
                    texts += new
                    if fault:
                        await other.daemon.wait_until_ready()
                        took_s.append(trio.current_time() - began)
                    assert await room.bob.read_until(room.id, texts[-1]) == texts
                    if fault:
                        await holder.come_back(fault)
                        holder, other = other, holder
                await world.wait_until_settled(world.b.name, event_ids[-1])
    print(f"{len(took_s)} times: p50 {median(took_s):.1f} s, at most {max(took_s):.1f} s")
