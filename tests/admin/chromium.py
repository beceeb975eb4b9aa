"""A real browser beside a real endpoint: Debian's Chromium, driven by Playwright."""

import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import trio
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request, sync_playwright
from tests.admin.desk import Standing
from tests.admin.test_serving import serving
from tests.sender.harness import World

ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
PATIENCE_MS = 20_000
REFUSED = re.compile("Failed to load resource: ")
DESKTOP = (1280, 900)
PHONE = (390, 844)


class Chromium:
    """The browser. Playwright wants all its calls on one thread, which must not be Trio's."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "chromium")
        self._playwright: Playwright
        self._browser: Browser

    def __enter__(self) -> Self:
        def start() -> None:
            self._playwright = sync_playwright().start()
            self._browser = self._playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=ARGUMENTS
            )

        self._thread.submit(start).result()
        return self

    def __exit__(self, *_: object) -> None:
        def stop() -> None:
            self._browser.close()
            self._playwright.stop()

        self._thread.submit(stop).result()
        self._thread.shutdown()

    async def walk(
        self,
        url: str,
        steps: Callable[[Page], object],
        size: tuple[int, int] = DESKTOP,
        *,
        dark: bool = False,
        elsewhere: str = "",
        complaint: str | None = None,
    ) -> None:
        """Play `steps` on a new page, with cookies of its own.

        At the end its console has no error, and it has asked nobody but the endpoint.

        Args:
            elsewhere: a second origin that the steps go to themselves.
            complaint: part of the errors that the steps bring about in the console. That a request
                was refused may always be there.
        """

        def play() -> None:
            context = self._browser.new_context(
                viewport={"width": size[0], "height": size[1]},
                color_scheme="dark" if dark else "light",
            )
            try:
                context.set_default_timeout(PATIENCE_MS)
                page = context.new_page()
                wrong: list[str] = []

                def hear(message: ConsoleMessage) -> None:
                    text = message.text
                    expected = complaint is not None and complaint in text
                    if message.type == "error" and not expected and not REFUSED.match(text):
                        wrong.append(text)

                page.on("console", hear)
                page.on("pageerror", lambda error: wrong.append(str(error)))

                def meet(request: Request) -> None:
                    if not request.url.startswith((url, elsewhere or url)):
                        wrong.append(request.url)

                page.on("request", meet)
                page.goto(url)
                steps(page)
                assert not wrong, wrong
            finally:
                context.close()

        await trio.to_thread.run_sync(self._thread.submit(play).result)


@dataclass
class House:
    """A sender with its endpoint.

    Attributes:
        url: of the page.
    """

    world: World
    standing: Standing
    url: str
    token: trio.lowlevel.TrioToken

    def do(self, function: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> Any:
        """Run this beside the sender; called in the steps of a walk."""

        async def run() -> Any:
            return await function(*args, **named)

        return trio.from_thread.run(run, trio_token=self.token)


@asynccontextmanager
async def open_house(directory: Path, **settings: Any) -> AsyncIterator[House]:
    """A sender on the real clock, with its endpoint on a free port of loopback."""
    world = World(directory, ledger={"directory": str(directory / "ledger")}, **settings)
    standing = Standing()
    async with serving(world, "127.0.0.1:0", standing=standing) as admin:
        token = trio.lowlevel.current_trio_token()
        yield House(world, standing, f"http://{admin.address}/", token)
