"""I8: what a start finds pending is tried, and nothing new need happen first."""

import trio

from fedsender.daemon import Daemon
from fedsender.simulation.evidence import Evidence
from fedsender.testing.clock import now_ms

LOOKS_S = (5.0, 60.0, 300.0)
"""So long after a start it is looked at: the last time everybody must have been tried."""
PER_SERVER_S = 2.0
"""The last look waits so much longer for each server there is: dead ones share the slow lane."""


class StartCheck:
    """Follows one start. Made when it is over, and the sender runs."""

    def __init__(self, evidence: Evidence) -> None:
        assert evidence.disk is not None
        self._evidence = evidence
        self._started = trio.current_time()
        self._pending = evidence.disk.owing() - evidence.disk.held(now_ms())
        evidence.counts["pending at a start"] += len(self._pending)

    def look(self, daemon: Daemon) -> None:
        """Who owes still must be known to the sender, and in the end must have been tried."""
        evidence, sender = self._evidence, daemon.sender
        assert evidence.disk is not None
        after_s = trio.current_time() - self._started
        self._pending &= evidence.disk.owing() - evidence.disk.held(now_ms())
        for server in sorted(self._pending):
            if evidence.books.of[server].sought_at > self._started:
                self._pending.discard(server)
            elif server not in sender.active and not sender.registry.is_behind(server):
                evidence.fail("I8", f"{server} is forgotten {after_s:.0f} s after a start")
            elif after_s >= LOOKS_S[-1]:
                evidence.fail("I8", f"{server} was not tried within {after_s:.0f} s of a start")
