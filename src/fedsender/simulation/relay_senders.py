"""`fedsender simulate --relay --servers N`: whole senders behind a relay, and everything checked.

Two shards, each a daemon with stores of its own, follow one relay, beside consumers that only
remember. All that the simulation does to a sender is done to both, and all that it does to a relay
to the relay; the invariants of both hold, and what the homeserver said reaches every server.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from fedsender.config import Config, from_values
from fedsender.simulation import MEMORY_DISK
from fedsender.simulation.course import Course
from fedsender.simulation.evidence import Evidence, Violation, log_goes_to
from fedsender.simulation.lives import SPEAKER
from fedsender.simulation.relay_books import RelayBooks
from fedsender.simulation.relay_consumer import Manners, SimulatedConsumer
from fedsender.simulation.relay_front import DOOR, RelayFront
from fedsender.simulation.relay_station import RelayStation
from fedsender.simulation.relay_world import SETTINGS
from fedsender.simulation.report import in_words
from fedsender.simulation.sites import make_site
from fedsender.simulation.world import ORIGIN, Size, configuration, found, people
from fedsender.testing.clock import derived, run_virtually
from fedsender.testing.network import Internet

SHARDS: Final = ("sender-0", "sender-1")
SERVERS: Final = 12
DAYS: Final = 0.15
RELAY: Final[Mapping[str, object]] = {
    **SETTINGS,
    "log_cap": 2 * 2**20,
    "disk_reserve": 512 * 1024,
}
CONSUMERS: Final[Mapping[str, Manners]] = {
    "slow": Manners(slow_s=8.0, away_s=40.0),
    "long-away": Manners(lives_s=300.0, away_s=1500.0),
}
AT_LEAST_ONCE: Final = (
    *("crashes", "restores", "PDUs: live", "PDUs: catch_up", "to-device messages", "quarantined"),
    *("relay: crashes", "relay: snapshots loaded", "relay: senders' full syncs", "spills"),
)


@dataclass(frozen=True, slots=True)
class SendersReport:
    """One run; the counts are those of both shards together, and those of the relay."""

    seed: int
    servers: int
    days: float
    counts: Counter[str]
    violations: tuple[Violation, ...]
    trace: str

    @property
    def passed(self) -> bool:
        """Every invariant held, and the run was not too tame."""
        return not self.violations and not self.too_tame()

    def too_tame(self) -> list[str]:
        """What there was too little of, in words."""
        return [f"no {name}" for name in AT_LEAST_ONCE if not self.counts[name]]

    def text(self) -> str:
        """For people."""
        return in_words(
            self,
            f"senders behind a relay, seed {self.seed}: {self.servers} servers, {self.days:g} days",
            trace=self.trace,
            again=f"--relay --seed {self.seed} --servers {self.servers} --days {self.days:g}",
        )


def simulate_senders(seed: int, servers: int = SERVERS, days: float = DAYS) -> SendersReport:
    """Run one world. Not from within trio."""
    size = Size(seed, servers, days)
    where = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fedsender-", dir=where) as directory:
        return run_virtually(seed, lambda: _run(size, Path(directory)))


def run_senders_simulation(
    seed: int, servers: int, days: float = DAYS, *, say: Callable[[str], object] = print
) -> int:
    """Run one world and say how it went; 0 if every invariant held and it was not too tame."""
    report = simulate_senders(seed, servers, days)
    say(report.text())
    return 0 if report.passed else 1


async def _run(size: Size, directory: Path) -> SendersReport:
    books = RelayBooks()
    async with trio.open_nursery() as nursery:
        world = SendersWorld(size, directory, books, nursery)
        with _logging_to(books, [shard.evidence for shard in world.shards]):
            await world.run()
        nursery.cancel_scope.cancel()
    counts: Counter[str] = Counter()
    for shard in world.shards:
        counts.update(shard.evidence.counts)
    counts["events"] = len(world.shards[0].homeserver.steps)
    counts.update({f"relay: {name}": count for name, count in books.counts.items()})
    broken = [each for shard in world.shards for each in shard.evidence.violations]
    return SendersReport(
        size.seed,
        size.servers,
        size.days,
        counts,
        (*books.violations, *broken),
        books.trace.digest(),
    )


class SendersWorld:
    """The relay, what is before it, and what is behind it.

    Attributes:
        shards: one world for each sender; the first also has what happens at the homeserver.
    """

    def __init__(
        self, size: Size, directory: Path, books: RelayBooks, nursery: trio.Nursery
    ) -> None:
        seed = size.seed
        relay = {"server_name": ORIGIN, "signing_key": "key", "relay": dict(RELAY)}
        home = directory / "relay"
        home.mkdir()
        config = from_values(relay, directory=home)
        self._books = books
        self._station = RelayStation(seed, config, home, books, goes_back=False)
        sites = {index: make_site(index) for index in range(size.servers)}
        origins = found(size, [site.name for site in sites.values()], dense=True)
        front = RelayFront(origins.homeserver, self._station, books, derived(seed, "front"))
        self._front = front
        internet = Internet(derived(seed, "internet"), nursery)
        internet.doors[DOOR] = front
        self.shards = []
        for number, name in enumerate(SHARDS):
            configure = partial(_configuration, name)
            place = directory / name
            place.mkdir()
            is_mine = configure(place).handles
            world = people(
                replace(size, seed=seed + number * 1_000_003),
                place,
                origins,
                {index: site for index, site in sites.items() if is_mine(site.name)},
                internet,
                front,
            )
            world.evidence.trace = books.trace
            self.shards.append(
                replace(
                    world,
                    configure=configure,
                    leads=number == 0,
                    post=front.post,
                    long_absences=True,
                )
            )
        self._consumers = [
            SimulatedConsumer(
                name, books, self._station, derived(seed, name), manners, home, ORIGIN
            )
            for name, manners in CONSUMERS.items()
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
                    async with trio.open_nursery() as courses:
                        for shard in self.shards:
                            courses.start_soon(Course(shard).run)
                    troubles.cancel()
            self._books.check_answered()
            for shard in self.shards:
                self._front.check_messages(shard.evidence)
            nursery.cancel_scope.cancel()

    async def _trouble(self) -> None:
        """Until all are healed."""
        with trio.move_on_after(self.shards[0].size.seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._station.trouble)
                for consumer in self._consumers:
                    nursery.start_soon(consumer.trouble)
        for consumer in self._consumers:
            consumer.calm()


def _configuration(name: str, directory: Path) -> Config:
    """One shard's, with the small bounds of the other simulation."""
    return configuration(
        directory,
        instance_name=name,
        homeserver={
            "database": "homeserver.sqlite3",
            "federation_sender_instances": list(SHARDS),
        },
        feed={"kind": "relay", "relay": {"address": f"unix:{DOOR}", "directory": "snapshot"}},
    )


def _logging_to(
    books: RelayBooks, all_evidence: Sequence[Evidence]
) -> AbstractContextManager[None]:
    """Let no log line out, look for secrets in each (I10), and take what is a bug for one."""

    def take(_logger: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        name, speaker = event.get("event"), SPEAKER.get()
        if speaker is not None and not speaker.alive:
            raise structlog.DropEvent
        evidence = speaker or all_evidence[0]
        evidence.check_secrets("a log line", repr(event).encode())
        books.trace.note("log", name, event.get("destination", event.get("consumer", "")))
        books.counts["senders' full syncs"] += speaker is not None and (
            name == "relay_snapshot_loaded"
        )
        if event.get("exc_info") or (method == "critical" and speaker is not None):
            text = structlog.processors.format_exc_info(None, "", dict(event))
            evidence.fail("bug", f"{name}: {text.get('exception', '')[-500:]}")
        raise structlog.DropEvent

    return log_goes_to(take)
