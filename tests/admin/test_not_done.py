"""What an operator was told is not done has not been done, and does not happen later."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.admin.desk import OURS, Desk, open_desk
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.admin.app import description
from fedsender_lab.simulation.daemon_life import disk_full

A, B = "a.example", "b.example"
R1 = "!1:hs.example"
GIVEN_UP = ("dropped", "purged")


class Disk:
    """The disk of a world; `full` names the databases that cannot write."""

    def __init__(self, world: World) -> None:
        self.full: tuple[str, ...] = ()
        world.faults = self._fault

    def _fault(self, point: str) -> None:
        database, _, when = point.partition(": ")
        if database in self.full and when == "before commit":
            raise disk_full()


@asynccontextmanager
async def prepared(world: World) -> AsyncIterator[tuple[Desk, Disk, dict[str, Any]]]:
    """Servers A, which is paused, and B; one item of B in quarantine. Bodies of requests for it."""
    disk = Disk(world)
    async with open_desk(world) as desk:
        await world.join(R1, A, B)
        event = world.pdu(R1, "one")
        await world.apply(event)
        await trio.sleep(20)
        await world.sender.operations.hold(A, paused="before", parked=None)
        item = await world.store.sender.quarantine_item(
            destination=B, kind="pdu", reason="because", event_id=event.event_id, room_id=R1
        )
        await trio.sleep(20)
        yield desk, disk, {"pairs": [[B, event.event_id]], "ids": [item]}


async def state(desk: Desk) -> dict[str, Any]:
    """All that a verb could have changed."""
    store = desk.world.store.sender
    states = await store.all_server_states()
    held = {
        server: {name: value for name, value in row.items() if name[:5] in ("pause", "parke")}
        for server, row in states.items()
    }
    return {
        "on record": held,
        "in memory": {
            server: (found.paused, found.paused_by, found.parked)
            for server in (A, B)
            for found in [desk.world.sender.registry.state_of(server)]
        },
        "quarantine": await store.quarantine_list(None, 10, 0),
        "redeliveries": [await store.redeliveries(server, 10) for server in (A, B)],
        "ledger": [line for line in desk.world.ledger() if line["outcome"] in GIVEN_UP],
        "answered": [len(desk.world.servers[server].got) for server in (A, B)],
    }


VERBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pause", {"servers": [B], "reason": "r", "by": "me"}),
    ("pause", {"pattern": "*", "reason": "r", "for_ms": 3_600_000}),
    ("park", {"servers": [A, B], "reason": "r"}),
    ("resume", {"servers": [A]}),
    ("purge", {"server": B, "force": True}),
    ("redeliver", {"pairs": []}),
    ("quarantine/release", {"ids": []}),
    ("quarantine/drop", {"ids": []}),
    ("redeliver_since", {"server": B, "since_ts": 0}),
)
"""Requests that write; lists of pairs and of ids are those of `prepared`."""
NOT_HERE = {
    "notify_remote_server_up",  # It stores nothing.
    "skip",  # Only where the fan-out stands: tests/admin/test_skip.py.
}


def test_each_verb_is_tried_on_a_full_disk() -> None:
    """A new one belongs into `VERBS`, so that what it says is done outlives the daemon."""
    paths = description()["paths"]
    ours = {path.removeprefix(f"{OURS}/") for path in paths if "post" in paths[path]}

    assert {path for path in ours if not path.startswith("/")} == {
        *NOT_HERE,
        *(verb for verb, _ in VERBS),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "body"), VERBS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_a_verb_on_a_full_disk_is_not_done_then_or_later(
    world: World, autojump_clock: MockClock, verb: str, body: dict[str, Any]
) -> None:
    async with prepared(world) as (desk, disk, bodies):
        body = {key: bodies.get(key, value) for key, value in body.items()}
        before = await state(desk)
        disk.full = "sender", "homeserver"
        answer = await desk.post(verb, body, 503)
        assert answer["error"].startswith("not done within 60 s")
        disk.full = ()
        await trio.sleep(300)

        assert await state(desk) == before


async def test_a_verb_whose_time_ran_out_in_its_midst_says_so(
    world: World, autojump_clock: MockClock
) -> None:
    """A purge first parks the server, so that it can be run again."""
    async with prepared(world) as (desk, disk, _):
        disk.full = ("homeserver",)
        answer = await desk.post("purge", {"server": B, "force": True}, 503)

        assert answer["error"].startswith("only a part is done within 60 s")
        assert (await desk.get(f"why/{B}"))["state"] == "parked"
        disk.full = ()
        await trio.sleep(60)
        assert await desk.post("purge", {"server": B, "force": True}) == {"purged": B}


async def test_a_full_disk_is_an_error_in_the_log_and_ready_says_which(
    world: World, autojump_clock: MockClock
) -> None:
    """`journalctl -p err` is where an operator looks first."""
    async with prepared(world) as (desk, disk, _):
        disk.full = ("sender",)
        with capture_logs() as logged:
            await desk.post("pause", {"servers": [B], "reason": "r"}, 503)
        found = await desk.get("/ready", 503)
        assert found["reasons"] == [
            "the sender's own database cannot be used: database or disk is full"
        ]
        [entry] = [entry for entry in logged if entry["event"] == "database_unavailable"]
        assert entry["log_level"] == "error"
        disk.full = ()
        assert await desk.post("pause", {"servers": [B], "reason": "r"}) == {"servers": [B]}
        assert (await desk.get("/ready"))["ready"] is True
