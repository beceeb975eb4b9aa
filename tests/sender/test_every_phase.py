"""Every order, given in every phase of a destination's life: nothing is lost, and the rules hold.

For each phase one world: a server for each order, all of them brought to that phase, and then each
given its order. Afterwards all are well again, and what they have got is held against what was
said. `drain` is the end of the first life for all; in the last phase, all orders come during it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from tests.sender.harness import RemoteServer, Request, World, answer, ok
from trio.testing import MockClock

from fedsender.federation.client import Answer
from fedsender.sender.context import Phase
from fedsender.sender.operations import Operations
from fedsender.sender.sender import Sender
from fedsender.store import StoreClosed

QUEUE = 50
DRAINS_AT_ONCE = {"waiting"}
"""Phases with nothing in flight: the drain has nothing to wait for."""


@dataclass
class Scene:
    """One server in a room of its own, and all that was said there."""

    world: World
    order: str
    said: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    forgiven: int = 0

    @property
    def name(self) -> str:
        return f"{self.order}.example"

    @property
    def room(self) -> str:
        return f"!{self.order}:hs.example"

    @property
    def server(self) -> RemoteServer:
        return self.world.server(self.name)

    @property
    def sender(self) -> Sender:
        return self.world.sender

    async def say(self, text: str) -> None:
        pdu = self.world.pdu(self.room, f"{text} {len(self.said)}")
        self.said.append(f"{text} {len(self.said)}")
        self.events.append(pdu.event_id)
        await self.world.apply(pdu)

    @property
    def phase(self) -> Phase | None:
        destination = self.sender.active.get(self.name)
        return None if destination is None else destination.phase


# --- the phases: what brings a server there, and how one sees that it is there --------------------


async def idle(scene: Scene) -> None: ...


async def sending(scene: Scene) -> None:
    scene.server.latency = 30
    await scene.say("in flight")


async def waiting(scene: Scene) -> None:
    scene.server.reply = lambda _: answer(500)
    await scene.say("failed")


async def catching_up(scene: Scene) -> None:
    scene.server.down = True
    for _ in range(3):
        await scene.say("missed")


async def parked(scene: Scene) -> None:
    await scene.sender.operations.hold(scene.name, paused=None, parked="gone")
    await scene.say("kept")


async def paused(scene: Scene) -> None:
    await scene.sender.operations.hold(scene.name, paused="later", parked=None)
    await scene.say("kept")


async def quarantined(scene: Scene) -> None:
    def picky(request: Request) -> Answer:
        return answer(400) if any("poison" in body for body in request.bodies) else ok(request)

    scene.server.reply = picky
    await scene.say("poison")
    await scene.say("behind it")


async def spilled(scene: Scene) -> None:
    scene.server.latency = 30
    await scene.say("in flight")
    await trio.sleep(0.5)
    for _ in range(QUEUE + 5):
        await scene.say("spilled")


async def settled(scenes: list[Scene], phase: str) -> None:
    """They are in their phase."""
    if phase == "catching_up":
        await trio.sleep(2000)
        for scene in scenes:
            scene.server.down, scene.server.latency = False, 30
        scenes[0].sender.registry.wake([scene.name for scene in scenes], by_admin=True)
        await trio.sleep(1)
    await trio.sleep({"quarantined": 300.0, "idle": 3.0}.get(phase, 1.0))
    for scene in scenes:
        await IN_PHASE[phase](scene)


async def is_idle(scene: Scene) -> None:
    assert scene.phase is Phase.IDLE


async def is_sending(scene: Scene) -> None:
    assert scene.phase is Phase.SENDING
    assert scene.server.in_flight == 1


async def is_waiting(scene: Scene) -> None:
    assert scene.phase is Phase.WAITING
    assert scene.sender.active[scene.name].frozen is not None


async def is_catching_up(scene: Scene) -> None:
    assert scene.phase is Phase.CATCHING_UP
    assert scene.server.in_flight == 1


async def is_held(scene: Scene) -> None:
    status = scene.sender.registry.status(scene.name)
    assert status is not None
    assert status.standing in ("paused", "parked")


async def is_quarantined(scene: Scene) -> None:
    (item,) = await scene.world.store.sender.quarantine_list(scene.name, 10)
    assert item.event_id in scene.events


async def is_spilled(scene: Scene) -> None:
    assert not scene.sender.active[scene.name].outbox.level
    assert scene.server.in_flight == 1


IN_PHASE: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "idle": is_idle,
    "sending": is_sending,
    "waiting": is_waiting,
    "catching_up": is_catching_up,
    "parked": is_held,
    "paused": is_held,
    "quarantined": is_quarantined,
    "spilled": is_spilled,
}
PHASES: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "idle": idle,
    "sending": sending,
    "waiting": waiting,
    "catching_up": catching_up,
    "parked": parked,
    "paused": paused,
    "quarantined": quarantined,
    "spilled": spilled,
}


# --- the orders -----------------------------------------------------------------------------------


async def wake(scene: Scene) -> None:
    scene.sender.registry.wake([scene.name], by_admin=True)


async def pause(scene: Scene) -> None:
    await scene.sender.operations.hold(scene.name, paused="order", parked=None)


async def resume(scene: Scene) -> None:
    await scene.sender.operations.hold(scene.name, paused=None, parked=None)


async def park(scene: Scene) -> None:
    await scene.sender.operations.hold(scene.name, paused=None, parked="order")


async def purge(scene: Scene) -> None:
    scene.forgiven = len(scene.said)
    assert await scene.sender.operations.purge(scene.name, force=True) == []
    await scene.sender.operations.hold(scene.name, paused=None, parked=None)


async def redeliver(scene: Scene) -> None:
    assert await scene.sender.operations.redeliver([(scene.name, scene.events[0])]) == []


async def release(scene: Scene) -> None:
    items = await scene.world.store.sender.quarantine_list(scene.name, 10)
    assert await scene.sender.operations.release([item.id for item in items]) == []


async def reload(scene: Scene) -> None:
    override = {"match": scene.name, "max_pdus": 7, "address": "192.0.2.7:8448"}
    scene.world.settings["destinations"] = {"overrides": [override]}
    scene.world.reload(scene.sender)


async def drain(scene: Scene) -> None: ...


async def foreign_reset(scene: Scene) -> None:
    """Another of the homeserver's processes has reached the server."""
    await scene.world.store.homeserver.store_backoff(scene.name, None, 0, 0)
    scene.sender.backoff_changed(scene.name)


