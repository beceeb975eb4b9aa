"""`fedsender simulate --senders N`: several senders share one PostgreSQL, and their list changes.

The senders are whole but for their admin endpoint's socket: their orders go the way that those of
another sender go. The list of senders changes again and again under load, as `fedsender senders
set` does it; processes are killed at commit points, frozen and thawed, cut off from the database,
restarted, or hear nothing of a commit that was made; and a replica that is some seconds behind
takes over. Two names have machines that stand by. `machines` says what is real of the database.

I1 to I10 are checked over all senders together, and two rules of their own: *one*: whoever begins a
request holds its name's lease, and the list in force has that name for the server. *fence*: whoever
commits holds its name's lease. What was under way when a process was killed, frozen or cut off may
overlap with the first request after it; its answers may be lost, as may those of its last seconds,
which only its own ledger has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import psycopg
import trio
from psycopg import sql

from fedsender.admin.bodies import InQuarantine, Pairs, Pause, Servers
from fedsender.admin.context import AdminContext
from fedsender.admin.endpoints import (
    drop,
    notify_remote_server_up,
    pause,
    redeliver,
    release,
    resume,
)
from fedsender.config import Config
from fedsender.embedded.facts import Elsewhere
from fedsender.http.server import Refusal
from fedsender.matrix import shard_of
from fedsender.store.connections import LAST_PAUSE_S
from fedsender.store.engine import StoreError, open_database
from fedsender.store.leases import LEASE_S, RENEWAL_S
from fedsender.store.membership import Membership, Walk
from fedsender.switching.senders import NotChanged, change_list
from fedsender_lab.simulation.behaviours import MINUTE
from fedsender_lab.simulation.checks import (
    CommitChecks,
    FinalChecks,
    LedgerChecks,
    MemoryChecks,
    StartCheck,
    WireChecks,
)
from fedsender_lab.simulation.daemon_life import Away, CrashPlan
from fedsender_lab.simulation.disasters import Operator, repeat_of
from fedsender_lab.simulation.disk import HOMESERVER, SENDER, Disk, LedgerTail
from fedsender_lab.simulation.machines import (
    TIMELINE,
    Machine,
    Process,
    RemoteNursery,
    acting,
    observed_sessions,
)
from fedsender_lab.simulation.observations import (
    STUBBORN,
    Failover,
    Observations,
    ServerView,
    log_goes_to,
    traceback_in,
)
from fedsender_lab.simulation.outbox import PushFront
from fedsender_lab.simulation.receiver import Attempt, make_site
from fedsender_lab.simulation.report import Report
from fedsender_lab.simulation.scenario import Scenario
from fedsender_lab.simulation.world import Size, configuration, found, people, run_world
from fedsender_lab.testing.clock import derived, virtual_runtime
from fedsender_lab.testing.network import Internet

SERVERS: Final = 24
DAYS: Final = 0.02
STANDBYS: Final = (3, 2)
"""Machines of the first names; the others have one."""
MOST_TRANSACTIONS_BETWEEN_KILLS: Final = 120
EVENTS_EVERY_S: Final = 0.5
SETTLED_S: Final = 40.0
"""In this time all that was killed runs again: a start comes within 30 s, a lease ends after 6."""
LOOK_EVERY_S: Final = 15.0
FAILOVER_EVERY_S: Final = 2 * MINUTE
LOOKS_AGAIN_S: Final = LAST_PAUSE_S + RENEWAL_S
"""The longest time from when the database is reached again until a process looks at its lease."""
MOST_LOST_S: Final = 5.0
"""A replica that takes over lacks the commits of so many seconds, at most."""
AT_LEAST_ONCE: Final = (
    *("killed while it sends", "frozen while it sends", "cut off while it sends", "leases lost"),
    *("lists changed", "taken over", "walks", "orders", "orders of others", "PDUs: live"),
    *("PDUs: catch_up", "to-device messages", "quarantined", "redeliveries"),
    *("unheard while it sends", "failovers", "commits lost"),
)


class Copy(NamedTuple):
    """A database as a replica has it: its tables, and how far its sequences are."""

    tables: dict[str, bytes]
    sequences: list[tuple[str, int | None]]


class Standing(NamedTuple):
    """What the database says of who sends under a name."""

    holder: str
    stopped: str | None
    in_force: list[str]
    change: str | None


class SharedDisk(Disk):
    """The two databases that all senders share, and the files of each."""

    def __init__(self, directory: Path, urls: Sequence[str]) -> None:
        super().__init__(directory)
        self._there, self._timeline = False, 0
        self._walks: dict[str, Walk | None] = {}
        self._shared = {
            name: psycopg.connect(url, autocommit=True)
            for name, url in zip((HOMESERVER, SENDER), urls, strict=True)
        }

    def _rows(self, file: str, query: str, *values: object) -> list[Any]:
        text = query.replace("?", "%s").encode()
        return self._shared[file].execute(text, values or None).fetchall()

    def ready(self) -> bool:
        if not self._there:
            self._there = self._looks_ready()
        return self._there

    def _looks_ready(self) -> bool:
        (table,) = self._rows(SENDER, "SELECT to_regclass('server_states')")[0]
        (other,) = self._rows(HOMESERVER, "SELECT to_regclass('device_federation_outbox')")[0]
        return table is not None and other is not None

    def position(self) -> int:
        process = acting()
        query = (
            "SELECT stream_id FROM federation_stream_position"
            " WHERE type = 'events' AND instance_name = ?"
        )
        rows = self._rows(HOMESERVER, query, "" if process is None else process.name)
        return int(rows[0][0]) if rows else -1

    def newest_owed(self) -> int:
        """The newest event that a server of this sender is owed, but for what it walks."""
        process = acting()
        assert process is not None
        walk = self.walk(process.name)
        upto = 0 if walk is None else walk.upto
        query = "SELECT destination, max(stream_ordering) FROM destination_rooms GROUP BY 1"
        owed = (at for name, at in self._rows(HOMESERVER, query) if process.handles(name))
        return max((at for at in owed if at > upto), default=0)

    def newest_noted(self, server: str) -> int:
        """The newest event that is on record as owed to this server, answered or not."""
        query = "SELECT max(stream_ordering) FROM destination_rooms WHERE destination = ?"
        return self._rows(HOMESERVER, query, server)[0][0] or -1

    def walk(self, name: str) -> Walk | None:
        """The walk of this name, also one that has ended."""
        if name not in self._walks:
            query = "SELECT after, upto, before FROM walks WHERE instance_name = ?"
            self._walks[name] = None
            for after, upto, before in self._rows(SENDER, query, name):
                self._walks[name] = Walk(after, upto, None if before is None else tuple(before))
        return self._walks[name]

    def committed(self, database: str) -> None:
        super().committed(database)
        if database == "sender":
            self._walks.clear()

    def holder(self, name: str) -> tuple[str, str | None]:
        """The boot id in the row of this name's lease, empty if nobody holds it, and the id of the
        change of the list for which its holder has stopped, or None."""
        query = "SELECT holder, stopped FROM leases WHERE instance_name = ?"
        rows = self._rows(SENDER, query, name)
        return rows[0] if rows else ("", None)

    def senders(self) -> tuple[list[str], str | None]:
        """The list in force, and the change under way."""
        rows = self._rows(SENDER, "SELECT in_force, change FROM sender_list")
        return rows[0] if rows else ([], None)

    def end_sessions(self, processes: Sequence[int]) -> None:
        """Have these processes of the server end."""
        query = "SELECT pg_terminate_backend(pid, 5000) FROM unnest(?::int[]) AS pid"
        self._rows(SENDER, query, processes)

    def copy(self) -> dict[str, Copy]:
        """Both databases as they are now."""
        found = {}
        for file, connection in self._shared.items():
            names = self._rows(file, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
            tables = {}
            for (name,) in sorted(names):
                rows = sql.SQL("COPY {} TO STDOUT (FORMAT binary)").format(sql.Identifier(name))
                with connection.cursor().copy(rows) as stream:
                    tables[name] = b"".join(bytes(piece) for piece in stream)
            query = "SELECT sequencename, last_value FROM pg_sequences ORDER BY 1"
            found[file] = Copy(tables, self._rows(file, query))
        return found

    def fail_over(self, copies: Mapping[str, Copy]) -> None:
        """Have databases become these copies, on another timeline. Nobody keeps a connection."""
        self._timeline += 1
        own = [connection.info.backend_pid for connection in self._shared.values()]
        for file, connection in self._shared.items():
            others = (
                "SELECT pid FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> ALL(?::int[])"
            )
            self.end_sessions([pid for (pid,) in self._rows(file, others, own)])
            if file in copies:
                with connection.transaction():
                    self._become(connection, copies[file])
        self._forget_quarantine()
        self._walks.clear()

    def _become(self, connection: psycopg.Connection, copy: Copy) -> None:
        names = sql.SQL(", ").join(map(sql.Identifier, copy.tables))
        connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute(sql.SQL("TRUNCATE {}").format(names))
        for name, rows in copy.tables.items():
            query = sql.SQL("COPY {} FROM STDIN (FORMAT binary)").format(sql.Identifier(name))
            with connection.cursor().copy(query) as stream:
                stream.write(rows)
        for name, last in copy.sequences:
            connection.execute(
                "SELECT setval(%s::regclass, %s, %s)", (name, last or 1, last is not None)
            )
        here = sql.Identifier(connection.info.dbname)
        query = sql.SQL("ALTER DATABASE {} SET {} = {}").format(
            here, sql.SQL(TIMELINE), sql.Literal(str(self._timeline))
        )
        connection.execute(query)

    def standing(self, name: str) -> Standing:
        """Of this name."""
        return Standing(*self.holder(name), *self.senders())

    def positions(self) -> dict[str, int]:
        """The events position of each name."""
        query = (
            "SELECT instance_name, stream_id FROM federation_stream_position"
            " WHERE type = ? ORDER BY instance_name"
        )
        return dict(self._rows(HOMESERVER, query, "events"))

    def mark_of(self, name: str) -> str | None:
        """The mark that a sender has made as it last took the homeserver's database over."""
        query = "SELECT mark FROM generation WHERE instance_name = ?"
        rows = self._rows(SENDER, query, name)
        return str(rows[0][0]) if rows else None

    def paused(self) -> list[str]:
        """The servers to which nothing is sent."""
        query = "SELECT destination FROM server_states WHERE paused IS NOT NULL ORDER BY 1"
        return [name for (name,) in self._rows(SENDER, query)]

    def close(self) -> None:
        for connection in self._shared.values():
            connection.close()


