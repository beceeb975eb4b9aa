"""The feeds that this package brings: of a relay, and of a homeserver over TCP."""

from dataclasses import replace
from functools import partial

from fedsender.config import Config, TcpFeed, read_secret
from fedsender.embedded.store import own_store
from fedsender.replication.endpoint import Endpoint
from fedsender.replication.feed import FeedParts, tls_context
from fedsender.replication.feed_api import Feed
from fedsender_relay.feed import RelayFeed
from fedsender_relay.line_feed import EmbeddedFeed, LineSettings, NoticeFeed
from fedsender_relay.load import load_snapshot
from fedsender_relay.protocol import Shard


def relay_feed(parts: FeedParts) -> Feed:
    """The feed of a sender behind a relay. Raises ConfigError."""
    relay, store = parts.config.feed.relay, own_store(parts.store)
    return RelayFeed(
        relay_settings(parts.config, sends=not parts.shadow),
        parts.runtime,
        store,
        parts.sink,
        load=partial(load_snapshot, store, parts.runtime.now_ms),
        handles=parts.config.handles,
        directory=relay.directory,
        disk_reserve=relay.disk_reserve,
    )


def tcp_feed(parts: FeedParts) -> Feed:
    """The feed of a homeserver that speaks the line protocol. Raises ConfigError."""
    config, settings = parts.config, tcp_settings(parts.config)
    if config.homeserver.kind == "synapse":
        return NoticeFeed(settings, parts.runtime, parts.store, parts.sink)
    store = own_store(parts.store)
    return EmbeddedFeed(settings, parts.runtime, store, parts.sink, handles=config.handles)


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
        endpoint=Endpoint(feed.address, tls_context(feed.ca_file) if feed.tls else None),
        server_name=config.server_name,
        name=config.instance_name,
        secret=secret,
    )


def _shard(config: Config) -> Shard:
    """The servers that we send to, as a share of all senders' (`Config.handles`)."""
    senders = config.senders
    return Shard(senders.index(config.instance_name), len(senders))
