"""One name with two processes: who may send and write for it, in ticks of 2 s."""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from fedsender_lab.cluster.search import less


class Row(NamedTuple):
    """The row of the lease, as the sender's database has it.

    Attributes:
        holder: incarnation of the process that has it.
        number: another one after each write.
        ends: whether its holder stops unless it is renewed.
        timeline: of the database, when it was taken.
    """

    holder: int
    number: int
    ends: bool
    timeline: int = 0


class Ask(NamedTuple):
    """A call to the sender's database: a renewal, or a take-over.

    Attributes:
        incarnation: the asker's, from then on.
        seen: the row that a take-over compares; None: it is a renewal.
        timeline: that both compare; None: they do not.
        ends: what it writes into the row.
        age: ticks since it was asked, by the asker's clock.
        state: `sent`, or its result: `done`, `wanted` (done, and somebody asks for one that ends)
            or `refused`.
        slow: whether the asker's clock stood still meanwhile.
    """

    incarnation: int
    seen: Row | None
    timeline: int | None
    ends: bool
    age: int = 0
    state: str = "sent"
    slow: bool = False


class Session(NamedTuple):
    """A session that is to write in the homeserver's database, as an incarnation.

    Attributes:
        stage: `marked` with the name, or `asked` whose the lease is: one of the two is to come;
            `open`: it may write; `writes`: its transaction is under way.
    """

    stage: str
    incarnation: int


class Process(NamedTuple):
    """A process of the name, and what its machine keeps when it dies.

    Attributes:
        life: `dead`, `waits`, `took` the lease, ended the sessions of others and is `alone`, or has
            read the position and `holds`.
        mode: `runs`, `frozen` (its clock goes on), or `paused` by its host (its clock stands).
        cut: whether it reaches no database.
        here: incarnations that ran on this machine, by its file.
        incarnation: its own.
        timeline: the sender's database's, when it took the lease.
        ends, wanted: whether its lease ends; whether it was told that somebody asks for that.
        left: ticks until it ends, by its own clock.
        ask, late: the call that it waits for; one that it has given up, which may still be done.
        seen, seen_for: the row and timeline as last read, and for how many ticks they have stood.
        session: that it writes with.
        writes: incarnations of transactions that it left under way.
        slow: whether its clock stood still since it asked for the lease that it has.
    """

    life: str = "waits"
    mode: str = "runs"
    cut: bool = False
    here: tuple[int, ...] = ()
    incarnation: int = 0
    timeline: int = 0
    ends: bool = True
    wanted: bool = False
    left: int = 0
    ask: Ask | None = None
    late: Ask | None = None
    seen: tuple[Row, int] | None = None
    seen_for: int = 0
    session: Session | None = None
    writes: tuple[int, ...] = ()
    slow: bool = False


class LeaseState(NamedTuple):
    """A state of `Leases`.

    Attributes:
        row, asked: of the lease; whether somebody asks for one that ends.
        timeline: of the sender's database: another one after each failover.
        replica: `row` as of some moment before, for a failover; None: none comes any more.
        reader: the incarnation that has last read the position to go on from, while the lease was
            its own: no row, a note of the model's.
        faults: those that may still happen.
    """

    processes: tuple[Process, Process]
    row: Row
    replica: Row | None
    reader: int
    faults: tuple[str, ...]
    asked: bool = False
    timeline: int = 0
    wrong: str = ""


LEASE: Final = 3
"""Ticks of 2 s for which a lease holds: it is renewed each tick."""
FAULTS: Final = ("kill", "freeze", "pause", "cut", "slow call", "failover")
"""`failover` is of the sender's database, to a replica of it."""
ACTIVE: Final = ("took", "alone", "holds")


