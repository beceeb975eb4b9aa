"""Connections of a consumer to its relay: the greeting, and what is the same on each of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog
import trio

from fedsender.outside import Outside
from fedsender.replication.commands import (
    RELAY_VERSION,
    Auth,
    Error,
    Name,
    Relay,
    Server,
    Shard,
)
from fedsender.replication.endpoint import Disconnected, Endpoint, connect
from fedsender.replication.parsing import BadLine
from fedsender.replication.wire import OWN_KIND, Wire

log = structlog.get_logger()

STREAM = "events"
GREETING_S = 30.0


def _no_secret() -> None:
    return None


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Which relay, and who we are.

    Attributes:
        server_name: the homeserver's name; it is checked both ways.
        consumer: the name by which the relay remembers us.
        secret: reads what is sent as `AUTH`; asked at each connection, so that it may change.
            Raises ValueError or OSError.
        shard: which servers we send to; None: to none.
        fetch_parallel: connections that fetch a snapshot.
    """

    endpoint: Endpoint
    server_name: str
    consumer: str
    secret: Callable[[], str | None] = field(default=_no_secret, repr=False)
    shard: Shard | None = None
    fetch_parallel: int = 4


class State(enum.Enum):
    """Where in its life the feed is, in the operator's words."""

    OFF = "off"
    CONNECTING = "connecting"
    HELLO = "greeting"
    RESUMING = "resuming"
    FOLLOWING = "following"
    JOINING = "waiting for a snapshot"
    FETCHING = "fetching a snapshot"
    LOADING = "loading a snapshot"
    BACKOFF = "waiting to connect again"


SYNCING = frozenset((State.JOINING, State.FETCHING, State.LOADING))


async def connect_relay(
    settings: RelaySettings, outside: Outside, nursery: trio.Nursery
) -> tuple[Wire, Relay]:
    """A connection on which we are known, kept alive by a task in `nursery`; and what it holds.

    Whoever has it closes it, or cancels the nursery. Raises Disconnected, also for a relay of
    another homeserver, or one that does not let us in; BadLine.
    """
    try:
        secret = settings.secret()
    except (ValueError, OSError) as error:
        raise Disconnected(f"the relay's secret: {error}") from error
    wire = Wire(await connect(settings.endpoint, outside), OWN_KIND, outside.now_ms)
    try:
        with trio.fail_after(GREETING_S):
            relay = await _greet(wire, settings, secret)
    except trio.TooSlowError:
        await wire.aclose()
        raise Disconnected(f"no greeting in {GREETING_S:.0f} s") from None
    except BaseException:
        await wire.aclose()
        raise
    nursery.start_soon(_keep_alive, wire, name="relay ping")
    return wire, relay


async def _greet(wire: Wire, settings: RelaySettings, secret: str | None) -> Relay:
    """Check who it is before telling it anything."""
    first = await wire.next_command()
    if first != Server(settings.server_name):
        await wire.send(Error("WRONG_SERVER another homeserver is expected"))
        name = first.name if isinstance(first, Server) else "something else"
        raise Disconnected(f"this is the relay of {name}, not of {settings.server_name}")
    if secret is not None:
        await wire.send(Auth(secret))
    await wire.send(Server(settings.server_name), Name(settings.consumer))
    if settings.shard is not None:
        await wire.send(settings.shard)
    while True:
        match await wire.next_command():
            case Relay(version) as relay:
                if version != RELAY_VERSION:
                    older = "this sender" if version > RELAY_VERSION else "the relay"
                    raise Disconnected(
                        f"the relay speaks version {version} and this sender version"
                        f" {RELAY_VERSION}: upgrade {older} first; nothing is lost meanwhile"
                    )
                return relay
            case Error(text):
                raise Disconnected(f"the relay says: {text[:200]}")


async def _keep_alive(wire: Wire) -> None:
    """Own the connection: it is closed when this ends, for whatever reason."""
    async with aclosing(wire):
        try:
            await wire.keep_alive()
        except (Disconnected, BadLine) as gone:
            log.debug("relay_ping_failed", reason=str(gone))
