"""A homeserver with an outbox and the sender are killed at any moment: nothing lost, or twice."""

from pathlib import Path

import pytest
from tests.embedded.kills import run_campaign

pytestmark = pytest.mark.slow


async def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    """`python -m tests.embedded.kills` has 200."""
    figures = await run_campaign(tmp_path, 10, seed=1)
    assert figures.amiss == []
    assert min(figures.kills["homeserver"], figures.kills["sender"]) > 1
    assert figures.events > 100
    assert figures.nonsense > 0
