"""The daemon as a process of its own, over a real NOTIFY_SOCKET; and what needs no process."""

import hashlib
import json
import os
import signal
import socket
import sqlite3
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.exc import OperationalError
from tests.federation.servers import proxy_py
from tests.relay.log_support import open_replication_server
from tests.servers import Databases
from tests.service import PATIENCE_S, Service, World, open_world

from fedsender import daemon, version
from fedsender.cli import run_command
from fedsender.config import Config, ConfigError, from_values
from fedsender.embedded.store import own_store
from fedsender.fairness import Turns
from fedsender.federation.signing import signing_key_from_seed
from fedsender.ledger import NOTES
from fedsender.runtime import Limiter, RealNetwork, real_runtime
from fedsender.segments import segments
from fedsender.sender.admission import Admission
from fedsender.store import HomeserverSettings, SenderStore, StoreConfig, open_store
from fedsender.store.lock import LockUnknown
from fedsender.systemd import Notifier
from fedsender_lab.demo import process
from fedsender_lab.demo.process import SERVER_NAME, write_signing_key
from fedsender_lab.testing.clock import inline, turns_cpu, until
from fedsender_lab.testing.receiver import STALLING, ReceivingServer, healthy, slow
from fedsender_lab.testing.rooms import STREAM
from fedsender_lab.testing.rules import Origin

pytestmark = pytest.mark.slow

SENDING = f"sending for {SERVER_NAME}"
OLD_CONFIG = "the configuration cannot be used; running on the old one"


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose name is short enough for a Unix socket in it."""
    return tmp_path_factory.mktemp("d")


async def arrived(event_id: str, server: ReceivingServer) -> None:
    await until(lambda: event_id in server.received)


# --- starting -------------------------------------------------------------------------------------


@asynccontextmanager
async def without_feed(home: Path) -> AsyncIterator[tuple[World, Callable[[], Awaitable[None]]]]:
    """A world whose daemon has to connect to its homeserver; and what lets it, at last."""
    # Bound, and not listening: connections are refused, and nobody else is given the port.
    with trio.socket.socket() as holder:
        await holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        feed = {"kind": "tcp", "tcp": {"address": address}}
        async with open_world(home, told=False, feed=feed) as world:

            async def serve(task_status: trio.TaskStatus[None]) -> None:
                holder.listen(10)
                streams, listeners = {STREAM: world.homeserver}, [trio.SocketListener(holder)]
                async with open_replication_server(SERVER_NAME, streams, listeners, real_runtime()):
                    task_status.started()
                    await trio.sleep_forever()

            async def connect() -> None:
                await world.nursery.start(serve)

            yield world, connect


async def test_ready_is_said_when_the_feed_has_connected_and_not_before(home: Path) -> None:
    async with without_feed(home) as (world, connect), world.service() as service:
        assert await service.manager.next() == "STATUS=starting"
        assert await service.manager.next() == "STATUS=waiting for the feed to connect"
        # The endpoint stands, so all but the feed does.
        answer = await service.ask("/ready")
        assert answer.status_code == 503
        assert "the feed is not connected" in answer.text
        assert service.manager.rest() == []
        [start] = service.logged("starting")
        assert (start["what"], start["version"]) == ("sender", version())
        assert (start["instance"], start["server"]) == ("fedsender", SERVER_NAME)
        assert start["file"] == str(world.config)

        # Nor does a reload before say it.
        service.tell(signal.SIGHUP)
        assert await service.manager.next() == f"STATUS={SENDING}"
        await connect()
        assert await service.manager.next() == f"READY=1\nSTATUS={SENDING}"
        await until(lambda: world.servers[0].received)


class NoNetwork(RealNetwork):
    """Where no homeserver and no server can be reached."""

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        raise ConnectionRefusedError

    async def resolve(self, name: str, rdtype: str, nameservers: object = ()) -> Any:
        raise NotImplementedError


async def test_without_a_feed_ready_is_said_after_30_seconds(
    home: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A homeserver that is down is no reason not to deliver what is owed."""

    heard: list[tuple[float, str]] = []
    ready = trio.Event()

    def send(message: bytes) -> None:
        heard.append((trio.current_time() - began, message.decode()))
        if message.startswith(b"READY=1"):
            ready.set()

    runtime = replace(real_runtime(), run_sync=inline, network=NoNetwork())
    path = write_config(home)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.run, path, runtime, Notifier(send, lambda: 1))
        await ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    said = [text for _, text in heard]
    assert said == [
        "STATUS=starting",
        "STATUS=waiting for the feed to connect",
        f"READY=1\nSTATUS=sending what {SERVER_NAME} owes; its feed has not connected yet",
        "STOPPING=1\nSTATUS=draining",
    ]
    assert heard[2][0] - heard[1][0] == pytest.approx(daemon.FEED_PATIENCE_S, abs=1)


