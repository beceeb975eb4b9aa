"""What a relay has told anybody, held against what it says later: the invariants of its log.

A history has an epoch, and each of its tokens stands for one record for ever. A relay whose loss
was accepted goes on with a new history, which shares with the old one what was left of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from fedsender.relay.consumer import Consumer
from fedsender.relay.daemon import RelayDaemon
from fedsender.replication.commands import Json
from fedsender.simulation.evidence import Violation
from fedsender.simulation.relay_disk import MemoryDisk
from fedsender.simulation.virtual import Trace

DIRECTORY = Path("/relay")
KEPT_VIOLATIONS = 50


@dataclass
class History:
    """The records of an epoch, as far as anybody was told of them.

    Attributes:
        records: the id of the record of each token.
        tokens: the same the other way round.
        newest: the largest token that anybody was told of.
    """

    records: dict[int, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    newest: int = 0


@dataclass
class RelayBooks:
    """See the module.

    Attributes:
        disk: the relay's.
        rows: the rows of each record that was ever sent in, by its id.
        answered: the ids of those that were answered 200, with epoch and token.
        counts: what happened, for the report.
    """

    disk: MemoryDisk
    trace: Trace = field(default_factory=Trace)
    rows: dict[str, Sequence[Json]] = field(default_factory=dict)
    answered: dict[str, tuple[str, int]] = field(default_factory=dict)
    histories: dict[str, History] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    epoch: str = ""

    def fail(self, invariant: str, text: str) -> None:
        """Something was seen that must never be."""
        if len(self.violations) < KEPT_VIOLATIONS:
            self.violations.append(Violation(invariant, trio.current_time(), text))
        self.trace.note("VIOLATION", invariant, text)

    # --- the log ----------------------------------------------------------------------------------

    def told(self, by: str, epoch: str, token: int, record: str) -> None:
        """Somebody was told that this token stands for this record."""
        history = self.histories.get(epoch)
        if history is None:
            self.fail("epoch", f"{by} speaks of epoch {epoch}, which was never begun")
            return
        known = history.records.get(token)
        if known is not None and known != record:
            self.fail("token", f"{by}: {token} of {epoch} was {known}, and is {record}")
        if history.tokens.get(record, token) != token:
            self.fail("once", f"{by}: {record} is {history.tokens[record]} and {token}")
        history.records.setdefault(token, record)
        history.tokens.setdefault(record, token)
        if token > history.newest:
            history.newest = token
            self._check_durable(by, token, record)

    def _check_durable(self, by: str, token: int, record: str) -> None:
        needle = f'"{record}"'.encode()
        if not any(needle in content for content in self.disk.durable(DIRECTORY / "log")):
            self.fail("durable", f"{by} was told of {token}, {record}, before it was on disk")

    def answer(self, epoch: str, token: int, record: str) -> None:
        """The homeserver was told that this record is kept."""
        before = self.answered.get(record)
        if before is not None and before[0] == epoch and before[1] != token:
            self.fail("once", f"{record} was answered {before[1]} and {token}")
        self.told("the homeserver", epoch, token, record)
        self.answered[record] = (epoch, token)

    def begin(self, relay: RelayDaemon, *, loss_accepted: bool) -> None:
        """The relay has started: what anybody was told of must be there."""
        epoch, head = relay.log.epoch, relay.log.head
        history = self.histories.get(epoch)
        if history is not None:
            if epoch != self.epoch:
                self.fail("epoch", f"{epoch} came back after {self.epoch}")
            if head < history.newest:
                self.fail("kept", f"{history.newest} was told of, and the log ends at {head}")
        else:
            if self.epoch and not loss_accepted:
                self.fail("epoch", f"a new one, {epoch}, though nothing was lost")
            before = self.histories.get(self.epoch, History())
            kept = {token: name for token, name in before.records.items() if token <= head}
            tokens = {name: token for token, name in kept.items()}
            self.counts["records given up"] += len(before.records) - len(kept)
            self.histories[epoch] = History(kept, tokens, min(before.newest, head))
        self.epoch = epoch
        self.trace.note("relay", epoch, relay.log.first, head)

    # --- what is kept -----------------------------------------------------------------------------

    def check_snapshots(self, relay: RelayDaemon) -> None:
        """Whoever has lost its place can take a snapshot, and go on behind it."""
        newest = max((info.token for info in relay.shelf.snapshots), default=0)
        if newest < relay.log.first - 1:
            self.fail(
                "snapshot", f"the newest is {newest}, and the log begins at {relay.log.first}"
            )

    def check_consumers(self, relay: RelayDaemon) -> None:
        """A consumer that the log does not reach any more is shown as lost."""
        for one in relay.registry:
            if one.pin is not None and one.pin < relay.log.first - 1:
                self.fail("lost", f"{one.name} holds {one.pin}, the log begins behind it")
            self.counts["consumers seen lost"] += one.lost

    def check_removal(self, relay: RelayDaemon, path: Path, *, short: bool) -> None:
        """A segment goes: nobody may need it, but for want of room."""
        first = int(path.stem)
        # The log has let go of it already; what is left begins behind it.
        last = relay.log.first - 1
        self.counts["segments deleted"] += 1
        holders = [one.name for one in relay.registry if needs(one, last)]
        if holders:
            self.counts["segments deleted for want of room"] += 1
            if not short:
                self.fail("pin", f"{first} to {last} went, and {holders} needed it")

    # --- at the end -------------------------------------------------------------------------------

    def check_answered(self) -> None:
        """Each record that was answered 200 is there, once, but for what was given up openly."""
        history = self.histories[self.epoch]
        for record, (epoch, token) in self.answered.items():
            if epoch == self.epoch and history.tokens.get(record) != token:
                self.fail("kept", f"{record} was answered {token}, and is not in the log")

    def newest_in_rooms(self, epoch: str, token: int) -> Mapping[str, str]:
        """The newest event in each room that any server was to get, up to this token."""
        newest: dict[str, str] = {}
        shared: set[str] = set()
        history = self.histories[epoch]
        for at in range(1, token + 1):
            record = history.records.get(at)
            if record is None:
                continue
            for row in self.rows[record]:
                if row[0] == "pdu" and row[1][0] in shared:
                    newest[row[1][0]] = row[1][1]
                elif row[0] == "hosts":
                    shared.add(row[1][0])
        return newest


def needs(consumer: Consumer, last: int) -> bool:
    """Whether a consumer's pin is below this token."""
    return consumer.pin is not None and consumer.pin < last


def name_of(rows: Sequence[Json]) -> str:
    """The id of a record of the simulation: that of its first row."""
    kind, body = rows[0]
    return str(body[2] if kind == "edu" else body[1])
