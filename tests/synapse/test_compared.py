"""Synapse's own worker and the daemon, given the same to do: what reaches B is the same.

The same history is played twice in rooms and by people of its own, once with each sender, while a
door in front of B reads along. Where they differ on purpose, docs/switching.md says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import trio
import trustme
from tests.synapse.client import User
from tests.synapse.daemon import open_daemon
from tests.synapse.recorder import Recording
from tests.synapse.world import Room, World, recorded, until

TEST_S = 300
READ_S = 60


@dataclass(frozen=True, slots=True)
class Played:
    """A history that was played: the names in it that differ from one playing to the next."""

    room: Room
    event_ids: Mapping[str, str]

    def plain(self, value: Any) -> Any:
        """`value` with these names in words, and without what must differ: ids and times."""
        if isinstance(value, Mapping):
            left_out = ("stream_id", "prev_id", "message_id", "last_active_ago", "ts", "keys")
            return {self.plain(k): self.plain(v) for k, v in value.items() if k not in left_out}
        if isinstance(value, list | tuple):
            return [self.plain(each) for each in value]
        words = {self.room.id: "ROOM", self.room.alice.mxid: "ALICE", self.room.bob.mxid: "BOB"}
        words |= {event_id: text.upper() for text, event_id in self.event_ids.items()}
        return words.get(value, value) if isinstance(value, str) else value


async def play(world: World, recording: Recording) -> Played:
    """The history: messages, state, a redaction, a burst, and every kind of EDU.

    Each thing is awaited at B's door before the next, where order between kinds would be chance.
    """
    room = await world.room()
    alice = room.alice
    events = {}

    async def arrived(event_id: str) -> None:
        await world.wait_until_settled(world.b.name, event_id)

    async def seen(edu_type: str, what: Mapping[str, Any]) -> None:
        async def there() -> bool:
            return any(what.items() <= each.items() for each in recording.edus(edu_type))

        with trio.fail_after(READ_S):
            await until(there)

    events["one"] = await alice.send(room.id, "one")
    await room.bob.read_until(room.id, "one")
    await arrived(events["one"])
    events["topic"] = await alice.set_state(room.id, "m.room.topic", {"topic": "this and that"})
    events["two"] = await alice.send(room.id, "two")
    events["redaction"] = await alice.redact(room.id, events["one"])
    burst = [f"burst {number}" for number in range(10)]
    events |= dict(zip(burst, await alice.send_all(room.id, burst), strict=True))
    await room.bob.read_until(room.id, burst[-1])
    await arrived(events[burst[-1]])

    await alice.type_in(room.id)
    await seen("m.typing", {"room_id": room.id, "typing": True})
    await alice.type_in(room.id, typing=False)
    await seen("m.typing", {"room_id": room.id, "typing": False})
    await alice.read(room.id, events["two"])
    await until_receipt(recording, room)
    for text in ("first", "second"):
        await alice.send_to_device(room.bob.mxid, text)
    await until_to_device(recording, alice, 2)
    await play_devices(world, recording, alice)
    return Played(room, events)


async def play_devices(world: World, recording: Recording, alice: User) -> None:
    """A device that comes and goes."""

    async def told(deleted: bool) -> bool:
        return any(
            each["user_id"] == alice.mxid and each.get("deleted", False) == deleted
            for each in recording.edus("m.device_list_update")
            if each["device_id"] == "PHONE"
        )

    phone = await alice.login("PHONE")
    with trio.fail_after(READ_S):
        await until(lambda: told(deleted=False))
        await phone.logout()
        await until(lambda: told(deleted=True))


async def until_receipt(recording: Recording, room: Room) -> None:
    async def there() -> bool:
        return any(room.id in each for each in recording.edus("m.receipt"))

    with trio.fail_after(READ_S):
        await until(there)


async def until_to_device(recording: Recording, alice: User, count: int) -> None:
    async def there() -> bool:
        return len(to_device(recording, alice)) >= count

    with trio.fail_after(READ_S):
        await until(there)


def to_device(recording: Recording, alice: User) -> list[Mapping[str, Any]]:
    """Alice's to-device EDUs: she sends no others."""
    return [each for each in recording.edus("m.direct_to_device") if each["sender"] == alice.mxid]


def pdus_of(recording: Recording, played: Played) -> list[Any]:
    """The room's PDUs as B was sent them, without ids, hashes, signatures, times and `unsigned`."""
    kept = ("type", "sender", "state_key", "content", "depth", "redacts", "room_id")
    return [
        played.plain({name: pdu[name] for name in kept if name in pdu})
        for pdu in recording.pdus(played.room.id)
    ]


def edus_of(recording: Recording, played: Played) -> Mapping[str, Sequence[Any]]:
    """What was said of this playing's people and room, by kind, each thing once, in order."""
    alice, room = played.room.alice, played.room
    found: dict[str, list[Mapping[str, Any]]] = {
        "m.typing": [e for e in recording.edus("m.typing") if e["room_id"] == room.id],
        "m.receipt": [{room.id: e[room.id]} for e in recording.edus("m.receipt") if room.id in e],
        "m.direct_to_device": to_device(recording, alice),
        "m.device_list_update": [
            e for e in recording.edus("m.device_list_update") if e["user_id"] == alice.mxid
        ],
    }
    return {kind: once([played.plain(each) for each in edus]) for kind, edus in found.items()}


def once(values: Sequence[Any]) -> list[Any]:
    """Without repeats: who types is said again every 40 s."""
    return [value for number, value in enumerate(values) if value not in values[:number]]


async def test_synapses_worker_and_the_daemon_send_the_same(
    world: World, synapse_authority: trustme.CA
) -> None:
    """The same PDUs in the same order, each once; the same EDUs; W27 mended."""
    with trio.fail_after(TEST_S):
        async with recorded(world, synapse_authority) as theirs, world.synapse_worker():
            with_synapse = await play(world, theirs)
        async with recorded(world, synapse_authority) as ours, open_daemon(world.daemon):
            with_daemon = await play(world, ours)

    assert pdus_of(ours, with_daemon) == pdus_of(theirs, with_synapse)
    assert edus_of(ours, with_daemon) == edus_of(theirs, with_synapse)
    assert any("age_ts" in pdu["unsigned"] for pdu in theirs.pdus(with_synapse.room.id))
    for pdu in ours.pdus(with_daemon.room.id):
        assert not {"age", "age_ts"} & pdu.get("unsigned", {}).keys()
