"""A stand-in for systemctl, for tests that follow a guide to the letter on a machine without it.

It knows `enable --now`, `disable --now`, `start`, `stop`, `restart`, `is-active` and
`daemon-reload`, reads ExecStart= of the unit's file, and takes READY=1 for the end of a start, as
systemd does. It cannot be another user, and so takes only units with a User= that is the one it
runs as. Usage: `systemctl.py UNITS STATE VERB ...`, where UNITS holds the unit files and STATE what
it remembers.
"""

import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_S = 120
STOP_S = 90


def command_of(unit: Path) -> list[str]:
    """What the unit runs."""
    lines = unit.read_text().splitlines()
    found = [line.partition("=")[2] for line in lines if line.startswith("ExecStart=")]
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(found[-1])]


def refusal(unit: Path) -> str | None:
    """Why systemd, or we, would not start this unit."""
    settings = [line.partition("=") for line in unit.read_text().splitlines()]
    if (user := pwd.getpwuid(os.geteuid()).pw_name) not in (
        v for k, _, v in settings if k == "User"
    ):
        return f"it does not say User={user}"
    for source in (
        value.partition(":")[2] for key, _, value in settings if key == "LoadCredential"
    ):
        if not Path(source).exists():
            return f"status=243/CREDENTIALS: there is no {source}"
    return None


def environment() -> dict[str, str]:
    """As bare as systemd makes it, but for where the tests find Python's packages."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH")
    return {name: os.environ[name] for name in kept if name in os.environ}


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(unit: Path, state: Path) -> None:
    """Start the unit's process; return once it is ready."""
    address = state / "notify"
    address.unlink(missing_ok=True)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications,
        (state / f"{unit.stem}.log").open("ab") as log,
    ):
        notifications.bind(str(address))
        notifications.settimeout(1)
        process = subprocess.Popen(
            command_of(unit),
            env=environment() | {"NOTIFY_SOCKET": str(address)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        (state / f"{unit.stem}.pid").write_text(str(process.pid))
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                said = (state / f"{unit.stem}.log").read_text(errors="replace")[-4000:]
                sys.exit(f"{unit.name} ended with {process.returncode}:\n{said}")
            try:
                if b"READY=1" in notifications.recv(65536).splitlines():
                    return
            except TimeoutError:
                continue
    sys.exit(f"{unit.name} is not ready after {START_S} s")


def stop(name: str, state: Path) -> None:
    """End the unit's process, and by force if it does not end."""
    pid_file = state / f"{name}.pid"
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + STOP_S
    if alive(pid):
        os.kill(pid, signal.SIGTERM)
    while alive(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    pid_file.unlink()


def main(units: Path, state: Path, verb: str, *arguments: str) -> None:
    """Do what systemctl would."""
    names = [name.removesuffix(".service") for name in arguments if name != "--now"]
    if verb in ("enable", "disable") and "--now" not in arguments:
        sys.exit("only with --now")
    for name in names:
        unit = units / f"{name}.service"
        if not unit.exists():
            sys.exit(f"Unit {name}.service could not be found.")
        if verb == "restart":
            stop(name, state)
        if verb in ("enable", "start", "restart"):
            if (why := refusal(unit)) is not None:
                sys.exit(f"Unit {name}.service failed: {why}")
            start(unit, state)
        elif verb in ("disable", "stop"):
            stop(name, state)
        elif verb == "is-active":
            pid_file = state / f"{name}.pid"
            active = pid_file.exists() and alive(int(pid_file.read_text()))
            print("active" if active else "inactive")
            sys.exit(0 if active else 3)
        else:
            sys.exit(f"Unknown command verb {verb}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
