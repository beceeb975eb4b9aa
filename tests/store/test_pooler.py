"""PgBouncer between us and PostgreSQL."""

import os
import pwd
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.servers import Databases, RunAs, free_port
from tests.store.ready_made import lay

from fedsender.runtime import real_runtime
from fedsender.store import HomeserverSettings, StoreConfig, WrongDatabase, open_store

pytestmark = pytest.mark.program("pgbouncer", "pgbouncer")


@contextmanager
def pooled(url: str, mode: str) -> Iterator[str]:
    """The URL of the same database behind a PgBouncer."""
    place, _, name = url.rpartition("/")
    host, port, own = "127.0.0.1", place.rpartition(":")[2], free_port()
    with tempfile.TemporaryDirectory(prefix="fedsender-pgbouncer-") as directory:
        path = Path(directory) / "pgbouncer.ini"
        path.write_text(
            f"[databases]\n* = host={host} port={port} user=postgres\n"
            f"[pgbouncer]\nlisten_addr = {host}\n"
            f"listen_port = {own}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\n"
            "default_pool_size = 20\n"
        )
        run_as: RunAs = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            run_as = {"user": nobody.pw_uid, "group": nobody.pw_gid}
            path.chmod(0o644)
            Path(directory).chmod(0o755)
        process = subprocess.Popen(
            ["pgbouncer", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **run_as
        )
        through = f"postgresql://postgres@{host}:{own}/{name}"
        try:
            _wait(through)
            yield through
        finally:
            process.terminate()
            process.wait()


def _wait(url: str) -> None:
    for _ in range(600):
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("PgBouncer did not start")


async def test_a_pooler_by_transaction_is_refused_with_the_setting_that_mends_it(
    tmp_path: Path, postgres: Databases
) -> None:
    """Our locks belong to a session; two daemons would hold the same one, or nobody."""

    def config(url: str) -> StoreConfig:
        settings = HomeserverSettings("embedded", "fed1", ("fed1",))
        homeserver = lay(tmp_path / "homeserver.sqlite3", "homeserver")
        return StoreConfig(settings, homeserver, url, synchronous="OFF")

    url = postgres.create_database()
    with (
        pooled(url, "transaction") as through,
        pytest.raises(WrongDatabase, match=r"sender database .* set pool_mode = session"),
    ):
        async with open_store(config(through), real_runtime()):
            pass
    with pooled(url, "session") as through:
        async with open_store(config(through), real_runtime()) as store:
            await store.sender.take_lock("b1")
            assert await store.sender.renew_lock()
