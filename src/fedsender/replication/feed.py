"""The configured feed. This package has Redis; others bring more (`FeedParts`).

Over Redis, Synapse only announces the position of each of its writers: the facts are in the
database that we share, and the position that moves is the linear one. A feed into a store of ours
brings the facts themselves, and they are stored before the events position moves.

In both cases the sender sees a `Sink` with a rising `events`, and an operator sees a `FeedStatus`.
The feed does not skip a row that it cannot understand: events stop there, with a reason in words.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, cast

import structlog
import trio

from fedsender.config import (
    Config,
    ConfigError,
    RedisFeed,
    read_secret,
)
from fedsender.federation.signing import KeyRing
from fedsender.replication.endpoint import Endpoint
from fedsender.replication.feed_api import Feed, Sink
from fedsender.replication.redis import RedisSettings
from fedsender.replication.stream_updates import Peers
from fedsender.replication.synapse import InstanceTaken, NameIsOurs, SynapseFeed
from fedsender.runtime import Runtime
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.synapse import SynapseStore
from fedsender.streams import FeedStatus
from fedsender.tls import client_context

if TYPE_CHECKING:
    from fedsender.telemetry import Metrics

__all__ = ["Feed", "FeedParts", "FeedStatus", "InstanceTaken", "Sink", "open_feed"]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FeedParts:
    """The parts that a feed is made of.

    Attributes:
        keys: the keys of a feed that signs events.
        shadow: whether the feed tells its server nothing about us.
    """

    config: Config
    runtime: Runtime
    store: HomeserverStore
    sink: Sink
    keys: KeyRing | None
    shadow: bool
    name_is_ours: NameIsOurs | None = None


MakeFeed = Callable[[FeedParts], Feed]
"""The entry point `fedsender.feeds` of a value of `feed.kind`. Raises ConfigError."""


def redis_settings(config: Config) -> RedisSettings:
    """The address of Redis and its password, read from its file. Raises ConfigError."""
    redis = config.feed.redis
    tls = _redis_tls(redis) if redis.tls else None
    return RedisSettings(
        endpoint=Endpoint(redis.address, tls),
        channel=config.server_name,
        username=redis.username,
        password=read_secret(redis.password_file) if redis.password_file else None,
    )


def peers(config: Config) -> Peers:
    """The processes to ask for missed rows. Raises ConfigError."""
    http = config.feed.http
    secret = read_secret(http.secret_file) if http.secret_file else None
    tls = tls_context(http.ca_file) if any(each.tls for each in http.instances.values()) else None
    endpoints = {
        name: Endpoint(each.address, tls if each.tls else None)
        for name, each in http.instances.items()
    }
    return Peers(endpoints, secret)


def _redis_tls(redis: RedisFeed) -> ssl.SSLContext:
    context = tls_context(redis.ca_file, redis.ca_directory)
    if not redis.verify_certificate:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if redis.certificate_file is not None:
        try:
            # A key with a passphrase must not make OpenSSL ask for it on the terminal.
            context.load_cert_chain(redis.certificate_file, redis.private_key_file, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{redis.certificate_file}: {_why(error)}") from None
    return context


def tls_context(ca_file: Path | None, ca_directory: Path | None = None) -> ssl.SSLContext:
    """A context that checks the peer's certificate by these authorities. Raises ConfigError."""
    try:
        return client_context(ca_file, ca_directory)
    except OSError as error:
        raise ConfigError(f"{ca_file}: {_why(error)}") from None


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError) or not isinstance(error, OSError):
        return "holds no certificates that can be used"
    return f"cannot be read: {error.strerror}"


def redis_feed(parts: FeedParts) -> Feed:
    """The feed of a Synapse. Raises ConfigError."""
    config = parts.config
    return SynapseFeed(
        redis_settings(config),
        parts.runtime,
        cast(SynapseStore, parts.store),  # The configuration is checked: this feed has no other.
        parts.sink,
        instance=config.instance_name,
        writers=config.homeserver.event_writers,
        peers=peers(config),
        shadow=parts.shadow,
        name_is_ours=parts.name_is_ours,
    )


def load_feed(kind: str) -> MakeFeed:
    """Import all that this kind of feed needs. Raises ConfigError."""
    for found in entry_points(group="fedsender.feeds", name=kind):
        make: MakeFeed = found.load()
        return make
    raise ConfigError(f"feed.kind: no package that is installed has the feed {kind}")


@asynccontextmanager
async def open_feed(
    config: Config,
    runtime: Runtime,
    store: HomeserverStore,
    sink: Sink,
    *,
    keys: KeyRing | None = None,
    shadow: bool = False,
    metrics: Metrics | None = None,
    name_is_ours: NameIsOurs | None = None,
) -> AsyncIterator[Feed]:
    """The configured feed, running for as long as the body does.

    With `shadow` it sends nothing but REPLICATE. A feed that signs events does so with all `keys`.
    `name_is_ours`: see `SynapseFeed`.

    Raises ConfigError; and out of the body, as soon as another process speaks under our name:
    LeaseLost if that has our lease now, else InstanceTaken.
    """
    make = load_feed(config.feed.kind)
    feed = make(FeedParts(config, runtime, store, sink, keys, shadow, name_is_ours))
    feed.metrics = metrics or feed.metrics
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run_for_ever, sink.events, name="feed")
        yield feed
        nursery.cancel_scope.cancel()