ORDERS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "wake": wake,
    "pause": pause,
    "resume": resume,
    "park": park,
    "purge": purge,
    "redeliver": redeliver,
    "release": release,
    "reload": reload,
    "drain": drain,
    "foreign-reset": foreign_reset,
}
ELSEWHERE = {
    "is_known",  # It changes nothing.
    "hold",  # Here it is `resume`.
    "drop",  # What is in quarantine waits for no phase, in these three.
    "drop_room",
    "release_room",
    "redeliver_since",  # It finds the events, and is `redeliver` from there on.
}


def test_every_order_of_an_operator_is_tried_in_every_phase() -> None:
    """A new one belongs into `ORDERS`."""
    ours = {name for name in vars(Operations) if not name.startswith("_")}
    assert ours - ELSEWHERE <= ORDERS.keys()
    assert ours >= ELSEWHERE


# --- what must hold -------------------------------------------------------------------------------


def check(scene: Scene) -> None:
    """Everything that was said has arrived, in order; and the record says how."""
    first: list[str] = list(dict.fromkeys(scene.server.got))
    owed = scene.said[scene.forgiven :]
    held_back = [text for text in owed if text not in first]
    assert all("poison" in text for text in held_back), f"{scene.order}: {held_back} never came"
    in_order = [text for text in first if text in owed and "poison" not in text]
    assert in_order == [text for text in owed if text in in_order], scene.order
    bodies: dict[str, set[bytes]] = {}
    for request in scene.server.requests:
        bodies.setdefault(request.id, set()).add(request.body)
    assert all(len(each) == 1 for each in bodies.values()), "I3: one id, two bodies"
    lines = [
        line
        for line in scene.world.ledger(scene.name)
        if line["attempt"] > 0 and line["outcome"] != "discarded"
    ]
    seen = [request.id for request in scene.server.requests]
    assert sorted(line["transaction_id"] for line in lines) == sorted(seen), (
        f"I9: a line for each attempt of {scene.order}"
    )


