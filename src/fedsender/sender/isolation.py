"""Isolation: the search for an item that makes a server refuse the transactions with it.

A server may refuse a transaction because of one item in it, all of it, or us. PDUs and EDUs are
searched apart, so that items of one kind go on while the other kind is stopped. Half as many items
are tried, then half of those, until one is left: the *suspect*. It is held: it stays owed.

A refusal of the suspect alone proves nothing: a broken proxy refuses everything, and one of two
backends refuses half. A *witness* is another item of that kind that is answered when it is sent
alone. Once there is one, each next item is drawn by lot, the suspect or a witness: up to 10
different witnesses, then those again that were answered. If the server refuses for another reason
than the content (chance, turns, the time of day), the lots decide which item is refused. So the
suspect is convicted when the lots would hardly ever give it so many refusals. An answer acquits it.

If no witness is answered the server is at fault. Then after each wait, and waits grow, the suspect
is tried, or first an empty transaction. Once that is answered the suspect and one witness follow.

All functions here are pure: a `Search` and an outcome make another `Search`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from math import comb
from random import Random
from typing import Any

WITNESSES = 10
"""The number of other items tried before those that were answered are sent again."""
CHANCE = 1e-5
"""The share of all possible lots with only failures of the suspect; below it, it is convicted. If
all witnesses are answered that takes about ten failures of it."""
AHEAD = 100
"""The number of witnesses answered out of turn that are remembered; others would be sent again."""


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


class Turn(StrEnum):
    """The next turn while there is a suspect."""

    WITNESS = "another item"
    AGAIN = "another item that was answered before"
    EMPTY = "an empty transaction"
    SUSPECT = "the suspect"


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


@dataclass(frozen=True, slots=True)
class Search:
    """The search among the PDUs, or among the EDUs, of one server; times in ms since the epoch.

    Attributes:
        limit: the most items in one transaction; 0: none until an empty one was answered; None: no
            limit, and unless `apart` the search is over, and only `ahead` is still of use.
        apart: whether the last answer to these items said nothing. None of them is suspected by
            that, but the two kinds go apart until these are answered.
        quick: refusals in the search that no wait followed, since the last answer to an item.
        waits, since_ms: refusals that a wait followed, and the time of the first.
        set_ms, next_ms: the time when the last wait was set, and its end; None: there is no wait.
        suspect: the suspect's mark; None: more than one item may be at fault.
        room_id, place: a suspected PDU's, as in `Item`.
        turn: the next turn.
        drawn: whether a lot decided the turn.
        failures: refusals of the suspect in turns drawn by lot.
        answers, refusals: of witnesses, in turns drawn by lot.
        witnesses: marks of the witnesses answered last, for this suspect or earlier ones.
        refused: marks of the other items that were refused.
        at_fault: whether the server is at fault: no witness was answered.
        asked: whether the server has just answered an empty transaction.
        alone: whether there was no other item; the next one that comes is tried at once.
        full: whether the suspect is convicted, and quarantine has no room for it.
        ahead: PDUs that were answered out of turn, as witnesses, and must not be sent again.
    """

    limit: int | None
    quick: int = 0
    waits: int = 0
    since_ms: int | None = None
    set_ms: int | None = None
    next_ms: int | None = None
    suspect: str | None = None
    room_id: str = ""
    place: int = 0
    turn: Turn = Turn.WITNESS
    drawn: bool = False
    failures: int = 0
    answers: int = 0
    refusals: int = 0
    witnesses: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    at_fault: bool = False
    asked: bool = False
    alone: bool = False
    full: bool = False
    ahead: tuple[str, ...] = ()
    apart: bool = False

    @property
    def active(self) -> bool:
        """Whether it is still under way."""
        return self.limit is not None or self.apart

    @property
    def asks(self) -> bool:
        """Whether an empty transaction goes next."""
        return self.limit == 0 or (self.suspect is not None and self.turn is Turn.EMPTY)

    @property
    def at_once(self) -> bool:
        """Whether the next item need not wait, because the server has just answered."""
        return self.asked and self.turn is Turn.WITNESS

    @property
    def convicted(self) -> bool:
        """Whether the suspect is to go into quarantine.

        That is so if only few of all ways to draw the lots have only refusals for the suspect.
        """
        refused = self.failures + self.refusals
        ways = comb(refused + self.answers, self.failures)
        return comb(refused, self.failures) < CHANCE * ways

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
        times = (self.since_ms, self.set_ms, self.next_ms)
        since_ms, set_ms, next_ms = (at and at + by_ms for at in times)
        return replace(self, since_ms=since_ms, set_ms=set_ms, next_ms=next_ms)

    def hastened(self) -> "Search":
        """The search without a wait."""
        return replace(self, set_ms=None, next_ms=None)

    # --- What happens -----------------------------------------------------------------------------

    def lives(self) -> "Search":
        """The search after an answer to a transaction without any items of this kind."""
        search = replace(self, limit=1) if self.limit == 0 else self
        return replace(search, turn=Turn.SUSPECT, asked=search.at_fault) if search.asks else search

    def answered(
        self, marks: Sequence[str], most: int, rng: Random, *, out_of_turn: bool = False
    ) -> "Search | None":
        """The search after an answer to items of this kind; None: the search is over.

        Args:
            most: the most items of a transaction without a limit.
            rng: for the lots.
            out_of_turn: whether the items were sent early, and are not to be sent again in turn.
        """
        ahead = self.ahead + tuple(mark for mark in marks if mark not in self.ahead)
        search = replace(
            self.hastened(),
            quick=0,
            waits=0,
            since_ms=None,
            alone=False,
            ahead=ahead[-AHEAD:] if out_of_turn else self.ahead,
        )
        if self.suspect is None:
            return search._grown(most)
        if self.suspect in marks:
            return search.acquitted()._grown(most)
        others = (mark for mark in self.witnesses if mark not in marks)
        return replace(
            search,
            at_fault=False,
            asked=False,
            answers=self.answers + self.drawn,
            witnesses=(*others, *marks)[-WITNESSES:],
        )._next(rng)

    def _grown(self, most: int) -> "Search | None":
        limit = more_items(self.limit, most)
        over = limit is None and not self.ahead
        return None if over else replace(self, limit=limit, refused=(), apart=False)

    def unproven(self, rng: Random) -> "Search":
        """The search after an answer that says nothing, and so proves nothing.

        It acquits no suspect, and makes nobody a witness. What went was drawn by lot or not: the
        lot is void, of the suspect as of a witness, and another is drawn.
        """
        return self if self.suspect is None else self._next(rng)

    def acquitted(self) -> "Search":
        """The search without a suspect: it was answered, or is gone, or is in quarantine."""
        return Search(
            limit=1,
            quick=self.quick,
            waits=self.waits,
            since_ms=self.since_ms,
            # The next suspect may be right behind: the same witnesses speak for the server.
            witnesses=self.witnesses,
            refused=self.refused,
            ahead=self.ahead,
        )

    def level(self) -> "Search | None":
        """The search without `ahead`, as the turn of those PDUs is past; None: it is over."""
        return replace(self, ahead=()) if self.active else None

    def refused_together(self, items: int, first_suspect: int | None) -> "Search":
        """The search after a refusal of several items together: fewer are tried."""
        return replace(self, limit=fewer_items(items, first_suspect))

    def refused_alone(self, item: Item, rng: Random) -> "Search":
        """The search after a refusal of one item alone."""
        if self.suspect is None:
            return replace(
                self.acquitted(),
                suspect=item.mark,
                room_id=item.room_id,
                place=item.place,
                refused=tuple(mark for mark in self.refused if mark != item.mark),
            )._next(rng)
        if item.mark == self.suspect:
            return replace(self, failures=self.failures + self.drawn)._next(rng)
        search = replace(self, refusals=self.refusals + self.drawn, alone=False)
        if item.mark in self.witnesses:
            others = (mark for mark in self.witnesses if mark != item.mark)
            search = replace(search, witnesses=(*others, item.mark))
        elif item.mark not in self.refused:
            search = replace(search, refused=(*self.refused, item.mark))
        return search._again(rng) if self.at_fault else search._next(rng)

    def _again(self, rng: Random) -> "Search":
        """The search with the turn after the next wait; by lot, as a server may refuse by turns."""
        turn = rng.choice((Turn.EMPTY, Turn.SUSPECT))
        return replace(self, turn=turn, drawn=False, asked=False)

    def _next(self, rng: Random) -> "Search":
        search = replace(self, drawn=False)
        if self.full or (self.at_fault and not self.asked):
            return self._again(rng)
        more = self.at_fault or len(self.witnesses) + len(self.refused) < WITNESSES
        if self.witnesses:
            # Others may be poison, too: not more of them are tried than were found to be good.
            fresh = more and len(self.refused) < len(self.witnesses)
            witness = Turn.WITNESS if fresh else Turn.AGAIN
            return replace(search, turn=rng.choice((Turn.SUSPECT, witness)), drawn=True)
        if more:
            return replace(search, turn=Turn.WITNESS)
        return replace(search, at_fault=True, refused=())._again(rng)

    def none_there(self, rng: Random, *, early: bool = False) -> "Search":
        """The search after no item was found for the next turn.

        `early`: the item was looked for before the end of its wait, because an EDU or a PDU came.
        That was no other item. So `alone` stays False: else items that come again and again, of the
        same user, would have no wait at all.
        """
        if self.turn is Turn.SUSPECT:
            return self.acquitted()
        if self.turn is Turn.WITNESS and self.witnesses:
            return replace(self, turn=Turn.AGAIN)
        # Also if what was answered before can no longer be had.
        tried = bool(self.refused) or self.turn is Turn.AGAIN
        at_fault = tried or self.at_fault
        search = replace(self, witnesses=(), refused=(), at_fault=at_fault)
        search = replace(search, alone=not tried and not early)
        return search._again(rng)


def of_json(value: Mapping[str, Any] | None) -> Search | None:
    """The search of which `dataclasses.asdict` made this value."""
    if value is None:
        return None
    known: dict[str, Any] = {**value, "turn": Turn(value["turn"])}
    for name in ("witnesses", "refused", "ahead"):
        known[name] = tuple(value[name])
    return Search(**known)


def more_items(limit: int | None, most: int) -> int | None:
    """The number of items that the next transaction may carry after one of `limit` was answered.

    Twice as many, until no limit is left (None); one after an empty transaction.
    """
    if limit is None:
        return None
    more = max(1, limit * 2)
    return more if more < most else None


def fewer_items(items: int, first_suspect: int | None) -> int:
    """The number of items that the next transaction may carry after one of `items` was refused.

    Half as many. But if one is suspected first (it has a number that is no integer, in room
    versions 1-5, which strict servers refuse), only those before it, so that it is sent alone.
    """
    if first_suspect is not None:
        return max(1, first_suspect)
    return max(1, items // 2)
