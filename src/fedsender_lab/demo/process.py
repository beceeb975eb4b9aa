"""The real daemon in a process of its own, configured and used as an operator would."""

import os
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.waiting import again
from fedsender_lab.testing.rooms import Signer

DAEMON = (sys.executable, "-m", "fedsender")
SERVER_NAME = "hs.demo"
KEY_VERSION = "a_demo"
CATCH_UP_GAP_EVENTS = 25
"""Small, so that a short run has gaps on both sides of it."""
STOP_SECONDS = 40.0
ADMIN_SECONDS = 30.0
LONGEST_SOCKET_PATH = 100
"""Unix allows 108 bytes and less, depending on the system."""


class DaemonDied(Exception):
    """The daemon's process ended by itself or gives no answer; the text has its last lines."""


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def write_signing_key(directory: Path, seed: bytes, server_name: str = SERVER_NAME) -> Signer:
    """Write `signing.key` as Synapse does; return the signer that uses it."""
    encoded = b64encode(seed).rstrip(b"=").decode()
    write_secret(directory / "signing.key", f"ed25519 {KEY_VERSION} {encoded}\n")
    key = Ed25519PrivateKey.from_private_bytes(seed)
    return Signer(server_name, f"ed25519:{KEY_VERSION}", key)


def push_feed(directory: Path) -> Mapping[str, Any]:
    """The feed of a daemon that the homeserver appends to, over a Unix socket in the directory."""
    listen = f"unix:{socket_in(directory, 'append.sock')}"
    return {"kind": "push", "push": {"listen": listen, "token_file": "append.token"}}


def socket_in(directory: Path, name: str) -> Path:
    """The path of a Unix socket of this name; raises ValueError if it is too long for a system."""
    socket = directory / name
    if len(str(socket)) > LONGEST_SOCKET_PATH:
        raise ValueError(f"{directory} is too long a path for the sockets in it")
    return socket


def configuration(directory: Path, feed: Mapping[str, Any], ca_file: Path) -> Mapping[str, Any]:
    """The contents of `config.yaml`, with waits as short as the daemon allows.

    Files are named relative to the directory, so that it can be moved.
    """
    socket = socket_in(directory, "admin.sock")
    return {
        "server_name": SERVER_NAME,
        "signing_key": "signing.key",
        "feed": dict(feed),
        "federation": {
            "ca_file": os.path.relpath(ca_file, directory),
            "ip_allow": ["127.0.0.0/8"],
        },
        "destinations": {
            "defaults": {
                "request_timeout": "4s",
                "backoff": {"first": "1s", "steady_for": 0},
                "catch_up_gap_events": CATCH_UP_GAP_EVENTS,
            }
        },
        "admin": {"listen": f"unix:{socket}", "token_file": "admin.token"},
    }


def relay_configuration(directory: Path, **settings: Any) -> Mapping[str, Any]:
    """The contents of `config.yaml` of a relay in this directory, where everything of it is.

    `settings`: more of its section `relay`.
    """
    return {
        "server_name": SERVER_NAME,
        "relay": {
            "directory": "data",
            "listen": [f"unix:{socket_in(directory, 'relay.sock')}"],
            "intake": f"unix:{socket_in(directory, 'intake.sock')}",
            "intake_token_file": "intake.token",
            "disk_reserve": 0,
            **settings,
        },
        "admin": {"listen": f"unix:{socket_in(directory, 'admin.sock')}"},
    }


