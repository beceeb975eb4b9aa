"""A database of our own, in place of a homeserver's: a feed fills it."""

from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar, cast

import trio
from cachetools import LRUCache
from sqlalchemy import Connection, select

from fedsender.embedded import appends, feeding, stays
from fedsender.embedded.appends import News, Notice, Place
from fedsender.embedded.facts import (
    Answer,
    Record,
    RelayRow,
    RoomServers,
    ServersRow,
    redacted_in,
    stored_rows,
)
from fedsender.embedded.feeding import Step, Steps
from fedsender.runtime import Runtime
from fedsender.store import event_rows, positions, tables
from fedsender.store.edus import EduStore
from fedsender.store.engine import Database, reading, writing
from fedsender.store.homeserver import HomeserverStore, ToRoute
from fedsender.store.lock import lock_of
from fedsender.store.migrations import bring_up_to_date, claim_store
from fedsender.store.opening import Homeserver, OpenDatabase, StoreConfig
from fedsender.store.records import (
    EventRow,
    History,
    HomeserverSettings,
    Hosts,
    Receipt,
)
from fedsender.store.statements import replace_rows, select_rows
from fedsender.streams import HostsRow

T = TypeVar("T")

MAX_SERVERS_KNOWN = 200_000
"""The most servers of an embedded store's rooms in memory: some 20 MB if they all differ."""


