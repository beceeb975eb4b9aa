"""Synapse's federation admin endpoints: ours answer what the real ones answer, word for word.

The same requests go to a real Synapse and to the daemon on its database; status, content type and
JSON must be the same. Tools that were written for Synapse's API then work with ours.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import trio
from tests.synapse.daemon import TOKEN, open_daemon
from tests.synapse.world import World

TEST_S = 300
PREFIX = "/_synapse/admin/v1/federation/destinations"
# Servers of this test alone, which nobody ever talks to.
DOMAIN = "parity.example"
NAMES = [f"p{number}.{DOMAIN}" for number in range(6)]
ORDERS = (
    "destination",
    "retry_last_ts",
    "retry_interval",
    "failure_ts",
    "last_successful_stream_ordering",
)

Reply = tuple[int, str, Any]


@asynccontextmanager
async def rows_of_our_own(world: World) -> AsyncIterator[str]:
    """Destinations with and without failures, in rooms; the id of one of the rooms."""
    alice = await world.user(world.a, "alice")
    rooms = [await alice.create_room(preset="private_chat") for _ in range(3)]
    newest = await world.newest_event()
    for number, name in enumerate(NAMES):
        failing = (1000 + number, 7_000_000_000 - number, 900 - number) if number % 2 else (0, 0, 0)
        await world.change(
            "INSERT INTO destinations (destination, retry_last_ts, retry_interval, failure_ts,"
            " last_successful_stream_ordering) VALUES (%s, %s, %s, NULLIF(%s, 0), %s)",
            name,
            *failing,
            newest + number,
        )
        for room in rooms:
            await world.change(
                "INSERT INTO destination_rooms (destination, room_id, stream_ordering)"
                " VALUES (%s, %s, %s)",
                name,
                room,
                newest,
            )
    try:
        yield rooms[0]
    finally:
        for table in ("destination_rooms", "destinations"):
            await world.change(f"DELETE FROM {table} WHERE destination = ANY(%s)", NAMES)


def questions() -> list[str]:
    """Paths and queries below the prefix: every parameter, right and wrong."""
    ours = f"?destination={DOMAIN}"
    one = f"/{NAMES[1]}"
    return [
        ours,
        *(f"{ours}&order_by={order}&dir={way}" for order in ORDERS for way in "fb"),
        *(f"{ours}&from={start}&limit={limit}" for start in (0, 2, 6, 9) for limit in (1, 4, 100)),
        f"?destination={DOMAIN.upper()}&limit=2",
        "?destination=nobody-knows-it.example",
        *(f"{ours}&{name}={value}" for name in ("from", "limit") for value in ("-1", "x", "1.5")),
        f"{ours}&order_by=nonsense",
        f"{ours}&dir=up",
        one,
        f"/{NAMES[0]}",
        "/nobody-knows-it.example",
        f"{one}/rooms",
        *(f"{one}/rooms?dir={way}&limit=2" for way in "fb"),
        *(f"{one}/rooms?from={start}&limit=1" for start in (1, 2, 3)),
        f"{one}/rooms?dir=up",
        f"{one}/rooms?from=-1",
        f"{one}/rooms?limit=x",
        "/nobody-knows-it.example/rooms",
    ]


async def ask(http: httpx.AsyncClient, method: str, path: str, token: str | None) -> Reply:
    """Status, content type and content of an answer."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body: dict[str, str] | None = {} if method == "POST" else None
    answer = await http.request(method, PREFIX + path, headers=headers, json=body)
    return answer.status_code, answer.headers["content-type"], answer.json()


async def test_ours_answer_as_synapses_do(world: World) -> None:
    """Each difference is a tool that breaks on the day of the switch."""
    with trio.fail_after(TEST_S):
        admin = await world.user(world.a, "admin")
        await world.change("UPDATE users SET admin = 1 WHERE name = %s", admin.mxid)
        ours_url = f"http://127.0.0.1:{world.daemon.admin_port}"
        async with (
            rows_of_our_own(world),
            open_daemon(world.daemon),
            httpx.AsyncClient(base_url=world.a.client_url, trust_env=False, timeout=60) as theirs,
            httpx.AsyncClient(base_url=ours_url, trust_env=False, timeout=60) as ours,
        ):
            different = []
            for path in questions():
                expected = await ask(theirs, "GET", path, admin.token)
                found = await ask(ours, "GET", path, TOKEN)
                if found != expected:
                    different.append(f"{path}\n  Synapse: {expected}\n  ours:    {found}")
            assert not different, "\n".join(different)

            for token in (None, "wrong"):
                expected = await ask(theirs, "GET", "", token)
                found = await ask(ours, "GET", "", token)
                assert found[0] == expected[0]
                assert found[2]["errcode"] == expected[2]["errcode"]

            await resetting_is_the_same(theirs, ours, admin.token)


async def resetting_is_the_same(
    theirs: httpx.AsyncClient, ours: httpx.AsyncClient, token: str
) -> None:
    """One that fails (each its own), one that does not, and one that nobody knows."""
    for their_name, our_name in (
        (NAMES[1], NAMES[3]),
        (NAMES[1], NAMES[3]),
        (NAMES[0], NAMES[2]),
        ("nobody-knows-it.example", "nobody-knows-it.example"),
    ):
        expected = await ask(theirs, "POST", f"/{their_name}/reset_connection", token)
        assert await ask(ours, "POST", f"/{our_name}/reset_connection", TOKEN) == expected
