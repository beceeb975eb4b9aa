"""The hand-back to the next sender: items that it would not send are named before they are lost.

The next sender is Synapse's own federation sender. Where one of several senders leaves the list, it
is the others.

Synapse's sender goes on from the tables that we kept correct: the events position, the rooms owed
to each server, LSSO, to-device messages and device lists. It does not read the tables of our own.
So before it may start again, these are searched for three things: events and EDUs in quarantine,
events that are to be sent again, and transactions that left and were not answered. Sticky events
(MSC4354) that are to be sent again go into Synapse's own list of such debts.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from fedsender.config import Config, ConfigError
from fedsender.ledger import Ledger, TransactionRecord, open_ledger
from fedsender.runtime import Runtime
from fedsender.sender.failure import states_of
from fedsender.sender.recovery import discard, hand_over, note_handed_over, take_over
from fedsender.store import Store, StoreConfig, open_store
from fedsender.store.records import Redelivery, Settlement
from fedsender.switching.senders import until_member
from fedsender.telemetry import Count

PAGE: Final = 1000
REASON_CHARACTERS: Final = 200
DISCARDED: Final = "handed back"


@dataclass(frozen=True, slots=True)
class Findings:
    """The obstacles to a hand-back, each a sentence that names server and room.

    Attributes:
        losses: the items that Synapse's sender would never send.
        repeats: the transactions that it would send again under an id of its own.
        notes: other facts for the operator, with nothing to decide.
        done: whether the sending was handed back. If not, nothing was changed.
    """

    losses: Sequence[str]
    repeats: Sequence[str]
    notes: Sequence[str]
    done: bool


async def hand_back(
    config: Config,
    settings: StoreConfig,
    runtime: Runtime,
    *,
    accept_repeats: bool = False,
    accept_loss: bool = False,
) -> Findings:
    """Leave the databases as Synapse's own sender needs them, or return the obstacles.

    Answers that only a killed daemon's ledger has are written to the databases first. Then, if no
    obstacle is found, or all are accepted, unanswered transactions are given up, each with a line
    in the ledger. Servers that were never reached get a low-water mark (LSSO) from which Synapse's
    sender can catch up with them (W2). Quarantine stays, in case we come back. Synapse's schema is
    not touched.

    Args:
        settings: the addresses and options of the databases of `config`.
        accept_repeats: unanswered transactions are no reason to refuse.
        accept_loss: no obstacle is a reason to refuse.

    Raises:
        ConfigError: there is no Synapse behind this configuration, nor another sender on its list.
        LockHeld: the daemon is still running.
        StoreError: a database is not one that we know, or of a version outside the tested range.
    """
    others = set(config.senders) - {config.instance_name}
    if config.homeserver.kind != "synapse" and not others:
        raise ConfigError(
            "homeserver.kind is not synapse, and homeserver.federation_sender_instances names no"
            " other sender: there is nobody to hand back to"
        )
    async with _records(config, settings, runtime) as (store, ledger, config):
        frozen = await take_over(store, ledger, runtime, config.instance_name, config.handles)
        sticky, again = await _redeliveries(store, config)
        sticky |= await _passed_sticky(store, config)
        losses = [*await _quarantined(store, config), *again]
        repeats = [await _unanswered(store, name, _next(config)) for name in sorted(frozen)]
        refused = not accept_loss and (losses or (repeats and not accept_repeats))
        notes = [] if refused else await _settle(store, ledger, runtime, config, frozen)
        if not refused:
            await _leave_sticky(store, sticky)
        await hand_over(store, config.instance_name)
        if not refused:
            position = await store.homeserver.events_position()
            await note_handed_over(store, ledger, runtime, position, config.handles)
            await store.homeserver.hand_back()
    return Findings(losses, repeats, notes, done=not refused)


@asynccontextmanager
async def _records(
    config: Config, settings: StoreConfig, runtime: Runtime
) -> AsyncIterator[tuple[Store, Ledger, Config]]:
    """Open the databases and the ledger as the daemon does, in its place; the configuration is that
    with the list of senders in force."""
    boot_id = runtime.entropy(8).hex()
    async with open_store(settings, runtime) as store:
        await store.sender.take_lock(boot_id)
        config = config.with_senders(await until_member(store, config, runtime, _refuse_to_wait))
        async with open_ledger(
            config.ledger,
            config.instance_name,
            boot_id,
            runtime,
            Count(),
            counts=store.sender.has_followed,
        ) as ledger:
            yield store, ledger, config


def _refuse_to_wait(why: str) -> None:
    raise ConfigError(f"homeserver.federation_sender_instances: {why}")


async def _quarantined(store: Store, config: Config) -> list[str]:
    """One sentence for each server and room with items in quarantine."""
    counts: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], str] = {}
    after = 0
    while page := await store.sender.quarantine_list(None, PAGE, after):
        after = page[-1].id
        for item in page:
            if item.destination is not None and not config.handles(item.destination):
                continue
            where = f"room {item.room_id}" if item.room_id is not None else item.kind
            key = (item.destination or "all servers", where)
            counts[key] += 1
            reasons.setdefault(key, item.reason[:REASON_CHARACTERS])
    return [
        f"{server}, {where}: {counts[server, where]} in quarantine ({reasons[server, where]});"
        f" {_next(config)} will not send them"
        for server, where in sorted(counts)
    ]


async def _redeliveries(store: Store, config: Config) -> tuple[dict[Redelivery, int], list[str]]:
    """The events that wait to be sent again.

    Sticky ones, of which Synapse's sender can be told, with their stream ids there; and one
    sentence for each server and room with others.
    """
    sticky: dict[Redelivery, int] = {}
    others: Counter[tuple[str, str]] = Counter()
    after = "", ""
    while page := await store.sender.redelivery_list(PAGE, after):
        after = page[-1].destination, page[-1].event_id
        ours = [each for each in page if config.handles(each.destination)]
        found = await _known_as_sticky(store, ours)
        sticky |= found
        others.update((each.destination, each.room_id) for each in ours if each not in found)
    return sticky, [
        f"{server}, room {room}: {count} to be sent again; {_next(config)} does not know of them"
        for (server, room), count in sorted(others.items())
    ]


async def _passed_sticky(store: Store, config: Config) -> dict[Redelivery, int]:
    """The sticky events that LSSO has passed in rooms that are owed a newer event, with their
    stream ids at Synapse's sender."""
    sticky: dict[Redelivery, int] = {}
    for name in await store.sender.catch_up_floors():
        record, lsso = await store.sender.catch_up(name), await store.homeserver.lsso(name)
        if record is None or lsso is None or not config.handles(name):
            continue
        upto = lsso
        while rooms := await store.homeserver.owed_rooms(name, upto, PAGE):
            upto = rooms[-1][1]
            for room_id, value in rooms:
                after = max(record.floor, record.rooms.get(room_id, record.floor))
                found = await store.homeserver.sticky_events(
                    room_id, after, min(lsso + 1, value), config.server_name
                )
                owed = [Redelivery(name, event_id, room_id, at) for at, event_id in found]
                sticky |= await _known_as_sticky(store, owed)
    return sticky