class _Tails(LedgerTail):
    """The ledgers of all machines."""

    def __init__(self) -> None:
        super().__init__()
        self.machines: list[Machine] = []
        # Whose line was the last one that was read.
        self.written_on: Machine | None = None

    def new_lines(self, directory: Path) -> Iterator[bytes]:
        for machine in self.machines:
            self.written_on = machine
            yield from machine.tail.new_lines(machine.directory / "ledger")

    def forget(self) -> None:
        for machine in self.machines:
            machine.tail.forget()


class SharedObservations(Observations):
    """Observations of several senders: what is of one is of whoever acts."""

    def __init__(self, base: Observations, disk: SharedDisk) -> None:
        self._positions: dict[str, int] = {}
        self._when: dict[str, list[tuple[int, float]]] = {}
        # Servers whose sender was killed, frozen or cut off, and has no successor yet.
        self._left: dict[str, Process] = {}
        # Who runs since before a failover; what was true until then, if the leases are void, too.
        self._unaware: dict[Process, tuple[Failover, Standing | None]] = {}
        # Names of which nobody has sent since one.
        self._behind: set[str] = set()
        # By name the incarnation that has begun to send last.
        self._senders: dict[str, str] = {}
        self._set_back_at = -math.inf
        self._anew_at: dict[Process, float] = {}
        # Servers whose sender has not noticed one.
        self._set_back: set[str] = set()
        super().__init__(base.homeserver, base.views, base.trace, disk)
        self.secrets = base.secrets
        self.tails = self.tail = _Tails()
        self.shared_disk = disk
        self.on_crash: Callable[[], None] = lambda: None
        self.on_opened: Callable[[Process], None] = lambda _: None
        self.on_drained: Callable[[Process], None] = lambda _: None

    @property
    def life(self) -> int:
        process = acting()
        return 0 if process is None else process.serial

    @life.setter
    def life(self, _: int) -> None: ...

    @property
    def alive(self) -> bool:
        process = acting()
        return process is None or process.well

    @alive.setter
    def alive(self, _: bool) -> None: ...

    @property
    def position(self) -> int:
        process = acting()
        if process is None:
            return min(self._positions.values(), default=-1)
        return self._positions.get(process.name, -1)

    @position.setter
    def position(self, position: int) -> None: ...

    def moved(self, position: int) -> None:
        process = acting()
        assert process is not None
        self._positions[process.name] = position
        self._when.setdefault(process.name, []).append((position, trio.current_time()))

    def passed_at(self, token: int) -> float | None:
        process = acting()
        times = () if process is None else self._when.get(process.name, ())
        return next((at for position, at in times if position >= token), None)

    def back_to(self, _: int) -> None:
        self._positions = self.shared_disk.positions()
        for name, times in self._when.items():
            upto = self._positions.get(name, -1)
            self._when[name] = [entry for entry in times if entry[0] <= upto]
        self.crashed_at.append(trio.current_time())

    @property
    def failover(self) -> Failover | None:
        """The one that whoever acts has not noticed."""
        process = acting()
        found = None if process is None else self._unaware.get(process)
        return None if found is None else found[0]

    @failover.setter
    def failover(self, _: Failover | None) -> None: ...

    def noted_upto(self, server: str) -> int:
        process = acting()
        if process is None or not self.walks_to(process, server):
            return self.position
        return self.shared_disk.newest_noted(server)

    def walks_to(self, process: Process, server: str) -> bool:
        """Whether it comes to what this server is owed by a walk, which takes its time."""
        walk, name = self.shared_disk.walk(process.name), process.name
        if walk is None or self._positions.get(name, -1) > walk.upto:
            return False
        return walk.of(name)(server)

    # --- who sends --------------------------------------------------------------------------------

    def opened(self, process: Process) -> None:
        """This process sends from now on."""
        self.trace.note(process, "sends")
        self._senders[process.name] = process.boot_id
        standing = self._unaware.get(process, (None, None))[1]
        if standing is None or standing.holder != process.boot_id:
            self._notice(process)
            standing = self.shared_disk.standing(process.name)
        if process.name not in standing.in_force:
            self.fail("one", f"{process} sends, and is not in the list")
        self._positions[process.name] = self.shared_disk.position()
        for server in sorted(self._left):
            if process.handles(server):
                last = self._left.pop(server)
                self.counts["taken over"] += last.machine is not process.machine
                self._forget(self.views.of[server])
        self.on_opened(process)

    def left(self, process: Process) -> None:
        """It was killed, frozen or cut off: what was under way is anybody's guess."""
        for server, view in self.views.of.items():
            if process.handles(server):
                self._left[server] = process
                knows = not process.crashed and view.unanswered is None
                self._forget(view)
                if knows:
                    # It may go on, and has the answer, whatever is on record.
                    view.unanswered = None

    def fail_over(self, processes: Iterable[Process], copies: Mapping[str, Copy]) -> None:
        """A replica takes over that has not more than these copies."""
        disk, void = self.shared_disk, SENDER in copies
        had = disk.positions()
        for process in processes:
            failover = Failover(trio.current_time(), disk.mark_of(process.name))
            known, before = self._unaware.get(process, (failover, None))
            if before is not None and before.holder != process.boot_id:
                # It has noticed that one, and waited since.
                known, before = failover, None
            if void and before is None:
                known, before = failover, disk.standing(process.name)
            self._unaware[process] = known, before
            process.lose_sessions()
        disk.fail_over(copies)
        self._set_back.update(self.views.of)
        self._behind.update(machine.name for machine in self.tails.machines)
        self.counts["failovers"] += 1
        self.counts["commits lost"] += disk.positions() != had
        self._set_back_at = trio.current_time()
        self.trace.note("failover", *had.items(), *disk.positions().items())

    def look_for_takeover(self) -> None:
        """Whether whoever acts has begun anew under its lease."""
        process = acting()
        found = None if process is None else self._unaware.get(process)
        if process is None or found is None or found[1] is not None:
            return
        if self.shared_disk.mark_of(process.name) != found[0].taken_over:
            self._notice(process)

    def _notice(self, process: Process) -> None:
        anew = self._unaware.pop(process, None) is not None or process.name in self._behind
        self._behind.discard(process.name)
        if anew:
            self.counts["failovers noticed"] += 1
            self._anew_at[process] = trio.current_time()
        marks = self.shared_disk.marks()
        for server, view in self.views.of.items():
            if not process.handles(server):
                continue
            is_set_back = server in self._set_back
            if is_set_back:
                self._set_back.remove(server)
                view.go_back(marks.get(server, 0), None)
            # Also if another sender has noticed it for this server, and had it until now.
            if is_set_back or anew:
                self._forget(view)

    @property
    def anew_at(self) -> float:
        process = acting()
        anew_at = -math.inf if process is None else self._anew_at.get(process, -math.inf)
        return max(anew_at, self._set_back_at)

    @anew_at.setter
    def anew_at(self, _: float) -> None: ...

    def is_unaware(self, process: Process) -> bool:
        """Whether it runs since before a failover."""
        return process in self._unaware

    def drained(self, process: Process) -> None:
        """It has ended in order."""
        if process.well:
            self.on_drained(process)

    def _forget(self, view: ServerView) -> None:
        """Its next sender knows what is in the databases, and no other answer."""
        record = self.disk.frozen(view.name)
        view.unanswered = None if record is None else repeat_of(view.name, *record)
        view.proven.clear()
        view.stubborn = STUBBORN
        view.failed_at, view.unlined, view.newest_live = None, 0, 0
        view.since = trio.current_time()

    def end_sessions(self, sessions: Iterable[psycopg.Connection]) -> None:
        """End these sessions; whoever has them does not know yet."""
        self.shared_disk.end_sessions([each.info.backend_pid for each in sessions])

    def is_late_line(self, view: ServerView, began_at: float) -> bool:
        """Also if another process of its name has come in the place of its own since: it may have
        begun before its first byte left, which its line does not say."""
        machine = self.tails.written_on
        process = None if machine is None else machine.process
        replaced = process is not None and self._senders.get(process.name) != process.boot_id
        return replaced or super().is_late_line(view, began_at)

    def check_ledgers(self) -> None:
        """A process is about to die: what it has written until now counts."""
        self.on_crash()

    def check_fence(self, process: Process) -> None:
        """A process that sends has committed. One that has lost its lease may do so until its
        sessions are ended: before its successor sends, and before the list changes without it."""
        holder, _, in_force, _ = self.shared_disk.standing(process.name)
        if holder == process.boot_id:
            return
        assert process.daemon is not None
        changed = tuple(in_force) != process.daemon.config.senders
        if changed or self._senders.get(process.name) == holder:
            self.fail("fence", f"{process} commits, the lease is {holder or 'nobody'}'s")

    def check_one(self, process: Process, server: str) -> None:
        """A process has begun a request."""
        if process.crashed or process.frozen:
            return
        failover, standing = self._unaware.get(process, (None, None))
        lease = None if process.daemon is None else process.daemon.store.sender.lease
        endless = lease is not None and lease.ends_at == math.inf
        if process.cut or (endless and trio.current_time() < process.mended_at + LOOKS_AGAIN_S):
            failover = None  # It cannot know, and nobody takes a lease that does not end.
        if standing is None:
            standing = self.shared_disk.standing(process.name)
        elif failover is not None and trio.current_time() > failover.at + LEASE_S:
            self.fail("one", f"{process} sends to {server} by what a failover has made void")
        holder, stopped, names, change = standing
        owner = names[shard_of(server, len(names))]
        if holder != process.boot_id or owner != process.name:
            whose = f"{owner}'s, the lease of {process.name} {holder or 'nobody'}'s"
            self.fail("one", f"{process} sends to {server}, which is {whose}")
        if change is not None and stopped == change:
            self.fail("one", f"{process} sends to {server}, and has stopped for {change}")
        if lease is not None and trio.current_time() >= lease.ends_at:
            self.fail("one", f"{process} sends to {server}, and its lease has ended")


