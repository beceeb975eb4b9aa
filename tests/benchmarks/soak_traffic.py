"""What a homeserver says in a soak: messages, typing, receipts, devices and presence, evenly mixed.

The rooms stay as they are, so that one stretch of the run is like the next. Whatever is due to
several servers counts as so many deliveries, and the pace is kept in deliveries per second: what is
said in a large room is followed by a longer silence.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import trio

from fedsender_lab.intake_client import IntakeClient, NewRecord
from fedsender_lab.testing.rooms import Homeserver, Room, Step

BATCH: Final = 50
TICK_S: Final = 0.05
"""What is said in this time is handed over at once."""
ROOM_SHARES: Final = (1.0, 0.5, 0.25, 0.1, 0.1, *[0.04] * 4, *[0.02] * 6)
"""Which share of all servers is in each of the larger rooms."""
SMALL_ROOMS: Final = 25
SMALL_SIZES: Final = (1, 2, 3)
MOST_FOR_DEVICES: Final = 50
MOST_FOR_PRESENCE: Final = 100
"""Servers that share a room with somebody whose device, or presence, changes."""
TO_DEVICE_AT_ONCE: Final = 5
CIPHERTEXT: Final = "x" * 300
RECORDS_BEFORE: Final = 10_000
"""A line feed remembers so many tokens: that memory is full from the start."""


class Traffic:
    """A homeserver that talks by way of a relay.

    Attributes:
        steps: what happened in the rooms, with the tokens that the relay gave.
        to_device: messages to devices, by server.
        said: how much there was of each kind.
        late_s: by how much it was behind its pace, at the worst.
    """

    def __init__(
        self, homeserver: Homeserver, relay: IntakeClient, rng: random.Random, per_second: float
    ) -> None:
        """`per_second`: deliveries."""
        self.steps: list[Step] = []
        self.to_device: Counter[str] = Counter()
        self.said: Counter[str] = Counter()
        self.late_s = 0.0
        self._homeserver = homeserver
        self._relay = relay
        self._rng = rng
        self._per_second = per_second
        self._number = 0
        self._typing: set[str] = set()
        # What has been said and the relay does not know yet; and the steps of those records.
        self._records: list[NewRecord] = []
        self._steps: list[Step | None] = []
        self._ephemeral: defaultdict[str, list[Any]] = defaultdict(list)
        self._kinds: list[tuple[int, Callable[[], int]]] = [
            (45, self._message),
            (20, self._type),
            (18, self._read),
            (8, self._to_devices),
            (3, self._change_device),
            (6, self._be_present),
        ]

    async def furnish(self, servers: Sequence[str]) -> None:
        """Make rooms of all sizes, with everybody in the largest, and tell the relay of them."""
        sizes = [max(1, round(share * len(servers))) for share in ROOM_SHARES]
        sizes += [SMALL_SIZES[number % len(SMALL_SIZES)] for number in range(SMALL_ROOMS)]
        for size in sizes:
            room = self._homeserver.create_room()
            for server in self._rng.sample(servers, min(size, len(servers))):
                # They join by way of others, which tell everybody: nothing of it is for us to send.
                user = f"@first:{server}"
                self._homeserver.set_membership(room, user, user, "join")
        for step in self._homeserver.steps:
            self._note(NewRecord(step.rows, step.event.event_id), step)
        # Nobody joins and nobody leaves.
        nothing = [["hosts", [self._homeserver.steps[0].event.room_id, [], []]]]
        for number in range(RECORDS_BEFORE):
            self._note(NewRecord(nothing, f"before {number}"))
        await self._flush()

    def _note(self, record: NewRecord, step: Step | None = None) -> None:
        self._records.append(record)
        self._steps.append(step)

    async def go_on(self) -> None:
        """Talk until cancelled."""
        due = trio.current_time()
        weights = [weight for weight, _ in self._kinds]
        while True:
            while due <= trio.current_time():
                ((_, say),) = self._rng.choices(self._kinds, weights)
                due += say() / self._per_second
                self.said[say.__name__.strip("_")] += 1
            # An append that was begun ends: nobody could say otherwise whether it counts.
            with trio.CancelScope(shield=True):
                await self._flush()
            self.late_s = max(self.late_s, trio.current_time() - due)
            await trio.sleep_until(max(due, trio.current_time() + TICK_S))

    async def _flush(self) -> None:
        """Hand over what was said since the last time."""
        records, self._records = self._records, []
        steps, self._steps = self._steps, []
        for start in range(0, len(records), BATCH):
            tokens = await self._relay.append_all(records[start : start + BATCH])
            for step, token in zip(steps[start : start + BATCH], tokens, strict=True):
                if step is not None and token is not None:
                    self.steps.append(replace(step, token=token))
        ephemeral, self._ephemeral = self._ephemeral, defaultdict(list)
        if ephemeral:
            await self._relay.ephemeral(**ephemeral)

    # --- each says something, and tells how many servers it concerns ------------------------------

    def _message(self) -> int:
        step = self._homeserver.say(self._room())
        self._note(NewRecord(step.rows, step.event.event_id), step)
        return len(step.servers)

    def _type(self) -> int:
        room = self._room()
        typing = room.room_id not in self._typing
        self._typing ^= {room.room_id}
        self._ephemeral["typing"].append([room.room_id, [room.creator] if typing else []])
        return len(self._others(room))

    def _read(self) -> int:
        room = self._room()
        assert room.timeline.latest is not None
        event_id = room.timeline.latest.event_id
        row = [room.room_id, "m.read", room.creator, event_id, None, {"ts": self._next()}]
        self._ephemeral["receipts"].append(row)
        return len(self._others(room))

    def _to_devices(self) -> int:
        others = self._others(self._room())
        servers = self._rng.sample(others, min(len(others), TO_DEVICE_AT_ONCE))
        for server in servers:
            name = f"m{self._next()}"
            sealed = {"algorithm": "m.olm.v1.curve25519-aes-sha2", "ciphertext": CIPHERTEXT}
            content = {
                "sender": f"@creator0:{self._homeserver.name}",
                "type": "m.room.encrypted",
                "message_id": name,
                "messages": {f"@first:{server}": {"DEVICE": sealed}},
            }
            self._note(NewRecord([["edu", ["to_device", server, name, content]]], name))
            self.to_device[server] += 1
        return len(servers)

    def _change_device(self) -> int:
        room = self._room(MOST_FOR_DEVICES)
        user, device = room.creator, f"DEVICE{self._rng.randrange(5)}"
        keys = {"curve25519:" + device: f"{self._next():043d}"}
        content = {"user_id": user, "device_id": device, "keys": {"keys": keys}}
        servers = self._others(room)
        rows = [["edu", ["device_list", server, user, device, content]] for server in servers]
        self._note(NewRecord(rows, f"d{self._next()}"))
        return len(servers)

    def _be_present(self) -> int:
        room = self._room(MOST_FOR_PRESENCE)
        state = self._rng.choice(("online", "unavailable"))
        servers = self._others(room)
        row = [room.creator, state, self._next(), None, state == "online", servers]
        self._ephemeral["presence"].append(row)
        return len(servers)

    # ----------------------------------------------------------------------------------------------

    def _room(self, most: int | None = None) -> Room:
        """A room by chance (of at most so many servers), small ones more often."""
        rooms = self._homeserver.rooms
        sizes = [len(room.memberships) - 1 for room in rooms]
        weights = [
            size**-0.5 if most is None or size <= most or size == min(sizes) else 0.0
            for size in sizes
        ]
        return self._rng.choices(rooms, weights)[0]

    def _others(self, room: Room) -> list[Any]:
        return sorted(room.servers() - {self._homeserver.name})

    def _next(self) -> int:
        self._number += 1
        return self._number
