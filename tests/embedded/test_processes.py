"""Real daemons that a homeserver appends to, with signals, TLS and one PostgreSQL."""

import os
import re
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
import trustme
from tests.embedded.support import TOKEN
from tests.servers import Databases, free_port

from fedsender.config.policy import GAP_EVENTS
from fedsender.matrix import ROOM_VERSIONS
from fedsender.runtime import real_runtime
from fedsender_lab.demo import process
from fedsender_lab.demo.process import DaemonProcess, open_daemon_process
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import Receivers, failing, healthy, open_receivers
from fedsender_lab.testing.rooms import Signer, Timeline, new_timeline
from fedsender_lab.testing.rules import pdu_reader

pytestmark = pytest.mark.slow

HS = process.SERVER_NAME
USER = f"@a:{HS}"
VERSION = "10"
NAMES = ("a", "b", "c")
PATIENCE_S = 60.0


@asynccontextmanager
async def daemon_in(
    directory: Path, push: Mapping[str, Any], ca_file: Path, **more: Any
) -> AsyncIterator[DaemonProcess]:
    """`more`: sections of its configuration, in place of those of the demo."""
    process.write_secret(directory / "append.token", TOKEN)
    feed = {"kind": "push", "push": {"token_file": "append.token", **push}}
    values = dict(process.configuration(directory, feed, ca_file)) | more
    # What an outage leaves is sent whole: nothing stands in for anything.
    values["destinations"]["defaults"]["catch_up_gap_events"] = GAP_EVENTS
    async with open_daemon_process(directory, values, "admin") as daemon:
        yield daemon


def issue(authority: trustme.CA, directory: Path) -> ssl.SSLContext:
    """A new certificate in the daemon's files."""
    cert = authority.issue_cert("localhost")
    cert.private_key_pem.write_to_path(str(directory / "tls.key"))
    cert.cert_chain_pems[0].write_to_path(str(directory / "tls.pem"))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def say(client: IntakeClient, timeline: Timeline, signer: Signer, said: list[str]) -> None:
    """Append one message more; `said` has the ids of those that were stored."""
    now_ms = real_runtime().now_ms()
    content = {"n": len(said)}
    event = timeline.append("m.room.message", USER, content, signer=signer, now_ms=now_ms)
    row = ["pdu", [event.room_id, event.event_id, event.content, {"room_version": VERSION}]]
    await client.append([row], id=event.event_id)
    said.append(event.event_id)


@asynccontextmanager
async def open_talk(directory: Path) -> AsyncIterator[tuple[Signer, Timeline, Receivers]]:
    """A room, and six servers that check what they receive of it."""
    now_ms = real_runtime().now_ms()
    signer = process.write_signing_key(directory, b"k" * 32)
    timeline = new_timeline(ROOM_VERSIONS[VERSION], "r", USER)
    content = {"room_version": VERSION}
    timeline.append("m.room.create", USER, content, signer=signer, now_ms=0, state_key="")
    reader = pdu_reader(lambda _: VERSION)
    async with open_receivers(
        6, [signer.origin], reader, directory=directory, now_ms=now_ms
    ) as receivers:
        yield signer, timeline, receivers


async def test_a_renewed_certificate_is_taken_up_by_a_reload(tmp_path: Path) -> None:
    """One that cannot be used is not, and says so; who is connected stays so."""
    process.write_signing_key(tmp_path, b"k" * 32)
    first, second = trustme.CA(), trustme.CA()
    trusts_first, port = issue(first, tmp_path), free_port()
    second.cert_pem.write_to_path(str(tmp_path / "second.pem"))
    push = {
        "listen": f"127.0.0.1:{port}",
        "certificate_file": "tls.pem",
        "private_key_file": "tls.key",
    }

    async def greeted(context: ssl.SSLContext) -> bool:
        try:
            stream = await trio.open_ssl_over_tcp_stream("localhost", port, ssl_context=context)
            async with stream:
                await stream.do_handshake()
        except (OSError, trio.BrokenResourceError):
            return False
        return True

    def says(event: str) -> Callable[[], bool]:
        return lambda: daemon.count(event) == 1

    async with daemon_in(tmp_path, push, tmp_path / "second.pem") as daemon:
        await until(says("ready"))
        assert await greeted(trusts_first)
        (tmp_path / "tls.pem").write_text("no certificate")
        os.kill(daemon.pid, signal.SIGHUP)
        await until(says("configuration_not_reloaded"))
        assert "feed.push.certificate_file" in daemon.last_words()
        assert await greeted(trusts_first)
        trusts_second = issue(second, tmp_path)
        os.kill(daemon.pid, signal.SIGHUP)
        await until(says("configuration_reloaded"))
        assert await greeted(trusts_second)
        assert not await greeted(trusts_first)
        async with IntakeClient.at(
            f"https://localhost:{port}", TOKEN, ca_file=str(tmp_path / "second.pem")
        ) as client:
            assert (await client.position()).stored == 0
        assert b'"takes_appends":"we do"' in (await daemon.ask("GET", "/ready")).content


