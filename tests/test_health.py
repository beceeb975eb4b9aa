"""The servers' health as the daemon reads it: of use where it is there, and never in the way."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import trio
from tests.admin.desk import open_desk
from tests.sender.harness import World
from trio.testing import MockClock

from fedsender.health import SCHEMA, STALE_MS, ServerHealth, read_health

NOW_MS = 1_767_225_600_000
R1 = "!1:hs.example"
A, B = "a.example", "b.example"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def write_health(path: Path, servers: dict[str, tuple[int, int]], *, ms: int = NOW_MS) -> None:
    """A file as the pipeline leaves it: server -> attempts, and those delivered."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
        meta = {"version": "2", "newest_ms": str(ms)}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.executemany(
            "INSERT INTO servers VALUES (?, ?, ?, 12, 30, 70, ?, ?)",
            [
                (server, *counts, ms, ms - 5 if server == "ill.example" else None)
                for server, counts in servers.items()
            ],
        )
        connection.commit()


def test_it_says_how_a_servers_day_went(tmp_path: Path) -> None:
    write_health(tmp_path / "h?.sqlite3", {"a.example": (10, 10), "ill.example": (20, 5)})
    found = read_health(tmp_path / "h?.sqlite3", NOW_MS + 1)
    assert found == {
        "a.example": ServerHealth(1.0, 10, 12, 30, 70, None),
        "ill.example": ServerHealth(0.25, 20, 12, 30, 70, NOW_MS - 5),
    }


@pytest.mark.parametrize("kind", ["absent", "stale", "text", "empty", "another version", "torn"])
def test_what_cannot_be_used_is_ignored(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "health.sqlite3"
    if kind in ("stale", "another version", "torn"):
        write_health(path, {"a.example": (1, 1)})
    now_ms = NOW_MS + STALE_MS + 1 if kind == "stale" else NOW_MS
    if kind == "text":
        path.write_text("no database, and long enough for the header of one" * 10)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "torn":
        path.write_bytes(path.read_bytes()[:5000])
    elif kind == "another version":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE meta SET value = '1' WHERE name = 'version'")
            connection.commit()
    assert read_health(path, now_ms) == {}


async def test_why_says_how_the_last_day_went(world: World, autojump_clock: MockClock) -> None:
    async with open_desk(world) as desk:
        await world.join(R1, A, B)
        await world.say(R1, "one")
        await trio.sleep(2)
        assert (await desk.get(f"why/{A}"))["health"] is None
        path = world.config().pipeline.health
        write_health(path, {A: (4, 3)}, ms=world.runtime.now_ms())
        said = (await desk.get(f"why/{A}"))["health"]
        assert (said["success_rate"], said["p99_ms"]) == (0.75, 70)
        assert (await desk.get(f"why/{B}"))["health"] is None
