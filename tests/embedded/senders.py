"""Real daemons that a homeserver talks to, in a room with servers that check what they are sent."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import trio
from tests.embedded.support import TOKEN
from tests.servers import Databases

from fedsender.config.policy import GAP_EVENTS
from fedsender.matrix import ROOM_VERSIONS
from fedsender.runtime import real_runtime
from fedsender_lab.demo import process
from fedsender_lab.demo.process import DaemonProcess, open_daemon_process
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import Receivers, open_receivers
from fedsender_lab.testing.rooms import Signer, Timeline, new_timeline
from fedsender_lab.testing.rules import pdu_reader

HS = process.SERVER_NAME
USER = f"@a:{HS}"
VERSION = "10"
PATIENCE_S = 60.0


@asynccontextmanager
async def daemon_in(
    directory: Path,
    push: Mapping[str, Any],
    ca_file: Path,
    *,
    command: str = "run",
    **more: Any,
) -> AsyncIterator[DaemonProcess]:
    """`more`: sections of its configuration, in place of those of the demo."""
    process.write_secret(directory / "append.token", TOKEN)
    feed = {"kind": "push", "push": {"token_file": "append.token", **push}}
    values = dict(process.configuration(directory, feed, ca_file)) | more
    # What an outage leaves is sent whole: nothing stands in for anything.
    values["destinations"]["defaults"]["catch_up_gap_events"] = GAP_EVENTS
    async with open_daemon_process(directory, values, "admin", command) as daemon:
        yield daemon


class Talk:
    """What is said in a room, and the servers in it.

    Attributes:
        said: the ids of the events that were stored, in order.
    """

    def __init__(self, signer: Signer, timeline: Timeline, receivers: Receivers) -> None:
        self.said: list[str] = []
        self.receivers = receivers
        self._signer = signer
        self._timeline = timeline

    async def begin(self, client: IntakeClient) -> None:
        """Tell who is in the room."""
        servers = sorted(self.receivers.servers)
        await client.append([["servers", [self._timeline.room_id, servers]]])

    async def say(self, client: IntakeClient) -> None:
        """Append one message more."""
        event = self._timeline.append(
            "m.room.message",
            USER,
            {"n": len(self.said)},
            signer=self._signer,
            now_ms=real_runtime().now_ms(),
        )
        row = ["pdu", [event.room_id, event.event_id, event.content, {"room_version": VERSION}]]
        await client.append([row], id=event.event_id)
        self.said.append(event.event_id)

    @asynccontextmanager
    async def goes_on(self, *addresses: str, every_s: float = 0.05) -> AsyncIterator[None]:
        """Talk while the body runs, at whichever of the addresses takes it."""
        silent = False

        async def talk() -> None:
            await self.begin(client)
            while not silent:
                await self.say(client)
                await trio.sleep(every_s)

        async with IntakeClient.at(addresses, TOKEN) as client, trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            yield
            silent = True

    async def more(self, count: int = 20) -> None:
        """Wait until so many messages more were said."""
        before = len(self.said)
        await until(lambda: len(self.said) > before + count, seconds=PATIENCE_S)

    async def arrives(
        self, sent: Callable[[], list[str]] | None = None, *, seconds: float = PATIENCE_S
    ) -> None:
        """Wait until every server has got all that was said, or sent, in order and by the rules."""
        wanted = sent or (lambda: self.said)
        for server in self.receivers.servers.values():
            with suppress(trio.TooSlowError):
                await until(
                    lambda: list(server.received) == wanted(),  # noqa: B023
                    seconds=seconds,
                    every_s=0.2,
                )
            assert list(server.received) == wanted()
        assert not self.receivers.violations.first

    def sent_again(self) -> dict[str, int]:
        """By server, how many events came again under the id of another transaction."""
        again = {}
        for name, server in self.receivers.servers.items():
            sent = [
                pdu.event_id
                for each in server.transactions
                if each.processed and not each.repeat
                for pdu in each.pdus
            ]
            if len(sent) > len(set(sent)):
                again[name] = len(sent) - len(set(sent))
        return again


@asynccontextmanager
async def open_talk(directory: Path) -> AsyncIterator[Talk]:
    """A room, and six servers that check what they receive of it."""
    now_ms = real_runtime().now_ms()
    signer = process.write_signing_key(directory, b"k" * 32)
    timeline = new_timeline(ROOM_VERSIONS[VERSION], "r", USER)
    content = {"room_version": VERSION}
    timeline.append("m.room.create", USER, content, signer=signer, now_ms=0, state_key="")
    reader = pdu_reader(lambda _: VERSION)
    async with open_receivers(
        6, [signer.origin], reader, directory=directory, now_ms=now_ms
    ) as receivers:
        yield Talk(signer, timeline, receivers)


class Senders:
    """Daemons that share two databases, each in a directory of its own.

    Attributes:
        database: URL of the homeserver's.
        own: URL of `sender_database`.
        daemons: by directory.
    """

    def __init__(
        self, home: Path, postgres: Databases, receivers: Receivers, nursery: trio.Nursery
    ) -> None:
        self.database, self.own = postgres.create_database(), postgres.create_database()
        self.daemons: dict[str, DaemonProcess] = {}
        self._home = home
        self._receivers = receivers
        self._nursery = nursery

    def addresses(self, *directories: str) -> list[str]:
        """Where they take appends."""
        return [f"unix:{self._home}/{each}/append.sock" for each in directories]

    async def open(
        self,
        name: str,
        directory: str = "",
        *,
        command: str = "run",
        configured: tuple[str, ...] = (),
        **more: Any,
    ) -> DaemonProcess:
        """Start one.

        Args:
            directory: if it is not called as the sender is.
            configured: the list of senders in its file.
            more: see `daemon_in`.
        """
        home = self._home / (directory or name)
        home.mkdir()
        process.write_signing_key(home, b"k" * 32)
        (listen,) = self.addresses(home.name)
        homeserver: dict[str, Any] = {"database": self.database}
        if configured:
            homeserver["federation_sender_instances"] = list(configured)
        more |= {"instance_name": name, "homeserver": homeserver, "sender_database": self.own}
        run = daemon_in(home, {"listen": listen}, self._receivers.ca_file, command=command, **more)

        async def keep(task_status: trio.TaskStatus[DaemonProcess]) -> None:
            async with run as daemon:
                task_status.started(daemon)
                await trio.sleep_forever()

        daemon: DaemonProcess = await self._nursery.start(keep)
        self.daemons[home.name] = daemon
        return daemon

    async def says(self, directory: str, event: str, before: int = 0) -> None:
        """Wait until one has logged this event more often."""
        count = partial(self.daemons[directory].count, event)
        await until(lambda: count() > before, seconds=PATIENCE_S)

    async def set(self, *names: str) -> int:
        """Change the list; the exit code of the command."""
        config = str(self._home / "a" / "config.yaml")
        command = [*process.DAEMON, "senders", "set", ",".join(names), "-c", config]
        return (await trio.run_process(command, check=False)).returncode

    async def set_at_last(self, *names: str) -> None:
        """Change the list, and again whenever the change was withdrawn."""
        while await self.set(*names) != 0:  # noqa: ASYNC110
            await trio.sleep(1)

    def stored(self) -> list[str]:
        """The ids of all events in the homeserver's database, in order."""
        with psycopg.connect(self.database) as connection:
            query = "SELECT event_id FROM events ORDER BY stream_ordering"
            return [row[0] for row in connection.execute(query)]

    async def stop(self) -> None:
        """Stop them all."""
        for each in self.daemons.values():
            await each.stop()


@asynccontextmanager
async def open_senders(home: Path, postgres: Databases) -> AsyncIterator[tuple[Senders, Talk]]:
    """A room, and no sender yet."""
    async with open_talk(home) as talk, trio.open_nursery() as nursery:
        yield Senders(home, postgres, talk.receivers, nursery), talk
        nursery.cancel_scope.cancel()
