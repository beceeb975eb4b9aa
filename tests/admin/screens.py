"""Pictures of the page, to be looked at: `python -m tests.admin.screens DIRECTORY`.

Each view of a sender in trouble (`crowd`), at desktop and phone width, light and dark. It also
prints what one look at the list costs the daemon.
"""

import sys
import tempfile
import time
from pathlib import Path

import httpx
import trio
from playwright.sync_api import Page, expect
from tests.admin.chromium import DESKTOP, PHONE, Chromium, House, open_house
from tests.admin.crowd import BEHIND, Crowd, gather
from tests.admin.desk import TOKEN
from tests.admin.test_browser import log_in, show

LOOKS = 20


def take_pictures(page: Page, names: Crowd, directory: Path, kind: str) -> None:
    def take(name: str, *, whole: bool = False) -> None:
        page.screenshot(path=directory / f"{name}-{kind}.png", full_page=whole)

    take("login")
    log_in(page)
    take("servers")
    page.get_by_label("State").select_option("failing")
    expect(page.locator(".foot")).to_contain_text("300 on this list")
    page.get_by_text("Failing servers, by class").click()
    take("failing", whole=True)
    show(page, names.server)
    take("server", whole=True)
    for name in ("Pause", "Purge"):
        page.get_by_role("button", name=f"{name}…").click()
        take(name.lower())
        page.keyboard.press("Escape")
    show(page, names.event)
    take("event", whole=True)
    page.get_by_role("link", name="Quarantine").click()
    expect(page.locator(".items tbody tr").first).to_be_visible()
    take("quarantine", whole=True)
    page.get_by_label("Server or event ID").fill("nobody.example")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).not_to_be_empty()
    take("unknown")


async def measure(house: House) -> None:
    """Print the CPU time of this thread, which has the daemon's loop, for one answer."""
    headers = {"Authorization": f"Bearer {TOKEN}"}

    def look() -> None:
        with httpx.Client(base_url=house.url, headers=headers) as client:
            for _ in range(LOOKS):
                client.get("page/overview?behind=true&sort=age").raise_for_status()

    await trio.to_thread.run_sync(look)
    before = time.thread_time()
    await trio.to_thread.run_sync(look)
    ms = (time.thread_time() - before) / LOOKS * 1000
    print(f"one look at the list, {BEHIND:,} servers behind: {ms:.1f} ms of CPU time")


async def main(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as place, Chromium() as chromium:
        async with open_house(Path(place)) as house:
            names = await gather(house.world)
            await measure(house)
            for size in (DESKTOP, PHONE):
                for scheme in ("light", "dark"):
                    kind = f"{size[0]}-{scheme}"

                    def steps(page: Page, kind: str = kind) -> None:
                        take_pictures(page, names, directory, kind)

                    await chromium.walk(house.url, steps, size, dark=scheme == "dark")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    trio.run(main, Path(sys.argv[1]))
