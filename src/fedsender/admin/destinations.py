"""The destinations as an operator lists and names them."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedsender.admin.bodies import MAX_SERVERS, Servers, bad_param, not_found
from fedsender.admin.context import AdminContext
from fedsender.matrix import matches
from fedsender.sender.failure import ServerState
from fedsender.sender.sender import Status
from fedsender.store.records import Lagging

ROWS = 1_000
"""Rows of the destinations table that are read at once."""
UNKNOWN = "not a server that we know of"


@dataclass(frozen=True, slots=True)
class Summary:
    """One destination in a list; times in milliseconds since the epoch.

    Attributes:
        state: its activity, in words.
        behind: whether it is owed anything.
        rooms_owed: rooms with an event that it has not answered for.
        owes_keys: to-device messages or device lists wait.
        oldest_owed_s: seconds since the homeserver received the oldest event that stands for such
            a room.
    """

    destination: str
    state: str
    behind: bool
    rooms_owed: int
    owes_keys: bool
    oldest_owed_s: float | None
    queued_pdus: int
    failures: int
    failing_since_ts: int | None
    failing_for_s: float | None
    last_success_ts: int | None
    next_attempt_ts: int | None
    next_attempt_in_s: float | None
    last_error: str | None
    reason: str | None
    paused: str | None
    parked: str | None


@dataclass(frozen=True, slots=True)
class Page:
    """Destinations by name.

    Attributes:
        total: on all pages.
        next_from: the `from` of the next page; null: this was the last page.
    """

    destinations: tuple[Summary, ...]
    total: int
    next_from: str | None


async def is_known(context: AdminContext, server: str) -> bool:
    """Whether any record shows that an item was ever to be sent to this server."""
    if context.sender.registry.status(server) is not None:
        return True
    return await context.homeserver.backoff(server) is not None


async def known_names(context: AdminContext, pattern: str) -> list[str]:
    """Every server that we know of and `pattern` covers, by name."""
    names = set(context.sender.registry.known("*"))
    start, more = 0, True
    while more:
        page = await context.homeserver.destinations_page(start, ROWS)
        names.update(row.destination for row in page.rows)
        start += ROWS
        more = start < page.total
    return sorted(name for name in names if matches(pattern, name))


async def chosen(context: AdminContext, request: Servers) -> list[str]:
    """The servers that a request names; all of them known, and each once.

    Raises:
        Refusal: one of them is not known, or the pattern covers too many.
    """
    if request.servers is None:
        names = await known_names(context, request.pattern or "")
        if not names:
            raise not_found("the pattern covers no server that we know of")
        if len(names) > MAX_SERVERS:
            raise bad_param(f"the pattern covers {len(names)} servers, more than {MAX_SERVERS}")
        return names
    for server in request.servers:
        if not await is_known(context, server):
            raise not_found(f"{server}: {UNKNOWN}")
    return list(dict.fromkeys(request.servers))


async def list_page(
    context: AdminContext, *, behind: bool, after: str, limit: int, pattern: str
) -> Page:
    """Up to `limit` destinations with names behind `after`."""
    lagging = {lag.destination: lag for lag in await context.homeserver.lagging()}
    owed = {
        *lagging,
        *await context.store.destinations_with_redeliveries(),
        *await context.store.frozen_destinations(),
    }
    if behind:
        names = sorted(name for name in owed if matches(pattern, name))
    else:
        names = await known_names(context, pattern)
        names = sorted({*names, *(name for name in owed if matches(pattern, name))})
    shown = [name for name in names if name > after][: limit + 1]
    rows = [
        await _summary(context, name, lagging.get(name), name in owed) for name in shown[:limit]
    ]
    return Page(tuple(rows), len(names), shown[limit - 1] if len(shown) > limit else None)


async def _summary(context: AdminContext, name: str, lag: Lagging | None, owed: bool) -> Summary:
    oldest = None
    if lag is not None:
        oldest = (await context.homeserver.pending_counts(name)).oldest_received_ts
    status = context.sender.registry.status(name)
    state = ServerState(name) if status is None else status.state
    next_ms = next_attempt_ms(context, name, status)
    now_ms = context.runtime.now_ms()
    return Summary(
        destination=name,
        state=state_in_words(context, name, status, owed=owed),
        behind=owed,
        rooms_owed=lag.rooms if lag is not None else 0,
        owes_keys=lag is not None and lag.owes_keys,
        oldest_owed_s=None if oldest is None else max(0.0, (now_ms - oldest) / 1000),
        queued_pdus=status.queued if status is not None else 0,
        failures=state.failures,
        failing_since_ts=state.failing_since_ms,
        failing_for_s=None
        if state.failing_since_ms is None
        else (now_ms - state.failing_since_ms) / 1000,
        last_success_ts=state.last_success_ms,
        next_attempt_ts=next_ms,
        next_attempt_in_s=None if next_ms is None else (next_ms - now_ms) / 1000,
        last_error=state.outcome,
        reason=state.reason,
        paused=state.paused,
        parked=state.parked,
    )


def state_in_words(context: AdminContext, name: str, status: Status | None, *, owed: bool) -> str:
    """The activity of a destination, in one or a few words."""
    if not context.config.allows(name):
        return "not allowed"
    if not context.config.handles(name):
        return "another sender's"
    phase = "level" if status is None else status.phase
    if owed and phase in ("level", "idle"):
        # Its task has not looked yet, or its turn after a start has not come.
        phase = "waiting"
    if phase == "waiting" and status is not None and status.state.failing_since_ms is not None:
        return "waiting after a failure"
    return phase


def next_attempt_ms(context: AdminContext, name: str, status: Status | None) -> int | None:
    """When our own timer tries again; None: nothing is waiting for it, or nothing may be sent."""
    if status is None or status.retry_in_s is None or (status.level and status.state.healthy):
        return None
    if status.state.paused is not None or status.state.parked is not None:
        return None
    if not (context.config.allows(name) and context.config.handles(name)):
        return None
    return context.runtime.now_ms() + int(status.retry_in_s * 1000)


async def left_alone_because(context: AdminContext, server: str) -> str:
    """Why a wake of this server does nothing; or why nothing is known of it."""
    if not context.config.allows(server):
        return "the configuration forbids sending to it"
    if not context.config.handles(server):
        return "another federation sender handles it"
    status = context.sender.registry.status(server)
    if status is not None and status.state.paused is not None:
        return f"paused: {status.state.paused}"
    if status is not None and status.state.parked is not None:
        return f"parked: {status.state.parked}"
    if not await is_known(context, server):
        return UNKNOWN
    return "nothing is owed to it"


async def left_alone(
    context: AdminContext, asked: Sequence[str], woken: Sequence[str]
) -> dict[str, str]:
    """Those that were asked for and not woken, each with the reason."""
    done = set(woken)
    return {each: await left_alone_because(context, each) for each in asked if each not in done}
