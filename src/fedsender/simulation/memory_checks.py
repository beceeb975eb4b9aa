"""I7: what a running daemon holds in memory is bounded."""

import trio

from fedsender.daemon import Daemon
from fedsender.matrix import MAX_PDU_BYTES
from fedsender.simulation.evidence import Evidence

TASKS_PER_SERVER = 12
"""A destination, its attempt's addresses, the server's own side of each connection."""
OTHER_TASKS = 150
LONG_WAIT_S = 600.0


class MemoryChecks:
    """Looks at a daemon from time to time."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def look(self, daemon: Daemon) -> None:
        """Compare what there is with what there may be."""
        sender, evidence = daemon.sender, self._evidence
        counts = evidence.counts
        servers = len(evidence.books.of)
        if len(sender.active) > servers:
            evidence.fail("I7", f"{len(sender.active)} destinations for {servers} servers")
        most = daemon.config.sending.queue_pdus
        queued_ids: set[str] = set()
        for destination in sender.active.values():
            queued = len(destination.outbox.queue)
            queued_ids.update(pdu.event_id for pdu in destination.outbox.queue)
            counts["longest queue"] = max(counts["longest queue"], queued)
            if queued > most:
                evidence.fail("I7", f"{destination.name}: {queued} PDUs queued, {most} may be")
            waits_s = trio.current_time() - destination.since
            if destination.retry_in_s > LONG_WAIT_S and waits_s > LONG_WAIT_S:
                evidence.fail("I7", f"{destination.name} waits for hours in memory")
        window = sender.context.pdu_pool.bytes
        counts["largest window"] = max(counts["largest window"], window)
        if window > daemon.config.sending.window_bytes + MAX_PDU_BYTES:
            evidence.fail("I7", f"the window of queued events has {window} bytes")
        if (held := len(sender.context.pdu_pool)) != len(queued_ids):
            evidence.fail("I7", f"{held} events are held, {len(queued_ids)} are queued")
        tasks = trio.lowlevel.current_statistics().tasks_living
        counts["most tasks"] = max(counts["most tasks"], tasks)
        if tasks > OTHER_TASKS + TASKS_PER_SERVER * servers:
            evidence.fail("I7", f"{tasks} tasks for {servers} servers")
