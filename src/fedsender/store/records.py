"""The values that the store takes and returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from fedsender.console import utc_text
from fedsender.ledger import DevicePoke


@dataclass(frozen=True, slots=True)
class HomeserverSettings:
    """The settings of the homeserver that its store needs.

    Attributes:
        instance: our name in `federation_stream_position`.
        instances: all senders, ourselves among them: they read one database.
        event_writers: the instances that write the events stream.
        device_names: whether other servers are told the names of devices.
    """

    kind: Literal["embedded", "synapse"]
    instance: str
    instances: tuple[str, ...]
    event_writers: tuple[str, ...] = ("master",)
    device_names: bool = False


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event as the homeserver holds it.

    A *bare* row is without the event's content: it says whose event it is and how large, and of a
    membership what is needed to tell its servers.

    Attributes:
        received_ts: ms; None where the homeserver did not keep it.
        json: "" if the homeserver has no JSON for it, or metadata that is not an object. In a bare
            row: "", or of a membership a part.
        internal_metadata: Synapse's notes about the event, never sent.
        room_version: None if the room is gone or has none.
        redacted: it has a valid redaction, so it is sent pruned.
        erased: its sender was erased, so it is sent pruned, and stands in for nothing.
        state_group: in a Synapse, the state after it; None where that is not known, or not for
            good: while the room's state is partial.
        partial: whether only a part of the state before it is known: the homeserver joined the room
            a short while ago and still fetches the rest, and the event is not older than that join.
        size: in a bare row the bytes of the event's JSON.
        mark: if it came with a snapshot, see `stands_above`.
    """

    stream_ordering: int
    event_id: str
    room_id: str
    type: str
    sender: str
    state_key: str | None
    received_ts: int | None
    depth: int
    outlier: bool
    rejected: bool
    json: str
    internal_metadata: Mapping[str, object]
    room_version: str | None
    redacted: bool
    state_group: int | None = None
    partial: bool = False
    erased: bool = False
    size: int = 0
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event as it is stored, with any faults.

    Attributes:
        event_id, room_id: with bytes that are no text replaced.
        json: empty if the homeserver has none for it.
    """

    stream_ordering: int
    event_id: str
    room_id: str
    json: bytes


STANDS_ABOVE = "fedsender.stands_above"
"""In `internal_metadata`, in an embedded store only: see `stands_above`."""


def stands_above(internal_metadata: Mapping[str, object]) -> int | None:
    """Of an event from a snapshot: the stream ordering above which it stands for its room's events.

    We never got those events. None for an event that did not come with a snapshot.
    """
    value = internal_metadata.get(STANDS_ABOVE)
    return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class HostsUnknown:
    """The servers in the room before an event are unknown, with the reason."""

    reason: str


Hosts = frozenset[str] | HostsUnknown


@dataclass(frozen=True, slots=True)
class Lagging:
    """A destination with a backlog.

    Attributes:
        lsso: last successful stream ordering; None: unknown.
        rooms: number of rooms with an event above it.
        owes_keys: whether to-device messages or device lists wait.
        oldest: the smallest stream ordering of an event that stands for such a room, or None.
    """

    destination: str
    lsso: int | None
    rooms: int
    owes_keys: bool
    oldest: int | None = None


class OwedSince(NamedTuple):
    """From where on a destination is owed events.

    Attributes:
        lsso: rooms with a newer event than this are owed.
        floor: of those rooms, the events above this: the floor of a catch-up, or `lsso`.
    """

    lsso: int
    floor: int


@dataclass(frozen=True, slots=True)
class Device:
    """A device as other servers see it.

    Attributes:
        keys: its identity keys as uploaded, the user's own cross-signing signatures merged in.
        name: None where names are not told.
    """

    keys: Mapping[str, Any] | None
    name: str | None


@dataclass(frozen=True, slots=True)
class CrossSigning:
    """A user's cross-signing keys.

    Attributes:
        master: the newest one as uploaded; None: there is none.
        self_signing: the same.
        public_keys: of these and of all that they replaced. A poke names one as its device.
    """

    master: Mapping[str, Any] | None
    self_signing: Mapping[str, Any] | None
    public_keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class DeviceChanges:
    """The changes of devices and keys that one server is owed.

    Attributes:
        pokes: ascending by stream id.
        complete: whether there are no more than these.
        devices: the poked devices that exist.
        cross_signing: by user.
        last_sent: by user, the stream id of the last update that the server answered.
    """

    pokes: Sequence[DevicePoke]
    complete: bool
    devices: Mapping[tuple[str, str], Device]
    cross_signing: Mapping[str, CrossSigning]
    last_sent: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt: the user has read up to the event.

    Attributes:
        thread_id: of the thread, "main", or None for the whole room.
        ts: time in ms; None if the homeserver does not say.
    """

    stream_id: int
    room_id: str
    receipt_type: str
    user_id: str
    event_id: str
    thread_id: str | None
    ts: int | None


