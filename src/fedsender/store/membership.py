"""The list of senders in force: a row of `sender_database`, which several senders share.

A change of it is one at a time, by compare-and-swap on that row. `switching.senders` has the steps.
Whoever gains servers by a change gets a *walk*: the servers' events from the lowest position of any
sender of the old list on may not be noted as owed to them, because the sender that had them was not
so far. It has ended once its sender's events position, in the homeserver's database, is past it.
That database may be set back alone, with all that the walk has noted there: so its row says where
it begins, and stays until the list changes again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy import Connection, delete, exists, func, insert, literal, or_, select, update

from fedsender.matrix import shard_of
from fedsender.runtime import Runtime
from fedsender.store import tables
from fedsender.store.engine import Database, reading, writing
from fedsender.store.leases import DRIFT_S, LEASE_S, NOBODY, PLACE
from fedsender.store.requests import hand_on
from fedsender.store.statements import in_chunks, insert_rows, replace_rows, upsert

__all__ = ["Membership", "Standing", "Walk"]

sender_list, walks, leases, quarantine = (
    tables.sender_list,
    tables.walks,
    tables.leases,
    tables.quarantine,
)
_ONE: Final = 1


class Standing(NamedTuple):
    """The list of senders as it stands.

    Attributes:
        in_force: the names of all senders, in order.
        change: id of the change under way; None: there is none.
        wanted: the list that it leads to.
    """

    in_force: tuple[str, ...]
    change: str | None = None
    wanted: tuple[str, ...] = ()


class Walk(NamedTuple):
    """The events that the servers that a sender has gained may lack.

    Attributes:
        after: up to here all that they are owed was noted before.
        upto: the last of them, a stream ordering.
        before: the list by which it is seen what was gained; None: everything was.
    """

    after: int
    upto: int
    before: tuple[str, ...] | None

    def of(self, instance: str) -> Callable[[str], bool]:
        """Whether this sender has gained a server that is its own now."""
        before = self.before
        if before is None or instance not in before:
            return lambda _: True
        return lambda server: before[shard_of(server, len(before))] != instance


class Holder(NamedTuple):
    """The row of a name's lease: see `tables.leases`."""

    holder: str
    renewal: int
    ends: bool
    stopped: str | None
    stands: bool
    """Whether it was written in this place: before a failover somebody may have had it since."""

    def has_stopped(self, change: str | None) -> bool:
        """Whether this holder has stopped for this change, and not one before it."""
        return self.stopped == f"{change} {self.holder}"

    def sends(self, change: str | None) -> bool:
        """Whether somebody may send under this name, for all that the row says."""
        return not self.stands or (self.holder != NOBODY and not self.has_stopped(change))


@dataclass(frozen=True, slots=True)
class Missing:
    """The senders that keep a change of the list from coming into force.

    Attributes:
        running: names of the list in force that have not stopped.
        absent: names of the new list under which nobody waits.
        lapsed: names of the list in force whose lease has lapsed, or is void, as their rows are.
            Sessions of theirs may not have ended.
    """

    running: Sequence[str]
    absent: Sequence[str]
    lapsed: Mapping[str, Holder]


