"""How many files one message passes through on the loop's thread, and how often it crosses between
them: the length of its story for a reader."""

import cProfile
import pstats
from collections import Counter
from pathlib import Path
from typing import Any, Final

import fedsender
from fedsender_lab.bench.meter import Options
from fedsender_lab.bench.stage import Servers, checked, open_stage, quiet

DELIVERY_SECONDS = 600.0
BUSIEST: Final = 12
"""Borders that are listed."""

Border = tuple[str, str]


async def path(options: Options) -> dict[str, Any]:
    """`events` messages, one after the other, under cProfile, once the connections are there.

    A file counts if it is entered for at least every second message. A crossing is a call from one
    of our files into another; where a task is resumed, each step down to where it waits is a call.
    """
    profiler = cProfile.Profile()
    async with open_stage([Servers(options.servers)]) as stage, stage.open_daemon() as daemon:
        for message in range(1, 4):
            await stage.homeserver.ask("say", count=1)
            await stage.until(seconds=DELIVERY_SECONDS, pdus=message * len(stage.names))
        await quiet(daemon)
        before = await stage.receivers.ask("tell")
        profiler.enable()
        for message in range(1, options.events + 1):
            await stage.homeserver.ask("say", count=1)
            due = before["pdus"] + message * options.servers
            after = await stage.until(seconds=DELIVERY_SECONDS, pdus=due)
        await quiet(daemon)
        profiler.disable()
    entered, crossings = _counted(profiler)
    files = sorted(name for name, calls in entered.items() if calls * 2 >= options.events)
    borders = [
        {"from": caller, "to": callee, "times": round(times / options.events, 1)}
        for (caller, callee), times in crossings.most_common(BUSIEST)
    ]
    return {
        "servers": options.servers,
        "messages": options.events,
        "files": len(files),
        "crossings": round(crossings.total() / options.events, 1),
        "goal": {"files": 28, "crossings": 120},
        "busiest": borders,
        "names": files,
        **checked(after),
    }


def _counted(profiler: cProfile.Profile) -> tuple[Counter[str], Counter[Border]]:
    """Calls into each of our files, and between two of them."""
    root = str(Path(fedsender.__file__).parent) + "/"
    entered: Counter[str] = Counter()
    crossings: Counter[Border] = Counter()
    profiler.create_stats()
    calls: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, *_), (_, times, _, _, callers) in calls.items():
        if not file.startswith(root):
            continue
        name = file.removeprefix(root)
        entered[name] += times
        for (caller, *_), (_, called, _, _) in callers.items():
            if caller.startswith(root) and caller != file:
                crossings[caller.removeprefix(root), name] += called
    return entered, crossings
