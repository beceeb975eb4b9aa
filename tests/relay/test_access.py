"""Who may follow a relay: secrets, addresses, TLS; over real sockets where that matters.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing
import trustme
from tests.proxy import open_proxy
from tests.relay.lines import Netcat
from tests.relay.log_support import pdu
from tests.relay.relay_world import Hands, World, config_of

from fedsender.config import TcpAddress, UnixAddress, from_values
from fedsender.replication.commands import Command
from fedsender.replication.endpoint import Endpoint, connect
from fedsender.runtime import CannotListen, real_runtime
from fedsender_lab.testing.appends import append_of
from fedsender_relay import line_stream
from fedsender_relay.daemon import RelayDaemon, open_relay
from fedsender_relay.feeds import relay_settings
from fedsender_relay.hub import Session
from fedsender_relay.line_server import (
    MAX_CONNECTIONS,
    MAX_LEAVING,
    MAX_OF_ONE,
    MAX_PROVING,
    open_doors,
)

Clock = trio.testing.MockClock
SECRET = "correct horse battery staple"
LOOPBACK = TcpAddress("127.0.0.1", 0)
PATIENCE_S = 60.0


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "relay.secret"
    path.write_text(SECRET + "\n")
    return path


def consumers(secret_file: Path, **more: Path) -> dict[str, object]:
    """The settings of a relay with these secrets."""
    files = {"sender-1": secret_file, **more}
    return {"consumers": {name: {"secret_file": str(path)} for name, path in files.items()}}


# --- secrets, on the virtual clock ----------------------------------------------------------------


async def test_a_listener_that_is_no_unix_socket_wants_the_secret_first(
    autojump_clock: Clock, secret_file: Path
) -> None:
    """Without it nothing is told but the homeserver's name."""
    async with World(settings=consumers(secret_file)).running() as world:
        await world.append()
        for lines in (["NAME sender-1"], ["REPLICATE events 0"], [f"AUTH {SECRET}!"]):
            hands = world.connect(trusted=False)
            assert await hands.hear_any() == "SERVER hs.example"
            await hands.say(*lines)
            assert await hands.hear_any() == "ERROR AUTH a secret is needed, before anything else"
        right = world.connect(trusted=False)
        await right.say(f"AUTH {SECRET}")
        await right.resume("sender-1", 0)
        assert await right.tokens_until_level() == [1]


async def test_without_a_secret_configured_no_such_listener_lets_anybody_in(
    autojump_clock: Clock,
) -> None:
    """There is no default secret, and none is not a secret."""
    async with World().running() as world:
        hands = world.connect(trusted=False)
        await hands.say("AUTH None")
        assert (await hands.error()).startswith("AUTH ")


async def test_wrong_secrets_are_counted_and_answered_ever_more_slowly(
    autojump_clock: Clock, secret_file: Path
) -> None:
    """So nobody tries many; the right one is never kept waiting."""
    async with World(settings=consumers(secret_file)).running() as world:
        took = []
        for _ in range(6):
            began = trio.current_time()
            hands = world.connect(trusted=False)
            await hands.say("AUTH wrong")
            await hands.error()
            took.append(trio.current_time() - began)
        assert took == pytest.approx([0.5, 1, 2, 4, 8, 8])
        assert world.relay.hub.counts.wrong_secrets == 6
        began = trio.current_time()
        right = world.connect(trusted=False)
        await right.say(f"AUTH {SECRET}")
        await right.greet()
        assert trio.current_time() == began


async def test_a_consumer_takes_no_name_but_the_one_whose_secret_it_gave(
    autojump_clock: Clock, secret_file: Path, tmp_path: Path
) -> None:
    """And it does not learn which names there are."""
    other = tmp_path / "other.secret"
    other.write_text("another secret\n")
    settings = consumers(secret_file, **{"sender-2": other, "sender-3": tmp_path / "nothing"})
    async with World(settings=settings).running() as world:
        for name in ("sender-2", "sender-3", "nobody"):
            hands = world.connect(trusted=False)
            await hands.say(f"AUTH {SECRET}", f"NAME {name}")
            assert await hands.error() == "AUTH the secret that was given is not that of this name"
        second = world.connect(trusted=False)
        await second.say("AUTH another secret")
        await second.resume("sender-2", 0)
        await second.until("POSITION ")


async def test_who_says_nothing_is_gone_after_ten_seconds(
    autojump_clock: Clock, secret_file: Path
) -> None:
    """Also one that says it byte by byte."""
    async with World(settings=consumers(secret_file)).running() as world:
        silent, trickling = world.connect(trusted=False), world.connect(trusted=False)
        began = trio.current_time()

        async def trickle() -> None:
            for _ in range(100):
                await trio.sleep(1)
                with suppress(trio.BrokenResourceError):
                    await trickling.stream.send_all(b"x")

        world.nursery.start_soon(trickle)
        for hands in (silent, trickling):
            assert (await hands.error()).startswith("AUTH ")
        # Waiting, and the penance for nothing said, of two.
        assert trio.current_time() - began <= 11
        await trio.sleep(100)


