"""The homeserver of a benchmark, in a process of its own, and its messages of the usual size."""

import time
from base64 import b64decode, b64encode
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.matrix import ROOM_VERSIONS
from fedsender.runtime import Runtime, real_runtime
from fedsender.streams import Json
from fedsender_lab.intake_client import IntakeClient, NewRecord
from fedsender_lab.testing.children import Order, serve_orders
from fedsender_lab.testing.rooms import Event, Signer, new_timeline

SERVER_NAME = "hs.bench"
KEY_ID = "ed25519:a_bench"
ROOM_VERSION = "10"
TEXT = "x" * 380
"""With it a message has about 960 bytes: 50 of them make the 48 KB of a full transaction."""


def encode_seed(seed: bytes) -> str:
    """A signing key's seed, for a child."""
    return b64encode(seed).decode()


def signer(encoded_seed: str) -> Signer:
    """The key with which the homeserver signs its events."""
    key = Ed25519PrivateKey.from_private_bytes(b64decode(encoded_seed))
    return Signer(SERVER_NAME, KEY_ID, key)


class Room:
    """A room with a local user that sends messages."""

    def __init__(self, number: int, signer: Signer, now_ms: int) -> None:
        self.creator = f"@creator:{SERVER_NAME}"
        self._signer = signer
        self._now_ms = now_ms
        self._timeline = new_timeline(ROOM_VERSIONS[ROOM_VERSION], f"room{number}", self.creator)
        version = {"room_version": ROOM_VERSION, "creator": self.creator}
        self._append("m.room.create", version, state_key="")
        self._append("m.room.member", {"membership": "join"}, state_key=self.creator)
        self._append("m.room.power_levels", {"users": {self.creator: 100}}, state_key="")

    @property
    def room_id(self) -> str:
        return self._timeline.room_id

    def say(self, stamp: int | None = None, numbers: int = 0) -> Event:
        """A message; `stamp` travels with it, and so many numbers of one digit."""
        content: dict[str, Any] = {"msgtype": "m.text", "body": TEXT}
        if numbers:
            content["n"] = [number % 10 for number in range(numbers)]
        if stamp is not None:
            content["sent_us"] = stamp
        return self._append("m.room.message", content)

    def _append(self, kind: str, content: dict[str, Any], *, state_key: str | None = None) -> Event:
        return self._timeline.append(
            kind,
            self.creator,
            content,
            signer=self._signer,
            now_ms=self._now_ms,
            state_key=state_key,
        )


SERVERS_PER_ROW = 1_000
APPENDS_AT_ONCE = 200
"""The most that are sent in one request of what has piled up meanwhile."""


class Homeserver:
    """Rooms that do not change, and the messages in them, which are appended to its sender.

    One request is under way at a time, with all that came meanwhile.
    """

    def __init__(self, nursery: trio.Nursery, runtime: Runtime) -> None:
        self._nursery = nursery
        self._runtime = runtime
        self._rooms: list[Room] = []
        self._records: list[NewRecord] = []
        self._count = 0
        self._ready = 0
        self._came = trio.Event()
        self._turn = 0

    async def begin(self, seed: str, rooms: list[list[str]]) -> Order:
        """Make the rooms with these servers in them; they are told of first."""
        signs, now_ms = signer(seed), self._runtime.now_ms()
        for number, servers in enumerate(rooms):
            room = Room(number, signs, now_ms)
            self._rooms.append(room)
            for start in range(0, len(servers), SERVERS_PER_ROW):
                self._add(["hosts", [room.room_id, servers[start : start + SERVERS_PER_ROW], []]])
        self._publish()
        await trio.lowlevel.checkpoint()
        return {}

    async def append(self, address: str | list[str], token: str) -> Order:
        """Append to the sender at this address from now on, or to that of these which takes it."""
        await self._nursery.start(self._append_all, address, token)
        return {}

    async def _append_all(
        self, address: str | list[str], token: str, *, task_status: trio.TaskStatus[None]
    ) -> None:
        async with IntakeClient.at(address, token) as client:
            task_status.started()
            while True:
                await self._came.wait()
                some = self._records[: min(self._ready, APPENDS_AT_ONCE)]
                await client.append_all(some)
                del self._records[: len(some)]
                self._ready -= len(some)
                if not self._ready:
                    self._came = trio.Event()

    async def say(
        self, count: int, every_s: float = 0.0, stamp: bool = False, room: int | None = None
    ) -> Order:
        """Messages, in one room or in all of them in turn: all at once, or one `every_s` seconds.

        With `stamp` each says when it was made, on this machine's monotonic clock in microseconds.
        Tells their ids.
        """
        due, events = trio.current_time(), []
        for _ in range(count):
            if every_s:
                due += every_s
                await trio.sleep_until(due)
            events.append(self._say(room, time.monotonic_ns() // 1000 if stamp else None))
            if every_s:
                self._publish()
        self._publish()
        return {"events": events}

    def _say(self, number: int | None, stamp: int | None) -> str:
        if number is None:
            number, self._turn = self._turn % len(self._rooms), self._turn + 1
        room = self._rooms[number]
        event = room.say(stamp)
        about = {"room_version": ROOM_VERSION, "plus": [], "minus": []}
        self._add(["pdu", [room.room_id, event.event_id, event.content, about]])
        return event.event_id

    def _add(self, row: Json) -> None:
        """One more record; it is not appended before `_publish`."""
        self._count += 1
        self._records.append(NewRecord([row], f"homeserver-{self._count}"))

    def _publish(self) -> None:
        self._ready = len(self._records)
        if self._ready:
            self._came.set()


async def main() -> None:
    """Be the homeserver until told to end."""
    async with trio.open_nursery() as nursery:
        homeserver = Homeserver(nursery, real_runtime())
        await serve_orders(
            {"begin": homeserver.begin, "append": homeserver.append, "say": homeserver.say}
        )
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
