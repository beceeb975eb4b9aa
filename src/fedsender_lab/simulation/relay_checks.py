"""The checks of a running relay: the records that it keeps and deletes, and its consumers."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import orjson
import trio

from fedsender.config.sections import Relay
from fedsender.streams import Json
from fedsender_lab.simulation.observations import Violation
from fedsender_lab.testing.clock import Trace
from fedsender_relay.daemon import DATABASE, RelayDaemon
from fedsender_relay.registry import Patience
from fedsender_relay.retention import EDU_SHARE
from fedsender_relay.snapshot import MANIFEST, SnapshotInfo
from fedsender_relay.snapshots import DIRECTORY

DROPPED = "messages dropped for want of room"
KEPT_VIOLATIONS = 50


@dataclass
class History:
    """The records of an epoch, as far as any party was told of them.

    Attributes:
        records: the id of the record of each token.
        tokens: the same the other way round.
        newest: the largest token that any party was told of.
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
    """The standing of a consumer.

    Attributes:
        epoch, token: its position.
        newest: the largest one that it ever had and that still means the same.
        fed_at: when it last stored something from the relay.
        joined: that was a snapshot, and the relay may not know that it has it.
        messages: the to-device messages that it was ever given.
    """

    epoch: str = ""
    token: int = 0
    newest: int = 0
    fed_at: float = float("-inf")
    joined: bool = False
    messages: set[str] = field(default_factory=set)


def newest_in(
    stays: Iterable[Sequence[Any]], events: Iterable[Sequence[Any]]
) -> dict[tuple[str, str], str]:
    """(room, server) -> the newest event for the server, by `hosts` and `events` of a snapshot."""
    by_room: defaultdict[str, list[tuple[str, int, int | None]]] = defaultdict(list)
    for room, server, joined, left in stays:
        by_room[room].append((server, joined, left))
    newest: dict[tuple[str, str], str] = {}
    for room, token, text in sorted(events, key=itemgetter(1)):
        _, (_, event_id, _, about) = json.loads(text)
        behalf = (about.get("internal_metadata") or {}).get("send_on_behalf_of")
        inside = {
            server
            for server, joined, left in by_room[room]
            if joined < token and (left is None or token <= left)
        }
        for server in {*inside, *about.get("plus", ())} - {*about.get("minus", ()), behalf}:
            newest[room, server] = event_id
    return newest


@dataclass
class RelayViews:
    """The records that each party was told of.

    Attributes:
        is_durable: whether this token stands for this record in the relay's database.
        rows: the rows of each record that was ever sent in, by its id; and when they were.
        audience: the servers that are to get the event of a record, by its id, where the rows do
        not have them.
        answered: the token of those that were answered 200, but for those that an older copy of
            the relay's directory has not.
        standings: the records of each consumer that follows the relay in good faith.
        counts: of events, for the report.
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
        """Note that a party was told this record for this token."""
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
            if not self.is_durable(token, record):
                self.fail("durable", f"{by} was told of {token}, {record}, before it was durable")

    def answer(self, epoch: str, token: int, record: str) -> None:
        """The homeserver was told that this record is kept."""
        before = self.answered.get(record, token)
        if before != token:
            self.fail("once", f"{record} was answered {before} and {token}")
        self.told("the homeserver", epoch, token, record)
        self.answered[record] = token

    def begin(self, relay: RelayDaemon, epochs: Sequence[str], *, restored: bool) -> None:
        """The relay has started: the records that any party was told of must be there.

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
        lost = [name for token, name in present.records.items() if token > head]
        self.counts["records given up"] += len(lost)
        for name in lost:
            self.answered.pop(name, None)
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
        """A consumer has stored its records up to this token."""
        standing = self.standings.setdefault(name, Standing())
        standing.epoch, standing.token = epoch, token
        standing.newest = max(standing.newest, token)
        standing.fed_at, standing.joined = trio.current_time(), joined

    def joins(self, name: str, epoch: str, token: int) -> None:
        """A consumer takes a snapshot: it never gets the records from before it."""
        standing = self.standings[name]
        if standing.epoch:
            return
        for record in self._records(epoch, token):
            standing.messages.add(record)

    def went_back(self, name: str) -> None:
        """A consumer was restored: until it has said so, its records are unknown."""
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
        """Each answered record has the token of its answer."""
        history = self.present
        for record, token in self.answered.items():
            if history.tokens.get(record) != token:
                self.fail("kept", f"{record} was answered {token}, and is not in the log")

    def check_messages(self, first: int = 1) -> None:
        """No to-device message from this token on was kept from a consumer, but for those that
        snapshots openly had no room for."""
        for name, standing in self.standings.items():
            missing = [
                (token, record)
                for token, record in self.present.records.items()
                if token >= first and self.rows[record][0][0] == "edu"
                if record not in standing.messages
            ]
            if len(missing) > self.counts[DROPPED]:
                for token, record in missing:
                    self.fail("edu", f"{name} was never given {record}, token {token}")


