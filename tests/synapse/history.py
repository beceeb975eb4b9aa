"""One history for two senders: what alice of A does in rooms with people of three other servers.

B is a real Synapse, C and D are recorders with a key. Each thing is awaited at every door that it
should reach before the next is done, where order between kinds, or between rooms, would be chance.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import trio
from tests.synapse.client import User
from tests.synapse.recorder import Recording
from tests.synapse.remote import Remote
from tests.synapse.world import World, until

from fedsender.federation.signing import signing_key_from_seed
from fedsender.matrix import canonical_json

READ_S = 60
SAY_AGAIN_S = 5
PRESENT = (("online", "here"), ("unavailable", "at lunch"), ("offline", "gone home"))
"""What alice says of herself; what she is only for having been silent for long is chance."""
SIGNING_KEYS = ("m.signing_key_update", "org.matrix.signing_key_update")
KINDS = (
    "m.typing",
    "m.receipt",
    "m.presence",
    "m.direct_to_device",
    "m.device_list_update",
    *SIGNING_KEYS,
)
_UNLIKE = ("message_id", "last_active_ago", "ts", "stream_id", "prev_id")


@dataclass(slots=True)
class History:
    """A history while it is played, and then what is in it.

    Attributes:
        names: what differs from one playing to the next, in words.
        events: the ids of what alice said, by its text.
        at: by server ("B", "C", "D"), what A sent it.
    """

    world: World
    alice: User
    bob: User
    carol: str
    dave: str
    room: str
    side: str
    c: Remote
    d: Remote
    at: Mapping[str, Recording]
    names: dict[str, str] = field(default_factory=dict)
    events: dict[str, str] = field(default_factory=dict)

    def plain(self, value: Any) -> Any:
        """`value` with these names in words, and without what must differ: ids and times."""
        if isinstance(value, Mapping):
            return {self.plain(k): self.plain(v) for k, v in value.items() if k not in _UNLIKE}
        if isinstance(value, list | tuple):
            return [self.plain(each) for each in value]
        return self.names.get(value, value) if isinstance(value, str) else value

    # --- what was recorded ------------------------------------------------------------------------

    def pdus(self, server: str) -> list[Any]:
        """The PDUs in our rooms, without ids, hashes, signatures, times and `unsigned`."""
        kept = ("type", "sender", "state_key", "content", "depth", "redacts", "room_id")
        return [
            self.plain({name: pdu[name] for name in kept if name in pdu})
            for pdu in self.raw_pdus(server)
        ]

    def raw_pdus(self, server: str) -> list[Mapping[str, Any]]:
        """The PDUs in our rooms as they came, of both rooms in one order."""
        return self.at[server].pdus(self.room, self.side)

    def edus(self, server: str) -> Mapping[str, list[Any]]:
        """What a server was told of alice, by kind: each thing once, in order.

        How many EDUs it came in is chance where the homeserver writes several rows for one thing:
        the two keys of an upload, and a device of which the keys come after the login.
        """
        told = {kind: self.plain(self.told(server, kind)) for kind in KINDS}
        for kind in SIGNING_KEYS:
            told[kind] = [(n, e[n]) for e in told[kind] for n in sorted(e) if n != "user_id"]
        devices = told["m.device_list_update"]
        told["m.device_list_update"] = [e for e in devices if "keys" in e or "deleted" in e]
        return {kind: once(edus) for kind, edus in told.items()}

    def told(self, server: str, kind: str) -> list[Mapping[str, Any]]:
        """The EDUs of a kind that are about alice, in order, presence one by one."""
        edus = self.at[server].edus(kind)
        alice = self.alice.mxid
        match kind:
            case "m.presence":
                said = [entry for edu in edus for entry in edu["push"]]
                return [e for e in said if (e["presence"], e.get("status_msg")) in PRESENT]
            case "m.receipt":
                return [{self.room: edu[self.room]} for edu in edus if self.room in edu]
            case "m.direct_to_device":
                return [edu for edu in edus if edu["sender"] == alice]
            case _:
                return [edu for edu in edus if edu["user_id"] == alice]

    def broken_chains(self, server: str) -> list[str]:
        """The devices whose update names one before it that the server was not told."""
        told: set[int] = set()
        broken = []
        for update in self.told(server, "m.device_list_update"):
            if not told.issuperset(update.get("prev_id", ())):
                broken.append(update["device_id"])
            told.add(update["stream_id"])
        return broken

    # --- what is done -----------------------------------------------------------------------------

    async def delivered(self) -> None:
        """Return once everybody has answered for all that was said in our rooms."""
        newest = await self.world.newest_event()

        async def all_answered() -> bool:
            sql = (
                "SELECT 1 FROM destination_rooms r LEFT JOIN destinations d USING (destination)"
                " WHERE r.room_id IN (%s, %s)"
                " AND coalesce(d.last_successful_stream_ordering, 0) < r.stream_ordering"
            )
            if await self.world.events_position() < newest:
                return False
            return not await self.world.rows(sql, self.room, self.side)

        with trio.fail_after(READ_S):
            await until(all_answered)

    async def heard(
        self, kind: str, at: str, true: Callable[[Mapping[str, Any]], bool], times: int = 1
    ) -> None:
        """Return once each of these servers has been told so, so often."""

        async def all_told() -> bool:
            return all(sum(map(true, self.told(server, kind))) >= times for server in at)

        with trio.fail_after(READ_S):
            await until(all_told)

    async def say(self, room_id: str, text: str) -> str:
        """Alice says something, and everybody has it."""
        event_id = self.events[text] = await self.alice.send(room_id, text)
        self.names[event_id] = text.upper()
        await self.delivered()
        return event_id


def having(**wanted: Any) -> Callable[[Mapping[str, Any]], bool]:
    """Whether an EDU says all of this."""
    return lambda edu: wanted.items() <= edu.items()


async def play(world: World, at_b: Recording, c: Remote, d: Remote) -> History:
    """The history, with new people and new rooms; at its end C and D are in neither."""
    room = await world.room()
    side = await room.alice.create_room(preset="private_chat")
    history = History(
        world=world,
        alice=room.alice,
        bob=room.bob,
        carol=c.user("carol"),
        dave=d.user("dave"),
        room=room.id,
        side=side,
        c=c,
        d=d,
        at={"B": at_b, "C": c.recording, "D": d.recording},
    )
    people = {"ALICE": room.alice.mxid, "BOB": room.bob.mxid}
    people |= {"CAROL": history.carol, "DAVE": history.dave}
    history.names |= {mxid: word for word, mxid in people.items()}
    history.names |= {mxid[1:].partition(":")[0]: word.title() for word, mxid in people.items()}
    history.names |= {room.id: "ROOM", side: "SIDE"}
    await play_events(history)
    await play_ephemeral(history)
    await play_devices(history)
    await play_presence(history)
    await play_departures(history)
    return history


async def play_events(history: History) -> None:
    """Messages, state, a redaction, a burst; people who come. D is only in the side room."""
    alice, room, side = history.alice, history.room, history.side
    one = await history.say(room, "one")
    await history.bob.read_until(room, "one")
    await alice.invite(room, history.carol)
    await history.c.join(room, history.carol)
    await history.delivered()
    await alice.set_state(room, "m.room.topic", {"topic": "this and that"})
    await history.delivered()
    await history.say(room, "two")
    history.names[await alice.redact(room, one)] = "REDACTION"
    await history.delivered()
    burst = [f"burst {number}" for number in range(10)]
    for event_id, text in zip(await alice.send_all(room, burst), burst, strict=True):
        history.names[event_id] = text.upper()
    await history.delivered()

    await alice.invite(side, history.carol)
    await history.c.join(side, history.carol)
    await history.say(side, "aside")
    await history.bob.read_until(room, burst[-1])


async def play_ephemeral(history: History) -> None:
    """Typing, a receipt and messages to devices, for B and C."""
    alice, room = history.alice, history.room
    for typing in (True, False):
        await alice.type_in(room, typing=typing)
        await history.heard("m.typing", "BC", having(typing=typing))
    await alice.read(room, history.events["two"])
    await history.heard("m.receipt", "BC", having())
    for text in ("first", "second"):
        await alice.send_to_device(history.bob.mxid, text)
        await alice.send_to_device(history.carol, text)
    await history.heard("m.direct_to_device", "BC", having(), times=2)


async def play_devices(history: History) -> None:
    """A device that comes and goes, new cross-signing keys, and another device after them."""

    async def is_known(device: str) -> None:
        edus = "m.device_list_update"
        await history.heard(edus, "BC", lambda edu: having(device_id=device)(edu) and "keys" in edu)

    phone = await history.alice.login("PHONE")
    await is_known("PHONE")
    await phone.logout()
    await history.heard("m.device_list_update", "BC", having(device_id="PHONE", deleted=True))
    keys, signature = cross_signing_keys(history.alice.mxid)
    history.names[signature] = "SIGNED"
    await history.alice.upload_signing_keys(keys)
    for kind, name in itertools.product(SIGNING_KEYS, keys):
        await history.heard(kind, "BC", having(**{name: keys[name]}))
    tablet = await history.alice.login("TABLET")
    await is_known("TABLET")
    await tablet.aclose()


def cross_signing_keys(mxid: str) -> tuple[Mapping[str, Any], str]:
    """A master and a self-signing key, the same for everybody, and the one's signature."""
    master, own = (signing_key_from_seed("x", bytes([seed]) * 32) for seed in (1, 2))

    def describe(usage: str, public: str) -> dict[str, Any]:
        return {"user_id": mxid, "usage": [usage], "keys": {f"ed25519:{public}": public}}

    signed = describe("self_signing", own.public_key())
    signature = master.sign(canonical_json(signed))
    signed["signatures"] = {mxid: {f"ed25519:{master.public_key()}": signature}}
    return {
        "master_key": describe("master", master.public_key()),
        "self_signing_key": signed,
    }, signature


