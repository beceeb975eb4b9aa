"""Talking to systemd: readiness, reload, stop, watchdog (sd_notify(3)), and the unit to run under.

Nothing here needs systemd: without `NOTIFY_SOCKET` every notification is a no-op.
"""

import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
import trio

log = structlog.get_logger()

Send = Callable[[bytes], None]
"""Hands one datagram to the service manager, in a moment or never; raises OSError."""


@dataclass(frozen=True, slots=True)
class Notifier:
    """Our line to the service manager.

    Attributes:
        send: where datagrams go, or None without a service manager.
        monotonic_us: CLOCK_MONOTONIC in microseconds, which a reload is stamped with.
        watchdog_seconds: the manager kills us when it heard nothing for so long; None: it does not.
    """

    send: Send | None
    monotonic_us: Callable[[], int]
    watchdog_seconds: float | None = None

    def notify(self, *assignments: str) -> None:
        """Send `NAME=value` assignments as one message. Never raises: delivery is not our work."""
        if self.send is None:
            return
        message = "\n".join(text.replace("\n", " ") for text in assignments)
        try:
            self.send(message.encode(errors="replace"))
        except OSError as error:
            log.warning("systemd cannot be notified", reason=str(error))

    def ready(self, status: str) -> None:
        """Started, or a reload is done; `status` is the line that `systemctl status` shows."""
        self.notify("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """Change the line that `systemctl status` shows."""
        self.notify(f"STATUS={text}")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self.notify("RELOADING=1", f"MONOTONIC_USEC={self.monotonic_us()}")

    def stopping(self, status: str) -> None:
        """The stop begins."""
        self.notify("STOPPING=1", f"STATUS={status}")

    async def feed_watchdog(self) -> None:
        """Tell the manager, twice per period, that the event loop goes round; until cancelled.

        A task like any other, so that a loop that hangs is noticed. Returns at once where nobody
        watches.
        """
        if self.send is None or self.watchdog_seconds is None:
            return
        while True:
            self.notify("WATCHDOG=1")
            await trio.sleep(self.watchdog_seconds / 2)


def notifier_from(environ: Mapping[str, str], *, pid: int) -> Notifier:
    """The notifier that systemd's environment variables ask for.

    `WATCHDOG_USEC` counts only if `WATCHDOG_PID` is ours or absent (sd_watchdog_enabled(3)).
    """
    address = environ.get("NOTIFY_SOCKET")
    send = None if not address else _datagram_sender(address)
    return Notifier(send, _monotonic_us, _watchdog_seconds(environ, pid))


def _watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    period = environ.get("WATCHDOG_USEC", "")
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(period) / 1e6 if period.isascii() and period.isdigit() and int(period) else None


# The real ends of the two seams. A notification takes no part in what the daemon does, and the
# stamp must be the kernel's clock: a virtual one would be wrong.


def _datagram_sender(address: str) -> Send | None:
    """Sends to a Unix socket: a path, or an abstract name written with a leading @."""
    if address[0] not in "/@":
        log.warning("NOTIFY_SOCKET is not a Unix socket", address=address)
        return None
    target = f"\0{address[1:]}" if address[0] == "@" else address

    def send(message: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            # The kernel holds ten datagrams for a manager that is busy. READY=1 is worth a moment
            # of the whole loop; more would be a hang of our own.
            sock.settimeout(0.2)
            sock.sendto(message, target)

    return send


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000


# --- The unit -------------------------------------------------------------------------------------

_UNIT: Final = """\
# A unit for fedsender. Save it as /etc/systemd/system/fedsender.service, adjust the paths, then:
#   systemctl daemon-reload && systemctl enable --now fedsender
# In the configuration, let sender_database, ledger.directory and federation.discovery_cache (and an
# embedded homeserver.database) be files below {state}, which is all it may write to.

[Unit]
Description=Matrix federation sender
Wants=network-online.target
After=network-online.target postgresql.service redis-server.service matrix-synapse.service
# However often it fails: starting again is cheap, and what is owed waits in the database.
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
WatchdogSec=60s
TimeoutStartSec=3min
# Draining takes up to sending.drain_seconds, then what is unanswered is written down.
TimeoutStopSec={stop_seconds}s
KillMode=mixed
Restart=on-failure
RestartSec=5s
# 2: the configuration is wrong, and will be until somebody changes it.
RestartPreventExitStatus=2
LimitNOFILE=65536

# A user that exists while the service runs. To use one of your own (for a database that knows its
# clients by their Unix user, say), take these two lines instead:
#   DynamicUser=no
#   User=fedsender
DynamicUser=yes

# Secrets are read by systemd as root. The configuration names them as
# $CREDENTIALS_DIRECTORY/signing.key and so on. Remove the lines you have no file for.
{credentials}

StateDirectory=fedsender
StateDirectoryMode=0700
RuntimeDirectory=fedsender
RuntimeDirectoryMode=0750
WorkingDirectory={state}
UMask=0077

CapabilityBoundingSet=
AmbientCapabilities=
NoNewPrivileges=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
PrivateDevices=yes
PrivateTmp=yes
PrivateUsers=yes
ProcSubset=pid
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
ProtectSystem=strict
RemoveIPC=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""

CREDENTIALS: Final = ("signing.key", "admin.token", "database.password")
"""The secrets' names below $CREDENTIALS_DIRECTORY."""


def unit_text(
    *,
    executable: str = "/usr/bin/fedsender",
    config: str = "/etc/fedsender/config.yaml",
    credentials_directory: str = "/etc/fedsender",
    drain_seconds: float = 20.0,
) -> str:
    """A hardened unit that runs `executable` with `config`.

    Args:
        executable: the installed command, an absolute path outside /home.
        credentials_directory: where the administrator keeps the files named in `CREDENTIALS`.
        drain_seconds: what the configuration allows for draining; the stop may take longer by as
            much as writing things down could need.
    """
    command = " ".join(_quoted(part) for part in (executable, "run", "-c", config))
    lines = (f"LoadCredential={name}:{credentials_directory}/{name}" for name in CREDENTIALS)
    return _UNIT.format(
        command=command,
        credentials="\n".join(_specifiers_escaped(line) for line in lines),
        state="/var/lib/fedsender",
        stop_seconds=int(drain_seconds) + 40,
    )


def _quoted(word: str) -> str:
    """One word of a command line as systemd reads it: quotes as in a shell, % and $ doubled."""
    return shlex.quote(_specifiers_escaped(word).replace("$", "$$"))


def _specifiers_escaped(text: str) -> str:
    return text.replace("%", "%%")


def real_notifier() -> Notifier:
    """The notifier of this process."""
    return notifier_from(os.environ, pid=os.getpid())
