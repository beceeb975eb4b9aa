"""The destinations as an operator lists and names them."""

import heapq
import operator
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import trio

from fedsender.admin.bodies import MAX_SERVERS, Servers
from fedsender.admin.context import AdminContext
from fedsender.admin.display import AGES, duration, many
from fedsender.admin.together import Joint, ours, question
from fedsender.fairness import site_of
from fedsender.federation.dialing import Unreachable
from fedsender.http.server import bad_param, not_found
from fedsender.matrix import matches
from fedsender.sender.admission import SLOW_S
from fedsender.sender.context import Phase
from fedsender.sender.failure import ServerState
from fedsender.sender.isolation import Kind
from fedsender.sender.operations import UNKNOWN
from fedsender.sender.sender import Status
from fedsender.sender.transaction import Debt
from fedsender.telemetry import Standing

ROWS = 1_000
"""Rows of the destinations table that are read at once."""
_NUMBER: Final = re.compile("0*([0-9]{1,18})")
LAST: Final = 2.0**63
"""A sort key behind all others. Not infinity: keys pass between senders as JSON."""
AGE_ENDS: Final = [end_s for _, end_s in AGES]


By = Literal["site", "address"]
"""What servers of one group share: the part of their names that somebody registered, or the IP."""
Sort = Literal["name", "owed", "age", "fails"]
"""The order of a list: by name, as people count; or the most rooms, the oldest event, the longest
failure first. Of those that fail since a moment, the latest to begin is first."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One destination in a list; times in milliseconds since the epoch.

    Attributes:
        state: where it stands, "not allowed" or "another sender's".
        behind: whether it is owed anything.
        rooms_owed: rooms with an event that it had not answered for at the last sweep; null: it
            has fallen behind since.
        events_owed: events that it is owed; 0: only their rooms are known.
        redeliveries: events to be sent again, released from quarantine, or set aside.
        owes_keys: to-device messages or device lists wait, as far as memory knows.
        oldest_owed_s: seconds since the homeserver received the oldest event that it is owed; or
            since the oldest redelivery was asked for, released or set aside, if that is longer.
        in_flight: the id of the frozen transaction, if there is one in memory.
        reason: why it fails, what is held back, or that it takes long.
    """

    destination: str
    state: str
    behind: bool
    rooms_owed: int | None
    events_owed: int
    redeliveries: int
    owes_keys: bool
    oldest_owed_s: float | None
    queued_pdus: int
    in_flight: str | None
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
class Page(Joint):
    """Destinations in the order that was asked for.

    Attributes:
        total: on all pages.
        behind: servers that are owed anything, of all that the pattern covers.
        known: servers with a record, or with items to send; of the same.
        counted_s: seconds since rooms were counted.
        next_from: the `from` of the next page; null: this was the last page.
    """

    destinations: tuple[Summary, ...]
    total: int
    behind: int
    known: int
    counted_s: float
    next_from: str | None


@dataclass(frozen=True, slots=True)
class Rows:
    """The page of one sender.

    Attributes:
        keys: of its rows, the sort keys before the name.
    """

    page: Page
    keys: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Listing:
    """A list as it is asked for.

    Attributes:
        after: the `from` of this page: a name, or the number of those before it of each sender;
            "": the first.
        state: only those in this state; null: all.
        since: only those whose failures began at this time (ms since the epoch) or later.
    """

    behind: bool = False
    state: Standing | None = None
    sort: Sort = "name"
    after: str = ""
    limit: int = 100
    pattern: str = "*"
    since: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Servers that have something in common.

    Attributes:
        name: the site, an address, or "-": the address is not known at this moment.
        failing: servers whose last attempt failed.
        behind: servers that are owed anything.
    """

    name: str
    servers: int
    failing: int
    behind: int


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of servers.

    Attributes:
        total: with those that are left out.
    """

    groups: Sequence[Group]
    total: int


