"""The checks of the invariants I1-I10, independent of the sender's code.

Each reads the daemon's traces: every line of the ledger, every commit of its databases, every
transaction on the wire, its memory from time to time, each start, and at last the healed world.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
import trio

from fedsender.daemon import Daemon
from fedsender.ledger import EVERY_SERVER, NOTES
from fedsender.matrix import MAX_PDU_BYTES
from fedsender.sender.failure import ServerState
from fedsender_lab.simulation.behaviours import Mode
from fedsender_lab.simulation.disk import Disk, QuarantinedItem
from fedsender_lab.simulation.observations import (
    DAY_S,
    STUBBORN,
    Observations,
    ServerView,
    Unanswered,
)
from fedsender_lab.simulation.receiver import Attempt
from fedsender_lab.testing.clock import EPOCH_MS
from fedsender_lab.testing.rooms import Step

LOOKS_S = (5.0, 60.0, 300.0)
"""Seconds from a start to its check: by then all servers must have been tried."""
PER_SERVER_S = 2.0
"""The last look waits so much longer for each server there is: dead ones share the slow lane."""


class StartCheck:
    """Follows one start. Made when it is over, and the sender runs."""

    def __init__(
        self, observed: Observations, handles: Callable[[str], bool] = lambda _: True
    ) -> None:
        """`handles`: whether it sends to a server."""
        self._observed = observed
        self._started = trio.current_time()
        self._pending = set(filter(handles, observed.disk.due(observed.now_ms())))
        observed.counts["pending at a start"] += len(self._pending)

    def look(self, daemon: Daemon) -> None:
        """Servers that are owed must be known to the sender, and tried in the end."""
        observed, sender = self._observed, daemon.sender
        after_s = trio.current_time() - self._started
        self._pending &= observed.disk.due(observed.now_ms())
        for server in sorted(self._pending):
            if observed.views.of[server].sought_at > self._started:
                self._pending.discard(server)
            elif server not in sender.active and not sender.registry.owes(server):
                observed.fail("I8", f"{server} is forgotten {after_s:.0f} s after a start")
            elif after_s >= LOOKS_S[-1]:
                observed.fail("I8", f"{server} was not tried within {after_s:.0f} s of a start")


TASKS_PER_SERVER = 12
"""A destination, its attempt's addresses, the server's own side of each connection."""
OTHER_TASKS = 150
LONG_WAIT_S = 600.0


class MemoryChecks:
    """Looks at a daemon from time to time."""

    def __init__(self, observed: Observations, daemons: int = 1) -> None:
        """`daemons`: so many may run."""
        self._observed = observed
        self._most_tasks = OTHER_TASKS * daemons + TASKS_PER_SERVER * len(observed.views.of)

    def look(self, daemon: Daemon) -> None:
        """Compare the daemon's memory with its bounds."""
        sender, observed = daemon.sender, self._observed
        counts = observed.counts
        servers = len(observed.views.of)
        if len(sender.active) > servers:
            observed.fail("I7", f"{len(sender.active)} destinations for {servers} servers")
        most = daemon.config.sending.queue_pdus
        queued_ids: set[str] = set()
        for destination in sender.active.values():
            queued = destination.outbox.queued
            queued_ids.update(pdu.event_id for pdu in destination.outbox.queue.pdus)
            counts["longest queue"] = max(counts["longest queue"], queued)
            if queued > most:
                observed.fail("I7", f"{destination.name}: {queued} PDUs queued, {most} may be")
            waits_s = trio.current_time() - destination.since
            if destination.retry_in_s > LONG_WAIT_S and waits_s > LONG_WAIT_S:
                observed.fail("I7", f"{destination.name} waits for hours in memory")
        window = sender.context.pdu_pool.bytes
        counts["largest window"] = max(counts["largest window"], window)
        if window > daemon.config.sending.window_bytes + MAX_PDU_BYTES:
            observed.fail("I7", f"the window of queued events has {window} bytes")
        if (held := len(sender.context.pdu_pool)) != len(queued_ids):
            observed.fail("I7", f"{held} events are held, {len(queued_ids)} are queued")
        tasks = trio.lowlevel.current_statistics().tasks_living
        counts["most tasks"] = max(counts["most tasks"], tasks)
        if tasks > self._most_tasks:
            observed.fail("I7", f"{tasks} tasks for {servers} servers")