async def play_presence(history: History) -> None:
    """Alice is here when D comes, which is told so at once; then she is not."""
    alice = history.alice

    async def keep_saying() -> None:
        # Without it a slow machine would have her offline before D has come.
        for _ in itertools.count():
            await alice.be(*PRESENT[0])
            await trio.sleep(SAY_AGAIN_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_saying)
        await history.heard("m.presence", "BC", having(presence="online"))
        await alice.invite(history.side, history.dave)
        await history.d.join(history.side, history.dave)
        await history.delivered()
        await history.heard("m.presence", "D", having(presence="online"))
        nursery.cancel_scope.cancel()
    for presence, status in PRESENT[1:]:
        await alice.be(presence, status)
        await history.heard("m.presence", "BCD", having(presence=presence))


async def play_departures(history: History) -> None:
    """Who is kicked is told so, and nothing that is said later; who leaves knows it."""
    alice, room, side = history.alice, history.room, history.side
    await history.say(side, "aside with dave")
    await alice.kick(room, history.carol)
    await history.delivered()
    await history.say(room, "without carol")
    await history.d.leave(side, history.dave)
    await history.delivered()
    await history.say(side, "without dave")
    await history.c.leave(side, history.carol)
    await history.say(side, "alone")


def once(values: list[Any]) -> list[Any]:
    """Without repeats: who types is said again every 40 s."""
    return [value for number, value in enumerate(values) if value not in values[:number]]
