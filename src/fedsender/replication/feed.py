"""The configured feed: Redis, push, relay or TCP.

Over TCP the homeserver (or a relay) sends the facts themselves, and they are stored before the
events position moves. Over Redis, Synapse only announces the position of each of its writers: the
facts are in the database that we share, and the position that moves is the linear one.

In both cases the sender sees a `Sink` with a rising `events`, and an operator sees a `FeedStatus`.
The feed does not skip a row that it cannot understand: events stop there, with a reason in words.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog
import trio

from fedsender.config import (
    Config,
    ConfigError,
    RedisFeed,
    TcpAddress,
    TcpFeed,
    UnixAddress,
    read_secret,
)
from fedsender.federation.signing import KeyRing
from fedsender.intake.signing import EventSigner
from fedsender.replication.client import (
    EmbeddedFeed,
    LineSettings,
    NoticeFeed,
)
from fedsender.replication.feed_api import Feed, Sink
from fedsender.replication.line_stream import Endpoint
from fedsender.replication.protocol import Shard
from fedsender.replication.push import PushFeed, PushStore
from fedsender.replication.redis import RedisSettings
from fedsender.replication.relay_feed import RelayFeed, RelayStore
from fedsender.replication.stream_updates import Peers
from fedsender.replication.synapse import InstanceTaken, SynapseFeed, SynapseStore
from fedsender.runtime import Runtime
from fedsender.streams import FeedStatus, Watermark
from fedsender.waiting import BeginAnew

if TYPE_CHECKING:
    from fedsender.telemetry import Metrics

__all__ = ["Feed", "FeedStatus", "FeedStore", "InstanceTaken", "Sink", "open_feed"]

log = structlog.get_logger()


class FeedStore(SynapseStore, RelayStore, PushStore, Protocol):
    """The store that any feed needs."""


def tcp_settings(config: Config) -> LineSettings:
    """The server of the plain protocol, and our name to it. Raises ConfigError.

    Its limits are those of our own kind: only that kind has the rows of a store of ours.
    """
    return _line_settings(config, config.feed.tcp)


def relay_settings(config: Config, *, sends: bool = True) -> LineSettings:
    """The relay, and our name to it; a shadow sends nothing. Raises ConfigError."""
    return replace(
        _line_settings(config, config.feed.relay),
        shard=_shard(config) if sends else None,
    )


def _line_settings(config: Config, feed: TcpFeed) -> LineSettings:
    secret_file = feed.secret_file

    def secret() -> str | None:
        return None if secret_file is None else read_secret(secret_file)

    secret()
    return LineSettings(
        endpoint=Endpoint(feed.address, _tls(feed.ca_file) if feed.tls else None),
        server_name=config.server_name,
        name=feed.name or config.instance_name,
        secret=secret,
    )


def _shard(config: Config) -> Shard:
    """The servers that we send to, as a share of all senders' (`Config.handles`)."""
    senders = config.homeserver.federation_sender_instances or (config.instance_name,)
    return Shard(senders.index(config.instance_name), len(senders))


def redis_settings(config: Config) -> RedisSettings:
    """The address of Redis and its password, read from its file. Raises ConfigError."""
    redis = config.feed.redis
    tls = _redis_tls(redis) if redis.tls else None
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
    """The processes to ask for missed rows. Raises ConfigError."""
    http = config.feed.http
    secret = read_secret(http.secret_file) if http.secret_file else None
    tls = _tls(http.ca_file) if any(each.tls for each in http.instances.values()) else None
    endpoints = {
        name: Endpoint(each.address, tls if each.tls else None)
        for name, each in http.instances.items()
    }
    return Peers(endpoints, secret)


def _redis_tls(redis: RedisFeed) -> ssl.SSLContext:
    context = _tls(redis.ca_file, redis.ca_directory)
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


def _tls(ca_file: Path | None, ca_directory: Path | None = None) -> ssl.SSLContext:
    """A context that checks the peer's certificate by these authorities. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file, capath=ca_directory)
    except OSError as error:
        raise ConfigError(f"{ca_file}: {_why(error)}") from None


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError) or not isinstance(error, OSError):
        return "holds no certificates that can be used"
    return f"cannot be read: {error.strerror}"


def _make_feed(
    config: Config,
    runtime: Runtime,
    store: FeedStore,
    sink: Sink,
    *,
    keys: KeyRing | None,
    shadow: bool,
) -> Feed:
    if config.feed.kind == "relay":
        settings = relay_settings(config, sends=not shadow)
        relay = config.feed.relay
        return RelayFeed(
            settings,
            runtime,
            store,
            sink,
            handles=config.handles,
            directory=relay.directory,
            disk_reserve=relay.disk_reserve,
        )
    if config.feed.kind == "push":
        signer = None
        if config.feed.push.sign_events and keys is not None:
            signer = EventSigner(config.server_name, keys, store.events_by_id)
        return PushFeed(runtime, store, sink, signer)
    if config.feed.kind == "tcp":
        settings = tcp_settings(config)
        if config.homeserver.kind == "synapse":
            return NoticeFeed(settings, runtime, store, sink)
        return EmbeddedFeed(settings, runtime, store, sink, handles=config.handles)
    return SynapseFeed(
        redis_settings(config),
        runtime,
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
    runtime: Runtime,
    store: FeedStore,
    sink: Sink,
    *,
    keys: KeyRing | None = None,
    shadow: bool = False,
    metrics: Metrics | None = None,
) -> AsyncIterator[Feed]:
    """The configured feed, running for as long as the body does.

    With `shadow` it sends nothing but REPLICATE. A feed that signs events does so with all `keys`.
    Raises ConfigError; and InstanceTaken, out of the body, as soon as another process speaks under
    our name.
    """
    feed = _make_feed(config, runtime, store, sink, keys=keys, shadow=shadow)
    feed.metrics = metrics
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run, feed, sink.events, name="feed")
        yield feed
        nursery.cancel_scope.cancel()


async def _run(feed: Feed, events: Watermark) -> None:
    """Run the feed, from the start again whenever the database was set back: ids are used again."""
    while True:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end, nursery.cancel_scope, events.fallen)
            feed.stopped = None
            try:
                await feed.run()
            except BeginAnew as reason:
                log.warning("feed begins anew", reason=str(reason))
                nursery.cancel_scope.cancel()


async def _end(scope: trio.CancelScope, when: trio.Event) -> None:
    await when.wait()
    scope.cancel()
