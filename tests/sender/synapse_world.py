"""The world of `harness` on a Synapse-shaped database: where the EDUs of a homeserver come from."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, delete, insert
from tests.sender.harness import HS, RemoteServer, World
from tests.store import synapse_schema
from tests.store.ready_made import lay

from fedsender.store import HomeserverSettings, Store, StoreConfig, open_store, tables
from fedsender.store.engine import Database, DatabaseOptions, open_database
from fedsender.store.synapse import SynapseStore


class Killed(BaseException):
    """The process ended here."""


class SynapseWorld(World):
    """Writes what Synapse's other processes write; `fed1` is the only sender.

    `kill_at` names the commit point at which the process ends, as `open_store` names them.
    """

    database: Database

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.device_names = False
        self.kill_at: str | None = None
        self.stream_id = 10
        self.backfilled = 0
        self.faults = self._fault

    def _fault(self, point: str) -> None:
        if point == self.kill_at:
            self.kill_at = None
            raise Killed

    @property
    def synapse(self) -> SynapseStore:
        """The homeserver's database, with what only a Synapse's has."""
        assert isinstance(self.store.homeserver, SynapseStore)
        return self.store.homeserver

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        url = lay(self.directory / "synapse.db", synapse_schema.create)
        options = DatabaseOptions(synchronous="OFF")
        async with open_database(url, self.runtime, name="test", options=options) as self.database:
            settings = self.store_settings()
            async with open_store(settings, self.runtime, faults=self.faults) as self.store:
                yield self.store

    def store_settings(self) -> StoreConfig:
        return StoreConfig(
            HomeserverSettings(
                "synapse", "fedsender", ("fedsender",), device_names=self.device_names
            ),
            f"sqlite:///{self.directory / 'synapse.db'}",
            lay(self.directory / "sender.sqlite3", "sender"),
            synchronous="OFF",
        )

    # --- what Synapse's other processes write ---

    async def write(self, table: Table, *rows: dict[str, Any]) -> None:
        await self.database.write(lambda connection: _insert(connection, table, rows))

    async def rows(self, table: Table) -> list[tuple[Any, ...]]:
        query = table.select()
        return await self.database.read(lambda c: [tuple(row) for row in c.execute(query)])

    async def remove(self, table: Table, **values: Any) -> None:
        statement = delete(table)
        for name, value in values.items():
            statement = statement.where(table.c[name] == value)
        await self.database.write(lambda connection: _nothing(connection.execute(statement)))

    async def login(self, user: str, device: str, **keys: Any) -> None:
        """A device appears, or its keys change; nobody is told yet."""
        await self.logout(user, device)
        await self.write(
            tables.devices,
            {"user_id": user, "device_id": device, "display_name": "My phone", "hidden": False},
        )
        if keys:
            row = {"user_id": user, "device_id": device, "key_json": json.dumps(keys)}
            await self.write(tables.e2e_device_keys_json, row)

    async def logout(self, user: str, device: str) -> None:
        for table in (tables.devices, tables.e2e_device_keys_json):
            await self.remove(table, user_id=user, device_id=device)

    async def poke(
        self, user: str, *devices: str, servers: Iterable[str], tell: bool = True
    ) -> int:
        """Servers are to be told of these devices, one after the other; the last stream id."""
        for device in devices:
            self.stream_id += 1
            rows = [
                {
                    "destination": server,
                    "stream_id": self.stream_id,
                    "user_id": user,
                    "device_id": device,
                }
                for server in servers
            ]
            await self.write(tables.device_lists_outbound_pokes, *rows)
        if tell:
            self.sender.edus.device_lists.advance(self.stream_id)
        return self.stream_id

    async def upload_cross_signing(self, user: str, master: str, self_signing: str) -> None:
        self.stream_id += 1
        await self.write(
            tables.e2e_cross_signing_keys,
            *(
                {
                    "user_id": user,
                    "keytype": kind,
                    "stream_id": self.stream_id,
                    "keydata": json.dumps(
                        {"user_id": user, "usage": [kind], "keys": {f"ed25519:{key}": key}}
                    ),
                }
                for kind, key in (("master", master), ("self_signing", self_signing))
            ),
        )

    async def found(self, room: str, group: int, *users: str) -> None:
        """A room of version 10 with these members, by the state group and by the current state."""
        await self.write(tables.rooms, {"room_id": room, "room_version": "10"})
        await self.state(room, group, *users)
        await self.members(room, *users)

    async def state(self, room: str, group: int, *users: str) -> None:
        """A state group in which these are joined."""
        for user in users:
            event_id = f"${room}{user}{group}"
            await self.write(
                tables.room_memberships,
                {"event_id": event_id, "user_id": user, "room_id": room, "membership": "join"},
            )
            await self.write(
                tables.state_groups_state,
                {
                    "state_group": group,
                    "room_id": room,
                    "type": "m.room.member",
                    "state_key": user,
                    "event_id": event_id,
                },
            )

    async def message(
        self,
        room: str,
        group: int | None,
        text: str,
        *,
        sender: str = f"@a:{HS}",
        newest: bool = False,
        metadata: str = "{}",
        tell: bool = True,
        **values: Any,
    ) -> str:
        """An event with this state group after it; `newest`: the room's only forward extremity."""
        pdu = self.pdu(room, text, sender=sender, **values)
        self.token += 1
        await self.write(
            tables.events,
            {
                "stream_ordering": self.token,
                "event_id": pdu.event_id,
                "room_id": room,
                "type": pdu.event["type"],
                "sender": sender,
                "state_key": pdu.event.get("state_key"),
                "received_ts": self.runtime.now_ms(),
                "depth": self.token,
                "outlier": False,
            },
        )
        await self.write(
            tables.event_json,
            {
                "event_id": pdu.event_id,
                "room_id": room,
                "internal_metadata": metadata,
                "json": pdu.json,
                "format_version": 3,
            },
        )
        if group is not None:
            row = {"event_id": pdu.event_id, "state_group": group}
            await self.write(tables.event_to_state_groups, row)
        if newest:
            await self.remove(tables.event_forward_extremities, room_id=room)
            row = {"event_id": pdu.event_id, "room_id": room}
            await self.write(tables.event_forward_extremities, row)
        if tell and hasattr(self, "sender"):
            self.sender.events.advance(self.token)
        return pdu.event_id

    async def members(self, room: str, *users: str) -> None:
        """These are in the room now."""
        for user in users:
            self.servers.setdefault(user.partition(":")[2], RemoteServer(user.partition(":")[2]))
        await self.write(
            tables.current_state_events,
            *(
                {
                    "event_id": f"${room}{user}",
                    "room_id": room,
                    "type": "m.room.member",
                    "state_key": user,
                    "membership": "join",
                }
                for user in users
            ),
        )

    async def read(
        self,
        room: str,
        user: str,
        event_id: str = "$e",
        *,
        thread: str | None = None,
        kind: str = "m.read",
        ts: int = 1234,
        tell: bool = True,
        stream_id: int | None = None,
        writer: str = "master",
    ) -> int:
        """A user has read the room up to an event; the stream id, by default the next one."""
        if stream_id is None:
            self.stream_id += 1
            stream_id = self.stream_id
        old = {"room_id": room, "user_id": user, "receipt_type": kind, "thread_id": thread}
        await self.remove(tables.receipts_linearized, **old)
        row = {"stream_id": stream_id, "event_id": event_id, "data": f'{{"ts":{ts}}}', **old}
        row["instance_name"] = writer
        await self.write(tables.receipts_linearized, row)
        if tell:
            self.sender.edus.receipts.advance(stream_id)
        return stream_id

    async def event(self, event_id: str, room: str, sender: str, *, age_s: float) -> None:
        """An event that the homeserver has, and that was fanned out before."""
        await self.write(
            tables.events,
            {
                "stream_ordering": self._before(),
                "event_id": event_id,
                "room_id": room,
                "type": "m.room.message",
                "sender": sender,
                "received_ts": self.runtime.now_ms() - round(age_s * 1000),
                "depth": 1,
                "outlier": False,
            },
        )

    def _before(self) -> int:
        self.backfilled -= 1
        return self.backfilled

    async def prune(self, server: str, user: str) -> None:
        """Synapse's hourly job: of several old pokes it leaves the newest, and cuts the chain."""
        rows = await self.rows(tables.device_lists_outbound_pokes)
        ids = sorted(row[1] for row in rows if row[0] == server and row[2] == user)
        for stream_id in ids[:-1]:
            await self.remove(
                tables.device_lists_outbound_pokes, destination=server, stream_id=stream_id
            )
        if len(ids) > 1:
            await self.remove(
                tables.device_lists_outbound_last_success, destination=server, user_id=user
            )

    # --- what servers got ---

    def pushes(self) -> list[tuple[float, str]]:
        """When (virtual seconds) which server was sent a transaction."""
        return sorted(
            (request.at, server.name)
            for server in self.servers.values()
            for request in server.requests
        )

    def edus(self, server: str, *kinds: str) -> list[dict[str, Any]]:
        """The contents of the EDUs it answered for, in order; of these types, or all."""
        return [
            edu["content"]
            for request in self.servers[server].answered
            for edu in request.edus
            if not kinds or edu["edu_type"] in kinds
        ]


def _insert(connection: Connection, table: Table, rows: tuple[dict[str, Any], ...]) -> None:
    connection.execute(insert(table), list(rows))


def _nothing(_: object) -> None: ...


@contextmanager
def killed() -> Iterator[None]:
    """The body ends by `Killed`, whatever else falls with it."""
    try:
        yield
    except BaseException as error:
        if not _is_kill(error):
            raise
    else:
        raise AssertionError("nothing was killed")


def _is_kill(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_kill(inner) for inner in error.exceptions)
    return isinstance(error, Killed)


ALICE, BOB = f"@alice:{HS}", f"@bob:{HS}"
