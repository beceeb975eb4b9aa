"""Limits of a daemon and of a relay: file descriptors and memory.

The units that `fedsender systemd-unit` prints have the same limits.
"""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from fedsender.config import Federation, Sending

log = structlog.get_logger()

MIB: Final = 2**20
_OTHER_FILES: Final = 1024
"""Files of the databases, ledger, look-ups, admin endpoint and feed; with a reserve."""
MAX_CONNECTING: Final = 1000
"""Connections being opened, to several addresses of each server at once. Above this number, one
address of each server is tried at a time."""
_CONNECTION_BYTES: Final = MIB // 4
"""Memory of a connection: some 50 KB in the common case, the rest for data on its way."""
_OTHER_BYTES: Final = 1024 * MIB
"""Other memory: 100 MB at rest, and 4 to 10 KB for each known server."""
MAX_CONSUMERS: Final = 64
"""Senders that a relay knows at once: several times as many as any deployment of Synapse has."""
_CONSUMER_FILES: Final = 16
_CONSUMER_BYTES: Final = 16 * MIB
IN_FLIGHT_BYTES: Final = 64 * MIB
"""Memory for the transactions under way, and for what is read for one; the more of it is taken, the
smaller are new ones. Enough for the 2,000 attempts of `sending.max_in_flight` at 32 KiB, many times
a common transaction's size."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds far above the normal need: a process reaches them only with a fault.

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
        + 2 * (sending.window_bytes + IN_FLIGHT_BYTES)
        + connections * _CONNECTION_BYTES,
    )


OF_RELAY: Final = Limits(
    _OTHER_FILES + MAX_CONSUMERS * _CONSUMER_FILES,
    _OTHER_BYTES + MAX_CONSUMERS * _CONSUMER_BYTES,
)
"""The limits of `fedsender relay`."""


def resident_bytes() -> int | None:
    """The memory of this process; None: the system does not tell (only Linux does)."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        return None
    return pages * resource.getpagesize()


def raise_file_limit(files: int) -> bool:
    """Let this process open so many files; return False if the system does not allow it.

    Then the log has a warning. The daemon goes on, as fewer files may be enough.
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
            "too_few_files_allowed",
            limit=allowed,
            needed=files,
            hint="raise LimitNOFILE in the unit, or ulimit -n, or lower the caps",
        )
    return allowed >= files