class WaitChecks:
    """Looks from time to time whether a wait for the next attempt has become longer.

    Only an attempt may set another one, and it makes another state.
    """

    def __init__(self, observed: Observations) -> None:
        self._observed = observed
        self._due: dict[str, tuple[ServerState, float]] = {}

    def look(self, daemon: Daemon) -> None:
        """Compare the waits with those of the last look."""
        registry, now = daemon.sender.registry, trio.current_time()
        due: dict[str, tuple[ServerState, float]] = {}
        for name in sorted(registry.names()):
            status, active = registry.status(name), registry.active.get(name)
            if status is None or not status.retry_in_s:
                continue
            # EDUs that come, or grow too old, are due at other times than the PDUs that wait.
            if active is not None and (active.outbox.has_edus or not active.outbox.owes_pdus):
                continue
            state, until = registry.own_state(name), now + status.retry_in_s
            known = self._due.get(name)
            if known is not None and known[0] is state and until > known[1] + 1:
                late_s = until - known[1]
                self._observed.fail("clock", f"{name}: a wait under way is {late_s:.0f} s longer")
            due[name] = (state, until)
        self._due = due


MOST_PDUS = 50
"""In one transaction."""
MOST_BY_TIMER = 60
MOST_WITH_WAKES = 300


class LedgerChecks:
    """Reads the ledger as it grows."""

    def __init__(self, observed: Observations) -> None:
        self._observed = observed

    def catch_up(self) -> None:
        """Read the new lines."""
        observed = self._observed
        for text in observed.tail.new_lines(observed.disk.directory / "ledger"):
            observed.check_secrets("the ledger", text)
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError:
                if not observed.disk_full:
                    observed.fail("I9", f"a torn line: {text[:80]!r}")
                continue
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        observed = self._observed
        outcome = line["outcome"]
        observed.counts[f"outcome: {outcome}"] += 1
        if line["destination"] == EVERY_SERVER:
            return
        view = observed.views.of[line["destination"]]
        at = (line["ms"] - observed.set_by_ms - EPOCH_MS) / 1000
        # A start may write a line of what was before.
        at = min(at, trio.current_time())
        observed.trace.note(
            "line", view.name, outcome, line["transaction_id"], line["attempt"], line["status"]
        )
        for pdu in line["pdus"]:
            if pdu["lane"] != "live" and outcome == "delivered":
                observed.trace.note("lane", view.name, *pdu.values())
        if outcome == "discarded":
            view.unanswered = None
        if outcome in NOTES:
            return
        view.sought_at = max(view.sought_at, at)
        if line["transaction_id"] is not None and line["attempt"] > 0:
            view.unlined = 0
            if line["status"] is None:
                view.cut_off = line["transaction_id"], trio.current_time()
        late = observed.is_late_line(view, at - line["took_ms"] / 1000)
        if outcome == "delivered":
            self._delivered(view, at, line, late=late)
        elif outcome != "unknown" and not late:
            self._failed(view, at, line)

    def _delivered(self, view: ServerView, at: float, line: dict[str, Any], *, late: bool) -> None:
        if not late:
            view.failed_at = None
            view.failures.clear()
            view.stubborn = 0
            view.proven.update(pdu["event_id"] for pdu in line["pdus"])
        for pdu in line["pdus"]:
            token_of = self._observed.orderings.token
            lane, token = pdu["lane"], token_of(pdu["stream_ordering"])
            self._observed.counts[f"PDUs: {lane}"] += 1
            view.recorded.add(pdu["event_id"])
            if "supersedes" in pdu:
                first, last = map(token_of, pdu["supersedes"])
                view.superseded.setdefault(pdu["room_id"], []).append((first, last))
                self._observed.counts["large gaps"] += 1
            elif lane == "catch_up":
                self._observed.counts["PDUs of small gaps"] += 1
            if lane == "live" and not late:
                self._check_order(view, token)
        if not late:
            self._check_share(view, at, line)
        self._observed.counts["refused PDUs"] += len(line["refused"])

    def _check_order(self, view: ServerView, token: int) -> None:
        if token <= view.newest_live:
            self._observed.fail(
                "I2", f"{view.name}: live PDU {token} recorded after {view.newest_live}"
            )
        view.newest_live = max(token, view.newest_live)

    def _check_share(self, view: ServerView, at: float, line: dict[str, Any]) -> None:
        """More than half of a transaction are redeliveries only if no other room's event waits."""
        again = [pdu["room_id"] for pdu in line["pdus"] if pdu["lane"] == "redelivery"]
        if len(again) <= MOST_PDUS // 2 or line["attempt"] > 1:
            return
        observed, disk = self._observed, self._observed.disk
        began_at = at - line["took_ms"] / 1000
        by_id = observed.homeserver.by_id
        rooms = {*again, *(by_id[name].room_id for name in disk.redeliveries(view.name))}
        for happening in view.owed_between(view.mark, observed.position):
            known_since = observed.passed_at(happening.token)
            if known_since is None or known_since > began_at - SETTLED_S:
                continue
            if happening.room_id in rooms or happening.event_id in view.answered:
                continue
            if view.covered(happening) or happening.event_id in view.quarantined:
                continue
            if disk.quarantined(None, happening.event_id):
                continue
            observed.fail(
                "share",
                f"{view.name}: {len(again)} redeliveries of {len(line['pdus'])} PDUs, while"
                f" {happening.token} of {happening.room_id} waits",
            )
            return

    def _failed(self, view: ServerView, at: float, line: dict[str, Any]) -> None:
        observed = self._observed
        if view.failed_at is not None and at < view.failed_at + 0.999:
            observed.fail("I5", f"{view.name}: attempts failed at {view.failed_at} and {at}")
        view.failed_at = at
        view.failure = line["outcome"]
        view.failures.append(at)
        view.stubborn += line["outcome"] == "failing"
        while view.failures[0] <= at - DAY_S:
            view.failures.popleft()
        allowed = self._allowed(view, at)
        if len(view.failures) > allowed:
            observed.fail(
                "I5",
                f"{view.name}: {len(view.failures)} attempts in 24 h without an answer,"
                f" {allowed} are allowed",
            )

    def _allowed(self, view: ServerView, at: float) -> int:
        """The number of attempts that are allowed in 24 h.

        A life that was cut off may not have written down that it had failed, and when to go on.
        """
        observed = self._observed
        while view.wakes and view.wakes[0][0] <= at - DAY_S:
            view.wakes.popleft()
        while observed.crashed_at and observed.crashed_at[0] <= at - DAY_S:
            observed.crashed_at.popleft()
        by_admin = sum(admin for _, admin in view.wakes)
        most = MOST_BY_TIMER if len(view.wakes) == by_admin else MOST_WITH_WAKES
        return most + by_admin + len(observed.crashed_at)


