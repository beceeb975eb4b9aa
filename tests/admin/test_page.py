"""The page's files, its login, and the sessions that a login begins."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
import structlog.testing
import trio
from starlette.types import Receive, Scope, Send
from tests.admin.desk import OURS, TOKEN, Desk, checked, open_desk
from tests.admin.test_access import Said, scope_of, whole_body
from tests.admin.test_endpoints import B, with_a_dead_server
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.admin import display, page
from fedsender.console import safe
from fedsender.http.server import OPERATORS, Doorkeeper

FILES = ("/", "/page.css", "/page.js", "/icon.svg")
PROTECTED = f"{OURS}/destinations"
KEY = page.KEY_HEADER.decode()


async def unreachable(*_: object) -> None:
    raise AssertionError


class Visitor:
    """A browser, as far as HTTP shows one; it has no token in its headers."""

    def __init__(self, desk: Desk) -> None:
        self._http = desk.http
        del desk.http.headers["Authorization"]
        self.cookie = self.key = ""

    async def login(
        self, token: object = TOKEN, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        response = await self._http.post(page.LOGIN, json={"token": token}, headers=headers)
        self._http.cookies.clear()
        if response.is_success:
            self.key = response.json()["key"]
            self.cookie = response.headers["set-cookie"].partition(";")[0]
        return response

    async def get(
        self, path: str = PROTECTED, headers: Mapping[str, str | None] | None = None
    ) -> httpx.Response:
        """Ask as the page does; a header that is None is left out."""
        given = {"Cookie": self.cookie, KEY: self.key, **(headers or {})}
        kept = {name: text for name, text in given.items() if text is not None}
        return await self._http.get(path, headers=kept)


async def test_the_files_need_no_token_and_let_nothing_in_from_elsewhere(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        del desk.http.headers["Authorization"]
        for path in FILES:
            response = await desk.http.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "frame-ancestors 'none'" in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "no-store"
        markup = (await desk.http.get("/")).text
        assert "style=" not in markup
        assert "onclick" not in markup
        assert "<style" not in markup
        assert "//" not in markup.replace("<!doctype html>", "")
        checked(await desk.http.post("/"), 401)
        checked(await desk.http.get("/", headers={"Host": "evil.example"}), 403)


async def test_without_a_token_or_at_another_endpoint_there_is_no_page(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world, token=None) as desk:
        for path in FILES:
            checked(await desk.http.get(path), 403)
        checked(await desk.http.post(page.LOGIN, json={"token": ""}), 403)

    transport = httpx.ASGITransport(app=Doorkeeper(unreachable, lambda: TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for path in FILES:
            checked(await http.get(path), 401)
        checked(await http.post(page.LOGIN, json={"token": TOKEN}), 401)


async def test_the_token_is_exchanged_for_a_cookie_and_a_key(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        visitor = Visitor(desk)
        with structlog.testing.capture_logs() as logged:
            for wrong in ("wrong", "", TOKEN[:-1], TOKEN + "x", None, [TOKEN], "\u00e9"):
                assert checked(await visitor.login(wrong), 401)["errcode"] == "M_UNKNOWN_TOKEN"
            response = await visitor.login()
        assert response.status_code == 200
        attributes = response.headers["set-cookie"].split("; ")[1:]
        assert attributes == [f"Max-Age={page.SESSION_SECONDS}", "HttpOnly", "SameSite=Strict"]
        assert TOKEN not in response.text + str(response.headers) + str(logged)
        assert visitor.key not in visitor.cookie + str(logged)
        assert (await visitor.get()).status_code == 200
        secure = await visitor.login(headers={"Origin": "https://ops.example"})
        assert secure.headers["set-cookie"].endswith("; Secure")


async def test_neither_the_cookie_nor_the_key_is_enough(
    world: World, autojump_clock: MockClock
) -> None:
    """A browser sends the cookie to every port of the host, so that others may see it."""
    async with open_desk(world) as desk:
        visitor = Visitor(desk)
        await visitor.login()
        first = visitor.cookie, visitor.key
        await visitor.login()
        for headers in (
            {KEY: None},
            {"Cookie": None},
            {KEY: first[1]},
            {"Cookie": first[0].partition("=")[0] + "="},
            {"Cookie": "a" + visitor.cookie},
            {"Cookie": visitor.cookie + "0"},
            {"Cookie": '";\\'},
        ):
            checked(await visitor.get(headers=headers), 401)


@pytest.mark.parametrize(
    "other", ["a=1", 'a={"b": "c"}', "a=b c", "path=/", "a,b=c", "a", "\u00e9=1"]
)
async def test_a_cookie_of_another_program_on_this_host_does_no_harm(
    world: World, autojump_clock: MockClock, other: str
) -> None:
    async with open_desk(world) as desk:
        visitor = Visitor(desk)
        await visitor.login()
        for line in (f"{other}; {visitor.cookie}", f"{visitor.cookie}; {other}"):
            response = await desk.http.get(
                PROTECTED,
                headers=[(b"cookie", line.encode()), (KEY.encode(), visitor.key.encode())],
            )
            assert response.status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
async def test_what_a_page_of_another_origin_sends_is_refused(
    world: World, autojump_clock: MockClock, site: str
) -> None:
    async with open_desk(world) as desk:
        visitor, sent = Visitor(desk), {"Sec-Fetch-Site": site}
        response = await desk.http.post(page.LOGIN, json={"token": TOKEN}, headers=sent)
        checked(response, 403)
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            body, headers = b'{"token": "wrong"}', {"Content-Type": kind}
            checked(await desk.http.post(page.LOGIN, content=body, headers=headers), 403)
        await visitor.login()
        checked(await visitor.get(headers=sent), 401)
        assert (await visitor.get(headers={"Sec-Fetch-Site": "same-origin"})).is_success


async def test_a_proxy_that_rewrites_host_is_none_of_the_pages_business(
    world: World, autojump_clock: MockClock
) -> None:
    """The browser's origin is the proxy's then, and the Host header ours."""
    proxied = {"Origin": "https://ops.example", "Sec-Fetch-Site": "same-origin"}
    async with open_desk(world) as desk:
        visitor = Visitor(desk)
        assert (await visitor.login(headers=proxied)).status_code == 200
        assert (await visitor.get(headers=proxied)).status_code == 200


async def test_wrong_tokens_are_few(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        visitor = Visitor(desk)
        await visitor.login()
        for _ in range(page.WRONG_TOKENS):
            checked(await visitor.login("wrong"), 401)
            await trio.sleep(1)
        late = await visitor.login()
        assert checked(late, 429)["error"] == "too many wrong tokens: try again in 50 s"
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        # Sessions, and commands with the token, go on.
        assert (await visitor.get()).status_code == 200
        assert (await desk.http.get(PROTECTED, headers=bearer)).status_code == 200
        await trio.sleep(51)
        checked(await visitor.login(), 200)


async def test_a_login_that_is_none_is_refused(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        for body in (b"", b"[]", b"{", b'{"token": {}}', b"\xff"):
            headers = {"Content-Type": "application/json"}
            checked(await desk.http.post(page.LOGIN, content=body, headers=headers), 401)


async def test_a_login_is_not_read_beyond_its_bound(autojump_clock: MockClock) -> None:
    async def endless() -> dict[str, Any]:
        return {"type": "http.request", "body": b" " * 1000, "more_body": True}

    said = Said()
    door = Doorkeeper(unreachable, lambda: TOKEN, page=page.Page(lambda: TOKEN, bytes))
    await door(scope_of(page.LOGIN), endless, said.send)
    assert said.status == 413


async def test_who_has_no_token_keeps_nobody_out(autojump_clock: MockClock) -> None:
    """As many slow logins as there may be requests at once."""

    async def silence() -> dict[str, Any]:
        await trio.sleep_forever()
        raise AssertionError

    async def greet(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    door = Doorkeeper(greet, lambda: TOKEN, page=page.Page(lambda: TOKEN, bytes))
    crowd, operator = [Said() for _ in range(OPERATORS.requests)], Said()
    async with trio.open_nursery() as nursery:
        for slow in crowd:
            nursery.start_soon(door, scope_of(page.LOGIN), silence, slow.send)
        await trio.sleep(1)
        await door(scope_of(PROTECTED), whole_body, operator.send)
    assert operator.status == 200
    assert {slow.status for slow in crowd} == {408}


@pytest.mark.slow
async def test_a_session_ends_by_time_by_logout_and_by_another_token(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        visitor = Visitor(desk)
        await visitor.login()
        await trio.sleep(page.SESSION_SECONDS - 1)
        assert (await visitor.get()).status_code == 200
        await trio.sleep(1)
        checked(await visitor.get(), 401)

        await visitor.login()
        sent = {"Cookie": visitor.cookie, KEY: visitor.key}
        out = await desk.http.post(page.LOGOUT, headers=sent)
        name, _, _ = visitor.cookie.partition("=")
        assert out.headers["set-cookie"].startswith(f"{name}=; Max-Age=0;")
        checked(await visitor.get(), 401)
        checked(await desk.http.post(page.LOGOUT, headers=sent), 401)

        await visitor.login()
        desk.token = "a new token"
        checked(await visitor.get(), 401)
        desk.token = None
        checked(await visitor.get(), 403)


async def test_sessions_are_bounded_and_the_oldest_ends_first(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        visitor = Visitor(desk)
        seen = []
        for _ in range(page.MAX_SESSIONS + 1):
            await visitor.login()
            seen.append({"Cookie": visitor.cookie, KEY: visitor.key})
        statuses = [(await visitor.get(headers=headers)).status_code for headers in seen]
        assert statuses == [401] + [200] * page.MAX_SESSIONS


async def test_the_page_says_what_the_commands_say(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await with_a_dead_server(desk)
        asked, shown = await desk.get(f"why/{B}"), await desk.get(f"/page/why/{B}")
        facts = [(name, safe(value)) for name, value in display.why_facts(asked)]
        assert [tuple(each) for each in shown["facts"]] == facts
        assert "connection refused" in dict(facts)["in short"]
        assert shown["table"]["rows"][0][0] == "!1:hs.example"
        assert shown["said"] == "1 room"

        asked, shown = await desk.get("overview"), await desk.get("/page/overview")
        heads = [text.plain for text in display.head(asked)]
        assert [shown["title"], *shown["readiness"]] == heads[:2]
        lines = [f"{name:<11}{text}" for name, text in shown["facts"]]
        # The memory of the process may have grown in between.
        same = [number for number, line in enumerate(lines) if not line.startswith("memory")]
        assert [lines[number] for number in same] == [heads[2 + number] for number in same]
        assert len(lines) == len(same) + 1
        assert shown["keys"] == ["a.example", B]
