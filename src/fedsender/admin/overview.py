"""The overview of the whole daemon, from memory alone, for `fedsender status` and `top`."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any, TypeVar

import trio

from fedsender import version
from fedsender.admin.context import AdminContext
from fedsender.admin.destinations import (
    Listing,
    Page,
    Rows,
    age_class,
    joined_page,
    list_rows,
)
from fedsender.admin.display import AGES
from fedsender.admin.probes import feed_lag_s, problems, warnings_of
from fedsender.admin.together import Joint, question, summed
from fedsender.limits import of_daemon, resident_bytes
from fedsender.sender.transaction import Debt
from fedsender.telemetry import Minute, Rates


@dataclass(frozen=True, slots=True)
class Feed:
    """The events stream of the homeserver.

    Attributes:
        position: the token up to which the sender was given events.
        head: the newest token that we have heard of.
        held_s: seconds for which the stream has been held back.
        fanned_out: the token up to which the servers of every event are on record.
        lag_s: seconds for which the oldest event that we heard of has waited for that.
    """

    connected: bool
    position: int
    head: int
    held_s: float
    fanned_out: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class Owed:
    """What all servers together are owed.

    Attributes:
        rooms: as counted at the last sweep, summed over servers of which it is not known how many
            events that are.
        events: of the other servers.
        redeliveries: events to be sent again.
        keys: servers for which to-device messages or device lists wait.
    """

    servers: int = 0
    rooms: int = 0
    events: int = 0
    redeliveries: int = 0
    keys: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the daemon, in bytes, and its bounds by the configuration of the last start.

    Attributes:
        resident: of the process; null: the system does not tell.
        most: `MemoryMax` of the unit that `fedsender systemd-unit` prints.
        queued: events in queues; at most `sending.window_bytes`, but for the newest event.
        bodies: transactions under way; at most `IN_FLIGHT_BYTES`, and 64 KiB for each.
    """

    resident: int | None
    most: int
    queued: int
    most_queued: int
    bodies: int
    most_bodies: int


@dataclass(frozen=True, slots=True)
class Overview(Joint):
    """The daemon at a glance; several of them as one.

    `version`, `uptime_s`, `signing_keys` and `memory` are those of the one that answers. Of several
    feeds, positions, latencies and lags it is the worst.

    Attributes:
        senders: by the name of each that answers its machine.
        reasons: why it is not ready, one sentence each.
        warnings: what needs an operator though it goes on, one sentence each.
        in_flight: attempts under way.
        rates: of the last minute; null: the daemon has just started.
        signing_keys: the ids of the keys that sign now: requests, and with `sign_events` events.
        states: the number of servers in each state.
        owed_by_age: servers, by the age of the oldest event that they are owed, where it is known.
        failing_by_age: by class of failure, and by the time since the first failure.
        quarantine_items: as counted at the last sweep.
        hour: the last hour, the latest minute last.
        page: the servers that were asked for.
    """

    version: str
    instance: str
    senders: Mapping[str, str]
    server_name: str
    uptime_s: float
    ready: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    feed: Feed
    in_flight: int
    rates: Rates | None
    signing_keys: tuple[str, ...]
    states: Mapping[str, int]
    owed: Owed
    owed_by_age: Mapping[str, int]
    failing_by_age: Mapping[str, Mapping[str, int]]
    quarantine_items: int
    memory: Memory
    hour: Sequence[Minute]
    page: Page


async def overview(context: AdminContext, listing: Listing) -> Overview:
    """The overview, with a page of this list."""
    heard = await overview_here.ask(context, listing)
    rows = {name: rows for name, (_, rows) in heard.answers.items()}
    found = {name: one for name, (one, _) in heard.answers.items()}
    every, feeds = found.values(), [one.feed for one in found.values()]
    away = [f"{name}: {reason}" for name, reason in heard.without.items()]
    return replace(
        found[context.config.instance_name],
        senders=summed(one.senders for one in every),
        ready=all(one.ready for one in every) and not away,
        reasons=(*_said({name: one.reasons for name, one in found.items()}), *away),
        warnings=tuple(_said({name: one.warnings for name, one in found.items()})),
        feed=Feed(
            all(each.connected for each in feeds),
            min(each.position for each in feeds),
            max(each.head for each in feeds),
            max(each.held_s for each in feeds),
            min(each.fanned_out for each in feeds),
            max(each.lag_s for each in feeds),
        ),
        in_flight=sum(one.in_flight for one in every),
        rates=_together([one.rates for one in every]),
        states=summed(one.states for one in every),
        owed=summed(one.owed for one in every),
        owed_by_age=summed(one.owed_by_age for one in every),
        failing_by_age=summed(one.failing_by_age for one in every),
        quarantine_items=sum(one.quarantine_items for one in every),
        hour=_together_by_minute([one.hour for one in every]),
        page=joined_page(context, listing, rows, heard.without),
        without=heard.without,
    )