_MESSAGE_ID: Final = re.compile(r'"message_id": ?"([^"]+)"')


class CommitChecks:
    """Compares the committed rows with their meaning."""

    def __init__(self, observed: Observations, ledger: LedgerChecks) -> None:
        self._observed = observed
        self._ledger = ledger
        self._outbox: dict[tuple[str, int], str] = {}
        self._fed_upto = 0
        self._quarantine: Mapping[int, QuarantinedItem] = {}
        # By server, up to where a failover repeats nothing.
        self._kept: dict[str, int] = {}

    def committed(self, database: str) -> None:
        """The daemon's database of that name has just committed."""
        observed = self._observed
        disk = observed.disk
        if not disk.ready():
            return
        disk.committed(database)
        if database == "homeserver":
            observed.orderings.note(disk.base())
        self._ledger.catch_up()
        observed.views.take_in(observed.homeserver.steps)
        if database == "homeserver":
            self._note_skipped(disk)
            self._check_position(disk)
            self._check_marks(disk)
            self._check_outbox(disk)
        else:
            self._look_for_takeover(disk)
            self._note_quarantine(disk)
            if observed.lock is not None:
                self._note_set_aside(disk)

    def restored(self, disk: Disk) -> None:
        """The databases are as they were long ago."""
        self._observed.back_to(disk.position())
        self._observed.orderings.back_to(disk.base())
        self._outbox = disk.outbox()
        self._fed_upto = disk.feed_position()
        self._quarantine = disk.quarantine()

    def lost_commits(self) -> None:
        """The homeserver's database is as it was some commits ago, and a daemon may run on it.

        What was answered above LSSO, or above the floor of a catch-up, may be sent again; until the
        daemon notices it may also send what it recorded in one of those commits.
        """
        disk = self._observed.disk
        floors = {name: disk.catch_up_floor(name) for name in self._observed.views.of}
        # As they are before the daemon writes new ones.
        self._kept = {
            name: mark if (floor := floors.get(name)) is None else min(mark, floor)
            for name, mark in disk.marks().items()
        }
        self._go_back()

    def _go_back(self) -> None:
        observed, disk = self._observed, self._observed.disk
        self.restored(disk)
        marks, events = disk.marks(), observed.homeserver.by_id
        for view in observed.views.of.values():
            least = self._kept.get(view.name, 0)
            proven = {name for name in view.proven if events[name].token <= least}
            view.go_back(marks.get(view.name, 0), view.unanswered)
            view.proven |= proven

    def _look_for_takeover(self, disk: Disk) -> None:
        """Whether the daemon has noticed a failover, and has cut off all attempts."""
        observed, failover = self._observed, self._observed.failover
        if failover is None or disk.taken_over() == failover.taken_over:
            return
        observed.failover, observed.anew_at = None, trio.current_time()
        observed.counts["failovers noticed"] += 1
        observed.trace.note("noticed")
        self._go_back()
        for view in observed.views.of.values():
            view.unanswered = None
        observed.on_begun_anew()

    def _note_quarantine(self, disk: Disk) -> None:
        """An operator may empty it before this check."""
        before, now = self._quarantine, disk.quarantine()
        if now is before:
            return
        for number in sorted(now.keys() - before.keys()):
            item = now[number]
            self._observed.trace.note("quarantined", item.destination, item.event_id)
            self._observed.counts["quarantined"] += 1
            self._check_guilt(item)
            if item.destination is None:
                self._observed.unsent.add(str(item.event_id))
                continue
            thing = item.event_id or message_id(item.content.decode())
            self._observed.views.of[item.destination].quarantined.add(thing)
        for number in sorted(before.keys() - now.keys()):
            item = before[number]
            self._observed.trace.note("let go", item.destination, item.event_id)
        self._quarantine = now

    def _note_set_aside(self, disk: Disk) -> None:
        """An event that was set aside may be found owed once more, after a kill or by catch-up."""
        for server, event_id in disk.all_redeliveries():
            self._observed.views.of[server].redelivered.add(event_id)

    def _check_guilt(self, item: QuarantinedItem) -> None:
        """For one server the quarantine has the items that this server always refuses, and none
        that it refused because it was ill."""
        observed, event_id = self._observed, item.event_id
        if item.destination is None or event_id is None:
            return
        happening = observed.homeserver.by_id.get(event_id)
        guilty = event_id in observed.views.of[item.destination].poison
        if happening is not None and happening.sendable and not guilty:
            observed.fail("guilt", f"{item.destination}: {event_id} in quarantine: {item.reason}")

    def _note_skipped(self, disk: Disk) -> None:
        """Note the events that a snapshot has skipped."""
        observed, before, now = self._observed, self._fed_upto, disk.feed_position()
        if now > before + 1:
            between = observed.homeserver.between(before, now)
            told = [each.event_id for each in between if any(row[0] == "pdu" for row in each.rows)]
            if not disk.has_events(told):
                observed.skipped.append((before, now))
                observed.counts["skipped by a snapshot"] += 1
        self._fed_upto = max(before, now)

    # --- I1 ---------------------------------------------------------------------------------------

    def _check_position(self, disk: Disk) -> None:
        observed = self._observed
        before, position = observed.position, disk.position()
        if position == before:
            return
        if position < before:
            observed.fail("I1", f"the events position went from {before} back to {position}")
        newest: dict[str, list[Step]] = {}
        for happening in observed.homeserver.between(before, position):
            if happening.servers and happening.sendable:
                newest.setdefault(happening.room_id, []).append(happening)
        for room_id, happenings in newest.items():
            rows = disk.owed(room_id)
            for happening in happenings:
                self._check_rows(disk, happening, rows)
        if disk.newest_owed() > position:
            observed.fail("I1", f"{disk.newest_owed()} is owed, the position is {position}")
        observed.moved(position)

    def _check_rows(self, disk: Disk, happening: Step, rows: dict[str, int]) -> None:
        for server in happening.servers:
            if not self._concerns(server) or rows.get(server, 0) >= happening.token:
                continue
            view = self._observed.views.of[server]
            set_aside = {*disk.redeliveries(server), *(view.redelivered & view.answered)}
            bearers = bearers_of(self._observed, server, happening)
            if any(
                each.event_id in set_aside or disk.quarantined(None, each.event_id)
                for each in bearers
            ):
                continue
            self._observed.fail(
                "I1",
                f"position past {happening.token}, but {server} is owed"
                f" {rows.get(server)} of {happening.room_id}",
            )

    def _concerns(self, server: str) -> bool:
        """Whether the daemon that has committed sends to this server."""
        return server in self._observed.views.of

    # --- I2, I9 -----------------------------------------------------------------------------------

    def _check_marks(self, disk: Disk) -> None:
        observed = self._observed
        for server, mark in disk.marks().items():
            view = observed.views.of[server]
            if mark == view.mark:
                continue
            observed.trace.note("mark", server, mark)
            if mark < view.mark:
                observed.fail("I2", f"{server}: LSSO went from {view.mark} back to {mark}")
            for happening in view.owed_between(view.mark, mark):
                self._check_below(disk, view, happening, mark)
            view.mark = mark

    def _check_below(self, disk: Disk, view: ServerView, happening: Step, mark: int) -> None:
        """An event that the mark has passed was answered, or is accounted for in another way."""
        observed, server = self._observed, view.name
        if disk.quarantined(server, happening.event_id) or view.covered(happening):
            return
        floor = disk.catch_up_floor(server)
        still_owed = disk.owed_room(server, happening.room_id) > mark
        if still_owed and floor is not None and floor < happening.token:
            return  # Also what was answered, if a crash cut the answer off.
        if happening.event_id in view.answered:
            if happening.event_id not in view.recorded and not observed.disk_full:
                observed.fail(
                    "I9", f"{server}: LSSO {mark} committed, no line has {happening.token}"
                )
            return
        if disk.quarantined(None, happening.event_id):
            return
        set_aside = disk.redeliveries(server)
        if any(each.event_id in set_aside for each in bearers_of(observed, server, happening)):
            return
        if is_stood_in_for(observed, view, happening):
            return
        observed.fail(
            "I2",
            f"{server}: LSSO {mark} passed {happening.token} of {happening.room_id},"
            f" which was not answered (catch-up from {floor}, still owed: {still_owed})",
        )

    # --- I4 ---------------------------------------------------------------------------------------

    def _check_outbox(self, disk: Disk) -> None:
        observed = self._observed
        now = disk.outbox()
        for key in [key for key in self._outbox if key not in now]:
            server, message = key[0], message_id(self._outbox[key])
            observed.trace.note("outbox", server, key[1], "gone")
            view = observed.views.of[server]
            if message not in view.messages_answered and message not in view.quarantined:
                observed.fail("I4", f"{server}: row {key[1]} was deleted without an answer")
        self._outbox = now


