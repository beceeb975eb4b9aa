"""Shards: when the list of federation senders changes, servers go from one sender to another.

What is on record of such a server has to go with it: a frozen transaction is repeated by whoever
sends next (I3), and what is in quarantine must not be sent by somebody who does not know of it. In
a database that all senders share, the new owner takes it over when it starts. Elsewhere it cannot
see it, and the old one refuses to start until nothing is left.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import structlog

from fedsender.config import Config, ConfigError
from fedsender.sender.routing import is_ours
from fedsender.store import SenderStore, Store
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.ownership import Foreign

__all__ = ["take_shard"]

log = structlog.get_logger()

CHUNK: Final = 500

_WORDS: Final = {
    "frozen_transactions": "frozen transactions",
    "quarantine": "items in quarantine",
    "redeliveries": "events to redeliver",
    "receipt_debts": "servers with receipts owed",
}
"""Tables whose rows must not be left behind. Of the others (waits, catch-ups under way) a new owner
makes his own: it may repeat something, and loses nothing."""


async def take_shard(both: Store, config: Config, boot_id: str) -> None:
    """Be the only one who sends under our instance name, and take what is on record of our servers.

    Waits for a database that is away. Raises LockHeld if somebody else runs under our name;
    SendersDiffer if a sender runs with another list, for it may still be sending to servers that
    are ours by this one; and ConfigError if by another list than before we would leave records of
    servers behind that are others' now, who cannot see them, or events that one sender has put
    down as owed and another has not.
    """
    me, store = config.instance_name, both.sender
    senders = config.homeserver.federation_sender_instances or (me,)
    await store.take_lock(me, boot_id)
    await store.agree_on_senders(config.server_name, senders)
    foreign = await store.foreign_records(config.sender_of)
    before = await store.last_list()
    changed = bool(before) and before != list(senders) and len(senders) > 1
    if not store.shared:
        await _refuse_to_leave_behind(store, foreign, me, senders if changed else ())
    if changed:
        await _refuse_unless_level(both.homeserver, before, config.server_name)
    await store.follow_list(senders)
    holders = sorted({each.holder for each in foreign if each.owner == me and each.holder})
    done = await store.take_over_records(config.handles, holders)
    if holders:
        log.info("records taken over", servers=sum(done.taken.values()), holders=holders)


async def _refuse_to_leave_behind(
    store: SenderStore, foreign: Sequence[Foreign], me: str, new_list: Sequence[str]
) -> None:
    """`new_list`: the senders, if they have changed."""
    left: Counter[str] = Counter()
    owners: set[str] = set()
    for each in foreign:
        counts = {name: n for name, n in each.records.items() if name in _WORDS}
        if each.owner != me and each.holder in (None, me) and counts:
            left.update(counts)
            owners.add(each.owner or "nobody")
    if new_list and (of_all := await store.quarantined_for_all()):
        # Some of the servers that did not get these may be others' now.
        left["quarantine"] += of_all
        owners.update(name for name in new_list if name != me)
    if left:
        raise ConfigError(_refusal(left, sorted(owners)))


async def _refuse_unless_level(
    homeserver: HomeserverStore, before: Sequence[str], server_name: str
) -> None:
    """What one of the old senders has not come to yet, his servers' new one may have passed."""
    positions = await homeserver.sender_positions()
    far = {name: positions[name] for name in before if name in positions}
    after, upto = min(far.values(), default=0), max(far.values(), default=0)
    while after < upto:
        rows = await homeserver.read_events(after, upto, CHUNK)
        if any(is_ours(row, server_name) for row in rows):
            told = ", ".join(f"{name} to {far[name]}" for name in sorted(far))
            raise ConfigError(
                "homeserver.federation_sender_instances: the senders of the old list have not come"
                f" equally far in the events ({told}), and what is between would not be sent to"
                " some servers: start all of them once more with the old list, until they have"
            )
        after = rows[-1].stream_ordering if len(rows) == CHUNK else upto


def _refusal(left: Counter[str], owners: list[str]) -> str:
    counted = ", ".join(f"{left[name]} {text}" for name, text in _WORDS.items() if left[name])
    return (
        f"homeserver.federation_sender_instances: by this list {counted} belong to"
        f" {', '.join(owners)}, who cannot see our sender_database: start once more with the old"
        " list until they are sent, released or dropped (see `fedsender why` and `fedsender"
        " quarantine list`), or let all senders share one PostgreSQL sender_database"
    )
