"""What each server should get, and what is known to have become of it."""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from fedsender.simulation.receiver import Attempt
from fedsender.testing.rooms import Step

DAY_S = 86_400.0


STUBBORN = 5
"""So many failures with 5xx, or without an answer, may make a sender suspect the content."""


@dataclass(slots=True)
class Unanswered:
    """A transaction that may have arrived and got no answer: it must be what comes next.

    Attributes:
        times: how many attempts it has had.
    """

    attempt: Attempt
    times: int = 1


@dataclass(slots=True)
class Book:
    """One server.

    Attributes:
        honest: it is one of the few in a hostile world.
        owed: what it should get, in stream order; `tokens` are their tokens.
        answered: events in transactions that it answered.
        messages_answered: the same for to-device messages.
        recorded: events that a line of the ledger says it has, or would if the disk took it.
        proven: those of them whose line is there.
        superseded: room -> [from, to] ranges that a line says something newer stands for.
        refused: events that it said no to in a proper answer.
        mark: the last successful stream ordering, as last committed.
        flight: the attempt under way.
        last: the newest attempt that is over.
        unlined: attempts over that the ledger has no line for yet.
        failed_at: when the newest failed attempt ended, by the ledger; None: the last was answered.
        failure: how it failed.
        failures: when attempts failed since the last answer, in the last 24 h.
        stubborn: "failing" attempts since the last answer, of whatever transaction.
        wakes: when it was woken (by an admin: True).
        newest: room -> token of the newest event taken in; `taken` are the events.
        poison: events that it has refused alone, and always will.
        quarantined: events and to-device messages that were ever in quarantine for it.
        redelivered: events that an operator asked to be sent again.
        digests: transaction id -> hash of its body.
        newest_live: token of the newest PDU that a line of the ledger has in the live lane.
        sought_at: when it was last tried, by what arrived or by the ledger.
    """

    name: str
    honest: bool = False
    owed: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    messages_answered: set[str] = field(default_factory=set)
    recorded: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    superseded: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    mark: int = 0
    flight: Attempt | None = None
    last: Attempt | None = None
    unlined: int = 0
    unanswered: Unanswered | None = None
    failed_at: float | None = None
    failure: str = ""
    failures: deque[float] = field(default_factory=deque)
    stubborn: int = 0
    wakes: deque[tuple[float, bool]] = field(default_factory=deque)
    newest: dict[str, int] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    poison: set[str] = field(default_factory=set)
    quarantined: set[str] = field(default_factory=set)
    redelivered: set[str] = field(default_factory=set)
    digests: dict[str, str] = field(default_factory=dict)
    newest_live: int = 0
    sought_at: float = -1.0

    def owe(self, happening: Step) -> None:
        """The homeserver says that this server should get the event."""
        self.owed.append(happening)
        self.tokens.append(happening.token)

    def go_back(self, mark: int, repeats: Unanswered | None) -> None:
        """The databases were restored; `repeats` is on record in them as what comes next.

        What is known to have arrived stays known: the server was not restored.
        """
        self.mark, self.unanswered = mark, repeats
        self.proven.clear()
        self.failures.clear()
        # The copy has the streak of its own day, which may have been longer.
        self.stubborn = STUBBORN
        self.newest.clear()
        self.newest_live = self.unlined = 0

    def owed_between(self, after: int, upto: int) -> list[Step]:
        """What it should get with after < token <= upto."""
        return self.owed[bisect_right(self.tokens, after) : bisect_right(self.tokens, upto)]

    def covered(self, happening: Step) -> bool:
        """Whether the ledger says that something newer of the room stands for the event."""
        ranges = self.superseded.get(happening.room_id, ())
        return any(first <= happening.token <= last for first, last in ranges)


class Books:
    """All servers; keeps up with what the homeserver does."""

    def __init__(self, names: list[str]) -> None:
        self.of = {name: Book(name) for name in names}
        self._known = 0

    def take_in(self, history: list[Step]) -> None:
        """Note what has happened since the last time."""
        for happening in history[self._known :]:
            if happening.sendable:
                for server in happening.servers:
                    # Others are another sender's.
                    if server in self.of:
                        self.of[server].owe(happening)
        self._known = len(history)