@pytest.mark.slow
async def test_those_who_say_nothing_keep_nobody_out(
    autojump_clock: Clock, secret_file: Path
) -> None:
    """However many there are and wherever they come from: the oldest of where the most come from
    makes room."""
    async with World(settings=consumers(secret_file)).running() as world:
        hub = world.relay.hub
        patient = world.connect(trusted=False, peer="192.0.2.7")
        await trio.testing.wait_all_tasks_blocked()
        silent = [world.connect(trusted=False, peer="198.51.100.1") for _ in range(400)]
        await trio.testing.wait_all_tasks_blocked()
        assert sum(session.proving for session in hub.sessions) == MAX_PROVING
        assert len(hub.sessions) <= MAX_PROVING + MAX_LEAVING + 1
        assert hub.counts.evicted == 400 + 1 - MAX_PROVING
        for hands in (patient, world.connect(trusted=False, peer="198.51.100.1")):
            await hands.say(f"AUTH {SECRET}")
            await hands.resume("sender-1", 0)
            await hands.until("POSITION ")
            await hands.leave()
        spread = [world.connect(trusted=False, peer=f"10.0.0.{n}") for n in range(100)]
        await trio.testing.wait_all_tasks_blocked()
        last = world.connect(trusted=False, peer="192.0.2.7")
        await last.say(f"AUTH {SECRET}")
        await last.resume("sender-1", 0)
        await last.until("POSITION ")
        await trio.sleep(15)
        assert len(hub.sessions) == 1
        assert len(silent) + len(spread) == 500


