"""Why a destination is where it is: all that memory and both databases know, and one sentence."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedsender.admin.context import AdminContext
from fedsender.admin.destinations import held, next_attempt_ms, where_it_stands
from fedsender.admin.display import duration, many
from fedsender.admin.together import AWAY, ours, question
from fedsender.config.values import ServerName
from fedsender.http.server import Refusal
from fedsender.sender.context import Phase
from fedsender.sender.failure import RULES, Outcome, ServerState, standing_after, states_of
from fedsender.sender.sender import Status
from fedsender.sender.transaction import Debt
from fedsender.store.records import OwedRoom
from fedsender.telemetry import Standing

COUNTED = 1_000
"""Redeliveries are counted up to here."""
ROOMS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Depth:
    """How much waits, by kind.

    Attributes:
        events: that it is owed; 0: of some only their rooms are known.
        rooms: with an event that was not answered for; in the database.
        queued_pdus: in memory, ready to go.
        to_device: messages that wait in the homeserver's outbox.
        device_lists: changed devices and keys that wait there.
        ephemeral: receipts, typing, presence; in memory.
        redeliveries: events to be sent again.
        quarantined: items that were taken out of the way.
    """

    events: int
    rooms: int
    queued_pdus: int
    to_device: int
    device_lists: int
    ephemeral: int
    redeliveries: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class Oldest:
    """The oldest event that waits; `event_id` is null once the homeserver has purged it.

    Attributes:
        received_ts: when the homeserver received it; of a redelivery, when it was asked for,
            released or set aside.
    """

    event_id: str | None
    stream_ordering: int
    received_ts: int | None
    age_s: float | None


@dataclass(frozen=True, slots=True)
class LastError:
    """How the last attempt of a failing streak ended.

    Attributes:
        outcome: the class of the failure.
        meaning: the meaning of that class.
        reason: of this failure, in words.
    """

    outcome: str
    meaning: str
    reason: str
    failures: int
    failing_since_ts: int | None


@dataclass(frozen=True, slots=True)
class InFlight:
    """The frozen transaction: the next thing this server gets, unchanged.

    Attributes:
        pdus: null where only its stored record is at hand.
    """

    transaction_id: str
    attempts: int
    frozen_ts: int
    age_s: float
    pdus: int | None


@dataclass(frozen=True, slots=True)
class Shared:
    """The destination's row that the homeserver's other processes read, as stored."""

    retry_last_ts: int | None
    retry_interval: int | None
    failure_ts: int | None
    last_successful_stream_ordering: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that is not at its default, and the line of the configuration that set it."""

    field: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Why:
    """Everything about one destination; times (`_ts`) in milliseconds since the epoch.

    Attributes:
        state: where it stands, "not allowed" or "another sender's".
        doing: what its task does now, in words; null: that says no more, or it has none.
        since_ts: since when, where that is known.
        oldest_rooms: of the rooms of `depth` the 100 that have waited the longest.
        summary: all of it in one sentence.
        isolating: items per transaction while a poisonous one is looked for.
        given_up: events that it was owed and that were gone before they could be sent; the ledger
            names them.
        held: suspects, one sentence each: its record, and why it is still owed.
        paused_by: the operator who paused it, if known.
        paused_until_ts: when the pause ends by itself; null: by resume only.
        settings: the configuration of this server beyond the defaults.
    """

    destination: str
    state: str
    doing: str | None
    since_ts: int | None
    summary: str
    depth: Depth
    oldest: Oldest | None
    oldest_rooms: tuple[OwedRoom, ...]
    last_error: LastError | None
    last_attempt_ts: int | None
    last_success_ts: int | None
    next_attempt_ts: int | None
    in_flight: InFlight | None
    isolating: int | None
    given_up: int
    held: tuple[str, ...]
    paused: str | None
    paused_by: str | None
    paused_ts: int | None
    paused_until_ts: int | None
    parked: str | None
    shared_backoff: Shared | None
    allowed: bool
    handled_here: bool
    settings: tuple[Setting, ...]


async def explain(context: AdminContext, server: str) -> Why | None:
    """All that is known of this server; None: nothing.

    While its sender is away, that is what the databases know.
    """
    try:
        heard = await explain_here.ask(context, server, [server])
    except Refusal as refusal:
        if refusal.errcode != AWAY:
            raise
        return await explain_here.here(context, server)
    return heard.joined()


