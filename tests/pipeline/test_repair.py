"""What an audit missed, handed to a real daemon's endpoint over a real socket."""

from datetime import date
from functools import partial
from pathlib import Path

import pytest
import trio
from tests.admin.desk import TOKEN
from tests.admin.test_serving import serving
from tests.sender.harness import RemoteServer, World

from fedsender.config import from_values
from fedsender_pipeline import PipelineError, schemas
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.repair import Repaired, repair

R1 = "!1:hs.example"
A, B = "a.example", "b.example"


def lake_that_misses(directory: Path, *pairs: tuple[str, str]) -> Lake:
    """A lake in which exactly these servers and events are missing, in this order."""
    lake = open_lake(directory / "lake", "hs.example", create=True)
    rows = [
        {"server": server, "room_id": R1, "stream_ordering": at, "event_id": event_id,
         "day": date(2026, 1, 1), "reasons": []}
        for at, (server, event_id) in enumerate(pairs)
    ]  # fmt: skip
    with lake.commit() as commit:
        commit.clear(schemas.MISSING)
        commit.append_rows(schemas.MISSING, rows)
    return lake


async def got(server: RemoteServer, *texts: str) -> None:
    """Wait until the server got exactly these."""
    for _ in range(1_200):
        if server.got == list(texts):
            return
        await trio.sleep(0.05)
    assert server.got == list(texts)


async def test_repair_has_the_daemon_send_what_is_missing(tmp_path: Path) -> None:
    """The daemon says no to a server that may not see the event, and that is shown."""
    world = World(tmp_path)
    listen = f"unix:{tmp_path}/admin.sock"
    (tmp_path / "token").write_text(TOKEN)
    admin = {"listen": listen, "token_file": "token"}
    config = from_values(
        {"server_name": "hs.example", "signing_key": "key", "admin": admin}, directory=tmp_path
    )

    def ask(*pairs: tuple[str, str]) -> Repaired:
        return repair(lake_that_misses(tmp_path, *pairs), config)

    with pytest.raises(PipelineError, match="after 0 events: no answer from the daemon"):
        await trio.to_thread.run_sync(partial(ask, (A, "$gone")))
    async with serving(world, listen):
        server = world.server(A)
        await world.join(R1, A)
        row = world.pdu(R1, "one")
        await world.apply(row)
        event_id = row.event_id
        await got(server, "one")
        pairs = [(A, event_id), (B, event_id), (A, "$gone")]
        told = await trio.to_thread.run_sync(partial(ask, *pairs))
        assert told.accepted == 1
        assert [(each["destination"], each["event_id"]) for each in told.refused] == [
            (B, event_id),
            (A, "$gone"),
        ]
        await got(server, "one", "one")
