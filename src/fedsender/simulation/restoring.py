"""A backup of both databases, taken in the middle of a catch-up, and restored much later.

The ledger stays: it is the proof of what was sent. What the databases had learned since is gone, so
a server may get again what it has, and the order of what it sees begins anew. Nothing may be lost.
"""

from pathlib import Path
from random import Random

import trio

from fedsender.simulation.books import Unanswered
from fedsender.simulation.commit_checks import CommitChecks
from fedsender.simulation.disasters import Operator
from fedsender.simulation.disk import HOMESERVER, SENDER, Disk
from fedsender.simulation.evidence import Evidence
from fedsender.simulation.manners import Manner
from fedsender.simulation.receiver import Attempt

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
        evidence: Evidence,
        commits: CommitChecks,
        operator: Operator,
        rng: Random,
    ) -> None:
        self.wanted = False
        self._directory = directory / "backup"
        self._evidence = evidence
        self._commits = commits
        self._operator = operator
        self._rng = rng
        self._paused: list[str] = []

    async def take(self) -> None:
        """Wait for a catch-up to be under way, and copy both databases, one after the other."""
        disk = self._evidence.disk
        while (
            disk is None or not self._evidence.alive or not disk.ready() or not disk.catching_up()
        ):
            await trio.sleep(LOOK_EVERY_S)
            disk = self._evidence.disk
        self._directory.mkdir(exist_ok=True)
        disk.back_up(self._directory, HOMESERVER)
        if self._rng.random() < 0.5:
            await trio.sleep(self._rng.uniform(0, APART_S))
        disk = self._evidence.disk
        assert disk is not None
        disk.back_up(self._directory, SENDER)
        self._paused = list(self._operator.paused)
        self._evidence.counts["backups"] += 1
        self._evidence.trace.note("backup")

    def put_back(self, directory: Path) -> None:
        """No daemon runs: the databases become what they were, and what was seen since is void."""
        self.wanted = False
        evidence = self._evidence
        had = -1 if evidence.disk is None else evidence.disk.feed_position()
        for name in (HOMESERVER, SENDER):
            for path in directory.glob(f"{name}*"):
                path.unlink()
        if evidence.disk is not None:
            evidence.disk.close()
        copies = Disk(self._directory)
        copies.back_up(directory, HOMESERVER, SENDER)
        copies.close()
        evidence.disk = disk = Disk(directory, evidence.orderings)
        evidence.counts["restores"] += 1
        evidence.trace.note("restored", disk.position())
        evidence.back_to(disk.position())
        self._operator.paused = list(self._paused)
        self._commits.restored(disk)
        evidence.given_back.append((disk.feed_position(), had))
        marks = disk.marks()
        for book in evidence.books.of.values():
            frozen = disk.frozen(book.name)
            repeats = None if frozen is None else _unknown_attempt(book.name, *frozen)
            book.go_back(marks.get(book.name, 0), repeats)


def _unknown_attempt(server: str, transaction_id: str, times: int) -> Unanswered:
    attempt = Attempt(server, transaction_id, 0.0, reused=False, manner=Manner.STALL, over=True)
    return Unanswered(attempt, times)
