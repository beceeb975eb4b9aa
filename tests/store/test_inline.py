"""The store without threads and on a virtual clock, as a simulation runs it."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing
from trio._core import _run

from fedsender.embedded.store import own_store
from fedsender.runtime import real_runtime
from fedsender.store import StoreConfig, open_store
from fedsender.store.homeserver import HomeserverSettings
from fedsender.streams import HostsRow
from fedsender_lab.testing.clock import inline

T = TypeVar("T")


class Crash(BaseException):
    """The process dies here."""


def run(directory: Path, crash_at: int) -> list[str]:
    """A few writers at once, until the fault of this number; the points that were passed."""
    points: list[str] = []

    def faults(point: str) -> None:
        points.append(point)
        if len(points) == crash_at:
            raise Crash

    config = StoreConfig(
        homeserver=HomeserverSettings("embedded", "fed1", ("fed1",)),
        homeserver_url=f"sqlite:///{directory}/homeserver.db",
        sender_url=f"sqlite:///{directory}/sender.db",
        synchronous="OFF",
    )

    async def main() -> None:
        runtime = replace(real_runtime(), run_sync=inline)
        async with open_store(config, runtime, faults=faults) as store:
            homeserver = own_store(store.homeserver)
            await homeserver.events_position()
            async with trio.open_nursery() as nursery:
                for token in (1, 2, 3):
                    rows = [HostsRow("!a:x", (f"{token}.example",), ())]
                    nursery.start_soon(homeserver.apply_feed_batch, [(token, rows)])
                    nursery.start_soon(store.sender.begin_catch_up, f"{token}.example", token)

    # Trio orders the tasks of one instant by chance, and a simulation by its seed.
    _run._r.seed(7)
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return points


@pytest.mark.slow
@pytest.mark.parametrize("point", range(1, 11))
def test_a_crash_at_any_commit_point_can_be_started_again(tmp_path: Path, point: int) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  (groups of them, too)
        run(tmp_path, point)
    assert "Crash" in repr(caught.value)

    again = run(tmp_path, -1)

    assert {"sender: after commit", "homeserver: after commit"} <= set(again)


def test_the_same_writers_make_the_same_commits(tmp_path_factory: pytest.TempPathFactory) -> None:
    one, other = (run(tmp_path_factory.mktemp("run"), -1) for _ in range(2))

    assert one == other
