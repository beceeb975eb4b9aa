"""An event that the fan-out cannot pass, for a reason that nobody foresaw: it is named, and an
operator has it passed over."""

import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import trio
from tests.admin.desk import Desk, open_desk
from tests.admin.test_outage import samples
from tests.sender.harness import World
from tests.test_cli import open_shell
from trio.testing import MockClock

from fedsender.embedded.store import own_store
from fedsender.matrix import Pdu
from fedsender.sender import routing
from fedsender.store.records import EventRow
from fedsender.streams import PduRow
from fedsender_lab.testing.clock import until

pytestmark = pytest.mark.slow

R1, R2 = "!1:hs.example", "!2:hs.example"
A = "a.example"
UNREADABLE = b"\xff\xfe no text"


async def happen(world: World, *pdus: PduRow, bad: PduRow) -> int:
    """Events, of which one's JSON is no text any more before anybody reads it; its token."""
    first = world.token + 1
    for pdu in pdus:
        world.token += 1
        await own_store(world.store.homeserver).apply_feed_batch([(world.token, [pdu])])
    with closing(sqlite3.connect(world.directory / "homeserver.sqlite3")) as connection, connection:
        connection.execute(
            "UPDATE event_json SET json = CAST(? AS TEXT) WHERE event_id = ?",
            (UNREADABLE, bad.event_id),
        )
    world.sender.events.advance(world.token)
    return first + pdus.index(bad)


async def at_a_standstill(desk: Desk) -> tuple[int, str]:
    """An event that cannot be read among others, all of one chunk; its token and id."""
    world = desk.world
    for room in (R1, R2):
        await world.join(room, A)
    await trio.sleep(5)
    bad = world.pdu(R1, "bad")
    others = [world.pdu(R2, "before"), bad, world.pdu(R1, "behind"), world.pdu(R2, "after")]
    token = await happen(world, *others, bad=bad)
    await trio.sleep(60)
    return token, bad.event_id


async def feed_lag_s(desk: Desk) -> float:
    """The lag of the feed in the overview, which is that of the metric."""
    lag_s: float = (await desk.get("overview"))["feed"]["lag_s"]
    response: httpx.Response = await desk.http.get("/metrics")
    assert samples(response.text, "fedsender_feed_lag_seconds") == {"": lag_s}
    return lag_s


async def test_what_the_fan_out_stands_at_is_named_and_skipped(
    world: World, autojump_clock: MockClock
) -> None:
    async with open_desk(world) as desk:
        token, event_id = await at_a_standstill(desk)
        assert world.servers[A].got[-1] == "before", "what stands before it goes on"
        (reason,) = (await desk.get("/ready", 503))["reasons"]
        assert reason == (
            f"the fan-out stands at token {token}: homeserver database: Could not decode to UTF-8"
            f" column 'json'. It is tried again; `fedsender skip {token}` passes over the event"
        )

        assert 55 < await feed_lag_s(desk) < 65
        refused = await desk.post("skip", {"token": token - 1}, 409)
        assert refused["error"].startswith(
            f"the fan-out does not stand at token {token - 1}: the fan-out stands at token {token}:"
        )
        skipped = await desk.post("skip", {"token": token})
        assert (skipped["event_id"], skipped["room_id"]) == (event_id, R1)
        await trio.sleep(120)
        assert await feed_lag_s(desk) == 0
        assert world.servers[A].got[-2:] == ["before", "after"]
        items = await world.store.sender.quarantine_list(None, 10)
        assert [(item.event_id, item.room_id, item.content) for item in items] == [
            (event_id, R1, UNREADABLE),
            (items[1].event_id, R1, None),
        ]
        assert items[0].reason == f"skipped by an operator: {skipped['stood_at']}"
        found = await desk.get("/ready")
        assert found["warnings"] == [
            f"1 room held back behind events in quarantine, the oldest at token {token}",
            f"an operator skipped an event since the start: {skipped['stood_at']}",
        ]
        again = await desk.post("skip", {"token": token}, 409)
        assert again["error"].endswith(f"it is past token {world.token} and goes on")

        await desk.post("quarantine/drop", {"ids": [item.id for item in items]})
        assert len((await desk.get("/ready"))["warnings"]) == 1
        await world.say(R1, "again")
        await trio.sleep(5)
        assert world.servers[A].got[-1] == "again"
    async with open_desk(world) as desk:
        assert "warnings" not in await desk.get("/ready")


async def test_an_error_in_our_own_code_is_told_without_what_it_quotes(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = routing.parse_row

    def failing(row: EventRow) -> Pdu:
        if "bad" in row.json:
            raise ValueError(f"cannot be: {row.json}")
        return parse(row)

    monkeypatch.setattr(routing, "parse_row", failing)
    async with open_desk(world) as desk:
        await world.join(R1, A)
        token = await world.say(R1, "bad")
        await trio.sleep(60)
        (reason,) = (await desk.get("/ready", 503))["reasons"]
        assert reason.startswith(
            f"the fan-out stands at token {token}: ValueError at test_skip.py:"
        )
        assert "bad" not in reason
        await desk.post("skip", {"token": token})
        await world.say(R2, "good")
        await trio.sleep(120)
        assert (await desk.get("/ready"))["ready"]


async def test_it_is_skipped_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_shell(tmp_path, capsys) as shell:
        world = shell.world
        await world.join(R1, A)
        bad = world.pdu(R1, "bad")
        token = await happen(world, bad, bad=bad)
        await until(lambda: world.sender.fan_out.standstill)
        assert await shell("destinations") == 0
        assert f"fedsender: not ready: the fan-out stands at token {token}" in shell.err
        assert await shell("skip", str(token + 1)) == 1
        assert f"does not stand at token {token + 1}" in shell.err
        assert await shell("skip", str(token)) == 0
        said = f"skipped: {bad.event_id} of {R1}; the fan-out stands at token {token}: "
        assert said in shell.out
        assert await shell("skip", str(token)) == 1
        assert await shell("quarantine", "list", "--json") == 0
        assert [item["event_id"] for item in shell.lines] == [bad.event_id]