async def test_who_makes_room_before_it_is_heard_is_not_obeyed(
    autojump_clock: Clock, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All come at once. Those that have to go have a moment to read why, and no secret."""
    obeyed: list[Command] = []

    async def obey(_: Session, command: Command) -> None:
        obeyed.append(command)
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Session, "obey", obey)
    async with World(settings=consumers(secret_file)).running() as world:
        hub = world.relay.hub
        pairs = [trio.testing.memory_stream_pair() for _ in range(2 * MAX_PROVING)]
        for ours, _ in pairs:
            await Hands.on(ours).say("NAME sender-1")
        for _, theirs in pairs:
            # So slowly do they read.
            theirs.send_stream.send_all_hook = partial(trio.sleep, 0.1)
            world.nursery.start_soon(partial(hub.serve, theirs, trusted=False))
        await trio.sleep(20)
        assert hub.counts.evicted == MAX_PROVING
    assert not obeyed


@pytest.mark.slow
async def test_one_secret_opens_so_many_connections_and_no_more(
    autojump_clock: Clock, secret_file: Path, tmp_path: Path
) -> None:
    """A sender that runs wild, or whose secret was stolen, keeps no other sender out."""
    other_file = tmp_path / "other.secret"
    other_file.write_text("the secret of the other one\n")
    settings = consumers(secret_file, **{"sender-2": other_file})
    async with World(settings=settings).running() as world:
        for _ in range(MAX_CONNECTIONS):
            hands = world.connect(trusted=False)
            await hands.say(f"AUTH {SECRET}")
            await trio.testing.wait_all_tasks_blocked()
        assert (await hands.error()).startswith("BUSY ")
        assert len(world.relay.hub.sessions) == MAX_OF_ONE
        other = world.connect(trusted=False)
        await other.say("AUTH the secret of the other one")
        await other.resume("sender-2", 0)
        await other.until("POSITION ")


async def test_29_the_secret_can_change_and_is_in_no_log(
    autojump_clock: Clock, secret_file: Path
) -> None:
    """29: changed on both sides, connections killed: following goes on."""
    async with World(settings=consumers(secret_file)).running() as world:
        with structlog.testing.capture_logs() as logs:
            first = world.connect(trusted=False)
            await first.say(f"AUTH {SECRET}")
            await first.resume("sender-1", 0)
            await first.until("POSITION ")
            await first.leave()
            await trio.Path(secret_file).write_text("another secret\n")
            old = world.connect(trusted=False)
            await old.say(f"AUTH {SECRET}")
            assert SECRET not in await old.error()
            word = world.connect(trusted=False)
            await word.say("another")
            await word.error()
            again = world.connect(trusted=False)
            await again.say("AUTH another secret")
            await again.resume("sender-1", 0)
            await world.append()
            assert await again.until("RDATA events 1 ")
        said = repr(logs)
        assert SECRET not in said
        assert "another" not in said


# --- addresses ------------------------------------------------------------------------------------


async def test_an_address_that_others_can_reach_needs_tls() -> None:
    """Checked on what was bound, whatever the configuration says of it."""
    with pytest.raises(CannotListen, match="needs TLS"):
        async with open_doors([TcpAddress("0.0.0.0", 0)]):
            pass


async def test_addresses_that_were_opened_are_closed_when_another_is_taken(tmp_path: Path) -> None:
    """One error, and nothing is left behind."""
    path = tmp_path / "relay.sock"
    async with open_doors([LOOPBACK]) as taken:
        with pytest.raises(CannotListen):
            async with open_doors([UnixAddress(path), taken[0].address]):
                pass
        assert not path.exists()


# --- real sockets ---------------------------------------------------------------------------------


@asynccontextmanager
async def real_relay(
    directory: Path,
    *,
    secret_file: Path | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[RelayDaemon, TcpAddress, UnixAddress]]:
    """A relay on real sockets and a real disk."""
    settings = {} if secret_file is None else consumers(secret_file)
    socket = UnixAddress(directory / "relay.sock")
    config = config_of(directory / "relay", settings)
    with trio.fail_after(PATIENCE_S):
        doors = open_doors([LOOPBACK, socket], tls)
        async with open_relay(config, real_runtime(), doors) as relay:
            address = relay.doors[0].address
            assert isinstance(address, TcpAddress)
            yield relay, address, socket


async def test_tls_and_the_secret_together_and_netcat_by_the_unix_socket(
    tmp_path: Path, secret_file: Path
) -> None:
    """30, 53: consumers find it by name; a Unix socket needs no secret, as its file's mode says
    who may open it; a plain client of the line protocol reads along there."""
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with real_relay(tmp_path, secret_file=secret_file, tls=context) as (relay, where, unix):
        endpoint = Endpoint(TcpAddress("localhost", where.port), trusting)
        hands = Hands.on(await connect(endpoint, real_runtime()))
        await hands.say(f"AUTH {SECRET}")
        await hands.resume("sender-1", 0)
        await hands.until("POSITION events 0")
        netcat = Netcat.on(await trio.open_unix_socket(str(unix.path)))
        await netcat.say("REPLICATE events NOW")
        assert (await netcat.hear_lines(2))[1] == "POSITION events 0"
        await relay.intake.append([append_of("1", [pdu(1)])])
        assert str(await netcat.hear()).startswith("RDATA events 1 ")
        await hands.until("RDATA events 1 ")
        await hands.stream.aclose()
        await netcat.stream.aclose()


@pytest.mark.slow
async def test_25_connections_that_end_leave_no_descriptor_behind(tmp_path: Path) -> None:
    """25: sixty-four reconnects, half of them broken off in the middle of the log."""
    async with real_relay(tmp_path) as (relay, _, unix):
        for number in range(200):
            await relay.intake.append([append_of(f"{number}", [pdu(number, 2000)])])

        async def once(number: int) -> None:
            hands = Hands.on(await trio.open_unix_socket(str(unix.path)))
            await hands.resume("sender-1", 0)
            await hands.until("RDATA events 1 " if number % 2 else "POSITION ")
            await hands.stream.aclose()
            while relay.hub.sessions:  # noqa: ASYNC110
                await trio.sleep(0.01)

        await once(0)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(64):
            await once(number)
        assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.slow
async def test_38_a_network_that_stalls_costs_the_connection_and_no_snapshot(
    tmp_path: Path, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """38: real sockets, whose buffers fill; once they flow again the consumer is level."""
    monkeypatch.setattr(line_stream, "SEND_S", 0.5)
    async with (
        real_relay(tmp_path, secret_file=secret_file) as (relay, where, _),
        open_proxy((where.host, where.port)) as proxy,
    ):

        async def connected() -> Hands:
            hands = Hands.on(await trio.open_tcp_stream(*proxy.address))
            await hands.say(f"AUTH {SECRET}")
            return hands

        hands = await connected()
        await hands.resume("sender-1", 0)
        await hands.until("POSITION ")
        proxy.to_client.stall()
        number = 0
        while not relay.hub.counts.slow:
            for _ in range(20):
                number += 1
                await relay.intake.append([append_of(f"{number}", [pdu(number, 50_000)])])
            await trio.sleep(0.05)
        await hands.stream.aclose()
        proxy.cut()
        proxy.to_client.flow()
        while relay.registry.connected("sender-1"):  # noqa: ASYNC110
            await trio.sleep(0.01)
        again = await connected()
        await again.resume("sender-1", 0)
        assert await again.tokens_until_level() == list(range(1, number + 1))
        assert relay.hub.counts.full_syncs == {}
        await again.stream.aclose()


def test_all_senders_have_one_name_at_the_relay() -> None:
    values = {
        "server_name": "hs.example",
        "signing_key": "key",
        "instance_name": "fed1",
        "feed": {"kind": "relay", "relay": {"address": "unix:/relay.sock"}},
    }
    assert relay_settings(from_values(values, directory=Path("/"))).name == "fedsender"
