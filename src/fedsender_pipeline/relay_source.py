"""A relay's database as a source: the records of its log, and the state that is left of older ones.

A sender behind a relay has a store that the relay filled. An audit by that store alone could not
find a lost record. The records read here are the relay's own. They go into an embedded store in the
lake's directory, by the functions that fill the sender's, and are ingested from there like any
other. So a lost record is found, and there is one set of rules.

Records that the relay has deleted, or never had because its present history began later, come from
the sender's own store: no other source has them. The newest event of each room stays in the relay.
Rows that are in the lake are removed from the store in its directory, except those that later
records refer to.

The relay may run meanwhile; its database is only read. It is read up to the sender's own position,
and no sender is told of a record before it is durable.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, bindparam, func, select

from fedsender.embedded import feeding
from fedsender.embedded.facts import BadRow, RelayRow, rows_of
from fedsender.store import positions, tables
from fedsender.store.connections import words
from fedsender.store.engine import StoreError
from fedsender.store.migrations import upgrade
from fedsender.store.records import History
from fedsender.store.statements import insert_rows, select_rows
from fedsender.streams import PduRow
from fedsender_pipeline import PipelineError, sources
from fedsender_pipeline.database import Source, open_source
from fedsender_pipeline.lake import RELAY, Lake, locked
from fedsender_pipeline.session import Step, Steps
from fedsender_relay.database import (
    DamagedLog,
    LogBounds,
    LogRecord,
    read_bounds,
    read_epochs,
    read_kept,
    read_log,
)
from fedsender_relay.line_feed import parse_record

EXPIRED: Final = "expired"
"""The name of the position up to which `expire` has removed rows."""

_events, _json, _exceptions = tables.events, tables.event_json, tables.event_servers
_stays = tables.room_servers


# --- from the sender's own store ------------------------------------------------------------------


def take_over(engine: Engine, sender: Source, instance: str, after: int, upto: int) -> int:
    """Copy events, and servers' stays in rooms, with after < stream ordering <= upto.

    Rows that are there already stay. If it is begun again, the result is the same. Returns the
    number of events.
    """
    taken = 0
    query = select(_events).where(_events.c.stream_ordering <= upto)
    for page in sender.pages(query, [_events.c.stream_ordering], [after]):
        rows = [dict(row._mapping) for row in page]
        ids = [row["event_id"] for row in rows]
        rooms = {row["room_id"] for row in rows}
        texts = _rows_of(sender, _json, "event_id", ids)
        exceptions = _rows_of(sender, _exceptions, "event_id", ids)
        known = _rows_of(sender, tables.rooms, "room_id", rooms)
        versions = {row["room_id"]: row["room_version"] for row in known}
        with engine.begin() as connection:
            feeding.store_rooms(connection, dict.fromkeys(rooms) | versions)
            insert_rows(connection, _events, rows)
            insert_rows(connection, _json, texts)
            feeding.store_exceptions(connection, exceptions)
        taken += len(rows)
    _take_over_stays(engine, sender, after, upto)
    with engine.begin() as connection:
        positions.set_feed_position(connection, upto)
        positions.set_position(connection, "events", instance, upto)
    return taken


def _rows_of(
    sender: Source, table: sa.Table, key: str, names: Iterable[str]
) -> list[dict[str, object]]:
    rows = sender.read(lambda c: list(select_rows(c, select(table), table.c[key], names)))
    return [dict(row._mapping) for row in rows]


def _take_over_stays(engine: Engine, sender: Source, after: int, upto: int) -> None:
    """Copy stays. A full sync of the sender ended some at its position, which may be `after`."""
    query = select(_stays.c.room_id, _stays.c.server, _stays.c.joined, _stays.c.left).where(
        _stays.c.joined <= upto, sa.or_(_stays.c.joined > after, _stays.c.left >= after)
    )
    close = (
        sa.update(_stays)
        .where(_stays.c.room_id == bindparam("room"), _stays.c.server == bindparam("name"))
        .where(_stays.c.left.is_(None), _stays.c.joined <= after)
        .values(left=bindparam("end"))
    )
    for page in sender.pages(query, [_stays.c.room_id, _stays.c.server, _stays.c.joined]):
        ended = [None if row.left is None or row.left > upto else row.left for row in page]
        pairs = list(zip(page, ended, strict=True))
        closed = [
            {"room": row.room_id, "name": row.server, "end": left}
            for row, left in pairs
            if row.joined <= after and left is not None
        ]
        opened = [
            {"room_id": row.room_id, "server": row.server, "joined": row.joined, "left": left}
            for row, left in pairs
            if row.joined > after
        ]
        with engine.begin() as connection:
            if closed:
                connection.execute(close, closed)
            insert_rows(connection, _stays, opened, replacing=("left",))


def without_older(
    sender: Source, base: int, facts: Sequence[tuple[int, list[RelayRow]]]
) -> list[tuple[int, list[RelayRow]]]:
    """The facts without events that the sender had in an earlier history of the relay."""
    ids = [row.event_id for _, rows in facts for row in rows if isinstance(row, PduRow)]
    if not base or not ids:
        return list(facts)

    query = select(_events.c.event_id).where(_events.c.stream_ordering <= base)
    older = sender.read(
        lambda connection: {
            row[0] for row in select_rows(connection, query, _events.c.event_id, ids)
        }
    )
    return [
        (token, [row for row in rows if not (isinstance(row, PduRow) and row.event_id in older)])
        for token, rows in facts
    ]


def end_all_stays(connection: Connection, upto: int) -> None:
    """End all stays at `upto`: another history begins there, which has them all again."""
    connection.execute(sa.update(_stays).where(_stays.c.left.is_(None)).values(left=upto))


# --- what need not be kept ------------------------------------------------------------------------


def expire(engine: Engine, instance: str, upto: int) -> None:
    """Remove the rows that the lake has: all up to and with `upto`.

    Invitations and knocks stay: they show later which users an event turns away.
    """
    membership = sa.case(
        (
            func.json_valid(_json.c.json) == 1,
            func.json_extract(_json.c.json, "$.content.membership"),
        )
    )
    asking = (
        select(_events.c.event_id)
        .join(_json, _json.c.event_id == _events.c.event_id)
        .where(_events.c.type == "m.room.member", membership.in_(("invite", "knock")))
        .scalar_subquery()
    )
    spent = (
        select(_events.c.event_id)
        .where(_events.c.stream_ordering <= upto, _events.c.event_id.not_in(asking))
        .scalar_subquery()
    )
    with engine.begin() as connection:
        # In this order: `spent` is found out by what goes last.
        for table in (_exceptions, _json, _events):
            connection.execute(sa.delete(table).where(table.c.event_id.in_(spent)))
        connection.execute(sa.delete(_stays).where(_stays.c.left < upto))
        connection.execute(sa.delete(tables.redactions))
        positions.set_position(connection, EXPIRED, instance, upto)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        pages, free = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("page_count", "freelist_count")
        )
        # A first run can read years of a log, of which little stays.
        if 2 * free > pages:
            connection.exec_driver_sql("VACUUM")


STORE: Final = "store.sqlite3"
RECORDS_AT_ONCE: Final = 1_000
BYTES_AT_ONCE: Final = 8 * 2**20
_TRIES: Final = 3


@dataclass(slots=True)
class Followed:
    """The counts of a read: records of the relay, and events that only the sender's store has."""

    records: int = 0
    from_sender: int = 0