async def _known_as_sticky(store: Store, owed: Sequence[Redelivery]) -> dict[Redelivery, int]:
    known = await store.homeserver.sticky_among({each.event_id for each in owed})
    return {each: known[each.event_id] for each in owed if each.event_id in known}


async def _leave_sticky(store: Store, sticky: Mapping[Redelivery, int]) -> None:
    """Note them for Synapse's sender, and give our own records of them up."""
    first: dict[tuple[str, str], int] = {}
    for each, stream_id in sticky.items():
        key = (each.destination, each.room_id)
        first[key] = min(stream_id, first.get(key, stream_id))
    await store.homeserver.leave_sticky(first)
    for each in sticky:
        await store.sender.redelivered(each.destination, [each.event_id])


def _next(config: Config) -> str:
    """The next sender, in words."""
    return "Synapse's sender" if config.homeserver.kind == "synapse" else "whoever sends next"


async def _unanswered(store: Store, name: str, next_sender: str) -> str:
    """The unanswered transaction of this server, in words."""
    record = await store.sender.load_frozen(name)
    if record is None:
        return f"{name}: a transaction is unanswered"
    sent = TransactionRecord.from_json(record.manifest)
    rooms = ", ".join(sorted({pdu.room_id for pdu in sent.pdus}))
    return (
        f"{name}: transaction {record.transaction_id} (PDUs: {len(sent.pdus)}"
        f"{', of ' + rooms if rooms else ''}; EDUs: {sum(sent.edus.values())}) was sent and had no"
        f" 200; {next_sender} will send the newest event of each room, to-device messages and"
        " device lists again, and no receipts"
    )


async def _settle(
    store: Store, ledger: Ledger, runtime: Runtime, config: Config, frozen: set[str]
) -> list[str]:
    """Give our transactions up, and set missing low-water marks; return the notes."""
    for name in sorted(frozen):
        await discard(store, ledger, runtime, name, DISCARDED)
    notes = []
    unreached = [each for each in await store.homeserver.lagging() if each.lsso is None]
    for each in unreached:
        if not config.handles(each.destination):
            continue
        for _, ordering in await store.homeserver.owed_rooms(each.destination, 0, 1):
            await store.homeserver.settle([Settlement(each.destination, ordering - 1)])
            notes.append(f"{each.destination} was never reached; LSSO is now {ordering - 1}")
        await trio.lowlevel.checkpoint()
    debts = (await store.receipts.load(config.instance_name, config.handles)).debts
    if owed := len(debts):
        notes.append(f"receipts that {owed} servers are owed are not sent")
    return [*notes, *await _held_back(store, config, runtime.now_ms())]


async def _held_back(store: Store, config: Config, now_ms: int) -> list[str]:
    """The notes on servers that only we do not send to, because an operator said so."""
    states = states_of(await store.sender.all_server_states())
    notes = []
    for name, state in sorted(states.items()):
        word = "parked" if state.parked is not None else "paused"
        over = state.parked is None and state.pause_left_s(now_ms) == 0
        held = state.parked is not None or state.paused is not None
        if held and not over and config.handles(name):
            notes.append(f"{name} is {word} here; {_next(config)} sends to it")
    if config.lists():
        notes.append(f"allow and deny hold here alone: {_next(config)} does not read them")
    return notes
