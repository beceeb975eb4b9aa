"""One name with two processes: who may send and write for it, in ticks of 2 s."""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from fedsender_lab.cluster.search import less


class Ask(NamedTuple):
    """A call to the sender's database: a renewal, or a take-over.

    Attributes:
        kind: what it asks for: `renew` or `take`.
        old, incarnation: ours so far, and from then on.
        seen: the row and timeline that a take-over compares; for a renewal, the timeline.
        age: ticks since it was asked, by the asker's clock.
        state: `sent`, or its result: `done` or `refused`.
        slow: whether the asker's clock stood still meanwhile.
    """

    kind: str
    old: int
    incarnation: int
    seen: tuple[Any, ...]
    age: int = 0
    state: str = "sent"
    slow: bool = False


class Process(NamedTuple):
    """A process of the name.

    Attributes:
        life: `dead`, `waits`, `took` the lease and has not set the token yet, or `holds`.
        mode: `runs`, `frozen` (its clock goes on), or `paused` by its host (its clock stands).
        cut: whether it reaches no database.
        incarnation: its own.
        timeline: the sender's database's, as of its last renewal.
        left: ticks until its lease ends, by its own clock.
        ask, late: the call that it waits for; one that it has given up, which may still be done.
        seen, seen_for: the row and timeline as last read, and for how many ticks they have stood.
        token: what it read there before it asked for the lease; None: nothing yet.
        write: the token's value in a write that is under way; 0: there is none.
        slow: whether its clock stood still since it asked for the lease that it has.
    """

    life: str = "waits"
    mode: str = "runs"
    cut: bool = False
    incarnation: int = 0
    timeline: int = 0
    left: int = 0
    ask: Ask | None = None
    late: Ask | None = None
    seen: tuple[Any, ...] | None = None
    seen_for: int = 0
    token: int | None = None
    write: int = 0
    slow: bool = False


class LeaseState(NamedTuple):
    """A state of `Leases`.

    Attributes:
        row: of the lease: incarnation, and a number that each write changes.
        timeline: of the sender's database: another one after each failover.
        replica: `row` as of some moment before, for a failover; None: none comes any more.
        token, reader: of the homeserver's database: the row that each write compares; whoever has
            last read the position to go on from (no row of it, a note of the model's).
        token_replica: both, as of some moment before; None: it is not set back any more.
        faults: those that may still happen.
    """

    processes: tuple[Process, Process]
    row: tuple[int, int]
    replica: tuple[int, int] | None
    token: int
    reader: int
    token_replica: tuple[int, int] | None
    faults: tuple[str, ...]
    timeline: int = 0
    wrong: str = ""


LEASE: Final = 3
"""Ticks of 2 s for which a lease holds: it is renewed each tick."""
FAULTS: Final = ("kill", "freeze", "pause", "cut", "slow call", "failover", "set back")
"""`failover` is of the sender's database, `set back` is the homeserver's to a replica of it."""


