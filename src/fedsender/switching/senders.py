"""The list of senders: who sends by it, and how it is changed while senders run.

Where senders share one PostgreSQL, their list in force is a row there, and a configuration's list
counts only as long as there is none. A change is wanted by a command. Each sender of the list in
force then stops as it does at its end: what is unanswered after a few seconds is on record, and its
positions are written. It waits, and so does each that is new. When all old ones have stopped, or
their leases have lapsed, and a process waits under each new name, any of them puts the list in
force, and all go on by it. No record moves: who sends to a server goes by what is on record of it.

An SQLite belongs to one sender: there the configuration's list counts, which names it alone.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog
import trio

from fedsender.config import Config, ConfigError, is_instance_name
from fedsender.runtime import Runtime
from fedsender.store import Store, StoreError, positions, store_config
from fedsender.store.connections import checked_url
from fedsender.store.engine import open_database
from fedsender.store.leases import LEASE_S, NOBODY, Waits
from fedsender.store.membership import Holder, Membership, Missing, Standing
from fedsender.store.migrations import look_for_command
from fedsender.store.positions import NEVER_ACKED

__all__ = [
    "DRAIN_S",
    "NotChanged",
    "change_list",
    "change_list_of",
    "describe_list",
    "until_changed",
    "until_member",
]


log = structlog.get_logger()

STOP_S: Final = 15.0
"""How long a change waits for all senders to stop."""
DRAIN_S: Final = 3.0
"""How long a sender gives what is in flight, before it stops for a change."""
LOOK_EVERY_S: Final = 0.5
WATCH_EVERY_S: Final = 1.0


class NotChanged(StoreError):
    """The list of senders was not changed."""


def is_shared(store: Store) -> bool:
    """Whether other senders may be on these databases."""
    return store.sender.shared and store.homeserver.known_to_others


async def until_member(
    store: Store, config: Config, runtime: Runtime, waits: Waits
) -> tuple[str, ...]:
    """The list of senders in force, once we send by it. We hold our name's lease meanwhile.

    Until then we wait, and `waits` is told why: a change is under way, or the list does not name
    us.
    """
    senders = store.sender.senders
    if is_shared(store):
        found = await _until_in_force(store, config, runtime, waits)
        if len(found) > 1:
            await store.sender.let_lease_end()
    else:
        found = config.senders
        if await senders.standing() != Standing(found):
            await senders.follow(found, await store.homeserver.places())
    walk = await senders.walk()
    store.homeserver.use_list(found, None if walk is None else walk.upto)
    return found


async def _until_in_force(
    store: Store, config: Config, runtime: Runtime, waits: Waits
) -> tuple[str, ...]:
    senders, me = store.sender.senders, config.instance_name
    said, change, began_s = "", "", 0.0
    while True:
        standing = await senders.standing()
        if standing is None:
            await senders.begin(config.senders, await store.homeserver.places())
            continue
        if standing.change is None:
            if me in standing.in_force:
                break
            why = f"the list of senders in force does not name us: {', '.join(standing.in_force)}"
        else:
            if standing.change != change:
                change, began_s = standing.change, runtime.elapsed_s()
                await senders.note_stopped(change)
            missing = await _try_in_force(store, standing)
            if missing is None:
                continue
            if runtime.elapsed_s() - began_s >= STOP_S and await senders.withdraw(change):
                log.warning("senders_not_changed", reason=_in_words(missing))
                continue
            why = f"the list of senders becomes {', '.join(standing.wanted)}; {_in_words(missing)}"
        if why != said:
            said = why
            waits(why)
        await trio.sleep(LOOK_EVERY_S)
    if standing.in_force != config.senders:
        log.warning("senders_differ", in_force=standing.in_force, configured=config.senders)
    return standing.in_force


async def _try_in_force(store: Store, standing: Standing) -> Missing | None:
    """Put the list that is wanted in force, if nobody is missing; else return who is."""
    senders = store.sender.senders
    there = await store.homeserver.senders()
    missing = await senders.missing(
        standing, {name: each.ours != NEVER_ACKED for name, each in there.items()}
    )
    if missing.running or missing.absent:
        return missing
    if missing.lapsed:
        await senders.void(missing.lapsed)
        for name in missing.lapsed:
            # What it has under way is committed now, or never.
            await store.sender.evict(name)
    places = await store.homeserver.places()
    if await senders.put_in_force(standing, places):
        log.info("senders_changed", before=standing.in_force, now=standing.wanted)
    return None


def _in_words(missing: Missing) -> str:
    words = []
    if missing.running:
        words.append(f"{', '.join(missing.running)} did not stop yet")
    if missing.absent:
        words.append(f"nobody waits as {', '.join(missing.absent)}")
    return " and ".join(words) or "it is not in force yet"


async def until_changed(store: Store, senders: Sequence[str]) -> None:
    """Wait until the list of senders is not this one any more, or is about to change."""
    here = Standing(tuple(senders))
    if not is_shared(store):
        await trio.sleep_forever()
    while True:
        # A database that is in trouble says so at many other places.
        with suppress(StoreError):
            if await store.sender.senders.standing() not in (None, here):
                return
        await trio.sleep(WATCH_EVERY_S)


@asynccontextmanager
async def _membership(config: Config, runtime: Runtime) -> AsyncIterator[Membership]:
    """The list, for a command. Raises ConfigError where no other sender can see it."""
    url = store_config(config).sender_url
    if checked_url(url).get_backend_name() != "postgresql":
        text = "must be a PostgreSQL that all senders share"
        raise ConfigError(config.problem(("sender_database",), text))
    async with open_database(url, runtime, name="sender") as database:
        await look_for_command(database, "sender")
        yield Membership(database, runtime, config.instance_name)


async def describe_list(config: Config, runtime: Runtime) -> list[str]:
    """The list of senders, and who runs, in lines."""
    async with _membership(config, runtime) as senders:
        standing, rows = await senders.standing(), await senders.holders()
        silent = await _silent(senders, rows, runtime)
    if standing is None:
        return ["no sender has run on this database yet"]
    lines = [f"in force: {', '.join(standing.in_force)}"]
    if standing.change is not None:
        lines.append(f"wanted: {', '.join(standing.wanted)}")
    for name in dict.fromkeys((*standing.in_force, *standing.wanted, *sorted(rows))):
        row = rows.get(name)
        if row is None or row.holder == NOBODY:
            what = "does not run"
        elif name in silent:
            what = f"has not renewed its lease for {LEASE_S:g} s: it is dead, frozen or cut off"
        elif row.has_stopped(standing.change):
            what = "has stopped for the change"
        else:
            what = "sends" if name in standing.in_force else "stands by"
        lines.append(f"  {name}: {what}")
    return lines


async def _silent(
    senders: Membership, rows: Mapping[str, Holder], runtime: Runtime
) -> Collection[str]:
    """The names whose holders do not renew their leases, by these rows and what is there later."""
    began_s, silent = runtime.elapsed_s(), {name for name in rows if rows[name].holder != NOBODY}
    while silent and runtime.elapsed_s() - began_s < LEASE_S:
        await trio.sleep(LOOK_EVERY_S)
        now = await senders.holders()
        silent = {name for name in silent if now.get(name) == rows[name]}
    return silent


async def change_list_of(config: Config, runtime: Runtime, wanted: Sequence[str]) -> None:
    """Have the senders on this configuration's database go by this list; raises ConfigError, and as
    `change_list` does."""
    for name in wanted:
        if not is_instance_name(name):
            raise ConfigError(f"{name[:100]!r} is not the name of a sender")
    if len(set(wanted)) < len(wanted):
        raise ConfigError("the list names one sender twice")
    url = store_config(config).homeserver_url
    async with (
        _membership(config, runtime) as senders,
        open_database(url, runtime, name="homeserver") as homeserver,
    ):
        there = await homeserver.read(positions.senders)
        sent = [name for name, each in there.items() if each.ours != NEVER_ACKED]
        await change_list(senders, runtime, wanted, sent)


async def change_list(
    senders: Membership, runtime: Runtime, wanted: Sequence[str], sent: Collection[str] = ()
) -> None:
    """Have the running senders go by this list, and wait until they do.

    `sent`: the names under which somebody has sent.

    Raises NotChanged, which says who did not stop, or cannot.
    """
    standing = await senders.standing()
    if standing is None:
        raise NotChanged("no sender has run on this database yet")
    if standing == Standing(tuple(wanted)):
        return
    rows = await senders.holders()
    for name in standing.in_force:
        if name in sent and name not in rows:
            raise NotChanged(
                f"{name} has never run on this database, and cannot take part: if it is a worker of"
                " Synapse, stop it and start fedsender under its name first; or stop all senders"
            )
    for name in wanted:
        if name not in standing.in_force and (name not in rows or rows[name].holder == NOBODY):
            raise NotChanged(f"nobody runs as {name} on this database")
    change = runtime.entropy(8).hex()
    if not await senders.want(change, standing.in_force, wanted):
        raise NotChanged("another change is under way: look again in 15 s")
    began_s, why = runtime.elapsed_s(), "at once"
    while True:
        await trio.sleep(LOOK_EVERY_S / 2)
        now = await senders.standing()
        if now is None or now.change != change:
            if now is None or now.in_force != tuple(wanted):
                raise NotChanged(f"the change was withdrawn: {why}")
            return
        why = _in_words(await senders.missing(now, {}))
        if runtime.elapsed_s() - began_s >= STOP_S:
            await senders.withdraw(change)
