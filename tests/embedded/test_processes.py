"""Real daemons that a homeserver appends to, with signals, TLS and one PostgreSQL."""

import os
import re
import signal
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import psycopg
import pytest
import trio
import trustme
from tests.embedded.senders import HS, PATIENCE_S, daemon_in, open_senders
from tests.embedded.support import TOKEN
from tests.servers import Databases, free_port

from fedsender.matrix import shard_of
from fedsender_lab.demo import process
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import STALLING, failing, healthy

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")


def issue(authority: trustme.CA, directory: Path) -> ssl.SSLContext:
    """A new certificate in the daemon's files."""
    cert = authority.issue_cert("localhost")
    cert.private_key_pem.write_to_path(str(directory / "tls.key"))
    cert.cert_chain_pems[0].write_to_path(str(directory / "tls.pem"))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


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
    async with open_senders(tmp_path, postgres) as (senders, talk):
        daemons = senders.daemons
        for name in NAMES:
            await senders.open(name, configured=NAMES)

        def taken_over(times: int) -> bool:
            return sum(each.count("takes_appends") for each in daemons.values()) > times

        async with talk.goes_on(*senders.addresses(*NAMES)):
            await talk.more(0)
            told = [await each.ask("GET", "/metrics") for each in daemons.values()]
            takes = [
                re.findall(r"^fedsender_takes_appends\S* (\S+)", each.text, re.M) for each in told
            ]
            assert sorted(takes) == [["0.0"], ["0.0"], ["1.0"]]
            for round_ in (1, 2):
                await talk.more(30)
                with psycopg.connect(senders.database) as connection:
                    found = connection.execute("SELECT instance_name FROM stream_epoch")
                    ((holder,),) = found.fetchall()
                await daemons[holder].kill()
                talk.receivers.origin_killed(HS)
                await until(partial(taken_over, round_), seconds=PATIENCE_S)
                await daemons[holder].start()
                await talk.more(30)
        assert senders.stored() == talk.said
        await talk.arrives()
        assert [line for each in daemons.values() for line in each.errors()] == []
        await senders.stop()


@pytest.mark.long
async def test_the_list_of_senders_changes_under_load(
    tmp_path: Path, postgres: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one to two and three, while one server is away, and back to one, with `kill -9` of one
    that stays or goes, and a freeze of one that goes, in the middle of a change: every server gets
    all that was said, in order."""
    # Who is frozen may have an append in its hands.
    monkeypatch.setattr("fedsender_lab.intake_client.TIMEOUT_S", 15.0)
    async with open_senders(tmp_path, postgres) as (senders, talk):
        daemons = senders.daemons

        async def change(*names: str) -> None:
            assert await senders.set(*names) == 0
            await talk.more()

        await senders.open("a")
        await senders.says("a", "takes_appends")
        for name in "bc":
            await senders.open(name)
            await senders.says(name, "standing_by")
        async with talk.goes_on(*senders.addresses(*NAMES)):
            await talk.more()
            first, *_ = talk.receivers.servers.values()
            first.become(failing())
            await change("a", "b")
            await change("c", "a", "b")
            first.become(healthy())
            for victim, how, names in (
                ("b", "killed", ("b", "c", "a")),
                ("b", "frozen", ("c", "a")),
                ("a", "killed", ("c",)),
            ):
                stops = daemons[victim].count("stops_for_change")
                with trio.fail_after(PATIENCE_S):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(senders.set_at_last, *names)
                        await senders.says(victim, "stops_for_change", stops)
                        if how == "killed":
                            await daemons[victim].kill()
                            talk.receivers.origin_killed(HS)
                            await daemons[victim].start()
                        else:
                            os.kill(daemons[victim].pid, signal.SIGSTOP)
                if how == "frozen":
                    # What it had under way, the next one may send again.
                    talk.receivers.origin_killed(HS)
                    stands_by = daemons[victim].count("standing_by")
                    await talk.more()
                    os.kill(daemons[victim].pid, signal.SIGCONT)
                    await senders.says(victim, "standing_by", stands_by)
                await talk.more()
        assert senders.stored() == talk.said
        with psycopg.connect(senders.database) as connection:
            query = "SELECT instance_name FROM federation_stream_position WHERE type = 'events'"
            assert connection.execute(query).fetchall() == [("c",)]
        await talk.arrives()
        await senders.stop()


@pytest.mark.long
@pytest.mark.parametrize("had_stopped", [False, True])
async def test_who_stands_by_takes_a_name_in_the_middle_of_a_change(
    tmp_path: Path, postgres: Databases, had_stopped: bool
) -> None:
    """Its holder is killed, before or after it has stopped for the change. Nobody waits under the
    new name until whoever stood by has stopped, too; then the list is in force, and every server
    gets all that was said, in order, and once, but for what the killed one had under way."""
    async with open_senders(tmp_path, postgres) as (senders, talk):
        daemons = senders.daemons
        first, *_ = talk.receivers.servers.values()
        # What stalls is in flight until the end.
        long = {"defaults": {"request_timeout": f"{PATIENCE_S:.0f}s"}}

        def with_a(*others: str) -> tuple[str, ...]:
            """A list by which the first server is a's."""
            at = shard_of(first.name, len(others) + 1)
            return (*others[:at], "a", *others[at:])

        for name, directory, command, event in (
            ("a", "a", "run --standby", "takes_appends"),
            ("a", "a2", "run --standby", "standing_by"),
            ("b", "b", "run", "standing_by"),
            ("c", "c", "run", "standing_by"),
        ):
            await senders.open(name, directory, command=command, destinations=long)
            await senders.says(directory, event)
        with psycopg.connect(senders.own, autocommit=True) as connection:

            def lease() -> tuple[str, str | None, bool]:
                """Of a: its holder, the change under way, and whether it has stopped for that."""
                query = (
                    "SELECT holder, change, coalesce(stopped = change || ' ' || holder, false)"
                    " FROM leases, sender_list WHERE instance_name = 'a'"
                )
                (row,) = connection.execute(query).fetchall()
                return cast("tuple[str, str | None, bool]", row)

            def victim() -> str:
                """Where the holder runs: whenever a stops, either process may go on."""
                noted = {each: tmp_path / each / "ledger" / "a.lease" for each in ("a", "a2")}
                holder, _, _ = lease()
                return next(each for each, path in noted.items() if holder in path.read_text())

            async with talk.goes_on(*senders.addresses(*daemons)):
                before = with_a("b")
                assert await senders.set(*before) == 0
                await talk.more()
                await daemons["c"].kill()
                if not had_stopped:
                    first.become(STALLING)
                    await talk.more()
                at = victim()
                stops = daemons[at].count("stops_for_change")
                with trio.fail_after(PATIENCE_S):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(senders.set_at_last, *with_a("b", "c"))
                        await senders.says(at, "stops_for_change", stops)
                        if had_stopped:
                            await until(lambda: lease()[2])
                        await daemons[victim()].kill()
                        killed, change, _ = lease()
                        if not had_stopped:
                            talk.receivers.origin_killed(HS)
                            first.become(healthy())
                        await until(lambda: lease()[0] != killed)
                        # Unless it was withdrawn before that, on a very busy machine.
                        if lease()[1] == change:
                            await until(lambda: lease()[1:] != (change, False))
                            assert lease()[1:] == (change, True)
                        await daemons["c"].start()
                await talk.more()
        assert senders.stored() == talk.said
        await talk.arrives()
        again = set(talk.sent_again())
        if not had_stopped:
            again -= {name for name in again if before[shard_of(name, len(before))] == "a"}
        assert not again
        await senders.stop()
