"""The list of senders changes under load: from one to two, three, and back to one.

    fedsender bench change [--servers 10000] [--events 2]

Of the servers one in twenty has traffic, a message a second in one room. Three in a hundred are
in that room and away: they are owed events, `--events` messages to devices each, and a transaction
that failed. All others are up, and got one message. The senders are processes of their own over a
PostgreSQL that it starts. While the list becomes that of three, one of them is killed; while it
becomes that of one again, another one is frozen. A change that was withdrawn is given again.

A message waits for as long as its server pauses: `wait_max_s` and the like are of all messages that
were made while the list changed. In the end those that were away come back. Every server has to get
every message, and for the first time in order, and every message to its devices.
"""

import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio
import yaml
from tests.servers import Postgres, open_postgres

from fedsender.config.policy import GAP_EVENTS
from fedsender_lab.bench.meter import Options, percentile
from fedsender_lab.bench.stage import Servers, Stage, checked, open_stage
from fedsender_lab.demo.process import DAEMON, write_secret
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.children import BenchFailed, Order

NAMES: Final = ("a", "b", "c")
CHANGES: Final = ((("a", "b"), None, ""), (NAMES, "b", "killed"), (("a",), "c", "frozen"))
"""Each list, and which sender is hit in the middle of the change, and how."""
EVERY_S: Final = 1.0
CALM_S: Final = 4.0
PATIENCE_S: Final = 900.0
LOOK_S: Final = 0.1
TRAFFIC, AWAY = 0, 1