@dataclass(frozen=True, slots=True)
class PresenceState:
    """The presence of a user.

    Attributes:
        state: "online", "unavailable", "offline", or another word of the homeserver.
        last_active_ts: ms; 0: never, or not known.
    """

    user_id: str
    state: str = "offline"
    last_active_ts: int = 0
    status_msg: str | None = None
    currently_active: bool = False


@dataclass(frozen=True, slots=True)
class Settlement:
    """The changes of a destination's records by an answered transaction.

    Attributes:
        lsso: the new last successful stream ordering (upwards only); None: leave it.
        outbox_ids: stream ids of the to-device rows that were in it.
        pokes: rows of device changes that were in it, or were conflated into one that was.
        resync: the changes of `pokes` never arrived (they are in quarantine): the next update of
            each of their users makes the server ask for all of that user's devices.
    """

    destination: str
    lsso: int | None
    outbox_ids: tuple[int, ...] = ()
    pokes: tuple[DevicePoke, ...] = ()
    resync: bool = False


@dataclass(frozen=True, slots=True)
class Backoff:
    """The four columns of a row of `destinations`; times and interval in ms, as stored."""

    retry_last_ts: int | None
    retry_interval: int | None
    failure_ts: int | None
    lsso: int | None


@dataclass(frozen=True, slots=True)
class Generation:
    """The homeserver's events position, with the values by which a start sees a foreign change.

    Attributes:
        position: the events position.
        ours: the events position as we wrote it last. If the two differ, another process moved it.
        mark: our mark in this database. None where there is none (always, on a Synapse).
    """

    position: int
    ours: int | None
    mark: str | None


@dataclass(frozen=True, slots=True)
class History:
    """The history that a feed's tokens belong to, and the offset to our stream orderings.

    Attributes:
        epoch: names the history; a relay that lost or replaced its own begins another.
        base: added to a token of the history, it is our stream ordering. So our positions never go
            back, even if the relay's do.
    """

    epoch: str
    base: int


@dataclass(frozen=True, slots=True)
class OwedRoom:
    """A room in which a destination is owed events, with the newest one of them.

    Attributes:
        received_ts: when the homeserver received it, in ms; null: not known.
    """

    room_id: str
    stream_ordering: int
    received_ts: int | None


@dataclass(frozen=True, slots=True)
class Pending:
    """The numbers of items that a destination is owed.

    Attributes:
        oldest_rooms: of these rooms the oldest ones, by stream ordering.
    """

    rooms: int
    oldest_rooms: tuple[OwedRoom, ...]
    to_device: int
    device_lists: int


# --- the sender's own database --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrozenRecord:
    """A transaction that may have left: sent again unchanged until it is answered (I3).

    Attributes:
        body: the exact bytes.
        manifest: its contents, as JSON values; `sender.transaction` writes and reads it.
        frozen_ms: when it was made.
        attempts: so far.
    """

    destination: str
    transaction_id: str
    body: bytes
    manifest: Mapping[str, Any]
    frozen_ms: int
    attempts: int


@dataclass(frozen=True, slots=True)
class FrozenManifest:
    """A frozen transaction's manifest, without its bytes."""

    destination: str
    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A catch-up under way.

    Attributes:
        floor: LSSO when it began.
        rooms: room -> stream ordering up to which that room was answered.
    """

    floor: int
    rooms: Mapping[str, int]


class Discovered(NamedTuple):
    """Where a server was found, or an answer on the way there.

    Attributes:
        kind: "well_known", or the type of a DNS record.
        name: the host.
        expires_ms: in ms since the epoch.
        value: the answer, as JSON.
    """

    kind: str
    name: str
    expires_ms: int
    value: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An item in quarantine.

    Attributes:
        destination: None: an event that no server got.
        kind: "pdu", or the EDU's type.
        content: bytes of an EDU, or of an event that was skipped; a PDU stays with the homeserver.
    """

    id: int
    destination: str | None
    kind: str
    event_id: str | None
    room_id: str | None
    stream_ordering: int | None
    content: bytes | None
    reason: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Redelivery:
    """An event that a server is to get once more, or for the first time."""

    destination: str
    event_id: str
    room_id: str
    stream_ordering: int


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """The homeserver's database in the state in which we last left it: see `Generation`."""

    events_position: int
    mark: str
    timeline: str | None = None

    @property
    def restored(self) -> str | None:
        """The time of the backup from which these records were restored; None: they were not."""
        prefix, found, time = self.mark.partition(_RESTORED)
        return time if found and not prefix else None


_RESTORED: Final = "restored from "


def restored_mark(made_ms: int) -> str:
    """The mark of records that a restore has brought back: a homeserver's database has another."""
    return f"{_RESTORED}{utc_text(made_ms)}"
