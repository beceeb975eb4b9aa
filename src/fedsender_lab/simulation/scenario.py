"""The course of a world: the tasks in it, all at once, until it is healed and judged."""

import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import trio

from fedsender.waiting import Watermark
from fedsender_lab.simulation.behaviours import (
    HONEST,
    HOUR,
    MINUTE,
    UNHURRIED,
    Mode,
    Mood,
    life_of,
)
from fedsender_lab.simulation.checks import LOOKS_S, PER_SERVER_S, FinalChecks, StartCheck
from fedsender_lab.simulation.coverage import BEGINS, Coverage, Troubles
from fedsender_lab.simulation.daemon_life import Life
from fedsender_lab.simulation.disasters import (
    Backup,
    Operator,
    Replica,
    fill_ledger_disk,
    lock_room,
)
from fedsender_lab.simulation.receiver import RemoteServer, move
from fedsender_lab.simulation.world import World
from fedsender_lab.testing.clock import derived
from fedsender_lab.testing.rooms import LARGE_TEXT

EVENTS_PER_DAY = 1_500
CALM_AFTER_S = MINUTE
"""After a start, or once its database is back, the daemon is well again."""
FAIR_S = {HONEST.name: 8.0, UNHURRIED.name: 32.0}
"""In a hostile world 99 of 100 PDUs reach honest servers, and are answered, within this, beside the
time that those take for it: nobody waits for longer than 30 s, and 2 s are for the way."""
OWN_TIMERS_S = HOUR
"""In a healed world no server is woken for so long ..."""
PATIENCE_S = 3 * HOUR
"""... and then everything must have arrived within this."""
LOOK_EVERY_S = 5 * MINUTE
YEAR = 365 * 24 * HOUR
ABSENCE_S = (2.0, 60.0)
LONG_ABSENCE_S = (20 * MINUTE, 50 * MINUTE)


