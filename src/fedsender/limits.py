"""Limits of a daemon and of a relay, from their configuration: file descriptors and memory.

The units that `fedsender systemd-unit` prints say the same.
"""

import resource
from dataclasses import dataclass
from typing import Final

import structlog

from fedsender.config import Federation, Sending
from fedsender.config.sections import Relay

log = structlog.get_logger()

MIB: Final = 2**20
_OTHER_FILES: Final = 1024
"""Databases, the ledger, look-ups, the admin endpoint, the feed; with room to spare."""
MAX_CONNECTING: Final = 1000
"""Connections that are being opened to several addresses of their servers at once; beyond, each
server has one address tried at a time."""
_CONNECTION_BYTES: Final = MIB // 4
"""Bytes for one connection: usually about 50 KB; the rest is for items on their way."""
_OTHER_BYTES: Final = 1024 * MIB
"""100 MB at rest, and 4 to 10 KB for each server that is known."""
_CONSUMER_FILES: Final = 16
_CONSUMER_BYTES: Final = 16 * MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds far above the need of a sound daemon.

    Attributes:
        files: file descriptors.
        bytes: memory.
    """

    files: int
    bytes: int


def of_daemon(federation: Federation, sending: Sending) -> Limits:
    """The limits of `fedsender run` with this configuration."""
    connections = federation.max_connections
    return Limits(
        _OTHER_FILES + connections + MAX_CONNECTING,
        _OTHER_BYTES
        + 2 * (sending.window_bytes + sending.in_flight_bytes)
        + connections * _CONNECTION_BYTES,
    )


def of_relay(relay: Relay) -> Limits:
    """The limits of `fedsender relay` with this configuration."""
    return Limits(
        _OTHER_FILES + relay.max_consumers * _CONSUMER_FILES,
        _OTHER_BYTES + relay.max_consumers * _CONSUMER_BYTES,
    )


def raise_file_limit(files: int) -> bool:
    """See to it that this process may open so many files; False: the system does not let us.

    That is in the log then. It does not end the daemon: fewer may be enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    try:
        if soft != resource.RLIM_INFINITY and soft < allowed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed < files:
        log.warning(
            "this process may open too few files for the caps of its configuration",
            limit=allowed,
            needed=files,
            hint="raise LimitNOFILE in the unit, or ulimit -n, or lower the caps",
        )
    return allowed >= files