class SharedCommits(CommitChecks):
    """Of all senders: each has an events position, for the servers that it sends to."""

    def _check_position(self, disk: Disk) -> None:
        process, observed = acting(), self._observed
        if process is None or process.daemon is None:
            return
        assert isinstance(observed, SharedObservations)
        walk = observed.shared_disk.walk(process.name)
        if observed.position < 0 and walk is not None and disk.position() == walk.upto:
            # A replica was from before it was in the list: what is below it walks again.
            observed.moved(walk.upto)
        super()._check_position(disk)

    def _concerns(self, server: str) -> bool:
        process = acting()
        return process is not None and process.handles(server)

    def _look_for_takeover(self, disk: Disk) -> None:
        assert isinstance(self._observed, SharedObservations)
        self._observed.look_for_takeover()


class SharedWire(WireChecks):
    """What arrives of all senders."""

    def __init__(self, observed: SharedObservations, ledger: LedgerChecks) -> None:
        super().__init__(observed, ledger)
        self._shared = observed
        self.by_serial: dict[int, Process] = {}

    def began(self, attempt: Attempt) -> None:
        process, view = acting(), self._view(attempt.server)
        assert process is not None
        self._shared.check_one(process, attempt.server)
        flight = view.flight
        if flight is not None and not flight.over and not self.by_serial[flight.life].well:
            self._shared.counts["overlaps"] += 1
            view.flight = None
        super().began(attempt)

    def drained_by(self, process: Process) -> None:
        """A process has ended in order: what it leaves unanswered is on record, unless a failover
        that it has not noticed before made it begin anew."""
        if self._shared.is_unaware(process):
            return
        for view in self._shared.views.of.values():
            if view.unanswered is None or view.unanswered.attempt.life != process.serial:
                continue
            wanted = view.unanswered.attempt.transaction_id
            record = self._shared.disk.frozen(view.name)
            if (record is None or record[0] != wanted) and not self._isolated(view):
                self._shared.fail("I3", f"{view.name}: {wanted} is not on record after a drain")


