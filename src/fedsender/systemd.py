"""Talking to systemd: readiness, reload, stop, watchdog (sd_notify(3)), the journal, and the unit.

Nothing here needs systemd: without `NOTIFY_SOCKET` every notification is a no-op.
"""

import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import structlog
import trio

from fedsender.limits import MIB, Limits

log = structlog.get_logger()

Send = Callable[[bytes], None]
"""Hands one datagram to the service manager within a moment; raises OSError."""


@dataclass(frozen=True, slots=True)
class Notifier:
    """Our connection to the service manager.

    Attributes:
        send: the function for datagrams, or None without a service manager.
        monotonic_us: CLOCK_MONOTONIC in microseconds, for the stamp of a reload.
        watchdog_seconds: the manager kills us after so long a silence; None: it does not.
    """

    send: Send | None
    monotonic_us: Callable[[], int]
    watchdog_seconds: float | None = None

    def notify(self, *assignments: str) -> None:
        """Send `NAME=value` assignments as one message. A failure is logged, never raised."""
        if self.send is None:
            return
        message = "\n".join(text.replace("\n", " ") for text in assignments)
        try:
            self.send(message.encode(errors="replace"))
        except OSError as error:
            log.warning("systemd cannot be notified", reason=str(error))

    def ready(self, status: str) -> None:
        """Notify that a start or reload is done; `status`: the line of `systemctl status`."""
        self.notify("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """Change the line that `systemctl status` shows."""
        self.notify(f"STATUS={text}")

    def reloading(self) -> None:
        """Notify that a reload begins; `ready` ends it."""
        self.notify("RELOADING=1", f"MONOTONIC_USEC={self.monotonic_us()}")

    def stopping(self, status: str) -> None:
        """Notify that the stop begins."""
        self.notify("STOPPING=1", f"STATUS={status}")

    async def feed_watchdog(self) -> None:
        """Tell the manager, twice per period, that the event loop runs; until cancelled.

        It is a task like any other, so that a loop that hangs is noticed. Returns at once if there
        is no watchdog.
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


def is_journal(environ: Mapping[str, str], descriptor: int) -> bool:
    """Whether this file descriptor is the journal's stream that `JOURNAL_STREAM` names
    (systemd.exec(5)). False for a descriptor that is closed.
    """
    told = environ.get("JOURNAL_STREAM")
    if not told:
        return False
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return told == f"{found.st_dev}:{found.st_ino}"


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

_COMMON: Final = """\
KillMode=mixed
Restart=on-failure
RestartSec=5s
# 2: the configuration is wrong, and stays so until an operator changes it.
RestartPreventExitStatus=2
{limits}
{user}

StateDirectory={name}
StateDirectoryMode=0700
RuntimeDirectory={name}
RuntimeDirectoryMode=0750
WorkingDirectory={state}
UMask=0077

CapabilityBoundingSet=
AmbientCapabilities=
DevicePolicy=closed
NoNewPrivileges=yes
LockPersonality=yes
MemoryDenyWriteExecute={write_execute_denied}
PrivateDevices=yes
PrivateMounts=yes
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
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM
"""
"""The settings that are the same for every unit: the end of [Service]."""

_USER_OF_ITS_OWN: Final = """\
# A user that exists while the service runs; `--user NAME` makes a unit for one of yours (Synapse's
# own, say, who may read the signing key and whom the database knows).
User={name}
DynamicUser=yes
RemoveIPC=yes

# Secrets are read by systemd as root. The configuration names them as
# $CREDENTIALS_DIRECTORY/signing.key and so on. Remove the lines you have no file for.
{credentials}"""

_USER_OF_YOURS: Final = """\
# This user reads the configuration and all files that it names, secrets among them.
User={user}"""

_INSTALL: Final = """
[Install]
WantedBy=multi-user.target
"""

_UNIT: Final = """\
# {title} Save it as /etc/systemd/system/{unit}.service, adjust the paths, then:
#   systemctl daemon-reload && systemctl enable --now {started}
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
# Draining takes up to sending.drain, then what is unanswered is written down.
TimeoutStopSec={stop_seconds}s
{common}{install}"""

_LIMITS: Final = """\
# For the caps of the configuration that this was printed with; what needs more has gone wrong.
LimitNOFILE={files}
MemoryMax={mib}M
"""

_RELAY_UNIT: Final = """\
# A unit for a fedsender relay. Save it as /etc/systemd/system/{name}.service, adjust the
# paths, then:
#   systemctl daemon-reload && systemctl enable --now {name}
# In the configuration, let relay.directory be below {state}, which is all it may
# write to, and sockets below /run/{name}. Only its own user can open those: senders and
# a homeserver under other users come by loopback TCP, with a secret.

[Unit]
Description=Matrix federation sender relay
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
WatchdogSec=60s
# A log of some GiB is read once at the start.
TimeoutStartSec=10min
TimeoutStopSec=90s
{common}{install}"""

_PIPELINE_UNITS: Final = """\
# A service and a timer for fedsender's data pipeline. Save this part as
# /etc/systemd/system/{name}-pipeline.service and the part below as
# /etc/systemd/system/{name}-pipeline.timer, adjust the paths, then:
#   systemctl daemon-reload && systemctl enable --now {name}-pipeline.timer
# In the configuration, let pipeline.lake and pipeline.health be below {state}, as the
# ledger is: the daemon's unit and this one are of the same user and have the same directory.

[Unit]
Description=Matrix federation sender: proof of delivery
Wants=network-online.target
After=network-online.target postgresql.service {name}.service

[Service]
Type=oneshot
ExecStart={command}
# It runs beside the daemon, and must not be felt there.
Nice=10
IOSchedulingClass=idle
# Java and Python stay below this, and what they have no room for goes to files. If you set
# spark.driver.memory (in pipeline.spark.settings) to more than 2g, raise this as well; if /tmp is
# kept in memory, set spark.local.dir to a directory that is not.
MemoryMax=4G
# Java alone is killed then: the job says so and ends with 1, and is not started again at once.
OOMPolicy=continue
TimeoutStartSec=6h
# It ends its Java itself, which must not be gone before.
KillMode=mixed
# The daemon's sockets are in there.
RuntimeDirectoryPreserve=yes
# 1: something is missing, or a source was not there: for a person to see; the timer comes again.
RestartPreventExitStatus=1
# 75: another job was at work, which is no failure.
SuccessExitStatus=75
# Java and Spark open many files at once.
LimitNOFILE=65536
# Java compiles into memory that it then runs: MemoryDenyWriteExecute is off below.
{common}
# ---------------------- /etc/systemd/system/{name}-pipeline.timer ----------------------

[Unit]
Description=Matrix federation sender: proof of delivery, every hour

[Timer]
OnCalendar=hourly
RandomizedDelaySec=5min
Persistent=yes

[Install]
WantedBy=timers.target
"""

_INSTANCE: Final = "@INSTANCE@"
"""Stands for the specifier %i until all other specifiers are escaped."""

Kind = Literal["sender", "senders", "relay", "pipeline"]

_SECRETS: Final = ("signing.key", "admin.token", "database.password")
_OF_KIND: Final[Mapping[Kind, tuple[str, Sequence[str], Sequence[str]]]] = {
    "sender": (_UNIT, ("run",), _SECRETS),
    "senders": (_UNIT, ("run",), _SECRETS),
    "relay": (_RELAY_UNIT, ("relay",), ("sender-1.secret", "intake.token", "admin.token")),
    "pipeline": (_PIPELINE_UNITS, ("pipeline", "run"), ("database.password",)),
}
"""The text of each kind, its command, and its secrets by their names below
$CREDENTIALS_DIRECTORY."""


def unit_text(
    kind: Kind,
    *,
    executable: str,
    config: str,
    user: str | None,
    name: str,
    limits: Limits,
    drain_s: float,
) -> str:
    """A hardened unit that runs `executable` with `config`.

    Args:
        kind: "senders": a template for several senders of one host, `name@INSTANCE`. Each has the
            configuration /etc/fedsender/INSTANCE.yaml in place of `config`, its secrets in
            /etc/fedsender/INSTANCE, and directories and a user called `name`-INSTANCE.
            "pipeline": a service for `pipeline run`, and its timer behind it.
        executable: the installed command, an absolute path outside /home.
        user: the user that it runs as, with access to all files that the configuration names; None:
            a user that systemd makes for the run, and hands the secrets in /etc/fedsender to.
        name: the name of the unit, of its directories below /var/lib and /run, and of a user of its
            own. Two units of one host need two names. The pipeline's is that of the daemon whose
            ledger it reads.
        limits: file descriptors and memory; the pipeline has limits of its own.
        drain_s: the configured time for a sender's draining; the stop may take longer, by the time
            to store unanswered transactions.
    """
    template, command, secrets = _OF_KIND[kind]
    title, unit, started, place = "A unit for fedsender.", name, name, "/etc/fedsender"
    if kind == "senders":
        title, unit, started = "A unit for several senders.", f"{name}@", f"{name}@INSTANCE"
        name, place = f"{name}-{_INSTANCE}", f"{place}/{_INSTANCE}"
        config = f"{place}.yaml"
    credentials = "\n".join(f"LoadCredential={each}:{place}/{each}" for each in secrets)
    own = _USER_OF_ITS_OWN.format(name=name, credentials=credentials)
    bounds = _LIMITS.format(files=limits.files, mib=limits.bytes // MIB)
    names = {"name": name, "state": f"/var/lib/{name}"}
    common = _COMMON.format(
        user=own if user is None else _USER_OF_YOURS.format(user=user),
        limits="" if kind == "pipeline" else bounds,
        write_execute_denied="no" if kind == "pipeline" else "yes",
        **names,
    )
    return template.format(
        command=" ".join(map(_quoted, (executable, *command, "-c", config))),
        common=common,
        install=_INSTALL,
        title=title,
        unit=unit,
        started=started,
        stop_seconds=int(drain_s) + 40,
        **names,
    ).replace(_INSTANCE, "%i")


def _quoted(word: str) -> str:
    """One word of a command line as systemd reads it: quotes as in a shell, % and $ doubled."""
    return shlex.quote(word.replace("%", "%%").replace("$", "$$"))


def real_notifier() -> Notifier:
    """The notifier of this process."""
    return notifier_from(os.environ, pid=os.getpid())
