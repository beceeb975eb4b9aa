"""The append endpoint over real sockets, and the client that a homeserver uses."""

import asyncio
import gc
import json
import os
import ssl
import stat
import tempfile
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trustme
from tests.relay.log_support import lines_after, log_of, numbers, open_log, pdu

from fedsender.config import Address, TcpAddress, UnixAddress
from fedsender.embedded.endpoint import BOUNDS, PREFIX, description, serve_intake
from fedsender.embedded.facts import Ephemeral, prepare_ephemeral
from fedsender.embedded.intake import Intake
from fedsender.runtime import real_runtime
from fedsender_lab.intake_client import (
    EpochOver,
    IntakeClient,
    NewRecord,
    NotTrusted,
    Position,
    Refused,
    ReservationLost,
)
from fedsender_relay.protocol import rows_of

TOKEN = "not for everybody"
ANY_PORT: Address = TcpAddress("127.0.0.1", 0)


@asynccontextmanager
async def serving(
    directory: Path,
    listen: Address = ANY_PORT,
    publish: Callable[[Ephemeral], None] = lambda row: None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Intake, str]]:
    """The endpoint with a log on a real disk; the intake, and its address."""
    secret = directory / "token"
    secret.write_text(TOKEN)
    runtime = real_runtime()
    async with open_log(directory / "relay", runtime) as log:
        intake = Intake(log.writer, runtime, publish)
        async with serve_intake(intake, listen, secret, runtime, lambda: tls) as served:
            yield intake, str(served.address)


async def ask(address: str, what: str, body: object, token: str = TOKEN) -> tuple[int, Any]:
    async with httpx.AsyncClient(verify=False, trust_env=False) as http:
        response = await http.post(
            f"http://{address}{PREFIX}/{what}",
            content=body if isinstance(body, bytes) else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}"},
        )
    return response.status_code, response.json()


def one(number: int, **more: object) -> dict[str, object]:
    return {"appends": [{"id": f"id{number}", "rows": [pdu(number)], **more}]}


@pytest.mark.slow
async def test_a_200_means_that_it_is_in_the_log(tmp_path: Path) -> None:
    """Contract: an append endpoint over HTTP, with a token; the same id, the same token."""
    async with serving(tmp_path) as (intake, address):
        async with IntakeClient.at(address, TOKEN) as relay:
            assert await relay.append([pdu(1)], id="a") == 1
            assert await relay.append([pdu(1)], id="a") == 1
            records = [NewRecord([pdu(number)], f"id{number}") for number in range(2, 500)]
            assert await relay.append_all(records) == list(range(2, 500))
            assert await relay.append_all(records[-3:]) == [497, 498, 499]
            position = await relay.position()
        assert position == Position(log_of(intake).epoch, 499, first=1)
        assert numbers(await lines_after(log_of(intake), 0)) == list(range(1, 500))


async def test_an_append_by_an_epoch_that_is_over_tells_the_caller_to_look(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, address), IntakeClient.at(address, TOKEN) as relay:
        before = (await relay.position()).epoch
        assert await relay.append_all([NewRecord([pdu(1)], "id1")], epoch=before) == [1]
    async with serving(tmp_path) as (_, address), IntakeClient.at(address, TOKEN) as relay:
        with pytest.raises(EpochOver):
            await relay.append_all([NewRecord([pdu(2)], "id2")], epoch=before)
        position = await relay.position()
        assert position.stored == 1
        records = [NewRecord([pdu(2)], "id2")]
        assert await relay.append_all(records, epoch=position.epoch) == [2]


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    """The other kind of listener; lone surrogates and big numbers come through as they are."""
    row = pdu(1)
    row[1][2]["content"] = {"half": "\ud83d", "big": 2**70, "é": [None, True, "\u0000"]}
    listen = UnixAddress(tmp_path / "append.sock")
    async with (
        serving(tmp_path, listen) as (intake, address),
        IntakeClient.at(address, TOKEN) as relay,
    ):
        assert stat.S_IMODE(listen.path.stat().st_mode) == 0o660, "a homeserver is another user"
        assert await relay.append([row]) == 1
        (lines,) = await lines_after(log_of(intake), 0)
        assert json.loads(rows_of(lines)[0]) == row


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_a_unix_socket_is_opened_by_another_user_through_its_group() -> None:
    """A homeserver in another container: the group is that of our process, or the directory's
    where that has the setgid bit. Who is in neither stays out."""
    group, connect = 23456, "import socket, sys; socket.socket(1).connect(sys.argv[1])"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.chown(directory, 0, group)
        os.chmod(directory, 0o2755)
        (directory / "relay").mkdir()
        listen = UnixAddress(directory / "append.sock")
        async with serving(directory / "relay", listen):
            assert listen.path.stat().st_gid == group
            for groups, code in (([group], 0), ([], 1)):
                done = await trio.run_process(
                    ["/usr/bin/python3", "-c", connect, str(listen.path)],
                    user=54321,
                    group=54321,
                    extra_groups=groups,
                    check=False,
                    capture_stderr=True,
                )
                assert done.returncode == code, done.stderr
            assert b"PermissionError" in done.stderr


