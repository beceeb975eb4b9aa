"""`fedsender simulate --relay`: a relay, its homeserver and its senders on the virtual clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from fedsender.config import from_values
from fedsender.embedded.facts import BadRow, Full, KeyReused
from fedsender.embedded.intake import Append, Busy, ReservationGone, Waiting
from fedsender.streams import Json
from fedsender_lab.simulation.daemon_life import Away
from fedsender_lab.simulation.observations import Violation, log_goes_to, traceback_in
from fedsender_lab.simulation.relay_checks import RelayViews, name_of
from fedsender_lab.simulation.relay_consumer import ConsumerBehaviour, SimulatedConsumer
from fedsender_lab.simulation.relay_station import RelayStation
from fedsender_lab.simulation.report import Report
from fedsender_lab.simulation.world import run_world
from fedsender_lab.testing.appends import append_of
from fedsender_lab.testing.clock import derived
from fedsender_relay.daemon import RelayDaemon

SERVER = "hs.example"
ROOMS = 6
SERVERS = 20
WRITERS = 3
EVERY_S = 12.0
"""Between two records of a writer, on average."""
CALL_S = 30.0
"""A request is given up after so long."""


class RelayHomeserver:
    """The relay's homeserver: several writers that append, and send again after an error.

    Attributes:
        quiet: nothing new is written any more; writes under way go on.
        busy: records that are not yet answered.
    """

    def __init__(self, station: RelayStation, views: RelayViews, rng: random.Random) -> None:
        self.quiet = False
        self.busy = 0
        self._station = station
        self._views = views
        self._random = rng
        self._number = 0

    async def run(self) -> None:
        """Write, until cancelled."""
        async with trio.open_nursery() as nursery:
            for number in range(WRITERS):
                nursery.start_soon(self._write, f"writer-{number}")

    async def _write(self, writer: str) -> None:
        while True:
            await trio.sleep(self._random.expovariate(1 / EVERY_S))
            if self.quiet:
                continue
            rows = self._record()
            record = name_of(rows)
            self._views.send_in(record, rows)
            self.busy += 1
            try:
                await self._tell(writer, record, rows)
                if self._random.random() < 0.1:
                    self._views.counts["repetitions"] += 1
                    await self._tell(writer, record, rows)
            finally:
                self.busy -= 1

    def _record(self) -> Sequence[Json]:
        self._number += 1
        name, chance = f"$e{self._number}", self._random.random()
        if chance < 0.1:
            body = ["to_device", self._server(), f"m{self._number}", {"n": self._number}]
            return [["edu", body]]
        room = f"!{self._random.randrange(ROOMS)}:{SERVER}"
        size = 16_000 if self._random.random() < 0.2 else 200
        event = {
            "type": "m.room.message",
            "room_id": room,
            "sender": f"@a:{SERVER}",
            "prev_events": ["$p"],
            "content": {"n": self._number, "body": "x" * size},
        }
        about: dict[str, Json] = {"room_version": "11", "plus": [], "minus": []}
        if 0.35 < chance < 0.45:
            about["plus" if chance < 0.4 else "minus"] = [self._server()]
        rows: list[Json] = [["pdu", [room, name, event, about]]]
        if chance < 0.25:
            rows.append(["hosts", [room, [self._server()], []]])
        elif chance < 0.35:
            rows.append(["hosts", [room, [], [self._server()]]])
        elif chance > 0.97:
            here = self._random.sample(range(SERVERS), 5)
            rows.append(["servers", [room, [f"s{number}.example" for number in here]]])
        return rows

    def _server(self) -> str:
        return f"s{self._random.randrange(SERVERS)}.example"

    async def _tell(self, writer: str, record: str, rows: Sequence[Json]) -> None:
        """Until it is answered 200."""
        reserves, place = self._random.random() < 0.3, None
        while True:
            # A connection may break in the middle of anything.
            patience_s = CALL_S if self._random.random() < 0.95 else self._random.random() * 0.1
            with trio.move_on_after(patience_s) as call:
                if reserves and place is None:
                    place = self._reserve(writer)
                    await trio.sleep(self._random.random() * 3)
                if await self._append(append_of(record, rows, place)):
                    return
                place = place if reserves and self._random.random() < 0.8 else None
            if call.cancelled_caught:
                self._views.counts["requests broken off"] += 1
            await trio.sleep(0.1 + self._random.random() * 5)

    def _reserve(self, writer: str) -> str | None:
        relay = self._station.relay
        with suppress(Busy):
            return None if relay is None else relay.intake.reserve(writer, 1)[0]
        return None

    async def _append(self, append: Append) -> bool:
        """Whether it was answered 200, and the answer came through."""

        async def ask(relay: RelayDaemon) -> tuple[str, int | None]:
            (token,) = await relay.intake.append([append])
            return relay.log.epoch, token

        try:
            epoch, token = await self._station.ask(ask)
        except ReservationGone:
            # The place is given up, and the next try has another one or none.
            self._views.counts["reservations gone"] += 1
            return await self._append(append_of(append.id, append.rows))
        except (Full, Busy, Waiting, Away) as refused:
            self._views.counts[f"answered {type(refused).__name__}"] += 1
            return False
        except (KeyReused, BadRow) as wrong:
            self._views.fail("once", f"{append.id} is refused: {wrong}")
            return True
        assert token is not None
        if self._random.random() < 0.1:
            self._views.counts["answers lost"] += 1
            return False
        self._views.answer(epoch, token, append.id)
        self._views.counts["answered 200"] += 1
        return True


HEALED_S: Final = 4 * 3600.0
"""All must be level so long after the world was healed."""
SETTINGS: Final[Mapping[str, object]] = {
    "keep_min": 30,
    "log_cap": 256 * 1024,
    "disk_reserve": 64 * 1024,
    "snapshot_every": 300,
}
CONSUMERS: Final[Mapping[str, ConsumerBehaviour]] = {
    "steady": ConsumerBehaviour(),
    "slow": ConsumerBehaviour(slow_s=8.0, away_s=40.0),
    "often-away": ConsumerBehaviour(lives_s=200.0, away_s=500.0),
    "long-away": ConsumerBehaviour(lives_s=300.0, away_s=1500.0),
    "restored": ConsumerBehaviour(lives_s=200.0, away_s=60.0, restores=0.4),
    "away": ConsumerBehaviour(lives_s=300.0, away_s=300.0),
}


class RelayWorld:
    """A relay, its homeserver and its consumers, and the checks over all of them."""

    def __init__(self, seed: int, home: Path) -> None:
        self.views = RelayViews()
        config = from_values(
            {"server_name": SERVER, "signing_key": "key", "relay": dict(SETTINGS)}, directory=home
        )
        self._station = RelayStation(seed, config, home, self.views)
        self._homeserver = RelayHomeserver(self._station, self.views, derived(seed, "homeserver"))
        self._consumers = [
            SimulatedConsumer(name, self.views, self._station, derived(seed, name), behaviour, home)
            for name, behaviour in CONSUMERS.items()
        ]

    async def run(self, days: float) -> None:
        """Trouble for so many days, then none, and all must be level."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._station.run)
            nursery.start_soon(self._homeserver.run)
            for consumer in self._consumers:
                nursery.start_soon(consumer.run)
            with trio.move_on_after(days * 86_400):
                async with trio.open_nursery() as troubles:
                    troubles.start_soon(self._station.trouble)
                    for consumer in self._consumers:
                        troubles.start_soon(consumer.trouble)
            await self._heal()
            nursery.cancel_scope.cancel()

    async def _heal(self) -> None:
        self._station.heal()
        self._homeserver.quiet = True
        for consumer in self._consumers:
            consumer.calm()
        with trio.move_on_after(HEALED_S):
            while not self._level():  # noqa: ASYNC110
                await trio.sleep(5)
            self.views.check_answered()
            self.views.check_messages()
            return
        relay = self._station.relay
        stands = {one.store.name: one.store.held for one in self._consumers}
        head = None if relay is None else (relay.log.epoch, relay.log.first, relay.log.head)
        self.views.fail("level", f"{self._homeserver.busy} unanswered; log {head}; {stands}")

    def _level(self) -> bool:
        relay = self._station.relay
        if relay is None or self._homeserver.busy:
            return False
        return all(one.level_at(relay.log.epoch, relay.log.head) for one in self._consumers)


