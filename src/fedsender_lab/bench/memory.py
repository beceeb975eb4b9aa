"""The memory of `fedsender run`: at rest, for a server, for a connection.

The daemon runs in a process of its own, as an operator starts it, and its resident memory is read
from outside. Its tables are there already: the first start makes them, and keeps Alembic's 10 MB.
The figures per server and per connection are differences between two moments of one process, the
first after as many of the same kind. So memory that is needed only once, such as code or the
databases' page caches, does not count.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import trio

from fedsender.admin.client import PREFIX
from fedsender_lab.bench.meter import Options, rss_kb
from fedsender_lab.bench.stage import VERIFY_EVERY, Servers, Stage, open_process, open_stage

IMPORTS = """
import fedsender.cli, fedsender.daemon
from fedsender.replication.feed import load_feed
load_feed("push")
"""
SETTLE_SECONDS = 1.5
DELIVERY_SECONDS = 300.0


async def memory(options: Options) -> dict[str, Any]:
    """`servers` of which each takes one transaction of `events` PDUs; and five times as many that
    each got one PDU and have no connection any more."""
    bare_kb = await _bare_imports_kb()
    # At the default pace few transactions are under way at once: their memory is not asked for.
    per_connection = await _growth(options.servers, options.events, {})
    at_rest_kb = per_connection["at_rest_kb"]
    idle = 5 * options.servers
    per_server = await _idle_servers(idle)
    return {
        "at_rest_mb": round(at_rest_kb / 1024, 1),
        "asked_mb": round(per_connection["asked_kb"] / 1024, 1),
        "imports_mb": round(bare_kb / 1024, 1),
        "above_imports_mb": round((at_rest_kb - bare_kb) / 1024, 1),
        "per_idle_server_kb": round(per_server["kb"], 1),
        "idle_servers": idle,
        "per_connection_kb": round(per_connection["kb"], 1),
        "connections": options.servers,
        "pdus_in_transaction": per_connection["largest"],
        "goal": {
            "at_rest_mb": 100,
            "asked_mb": 80,
            "above_imports_mb": 25,
            "per_idle_server_kb": 4,
            "per_connection_kb": 45,
        },
        "verify_every": VERIFY_EVERY,
        "broken": per_connection["broken"] + per_server["broken"],
    }


async def _bare_imports_kb() -> int:
    """A process that has imported the daemon's modules, and done nothing."""
    script = f"{IMPORTS}from fedsender_lab.bench.meter import rss_kb\nprint(rss_kb())"
    done = await trio.run_process([sys.executable, "-c", script], capture_stdout=True)
    return int(done.stdout)


async def _idle_servers(servers: int) -> dict[str, Any]:
    """The memory of one server that got a transaction, has a task, and has no connection."""
    settings: dict[str, dict[str, Any]] = {
        "federation": {"max_connections": 20},
        "sending": {
            "max_in_flight": 20,
            "handshakes_per_second": 200,
            "idle_destination": "1h",
            "drain": "1s",
        },
    }
    return await _growth(servers, 1, settings)


async def _growth(
    servers: int, messages: int, settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """KiB at rest, and after requests of an operator; and how many more per server once each of a
    second lot has had its messages."""
    groups = [Servers(servers), Servers(servers)]

    def rooms(names: Sequence[str]) -> list[list[str]]:
        return [list(names[:servers]), list(names[servers:])]

    async with open_stage(groups, rooms=rooms, settings=settings) as stage:
        await stage.migrate()
        async with open_process(stage) as pid:
            return await _growth_of(stage, pid, messages, servers)


async def _growth_of(stage: Stage, pid: int, messages: int, servers: int) -> dict[str, Any]:
    await _settle()
    at_rest_kb = rss_kb(pid)
    await _ask(stage)
    await _settle()
    asked_kb = rss_kb(pid)
    await _say(stage, 0, messages, servers)
    before_kb = rss_kb(pid)
    await stage.receivers.ask("tell")
    got = await _say(stage, 1, messages, 2 * servers)
    after_kb = rss_kb(pid)
    per_server_kb = (after_kb - before_kb) / servers
    return {"at_rest_kb": at_rest_kb, "asked_kb": asked_kb, "kb": per_server_kb, **got}


async def _ask(stage: Stage) -> None:
    """Ask for the metrics, and for what `status` shows."""
    token = (stage.directory / "admin.token").read_text().strip()
    async with httpx.AsyncClient(
        base_url="http://localhost",
        headers={"Authorization": f"Bearer {token}"},
        transport=httpx.AsyncHTTPTransport(uds=str(stage.directory / "admin.sock")),
    ) as admin:
        for path in ("/metrics", f"{PREFIX}/overview"):
            (await admin.get(path)).raise_for_status()


async def _say(stage: Stage, room: int, messages: int, servers: int) -> dict[str, Any]:
    await stage.homeserver.ask("say", count=messages, room=room)
    got = await stage.until(seconds=DELIVERY_SECONDS, pdus=messages * servers)
    await _settle()
    return got


async def _settle() -> None:
    """Wait until the work after the last answer is over."""
    await trio.sleep(SETTLE_SECONDS)