async def test_who_takes_the_appends_is_killed_and_nothing_is_lost(
    tmp_path: Path, postgres: Databases
) -> None:
    """Twice, of three; what is sent again by the same ids is stored once and in order."""
    database, own = postgres.create_database(), postgres.create_database()
    said: list[str] = []
    stop = False
    async with AsyncExitStack() as stack:
        signer, timeline, receivers = await stack.enter_async_context(open_talk(tmp_path))
        daemons: dict[str, DaemonProcess] = {}
        for name in NAMES:
            directory = tmp_path / name
            directory.mkdir()
            process.write_signing_key(directory, b"k" * 32)
            daemons[name] = await stack.enter_async_context(
                daemon_in(
                    directory,
                    {"listen": f"unix:{directory}/append.sock"},
                    receivers.ca_file,
                    instance_name=name,
                    homeserver={"database": database, "federation_sender_instances": list(NAMES)},
                    sender_database=own,
                )
            )
        addresses = [f"unix:{tmp_path}/{name}/append.sock" for name in NAMES]

        async def talk(client: IntakeClient) -> None:
            await client.append([["servers", [timeline.room_id, sorted(receivers.servers)]]])
            while not stop:
                await say(client, timeline, signer, said)
                await trio.sleep(0.05)

        def more_than(count: int) -> bool:
            return len(said) > count

        def taken_over(times: int) -> bool:
            return sum(each.count("takes_appends") for each in daemons.values()) > times

        with trio.fail_after(2 * PATIENCE_S):
            async with IntakeClient.at(addresses, TOKEN) as client, trio.open_nursery() as nursery:
                nursery.start_soon(talk, client)
                await until(partial(more_than, 0))
                told = [await each.ask("GET", "/metrics") for each in daemons.values()]
                takes = [
                    re.findall(r"^fedsender_takes_appends\S* (\S+)", each.text, re.M)
                    for each in told
                ]
                assert sorted(takes) == [["0.0"], ["0.0"], ["1.0"]]
                for round_ in (1, 2):
                    await until(partial(more_than, len(said) + 30))
                    with psycopg.connect(database) as connection:
                        found = connection.execute("SELECT instance_name FROM stream_epoch")
                        ((holder,),) = found.fetchall()
                    await daemons[holder].kill()
                    receivers.origin_killed(HS)
                    killed = len(said)
                    await until(partial(taken_over, round_))
                    await daemons[holder].start()
                    await until(partial(more_than, killed + 30))
                stop = True
        with psycopg.connect(database) as connection:
            query = "SELECT event_id FROM events ORDER BY stream_ordering"
            assert [row[0] for row in connection.execute(query)] == said
        with trio.fail_after(PATIENCE_S):
            await until(
                lambda: all(list(each.received) == said for each in receivers.servers.values())
            )
        assert not receivers.violations.first
        assert [line for each in daemons.values() for line in each.errors()] == []
        for each in daemons.values():
            await each.stop()


