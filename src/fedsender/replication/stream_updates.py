"""Missed rows of streams that only their writer has: fetched from it over HTTP.

Synapse's processes answer `GET /_synapse/replication/get_repl_stream_updates/<stream>/<id>` on
their replication listener, page by page.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
import trio

from fedsender.federation.transport import (
    AnswerMemory,
    Bounds,
    Connection,
    ExchangeFailed,
    header_lines,
)
from fedsender.replication.endpoint import Disconnected, Endpoint, connect
from fedsender.runtime import Runtime
from fedsender.streams import Json

BOUNDS = Bounds(body_bytes=16 * 2**20, framing_bytes=2**20)
MAX_PAGES = 100
MAX_ROWS = 50_000


class NotFetched(Exception):
    """The rows could not be fetched; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The homeserver's processes that can be asked.

    Attributes:
        endpoints: by instance name, the address of its replication listener.
        secret: the secret that they require, if any.
    """

    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    secret: str | None = field(default=None, repr=False)


async def fetch_missed(
    peers: Peers, runtime: Runtime, stream: str, instance: str, after: int, upto: int
) -> list[tuple[int, Json]]:
    """The rows of `instance` with after < token <= upto, each with its token, ascending.

    The deadline is the caller's. Raises NotFetched.
    """
    endpoint = peers.endpoints.get(instance)
    if endpoint is None:
        raise NotFetched(f"no address is configured for {instance!r}")
    try:
        stream_to_it = await connect(endpoint, runtime)
    except Disconnected as error:
        raise NotFetched(str(error)) from error
    async with aclosing(stream_to_it):
        connection = Connection(stream_to_it)
        rows: list[tuple[int, Json]] = []
        for _ in range(MAX_PAGES):
            # Answers are kept by this id, whatever was asked: it must never be used again.
            page_id = runtime.entropy(8).hex()
            target = (
                f"/_synapse/replication/get_repl_stream_updates/{stream}/{page_id}"
                f"?from_token={after}&upto_token={upto}"
            )
            page, after, limited = _parse(await _ask(connection, peers.secret, target))
            rows += [(token, row) for token, row in page if token <= after]
            if not limited or after >= upto:
                return rows
            if len(rows) > MAX_ROWS:
                break
        raise NotFetched(f"{stream}: more than can be")


async def _ask(connection: Connection, secret: str | None, target: str) -> bytes:
    headers = [(b"host", b"replication"), (b"accept", b"application/json")]
    if secret is not None:
        headers.append((b"authorization", b"Bearer " + secret.encode()))
    try:
        memory, lines = AnswerMemory(BOUNDS.body_bytes), header_lines(headers)
        answer = await connection.exchange("GET", target, lines, bounds=BOUNDS, memory=memory)
    except ExchangeFailed as error:
        raise NotFetched(error.text) from error
    if answer.status == 500:
        raise NotFetched("answered 500: the replication secret may be wrong")
    if answer.status != 200:
        raise NotFetched(f"answered {answer.status}")
    await trio.lowlevel.checkpoint()
    return answer.body


def _parse(body: bytes) -> tuple[list[tuple[int, Any]], int, bool]:
    """The rows of a page, the token at its end, and whether there is another. Raises NotFetched."""
    try:
        answer = orjson.loads(body)
        rows = [(int(token), row) for token, row in answer["updates"]]
        return rows, int(answer["upto_token"]), bool(answer["limited"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise NotFetched(f"no answer of the kind: {type(error).__name__}") from error