async def test_a_proxy_that_goes_away_is_no_failure_of_a_server(home: Path) -> None:
    """Behind a real one, all is sent; while it is down, nothing is written about any server."""
    async with open_world(home) as world, trio.open_nursery() as nursery:
        async with proxy_py(home) as port:
            world.configure(federation={"proxy": {"url": f"http://127.0.0.1:{port}"}})
            service = await nursery.start(kept, world)
            await service.manager.ready()
            await until(lambda: world.servers[0].received)
        # Its tunnels ended with it.
        later = world.say()
        broken = f"the proxy 127.0.0.1:{port}: connection refused"
        await until(lambda: service.logged("proxy_broken"))
        [line, *_] = service.logged("proxy_broken")
        assert line["reason"] == f"no connection to {broken}"
        answer = await service.ask("/ready")
        assert answer.status_code == 503
        assert broken in answer.text
        assert later not in world.servers[0].received
        async with proxy_py(home, port=port):
            await arrived(later, world.servers[0])
        # An attempt on a tunnel that had just ended has no verdict.
        assert {line["outcome"] for line in world.ledger()} <= {"delivered", "unknown"}
        nursery.cancel_scope.cancel()


async def kept(world: World, task_status: trio.TaskStatus[Service]) -> None:
    """The daemon, until it is cancelled."""
    async with world.service() as service:
        task_status.started(service)
        await trio.sleep_forever()


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:3128"])
async def test_a_proxy_of_the_environment_that_is_not_used_is_said_once(
    home: Path,
    url: str | None,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("https_proxy", "http://u:c4n4ry@proxy:3128")
    started = trio.Event()

    def send(message: bytes) -> None:
        if message.startswith(b"STATUS=waiting"):
            started.set()

    runtime = replace(real_runtime(), run_sync=inline, network=NoNetwork())
    path = write_config(home, federation={"proxy": {"url": url}})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.run, path, runtime, Notifier(send, lambda: 1))
        await started.wait()
        os.kill(os.getpid(), signal.SIGTERM)
    said = capsys.readouterr().err
    lines = [json.loads(line) for line in said.splitlines() if "environment" in line]
    assert [line["variables"] for line in lines] == ([["https_proxy"]] if url is None else [])
    assert "c4n4ry" not in said