class _Sender:
    """A process of one sender, that may be killed and started anew."""

    def __init__(self, directory: Path, name: str) -> None:
        self._log = directory / f"{name}.log"
        self._command = [*DAEMON, "run", "-c", str(directory / f"{name}.yaml")]
        self._process: trio.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def tell(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> None:
        assert self._process is not None
        await self._process.wait()

    def count(self, event: str) -> int:
        return self._log.read_text().count(f'"event":"{event}"')

    async def until(self, event: str, before: int = 0) -> None:
        """Wait until it has logged this more often."""
        with trio.move_on_after(PATIENCE_S):
            while self.count(event) <= before:  # noqa: ASYNC110
                await trio.sleep(LOOK_S)
            return
        raise BenchFailed(f"no {event}: {self._log.read_text()[-500:]}")


class _Talk:
    """The messages of the room with traffic."""

    def __init__(self, stage: Stage) -> None:
        self.said = 0
        self._stage = stage
        self._enough, self._silent = trio.Event(), trio.Event()

    async def run(self) -> None:
        # Of more than that a server that is away is owed only the newest.
        while not self._enough.is_set() and self.said < GAP_EVENTS - 1:
            await self._stage.homeserver.ask("say", count=1, stamp=True, room=0)
            self.said += 1
            with trio.move_on_after(EVERY_S):
                await self._enough.wait()
        self._silent.set()

    async def end(self) -> None:
        self._enough.set()
        await self._silent.wait()


async def change(options: Options) -> dict[str, Any]:
    """The waits of messages while the list of senders changes; see the module."""
    traffic, away = max(3, options.servers // 20), max(3, options.servers * 3 // 100)
    groups = [Servers(traffic), Servers(away, listens=False)]
    groups.append(Servers(max(1, options.servers - traffic - away)))
    settings = {"destinations": {"defaults": {"catch_up_gap_events": GAP_EVENTS}}}
    with open_postgres() as server, tempfile.TemporaryDirectory(prefix="d") as sockets:
        async with (
            open_stage(
                groups,
                rooms=lambda names: [list(names[: traffic + away]), list(names)],
                settings=settings,
            ) as stage,
            _open_senders(stage, server, Path(sockets)) as senders,
        ):
            return await _play(options, stage, senders, Path(sockets))


@asynccontextmanager
async def _open_senders(
    stage: Stage, server: Postgres, sockets: Path
) -> AsyncIterator[dict[str, _Sender]]:
    """All of them, of which the first one sends."""
    for database in ("sender", "homeserver"):
        server.create_database(database)
    senders: dict[str, _Sender] = {}
    try:
        for name in NAMES:
            push = {**stage.values["feed"]["push"], "listen": f"unix:{sockets}/{name}.push"}
            admin = {**stage.values["admin"], "listen": f"unix:{sockets}/{name}.admin"}
            values = stage.values | {
                "instance_name": name,
                "sender_database": server.url("sender"),
                "homeserver": {"database": server.url("homeserver")},
                "feed": {"kind": "push", "push": push},
                "admin": admin,
            }
            write_secret(stage.directory / f"{name}.yaml", yaml.safe_dump(values))
            sender = _Sender(stage.directory, name)
            await sender.start()
            senders[name] = sender
            await sender.until("takes_appends" if name == "a" else "standing_by")
        yield senders
    finally:
        for sender in senders.values():
            sender.tell(signal.SIGCONT)
            sender.tell(signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await sender.ended()


async def _play(
    options: Options, stage: Stage, senders: dict[str, _Sender], sockets: Path
) -> dict[str, Any]:
    traffic, away, rest = (len(group) for group in stage.groups)
    addresses = [f"unix:{sockets}/{name}.push" for name in NAMES]
    token = (stage.directory / "append.token").read_text()
    await stage.homeserver.ask("append", address=addresses, token=token)
    await stage.homeserver.ask("say", count=1, room=1)
    await stage.until(seconds=PATIENCE_S, servers=traffic + rest)
    async with IntakeClient.at(addresses, token) as client, trio.open_nursery() as nursery:
        talk = _Talk(stage)
        nursery.start_soon(talk.run)
        for number in range(options.events):
            for name in stage.groups[AWAY]:
                key = {"type": "m.room_key", "sender": "@a:b", "message_id": f"{number}"}
                await client.append([["edu", ["to_device", name, f"{number}{name}", key]]])
        waits: dict[str, dict[str, float]] = {"calm": await _waits(stage, CALM_S)}
        for names, victim, how in CHANGES:
            began = trio.current_time()
            await _change(stage, senders, names, victim, how)
            took = trio.current_time() - began
            found = await _waits(stage, CALM_S)
            waits[",".join(names)] = {"took_s": round(took, 1), **found}
        await talk.end()
        await stage.receivers.ask("come_back")
        await _run("wake", "--all", config=stage.directory / "a.yaml")
        due = talk.said * (traffic + away)
        got = await _until(stage, due, away * options.events)
    broken = list(got["broken"])
    for what, wanted in (("stamped", due), ("keys", away * options.events)):
        if got[what] < wanted:
            broken.append(f"{got[what]} of {wanted} {what} arrived")
    if got["overtaken"]:
        broken.append(f"{got['overtaken']} came behind a later one")
    return {
        "servers": {"traffic": traffic, "away": away, "others": rest},
        "messages": talk.said,
        "waits": waits,
        "goal": {"wait_max_s": 5},
        **checked(got),
        "broken": broken,
    }


async def _change(
    stage: Stage,
    senders: dict[str, _Sender],
    names: tuple[str, ...],
    victim: str | None,
    how: str,
) -> None:
    """Put this list in force, whatever it takes."""
    config = stage.directory / "a.yaml"

    async def hit(victim: _Sender) -> None:
        stops = victim.count("stops_for_change")
        await victim.until("stops_for_change", stops)
        if how == "killed":
            victim.tell(signal.SIGKILL)
            await victim.ended()
            await victim.start()
        else:
            victim.tell(signal.SIGSTOP)

    async with trio.open_nursery() as nursery:
        if victim is not None:
            nursery.start_soon(hit, senders[victim])
        while await _run("senders", "set", ",".join(names), config=config):  # noqa: ASYNC110
            await trio.sleep(1)
    if how == "frozen" and victim is not None:
        senders[victim].tell(signal.SIGCONT)


async def _run(*command: str, config: Path) -> int:
    done = await trio.run_process(
        [*DAEMON, *command, "-c", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode


async def _waits(stage: Stage, seconds: float) -> dict[str, float]:
    """After so many seconds, how long messages waited that came since it was asked last."""
    await trio.sleep(seconds)
    got = await stage.receivers.ask("tell")
    found = [each / 1e6 for each in got["delays_us"]] or [0.0]
    return {
        "wait_p50_s": round(percentile(found, 0.5), 2),
        "wait_p99_s": round(percentile(found, 0.99), 2),
        "wait_max_s": round(max(found), 2),
    }


async def _until(stage: Stage, stamped: int, keys: int) -> Order:
    """The receivers' counts, once all has arrived, or after a long time."""
    with trio.move_on_after(PATIENCE_S):
        while True:
            got = await stage.receivers.ask("tell")
            if got["stamped"] >= stamped and got["keys"] >= keys:
                break
            await trio.sleep(LOOK_S)
    return got
