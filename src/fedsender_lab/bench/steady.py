"""Messages to healthy servers: one by one, many at once, timed, and beside 600 slow servers."""

from collections.abc import Sequence
from typing import Any

import trio
import trio.lowlevel

from fedsender.daemon import Daemon
from fedsender_lab.bench.floor import Floor, open_floor
from fedsender_lab.bench.meter import Meter, Options, Usage, fsync_ms, median, percentile
from fedsender_lab.bench.stage import Servers, Stage, checked, open_stage, quiet
from fedsender_lab.testing.children import BenchFailed, Order

DELIVERY_SECONDS = 600.0
WARM_UP = {"sending": {"handshakes_per_second": 500}}
"""Many handshakes a second: connections are not measured here."""
TRICKLE_PER_SECOND = 40
FLOOR_EXCHANGES = 500


async def _warm_up(stage: Stage, daemon: Daemon) -> None:
    """Open connections to all servers, and run every code path once."""
    for message in range(1, 4):
        await stage.homeserver.ask("say", count=1)
        await stage.until(seconds=DELIVERY_SECONDS, pdus=message * len(stage.names))
        await quiet(daemon)
    await stage.receivers.ask("tell")


def _since(before: Order, after: Order) -> tuple[int, int]:
    """Transactions and PDUs between two counts."""
    return after["transactions"] - before["transactions"], after["pdus"] - before["pdus"]


# --- fanout ---------------------------------------------------------------------------------------


async def fanout(options: Options) -> dict[str, Any]:
    """`events` messages a round, each to all servers and each delivered before the next."""
    costs: list[float] = []
    floors: list[float] = []
    sizes: list[float] = []
    async with (
        open_stage([Servers(options.servers)], settings=WARM_UP) as stage,
        open_floor(stage, stage.names) as floor,
        stage.open_daemon() as daemon,
    ):
        await _warm_up(stage, daemon)
        await floor.measure(FLOOR_EXCHANGES, 1)
        for _ in range(options.rounds):
            floors.append(await floor.measure(FLOOR_EXCHANGES, 1))
            usage, transactions, pdus = await _fan_out(stage, daemon, options.events)
            costs.append(usage.cpu_s * 1000 / transactions)
            sizes.append(pdus / transactions)
        got = await stage.receivers.ask("tell")
    ratios = [cost / floor for cost, floor in zip(costs, floors, strict=True)]
    return {
        "servers": options.servers,
        "messages": options.events * options.rounds,
        "pdus_per_transaction": median(sizes),
        "cpu_ms_per_transaction": median(costs),
        "floor_ms": median(floors),
        "ratio": median(ratios, 2),
        "ratios": [round(min(ratios), 2), round(max(ratios), 2)],
        "goal": {"ratio": 2.2},
        **checked(got),
    }


async def _fan_out(stage: Stage, daemon: Daemon, messages: int) -> tuple[Usage, int, int]:
    before = await stage.receivers.ask("tell")
    meter = Meter()
    for message in range(1, messages + 1):
        await stage.homeserver.ask("say", count=1)
        due = before["pdus"] + message * len(stage.names)
        after = await stage.until(seconds=DELIVERY_SECONDS, pdus=due)
        await quiet(daemon)
    usage = meter.read()
    return usage, *_since(before, after)


# --- burst ----------------------------------------------------------------------------------------


async def burst(options: Options) -> dict[str, Any]:
    """`events` messages to all servers, complete before the daemon starts; then as many, trickled.

    Each round begins with an empty store and no connection.
    """
    rounds = [await _burst(options) for _ in range(options.rounds)]
    figures: dict[str, Any] = {
        "servers": options.servers,
        "messages": options.events,
        "rounds": options.rounds,
    }
    for name in rounds[0]:
        if name not in ("verified", "broken"):
            figures[name] = median([each[name] for each in rounds])
    figures["goal"] = {"cpu_ms_per_pdu": 0.1}
    return figures | checked(
        {
            "verified": sum(each["verified"] for each in rounds),
            "broken": [text for each in rounds for text in each["broken"]],
        }
    )


