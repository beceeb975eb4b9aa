"""The endpoint on real sockets."""

import errno
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
from tests.admin.desk import OURS, TOKEN, Standing, checked, parts_of
from tests.sender.harness import World

from fedsender.admin.client import AdminClient, AdminError
from fedsender.admin.server import serve_parts
from fedsender.admin.serving import Admin
from fedsender.config import ConfigError, TcpAddress, UnixAddress


@asynccontextmanager
async def serving(world: World, listen: str, token_file: str = "token") -> AsyncIterator[Any]:
    (world.directory / "token").write_text(f"{TOKEN}\n")
    world.settings["admin"] = {"listen": listen, "token_file": token_file}
    async with world.run():
        parts = parts_of(world, Standing())
        async with serve_parts(parts) as served:
            yield served


@asynccontextmanager
async def client_of(admin: Admin, token: str | None = TOKEN) -> AsyncIterator[httpx.AsyncClient]:
    address = admin.address
    unix = str(address.path) if isinstance(address, UnixAddress) else None
    transport = httpx.AsyncHTTPTransport(uds=unix)
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
        second = parts_of(world, Standing())
        with pytest.raises(OSError, match=r"in use|somebody listens") as caught:
            async with serve_parts(second):
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
        await admin.read_token()
        async with client_of(admin) as http:
            checked(await http.get(f"{OURS}/destinations"), 401)
        async with client_of(admin, "another") as http:
            assert (await http.get(f"{OURS}/destinations")).is_success
        (world.directory / "token").unlink()
        with pytest.raises(ConfigError):
            await admin.read_token()
        async with client_of(admin, "another") as http:
            assert (await http.get(f"{OURS}/destinations")).is_success


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


async def test_a_body_that_is_too_large_is_answered_over_the_wire_too(world: World) -> None:
    async with serving(world, "127.0.0.1:0") as admin:
        for token, status in ((TOKEN, 413), ("wrong", 401)):
            async with client_of(admin, token) as http:
                response = await http.post(f"{OURS}/pause", content=b" " * 3 * 2**20)
                checked(response, status)


async def test_an_idle_connection_does_not_hold_the_end(world: World) -> None:
    async with serving(world, "127.0.0.1:0") as admin:
        stream = await trio.open_tcp_stream("127.0.0.1", admin.address.port)
        await stream.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
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
        with pytest.raises(AdminError, match="not the configured one") as caught:
            await in_thread(AdminClient(admin.address, "wrong").post, "pause", body={})
        assert caught.value.status == 401


def test_the_client_says_in_one_line_that_nobody_answers(tmp_path: Path) -> None:
    for address in (UnixAddress(tmp_path / "no.sock"), TcpAddress("127.0.0.1", 1)):
        with pytest.raises(AdminError, match="no answer from the daemon at") as caught:
            AdminClient(address, None).get("destinations")
        assert caught.value.status == 0
