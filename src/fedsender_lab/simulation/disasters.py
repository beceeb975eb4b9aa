"""Disasters that befall a daemon, beside its remote servers: its homeserver, its disk, its
operator, and backups that are restored.
"""

import fcntl
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import trio

from fedsender.daemon import Daemon
from fedsender_lab.simulation.behaviours import Mode
from fedsender_lab.simulation.checks import CommitChecks
from fedsender_lab.simulation.daemon_life import Life
from fedsender_lab.simulation.disk import HOMESERVER, SENDER, Disk
from fedsender_lab.simulation.observations import Failover, Observations, RoomLock, Unanswered
from fedsender_lab.simulation.receiver import Attempt

SECRET_CONTENT = "for-your-device-only"
FULL = "/dev/full"
BUSY = 50
"""Events behind one that cannot be sent: a busy room."""
GRACE_S = 5.0
"""Seconds after which records that depend on a lost line may still be written."""


class Operator:
    """An operator that pauses, wakes, redelivers, empties the quarantine, frees blocked rooms, and
    restarts now and then.

    Everything is asked of the life that is lived; if there is none, nothing happens.

    Attributes:
        paused: the servers to which nothing is sent.

    Args:
        post: takes a to-device message: (server, id, content).
    """

    def __init__(
        self,
        observed: Observations,
        rng: Random,
        life: Callable[[], Life | None],
        post: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self._observed = observed
        self._rng = rng
        self._life = life
        self._post = post
        self._messages = 0
        self.paused: list[str] = []

    def ask(self, act: Callable[[Daemon], Awaitable[object]]) -> None:
        """Have this done by the daemon, unless it dies over it."""
        life = self._life()
        if life is not None and life.acts is not None and life.daemon is not None:
            life.acts.start_soon(act, life.daemon)

    def act(self) -> None:
        """Do something."""
        acts = (
            *(self.wake, self.pause, self.resume, self.redeliver, self.redeliver, self.release),
            self.free_rooms,
        )
        self._rng.choice(acts)()

    def _server(self) -> str:
        return self._rng.choice(list(self._observed.views.of))

    def wake(self) -> None:
        """`notify_remote_server_up` for a few servers."""
        servers = [self._server() for _ in range(self._rng.randint(1, 5))]
        self.wake_all(servers)

    def wake_all(self, servers: list[str]) -> None:
        """The same for these."""
        life = self._life()
        if life is not None and life.daemon is not None and life.acts is not None:
            for server in servers:
                self._observed.views.of[server].wakes.append((trio.current_time(), True))
            life.daemon.sender.registry.wake(servers, by_admin=True)
            self._observed.counts["wakes"] += len(servers)

    def pause(self) -> None:
        """Send nothing to a server until further notice."""
        server = self._server()
        self.paused.append(server)

        self.ask(
            lambda daemon: daemon.sender.operations.hold(server, paused="by hand", parked=None)
        )

    def resume(self) -> None:
        """Send again to all that were paused."""
        self._observed.counts["resumed"] += len(self.paused)

        async def do(daemon: Daemon) -> None:
            for server in list(self.paused):
                await daemon.sender.operations.hold(server, paused=None, parked=None)
                # Asked twice at a time, the other one may have been first.
                if server in self.paused:
                    self.paused.remove(server)

        self.ask(do)

    def redeliver(self) -> None:
        """Have some events sent again to one server; also some that it must not see (I6)."""
        view = self._observed.views.of[self._server()]
        known = self._observed.homeserver.between(0, max(self._observed.position, 0))
        chosen = self._rng.sample(view.owed, min(len(view.owed), 5))
        wanted = [event.event_id for event in chosen if event.token <= self._observed.position]
        if known:
            wanted.append(self._rng.choice(known).event_id)
        view.redelivered.update(wanted)
        self._observed.counts["redeliveries"] += len(wanted)

        items = [(view.name, event_id) for event_id in wanted]
        self.ask(lambda daemon: daemon.sender.operations.redeliver(items))

    def release(self) -> None:
        """Try everything in quarantine again, and give up malformed items."""
        observed = self._observed
        if not observed.disk.ready():
            return
        items = observed.disk.quarantine().values()
        hopeless = [
            item.id
            for item in items
            if item.event_id in observed.homeserver.by_id
            and not observed.homeserver.by_id[item.event_id].sendable
        ]
        others = [item.id for item in items if item.id not in hopeless and item.event_id]
        for item in items:
            servers = observed.views.of if item.destination is None else [item.destination]
            for server in servers:
                if item.event_id is not None:
                    observed.views.of[server].redelivered.add(item.event_id)
        observed.counts["released"] += len(others)

        async def do(daemon: Daemon) -> None:
            await daemon.sender.operations.drop(hopeless)
            await daemon.sender.operations.release(others)

        self.ask(do)

    def free_rooms(self) -> None:
        """Give up the malformed events that block a room, and release all that waits behind them.

        Nobody gets anything twice by it, or out of order: the checks make no exception.
        """
        observed = self._observed
        if not observed.disk.ready():
            return
        happenings = observed.homeserver.by_id
        blocking = [
            (item.id, happenings[item.event_id])
            for item in observed.disk.quarantine().values()
            if item.destination is None and item.event_id in happenings
        ]
        hopeless = [number for number, happening in blocking if not happening.sendable]
        rooms = list(dict.fromkeys(happening.room_id for _, happening in blocking))

        async def do(daemon: Daemon) -> None:
            await daemon.sender.operations.drop(hopeless)
            for room_id in rooms:
                released, more = 0, True
                while more:
                    freed = await daemon.sender.operations.release_room(room_id)
                    released, more = released + len(freed.released), freed.more
                observed.counts["busy rooms freed"] += released >= BUSY

        self.ask(do)

    async def send_to_device(self) -> None:
        """A local client sends twice to a remote device."""
        server = self._server()
        self._post_message(server)
        await trio.sleep(self._rng.uniform(0, 1))
        self._post_message(server)

    def _post_message(self, server: str) -> None:
        self._messages += 1
        name = f"message-{self._messages}"
        content: dict[str, Any] = {
            "sender": f"@mia:{self._observed.homeserver.name}",
            "type": "m.room.encrypted",
            "messages": {f"@ana:{server}": {"DEVICE": {"ciphertext": SECRET_CONTENT}}},
        }
        self._post(server, name, content)


async def fill_ledger_disk(observed: Observations, life: Life, seconds: float) -> None:
    """For a while the disk with the ledger takes nothing: its descriptor leads to /dev/full."""
    descriptor = _open_segment(life)
    if descriptor is None:
        return
    observed.counts["full disks"] += 1
    observed.disk_full = True
    there = os.dup(descriptor)
    full = os.open(FULL, os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)
    try:
        await trio.sleep(seconds)
    finally:
        # The daemon may have closed it, and then the number is somebody else's.
        if _target(descriptor) == FULL:
            os.dup2(there, descriptor)
        os.close(there)
    await trio.sleep(GRACE_S)
    observed.disk_full = False


def _open_segment(life: Life) -> int | None:
    """The descriptor with which the daemon writes its ledger."""
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        target = _target(int(name))
        ours = target.startswith(f"{life.directory}/") and target.endswith(".open")
        if ours and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_WRONLY:
            return int(name)
    return None


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


STANDS_STILL_S = 60.0
"""So long after it met a lock the fan-out has gone on, if nothing else ails the daemon."""


async def lock_room(
    observed: Observations, life: Callable[[], Life | None], room_id: str, seconds: float
) -> None:
    """Another process locks a room, half-way also its rows, and in the end it rolls back."""
    if observed.lock is not None:
        return
    observed.counts["rooms_locked"] += 1
    lock = observed.lock = RoomLock(room_id)
    began = trio.current_time()
    try:
        while trio.current_time() < began + seconds:
            await trio.sleep(min(LOOK_EVERY_S, seconds))
            lock.rows = trio.current_time() >= began + seconds / 2
            _check_goes_on(observed, lock, life())
    finally:
        observed.lock = None


def _check_goes_on(observed: Observations, lock: RoomLock, life: Life | None) -> None:
    """A lock holds up no other room."""
    if lock.refused_at is None or trio.current_time() < lock.refused_at + STANDS_STILL_S:
        return
    if life is None or life.crashed or life.draining or life.away_at >= lock.refused_at:
        return
    observed.fail("standstill", f"the fan-out waits for {lock.room_id} since {lock.refused_at:.0f}")


LOOK_EVERY_S = 5.0
APART_S = 20.0
"""The sender's database may be copied so much later than the homeserver's."""


class Backup:
    """Takes copies, and puts them back.

    Attributes:
        wanted: at the daemon's next end the copies are to be put back.
    """

    def __init__(
        self,
        directory: Path,
        observed: Observations,
        commits: CommitChecks,
        operator: Operator,
        rng: Random,
    ) -> None:
        self.wanted = False
        self._directory = directory / "backup"
        self._observed = observed
        self._commits = commits
        self._operator = operator
        self._rng = rng
        self._paused: list[str] = []

    async def take(self) -> None:
        """Wait for a catch-up to be under way, and copy both databases, one after the other."""
        observed = self._observed
        while not (  # noqa: ASYNC110
            observed.alive and observed.disk.ready() and observed.disk.catching_up()
        ):
            await trio.sleep(LOOK_EVERY_S)
        self._directory.mkdir(exist_ok=True)
        observed.disk.back_up(self._directory, HOMESERVER)
        if self._rng.random() < 0.5:
            await trio.sleep(self._rng.uniform(0, APART_S))
        observed.disk.back_up(self._directory, SENDER)
        self._paused = list(self._operator.paused)
        observed.counts["backups"] += 1
        observed.trace.note("backup")

    def put_back(self, directory: Path) -> None:
        """No daemon runs: the databases become as they were, and later observations are void."""
        self.wanted = False
        observed = self._observed
        had = observed.disk.feed_position()
        for name in (HOMESERVER, SENDER):
            for path in directory.glob(f"{name}*"):
                path.unlink()
        observed.disk.close()
        copies = Disk(self._directory)
        copies.back_up(directory, HOMESERVER, SENDER)
        copies.close()
        disk = observed.disk
        disk.look_at(directory)
        observed.counts["restores"] += 1
        observed.trace.note("restored", disk.position())
        self._operator.paused = list(self._paused)
        self._commits.restored(disk)
        observed.given_back.append((disk.feed_position(), had))
        marks = disk.marks()
        for view in observed.views.of.values():
            frozen = disk.frozen(view.name)
            repeats = None if frozen is None else repeat_of(view.name, *frozen)
            view.go_back(marks.get(view.name, 0), repeats)


NOTICED_S = 600.0
"""By then a daemon that can write has noticed a failover: it looks every five minutes."""
MOST_LOST = 30
"""Commits that a failover loses."""


class Replica:
    """A replica of the homeserver's database that takes over, and lacks the newest commits."""

    def __init__(
        self,
        directory: Path,
        observed: Observations,
        commits: CommitChecks,
        rng: Random,
    ) -> None:
        self._path = directory / "replica"
        self._observed = observed
        self._commits = commits
        self._rng = rng
        self._left = 0

    def fall_behind(self) -> None:
        """Take no commits from now on; in place of one of the next, take over."""
        observed = self._observed
        if not observed.alive or not observed.disk.ready() or observed.failover is not None:
            return
        self._path.mkdir(exist_ok=True)
        observed.disk.back_up(self._path, HOMESERVER)
        self._left = self._rng.choice((1, 1, 2, 3, 5, self._rng.randint(1, MOST_LOST)))

    def forget(self) -> None:
        """The daemon has ended. What its next one makes of the databases, a start has noticed."""
        self._left = 0
        if self._observed.failover is not None:
            self._observed.failover = None
            self._commits.lost_commits()

    def committed(self) -> None:
        """The homeserver's database has committed, and the daemon does not know it yet."""
        if self._left == 0:
            return
        self._left -= 1
        if self._left == 0:
            self._take_over()

    def _take_over(self) -> None:
        observed, disk = self._observed, self._observed.disk
        had = disk.position(), disk.feed_position()
        disk.lose_commits(self._path / HOMESERVER)
        has = disk.position(), disk.feed_position()
        observed.trace.note("failover", *had, *has)
        observed.counts["failovers"] += 1
        self._commits.lost_commits()
        if has != had:
            # Else only marks and messages are lost, and nobody can see it.
            observed.failover = Failover(trio.current_time(), disk.taken_over())

    def check(self, life: Life | None) -> None:
        """Whether a failover has gone unnoticed for long."""
        observed, failover = self._observed, self._observed.failover
        if failover is None or trio.current_time() < failover.at + NOTICED_S:
            return
        if life is None or life.crashed or life.draining or life.away_at >= failover.at:
            return
        observed.fail("unnoticed", f"a failover of {failover.at:.0f} s")


def repeat_of(server: str, transaction_id: str, times: int) -> Unanswered:
    """What is on record as the next transaction, after so many attempts."""
    attempt = Attempt(server, transaction_id, 0.0, reused=False, mode=Mode.STALL, over=True)
    return Unanswered(attempt, times)
