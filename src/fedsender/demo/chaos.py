"""What goes wrong in a chaotic run, and when.

The plot is told in events, not in seconds, so that the same run always has the same shape: a
server that is away for many events of a room (a large gap), one that is away for a few (a small
one), one that is thrown out of a room while it is away, others that answer 429, 500, 401 or
garbage, that fall silent, that are slow, and in the middle one `kill -9` of the daemon.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsender.testing.receiver import (
    DOWN,
    STALLING,
    Behaviour,
    busy,
    failing,
    garbage,
    healthy,
    refusing,
    slow,
)

AWAY_LONG = "away long"
AWAY_SHORT = "away short"
KICKED = "kicked while away"
ROLES = (
    AWAY_LONG,
    AWAY_SHORT,
    KICKED,
    "busy",
    "failing",
    "refusing",
    "garbage",
    "stalling",
    "slow",
)
MIN_SERVERS = len(ROLES) + 1
MIN_EVENTS = 100
SHORT_EVENTS = 15
"""For so many events before the kill the server with a small gap is away."""
SLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """At event number `at` this server begins to behave otherwise.

    Attributes:
        woken: an operator then tells the daemon that it is up again.
    """

    at: int
    server: str
    behaviour: Behaviour
    woken: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """One run's misfortunes.

    Attributes:
        roles: server -> its part; the others are healthy throughout.
        changes: in the order of events.
        kill_at: before this event the daemon is killed and started again.
        evict_at: before this event the server of that part loses its rooms.
    """

    roles: dict[str, str]
    changes: tuple[Change, ...]
    kill_at: int | None = None
    evict_at: int | None = None

    def server(self, role: str) -> str:
        """Who plays this part."""
        return next(name for name, part in self.roles.items() if part == role)


def calm(servers: Sequence[str]) -> Plot:
    """Nothing goes wrong; servers answer after 5 to 50 ms."""
    changes = (
        Change(0, name, healthy(latency=0.005 * (1 + index % 10)))
        for index, name in enumerate(servers)
    )
    return Plot({}, tuple(changes))


def chaotic(servers: Sequence[str], events: int) -> Plot:
    """The plot of a chaotic run.

    Raises:
        ValueError: too few servers or events for every part.
    """
    if len(servers) < MIN_SERVERS or events < MIN_EVENTS:
        raise ValueError(f"chaos needs {MIN_SERVERS} servers and {MIN_EVENTS} events at least")
    roles = dict(zip(servers, ROLES, strict=False))
    cast = {role: name for name, role in roles.items()}
    kill_at = events // 2

    def part(share: float) -> int:
        return int(events * share)

    def ill(role: str, behaviour: Behaviour, since: float, until: float, *, woken: bool) -> None:
        changes.append(Change(part(since), cast[role], behaviour))
        changes.append(Change(part(until), cast[role], healthy(), woken=woken))

    changes = list(calm(servers[len(ROLES) :]).changes)
    ill(AWAY_LONG, DOWN, 0.05, 0.8, woken=False)
    ill(KICKED, DOWN, 0.2, 0.75, woken=True)
    changes.append(Change(kill_at - SHORT_EVENTS, cast[AWAY_SHORT], DOWN))
    changes.append(Change(kill_at + 1, cast[AWAY_SHORT], healthy()))
    ill("busy", busy(retry_after=2), 0.2, 0.5, woken=False)
    ill("failing", failing(), 0.25, 0.6, woken=False)
    # From the start: of a server that has answered before, a refusal would be the content's fault.
    ill("refusing", refusing(), 0.0, 0.6, woken=True)
    ill("garbage", garbage(), 0.3, 0.55, woken=True)
    ill("stalling", STALLING, 0.3, 0.6, woken=False)
    changes.append(Change(0, cast["slow"], slow(SLOW_SECONDS)))
    changes.sort(key=lambda change: change.at)
    return Plot(roles, tuple(changes), kill_at=kill_at, evict_at=part(0.45))
