"""A sender in trouble, for the page and the terminal: 10,000 servers behind, 300 of them failing in
ten ways, some paused and parked, items in quarantine, and one server with a long history."""

import random
from dataclasses import dataclass

import trio
from tests.admin.test_attempts import a_ledger
from tests.sender.harness import World

from fedsender.ledger import Line, SentPdu, TransactionRecord
from fedsender.sender.failure import ServerState
from fedsender.sender.transaction import Debt

BEHIND = 10_000
FAILING = 300
WAYS = (
    ("unreachable", None, "connection refused (192.0.2.7:8448)"),
    ("unreachable", None, "no address: there is no such name in the DNS"),
    ("unreachable", None, "certificate refused: certificate has expired"),
    ("busy", 429, "answered 429: M_LIMIT_EXCEEDED: later"),
    ("failing", 502, "answered 502"),
    ("failing", None, "no answer within 60 s"),
    ("refusing", 401, "answered 401: M_UNAUTHORIZED: Failed to find any key to satisfy the rule"),
    ("not_there", 404, "answered 404"),
    ("rejecting", 400, "answered 400: M_UNKNOWN: a PDU was malformed"),
    ("lying", 200, "answered 200, but not with a JSON object"),
)
ANSWERED: tuple[str, int | None, str] = ("delivered", 200, "")
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Crowd:
    """Names to ask for.

    Attributes:
        server: one that fails, is owed events in 120 rooms, and has a history.
        event: one that goes to 2,300 servers.
    """

    server: str
    event: str


async def gather(world: World) -> Crowd:
    """Bring the trouble about in a running sender; it stays until its next sweep."""
    rng = random.Random(7)
    now_ms, sender = world.runtime.now_ms(), world.sender
    names = [f"s{number:05}.example" for number in range(BEHIND)]
    states = {name: ServerState(name) for name in names}
    for number, name in enumerate(names[:FAILING]):
        outcome, _, reason = WAYS[number % len(WAYS)]
        since_ms = now_ms - round(HOUR_MS * 300 * rng.random() ** 4) - 60_000
        states[name] = ServerState(
            name,
            failing_since_ms=since_ms,
            failures=number % 40 + 1,
            last_attempt_ms=now_ms - 30_000,
            next_attempt_ms=now_ms + HOUR_MS,
            last_success_ms=since_ms - 60_000,
            outcome=outcome,
            reason=reason,
        )
    sender.registry.take_in(states, [])
    for name in names:
        sender.registry.schedule(name, trio.current_time() + 10_000 * (1 + rng.random()))
    for name in names[300:312]:
        await sender.operations.hold(
            name, paused="it moves house", parked=None, by="ada", for_ms=2 * HOUR_MS
        )
    for name in names[312:320]:
        await sender.operations.hold(name, paused=None, parked="gone since spring")

    event = world.pdu("!big:hs.example", "to all")
    healthy = [f"h{number:03}.example" for number in range(300)]
    await world.join("!big:hs.example", *names[:2000], *healthy)
    await world.apply(event)
    for number in range(120):
        room = f"!room{number:03}:hs.example"
        await world.join(room, names[4])
        await world.say(room, "one")
    for number in range(25):
        await world.store.sender.quarantine_item(
            destination=names[number * 3],
            kind="pdu" if number % 4 else "m.direct_to_device",
            reason=f"refused 12 times in a row, while others were answered: {WAYS[8][2]}",
            event_id=f"$quarantined-{number}-Xd3k1fjd9JdkE0akfj3lskdjf3lsdkjf93k" * (number % 4 > 0)
            or None,
            room_id="!big:hs.example",
            stream_ordering=number,
        )
    _write_history(world, names[4], now_ms, rng)
    await sender.sweep()
    sender.context.debts.count_anew(
        {
            name: Debt(
                rooms=rng.randrange(1, 400) if number % 5 else 0,
                oldest_ms=now_ms - round(HOUR_MS * 400 * rng.random() ** 6) - 5_000,
                events=rng.randrange(1, 50),
                owes_keys=number % 7 == 0,
            )
            for number, name in enumerate(names)
        },
        {},
    )
    for second in range(60):
        world.metrics.sent_pdus.inc(rng.randrange(50))
        world.metrics.sent_transactions.inc(40)
        for _ in range(40):
            world.metrics.delivery_seconds.observe(rng.expovariate(8))
        world.metrics.sample(float(second))
    return Crowd(names[4], event.event_id)


def _write_history(world: World, server: str, now_ms: int, rng: random.Random) -> None:
    """150 attempts at this server in the last day, as another start of the daemon left them."""
    ledger = a_ledger(world.directory / "ledger", boot="b11t")
    for number in range(150):
        outcome, status, reason = ANSWERED
        if number % 29 > 20 or number > 135:
            outcome, status, reason = WAYS[rng.choice((0, 3, 4, 5))]
        took_ms = rng.expovariate(1 / 150) + 20 if status else 0.4
        if reason == WAYS[5][2]:
            took_ms = 60_000
        pdus = [SentPdu(f"${number}-{each}", "!r", number, "live") for each in range(number % 7)]
        edus = {"m.receipt": 1 + number % 3, "m.direct_to_device": 1} if number % 4 else {}
        ledger.record(
            Line(
                now_ms - (150 - number) * 9 * 60_000,
                server,
                outcome,
                transaction_id=f"9adf458728b1d4f5.{number}",
                attempt=1 + number % 3,
                status=status,
                reason=reason,
                record=TransactionRecord(pdus, edus),
                refused={"$0-0": "no"} if number % 40 == 5 else {},
                took_ms=round(took_ms),
            )
        )