class Leases:
    """One name with two processes: P has its lease at first, Q stands by.

    Args:
        faults: those of `FAULTS` that may happen, each as often as it stands here.
        ends: whether P's lease ends from the beginning; else when Q has asked for that.
        without: a guard to leave out: see docs/clusters-protocol.md.
    """

    def __init__(self, *faults: str, ends: bool = True, without: str = "") -> None:
        self._faults = tuple(sorted(faults))
        self._ends = ends
        self._without = without

    def begin(self) -> LeaseState:
        holder = Process("holds", here=(1,), incarnation=1, ends=self._ends, left=LEASE)
        row = Row(1, 2, self._ends)
        return self._plain(LeaseState((holder, Process()), row, row, 1, self._faults))

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
            after = state._replace(row=state.replica, asked=False, timeline=state.timeline + 1)
            yield "the replica takes over", _after(after, "failover")

    def _tick(self, state: LeaseState) -> LeaseState:
        one, two = state.processes
        return state._replace(processes=(self._aged(one), self._aged(two)))

    def _aged(self, one: Process) -> Process:
        ask = one.ask
        if one.mode == "paused":
            if ask is not None:
                ask = ask._replace(slow=True)
            return one._replace(ask=ask, slow=one.life in ACTIVE)
        late = one.late
        if ask is not None:
            if ask.age == 1:
                # Given up after 2 s; the database may do it yet.
                late = late or (ask if ask.state == "sent" else None)
                ask = None
            else:
                ask = ask._replace(age=1)
        left = max(0, one.left - one.ends)
        one = one._replace(
            left=left, ask=ask, late=late, seen_for=min(LEASE, one.seen_for + 1) if one.seen else 0
        )
        return self._lost(one) if self._over(one) and one.mode == "runs" else one

    def _over(self, one: Process) -> bool:
        return one.life in ACTIVE and one.ends and one.left == 0

    def _lost(self, one: Process) -> Process:
        """The process begins again; what it had under way may still be done."""
        fresh = Process(mode=one.mode, cut=one.cut, here=one.here, late=one.late)
        return fresh._replace(writes=_under_way(one))

    def _works(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        """What a process does by itself."""
        one = state.processes[at]
        if one.mode != "runs":
            return
        if self._over(one):
            yield " sees that its lease has ended", _with(state, at, self._lost(one))
        if one.ask is not None and one.ask.state != "sent" and not one.cut:
            yield " hears the answer", _with(state, at, self._answered(one, one.ask))
        if one.cut or one.life == "dead":
            return
        if one.ask is None:
            yield from self._waits(state, at)
            yield from self._calls(state, at)
        if one.life == "took":
            after = self._evicted(state) if self._guards("eviction") else state
            alone = after.processes[at]._replace(life="alone")
            yield " ends all sessions of the name", _with(after, at, alone)
        if one.life == "alone":
            valid = (state.row.holder, state.timeline) == (one.incarnation, one.timeline)
            after = state._replace(reader=one.incarnation) if valid else state
            yield " reads the position", _with(after, at, one._replace(life="holds"))
        if one.life == "holds":
            yield from self._sessions(state, at)

    def _waits(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        one = state.processes[at]
        if one.life != "waits":
            return
        row, timeline = one.seen or (None, None)
        moved = timeline != state.timeline and self._guards("timeline")
        if row != state.row or moved:
            seen = (state.row, state.timeline)
            yield " reads the lease", _with(state, at, one._replace(seen=seen, seen_for=0))
        elif not (state.row.ends or state.asked or state.row.holder in one.here):
            yield " asks for a lease that ends", state._replace(asked=True)

    def _calls(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        one = state.processes[at]
        asks = self._asks(state, one)
        if asks is None or asks.ask is None:
            return
        words = "its renewal" if one.life in ACTIVE else "the lease"
        if "slow call" in state.faults:
            after = _after(_with(state, at, asks), "slow call")
            yield f" asks for {words}, which takes long", after
        after, told = self._called(state, asks.ask)
        words = "renews it" if one.life in ACTIVE else "takes the lease"
        words = "is refused it" if told.state == "refused" else words
        yield f" {words}", _with(after, at, self._answered(asks, told))

    def _asks(self, state: LeaseState, one: Process) -> Process | None:
        """The process with the call that it makes next, if it makes one."""
        if one.life == "waits":
            if one.seen is None:
                return None
            row, timeline = one.seen
            # Its machine knows who of those that ran there is dead.
            dead = row.holder in one.here
            stands = row.timeline == timeline or not self._guards("timeline of the row")
            may = row.ends or dead or not self._guards("confirmation")
            if not (dead and stands) and not (may and one.seen_for == LEASE):
                return None
            fresh = 1 + max(_numbers(state))
            at = timeline if self._guards("timeline") else None
            # Noted before it is asked: the answer may be lost, and the process die.
            here = (*one.here, fresh)
            return one._replace(ask=Ask(fresh, row, at, ends=True), here=here)
        if one.life not in ACTIVE or (one.ends and one.left == LEASE):
            return None
        ends = one.ends or one.wanted
        if ends and not one.ends and self._guards("end before it is said"):
            one = one._replace(ends=True, left=LEASE)
        compared = one.timeline if self._guards("timeline") else None
        return one._replace(ask=Ask(one.incarnation, None, compared, ends))

    def _called(self, state: LeaseState, ask: Ask) -> tuple[LeaseState, Ask]:
        """The call is carried out, or refused."""
        if not self._agrees(state, ask):
            return state, ask._replace(state="refused")
        of = state.row.timeline if ask.seen is None else state.timeline
        row = Row(ask.incarnation, 2 + max(_numbers(state)), ask.ends, of)
        if ask.seen is not None:
            return state._replace(row=row, asked=False), ask._replace(state="done")
        told = "wanted" if state.asked else "done"
        return state._replace(row=row), ask._replace(state=told)

    def _agrees(self, state: LeaseState, ask: Ask) -> bool:
        """Whether the database carries this call out: its compare-and-swap."""
        if ask.timeline not in (state.timeline, None):
            return False
        if ask.seen is not None:
            return ask.seen == state.row or not self._guards("compare-and-swap")
        return ask.incarnation == state.row.holder

    def _answered(self, one: Process, ask: Ask) -> Process:
        if ask.state == "refused":
            return self._lost(one)
        left = LEASE - (ask.age if self._guards("early end") else 0)
        one = one._replace(
            ends=ask.ends, wanted=ask.state == "wanted", left=left, ask=None, slow=ask.slow
        )
        if ask.seen is None:
            return one
        timeline = ask.timeline or 0
        return one._replace(life="took", incarnation=ask.incarnation, timeline=timeline, seen=None)

    # --- the fence --------------------------------------------------------------------------------

    def _evicted(self, state: LeaseState) -> LeaseState:
        """The state without the sessions that are marked."""
        for at, one in enumerate(state.processes):
            session = one.session if one.session and one.session.stage == "asked" else None
            state = _with(state, at, one._replace(session=session, writes=()))
        return state

    def _sessions(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        """What a holder does to write: whether its lease has ended does not count."""
        one = state.processes[at]
        if one.session is None:
            if not self._guards("admission"):
                yield " opens a session", self._in_stage(state, at, "open")
            elif self._guards("mark first"):
                yield " marks a session", self._in_stage(state, at, "marked")
            else:
                yield from self._admitted(state, at, "asked")
        elif one.session.stage == "marked":
            yield from self._admitted(state, at, "open")
        elif one.session.stage == "asked":
            yield " marks the session", self._in_stage(state, at, "open")
        elif one.session.stage == "open":
            yield " writes", self._committed(state, one.session.incarnation)
            if "slow call" in state.faults:
                after = self._in_stage(state, at, "writes")
                yield " writes, which takes long", _after(after, "slow call")

    def _admitted(self, state: LeaseState, at: int, stage: str) -> Iterator[tuple[str, LeaseState]]:
        one = state.processes[at]
        same = one.timeline == state.timeline or not self._guards("timeline")
        if state.row.holder == one.incarnation and same:
            yield " reads that the lease is its own", self._in_stage(state, at, stage)
        else:
            yield " reads that the lease is not its own", _with(state, at, self._lost(one))

    def _in_stage(self, state: LeaseState, at: int, stage: str) -> LeaseState:
        one = state.processes[at]
        return _with(state, at, one._replace(session=Session(stage, one.incarnation)))

    def _committed(self, state: LeaseState, incarnation: int) -> LeaseState:
        if incarnation == state.reader:
            return state
        return state._replace(wrong="a former holder's write changes what its successor has read")

    def _databases(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        """What the databases do with a process's slow calls, however late."""
        one = state.processes[at]
        for ask in (one.ask, one.late):
            if ask is not None and ask.state == "sent":
                after, told = self._called(state, ask)
                heard = one._replace(ask=told) if ask is one.ask else one._replace(late=None)
                kind = "renew" if ask.seen is None else "take"
                yield f"'s call to {kind} the lease is {told.state}", _with(after, at, heard)
        if one.session is not None and one.session.stage == "writes":
            after = self._in_stage(state, at, "open")
            yield "'s write is committed", self._committed(after, one.session.incarnation)
        for number in one.writes:
            rest = tuple(each for each in one.writes if each != number)
            after = _with(state, at, one._replace(writes=rest))
            yield "'s write is committed", self._committed(after, number)

    # --- faults -----------------------------------------------------------------------------------

    def _faulty(self, state: LeaseState, at: int) -> Iterator[tuple[str, LeaseState]]:
        one, who = state.processes[at], "PQ"[at]
        if one.life == "dead":
            yield f"{who} starts again", _with(state, at, one._replace(life="waits"))
            return
        if "kill" in state.faults:
            yield f"{who} is killed", _after(_with(state, at, _dead(one)), "kill")
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
        over = self._over(one) and self._guards("own end")
        return one.life == "holds" and one.mode == "runs" and not over

    def wrong(self, state: LeaseState) -> str | None:
        if state.wrong:
            return state.wrong
        # A machine that its host paused sends until its next renewal fails: that is not promised.
        senders = [one for one in state.processes if self._sends(one) and not one.slow]
        return "two processes may send" if len(senders) > 1 else None

    def calm(self, state: LeaseState) -> LeaseState | None:
        if any(self._sends(one) and not one.cut for one in state.processes):
            return None
        state = state._replace(faults=(), replica=None)
        for at in (0, 1):
            one = state.processes[at]
            well = one._replace(mode="runs", cut=False)
            if one.life == "dead":
                well = one._replace(life="waits")
            if well != one:
                return _with(state, at, well)
        for at in (0, 1):
            for words, after in (*self._databases(state, at), *self._works(state, at)):
                if after != state and words != " renews it":
                    return self._plain(after)
        return self._plain(self._tick(state))

    def missing(self, state: LeaseState) -> str | None:
        return None if any(map(self._sends, state.processes)) else "nobody may send"

    # --- equal states are made equal --------------------------------------------------------------

    def _plain(self, state: LeaseState) -> LeaseState:
        """The same state without what can no longer matter, and its numbers counted from 1 on."""
        if state.replica is not None and "failover" not in state.faults:
            state = state._replace(replica=None)
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
        rows = {state.row.holder, state.replica.holder if state.replica else 0}
        asked = {each.incarnation for each in (one.ask, one.late) if each is not None}
        here = tuple(each for each in one.here if each in rows or each in asked)
        return one if here == one.here else one._replace(here=here)

    def words(self, state: LeaseState) -> str:
        def whose(incarnation: int) -> str:
            for who, one in zip("PQ", state.processes, strict=True):
                if incarnation in (one.incarnation, *one.here):
                    return who
            return "nobody"

        each = [f"{who} {_in_words(one)}" for who, one in zip("PQ", state.processes, strict=True)]
        return f"{', '.join(each)}; lease {whose(state.row.holder)}'s"


def _in_words(one: Process) -> str:
    if one.life == "dead":
        return "dead"
    left = f" with {2 * one.left} s left" if one.life in ACTIVE and one.ends else ""
    mode = {"runs": "", "frozen": " (frozen)", "paused": " (paused)"}[one.mode]
    return f"{one.life}{left}{mode}{' (cut off)' if one.cut else ''}"


def _under_way(one: Process) -> tuple[int, ...]:
    if one.session is None or one.session.stage != "writes":
        return one.writes
    return tuple(sorted({*one.writes, one.session.incarnation}))


def _dead(one: Process) -> Process:
    late = one.late or (one.ask if one.ask and one.ask.state == "sent" else None)
    return Process("dead", here=one.here, late=late, writes=_under_way(one))


def _after(state: LeaseState, fault: str) -> LeaseState:
    return state._replace(faults=less(state.faults, fault))


def _with(state: LeaseState, at: int, one: Process) -> LeaseState:
    if one is state.processes[at]:
        return state
    both = (one, state.processes[1]) if at == 0 else (state.processes[0], one)
    return state._replace(processes=both)


def _numbers(state: LeaseState) -> Iterable[int]:
    """Incarnations and numbers of rows: only which are equal matters."""
    yield from state.row[:2]
    yield from state.replica[:2] if state.replica else ()
    yield state.reader
    for one in state.processes:
        yield one.incarnation
        yield from one.here
        yield from one.writes
        if one.session is not None:
            yield one.session.incarnation
        for ask in (one.ask, one.late):
            if ask is not None:
                yield ask.incarnation
                yield from ask.seen[:2] if ask.seen else ()
        if one.seen is not None:
            yield from one.seen[0][:2]


def _renumbered(state: LeaseState) -> LeaseState:
    """The same state with its numbers counted from 1 on, so that equal states are equal."""
    names = {0: 0}
    for number in _numbers(state):
        names.setdefault(number, len(names))
    if all(number == name for number, name in names.items()):
        return state

    def rowed(row: Row) -> Row:
        return row._replace(holder=names[row.holder], number=names[row.number])

    def asked(ask: Ask | None) -> Ask | None:
        if ask is None:
            return None
        seen = ask.seen and rowed(ask.seen)
        return ask._replace(incarnation=names[ask.incarnation], seen=seen)

    def process(one: Process) -> Process:
        session = one.session
        return one._replace(
            here=tuple(names[each] for each in one.here),
            incarnation=names[one.incarnation],
            ask=asked(one.ask),
            late=asked(one.late),
            seen=None if one.seen is None else (rowed(one.seen[0]), one.seen[1]),
            session=session and session._replace(incarnation=names[session.incarnation]),
            writes=tuple(sorted(names[each] for each in one.writes)),
        )

    return state._replace(
        processes=(process(state.processes[0]), process(state.processes[1])),
        row=rowed(state.row),
        replica=state.replica and rowed(state.replica),
        reader=names[state.reader],
    )
