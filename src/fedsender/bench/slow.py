"""What most servers cost the others when they are slow: messages to quick ones meanwhile."""

from collections.abc import Sequence
from typing import Any

import trio

from fedsender.bench.meter import Options, percentile
from fedsender.bench.stage import VERIFY_EVERY, Servers, Stage, open_stage
from fedsender.testing.children import BenchFailed

QUICK_OF = 31
"""One server of so many is quick: 20 of 620."""
ANSWER_SECONDS = 30.0
EVERY_SECONDS = 0.2
MESSAGES_BETWEEN = 25
"""To the quick servers, for each message to the slow ones."""
PATIENCE_SECONDS = 120.0

QUICK_ROOM, SLOW_ROOM, NEW_ROOM = 0, 1, 2


async def slow(options: Options) -> dict[str, Any]:
    """`events` messages to quick servers, 5 a second, first alone, and then while all others are
    sent messages in a room of theirs and answer after 30 s.

    At the end one message to as many quick servers that were never heard of.
    """
    quick = max(1, options.servers // QUICK_OF)
    many = max(1, options.servers - quick)
    groups = [Servers(quick), Servers(many, latency=ANSWER_SECONDS), Servers(quick)]

    def rooms(names: Sequence[str]) -> list[list[str]]:
        return [list(names[:quick]), list(names[quick:-quick]), list(names[-quick:])]

    async with open_stage(groups, rooms=rooms) as stage, stage.open_daemon() as daemon:
        await _delays(stage, 3, quick)
        alone = await _delays(stage, options.events, quick)
        # The first that the slow ones hear of us: nothing tells that they are slow.
        await stage.homeserver.ask("say", count=1, room=SLOW_ROOM)
        await stage.until(seconds=PATIENCE_SECONDS, pdus=0, servers=quick + many)
        beside: list[float] = []
        in_flight = 0
        for start in range(0, options.events, MESSAGES_BETWEEN):
            await stage.homeserver.ask("say", count=1, room=SLOW_ROOM)
            beside += await _delays(stage, min(MESSAGES_BETWEEN, options.events - start), quick)
            in_flight = max(in_flight, daemon.admission.in_flight)
        new = await _delays(stage, 1, quick, room=NEW_ROOM)
        got = await stage.receivers.ask("tell")
    return {
        "servers": [quick, many],
        "answer_s": ANSWER_SECONDS,
        "messages": options.events,
        "in_flight": in_flight,
        **_figures("alone", alone),
        **_figures("beside", beside),
        "new_longest_ms": round(max(new), 1),
        "goal": {"beside_p50_ms": 150, "beside_p99_ms": 1000},
        "verify_every": VERIFY_EVERY,
        "verified": got["verified"],
        "broken": got["broken"],
    }


async def _delays(
    stage: Stage, messages: int, servers: int, *, room: int = QUICK_ROOM
) -> list[float]:
    """Milliseconds from the making of each of these messages to its arrival at each server."""
    delays: list[float] = []
    await stage.homeserver.ask("say", count=messages, every_s=EVERY_SECONDS, stamp=True, room=room)
    with trio.move_on_after(PATIENCE_SECONDS):
        while len(delays) < messages * servers:
            await trio.sleep(EVERY_SECONDS)
            got = await stage.receivers.ask("tell")
            delays += [delay / 1000 for delay in got["delays_us"]]
        return delays
    text = f"{len(delays)} of {messages * servers} deliveries to quick servers"
    raise BenchFailed(f"after {PATIENCE_SECONDS:.0f} s {text}")


def _figures(prefix: str, delays: list[float]) -> dict[str, float]:
    return {
        f"{prefix}_p50_ms": round(percentile(delays, 0.5), 1),
        f"{prefix}_p99_ms": round(percentile(delays, 0.99), 1),
        f"{prefix}_longest_ms": round(max(delays), 1),
    }
