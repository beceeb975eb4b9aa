"""A real Synapse as a child process: its configuration, its start and stop, its users.

Its server name is an IP literal of the loopback net with a port, so that discovery needs no DNS.
"""

import base64
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
import trustme
from tests.servers import free_port
from tests.synapse.client import User, register
from tests.synapse.installed import synapse_python

START_S = 90
STOP_S = 15
_UNLIMITED = {"per_second": 100_000, "burst_count": 100_000}
_SAYS_IT_IS_UP = "/_matrix/client/versions"


class HomeserverError(RuntimeError):
    """A Synapse process did not start, or ended by itself; the text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Database:
    """A PostgreSQL database for Synapse (UTF8, locale C); without one it keeps an SQLite file."""

    host: str
    port: int
    user: str
    name: str

    @property
    def url(self) -> str:
        """The same database as SQLAlchemy names it."""
        return f"postgresql+psycopg://{self.user}@{self.host}:{self.port}/{self.name}"


@dataclass(slots=True)
class Homeserver:
    """One Synapse: the main process, and workers beside it.

    Attributes:
        name: the server name, `address:port`.
        directory: its configuration, keys and logs.
        listens_at: the address and port of its federation listener. Not that of its name when a
            proxy stands in front of it.
        database: None for SQLite.
        redis_port: on loopback; None for a homeserver without workers.
        senders: the workers named in `federation_sender_instances`; none: it sends itself.
        client_port: the client API, plain HTTP on loopback.
        replication_port: the main process's replication listener.
    """

    name: str
    directory: Path
    listens_at: tuple[str, int]
    authority: trustme.CA
    database: Database | None = None
    redis_port: int | None = None
    senders: Sequence[str] = ()
    client_port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    replication_port: int = field(default_factory=lambda: free_port("127.0.0.1"))
    _process: subprocess.Popen[bytes] | None = None

    @property
    def client_url(self) -> str:
        return f"http://127.0.0.1:{self.client_port}"

    @property
    def replication_secret(self) -> str:
        """What the replication listener asks for."""
        return "replication-of-a-test"

    @property
    def signing_key_path(self) -> Path:
        return self.directory / "signing.key"

    @property
    def config_path(self) -> Path:
        return self.directory / "homeserver.yaml"

    @property
    def ca_path(self) -> Path:
        """The certificate of the authority that all homeservers of a test trust."""
        return self.directory / "ca.pem"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the main process and return once its client API answers. Blocks."""
        assert not self.running
        self._process = self._spawn("main", self.main_command(self.config_path))
        _wait_until_up(self._process, self.client_url + _SAYS_IT_IS_UP, self.log_path("main"))

    def stop(self) -> None:
        """Stop the main process as a service manager would. Blocks; safe when it is not running."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    @contextmanager
    def worker(self, name: str) -> Iterator[int]:
        """Synapse's own federation sender `name` until the body is left; its pid. Blocks."""
        port = free_port("127.0.0.1")
        self.worker_command(name, port)
        with self.written_worker(name, port) as pid:
            yield pid

    @contextmanager
    def written_worker(self, name: str, port: int) -> Iterator[int]:
        """The worker `name` whose file is there, with its listener at `port`; its pid. Blocks."""
        process = self._spawn(name, self._worker_command(name))
        try:
            _wait_until_up(process, f"http://127.0.0.1:{port}/health", self.log_path(name))
            yield process.pid
        finally:
            _end(process)

    def main_command(self, *configs: Path) -> list[str | Path]:
        """What starts the main process with these files, after its own files are written."""
        if not self.config_path.exists():
            self._write_files()
        return self._command("synapse.app.homeserver", *configs)

    def worker_path(self, name: str) -> Path:
        """The configuration file of Synapse's own worker `name`."""
        return self.directory / f"{name}.yaml"

    def worker_command(self, name: str, health_port: int) -> list[str | Path]:
        """What starts Synapse's own federation sender `name`, whose files are written."""
        _write_json(
            self.worker_path(name),
            {
                "worker_app": "synapse.app.generic_worker",
                "worker_name": name,
                "worker_log_config": str(self._log_config(name)),
                "worker_listeners": [_listener("127.0.0.1", health_port, ["health"])],
            },
        )
        return self._worker_command(name)

    def log_path(self, process: str) -> Path:
        """The log of `main` or of a worker."""
        return self.directory / f"{process}.log"

    def requests_served(self, path_part: str) -> list[str]:
        """The lines of the main process's log about requests whose path contains `path_part`."""
        with self.log_path("main").open() as log:
            return [line for line in log if "Processed request" in line and path_part in line]

    async def register(self, localpart: str) -> User:
        """A new user of this homeserver, logged in."""
        return await register(self.client_url, localpart)

    def _worker_command(self, name: str) -> list[str | Path]:
        return self._command("synapse.app.generic_worker", self.config_path, self.worker_path(name))

    def _command(self, module: str, *configs: Path) -> list[str | Path]:
        command: list[str | Path] = [synapse_python(), "-m", module]
        for config in configs:
            command += ["-c", config]
        return command

    def _spawn(self, process: str, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        with (self.directory / f"{process}.out").open("ab") as out:
            return subprocess.Popen(
                command,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=clean_environment(),
            )

    def _write_files(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        host = self.name.rpartition(":")[0]
        certificate = self.authority.issue_cert(host)
        certificate.cert_chain_pems[0].write_to_path(str(self.directory / "tls.crt"))
        certificate.private_key_pem.write_to_path(str(self.directory / "tls.key"))
        self.authority.cert_pem.write_to_path(str(self.ca_path))
        seed = base64.b64encode(os.urandom(32)).decode().rstrip("=")
        self.signing_key_path.write_text(f"ed25519 a_test {seed}\n")
        self.signing_key_path.chmod(0o600)
        _write_json(self.config_path, self._config())

    def _config(self) -> Mapping[str, object]:
        address, port = self.listens_at
        config: dict[str, object] = {
            **_TEST_SETTINGS,
            "server_name": self.name,
            "public_baseurl": self.client_url + "/",
            "signing_key_path": str(self.signing_key_path),
            "macaroon_secret_key": "macaroons of a test",
            "form_secret": "forms of a test",
            "log_config": str(self._log_config("main")),
            "media_store_path": str(self.directory / "media"),
            "pid_file": str(self.directory / "main.pid"),
            "tls_certificate_path": str(self.directory / "tls.crt"),
            "tls_private_key_path": str(self.directory / "tls.key"),
            "federation_custom_ca_list": [str(self.ca_path)],
            "listeners": [
                _listener(address, port, ["federation"], tls=True),
                _listener("127.0.0.1", self.client_port, ["client"]),
            ],
            "database": self._database_config(),
        }
        if self.senders:
            self._add_workers(config)
        return config

    def _add_workers(self, config: dict[str, object]) -> None:
        listeners = config["listeners"]
        assert isinstance(listeners, list)
        listeners.append(_listener("127.0.0.1", self.replication_port, ["replication"]))
        config["send_federation"] = False
        config["federation_sender_instances"] = list(self.senders)
        config["redis"] = {"enabled": True, "host": "127.0.0.1", "port": self.redis_port}
        config["instance_map"] = {"main": {"host": "127.0.0.1", "port": self.replication_port}}
        config["worker_replication_secret"] = self.replication_secret

    def _database_config(self) -> Mapping[str, object]:
        if self.database is None:
            path = self.directory / "homeserver.db"
            return {"name": "sqlite3", "args": {"database": str(path)}}
        return {
            "name": "psycopg2",
            "args": {
                "host": self.database.host,
                "port": self.database.port,
                "user": self.database.user,
                "dbname": self.database.name,
                "cp_min": 1,
                "cp_max": 5,
            },
        }

    def _log_config(self, process: str) -> Path:
        path = self.directory / f"{process}.log.yaml"
        file = {
            "class": "logging.FileHandler",
            "formatter": "line",
            "filename": str(self.log_path(process)),
        }
        line = "%(asctime)s %(name)s:%(lineno)d %(levelname)s %(request)s %(message)s"
        config = {
            "version": 1,
            "formatters": {"line": {"format": line}},
            "handlers": {"file": file},
            "root": {"level": "INFO", "handlers": ["file"]},
            "disable_existing_loggers": False,
        }
        _write_json(path, config)
        return path


_TEST_SETTINGS: Mapping[str, object] = {
    "report_stats": False,
    "enable_registration": True,
    "enable_registration_without_verification": True,
    "bcrypt_rounds": 4,
    "trusted_key_servers": [],
    "suppress_key_server_warning": True,
    "ip_range_blacklist": [],
    "federation_ip_range_blacklist": [],
    # What Synapse still does to a new database is over at once.
    "background_updates": {"sleep_enabled": False},
    # A cut timeline would look like messages that are missing.
    "filter_timeline_limit": -1,
    # What a homeserver asks of another that is down must not wait for minutes.
    "federation": {
        "client_timeout": "10s",
        "max_short_retries": 1,
        "max_short_retry_delay": "1s",
        "destination_min_retry_interval": "1s",
        "destination_max_retry_interval": "5s",
    },
    "rc_message": _UNLIMITED,
    "rc_registration": _UNLIMITED,
    "rc_presence": {"per_user": _UNLIMITED},
    "rc_joins_per_room": _UNLIMITED,
    "rc_room_creation": _UNLIMITED,
    "rc_joins": {"local": _UNLIMITED, "remote": _UNLIMITED},
    "rc_invites": {"per_room": _UNLIMITED, "per_user": _UNLIMITED, "per_issuer": _UNLIMITED},
    "rc_login": {
        "address": _UNLIMITED,
        "account": _UNLIMITED,
        "failed_attempts": _UNLIMITED,
    },
    "rc_federation": {
        "window_size": 1000,
        "sleep_limit": 100_000,
        "sleep_delay": 1,
        "reject_limit": 100_000,
        "concurrent": 100,
    },
}


@contextmanager
def open_homeserver(homeserver: Homeserver) -> Iterator[Homeserver]:
    """`homeserver`, running until the body is left. Blocks while it starts and stops."""
    try:
        homeserver.start()
        yield homeserver
    finally:
        homeserver.stop()


@asynccontextmanager
async def open_homeserver_in_thread(homeserver: Homeserver) -> AsyncIterator[Homeserver]:
    """As `open_homeserver`, for a test whose own tasks have to go on meanwhile."""
    try:
        await trio.to_thread.run_sync(homeserver.start)
        yield homeserver
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(homeserver.stop)


@asynccontextmanager
async def open_worker_in_thread(homeserver: Homeserver, name: str) -> AsyncIterator[int]:
    """As `Homeserver.worker`, for a test whose own tasks have to go on meanwhile."""
    worker = homeserver.worker(name)
    pid = await trio.to_thread.run_sync(worker.__enter__)
    try:
        yield pid
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(worker.__exit__, None, None, None)


def _listener(
    address: str, port: int, names: Sequence[str], *, tls: bool = False
) -> Mapping[str, object]:
    return {
        "port": port,
        "bind_addresses": [address],
        "type": "http",
        "tls": tls,
        "resources": [{"names": list(names)}],
    }


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    # JSON is YAML.
    path.write_text(json.dumps(value, indent=1))


def clean_environment() -> dict[str, str]:
    """Our environment without what would change how a child finds its packages."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "SYNAPSE_")) and not name.lower().endswith("_proxy")
    }


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise HomeserverError(f"ended with {process.returncode}:\n{_end_of(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    _end(process)
    raise HomeserverError(f"not up after {START_S} s:\n{_end_of(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_of(log: Path) -> str:
    text = ""
    for path in (log.with_suffix(".out"), log):
        if path.exists():
            text += path.read_text(errors="replace")[-3000:]
    return text
