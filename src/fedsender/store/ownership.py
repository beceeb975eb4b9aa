"""Whose records they are, where several senders share one database: functions of a connection.

Each record of a server names the instance that holds it. When the list of senders changes, servers
go from one to another by the shard rule, and their records must go with them: a frozen transaction
is repeated by whoever sends next, and a debt is paid by him. A start asks what is here of servers
that are somebody else's now, and takes what is its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Connection, Table, func, or_, select, update

from fedsender.store import sender_tables
from fedsender.store.event_rows import in_chunks
from fedsender.store.rows import insert_rows


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
        servers: those whose records another instance held until now.
    """

    taken: Mapping[str | None, int] = field(default_factory=dict)
    out_of_reach: Mapping[str, int] = field(default_factory=dict)
    servers: frozenset[str] = field(default=frozenset(), compare=False)


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
        frozenset().union(*(names for name, names in taken.items() if name is not None)),
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
    for chunk in in_chunks(servers):
        connection.execute(
            update(table)
            .where(table.c.destination.in_(chunk), reachable)
            .values(instance_name=instance)
        )


def _lower_receipt_position(connection: Connection, instance: str, holders: set[str]) -> None:
    table = sender_tables.receipt_positions
    lowest = select(func.min(table.c.stream_id)).where(table.c.instance_name.in_(sorted(holders)))
    position = connection.execute(lowest).scalar()
    if position is not None:
        # Who has no position yet would begin at the newest receipt.
        row = {"instance_name": instance, "stream_id": position}
        insert_rows(connection, table, [row])
        connection.execute(
            update(table)
            .where(table.c.instance_name == instance, table.c.stream_id > position)
            .values(stream_id=position)
        )
