"""The page in a real Chromium: every view and action, by mouse and by keyboard, wide and narrow."""

import http.client
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trio
from playwright.sync_api import Page, Route, expect
from tests.admin.chromium import DESKTOP, PATIENCE_MS, PHONE, Chromium, House, open_house
from tests.admin.crowd import BEHIND, gather
from tests.admin.desk import TOKEN
from tests.test_cli import R1, A, B, with_a_dead_server

from fedsender.federation.client import Unreachable
from fedsender_lab.testing.clock import until

pytestmark = pytest.mark.program("chromium", "chromium")

HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>\u202e\x1b[2J"
SHOWN = "<img src=x onerror=alert(1)><b>bold</b>\\u202e\\x1b[2J"
LONG = f"{'long-' * 11}name.{'and-on-' * 7}it-goes.example"

expect.set_options(timeout=PATIENCE_MS)


def log_in(page: Page) -> None:
    page.get_by_label("Access token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    expect(page.locator(".foot")).to_contain_text("on this list")


def show(page: Page, wanted: str) -> None:
    """Go to a server or an event by the form at the top."""
    page.get_by_label("Server or event ID").fill(wanted)
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(wanted)
    expect(page.locator("main.filling")).to_have_count(0)


def confirm(page: Page, name: str, **fields: str) -> None:
    """Press a button, fill the fields of its question, and say yes."""
    page.get_by_role("button", name=f"{name}…").click()
    dialog = page.get_by_role("dialog")
    for label, text in fields.items():
        dialog.get_by_label(label.replace("_", " ")).fill(text)
    dialog.get_by_role("button", name=name.partition(" ")[0], exact=True).click()


def said(page: Page, text: str) -> None:
    expect(page.get_by_role("status")).to_contain_text(text)


def servers(page: Page) -> list[str]:
    return page.locator(".list td[data-title=SERVER]").all_inner_texts()


# --- the login ------------------------------------------------------------------------------------


async def test_a_browser_logs_in_stays_in_and_logs_out(tmp_path: Path, chromium: Chromium) -> None:
    async with open_house(tmp_path) as house:
        await with_a_dead_server(house.world)

        def steps(page: Page) -> None:
            expect(page.get_by_label("Access token")).to_be_focused()
            page.get_by_label("Access token").fill("wrong")
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert")).to_contain_text("not the configured one")
            log_in(page)
            [cookie] = page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
            assert cookie["domain"] == "127.0.0.1"
            assert TOKEN not in str(page.context.storage_state()) + page.url

            page.goto(f"{house.url}#/server/{B}")
            page.reload()
            expect(page.get_by_role("heading", level=1)).to_have_text(B)
            expect(page.locator("dl.facts")).to_contain_text("connection refused")

            page.get_by_role("button", name="Log out").click()
            expect(page.get_by_label("Access token")).to_be_focused()
            assert page.context.cookies() == []
            page.reload()
            expect(page.get_by_label("Access token")).to_be_visible()

        await chromium.walk(house.url, steps)


async def test_a_session_that_has_ended_asks_for_the_token_and_goes_on_there(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_house(tmp_path) as house:
        await with_a_dead_server(house.world)

        def steps(page: Page) -> None:
            log_in(page)
            show(page, B)
            page.context.clear_cookies()
            page.get_by_label("Access token").fill(TOKEN)
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", level=1)).to_have_text(B)
            # The server that is shown is looked at anew.
            show(page, B)
            expect(page.get_by_role("heading", level=1)).to_be_focused()

        await chromium.walk(house.url, steps)


@contextmanager
def on_another_port(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a web server of the same host, to which a browser sends the cookie, too."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


SEND = """async ([url, headers]) => {
    try {
        const request = {method: "POST", credentials: "include", mode: headers ? "cors" : "no-cors",
            headers: headers ?? {}, body: '{"servers": ["b.example"]}'};
        return (await fetch(url, request)).status;
    } catch (error) {
        return String(error);
    }
}"""


async def test_a_page_of_another_origin_does_nothing_with_the_cookie(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_house(tmp_path) as house:
        await with_a_dead_server(house.world)
        pause = f"{house.url}_fedsender/admin/v1/pause"

        def steps(page: Page) -> None:
            log_in(page)
            page.goto(elsewhere)
            assert page.title() == "elsewhere"
            assert page.evaluate(SEND, [pause, None]) == 0  # Its answer is not for that page.
            headers = {"X-Fedsender-Key": "guessed"}
            assert "Failed to fetch" in page.evaluate(SEND, [pause, headers])

        cookies: list[str] = []

        class Elsewhere(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cookies.append(self.headers.get("Cookie", ""))
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b"<title>elsewhere</title>")

            def log_message(self, *_: object) -> None: ...

        with on_another_port(Elsewhere) as elsewhere:
            await chromium.walk(house.url, steps, elsewhere=elsewhere, complaint="CORS policy")
        assert "fedsender_" in cookies[0], "the test shows nothing: the cookie did not go there"
        assert house.world.sender.registry.own_state(B).paused is None


async def test_behind_a_proxy_with_a_path_of_its_own_that_rewrites_host(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_house(tmp_path) as house:
        await with_a_dead_server(house.world)
        inner = house.url.removeprefix("http://").rstrip("/")

        class Proxy(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {**self.headers, "Host": "127.0.0.1"}
                path = self.path.removeprefix("/fedsender")
                # A browser that has left ends this by an error.
                with closing(http.client.HTTPConnection(inner)) as connection:
                    connection.request(self.command, path, body, headers)
                    answer = connection.getresponse()
                    self.send_response(answer.status)
                    for name, value in answer.getheaders():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(answer.read())

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None: ...

        def steps(page: Page) -> None:
            log_in(page)
            [cookie] = page.context.cookies()
            assert cookie["path"] == "/fedsender"
            show(page, B)
            confirm(page, "Park")
            said(page, f"park: {B}")

        with on_another_port(Proxy) as outer:
            await chromium.walk(f"{outer}fedsender/", steps)


# --- the list -------------------------------------------------------------------------------------


async def test_the_list_is_sorted_filtered_paged_and_live(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_house(tmp_path) as house:
        world = house.world
        await world.join(R1, *(f"s{number:03}.example" for number in range(150)))
        for server in world.servers.values():
            server.down = True
        await world.say(R1, "one")
        await until(lambda: all(server.attempts for server in world.servers.values()))

        def steps(page: Page) -> None:
            log_in(page)
            expect(page.locator(".list tbody tr")).to_have_count(100)
            page.get_by_role("button", name="SERVER").click()
            head = page.get_by_role("columnheader", name="SERVER")
            expect(head).to_have_attribute("aria-sort", "ascending")
            expect(page.locator(".list tbody tr").first).to_contain_text("s000.example")
            page.get_by_role("button", name="Next page").click()
            expect(page.locator(".list tbody tr")).to_have_count(50)
            assert servers(page)[0] == "s100.example"
            expect(page.get_by_role("heading", level=1)).to_be_focused()
            page.get_by_role("button", name="First page").click()
            expect(page.locator(".list tbody tr")).to_have_count(100)

            page.get_by_label("Name or pattern").fill("s01?.*")
            page.keyboard.press("Enter")
            expect(page.locator(".foot")).to_contain_text("10 on this list")
            hold = world.sender.operations.hold
            house.do(hold, "s013.example", paused="it moves", parked=None)
            row = page.get_by_role("row").filter(has_text="s013.example")
            expect(row).to_contain_text("paused")
            expect(row).to_contain_text("it moves")
            page.get_by_label("State").select_option("paused")
            expect(page.locator(".foot")).to_contain_text("1 on this list")
            assert servers(page) == ["s013.example"]
            page.get_by_label("State").select_option("level")
            expect(page.locator(".foot")).to_contain_text("No server is on this list")

            # What was chosen is still so after a look at another view.
            page.get_by_role("link", name="Quarantine").click()
            page.get_by_role("link", name="Servers").click()
            expect(page.get_by_label("Name or pattern")).to_have_value("s01?.*")
            page.get_by_text("Failing servers, by class").click()
            expect(page.locator(".by-error tbody tr")).to_contain_text("unreachable")
            page.get_by_label("Name or pattern").fill("no name")
            page.keyboard.press("Enter")
            said(page, "must be a server name or a pattern")
            page.get_by_role("link", name="Quarantine").click()
            page.get_by_role("link", name="Servers").click()
            expect(page.get_by_label("Name or pattern")).to_have_value("s01?.*")
            expect(page.locator(".foot")).to_contain_text("on this list")

        await chromium.walk(house.url, steps)


async def test_a_link_keeps_the_focus_while_rows_move(tmp_path: Path, chromium: Chromium) -> None:
    async with open_house(tmp_path) as house:
        world = house.world
        await with_a_dead_server(world)

        def steps(page: Page) -> None:
            log_in(page)
            page.get_by_label("Only those that are owed something").uncheck()
            page.get_by_label("Sort by").select_option("name")
            expect(page.locator(".list tbody tr")).to_have_count(2)
            page.get_by_role("link", name=B).focus()
            house.do(world.join, "!2:hs.example", "aa.example", "c.example")
            house.do(world.say, "!2:hs.example", "two")
            expect(page.locator(".list tbody tr")).to_have_count(4)
            assert servers(page) == [A, "aa.example", B, "c.example"]
            expect(page.get_by_role("link", name=B)).to_be_focused()
            page.get_by_label("Live").uncheck()
            page.keyboard.press("Escape")

        await chromium.walk(house.url, steps)


async def test_a_daemon_that_is_not_ready_or_not_there_says_so(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_house(tmp_path) as house:

        def steps(page: Page) -> None:
            log_in(page)
            expect(page.locator(".readiness")).to_have_text("ready")
            house.standing.open = False
            expect(page.locator(".readiness")).to_contain_text("not ready: the instance lock")
            page.route("**/page/overview*", lambda route: route.abort())
            said(page, "no answer from the daemon")
            page.unroute("**/page/overview*")
            expect(page.get_by_role("status")).to_be_empty()

        await chromium.walk(house.url, steps)


# --- one server -----------------------------------------------------------------------------------


async def test_the_last_hour_is_drawn(
    tmp_path: Path, chromium: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsender.admin.context.MINUTE_S", 0.05)
    async with open_house(tmp_path) as house:
        house.world.metrics.sample(trio.current_time())
        await with_a_dead_server(house.world)
        house.world.metrics.sample(trio.current_time())

        def steps(page: Page) -> None:
            log_in(page)
            pictures = page.get_by_role("group", name="The last hour").get_by_role("img")
            expect(pictures).to_have_count(5)
            for number, name in enumerate(
                (
                    r"Delivered: now \S+ PDUs/s; at most \S+",
                    r"Delay: now p50 \S+ m?s, p99 \S+ m?s; at most \S+",
                    "Behind: now 1 server; at most 1",
                    "Owed: now at least 1 event; at most 1",
                    "Failing: now 1 server; at most 1",
                )
            ):
                picture = pictures.nth(number)
                whole = re.compile(f"^{name} in the last hour$")
                expect(picture).to_have_accessible_name(whole)
                # Ever more minutes, the latest at the right edge.
                lines = picture.locator("path")
                expect(lines).to_have_count(2 if name.startswith("Delay") else 1)
                for line in lines.all():
                    expect(line).to_have_attribute("d", re.compile("H180|L180"))

        await chromium.walk(house.url, steps)


async def test_a_server_is_explained_and_acted_upon(tmp_path: Path, chromium: Chromium) -> None:
    async with open_house(tmp_path) as house:
        world = house.world
        event_id = await with_a_dead_server(world)
        own_state = world.sender.registry.own_state

        def steps(page: Page) -> None:
            log_in(page)
            page.get_by_role("link", name=B).click()
            facts = page.locator("dl.facts")
            expect(facts).to_contain_text("Failing for")
            expect(page.locator(".rooms tbody tr")).to_contain_text(R1)
            expect(page.locator(".attempts tbody tr").first).to_contain_text("connection refused")
            expect(page.get_by_role("img", name="Attempts by time")).to_be_visible()

            page.get_by_role("button", name="Pause…").click()
            dialog = page.get_by_role("dialog")
            dialog.get_by_role("button", name="Cancel").click()
            expect(dialog).to_be_hidden()
            assert own_state(B).paused is None
            page.get_by_role("button", name="Pause…").click()
            dialog.get_by_label("For").select_option("2 hours")
            dialog.get_by_label("Reason").fill("it moves house")
            dialog.get_by_label("Your name").fill("ada")
            dialog.get_by_role("button", name="Pause", exact=True).click()
            said(page, f"pause: {B}")
            expect(facts).to_contain_text("by ada: it moves house")
            state = own_state(B)
            assert state.paused_until_ms is not None
            assert state.paused_ms is not None
            assert state.paused_until_ms - state.paused_ms == 2 * 3_600_000

            confirm(page, "Wake")
            said(page, f"left alone: {B}: paused: it moves house")
            confirm(page, "Resume")
            said(page, f"resume: {B}")
            expect(page.get_by_role("button", name="Resume…")).to_be_hidden()
            confirm(page, "Park", Reason="gone")
            said(page, f"park: {B}")
            expect(facts).to_contain_text("Parked: gone")
            confirm(page, "Resume")
            expect(facts).to_contain_text("Failing for")

            world.servers[B].down = False
            confirm(page, "Wake")
            said(page, f"woken: {B}")
            expect(facts).to_contain_text("Up to date")
            page.get_by_role("button", name="Look again").click()
            expect(page.locator(".key")).to_contain_text("delivered 1")
            page.get_by_role("button", name="unreachable").click()
            expect(page.locator(".attempts tbody")).not_to_contain_text("delivered")

            confirm(page, "Redeliver", Event_ID=event_id)
            said(page, f"{event_id} goes to {B} again")
            house.do(until, lambda: world.servers[B].got == ["one", "one"])
            confirm(page, "Redeliver", Event_ID="$unknown")
            expect(page.get_by_role("alert")).not_to_be_empty()
            page.keyboard.press("Escape")

        await chromium.walk(house.url, steps)


async def test_a_purge_wants_the_name_and_says_what_it_would_cost(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_house(tmp_path) as house:
        await with_a_dead_server(house.world)

        def steps(page: Page) -> None:
            log_in(page)
            show(page, B)
            confirm(page, "Purge", To_confirm=A)
            alert = page.get_by_role("dialog").get_by_role("alert")
            expect(alert).to_have_text("this is not the name of the server")
            dialog = page.get_by_role("dialog")
            dialog.get_by_label("To confirm").fill(B)
            dialog.get_by_role("button", name="Purge").click()
            expect(alert).to_contain_text("1 room shared with it")
            dialog.get_by_label("Also while rooms are shared").check()
            dialog.get_by_role("button", name="Purge").click()
            said(page, f"purged: {B}")
            expect(page.get_by_role("heading", level=1)).to_have_text("Servers")
            house.do(until, lambda: house.world.sender.registry.status(B) is None)

        await chromium.walk(house.url, steps)


async def test_a_question_keeps_to_itself_and_the_focus_is_never_lost(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_house(tmp_path) as house:
        await with_a_dead_server(house.world)

        def steps(page: Page) -> None:
            log_in(page)
            heading, dialog = page.get_by_role("heading", level=1), page.get_by_role("dialog")
            page.goto(f"{house.url}#/constructor")
            expect(heading).to_have_text("Servers")
            show(page, B)

            # The answer of one question comes while the next is asked.
            slow: list[Route] = []
            page.route("**/pause", lambda route: slow.append(route))
            with page.expect_request("**/pause"):
                confirm(page, "Pause")
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Park…").click()
            expect(dialog.get_by_role("button", name="Park")).to_be_enabled()
            slow.pop().fulfill(status=503, json={"error": "not done"})
            said(page, "not done")
            expect(dialog.get_by_role("alert")).to_be_empty()
            expect(dialog).to_have_accessible_name(f"Park {B}?")
            dialog.get_by_role("button", name="Park").click()
            said(page, f"park: {B}")

            confirm(page, "Resume")
            expect(page.get_by_role("button", name="Resume…")).to_be_hidden()
            expect(heading).to_be_focused()

            page.get_by_role("button", name="Wake…").click()
            page.go_back()
            expect(heading).to_have_text("Servers")
            expect(dialog).to_be_hidden()
            expect(heading).to_be_focused()

            show(page, B)
            page.get_by_role("button", name="Wake…").click()
            page.context.clear_cookies()
            dialog.get_by_role("button", name="Wake").click()
            expect(page.get_by_label("Access token")).to_be_visible()
            # The event of the closed question has come by then.
            page.evaluate("new Promise((done) => setTimeout(done))")
            expect(page.get_by_label("Access token")).to_be_focused()

        await chromium.walk(house.url, steps)


# --- an event, the quarantine ---------------------------------------------------------------------


async def test_an_event_is_a_map_of_its_servers(tmp_path: Path, chromium: Chromium) -> None:
    async with open_house(tmp_path) as house:
        world = house.world
        await world.join(R1, *(f"s{number:03}.example" for number in range(60)))
        for number in range(15):
            world.servers[f"s{number:03}.example"].down = True
        event = world.pdu(R1, "one")
        await world.apply(event)
        await until(lambda: all(server.attempts for server in world.servers.values()))

        def steps(page: Page) -> None:
            log_in(page)
            show(page, event.event_id)
            expect(page.locator("ul.facts")).to_contain_text("m.room.message by @a:hs.example")
            image = page.get_by_role("img", name="Servers by outcome: 15 pending, 45 delivered")
            expect(image).to_be_visible()
            expect(page.locator(".key")).to_have_text("pending 15delivered 45")
            expect(page.locator(".fates tbody tr")).to_have_count(20)
            page.get_by_role("button", name="pending 15").click()
            expect(page.locator(".fates tbody tr")).to_have_count(15)
            page.get_by_role("button", name="pending 15").click()
            page.get_by_role("button", name="Show more").click()
            expect(page.locator(".fates tbody tr")).to_have_count(60)

            image.hover(position={"x": 3, "y": 3})
            expect(page.locator(".pointed")).to_have_text("s000.example: pending")
            world.servers["s000.example"].down = False
            image.click(position={"x": 3, "y": 3})
            expect(page.get_by_role("heading", level=1)).to_have_text("s000.example")
            page.go_back()
            confirm(page, "Redeliver", To_the_server="s020.example")
            said(page, "goes to s020.example again")
            house.do(until, lambda: world.servers["s020.example"].got == ["one", "one"])
            page.get_by_label("Server or event ID").fill("$unknown")
            page.keyboard.press("Enter")
            said(page, "the homeserver has no such event")

        await chromium.walk(house.url, steps)


async def test_quarantine_is_released_and_dropped(tmp_path: Path, chromium: Chromium) -> None:
    async with open_house(tmp_path) as house:
        world = house.world
        await world.join(R1, A, B)
        events = [world.pdu(R1, text) for text in ("one", "two", "three")]
        for number, event in enumerate(events):
            await world.apply(event)
            await world.store.sender.quarantine_item(
                destination=B,
                kind="pdu",
                reason=f"refused {number}",
                event_id=event.event_id,
                room_id=R1,
                stream_ordering=number + 2,
            )
        await until(lambda: len(world.servers[B].got) == 3)

        def steps(page: Page) -> None:
            log_in(page)
            page.get_by_role("link", name="Quarantine").click()
            rows = page.locator(".items tbody tr")
            expect(rows).to_have_count(3)
            page.get_by_role("button", name="Drop the chosen…").click()
            said(page, "Choose an item first")
            page.get_by_label("Choose item 1").check()
            confirm(page, "Release the chosen")
            said(page, "released: 1")
            expect(rows).to_have_count(2)
            house.do(until, lambda: world.servers[B].got.count("one") == 2)

            page.get_by_label("Of this server only").fill(A)
            page.keyboard.press("Enter")
            expect(page.locator(".foot")).to_have_text("Nothing is in quarantine.")
            page.get_by_label("Of this server only").fill("")
            page.keyboard.press("Enter")
            expect(rows).to_have_count(2)
            every = page.get_by_label("All on this page")
            every.check()
            page.get_by_label("Choose item 2").uncheck()
            expect(every).not_to_be_checked()
            every.check()
            page.get_by_role("button", name="Drop the chosen…").click()
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text("Drop 2 items?")
            expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
            dialog.get_by_role("button", name="Drop").click()
            said(page, "dropped: 2, 3")
            expect(page.locator(".foot")).to_have_text("Nothing is in quarantine.")

        await chromium.walk(house.url, steps)
        assert await world.store.sender.quarantine_list(None, 10) == []


# --- for everybody --------------------------------------------------------------------------------


async def test_the_keyboard_is_enough(tmp_path: Path, chromium: Chromium) -> None:
    async with open_house(tmp_path) as house:
        await with_a_dead_server(house.world)

        def steps(page: Page) -> None:
            def press(*keys: str) -> None:
                for key in keys:
                    page.keyboard.press(key)

            def tab_to(name: str) -> None:
                for _ in range(40):
                    press("Tab")
                    if name in page.evaluate(FOCUSED):
                        assert page.evaluate(RING), f"{name} does not show the focus"
                        return
                raise AssertionError(f"no Tab comes to {name}")

            page.keyboard.type(TOKEN)
            press("Enter")
            expect(page.locator(".foot")).to_contain_text("on this list")
            page.evaluate("document.activeElement.blur()")
            tab_to("Skip to the content")
            press("Enter")
            expect(page.get_by_role("heading", level=1)).to_be_focused()
            tab_to(B)
            press("Enter")
            expect(page.get_by_role("heading", level=1)).to_have_text(B)
            expect(page.get_by_role("heading", level=1)).to_be_focused()
            expect(page.locator("dl.facts")).to_contain_text("Failing for")
            tab_to("Pause…")
            press("Enter")
            expect(page.get_by_role("dialog").get_by_label("For")).to_be_focused()
            press("Escape")
            expect(page.get_by_role("button", name="Pause…")).to_be_focused()
            press("Enter", "End", "Tab", "Tab", "Tab", "Tab")
            expect(page.get_by_role("button", name="Pause", exact=True)).to_be_focused()
            press("Enter")
            said(page, f"pause: {B}")
            expect(page.get_by_role("button", name="Pause…")).to_be_focused()

        await chromium.walk(house.url, steps)
        state = house.world.sender.registry.own_state(B)
        assert state.paused is not None
        assert state.paused_until_ms is None


FOCUSED = "document.activeElement === document.body ? '' : document.activeElement.innerText"
RING = "getComputedStyle(document.activeElement).outlineStyle === 'solid'"
UNREADABLE = """() => {
    const parts = (text) => text.match(/[0-9.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b]
        .map((each) => each / 255)
        .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
        .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
    const behind = (node) => {
        for (let each = node; each; each = each.parentElement) {
            const found = parts(getComputedStyle(each).backgroundColor);
            if (found.length === 3 || found[3] > 0) return found;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
        const icon = node.matches("svg path");
        if (!(own || icon) || !node.checkVisibility({visibilityProperty: true})) continue;
        const style = getComputedStyle(node);
        const colour = icon || node.matches("svg text") ? style.fill : style.color;
        const [a, b] = [light(parts(colour)), light(behind(node))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < (icon ? 3 : 4.5)) found.push(`${node.tagName} ${node.textContent}: ${ratio}`);
    }
    return found;
}"""
CUT = """() => [...document.querySelectorAll("main td, main p, main dd, main button, header *")]
    .filter((each) => each.checkVisibility({visibilityProperty: true}))
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => each.textContent)"""
NAMED = ("button", "link", "textbox", "checkbox", "combobox", "image", "dialog", "table")


def check_view(page: Page) -> None:
    """What must hold of each view, at each width, in each colour scheme."""
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.viewport_size["width"], f"{page.url} is {width} wide"  # type: ignore[index]
    assert page.evaluate(CUT) == []
    assert page.evaluate(UNREADABLE) == []
    assert page.locator("img, iframe").count() == 0
    assert page.locator("h1").count() == 1
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in nodes if not node["ignored"]}
    nameless = [
        node
        for node in nodes
        if not node["ignored"]
        and node["role"]["value"] in NAMED
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    if not page.get_by_role("dialog").is_visible():  # Beside it nothing is there.
        assert "main" in roles
        logged_in = page.locator("header").is_visible()
        assert logged_in == ({"banner", "navigation", "search"} <= roles)


def every_view(page: Page, house: House, server: str, event: str) -> None:
    check_view(page)
    log_in(page)
    check_view(page)
    page.get_by_text("Failing servers, by class").click()
    check_view(page)
    for wanted in (server, event):
        show(page, wanted)
        expect(page.locator(".picture svg")).to_be_visible()
        check_view(page)
    show(page, server)
    for name in ("Pause…", "Purge…"):
        page.get_by_role("button", name=name).click()
        check_view(page)
        page.keyboard.press("Escape")
    page.get_by_role("link", name="Quarantine").click()
    expect(page.locator(".items tbody tr").first).to_be_visible()
    check_view(page)


LIGHT_WIDE, DARK_NARROW = (DESKTOP, False), (PHONE, True)
DARK_WIDE, LIGHT_NARROW = (DESKTOP, True), (PHONE, False)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param((LIGHT_WIDE, DARK_NARROW), id="each-once"),
        pytest.param((DARK_WIDE, LIGHT_NARROW), id="the-other-way", marks=pytest.mark.long),
    ],
)
async def test_each_view_can_be_read_with_10_000_servers_behind(
    looks: Sequence[tuple[tuple[int, int], bool]], tmp_path: Path, chromium: Chromium
) -> None:
    """In a wide window and on a phone, light and dark."""
    async with open_house(tmp_path) as house:
        names = await gather(house.world)

        def steps(page: Page) -> None:
            every_view(page, house, names.server, names.event)
            page.get_by_role("link", name="Servers").click()
            expect(page.locator(".foot")).to_contain_text(f"{BEHIND:,} on this list")
            assert page.locator("main *").count() < 3000
            show(page, names.server)
            expect(page.locator(".rooms-said")).to_contain_text("121 rooms; the 100 that have")
            expect(page.locator(".rooms tbody tr")).to_have_count(20)
            # No column is left out on a phone: each cell with a text is there.
            hidden = page.locator("main td:not(.none)").filter(visible=False)
            assert hidden.count() == 0

        for size, dark in looks:
            await chromium.walk(house.url, steps, size, dark=dark)


async def test_what_others_choose_is_shown_as_text_and_breaks_no_line(
    tmp_path: Path, chromium: Chromium
) -> None:
    async with open_house(tmp_path) as house:
        world = house.world

        def refuse() -> None:
            raise Unreachable("refused", HOSTILE + "x" * 300)

        world.server(LONG, connecting=refuse)
        await world.join(R1, A, LONG)
        event = world.pdu(R1, "one", type=f"{HOSTILE}{'y' * 200}")
        await world.apply(event)
        await until(lambda: world.sender.registry.own_state(LONG).failures)
        await world.store.sender.quarantine_item(
            destination=LONG,
            kind=HOSTILE,
            reason=HOSTILE,
            event_id="$<script>alert(1)</script>" + "z" * 200,
            room_id=f"!{HOSTILE}:{LONG}",
        )

        def steps(page: Page) -> None:
            page.on("dialog", lambda dialog: pytest.fail(dialog.message))
            every_view(page, house, LONG, event.event_id)
            expect(page.locator(".items")).to_contain_text(SHOWN)
            show(page, event.event_id)
            expect(page.locator("ul.facts")).to_contain_text(SHOWN)
            show(page, LONG)
            # The sender itself has put spaces in place of the other characters.
            expect(page.locator("dl.facts")).to_contain_text(SHOWN.partition("\\")[0])
            for wanted in (HOSTILE.replace("\x1b", ""), "$<script>alert(1)</script>"):
                page.get_by_label("Server or event ID").fill(wanted)
                page.get_by_role("button", name="Show", exact=True).click()
                expect(page.get_by_role("heading", level=1)).to_have_text(wanted)
                expect(page.get_by_role("status")).not_to_be_empty()
            assert page.evaluate("document.scripts.length") == 1
            # Nothing here can make HTML from text, not even by mistake.
            with pytest.raises(Exception, match="TrustedHTML"):
                page.evaluate("document.body.innerHTML = '<p>'")

        for size in (DESKTOP, PHONE):
            await chromium.walk(house.url, steps, size, complaint="TrustedHTML")