def world_of(directory: Path) -> tuple[World, list[Scene]]:
    world = World(directory, sending={"queue_pdus": QUEUE})
    return world, [Scene(world, order) for order in ORDERS]


async def begin(world: World, scenes: list[Scene]) -> None:
    for scene in scenes:
        await world.join(scene.room, scene.name)
        await scene.say("before")
    await trio.sleep(2)


async def all_well(scenes: list[Scene]) -> None:
    for scene in scenes:
        scene.server.down, scene.server.latency, scene.server.reply = False, 0.01, ok
        await scene.sender.operations.hold(scene.name, paused=None, parked=None)
    scenes[0].sender.registry.wake([scene.name for scene in scenes], by_admin=True)
    await trio.sleep(120)


async def in_the_end(world: World, scenes: list[Scene]) -> None:
    """Another life: what the first has left undone is done."""
    async with world.run():
        await all_well(scenes)
        for scene in scenes:
            await scene.say("last")
        await trio.sleep(60)
        assert await world.store.homeserver.lagging() == []
        assert await world.store.sender.frozen_destinations() == []
        assert await world.store.sender.catch_up_floors() == {}
    for scene in scenes:
        check(scene)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_every_order_in_this_phase(
    tmp_path: Path, autojump_clock: MockClock, phase: str
) -> None:
    """I2, I3, I9; and that nothing is sent to a server that is held."""
    world, scenes = world_of(tmp_path)
    async with world.run() as sender:
        await begin(world, scenes)
        for scene in scenes:
            await PHASES[phase](scene)
        await settled(scenes, phase)
        async with trio.open_nursery() as nursery:
            for scene in scenes:
                nursery.start_soon(ORDERS[scene.order], scene)
        for scene in scenes:
            await scene.say("after")
        await trio.sleep(70)
        held = [scene for scene in scenes if scene.order in ("pause", "park")]
        tries = {scene.order: len(scene.server.attempts) for scene in held}
        await trio.sleep(400)
        for scene in held:
            status = sender.registry.status(scene.name)
            assert status is not None
            assert status.standing == ("paused" if scene.order == "pause" else "parked")
            assert len(scene.server.attempts) == tries[scene.order]
        await all_well(scenes)
        for scene in scenes:
            if scene.order != "drain":
                check(scene)
    await in_the_end(world, scenes)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["sending", "waiting", "catching_up", "spilled"])
async def test_every_order_while_it_drains(
    tmp_path: Path, autojump_clock: MockClock, phase: str
) -> None:
    """The drain waits up to 20 s for what is in flight; orders that come meanwhile cost nothing.

    One that comes too late is told so, whatever it has done by then; none waits for ever.
    """
    world, scenes = world_of(tmp_path)
    late: list[str] = []

    async def order(scene: Scene) -> None:
        await trio.sleep(0 if phase in DRAINS_AT_ONCE else 1)
        try:
            with trio.fail_after(25):
                await ORDERS[scene.order](scene)
        except StoreClosed:
            late.append(scene.order)

    async with trio.open_nursery() as nursery, world.run():
        await begin(world, scenes)
        for scene in scenes:
            await PHASES[phase](scene)
        await settled(scenes, phase)
        for scene in scenes:
            if scene.order != "purge":
                nursery.start_soon(order, scene)
    assert phase in DRAINS_AT_ONCE or not late, late
    await in_the_end(world, scenes)


async def test_an_order_after_the_drain_is_refused(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Nobody reads or writes any more: whoever asks is told so, and does not wait for ever."""
    world, scenes = world_of(tmp_path)
    async with world.run() as sender:
        await begin(world, scenes[:1])
    scene = scenes[0]
    with trio.fail_after(60):
        with pytest.raises(StoreClosed):
            await sender.operations.hold(scene.name, paused="too late", parked=None)
        with pytest.raises(StoreClosed):
            await sender.operations.redeliver([(scene.name, scene.events[0])])