@pytest.mark.slow
async def test_inside_tls(tmp_path: Path) -> None:
    """By name; who speaks no TLS, or says nothing, gets nothing and stands in nobody's way. A
    client that is still sending when it is refused sees the answer."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with serving(tmp_path, tls=context) as (intake, address):
        port = int(address.rpartition(":")[2])
        silent = await trio.open_tcp_stream("127.0.0.1", port)
        async with await trio.open_tcp_stream("127.0.0.1", port) as plain:
            await plain.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with suppress(trio.BrokenResourceError):
                assert not (await plain.receive_some()).startswith(b"HTTP/")
        where = f"https://localhost:{port}"
        async with IntakeClient.at(where, TOKEN, ca_file=str(tmp_path / "ca.pem")) as relay:
            assert await relay.append([pdu(1)]) == 1
        stranger = await trio.open_ssl_over_tcp_stream("localhost", port)
        with pytest.raises(trio.BrokenResourceError):
            await stranger.do_handshake()
        await trio.aclose_forcefully(stranger)
        async with httpx.AsyncClient(verify=trusting, trust_env=False) as http:
            body = b" " * (BOUNDS.body_bytes + 2**20)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            response = await http.post(f"{where}{PREFIX}/append", content=body, headers=headers)
            assert response.status_code == 413
        await silent.aclose()
        assert log_of(intake).head == 1


@pytest.mark.slow
async def test_what_waiting_does_not_cure_is_said_at_once(tmp_path: Path) -> None:
    """A certificate that is not trusted, no TLS where it should be, another token."""
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    stranger.cert_pem.write_to_path(str(tmp_path / "stranger.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def fails(address: str, ca: str, token: str, why: str) -> None:
        with trio.fail_after(10):
            async with IntakeClient.at(address, token, ca_file=str(tmp_path / ca)) as client:
                with pytest.raises((NotTrusted, Refused), match=why):
                    await client.append([pdu(1)])

    async with serving(tmp_path, tls=context) as (_, address):
        port = address.rpartition(":")[2]
        await fails(f"https://localhost:{port}", "stranger.pem", TOKEN, "localhost.*not trusted")
        await fails(f"https://127.0.0.1:{port}", "ca.pem", TOKEN, "not trusted: .*127")
        await fails(f"https://localhost:{port}", "ca.pem", "another", "not the configured one")
    (tmp_path / "clear").mkdir()
    async with serving(tmp_path / "clear") as (_, address):
        await fails(f"https://{address}", "ca.pem", TOKEN, "does not speak TLS")


async def test_the_client_waits_for_the_relay(tmp_path: Path) -> None:
    """It tries again while the relay is away, refuses or breaks off, and appends once."""
    listen = UnixAddress(tmp_path / "append.sock")
    done = trio.Event()

    async def bring() -> None:
        async with IntakeClient.at(str(listen), TOKEN) as relay:
            tokens.append(await relay.append([pdu(1)], id="a"))
            tokens.append(await relay.append([pdu(2)], id="b"))
            done.set()

    tokens: list[int | None] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bring)
        await trio.sleep(0.1)
        async with serving(tmp_path, listen) as (intake, _):
            log_of(intake).refuse("no room")
            await trio.sleep(0.2)
            assert tokens == []
            log_of(intake).refuse(None)
            with trio.fail_after(60):
                await log_of(intake).moved.wait_past(0)
        async with serving(tmp_path, listen) as (intake, _):
            with trio.fail_after(60):
                await done.wait()
            assert tokens == [1, 2]
            assert numbers(await lines_after(log_of(intake), 0)) == [1, 2]


async def test_a_connection_that_breaks_off(tmp_path: Path) -> None:
    """While the body is being sent, and instead of an answer: nothing is left behind but another
    attempt."""
    broken = 0

    async def break_off(stream: trio.SocketStream) -> None:
        nonlocal broken
        broken += 1
        with suppress(trio.BrokenResourceError):
            await stream.receive_some(100 if broken % 2 else 10**7)
        await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, break_off, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        async with IntakeClient.at(address, TOKEN) as relay:
            nursery.start_soon(relay.append, [pdu(1, 200_000)] * 15)
            with trio.fail_after(60):
                while broken < 4:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    gc.collect()


async def test_two_writers_and_their_places(tmp_path: Path) -> None:
    """Reserve and complete; a body that fails gives its place up, so nobody waits for it."""
    async with (
        serving(tmp_path) as (intake, address),
        IntakeClient.at(address, TOKEN) as relay,
        trio.open_nursery() as nursery,
    ):
        with pytest.raises(ZeroDivisionError):
            async with relay.reserved("a"):
                raise ZeroDivisionError
        assert intake.holder() is None
        async with relay.reserved("a") as place, relay.reserved("b") as later:
            nursery.start_soon(lambda: relay.append([pdu(2)], id="2", reservation=later))
            await trio.sleep(0.1)
            assert log_of(intake).head == 0
            assert await relay.append([pdu(1)], id="1", reservation=place) == 1
        with trio.fail_after(60):
            await log_of(intake).moved.wait_past(1)
        with pytest.raises(ReservationLost):
            await relay.append([pdu(3)], id="3", reservation=place)


async def test_what_is_of_use_only_now(tmp_path: Path) -> None:
    """POST /ephemeral reaches who is connected, and no log."""
    published: list[Ephemeral] = []
    async with (
        serving(tmp_path, publish=published.append) as (intake, address),
        IntakeClient.at(address, TOKEN) as relay,
    ):
        await relay.ephemeral(typing=[["!r:hs.example", []]])
        assert published == [prepare_ephemeral("typing", ["!r:hs.example", []])]
        with pytest.raises(Refused, match="typing"):
            await relay.ephemeral(typing=[["!r:hs.example"]])
        with pytest.raises(ValueError, match="events"):
            await relay.ephemeral(events=[])
        assert log_of(intake).head == 0


@pytest.mark.slow
async def test_a_body_of_errors_costs_little_memory(tmp_path: Path) -> None:
    """Pydantic makes 1 KiB of each key that it does not know: 8 MiB of them took 914."""
    keys = b"{" + b",".join(b'"%06d":1' % number for number in range(2**17 - 2)) + b"}"
    async with serving(tmp_path) as (_, address):
        tracemalloc.start()
        try:
            status, answer = await ask(address, "append", keys)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (status, answer["error"]) == (400, "body: there is no key '000000'")
    assert peak < 64 * 2**20


async def test_one_record_with_any_event_fits(tmp_path: Path) -> None:
    """However many commas its 64 KiB have."""
    async with serving(tmp_path) as (intake, address):
        row = pdu(1)
        row[1][2]["content"] = {"body": "," * 60_000}
        status, _ = await ask(address, "append", {"appends": [{"id": "a", "rows": [row]}]})
        assert status == 200
        assert log_of(intake).head == 1


@pytest.mark.slow
async def test_requests_that_are_refused(tmp_path: Path) -> None:
    """Every bad request has one clear answer, says no content of it, and leaves nothing behind."""
    deep = b'{"appends":[{"id":"a","rows":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}"
    huge = b" " * (BOUNDS.body_bytes + 1)
    many = {"appends": [{"id": str(n), "rows": [pdu(n)]} for n in range(1001)]}
    secret_row = ["edu", ["to_device", "b.example", "m", "hush-hush"]]
    refused: list[tuple[object, int, str]] = [
        (b"{", 400, "M_NOT_JSON"),
        (b"\xff", 400, "M_NOT_JSON"),
        (deep, 400, "M_NOT_JSON"),
        (huge, 413, "M_TOO_LARGE"),
        (b'{"appends":[' + b"[]," * 2**16 + b"[]]}", 413, "M_TOO_LARGE"),
        (one(1) | {"other": 1}, 400, "M_BAD_JSON"),
        ([], 400, "M_BAD_JSON"),
        ({}, 400, "M_MISSING_PARAM"),
        ({"appends": []}, 400, "M_INVALID_PARAM"),
        (many, 400, "M_INVALID_PARAM"),
        ({"appends": [{"id": "a"}]}, 400, "M_MISSING_PARAM"),
        ({"appends": [{"id": "a", "rows": []}]}, 400, "M_BAD_JSON"),
        (one(1, more=1), 400, "M_INVALID_PARAM"),
        (one(1, reservation="x-1"), 409, "FEDSENDER_RESERVATION_GONE"),
        ({"appends": [{"id": "a", "rows": [secret_row]}]}, 400, "M_BAD_JSON"),
        ({"appends": [{"id": "a", "rows": [pdu(1, 300_000)]}]}, 400, "M_BAD_JSON"),
        (b'{"appends":[{"id":"a","rows":[["hosts",[NaN,[],[]]]]}]}', 400, "M_BAD_JSON"),
        (b'{"appends":[{"id":"a","rows":[["hosts",[%s,[],[]]]]}]}' % (b"9" * 5000), 400, "M_"),
        ({"appends": [{"id": "id7", "rows": [pdu(8)]}]}, 409, "FEDSENDER_ID_REUSED"),
    ]
    async with serving(tmp_path) as (intake, address):
        assert await ask(address, "append", one(7)) == (
            200,
            {"epoch": log_of(intake).epoch, "tokens": [1]},
        )
        for body, status, errcode in refused:
            got, answer = await ask(address, "append", body)
            assert (got, answer["errcode"][: len(errcode)]) == (status, errcode), answer
            assert "hush-hush" not in str(answer)
        assert (await ask(address, "append", one(1), token="wrong"))[0] == 401
        assert (await ask(address, "reserve", {"writer": "a b"}))[0] == 400
        assert (await ask(address, "reserve", {"writer": "a", "count": 101}))[0] == 400
        assert (await ask(address, "nothing", {}))[0] == 404
        log_of(intake).refuse("no room")
        got, answer = await ask(address, "append", one(2))
        assert (got, answer["errcode"], answer["retry_after_ms"] > 0) == (
            503,
            "FEDSENDER_FULL",
            True,
        )
        async with IntakeClient.at(address, "wrong") as relay:
            with pytest.raises(Refused) as refusal:
                await relay.append([pdu(1)])
            assert refusal.value.status == 401
        log_of(intake).refuse(None)
        async with IntakeClient.at(address, f"{TOKEN}\n") as relay:
            assert await relay.append([pdu(7)], id="id7") == 1, "as it was read from its file"
        with pytest.raises(ValueError, match="token"):
            async with IntakeClient.at(address, "two\nlines"):
                pass
        assert log_of(intake).head == 1


def test_it_runs_on_asyncio(tmp_path: Path) -> None:
    """Most homeservers in Python do."""
    ready: list[tuple[str, trio.lowlevel.TrioToken, trio.Event]] = []
    up = threading.Event()

    async def serve() -> None:
        async with serving(tmp_path) as (_, address):
            stop = trio.Event()
            ready.append((address, trio.lowlevel.current_trio_token(), stop))
            up.set()
            await stop.wait()

    async def bring() -> int | None:
        async with IntakeClient.at(ready[0][0], TOKEN) as relay:
            return await relay.append([pdu(1)])

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert up.wait(60)
        assert asyncio.run(bring()) == 1
    finally:
        for _, token, stop in ready:
            token.run_sync_soon(stop.set)
        thread.join(60)


def test_the_endpoint_is_described() -> None:
    """Issue: the endpoint described in OpenAPI, for homeservers in other languages."""
    paths = description()["paths"]
    assert sorted(paths) == [
        f"{PREFIX}/{name}"
        for name in (
            "append",
            "ephemeral",
            "outcomes",
            "position",
            "reserve",
            "rooms/{room_id}",
        )
    ]
    assert "503" in paths[f"{PREFIX}/append"]["post"]["responses"]
