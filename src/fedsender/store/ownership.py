"""Whose records they are, where several senders share one database: functions of a connection.

Each record of a server names the instance that holds it. When the list of senders changes, servers
go from one to another by the shard rule, and their records must go with them: a frozen transaction
is repeated by whoever sends next, and a debt is paid by him. A start asks what is here of servers
that are somebody else's now, and takes what is its own. An event in quarantine for no server in
particular is held by each sender, for its own servers; whoever starts first by another list gives
it to all that are on that list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    update,
)

from fedsender.store import sender_tables, tables
from fedsender.store.connections import WrongDatabase
from fedsender.store.event_rows import in_chunks
from fedsender.store.rows import insert_rows


def claim_store(connection: Connection, server_name: str, *, relay: bool) -> None:
    """Have a store of ours belong to this homeserver's sender, or relay. Raises WrongDatabase.

    What a relay does to it a sender does not expect, and so the other way round.
    """
    owner = tables.store_owner
    query = select(owner.c.server_name, owner.c.is_relay)
    if connection.execute(query).first() is None:
        # Another one may do so at this moment.
        insert_rows(connection, owner, [{"id": 1, "server_name": server_name, "is_relay": relay}])
    name, is_relay = connection.execute(query).one()
    if (name, is_relay) != (server_name, relay):
        kinds = {True: "the relay", False: "a sender"}
        raise WrongDatabase(
            f"this is the database of {kinds[is_relay]} of {name}:"
            f" {kinds[relay]} of {server_name} needs one of its own"
        )


@dataclass(frozen=True, slots=True)
class Foreign:
    """Records of servers that belong to another instance than the one that holds them.

    Attributes:
        holder: the instance that wrote them or took them over; None: not known.
        owner: whose the servers are by the present list; None: nobody's.
        servers: how many servers.
        records: how many rows of each table.
    """

    holder: str | None
    owner: str | None
    servers: int
    records: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What a take-over moved, and what it could not.

    Attributes:
        taken: instance that held records of our servers -> how many servers; None: not known.
        out_of_reach: the same for records that stay where they are: those of our servers held by
            an instance that we may not take from; and, where the database is not shared, those we
            hold ourselves of servers that are no longer ours (under our own name), because their
            new owner cannot see them.
    """

    taken: Mapping[str | None, int] = field(default_factory=dict)
    out_of_reach: Mapping[str, int] = field(default_factory=dict)


Holdings = dict[tuple[str, str | None], dict[str, int]]


def _holdings(connection: Connection) -> Holdings:
    """(server, holder) -> rows of each table."""
    found: Holdings = {}
    for table in sender_tables.PER_DESTINATION:
        query = (
            select(table.c.destination, table.c.instance_name, func.count())
            .where(table.c.destination.is_not(None))
            .group_by(table.c.destination, table.c.instance_name)
        )
        for destination, holder, rows in connection.execute(query):
            found.setdefault((destination, holder), {})[table.name] = rows
    return found


def foreign_records(connection: Connection, owner_of: Callable[[str], str | None]) -> list[Foreign]:
    """Records whose server belongs to another than their holder, by holder and owner."""
    servers: dict[tuple[str | None, str | None], set[str]] = {}
    records: dict[tuple[str | None, str | None], dict[str, int]] = {}
    for (server, holder), rows in _holdings(connection).items():
        pair = (holder, owner_of(server))
        if pair[0] == pair[1]:
            continue
        servers.setdefault(pair, set()).add(server)
        counts = records.setdefault(pair, {})
        for name, count in rows.items():
            counts[name] = counts.get(name, 0) + count
    return [
        Foreign(*pair, len(servers[pair]), records[pair])
        for pair in sorted(servers, key=lambda each: (each[0] or "", each[1] or ""))
    ]


def take_over(
    connection: Connection,
    instance: str,
    is_mine: Callable[[str], bool],
    instances: Sequence[str],
    *,
    shared: bool,
) -> TakenOver:
    """Make `instance` the holder of its servers' records that nobody or one of `instances` holds.

    Whoever held them may have been behind us with receipts: where any were taken, our position in
    their stream goes back to the lowest of the holders' (receipts may be sent twice).
    """
    reachable = {None, *instances} - {instance}
    taken: dict[str | None, set[str]] = {}
    left: dict[str, set[str]] = {}
    for server, holder in _holdings(connection):
        if is_mine(server):
            if holder in reachable:
                taken.setdefault(holder, set()).add(server)
            elif holder is not None and holder != instance:
                left.setdefault(holder, set()).add(server)
        elif not shared and holder in (None, instance):
            left.setdefault(instance, set()).add(server)
    servers = sorted(set().union(*taken.values()))
    for table in sender_tables.PER_DESTINATION:
        _move(connection, table, servers, instance, reachable)
    if servers:
        _lower_receipt_position(connection, instance, {name for name in taken if name})
    return TakenOver(
        {name: len(taken[name]) for name in sorted(taken, key=lambda each: each or "")},
        {name: len(left[name]) for name in sorted(left)},
    )


