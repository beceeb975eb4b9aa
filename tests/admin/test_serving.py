"""The endpoint on real sockets."""

import errno
import random
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from tests.admin.desk import OURS, TOKEN, Standing, checked, serve
from tests.sender.harness import World

from fedsender.admin.client import AdminClient, AdminError
from fedsender.config import ConfigError, TcpAddress, UnixAddress
from fedsender.http.server import Admin, read_files
from fedsender.runtime import real_runtime


@asynccontextmanager
async def serving(
    world: World, listen: str, token_file: str = "token", standing: Standing | None = None
) -> AsyncIterator[Any]:
    (world.directory / "token").write_text(f"{TOKEN}\n")
    world.settings["admin"] = {"listen": listen, "token_file": token_file}
    async with world.run(), serve(world, standing or Standing()) as served:
        yield served


@asynccontextmanager
async def client_of(admin: Admin, token: str | None = TOKEN) -> AsyncIterator[httpx.AsyncClient]:
    address = admin.address
    unix = str(address.path) if isinstance(address, UnixAddress) else None
    transport = httpx.AsyncHTTPTransport(uds=unix, verify=False)
    host = "admin" if unix else str(address)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://{host}", headers=headers, timeout=None
    ) as client:
        with trio.fail_after(20):
            yield client


async def in_thread(function: Callable[..., Any], *args: Any, **values: Any) -> Any:
    with trio.fail_after(20):
        return await trio.to_thread.run_sync(partial(function, *args, **values))


async def test_it_serves_on_a_free_loopback_port_and_stops(world: World) -> None:
    async with serving(world, "127.0.0.1:0") as admin:
        port = admin.address.port
        assert port != 0
        async with client_of(admin) as http:
            assert (await http.get("/health")).json() == {"alive": True}
            assert (await http.get(f"{OURS}/destinations")).json()["total"] == 0
        async with client_of(admin, None) as http:
            checked(await http.get(f"{OURS}/destinations"), 401)
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await trio.open_tcp_stream("127.0.0.1", port)


async def test_a_unix_socket_is_for_our_user_alone_and_goes_at_the_end(world: World) -> None:
    path = world.directory / "admin.sock"
    async with serving(world, f"unix:{path}") as admin:
        assert admin.address == UnixAddress(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with client_of(admin) as http:
            assert (await http.get(f"{OURS}/destinations")).json()["total"] == 0
    assert not path.exists()


async def test_a_socket_that_a_kill_left_behind_is_replaced(world: World) -> None:
    path = world.directory / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(world, f"unix:{path}") as admin, client_of(admin) as http:
        assert (await http.get("/health")).is_success


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_an_address_in_use_is_one_plain_error_and_the_first_user_keeps_it(
    world: World, kind: str
) -> None:
    listen = "127.0.0.1:0" if kind == "tcp" else f"unix:{world.directory}/admin.sock"
    async with serving(world, listen) as admin:
        world.settings["admin"]["listen"] = str(admin.address)
        with pytest.raises(OSError, match=r"in use|somebody listens") as caught:
            async with serve(world, Standing()):
                pass
        assert caught.value.errno == errno.EADDRINUSE
        async with client_of(admin) as http:
            assert (await http.get("/health")).is_success


async def test_without_the_tokens_file_it_does_not_start(world: World) -> None:
    expected = pytest.RaisesExc(ConfigError, match="cannot be read")
    with pytest.RaisesGroup(expected, flatten_subgroups=True, allow_unwrapped=True):
        async with serving(world, "127.0.0.1:0", "missing"):
            pass


async def test_the_token_can_be_changed_while_it_runs(world: World) -> None:
    async with serving(world, "127.0.0.1:0") as admin:
        (world.directory / "token").write_text("another\n")
        await read_files([admin])
        async with client_of(admin) as http:
            checked(await http.get(f"{OURS}/destinations"), 401)
        async with client_of(admin, "another") as http:
            assert (await http.get(f"{OURS}/destinations")).is_success
        (world.directory / "token").unlink()
        with pytest.raises(ConfigError):
            await read_files([admin])
        async with client_of(admin, "another") as http:
            assert (await http.get(f"{OURS}/destinations")).is_success


async def test_one_bad_file_leaves_every_endpoint_as_it_was(world: World) -> None:
    async with serving(world, "127.0.0.1:0") as first:
        second = Admin(first.address, world.directory / "missing", real_runtime(), None)
        (world.directory / "token").write_text("another\n")
        with pytest.raises(ConfigError):
            await read_files([first, second])
        async with client_of(first, "another") as http:
            checked(await http.get(f"{OURS}/destinations"), 401)


@pytest.mark.slow
async def test_nonsense_on_the_socket_harms_nobody_else(world: World) -> None:
    async with serving(world, "127.0.0.1:0") as admin:
        for nonsense in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            b"GET " + b"/" * 100_000,
            b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000,
        ):
            stream = await trio.open_tcp_stream("127.0.0.1", admin.address.port)
            async with stream:
                with trio.fail_after(60), suppress(trio.BrokenResourceError):
                    await stream.send_all(nonsense)
                    await stream.send_eof()
                    while await stream.receive_some():
                        pass
        async with client_of(admin) as http:
            assert (await http.get("/health")).is_success