def _said(by_sender: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What each of them says, with its name if there are several."""
    for name, said in by_sender.items():
        yield from (each if len(by_sender) == 1 else f"{name}: {each}" for each in said)


T = TypeVar("T", Rates, Minute)


def _together(measured: Sequence[T | None]) -> T | None:
    """The numbers of all that were measured, summed up; times (`_ms`, `_s`) are the longest."""
    there = [each for each in measured if each is not None]
    if not there:
        return None
    values: dict[str, Any] = {}
    for each in fields(there[0]):
        numbers = [n for one in there if (n := getattr(one, each.name)) is not None]
        longest = each.name.endswith(("_ms", "over_s"))
        values[each.name] = (max(numbers) if longest else sum(numbers)) if numbers else None
    return replace(there[0], **values)


def _together_by_minute(hours: Sequence[Sequence[Minute]]) -> list[Minute]:
    """The last hour of several; each notes its minutes when it likes."""
    minutes = zip_longest(*(reversed(hour) for hour in hours))
    return [one for each in minutes if (one := _together(each)) is not None][::-1]


@question
async def overview_here(context: AdminContext, listing: Listing) -> tuple[Overview, Rows]:
    sender, config = context.sender, context.config
    reasons, status = tuple(problems(context)), context.feed.status()
    debts = {name: debt async for name, debt in sender.debts()}
    owed, owed_by_age = await _owed(context, debts)
    rows = await list_rows(context, listing, debts)
    # With 50,000 servers each of the looks at them all takes 100 ms.
    await trio.lowlevel.checkpoint()
    states = {each.value: number for each, number in sender.registry.counts().items()}
    await trio.lowlevel.checkpoint()
    failing = await _failing(context)
    found = Overview(
        version=version(),
        instance=config.instance_name,
        senders={config.instance_name: context.host},
        server_name=config.server_name,
        uptime_s=trio.current_time() - context.began,
        ready=not reasons,
        reasons=reasons,
        warnings=tuple(warnings_of(sender)),
        feed=Feed(
            status.connected,
            status.position,
            status.head,
            status.held_s,
            sender.fan_out.position,
            feed_lag_s(sender, status),
        ),
        in_flight=sender.context.admission.in_flight,
        rates=context.metrics.rates(),
        signing_keys=_signing_keys(context),
        states=states,
        owed=owed,
        owed_by_age=owed_by_age,
        failing_by_age=failing,
        quarantine_items=sender.quarantine_items,
        memory=_memory(context),
        hour=tuple(context.hour),
        page=rows.page,
    )
    return found, rows


def _signing_keys(context: AdminContext) -> tuple[str, ...]:
    feed = context.config.feed
    signs = feed.kind == "push" and feed.push.sign_events
    keys = context.keys.keys if signs else (context.keys.keys[0],)
    return tuple(key.key_id for key in keys)


def _memory(context: AdminContext) -> Memory:
    inner, config = context.sender.context, context.config
    return Memory(
        resident_bytes(),
        of_daemon(config.federation, config.sending).bytes,
        inner.pdu_pool.bytes,
        config.sending.window_bytes,
        inner.admission.bodies,
        inner.admission.in_flight_bytes,
    )


async def _owed(context: AdminContext, debts: Mapping[str, Debt]) -> tuple[Owed, dict[str, int]]:
    registry, now_ms = context.sender.registry, context.runtime.now_ms()
    sums, ages = Counter[str](), dict.fromkeys((name for name, _ in AGES), 0)
    async for server, debt in context.runtime.turns.with_breaks(debts.items()):
        sums["servers"] += 1
        sums["rooms"] += 0 if debt.counted else debt.rooms
        sums["events"] += debt.counted
        sums["redeliveries"] += 0 if debt.again is None else debt.again.events
        sums["keys"] += debt.owes_keys or registry.owes_keys(server)
        if debt.since_ms is not None:
            ages[age_class((now_ms - debt.since_ms) / 1000)] += 1
    return Owed(**sums), ages


async def _failing(context: AdminContext) -> dict[str, dict[str, int]]:
    registry, now_ms = context.sender.registry, context.runtime.now_ms()
    failing: defaultdict[str, Counter[str]] = defaultdict(Counter)
    async for name in context.runtime.turns.with_breaks(registry.failing()):
        state = registry.state_of(name)
        if state.failing_since_ms is not None:
            age = age_class((now_ms - state.failing_since_ms) / 1000)
            failing[state.outcome or "unknown"][age] += 1
    return {outcome: dict(found) for outcome, found in sorted(failing.items())}
