"""The homeserver appends what happens in it to a daemon or a relay."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from fedsender.runtime import Runtime
from fedsender_lab.demo.process import (
    DaemonDied,
    DaemonProcess,
    open_daemon_process,
    write_secret,
)
from fedsender_lab.intake_client import EpochOver, IntakeClient, NewRecord, Refused
from fedsender_lab.testing.rooms import Homeserver

BATCH = 50


async def tell(homeserver: Homeserver, client: IntakeClient) -> None:
    """Append every record, and again what the store lacks after a change of the epoch; both have
    the same tokens.

    Raises:
        DaemonDied: a record is refused, or has another token.
    """
    told, epoch = 0, None
    while True:
        if epoch is None:
            position = await client.position()
            told, epoch = min(told, position.stored), position.epoch
        await homeserver.watermark.wait_past(told)
        records = [NewRecord(rows, id) for id, rows in homeserver.records[told : told + BATCH]]
        try:
            tokens = await client.append_all(records, epoch=epoch)
        except EpochOver:
            epoch = None
            continue
        except Refused as refused:
            raise DaemonDied(f"record {told + 1} is refused: {refused}") from refused
        if tokens != [*range(told + 1, told + 1 + len(records))]:
            raise DaemonDied(f"record {told + 1} has token {tokens[0]}")
        told += len(records)
        homeserver.asked.set()


@asynccontextmanager
async def open_told_daemon(
    homeserver: Homeserver, directory: Path, config: Mapping[str, Any], runtime: Runtime
) -> AsyncIterator[DaemonProcess]:
    """A daemon with a push feed, and the homeserver that appends to it.

    Raises:
        DaemonDied: (in a group) it ended by itself while the body ran, or as `tell`.
    """
    token = runtime.entropy(16).hex()
    write_secret(directory / "append.token", token)
    async with (
        open_daemon_process(directory, config, runtime.entropy(16).hex()) as daemon,
        IntakeClient.at(config["feed"]["push"]["listen"], token) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(tell, homeserver, client)
        yield daemon
        nursery.cancel_scope.cancel()