async def _burst(options: Options) -> dict[str, Any]:
    async with open_stage([Servers(options.servers)], settings=WARM_UP) as stage:
        await stage.migrate()
        due = options.events * options.servers
        async with open_floor(stage, stage.names) as floor:
            floor_ms = await _floor_of_both(floor)
            await stage.homeserver.ask("say", count=options.events)
            before = await stage.receivers.ask("tell")
            meter = Meter()
            async with stage.open_daemon() as daemon:
                middle = await stage.until(seconds=DELIVERY_SECONDS, pdus=due)
                await quiet(daemon)
                at_once = meter.read()
                meter = Meter()
                every_s = 1 / TRICKLE_PER_SECOND
                await stage.homeserver.ask("say", count=options.events, every_s=every_s)
                after = await stage.until(seconds=DELIVERY_SECONDS, pdus=2 * due)
                await quiet(daemon)
                trickled = meter.read()
    figures = {
        **_costs("", at_once, *_since(before, middle)),
        **_costs("trickled_", trickled, *_since(middle, after)),
        "floor_ms": floor_ms[0],
        "floor_50_ms": floor_ms[1],
        "verified": after["verified"],
        "broken": after["broken"],
    }
    figures["ratio"] = figures["cpu_ms_per_transaction"] / floor_ms[1]
    return figures


async def _floor_of_both(floor: Floor) -> tuple[float, float]:
    await floor.measure(FLOOR_EXCHANGES, 50)
    return await floor.measure(FLOOR_EXCHANGES, 1), await floor.measure(FLOOR_EXCHANGES, 50)


def _costs(prefix: str, usage: Usage, transactions: int, pdus: int) -> dict[str, float]:
    return {
        f"{prefix}cpu_ms_per_pdu": usage.cpu_s * 1000 / pdus,
        f"{prefix}cpu_ms_per_transaction": usage.cpu_s * 1000 / transactions,
        f"{prefix}transactions": transactions,
        f"{prefix}wall_s": usage.wall_s,
    }


# --- latency --------------------------------------------------------------------------------------


async def latency(options: Options) -> dict[str, Any]:
    """`events` messages, 20 a second, from the making of the event to its transaction's arrival.

    That is a little more than the daemon's share: the homeserver's signing of the event and its
    sending of the line are in it. Beside it: the time of a bare exchange, and of making a page
    durable, which happens twice on the way.
    """
    async with (
        open_stage([Servers(options.servers)], settings=WARM_UP) as stage,
        open_floor(stage, stage.names) as floor,
        stage.open_daemon() as daemon,
    ):
        await _warm_up(stage, daemon)
        fsync = fsync_ms(stage.directory)
        exchange_ms = await floor.measure_wall(100)
        before = await stage.receivers.ask("tell")
        meter = Meter()
        await stage.homeserver.ask("say", count=options.events, every_s=0.05, stamp=True)
        due = before["pdus"] + options.events * options.servers
        after = await stage.until(seconds=DELIVERY_SECONDS, pdus=due)
        await quiet(daemon)
        usage = meter.read()
        await trio.lowlevel.checkpoint()
    delays = [delay / 1000 for delay in after["delays_us"]]
    return {
        "servers": options.servers,
        "messages": options.events,
        "p50_ms": round(percentile(delays, 0.5), 1),
        "p99_ms": round(percentile(delays, 0.99), 1),
        "longest_ms": round(max(delays), 1),
        "deliveries": len(delays),
        "exchange_ms": round(exchange_ms, 2),
        "fsync_ms": round(fsync, 1),
        "cpu_ms_per_transaction": round(usage.cpu_s * 1000 / _since(before, after)[0], 3),
        "goal": {"p50_ms": 20, "p99_ms": 100},
        **checked(after),
    }


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
        **checked(got),
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
