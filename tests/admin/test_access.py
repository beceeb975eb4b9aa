"""Who may ask, how much, and what machines may ask without a token."""

import re
from itertools import product
from typing import Any

import httpx
import pytest
import trio
from starlette.types import Receive, Scope, Send
from tests.admin.desk import OURS, TOKEN, checked, open_desk
from tests.pages import ROOT
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.admin.app import OPENAPI_PATH, description
from fedsender.http.server import (
    BODY_SECONDS,
    LARGE_BYTES,
    OPERATORS,
    SMALL_BODY,
    Bounds,
    Doorkeeper,
)
from fedsender.streams import FeedStatus

GUARDED = (
    f"{OURS}/destinations",
    f"{OURS}/why/a.example",
    f"{OURS}/quarantine",
    f"{OURS}/nothing/here",
    OPENAPI_PATH,
    "/page/overview",
    "/page.html",
    "/health/",
    "/ready/ready",
)


@pytest.mark.slow
async def test_every_path_but_the_probes_needs_the_token(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        for method, path in product(("GET", "POST", "DELETE", "OPTIONS"), GUARDED):
            del desk.http.headers["Authorization"]
            response = await desk.http.request(method, path)
            assert checked(response, 401)["errcode"] == "M_MISSING_TOKEN"
            desk.http.headers["Authorization"] = "Bearer wrong"
            response = await desk.http.request(method, path)
            assert checked(response, 401)["errcode"] == "M_UNKNOWN_TOKEN"


async def test_without_a_configured_token_only_the_probes_answer(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world, token=None) as desk:
        for path in GUARDED:
            refused = checked(await desk.http.get(path), 403)
            assert refused["errcode"] == "M_FORBIDDEN"
            assert "admin.token_file" in refused["error"]
        for probe in ("/health", "/ready", "/metrics"):
            assert (await desk.http.get(probe)).status_code == 200


NOT_THE_TOKEN = [
    b"Bearer",
    b"Bearer ",
    b"Basic dGhlIGFkbWluIHRva2Vu",
    b"Bearer the admin toke",
    b"Bearer the admin token and more",
    b"Bearer \xff\xfe",
    b"the admin token",
    b"",
]


async def test_nothing_but_the_whole_token_will_do(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        for given in NOT_THE_TOKEN:
            raw: Any = {"Authorization": given}
            response = await desk.http.get(f"{OURS}/destinations", headers=raw)
            checked(response, 401)
            assert TOKEN not in response.text


async def test_spaces_around_the_token_are_no_part_of_it(autojump_clock: MockClock) -> None:
    """HTTP drops them from the ends of a header."""

    async def greet(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    door = Doorkeeper(greet, lambda: f" {TOKEN} ")
    transport = httpx.ASGITransport(app=door)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for given in (TOKEN, f" {TOKEN} "):
            headers = {"Authorization": f"Bearer {given}"}
            assert (await http.get("/x", headers=headers)).status_code == 200


async def test_two_tokens_are_no_token(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer wrong")]
        del desk.http.headers["Authorization"]
        response = await desk.http.get(f"{OURS}/destinations", headers=headers)
        assert checked(response, 401)["errcode"] == "M_MISSING_TOKEN"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", f"{OURS}/destinations", "/x"])
async def test_a_host_that_is_a_name_is_refused_everywhere(
    world: World, autojump_clock: MockClock, path: str
) -> None:
    """A web page whose name resolves to 127.0.0.1 could read what an operator's browser may."""
    async with open_desk(world) as desk:
        for name in (
            "evil.example",
            "evil.example:9009",
            "localhost.evil.example",
            "",
            "127.1",
            "\0",
        ):
            response = await desk.http.get(path, headers={"Host": name})
            assert checked(response, 403)["errcode"] == "M_FORBIDDEN"
            assert "Host" in response.text
        for name in ("127.0.0.1", "127.0.0.1:9009", "localhost:80", "LOCALHOST", "[::1]:9009"):
            response = await desk.http.get(path, headers={"Host": name})
            assert response.status_code == (404 if path == "/x" else 200)


async def test_on_a_unix_socket_any_host_will_do(autojump_clock: MockClock) -> None:
    async def greet(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    for server, status in ((("/run/admin.sock", None), 200), (("127.0.0.1", 9009), 403)):
        said = Said()
        scope = scope_of("/health") | {"headers": [(b"host", b"admin")], "server": server}
        await Doorkeeper(greet, lambda: TOKEN)(scope, whole_body, said.send)
        assert said.status == status


async def test_an_unknown_path_or_method_is_refused_as_matrix_does(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        assert (await desk.get("nothing", 404))["errcode"] == "M_UNRECOGNIZED"
        assert (await desk.get("pause", 405))["errcode"] == "M_UNRECOGNIZED"
        assert (await desk.get("/docs", 404))["errcode"] == "M_UNRECOGNIZED"


# --- the doorkeeper alone -------------------------------------------------------------------------


def scope_of(path: str) -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    return {"type": "http", "method": "POST", "path": path, "headers": headers}


class Said(list[dict[str, Any]]):
    """What was sent to who asked."""

    async def send(self, message: Any) -> None:
        self.append(message)

    @property
    def status(self) -> int:
        return int(self[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self)


async def whole_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"{}", "more_body": False}


async def test_an_error_of_ours_shows_nothing_of_itself(autojump_clock: MockClock) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("syt_secret_token")

    said = Said()
    await Doorkeeper(broken, lambda: TOKEN)(scope_of("/x"), whole_body, said.send)
    assert said.status == 500
    assert b"syt_" not in said.body


async def test_a_request_that_takes_too_long_is_ended(autojump_clock: MockClock) -> None:
    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep_forever()

    said = Said()
    await Doorkeeper(stuck, lambda: TOKEN)(scope_of("/x"), whole_body, said.send)
    assert said.status == 503
    assert b"database is away" in said.body


async def test_a_body_that_never_comes_is_not_waited_for(autojump_clock: MockClock) -> None:
    async def unreachable(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the endpoint was asked")

    async def silence() -> dict[str, Any]:
        await trio.sleep_forever()
        raise AssertionError

    said = Said()
    await Doorkeeper(unreachable, lambda: TOKEN)(scope_of("/x"), silence, said.send)
    assert said.status == 408
    assert trio.current_time() == pytest.approx(BODY_SECONDS)


async def test_a_body_beyond_the_bound_is_refused_as_soon_as_it_is(
    autojump_clock: MockClock,
) -> None:
    heard = bytearray()

    async def hear(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    for size, status in ((0, 200), (1, 413)):
        chunks = [b" " * 65_536] * 16 + [b" " * size, b"never asked for"]

        async def next_chunk(chunks: list[bytes] = chunks) -> dict[str, Any]:
            body = chunks.pop(0)
            return {"type": "http.request", "body": body, "more_body": body != b""}

        said = Said()
        await Doorkeeper(hear, lambda: TOKEN)(scope_of("/x"), next_chunk, said.send)
        assert said.status == status
        assert chunks == [b"never asked for"]
    assert len(heard) == OPERATORS.body_bytes


async def test_a_crowd_is_turned_away_but_the_probes_answer(autojump_clock: MockClock) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/health":
            await trio.sleep(10)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    keeper = Doorkeeper(slow, lambda: TOKEN)
    crowd = [Said() for _ in range(OPERATORS.requests)]
    late, probe, after = Said(), Said(), Said()
    async with trio.open_nursery() as nursery:
        for said in crowd:
            nursery.start_soon(keeper, scope_of("/x"), whole_body, said.send)
        await trio.sleep(1)
        await keeper(scope_of("/x"), whole_body, late.send)
        await keeper(scope_of("/health"), whole_body, probe.send)
    await keeper(scope_of("/x"), whole_body, after.send)

    assert (late.status, probe.status, after.status) == (503, 200, 200)
    assert all(said.status == 200 for said in crowd)


async def test_large_bodies_are_bounded_together_and_keep_no_small_one_out(
    autojump_clock: MockClock,
) -> None:
    """Some megabytes each, and a hundred at once, would take all memory once they are parsed."""

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(10)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def of(size: int) -> Receive:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * size, "more_body": False}

        return receive

    size = LARGE_BYTES // 4 + SMALL_BODY
    keeper = Doorkeeper(slow, lambda: TOKEN, Bounds(body_bytes=size))
    large = [Said() for _ in range(4)]
    late, small, after = Said(), Said(), Said()
    async with trio.open_nursery() as nursery:
        for said in large:
            nursery.start_soon(keeper, scope_of("/x"), of(size), said.send)
        await trio.sleep(1)
        await keeper(scope_of("/x"), of(SMALL_BODY + 1), late.send)
        nursery.start_soon(keeper, scope_of("/x"), of(SMALL_BODY), small.send)
    await keeper(scope_of("/x"), of(size), after.send)

    assert (late.status, small.status, after.status) == (503, 200, 200)
    assert all(said.status == 200 for said in large)


# --- probes ---------------------------------------------------------------------------------------


def feed(**values: Any) -> FeedStatus:
    standing: dict[str, Any] = {"connected": True, "level": True, "position": 7, "head": 9}
    return FeedStatus("tcp", **(standing | values))


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        ({"feed": feed(connected=False, last_error="refused")}, "not connected"),
        ({"feed": feed(level=False)}, "at token 7, the newest known is 9"),
        ({"feed": feed(level=False, head=7)}, "it has not said where it stands"),
        ({"feed": feed(level=False, held="persister2 for 40 s")}, "persister2 for 40 s"),
        ({"feed": feed(stopped="an unknown writer")}, "an unknown writer"),
        (
            {"feed": feed(stopped="another history", connected=False, last_error="of before")},
            "another history",
        ),
        ({"failing": "No space left on device"}, "No space left"),
        ({"open": False}, "lock"),
        ({"lack": "Too many open files"}, "Too many open files"),
    ],
)
async def test_ready_says_what_is_missing(
    world: World, autojump_clock: MockClock, standing: dict[str, Any], words: str
) -> None:
    async with open_desk(world) as desk:
        assert await desk.get("/ready") == {"ready": True, "reasons": []}
        for name, value in standing.items():
            setattr(desk.standing, name, value)
        found = await desk.get("/ready", 503)
        assert not found["ready"]
        assert [words in reason for reason in found["reasons"]] == [True]
        assert await desk.get("/health") == {"alive": True}


async def test_metrics_are_what_prometheus_reads(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        del desk.http.headers["Authorization"]
        response: httpx.Response = await desk.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        assert 'synapse_federation_client_sent_transactions_total{server_name="' in response.text
        assert (
            'fedsender_stream_position{server_name="hs.example",stream="events"}' in response.text
        )
        assert (
            'fedsender_destinations{server_name="hs.example",state="catching_up"}' in response.text
        )


# --- the description ------------------------------------------------------------------------------


def paths_on_the_page() -> set[str]:
    """The paths in the first column of the page's table for operators."""
    section = (ROOT / "docs/admin.md").read_text().split("\n## For operators, below")[1]
    cells = re.findall(r"^\| (`.*?) \| ", section.split("\n## ")[0], re.M)
    named = [word for cell in cells for word in re.findall(r"`(?:GET |POST )?([a-z_][^`?]*)", cell)]
    return {
        f"/{path}".replace("SERVER", "{server}").replace("EVENT_ID", "{event_id}") for path in named
    }


@pytest.mark.slow
async def test_openapi_describes_every_endpoint(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        described = await desk.get(OPENAPI_PATH)
    assert described == description()
    ours = {path.removeprefix(OURS) for path in described["paths"] if path.startswith(OURS)}
    assert ours == paths_on_the_page()
    for path in ours:
        for operation in described["paths"][OURS + path].values():
            assert operation["summary"]
            assert operation["security"]
            assert operation["responses"]["200"]["content"]["application/json"]["schema"]
