"""What the ledger says beside attempts: whose the stream is, and what was given up."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from tests.sender.harness import World
from tests.sender.test_recovery import A, B, a_store, fan_out_upto, start
from trio.testing import MockClock

from fedsender.config import from_values
from fedsender.ledger import NOTES
from fedsender.segments import read_lines, segments
from fedsender.sender.recovery import hand_over
from fedsender.store import Store

R1 = "!1:hs.example"


def notes(ledger: Path) -> list[tuple[Any, ...]]:
    """(outcome, destination, position, lsso) of each, oldest first."""
    lines = [line for path in segments(ledger) for line in read_lines(path)]
    return [
        (line["outcome"], line["destination"], line["position"], line["lsso"])
        for line in lines
        if line["outcome"] in NOTES
    ]


async def move_on(store: Store, position: int, *, acked: int | None = None) -> None:
    """As another sender does that takes our place: Synapse's acknowledges what it is sent as 0."""
    for kind, value in (("events", position), ("federation", acked)):
        if value is not None:
            await store.homeserver._database.write(
                lambda connection, kind=kind, value=value: connection.exec_driver_sql(  # type: ignore[misc]
                    "UPDATE federation_stream_position SET stream_id = ? WHERE type = ?",
                    (value, kind),
                )
            )


async def test_a_start_says_from_where_on_the_stream_is_ours(tmp_path: Path) -> None:
    async with a_store(tmp_path) as store:
        await fan_out_upto(store, 10)
        await start(store, tmp_path, "b1")
        await fan_out_upto(store, 20)
        await start(store, tmp_path, "b2")
    assert notes(tmp_path / "ledger") == [("owned", "*", 10, None), ("owned", "*", 20, None)]


@pytest.mark.parametrize("acked", [None, 0, -1])
async def test_where_another_sender_went_on_unasked_the_stream_was_handed_over(
    tmp_path: Path, acked: int | None
) -> None:
    """Nobody handed it back, so the position that has moved says so. A server that was in catch-up
    was owed what is above its floor, whatever its low-water mark had passed."""
    async with a_store(tmp_path) as store:
        await fan_out_upto(store, 20)
        await start(store, tmp_path, "b1")
        for server, floor in ((A, 7), (B, 8)):
            await store.sender.begin_catch_up(server, floor)
        await fan_out_upto(store, 30)
        await hand_over(store, "fed1")
        await move_on(store, 60, acked=acked)
        with capture_logs() as logged:
            await start(store, tmp_path, "b2", lambda server: server == A)
        # A backup that came back is no other sender's doing.
        await move_on(store, 50)
        await start(store, tmp_path, "b3")
    if acked is not None:
        (moved,) = [entry for entry in logged if entry["event"] == "database_moved"]
        assert moved["reason"] == "another sender has been at work: the events position is 60"
    assert notes(tmp_path / "ledger") == [
        ("owned", "*", 20, None),
        ("handed_over", A, 30, 7),
        ("handed_over", "*", 30, None),
        ("owned", "*", 60, None),
        ("owned", "*", 50, None),
    ]


async def test_what_an_operator_gives_up_has_its_line(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A purged server, from where it was owed; and each item that leaves quarantine for nowhere."""
    world = World(tmp_path)
    world.server(A, down=True)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "one")
        await trio.sleep(5)
        store = world.store
        lsso = await store.homeserver.lsso(A)
        position = await store.homeserver.events_position()
        where: dict[str, Any] = {"event_id": "$e", "room_id": R1, "stream_ordering": 3}
        ids = [
            await store.sender.quarantine_item(destination=A, kind="pdu", reason="bad", **where),
            await store.sender.quarantine_item(destination=None, kind="pdu", reason="bad", **where),
            await store.sender.quarantine_item(destination=A, kind="m.typing", reason="bad"),
        ]
        assert await sender.operations.purge(A) == [R1]
        await sender.operations.drop(ids)
        assert await sender.operations.purge(A, force=True) == []
    assert notes(tmp_path / "ledger")[1:] == [
        ("dropped", A, None, None),
        ("dropped", "*", None, None),
        ("dropped", A, None, None),
        ("purged", A, position, lsso),
    ]
    dropped = [line for line in world.ledger() if line["outcome"] == "dropped"]
    assert [line["pdus"] for line in dropped] == [
        *[[where | {"lane": "quarantine"}]] * 2,
        [],
    ]
    assert [line["edus"] for line in dropped] == [{}, {}, {"m.typing": 1}]


async def test_a_purge_s_line_speaks_of_all_that_it_removes(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said meanwhile is given up with a line, or it is sent: an audit would miss it."""
    world, said = World(tmp_path), list[int]()
    server = world.server(A, down=True)
    async with world.run() as sender:
        await world.join(R1, A)
        await world.say(R1, "given up")
        await trio.sleep(5)
        purge = world.store.homeserver.purge

        async def slowly(destination: str) -> None:
            said.append(await world.say(R1, "meanwhile"))
            await trio.sleep(2)
            await purge(destination)

        monkeypatch.setattr(world.store.homeserver, "purge", slowly)
        assert await sender.operations.purge(A, force=True) == []
        server.down = False
        await trio.sleep(60)
    *_, line = lines = [line for line in world.ledger(A) if line["outcome"] == "purged"]
    assert None not in {line["lsso"] for line in lines}
    assert server.got == ["meanwhile"] * sum(token > line["position"] for token in said)


def test_the_lists_that_forbid_servers_can_be_read_back(tmp_path: Path) -> None:
    """They stand in a line as a configuration has them: whoever reads it finds who was denied."""
    values: list[dict[str, Any]] = [
        {},
        {"deny": ["*.bad.example", "c.example:8448"]},
        {"allow": ["a.*"]},
        {"allow": []},
        {"allow": ["*.example"], "deny": ["b.*"]},
    ]
    base = {"server_name": "us.example", "signing_key": "key"}
    names = ("a.example", "b.example", "x.bad.example", "c.example:8448", "us.example")
    for each in values:
        config = from_values(base | each, directory=tmp_path)
        lists = json.loads(json.dumps(config.lists()))
        again = from_values(base | lists, directory=tmp_path)
        assert bool(lists) == bool(each)
        assert [again.allows(name) for name in names] == [config.allows(name) for name in names]