class EmbeddedStore(HomeserverStore):
    """The embedded store: what a feed brings is stored here, and read by senders."""

    def __init__(self, database: Database, runtime: Runtime, settings: HomeserverSettings) -> None:
        super().__init__(database, runtime, settings)
        self._here: LRUCache[str, frozenset[str]] = LRUCache(
            MAX_SERVERS_KNOWN, getsizeof=lambda servers: 1 + len(servers)
        )
        self._moves = 0
        # The newest token of the feed that we know to be stored. It falls only when the feed begins
        # anew.
        self._fed = -1

    @property
    def alone(self) -> bool:
        """Whether no other sender reads this store."""
        return len(self._settings.instances) == 1

    @property
    def known_to_others(self) -> bool:
        """Whether senders of other names may have sent events of this store."""
        return self._database.dialect == "postgresql"

    def begin_anew(self) -> None:
        """Forget all that is known of the database: it was set back."""
        super().begin_anew()
        self._hosts_moved()

    def _read_mark(self, connection: Connection) -> str | None:
        marks = tables.generation_marks.c
        query = select(marks.mark).where(marks.instance_name == self._settings.instance)
        return connection.execute(query).scalar()

    def _write_mark(self, connection: Connection, mark: str) -> None:
        row = {"instance_name": self._settings.instance, "mark": mark}
        replace_rows(connection, tables.generation_marks, ("instance_name",), [row])

    @reading
    def event_writer_positions(self, connection: Connection) -> dict[str, int]:
        """By configured writer of events the feed's position: what is above it does not count."""
        stored = positions.feed_position(connection)
        return dict.fromkeys(self._settings.event_writers, stored)

    # --- servers in rooms -------------------------------------------------------------------------

    @reading
    def servers_before(
        self, connection: Connection, events: Sequence[EventRow]
    ) -> dict[str, Hosts]:
        """By event id the servers in the room at it."""
        return stays.servers_before(connection, events)

    @reading
    def read_to_route(
        self,
        connection: Connection,
        after: int,
        upto: int,
        limit: int,
        offers: int,
        wanted: Callable[[EventRow], bool],
    ) -> ToRoute:
        """As the interface says."""
        rows = event_rows.read_events(connection, after, upto, limit, schema=self._schema)
        before = partial(stays.servers_before, connection)
        return self._to_route(rows, upto if len(rows) < limit else None, offers, wanted, before)

    async def servers_now(self, room_ids: Sequence[str]) -> dict[str, frozenset[str]]:
        """By room the servers in it now."""
        # Nobody else writes here.
        wanted = set(room_ids)
        known = {name: self._here[name] for name in wanted if name in self._here}
        moves, unknown = self._moves, wanted - known.keys()
        if not unknown:
            await trio.lowlevel.checkpoint()
            return known
        found = await self._database.read(partial(stays.servers_now, room_ids=unknown))
        if moves == self._moves:
            for name, servers in found.items():
                with suppress(ValueError):  # It alone is larger than the cache.
                    self._here[name] = servers
        return known | found

    @reading
    def rooms_with(
        self, connection: Connection, destination: str, room_ids: Iterable[str]
    ) -> set[str]:
        """The rooms among these that the server is in now (I6)."""
        stay = tables.room_servers.c
        here = select(stay.room_id).where(stay.server == destination, stay.left.is_(None))
        return {row.room_id for row in select_rows(connection, here, stay.room_id, room_ids)}

    @reading
    def rooms_shared_with(self, connection: Connection, destination: str) -> list[str]:
        """The rooms that the server is in now."""
        stay = tables.room_servers.c
        here = select(stay.room_id).where(stay.server == destination, stay.left.is_(None))
        return sorted(connection.execute(here.distinct()).scalars())

    @contextmanager
    def _hosts_moving(self) -> Iterator[None]:
        """Keep results of reads out of memory while servers join or leave rooms."""
        self._moves += 1
        try:
            yield
        finally:
            self._hosts_moved()

    def _hosts_moved(self) -> None:
        """Drop the remembered servers of rooms: servers have joined or left."""
        self._moves += 1
        self._here.clear()

    async def apply_feed_batch(
        self, batch: Sequence[tuple[int, Sequence[RelayRow]]], history: History | None = None
    ) -> None:
        """Store the rows of each (token, rows), ascending, and the newest token, as one.

        A token that was stored before is passed over. Raises FeedError for rows that cannot be
        stored, and SetBack if tokens are gone that we knew to be stored.

        `history`: that of these tokens, if it is a new one. It is stored with them, as a failover
        that took it alone would not be noticed.
        """
        now_ms = self._now_ms()

        def apply(connection: Connection) -> None:
            self._check_stored(connection, self._fed)
            self._check_taker(connection)
            feeding.apply_tokens(connection, batch, now_ms)
            if history is not None:
                positions.set_feed_history(connection, history)
            self.tell_redacted(connection, redacted_in(row for _, rows in batch for row in rows))

        moving = _move_hosts(row for _, rows in batch for row in rows)
        with self._noticing(), self._hosts_moving() if moving else nullcontext():
            await self._database.write(apply)
        self._fed = max([self._fed, *(token for token, _ in batch)])

    def _check_stored(self, connection: Connection, upto: int) -> None:
        """Raise SetBack if the feed's rows up to here are not here any more.

        To store more would leave a gap, and to move the events position would pass the lost ones.
        """
        stored = max(0, positions.feed_position(connection))
        if stored < upto:
            raise positions.SetBack(
                f"the feed is stored up to {stored}, and was up to {upto}: the database is in"
                " an earlier state (a replica that was behind took over, or it was restored)"
            )

    def _check_taker(self, connection: Connection) -> None:
        """Raise Elsewhere if another sender takes the feed."""
        if not self.alone:
            appends.check_taker(connection, self._settings.instance)

    def tell_redacted(self, connection: Connection, event_ids: Iterable[str]) -> None:
        """Tell the other senders, if there are any, that these events are redacted."""
        if not self.alone:
            told, instance = map(appends.redaction, event_ids), self._settings.instance
            appends.store_notices(connection, instance, told, self._now_ms())

    async def take_feed(self, epoch: str | None = None) -> bool:
        """Take the feed; False: another sender of our list has it.

        `epoch`: the history that begins; None: the one that is stored goes on.

        Raises Elsewhere if another sender takes it at the same moment.
        """
        me = self._settings.instance
        before = await self._database.read(appends.taker)
        others = {*self._settings.instances} - {me}
        if before in others and not await self.ended(before):
            return False
        take = partial(appends.take, instance=me, before=before, epoch=epoch)
        if not await self._database.write(take):
            return False
        await self.drop_unfinished_load()
        await self.feed_position()
        return True

    async def feed_news(self, after: Place | None) -> News:
        """The news in the store since `after`; None: the present positions."""
        instance = self._settings.instance
        found = await self._database.read(
            lambda connection: appends.read_news(connection, instance, after)
        )
        if after is None or found.place.position > after.position:
            self._hosts_moved()
        return found

    async def append_records(self, records: Sequence[Record]) -> list[Answer]:
        """Store records in this order, in one transaction; see `appends`.

        Raises Elsewhere, and SetBack if tokens are gone that we gave.
        """
        now_ms = self._now_ms()

        def append(connection: Connection) -> list[Answer]:
            self._check_stored(connection, self._fed)
            self._check_taker(connection)
            make_rows = partial(feeding.Rows, now_ms)
            answers = appends.append_records(connection, records, now_ms, make_rows)
            self.tell_redacted(connection, redacted_in(stored_rows(records, answers)))
            return answers

        moving = _move_hosts(row for record in records for row in record.rows)
        with self._noticing(), self._hosts_moving() if moving else nullcontext():
            answers = await self._database.write(append)
        tokens = (answer for answer in answers if isinstance(answer, int))
        self._fed = max([self._fed, *tokens])
        return answers

    @reading
    def room_servers(self, connection: Connection, room_id: str) -> RoomServers | None:
        """The room's servers by the feed's rows; None: no row was about them."""
        return stays.room_of(connection, room_id)

    @reading
    def find_appends(
        self, connection: Connection, keys: Sequence[bytes]
    ) -> dict[bytes, tuple[int, int]]:
        """Key -> (token, checksum) of the stored records."""
        return appends.find_appends(connection, keys)

    async def forget_appends(self) -> int:
        """Delete some of the old keys, and all old notices; returns the number of keys."""
        now_ms = self._now_ms()

        def forget(connection: Connection) -> int:
            appends.forget_notices(connection, now_ms)
            return appends.forget_appends(connection, now_ms)

        return await self._database.write(forget)

    async def store_ephemeral(
        self, receipts: Sequence[Receipt], notices: Sequence[Notice]
    ) -> int | None:
        """Store receipts for servers that do not answer now, and notices for other senders.

        Returns the newest stream id of the receipts; None: there were none. Raises Elsewhere.
        """
        instance, now_ms = self._settings.instance, self._now_ms()

        def store(connection: Connection) -> int | None:
            self._check_taker(connection)
            if not self.alone:
                appends.store_notices(connection, instance, notices, now_ms)
            return feeding.store_receipts(connection, receipts) if receipts else None

        return await self._database.write(store)

    async def feed_position(self) -> int:
        """The token up to which the feed is stored, and from which it goes on; -1: none yet."""
        self._fed = await self._database.read(positions.feed_position)
        return self._fed

    def note_fed(self, token: int) -> None:
        """Note that the feed is stored up to here."""
        self._fed = token

    @reading
    def mark(self, connection: Connection) -> str | None:
        """What tells this store from all others: 16 hexadecimal characters; None: nobody's yet."""
        mark: str | None = connection.execute(select(tables.store_owner.c.mark)).scalar()
        return mark

    @reading
    def feed_history(self, connection: Connection) -> History | None:
        """The history that the feed's tokens belong to; None: not known yet."""
        return positions.feed_history(connection)

    @writing
    def begin_history(self, connection: Connection, history: History) -> None:
        """Store the history that the feed's tokens belong to from now on."""
        self._check_taker(connection)
        positions.set_feed_history(connection, history)

    async def drop_unfinished_load(self) -> None:
        """Remove the rows of an interrupted load; before the feed stores anything."""
        await self.write_in_steps(feeding.drop_unfinished_load())

    async def write_in_steps(self, steps: Steps[T]) -> T:
        """Run each step in its own transaction, which others may share; returns the end's value.

        Raises FeedError for rows that cannot be stored, and what the steps raise.
        """
        limiter = trio.CapacityLimiter(1)
        result: Any = None
        with self._noticing(), self._hosts_moving(), closing(steps):
            while True:
                go_on = partial(feeding.run_step, steps, result)
                step, value = await self._runtime.run_sync(go_on, limiter=limiter)
                if step is None:
                    return cast(T, value)
                result = await self._database.write(partial(self._as_taker, step))

    def _as_taker(self, step: Step, connection: Connection) -> Any:
        self._check_taker(connection)
        return step(connection)