def stand_ins_of(observed: Observations, server: str, happening: Step) -> list[Step]:
    """The event that a snapshot had in its place: the newest of the room that the server is to get.

    It may be one that cannot be sent.
    """
    found = []
    for after, upto in observed.skipped:
        if after < happening.token <= upto:
            later = observed.homeserver.between(happening.token - 1, upto)
            alike = [each for each in later if each.room_id == happening.room_id]
            found.append([each for each in alike if server in each.servers][-1])
    return found


def bearers_of(observed: Observations, server: str, happening: Step) -> list[Step]:
    """The event, and those that snapshots had in its place.

    A redelivery of one that stands in is on record for all that it supersedes: the line of its
    answer names them, and the end of the world has them missing if it does not.
    """
    return [happening, *stand_ins_of(observed, server, happening)]


def is_stood_in_for(observed: Observations, view: ServerView, happening: Step) -> bool:
    """Whether the event that a snapshot had in its place is in quarantine.

    The record says that it could not be sent; the events that it stood for are not here. An
    operator may have given up an event that cannot be sent.
    """
    disk = observed.disk
    for each in stand_ins_of(observed, view.name, happening):
        name = each.event_id
        if name in view.quarantined or disk.quarantined(None, name):
            return True
        if not each.sendable and name in observed.unsent:
            return True
    return False