class Scenario:
    """Sets a world in motion."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._observed = world.observed
        self._life: Life | None = None
        self._lives = 0
        self._over = False
        self._opened = Watermark()
        self._nursery: trio.Nursery | None = None
        self._rng = derived(world.size.seed, "course")
        self._operator = Operator(
            world.observed,
            derived(world.size.seed, "operator"),
            lambda: self._life,
            world.front.post,
        )
        self._backup = Backup(
            world.directory,
            world.observed,
            world.commits,
            self._operator,
            derived(world.size.seed, "backup"),
        )
        self._replica = Replica(
            world.directory,
            world.observed,
            world.commits,
            derived(world.size.seed, "replica"),
        )
        world.plan.orderly = self._restart_in_order
        world.observed.on_begun_anew = self._has_begun_anew
        world.wire.at_point = self._at_wire_point

    async def run(self) -> None:
        """From the first room to the last check."""
        world = self._world
        async with trio.open_nursery() as self._nursery:
            nursery = self._nursery
            await nursery.start(world.front.run)
            nursery.start_soon(self._keep_daemon_alive)
            await self._found_rooms()
            with trio.move_on_after(world.size.seconds):
                await self._let_live()
            self._judge_fairness()
            await self._heal()
            await self._wait_until_all_is_well()
            FinalChecks(self._observed).judge()
            await self._stop_for_good()
            nursery.cancel_scope.cancel()

    # --- the daemon -------------------------------------------------------------------------------

    async def _keep_daemon_alive(self) -> None:
        directory = self._world.directory / "life-1"
        directory.mkdir()
        key = directory / "signing.key"
        key.write_text(self._world.key_file)
        key.chmod(0o600)
        while not self._over:
            life = self._life = self._next_life(directory)
            await life.live()
            self._life = None
            self._replica.forget()
            self._observed.counts["spills"] += life.spills()
            directory = life.image if life.crashed else directory
            long = self._world.long_absences and self._rng.random() < 0.3
            await trio.sleep(self._rng.uniform(*(LONG_ABSENCE_S if long else ABSENCE_S)))
            if self._backup.wanted:
                self._backup.put_back(directory)

    def _next_life(self, directory: Path) -> Life:
        self._lives += 1
        world = self._world
        return Life(
            self._lives,
            directory,
            world.configure(directory),
            seed=world.size.seed,
            internet=world.internet,
            observed=world.observed,
            checks=world.commits,
            wire=world.wire,
            plan=world.plan,
            opened=self._has_opened,
            replica=self._replica.committed,
        )

    def _judge_fairness(self) -> None:
        """Whether honest servers noticed the hostile ones, when nothing else ailed the daemon."""
        for name, fair_s in FAIR_S.items():
            latencies = sorted(self._observed.latencies[name])
            self._observed.counts[f"PDUs to {name} servers in calm times"] = len(latencies)
            if latencies:
                p99 = latencies[int(len(latencies) * 0.99)]
                self._observed.counts[f"p99 to {name} servers in ms"] = round(p99 * 1000)
                if p99 > fair_s:
                    self._observed.fail("fairness", f"p99 to {name} servers is {p99:.2f} s")

    def _has_opened(self, life: Life) -> None:
        self._opened.advance(life.number)
        self._world.front.opened(life)
        self._observed.clock_was_set = False
        self._has_begun_anew()

    def _has_begun_anew(self) -> None:
        self._observed.calm_since = trio.current_time() + CALM_AFTER_S
        assert self._nursery is not None
        # A life that begins anew waits by the steady clock that it has had from its start, and what
        # is due is found by the wall clock here.
        if not self._observed.clock_was_set:
            self._nursery.start_soon(self._watch_start, StartCheck(self._observed))

    async def _watch_start(self, check: StartCheck) -> None:
        """Until something comes in between that excuses it (I8)."""
        life, started = self._life, trio.current_time()
        more_s = PER_SERVER_S * len(self._world.servers)
        for after_s in (*LOOKS_S[:-1], LOOKS_S[-1] + more_s):
            await trio.sleep_until(started + after_s)
            if life is None or life is not self._life or life.crashed or life.draining:
                return
            if life.daemon is None or life.away or life.away_at >= started:
                return
            if self._observed.failover is not None or self._observed.anew_at > started:
                return
            check.look(life.daemon)

    def _restart_in_order(self) -> None:
        if self._life is not None:
            self._observed.counts["orderly restarts"] += 1
            self._life.stop()

    def _at_wire_point(self, point: str) -> None:
        if point == "request arrived":
            self._world.plan.transaction()
        life = self._life
        if life is not None and not life.crashed and self._world.plan.strikes(point):
            life.crash(point)

    async def _stop_for_good(self) -> None:
        self._over = True
        life = self._life
        if life is not None:
            life.stop()
            await life.ended.wait()

    # --- what goes on -----------------------------------------------------------------------------

    async def _found_rooms(self) -> None:
        world = self._world
        names = [server.name for server in world.servers]
        for _ in range(max(4, len(names) // 3)):
            size = min(len(names), self._rng.choice((1, 2, 3, 5, 8, 8, 13, 21, 34)))
            world.homeserver.create_room(self._rng.sample(names, size))
            # Events of room version 1 are named by the millisecond.
            await trio.sleep(1)

    async def _let_live(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_at_memory)
            for index, server in enumerate(self._world.servers):
                nursery.start_soon(self._live_of, index, server)
            seconds = self._world.size.seconds
            operator = self._operator
            if not self._world.size.hostile:
                # Who is paused, and made ill by the programme, would not be reached in time.
                nursery.start_soon(self._now_and_then, "operator", 20 * MINUTE, operator.act)
                nursery.start_soon(self._coverage().run)
                fall_behind = self._replica.fall_behind
                nursery.start_soon(self._now_and_then, "failover", seconds / 8, fall_behind)
            else:
                nursery.start_soon(self._provoke)
            for name, every_s, act in (
                ("clock", 10 * MINUTE, self._set_clock),
                ("server up", 15 * MINUTE, self._say_server_up),
                ("restart", seconds / 3, self._restart_in_order),
                ("malformed", seconds / 2, self._say_malformed),
            ):
                nursery.start_soon(self._now_and_then, name, every_s, act)
            nursery.start_soon(self._talk)
            nursery.start_soon(self._trouble_homeserver, seconds / 4)
            nursery.start_soon(self._write_to_devices)
            nursery.start_soon(self._lock_rooms, seconds / 8)
            nursery.start_soon(self._trouble_disk, seconds / 6)
            nursery.start_soon(self._back_up_and_restore, seconds)

    async def _provoke(self) -> None:
        """Have hostile servers attack that chance has sent nothing by now."""
        await trio.sleep(BEGINS * self._world.size.seconds)
        hostile = [each for each in self._world.servers if each.character.attack is not None]
        if quiet := [server.name for server in hostile if not server.attacks]:
            self._world.homeserver.say(self._world.homeserver.create_room(quiet, staged=True))

    def _coverage(self) -> Coverage:
        """Run the happenings that chance has left out by then."""
        troubles = Troubles(
            life=lambda: self._life,
            restart=self._restart_in_order,
            fail_database=self._fail_database,
            fail_homeserver=self._fail_homeserver,
            lock_room=self._lock_room,
            fail_over=self._replica.fall_behind,
        )
        return Coverage(self._world, self._operator, troubles)

    async def _now_and_then(self, name: str, every_s: float, act: Callable[[], None]) -> None:
        rng = derived(self._world.size.seed, "now and then", name)
        while True:
            await trio.sleep(rng.uniform(0.2, 1.4) * every_s)
            act()

    async def _talk(self) -> None:
        """Events, one by one, in bursts, and long silences."""
        homeserver, rng = self._world.homeserver, derived(self._world.size.seed, "talk")
        pause_s = 86_400 / EVENTS_PER_DAY
        while True:
            chance = rng.random()
            if chance < 0.01:
                await trio.sleep(rng.uniform(5 * MINUTE, self._world.size.seconds / 10))
            elif chance < 0.035:
                await self._burst(rng)
            else:
                homeserver.act()
            await trio.sleep(rng.expovariate(1 / pause_s))

    async def _burst(self, rng: Random) -> None:
        room, large = rng.choice(self._world.homeserver.lively), rng.random() < 0.1
        for _ in range(rng.randint(5, 150)):
            if large:
                self._world.homeserver.say(room, size=rng.randint(5_000, LARGE_TEXT))
            else:
                self._world.homeserver.say_something(room)
            if rng.random() < 0.2:
                await trio.sleep(rng.uniform(0, 1))
        await trio.sleep(1)
        self._look_once()

    async def _write_to_devices(self) -> None:
        rng = derived(self._world.size.seed, "to-device")
        while True:
            await trio.sleep(rng.expovariate(1 / (5 * MINUTE)))
            await self._operator.send_to_device()

    def _say_malformed(self) -> None:
        self._observed.counts["malformed events"] += 1
        self._world.homeserver.say_malformed(self._rng.choice(self._world.homeserver.lively))

    def _say_server_up(self) -> None:
        server = self._rng.choice(self._world.servers).name
        self._observed.views.of[server].wakes.append((trio.current_time(), False))
        self._world.front.server_up(server)

    async def _live_of(self, index: int, server: RemoteServer) -> None:
        """One server's moods, one after the other."""
        world, moves = self._world, 0
        rng = derived(world.size.seed, "moods", index)
        longest_s = max(world.size.seconds / 2, HOUR / 2)
        for mood, seconds in life_of(server.character, rng, longest_s):
            self._observed.trace.note("mood", server.name, mood)
            was, server.mood = server.mood, mood
            self._set_dns(server, mood)
            if server.character.moves and was != mood and mood.modes[0] is Mode.WELL:
                moves += 1
                move(server, world.internet, index, moves)
            await trio.sleep(seconds)

    def _set_dns(self, server: RemoteServer, mood: Mood) -> None:
        how = {Mode.NO_DNS: "gone", Mode.DNS_SILENT: "silent"}.get(mood.modes[0])
        for name in server.site.targets:
            self._world.internet.unresolvable.pop(name, None)
            if how is not None:
                self._world.internet.unresolvable[name] = how

    async def _trouble_homeserver(self, every_s: float) -> None:
        rng = derived(self._world.size.seed, "homeserver restarts")
        while True:
            await trio.sleep(rng.uniform(0.2, 1.2) * every_s)
            await self._fail_homeserver(rng.uniform(1, 10 * MINUTE))

    async def _fail_homeserver(self, seconds: float) -> None:
        self._observed.counts["homeserver restarts"] += 1
        self._world.front.go_down()
        try:
            await trio.sleep(seconds)
        finally:
            self._world.front.up = True

    async def _back_up_and_restore(self, seconds: float) -> None:
        """Once: a backup in the middle of a catch-up, and much later the way back to it."""
        rng = derived(self._world.size.seed, "restore")
        await trio.sleep(rng.uniform(0.1, 0.3) * seconds)
        await self._backup.take()
        await trio.sleep(rng.uniform(0.05, 0.3) * seconds)
        self._backup.wanted = True
        if self._life is not None and rng.random() < 0.5:
            self._life.crash("before a restore")
        elif self._life is not None:
            self._life.stop()

    async def _trouble_disk(self, every_s: float) -> None:
        """The database, or the ledger's disk, takes nothing for a while."""
        rng = derived(self._world.size.seed, "disk")
        while True:
            await trio.sleep(rng.uniform(0.2, 1.2) * every_s)
            life, seconds = self._life, rng.uniform(1, 3 * MINUTE)
            if life is None:
                continue
            if rng.random() < 0.5:
                await fill_ledger_disk(self._observed, life, seconds)
            else:
                await self._fail_database(seconds)

    async def _lock_rooms(self, every_s: float) -> None:
        """The homeserver purges a room now and then, in vain."""
        rng = derived(self._world.size.seed, "locks")
        while True:
            await trio.sleep(rng.uniform(0.2, 1.2) * every_s)
            room = rng.choice(self._world.homeserver.lively)
            await self._lock_room(room.room_id, rng.uniform(1, 15 * MINUTE))

    async def _lock_room(self, room_id: str, seconds: float) -> None:
        await lock_room(self._observed, lambda: self._life, room_id, seconds)

    async def _fail_database(self, seconds: float) -> None:
        life = self._life
        if life is None:
            return
        self._observed.counts["database outages"] += 1
        life.away = True
        self._observed.calm_since = math.inf
        try:
            await trio.sleep(seconds)
        finally:
            life.away = False
            self._observed.calm_since = trio.current_time() + CALM_AFTER_S

    async def _look_at_memory(self) -> None:
        while True:
            await trio.sleep(LOOK_EVERY_S)
            self._look_once()

    def _set_clock(self) -> None:
        """Set the daemon's wall clock ahead or back: no wait may become longer."""
        step_s = self._rng.choice((20 * MINUTE, HOUR, YEAR)) * self._rng.choice((-1, 1))
        self._world.wire.clock_set(round(step_s * 1000))

    def _look_once(self) -> None:
        if self._life is not None and self._life.daemon is not None:
            self._world.memory.look(self._life.daemon)
            self._world.waits.look(self._life.daemon)
        self._replica.check(self._life)

    # --- how it ends ------------------------------------------------------------------------------

    async def _heal(self) -> None:
        """All are well, and the daemon dies once more: it must go on without a new event (I8)."""
        world, observed = self._world, self._observed
        observed.trace.note("healed")
        observed.counts["virtual hours"] = round(trio.current_time() / HOUR)
        observed.disk_full = False
        for server in world.servers:
            server.heal()
        world.plan.enabled = False
        world.front.heal()
        if self._life is not None:
            self._life.crash("healed")
        await self._opened.wait_past(self._lives)
        self._operator.resume()

    async def _wait_until_all_is_well(self) -> None:
        ending = FinalChecks(self._observed)
        started = trio.current_time()
        while trio.current_time() < started + PATIENCE_S:
            await trio.sleep(MINUTE)
            self._look_once()
            if not any(ending.missing()) and not ending.messages_waiting():
                return
            if trio.current_time() > started + OWN_TIMERS_S:
                self._operator.wake_all(list(self._observed.views.of))
                await trio.sleep(10 * MINUTE)