def write_config(directory: Path, **settings: Any) -> Path:
    write_signing_key(directory, b"k" * 32)
    path = directory / "config.yaml"
    values = {
        "server_name": SERVER_NAME,
        "signing_key": "signing.key",
        "feed": {"kind": "tcp"},
        "admin": {"listen": f"unix:{directory}/admin.sock"},
        **settings,
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"signing_key": "bad.key"}, "bad.key:1: "),
        ({"signing_key": "none.key"}, "none.key: cannot be read: No such file"),
        ({"sender_database": "MISSING"}, '_not" does not exist'),
        ({"sender_database": "STRANGER"}, 'role "stranger" does not exist'),
        ({"sender_database": "bad.key"}, "file is not a database"),
        ({"sender_database": "none/x.db"}, "No such file or directory"),
        (
            {
                "homeserver": {"kind": "synapse", "database": "none.db"},
                "feed": {"kind": "redis"},
            },
            "no database at",
        ),
        ({"sender_database": "homeserver.sqlite3"}, "needs a file of its own"),
        ({"admin": {"listen": "127.0.0.1:TAKEN"}}, "cannot listen there: Address already in use"),
        ({"admin": {"token_file": "none"}}, "none: cannot be read"),
        ({"sendign": {}}, "unknown setting (did you mean sending?)"),
    ],
)
def test_what_makes_a_start_impossible_is_one_line_and_exit_code_2(
    settings: dict[str, Any],
    sentence: str,
    home: Path,
    postgres: Databases,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2 tells systemd not to try again: RestartPreventExitStatus=2."""
    (home / "bad.key").write_text("ed25519 1 short, and no database either" * 100)
    text = yaml.safe_dump(settings)
    if "MISSING" in text:
        text = text.replace("MISSING", postgres.create_database() + "_not")
    if "STRANGER" in text:
        text = text.replace(
            "STRANGER", postgres.create_database().replace("//postgres", "//stranger")
        )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = text.replace("TAKEN", str(taken.getsockname()[1]))
        path = write_config(home, **yaml.safe_load(text))
        code = run_command(["run", "-c", str(path)])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedsender: ")]
    assert (code, len(said)) == (2, 1)
    assert sentence in said[0]


async def test_a_second_daemon_of_the_same_name_is_refused_and_the_first_goes_on(
    home: Path,
) -> None:
    """Exit code 1: systemd tries again, and takes over once the first has gone."""
    async with open_world(home) as world, world.service() as first:
        await first.manager.ready()
        code, line = await world.refused(admin={"listen": f"unix:{home}/other.sock"})
        assert code == 1
        assert "sqlite3, and an SQLite is for one" in line

        event_id = world.say()
        await arrived(event_id, world.servers[0])
        assert await first.stop() == 0
        async with world.service() as next_one:
            await next_one.manager.ready()


# --- the watchdog ---------------------------------------------------------------------------------


async def test_the_watchdog_is_fed_by_the_loop_and_goes_hungry_when_it_hangs(home: Path) -> None:
    async with open_world(home) as world, world.service(watchdog_s=0.4) as service:
        await service.manager.ready()
        for _ in range(4):
            with trio.fail_after(PATIENCE_S):
                await service.manager.feeding()
        fed = service.manager.fed[-4:]
        assert fed[-1] - fed[0] > 3 * 0.2 * 0.75

        service.tell(signal.SIGSTOP)
        with trio.move_on_after(0.5):
            while True:
                await service.manager.feeding()  # What was under way.
        with trio.move_on_after(2):
            await service.manager.feeding()
            pytest.fail("fed by a loop that hangs")

        service.tell(signal.SIGCONT)
        with trio.fail_after(PATIENCE_S):
            await service.manager.feeding()


# --- reload ---------------------------------------------------------------------------------------


async def reload(service: Service) -> str:
    """Reload as systemd does; the status at its end."""
    service.tell(signal.SIGHUP)
    first, stamp = (await service.manager.next()).split("\n")
    assert first == "RELOADING=1"
    assert int(stamp.removeprefix("MONOTONIC_USEC=")) > 0
    return await service.manager.ready()


async def test_a_reload_puts_new_policies_in_force(home: Path) -> None:
    async with open_world(home, servers=2) as world:
        one, other = world.servers
        world.configure(deny=[one.name])
        async with world.service() as service:
            await service.manager.ready()
            unseen, seen = [], []
            for _ in range(2):
                unseen.append(world.say())
                await arrived(unseen[-1], other)
                world.configure(deny=[])
                assert await reload(service) == SENDING
                seen.append(world.say())
                await arrived(seen[-1], one)
                world.configure(deny=[one.name])
                assert await reload(service) == SENDING
            assert (await service.ask(why(one))).json()["state"] == "not allowed"
        assert not set(unseen) & set(one.received)
        assert len(world.receivers.violations) == 0
        # The ledger has who was denied, and from when on.
        denied = [
            json.loads(line["reason"])["deny"] if line["reason"] else None
            for line in world.ledger(NOTES)
            if line["outcome"] == "denied"
        ]
        assert denied == [[one.name], None, [one.name], None, [one.name]]


def why(server: ReceivingServer) -> str:
    return f"/_fedsender/admin/v1/why/{server.name}"


async def test_a_reload_reads_the_file_as_it_is(home: Path) -> None:
    """What is new is in force; a broken file changes nothing, and says so; one that does not answer
    stops nothing."""
    async with open_world(home, log={"level": "warning"}) as world, world.service() as service:
        await service.manager.ready()
        assert not service.logged("ready")
        (home / "admin.token").write_text("another token")
        world.configure(log={"level": "info"})
        assert await reload(service) == SENDING
        assert service.logged("configuration_reloaded")
        path = "/_fedsender/admin/v1/destinations"
        assert (await service.ask(path)).status_code == 401
        assert (await service.ask(path, "another token")).status_code == 200

        for broken in (
            "server_name: [",
            world.config.read_text() + "deny: ['*']\nsendign: {}\n",
            # Good by itself, but not with the `sending` that runs.
            world.config.read_text().replace(
                "defaults:", "defaults:\n    max_transaction_bytes: 1GiB"
            )
            + "sending: {window_bytes: 1GiB}\n",
            # The server would be called unreachable.
            world.config.read_text().replace("defaults:", "defaults:\n    ca_file: none.pem"),
        ):
            world.config.write_text(broken)
            assert await reload(service) == OLD_CONFIG
            world.configure()
        (home / "admin.token").rename(home / "no.token")
        world.configure(deny=["*"])
        assert await reload(service) == OLD_CONFIG
        errors = [line["reason"] for line in service.logged("configuration_not_reloaded")]
        assert [Path(error.partition(":")[0]).name for error in errors] == [
            *["config.yaml"] * 4,
            "admin.token",
        ]
        assert (await service.ask(path, "another token")).status_code == 200
        await arrived(world.say(), world.servers[0])

        (home / "no.token").rename(home / "admin.token")
        world.configure(deny=[])
        text = world.config.read_text()
        world.config.unlink()
        os.mkfifo(world.config)
        service.tell(signal.SIGHUP)
        assert (await service.manager.next()).startswith("RELOADING=1")
        await arrived(world.say(), world.servers[0])
        assert (await service.ask("/ready")).status_code == 200
        async with await trio.open_file(world.config, "w") as pipe:
            await pipe.write(text)
        assert await service.manager.ready() == SENDING

        service.tell(signal.SIGHUP)
        assert (await service.manager.next()).startswith("RELOADING=1")
        service.tell(signal.SIGTERM)
        assert await service.ended() == 0


async def test_what_needs_a_restart_is_named_and_not_in_force(
    home: Path, postgres: Databases
) -> None:
    """The list of senders in the file neither is in force nor will be: there is one in force."""
    # Several senders share PostgreSQL.
    store, own = {"database": postgres.create_database()}, postgres.create_database()
    opening = open_world(home, homeserver=store, sender_database=own)
    async with opening as world, world.service() as service:
        await service.manager.ready()
        others = store | {
            "federation_sender_instances": ["fedsender", "a", "b", "c", "d", "e", "f"]
        }
        world.configure(homeserver=others, sending={"drain": "7s"}, log={"level": "debug"})
        assert await reload(service) == "reloaded; waiting for a restart: sending.drain"
        # By then, six of seven servers would be another sender's.
        for _ in range(3):
            world.room = world.homeserver.create_room([world.servers[0].name])
            event_id = world.say()
            await arrived(event_id, world.servers[0])
        assert (await service.ask(why(world.servers[0]))).json()["handled_here"]

        world.configure(homeserver=store, sending={})
        world.settings["sending"] = {}
        world.configure()
        assert await reload(service) == SENDING


async def test_a_reload_takes_a_new_signing_key_and_the_old_one_signs_no_more(home: Path) -> None:
    """The receiver knows one key at a time, and takes nothing that another one has signed. What it
    refused goes out under the new key: a repeated transaction is signed afresh (I3)."""
    async with open_world(home) as world:
        (server,), origins = world.servers, world.receivers.origins
        old, seed = origins[SERVER_NAME], b"n" * 32
        new = signing_key_from_seed("new", seed)
        public = Ed25519PrivateKey.from_private_bytes(seed).public_key()
        async with world.service() as service:
            await service.manager.ready()
            await arrived(world.say(), server)
            overview = (await service.ask("/_fedsender/admin/v1/overview")).json()
            assert overview["signing_keys"] == list(old.keys)

            origins[SERVER_NAME] = Origin(SERVER_NAME, {new.key_id: public})
            refused = world.say()
            await until(lambda: len(world.receivers.violations) > 0)
            assert refused not in server.received
            written = b64encode(seed).rstrip(b"=").decode()
            process.write_secret(home / "signing.key", "ed25519 new no key\n")
            assert await reload(service) == OLD_CONFIG
            process.write_secret(home / "signing.key", f"ed25519 new {written}\n")
            assert await reload(service) == SENDING
            await arrived(refused, server)
            overview = (await service.ask("/_fedsender/admin/v1/overview")).json()
            assert overview["signing_keys"] == [new.key_id]
            assert service.logged("configuration_reloaded")[-1]["signing_keys"] == [new.key_id]

            before = len(world.receivers.violations)
            origins[SERVER_NAME] = old
            refused = world.say()
            await until(lambda: len(world.receivers.violations) > before)
            assert refused not in server.received


# --- stopping -------------------------------------------------------------------------------------


async def in_flight(server: ReceivingServer) -> None:
    """Wait until a transaction's head has arrived and is not answered."""
    await until(lambda: server._with(SERVER_NAME).in_flight)


def frozen(world: World) -> list[tuple[str, bytes, int]]:
    """The records of frozen transactions, of a daemon that has ended."""
    with closing(sqlite3.connect(world.directory / "fedsender.sqlite3")) as database:
        query = "SELECT transaction_id, body, attempts FROM frozen_transactions"
        return database.execute(query).fetchall()


async def test_a_stop_waits_for_an_answer_that_comes_in_time(home: Path) -> None:
    """More signals meanwhile do not spoil it."""
    async with open_world(home, behaviour=slow(1.5)) as world:
        (server,) = world.servers
        async with world.service() as service:
            await service.manager.ready()
            await in_flight(server)
            service.tell(signal.SIGTERM)
            assert await service.manager.next() == "STOPPING=1\nSTATUS=draining"
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                service.tell(number)
            assert await service.ended() == 0
            assert service.manager.rest() == []
        assert [line["outcome"] for line in world.ledger()] == ["delivered"]
        assert frozen(world) == []
        assert {path.suffix for path in segments(home / "ledger")} == {".jsonl"}
        attempts = server.counts["attempts"]
        async with world.service() as service:
            await service.manager.ready()
            event_id = world.say()
            await arrived(event_id, server)
        assert server.counts["attempts"] == attempts + 1
        assert server.counts["repeated_pdus"] == 0


async def test_what_is_unanswered_at_the_end_of_a_stop_is_repeated_by_the_next_start(
    home: Path,
) -> None:
    sending = {"drain": "500ms"}
    async with open_world(home, behaviour=STALLING, sending=sending) as world:
        (server,) = world.servers
        async with world.service() as service:
            await service.manager.ready()
            await in_flight(server)
            assert await service.stop() == 0
        [(transaction_id, body, attempts)] = frozen(world)
        assert attempts == 1

        server.become(healthy())
        event_id = world.say()
        async with world.service() as service:
            await arrived(event_id, server)
            assert await service.stop() == 0
        cut_off, again, *_ = server.transactions
        assert (cut_off.status, again.status) == (None, 200)
        assert cut_off.transaction_id == again.transaction_id == transaction_id
        assert cut_off.bytes == again.bytes == len(body)
        # The server has compared the bytes, too.
        assert len(world.receivers.violations) == 0
        assert frozen(world) == []
        repeat = next(line for line in world.ledger() if line["outcome"] == "delivered")
        assert (repeat["transaction_id"], repeat["attempt"]) == (transaction_id, 2)


async def test_a_stop_before_the_feed_ever_connected_is_at_once(home: Path) -> None:
    async with without_feed(home) as (world, _), world.service() as service:
        for _ in range(2):
            await service.manager.next()
        before = trio.current_time()
        assert await service.stop() == 0
        assert trio.current_time() - before < 5
        assert service.manager.rest() == ["STOPPING=1\nSTATUS=draining"]


async def test_a_stop_while_the_database_is_away_is_at_once(home: Path) -> None:
    """A start waits for a database for ever; an operator does not."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"postgresql://fedsender@127.0.0.1:{nobody.getsockname()[1]}/fedsender"
        async with open_world(home, sender_database=url) as world, world.service() as service:
            assert await service.manager.next() == "STATUS=starting"
            await until(lambda: service.logged("database_unavailable"))
            before = trio.current_time()
            assert await service.stop() == 0
            assert trio.current_time() - before < 5
            assert service.manager.rest() == ["STOPPING=1\nSTATUS=stopped while starting"]


async def test_a_stop_does_not_wait_for_ever_for_a_database_that_went_away(
    home: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """What could not be written down is sent under another id by the next daemon, and not lost."""
    away = False
    ready = trio.Event()

    async def run_or_fail(
        function: Callable[[], Any], /, *, limiter: Limiter, abandon_on_cancel: bool = False
    ) -> Any:
        if away and getattr(function, "__name__", "") != "dispose":
            failure = sqlite3.OperationalError("disk I/O error")
            failure.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise OperationalError("", {}, failure)
        return await inline(function, limiter=limiter)

    def send(message: bytes) -> None:
        if message.startswith(b"READY=1"):
            ready.set()

    runtime = replace(real_runtime(), run_sync=run_or_fail, network=NoNetwork())
    path = write_config(home, sending={"drain": "2s"})
    codes: list[int] = []

    async def run() -> None:
        codes.append(await daemon.run(path, runtime, Notifier(send, lambda: 1)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await ready.wait()
        away = True
        os.kill(os.getpid(), signal.SIGTERM)
        began = trio.current_time()
    assert codes == [1]
    assert trio.current_time() - began == pytest.approx(2 + daemon.WRITE_DOWN_S, abs=2)


# --- the instance lock ----------------------------------------------------------------------------


class LockThief:
    """Takes a daemon's advisory lock away, and holds it."""

    def __init__(self, postgres: Databases, url: str) -> None:
        self._postgres = postgres
        self._database = url.rpartition("/")[2]
        digest = hashlib.sha256(b"fedsender instance fedsender").digest()
        self._key = int.from_bytes(digest[:8], "big", signed=True)
        self._connection = postgres.server.connect(self._database)

    def steal(self, *, as_holder: str | None = None) -> None:
        """End the daemon's session and take the lock; with the name in its row, if one is given."""
        self._connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'fedsender lock' AND datname = current_database()"
        )
        self._connection.execute("SELECT pg_advisory_lock(%s)", (self._key,))
        if as_holder is not None:
            self._connection.execute("UPDATE leases SET holder = %s", (as_holder,))

    def give_back(self) -> None:
        self._connection.execute("SELECT pg_advisory_unlock(%s)", (self._key,))

    def rename_table(self, name: str, other: str) -> None:
        self._connection.execute(f"ALTER TABLE {name} RENAME TO {other}".encode())

    def close(self) -> None:
        self._connection.close()


