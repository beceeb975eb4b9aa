"""How long a simulated consumer may expect that the log is kept for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from fedsender.config import from_values
from fedsender.simulation.relay_checks import History, RelayChecks, RelayViews


class NoConsumers(tuple[Any, ...]):
    """A registry that knows nobody."""

    def get(self, name: str) -> None:
        return None


@pytest.mark.parametrize(("joined", "found"), [(True, []), (False, ["pin"])])
async def test_one_that_has_not_gone_on_from_its_snapshot_has_no_longer_than_join_ttl(
    autojump_clock: trio.testing.MockClock, joined: bool, found: list[str]
) -> None:
    """The relay cannot know that it holds the snapshot."""
    relay_settings = {"join_ttl": 300, "consumer_ttl": 1200, "disk_reserve": 0}
    values = {"server_name": "hs.example", "signing_key": "key", "relay": relay_settings}
    settings = from_values(values, directory=Path("/relay")).relay
    views = RelayViews(histories={"e": History()}, epoch="e")
    checks = RelayChecks(views, settings)
    log = SimpleNamespace(first=11, bytes=0)
    relay: Any = SimpleNamespace(log=log, registry=NoConsumers())
    files: Any = SimpleNamespace(first=lambda: 11, messages=dict)

    views.fed("sender-1", "e", 5, joined=joined)
    await trio.sleep(600)
    checks.committed(relay, files)

    assert [each.invariant for each in views.violations] == found
