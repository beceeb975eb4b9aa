"""A homeserver with rooms, and servers on loopback that check their transactions."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fedsender.runtime import Runtime
from fedsender_lab.testing.receiver import Receivers, open_receivers
from fedsender_lab.testing.rooms import Homeserver, Signer
from fedsender_lab.testing.rules import pdu_reader


@asynccontextmanager
async def open_federation(
    signer: Signer,
    servers: int,
    *,
    directory: Path,
    runtime: Runtime,
    rng: random.Random,
    tells_all: bool = False,
    others: Sequence[str] = (),
    **receiving: Any,
) -> AsyncIterator[tuple[Homeserver, Receivers]]:
    """A homeserver without rooms yet, and so many servers that know its key.

    Args:
        directory: where the servers' authority is put (`tls/ca.pem`).
        tells_all: as `Homeserver` has it.
        others: more servers that its rooms may have.
        receiving: `places` and `behaviours`, as `open_receivers` has them.
    """
    versions: dict[str, str] = {}
    async with open_receivers(
        servers,
        [signer.origin],
        pdu_reader(versions.__getitem__),
        directory=directory / "tls",
        now_ms=runtime.now_ms(),
        **receiving,
    ) as receivers:
        homeserver = Homeserver(
            signer,
            [*receivers.servers, *others],
            rng=rng,
            now_ms=runtime.now_ms,
            tells_all=tells_all,
        )
        homeserver.room_versions = versions
        yield homeserver, receivers
