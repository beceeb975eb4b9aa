"""What a homeserver's database is opened with, and what comes of it.

Each kind of homeserver (`homeserver.kind`) opens its own.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from fedsender.runtime import Runtime
from fedsender.store.edus import EduStore
from fedsender.store.engine import Database
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.lock import Lock
from fedsender.store.migrations import Line
from fedsender.store.records import HomeserverSettings


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The places of the databases.

    Attributes:
        homeserver_url: `sqlite:///path` or `postgresql://...`: the embedded store or Synapse's.
        sender_url: the same for the sender's tables.
        state_url: a Synapse's `state` database, if it is split.
        here: a file of this machine, for `store.leases`; None: there is none.
        server_name: the homeserver that an embedded store must belong to; None: any homeserver.
        synchronous: SQLite's setting for databases of ours. FULL survives a power cut, NORMAL a
            killed process, OFF neither (simulations).
    """

    homeserver: HomeserverSettings
    homeserver_url: str
    sender_url: str
    state_url: str | None = None
    synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL"
    server_name: str | None = None
    here: Path | None = None

    @property
    def ours(self) -> list[tuple[str, Line]]:
        """The databases whose tables are our own, by URL and version line."""
        lines: list[tuple[str, Line]] = [(self.sender_url, "sender")]
        if self.homeserver.kind == "embedded":
            lines.append((self.homeserver_url, "homeserver"))
        return lines


class OpenDatabase(Protocol):
    """Opens a database, waits until it is there, and checks its sessions."""

    def __call__(
        self, url: str, name: str, *, ours: bool
    ) -> AbstractAsyncContextManager[Database]: ...


class Homeserver(NamedTuple):
    """A homeserver's database, open.

    Attributes:
        main: the database itself.
        lock: in this database, for senders that share it; None: it has no place for one.
    """

    store: HomeserverStore
    edus: EduStore
    main: Database
    lock: Lock | None


OpenHomeserver = Callable[
    [StoreConfig, Runtime, OpenDatabase], AbstractAsyncContextManager[Homeserver]
]
"""Opens a kind of homeserver's database. Raises StoreError if it is not one that we can use."""
