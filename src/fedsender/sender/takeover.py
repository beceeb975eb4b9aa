"""Taking over: what the last daemon, or Synapse's own worker, left behind.

Before anything is sent, three questions are answered. Is the homeserver's database as we left it?
Which answers are in the ledger that the databases did not get to know of? And which frozen
transactions may still be repeated?
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedsender.ledger import Ledger, Line
from fedsender.outside import Outside
from fedsender.store import Store
from fedsender.store.records import DevicePoke, Settlement
from fedsender.store.sender import StoredGeneration


async def take_over(
    store: Store,
    ledger: Ledger,
    outside: Outside,
    instance: str,
    is_mine: Callable[[str], bool],
) -> set[str]:
    """Answer the three questions; the servers whose frozen transaction is to be repeated.

    `is_mine`: whether a server belongs to this shard; others' records are left alone.

    All frozen transactions are void if the homeserver's database has moved without us (Synapse's
    own worker ran, a backup was restored); one is if its server's LSSO is not what it was. Void
    ones are discarded, each with a line in the ledger.
    """
    left = await store.sender.load_generation(instance)
    moved = await _moved_without_us(store, left)
    if moved is None:
        for answer in ledger.last_words.values():
            await _settle_from_ledger(store, answer)
    else:
        # What they say was answered, the homeserver's database may not know of.
        for name in await store.sender.catching_up():
            if is_mine(name):
                await store.sender.end_catch_up(name)
    ledger.close_torn()
    valid = set()
    for name in await store.sender.frozen_destinations():
        if not is_mine(name):
            continue
        reason = moved or await _void(store, name)
        if reason is None:
            valid.add(name)
        else:
            await _discard(store, ledger, outside, name, reason)
    keep_mark = left is not None and moved is None
    mark = left.mark if left is not None and keep_mark else outside.entropy(8).hex()
    # Ours first: a crash between the two is taken for a move, with nothing left to discard.
    await store.sender.save_generation(instance, await store.homeserver.events_position(), mark)
    await store.homeserver.adopt_generation(mark)
    return valid


async def hand_over(store: Store, instance: str) -> None:
    """Remember how we leave the homeserver's database."""
    left = await store.sender.load_generation(instance)
    if left is not None:
        position = await store.homeserver.events_position()
        await store.sender.save_generation(instance, position, left.mark)


async def _void(store: Store, name: str) -> str | None:
    """Why this server's frozen transaction must not be repeated; None: it may be."""
    record = await store.sender.load_frozen(name)
    if record is None:
        return "its record is gone"
    lsso, before = await store.homeserver.lsso(name), record.manifest.get("lsso_before")
    if lsso == before:
        return None
    return f"LSSO is {lsso}, and was {before} when it was frozen"


async def _discard(store: Store, ledger: Ledger, outside: Outside, name: str, reason: str) -> None:
    record = await store.sender.load_frozen(name)
    if record is None:
        return
    line = Line(
        ms=outside.now_ms(),
        destination=name,
        outcome="discarded",
        transaction_id=record.transaction_id,
        attempt=record.attempts,
        reason=reason,
    )
    ledger.record(line)
    await store.sender.drop_frozen(name)


async def _settle_from_ledger(store: Store, line: Mapping[str, Any]) -> None:
    """Move what this recorded answer moves, in the order of `Destination._settle`, or again."""
    name = line["destination"]
    rooms: dict[str, int] = {}
    for pdu in line["pdus"]:
        if pdu["lane"] == "catch_up":
            upto = pdu.get("supersedes", (0, pdu["stream_ordering"]))[1]
            rooms[pdu["room_id"]] = max(upto, rooms.get(pdu["room_id"], 0))
    if rooms and await store.sender.catch_up(name) is not None:
        await store.sender.catch_up_sent(name, rooms)
    pokes = tuple(DevicePoke(*poke) for poke in line.get("device_lists", ()))
    outbox = tuple(line["outbox"])
    await store.homeserver.settle([Settlement(name, line["lsso"], outbox, pokes=pokes)])
    again = [pdu["event_id"] for pdu in line["pdus"] if pdu["lane"] == "redelivery"]
    if again:
        await store.sender.redelivered(name, again)
    record = await store.sender.load_frozen(name)
    if record is not None and record.transaction_id == line["transaction_id"]:
        await store.sender.drop_frozen(name)


async def _moved_without_us(store: Store, left: StoredGeneration | None) -> str | None:
    """Why the homeserver's database is not as we left it; None: it is, or we never had it."""
    there = await store.homeserver.generation()
    if left is None:
        return None
    if there.ours is not None and there.ours != there.position:
        return f"the events position is {there.position}, and was {there.ours} when we left it"
    if there.position < left.events_position:
        return f"the events position went back to {there.position} from {left.events_position}"
    if there.mark is not None and there.mark != left.mark:
        return "the homeserver's database is not the one that we left"
    return None