class _Orders(Operator):
    """An operator that tells any of the senders, for all of them."""

    def __init__(self, scenario: SendersScenario, *rest: Any) -> None:
        super().__init__(*rest)
        self._scenario = scenario

    def _tell(
        self, order: Callable[[Any, AdminContext], Any], body: object, server: str | None = None
    ) -> None:
        self._scenario.nursery.start_soon(self._order, order, body, server)

    async def _order(
        self, order: Callable[[Any, AdminContext], Any], body: object, server: str | None
    ) -> bool:
        """Give an order; whether it was taken."""
        open_ones = self._scenario.open_ones()
        if not open_ones:
            return False
        process = self._rng.choice(open_ones)
        counts = self._observed.counts
        counts["orders"] += 1
        counts["orders of others"] += server is not None and not process.handles(server)
        try:
            await process.ask(lambda _: order(body, cast(AdminContext, process.context)))
        except Refusal as refused:
            counts[f"orders refused: {refused.errcode}"] += 1
        except (Away, StoreError):
            counts["orders cut short"] += 1
        else:
            return True
        return False

    def act(self) -> None:
        acts = (self.wake, self.pause, self.resume, self.redeliver, self.release, self.drop)
        self._rng.choice(acts)()

    def wake_all(self, servers: list[str]) -> None:
        for server in servers:
            self._observed.views.of[server].wakes.append((trio.current_time(), True))
        self._observed.counts["wakes"] += len(servers)
        self._tell(notify_remote_server_up, Servers(servers=servers), servers[0])

    def pause(self) -> None:
        server = self._server()
        self.paused.append(server)
        self._tell(pause, Pause(servers=[server], reason="by hand", for_ms=None), server)

    def resume(self) -> None:
        for server in self.paused:
            self._observed.counts["resumed"] += 1
            self._scenario.nursery.start_soon(self._insist_on_resuming, server)
        self.paused = []

    async def _insist_on_resuming(self, server: str) -> None:
        while not await self._order(resume, Servers(servers=[server]), server):  # noqa: ASYNC110
            await trio.sleep(5)

    def redeliver(self) -> None:
        view = self._observed.views.of[self._server()]
        chosen = self._rng.sample(view.owed, min(len(view.owed), 5))
        wanted = [each.event_id for each in chosen if each.token <= self._observed.position]
        view.redelivered.update(wanted)
        self._observed.counts["redeliveries"] += len(wanted)
        if wanted:
            self._tell(redeliver, Pairs(pairs=[(view.name, each) for each in wanted]), view.name)

    def release(self) -> None:
        self._each_item(release, sendable=True)

    def drop(self) -> None:
        """Give up what no server can be sent."""
        self._each_item(drop, sendable=False)

    def _each_item(self, order: Callable[[Any, AdminContext], Any], *, sendable: bool) -> None:
        observed = self._observed
        if not observed.disk.ready():
            return
        events = observed.homeserver.by_id
        items = [
            item
            for item in observed.disk.quarantine().values()
            if item.event_id in events and events[str(item.event_id)].sendable == sendable
        ]
        if not items:
            return
        item = self._rng.choice(items)
        for server in observed.views.of if item.destination is None else [item.destination]:
            observed.views.of[server].redelivered.add(str(item.event_id))
        self._tell(order, InQuarantine(ids=[item.id], room_id=None), item.destination)


