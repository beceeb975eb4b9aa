"""What EDUs are made of, as Synapse's database has it: questions in the words of the sender.

An embedded store has what a relay brings of it; it does not know whose users are in which rooms.
"""

from collections.abc import Collection, Sequence

from sqlalchemy import Connection

from fedsender.store import device_lists, presence, receipts
from fedsender.store.engine import Database
from fedsender.store.homeserver import HomeserverSettings
from fedsender.store.records import DeviceChanges, PresenceState, Receipt


class EduStore:
    """See the module. Every method is one hop into a worker thread."""

    def __init__(self, database: Database, settings: HomeserverSettings) -> None:
        self._database = database
        self._embedded = settings.kind == "embedded"
        self._device_names = settings.device_names

    # --- device lists -----------------------------------------------------------------------------

    async def device_changes(self, destination: str, upto: int) -> DeviceChanges:
        """What the server is to hear of devices, by its oldest rows at or below `upto`."""
        asked = (destination, upto)
        return await self._database.read_together(self._device_changes, asked)

    def _device_changes(
        self, connection: Connection, asked: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], DeviceChanges]:
        # A homeserver behind a relay has left out what others are not to know.
        names = self._device_names or self._embedded
        return device_lists.changes(connection, asked, names=names)

    async def changed_device_lists(self, after: int, upto: int) -> list[str]:
        """The servers to be told of device changes with after < stream id <= upto."""
        return await self._database.read(
            lambda connection: device_lists.poked(connection, after, upto)
        )

    # --- receipts ---------------------------------------------------------------------------------

    async def newest_receipt(self) -> int:
        """The newest stream id of a receipt; 0: there is none."""
        return await self._database.read(receipts.newest)

    async def receipts(
        self, server_name: str, after: int, upto: int | None, limit: int
    ) -> list[Receipt]:
        """Public receipts of this server's users with after < stream id (<= upto), ascending."""
        return await self._database.read(
            lambda connection: receipts.read(connection, server_name, after, upto, limit)
        )

    # --- presence ---------------------------------------------------------------------------------

    async def present(self, server_name: str) -> tuple[list[PresenceState], int]:
        """The states of this server's users who are not offline, and the newest stream id then."""
        if self._embedded:
            return [], 0
        return await self._database.read(
            lambda connection: (
                presence.present(connection, server_name),
                presence.newest(connection),
            )
        )

    async def presence_said(self, server_name: str, after: int, upto: int) -> list[PresenceState]:
        """The states of this server's users with after < stream id <= upto, ascending."""
        if self._embedded:
            return []
        return await self._database.read(
            lambda connection: presence.said(connection, server_name, after, upto)
        )

    async def presence_of(self, users: Collection[str]) -> list[PresenceState]:
        """The states of those users who have one."""
        if self._embedded:
            return []
        return await self._database.read(lambda connection: presence.of_users(connection, users))

    async def servers_of(
        self, users: Collection[str], excluded_rooms: Collection[str]
    ) -> dict[str, frozenset[str]]:
        """By user the servers in the rooms that the user is in now; some rooms do not count."""
        if self._embedded:
            return dict.fromkeys(users, frozenset())
        return await self._database.read(
            lambda connection: presence.servers_of(connection, users, excluded_rooms)
        )
