"""A homeserver's rooms: events, members that come and go, and the servers that must get each event.

`Timeline` makes events as a homeserver does: linked, hashed, signed, in any room version. Versions
1-12 differ in the members of an event and in the source of its id; the rules are those of the
Matrix specification's "Room Versions" pages and of the server-server API ("Adding hashes and
signatures to outgoing events").

`Homeserver` is a history of them, seeded, so that a run can be repeated. Each of its steps is one
record for a sender, with the rows that it is told, and, from nothing but its own table of
memberships, the servers that must get the event. These rules are written down here a second time,
on purpose, and not taken from the sender: a run is held against them.
"""

import random
from base64 import b64encode
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.matrix import (
    ROOM_VERSIONS,
    JsonObject,
    RoomVersion,
    event_id_of,
    hashed,
    server_of,
)
from fedsender.streams import Fact
from fedsender.waiting import Watermark
from fedsender_lab.testing.rules import Origin

STREAM: Final = "events"
WRITER: Final = "master"
ALL_VERSIONS: Final = tuple(map(str, range(1, 13)))
LARGE_TEXT: Final = 40_000
WORDS: Final = (
    "federation",
    "Straßenbahn",
    "雲",
    "🦊",
    'quote "\\" and slash',
    "tab\tnewline\nbell\x07",
    "\u2028separators\u2029",
    "é",
    "plain words",
)
CREATOR_POWER: Final = {"ban": 50, "kick": 50, "redact": 50, "invite": 0, "users_default": 0}

# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signer:
    """A homeserver's name and key."""

    server: str
    key_id: str
    key: Ed25519PrivateKey

    @property
    def origin(self) -> Origin:
        """As its peers know it."""
        return Origin(self.server, {self.key_id: self.key.public_key()})

    def signatures(self, message: bytes) -> dict[str, dict[str, str]]:
        """The `signatures` object with this server's signature of `message`."""
        return {self.server: {self.key_id: _unpadded(self.key.sign(message))}}


@dataclass(frozen=True, slots=True)
class Event:
    """One event as the homeserver stores it.

    Attributes:
        content: its JSON object, `unsigned` with members that only the homeserver may see.
        reference_hash: unpadded base64, for those that come after it in room versions 1 and 2.
    """

    event_id: str
    room_id: str
    content: JsonObject
    reference_hash: str


