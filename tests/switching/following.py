"""A shadow in this process, followed while it follows."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

import trio
from rich.console import Console

from fedsender.config import Config
from fedsender.runtime import real_runtime
from fedsender.signals import Signals
from fedsender.switching.comparison import Report
from fedsender.switching.shadow import run_shadow
from fedsender.systemd import Notifier

PATIENCE_S = 60


class Followable(Protocol):
    """What a shadow is started with: a directory for its report, and a configuration."""

    @property
    def directory(self) -> Path: ...

    def config(self, **changes: Any) -> Config: ...


@dataclass
class Followed:
    """A shadow that runs; `code` is its exit code once it has ended."""

    report: Report
    signals: Signals
    ready: trio.Event
    screen: StringIO
    code: int | None = None


@asynccontextmanager
async def followed(
    world: Followable, *, patience_s: float = PATIENCE_S, **changes: Any
) -> AsyncIterator[Followed]:
    """A shadow runs while the body does, and has summed up after it."""
    running = Followed(Report(world.directory), Signals(10), trio.Event(), StringIO())
    notifier = Notifier(lambda message: _hear(running, message), lambda: 0)

    async def follow() -> None:
        running.code = await run_shadow(
            world.config(**changes),
            real_runtime(),
            running.report,
            running.signals,
            notifier,
            Console(file=running.screen, width=120),
        )

    with trio.fail_after(patience_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await running.ready.wait()
            yield running
            running.signals.stop.set()


def _hear(running: Followed, message: bytes) -> None:
    if b"READY=1" in message:
        running.ready.set()


def lines(world: Followable, what: str) -> list[dict[str, Any]]:
    """The lines of the report of one kind, in order."""
    text = (world.directory / "shadow.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["what"] == what]