@contextmanager
def open_relay_source(
    lake: Lake, relay_url: str, sender: Source, instance: str, steps: Steps
) -> Iterator[tuple[Source, Followed]]:
    """The records of the relay with this database, as a homeserver's database to ingest from.

    If the body ends well, rows that the lake has are removed from there.

    Args:
        sender: the store of the audited sender; the relay is read up to its position.

    Raises:
        PipelineError: the relay's database cannot be read, or is of another history.
    """
    home = lake.directory / RELAY
    home.mkdir(mode=0o700, exist_ok=True)
    store = home / STORE
    url = f"sqlite:///{store}"
    with locked(home):
        engine = sa.create_engine(url, hide_parameters=True)
        try:
            with _in_words(store):
                if _prepare(engine, store, instance) > _ingested(lake):
                    # The lake is another, or an older one: it needs what was removed.
                    engine.dispose()
                    store.unlink()
                    _prepare(engine, store, instance)
                with (
                    steps.step("relay") as step,
                    open_source(relay_url, "relay", sender.rows_per_s) as relay,
                ):
                    told = _Follower(engine, relay, sender, instance).follow(step)
            with open_source(url, "relay") as source:
                yield source, told
            with _in_words(store):
                expire(engine, instance, _ingested(lake))
        finally:
            engine.dispose()