class _Front(PushFront):
    """The homeserver appends to any sender of the list that answers."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.choose: Callable[[], Process | None] = lambda: None

    async def _put(self, question: Any) -> Any:
        self._life = self.choose()
        try:
            return await super()._put(question)
        except Elsewhere:
            raise Away from None


def simulate_senders(
    seed: int,
    senders: int,
    servers: int,
    days: float,
    urls: Sequence[str],
    stop_at: str | None = None,
) -> Report:
    """Run one world; a violation of `stop_at` ends it. Not from within trio.

    `urls`: two empty PostgreSQL databases, the homeserver's and the senders'.
    """
    size = Size(seed, servers, days)
    return run_world(seed, lambda directory: _run(size, senders, directory, urls, stop_at))


async def _run(
    size: Size, senders: int, directory: Path, urls: Sequence[str], stop_at: str | None
) -> Report:
    with observed_sessions():
        async with trio.open_nursery() as nursery:
            scenario = SendersScenario(size, senders, directory, urls, nursery)
            observed = scenario.observed
            observed.on_violation = lambda found: (
                nursery.cancel_scope.cancel() if found.invariant == stop_at else None
            )
            with log_goes_to(partial(_hear, observed)):
                try:
                    await scenario.run()
                finally:
                    scenario.thaw_all()
            nursery.cancel_scope.cancel()
        observed.shared_disk.close()
    counts: Counter[str] = observed.counts
    counts.update(observed.homeserver.counts)
    counts["events"] = len(observed.homeserver.steps)
    return Report(
        f"{senders} senders, seed {size.seed}: {size.servers} servers, {size.days:g} days",
        f"--senders {senders} --seed {size.seed} --servers {size.servers} --days {size.days:g}",
        counts,
        tuple(observed.violations),
        tuple(f"no {name}" for name in AT_LEAST_ONCE if not counts[name]),
        observed.trace,
    )


def _hear(observed: SharedObservations, level: str, happened: Mapping[str, Any]) -> None:
    """Look for secrets in a log line (I10), and for a bug."""
    process, name = acting(), happened.get("event")
    if process is not None and process.crashed:
        return
    observed.check_secrets("a log line", repr(happened).encode())
    observed.trace.note("log", process, name, happened.get("destination", ""))
    observed.counts["lists changed"] += name == "senders_changed"
    observed.counts["walks"] += name == "walk_begun"
    if happened.get("exc_info") or level == "critical":
        observed.fail("bug", f"{process}: {name}: {traceback_in(happened)[-500:]}")


class SendersScenario(Scenario):
    """Sets the senders, their machines and the world around them in motion."""

    def __init__(
        self,
        size: Size,
        senders: int,
        directory: Path,
        urls: Sequence[str],
        nursery: trio.Nursery,
    ) -> None:
        sites = {index: make_site(index) for index in range(size.servers)}
        origins = found(size, [site.name for site in sites.values()])
        remote = cast(trio.Nursery, RemoteNursery(nursery))
        self._internet = Internet(derived(size.seed, "internet"), remote)
        self._urls = urls
        self.names = [f"fed{number}" for number in range(1, senders + 1)]
        disk = SharedDisk(directory, urls)

        def make_front(observed: Observations) -> _Front:
            return _Front(origins.homeserver, observed, derived(size.seed, "front"))

        def observe(base: Observations) -> SharedObservations:
            return SharedObservations(base, disk)

        world = people(
            size,
            directory,
            origins,
            sites,
            self._internet,
            make_front,
            make_observed=observe,
            make_wire=SharedWire,
            make_commits=SharedCommits,
        )
        super().__init__(world)
        self.nursery = nursery
        assert isinstance(world.observed, SharedObservations)
        assert isinstance(world.front, _Front)
        assert isinstance(world.wire, SharedWire)
        self.observed = world.observed
        self._wire = world.wire
        self._front = world.front
        self._front.choose = self._any_open
        self.observed.on_opened = self._process_opened
        self.observed.on_drained = self._wire.drained_by
        self.observed.on_crash = lambda: world.commits.committed("sender")
        self._memory = MemoryChecks(self.observed, senders + len(STANDBYS) + 1)
        self._plan = CrashPlan(size.seed, MOST_TRANSACTIONS_BETWEEN_KILLS)
        self._plan.orderly = self._restart_one
        self._operator = _Orders(
            self, self.observed, derived(size.seed, "operator"), lambda: None, world.front.post
        )
        self.machines = [
            self._machine(name, number, of)
            for at, name in enumerate(self.names)
            for of in [STANDBYS[at] if at < len(STANDBYS) else 1]
            for number in range(of)
        ]
        self.observed.tails.machines = self.machines

    def _machine(self, name: str, number: int, of: int) -> Machine:
        label = f"{name}-{'abc'[number]}"
        place = self._world.directory / label / "life-1"
        place.mkdir(parents=True)
        key = place / "signing.key"
        key.write_text(self._world.key_file)
        key.chmod(0o600)
        rng = derived(self._world.size.seed, "machine", label)
        return Machine(name, label, place, self._configure, self._process, rng, standby=of > 1)

    def _configure(self, name: str, directory: Path) -> Config:
        return configuration(
            directory,
            instance_name=name,
            homeserver={
                "database": self._urls[0],
                "federation_sender_instances": self.names,
            },
            sender_database=self._urls[1],
        )

    def _process(self, machine: Machine, number: int) -> Process:
        process = Process(
            machine,
            number,
            seed=self._world.size.seed + 1_000_003 * self.machines.index(machine),
            internet=self._internet,
            observed=self.observed,
            checks=self._world.commits,
            wire=self._wire,
            plan=self._plan,
            opened=lambda _: None,
            replica=lambda: None,
        )
        self._wire.by_serial[process.serial] = process
        return process

    # --- who runs ---------------------------------------------------------------------------------

    def _processes(self) -> list[Process]:
        return [each.process for each in self.machines if each.process is not None]

    def open_ones(self) -> list[Process]:
        """The processes that send, and can be asked."""
        return [each for each in self._processes() if each.acts is not None and each.well]

    def _any_open(self) -> Process | None:
        found = self.open_ones()
        return self._rng.choice(found) if found else None

    def _process_opened(self, process: Process) -> None:
        self.nursery.start_soon(self._watch, process)

    async def _watch(self, process: Process) -> None:
        def knows(server: str) -> bool:
            return process.handles(server) and not self.observed.walks_to(process, server)

        at_once, soon = (StartCheck(self.observed, of) for of in (knows, process.handles))
        since, daemon = trio.current_time(), process.daemon
        for check, after_s in ((at_once, 5.0), (soon, MINUTE)):
            look_at = since + after_s
            while trio.current_time() < look_at:
                await trio.sleep_until(look_at)
                # What it is owed waits for the database.
                look_at = max(since, process.disturbed_at) + after_s
            if process.daemon is not daemon or process.draining or not process.well:
                return
            if self.observed.is_unaware(process):
                return
            assert daemon is not None
            check.look(daemon)

    def thaw_all(self) -> None:
        """Have all go on: what is frozen cannot be ended."""
        for process in self._processes():
            process.thaw()

    def _at_wire_point(self, point: str) -> None:
        if point == "request arrived":
            self._plan.transaction()
        process = acting()
        if process is not None and process.well and self._plan.strikes(point):
            process.crash(point)

    def _restart_one(self) -> None:
        process = self._any_open()
        if process is not None:
            self.observed.counts["orderly restarts"] += 1
            process.stop()

    # --- its course -------------------------------------------------------------------------------

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            nursery = self._nursery
            await nursery.start(self._front.run)
            for machine in self.machines:
                nursery.start_soon(machine.run)
            await self._found_rooms()
            while self._any_open() is None:  # noqa: ASYNC110
                await trio.sleep(1)
            with trio.move_on_after(self._world.size.seconds):
                await self._let_live()
            await self._heal()
            await self._wait_until_all_is_well()
            FinalChecks(self.observed).judge()
            for machine in self.machines:
                await machine.stop()
            nursery.cancel_scope.cancel()

    async def _let_live(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_at_memory)
            for index, server in enumerate(self._world.servers):
                nursery.start_soon(self._live_of, index, server)
            for name, every_s, act in (
                ("operator", 20.0, self._operator.act),
                ("server up", 2 * MINUTE, self._say_server_up),
                ("malformed", 5 * MINUTE, self._say_malformed),
                ("restart", 4 * MINUTE, self._restart_one),
            ):
                nursery.start_soon(self._now_and_then, name, every_s, act)
            nursery.start_soon(self._talk)
            nursery.start_soon(self._write_to_devices)
            nursery.start_soon(self._trouble_homeserver, self._world.size.seconds / 4)
            nursery.start_soon(self._change_lists)
            nursery.start_soon(self._fail_over_now_and_then)
            for _ in range(2):
                nursery.start_soon(self._trouble)

    async def _talk(self) -> None:
        homeserver, rng = self._world.homeserver, derived(self._world.size.seed, "talk")
        while True:
            if rng.random() < 0.02:
                await self._burst(rng)
            else:
                homeserver.act()
            await trio.sleep(rng.expovariate(1 / EVENTS_EVERY_S))

    async def _change_lists(self) -> None:
        """As `fedsender senders set` does it, on a machine of its own."""
        rng = derived(self._world.size.seed, "lists")
        runtime = virtual_runtime(rng)
        async with (
            open_database(self._urls[1], runtime, name="sender") as database,
            trio.open_nursery() as nursery,
        ):
            members = Membership(database, runtime, "")
            while True:
                await trio.sleep(rng.uniform(5, 60))
                size = min(len(self.names), rng.choice((1, 2, 3, 5)))
                if rng.random() < 0.5:
                    # Whoever stops in this way has not come as far as the others: a walk.
                    nursery.start_soon(self._befall_one)
                    await trio.sleep(rng.uniform(0, 5))
                await self._change(members, rng.sample(self.names, size), runtime)

    async def _change(self, members: Membership, wanted: Sequence[str], runtime: Any) -> None:
        self.observed.trace.note("list wanted", *wanted)
        try:
            await change_list(members, runtime, wanted)
        except NotChanged as refused:
            self.observed.counts["lists not changed"] += 1
            self.observed.trace.note("not changed", refused)

    async def _trouble(self) -> None:
        while True:
            await trio.sleep(self._rng.uniform(5, 70))
            await self._befall_one()

    async def _befall_one(self) -> None:
        """Something befalls a process, mostly one that sends."""
        rng = self._rng
        processes = self.open_ones() if rng.random() < 0.8 else self._processes()
        if not processes:
            return
        process, seconds = rng.choice(processes), rng.choice((2.0, 5.0, 8.0, 30.0))
        match rng.choice(("kill", "freeze", "cut", "lose an answer")):
            case "kill":
                process.crash("any point")
            case "freeze":
                process.freeze()
                await trio.sleep(seconds * rng.uniform(0.5, 1.5))
                process.thaw()
            case "lose an answer":
                process.lose_answer()
            case _:
                process.cut_off()
                await trio.sleep(seconds * rng.uniform(0.5, 1.5))
                process.mend()

    async def _fail_over_now_and_then(self) -> None:
        """A replica that is some seconds behind takes over: of both databases, or the
        homeserver's alone."""
        rng, observed = derived(self._world.size.seed, "failovers"), self.observed
        while True:
            await trio.sleep(rng.uniform(0.2, 1.2) * FAILOVER_EVERY_S)
            copies = observed.shared_disk.copy()
            await trio.sleep(rng.uniform(0, MOST_LOST_S))
            if rng.random() < 0.5:
                copies = {HOMESERVER: copies[HOMESERVER]}
            observed.fail_over(self._processes(), copies)
            self._world.commits.lost_commits()
            # Also those whose order is still under way.
            paused = self._operator.paused
            paused += set(observed.shared_disk.paused()).difference(paused)

    def _look_once(self) -> None:
        for process in self.open_ones():
            if process.daemon is not None:
                self._memory.look(process.daemon)

    async def _heal(self) -> None:
        self.observed.trace.note("healed")
        for server in self._world.servers:
            server.heal()
        self._plan.enabled = False
        self._front.heal()
        for process in self._processes():
            process.mend()
            process.thaw()
        await trio.sleep(SETTLED_S)
        if (last := self._any_open()) is not None:
            last.crash("healed")
        await trio.sleep(SETTLED_S)
        self._operator.resume()

    async def _wait_until_all_is_well(self) -> None:
        ending = FinalChecks(self.observed)
        began_s = trio.current_time()
        while (passed_s := trio.current_time() - began_s) < 40 * MINUTE:
            await trio.sleep(LOOK_EVERY_S)
            if not any(ending.missing()) and not ending.messages_waiting():
                return
            if passed_s >= 5 * MINUTE:
                self._operator.resume()
                self._operator.wake_all(list(self.observed.views.of))
