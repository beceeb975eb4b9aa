"""Our own endpoints: wake, look, hold, forget, send again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from fedsender.admin.attempts import MAX_ATTEMPTS, Attempt, Attempts, read_attempts
from fedsender.admin.bodies import (
    MAX_INTEGER,
    EventId,
    InQuarantine,
    Pairs,
    Pause,
    Purge,
    Reach,
    Servers,
    ServersWithReason,
    Since,
    Skip,
)
from fedsender.admin.client import PREFIX
from fedsender.admin.context import AdminContext
from fedsender.admin.destinations import (
    By,
    Groups,
    Listing,
    Page,
    Sort,
    chosen,
    groups,
    list_page,
    matching,
)
from fedsender.admin.display import many
from fedsender.admin.overview import Overview, overview
from fedsender.admin.together import Joint, order, ours, question, summed
from fedsender.admin.trace import Trace, trace
from fedsender.admin.why import Why, explain
from fedsender.config.values import ServerName, ServerPattern
from fedsender.http.application import DESCRIBED, Error
from fedsender.http.outcomes import MAX_OUTCOMES, After, OutcomesPage, WaitS, answer_outcomes
from fedsender.http.outcomes import Limit as OutcomesLimit
from fedsender.http.server import Refusal, not_found
from fedsender.sender.operations import UNKNOWN, Freed, NotSent
from fedsender.store.records import Quarantined
from fedsender.telemetry import Standing

log = structlog.get_logger()

MAX_PAGE = 1_000
SHARED_ROOMS_SHOWN = 100

router = APIRouter(
    prefix=PREFIX,
    tags=["fedsender"],
    dependencies=DESCRIBED,
    responses={status: {"model": Error} for status in (400, 401, 403, 404, 413, 503)},
)

# `without` is there only if it says something.
post = partial(router.post, response_model_exclude_defaults=True)
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Entries on a page, at most.")]


# --- waking ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Woken(Joint):
    """The servers that will be tried now; and those that will not, each with the reason."""

    woken: list[str]
    left_alone: dict[str, str]


@order
async def wake_ours(context: AdminContext, request: Servers) -> Woken:
    if request.servers is not None:
        asked = ours(context, list(dict.fromkeys(request.servers)))
    else:
        asked = await matching(context, request.pattern or "", context.sender.registry.names())
    left = await context.sender.operations.wake(asked)
    return Woken([server for server in asked if server not in left], left)


@post("/notify_remote_server_up", summary="Try these servers now")
async def notify_remote_server_up(request: Servers, context: Reach) -> Woken:
    """An admin's wake is never refused for having come too often. A server that is owed nothing
    needs none: it gets the next event at once."""
    return (await wake_ours.ask(context, request, request.servers)).joined()


# --- looking --------------------------------------------------------------------------------------


# Async, or FastAPI would go through a thread for it.
async def _listing(
    behind: Annotated[bool, Query(description="Only those that are owed something.")] = False,
    state: Annotated[Standing | None, Query(description="Only those in this state.")] = None,
    sort: Annotated[
        Sort, Query(description="name; or first the most rooms, the oldest, the longest failing.")
    ] = "name",
    after: Annotated[
        str, Query(alias="from", max_length=300, description="`next_from` of the last page.")
    ] = "",
    limit: Limit = 100,
    pattern: Annotated[ServerPattern, Query(description="A name or a pattern with * and ?.")] = "*",
    since: Annotated[
        int,
        Query(
            ge=0,
            le=MAX_INTEGER,
            description="Only those that began to fail then or later; milliseconds since the epoch."
            " With `fails` the latest is first.",
        ),
    ] = 0,
) -> Listing:
    return Listing(behind, state, sort, after, limit, pattern, since)


Listed = Annotated[Listing, Depends(_listing)]


@router.get("/destinations", summary="The destinations, in pages")
async def destinations(context: Reach, listing: Listed) -> Page:
    return await list_page(context, listing)


@router.get("/groups", summary="The servers by site, or by address; most failing first")
async def groups_of_servers(
    context: Reach,
    by: Annotated[By, Query(description="The site of their names, or their IP addresses.")],
    pattern: Annotated[ServerPattern, Query(description="A name or a pattern with * and ?.")] = "*",
    limit: Limit = 100,
) -> Groups:
    return await groups(context, by, pattern, limit)


@router.get("/overview", summary="The daemon at a glance, with a page of destinations")
async def overview_of_all(context: Reach, listing: Listed) -> Overview:
    return await overview(context, listing)


@router.get("/destinations/{server:path}", summary="One destination; the same as why/{server}")
@router.get("/why/{server:path}", summary="Why a destination is where it is")
async def why(server: ServerName, context: Reach) -> Why:
    found = await explain(context, server)
    if found is None:
        refusal = context.sender.registry.refusal(server) if ours(context, [server]) else None
        raise not_found(f"{server}: {refusal or UNKNOWN}")
    return found


@router.get("/trace/{event_id:path}", summary="What became of an event at every server")
async def trace_event(event_id: EventId, context: Reach) -> Trace:
    found = await trace(context, event_id)
    if found is None:
        raise not_found("the homeserver has no such event")
    return found


@router.get("/attempts/{server:path}", summary="The attempts at a server, newest last")
async def attempts(
    server: ServerName,
    context: Reach,
    since: Annotated[
        int, Query(ge=0, le=MAX_INTEGER, description="No older ones; milliseconds since the epoch.")
    ] = 0,
    failed: Annotated[bool, Query(description="Only those that failed.")] = False,
    limit: Annotated[int, Query(ge=1, le=MAX_ATTEMPTS, description="The newest ones.")] = 100,
) -> Attempts:
    """From the ledgers of all senders, also of one that sent to it before their list changed."""
    heard = await attempts_here.ask(context, AttemptsAsked(server, since, failed, limit))
    found = sorted((one for each in heard.answers.values() for one in each.attempts), key=_ended)
    cuts = [each.cut for each in heard.answers.values() if each.cut is not None]
    ledgers = summed(each.ledgers for each in heard.answers.values())
    return Attempts(
        server,
        tuple(found[-limit:]),
        cuts[0] if cuts else None,
        ledgers=ledgers,
        without=heard.without,
    )


def _ended(attempt: Attempt) -> int:
    return attempt.at_ts


@dataclass(frozen=True, slots=True)
class AttemptsAsked:
    """The attempts that are asked for, as `attempts` has them."""

    server: ServerName
    since: int
    failed: bool
    limit: int


@question
async def attempts_here(context: AdminContext, asked: AttemptsAsked) -> Attempts:
    read = partial(
        read_attempts,
        context.config.ledger.directory,
        asked.server,
        since_ms=asked.since,
        failed=asked.failed,
        limit=asked.limit,
    )
    try:
        found = await context.runtime.run_sync(read, limiter=context.ledger_reading)
    except OSError as error:
        raise Refusal(503, "M_UNKNOWN", f"the ledger cannot be read: {error}") from None
    several = len(context.senders) > 1
    has = {context.config.instance_name: context.host} if several and found.attempts else {}
    return replace(found, ledgers=has)


@router.get(
    "/outcomes", summary="What became of events at each server", response_model=OutcomesPage
)
async def outcomes(
    context: Reach, after: After = "", limit: OutcomesLimit = MAX_OUTCOMES, wait_s: WaitS = 0.0
) -> Response:
    """`{"outcomes": [{"event_id", "token", "server", "outcome", "ms", "transaction_id", "reason",
    "supersedes"}], "cursor": "..."}`, in the order of the ledger: an entry for each attempt and
    event, and for each event that went into quarantine or was dropped. `token` is the event's
    stream ordering.

    410 FEDSENDER_GAP: the ledger is not kept back to `after`; `oldest` is where it begins now. 503
    FEDSENDER_BUSY: too many readers.
    """
    return await answer_outcomes(context.outcomes, after, limit, wait_s)


# --- quarantine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """Something that was taken out of the way. An EDU's content is never shown.

    Attributes:
        destination: null: an event that no server got.
        kind: pdu, or the EDU's type.
    """

    id: int
    destination: str | None
    kind: str
    event_id: str | None
    room_id: str | None
    stream_ordering: int | None
    reason: str
    at_ts: int


@dataclass(frozen=True, slots=True)
class Items:
    """A page of the quarantine, oldest first; `next_from` is null on the last one."""

    items: list[Item]
    next_from: int | None


@dataclass(frozen=True, slots=True)
class Released(Joint):
    """Items that left the quarantine to be sent again; and those that will not be sent.

    Attributes:
        dropped: with a room: those that the homeserver does not have any more. They are given up.
        refused: the events of those that were dropped or kept, and why.
        more: with a room: others wait for the same request again.
    """

    released: list[int]
    dropped: list[int]
    kept: list[int]
    refused: list[NotSent]
    more: bool


@dataclass(frozen=True, slots=True)
class Dropped(Joint):
    """Items that were given up for good.

    Attributes:
        more: with a room: others wait for the same request again.
    """

    dropped: list[int]
    more: bool


@router.get("/quarantine", summary="What was taken out of the way, in pages")
async def quarantine(
    context: Reach,
    destination: Annotated[ServerName | None, Query(description="Of this server only.")] = None,
    after: Annotated[
        int, Query(alias="from", ge=0, le=MAX_INTEGER, description="`next_from` of the last page.")
    ] = 0,
    limit: Limit = 100,
) -> Items:
    """An event that no server got has one entry, also if several senders hold it."""
    found = await context.store.quarantine_page(destination, limit + 1, after)
    page = [_item(item) for item in found[:limit]]
    return Items(page, page[-1].id if len(found) > limit else None)


def _item(item: Quarantined) -> Item:
    return Item(
        id=item.id,
        destination=item.destination,
        kind=item.kind,
        event_id=item.event_id,
        room_id=item.room_id,
        stream_ordering=item.stream_ordering,
        reason=item.reason,
        at_ts=item.at_ms,
    )


@dataclass(frozen=True, slots=True)
class InHand:
    """Items of the quarantine.

    Attributes:
        ids: of those of a server.
        events: that no server got: each sender holds them under ids of its own.
    """

    ids: list[int]
    events: list[str]


async def _present(
    context: AdminContext, ids: Sequence[int]
) -> tuple[list[Quarantined], InHand, list[str] | None]:
    """The items with these ids, and the servers they are of (None: all); all of them in
    quarantine, or the request is refused."""
    found = await context.store.quarantined_anywhere(ids)
    missing = sorted(set(ids) - {item.id for item in found})
    if missing:
        raise not_found(f"not in quarantine: {', '.join(map(str, missing[:20]))}")
    of_nobody = [item for item in found if item.destination is None]
    await _all_have_come_to(context, [item.stream_ordering for item in of_nobody])
    events = [str(item.event_id) for item in of_nobody]
    servers = [item.destination for item in found if item.destination is not None]
    in_hand = InHand([item.id for item in found if item.destination is not None], events)
    return found, in_hand, None if events else servers


@question
async def yet_to_come_to(context: AdminContext, events: tuple[int, int]) -> list[str]:
    """Our name, if we have yet to come to some of the events from the first to the last of these
    tokens."""
    past = context.sender.fan_out.has_come_to(*events)
    return [] if past else [context.config.instance_name]


async def _all_have_come_to(context: AdminContext, tokens: Iterable[int | None]) -> None:
    """Refuse the request unless all senders are there, and have come to these events, which no
    server got. Whoever comes to one later would hold it back, whatever was said before; and what
    waits for a sender that is away would be done for servers of others as well, by who has its
    servers next."""
    known = [token for token in tokens if token is not None]
    if not known:
        return
    heard = await yet_to_come_to.ask(context, (min(known), max(known)))
    missing = [f"{name} has yet to come to it" for name in heard.joined()]
    missing += heard.without.values()
    if missing:
        text = f"{', '.join(missing)}: wait, or take it out of the list of senders"
        raise Refusal(409, "FEDSENDER_BEHIND", text)


async def _all_have_come_to_room(context: AdminContext, room_id: str) -> None:
    """The same for the event that blocks this room."""
    await _all_have_come_to(context, [await context.store.blocked_from(room_id)])


async def _left(context: AdminContext, items: Sequence[Quarantined]) -> list[int]:
    """The ids of those of these items that are in quarantine still, at any sender."""
    ids = [item.id for item in items if item.destination is not None]
    events = [str(item.event_id) for item in items if item.destination is None]
    left = await context.store.still_quarantined(ids, events)
    return [item.id for item in items if (item.id if item.destination else item.event_id) in left]


async def _held(context: AdminContext, items: InHand) -> list[int]:
    """The ids of those of these items that are ours."""
    held = await context.store.quarantined(items.ids, items.events)
    return [
        item.id for item in held if item.destination is None or context.handles(item.destination)
    ]


@order
async def release_ours(context: AdminContext, items: InHand) -> list[NotSent]:
    return await context.sender.operations.release(await _held(context, items))


@order
async def release_room_here(context: AdminContext, room_id: str) -> Released:
    freed = _blocking(await context.sender.operations.release_room(room_id))
    log.info(
        "room_released",
        room=room_id,
        count=len(freed.released),
        dropped=freed.dropped,
        kept=freed.kept,
    )
    refusals = list(freed.refused)
    return Released([*freed.released], [*freed.dropped], [*freed.kept], refusals, freed.more)


@order
async def drop_ours(context: AdminContext, items: InHand) -> list[int]:
    held = await _held(context, items)
    await context.sender.operations.drop(held)
    return held


@order
async def drop_room_here(context: AdminContext, room_id: str) -> Dropped:
    freed = _blocking(await context.sender.operations.drop_room(room_id))
    log.info("room_dropped", room=room_id, count=len(freed.dropped))
    return Dropped([*freed.dropped], freed.more)


def _blocking(freed: Freed) -> Freed:
    """What was freed; the request is refused if no event blocks the room."""
    if not (freed.released or freed.dropped or freed.kept):
        raise not_found("no event blocks this room: none is in quarantine for all servers")
    return freed


@post("/quarantine/release", summary="Send quarantined PDUs after all")
async def release(request: InQuarantine, context: Reach) -> Released:
    """They go through the redelivery lane. Items that still cannot be sent, and EDUs, stay.
    A room's events are released in order, up to one that still cannot be sent; those that the
    homeserver does not have any more are given up."""
    if request.room_id is not None:
        await _all_have_come_to_room(context, request.room_id)
        return (await release_room_here.ask(context, request.room_id)).joined()
    assert request.ids is not None
    items, in_hand, servers = await _present(context, request.ids)
    heard = await release_ours.ask(context, in_hand, servers)
    refused, kept = list(dict.fromkeys(heard.joined())), await _left(context, items)
    released = [item.id for item in items if item.id not in kept]
    log.info("quarantine_released", released=released[:20], kept=kept[:20])
    return Released(released, [], kept, refused, more=False, without=heard.without)


@post("/quarantine/drop", summary="Give quarantined items up for good")
async def drop(request: InQuarantine, context: Reach) -> Dropped:
    if request.room_id is not None:
        await _all_have_come_to_room(context, request.room_id)
        return (await drop_room_here.ask(context, request.room_id)).joined()
    assert request.ids is not None
    items, in_hand, servers = await _present(context, request.ids)
    heard = await drop_ours.ask(context, in_hand, servers)
    kept = await _left(context, items)
    ids = [item.id for item in items if item.id not in kept]
    log.info("quarantine_dropped", dropped=ids[:20], count=len(ids))
    return Dropped(ids, more=False, without=heard.without)


@dataclass(frozen=True, slots=True)
class Skipped(Joint):
    """The event that was passed over, and the position of the fan-out."""

    token: int
    event_id: str
    room_id: str
    stood_at: str


@order
async def skip_here(context: AdminContext, request: Skip) -> Skipped:
    skipped = await context.sender.fan_out.skip(request.token)
    if skipped is None:
        stands = context.sender.fan_out.standstill
        now = stands or f"it is past token {context.sender.fan_out.position} and goes on"
        text = f"the fan-out does not stand at token {request.token}: {now}"
        raise Refusal(409, "FEDSENDER_NOT_STANDING", text)
    event = skipped.event
    log.warning(
        "event_skipped", token=request.token, event_id=event.event_id, stood_at=str(skipped)
    )
    return Skipped(request.token, event.event_id, event.room_id, str(skipped))


@post(
    "/skip",
    summary="Pass over the event that the fan-out stands at",
    responses={409: {"description": "The fan-out does not stand at this one; nothing was done."}},
)
async def skip(request: Skip, context: Reach) -> Skipped:
    """It goes to quarantine, with its content and with all later events of its room."""
    answers = (await skip_here.ask(context, request)).answers
    return next(iter(answers.values()))


# --- holding --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held(Joint):
    """The servers that are now as was asked."""

    servers: list[str]


@order
async def pause_ours(context: AdminContext, request: Pause) -> Held:
    servers = await chosen(context, request)
    await context.sender.operations.pause(
        servers, request.reason, by=request.by, for_ms=request.for_ms
    )
    log.info(
        "servers_paused",
        servers=servers[:20],
        count=len(servers),
        reason=request.reason,
        by=request.by,
        for_ms=request.for_ms,
    )
    return Held(servers)


@order
async def park_ours(context: AdminContext, request: ServersWithReason) -> Held:
    servers = await chosen(context, request)
    await context.sender.operations.park(servers, request.reason)
    log.info("servers_parked", servers=servers[:20], count=len(servers), reason=request.reason)
    return Held(servers)


@order
async def resume_ours(context: AdminContext, request: Servers) -> Held:
    servers = await chosen(context, request)
    await context.sender.operations.hold(*servers, paused=None, parked=None)
    log.info("servers_resumed", servers=servers[:20], count=len(servers))
    return Held(servers)


@post("/pause", summary="Send nothing to these servers for now")
async def pause(request: Pause, context: Reach) -> Held:
    """Their backlog is kept. `resume` sends it, or the end of the pause. Survives restarts."""
    return (await pause_ours.ask(context, request, request.servers)).joined()


@post("/park", summary="Give these servers up until somebody says otherwise")
async def park(request: ServersWithReason, context: Reach) -> Held:
    """As pausing, for servers that are believed to be gone: the first step before a purge."""
    return (await park_ours.ask(context, request, request.servers)).joined()


@post("/resume", summary="Undo pause and park")
async def resume(request: Servers, context: Reach) -> Held:
    return (await resume_ours.ask(context, request, request.servers)).joined()


# --- forgetting, sending again --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Purged:
    """The server that is forgotten."""

    purged: str


@order
async def purge_ours(context: AdminContext, request: Purge) -> Purged:
    known = ours(context, [request.server])
    if not known or not await context.sender.operations.is_known(request.server):
        raise not_found(f"{request.server}: {UNKNOWN}")
    rooms = await context.sender.operations.purge(request.server, force=request.force)
    if rooms:
        more = {"rooms": sorted(rooms)[:SHARED_ROOMS_SHOWN], "rooms_total": len(rooms)}
        text = f"{many(len(rooms), 'room')} shared with it, whose events it would miss"
        raise Refusal(409, "FEDSENDER_ROOMS_SHARED", text, more)
    log.warning("server_purged", destination=request.server, forced=request.force)
    return Purged(request.server)


@post(
    "/purge",
    summary="Forget a server and all it is owed",
    responses={409: {"description": "Rooms are shared with it; `rooms` names some of them."}},
)
async def purge(request: Purge, context: Reach) -> Purged:
    return (await purge_ours.ask(context, request, [request.server])).joined()


@dataclass(frozen=True, slots=True)
class Redelivered(Joint):
    """How many pairs were accepted, durably; and those that were not."""

    accepted: int
    refused: list[NotSent]


@order
async def redeliver_ours(context: AdminContext, request: Pairs) -> Redelivered:
    servers = set(ours(context, [server for server, _ in request.pairs]))
    pairs = [each for each in dict.fromkeys(request.pairs) if each[0] in servers]
    refused = await context.sender.operations.redeliver(pairs)
    return Redelivered(len(pairs) - len(refused), refused)


@post("/redeliver", summary="Send these events to these servers again")
async def redeliver(request: Pairs, context: Reach) -> Redelivered:
    """Only to servers that may see the event. In a room their order is kept."""
    servers = {server for server, _ in request.pairs}
    return (await redeliver_ours.ask(context, request, servers)).joined()


@dataclass(frozen=True, slots=True)
class SentAgain:
    """An event that goes to the server again."""

    event_id: str
    room_id: str
    stream_ordering: int
    received_ts: int | None


@dataclass(frozen=True, slots=True)
class Part:
    """Events of one part of the events stream.

    Attributes:
        upto, next_after: for the request of the next part; `next_after` null: this was the last.
    """

    events: list[SentAgain]
    upto: int
    next_after: int | None


@post("/redeliver_since", summary="Send a server again what it got since a time, in parts")
async def redeliver_since(request: Since, context: Reach) -> Part:
    """One request reads 500 events of the homeserver. Events in quarantine stay there."""
    return (await redeliver_part.ask(context, request, [request.server])).joined()


@question  # Of an order that waits nobody would hear where the next one begins.
async def redeliver_part(context: AdminContext, request: Since) -> Part:
    if not await context.sender.operations.is_known(request.server):
        raise not_found(f"{request.server}: {UNKNOWN}")
    found = await context.sender.operations.redeliver_since(
        request.server,
        request.since_ts,
        after=request.after,
        upto=request.upto,
        dry_run=request.dry_run,
    )
    if not request.dry_run:
        log.info(
            "redelivery_requested",
            destination=request.server,
            count=len(found.events),
            upto=found.upto,
        )
    events = [
        SentAgain(
            each.pdu.event_id, each.pdu.room_id, each.pdu.stream_ordering, each.pdu.received_ms
        )
        for each in found.events
    ]
    return Part(events, found.upto, found.next_after)
