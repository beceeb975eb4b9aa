"""A person's encrypting device, as a process of its own: `nio_device.py` and how to talk to it."""

import itertools
import json
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
from tests.synapse.client import PASSWORD
from tests.synapse.homeserver import Homeserver, clean_environment
from tests.synapse.installed import encrypted_client_python
from tests.synapse.world import until

_SCRIPT = Path(__file__).with_name("nio_device.py")

Sight = Mapping[str, Any]
"""One line of what the device saw: `saw` says what, `at` when we heard of it by trio's clock."""


class DeviceError(RuntimeError):
    """The homeserver refused what the device asked for, or the device broke down."""


@dataclass(slots=True)
class EncryptedDevice:
    """One device of a user.

    Attributes:
        mxid: whose it is.
        device_id: its name.
        sights: all that it has seen, oldest first; `at` is trio's clock when we heard of it.
    """

    mxid: str
    device_id: str
    _process: trio.Process
    _output: Path
    sights: list[Sight] = field(default_factory=list)
    _answers: dict[int, Sight] = field(default_factory=dict)
    _news: trio.Event = field(default_factory=trio.Event)
    _ids: Iterator[int] = field(default_factory=itertools.count)

    async def create_room(self) -> str:
        """The id of a new encrypted room."""
        return str(await self._do("create_room"))

    async def invite(self, room: str, mxid: str) -> None:
        await self._do("invite", room=room, mxid=mxid)

    async def join(self, room: str) -> None:
        await self._do("join", room=room)

    async def send(self, room: str, text: str) -> str:
        """Encrypt and send; the event id."""
        return str(await self._do("send", room=room, text=text))

    async def rotate(self, room: str) -> None:
        """Make a new key for the next message."""
        await self._do("rotate", room=room)

    async def type_in(self, room: str, typing: bool) -> None:
        await self._do("type", room=room, typing=typing)

    async def read(self, room: str, event_id: str) -> None:
        await self._do("read", room=room, event_id=event_id)

    async def be(self, presence: str, status: str) -> None:
        await self._do("be", presence=presence, status=status)

    async def wait_until_it_can_talk_to(self, room: str, other: "EncryptedDevice") -> None:
        """Return once it sees the other's user in the room and would encrypt for that device."""

        async def sees() -> bool:
            return bool(await self._do("sees", room=room, mxid=other.mxid))

        async def knows() -> bool:
            devices = await self._do("devices", mxid=other.mxid)
            return isinstance(devices, list) and other.device_id in devices

        await until(sees)
        await until(knows)

    async def sees(self, true: Callable[[Sight], bool]) -> Sight:
        """The first sight, of those that were and those to come, of which `true` is true."""
        looked_at = 0
        while True:
            news = self._news
            for sight in self.sights[looked_at:]:
                looked_at += 1
                if true(sight):
                    return sight
            await news.wait()

    async def reads(self, text: str) -> Sight:
        """Wait until it has decrypted a message of this text."""
        return await self.sees(lambda s: s["saw"] == "message" and s["text"] == text)

    def messages(self, room: str) -> list[Sight]:
        """The messages of the room that it could read, in the order in which it could."""
        return [s for s in self.sights if s["saw"] == "message" and s["room"] == room]

    def unread(self, room: str) -> set[str]:
        """The ids of the room's messages that it could not decrypt so far."""
        read = {s["event_id"] for s in self.messages(room)}
        found = {s["event_id"] for s in self.sights if s["saw"] == "undecryptable"}
        return found - read

    async def _do(self, what: str, **arguments: object) -> object:
        number = next(self._ids)
        order = {"id": number, "do": what, "with": arguments}
        assert self._process.stdin is not None
        await self._process.stdin.send_all(json.dumps(order).encode() + b"\n")
        while number not in self._answers:
            await self._news.wait()
        answer = self._answers.pop(number)
        if "error" in answer:
            raise DeviceError(f"{self.mxid} {what}: {answer['error']}")
        return answer["answer"]

    async def _listen(self) -> None:
        """Take lines until the process ends, which it must not do by itself."""
        assert self._process.stdout is not None
        buffer = b""
        async for data in self._process.stdout:
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        raise DeviceError(f"{self.mxid} ended:\n{self._output.read_text()[-4000:]}")

    def _take(self, line: dict[str, Any]) -> None:
        if line.get("saw") == "broken":
            raise DeviceError(f"{self.mxid} broke down: {line['error']}")
        if "saw" in line:
            self.sights.append(line | {"at": trio.current_time()})
        else:
            self._answers[line["id"]] = line
        self._news.set()
        self._news = trio.Event()


@asynccontextmanager
async def open_device(
    homeserver: Homeserver, mxid: str, device_id: str
) -> AsyncIterator[EncryptedDevice]:
    """A new device of that user, logged in and syncing until the body is left."""
    python = await trio.to_thread.run_sync(encrypted_client_python)
    with tempfile.TemporaryDirectory(prefix="fedsender-device-") as store:
        output = Path(store) / "output"
        with output.open("wb") as errors:
            command = [python, _SCRIPT, homeserver.client_url, mxid, PASSWORD, device_id, store]
            process = await trio.lowlevel.open_process(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=clean_environment(),
            )
        device = EncryptedDevice(mxid, device_id, process, output)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(device._listen)
            try:
                await device.sees(lambda sight: sight["saw"] == "ready")
                yield device
            finally:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    process.kill()
                    await process.wait()
