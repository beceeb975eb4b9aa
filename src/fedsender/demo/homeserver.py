"""A small homeserver's history: rooms, people who come and go, and what they say.

Seeded, so that a run can be repeated. Every step appends one token to the events stream, with the
rows that a homeserver tells a sender which cannot look into its database. For each event it also
notes, from its own table of who is in which room and from nothing else, the servers that must get
it: the truth that a run is held against in the end.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.matrix import ROOM_VERSIONS, server_of
from fedsender.streams import Fact, Watermark
from fedsender.testing.rooms import Event, Signer, Timeline, new_timeline

STREAM = "events"
WRITER = "master"

ALL_VERSIONS = tuple(map(str, range(1, 13)))
LARGE_TEXT = 40_000
WORDS = (
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
CREATOR_POWER = {"ban": 50, "kick": 50, "redact": 50, "invite": 0, "users_default": 0}


@dataclass(frozen=True, slots=True)
class Step:
    """One token of the events stream.

    Attributes:
        rows: what is said at it, in order; a step that no sender needs to know of has none.
        event: what happened.
        servers: who must get it from this homeserver; empty for what others send.
        own: whether this homeserver has to send it to anybody at all.
        evicted: servers that were in the room until this event, and did not leave by themselves.
    """

    token: int
    rows: tuple[list[Any], ...]
    event: Event
    servers: frozenset[str]
    own: bool
    evicted: frozenset[str] = frozenset()


@dataclass(slots=True)
class Room:
    """A room, and who is what in it.

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
        steps: its history, oldest first; tokens count up by one, from 1.
        due: how many deliveries all of it asks for.
        room_versions: room id -> identifier of its version.
        asleep: servers whose users do nothing of their own accord for now.
        watermark: the newest token.
        asked: somebody has begun to read the stream.
    """

    def __init__(
        self,
        name: str,
        signing_key: tuple[str, Ed25519PrivateKey],
        servers: Sequence[str],
        *,
        rng: random.Random,
        now_ms: Callable[[], int],
        versions: Sequence[str] = ALL_VERSIONS,
        tells_all: bool = False,
    ) -> None:
        """`servers` are the others; `signing_key` is key id and key; `versions` take turns.

        With `tells_all` every step has rows, and they name every server that an event goes to
        beyond the room's: a relay keeps no invitations by which a sender could find out.
        """
        self.name = name
        self.steps: list[Step] = []
        self.due = 0
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
        self._told: set[str] = set()
        self._signers = {name: Signer(name, *signing_key)}

    async def read(self, after: int, upto: int, limit: int) -> Sequence[Fact[list[Any]]]:
        """The steps with after < token <= upto that have rows; about `limit` rows."""
        await trio.lowlevel.checkpoint()
        self.asked.set()
        facts: list[Fact[list[Any]]] = []
        room = limit
        for step in self.steps[max(after, 0) : upto]:
            if room <= 0:
                break
            if step.rows:
                facts.append(Fact(WRITER, step.token, step.rows))
                room -= len(step.rows)
        return facts

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
        """A message, by default of a local member."""
        sender = sender or self._rng.choice(self._local(room))
        text = " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 6)))
        content = {"msgtype": "m.text", "body": text + "x" * size}
        step = self._happen(room, "m.room.message", sender, content)
        if step.own:
            room.said.append(step.event.event_id)
        return step

    def redact(self, room: Room) -> Step:
        """Take one of our messages back."""
        target = room.said.pop(self._rng.randrange(len(room.said)))
        return self._happen(room, "m.room.redaction", room.creator, {}, redacts=target)

    def set_topic(self, room: Room) -> Step:
        """Change a piece of the room's state."""
        topic = {"topic": self._rng.choice(WORDS)}
        return self._happen(room, "m.room.topic", room.creator, topic, state_key="")

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
        return self._happen(
            room, "m.room.member", sender, content, state_key=target, metadata=flags
        )

    def evict(self, room: Room, server: str, membership: str = "leave") -> list[Step]:
        """Kick (or ban) every user of `server` out of the room."""
        users = [user for user in room.users("join") if server_of(user) == server]
        return [self.set_membership(room, room.creator, user, membership) for user in users]

    # --- at random --------------------------------------------------------------------------------

    def act(self, room: Room | None = None) -> Step:
        """Something happens, somewhere or in `room`; mostly somebody says something."""
        room = room or self._rng.choice([room for room in self.rooms if not room.staged])
        actions: list[tuple[int, Callable[[Room], Step | None]]] = [
            (60, lambda room: self.say(room)),
            (1, lambda room: self.say(room, size=LARGE_TEXT)),
            (4, self.set_topic),
            (4, lambda room: self.redact(room) if room.said else None),
            (6, self._remote_message),
            (8, self._remote_arrives),
            (4, self._remote_leaves),
            (4, self._remote_thrown_out),
            (4, self._remote_turned_away),
            (4, self._local_comes_or_goes),
            (1, self._own_join_elsewhere),
        ]
        while True:
            (action,) = self._rng.choices(
                [each for _, each in actions], weights=[weight for weight, _ in actions]
            )
            step = action(room)
            if step is not None:
                return step

    def _local(self, room: Room) -> list[str]:
        return [user for user in room.users("join") if server_of(user) == self.name]

    def _remote(self, room: Room, *memberships: str) -> list[str]:
        users = room.users(*memberships)
        return [user for user in users if server_of(user) != self.name]

    def _awake(self, users: list[str]) -> list[str]:
        return [user for user in users if server_of(user) not in self.asleep]

    def _remote_message(self, room: Room) -> Step | None:
        users = self._awake(self._remote(room, "join"))
        return self.say(room, self._rng.choice(users)) if users else None

    def _remote_arrives(self, room: Room) -> Step | None:
        """A remote user is invited, knocks or joins, through us or through another server."""
        servers = [server for server in self._servers if server not in self.asleep]
        if not servers:
            return None
        server = self._rng.choice(servers)
        user = f"@{self._rng.choice(('ana', 'bo', 'first'))}:{server}"
        before = room.memberships.get(user, "leave")
        if before in ("join", "ban"):
            return self._unban(room, user) if before == "ban" else None
        knocks = before == "leave" and room.timeline.version.strict_json
        wish = self._rng.choice(["invite", "join", "join", *(["knock"] if knocks else [])])
        if wish == "invite":
            if before == "invite":
                return None
            return self.set_membership(room, self._rng.choice(self._local(room)), user, "invite")
        others = [name for name in room.servers() if name not in (self.name, server)]
        via_us = not others or self._rng.random() < 0.7
        return self.set_membership(room, user, user, wish, via_us=via_us)

    def _unban(self, room: Room, user: str) -> Step:
        return self.set_membership(room, room.creator, user, "leave")

    def _remote_leaves(self, room: Room) -> Step | None:
        """A remote user leaves; its own server tells everybody."""
        users = self._awake(self._remote(room, "join"))
        if not users:
            return None
        user = self._rng.choice(users)
        return self.set_membership(room, user, user, "leave")

    def _remote_thrown_out(self, room: Room) -> Step | None:
        users = self._remote(room, "join")
        if not users:
            return None
        how = self._rng.choice(("leave", "ban"))
        return self.set_membership(room, room.creator, self._rng.choice(users), how)

    def _remote_turned_away(self, room: Room) -> Step | None:
        """An invitation is taken back, a knock refused, or somebody who is not there banned."""
        users = self._remote(room, "invite", "knock") or self._remote(room, "leave")
        if not users:
            return None
        user = self._rng.choice(users)
        outside = room.memberships[user] == "leave"
        how = "ban" if outside else self._rng.choice(("leave", "leave", "ban"))
        return self.set_membership(room, room.creator, user, how)

    def _local_comes_or_goes(self, room: Room) -> Step:
        user = f"@{self._rng.choice(('mia', 'noah'))}{room.creator[8:]}"
        goes = room.memberships.get(user) == "join"
        return self.set_membership(room, user, user, "leave" if goes else "join")

    def _own_join_elsewhere(self, room: Room) -> Step | None:
        """A local user gets in by another server's doing, which tells everybody itself."""
        user = f"@guest:{self.name}"
        if room.memberships.get(user) == "join" or room.servers() == {self.name}:
            return None
        flag = self._rng.choice(({"proactively_send": False}, {"out_of_band_membership": True}))
        return self.set_membership(room, user, user, "join", metadata=flag)

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
        metadata: Mapping[str, object] | None = None,
    ) -> Step:
        event = room.timeline.append(
            kind,
            sender,
            content,
            signer=self._signer(server_of(sender)),
            now_ms=self._now_ms(),
            state_key=state_key,
            redacts=redacts,
        )
        self.room_versions[room.room_id] = room.timeline.version.identifier
        before, was = room.servers(), room.memberships.get(state_key or "")
        if kind == "m.room.member" and state_key is not None:
            room.memberships[state_key] = content["membership"]
        flags = metadata or {}
        own = self._is_own(kind, sender, flags)
        turned_away = self._turned_away(kind, sender, state_key, content, was)
        servers = (before | turned_away) - {self.name, flags.get("send_on_behalf_of")}
        gone = before - room.servers()
        step = Step(
            token=len(self.steps) + 1,
            rows=self._rows(room, event, before, turned_away, flags, redacts),
            event=event,
            servers=frozenset(servers) if own else frozenset(),
            own=own,
            evicted=gone if sender != state_key else frozenset(),
        )
        self.steps.append(step)
        self.due += len(step.servers)
        self.watermark.advance(step.token)
        return step

    def _is_own(self, kind: str, sender: str, flags: Mapping[str, object]) -> bool:
        if flags.get("out_of_band_membership") or flags.get("proactively_send") is False:
            return False
        ours = server_of(sender) == self.name or "send_on_behalf_of" in flags
        return ours and kind != "m.room.create"

    def _turned_away(
        self,
        kind: str,
        sender: str,
        target: str | None,
        content: Mapping[str, Any],
        was: str | None,
    ) -> frozenset[str]:
        """The server of somebody who was invited, or knocked, and may not come in after all."""
        if kind != "m.room.member" or target is None or sender == target:
            return frozenset()
        if was in ("invite", "knock") and content["membership"] in ("leave", "ban"):
            return frozenset({server_of(target)})
        return frozenset()

    def _rows(
        self,
        room: Room,
        event: Event,
        before: frozenset[str],
        turned_away: frozenset[str],
        flags: Mapping[str, object],
        redacts: str | None,
    ) -> tuple[list[Any], ...]:
        """What the events stream says: the event, who came and went with it, what it redacts."""
        rows: list[list[Any]] = []
        details: dict[str, Any] = {
            "room_version": room.timeline.version.identifier,
            "plus": [],
            "minus": [],
        }
        if flags:
            details["internal_metadata"] = dict(flags)
        # A sender finds the invitation or knock itself if it was told of it, so both must work.
        before_it = event.content["unsigned"].get("replaces_state")
        found_out = before_it in self._told and not self._tells_all
        if turned_away and not (found_out and self._rng.random() < 0.5):
            details["plus"] = sorted(turned_away)
        foreign = server_of(event.content["sender"]) != self.name and not flags
        # Of a remote server's own events a homeserver may say everything, or nothing.
        if not foreign or self._tells_all or self._rng.random() < 0.5:
            rows.append(["pdu", [room.room_id, event.event_id, event.content, details]])
            self._told.add(event.event_id)
        now = room.servers()
        if now != before:
            rows.append(["hosts", [room.room_id, sorted(now - before), sorted(before - now)]])
        if redacts is not None:
            rows.append(["redaction", [event.event_id, redacts]])
        return tuple(rows)

    def _signer(self, server: str) -> Signer:
        if server not in self._signers:
            key = Ed25519PrivateKey.from_private_bytes(self._rng.randbytes(32))
            self._signers[server] = Signer(server, "ed25519:1", key)
        return self._signers[server]