DAYS: Final = 0.1
PER_HOUR: Final[Mapping[str, float]] = {
    "answered 200": 300,
    "crashes": 10,
    "consumer crashes": 10,
    "records followed": 500,
    "records deleted": 300,
    "snapshots loaded": 1,
    "links cut": 10,
    "answers lost": 20,
    "requests broken off": 10,
    "links frozen": 10,
    "consumer disk errors": 10,
    "consumer disks full": 10,
}
"""So many, at least; or the run says nothing."""
AT_LEAST_ONCE: Final = (
    *("full disks", "disk errors", "restores", "orderly stops", "repetitions", "older copies"),
    *("cuts for want of room", "consumers seen lost", "reservations gone"),
    *("snapshots spoiled: bits flipped", "bits flipped: fetched"),
)


def _lacking(counts: Counter[str], hours: float) -> Iterator[str]:
    """The happenings that were too few in so many hours."""
    for name, wanted in PER_HOUR.items():
        if counts[name] < wanted * hours:
            yield f"{counts[name]} {name}, {wanted * hours:.0f} are wanted"
    yield from (f"no {name}" for name in AT_LEAST_ONCE if not counts[name])


def simulate_relay(seed: int, days: float = DAYS, *, stop_at: str | None = None) -> Report:
    """Run one world; a violation of the invariant `stop_at` ends it. Not from within trio."""

    async def run(home: Path) -> Report:
        world = RelayWorld(seed, home)
        views = world.views
        with trio.CancelScope() as scope, log_goes_to(partial(_hear, views, home)):

            def judge(violation: Violation) -> None:
                if violation.invariant == stop_at:
                    scope.cancel()

            views.on_violation = judge
            await world.run(days)
        return Report(
            f"relay, seed {seed}: {days:g} days",
            f"--relay --seed {seed} --days {days:g}",
            views.counts,
            tuple(views.violations),
            tuple(_lacking(views.counts, days * 24)),
            views.trace,
        )

    return run_world(seed, run)


def _hear(views: RelayViews, home: Path, level: str, event: Mapping[str, Any]) -> None:
    """Take a log line that should never be for a bug."""
    name = event.get("event")
    # The directory has another name in each run.
    reason = str(event.get("reason", "")).replace(f"{home}/", "")
    views.trace.note("log", name, event.get("consumer", ""), reason)
    if event.get("exc_info"):
        views.fail("bug", f"{name}: {traceback_in(event)[-1500:]}")
    if name == "relay_resync" and level == "critical" and not views.counts["older copies"]:
        views.fail("ahead", f"a consumer is ahead of its own history: {event}")