class Leases:
    """One name with two processes, one of which has its lease at first.

    Args:
        faults: those of `FAULTS` that may happen, each as often as it stands here.
        without: a guard to leave out: `fencing token` (no write compares it), `compare-and-swap`
            (who takes a lease does not), `timeline` (leases outlive a failover), `own end` (the
            holder does not look at its clock), `early end` (it counts from the answer).
    """

    def __init__(self, *faults: str, without: str = "") -> None:
        self._faults = tuple(sorted(faults))
        self._without = without

    def begin(self) -> LeaseState:
        holder = Process("holds", incarnation=1, left=LEASE, token=0)
        return self._plain(
            LeaseState((holder, Process()), (1, 2), (1, 2), 1, 1, (1, 1), self._faults)
        )

    # --- steps ------------------------------------------------------------------------------------

    def steps(self, state: LeaseState) -> Iterator[tuple[str, LeaseState]]:
        for words, after in self._steps(state):
            yield words, self._plain(after)

    def _steps(self, state: LeaseState) -> Iterator[tuple[str, LeaseState]]:
        yield "2 s pass", self._tick(state)
        for at, who in enumerate("PQ"):
            for words, after in (*self._works(state, at), *self._databases(state, at)):
                yield f"{who}{words}", after
            yield from self._faulty(state, at)
        if state.replica is not None:
            if state.row != state.replica:
                yield "a replica has all rows", state._replace(replica=state.row)
            after = state._replace(row=state.replica, timeline=state.timeline + 1)
            yield "the replica takes over", _after(after, "failover")
        if state.token_replica is not None:
            now = (state.token, state.reader)
            if now != state.token_replica:
                yield "the homeserver's replica has all rows", state._replace(token_replica=now)
            token, reader = state.token_replica
            after = state._replace(token=token, reader=reader)
            yield "the homeserver's replica takes over", _after(after, "set back")

    def _tick(self, state: LeaseState) -> LeaseState:
        one, two = state.processes
        return state._replace(processes=(self._aged(one), self._aged(two)))

    def _aged(self, one: Process) -> Process:
        ask = one.ask
        if one.mode == "paused":
            if ask is not None:
                ask = ask._replace(slow=True)
            return one._replace(ask=ask, slow=one.life in ("took", "holds"))
        late = one.late
        if ask is not None:
            if ask.age == 1:
                # Given up after 2 s; the database may do it yet.
                late = late or (ask if ask.state == "sent" else None)
                ask = None
            else:
                ask = ask._replace(age=1)
        left = max(0, one.left - 1)
        one = one._replace(
            left=left, ask=ask, late=late, seen_for=min(LEASE, one.seen_for + 1) if one.seen else 0
        )
        if left == 0 and one.mode == "runs" and one.life in ("took", "holds"):
            return self._lost(one)
        return one

    def _lost(self, one: Process) -> Process:
        return one._replace(
            life="waits",
            left=0,
            seen=None,
            seen_for=0,
            token=None,
            slow=False,
            incarnation=0,
            timeline=0,
        )

    def _works(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        """What a process does by itself."""
        one = state.processes[at]
        if one.mode != "runs":
            return
        if one.life in ("took", "holds") and one.left == 0:
            yield " sees that its lease has ended", _with(state, at, self._lost(one))
        if one.ask is not None and one.ask.state != "sent" and not one.cut:
            yield " hears the answer", _with(state, at, self._answered(one, one.ask))
        if one.cut or one.life == "dead" or one.ask is not None:
            return
        seen = (state.row, state.timeline)
        row, timeline = one.seen or (None, None)
        if one.life == "waits" and (
            row != state.row or (timeline != state.timeline and self._guards("timeline"))
        ):
            yield " reads the lease", _with(state, at, one._replace(seen=seen, seen_for=0))
        asks = self._asks(state, one)
        if asks is not None and asks.ask is not None:
            words = "the lease" if asks.ask.kind == "take" else "its renewal"
            if "slow call" in state.faults:
                after = _after(_with(state, at, asks), "slow call")
                yield f" asks for {words}, which takes long", after
            after, told = self._called(state, asks.ask)
            words = "takes the lease" if asks.ask.kind == "take" else "renews it"
            words = words if told.state == "done" else "is refused it"
            yield f" {words}", _with(after, at, self._answered(asks, told))
        if one.life == "took" and one.token is not None and one.left:
            if one.token == state.token or not self._guards("compare-and-swap"):
                after = state._replace(token=one.incarnation, reader=one.incarnation)
                opened = one._replace(life="holds", token=0)
                yield " sets the token and reads the position", _with(after, at, opened)
            else:
                yield " finds another token", _with(state, at, one._replace(token=None))
        if one.life == "holds" and not one.write and one.left:
            yield from self._written(state, at, one.incarnation)
            if "slow call" in state.faults:
                after = _with(state, at, one._replace(write=one.incarnation))
                yield " writes, which takes long", _after(after, "slow call")

    def _asks(self, state: LeaseState, one: Process) -> Process | None:
        """The process with the call that it makes next, if it makes one."""
        fresh = 1 + max(_numbers(state))
        if one.life == "waits":
            if one.seen is None or one.seen_for < LEASE:
                return None
            seen = one.seen if self._guards("timeline") else (one.seen[0], None)
            return one._replace(ask=Ask("take", 0, fresh, seen), token=state.token)
        if one.left == LEASE and one.token is not None:
            return None
        number = one.incarnation if one.token is not None else fresh
        token = state.token if one.life == "took" else one.token
        return one._replace(ask=Ask("renew", one.incarnation, number, (one.timeline,)), token=token)

    def _called(self, state: LeaseState, ask: Ask) -> tuple[LeaseState, Ask]:
        """The call is carried out, or refused."""
        if not self._agrees(state, ask):
            return state, ask._replace(state="refused")
        row = (ask.incarnation, 2 + max(_numbers(state)))
        return state._replace(row=row), ask._replace(state="done")

    def _answered(self, one: Process, ask: Ask) -> Process:
        if ask.state == "refused":
            return self._lost(one)._replace(ask=None)
        left = LEASE - (ask.age if self._guards("early end") else 0)
        return one._replace(
            life="took" if ask.incarnation != one.incarnation else one.life,
            incarnation=ask.incarnation,
            timeline=ask.seen[-1] if ask.seen[-1] is not None else 0,
            left=left,
            ask=None,
            slow=ask.slow,
        )

    def _databases(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        """What the databases do with a process's slow calls, however late."""
        one = state.processes[at]
        for ask in (one.ask, one.late):
            if ask is not None and ask.state == "sent":
                after, told = self._called(state, ask)
                heard = one._replace(ask=told) if ask is one.ask else one._replace(late=None)
                yield f"'s call to {ask.kind} the lease is {told.state}", _with(after, at, heard)
        if one.write:
            yield from self._written(state, at, one.write)

    def _written(self, state: LeaseState, at: int, number: int) -> Iterator[tuple[str, LeaseState]]:
        """A write to the homeserver's database by this incarnation is committed, or refused."""
        one = state.processes[at]._replace(write=0)
        if number == state.token or not self._guards("fencing token"):
            if number != state.reader:
                wrong = "a former holder's write changes what its successor has read"
                yield "'s write is committed", _with(state._replace(wrong=wrong), at, one)
            elif state.processes[at].write:
                yield "'s write is committed", _with(state, at, one)
            return
        if one.life == "holds" and one.incarnation == number:
            # The homeserver's database was set back: begin anew.
            one = one._replace(life="took", token=None)
        yield "'s write is refused", _with(state, at, one)

    def _agrees(self, state: LeaseState, ask: Ask) -> bool:
        """Whether the database carries this call out: its compare-and-swap."""
        if ask.kind == "take":
            row, timeline = ask.seen
            if not self._guards("compare-and-swap"):
                return True
            return row == state.row and timeline in (state.timeline, None)
        (timeline,) = ask.seen
        same = timeline == state.timeline or not self._guards("timeline")
        return ask.old == state.row[0] and same

    def _faulty(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        one, who = state.processes[at], "PQ"[at]
        if one.life == "dead":
            fresh = Process(late=one.late, write=one.write)
            yield f"{who} starts again", _with(state, at, fresh)
            return
        if "kill" in state.faults:
            late = one.late or (one.ask if one.ask and one.ask.state == "sent" else None)
            dead = Process("dead", late=late, write=one.write)
            yield f"{who} is killed", _after(_with(state, at, dead), "kill")
        if one.mode == "runs":
            for fault, mode in (("freeze", "frozen"), ("pause", "paused")):
                if fault in state.faults:
                    after = _with(state, at, one._replace(mode=mode))
                    words = "is frozen" if fault == "freeze" else "is paused with its machine"
                    yield f"{who} {words}", _after(after, fault)
        else:
            yield f"{who} goes on", _with(state, at, one._replace(mode="runs"))
        if one.cut:
            yield f"{who} is no longer cut off", _with(state, at, one._replace(cut=False))
        elif "cut" in state.faults:
            after = _with(state, at, one._replace(cut=True))
            yield f"{who} is cut off", _after(after, "cut")

    def _guards(self, guard: str) -> bool:
        return guard != self._without

    # --- what must hold ---------------------------------------------------------------------------

    def _sends(self, one: Process) -> bool:
        may = one.left > 0 or not self._guards("own end")
        return one.life == "holds" and one.mode == "runs" and may

    def wrong(self, state: LeaseState) -> str | None:
        if state.wrong:
            return state.wrong
        # A machine that its host paused sends until its next renewal fails: that is not promised.
        senders = [one for one in state.processes if self._sends(one) and not one.slow]
        return "two processes may send" if len(senders) > 1 else None

    def calm(self, state: LeaseState) -> LeaseState | None:
        if any(self._sends(one) and not one.cut for one in state.processes):
            return None
        state = state._replace(faults=())
        for at in (0, 1):
            one = state.processes[at]
            well = one._replace(mode="runs", cut=False)
            if one.life == "dead":
                well = Process(late=one.late, write=one.write)
            if well != one:
                return _with(state, at, well)
        for at, one in enumerate(state.processes):
            for words, after in (*self._databases(state, at), *self._works(state, at)):
                if after != state and (words != " renews it" or one.life == "took"):
                    return self._plain(after)
        return self._plain(self._tick(state))

    def missing(self, state: LeaseState) -> str | None:
        return None if any(map(self._sends, state.processes)) else "nobody may send"

    def _plain(self, state: LeaseState) -> LeaseState:
        """The same state without what can no longer matter, and its numbers counted from 1 on."""
        if state.replica is not None and "failover" not in state.faults:
            state = state._replace(replica=None)
        if state.token_replica is not None and "set back" not in state.faults:
            state = state._replace(token_replica=None)
        if self._guards("timeline") and self._guards("compare-and-swap"):
            for at, one in enumerate(state.processes):
                state = _with(state, at, self._without_what_is_past(state, one))
        return _renumbered(state)

    def _without_what_is_past(self, state: LeaseState, one: Process) -> Process:
        # Neither a row nor a timeline comes back: what is refused now always will be.
        if one.seen is not None and (
            one.life != "waits" or one.seen != (state.row, state.timeline)
        ):
            one = one._replace(seen=None, seen_for=0)
        if one.late is not None and not self._agrees(state, one.late):
            one = one._replace(late=None)
        if one.ask is not None and one.ask.state == "sent" and not self._agrees(state, one.ask):
            one = one._replace(ask=one.ask._replace(state="refused"))
        refused = state.token_replica is None and self._guards("fencing token")
        if refused and one.write not in (state.token, one.incarnation):
            one = one._replace(write=0)
        return one

    def words(self, state: LeaseState) -> str:
        def whose(incarnation: int) -> str:
            for who, one in zip("PQ", state.processes, strict=True):
                if one.incarnation == incarnation:
                    return who
            return "nobody"

        each = [f"{who} {_in_words(one)}" for who, one in zip("PQ", state.processes, strict=True)]
        return f"{', '.join(each)}; lease {whose(state.row[0])}'s, token {whose(state.token)}'s"


def _in_words(one: Process) -> str:
    if one.life == "dead":
        return "dead"
    lease = f" with {2 * one.left} s left" if one.life in ("took", "holds") else ""
    mode = {"runs": "", "frozen": " (frozen)", "paused": " (paused)"}[one.mode]
    return f"{one.life}{lease}{mode}{' (cut off)' if one.cut else ''}"


def _after(state: LeaseState, fault: str) -> LeaseState:
    return state._replace(faults=less(state.faults, fault))


def _with(state: LeaseState, at: int, one: Process) -> LeaseState:
    both = (one, state.processes[1]) if at == 0 else (state.processes[0], one)
    return state._replace(processes=both)


def _numbers(state: LeaseState) -> Iterable[int]:
    """Incarnations and numbers of rows: only which are equal matters."""
    yield from state.row
    yield from state.replica or ()
    yield state.token
    yield state.reader
    yield from state.token_replica or ()
    for one in state.processes:
        yield one.incarnation
        yield one.write
        yield one.token or 0
        for ask in (one.ask, one.late):
            if ask is not None:
                yield ask.old
                yield ask.incarnation
                if ask.kind == "take":
                    yield from ask.seen[0]
        if one.seen is not None:
            yield from one.seen[0]


def _renumbered(state: LeaseState) -> LeaseState:
    """The same state with its numbers counted from 1 on, so that equal states are equal."""
    names = {0: 0}
    for number in _numbers(state):
        names.setdefault(number, len(names))
    if all(number == name for number, name in names.items()):
        return state

    def pair(row: tuple[int, int]) -> tuple[int, int]:
        return names[row[0]], names[row[1]]

    def asked(ask: Ask | None) -> Ask | None:
        if ask is None:
            return None
        seen = (pair(ask.seen[0]), ask.seen[1]) if ask.kind == "take" else ask.seen
        return ask._replace(old=names[ask.old], incarnation=names[ask.incarnation], seen=seen)

    def process(one: Process) -> Process:
        return one._replace(
            incarnation=names[one.incarnation],
            write=names[one.write],
            token=None if one.token is None else names[one.token],
            ask=asked(one.ask),
            late=asked(one.late),
            seen=None if one.seen is None else (pair(one.seen[0]), one.seen[1]),
        )

    return state._replace(
        processes=(process(state.processes[0]), process(state.processes[1])),
        row=pair(state.row),
        replica=state.replica and pair(state.replica),
        token=names[state.token],
        reader=names[state.reader],
        token_replica=state.token_replica and pair(state.token_replica),
    )
