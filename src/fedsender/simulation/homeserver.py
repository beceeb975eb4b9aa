"""A homeserver's history and, from nothing but its own table of who is in which room, the truth.

Every `Happening` is one token of the events stream: the rows that are told to a sender, and the
servers that must get the event. The rules behind that list are written down here a second time, on
purpose, and not taken from the sender.
"""

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from fedsender.matrix import ROOM_VERSIONS, server_of
from fedsender.streams import Fact, Watermark
from fedsender.testing.rooms import Event, Signer, Timeline, new_timeline

WRITER = "master"
VERSIONS = tuple(map(str, range(1, 13)))
WORDS = ("federation", "Straße", "雲", "🦊", 'quote "\\"', "tab\tbell\x07", "\u2028", "plain words")
TOKEN_GAP = 0.1
"""How often a token is given to somebody who then says nothing."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One event.

    Attributes:
        servers: who must get it, by name; empty for what other servers send.
        sendable: False for what no sender could send, because it is malformed.
    """

    token: int
    event_id: str
    room_id: str
    kind: str
    content: Mapping[str, Any]
    rows: tuple[list[Any], ...]
    servers: tuple[str, ...]
    sendable: bool = True


@dataclass(slots=True)
class Room:
    """A room.

    Attributes:
        members: user -> membership.
        said: own messages that have not been redacted.
        left: remote users that were in it and are not.
    """

    timeline: Timeline
    creator: str
    members: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    @property
    def room_id(self) -> str:
        return self.timeline.room_id

    def users(self, *memberships: str) -> list[str]:
        """Everyone with one of these memberships."""
        return [user for user, now in self.members.items() if now in memberships]

    def servers(self) -> list[str]:
        """Every server with a joined user, by name."""
        return sorted({server_of(user) for user in self.users("join")})