class Membership:
    """Questions about the list of senders, and changes of it."""

    def __init__(self, database: Database, runtime: Runtime, instance: str) -> None:
        self._database = database
        self._runtime = runtime
        self._instance = instance
        # Row of each name as it was seen, and since when.
        self._watched: dict[str, tuple[Holder, float]] = {}

    @reading
    def standing(self, connection: Connection) -> Standing | None:
        """The list as it stands; None: there is none yet."""
        return _standing(connection)

    @writing
    def begin(
        self, connection: Connection, senders: Sequence[str], places: Mapping[str, int]
    ) -> None:
        """Put the first list in force, if there is none.

        `places`: the events position of each sender so far.
        """
        first = upsert(connection.dialect.name, sender_list)
        first = first.values(id=_ONE, in_force=list(senders))
        made = connection.execute(first.on_conflict_do_nothing().returning(sender_list.c.id))
        if made.first() is not None:
            _take_over_if_others_sent(connection, senders, places)

    @writing
    def follow(
        self, connection: Connection, senders: Sequence[str], places: Mapping[str, int]
    ) -> None:
        """Put this list in force, in a database that no other sender uses; `places` as above."""
        replace_rows(connection, sender_list, ("id",), [{"id": _ONE, "in_force": list(senders)}])
        _take_over_if_others_sent(connection, senders, places)

    @writing
    def want(
        self, connection: Connection, change: str, seen: Sequence[str], wanted: Sequence[str]
    ) -> bool:
        """Begin this change, if the list in force is the one that we have seen, and no change is
        under way."""
        found = _standing(connection, lock=True)
        if found is None or found.change is not None or found.in_force != tuple(seen):
            return False
        connection.execute(update(sender_list).values(change=change, wanted=list(wanted)))
        return True

    @writing
    def withdraw(self, connection: Connection, change: str) -> bool:
        """Withdraw this change, if it is not in force, nor withdrawn."""
        query = update(sender_list).where(sender_list.c.change == change)
        return connection.execute(query.values(change=None, wanted=None)).rowcount == 1

    @writing
    def note_stopped(self, connection: Connection, change: str) -> None:
        """Note that we have stopped for this change: we send nothing until it is decided."""
        query = update(leases).where(leases.c.instance_name == self._instance)
        connection.execute(query.values(stopped=literal(f"{change} ").concat(leases.c.holder)))

    async def missing(self, standing: Standing, places: Mapping[str, bool]) -> Missing:
        """The senders that keep this change from coming into force; asked again and again.

        `places`: by name whether a sender that is not ours was the last one under it.
        """
        rows, lapsed = await self._watch()
        running: list[str] = []
        gone: dict[str, Holder] = {}
        for name in standing.in_force:
            if name not in rows:
                # Nobody ever ran under it here.
                if places.get(name, False):
                    running.append(name)
                continue
            row = rows[name]
            if row.sends(standing.change):
                if name in lapsed:
                    gone[name] = row
                else:
                    running.append(name)
            elif row.holder == NOBODY:
                gone[name] = row
        waiting = {
            name
            for name, each in rows.items()
            if each.holder != NOBODY and not each.sends(standing.change) and name not in lapsed
        }
        absent = [name for name in standing.wanted if name not in waiting]
        return Missing(running, absent, gone)

    async def _watch(self) -> tuple[dict[str, Holder], set[str]]:
        """The row of each name's lease, and the names whose lease has lapsed: it ends, and its row
        has not changed for as long as we look."""
        rows = await self.holders()
        now_s = self._runtime.elapsed_s()
        for name, row in rows.items():
            if self._watched.get(name, (None, 0.0))[0] != row:
                self._watched[name] = row, now_s
        return rows, {
            name
            for name, row in rows.items()
            if (row.ends or row.holder == NOBODY)
            and now_s - self._watched[name][1] >= LEASE_S + DRIFT_S
        }

    async def acts(self, name: str) -> bool:
        """Whether somebody may act under another name; asked again and again. If its lease has
        lapsed, it is void from now on."""
        rows, lapsed = await self._watch()
        if name not in rows or (rows[name].holder == NOBODY and rows[name].stands):
            return False
        return name not in lapsed or not await self.void({name: rows[name]})

    @writing
    def void(self, connection: Connection, lapsed: Mapping[str, Holder]) -> bool:
        """Take the leases from those whose rows are still as they were seen; whether all are."""
        taken = 0
        for name, row in sorted(lapsed.items()):
            taken += connection.execute(
                update(leases)
                .where(
                    leases.c.instance_name == name,
                    leases.c.holder == row.holder,
                    leases.c.renewal == row.renewal,
                )
                .values(holder=NOBODY, ends=False, place=PLACE)
            ).rowcount
        return taken == len(lapsed)

    @writing
    def put_in_force(
        self, connection: Connection, standing: Standing, places: Mapping[str, int]
    ) -> bool:
        """Make the list that is wanted the one in force.

        False: it is not the one that is wanted any more, or somebody of the old list runs.

        `places`: the events position of each sender so far; none of them moves now.
        """
        if _standing(connection, lock=True) != standing:
            return False
        rows = _holders(connection, lock=True)
        if any(name in rows and rows[name].sends(standing.change) for name in standing.in_force):
            return False
        old, new = standing.in_force, standing.wanted
        # Whoever is no further than its walk may not have ended it.
        unfinished = {
            row.instance_name: row
            for row in connection.execute(select(walks))
            if places.get(row.instance_name, -1) <= row.upto
        }
        there = [places[name] for name in old if name in places]
        lowest = min([*there, *(row.after for row in unfinished.values())], default=None)
        highest = max([*there, *(row.upto for row in unfinished.values())], default=None)
        if lowest is not None and highest is not None:
            _send_to_walk(connection, new, lowest, highest, old, unfinished)
        # What a name left behind when it was in the list before says nothing of it now.
        fresh = [name for name in new if name not in old]
        generation = tables.generation
        connection.execute(delete(generation).where(generation.c.instance_name.in_(fresh)))
        _read_receipts_on(connection, old, new)
        _give_to_all(connection, new)
        _give_to_owners(connection, new)
        hand_on(connection, old, new, self._runtime.now_ms())
        now = {"in_force": list(new), "since": highest, "change": None, "wanted": None}
        connection.execute(update(sender_list).values(now))
        return True

    # --- walks ------------------------------------------------------------------------------------

    @reading
    def walk(self, connection: Connection) -> Walk | None:
        """Our walk by the list in force, also if it has ended; None: we gained nothing."""
        row = connection.execute(
            select(walks.c.after, walks.c.upto, walks.c.before).where(
                walks.c.instance_name == self._instance
            )
        ).one_or_none()
        if row is None:
            return None
        return Walk(row.after, row.upto, None if row.before is None else tuple(row.before))

    @writing
    def walk_from(self, connection: Connection, places: Mapping[str, int]) -> None:
        """Have each walk that has not ended begin at the lowest of these positions: who stood
        higher when the walk was written has been set back, with what it had noted.

        Each, and not only ours: whoever begins first deletes the rows of those who have left.

        `places`: the events position of each sender.
        """
        if not places:
            return
        lowest = min(places.values())
        names = [
            row.instance_name
            for row in connection.execute(select(walks).where(walks.c.after > lowest))
            if places.get(row.instance_name, -1) <= row.upto
        ]
        query = update(walks).where(walks.c.instance_name.in_(names))
        connection.execute(query.values(after=lowest))

    @writing
    def walk_anew(self, connection: Connection, places: Mapping[str, int]) -> None:
        """Walk for all our servers: what is noted as owed may have been set back.

        `places`: the events position of each sender.
        """
        query = select(walks).where(walks.c.instance_name == self._instance)
        unfinished = connection.execute(
            query.where(walks.c.upto >= places.get(self._instance, -1))
        ).all()
        after = min([*places.values(), *(row.after for row in unfinished)])
        upto = max([*places.values(), *(row.upto for row in unfinished)])
        row = {"instance_name": self._instance, "after": after, "upto": upto, "before": None}
        replace_rows(connection, walks, ("instance_name",), [row])

    @reading
    def holders(self, connection: Connection) -> dict[str, Holder]:
        """The row of each name's lease."""
        return _holders(connection)


