"""The feeds that this package brings: of a relay, and of a homeserver over TCP."""

from functools import partial
from typing import Final

from fedsender.config import Config, TcpFeed, read_secret
from fedsender.embedded.store import own_store
from fedsender.replication.endpoint import Endpoint
from fedsender.replication.feed import FeedParts, tls_context
from fedsender.replication.feed_api import Feed
from fedsender_relay.feed import RelayFeed
from fedsender_relay.line_feed import EmbeddedFeed, LineSettings, NoticeFeed
from fedsender_relay.load import load_snapshot

CONSUMER: Final = "fedsender"
"""The name of all senders together: one consumer, which one of them is at a time."""


def relay_feed(parts: FeedParts) -> Feed:
    """The feed of a sender behind a relay. Raises ConfigError."""
    relay, store = parts.config.feed.relay, own_store(parts.store)
    return RelayFeed(
        relay_settings(parts.config),
        parts.runtime,
        store,
        parts.sink,
        load=partial(load_snapshot, store, parts.runtime.now_ms),
        directory=relay.directory,
        disk_reserve=relay.disk_reserve,
    )


def tcp_feed(parts: FeedParts) -> Feed:
    """The feed of a homeserver that speaks the line protocol. Raises ConfigError."""
    config, settings = parts.config, tcp_settings(parts.config)
    if config.homeserver.kind == "synapse":
        return NoticeFeed(settings, parts.runtime, parts.store, parts.sink)
    store = own_store(parts.store)
    return EmbeddedFeed(settings, parts.runtime, store, parts.sink)


def tcp_settings(config: Config) -> LineSettings:
    """The server of the plain protocol, and our name to it. Raises ConfigError.

    Its limits are those of our own kind: only that kind has the rows of a store of ours.
    """
    return _line_settings(config, config.feed.tcp, config.instance_name)


def relay_settings(config: Config) -> LineSettings:
    """The relay, and the name that all senders have there. Raises ConfigError."""
    return _line_settings(config, config.feed.relay, CONSUMER)


def _line_settings(config: Config, feed: TcpFeed, name: str) -> LineSettings:
    secret_file = feed.secret_file

    def secret() -> str | None:
        return None if secret_file is None else read_secret(secret_file)

    secret()
    return LineSettings(
        endpoint=Endpoint(feed.address, tls_context(feed.ca_file) if feed.tls else None),
        server_name=config.server_name,
        name=name,
        secret=secret,
    )