@dataclass(slots=True)
class Timeline:
    """A room's events so far, to which the next event is linked.

    Attributes:
        latest: the newest event.
        state: (type, state key) -> its event.
    """

    version: RoomVersion
    room_id: str = ""
    latest: Event | None = None
    depth: int = 0
    count: int = 0
    state: dict[tuple[str, str], Event] = field(default_factory=dict)

    def append(
        self,
        kind: str,
        sender: str,
        content: Mapping[str, Any],
        *,
        signer: Signer,
        now_ms: int,
        state_key: str | None = None,
        redacts: str | None = None,
    ) -> Event:
        """Make the room's next event and link it in."""
        self.depth += 1
        self.count += 1
        body: JsonObject = {
            "type": kind,
            "sender": sender,
            "content": dict(content),
            "depth": self.depth,
            "origin_server_ts": now_ms,
            "prev_events": self._links([self.latest] if self.latest else []),
            "auth_events": self._links(self._authority(kind, sender, state_key)),
        }
        if state_key is not None:
            body["state_key"] = state_key
        if redacts is not None:
            self._put_redacts(body, redacts)
        event = self._finish(body, signer, now_ms)
        self.latest = event
        if state_key is not None:
            self.state[kind, state_key] = event
        return event

    def _finish(self, body: JsonObject, signer: Signer, now_ms: int) -> Event:
        """Hash and sign the event, and find out its id."""
        creates = body["type"] == "m.room.create"
        if self.version.event_format == 1:
            room = self.room_id[1:].partition(":")[0]
            body["event_id"] = f"${room}-{self.count}:{signer.server}"
        if not (creates and self.version.event_format == 4):
            body["room_id"] = self.room_id
        body, message = hashed(body, self.version)
        body["signatures"] = signer.signatures(message)
        event_id = event_id_of(body, self.version)
        if creates and self.version.event_format == 4:
            self.room_id = "!" + event_id[1:]
        body["unsigned"] = self._unsigned(body, now_ms)
        return Event(event_id, self.room_id, body, _unpadded(sha256(message).digest()))

    def _unsigned(self, body: JsonObject, now_ms: int) -> JsonObject:
        """The `unsigned` that a homeserver keeps with an event; peers may see `replaces_state`
        alone."""
        unsigned: JsonObject = {"age_ts": now_ms}
        before = self.state.get((body["type"], body.get("state_key", "\0")))
        if before is not None:
            unsigned["replaces_state"] = before.event_id
            unsigned["prev_content"] = before.content["content"]
        return unsigned

    def _put_redacts(self, body: JsonObject, target: str) -> None:
        holder = body["content"] if self.version.updated_redactions else body
        holder["redacts"] = target

    def _authority(self, kind: str, sender: str, state_key: str | None) -> list[Event]:
        """The state that lets the event pass (server-server API, "Auth events selection")."""
        wanted = [("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.member", sender)]
        if self.version.event_format == 4:
            del wanted[0]
        if kind == "m.room.member" and state_key is not None:
            wanted += [("m.room.member", state_key), ("m.room.join_rules", "")]
        if kind == "m.room.create":
            wanted = []
        return [self.state[key] for key in dict.fromkeys(wanted) if key in self.state]

    def _links(self, events: list[Event]) -> list[Any]:
        if self.version.event_format == 1:
            return [[event.event_id, {"sha256": event.reference_hash}] for event in events]
        return [event.event_id for event in events]


def new_timeline(version: RoomVersion, localpart: str, creator: str) -> Timeline:
    """An empty room; from room version 12 its id is only known once it has been created."""
    if version.event_format == 4:
        return Timeline(version)
    return Timeline(version, f"!{localpart}:{server_of(creator)}")


def _unpadded(data: bytes) -> str:
    return b64encode(data).rstrip(b"=").decode()


# --- rooms ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happened in a room, and is told as one record.

    Attributes:
        token: of the record, or, if no sender is told of the step, of the last one before it.
        rows: of the record, in order; a step that no sender needs to know of has none.
        event: of this step.
        servers: the servers that must get it from this homeserver, by name; empty for other
        servers' events.
        own: whether this homeserver has to send it at all.
        before: the servers in the room before it.
        evicted: servers that were in the room until this event, and did not leave by themselves.
        sendable: False for an event that no sender could send, because it is malformed.
    """

    token: int
    rows: tuple[list[Any], ...]
    event: Event
    servers: tuple[str, ...]
    own: bool
    before: frozenset[str] = frozenset()
    evicted: frozenset[str] = frozenset()
    sendable: bool = True

    @property
    def event_id(self) -> str:
        return self.event.event_id

    @property
    def room_id(self) -> str:
        return self.event.room_id

    @property
    def content(self) -> JsonObject:
        """The event's JSON object."""
        return self.event.content

    @property
    def kind(self) -> str:
        """The event's type."""
        return str(self.event.content["type"])


@dataclass(slots=True)
class Room:
    """A room, and its memberships.

    Attributes:
        staged: nothing happens in it by chance.
        memberships: user -> membership.
        said: own messages that have not been redacted.
    """

    timeline: Timeline
    creator: str
    staged: bool = False
    memberships: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def room_id(self) -> str:
        return self.timeline.room_id

    def users(self, *memberships: str) -> list[str]:
        """Everyone with one of these memberships."""
        return [user for user, now in self.memberships.items() if now in memberships]

    def servers(self) -> frozenset[str]:
        """Every server with a joined user."""
        return frozenset(server_of(user) for user in self.users("join"))


