"""Appends over HTTP: how many records become durable in a second, and how long an append takes.

The daemon is the measured process, with feed.kind push. Its fan-out reads what is stored, and finds
events of another server, which it does not send. The homeserver is a process of its own, which
sends one request after the other over a Unix socket. The floor is the same rows in a table of two
columns, one commit for each request, in a database of the same kind with the same settings.
"""

import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import trio
from sqlalchemy import BigInteger, Column, MetaData, Table, Text

from fedsender.bench.meter import Meter, Options, median
from fedsender.bench.relay import row
from fedsender.config import Config, Log, from_values
from fedsender.daemon import open_core, open_intake
from fedsender.demo.children import BenchFailed, Child, Order, open_child, serve_orders
from fedsender.demo.process import write_secret, write_signing_key
from fedsender.intake.client import IntakeClient, NewRecord
from fedsender.intake.intake import MAX_APPENDS
from fedsender.intake.rows import prepare
from fedsender.outside import real_outside
from fedsender.store.connections import DatabaseOptions, checked_url, make_engine
from fedsender.telemetry import configure_logging

GROUPS: Final = (1, 16, 128, MAX_APPENDS)
# A request of one waits for the disk each time: fewer of them say as much.
_MOST_REQUESTS: Final = 1_000
_PATIENCE_S: Final = 600.0
_TOKEN: Final = "of this run"


async def append(options: Options) -> dict[str, Any]:
    """Records per second and milliseconds per request, by how many records are in a request.

    `options.events` is how many records of about 1 KB are appended for each; `options.database`
    an empty PostgreSQL database, which is filled. Without it, SQLite.
    """
    configure_logging(Log(level="error"), now_ms=real_outside().now_ms)
    groups: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        directory = Path(name)
        config = _config(directory, options.database)
        floor_url = options.database or f"sqlite:///{directory}/floor.db"
        outside = real_outside()
        async with (
            open_core(config, outside) as daemon,
            open_intake(daemon, outside),
            open_child("bench.append") as child,
        ):
            first = daemon.feed.status().head + 1
            for group in GROUPS:
                rounds = []
                for _ in range(options.rounds):
                    requests = max(1, min(options.events // group, _MOST_REQUESTS))
                    rounds.append(await _round(child, directory, first, requests, group, floor_url))
                    first += requests * group
                groups[str(group)] = {
                    figure: median([each[figure] for each in rounds], 2) for figure in rounds[0]
                }
    kind = checked_url(floor_url).get_backend_name()
    return {"database": kind, "record_bytes": prepare([row(1)]).size, "groups": groups}


def _config(directory: Path, database: str | None) -> Config:
    write_signing_key(directory, bytes(32))
    write_secret(directory / "token", _TOKEN)
    push = {"listen": f"unix:{directory}/append.sock", "token_file": "token"}
    values: dict[str, Any] = {
        "server_name": "hs.bench",
        "signing_key": "signing.key",
        "feed": {"kind": "push", "push": push},
    }
    if database is not None:
        values["homeserver"] = {"database": database}
    return from_values(values, directory=directory)


async def _round(
    child: Child, directory: Path, first: int, requests: int, group: int, floor_url: str
) -> dict[str, float]:
    meter = Meter()
    with trio.move_on_after(_PATIENCE_S) as scope:
        got = await child.ask(
            "append", directory=str(directory), first=first, requests=requests, group=group
        )
    if scope.cancelled_caught:
        raise BenchFailed(f"{requests} requests took longer than {_PATIENCE_S:.0f} s")
    cpu_s, records = meter.read().cpu_s, requests * group
    floor_s = await trio.to_thread.run_sync(_floor, floor_url, first, requests, group)
    return {
        "records_per_s": records / got["seconds"],
        "p50_ms": got["p50_ms"],
        "p99_ms": got["p99_ms"],
        "floor_records_per_s": records / floor_s,
        "ratio": got["seconds"] / floor_s,
        "cpu_us_per_record": cpu_s / records * 1e6,
    }


def _floor(url: str, first: int, requests: int, group: int) -> float:
    """Seconds for bare commits of the same rows."""
    columns = Column("token", BigInteger, primary_key=True), Column("row", Text)
    table = Table("bench_floor", MetaData(), *columns)
    engine = make_engine("write", checked_url(url), 1, DatabaseOptions())
    try:
        with engine.begin() as connection:
            table.create(connection, checkfirst=True)
        texts = [prepare([row(first + n)]).rows[0].decode() for n in range(requests * group)]
        begun = time.perf_counter()
        for at in range(0, len(texts), group):
            with engine.begin() as connection:
                rows = [
                    {"token": first + number, "row": texts[number]}
                    for number in range(at, at + group)
                ]
                connection.execute(table.insert(), rows)
        return time.perf_counter() - begun
    finally:
        engine.dispose()


# --- the homeserver's process ---------------------------------------------------------------------


async def _append(directory: str, first: int, requests: int, group: int) -> Order:
    seconds = []
    async with IntakeClient.at(f"unix:{directory}/append.sock", _TOKEN) as client:
        await client.position()
        begun = time.perf_counter()
        for request in range(requests):
            numbers = range(first + request * group, first + (request + 1) * group)
            records = [NewRecord([row(number)], str(number)) for number in numbers]
            asked = time.perf_counter()
            await client.append_all(records)
            seconds.append(time.perf_counter() - asked)
        took = time.perf_counter() - begun
    ordered = sorted(seconds)
    return {
        "seconds": took,
        "p50_ms": statistics.median(ordered) * 1000,
        "p99_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000,
    }


if __name__ == "__main__":
    trio.run(partial(serve_orders, {"append": _append}))
