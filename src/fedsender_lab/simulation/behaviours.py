"""The behaviours of remote servers, and how long each lasts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random

from fedsender_lab.testing.attacks import ATTACKS, Attack

MINUTE = 60.0
HOUR = 3600.0


class Mode(Enum):
    """One way to treat a connection or a request."""

    WELL = "well"
    SLOW = "slow"
    REFUSES_SOME = "refuses some PDUs"
    TERSE = "says nothing without PDUs"
    # no connection
    REFUSED = "refused"
    SILENT = "silent"
    NO_DNS = "no DNS"
    DNS_SILENT = "DNS silent"
    BAD_TLS = "bad TLS"
    # no answer
    STALL = "stalls"
    STALL_EARLY = "does not read"
    DRIP = "drips"
    BREAK_BEFORE = "breaks before"
    BREAK_AFTER = "breaks after"
    HALF_ANSWER = "half an answer"
    # no proper answer
    GARBAGE = "garbage"
    PROXY = "says nothing to everything"
    REDIRECT = "redirect"
    HUGE = "huge"
    BUSY = "busy"
    BUSY_FOR = "busy for"
    FAILING = "failing"
    FORBIDDEN = "forbidden"
    NOT_THERE = "not there"
    GONE = "gone"
    # a proper answer, and then
    CLOSES = "closes"
    # whatever its attack is
    HOSTILE = "hostile"

    @property
    def processes(self) -> bool:
        """Whether a server that behaves so takes in its transactions."""
        return self in _PROCESSING


_PROCESSING = (
    # These stand in the way of new connections only.
    Mode.NO_DNS,
    Mode.DNS_SILENT,
    Mode.BAD_TLS,
    Mode.WELL,
    Mode.SLOW,
    Mode.REFUSES_SOME,
    Mode.TERSE,
    Mode.BREAK_AFTER,
    Mode.HALF_ANSWER,
    Mode.CLOSES,
    Mode.DRIP,
)
FLAKY = (
    *(
        Mode.WELL,
        Mode.WELL,
        Mode.WELL,
        Mode.WELL,
        Mode.SLOW,
        Mode.CLOSES,
    ),
    *(
        Mode.REFUSES_SOME,
        Mode.BREAK_BEFORE,
        Mode.BREAK_AFTER,
        Mode.HALF_ANSWER,
    ),
    *(
        Mode.FAILING,
        Mode.STALL,
        Mode.GARBAGE,
        Mode.BUSY_FOR,
        Mode.CLOSES,
    ),
)


@dataclass(frozen=True, slots=True)
class Mood:
    """The mood of a server for a while: each time one of these modes is drawn."""

    modes: tuple[Mode, ...]

    def draw(self, rng: Random) -> Mode:
        return self.modes[0] if len(self.modes) == 1 else rng.choice(self.modes)

    def __str__(self) -> str:
        return self.modes[0].value if len(self.modes) == 1 else "flaky"


WELL = Mood((Mode.WELL,))
SILENT = Mood((Mode.SILENT,))


@dataclass(frozen=True, slots=True)
class Character:
    """The character of a server in the long run.

    Attributes:
        troubles: the moods it falls into; between them it is well.
        long: whether troubles may last for a great part of the run.
        picky: the status with which it refuses a transaction for one poisonous PDU; 0: never.
        moves: it changes its address when it comes back.
        attack: its answers when it is hostile; None: it never is.
        takes_s: how long it takes for an answer when it is well; at least, at most.
        dear: its handshakes and DNS answers cost us as much as they can.
    """

    name: str
    troubles: tuple[Mood, ...]
    long: bool = False
    picky: int = 0
    moves: bool = False
    attack: Attack | None = None
    takes_s: tuple[float, float] = (0.02, 0.5)
    dear: bool = False


def _moods(*modes: Mode) -> tuple[Mood, ...]:
    return tuple(Mood((mode,)) for mode in modes)


CHARACTERS = (
    Character("steady", ()),
    Character("flaky", (Mood(FLAKY),), long=True),
    Character(
        "away",
        _moods(Mode.SILENT, Mode.REFUSED, Mode.NO_DNS, Mode.DNS_SILENT),
        long=True,
    ),
    Character("picky 400", (), picky=400),
    Character("terse", _moods(Mode.TERSE, Mode.TERSE, Mode.PROXY), long=True),
    Character("busy", _moods(Mode.BUSY, Mode.BUSY_FOR)),
    Character(
        "failing",
        _moods(
            Mode.FAILING,
            Mode.STALL,
            Mode.DRIP,
            Mode.BREAK_AFTER,
            Mode.BREAK_BEFORE,
        ),
    ),
    Character("refusing", _moods(Mode.FORBIDDEN, Mode.NOT_THERE, Mode.GONE)),
    Character(
        "lying",
        _moods(Mode.GARBAGE, Mode.REDIRECT, Mode.PROXY, Mode.HUGE),
    ),
    Character("moving", _moods(Mode.REFUSED, Mode.BAD_TLS), moves=True),
    Character("dead", (SILENT,), long=True),
    Character(
        "slow",
        _moods(Mode.SLOW, Mode.STALL_EARLY, Mode.CLOSES, Mode.HALF_ANSWER),
    ),
    Character("picky 413", (Mood((Mode.CLOSES,)),), picky=413),
    Character("picky 403", (), picky=403),
    Character("picky 500", (), picky=500),
    Character("away", _moods(Mode.REFUSED, Mode.SILENT), long=True),
)
"""Dealt to the servers in turn, so that a world of sixteen has one of each."""

HOSTILE = Mood((Mode.HOSTILE,))
HONEST = Character("honest", ())
UNHURRIED = Character("unhurried", (), takes_s=(6.0, 9.0))
"""As honest; it has the places of slow servers."""
HOSTILE_PER_HONEST = 3
_HOSTILE = tuple(
    Character(name, (HOSTILE,), attack=attack, dear=True) for name, attack in ATTACKS.items()
)
HOLDING = Character("late", (HOSTILE,), attack=ATTACKS["late"])
"""They hold places of slow servers for as long as they can, and are more than there are places."""


def dealt(index: int, *, hostile: bool) -> Character:
    """The character of a server; in a world among `hostile` ones, most are that."""
    if not hostile:
        return CHARACTERS[index % len(CHARACTERS)]
    honest, turn = divmod(index, HOSTILE_PER_HONEST + 1)
    if not turn:
        return UNHURRIED if honest % 8 == 3 else HONEST
    number, holding = divmod(honest * HOSTILE_PER_HONEST + turn - 1, 2)
    return HOLDING if holding else _HOSTILE[number % len(_HOSTILE)]


def life_of(character: Character, rng: Random, longest_s: float) -> Iterator[tuple[Mood, float]]:
    """The moods of such a server, one after the other, each with its length in seconds."""
    if character.name == "dead":
        yield WELL, rng.uniform(0, longest_s / 4)
        while True:
            yield SILENT, longest_s * 10
    if character.attack is not None:
        # It looks honest at first: what is trusted then is abused.
        yield WELL, rng.uniform(0, MINUTE)
        while True:
            yield HOSTILE, longest_s * 10
    while True:
        yield WELL, _log_uniform(rng, 5 * MINUTE, longest_s / 2)
        if character.troubles:
            end = longest_s if character.long else longest_s / 4
            yield rng.choice(character.troubles), _log_uniform(rng, MINUTE, max(end, 2 * MINUTE))


def _log_uniform(rng: Random, low: float, high: float) -> float:
    """Between the two; as often below their geometric mean as above it."""
    return math.exp(rng.uniform(math.log(low), math.log(max(high, low))))