def message_id(text: str) -> str:
    """The id of a simulated to-device message."""
    found = _MESSAGE_ID.search(text)
    assert found is not None
    return found[1]


class FinalChecks:
    """Counts the missing events, and reports them in the end."""

    def __init__(self, observed: Observations) -> None:
        self._observed = observed

    def missing(self) -> Iterator[tuple[ServerView, Step]]:
        """The events that should have reached a server, or be accounted for, and are not."""
        observed, disk = self._observed, self._observed.disk
        observed.views.take_in(observed.homeserver.steps)
        for view in observed.views.of.values():
            for happening in view.owed:
                event_id = happening.event_id
                if event_id in view.answered or view.covered(happening):
                    continue
                if disk.quarantined(view.name, event_id) or disk.quarantined(None, event_id):
                    continue
                if is_stood_in_for(observed, view, happening):
                    continue
                # Held, or what stands in for it is: nothing else there could be a witness.
                held = bearers_of(observed, view.name, happening)
                if any(one.event_id in view.poison and self._is_owed(view, one) for one in held):
                    continue
                yield view, happening

    def _is_owed(self, view: ServerView, happening: Step) -> bool:
        disk, server = self._observed.disk, view.name
        if happening.token > view.mark or happening.event_id in disk.redeliveries(server):
            return True
        floor, newest = disk.catch_up_floor(server), disk.owed_room(server, happening.room_id)
        return newest > view.mark and floor is not None and floor < happening.token

    def messages_waiting(self) -> list[str]:
        """The servers for which there are to-device messages."""
        return sorted({server for server, _ in self._observed.disk.outbox()})

    def judge(self) -> None:
        """Everything was delivered, is superseded by the ledger's word, in quarantine, or held."""
        for view, happening in self.missing():
            self._observed.fail(
                "lost" if happening.token <= view.mark else "I8",
                f"{view.name} never got {happening.event_id} (token {happening.token} of"
                f" {happening.room_id}, {happening.kind}); LSSO is {view.mark}",
            )
        for server in self.messages_waiting():
            self._observed.fail("lost", f"to-device messages for {server} were never sent")
        self._check_quarantine()
        self._check_modes()

    def _check_quarantine(self) -> None:
        for item in self._observed.disk.quarantine().values():
            if not item.reason:
                self._observed.fail("I9", f"quarantine item {item.id} has no reason")

    def _check_modes(self) -> None:
        """Files that hold content are for our user alone (I10)."""
        for path in sorted(self._observed.disk.directory.rglob("*")):
            content = ".sqlite3" in path.name or path.parent.name == "ledger"
            if path.is_file() and content and path.stat().st_mode & 0o077:
                self._observed.fail("I10", f"{path.name} has mode {path.stat().st_mode & 0o777:o}")