def name_of(rows: Sequence[Json]) -> str:
    """The id of a record of the simulation: that of its first row."""
    kind, body = rows[0]
    return str(body[2] if kind == "edu" else body[1])


SETTLE_S: Final = 30.0
"""For so long after there was too little room records may go because of that."""
PATIENCE_S: Final = 60.0
"""The log may be above its cap for so long while anything is still taken in."""
PATIENCE: Final = Patience(away_s=1200, joining_s=300)
"""Of the simulated relay: short, so that both ends are met."""
ROUNDING_S: Final = 1.0


class Files:
    """The files of one life, looked at without the relay's help."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Look no more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def says(self, token: int, record: str) -> bool:
        """Whether this is in the record of the token."""
        rows = self._read("SELECT lines FROM relay_log WHERE token = ?", token)
        return bool(rows) and f'"{record}"'.encode() in rows[0][0]

    def first(self) -> int:
        """The oldest token of the log."""
        ((first,),) = self._read('SELECT "first" FROM relay_state')
        return int(first)

    def epochs(self) -> list[str]:
        """Oldest first."""
        return [name for (name,) in self._read("SELECT epoch FROM relay_epochs ORDER BY number")]

    def messages(self) -> dict[int, int]:
        """The bytes of each to-device message, by its token."""
        return dict(self._read("SELECT token, bytes FROM relay_edus WHERE kind = 'to_device'"))

    def of_snapshots(self) -> list[Path]:
        """All files of snapshots."""
        return sorted(path for path in (self.directory / DIRECTORY).rglob("*") if path.is_file())

    def _read(self, query: str, *values: object) -> list[Any]:
        if self._connection is None:
            uri = f"file:{self.directory / DATABASE}?mode=ro"
            self._connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        return self._connection.execute(query, values).fetchall()


class RelayChecks:
    """Looks at one life of a relay after the other.

    Attributes:
        spoiled: the snapshots of which something was spoiled.
    """

    def __init__(self, views: RelayViews, settings: Relay) -> None:
        self._views = views
        self._settings = settings
        self._short_at = float("-inf")
        self._first = 1
        self._messages: dict[int, int] = {}
        self._over_since: float | None = None
        self._handed: dict[str, int] = {}
        self.spoiled: set[str] = set()

    def begin(self, files: Files) -> None:
        """Another life, on these files."""
        self._over_since = None
        self._first, self._messages = files.first(), files.messages()
        self._handed.clear()

    # --- at every commit --------------------------------------------------------------------------

    def see_room(self, relay: RelayDaemon, free: int) -> None:
        """Something is about to be committed, with so many bytes free."""
        settings = self._settings
        if relay.log.bytes > settings.log_cap or free < settings.disk_reserve:
            self._short_at = trio.current_time()

    def committed(self, relay: RelayDaemon, files: Files) -> None:
        """Something was committed."""
        self._see_messages(relay, files.messages())
        first = files.first()
        if first > self._first:
            self._views.counts["records deleted"] += first - self._first
            self._first = first
            self._cut(relay, first - 1)

    def _see_messages(self, relay: RelayDaemon, messages: dict[int, int]) -> None:
        """A message goes when all consumers have it, or there are too many bytes of them."""
        before, self._messages = self._messages, messages
        acked = min((one.acked or 0 for one in relay.registry), default=0)
        going = [token for token in before.keys() - messages.keys() if token > acked]
        if not going:
            return
        self._views.counts[DROPPED] += len(going)
        if sum(before.values()) <= self._settings.log_cap // EDU_SHARE:
            self._views.fail("edu", f"messages {sorted(going)} went, and {acked} is acknowledged")

    def _cut(self, relay: RelayDaemon, last: int) -> None:
        """The log was cut up to this token: no consumer may need it, but for want of room."""
        views = self._views
        holders = [name for name in views.standings if self._needs(relay, name, last)]
        holders += [one.name for one in relay.registry if one.pin is not None and one.pin < last]
        if trio.current_time() - self._short_at < SETTLE_S:
            # Who lacks it was given up before it went, and holds nothing any more.
            lacking = any((one.acked or 0) < last for one in relay.registry)
            views.counts["cuts for want of room"] += lacking
            return
        if holders:
            views.fail("pin", f"all to {last} went, and {sorted(set(holders))} needed it")
        sent_at = views.sent_at.get(views.present.records.get(last, ""), float("-inf"))
        if sent_at + self._settings.keep_min - ROUNDING_S > trio.current_time():
            views.fail("keep", f"{last} went {trio.current_time() - sent_at:.0f} s after it came")

    def _needs(self, relay: RelayDaemon, name: str, last: int) -> bool:
        """Whether a consumer that was here lately has not got all up to this token.

        By its own records: those of the relay may be wrong.
        """
        standing, known = self._views.standings[name], relay.registry.get(name)
        away_s = trio.current_time() - standing.fed_at
        patience_s = PATIENCE.joining_s if standing.joined else PATIENCE.away_s
        if away_s > patience_s or (known is not None and known.lost):
            return False
        token = self._views.token_of(standing)
        return token is not None and token < last

    # --- every second -----------------------------------------------------------------------------

    def look(self, relay: RelayDaemon) -> None:
        """Check the present state."""
        self._check_consumers(relay)
        self._check_size(relay)

    def _check_consumers(self, relay: RelayDaemon) -> None:
        views = self._views
        for one in relay.registry:
            if one.pin is not None and one.pin < relay.log.first - 1:
                views.fail("lost", f"{one.name} holds {one.pin}, the log begins behind it")
            views.counts["consumers seen lost"] += one.lost
            handed = sum(one.full_syncs.values())
            anew = self._handed.get(one.name, handed) != handed
            self._handed[one.name] = handed
            if anew and one.handed is not None:
                self._check_handed(relay, one.name, one.handed.snapshot)
            standing = views.standings.get(one.name)
            if standing is not None and (one.acked or 0) > standing.newest:
                views.fail("ack", f"{one.name} has {standing.newest}, its pin is {one.acked}")

    def _check_handed(self, relay: RelayDaemon, name: str, snapshot: str) -> None:
        """What a consumer was handed is whole: what we spoil is spoiled before a life begins.

        The id does not tell: one that is made anew, or is in an older copy, has that of a spoiled
        one.
        """
        info = relay.snapshots.find(snapshot)
        damage = "" if info is None else _damage_of(info)
        if damage:
            self._views.fail("whole", f"{name} was handed {snapshot}, spoiled: {damage}")

    def _check_size(self, relay: RelayDaemon) -> None:
        """The log above the cap goes, or nothing more is taken in."""
        if relay.log.bytes <= self._settings.log_cap or relay.log.refusing is not None:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = trio.current_time()
        elif trio.current_time() - self._over_since > PATIENCE_S:
            self._views.fail("cap", f"the log has {relay.log.bytes} bytes, and takes more")
            self._over_since = None

    # --- now and then -----------------------------------------------------------------------------

    def check_snapshots(self, relay: RelayDaemon) -> None:
        """Each offered snapshot is on the disk, and whole."""
        for info in relay.snapshots.snapshots:
            if info.id in self.spoiled:
                continue  # That shows when somebody asks for it.
            if damage := _damage_of(info):
                self._views.fail("whole", f"snapshot {info.id} is offered: {damage}")


def _damage_of(info: SnapshotInfo) -> str:
    """What is wrong with the files of this snapshot; empty: nothing."""
    try:
        manifest = orjson.loads((info.directory / MANIFEST).read_bytes())
        for file in manifest["files"]:
            content = (info.directory / file["name"]).read_bytes()
            if sha256(content).hexdigest() != file["sha256"]:
                return f"{file['name']} is another"
    except (OSError, ValueError) as damage:
        return str(damage)
    return ""
