"""Three names, each with as many processes as it takes, and changes of the list of them.

Who sends to which server, and whether an event is passed. It takes from `Leases` that a lease
lapses once its holder has stopped sending, and that after a failover all have.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from fedsender_lab.cluster.search import less

SenderList = tuple[int, str]
"""A list of senders: its random id, and its names."""
Token = tuple[int, int]
"""A fencing token: the incarnation, and the id of the list under which it opened."""


class Member(NamedTuple):
    """The process of a name, which has a live lease.

    Attributes:
        incarnation: its own.
        phase: `idle`, `applies` a list, is `ready` to open, `open`, or `stopped`.
        list: the list that it acts by; `stopped`: the one that it stopped for.
        saw: `applies`: the list that it found in the homeserver's database; `ready`: the token.
        position: where it knows its events position to be, while it is open.
    """

    incarnation: int
    phase: str = "idle"
    list: SenderList = (0, "")
    saw: tuple[int | str, ...] = ()
    position: int = -1


class Walk(NamedTuple):
    """A walk: events above `at`, up to `upto`, for servers not ours in all lists since `since`."""

    at: int
    upto: int
    since: SenderList


class SenderDatabase(NamedTuple):
    """The sender's database.

    Attributes:
        lists: each list that was in force, with a random id; the last one is.
        wanted: the list that is wanted.
        leases: by name the incarnation; negative if the lease has lapsed, 0 if it is void.
        stopped: by name (incarnation, id of the list) that it has stopped for.
    """

    lists: tuple[SenderList, ...]
    wanted: SenderList | None
    leases: tuple[int, ...]
    stopped: tuple[Token | None, ...]


class HomeserverDatabase(NamedTuple):
    """The homeserver's database.

    Attributes:
        head: newest event; the events are 1, 2, ..., each in a room of its own, for all servers.
        list: the list that the rows below stand for.
        positions: by name; -1: it has no row.
        walks: by name.
        tokens: by name (incarnation, id of the list).
        marks: by server its LSSO; -1: it has no row.
        rows: by server the events that it is owed or was sent, as bits.
    """

    head: int
    list: SenderList
    positions: tuple[int, ...]
    walks: tuple[Walk | None, ...]
    tokens: tuple[Token, ...]
    marks: tuple[int, ...]
    rows: tuple[int, ...]


class ListState(NamedTuple):
    """A state of `Lists`.

    Attributes:
        decided, owed: the two databases.
        decided_replica, owed_replica: as of some moment before; None: no failover comes.
        members: by name its process; None: it has none with a lease.
        zombie: (name, process, whether it writes once only): one that has lost its lease, and does
            not know; or a call of a process that has given it up.
        job: (the list wanted, whether it is put in force or withdrawn): a change of `decided`
            whose author has read the row, and has not written it.
        sent: by server the events that it was sent, as bits.
        wants: lists that will be wanted.
    """

    decided: SenderDatabase
    owed: HomeserverDatabase
    decided_replica: SenderDatabase | None
    owed_replica: HomeserverDatabase | None
    members: tuple[Member | None, ...]
    faults: tuple[str, ...]
    wants: tuple[str, ...]
    zombie: tuple[int, Member, bool] | None = None
    job: tuple[SenderList, bool] | None = None
    sent: tuple[int, ...] = (0, 0)
    wrong: str = ""


Become = Callable[[ListState, Member], ListState]
"""The state after a process has become what it is from then on."""

NAMES: Final = "ABC"
OWNERS: Final = {"AB": "AB", "ABC": "CA", "BC": "BC"}
"""By list the owner of each of two servers."""
LIST_FAULTS: Final = ("kill", "pause", "slow call", "failover", "set back")


class Lists:
    """Three names, two servers, and changes of the list: AB, ABC, BC.

    Args:
        faults: those of `LIST_FAULTS` that may happen, each as often as it stands here.
        without: a guard to leave out: `fencing token` (no write compares it), `compare-and-swap`
            (of the list), `walk`, `durable walk` (it is in its process's memory), `hold back` (no
            PDU before the walk has passed), `first row` (it has the LSSO of the walk), `unfinished
            walks`, `lost list` (a failover's), `fence all` (those that have lapsed too), `void
            lapsed` (their leases), `one transaction` (positions and walks revert together).
        wants: the lists that are wanted, one after the other.
        events: how many there are.
        jobs: whether a change of the list is read and written in two steps.
    """

    def __init__(
        self,
        *faults: str,
        without: str = "",
        wants: Sequence[str] = ("ABC",),
        events: int = 1,
        jobs: bool = False,
    ) -> None:
        self._faults = tuple(sorted(faults))
        self._without = without
        self._wants, self._events, self._jobs = tuple(wants), events, jobs

    def begin(self) -> ListState:
        first = (1, "AB")
        decided = SenderDatabase((first,), None, (1, 2, 3), (None, None, None))
        owed = HomeserverDatabase(
            0, first, (0, 0, -1), (None, None, None), ((1, 1), (2, 1), (0, 0)), (-1, -1), (0, 0)
        )
        members = (
            Member(1, "open", first, position=0),
            Member(2, "open", first, position=0),
            Member(3),
        )
        return self._plain(
            ListState(decided, owed, _void(decided), owed, members, self._faults, self._wants)
        )

    # --- steps ------------------------------------------------------------------------------------

    def steps(self, state: ListState) -> Iterator[tuple[str, ListState]]:
        for words, after in self._steps(state):
            yield words, self._plain(after)

    def _steps(self, state: ListState) -> Iterator[tuple[str, ListState]]:
        decided, owed = state.decided, state.owed
        if owed.head < self._events:
            yield f"event {owed.head + 1}", state._replace(owed=owed._replace(head=owed.head + 1))
        if state.wants and decided.wanted is None and state.wants[0] != decided.lists[-1][1]:
            after = state._replace(wants=state.wants[1:])
            name = state.wants[0]
            yield f"{name} is wanted", _decide(after, wanted=(_fresh(state), name))
        yield from self._list_steps(state)
        for at in range(3):
            yield from self._member_steps(state, at)
        if state.zombie is not None:
            at, zombie, once = state.zombie
            for words, after in self._writes(state, at, zombie, by_zombie=True):
                if once:
                    after = after._replace(zombie=None)
                yield f"a late write of {NAMES[at]}'s: {words}", after
            if "pause" in state.faults or "slow call" in state.faults:
                yield f"{NAMES[at]}'s former process ends", state._replace(zombie=None)
            stands = not once and abs(decided.leases[at]) == zombie.incarnation
            if stands and zombie.phase == "open" and zombie.list != decided.lists[-1]:
                wrong = "a former holder's write to the sender's database, under another list"
                yield f"{NAMES[at]}'s former process writes", state._replace(wrong=wrong)
        yield from self._disasters(state)

    def _list_steps(self, state: ListState) -> Iterator[tuple[str, ListState]]:
        """The row with the list in force and the one that is wanted."""
        decided = state.decided
        if decided.wanted is not None:
            if self._may_decide(decided):
                yield f"{decided.wanted[1]} is in force", self._in_force(state)
            yield "the change is withdrawn", _decide(state, wanted=None)
            if self._jobs and state.job is None:
                job = (decided.wanted, False)
                yield "somebody is about to withdraw it", state._replace(job=job)
                if self._may_decide(decided):
                    job = (decided.wanted, True)
                    yield "somebody is about to put it in force", state._replace(job=job)
        if state.job is not None:
            wanted, puts = state.job
            after = state._replace(job=None)
            if wanted == decided.wanted or not self._guards("compare-and-swap"):
                lists = (*decided.lists, wanted) if puts else decided.lists
                after = _decide(after, lists=lists, wanted=None)
            yield "who was about to writes the row", after

    def _may_decide(self, decided: SenderDatabase) -> bool:
        """Whether all have stopped, or lapsed, and all that are new have a lease."""
        wanted = decided.wanted
        assert wanted is not None
        for at, name in enumerate(NAMES):
            lease = decided.leases[at]
            if name in decided.lists[-1][1]:
                if lease > 0 and decided.stopped[at] != (lease, wanted[0]):
                    return False
            elif name in wanted[1] and lease <= 0:
                return False
        return True

    def _in_force(self, state: ListState) -> ListState:
        decided = state.decided
        assert decided.wanted is not None
        leases = decided.leases
        if self._guards("void lapsed"):
            leases = tuple(max(0, each) for each in leases)
        lists = (*decided.lists, decided.wanted)
        return _decide(state, lists=lists, wanted=None, leases=leases)

    def _member_steps(self, state: ListState, at: int) -> Iterator[tuple[str, ListState]]:
        name, member, decided = NAMES[at], state.members[at], state.decided
        if member is None:
            number = _fresh(state)
            after = _decide(state, leases=_put(decided.leases, at, number))
            yield f"{name} takes its lease", _member(after, at, Member(number))
            return
        present, wanted = decided.lists[-1], decided.wanted
        if wanted is not None and name in present[1]:
            if member.phase != "stopped" or member.list != wanted:
                stopped = _put(decided.stopped, at, (member.incarnation, wanted[0]))
                after = _decide(state, stopped=stopped)
                member = Member(member.incarnation, "stopped", wanted)
                yield f"{name} has stopped", _member(after, at, member)
        elif name in present[1] and (
            member.phase in ("idle", "stopped") or (member.list != present)
        ):
            owed = state.owed
            if owed.list != present:
                new = Member(member.incarnation, "applies", present, owed.list)
                if new != member:
                    yield f"{name} is about to apply the list", _member(state, at, new)
            else:
                new = Member(member.incarnation, "ready", present, owed.tokens[at])
                if new != member:
                    yield f"{name} is about to open", _member(state, at, new)
        elif name not in present[1] and member.phase != "idle" and wanted is None:
            yield f"{name} leaves", _member(state, at, Member(member.incarnation))
        for words, after in self._writes(state, at, member):
            yield f"{name} {words}", after
            if member.phase != "stopped" and "slow call" in state.faults and state.zombie is None:
                late = state._replace(zombie=(at, member, True))
                late = _after(_member(late, at, Member(member.incarnation)), "slow call")
                yield f"{name} gives up a call, which may be done yet", late
        for fault in ("kill", "pause"):
            if fault in state.faults and (fault == "kill" or state.zombie is None):
                after = _decide(state, leases=_put(decided.leases, at, -member.incarnation))
                zombie = state.zombie if fault == "kill" else (at, member, False)
                after = _after(_member(after, at, None)._replace(zombie=zombie), fault)
                words = "is killed, its lease lapses"
                if fault == "pause":
                    words = "is paused by its host, its lease lapses, it goes on"
                after = self._forget_walk(after, at)
                yield f"{name} {words}", after

    def _forget_walk(self, state: ListState, at: int) -> ListState:
        if self._guards("durable walk"):
            return state
        return state._replace(owed=state.owed._replace(walks=_put(state.owed.walks, at, None)))

    def _disasters(self, state: ListState) -> Iterator[tuple[str, ListState]]:
        if state.decided_replica is not None:
            void = _void(state.decided)
            if state.decided_replica != void:
                yield "the replica has all", state._replace(decided_replica=void)
            # Nobody takes a lease before all have ended: that is `Leases`.
            after = state._replace(
                decided=state.decided_replica, members=(None, None, None), job=None
            )
            yield "a failover, all leases end", _after(after, "failover")
        if state.owed_replica is not None:
            if state.owed_replica != state.owed:
                yield "the homeserver's replica has all", state._replace(owed_replica=state.owed)
            copy, owed = state.owed_replica, state.owed
            if not self._guards("one transaction"):
                copy = copy._replace(
                    walks=owed.walks,
                    list=owed.list,
                    tokens=owed.tokens,
                    positions=tuple(
                        min(there, copy.head) if was < 0 or there < 0 else was
                        for was, there in zip(copy.positions, owed.positions, strict=True)
                    ),
                )
            # Events that are lost were sent for nothing; new ones get their numbers.
            there = (2 << copy.head) - 1
            sent = (state.sent[0] & there, state.sent[1] & there)
            after = state._replace(owed=copy, sent=sent)
            yield "the homeserver's replica takes over", _after(after, "set back")

    def _writes(
        self, state: ListState, at: int, one: Member, *, by_zombie: bool = False
    ) -> Iterator[tuple[str, ListState]]:
        """The transactions of the homeserver's database that this process makes next."""
        owed = state.owed

        def become(after: ListState, member: Member) -> ListState:
            if by_zombie:
                assert state.zombie is not None
                return after._replace(zombie=(at, member, state.zombie[2]))
            return _member(after, at, member)

        if one.phase == "applies":
            after = state
            if owed.list == one.saw:
                after = state._replace(owed=self._applied(state.decided, owed, one.list))
            yield f"applies {one.list[1]}", become(after, Member(one.incarnation))
        elif one.phase == "ready":
            if owed.list == one.list and owed.tokens[at] == one.saw:
                tokens = _put(owed.tokens, at, (one.incarnation, one.list[0]))
                after = state._replace(owed=owed._replace(tokens=tokens))
                position = owed.positions[at]
                opened = Member(one.incarnation, "open", one.list, position=position)
                yield f"opens at {position}", become(after, opened)
            else:
                yield "does not open", become(state, Member(one.incarnation))
        elif one.phase == "open":
            yield from self._open_writes(state, at, one, become)

    def _open_writes(
        self, state: ListState, at: int, one: Member, become: Become
    ) -> Iterator[tuple[str, ListState]]:
        owed, name = state.owed, NAMES[at]
        ours = owed.tokens[at] == (one.incarnation, one.list[0])
        if not (ours or not self._guards("fencing token")) or owed.positions[at] != one.position:
            yield "is refused a write, and begins anew", become(state, Member(one.incarnation))
            return
        owners = OWNERS[one.list[1]]
        walk = owed.walks[at]
        gained = [
            server
            for server in range(2)
            if walk is not None and self._gained(state.decided, name, server, walk.since, one.list)
        ]
        event = one.position + 1
        if event <= owed.head:
            mine = [
                server
                for server in range(2)
                if owners[server] == name
                and not (walk is not None and server in gained and event <= walk.upto)
            ]
            after = owed
            for server in mine:
                floor = event - 1
                if walk is not None and server in gained and self._guards("first row"):
                    floor = walk.at
                after = self._owe(after, server, event, floor)
            after = after._replace(positions=_put(after.positions, at, event))
            moved = become(state._replace(owed=after), one._replace(position=event))
            yield f"fans out {event}", moved
        if walk is not None:
            event, after = walk.at + 1, owed
            if event <= min(walk.upto, owed.head):
                for server in gained:
                    after = self._owe(after, server, event, event - 1)
                new: Walk | None = walk._replace(at=event)
            elif event <= walk.upto:
                return  # Events that a failover has lost; new ones get their numbers.
            else:
                new = None
            after = after._replace(walks=_put(after.walks, at, new))
            words = "ends its walk" if new is None else f"walks {event}"
            yield words, state._replace(owed=after)
        for server in range(2):
            if owners[server] != name or owed.marks[server] < 0:
                continue
            if server in gained and self._guards("hold back"):
                continue
            above = owed.rows[server] & -(2 << owed.marks[server])
            if above:
                mark = above.bit_length() - 1
                sent = _put(state.sent, server, state.sent[server] | above)
                after = owed._replace(marks=_put(owed.marks, server, mark))
                yield (
                    f"sends to server {server} up to {mark}",
                    state._replace(owed=after, sent=sent),
                )

    def _owe(
        self, owed: HomeserverDatabase, server: int, event: int, floor: int
    ) -> HomeserverDatabase:
        marks = owed.marks
        if marks[server] < 0:
            marks = _put(marks, server, floor)
        return owed._replace(
            marks=marks, rows=_put(owed.rows, server, owed.rows[server] | 1 << event)
        )

    def _gained(
        self,
        decided: SenderDatabase,
        name: str,
        server: int,
        since: SenderList,
        present: SenderList,
    ) -> bool:
        """Whether the name has the server now, and had it not in each list since that one."""
        if OWNERS[present[1]][server] != name:
            return False
        if since not in decided.lists:
            # A failover has lost it: nobody knows who had what.
            return self._guards("lost list")
        lists = decided.lists[decided.lists.index(since) :]
        return any(OWNERS[each[1]][server] != name for each in lists)

    def _applied(
        self, decided: SenderDatabase, owed: HomeserverDatabase, new: SenderList
    ) -> HomeserverDatabase:
        """Make the rows of the homeserver's database those of the new list, in one transaction."""
        there = [each for each in owed.positions if each >= 0]
        lowest, highest = min(there), max(there)
        unfinished = [walk for walk in owed.walks if walk is not None]
        if self._guards("unfinished walks"):
            lowest = min([lowest, *(walk.at for walk in unfinished)])
        positions, walks, tokens = [], [], []
        for at, name in enumerate(NAMES):
            walk = owed.walks[at]
            since = owed.list
            # A list that a failover has lost: who had what under it nobody knows.
            known = since in decided.lists
            if walk is not None and known and self._guards("unfinished walks"):
                since = walk.since
            position, now = owed.positions[at], None
            if name not in new[1]:
                position = -1
            else:
                position = position if position >= 0 else highest
                lists = decided
                if new not in decided.lists:
                    lists = decided._replace(lists=(*decided.lists, new))
                gains = any(self._gained(lists, name, server, since, new) for server in range(2))
                if gains and lowest < highest and self._guards("walk"):
                    now = Walk(lowest, highest, since)
            positions.append(position)
            walks.append(now)
            tokens.append((0, new[0]) if self._guards("fence all") else owed.tokens[at])
        return owed._replace(
            list=new, positions=tuple(positions), walks=tuple(walks), tokens=tuple(tokens)
        )

    def _guards(self, guard: str) -> bool:
        return guard != self._without

    # --- equal states are made equal --------------------------------------------------------------

    def _plain(self, state: ListState) -> ListState:
        """The same state without what can no longer matter, and with its ids counted from 1 on."""
        if state.decided_replica is not None and "failover" not in state.faults:
            state = state._replace(decided_replica=None)
        if state.owed_replica is not None and "set back" not in state.faults:
            state = state._replace(owed_replica=None)
        return _with_ids_counted(self._without_what_is_past(state))

    def _without_what_is_past(self, state: ListState) -> ListState:
        zombie, now, owed = state.zombie, state.decided, state.owed
        if zombie is not None:
            at, one, once = zombie
            lease = not once and one.phase == "open" and abs(now.leases[at]) == one.incarnation
            refused = {
                "open": owed.tokens[at] != (one.incarnation, one.list[0]),
                "applies": owed.list != one.saw,
                "ready": (owed.list, owed.tokens[at]) != (one.list, one.saw),
            }
            # Neither a token nor the id of a list comes back, but with the homeserver's database.
            for_ever = state.owed_replica is None and self._guards("fencing token")
            if not lease and (one.phase not in refused or (for_ever and refused[one.phase])):
                state, zombie = state._replace(zombie=None), None
        # Stopped for another list, or as another incarnation; a lease that lapsed, and nobody left.
        wanted = now.wanted and now.wanted[0]
        stopped = tuple(
            pair if pair == (lease, wanted) else None
            for pair, lease in zip(now.stopped, now.leases, strict=True)
        )
        leases = tuple(
            lease
            if lease >= 0 or (zombie and zombie[0] == at and zombie[1].incarnation == -lease)
            else 0
            for at, lease in enumerate(now.leases)
        )
        # What went before each list that something is left of.
        left = {owed.list, *(walk.since for walk in owed.walks if walk is not None)}
        if (copy := state.owed_replica) is not None:
            left |= {copy.list, *(walk.since for walk in copy.walks if walk is not None)}
        left |= {one.list for one in state.members if one is not None}
        if zombie is not None:
            left |= {zombie[1].list}

        def cut(decided: SenderDatabase) -> SenderDatabase:
            lists = decided.lists
            while len(lists) > 1 and lists[0] not in left:
                lists = lists[1:]
            return decided._replace(lists=lists)

        # Whoever reads a token compares what it read; a value that nobody has is like any other.
        tokens = owed.tokens
        if copy is None:
            processes = [*enumerate(state.members), *([zombie[:2]] if zombie else [])]
            there = [(at, one) for at, one in processes if one is not None]
            known = {(one.incarnation, one.list[0]) for _, one in there}
            readers = {at for at, one in there if one.phase == "ready"}
            tokens = tuple(
                (0, 0) if token not in known and at not in readers else token
                for at, token in enumerate(tokens)
            )
        rows = tuple(
            row & -(2 << mark) if mark >= 0 else row
            for row, mark in zip(owed.rows, owed.marks, strict=True)
        )
        return state._replace(
            decided=cut(now._replace(leases=leases, stopped=stopped)),
            decided_replica=state.decided_replica and cut(state.decided_replica),
            owed=owed._replace(tokens=tokens, rows=rows),
        )

    # --- what must hold ---------------------------------------------------------------------------

    def wrong(self, state: ListState) -> str | None:
        if state.wrong:
            return state.wrong
        for server in range(2):
            passed = (2 << max(0, state.owed.marks[server])) - 2
            if state.owed.marks[server] > 0 and passed & ~state.sent[server]:
                return f"server {server} was not sent an event that its LSSO has passed"
            owners = [
                NAMES[at]
                for at, one in enumerate(state.members)
                if one is not None
                and one.phase == "open"
                and OWNERS[one.list[1]][server] == NAMES[at]
            ]
            if len(owners) > 1:
                return f"{' and '.join(owners)} may send to server {server}"
        return None

    def calm(self, state: ListState) -> ListState | None:
        state = state._replace(faults=(), zombie=None, wants=())
        if state.job is not None:
            return next(
                self._plain(after) for words, after in self._list_steps(state) if "writes" in words
            )
        for at in range(3):
            for words, after in self._member_steps(state, at):
                if after != state and not ("opens" in words and state.decided.wanted):
                    return self._plain(after)
        return next((self._plain(after) for _, after in self._list_steps(state)), None)

    def missing(self, state: ListState) -> str | None:
        owners = OWNERS[state.decided.lists[-1][1]]
        for server, owner in enumerate(owners):
            one = state.members[NAMES.index(owner)]
            if one is None or one.phase != "open":
                return f"nobody may send to server {server}"
            if state.sent[server] != (2 << state.owed.head) - 2:
                return f"server {server} was not sent all"
        return None

    def words(self, state: ListState) -> str:
        members = ", ".join(
            f"{name} {'gone' if one is None else one.phase}"
            f"{'' if at < 0 else f' at {at}'}"
            f"{'' if walk is None else f' walks {walk.at}-{walk.upto}'}"
            for name, one, at, walk in zip(
                NAMES, state.members, state.owed.positions, state.owed.walks, strict=True
            )
        )
        wanted = f" ({state.decided.wanted[1]} wanted)" if state.decided.wanted else ""
        sent = [bin(each).count("1") for each in state.sent]
        return f"{state.decided.lists[-1][1]}{wanted}: {members}; sent {sent} of {state.owed.head}"


T = TypeVar("T")


def _put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _member(state: ListState, at: int, one: Member | None) -> ListState:
    return state._replace(members=_put(state.members, at, one))


def _decide(state: ListState, **changed: Any) -> ListState:
    return state._replace(decided=state.decided._replace(**changed))


def _after(state: ListState, fault: str) -> ListState:
    return state._replace(faults=less(state.faults, fault))


def _void(decided: SenderDatabase) -> SenderDatabase:
    """The database after a failover: which leases there were does not count."""
    return decided._replace(leases=(0, 0, 0), stopped=(None, None, None))


def _fresh(state: ListState) -> int:
    """An incarnation, or the id of a list; in truth it is random."""
    return 1 + max(_ids(state))


def _ids(state: ListState) -> Iterator[int]:
    """All incarnations and ids of lists: only which are equal matters."""
    for decided in (state.decided, state.decided_replica):
        if decided is not None:
            yield from (number for number, _ in decided.lists)
            if decided.wanted is not None:
                yield decided.wanted[0]
            yield from map(abs, decided.leases)
    for owed in (state.owed, state.owed_replica):
        if owed is not None:
            yield owed.list[0]
            yield from (walk.since[0] for walk in owed.walks if walk is not None)
            for token in owed.tokens:
                yield from token
    for one in (*state.members, state.zombie and state.zombie[1]):
        if one is not None:
            yield one.incarnation
            yield one.list[0]
            yield from (part for part in one.saw if isinstance(part, int))
    if state.job is not None:
        yield state.job[0][0]


def _with_ids_counted(state: ListState) -> ListState:
    """The same state with its incarnations and ids of lists counted from 1 on."""
    names = {0: 0}
    for number in _ids(state):
        names.setdefault(number, len(names))
    if all(number == name for number, name in names.items()):
        return state

    def listed(each: SenderList) -> SenderList:
        return names[each[0]], each[1]

    def decided(each: SenderDatabase) -> SenderDatabase:
        return SenderDatabase(
            tuple(map(listed, each.lists)),
            each.wanted and listed(each.wanted),
            tuple(names[lease] if lease >= 0 else -names[-lease] for lease in each.leases),
            tuple(pair and (names[pair[0]], names[pair[1]]) for pair in each.stopped),
        )

    def owed(each: HomeserverDatabase) -> HomeserverDatabase:
        return each._replace(
            list=listed(each.list),
            walks=tuple(walk and walk._replace(since=listed(walk.since)) for walk in each.walks),
            tokens=tuple((names[one], names[two]) for one, two in each.tokens),
        )

    def member(one: Member) -> Member:
        saw = tuple(names[part] if isinstance(part, int) else part for part in one.saw)
        return one._replace(incarnation=names[one.incarnation], list=listed(one.list), saw=saw)

    return state._replace(
        decided=decided(state.decided),
        decided_replica=state.decided_replica and decided(state.decided_replica),
        owed=owed(state.owed),
        owed_replica=state.owed_replica and owed(state.owed_replica),
        members=tuple(one and member(one) for one in state.members),
        zombie=state.zombie and (state.zombie[0], member(state.zombie[1]), state.zombie[2]),
        job=state.job and (listed(state.job[0]), state.job[1]),
    )
