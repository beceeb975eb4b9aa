"""Isolation: the search for an item that makes a server refuse the transactions with it.

A server that refuses a transaction may mean one item in it, all of it, or us. PDUs and EDUs are
searched apart, so that those of one kind go on while the others are at a stop. Half as many items
are tried, then half of those, until one is left: the *suspect*. It is held: it stays owed.

That it was refused alone proves nothing: a broken proxy refuses everything, and one of two backends
half of it. A *witness* is another item of that kind that is answered when it is sent alone. Once
there is one, lots are drawn for what goes next, the suspect or a witness: up to 10 different ones,
then those again that were answered. If the server does not look at what it refuses, whatever it
goes by (chance, turns, the time of day), the lots decide which item meets its refusals; and the
suspect is convicted when they hardly ever would have had it meet as many. An answer acquits it.

If no witness is answered the server is at fault. Then after each wait, which grows, the suspect is
tried, or first an empty transaction: once that is answered the suspect and one witness.

All here is pure: a `Search` and what happened make another `Search`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from math import comb
from random import Random
from typing import Any

WITNESSES = 10
"""So many other items are tried before those that were answered are sent again."""
CHANCE = 1e-5
"""A suspect is convicted when so few of all lots would have had it fail each time it was sent. If
all witnesses are answered that takes about ten failures of it."""
AHEAD = 100
"""So many witnesses that were answered out of turn are remembered; others would be sent again."""


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
    """A PDU or EDU, as a search knows it.

    Attributes:
        mark: a PDU's event id; of an EDU, what stays the same when it is made anew.
        room_id, place: a PDU's room, and the stream ordering behind which others of it are owed.
    """

    mark: str
    room_id: str = ""
    place: int = 0


@dataclass(frozen=True, slots=True)
class Search:
    """The search among the PDUs, or among the EDUs, of one server; times in ms since the epoch.

    Attributes:
        limit: items in one transaction; 0: none until the server has answered without any; None:
            as many as ever, the search is over, and only `ahead` is still of use.
        quick: refusals of the search that no wait followed, since something was answered.
        waits, since_ms: refusals that a wait followed, and since when.
        set_ms, next_ms: when the last wait was set, and when it ends; None: there is none.
        suspect: its mark; None: there is more than one item that may be it.
        room_id, place: with a suspected PDU, where it stands.
        turn: what goes next.
        drawn: a lot has decided that.
        failures: of the suspect, when a lot had it go.
        answers, refusals: of witnesses, when a lot had them go.
        witnesses: marks of those that were answered last, for this suspect or others before it.
        refused: marks of those that were refused.
        at_fault: none of the witnesses was answered.
        asked: it has just answered an empty transaction.
        alone: there was no other item; the next one that comes is tried at once.
        full: the suspect is convicted, and there is no room for it in quarantine.
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

    @property
    def active(self) -> bool:
        """Whether it is still under way."""
        return self.limit is not None

    @property
    def asks(self) -> bool:
        """Whether an empty transaction goes next."""
        return self.limit == 0 or (self.suspect is not None and self.turn is Turn.EMPTY)

    @property
    def at_once(self) -> bool:
        """Whether what goes next need not wait, because the server has just answered."""
        return self.asked and self.turn is Turn.WITNESS

    @property
    def convicted(self) -> bool:
        """Whether the suspect is to be taken out of the way.

        Of all ways to deal the lots, the share that has only refusals for the suspect.
        """
        refused = self.failures + self.refusals
        ways = comb(refused + self.answers, self.failures)
        return comb(refused, self.failures) < CHANCE * ways

    def wait_s(self, now_ms: int) -> float:
        """Seconds until an item of this kind may go, and never longer than was meant."""
        if self.next_ms is None or self.set_ms is None:
            return 0.0
        return min(max(0, self.next_ms - now_ms), self.next_ms - self.set_ms) / 1000

    def waiting(self, now_ms: int, wait_s: float) -> "Search":
        """It goes on after this wait, in seconds."""
        since_ms = now_ms if self.since_ms is None else self.since_ms
        return replace(
            self,
            waits=self.waits + 1,
            since_ms=since_ms,
            set_ms=now_ms,
            next_ms=now_ms + int(wait_s * 1000),
        )

    def hastened(self) -> "Search":
        """It need not wait."""
        return replace(self, set_ms=None, next_ms=None)

    # --- What happens -----------------------------------------------------------------------------

    def lives(self) -> "Search":
        """The server has answered a transaction without any items of this kind."""
        search = replace(self, limit=1) if self.limit == 0 else self
        return replace(search, turn=Turn.SUSPECT, asked=search.at_fault) if search.asks else search

    def answered(
        self, marks: Sequence[str], most: int, rng: Random, *, out_of_turn: bool = False
    ) -> "Search | None":
        """Items of this kind were answered; None: the search is over.

        Args:
            most: so many items are a transaction without a limit.
            rng: for the lots.
            out_of_turn: they are not to be sent again when their turn comes.
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
        return None if over else replace(self, limit=limit, refused=())

    def acquitted(self) -> "Search":
        """There is no suspect: it was answered, or is gone, or is in quarantine."""
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
        """Forget what was answered out of turn: its turn is past."""
        return replace(self, ahead=()) if self.active else None

    def refused_together(self, items: int, first_suspect: int | None) -> "Search":
        """Several items were refused as a whole: fewer are tried."""
        return replace(self, limit=fewer_items(items, first_suspect))

    def refused_alone(self, item: Item, rng: Random) -> "Search":
        """One item was refused."""
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
        """After the next wait; by lot, because a server may refuse by turns."""
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
        """There is nothing to be sent of what would be next.

        `early`: it was looked for before its wait was over, because something came. That was no
        other item; or what comes again and again, of the same user, would have no wait at all.
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
    """The search that `dataclasses.asdict` made this of."""
    if value is None:
        return None
    known: dict[str, Any] = {**value, "turn": Turn(value["turn"])}
    for name in ("witnesses", "refused", "ahead"):
        known[name] = tuple(value[name])
    return Search(**known)


def more_items(limit: int | None, most: int) -> int | None:
    """The number of items that the next transaction may carry after one of `limit` was answered.

    Twice as many, until the limit is no limit any more (None); one, after none.
    """
    if limit is None:
        return None
    more = max(1, limit * 2)
    return more if more < most else None


def fewer_items(items: int, first_suspect: int | None) -> int:
    """The number of items that the next transaction may carry after one of `items` was refused.

    Half as many; or, if one is suspected before the others (a number that is no integer, in room
    versions 1-5, which strict servers refuse), just those before it, so that it comes out alone.
    """
    if first_suspect is not None:
        return max(1, first_suspect)
    return max(1, items // 2)
