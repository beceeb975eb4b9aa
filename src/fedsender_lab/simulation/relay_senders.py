"""`fedsender simulate --relay --servers N`: a whole sender behind a relay, and everything checked.

A daemon follows the relay, beside consumers that only remember. All that the simulation does to a
sender is done to it, and all that it does to a relay to the relay; the invariants of both hold, and
the homeserver's events reach every server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import trio

from fedsender.config import Config, from_values
from fedsender.embedded.intake import Intake
from fedsender_lab.simulation.daemon_life import SPEAKER, Life
from fedsender_lab.simulation.observations import Observations, log_goes_to, traceback_in
from fedsender_lab.simulation.outbox import Outbox
from fedsender_lab.simulation.receiver import make_site
from fedsender_lab.simulation.relay import SETTINGS
from fedsender_lab.simulation.relay_checks import RelayViews
from fedsender_lab.simulation.relay_consumer import ConsumerBehaviour, SimulatedConsumer
from fedsender_lab.simulation.relay_station import RelayStation
from fedsender_lab.simulation.report import Report
from fedsender_lab.simulation.scenario import Scenario
from fedsender_lab.simulation.world import ORIGIN, Size, configuration, found, people, run_world
from fedsender_lab.testing.clock import derived
from fedsender_lab.testing.network import Internet, MemoryStream
from fedsender_lab.testing.rooms import Homeserver

DOOR: Final = Path("/run/relay.sock")
T = TypeVar("T")


class RelayFront(Outbox):
    """The homeserver's way to its sender; also the door of the relay, for that one."""

    certificate: tuple[str, ...] = ()

    def __init__(
        self, homeserver: Homeserver, station: RelayStation, views: RelayViews, rng: Random
    ) -> None:
        super().__init__(homeserver, self._put, rng, views.counts)
        self._station = station
        self._views = views

    # --- the door ---------------------------------------------------------------------------------

    def knock(self) -> str:
        return "open" if self._station.links.up and self._station.relay else "refused"

    async def converse(self, stream: MemoryStream) -> None:
        try:
            self._station.serve(self._station.links.end(stream))
        except ConnectionRefusedError:
            stream.close()
        await trio.lowlevel.checkpoint()

    # --- the homeserver's side --------------------------------------------------------------------

    async def _put(self, question: Callable[[Intake], Awaitable[T]]) -> T:
        return await self._station.ask(lambda relay: question(relay.intake))

    def opened(self, life: Life) -> None:
        """A sender comes to the relay by itself."""

    def server_up(self, server: str) -> None:
        """A relay has no word for it."""

    def heal(self) -> None:
        self.up = True
        self._station.heal()

    def sending(self, name: str, rows: Sequence[Any]) -> None:
        if name not in self._views.rows:
            self._views.send_in(name, rows)
            happening = self._homeserver.by_id.get(name)
            self._views.audience[name] = () if happening is None else happening.servers

    def answered(self, epoch: str, token: int, name: str) -> None:
        self._views.answer(epoch, token, name)

    def wrong(self, text: str) -> None:
        self._views.fail("token", text)

    # --- at the end -------------------------------------------------------------------------------

    def check_messages(self, observed: Observations) -> None:
        """Each to-device message has reached its server, or stands in quarantine.

        A sender that was restored to before some of them came may have told the relay that it had
        them.
        """
        for token, (name, rows) in enumerate(self._homeserver.records, 1):
            kind, body = rows[0]
            view = observed.views.of.get(body[1]) if kind == "edu" else None
            if view is None or any(low < token <= high for low, high in observed.given_back):
                continue
            if name not in view.messages_answered and name not in view.quarantined:
                observed.fail("lost", f"{view.name} never got {name}, token {token}")


DAYS: Final = 0.15
RELAY: Final[Mapping[str, object]] = {
    **SETTINGS,
    "log_cap": 2 * 2**20,
    "disk_reserve": 512 * 1024,
}
CONSUMERS: Final[Mapping[str, ConsumerBehaviour]] = {
    "slow": ConsumerBehaviour(slow_s=8.0, away_s=40.0),
    "long-away": ConsumerBehaviour(lives_s=300.0, away_s=1500.0),
}
AT_LEAST_ONCE: Final = (
    *("crashes", "restores", "PDUs: live", "PDUs: catch_up", "to-device messages", "quarantined"),
    *("relay: crashes", "relay: snapshots loaded", "relay: senders' full syncs", "spills"),
)