class Homeserver:
    """A homeserver with its rooms; every method that makes something happen appends a `Step`.

    It is also the source of its events stream for a replication server.

    Attributes:
        name: its server name.
        steps: its history, oldest first.
        by_hash, by_id: the steps by content hash and by event id.
        redacted: event id -> the token that took it back.
        records: id and rows of each token, from 1 on; those of steps, and those of `tell`.
        due: how many deliveries all of it asks for.
        counts: how often some things happened.
        room_versions: room id -> identifier of its version.
        asleep: servers with users that do nothing of their own accord for now.
        watermark: the newest token.
        asked: a reader has begun to read the stream.
    """

    def __init__(
        self,
        signer: Signer,
        servers: Sequence[str],
        *,
        rng: random.Random,
        now_ms: Callable[[], int],
        versions: Sequence[str] = ALL_VERSIONS,
        tells_all: bool = False,
        forks: bool = False,
    ) -> None:
        """`servers` are the others; room `versions` take turns.

        With `tells_all` every step has rows, and they name every server that an event goes to
        beyond the room's: a relay keeps no invitations by which a sender could find out.

        Args:
            forks: now and then an event is for other servers than are in its room.
        """
        self.name = signer.server
        self.steps: list[Step] = []
        self.by_hash: dict[str, Step] = {}
        self.by_id: dict[str, Step] = {}
        self.redacted: dict[str, int] = {}
        self.records: list[tuple[str, Sequence[Any]]] = []
        self.due = 0
        self.counts: Counter[str] = Counter()
        self.rooms: list[Room] = []
        self.room_versions: dict[str, str] = {}
        self.asleep: set[str] = set()
        self.watermark = Watermark()
        self.asked = trio.Event()
        self._servers = list(servers)
        self._rng = rng
        self._now_ms = now_ms
        self._versions = versions
        self._tells_all = tells_all
        self._tokens: list[int] = []
        self._token = 0
        self._told: set[str] = set()
        self._gone: set[tuple[str, str]] = set()
        self._signers = {signer.server: signer}
        self._odds: list[tuple[int, Callable[[Room], Step | None]]] = [
            (45, self.say_something),
            (4, self._set_topic),
            (4, self.redact),
            (4 if forks else 0, self.fork),
            (6, self._remote_message),
            (10, self._arrive),
            (6, self._leave),
            (6, self._throw_out),
            (3, self._turn_away),
            (3, self._local_moves),
        ]

    @property
    def lively(self) -> list[Room]:
        """The rooms in which something happens by chance."""
        return [room for room in self.rooms if not room.staged]

    # --- its events stream ------------------------------------------------------------------------

    async def read(self, after: int, upto: int, limit: int) -> Sequence[Fact]:
        """The steps with after < token <= upto that have rows; about `limit` rows."""
        await trio.lowlevel.checkpoint()
        self.asked.set()
        facts: list[Fact] = []
        for step in self.between(after, upto):
            if limit <= 0:
                break
            if step.rows:
                facts.append(Fact(WRITER, step.token, step.rows))
                limit -= len(step.rows)
        return facts

    def between(self, after: int, upto: int) -> Sequence[Step]:
        """The steps with after < token <= upto."""
        return self.steps[bisect_right(self._tokens, after) : bisect_right(self._tokens, upto)]

    def tell(self, record: str, row: Any) -> None:
        """Something that is no event has a token, too."""
        self._token += 1
        self.records.append((record, [row]))
        self.watermark.advance(self._token)

    # --- what may happen --------------------------------------------------------------------------

    def create_room(self, members: Sequence[str] = (), *, staged: bool = False) -> Room:
        """A new room with a local creator and these remote servers in it."""
        number = len(self.rooms)
        version = ROOM_VERSIONS[self._versions[number % len(self._versions)]]
        creator = f"@creator{number}:{self.name}"
        room = Room(new_timeline(version, f"room{number}", creator), creator, staged)
        self.rooms.append(room)
        content = {"room_version": version.identifier}
        if not version.updated_redactions:
            content["creator"] = creator
        self._happen(room, "m.room.create", creator, content, state_key="")
        self.set_membership(room, creator, creator, "join")
        levels = dict(CREATOR_POWER, users={} if version.event_format == 4 else {creator: 100})
        self._happen(room, "m.room.power_levels", creator, levels, state_key="")
        rules = {"join_rule": "public"}
        self._happen(room, "m.room.join_rules", creator, rules, state_key="")
        for server in members:
            self.set_membership(room, f"@first:{server}", f"@first:{server}", "join", via_us=True)
        return room

    def say(self, room: Room, sender: str | None = None, *, size: int = 0) -> Step:
        """A message, by default of a local member; sometimes with a number that is no integer."""
        sender = sender or self._rng.choice(self._local(room))
        text = " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 6)))
        content: dict[str, Any] = {"msgtype": "m.text", "body": text + "x" * size}
        if not room.timeline.version.strict_json and self._rng.random() < 0.05:
            content["fraction"] = 1.5
        step = self._happen(room, "m.room.message", sender, content)
        if step.own:
            room.said.append(step.event_id)
        return step

    def say_malformed(self, room: Room) -> Step:
        """The homeserver stores an event that cannot be sent: too large, or its id is wrong."""
        content = {"msgtype": "m.text", "body": "x"}
        return self._happen(room, "m.room.message", room.creator, content, spoilt=True)

    def redact(self, room: Room) -> Step | None:
        """One of our newest messages is taken back, if there is any."""
        if not room.said:
            return None
        self.counts["redactions"] += 1
        target = room.said.pop(-1 - self._rng.randrange(min(5, len(room.said))))
        return self._happen(room, "m.room.redaction", room.creator, {}, redacts=target)

    def fork(self, room: Room) -> Step:
        """A message on a branch where other servers were in the room than are by now."""
        here = room.servers()
        inside = sorted(here - {self.name})
        runtime = [server for server in self._servers if server not in here]
        self.counts["forks"] += 1
        plus = self._rng.sample(runtime, min(len(runtime), self._rng.randint(0, 2)))
        minus = self._rng.sample(inside, self._rng.randint(0, len(inside) // 2))
        sender, content = self._rng.choice(self._local(room)), {"msgtype": "m.text", "body": "fork"}
        return self._happen(room, "m.room.message", sender, content, plus=plus, minus=minus)

    def set_membership(
        self,
        room: Room,
        sender: str,
        target: str,
        membership: str,
        *,
        via_us: bool = False,
        metadata: Mapping[str, object] | None = None,
    ) -> Step:
        """`sender` makes `target` a member, or no member, of the room.

        Args:
            via_us: a remote user's own membership that was agreed with this homeserver, which
                has to tell the others.
            metadata: flags to store with the event.
        """
        flags = dict(metadata or {})
        if via_us:
            flags["send_on_behalf_of"] = server_of(sender)
        content = {"membership": membership}
        return self._happen(room, "m.room.member", sender, content, state_key=target, flags=flags)

    def evict(self, room: Room, server: str, membership: str = "leave") -> list[Step]:
        """Kick (or ban) every user of `server` out of the room."""
        users = [user for user in room.users("join") if server_of(user) == server]
        return [self.set_membership(room, room.creator, user, membership) for user in users]

    # --- at random --------------------------------------------------------------------------------

    def act(self, room: Room | None = None) -> Step:
        """Make one step, in any room or in `room`; mostly a message."""
        room = room or self._rng.choice(self.lively)
        actions, weights = [each for _, each in self._odds], [weight for weight, _ in self._odds]
        while True:
            (action,) = self._rng.choices(actions, weights=weights)
            step = action(room)
            if step is not None:
                return step

    def _local(self, room: Room) -> list[str]:
        return [user for user in room.users("join") if server_of(user) == self.name]

    def _remote(self, room: Room, *memberships: str) -> list[str]:
        users = room.users(*memberships)
        return [user for user in users if server_of(user) != self.name]

    def _awake(self, room: Room) -> list[str]:
        """Remote members of servers that are not asleep."""
        return [user for user in self._remote(room, "join") if server_of(user) not in self.asleep]

    def say_something(self, room: Room) -> Step:
        """A local member says something; sometimes much."""
        large = self._rng.random() < 0.02
        return self.say(room, size=self._rng.randint(5_000, LARGE_TEXT) if large else 0)

    def _set_topic(self, room: Room) -> Step:
        topic = {"topic": self._rng.choice(WORDS)}
        return self._happen(room, "m.room.topic", room.creator, topic, state_key="")

    def _remote_message(self, room: Room) -> Step | None:
        users = self._awake(room)
        return self.say(room, self._rng.choice(users)) if users else None

    def _arrive(self, room: Room) -> Step | None:
        """A remote user comes in, is invited, knocks, or is let in again after a ban."""
        servers = [server for server in self._servers if server not in self.asleep]
        if not servers:
            return None
        gone = [server for server in servers if (room.room_id, server) in self._gone]
        server = self._rng.choice(gone if gone and self._rng.random() < 0.5 else servers)
        user = f"@{self._rng.choice(('first', 'first', 'first', 'ana'))}:{server}"
        before = room.memberships.get(user, "leave")
        if before == "join":
            return None
        if before == "ban":
            return self.set_membership(room, room.creator, user, "leave")
        wish = self._rng.choice(("join", "join", "join", "invite", "knock"))
        if before == "invite" or wish == "join":
            # Through us, and then we tell the others; or through a server in the room already.
            others = room.servers() - {self.name, server}
            via_us = not others or self._rng.random() < 0.7
            return self.set_membership(room, user, user, "join", via_us=via_us)
        sender = self._rng.choice(self._local(room)) if wish == "invite" else user
        return self.set_membership(room, sender, user, wish)

    def _leave(self, room: Room) -> Step | None:
        """A remote user leaves; its own server tells all servers."""
        users = self._awake(room)
        if not users:
            return None
        user = self._rng.choice(users)
        return self.set_membership(room, user, user, "leave")

    def _throw_out(self, room: Room) -> Step | None:
        users = self._remote(room, "join")
        if not users:
            return None
        how = self._rng.choice(("leave", "leave", "ban"))
        return self.set_membership(room, room.creator, self._rng.choice(users), how)

    def _turn_away(self, room: Room) -> Step | None:
        """An invitation is taken back, a knock refused, or a user that is not there banned."""
        users = self._remote(room, "invite", "knock") or self._remote(room, "leave")
        if not users:
            return None
        user = self._rng.choice(users)
        runtime = room.memberships[user] == "leave"
        how = "ban" if runtime else self._rng.choice(("leave", "leave", "ban"))
        return self.set_membership(room, room.creator, user, how)

    def _local_moves(self, room: Room) -> Step:
        """A local user comes or goes; some by another server's doing, which tells all servers."""
        user = f"@{self._rng.choice(('mia', 'noah'))}:{self.name}"
        goes = room.memberships.get(user) == "join"
        how = self._rng.choice((None, None, "proactively_send", "out_of_band_membership"))
        metadata = None if how is None else {how: how == "out_of_band_membership"}
        return self.set_membership(room, user, user, "leave" if goes else "join", metadata=metadata)

    # --- what a step says -------------------------------------------------------------------------

    def _happen(
        self,
        room: Room,
        kind: str,
        sender: str,
        content: Mapping[str, Any],
        *,
        state_key: str | None = None,
        redacts: str | None = None,
        flags: Mapping[str, object] | None = None,
        plus: Sequence[str] = (),
        minus: Sequence[str] = (),
        spoilt: bool = False,
    ) -> Step:
        """Append an event, for the servers in the room, with `plus` and without `minus`."""
        event = room.timeline.append(
            kind,
            sender,
            content,
            signer=self._signer(server_of(sender)),
            now_ms=self._now_ms(),
            state_key=state_key,
            redacts=redacts,
        )
        if spoilt:
            _spoil(event.content, room.timeline.version.event_format)
        self.room_versions[room.room_id] = room.timeline.version.identifier
        before, was = room.servers(), room.memberships.get(state_key or "")
        if kind == "m.room.member" and state_key is not None:
            room.memberships[state_key] = content["membership"]
        now, flags = room.servers(), flags or {}
        turned_away = _turned_away(kind, sender, state_key, content, was)
        audience = (before | {*plus}) - {*minus} | turned_away
        own = self._is_own(kind, sender, flags)
        rows: list[list[Any]] = []
        if self._tells_of(sender, flags):
            details = {
                "room_version": room.timeline.version.identifier,
                "plus": sorted({*plus, *self._named(turned_away, event)}),
                "minus": sorted(minus),
                "internal_metadata": dict(flags),
            }
            rows.append(["pdu", [room.room_id, event.event_id, event.content, details]])
            self._told.add(event.event_id)
        if now != before:
            rows.append(["hosts", [room.room_id, sorted(now - before), sorted(before - now)]])
        if redacts is not None:
            rows.append(["redaction", [event.event_id, redacts]])
        self._token += bool(rows)
        if redacts is not None:
            self.redacted[redacts] = self._token
        self.counts["re-joins"] += sum((room.room_id, each) in self._gone for each in now - before)
        self._gone.update((room.room_id, server) for server in before - now)
        step = Step(
            token=self._token,
            rows=tuple(rows),
            event=event,
            servers=tuple(sorted(audience - {self.name, flags.get("send_on_behalf_of")}))
            if own
            else (),
            own=own,
            before=before,
            evicted=before - now if sender != state_key else frozenset(),
            sendable=not spoilt,
        )
        self._note(step)
        return step

    def _note(self, step: Step) -> None:
        self.steps.append(step)
        if step.rows:
            self.records.append((step.event_id, step.rows))
        self.by_hash[step.content["hashes"]["sha256"]] = step
        self.by_id[step.event_id] = step
        self.due += len(step.servers)
        self._tokens.append(step.token)
        self.watermark.advance(step.token)

    def _is_own(self, kind: str, sender: str, flags: Mapping[str, object]) -> bool:
        if flags.get("out_of_band_membership") or flags.get("proactively_send") is False:
            return False
        ours = server_of(sender) == self.name or "send_on_behalf_of" in flags
        return ours and kind != "m.room.create"

    def _tells_of(self, sender: str, flags: Mapping[str, object]) -> bool:
        """Of a remote server's own events a homeserver may say everything, or nothing."""
        ours = server_of(sender) == self.name or bool(flags)
        return ours or self._tells_all or self._rng.random() < 0.5

    def _named(self, turned_away: frozenset[str], event: Event) -> frozenset[str]:
        # A sender finds the invitation or knock itself if it was told of it, so both must work.
        found_out = event.content["unsigned"].get("replaces_state") in self._told
        named = self._tells_all or not found_out or self._rng.random() < 0.5
        return turned_away if named else frozenset()

    def _signer(self, server: str) -> Signer:
        if server not in self._signers:
            key = Ed25519PrivateKey.from_private_bytes(self._rng.randbytes(32))
            self._signers[server] = Signer(server, "ed25519:1", key)
        return self._signers[server]


def _spoil(content: JsonObject, event_format: int) -> None:
    if event_format == 1:
        # There the id is no hash.
        content["content"]["body"] = "x" * 70_000
    else:
        content["origin_server_ts"] += 1


def _turned_away(
    kind: str, sender: str, target: str | None, content: Mapping[str, Any], was: str | None
) -> frozenset[str]:
    """The server of a user that was invited, or knocked, and may not come in after all."""
    if kind != "m.room.member" or target is None or sender == target:
        return frozenset()
    if was in ("invite", "knock") and content["membership"] in ("leave", "ban"):
        return frozenset({server_of(target)})
    return frozenset()