async def until_said(
    service: Service, path: str, condition: Callable[[dict[str, Any]], object]
) -> None:
    """Wait until the endpoint's answer is as wished."""
    with trio.fail_after(PATIENCE_S):
        while not condition((await service.ask(path)).json()):  # noqa: ASYNC110
            await trio.sleep(0.05)


async def test_a_lock_that_is_lost(home: Path, postgres: Databases) -> None:
    """The session ends three times: somebody holds the lock for a while; then the database fails
    while the lock is taken again; then another daemon has the lease."""
    url = postgres.create_database("sender")
    async with open_world(home, sender_database=url) as world, world.service() as service:
        (server,) = world.servers
        await service.manager.ready()
        await until(lambda: server.received)
        with closing(LockThief(postgres, url)) as thief:
            # Nobody takes the lease while its holder has not said that it ends.
            await trio.to_thread.run_sync(thief.steal)
            await until(lambda: service.logged("instance_lock_lost"))
            await arrived(world.say(), server)
            thief.give_back()
            await until(lambda: service.logged("instance_lock_retaken"))
            assert (await service.ask("/ready")).status_code == 200

            await trio.to_thread.run_sync(thief.steal)
            await until(lambda: len(service.logged("instance_lock_lost")) == 2)
            thief.rename_table("leases", "away")

            def not_renewed() -> int:
                refusals = service.logged("instance_lock_not_taken")
                return sum("cannot be renewed" in each["reason"] for each in refusals)

            # A try that renewed the lease before may take the lock once it is free.
            await until(not_renewed)
            thief.give_back()
            tries = not_renewed()
            await until(lambda: not_renewed() > tries + 1)
            thief.rename_table("away", "leases")
            await until(lambda: len(service.logged("instance_lock_retaken")) == 2)
            await arrived(world.say(), server)
            assert (await service.ask("/ready")).status_code == 200

            await trio.to_thread.run_sync(lambda: thief.steal(as_holder="somebody else"))
            status = await service.manager.ready()
            assert status.startswith("standing by: another process runs under our name")
            assert len(service.logged("lease_lost")) == 1
            assert await service.stop() == 0


