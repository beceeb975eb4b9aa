"""The checks of a simulated relay: its log for a consumer, and the tokens of its records."""

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from fedsender.config import from_values
from fedsender_lab.simulation.relay_checks import PATIENCE, History, RelayChecks, RelayViews
from fedsender_relay.snapshot import MANIFEST


class NoConsumers(tuple[Any, ...]):
    """A registry that knows nobody."""

    def get(self, name: str) -> None:
        return None


@pytest.mark.parametrize(("joined", "found"), [(True, []), (False, ["pin"])])
async def test_one_that_has_not_gone_on_from_its_snapshot_is_soon_not_waited_for(
    autojump_clock: trio.testing.MockClock, joined: bool, found: list[str]
) -> None:
    """The relay cannot know that it holds the snapshot."""
    relay_settings = {"disk_reserve": 0}
    values = {"server_name": "hs.example", "signing_key": "key", "relay": relay_settings}
    settings = from_values(values, directory=Path("/relay")).relay
    views = RelayViews(histories={"e": History()}, epoch="e")
    checks = RelayChecks(views, settings)
    log = SimpleNamespace(first=11, bytes=0)
    relay: Any = SimpleNamespace(log=log, registry=NoConsumers())
    files: Any = SimpleNamespace(first=lambda: 11, messages=dict)

    views.fed("sender-1", "e", 5, joined=joined)
    await trio.sleep((PATIENCE.joining_s + PATIENCE.away_s) / 2)
    checks.committed(relay, files)

    assert [each.invariant for each in views.violations] == found


async def test_a_record_that_an_older_copy_has_not_may_get_another_token() -> None:
    """Also where the log is read before the append is answered."""
    views = RelayViews(histories={"e": History()}, epoch="e")
    views.answer("e", 7, "$a")
    older: Any = SimpleNamespace(log=SimpleNamespace(epoch="f", first=1, head=5))

    views.begin(older, ["e", "f"], restored=True)
    views.check_answered()
    views.told("the log", "f", 6, "$a")
    views.answer("f", 6, "$a")
    views.check_answered()
    assert not views.violations

    views.answer("f", 8, "$a")
    assert "$a was answered 6 and 8" in views.violations[0].text


@pytest.mark.parametrize("whole", [True, False])
async def test_a_snapshot_that_was_spoiled_may_come_back_whole_under_its_id(
    tmp_path: Path, whole: bool
) -> None:
    """It is made anew, or an older copy has it."""
    content = b"rows"
    manifest = {"files": [{"name": "file", "sha256": sha256(content).hexdigest()}]}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "file").write_bytes(content if whole else b"spoiled")
    settings = from_values({"server_name": "hs.example", "signing_key": "key"}, directory=tmp_path)
    views = RelayViews(histories={"e": History()}, epoch="e")
    checks = RelayChecks(views, settings.relay)
    checks.spoiled.add("snapshot-1")
    one = SimpleNamespace(
        name="sender-1",
        pin=None,
        lost=False,
        acked=None,
        full_syncs=Counter[str](),
        handed=SimpleNamespace(snapshot="snapshot-1"),
    )
    shelf = SimpleNamespace(find=lambda _: SimpleNamespace(directory=tmp_path))
    log = SimpleNamespace(first=1, bytes=0, refusing=None)
    relay: Any = SimpleNamespace(log=log, registry=[one], snapshots=shelf)

    checks.look(relay)
    one.full_syncs["it joins"] += 1
    checks.look(relay)

    assert [each.invariant for each in views.violations] == ([] if whole else ["whole"])