@question
async def explain_here(context: AdminContext, server: ServerName) -> Why | None:
    if not await context.sender.operations.is_known(server):
        return None
    await context.homeserver.write_marks(server)
    row = await context.homeserver.backoff(server)
    pending = await context.homeserver.pending_counts(server, ROOMS_SHOWN)
    redeliveries = len(await context.store.redeliveries(server, COUNTED))
    quarantined = await context.store.quarantined_of(server)
    in_flight = await _in_flight(context, server)
    debt = await context.sender.look_up_debt(server)
    oldest = None if debt is None else await _oldest(context, server, debt)
    # What memory says is taken last and at once, so that it fits together.
    status = context.sender.registry.status(server)
    active = context.sender.active.get(server)
    depth = Depth(
        events=0 if debt is None else debt.counted,
        rooms=pending.rooms,
        queued_pdus=status.queued if status is not None else 0,
        to_device=pending.to_device,
        device_lists=pending.device_lists,
        ephemeral=active.outbox.edus_waiting if active is not None else 0,
        redeliveries=redeliveries,
        quarantined=quarantined,
    )
    state = ServerState(server) if status is None else status.state
    if others := not ours(context, [server]):
        stored = await context.store.all_server_states()
        state = states_of({server: stored[server]})[server] if server in stored else state
    owed = bool(
        depth.rooms or depth.to_device or depth.device_lists or depth.redeliveries or in_flight
    )
    stands = where_it_stands(context, server, owed=owed)
    phase, doing = None if status is None else status.phase, None
    if phase not in (None, Phase.WAITING, Phase.IDLE, Phase.LEAVING):
        doing = None if phase.value == stands.replace("_", " ") else phase.value
    error = _last_error(state)
    next_ts = next_attempt_ms(context, server, status)
    now_ms = context.runtime.now_ms()
    waits = _waits(depth, oldest, in_flight)
    sentence = _sentence(stands, doing, state, waits, error, next_ts, now_ms)
    if stands == "another sender's":
        sender = context.config.sender_of(server)
        known = f", which is away. By the database: {sentence}" if others else "."
        sentence = f"The federation sender {sender} handles it{known}"
    return Why(
        destination=server,
        state=stands,
        doing=doing,
        since_ts=_since(context, status, now_ms),
        summary=" ".join((sentence, *held(state), *_given_up(state, now_ms))),
        depth=depth,
        oldest=oldest,
        oldest_rooms=pending.oldest_rooms,
        last_error=error,
        last_attempt_ts=state.last_attempt_ms,
        last_success_ts=state.last_success_ms,
        next_attempt_ts=next_ts,
        in_flight=in_flight,
        isolating=state.isolating,
        given_up=state.given_up,
        held=tuple(held(state)),
        paused=state.paused,
        paused_by=state.paused_by,
        paused_ts=state.paused_ms,
        paused_until_ts=state.paused_until_ms,
        parked=state.parked,
        shared_backoff=Shared(row.retry_last_ts, row.retry_interval, row.failure_ts, row.lsso)
        if row is not None
        else None,
        allowed=context.config.allows(server),
        handled_here=context.config.handles(server),
        settings=tuple(_settings(context, server)),
    )


def _since(context: AdminContext, status: Status | None, now_ms: int) -> int | None:
    if status is None:
        return None
    if status.state.paused:
        return status.state.paused_ms
    if status.state.parked:
        return None  # It is not on record.
    if status.state.failing_since_ms is not None:
        return status.state.failing_since_ms
    if status.destination in context.sender.active:
        return now_ms - int(status.for_s * 1000)
    return status.state.last_attempt_ms


def _settings(context: AdminContext, server: str) -> list[Setting]:
    return [
        Setting(line.field, line.text, line.source)
        for line in context.config.explain_policy(server)
        if line.source != "default"
    ]


def _last_error(state: ServerState) -> LastError | None:
    if state.outcome is None:
        return None
    try:
        meaning = RULES[Outcome(state.outcome)].meaning
    except (ValueError, KeyError):
        meaning = "a class of an earlier version"
    return LastError(
        state.outcome, meaning, state.reason or "", state.failures, state.failing_since_ms
    )