MIN_GAP_S = 0.998
"""One second, less the rounding to milliseconds."""
SETTLED_S = 10.0
"""Longer than any database here takes for the queries of a transaction."""
REQUEST_S = 60.0
"""One attempt, all its connections included, takes no longer: `request_timeout`."""
MAY_BE_CONTENT = (400, 401, 403, 413)


class WireChecks:
    """The witness of everything that arrives anywhere."""

    def __init__(self, observed: Observations, ledger: LedgerChecks) -> None:
        self._observed = observed
        self._ledger = ledger
        self.at_point: Callable[[str], None] = lambda _point: None
        """Called after each observation, for scenarios that kill the daemon there."""

    def _view(self, server: str) -> ServerView:
        return self._observed.views.of[server]

    # --- the witness ------------------------------------------------------------------------------

    def contacted(self, server: str) -> None:
        """A connection to the server."""
        self._ledger.catch_up()
        view = self._view(server)
        view.sought_at = trio.current_time()
        self._observed.trace.note("contact", server)
        if view.failed_at is not None and view.failure == "unreachable":
            self._check_patience(view)

    def began(self, attempt: Attempt) -> None:
        """The head of a transaction is there."""
        self._ledger.catch_up()
        observed, view = self._observed, self._view(attempt.server)
        observed.trace.note("began", attempt.server, attempt.transaction_id)
        view.sought_at = trio.current_time()
        if view.flight is not None and not view.flight.over:
            observed.fail(
                "I3",
                f"{view.name}: {attempt.transaction_id} while {view.flight.transaction_id}"
                " is in flight",
            )
        view.flight = attempt
        attempt.life = observed.life
        if not observed.alive:
            return
        attempt.searching, attempt.on_trial = observed.disk.searching(attempt.server)
        attempt.known_to_work = observed.disk.known_to_work(attempt.server)
        attempt.second_try = self._is_second_try(view, attempt)
        if not attempt.second_try:
            self._check_patience(view)
            self._check_lines(view)
            self._check_succession(view, attempt)
        self.at_point("request began")

    def arrived(self, attempt: Attempt) -> None:
        """A transaction is there in whole."""
        observed, view = self._observed, self._view(attempt.server)
        assert attempt.digest is not None
        observed.counts["transactions arrived"] += 1
        known = view.digests.setdefault(attempt.transaction_id, attempt.digest)
        if known != attempt.digest:
            observed.fail("I3", f"{view.name}: {attempt.transaction_id} with another body")
        if attempt.contents is None:
            return
        sizes = len(attempt.contents.pdus), len(attempt.contents.messages)
        for size, works in zip(sizes, attempt.known_to_work, strict=True):
            attempt.searching |= 0 < works < size
        tokens = [pdu.token for pdu in attempt.contents.pdus]
        observed.trace.note("arrived", view.name, attempt.digest[:12], attempt.mode.value, tokens)
        repeated = view.unanswered is not None
        for pdu in attempt.contents.pdus:
            self._check_pdu(view, attempt, pdu, repeated=repeated)
        self.at_point("request arrived")

    def ended(self, attempt: Attempt) -> None:
        """An answer has begun to leave, or the connection is gone."""
        observed, view = self._observed, self._view(attempt.server)
        observed.trace.note("ended", view.name, attempt.status, attempt.processed)
        view.last = attempt
        if attempt.poisoned and attempt.contents is not None and len(attempt.contents.pdus) == 1:
            view.poison.add(attempt.contents.pdus[0].event_id)
        # Of a sender that was frozen meanwhile: its successor does not know.
        late = attempt.began_at < view.since
        if attempt.processed and attempt.contents is not None:
            self._take_in(view, attempt, late=late)
        if attempt.answered:
            self._answered(view, attempt)
        elif not late:
            self._unanswered(view, attempt)
        if attempt.life != observed.life or not observed.alive:
            self._forget_unrecorded(view)
        elif not late and not attempt.second_try and not observed.disk_full:
            id, at = view.cut_off or ("", 0.0)
            has_line = id == attempt.transaction_id and at >= attempt.began_at
            view.unlined += not has_line
        if attempt.status is not None:
            self.at_point("answer leaves")

    def clock_set(self, set_by_ms: int) -> None:
        """The daemon's wall clock is set ahead by so much from now on."""
        self._ledger.catch_up()
        self._observed.set_by_ms = set_by_ms
        self._observed.clock_was_set = True
        self._observed.counts["clocks set"] += 1

    def broken(self, server: str, rule: str, text: str) -> None:
        """A transaction breaks a rule of the specification."""
        self._observed.fail("spec", f"{server}: {rule}: {text}")

    # --- what the daemon's end does to it ---------------------------------------------------------

    def crashed(self) -> None:
        """A life was cut off: a transaction that it had tried once and not recorded may come under
        a new id."""
        observed = self._observed
        for view in observed.views.of.values():
            view.unlined = 0
            self._forget_unrecorded(view)

    def _forget_unrecorded(self, view: ServerView) -> None:
        observed, unanswered = self._observed, view.unanswered
        if unanswered is None:
            return
        wanted = unanswered.attempt.transaction_id
        record = observed.disk.frozen(view.name)
        if record is not None and record[0] == wanted:
            return
        if unanswered.times > 1 and not self._isolated(view):
            observed.fail(
                "I3", f"{view.name}: no record of {wanted}, tried {unanswered.times} times"
            )
        view.unanswered = None

    def drained(self) -> None:
        """A life has ended in order: unanswered transactions must be on record."""
        observed = self._observed
        for view in observed.views.of.values():
            if view.unanswered is None:
                continue
            wanted = view.unanswered.attempt.transaction_id
            record = observed.disk.frozen(view.name)
            if (record is None or record[0] != wanted) and not self._isolated(view):
                observed.fail("I3", f"{view.name}: {wanted} is not on record after a drain")

    def _unanswered(self, view: ServerView, attempt: Attempt) -> None:
        if attempt.began_at <= self._observed.anew_at:
            return
        known = view.unanswered
        if known is None or known.attempt.transaction_id != attempt.transaction_id:
            view.unanswered = Unanswered(attempt)
            return
        known.times += not attempt.second_try
        known.attempt = attempt

    # --- the rules --------------------------------------------------------------------------------

    def _is_second_try(self, view: ServerView, attempt: Attempt) -> bool:
        """The same attempt again: its reused connection turned out to be closed (I5).

        The line comes when both are over, unless the ledger's disk takes none. In between the
        attempt may wait for our own limits, behind others that use up their time.
        """
        last = view.last
        return (
            last is not None
            and last.reused
            and not last.second_try
            and not attempt.reused
            and last.status is None
            and last.life == attempt.life
            and last.transaction_id == attempt.transaction_id
            and attempt.began_at - last.began_at < 10 * REQUEST_S
            and (view.unlined > 0 or self._observed.disk_full)
        )

    def _check_patience(self, view: ServerView) -> None:
        now = trio.current_time()
        if view.failed_at is not None and now < view.failed_at + MIN_GAP_S:
            self._observed.fail(
                "I5", f"{view.name}: tried {now - view.failed_at:.3f} s after a failure"
            )

    def _check_lines(self, view: ServerView) -> None:
        if view.unlined > 0 and not self._observed.disk_full:
            assert view.last is not None
            self._observed.fail(
                "I9", f"{view.name}: no line for an attempt at {view.last.transaction_id}"
            )
        view.unlined = 0

    def _check_succession(self, view: ServerView, attempt: Attempt) -> None:
        """Another id follows only an answer, or an isolation that is on record (I3)."""
        before = view.unanswered
        if before is None or before.attempt.transaction_id == attempt.transaction_id:
            return
        status = before.attempt.status
        # A streak counts for the server: what it was sent meanwhile may have changed its id.
        stubborn = max(before.times, view.stubborn) >= STUBBORN
        suspect = status in MAY_BE_CONTENT or stubborn or before.attempt.searching
        # After a 200 that says nothing the kinds go apart.
        suspect = suspect or before.attempt.mode is Mode.PROXY
        if not (suspect and self._isolated(view)):
            self._observed.fail(
                "I3",
                f"{view.name}: {attempt.transaction_id} after {before.attempt.transaction_id},"
                f" which ended {before.times} times without an answer (last: {status})",
            )
        self._observed.counts["isolations"] += 1
        view.unanswered = None

    def _isolated(self, view: ServerView) -> bool:
        disk, before = self._observed.disk, view.unanswered
        assert before is not None
        if any(disk.searching(view.name)):
            return True
        contents = before.attempt.contents
        if contents is None:
            return False
        things = {*contents.messages, *(pdu.event_id for pdu in contents.pdus)}
        return not things.isdisjoint(view.quarantined)

    def _check_pdu(self, view: ServerView, attempt: Attempt, pdu: Step, *, repeated: bool) -> None:
        observed = self._observed
        assert attempt.contents is not None
        if not pdu.own:
            observed.counts["others' events"] += 1
            if view.name not in pdu.before:
                observed.fail("I6", f"{view.name} must not see {pdu.event_id} of another server")
            return
        if view.name not in pdu.servers:
            observed.fail("I6", f"{view.name} must not see {pdu.event_id} (token {pdu.token})")
        set_aside = pdu.event_id in view.redelivered
        # Its commit was made, and lost.
        queued = observed.failover is not None
        noted_upto = observed.noted_upto(view.name)
        if pdu.token > noted_upto and not set_aside and not queued:
            observed.fail("I1", f"{view.name}: {pdu.token} sent, noted up to {noted_upto}")
        taken_back = observed.homeserver.redacted.get(pdu.event_id)
        if pdu.event_id in attempt.contents.pruned:
            if taken_back is None:
                observed.fail("redaction", f"{view.name}: {pdu.event_id} pruned for no reason")
        elif taken_back is not None and not repeated:
            self._check_redaction(view, pdu, taken_back)
        again = pdu.event_id in view.proven and pdu.event_id not in view.redelivered
        if again and not repeated and not _is_alone_on_trial(attempt):
            # What had a recorded answer is not sent again, unless an operator asked for it.
            observed.fail(
                "I3", f"{view.name}: {pdu.event_id} (token {pdu.token}) again, LSSO is {view.mark}"
            )

    def _check_redaction(self, view: ServerView, pdu: Step, taken_back: int) -> None:
        observed = self._observed
        known_since = observed.passed_at(taken_back)
        if known_since is not None and trio.current_time() - known_since > SETTLED_S:
            observed.fail(
                "redaction",
                f"{view.name}: {pdu.event_id} whole, {trio.current_time() - known_since:.1f} s"
                " after its redaction was fanned out",
            )

    def _take_in(self, view: ServerView, attempt: Attempt, *, late: bool) -> None:
        """A server has taken a transaction in: in each room it sees time go one way, but for what
        a slow one was still at when its sender's successor began."""
        assert attempt.contents is not None
        for pdu in attempt.contents.pdus:
            if not pdu.own:
                continue  # It stands in, and may be newer than what is fanned out next.
            if pdu.event_id in view.redelivered or _is_alone_on_trial(attempt):
                view.taken.add(pdu.event_id)
                continue
            newest = view.newest.get(pdu.room_id, 0)
            if pdu.token < newest and pdu.event_id not in view.taken and not late:
                self._observed.fail(
                    "order", f"{view.name}: {pdu.token} after {newest} in {pdu.room_id}"
                )
            view.newest[pdu.room_id] = max(newest, pdu.token)
            view.taken.add(pdu.event_id)

    def _answered(self, view: ServerView, attempt: Attempt) -> None:
        view.unanswered = None
        if attempt.contents is not None:
            view.answered.update(pdu.event_id for pdu in attempt.contents.pdus)
            if self._observed.disk_full:
                _assume_recorded(view, attempt.contents.pdus)
            view.messages_answered.update(attempt.contents.messages)
            if view.honest is not None:
                own = [pdu for pdu in attempt.contents.pdus if pdu.own]
                view.took.append((attempt.began_at, trio.current_time()))
                self._take_latencies(own, view)
            self._observed.counts["PDUs answered"] += len(attempt.contents.pdus)
            self._observed.counts["to-device messages"] += len(attempt.contents.messages)
        self._observed.counts["transactions answered"] += 1

    def _take_latencies(self, pdus: Sequence[Step], view: ServerView) -> None:
        observed = self._observed
        assert view.honest is not None
        for pdu in pdus:
            since = observed.passed_at(pdu.token)
            if since is not None and since >= observed.calm_since:
                took_s = sum(max(0.0, end - max(began, since)) for began, end in view.took)
                observed.latencies[view.honest].append(trio.current_time() - since - took_s)


def _is_alone_on_trial(attempt: Attempt) -> bool:
    """Whether it is the suspect of a search that is on record, or the witness of one."""
    contents = attempt.contents
    return attempt.on_trial and contents is not None and len(contents.pdus) == 1


def _assume_recorded(view: ServerView, pdus: Sequence[Step]) -> None:
    """The line with the events that the PDUs stand for cannot be written."""
    for pdu in pdus:
        view.recorded.add(pdu.event_id)
        view.superseded.setdefault(pdu.room_id, []).append((0, pdu.token))
