"""Shards: when the list of federation senders changes, servers go from one sender to another.

What is on record of such a server has to go with it: a frozen transaction is repeated by whoever
sends next (I3), and what is in quarantine must not be sent by somebody who does not know of it. In
a database that all senders share, the new owner takes it over when it starts. Elsewhere it cannot
see it, and the old one refuses to start until nothing is left.
"""

from collections import Counter
from typing import Final

import structlog

from fedsender.config import Config, ConfigError
from fedsender.store import SenderStore

log = structlog.get_logger()

_WORDS: Final = {
    "frozen_transactions": "frozen transactions",
    "quarantine": "items in quarantine",
    "redeliveries": "events to redeliver",
    "receipt_debts": "servers with receipts owed",
}
"""Tables whose rows must not be left behind. Of the others (waits, catch-ups under way) a new owner
makes his own: it may repeat something, and loses nothing."""


async def take_over_shard(store: SenderStore, config: Config) -> frozenset[str]:
    """Take what is on record of our servers; the servers whose records another sender held.

    Our instance lock is held. Raises ConfigError if we hold records of servers that are others'
    now, who cannot see them; and SendersDiffer if a sender runs with another list, for it may still
    be sending to servers that are ours by this one.
    """
    me = config.instance_name
    senders = config.homeserver.federation_sender_instances or (me,)
    await store.agree_on_senders(config.server_name, senders)
    foreign = await store.foreign_records(config.sender_of)
    holders = sorted({each.holder for each in foreign if each.owner == me and each.holder})
    if not store.shared:
        left: Counter[str] = Counter()
        owners = set()
        for each in foreign:
            counts = {name: n for name, n in each.records.items() if name in _WORDS}
            if each.owner != me and each.holder in (None, me) and counts:
                left.update(counts)
                owners.add(each.owner or "nobody")
        if left:
            raise ConfigError(_refusal(left, sorted(owners)))
    done = await store.take_over_records(config.handles, holders)
    if done.servers:
        log.info("records taken over", servers=len(done.servers), holders=holders)
    return done.servers


def _refusal(left: Counter[str], owners: list[str]) -> str:
    counted = ", ".join(f"{left[name]} {text}" for name, text in _WORDS.items() if left[name])
    return (
        f"homeserver.federation_sender_instances: by this list {counted} belong to"
        f" {', '.join(owners)}, who cannot see our sender_database: start once more with the old"
        " list until they are sent (see `fedsender why` and `fedsender quarantine list`), or let"
        " all senders share one PostgreSQL sender_database"
    )