def simulate_senders(seed: int, servers: int, days: float) -> Report:
    """Run one world. Not from within trio."""
    size = Size(seed, servers, days)
    return run_world(seed, lambda directory: _run(size, directory))


async def _run(size: Size, directory: Path) -> Report:
    """The counts are those of the sender, and those of the relay."""
    views = RelayViews()
    async with trio.open_nursery() as nursery:
        world = SendersWorld(size, directory, views, nursery)
        with log_goes_to(partial(_hear, views, world.sender.observed)):
            await world.run()
        nursery.cancel_scope.cancel()
    world.sender.observed.disk.close()
    counts = Counter(world.sender.observed.counts)
    counts["events"] = len(world.sender.homeserver.steps)
    counts.update({f"relay: {name}": count for name, count in views.counts.items()})
    return Report(
        f"a sender behind a relay, seed {size.seed}: {size.servers} servers, {size.days:g} days",
        f"--relay --seed {size.seed} --servers {size.servers} --days {size.days:g}",
        counts,
        (*views.violations, *world.sender.observed.violations),
        tuple(f"no {name}" for name in AT_LEAST_ONCE if not counts[name]),
        views.trace,
    )


class SendersWorld:
    """The relay, its homeserver, and its consumers.

    Attributes:
        sender: the world of the sender, with the homeserver's events.
    """

    def __init__(
        self, size: Size, directory: Path, views: RelayViews, nursery: trio.Nursery
    ) -> None:
        seed = size.seed
        relay = {"server_name": ORIGIN, "signing_key": "key", "relay": dict(RELAY)}
        home = directory / "relay"
        home.mkdir()
        config = from_values(relay, directory=home)
        self._views = views
        self._station = RelayStation(seed, config, home, views, goes_back=False)
        sites = {index: make_site(index) for index in range(size.servers)}
        origins = found(size, [site.name for site in sites.values()], dense=True)
        front = RelayFront(origins.homeserver, self._station, views, derived(seed, "front"))
        self._front = front
        internet = Internet(derived(seed, "internet"), nursery)
        internet.doors[DOOR] = front
        place = directory / "sender"
        place.mkdir()
        world = people(size, place, origins, sites, internet, lambda _: front)
        world.observed.trace = views.trace
        self.sender = replace(world, configure=_configuration, long_absences=True)
        self._consumers = [
            SimulatedConsumer(
                name, views, self._station, derived(seed, name), behaviour, home, ORIGIN
            )
            for name, behaviour in CONSUMERS.items()
        ]

    async def run(self) -> None:
        """All of it, to the end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._station.run)
            for consumer in self._consumers:
                nursery.start_soon(consumer.run)
            with trio.CancelScope() as troubles:
                async with trio.open_nursery() as lives:
                    lives.start_soon(self._trouble)
                    await Scenario(self.sender).run()
                    troubles.cancel()
            self._views.check_answered()
            self._front.check_messages(self.sender.observed)
            nursery.cancel_scope.cancel()

    async def _trouble(self) -> None:
        """Until all are healed."""
        with trio.move_on_after(self.sender.size.seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._station.trouble)
                for consumer in self._consumers:
                    nursery.start_soon(consumer.trouble)
        for consumer in self._consumers:
            consumer.calm()


def _configuration(directory: Path) -> Config:
    """The sender's, with the small bounds of the other simulation."""
    return configuration(
        directory,
        homeserver={"database": "homeserver.sqlite3"},
        feed={"kind": "relay", "relay": {"address": f"unix:{DOOR}", "directory": "snapshot"}},
    )


def _hear(views: RelayViews, observed: Observations, level: str, event: Mapping[str, Any]) -> None:
    """Look for secrets in a log line (I10), and take one that shows a bug for one."""
    name, speaker = event.get("event"), SPEAKER.get()
    if speaker is not None and not speaker.alive:
        return
    observed.check_secrets("a log line", repr(event).encode())
    views.trace.note("log", name, event.get("destination", event.get("consumer", "")))
    views.counts["senders' full syncs"] += speaker is not None and name == "relay_snapshot_loaded"
    if event.get("exc_info") or (level == "critical" and speaker is not None):
        observed.fail("bug", f"{name}: {traceback_in(event)[-500:]}")