def _move_hosts(rows: Iterable[RelayRow]) -> bool:
    return any(isinstance(row, HostsRow | ServersRow) for row in rows)


@asynccontextmanager
async def open_embedded(
    config: StoreConfig, runtime: Runtime, open_one: OpenDatabase
) -> AsyncIterator[Homeserver]:
    """Our own store, its tables up to date. An SQLite belongs to one sender.

    Raises SchemaDiffers, LockHeld if the tables are old and a daemon runs on them, and
    WrongDatabase if it belongs to another homeserver.
    """
    async with open_one(config.homeserver_url, "homeserver", ours=True) as main:
        await bring_up_to_date(main, "homeserver", lock_of(main.url, runtime))
        if config.server_name is not None:
            own = (config.server_name, runtime.entropy(8).hex())
            await main.write(lambda connection: claim_store(connection, *own, relay=False))
        # A homeserver that feeds us has left out what others are not to know.
        yield Homeserver(
            EmbeddedStore(main, runtime, config.homeserver),
            EduStore(main, device_names=True),
            main,
            lock_of(main.url, runtime, config.homeserver.instance),
        )


def own_store(store: HomeserverStore) -> EmbeddedStore:
    """The store as one of our own, where the configuration says that it is one."""
    assert isinstance(store, EmbeddedStore)
    return store
