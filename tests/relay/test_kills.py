"""The relay and its consumers are killed at any moment: no answered record is lost, or twice."""

from pathlib import Path

import pytest
import trio
from tests.relay.kills import DATABASE, run_campaign
from tests.servers import open_postgres

pytestmark = pytest.mark.slow


async def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    """`python -m tests.relay.kills` has 300."""
    figures = await run_campaign(tmp_path, 10, seed=1)
    assert figures.amiss == []
    assert figures.kills["relay-1"] > 1
    assert figures.records > 200
    assert figures.repeats > 200


@pytest.mark.long
async def test_two_relays_and_a_postgresql_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    """The one takes over from the other; `--postgresql` has 100 kills."""
    # Not the tests' own: that one is not to be killed under the others.
    opened = open_postgres()
    postgres = await trio.to_thread.run_sync(opened.__enter__)
    try:
        figures = await run_campaign(tmp_path, 8, seed=3, postgres=postgres)
    finally:
        await trio.to_thread.run_sync(opened.__exit__, None, None, None)
    assert figures.amiss == []
    assert figures.kills[DATABASE] > 0
    assert figures.records > 100