@contextmanager
def _in_words(store: Path) -> Iterator[None]:
    try:
        yield
    except (BadRow, StoreError, OSError) as error:
        raise PipelineError(f"pipeline.relay: {error}") from None
    except sa.exc.DBAPIError as error:
        raise PipelineError(f"{store}: {words(error)}; remove it and the lake") from None


def _prepare(engine: Engine, store: Path, instance: str) -> int:
    """Make the store and its tables; return the position up to which `expire` has removed rows."""
    os.close(os.open(store, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with engine.begin() as connection:
        upgrade(connection, "homeserver")
        return positions.read_position(connection, EXPIRED, instance)


def _ingested(lake: Lake) -> int:
    return min(lake.position("events", 0), lake.position("room_servers", 0))


@dataclass(slots=True)
class _Follower:
    """Fills the store up to the sender's position, in the sender's stream orderings."""

    engine: Engine
    relay: Source
    sender: Source
    instance: str

    def follow(self, step: Step) -> Followed:
        """Fill the store, in one transaction for each batch of records."""
        told = Followed()
        # Before the position: so that is one of this history, or of a later one.
        history = self.sender.read(positions.feed_history) or History("", 0)
        base = history.base
        upto = sources.events_position(self.sender, self.instance)
        for attempt in range(_TRIES):
            try:
                epochs, bounds = self.relay.read(lambda c: (read_epochs(c), read_bounds(c)))
                self._enter(history, min(base, upto), told)
                if upto > base:
                    _check(dict(epochs), bounds, history, upto - base)
                    self._resume(epochs, bounds, base, upto, told)
                    self._follow(base, upto, told, step)
            except DamagedLog:
                # Retention took records while we looked.
                if attempt == _TRIES - 1:
                    raise
            else:
                break
        sender_s = f", {told.from_sender:,} events by the sender alone" if told.from_sender else ""
        step.say(f"{told.records:,} records{sender_s}")
        return told

    def _enter(self, history: History, upto: int, told: Followed) -> None:
        """Copy all from before the sender's present history, which the relay does not have."""
        with self.engine.begin() as connection:
            at = max(0, positions.feed_position(connection))
            known = positions.feed_history(connection) or History("", 0)
        if known.base == history.base:
            return
        if known.base > history.base or at > history.base:
            raise PipelineError(
                f"the sender's stream orderings are the relay's tokens since {history.base}, and"
                f" the lake has other ones up to {at}: the sender's database is another one, or was"
                " restored; ingest into a new lake"
            )
        told.from_sender += take_over(self.engine, self.sender, self.instance, at, upto)
        if upto == history.base:
            with self.engine.begin() as connection:
                positions.set_feed_history(connection, history)

    def _resume(
        self,
        epochs: Sequence[tuple[str, int]],
        bounds: LogBounds,
        base: int,
        upto: int,
        told: Followed,
    ) -> None:
        """Copy the part of the present history from before the first record of the relay's log."""
        epoch = epochs[-1][0]
        with self.engine.begin() as connection:
            at = max(base, positions.feed_position(connection))
            known = positions.feed_history(connection)
            if known is not None and at - base > dict(epochs).get(known.epoch, -1):
                raise PipelineError(
                    f"pipeline.relay: its history is {epoch}, and the lake's is {known.epoch};"
                    " ingest into a new lake"
                )
            positions.set_feed_history(connection, History(epoch, base))
            begin = min(bounds.first - 1 + base, upto)
            if begin <= at == base and base > 0:
                # The new history says anew who is where.
                end_all_stays(connection, base)
        if begin > at:
            self._keep(base, at, begin)
            told.from_sender += take_over(self.engine, self.sender, self.instance, at, begin)

    def _keep(self, base: int, at: int, upto: int) -> None:
        """Store events that the relay keeps from before its log; the sender must have had them."""
        after = at - base
        while kept := self.relay.read(partial(read_kept, after=after, limit=RECORDS_AT_ONCE)):
            after = kept[-1].token
            parsed = [(each.token + base, _events_of(each)) for each in kept]
            facts = without_older(self.sender, base, [each for each in parsed if each[0] <= upto])
            with self.engine.begin() as connection:
                before = positions.feed_position(connection)
                feeding.apply_tokens(connection, facts, kept[-1].ms)
                positions.set_feed_position(connection, before)

    def _follow(self, base: int, upto: int, told: Followed, step: Step) -> None:
        with self.engine.begin() as connection:
            at = max(base, positions.feed_position(connection))
        step.show(at, upto)
        while at < upto:
            look = partial(read_log, after=at - base, upto=upto - base, max_bytes=BYTES_AT_ONCE)
            batch = self.relay.read(look)
            self._store(base, batch)
            self.relay.pause(len(batch))
            told.records += len(batch)
            at = batch[-1].token + base
            step.show(at, upto)

    def _store(self, base: int, batch: Sequence[LogRecord]) -> None:
        """Store records as the sender's store does, each with its time of arrival at the relay."""
        facts = without_older(
            self.sender, base, [(each.token + base, _rows(each)) for each in batch]
        )
        last = batch[-1].token + base
        table = tables.events
        with self.engine.begin() as connection:
            feeding.apply_tokens(connection, facts, batch[-1].ms)
            connection.execute(
                table.update()
                .where(table.c.stream_ordering == sa.bindparam("token"))
                .values(received_ts=sa.bindparam("ms")),
                [{"token": each.token + base, "ms": each.ms} for each in batch],
            )
            positions.set_position(connection, "events", self.instance, last)


def _check(shared: dict[str, int], bounds: LogBounds, history: History, upto: int) -> None:
    """Check that the sender's position is one of the relay's; `upto`: that position as a token."""
    if history.epoch not in shared:
        raise PipelineError(
            f"pipeline.relay: the sender follows history {history.epoch or 'none'}, which is none"
            " of this relay's: it is another relay's, or the sender has yet to come to it"
        )
    if upto > shared[history.epoch]:
        raise PipelineError(
            f"pipeline.relay: of history {history.epoch} it has {shared[history.epoch]} tokens, and"
            f" the sender has read up to {upto}: it is another relay's, or an older copy"
        )
    assert upto <= bounds.head


def _handles_none(_server: str) -> bool:
    """False: rows of to-device messages and device lists are left out, as they are no events."""
    return False


def _rows(record: LogRecord) -> list[RelayRow]:
    rows = [orjson.loads(text) for text in rows_of(record.lines)]
    return parse_record(record.token, rows, _handles_none)


def _events_of(record: LogRecord) -> list[RelayRow]:
    return [row for row in _rows(record) if isinstance(row, PduRow)]