async def test_a_database_that_was_set_back_is_noticed_when_the_lock_is_taken_again(
    home: Path, postgres: Databases
) -> None:
    """A failover ends the lock's connection, and a daemon with nothing to write would not look."""
    url, file = postgres.create_database("sender"), home / "homeserver.db"
    settings = StoreConfig(
        homeserver=HomeserverSettings("embedded", "fedsender", ("fedsender",)),
        homeserver_url=f"sqlite:///{file}",
        sender_url=url,
    )
    admission = Admission(
        max_in_flight=1,
        slow_share=0.5,
        handshakes_per_second=1.0,
        loop=Turns(turns_cpu()),
        in_flight_bytes=1,
    )
    async with open_store(settings, real_runtime()) as store:
        homeserver = own_store(store.homeserver)
        await homeserver.apply_feed_batch([(2, [])])
        await homeserver.events_position()
        await homeserver.commit_fan_out(2, {})
        async with daemon._hold_instance(store, config(), "boot", admission, None):
            with closing(LockThief(postgres, url)) as thief, closing(sqlite3.connect(file)) as now:
                await trio.to_thread.run_sync(thief.steal)
                now.execute("UPDATE federation_stream_position SET stream_id = 1")
                now.commit()
                thief.give_back()
                with trio.fail_after(PATIENCE_S):
                    await homeserver.set_back.wait()


