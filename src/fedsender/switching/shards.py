"""Shards: when the list of federation senders changes, servers go from one sender to another.

The records of such a server have to go with it: its next sender repeats a frozen transaction (I3),
and must not send an item that the old one has in quarantine. In a database that all senders share,
the new owner takes the records over when it starts. Elsewhere it cannot see them: the old owner
refuses to start until no record is left. The new owner refuses to start until the old one says so,
or has handed back.

What a server is owed stands in the homeserver's tables. Behind a relay each sender has such tables
of its own, and nobody else can send what is in them: it keeps a server until nothing is owed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog
import trio

from fedsender.config import Config, ConfigError
from fedsender.matrix import shard_of
from fedsender.sender.fan_out import AlreadyOwed
from fedsender.sender.routing import is_ours
from fedsender.store import SenderStore, Store
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.leases import Waits
from fedsender.store.lock import SendersDiffer
from fedsender.store.positions import NEVER_ACKED
from fedsender.store.records import Generation
from fedsender.store.sender import Foreign

__all__ = ["owed_in_words", "take_shard"]

log = structlog.get_logger()

CHUNK: Final = 500
PATIENCE_S: Final = 60.0
"""The wait for senders that start at the same time to say that they have no records."""
LOOK_EVERY_S: Final = 0.5
NAMED: Final = 5
"""Servers that a sentence names; it counts the others."""

_WORDS: Final = {
    "frozen_transactions": "frozen transactions",
    "quarantine": "items in quarantine",
    "redeliveries": "events to redeliver",
    "receipt_debts": "servers with receipts owed",
}
"""Tables with rows that must not be left behind. A new owner makes its own rows of the others
(waits, catch-ups under way): it may repeat items, and loses none."""


async def take_shard(
    both: Store, config: Config, boot_id: str, waits: Waits | None = None
) -> AlreadyOwed | None:
    """Become the only sender under our instance name, and take over the records of our servers.

    With a changed list our position may go back to that of a sender that was behind us. The
    returned function tells the events that we had noted as owed before. None: it does not go back.

    Waits for a database that is away. With a changed list it also waits, for up to a minute, until
    the other senders of the list with a database of their own say that they have no records of our
    servers.

    `waits`: we stand by while another process runs under our name, and it is told why we wait.

    Raises LockHeld if another process runs under our name. Raises SendersDiffer if a sender runs
    with another list, as it may still send to servers that are ours by this one, or if a sender
    does not say that it has no records of them. Raises ConfigError if, with a changed list, records
    or anything owed would be left where their new owner cannot see them, by us or by a sender that
    has gone, or if one sender has noted events as owed and another has not.
    """
    me, store = config.instance_name, both.sender
    senders = config.homeserver.federation_sender_instances or (me,)
    await store.take_lock(boot_id, waits)
    await store.agree_on_senders(config.server_name, senders)
    foreign = await store.foreign_records(config.sender_of)
    before = await store.last_list()
    changed = bool(before) and before != list(senders) and len(senders) > 1
    left, owners = _left_behind(foreign, me)
    if (changed or store.shared) and (of_all := await store.quarantined_for_all()):
        # Some of the servers that did not get these may be others' now.
        left["quarantine"] += of_all
        owners.update(name for name in senders if name != me)
    if left and not store.shared:
        raise ConfigError(_refusal(left, sorted(owners)))
    if before and before != list(senders) and not both.homeserver.known_to_others:
        await _refuse_while_owed(both.homeserver, config, before)
    if changed:
        await _refuse_unless_level(both.homeserver, before, config.server_name)
    if not left:
        await store.say_nothing_left(config.server_name, senders)
    already_owed: AlreadyOwed | None = None
    if both.homeserver.known_to_others:
        there = await both.homeserver.senders()
        already_owed = _dealt_before(me, before, there, senders)
        unseen = [
            name
            for name in _old_holders(me, before, there, senders)
            if not (store.shared and await store.has_been_here(name))
        ]
        await _refuse_what_is_out_of_sight(store, unseen, config.server_name, senders)
    await store.follow_list(senders)
    holders = sorted({each.holder for each in foreign if each.owner == me and each.holder})
    done = await store.take_over_records(config.handles, holders)
    if holders:
        log.info("records_taken_over", count=sum(done.taken.values()), holders=holders)
    return already_owed


async def owed_in_words(homeserver: HomeserverStore, concerns: Callable[[str], bool]) -> str | None:
    """The sum of what the homeserver's tables owe to these servers, in words; None: nothing."""
    names, rooms, messages, changes = [], 0, 0, 0
    for each in await homeserver.lagging():
        if not concerns(each.destination):
            continue
        pending = await homeserver.pending_counts(each.destination)
        if pending.rooms or pending.to_device or pending.device_lists:
            names.append(each.destination)
            rooms += pending.rooms
            messages += pending.to_device
            changes += pending.device_lists
    if not names:
        return None
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"owed to {', '.join(names[:NAMED])}{more}: rooms with events {rooms}, to-device messages"
        f" {messages}, device list changes {changes}"
    )


