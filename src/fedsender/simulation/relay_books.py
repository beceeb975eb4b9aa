"""What a relay has told anybody, held against what it says later: the invariants of its log.

A history has an epoch, and each of its tokens stands for one record for ever. One history may go on
where another ends: then it has all that the other told anybody of. A relay whose directory was
replaced by an older copy goes on with a history that shares with the others what is in the copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from fedsender.relay.daemon import RelayDaemon
from fedsender.simulation.evidence import Violation
from fedsender.streams import Json
from fedsender.testing.clock import Trace

DROPPED = "messages dropped for want of room"
KEPT_VIOLATIONS = 50


@dataclass
class History:
    """The records of an epoch, as far as anybody was told of them.

    Attributes:
        records: the id of the record of each token.
        tokens: the same the other way round.
        newest: the largest token that anybody was told of.
        shared: earlier epochs, each with the last token that it has in common with this one, as far
            as that is known to the relay.
    """

    records: dict[int, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    newest: int = 0
    shared: dict[str, int] = field(default_factory=dict)

    def going_on(self, epoch: str, head: int) -> History:
        """One that begins behind this token of this one, which is called `epoch`."""
        records = {token: name for token, name in self.records.items() if token <= head}
        return History(
            records,
            {name: token for token, name in records.items()},
            min(self.newest, head),
            {**self.shared, epoch: head},
        )


@dataclass
class Standing:
    """What a consumer has.

    Attributes:
        epoch, token: its position.
        newest: the largest one that it ever had and that still means the same.
        fed_at: when it last stored something from the relay.
        joined: that was a snapshot, and the relay may not know that it has it.
        messages: the to-device messages that it was ever given.
        handles: whether it wants those for this server.
    """

    epoch: str = ""
    token: int = 0
    newest: int = 0
    fed_at: float = float("-inf")
    joined: bool = False
    messages: set[str] = field(default_factory=set)
    handles: Callable[[str], bool] = lambda _server: True


@dataclass
class RelayBooks:
    """See the module.

    Attributes:
        is_durable: whether this token stands for this record in the relay's database.
        rows: the rows of each record that was ever sent in, by its id; and when they were.
        audience: the servers that are to get the event of a record, by its id, where that is not
            to be read from the rows.
        answered: the token of those that were answered 200.
        standings: what each consumer has that follows the relay in good faith.
        given_up: the records that an older copy of the relay's directory has not.
        counts: what happened, for the report.
        on_violation: called with each.
    """

    is_durable: Callable[[int, str], bool] = lambda _token, _record: True
    trace: Trace = field(default_factory=Trace)
    rows: dict[str, Sequence[Json]] = field(default_factory=dict)
    sent_at: dict[str, float] = field(default_factory=dict)
    audience: dict[str, Collection[str]] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)
    histories: dict[str, History] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    epoch: str = ""
    on_violation: Callable[[Violation], None] = lambda _violation: None

    def fail(self, invariant: str, text: str) -> None:
        """Something was seen that must never be."""
        violation = Violation(invariant, trio.current_time(), text)
        if len(self.violations) < KEPT_VIOLATIONS:
            self.violations.append(violation)
        self.on_violation(violation)
        self.trace.note("VIOLATION", invariant, text)

    @property
    def present(self) -> History:
        """The history that the relay has now."""
        return self.histories[self.epoch]

    def send_in(self, record: str, rows: Sequence[Json]) -> None:
        """The homeserver begins to tell the relay of a record."""
        self.rows[record] = rows
        self.sent_at[record] = trio.current_time()

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
        if history is self.present:
            self.given_up.discard(record)
        if token > history.newest:
            history.newest = token
            if not self.is_durable(token, record):
                self.fail("durable", f"{by} was told of {token}, {record}, before it was durable")

    def answer(self, epoch: str, token: int, record: str) -> None:
        """The homeserver was told that this record is kept."""
        before = self.answered.get(record, token)
        if before != token and record not in self.given_up:
            self.fail("once", f"{record} was answered {before} and {token}")
        self.told("the homeserver", epoch, token, record)
        self.answered[record] = token

    def begin(self, relay: RelayDaemon, epochs: Sequence[str], *, restored: bool) -> None:
        """The relay has started: what anybody was told of must be there.

        Args:
            epochs: that the relay knows, oldest first.
            restored: its directory is an older copy.
        """
        epoch, first, head = relay.log.epoch, relay.log.first, relay.log.head
        present = self.histories.get(self.epoch, History())
        # A relay that was killed while it started has told nobody of its epoch.
        before = next((name for name in reversed(epochs) if name in self.histories), "")
        if not restored and (head < present.newest or before != self.epoch):
            self.fail("kept", f"{present.newest} of {self.epoch} was told of, log: {head} {before}")
        lost = {name for token, name in present.records.items() if token > head}
        self.counts["records given up"] += len(lost)
        self.given_up |= lost
        if epoch in self.histories:
            self.fail("epoch", f"{epoch} came back after {self.epoch}")
        else:
            self.histories[epoch] = self.histories.get(before, History()).going_on(before, head)
        for standing in self.standings.values():
            standing.newest = min(standing.newest, head)
        self.epoch = epoch
        self.trace.note("relay", epoch, first, head)

    # --- consumers --------------------------------------------------------------------------------

    def fed(self, name: str, epoch: str, token: int, *, joined: bool) -> None:
        """A consumer has stored what it was told, up to this token."""
        standing = self.standings.setdefault(name, Standing())
        standing.epoch, standing.token = epoch, token
        standing.newest = max(standing.newest, token)
        standing.fed_at, standing.joined = trio.current_time(), joined

    def joins(self, name: str, epoch: str, token: int) -> None:
        """A consumer takes a snapshot: what there was before anybody knew of it, it never gets."""
        standing = self.standings[name]
        if standing.epoch:
            return
        for record in self._records(epoch, token):
            standing.messages.add(record)

    def went_back(self, name: str) -> None:
        """A consumer was restored: until it has said so, nothing is known of what it has."""
        self.standings[name].fed_at = float("-inf")

    def token_of(self, standing: Standing) -> int | None:
        """A consumer's position in the present history; None: it has none there."""
        if standing.epoch == self.epoch:
            return standing.token
        upto = self.present.shared.get(standing.epoch, -1)
        return standing.token if standing.token <= upto else None

    # --- what a snapshot should say ---------------------------------------------------------------

    def newest_of(self, epoch: str, token: int) -> Mapping[tuple[str, str], str]:
        """(room, server) -> the newest event that the server was to get, up to this token."""
        newest: dict[tuple[str, str], str] = {}
        members: set[tuple[str, str]] = set()
        for record in self._records(epoch, token):
            for row in self.rows[record]:
                if row[0] == "pdu":
                    room, name, _, about = row[1]
                    servers = self.audience.get(record)
                    if servers is None:
                        inside = {server for at, server in members if at == room}
                        servers = (inside | {*about["plus"]}) - {*about["minus"]}
                    newest.update(((room, server), name) for server in servers)
            # Who comes or goes with a record does so behind it.
            self._move(members, record)
        return newest

    def members_of(self, epoch: str, token: int) -> set[tuple[str, str]]:
        """(room, server) of all that are in a room, as of this token."""
        members: set[tuple[str, str]] = set()
        for record in self._records(epoch, token):
            self._move(members, record)
        return members

    def _move(self, members: set[tuple[str, str]], record: str) -> None:
        for row in self.rows[record]:
            if row[0] == "hosts":
                room, joined, left = row[1]
                members -= {(room, server) for server in left}
                members |= {(room, server) for server in joined}
            elif row[0] == "servers":
                room, present = row[1]
                members -= {each for each in members if each[0] == room}
                members |= {(room, server) for server in present}

    def _records(self, epoch: str, token: int) -> list[str]:
        records = self.histories[epoch].records
        return [records[at] for at in range(1, token + 1) if at in records]

    # --- at the end -------------------------------------------------------------------------------

    def check_answered(self) -> None:
        """Each record that was answered 200 is there, once, but for what was given up openly."""
        history = self.present
        for record, token in self.answered.items():
            if record not in self.given_up and history.tokens.get(record) != token:
                self.fail("kept", f"{record} was answered {token}, and is not in the log")

    def check_messages(self, first: int = 1) -> None:
        """No to-device message from this token on was kept from a consumer, but for those that
        snapshots openly had no room for."""
        for name, standing in self.standings.items():
            missing = [
                (token, record)
                for token, record in self.present.records.items()
                if token >= first and self._is_message_for(standing, record)
                if record not in standing.messages
            ]
            if len(missing) > self.counts[DROPPED]:
                for token, record in missing:
                    self.fail("edu", f"{name} was never given {record}, token {token}")

    def _is_message_for(self, standing: Standing, record: str) -> bool:
        kind, body = self.rows[record][0]
        return kind == "edu" and standing.handles(body[1])


def name_of(rows: Sequence[Json]) -> str:
    """The id of a record of the simulation: that of its first row."""
    kind, body = rows[0]
    return str(body[2] if kind == "edu" else body[1])