async def test_where_there_is_no_lease_nothing_is_sent_without_the_lock(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an SQLite of our own beside a Synapse's PostgreSQL."""
    admission = Admission(
        max_in_flight=1,
        slow_share=0.5,
        handshakes_per_second=1.0,
        loop=Turns(turns_cpu()),
        in_flight_bytes=1,
    )
    settings = StoreConfig(
        homeserver=HomeserverSettings("embedded", "fedsender", ("fedsender",)),
        homeserver_url=f"sqlite:///{home}/homeserver.db",
        sender_url=f"sqlite:///{home}/sender.db",
    )
    lost = trio.Event()

    async def renew_lock(_: SenderStore) -> bool:
        await trio.lowlevel.checkpoint()
        return not lost.is_set()

    monkeypatch.setattr(SenderStore, "renew_lock", renew_lock)
    async with (
        open_store(settings, real_runtime()) as store,
        daemon._hold_instance(store, config(), "boot", admission, None),
    ):
        assert admission.gate.open
        monkeypatch.setattr(store.sender._lock, "take", _refuse)
        lost.set()
        await until(lambda: not admission.gate.open)
        monkeypatch.undo()
        await until(lambda: admission.gate.open)


async def _refuse(_: str) -> None:
    raise LockUnknown("the database is away")


# --- what a reload may change ---------------------------------------------------------------------


def config(**settings: Any) -> Config:
    values = {"server_name": SERVER_NAME, "signing_key": "k", **settings}
    return from_values(values, directory=Path("/nowhere"))


def test_a_reload_takes_policies_and_leaves_the_rest() -> None:
    ours = config(sending={"queue_pdus": 100})
    newer = config(
        deny=["a.*"], allow=["*.example"], log={"level": "debug"}, sending={"queue_pdus": 200}
    )
    in_force = ours.with_reloadable(newer)
    assert (in_force.deny, in_force.allow, in_force.log.level) == (
        ("a.*",),
        ("*.example",),
        "debug",
    )
    assert in_force.sending.queue_pdus == 100
    assert in_force.differences(newer) == ["sending.queue_pdus"]
    assert ours.differences(ours) == []


def test_policies_that_do_not_fit_the_rest_are_refused() -> None:
    large = {"defaults": {"max_transaction_bytes": "2MiB"}}
    newer = config(sending={"window_bytes": "4MiB"}, destinations=large)
    with pytest.raises(ConfigError, match="smaller than one transaction"):
        config(sending={"window_bytes": "1MiB"}).with_reloadable(newer)