async def _refuse_while_owed(
    homeserver: HomeserverStore, config: Config, before: Sequence[str]
) -> None:
    """Refuse a list by which servers leave us that our own homeserver tables owe something to."""
    me = config.instance_name

    def leaves(server: str) -> bool:
        was_ours = me not in before or before[shard_of(server, len(before))] == me
        return was_ours and not config.handles(server)

    if owed := await owed_in_words(homeserver, leaves):
        raise ConfigError(
            "homeserver.federation_sender_instances: by this list servers change hands, and their"
            f" new sender cannot see our homeserver.database, where this is {owed}. Start once more"
            " with the old list, the others stopped; change it when nothing is owed to these"
            " servers (`fedsender destinations --behind`), or give it up with `fedsender purge`"
        )


def _left_behind(foreign: Sequence[Foreign], me: str) -> tuple[Counter[str], set[str]]:
    """The number of records that we hold of other senders' servers, by table; and the owners."""
    left: Counter[str] = Counter()
    owners: set[str] = set()
    for each in foreign:
        counts = {name: n for name, n in each.records.items() if name in _WORDS}
        if each.owner != me and each.holder in (None, me) and counts:
            left.update(counts)
            owners.add(each.owner or "nobody")
    return left, owners


def _old_holders(
    me: str, before: Sequence[str], there: Mapping[str, Generation], senders: Sequence[str]
) -> list[str]:
    """The other senders of the old list that may have records; [] if the list is the same.

    `before`: the list by which our database was last used, if it ever was. Otherwise the
    homeserver's database names the senders so far. Synapse's own workers have no records, and
    neither has a sender that has handed back.
    """
    if before:
        same = before == list(senders)
    else:
        # Who starts first gives those that are new a position, and nobody has acknowledged there.
        new = me not in there or there[me].ours == NEVER_ACKED
        same = not new and there.keys() == set(senders)
    holders = [] if same else before or sorted(there)
    return [name for name in holders if name != me and name in there and _is_ours(there[name])]


def _is_ours(stands: Generation) -> bool:
    """Whether the last sender under this name was a fedsender."""
    return stands.position >= 0 and stands.ours == stands.position


def _dealt_before(
    me: str, before: Sequence[str], there: Mapping[str, Generation], senders: Sequence[str]
) -> AlreadyOwed | None:
    mine, lowest = there.get(me), min((each.position for each in there.values()), default=-1)
    changed = before != list(senders) and me in before
    if not changed or mine is None or not _is_ours(mine) or mine.position <= lowest:
        return None
    upto, senders_then = mine.position, tuple(before)

    def had(server: str, stream_ordering: int) -> bool:
        whose = senders_then[shard_of(server, len(senders_then))]
        return stream_ordering <= upto and whose == me

    return had


async def _refuse_what_is_out_of_sight(
    store: SenderStore, unseen: Sequence[str], server_name: str, senders: Sequence[str]
) -> None:
    """Refuse to start while `unseen` senders may have records of our servers that we cannot see."""
    gone = [name for name in unseen if name not in senders]
    if gone:
        raise ConfigError(f"{_OUT_OF_SIGHT.format(', '.join(gone))}: {_HAND_BACK}")
    with trio.move_on_after(PATIENCE_S) as waited:
        for name in unseen:
            while not await store.has_nothing_left(name, server_name, senders):  # noqa: ASYNC110
                await trio.sleep(LOOK_EVERY_S)
    if waited.cancelled_caught:
        raise SendersDiffer(
            f"{_OUT_OF_SIGHT.format(', '.join(unseen))}: start these by the same list at the same"
            f" time, and see that they start; or {_HAND_BACK}"
        )


_OUT_OF_SIGHT: Final = (
    "homeserver.federation_sender_instances: {} sent to servers that are ours by this list, and may"
    " have records of them in a sender_database that we cannot see"
)
_HAND_BACK: Final = (
    "run `fedsender hand-back` for it with its old configuration, or let all senders share one"
    " PostgreSQL sender_database"
)


async def _refuse_unless_level(
    homeserver: HomeserverStore, before: Sequence[str], server_name: str
) -> None:
    """Refuse to start while an old sender is behind: its servers would miss the events between."""
    there = await homeserver.senders()
    far = {name: there[name].position for name in before if name in there}
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