def _standing(connection: Connection, *, lock: bool = False) -> Standing | None:
    query = select(sender_list.c.in_force, sender_list.c.change, sender_list.c.wanted)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        return None
    return Standing(tuple(row.in_force), row.change, tuple(row.wanted or ()))


def _holders(connection: Connection, *, lock: bool = False) -> dict[str, Holder]:
    columns = (leases.c.holder, leases.c.renewal, leases.c.ends, leases.c.stopped)
    stands = (leases.c.place == PLACE).label("stands")
    query = select(leases.c.instance_name, *columns, stands).order_by(leases.c.instance_name)
    rows = connection.execute(query.with_for_update() if lock else query)
    return {name: Holder(*values) for name, *values in rows}


def _take_over_if_others_sent(
    connection: Connection, senders: Sequence[str], places: Mapping[str, int]
) -> None:
    """Write walks for all servers, and give these senders what is in quarantine, unless it is they
    that have sent so far."""
    if places and set(senders) != set(places):
        _send_to_walk(connection, senders, min(places.values()), max(places.values()), None, ())
        _give_to_all(connection, senders)
        _give_to_owners(connection, senders)


def _send_to_walk(
    connection: Connection,
    senders: Sequence[str],
    after: int,
    upto: int,
    before: Sequence[str] | None,
    unfinished: Collection[str],
) -> None:
    """Write a walk for each of them. Whoever has one that is unfinished walks for all its servers:
    some of them are from the list before that one."""
    connection.execute(delete(walks))
    rows = [
        {
            "instance_name": name,
            "after": after,
            "upto": upto,
            "before": None if before is None or name in unfinished else list(before),
        }
        for name in senders
    ]
    connection.execute(insert(walks), rows)


def _read_receipts_on(connection: Connection, old: Sequence[str], new: Sequence[str]) -> None:
    """Set each sender's receipt positions to the lowest ones of the old list.

    Receipts may be sent twice; nobody's are left out. Without a position a sender would begin at
    the newest receipt.
    """
    table = tables.receipt_positions
    lowest = connection.execute(
        select(table.c.writer, func.min(table.c.stream_id))
        .where(table.c.instance_name.in_(list(old)))
        .group_by(table.c.writer)
    ).all()
    connection.execute(delete(table))
    insert_rows(
        connection,
        table,
        [
            {"instance_name": name, "writer": writer, "stream_id": stream_id}
            for name in new
            for writer, stream_id in lowest
        ],
    )


def _give_to_all(connection: Connection, senders: Sequence[str]) -> None:
    """Give each of the senders an entry of its own for each event that no server got.

    Any of them may have servers now of a sender that has the entry. If such an event is released
    again, a server that got it since gets it twice.
    """
    table = quarantine
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


def _give_to_owners(connection: Connection, senders: Sequence[str]) -> None:
    """Have the entries of each server name the sender that it has now."""
    table = quarantine
    query = select(table.c.destination).where(table.c.destination.is_not(None)).distinct()
    of: dict[str, list[str]] = {}
    for server in connection.execute(query).scalars():
        of.setdefault(senders[shard_of(server, len(senders))], []).append(server)
    for sender, servers in sorted(of.items()):
        for chunk in in_chunks(servers):
            entries = update(table).where(table.c.destination.in_(chunk))
            connection.execute(entries.values(instance_name=sender))