@pytest.mark.long
async def test_the_list_of_senders_changes_under_load(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one to two and three, while one server is away, and back to one, with `kill -9` of one
    that stays or goes, and a freeze of one that goes, in the middle of a change: every server gets
    all that was said, in order."""
    # Who is frozen may have an append in its hands.
    monkeypatch.setattr("fedsender_lab.intake_client.TIMEOUT_S", PATIENCE_S / 4)
    database, own = postgres.create_database(), postgres.create_database()
    said: list[str] = []
    async with AsyncExitStack() as stack:
        signer, timeline, receivers = await stack.enter_async_context(open_talk(tmp_path))
        daemons: dict[str, DaemonProcess] = {}

        async def open_sender(name: str) -> None:
            directory = tmp_path / name
            directory.mkdir()
            process.write_signing_key(directory, b"k" * 32)
            daemons[name] = await stack.enter_async_context(
                daemon_in(
                    directory,
                    {"listen": f"unix:{directory}/append.sock"},
                    receivers.ca_file,
                    instance_name=name,
                    homeserver={"database": database},
                    sender_database=own,
                )
            )

        async def set_senders(*names: str) -> int:
            command = [*process.DAEMON, "senders", "set", ",".join(names)]
            command += ["-c", str(tmp_path / "a" / "config.yaml")]
            return (await trio.run_process(command, check=False)).returncode

        async def change(*names: str) -> None:
            assert await set_senders(*names) == 0
            await more()

        async def more() -> None:
            before = len(said)
            await until(lambda: len(said) > before + 20, seconds=PATIENCE_S)

        async def talk(client: IntakeClient) -> None:
            await client.append([["servers", [timeline.room_id, sorted(receivers.servers)]]])
            while True:
                await say(client, timeline, signer, said)
                await trio.sleep(0.05)

        await open_sender("a")
        await until(lambda: daemons["a"].count("takes_appends"), seconds=PATIENCE_S)
        for name in "bc":
            await open_sender(name)
            await until(partial(daemons[name].count, "standing_by"), seconds=PATIENCE_S)
        addresses = [f"unix:{tmp_path}/{name}/append.sock" for name in NAMES]
        async with IntakeClient.at(addresses, TOKEN) as client, trio.open_nursery() as nursery:
            nursery.start_soon(talk, client)
            await more()
            first, *_ = receivers.servers.values()
            first.become(failing())
            await change("a", "b")
            await change("c", "a", "b")
            first.become(healthy())
            for victim, how, names in (
                ("b", "killed", ("b", "c", "a")),
                ("b", "frozen", ("c", "a")),
                ("a", "killed", ("c",)),
            ):
                done = trio.Event()

                async def set_them(names: tuple[str, ...], done: trio.Event) -> None:
                    # Withdrawn, it is tried again.
                    while await set_senders(*names) != 0:  # noqa: ASYNC110
                        await trio.sleep(1)
                    done.set()

                nursery.start_soon(set_them, names, done)
                stops = daemons[victim].count("stops_for_change")
                await until(
                    lambda: daemons[victim].count("stops_for_change") > stops,  # noqa: B023
                    seconds=PATIENCE_S,
                )
                if how == "killed":
                    await daemons[victim].kill()
                    receivers.origin_killed(HS)
                    await daemons[victim].start()
                else:
                    os.kill(daemons[victim].pid, signal.SIGSTOP)
                with trio.fail_after(PATIENCE_S):
                    await done.wait()
                if how == "frozen":
                    # What it had under way, the next one may send again.
                    receivers.origin_killed(HS)
                    stands_by = daemons[victim].count("standing_by")
                    await more()
                    os.kill(daemons[victim].pid, signal.SIGCONT)
                    await until(
                        lambda: daemons[victim].count("standing_by") > stands_by,  # noqa: B023
                        seconds=PATIENCE_S,
                    )
                await more()
            nursery.cancel_scope.cancel()
        with psycopg.connect(database) as connection:
            query = "SELECT event_id FROM events ORDER BY stream_ordering"
            stored = [row[0] for row in connection.execute(query)]
            query = "SELECT instance_name FROM federation_stream_position WHERE type = 'events'"
            assert connection.execute(query).fetchall() == [("c",)]
        assert stored[: len(said)] == said
        for server in receivers.servers.values():
            await until(
                lambda: list(server.received) == stored,  # noqa: B023
                seconds=PATIENCE_S,
            )
        assert not receivers.violations.first
        for each in daemons.values():
            await each.stop()
