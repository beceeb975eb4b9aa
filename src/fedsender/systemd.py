"""Talking to systemd: readiness, reload, stop, watchdog (sd_notify(3)), the journal, the units.

Nothing here needs systemd: without `NOTIFY_SOCKET` every notification is a no-op.
"""

import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
            log.warning("systemd_not_notified", reason=str(error))

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
        log.warning("notify_socket_unusable", address=address)
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

_UNITS: Final = Path(__file__).with_name("units")
_OWN_USER: Final = re.compile(r"# A user that exists .*\nLoadCredential=\S+", re.DOTALL)
"""In the file of a unit: its own user, and the secrets that systemd hands to it."""
_CREDENTIALS: Final = re.compile(r"(?:LoadCredential=.*\n)+")
_YOUR_USER: Final = """\
# This user reads the configuration and all files that it names, secrets among them.
User=@user@"""

Kind = Literal["sender", "senders", "relay", "pipeline"]


def unit_text(
    kind: Kind,
    *,
    executable: str,
    config: str,
    user: str | None,
    name: str,
    limits: Limits,
    drain_s: float,
    credentials: Sequence[str] | None = None,
) -> str:
    """A hardened unit that runs `executable` with `config`.

    Args:
        kind: "senders": a template for several senders of one host, `name@INSTANCE`. Each has the
            configuration INSTANCE.yaml in place of `config`, beside it, and directories and a user
            called `name`-INSTANCE.
            "pipeline": a service for `pipeline run`, and its timer behind it.
        executable: the installed command, an absolute path outside /home.
        user: the user that it runs as, with access to all files that the configuration names; None:
            a user that systemd makes for the run, and hands the secrets beside `config` to.
        name: the name of the unit, of its directories below /var/lib and /run, and of a user of its
            own. Two units of one host need two names. The pipeline's is that of the daemon whose
            ledger it reads.
        limits: file descriptors and memory; the pipeline has limits of its own.
        drain_s: the configured time for a sender's draining; the stop may take longer, by the time
            to store unanswered transactions.
        credentials: the names of the secrets that systemd hands to a user of its own; None: those
            that such a unit usually has.
    """
    unit, started, place = name, name, str(Path(config).parent)
    config = _quoted(config)
    if kind == "senders":
        unit, started = f"{name}@", f"{name}@INSTANCE"
        name, config = f"{name}-%i", f"{_quoted(place)}/%i.yaml"
    text = (_UNITS / f"{kind.removesuffix('s')}.service").read_text("utf-8")
    if kind == "pipeline":
        text += "\n" + (_UNITS / "pipeline.timer").read_text("utf-8")
    if user is not None:
        text = _OWN_USER.sub(_YOUR_USER, text)
    elif credentials is not None:
        lines = [f"LoadCredential={each}:@place@/{each}\n" for each in credentials]
        text = _CREDENTIALS.sub("".join(lines), text)
    text = text.replace("@hardening@\n", (_UNITS / "hardening.conf").read_text("utf-8"))
    values = {
        "fedsender": _quoted(executable),
        "config": config,
        "place": place.replace("%", "%%"),
        "unit": unit,
        "started": started,
        "name": name,
        "user": user,
        "files": limits.files,
        "mib": limits.bytes // MIB,
        "stop": int(drain_s) + 40,
    }
    return re.sub("@([a-z]+)@", lambda found: str(values[found[1]]), text)


def _quoted(word: str) -> str:
    """One word of a command line as systemd reads it: quotes as in a shell, % and $ doubled."""
    return shlex.quote(word.replace("%", "%%").replace("$", "$$"))


def real_notifier() -> Notifier:
    """The notifier of this process."""
    return notifier_from(os.environ, pid=os.getpid())