async def _in_flight(context: AdminContext, server: str) -> InFlight | None:
    now_ms = context.runtime.now_ms()
    active = context.sender.active.get(server)
    if active is not None and active.frozen is not None:
        frozen = active.frozen
        age = (now_ms - frozen.frozen_ms) / 1000
        return InFlight(frozen.id, frozen.attempts, frozen.frozen_ms, age, len(frozen.pdus))
    record = await context.store.load_frozen(server)
    if record is None:
        return None
    age = (now_ms - record.frozen_ms) / 1000
    return InFlight(record.transaction_id, record.attempts, record.frozen_ms, age, None)


async def _oldest(context: AdminContext, server: str, debt: Debt) -> Oldest | None:
    event_id, ordering, received = None, debt.oldest, debt.since_ms
    again = None
    if received != debt.oldest_ms:
        again = await context.store.oldest_redelivery(server)
    if again is not None:
        event_id, ordering = again.event_id, again.stream_ordering
    elif ordering is not None:
        rows = await context.homeserver.read_events(ordering - 1, ordering, 1)
        event_id = rows[0].event_id if rows else None
    if ordering is None:
        return None
    age = None if received is None else max(0.0, (context.runtime.now_ms() - received) / 1000)
    return Oldest(event_id, ordering, received, age)


def _sentence(
    stands: str,
    doing: str | None,
    state: ServerState,
    waits: str,
    error: LastError | None,
    next_ts: int | None,
    now_ms: int,
) -> str:
    """The summary in one sentence."""
    if stands == "not allowed":
        return f"The configuration forbids sending to it; {waits}."
    if state.paused is not None:
        left_s = state.pause_left_s(now_ms)
        until = "" if left_s is None else f" for another {duration(left_s)}"
        by = "" if state.paused_by is None else f" by {state.paused_by}"
        return f"Paused{until}{by}: {state.paused}; {waits}."
    if state.parked is not None:
        return f"Parked: {state.parked}; {waits}."
    if error is not None:
        since = duration((now_ms - (error.failing_since_ts or now_ms)) / 1000)
        if doing is not None:
            when = f"a try is under way: {doing}"
        elif next_ts is None:
            when = "no timer is set for the next try"
        else:
            when = f"next try in {duration((next_ts - now_ms) / 1000)}"
        what = standing_after(error.outcome).capitalize()
        return f"{what} for {since}: {error.reason or error.meaning}; {waits}; {when}."
    if stands == Standing.LEVEL and waits == "nothing waits":
        return f"Up to date{_answered(state, now_ms)}."
    what = doing or stands.replace("_", " ")
    return f"It is {what}{_answered(state, now_ms)}; {waits}."


def _given_up(state: ServerState, now_ms: int) -> Iterator[str]:
    """What it was owed and cannot get any more."""
    if state.given_up_ms is not None:
        ago = duration((now_ms - state.given_up_ms) / 1000)
        events = many(state.given_up, "owed event")
        yield (
            f"{events} could not be sent any more, the last {ago} ago:"
            " see the lines `dropped` of the ledger."
        )


def _answered(state: ServerState, now_ms: int) -> str:
    if state.last_success_ms is None:
        return ""
    return f", last answered {duration((now_ms - state.last_success_ms) / 1000)} ago"


def _waits(depth: Depth, oldest: Oldest | None, in_flight: InFlight | None) -> str:
    counted = [(depth.events, "event"), (depth.rooms, "room")]
    events = " in ".join(_counted(number, thing) for number, thing in counted if number)
    kinds = [
        (0 if depth.events else depth.queued_pdus, "queued event"),
        (depth.to_device, "to-device message"),
        (depth.device_lists, "device change"),
        (depth.redeliveries, "redelivery"),
        (depth.quarantined, "quarantined item"),
    ]
    said = [events] * bool(events)
    said += [_counted(number, thing) for number, thing in kinds if number]
    if not said and in_flight is not None:
        said = ["1 frozen transaction"]
    if not said:
        return "nothing waits"
    age = ""
    if oldest is not None and oldest.age_s is not None:
        age = f", the oldest event for {duration(oldest.age_s)}"
    return f"waiting: {', '.join(said)}{age}"


def _counted(number: int, thing: str) -> str:
    if thing == "redelivery":
        return "1 redelivery" if number == 1 else f"{number:,} redeliveries"
    return many(number, thing)