async def groups(context: AdminContext, by: By, pattern: str, limit: int) -> Groups:
    """The servers with a record, or with items to send, that `pattern` covers; the groups with the
    most failing servers first, then those with the most behind."""
    heard = (await groups_here.ask(context, (by, pattern))).joined()
    found: dict[str, tuple[int, ...]] = {}
    async for name, *numbers in context.runtime.turns.with_breaks(heard):
        known = found.get(name, (0, 0, 0))
        found[name] = tuple(map(operator.add, known, numbers))
    order = ((-failing, -behind, name) for name, (_, failing, behind) in found.items())
    first = [name for *_, name in heapq.nsmallest(limit, order)]
    return Groups([Group(name, *found[name]) for name in first], len(found))


@question
async def groups_here(
    context: AdminContext, asked: tuple[By, str]
) -> list[tuple[str, int, int, int]]:
    """The fields of each `Group`: there may be 50,000, and names of fields would cost as much."""
    by, pattern = asked
    registry = context.sender.registry
    debts = {name: debt async for name, debt in context.sender.debts()}
    servers, failing, behind = Counter[str](), Counter[str](), Counter[str]()
    fails = frozenset(registry.failing())
    async for name in context.runtime.turns.with_breaks(registry.names()):
        if matches(pattern, name):
            for group in [site_of(name)] if by == "site" else _addresses(context, name):
                servers[group] += 1
                failing[group] += name in fails
                behind[group] += name in debts
    return [(name, number, failing[name], behind[name]) for name, number in servers.items()]


def _addresses(context: AdminContext, name: str) -> list[str]:
    """The addresses of a server; one that has several is in several groups."""
    try:
        fixed = context.config.policy_for(name).address
        known_place = context.sender.context.client.discovery.known_place
        place = known_place(name, None if fixed is None else str(fixed))
    except (Unreachable, ValueError):
        place = None
    return sorted({ip for ip, _ in place.candidates}) if place is not None else ["-"]


async def known_names(context: AdminContext, pattern: str) -> list[str]:
    """Every server of ours that we know of and `pattern` covers, by name."""
    names = context.sender.registry.names()
    after = ""
    while rows := await context.homeserver.known_destinations(after, ROWS):
        names.update(ours(context, rows))
        after = rows[-1]
    return await matching(context, pattern, names)


async def matching(context: AdminContext, pattern: str, names: Iterable[str]) -> list[str]:
    """Those of these names, of servers of ours, that `pattern` covers, by name."""
    breaks, handles = context.runtime.turns.with_breaks, context.handles
    return sorted(
        [name async for name in breaks(names) if matches(pattern, name) and handles(name)]
    )


