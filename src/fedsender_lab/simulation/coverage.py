"""Coverage: each kind of happening that chance has left out is made to take place.

It begins when a part of the run is over, and insists on one kind after the other, until it is seen.
All of it plays in a room of its own, with the first server, which is well if left alone.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from fedsender.sender.failure import Outcome
from fedsender_lab.simulation.behaviours import MINUTE, WELL, Mode, Mood
from fedsender_lab.simulation.daemon_life import Life
from fedsender_lab.simulation.disasters import Operator, fill_ledger_disk
from fedsender_lab.simulation.world import GAP_EVENTS, World
from fedsender_lab.testing.rooms import Room

BEGINS = 0.4
"""After this part of the run."""
TRIES = 2
ROUNDS = 15
FLOOD = 120
"""Events, all at once: more than a queue or a small gap holds."""
OUTCOMES = {
    Outcome.UNREACHABLE: Mode.REFUSED,
    Outcome.BUSY: Mode.BUSY,
    Outcome.FAILING: Mode.FAILING,
    Outcome.REFUSING: Mode.FORBIDDEN,
    Outcome.NOT_THERE: Mode.NOT_THERE,
    Outcome.GONE: Mode.GONE,
    Outcome.LYING: Mode.GARBAGE,
    Outcome.DELIVERED: Mode.WELL,
}
Step = Callable[[], object]
"""May be awaited or not."""


@dataclass(frozen=True, slots=True)
class Troubles:
    """The troubles for the daemon and its homeserver."""

    life: Callable[[], Life | None]
    restart: Callable[[], None]
    fail_database: Callable[[float], Awaitable[None]]
    fail_homeserver: Callable[[float], Awaitable[None]]
    lock_room: Callable[[str, float], Awaitable[None]]
    fail_over: Callable[[], None]


class Coverage:
    """The happenings that are still missing."""

    def __init__(self, world: World, operator: Operator, troubles: Troubles) -> None:
        self._world = world
        self._homeserver = world.homeserver
        self._operator = operator
        self._troubles = troubles
        self._server = world.servers[0]
        self._room: Room | None = None

    async def run(self) -> None:
        """Insist on whatever has not been seen by now."""
        await trio.sleep(BEGINS * self._world.size.seconds)
        steps = self._steps()
        for _ in range(ROUNDS):
            # One that does not come about must not keep the others from it.
            for name, step in steps.items():
                for _ in range(TRIES):
                    if self._count(name):
                        break
                    self._world.observed.trace.note("insists", name)
                    self._operator.resume()
                    done = step()
                    if isinstance(done, Awaitable):
                        await done
                    await trio.sleep(MINUTE)

    def _steps(self) -> dict[str, Step]:
        steps: dict[str, Step] = {
            f"outcome: {outcome.value}": partial(self._meet, mode)
            for outcome, mode in OUTCOMES.items()
        }
        # Behind, so that there is a catch-up to take a backup in.
        return (
            {"backups": self._fall_behind}
            | steps
            | {
                "outcome: rejecting": self._poison,
                "isolations": self._poison,
                "quarantined": self._poison,
                "refused PDUs": partial(self._meet, Mode.REFUSES_SOME),
                "spills": self._flood,
                "large gaps": partial(self._fall_behind, FLOOD),
                "PDUs of small gaps": self._fall_behind,
                "re-joins": self._leave_and_come_back,
                "redactions": self._redact,
                "others' events": self._another_server_speaks,
                "bans in partial state": self._ban_in_partial_state,
                "forks": lambda: self._homeserver.fork(self._stage()),
                "busy rooms freed": self._free_room,
                "full disks": self._fill_disk,
                "database outages": partial(self._troubles.fail_database, 20.0),
                "homeserver restarts": partial(self._troubles.fail_homeserver, 20.0),
                "failovers noticed": self._fail_over,
                "set aside": self._talk_in_a_locked_room,
                "orderly restarts": self._troubles.restart,
                "redeliveries": self._operator.redeliver,
                "wakes": self._operator.wake,
                "to-device messages": self._operator.send_to_device,
            }
        )

    def _count(self, name: str) -> int:
        life = self._troubles.life()
        running = life.spills() if name == "spills" and life is not None else 0
        return self._world.observed.counts[name] + running

    def _stage(self) -> Room:
        if self._room is None:
            self._room = self._homeserver.create_room([self._server.name], staged=True)
        return self._room

    # --- with the server --------------------------------------------------------------------------

    async def _meet(self, mode: Mode) -> None:
        """Send an event while the server is in this mode."""
        room = self._stage()
        self._server.mood = Mood((mode,))
        self._homeserver.say(room)
        await self._try_now()
        self._server.mood = WELL

    async def _try_now(self) -> None:
        await trio.sleep(5)
        self._operator.wake_all([self._server.name])
        await trio.sleep(MINUTE)

    async def _poison(self) -> None:
        """The server refuses every transaction with this one event."""
        self._server.poison.add(self._homeserver.say(self._stage()).event_id)
        await self._try_now()

    async def _flood(self) -> None:
        room = self._stage()
        self._server.mood = Mood((Mode.SLOW,))
        for _ in range(FLOOD):
            self._homeserver.say(room)
        await self._try_now()
        self._server.mood = WELL
        await self._try_now()

    async def _fall_behind(self, events: int = 3) -> None:
        """The daemon restarts while the server fails and there is this much to be sent."""
        room = self._stage()
        self._server.mood = Mood((Mode.FAILING,))
        self._homeserver.say(room)
        # That one is repeated as it was; what comes behind it is caught up with.
        await trio.sleep(MINUTE / 4)
        for _ in range(events):
            self._homeserver.say(room)
        await trio.sleep(MINUTE / 4)
        self._troubles.restart()
        await trio.sleep(2 * MINUTE)
        # Not too fast: somebody may wait for the moment to take a backup.
        self._server.mood = Mood((Mode.SLOW,))
        await self._try_now()
        self._server.mood = WELL

    async def _free_room(self) -> None:
        """A blocked room goes on while it is freed, and so does another one of a slow server."""
        room = self._stage()
        other = self._homeserver.create_room([self._server.name], staged=True)
        self._homeserver.say_malformed(room)
        for _ in range(FLOOD):
            self._homeserver.say(room)
        await trio.sleep(MINUTE / 4)
        self._server.mood = Mood((Mode.SLOW,))
        self._operator.free_rooms()
        for _ in range(FLOOD // 4):
            self._homeserver.say(room)
            self._homeserver.say(other)
            await trio.sleep(1)
        await trio.sleep(2 * MINUTE)
        self._server.mood = WELL
        await self._try_now()

    # --- the rest ---------------------------------------------------------------------------------

    async def _leave_and_come_back(self) -> None:
        room, user = self._stage(), f"@first:{self._server.name}"
        for membership in ("leave", "join"):
            self._homeserver.set_membership(room, user, user, membership)
            await trio.sleep(1)

    async def _redact(self) -> None:
        self._homeserver.say(self._stage())
        await trio.sleep(1)
        self._homeserver.redact(self._stage())

    async def _another_server_speaks(self) -> None:
        """Behind a large gap the newest event is of another server."""
        server, other = self._server.name, self._world.servers[1].name
        room = self._homeserver.create_room([server, other], staged=True)
        await self._fall_far_behind(room, f"@first:{other}")

    async def _ban_in_partial_state(self) -> None:
        """The same, and the list of the room's servers is of before the server was banned."""
        server, other = self._server.name, self._world.servers[1].name
        room = self._homeserver.create_room([server, other], staged=True)
        observed = self._world.observed
        observed.partial[room.room_id] = frozenset({server, other})
        try:
            await self._fall_far_behind(room, f"@first:{other}", ban=True)
            observed.counts["bans in partial state"] += 1
        finally:
            del observed.partial[room.room_id]

    async def _fall_far_behind(self, room: Room, other: str, *, ban: bool = False) -> None:
        await trio.sleep(MINUTE / 4)
        self._server.mood = Mood((Mode.FAILING,))
        self._homeserver.say(room)
        await trio.sleep(MINUTE / 4)
        for _ in range(GAP_EVENTS + 5):
            self._homeserver.say(room)
        if ban:
            self._homeserver.evict(room, self._server.name, "ban")
        await trio.sleep(MINUTE / 4)
        self._troubles.restart()
        await trio.sleep(2 * MINUTE)
        # The store is not told of each.
        while not self._homeserver.say(room, other).rows:
            pass
        await trio.sleep(1)
        self._server.mood = WELL
        await self._try_now()

    async def _talk_in_a_locked_room(self) -> None:
        room = self._stage()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._troubles.lock_room, room.room_id, 2 * MINUTE)
            # By then its rows are locked, too.
            await trio.sleep(1.5 * MINUTE)
            self._homeserver.say(room)

    async def _fail_over(self) -> None:
        """The next commits are lost: they are of new events."""
        self._troubles.fail_over()
        for _ in range(5):
            self._homeserver.say(self._stage())
            await trio.sleep(5)

    async def _fill_disk(self) -> None:
        life = self._troubles.life()
        if life is not None:
            await fill_ledger_disk(self._world.observed, life, 20.0)
