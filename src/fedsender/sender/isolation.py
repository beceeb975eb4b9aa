"""Isolation: find the item, or the size, that makes a server refuse a transaction.

PDUs and EDUs are searched apart, so that keys do not wait behind an event. A `Search` is in one of
three states:

                several items refused              one item refused
        rest ─────────────────────────▶ halving ────────────────────▶ trial
        ▲  ▲   refused: half as many ▲ │ │ answered: the next         │ ▲ │ refused or answered:
        │  │                         └─┘ │                            │ └─┘ by turns, see below
        │  └──── all were answered ──────┘                            │
        └──────── the suspect was answered, is gone, or is convicted ─┘

Halving. If all that was refused together is answered in smaller parts, the size was at fault. The
size that works is remembered: in bytes after a 413, in items after other refusals. Half an hour
later half as much again is tried, and so on until there is no limit.

Trial. That the suspect is refused alone proves nothing: a broken proxy refuses everything, and one
of two backends refuses half. So other items are tried alone, until one is answered, a *witness*.
From then on each next item is drawn by lot: the suspect, or another one, an untried one or a
witness. If the server refuses for another reason than the content (chance, turns, the time of day),
the lots decide which item it refuses. So the suspect is convicted when the lots would hardly ever
give it so many refusals. Until then it stays owed.

If the first few other items are refused as well, or all there are, the server counts as at fault:
nothing is convicted, and the waits grow. From then on an empty transaction and the suspect go by
turns. The suspect is first in order, and what a server that is well again answers first must not be
a later event. If the empty one was answered, and the suspect is refused, one other item follows.

    turn        next goes            answered             refused
    LOT         the suspect, or      the trial ends       LOT: a refusal of the suspect
                another, by lot      LOT: a witness       LOT: of another; EMPTY: nobody is answered
    EMPTY       nothing, in an       SUSPECT              FAULTY
                empty transaction
    SUSPECT     the suspect          the trial ends       LOT
    FAULTY      the suspect          the trial ends       EMPTY

All functions here are pure: a `Search` and an outcome make another `Search`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from math import ceil, comb
from random import Random
from typing import Any, Final

WITNESSES: Final = 10
"""The witnesses that are remembered."""
CHANCE: Final = 1e-5
"""The share of all possible lots with only failures of the suspect; below it, it is convicted. If
all others are answered, that takes about ten failures of it."""
AHEAD: Final = 100
"""The events answered out of turn, and the refused ones, that are remembered; others are tried
again."""
OTHERS: Final = 3
"""How many other items are refused, and none answered, before the server counts as at fault."""
ANSWER_IS_WORTH: Final = 3
"""So many refusals without a wait an answer gives back. Whoever refuses more often than that has us
wait, although it answers now and then."""
CLIMB_MS: Final = 30 * 60_000
"""The time until a larger transaction is tried than the size that works, in ms."""
STEP: Final = 1.5
"""How much larger it is."""


def left_s(since_ms: int | None, until_ms: int | None, now_ms: int) -> float:
    """Seconds that are left of a wait on record; 0 if there is none.

    Also 0 if it is said to begin in the future. Then the wall clock was set back, nobody knows how
    much of it is over, and a wait is only ever shortened.
    """
    if since_ms is None or until_ms is None or now_ms < since_ms:
        return 0.0
    return max(0, until_ms - now_ms) / 1000


class Kind(Enum):
    """The two kinds of items that are searched apart."""

    PDUS = "PDU"
    EDUS = "EDU"


@dataclass(frozen=True, slots=True)
class Item:
    """A PDU or EDU in a search.

    Attributes:
        mark: a PDU's event id; an EDU's mark, which is the same when the EDU is made anew.
        room_id, place: a PDU's room, and the stream ordering above which others of it are owed.
    """

    mark: str
    room_id: str = ""
    place: int = 0


class Turn(StrEnum):
    """What goes next in a trial; the table is at the head of this module."""

    LOT = "lot"
    EMPTY = "empty"
    SUSPECT = "suspect"
    FAULTY = "faulty"

    @property
    def faulty(self) -> bool:
        """Whether the server counts as at fault."""
        return self in (Turn.EMPTY, Turn.FAULTY)


@dataclass(frozen=True, slots=True)
class Search:
    """The search among the PDUs, or among the EDUs, of one server; times in ms since the epoch.

    Attributes:
        max_items, max_bytes: the size to try or, at rest, the one that works; None: no limit.
        climb_ms: when more may be tried.
        left: items refused together that are still to be answered; they are tried apart from the
            other kind.
        suspect: the item on trial; None: there is no trial.
        turn: what goes next in a trial. Without one, `EMPTY`: an empty transaction goes first, to
            see whether the server refuses only us.
        failures: refusals of the suspect since there is a witness.
        answers, refusals: the same of other items.
        witnesses, refused: marks of the other items that were answered, and refused, latest last.
        alone: whether there is no other item; the next one that comes is tried at once.
        full: whether the suspect is convicted, but quarantine has no room for it.
        ahead: events that were answered out of turn, and must not be sent again in turn.
        quick: refusals that no wait followed; an answer gives back some.
        waits, since_ms: those since the last answer that one followed, and the time of the first.
        set_ms, next_ms: when the present wait was set, and its end.
    """

    max_items: int | None = None
    max_bytes: int | None = None
    climb_ms: int | None = None
    left: int = 0
    suspect: Item | None = None
    turn: Turn = Turn.LOT
    failures: int = 0
    answers: int = 0
    refusals: int = 0
    witnesses: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    alone: bool = False
    full: bool = False
    ahead: tuple[str, ...] = ()
    quick: int = 0
    waits: int = 0
    since_ms: int | None = None
    set_ms: int | None = None
    next_ms: int | None = None

    @property
    def active(self) -> bool:
        """Whether it is under way; at rest it only remembers."""
        return self.left > 0

    def is_step(self, items: int) -> bool:
        """Whether a transaction of so many items is a step of it, or tries more than works."""
        if self.suspect is not None or (self.active and self.max_bytes is not None):
            return True
        return self.max_items is not None and (self.active or items > self.max_items)

    def is_of(self, marks: Sequence[str]) -> bool:
        """Whether the suspect is among the items with these marks."""
        return self.suspect is not None and self.suspect.mark in marks

    @property
    def convicted(self) -> bool:
        """Whether the suspect, once refused alone, is to go into quarantine.

        That is so if only few of all ways to draw the lots have only refusals for the suspect.
        """
        refused = self.failures + self.refusals
        ways = comb(refused + self.answers, self.failures)
        return comb(refused, self.failures) < CHANCE * ways

    def draws_suspect(self, rng: Random) -> bool:
        """Draw the next item of the trial: the suspect, or another one."""
        if self.full or self.turn is not Turn.LOT:
            return True
        return bool(self.witnesses) and rng.random() < 0.5

    @property
    def tries_new(self) -> bool:
        """Whether another item is to be one that was not tried yet.

        Others may be poison, too: not more of them are tried than were found to be good.
        """
        return not self.witnesses or len(self.refused) < len(self.witnesses)

    def most(self, items: int, size: int, now_ms: int) -> tuple[int, int]:
        """The most items, and bytes, of the next transaction, within these numbers."""
        climbs = not self.active and self.climb_ms is not None and now_ms >= self.climb_ms
        more = STEP if climbs else 1
        if self.max_items is not None:
            items = min(items, ceil(self.max_items * more))
        if self.max_bytes is not None:
            size = min(size, ceil(self.max_bytes * more))
        return items, size

    # --- Its waits --------------------------------------------------------------------------------

    def wait_s(self, now_ms: int) -> float:
        """Seconds until an item of this kind may go."""
        return left_s(self.set_ms, self.next_ms, now_ms)

    def waiting(self, now_ms: int, wait_s: float) -> "Search":
        """The search with this wait set, in seconds."""
        since_ms = now_ms if self.since_ms is None else self.since_ms
        return replace(
            self,
            waits=self.waits + 1,
            since_ms=since_ms,
            set_ms=now_ms,
            next_ms=now_ms + int(wait_s * 1000),
        )

    def moved(self, by_ms: int) -> "Search":
        """The same search by a clock that is ahead by so much."""
        times = (self.climb_ms, self.since_ms, self.set_ms, self.next_ms)
        climb_ms, since_ms, set_ms, next_ms = (at and at + by_ms for at in times)
        return replace(self, climb_ms=climb_ms, since_ms=since_ms, set_ms=set_ms, next_ms=next_ms)

    def hastened(self) -> "Search":
        """The search without a wait."""
        return replace(self, set_ms=None, next_ms=None)

    # --- What happens -----------------------------------------------------------------------------

    def apart(self, items: int, now_ms: int, *, asks: bool = False) -> "Search":
        """The search after these items failed together with the other kind, or told nothing."""
        climb_ms = self.climb_ms and now_ms + CLIMB_MS
        turn = Turn.EMPTY if asks else self.turn
        return replace(self, left=max(items, self.left, 1), climb_ms=climb_ms, turn=turn)

    def lives(self) -> "Search":
        """The search after an answer to a transaction without an item of this kind.

        If it was in question whether the server is at fault, the suspect's turn comes, and if that
        is refused another item's, without one more wait in between.
        """
        if not self.turn.faulty:
            return self
        if self.suspect is None:
            return replace(self, turn=Turn.LOT)
        return replace(self, turn=Turn.SUSPECT, quick=max(0, self.quick - 1))

    def answered(
        self,
        marks: Sequence[str],
        size: int,
        now_ms: int,
        *,
        most: tuple[int, int],
        out_of_turn: bool = False,
    ) -> "Search":
        """The search after an answer to items of this kind.

        Args:
            size: the bytes of the transaction.
            most: the most items, and bytes, of a transaction without a limit.
            out_of_turn: whether the items were sent early, and are not to be sent again in turn.
        """
        ahead = self.ahead + tuple(mark for mark in marks if mark not in self.ahead)
        search = replace(
            self.hastened(),
            quick=max(0, self.quick - ANSWER_IS_WORTH),
            waits=0,
            since_ms=None,
            alone=False,
            ahead=ahead[-AHEAD:] if out_of_turn else self.ahead,
        )
        if self.is_of(marks):
            return search.acquitted()
        if self.suspect is not None:
            return replace(
                search,
                turn=Turn.LOT,
                answers=self.answers + bool(self.witnesses),
                witnesses=_latest(self.witnesses, *marks)[-WITNESSES:],
                # Until now the server may have been at fault.
                refused=self.refused if self.witnesses else (),
            )
        left = max(0, self.left - len(marks))
        search = replace(search, left=left)
        return search if left else search._rested(len(marks), size, now_ms, most)

    def _rested(self, items: int, size: int, now_ms: int, most: tuple[int, int]) -> "Search":
        """The search at rest after this answer, with the size that works."""
        most_items, most_bytes = most
        max_items, max_bytes, climb_ms = self.max_items, self.max_bytes, self.climb_ms
        if max_items is not None and items > max_items:
            max_items, climb_ms = items if items < most_items else None, now_ms + CLIMB_MS
        if max_bytes is not None and size > max_bytes:
            max_bytes, climb_ms = size if size * STEP < most_bytes else None, now_ms + CLIMB_MS
        if max_items is max_bytes is None:
            climb_ms = None
        return Search(max_items=max_items, max_bytes=max_bytes, climb_ms=climb_ms, ahead=self.ahead)

    def acquitted(self) -> "Search":
        """The search without a suspect: it was answered, or is gone, or is in quarantine.

        Of sizes it has learned nothing. The next suspect may be right behind: the same witnesses
        speak for the server.
        """
        return Search(
            left=1,
            witnesses=self.witnesses,
            refused=self.refused,
            ahead=self.ahead,
            quick=self.quick,
            waits=self.waits,
            since_ms=self.since_ms,
        )

    def after_refusal(
        self,
        items: Sequence[Item],
        size: int,
        now_ms: int,
        *,
        too_large: bool = False,
        first_suspect: int | None = None,
    ) -> "Search":
        """The search after a refusal of these items; of none, in a trial.

        After several, half as many go next; if more was tried than the size that works, that again.
        But if one is suspected first (it has a number that is no integer, in room versions 1-5,
        which strict servers refuse), only those before it go next, so that it is sent alone.

        Args:
            size: the bytes of the transaction.
            too_large: whether the server said that it has too many bytes.
            first_suspect: the number of items before the one that is suspected first.
        """
        if not items:
            return replace(self, turn=Turn.FAULTY)
        if len(items) == 1:
            return self._refused_alone(items[0])
        search = replace(self, left=len(items), climb_ms=now_ms + CLIMB_MS)
        if too_large:
            return replace(search, max_bytes=_less(self.max_bytes, size))
        if first_suspect is not None:
            return replace(search, max_items=max(1, first_suspect))
        return replace(search, max_items=_less(self.max_items, len(items)))

    def _refused_alone(self, item: Item) -> "Search":
        if self.suspect is None:
            others = tuple(mark for mark in self.refused if mark != item.mark)
            return replace(self.acquitted(), suspect=item, refused=others)
        drawn = bool(self.witnesses)
        if item.mark == self.suspect.mark:
            turn = Turn.EMPTY if self.turn.faulty else Turn.LOT
            return replace(self, failures=self.failures + drawn, turn=turn)
        search = replace(self, refusals=self.refusals + drawn, alone=False)
        if item.mark in self.witnesses:
            return replace(search, witnesses=_latest(self.witnesses, item.mark))
        refused = _latest(self.refused, item.mark)[-AHEAD:]
        nobody = not drawn and len(refused) >= OTHERS
        return replace(search, refused=refused, turn=Turn.EMPTY if nobody else Turn.LOT)

    def without_others(self, *, early: bool) -> "Search":
        """The search after no other item was found, not even a witness to be sent again.

        If all were refused, the server counts as at fault.

        `early`: one was looked for before the end of its wait, because an EDU or a PDU came. That
        was no other item. So `alone` stays False: else items that come again and again, of the same
        user, would have no wait at all.
        """
        alone = not (self.witnesses or self.refused or early)
        turn = Turn.EMPTY if self.refused else Turn.LOT
        return replace(self, witnesses=(), refused=(), alone=alone, turn=turn)


AT_REST: Final = Search()


def of_json(value: Mapping[str, Any] | None) -> Search | None:
    """The search of which `dataclasses.asdict` made this value."""
    if value is None:
        return None
    marks = {name: tuple(value[name]) for name in ("witnesses", "refused", "ahead")}
    suspect = None if value["suspect"] is None else Item(**value["suspect"])
    return Search(**{**value, **marks, "suspect": suspect, "turn": Turn(value["turn"])})


def _less(works: int | None, refused: int) -> int:
    """What to try after so many items, or bytes, were refused."""
    return works if works is not None and works < refused else max(1, refused // 2)


def _latest(marks: Sequence[str], *latest: str) -> tuple[str, ...]:
    """The marks, each once, these last."""
    return (*(mark for mark in marks if mark not in latest), *latest)
