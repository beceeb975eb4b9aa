"""A whole daemon that is appended to, and a server that checks what it is sent."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fedsender.config import load
from fedsender.daemon import open_core
from fedsender.runtime import real_runtime
from fedsender_lab.demo import process
from fedsender_lab.intake_client import IntakeClient
from fedsender_lab.testing.receiver import Receivers, ReceivingServer, open_receivers
from fedsender_lab.testing.rules import PduReader, pdu_reader

TOKEN = "a token that is long enough"
ROOM_VERSION = "11"


@asynccontextmanager
async def whole_daemon(
    directory: Path, read: PduReader | None = None, **push: Any
) -> AsyncIterator[tuple[IntakeClient, ReceivingServer, Receivers]]:
    """In this process, over real sockets. `push`: settings of the feed."""
    signer = process.write_signing_key(directory, b"k" * 32)
    process.write_secret(directory / "append.token", TOKEN)
    runtime = real_runtime()
    async with open_receivers(
        1,
        [signer.origin],
        read or pdu_reader(lambda _room: ROOM_VERSION),
        directory=directory / "tls",
        now_ms=runtime.now_ms(),
    ) as receivers:
        (server,) = receivers.servers.values()
        feed = process.push_feed(directory)
        feed["push"].update(push)
        path = directory / "config.yaml"
        path.write_text(json.dumps(process.configuration(directory, feed, receivers.ca_file)))
        async with (
            open_core(load(path), runtime) as core,
            core.serve_feed(),
            IntakeClient.at(feed["push"]["listen"], TOKEN) as client,
        ):
            yield client, server, receivers
        assert not receivers.violations.counts
