"""What an audit missed, handed to a real daemon's endpoint over a real socket."""

import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from tests.admin.desk import TOKEN
from tests.admin.test_serving import serving
from tests.sender.harness import RemoteServer, World

from fedsender.config import from_values
from fedsender_pipeline import PipelineError, schemas
from fedsender_pipeline.audit import Audited, audit
from fedsender_pipeline.ingest import ingest
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.repair import Repaired, repair
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


async def test_what_is_missing_is_given_to_the_daemon_and_delivered_by_the_next_audit(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Of three events the ledger has lost the line of the second one."""
    world = World(tmp_path)
    listen = f"unix:{tmp_path}/admin.sock"
    (tmp_path / "token").write_text(TOKEN)
    config = from_values(
        {
            "server_name": "hs.example",
            "signing_key": "key",
            "homeserver": {"database": f"sqlite:///{tmp_path}/homeserver.sqlite3"},
            "sender_database": f"sqlite:///{tmp_path}/sender.sqlite3",
            "admin": {"listen": listen, "token_file": "token"},
        },
        directory=tmp_path,
    )
    lake = open_lake(tmp_path / "lake", "hs.example", create=True)

    def audited() -> Audited:
        steps = Steps(quiet=True)
        ingest(spark, lake, config, steps)
        return audit(spark, lake, config, steps)

    async def in_thread(job: Callable[..., Any], *args: Any) -> Any:
        return await trio.to_thread.run_sync(job, *args)

    async with serving(world, listen):
        server = world.server(A)
        await world.join(R1, A)
        texts = ("one", "two", "three")
        rows = [world.pdu(R1, text) for text in texts]
        for number, row in enumerate(rows, 1):
            await world.apply(row)
            await got(server, *texts[:number])
    lost = rows[1].event_id
    for path in (tmp_path / "ledger").glob("*.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        kept = [each for each in lines if [pdu["event_id"] for pdu in each["pdus"]] != [lost]]
        path.write_text("".join(json.dumps(each) + "\n" for each in kept))
    told = await in_thread(audited)
    assert [row["event_id"] for row in told.shown] == [lost]
    delivered = told.counts["delivered"]
    async with serving(world, listen):
        repaired = await in_thread(repair, lake, config)
        assert (repaired.accepted, repaired.refused) == (1, [])
        await got(server, "one", "two", "three", "two")
    told = await in_thread(audited)
    assert (told.missing, told.counts["delivered"], told.stray) == (0, delivered + 1, 0)
    assert lake.rows(schemas.REPEATED) == 0