async def chosen(context: AdminContext, request: Servers) -> list[str]:
    """Those of the servers that a request names that are ours; all of them known, and each once.

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
    servers = ours(context, list(dict.fromkeys(request.servers)))
    async for server in context.runtime.turns.with_breaks(servers):
        if not await context.sender.operations.is_known(server):
            raise not_found(f"{server}: {UNKNOWN}")
    return servers


async def list_page(context: AdminContext, listing: Listing) -> Page:
    """One page of a list. Raises Refusal: `after` is not what an earlier page gave."""
    heard = await list_here.ask(context, listing)
    return joined_page(context, listing, heard.answers, heard.without)


@question
async def list_here(context: AdminContext, listing: Listing) -> Rows:
    debts = {name: debt async for name, debt in context.sender.debts()}
    return await list_rows(context, listing, debts)


def joined_page(
    context: AdminContext,
    listing: Listing,
    answers: Mapping[str, Rows],
    without: Mapping[str, str],
) -> Page:
    """One page of those of all senders, by their names."""
    rows = []
    for name, each in answers.items():
        for key, row in zip(each.keys, each.page.destinations, strict=True):
            counted = as_people_count(row.destination) if listing.sort == "name" else ""
            rows.append((key, counted, row.destination, name, row))
    shown = sorted(rows, key=lambda row: row[:3])[: listing.limit]
    next_from: str | None = None
    pages = [each.page for each in answers.values()]
    if len(rows) > len(shown) or any(page.next_from is not None for page in pages):
        before = _before(context, listing)
        taken = Counter(name for *_, name, _ in shown)
        counts = (str(before[name] + taken[name]) for name in context.senders)
        next_from = shown[-1][-1].destination if listing.sort == "name" else ",".join(counts)
    return Page(
        tuple(row for *_, row in shown),
        total=sum(page.total for page in pages),
        behind=sum(page.behind for page in pages),
        known=sum(page.known for page in pages),
        counted_s=max(page.counted_s for page in pages),
        next_from=next_from,
        without=without,
    )


def _before(context: AdminContext, listing: Listing) -> dict[str, int]:
    """By sender how many of its rows are on the pages before."""
    numbers = [0] * len(context.senders)
    if listing.after and listing.sort != "name":
        if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", listing.after):
            raise bad_param("from must be the next_from of the last page")
        numbers = [int(each) for each in listing.after.split(",")]
    if len(numbers) != len(context.senders):
        raise bad_param("the list of senders has changed since the last page")
    return dict(zip(context.senders, numbers, strict=True))


async def list_rows(context: AdminContext, listing: Listing, debts: Mapping[str, Debt]) -> Rows:
    """Our rows of a page. What servers are owed comes from memory, never from the database.

    Args:
        debts: those of `Sender.debts`.
    """
    registry = context.sender.registry
    known: Collection[str] = registry.names()
    if listing.pattern != "*":
        known = await matching(context, listing.pattern, known)
        debts = {name: debts[name] for name in known if name in debts}
    names: Collection[str] = debts if listing.behind else known
    if not listing.behind and listing.state in (None, "level"):
        # A level server without a record of ours may have a row of the homeserver.
        names = await known_names(context, listing.pattern)
    first = as_people_count(listing.after if listing.sort == "name" else "")
    skip = _before(context, listing)[context.config.instance_name]

    now_ms, total = context.runtime.now_ms(), 0

    def key(name: str) -> tuple[float, float]:
        """The sort key before the name: the smallest goes first."""
        if listing.sort == "name":
            return 0, 0
        if listing.sort == "fails":
            since_ms = registry.state_of(name).failing_since_ms
            since_ms = -since_ms if listing.since and since_ms is not None else since_ms
            return LAST if since_ms is None else since_ms, 0
        if (debt := debts.get(name)) is None:
            return LAST, 0
        if listing.sort == "owed":
            return -debt.rooms, -debt.counted
        return now_ms if debt.since_ms is None else debt.since_ms, 0

    keys: list[tuple[float, float, str, str]] = []
    async for name in context.runtime.turns.with_breaks(names):
        if listing.state is not None and registry.standing(name) is not listing.state:
            continue
        if listing.since and (registry.state_of(name).failing_since_ms or 0) < listing.since:
            continue
        total += 1
        # The live page asks for other orders every few seconds, of all servers.
        counted = as_people_count(name) if listing.sort == "name" else ""
        if listing.sort != "name" or counted > first:
            keys.append((*key(name), counted, name))
    chosen_keys = heapq.nsmallest(skip + listing.limit + 1, keys)[skip:]
    shown = [name for *_, name in chosen_keys[: listing.limit]]
    page = Page(
        tuple(_summary(context, name, debts.get(name), now_ms) for name in shown),
        total,
        len(debts),
        len(known) if names is known else len({*known, *names}),
        trio.current_time() - context.sender.context.debts.counted_at,
        shown[-1] if len(chosen_keys) > listing.limit else None,
    )
    return Rows(page, [(one, other) for one, other, *_ in chosen_keys[: listing.limit]])


def as_people_count(name: str) -> str:
    """A key that sorts names as people count: `…0.2` before `…0.10`.

    It is hardly longer than the name, as a list has one of each server that anybody has thought of.
    """
    # Before a number stands a character for its length, which is below all those of names.
    return _NUMBER.sub(lambda found: chr(len(found[1])) + found[1], name) + "\0" + name


def _summary(context: AdminContext, name: str, debt: Debt | None, now_ms: int) -> Summary:
    registry = context.sender.registry
    status = registry.status(name)
    state = ServerState(name) if status is None else status.state
    next_ms = next_attempt_ms(context, name, status)
    since_ms = state.failing_since_ms
    oldest_ms = None if debt is None else debt.since_ms
    again = None if debt is None else debt.again
    return Summary(
        destination=name,
        state=where_it_stands(context, name),
        behind=debt is not None,
        rooms_owed=0 if debt is None else debt.rooms or None,
        events_owed=0 if debt is None else debt.counted,
        redeliveries=0 if again is None else again.events,
        owes_keys=debt is not None and (debt.owes_keys or registry.owes_keys(name)),
        oldest_owed_s=None if oldest_ms is None else max(0.0, (now_ms - oldest_ms) / 1000),
        queued_pdus=status.queued if status is not None else 0,
        in_flight=None if status is None else status.in_flight,
        failures=state.failures,
        failing_since_ts=since_ms,
        failing_for_s=None if since_ms is None else (now_ms - since_ms) / 1000,
        last_success_ts=state.last_success_ms,
        next_attempt_ts=next_ms,
        next_attempt_in_s=None if next_ms is None else (next_ms - now_ms) / 1000,
        last_error=state.outcome,
        reason=state.reason or next(held(state), None) or _takes_long(context, name, status),
        paused=state.paused,
        parked=state.parked,
    )


def _takes_long(context: AdminContext, name: str, status: Status | None) -> str | None:
    sends = status is not None and status.phase in (Phase.SENDING, Phase.CATCHING_UP)
    if status is not None and sends and status.for_s >= SLOW_S:
        return f"no answer for {duration(status.for_s)} yet"
    usual_s = context.sender.context.admission.answers_take_s(name)
    return f"its answers take longer than {duration(usual_s)}" if usual_s else None


def held(state: ServerState) -> Iterator[str]:
    """What keeps some of its items back although others go, a sentence each."""
    for kind in Kind:
        search = state.search(kind)
        if search.next_ms is not None and search.suspect is None:
            other_kind = "EDUs" if kind is Kind.PDUS else "PDUs"
            yield (
                f"{kind.value}s were refused, or answered with a 200 that says nothing. They are "
                f"sent again, apart from {other_kind}."
            )
        if search.suspect is None:
            continue
        if search.full:
            found = "it is at fault, and quarantine has no room for it"
        elif search.refused and not search.witnesses:
            found = f"so was each other {kind.value} that was tried: the server is at fault"
        elif search.alone:
            found = f"there is no other {kind.value} to find out whose fault that is"
        else:
            times, others = many(search.failures + 1, "time"), many(search.refusals, "time")
            answers = many(search.answers + bool(search.witnesses), "time")
            found = f"{times} by now; other {kind.value}s were refused {others}, answered {answers}"
        yield f"The {kind.value} {search.suspect.mark} was refused and is held: {found}."


def age_class(age_s: float) -> str:
    """The class of an age (seconds): a name in `AGES`."""
    return AGES[bisect_right(AGE_ENDS, age_s)][0]


def where_it_stands(context: AdminContext, name: str, *, owed: bool = False) -> str:
    """A `Standing`, or why this sender never sends to it; `owed`: the database has items for it."""
    if not context.config.allows(name):
        return "not allowed"
    if not context.config.handles(name):
        return "another sender's"
    standing = context.sender.registry.standing(name)
    # Its task has not looked yet, or its turn after a start has not come.
    return (Standing.WAITING if owed and standing is Standing.LEVEL else standing).value


def next_attempt_ms(context: AdminContext, name: str, status: Status | None) -> int | None:
    """When our own timer tries again; None: nothing is waiting for it, or nothing may be sent."""
    if status is None or status.retry_in_s is None or (status.level and status.state.healthy):
        return None
    if status.state.paused is not None or status.state.parked is not None:
        return None
    if not (context.config.allows(name) and context.config.handles(name)):
        return None
    return context.runtime.now_ms() + int(status.retry_in_s * 1000)
