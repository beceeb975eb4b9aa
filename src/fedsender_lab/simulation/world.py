"""A whole world, put together: a homeserver, its sender's checks, the servers it sends to."""

import tempfile
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.config import Config, from_values
from fedsender_lab.simulation.behaviours import HOLDING, dealt
from fedsender_lab.simulation.checks import (
    CommitChecks,
    LedgerChecks,
    MemoryChecks,
    WaitChecks,
    WireChecks,
)
from fedsender_lab.simulation.daemon_life import CrashPlan, Life
from fedsender_lab.simulation.disasters import SECRET_CONTENT
from fedsender_lab.simulation.disk import Disk, Orderings
from fedsender_lab.simulation.observations import Observations, ServerViews
from fedsender_lab.simulation.outbox import PushFront
from fedsender_lab.simulation.receiver import Inspector, RemoteServer, Site, make_site, publish
from fedsender_lab.testing.clock import Trace, derived, now_ms, run_virtually
from fedsender_lab.testing.network import Internet
from fedsender_lab.testing.rooms import Homeserver, Signer

T = TypeVar("T")

ORIGIN = "home.example"
KEY_VERSION = "sim"
MAX_BYTES = 256 * 1024
GAP_EVENTS = 12
MOST_TRANSACTIONS_BETWEEN_CRASHES = 350

MEMORY_DISK = Path("/dev/shm")
"""The files of a world lie there, where it exists."""