class DaemonProcess:
    """A daemon in a process of its own, which may be killed and started again.

    Attributes:
        log_file: its standard error, over all starts.
        starts: the number of starts.
        ended: the end of the process that was started last.
    """

    def __init__(
        self, directory: Path, token: str, nursery: trio.Nursery, command: str = "run"
    ) -> None:
        """`command`: the command of fedsender, "run" or "relay", with options."""
        self.log_file = directory / "daemon.log"
        self.directory = directory
        self.starts = 0
        self.ended = trio.Event()
        self._token = token
        self._command = command
        self._nursery = nursery
        self._process: trio.Process | None = None
        self._asked_to_end = False

    async def start(self) -> None:
        """Start it, without waiting until it is ready."""
        command = [*DAEMON, *self._command.split(), "-c", str(self.directory / "config.yaml")]
        self._asked_to_end = False
        self.ended = trio.Event()
        self.starts += 1
        with _appending(self.log_file) as log:
            run = partial(
                trio.run_process,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                deliver_cancel=end,
            )
            self._process = await self._nursery.start(partial(run, check=False))
        self._nursery.start_soon(self._watch, self._process, self.ended)

    @property
    def pid(self) -> int:
        """The id of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    @property
    def away(self) -> bool:
        """Whether it was killed or stopped, and not started again."""
        return self.ended.is_set() and self._asked_to_end

    async def kill(self) -> None:
        """`kill -9`, and wait until it is gone."""
        assert self._process is not None
        self._asked_to_end = True
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        """Ask it to drain and end, as systemd would; return its exit code.

        Raises:
            DaemonDied: it did not end in time.
        """
        assert self._process is not None
        self._asked_to_end = True
        self._process.send_signal(signal.SIGTERM)
        with trio.move_on_after(STOP_SECONDS):
            return await self._process.wait()
        self._process.kill()
        raise DaemonDied(f"did not end {STOP_SECONDS:.0f} s after SIGTERM\n{self.last_words()}")

    async def wake(self, servers: Sequence[str]) -> None:
        """Tell it through the admin endpoint that these servers are up.

        Raises:
            DaemonDied: it does not answer with 200.
        """
        body = {"servers": list(servers)}
        answer = await self.ask("POST", "/_fedsender/admin/v1/notify_remote_server_up", body)
        if answer.status_code != 200:
            raise DaemonDied(f"admin endpoint: {answer.text[:500]}")

    async def ask(self, method: str, target: str, body: object = None) -> httpx.Response:
        """The admin endpoint's answer, once there is an endpoint: the daemon may just have started.

        Raises:
            DaemonDied: it does not answer.
        """
        path, headers = self.directory / "admin.sock", {"Authorization": f"Bearer {self._token}"}
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False)
        try:
            with trio.fail_after(ADMIN_SECONDS):
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://localhost", headers=headers, timeout=None
                ) as http:
                    request = partial(http.request, method, target, json=body)
                    return await again(request, httpx.ConnectError, 0.1)
        except trio.TooSlowError:
            said = f"its admin endpoint did not answer within {ADMIN_SECONDS:.0f} s"
            raise DaemonDied(f"{said}\n{self.last_words()}") from None
        except httpx.HTTPError as error:
            raise DaemonDied(f"admin endpoint: {error!r}\n{self.last_words()}") from error

    async def not_ready(self) -> str | None:
        """Its answer to `/ready`, in its own words; None: it is ready. Raises DaemonDied."""
        answer = await self.ask("GET", "/ready")
        return None if answer.status_code == 200 else answer.text[:500]

    def last_words(self, count: int = 15) -> str:
        """The last lines that it logged."""
        return "\n".join(_lines(self.log_file)[-count:])

    def errors(self) -> list[str]:
        """Every line that it logged as an error; a demo that passes has none."""
        return [line for line in _lines(self.log_file) if '"level":"error"' in line]

    def count(self, event: str) -> int:
        """The number of times that it has logged this event."""
        return sum(f'"event":"{event}"' in line for line in _lines(self.log_file))

    async def _watch(self, process: trio.Process, ended: trio.Event) -> None:
        code = await process.wait()
        ended.set()
        if not self._asked_to_end:
            raise DaemonDied(f"ended by itself with {code}\n{self.last_words()}")


async def end(process: trio.Process) -> None:
    """SIGTERM, and SIGKILL once it is certain that no slowness of the machine is to blame. Whoever
    is frozen thaws.

    Trio's own way warns after five seconds, before it kills: where warnings are errors, the process
    stays and is waited for.
    """
    process.terminate()
    process.send_signal(signal.SIGCONT)
    await trio.sleep(STOP_SECONDS)
    process.kill()


def own_and_rss_kb(pid: int) -> tuple[int, int]:
    """A process's own memory (written by it, or in swap), and all resident, in KiB. Linux only.

    Raises:
        OSError: there is no such process (any more).
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kb = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return kb["Private_Dirty"] + kb["Swap"], kb["Rss"]


def cpu_and_wait_s(pid: int) -> tuple[float, float]:
    """For how long a process's first thread has had a CPU, and waited for one, in seconds. Not all
    kernels tell: then both are 0."""
    try:
        used_ns, waited_ns, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
    except OSError:
        return 0.0, 0.0
    return used_ns / 1e9, waited_ns / 1e9


def _appending(path: Path) -> Any:
    return path.open("ab")


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


@asynccontextmanager
async def open_daemon_process(
    directory: Path, config: Mapping[str, Any], token: str, command: str = "run"
) -> AsyncIterator[DaemonProcess]:
    """Start the daemon; when the body is left, its process is ended if it still runs.

    Raises:
        DaemonDied: (in a group) it ended by itself while the body ran.
    """
    write_secret(directory / "admin.token", token + "\n")
    write_secret(directory / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
    async with trio.open_nursery() as nursery:
        daemon = DaemonProcess(directory, token, nursery, command)
        await daemon.start()
        yield daemon
        nursery.cancel_scope.cancel()
