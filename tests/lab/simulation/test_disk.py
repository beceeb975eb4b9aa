"""The destinations that must be tried soon after a start, by the databases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, insert

from fedsender.store import tables
from fedsender_lab.simulation.disk import HOMESERVER, SENDER, Disk

A = "a.example"
NOW_MS = 1_700_000_000_000
WAITS = {"limit": 1, "next_ms": NOW_MS + 1}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """The files of a daemon that owes an event to A."""
    for name, schema in ((HOMESERVER, tables.homeserver), (SENDER, tables.sender)):
        schema.create_all(create_engine(f"sqlite:///{tmp_path / name}", poolclass=NullPool))
    disk = Disk(tmp_path)
    store(disk, HOMESERVER, tables.destinations, last_successful_stream_ordering=4)
    store(disk, HOMESERVER, tables.destination_rooms, room_id="!r", stream_ordering=5)
    yield disk
    disk.close()


def store(disk: Disk, name: str, table: Any, **values: object) -> None:
    """Add a row of A."""
    engine = create_engine(f"sqlite:///{disk.directory / name}", poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(insert(table).values(destination=A, **values))


def store_state(disk: Disk, **values: object) -> None:
    """Add the state of A."""
    store(disk, SENDER, tables.server_states, wake_tokens=1.0, wake_tokens_ms=0, **values)


@pytest.mark.parametrize(
    ("state", "due"),
    [
        ({}, {A}),
        ({"next_attempt_ms": NOW_MS}, {A}),
        ({"next_attempt_ms": NOW_MS + 1}, set()),
        ({"paused": "it moves"}, set()),
        # A search goes on for longer than the backoff of the failure before.
        ({"next_attempt_ms": NOW_MS - 1, "pdu_search": WAITS}, set()),
        ({"pdu_search": {**WAITS, "next_ms": NOW_MS}}, {A}),
        ({"pdu_search": {**WAITS, "next_ms": None}}, {A}),
        ({"edu_search": WAITS}, {A}),
    ],
)
def test_a_server_that_waits_is_not_due(disk: Disk, state: dict[str, Any], due: set[str]) -> None:
    store_state(disk, **state)

    assert disk.due(NOW_MS) == due


@pytest.mark.parametrize(("edu_search", "due"), [(None, {A}), (WAITS, set())])
def test_messages_need_not_wait_for_a_search_among_events(
    disk: Disk, edu_search: dict[str, Any] | None, due: set[str]
) -> None:
    store_state(disk, pdu_search=WAITS, edu_search=edu_search)
    message = {"stream_id": 1, "queued_ts": 0, "messages_json": "{}", "instance_name": "fed"}
    store(disk, HOMESERVER, tables.device_federation_outbox, **message)

    assert disk.due(NOW_MS) == due