def run_world(seed: int, main: Callable[[Path], Awaitable[T]]) -> T:
    """Run `main` on a virtual clock, with an empty directory that goes at the end.

    Not from within trio.
    """
    where = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fedsender-", dir=where) as directory:
        return run_virtually(seed, lambda: main(Path(directory)))


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a world, and the virtual days for which it is left to itself.

    Attributes:
        hostile: three of four servers attack whoever sends to them.
    """

    seed: int
    servers: int
    days: float
    hostile: bool = False

    @property
    def seconds(self) -> float:
        return self.days * 86_400


class Front(Protocol):
    """The homeserver, as its senders see it.

    Attributes:
        up: it is there.
    """

    up: bool

    async def run(self, task_status: trio.TaskStatus[None] = ...) -> None:
        """Tell the senders everything, for ever."""
        ...

    def go_down(self) -> None:
        """Be away: nothing is asked, and an answer on its way is lost."""
        ...

    def opened(self, life: Life) -> None:
        """A sender has begun."""
        ...

    def post(self, server: str, message: str, content: dict[str, Any]) -> None:
        """Have a to-device message sent."""
        ...

    def server_up(self, server: str) -> None:
        """Tell all senders that this server is alive."""
        ...

    def heal(self) -> None:
        """Be well from now on."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """All parts of a world; `course` sets them in motion.

    Attributes:
        key_file: the text of the homeserver's signing key file.
        configure: the configuration of the sender in a directory.
        long_absences: the sender is away for so long, now and then, that it is given up.
    """

    size: Size
    directory: Path
    key_file: str
    homeserver: Homeserver
    servers: list[RemoteServer]
    internet: Internet
    front: Front
    observed: Observations
    commits: CommitChecks
    wire: WireChecks
    memory: MemoryChecks
    waits: WaitChecks
    plan: CrashPlan
    configure: Callable[[Path], Config]
    long_absences: bool = False


@dataclass(frozen=True, slots=True)
class Origins:
    """A homeserver, and the proof that a request comes from it.

    Attributes:
        secrets: texts that may be seen nowhere.
    """

    homeserver: Homeserver
    key_file: str
    inspector: Inspector
    secrets: tuple[bytes, ...]


def found(size: Size, names: Sequence[str], *, dense: bool = False) -> Origins:
    """A homeserver at time 0, in a federation with servers of these names."""
    secret = derived(size.seed, "key").randbytes(32)
    key = Ed25519PrivateKey.from_private_bytes(secret)
    secret_text = b64encode(secret).decode().rstrip("=")
    signer = Signer(ORIGIN, f"ed25519:{KEY_VERSION}", key)
    homeserver = Homeserver(
        signer,
        names,
        rng=derived(size.seed, "homeserver"),
        now_ms=now_ms,
        tells_all=dense,
        forks=True,
    )
    return Origins(
        homeserver,
        f"ed25519 {KEY_VERSION} {secret_text}\n",
        Inspector(homeserver, signer.origin, MAX_BYTES),
        (secret_text.encode(), SECRET_CONTENT.encode()),
    )


def build_world(size: Size, directory: Path, nursery: trio.Nursery) -> World:
    """A world at time 0; its connections are served in `nursery`."""
    sites = [
        make_site(index, of_many=dealt(index, hostile=size.hostile) is HOLDING)
        for index in range(size.servers)
    ]
    origins = found(size, [site.name for site in sites])
    internet = Internet(derived(size.seed, "internet"), nursery, by_table=size.hostile)

    def make_front(observed: Observations) -> PushFront:
        return PushFront(origins.homeserver, observed, derived(size.seed, "front"))

    world = people(size, directory, origins, dict(enumerate(sites)), internet, make_front)
    world.observed.has_others = True
    return world


def people(
    size: Size,
    directory: Path,
    origins: Origins,
    sites: Mapping[int, Site],
    internet: Internet,
    make_front: Callable[[Observations], Front],
    make_observed: Callable[[Observations], Observations] = lambda observed: observed,
    make_wire: Callable[[Any, LedgerChecks], WireChecks] = WireChecks,
    make_commits: Callable[[Observations, LedgerChecks], CommitChecks] = CommitChecks,
) -> World:
    """The servers at these sites, by their numbers, and a sender that is to send to them.

    `make_...`: what is checked in another way if there are several senders.
    """
    homeserver = origins.homeserver
    views = ServerViews([site.name for site in sites.values()])
    orderings = Orderings()
    disk = Disk(directory, orderings)
    observed = Observations(homeserver, views, Trace(), disk, orderings=orderings)
    observed.secrets = origins.secrets
    observed = make_observed(observed)
    ledger = LedgerChecks(observed)
    wire = make_wire(observed, ledger)
    servers = []
    for index, site in sites.items():
        character = dealt(index, hostile=size.hostile)
        rng = derived(size.seed, "server", index)
        server = RemoteServer(site, character, rng, internet, origins.inspector, wire)
        if size.hostile and character.attack is None:
            observed.views.of[site.name].honest = character.name
        publish(site, server, internet)
        servers.append(server)
    return World(
        size=size,
        directory=directory,
        key_file=origins.key_file,
        homeserver=homeserver,
        servers=servers,
        internet=internet,
        front=make_front(observed),
        observed=observed,
        commits=make_commits(observed, ledger),
        wire=wire,
        memory=MemoryChecks(observed),
        waits=WaitChecks(observed),
        plan=CrashPlan(size.seed, MOST_TRANSACTIONS_BETWEEN_CRASHES),
        configure=configuration,
    )


def configuration(directory: Path, **more: Mapping[str, object] | str) -> Config:
    """A sender's configuration with small bounds, so that every one of them is met."""
    defaults = {"max_transaction_bytes": MAX_BYTES, "catch_up_gap_events": GAP_EVENTS}
    values: dict[str, object] = {
        "server_name": ORIGIN,
        "signing_key": "signing.key",
        "homeserver": {"database": "homeserver.sqlite3"},
        "feed": {"kind": "push", "push": {"token_file": "append.token"}},
        "federation": {"verify_certificates": False, "max_connections": 60},
        "sending": {
            "max_in_flight": 24,
            "handshakes_per_second": 20.0,
            "ramp_per_second": 10.0,
            "queue_pdus": 50,
            "window_bytes": 2**20,
        },
        "destinations": {"defaults": defaults},
        "ledger": {"keep": "3650d"},
    }
    return from_values({**values, **more}, directory=directory)