def _move(
    connection: Connection,
    table: Table,
    servers: Sequence[str],
    instance: str,
    holders: set[str | None],
) -> None:
    holder = table.c.instance_name
    named = sorted(name for name in holders if name is not None)
    reachable: ColumnElement[bool] = or_(holder.is_(None), holder.in_(named))
    values: dict[str, Any] = {"instance_name": instance}
    if "taken_from" in table.c:
        values["taken_from"] = holder
    for chunk in in_chunks(servers):
        connection.execute(
            update(table).where(table.c.destination.in_(chunk), reachable).values(values)
        )


def _lower_receipt_position(connection: Connection, instance: str, holders: set[str]) -> None:
    table = sender_tables.receipt_positions
    lowest = select(func.min(table.c.stream_id)).where(table.c.instance_name.in_(sorted(holders)))
    position = connection.execute(lowest).scalar()
    if position is not None:
        _lower_positions(connection, [instance], position)


def _lower_positions(connection: Connection, senders: Sequence[str], position: int) -> None:
    table = sender_tables.receipt_positions
    # Who has no position yet would begin at the newest receipt.
    rows = [{"instance_name": sender, "stream_id": position} for sender in senders]
    insert_rows(connection, table, rows)
    connection.execute(
        update(table)
        .where(table.c.instance_name.in_(list(senders)), table.c.stream_id > position)
        .values(stream_id=position)
    )


def last_list(connection: Connection) -> list[str]:
    """The senders by whose list all who use this database last ran, in order; []: not known."""
    table = sender_tables.sender_list
    query = select(table.c.instance_name).order_by(table.c.place)
    return list(connection.execute(query).scalars())


def follow_list(connection: Connection, senders: Sequence[str], *, shared: bool) -> None:
    """Everybody who uses this database runs by this list of senders from now on.

    If it is another list than before, each of those who share the database is given what is in
    quarantine for no server in particular: its servers may have been those of anybody who held it.
    (What one of them has been sent already comes twice if it is released again.) And each goes on
    with receipts from where the last of the old ones was.
    """
    table = sender_tables.sender_list
    if shared:
        # Two that start at once: the second must not give out again what was released since.
        connection.execute(text("LOCK TABLE sender_list IN SHARE ROW EXCLUSIVE MODE"))
    before = last_list(connection)
    if before == list(senders):
        return
    if shared:
        _give_to_all(connection, senders)
        _read_on_together(connection, before, senders)
    connection.execute(delete(table))
    rows = [{"instance_name": name, "place": place} for place, name in enumerate(senders)]
    insert_rows(connection, table, rows)


def _read_on_together(
    connection: Connection, before: Sequence[str], senders: Sequence[str]
) -> None:
    """Whoever starts late, too: what the others pass until then, they pass for their servers."""
    table = sender_tables.receipt_positions
    name = table.c.instance_name
    lowest = connection.execute(
        select(func.min(table.c.stream_id)).where(name.in_(list(before)))
    ).scalar()
    connection.execute(delete(table).where(name.not_in(list(senders))))
    if lowest is not None:
        _lower_positions(connection, senders, lowest)


def _give_to_all(connection: Connection, senders: Sequence[str]) -> None:
    table = sender_tables.quarantine
    names = [column.name for column in table.c if column.name not in ("id", "instance_name")]
    of_nobody = table.c.destination.is_(None)
    first_of_each = select(func.min(table.c.id)).where(of_nobody).group_by(table.c.event_id)
    there = table.alias()
    for sender in senders:
        has_it = exists().where(
            there.c.destination.is_(None),
            there.c.event_id == table.c.event_id,
            there.c.instance_name == sender,
        )
        missing = (
            select(*(table.c[name] for name in names), literal(sender))
            .where(table.c.id.in_(first_of_each), ~has_it)
            .order_by(table.c.id)
        )
        connection.execute(insert(table).from_select([*names, "instance_name"], missing))
    holder = table.c.instance_name
    connection.execute(
        delete(table).where(of_nobody, or_(holder.is_(None), holder.not_in(list(senders))))
    )
