"""One feed, whichever way the homeserver tells what is new.

Over TCP the homeserver (or a relay) sends the facts themselves, and they are stored before the
events position moves. Over Redis, Synapse only says how far each of its writers is: the facts are
in the database that we share, and the position that moves is the linear one.

Either way the sender sees a `Sink` whose `events` rises, and an operator sees a `FeedStatus`. What
the feed cannot understand it does not skip: events stop there, with a reason in words.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from fedsender.config import Config, TcpAddress, UnixAddress, read_secret
from fedsender.outside import Outside
from fedsender.replication.embedded import EmbeddedStore, TcpFeed
from fedsender.replication.endpoint import Endpoint
from fedsender.replication.link import TcpLinkSettings
from fedsender.replication.missed import Peers
from fedsender.replication.redis import RedisSettings
from fedsender.replication.sink import Feed, FeedStatus, Sink
from fedsender.replication.synapse import InstanceTaken, SynapseFeed, SynapseStore
from fedsender.replication.wire import OWN_KIND

__all__ = ["Feed", "FeedStatus", "FeedStore", "InstanceTaken", "Sink", "open_feed"]


class FeedStore(EmbeddedStore, SynapseStore, Protocol):
    """What either feed needs of the store."""


def tcp_settings(config: Config) -> TcpLinkSettings:
    """Where the homeserver's facts come from. Only our own kind has the rows of an embedded store,
    so its limits hold."""
    return TcpLinkSettings(
        endpoint=Endpoint(config.feed.tcp.address),
        server_name=config.server_name,
        instance=config.feed.tcp.name or config.instance_name,
        kind=OWN_KIND,
    )


def redis_settings(config: Config) -> RedisSettings:
    """Which Redis, its password read from its file. Raises ConfigError."""
    redis = config.feed.redis
    tls = ssl.create_default_context(cafile=redis.ca_file) if redis.tls else None
    address: TcpAddress | UnixAddress = TcpAddress(redis.host, redis.port)
    if redis.path is not None:
        address = UnixAddress(redis.path)
    return RedisSettings(
        endpoint=Endpoint(address, tls),
        channel=config.server_name,
        username=redis.username,
        password=read_secret(redis.password_file) if redis.password_file else None,
    )


def peers(config: Config) -> Peers:
    """Who can be asked for what was missed, the secret read from its file. Raises ConfigError."""
    http = config.feed.http
    secret = read_secret(http.secret_file) if http.secret_file else None
    return Peers(dict(http.instances), secret)


def _make_feed(
    config: Config, outside: Outside, store: FeedStore, sink: Sink, *, shadow: bool
) -> Feed:
    if config.feed.kind == "tcp":
        return TcpFeed(tcp_settings(config), outside, store, sink)
    return SynapseFeed(
        redis_settings(config),
        outside,
        store,
        sink,
        instance=config.instance_name,
        writers=config.homeserver.event_writers,
        peers=peers(config),
        shadow=shadow,
    )


@asynccontextmanager
async def open_feed(
    config: Config,
    outside: Outside,
    store: FeedStore,
    sink: Sink,
    *,
    shadow: bool = False,
) -> AsyncIterator[Feed]:
    """The configured feed, running for as long as the body does.

    With `shadow` it says nothing but REPLICATE. Raises ConfigError; and InstanceTaken, out of the
    body, as soon as somebody else speaks under our name.
    """
    feed = _make_feed(config, outside, store, sink, shadow=shadow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.run, name="feed")
        yield feed
        nursery.cancel_scope.cancel()
