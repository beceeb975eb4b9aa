"""Who takes the feed of a store that two names share: A has two processes, B has one."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from fedsender_lab.cluster.search import less


class Store(NamedTuple):
    """A transaction that stores something of the feed.

    Attributes:
        name: whose session it is.
        looked: whether it has found this name in the row, which it locks from then on.
        fresh: whether nobody else has stored anything since its process read the position.
        left: whether its process has begun again.
    """

    name: str
    looked: bool = False
    fresh: bool = True
    left: bool = False


class Taker(NamedTuple):
    """A process.

    Attributes:
        life: `runs`, `frozen` or `dead`.
        does: it `waits` for its name's lease, `follows` the feed; of the name that had the feed it
            has `voided` the lease and `ended` the sessions; it `took` the row, or `stores`.
        admitted: whether it has a session that may write.
        fresh: see `Store`.
        under_way: its transactions, also those that it left behind.
    """

    name: str
    life: str = "runs"
    does: str = "waits"
    admitted: bool = False
    fresh: bool = False
    under_way: tuple[Store, ...] = ()


class FeedState(NamedTuple):
    """A state of `Feeds`.

    Attributes:
        holders: by name the process that has its lease; None: nobody.
        taker: the name in the row.
    """

    processes: tuple[Taker, ...]
    holders: tuple[int | None, int | None]
    taker: str
    faults: tuple[str, ...]
    wrong: str = ""


NAMES: Final = "AB"
FEED_FAULTS: Final = ("kill", "freeze")
"""Whoever is frozen is cut off, too, or paused by its host: its lease may lapse."""


class Feeds:
    """The feed of a store, which A takes at first, in its first process.

    Args:
        faults: those of `FEED_FAULTS` that may happen, each as often as it stands here.
        without: a guard to leave out: see docs/clusters-protocol.md.
    """

    def __init__(self, *faults: str, without: str = "") -> None:
        self._faults = tuple(sorted(faults))
        self._without = without

    def begin(self) -> FeedState:
        first = Taker("A", does="stores", admitted=True, fresh=True)
        both = (first, Taker("A"), Taker("B", does="follows"))
        return FeedState(both, (0, 2), "A", self._faults)

    # --- steps ------------------------------------------------------------------------------------

    def steps(self, state: FeedState) -> Iterator[tuple[str, FeedState]]:
        for at, one in enumerate(state.processes):
            who = _who(at)
            for words, after in (*self._works(state, at), *self._databases(state, at)):
                yield f"{who}{words}", after
            if one.life == "dead":
                yield f"{who} starts again", _with(state, at, one._replace(life="runs"))
            elif one.life == "frozen":
                yield f"{who} thaws", _with(state, at, one._replace(life="runs"))
            else:
                for fault, hit in (
                    ("kill", _anew(one)._replace(life="dead")),
                    ("freeze", one._replace(life="frozen")),
                ):
                    if fault in state.faults:
                        faults = less(state.faults, fault)
                        yield f"{who}: {fault}", _with(state, at, hit)._replace(faults=faults)

    def _works(self, state: FeedState, at: int) -> Iterator[tuple[str, FeedState]]:
        """What a process does by itself."""
        one = state.processes[at]
        if one.life != "runs":
            return
        if one.does == "waits":
            if not self._acts(state, one.name):
                after = _with(state, at, one._replace(does="follows"))
                after = self._evicted(_held(after, one.name, at), one.name)
                yield " takes its name's lease", after
            return
        if not self._holds(state, at):
            yield " sees that its lease is not its own", _with(state, at, _anew(one))
        yield from self._takes(state, at)

    def _takes(self, state: FeedState, at: int) -> Iterator[tuple[str, FeedState]]:
        """The way to the feed: from the row as it was read to the position."""
        one = state.processes[at]
        if one.does == "follows":
            if state.taker == one.name:
                yield " finds its name", _with(state, at, one._replace(does="ended"))
            elif not self._acts(state, state.taker):
                after = _held(state, state.taker, None)
                yield " makes the other's void", _with(after, at, one._replace(does="voided"))
        elif one.does == "voided":
            after = self._evicted(state, NAMES[1 - NAMES.index(one.name)])
            yield " ends the other's sessions", _with(after, at, one._replace(does="ended"))
        elif one.does in ("ended", "took"):
            does = "took" if one.does == "ended" else "stores"
            if (one.does == "took") == self._guards("read after"):
                yield " reads the position", _with(state, at, one._replace(does=does, fresh=True))
            elif not one.admitted:
                yield from self._admitted(state, at)
            elif not self._is_locked(state):
                after = _with(state, at, one._replace(does=does))
                yield " takes the feed", after._replace(taker=one.name)
        elif one.does == "stores" and all(each.left for each in one.under_way):
            if one.admitted:
                begun = tuple(sorted((*one.under_way, Store(one.name, fresh=one.fresh))))
                yield " begins to store", _with(state, at, one._replace(under_way=begun))
            else:
                yield from self._admitted(state, at)

    def _admitted(self, state: FeedState, at: int) -> Iterator[tuple[str, FeedState]]:
        if self._holds(state, at) or not self._guards("admission"):
            after = state.processes[at]._replace(admitted=True)
            yield " opens a session", _with(state, at, after)

    def _databases(self, state: FeedState, at: int) -> Iterator[tuple[str, FeedState]]:
        """What becomes of transactions, whatever has become of their process."""
        one = state.processes[at]
        for each in dict.fromkeys(one.under_way):
            rest = list(one.under_way)
            rest.remove(each)
            left = one._replace(under_way=tuple(rest))
            if not each.looked:
                if state.taker == each.name or not self._guards("row"):
                    looks = tuple(sorted((*rest, each._replace(looked=True))))
                    yield "'s store finds its name", _with(state, at, one._replace(under_way=looks))
                else:
                    if not each.left:
                        left = left._replace(does="follows", fresh=False)
                    yield "'s store finds another's name", _with(state, at, left)
                continue
            after = _with(_stale(state, None if each.left else at), at, left)
            if not each.fresh:
                after = after._replace(wrong="stored by one that does not know what another stored")
            yield "'s store is committed", after

    def _evicted(self, state: FeedState, name: str) -> FeedState:
        """The state without the sessions of this name."""
        if self._guards("eviction"):
            for at, one in enumerate(state.processes):
                if one.name == name:
                    state = _with(state, at, one._replace(admitted=False, under_way=()))
        return state

    def _acts(self, state: FeedState, name: str) -> bool:
        """Whether the lease of this name is held, and has not lapsed."""
        holder = state.holders[NAMES.index(name)]
        if holder is None:
            return False
        one = state.processes[holder]
        return one.life == "runs" and one.does != "waits"

    def _holds(self, state: FeedState, at: int) -> bool:
        one = state.processes[at]
        return state.holders[NAMES.index(one.name)] == at and one.does != "waits"

    def _is_locked(self, state: FeedState) -> bool:
        """Whether a transaction that goes on has looked at the row."""
        looked = any(each.looked for one in state.processes for each in one.under_way)
        return looked and self._guards("row's lock")

    def _guards(self, guard: str) -> bool:
        return guard != self._without

    # --- what must hold ---------------------------------------------------------------------------

    def wrong(self, state: FeedState) -> str | None:
        return state.wrong or None

    def calm(self, state: FeedState) -> FeedState | None:
        for at, one in enumerate(state.processes):
            if one.life != "runs":
                return _with(state, at, one._replace(life="runs"))._replace(faults=())
        for at, one in enumerate(state.processes):
            for words, after in (*self._databases(state, at), *self._works(state, at)):
                # Only who has lost the feed has something to learn from it.
                learns = one.name != state.taker and self._guards("row")
                if words != " begins to store" or learns:
                    return after
        return None

    def missing(self, state: FeedState) -> str | None:
        stores = [one.name for one in state.processes if one.does == "stores"]
        return None if stores == [state.taker] else "the feed has not one taker"

    def words(self, state: FeedState) -> str:
        each = [f"{_who(at)} {one.life} {one.does}" for at, one in enumerate(state.processes)]
        return f"{', '.join(each)}; the row says {state.taker}"


def _who(at: int) -> str:
    return ("A", "A's second", "B")[at]


def _with(state: FeedState, at: int, one: Taker) -> FeedState:
    processes = state.processes
    return state._replace(processes=(*processes[:at], one, *processes[at + 1 :]))


def _held(state: FeedState, name: str, at: int | None) -> FeedState:
    holders = (at, state.holders[1]) if name == "A" else (state.holders[0], at)
    return state._replace(holders=holders)


def _anew(one: Taker) -> Taker:
    """The process begins again; what it had under way may still be done."""
    left = {each._replace(left=True) for each in one.under_way}
    return Taker(one.name, under_way=tuple(sorted(left)))


def _stale(state: FeedState, but: int | None) -> FeedState:
    """Something was stored: nobody knows of it but the process that did."""
    for at, one in enumerate(state.processes):
        own = at == but
        under_way = {
            each._replace(fresh=each.fresh and own and not each.left) for each in one.under_way
        }
        one = one._replace(fresh=one.fresh and own, under_way=tuple(sorted(under_way)))
        state = _with(state, at, one)
    return state