_UPGRADE = (
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: a\r\n"
)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HOSTILE = {
    "a WebSocket and a byte behind it": _UPGRADE + b"\r\nx",
    "a WebSocket extension that is no text": (_UPGRADE + b"Sec-WebSocket-Extensions: \xff\r\n\r\n"),
    "a WebSocket of HTTP/1.0": (
        b"GET / HTTP/1.0\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    ),
    "h2c with settings that are none": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: !\r\n\r\n"
    ),
    "h2c without settings": (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    ),
    "HTTP/2 from the start": _PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\0" * 64,
    # HEADERS with a :path of "/\xff", and with CONNECT and no :path: Huffman coding is off.
    "HTTP/2 with a path that is no text": (
        _PREFACE
        + b"\0\0\0\4\0\0\0\0\0"
        + b"\0\0\x0a\1\5\0\0\0\1\x82\x86\x41\1x\x04\x02/\xff\x00"[:-1]
    ),
    "HTTP/2 CONNECT": (
        _PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\x0c\1\5\0\0\0\1\x02\x07CONNECT\x41\1x"
    ),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"
    ),
    "a length and chunks": (
        b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x"
    ),
    "chunks that are none": (
        b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n"
    ),
    "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\nxxxx",
    "bytes that are no text": b"G\xffT /\xff%ff%00 HTTP/1.1\r\nHost: \xff\r\nX: \0\r\n\r\n",
    "many requests at once": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
}


async def heard(admin: Any, said: bytes) -> bytes:
    """What the endpoint answers to these bytes before it closes the connection."""
    answer = b""
    async with await trio.open_tcp_stream("127.0.0.1", admin.address.port) as stream:
        with trio.fail_after(60), suppress(trio.BrokenResourceError):
            await stream.send_all(said)
            await stream.send_eof()
            while got := await stream.receive_some():
                answer += got
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_nothing_that_a_client_sends_ends_the_process(world: World, name: str) -> None:
    async with serving(world, "127.0.0.1:0") as admin:
        answer = await heard(admin, HOSTILE[name])
        assert answer.startswith(b"HTTP/1.1 ")
        assert not answer.startswith(b"HTTP/1.1 1")
        async with client_of(admin) as http:
            assert (await http.get("/health")).is_success


def spoiled(rng: random.Random, said: bytes) -> bytes:
    """A request in which a few bytes are not what they were."""
    raw = bytearray(said)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(raw) + 1)
        match rng.randrange(4):
            case 0:
                raw[place:place] = rng.choice((b"\r\n", b"\0", b"\xff", b": ", b" ", b"%"))
            case 1:
                del raw[place : place + rng.randint(1, 9)]
            case 2:
                raw[place : place + 1] = bytes([rng.randrange(256)])
            case _:
                piece = rng.choice(list(HOSTILE.values()))
                start = rng.randrange(len(piece))
                raw[place:place] = piece[start : start + rng.randint(1, 60)]
    return bytes(raw) or b"\0"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_no_spoiled_request_ends_the_process_or_is_answered_by_silence_for_ever(
    world: World, seed: int
) -> None:
    rng = random.Random(seed)
    good = b"POST /_fedsender/admin/v1/pause HTTP/1.1\r\nHost: localhost\r\n"
    good += b"Authorization: Bearer " + TOKEN.encode() + b"\r\nContent-Length: 2\r\n\r\n{}"
    seeds = [good, *HOSTILE.values()]
    async with serving(world, "127.0.0.1:0") as admin:
        for _ in range(100):
            await heard(admin, spoiled(rng, rng.choice(seeds)))
        async with client_of(admin) as http:
            assert (await http.get("/health")).is_success


@pytest.mark.slow
async def test_a_client_that_reads_nothing_does_not_hold_the_end(world: World) -> None:
    """Or whoever may connect could keep the daemon from its drain."""
    async with serving(world, "127.0.0.1:0") as admin:
        stream = await trio.open_tcp_stream("127.0.0.1", admin.address.port)
        with trio.move_on_after(2):
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5_000)
        before = trio.current_time()
    assert trio.current_time() - before < 10
    await stream.aclose()


async def test_a_body_that_is_too_large_is_answered_over_the_wire_too(world: World) -> None:
    async with serving(world, "127.0.0.1:0") as admin:
        for token, status in ((TOKEN, 413), ("wrong", 401)):
            async with client_of(admin, token) as http:
                response = await http.post(f"{OURS}/pause", content=b" " * 3 * 2**20)
                checked(response, status)


@pytest.mark.slow
async def test_an_idle_connection_does_not_hold_the_end(world: World) -> None:
    async with serving(world, "127.0.0.1:0") as admin:
        stream = await trio.open_tcp_stream("127.0.0.1", admin.address.port)
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in await stream.receive_some()
        before = trio.current_time()
    assert trio.current_time() - before < 10
    await stream.aclose()


# --- the command line's client --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_the_client_asks_and_tells_over_either_kind_of_socket(
    world: World, kind: str
) -> None:
    listen = "127.0.0.1:0" if kind == "tcp" else f"unix:{world.directory}/admin.sock"
    async with serving(world, listen) as admin:
        client = AdminClient(admin.address, TOKEN)
        assert (await in_thread(client.get, "destinations", limit=5))["total"] == 0
        with pytest.raises(AdminError, match="not a server that we know of") as caught:
            await in_thread(client.get, "why", "[::1]:8448")
        assert caught.value.status == 404
        # Whatever a token file may hold, the second no header of latin-1.
        for wrong in ("wrong", "wrong \N{EURO SIGN}"):
            with pytest.raises(AdminError, match="not the configured one") as caught:
                await in_thread(AdminClient(admin.address, wrong).post, "pause", body={})
            assert caught.value.status == 401


def test_the_client_says_in_one_line_that_nobody_answers(tmp_path: Path) -> None:
    for address in (UnixAddress(tmp_path / "no.sock"), TcpAddress("127.0.0.1", 1)):
        with pytest.raises(AdminError, match="no answer from the daemon at") as caught:
            AdminClient(address, None).get("destinations")
        assert caught.value.status == 0