class Homeserver:
    """Rooms, and what happens in them; also the source of its events stream.

    Attributes:
        history: all that happened, oldest first.
        by_hash: the content hash of an event -> what happened.
        redacted: event id -> the token that took it back.
        counts: how often what happened, for the report.
        watermark: the newest token.
        records: with `dense`, the id and the rows of each token from 1 on.

    Args:
        dense: every token is told of, as a relay numbers them.
    """

    def __init__(
        self,
        name: str,
        signer: Signer,
        servers: Sequence[str],
        rng: random.Random,
        now_ms: Callable[[], int],
        *,
        dense: bool = False,
    ) -> None:
        self.name = name
        self.records: list[tuple[str, Sequence[Any]]] = []
        self._dense = dense
        self.history: list[Happening] = []
        self.by_hash: dict[str, Happening] = {}
        self.by_id: dict[str, Happening] = {}
        self.redacted: dict[str, int] = {}
        self.rooms: list[Room] = []
        self.counts: Counter[str] = Counter()
        self.watermark = Watermark()
        self._tokens: list[int] = []
        self._token = 0
        self._created = 0
        self._signer = signer
        self._servers = list(servers)
        self._rng = rng
        self._now_ms = now_ms
        self._gone: set[tuple[str, str]] = set()

    async def read(self, after: int, upto: int, limit: int) -> Sequence[Fact[list[Any]]]:
        """What happened with after < token <= upto and is told; about `limit` rows."""
        await trio.lowlevel.checkpoint()
        facts: list[Fact[list[Any]]] = []
        for happening in self.between(after, upto):
            if limit <= 0:
                break
            if happening.rows:
                facts.append(Fact(WRITER, happening.token, happening.rows))
                limit -= len(happening.rows)
        return facts

    def between(self, after: int, upto: int) -> Sequence[Happening]:
        """What happened with after < token <= upto."""
        first, last = bisect_right(self._tokens, after), bisect_right(self._tokens, upto)
        return self.history[first:last]

    def tell(self, record: str, row: Any) -> None:
        """Something that is no event has a token, too."""
        self._token += 1
        self.records.append((record, [row]))
        self.watermark.advance(self._token)

    # --- what may happen --------------------------------------------------------------------------

    def create_room(self, members: Sequence[str], *, apart: bool = False) -> Room:
        """A new room with a local creator and these remote servers in it.

        With `apart` nothing happens in it by itself.
        """
        number = self._created
        self._created += 1
        version = ROOM_VERSIONS[VERSIONS[number % len(VERSIONS)]]
        creator = f"@creator{number}:{self.name}"
        room = Room(new_timeline(version, f"room{number}", creator), creator)
        if not apart:
            self.rooms.append(room)
        content = {"room_version": version.identifier}
        if not version.updated_redactions:
            content["creator"] = creator
        self._happen(room, "m.room.create", creator, content, state_key="", told_to=())
        self.set_membership(room, creator, creator, "join")
        for server in members:
            self._joins(room, f"@first:{server}")
        return room

    def say(self, room: Room, *, large: bool = False) -> Happening:
        """A local member says something; sometimes with a number that is no integer."""
        text = " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, 6)))
        content: dict[str, Any] = {"msgtype": "m.text", "body": text}
        if not room.timeline.version.strict_json and self._rng.random() < 0.05:
            content["fraction"] = 1.5
        if large or self._rng.random() < 0.02:
            content["body"] = text[:10] * self._rng.randint(500, 4_000)
        happening = self._happen(room, "m.room.message", self._local(room), content)
        room.said.append(happening.event_id)
        return happening

    def say_malformed(self, room: Room) -> Happening:
        """The homeserver stores an event that nobody can send: too large, or its id is wrong."""
        content = {"msgtype": "m.text", "body": "x"}
        return self._happen(room, "m.room.message", room.creator, content, spoilt=True)

    def act(self, room: Room | None = None) -> None:
        """Something happens somewhere."""
        room = room or self._rng.choice(self.rooms)
        actions: list[tuple[int, Callable[[Room], object]]] = [
            (45, self.say),
            (4, self._set_topic),
            (4, self.redact),
            (4, self.fork),
            (6, self._remote_message),
            (10, self._arrive),
            (6, self._leave),
            (6, self._throw_out),
            (3, self._turn_away),
            (3, self._local_moves),
        ]
        weights = [weight for weight, _ in actions]
        (chosen,) = self._rng.choices([action for _, action in actions], weights=weights)
        chosen(room)

    def set_membership(
        self, room: Room, sender: str, target: str, membership: str, **about: Any
    ) -> Happening:
        """`sender` makes `target` a member, or no member, of the room."""
        content = {"membership": membership}
        return self._happen(room, "m.room.member", sender, content, state_key=target, **about)

    def _local(self, room: Room) -> str:
        users = [user for user in room.users("join") if server_of(user) == self.name]
        return self._rng.choice(users)

    def _remote(self, room: Room, *memberships: str) -> str | None:
        users = [user for user in room.users(*memberships) if server_of(user) != self.name]
        return self._rng.choice(users) if users else None

    def _set_topic(self, room: Room) -> None:
        topic = {"topic": self._rng.choice(WORDS)}
        self._happen(room, "m.room.topic", room.creator, topic, state_key="")

    def redact(self, room: Room) -> None:
        """One of the newest messages is taken back."""
        if room.said:
            self.counts["redactions"] += 1
            target = room.said.pop(-1 - self._rng.randrange(min(5, len(room.said))))
            self._happen(room, "m.room.redaction", room.creator, {}, redacts=target)

    def fork(self, room: Room) -> None:
        """A message on a branch where other servers were in the room than are by now."""
        inside = [server for server in room.servers() if server != self.name]
        outside = [server for server in self._servers if server not in inside]
        self.counts["forks"] += 1
        plus = self._rng.sample(outside, min(len(outside), self._rng.randint(0, 2)))
        minus = self._rng.sample(inside, self._rng.randint(0, len(inside) // 2))
        content = {"msgtype": "m.text", "body": "on a fork"}
        self._happen(room, "m.room.message", self._local(room), content, plus=plus, minus=minus)

    def _remote_message(self, room: Room) -> None:
        user = self._remote(room, "join")
        if user is not None:
            self._happen(room, "m.room.message", user, {"msgtype": "m.text", "body": "theirs"})

    def _arrive(self, room: Room) -> None:
        """A remote user comes in, is invited, knocks, or is let in again after a ban."""
        gone = [server for server in self._servers if (room.room_id, server) in self._gone]
        server = self._rng.choice(gone if gone and self._rng.random() < 0.5 else self._servers)
        user = f"@{self._rng.choice(('first', 'first', 'first', 'ana'))}:{server}"
        match room.members.get(user, "leave"):
            case "ban":
                self.set_membership(room, room.creator, user, "leave")
            case "invite":
                self._joins(room, user)
            case "leave" | "knock":
                wish = self._rng.choice(("join", "join", "join", "invite", "knock"))
                if wish == "join":
                    self._joins(room, user)
                elif wish == "invite":
                    self.set_membership(room, self._local(room), user, "invite")
                else:
                    self.set_membership(room, user, user, "knock", told=True)

    def _joins(self, room: Room, user: str) -> None:
        """Through us, and then we tell the others; or through somebody in the room already."""
        others = [name for name in room.servers() if name not in (self.name, server_of(user))]
        via_us = not others or self._rng.random() < 0.7
        flags = {"send_on_behalf_of": server_of(user)} if via_us else None
        self.set_membership(room, user, user, "join", flags=flags)

    def _leave(self, room: Room) -> None:
        user = self._remote(room, "join")
        if user is not None:
            self.set_membership(room, user, user, "leave")

    def _throw_out(self, room: Room) -> None:
        user = self._remote(room, "join")
        if user is not None:
            how = self._rng.choice(("leave", "leave", "ban"))
            self.set_membership(room, room.creator, user, how)

    def _turn_away(self, room: Room) -> None:
        """An invitation is taken back, a knock refused, somebody who is not there banned."""
        user = self._remote(room, "invite", "knock", "leave")
        if user is not None:
            outside = room.members[user] == "leave"
            self.set_membership(room, room.creator, user, "ban" if outside else "leave")

    def _local_moves(self, room: Room) -> None:
        user = f"@{self._rng.choice(('mia', 'noah'))}:{self.name}"
        goes = room.members.get(user) == "join"
        how = self._rng.choice((None, None, "proactively_send", "out_of_band_membership"))
        flags = None if how is None else {how: how == "out_of_band_membership"}
        self.set_membership(room, user, user, "leave" if goes else "join", flags=flags)

    # --- what it means ----------------------------------------------------------------------------

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
        told: bool = False,
        told_to: Sequence[str] | None = None,
        spoilt: bool = False,
    ) -> Happening:
        """Append an event. `told_to` overrules who must get it; with `told` its row is sent."""
        event = room.timeline.append(
            kind,
            sender,
            content,
            signer=self._signer,
            now_ms=self._now_ms(),
            state_key=state_key,
            redacts=redacts,
        )
        if spoilt:
            _spoil(event.content, room.timeline.version.event_format)
        before, was = room.servers(), room.members.get(state_key or "")
        turned_away = _turned_away(kind, sender, state_key, content, was)
        if kind == "m.room.member" and state_key is not None:
            room.members[state_key] = content["membership"]
        if told_to is None:
            told_to = self._audience(
                sender, flags or {}, (set(before) | set(plus)) - set(minus) | turned_away
            )
        self._token += 1 + (not self._dense and self._rng.random() < TOKEN_GAP)
        named = self._rng.random() < 0.5 or self._dense
        details = {
            "room_version": room.timeline.version.identifier,
            # A relay's homeserver must name them; the other may leave that to the sender.
            "plus": sorted({*plus, *(turned_away if named else ())}),
            "minus": sorted(minus),
            "internal_metadata": dict(flags or {}),
        }
        ours = server_of(sender) == self.name or bool(flags)
        rows: list[list[Any]] = []
        # Of other servers' events a homeserver may say everything or nothing.
        if ours or told or self._dense or self._rng.random() < 0.5:
            rows.append(["pdu", [room.room_id, event.event_id, event.content, details]])
        rows += self._changes(room, before)
        if redacts is not None:
            self.redacted[redacts] = self._token
            rows.append(["redaction", [event.event_id, redacts]])
        return self._append(room, event, kind, tuple(rows), told_to, not spoilt)

    def _append(
        self,
        room: Room,
        event: Event,
        kind: str,
        rows: tuple[list[Any], ...],
        servers: Sequence[str],
        sendable: bool,
    ) -> Happening:
        happening = Happening(
            self._token,
            event.event_id,
            room.room_id,
            kind,
            event.content,
            rows,
            tuple(servers),
            sendable,
        )
        self.history.append(happening)
        self.records.append((event.event_id, rows))
        self._tokens.append(self._token)
        self.by_hash[event.content["hashes"]["sha256"]] = happening
        self.by_id[event.event_id] = happening
        self.watermark.advance(self._token)
        return happening

    def _audience(
        self, sender: str, flags: Mapping[str, object], servers: set[str]
    ) -> tuple[str, ...]:
        """Those of the servers that this homeserver has to tell."""
        behalf = flags.get("send_on_behalf_of")
        elsewhere = flags.get("out_of_band_membership") or flags.get("proactively_send") is False
        if elsewhere or (server_of(sender) != self.name and behalf is None):
            return ()
        return tuple(sorted(servers - {self.name, behalf}))

    def _changes(self, room: Room, before: Sequence[str]) -> list[list[Any]]:
        """The row that says which servers came and went, if any did."""
        now = room.servers()
        came = [server for server in now if server not in before]
        went = [server for server in before if server not in now]
        back = sum((room.room_id, server) in self._gone for server in came)
        self.counts["re-joins"] += back
        self._gone.update((room.room_id, server) for server in went)
        return [["hosts", [room.room_id, came, went]]] if came or went else []


def _spoil(content: dict[str, Any], event_format: int) -> None:
    if event_format == 1:
        # There the id is no hash.
        content["content"]["body"] = "x" * 70_000
    else:
        content["origin_server_ts"] += 1


def _turned_away(
    kind: str, sender: str, target: str | None, content: Mapping[str, Any], was: str | None
) -> set[str]:
    """The server of somebody who was invited, or knocked, and may not come in after all."""
    if kind != "m.room.member" or target is None or sender == target:
        return set()
    if was in ("invite", "knock") and content["membership"] in ("leave", "ban"):
        return {server_of(target)}
    return set()
