"""The instance lock is lost while somebody waits for a place: the attempt starts all the same."""

import pytest
import trio
from trio.testing import MockClock

from fedsender.sender.admission import Admission


@pytest.mark.parametrize("lane", ["fast_place", "slow_place"])
async def test_nobody_gets_a_place_while_the_gate_is_shut(
    lane: str, autojump_clock: MockClock
) -> None:
    admission = Admission(max_in_flight=2, slow_share=0.5, handshakes_per_second=10)
    began = []

    async def attempt(name: str, seconds: float) -> None:
        async with getattr(admission, lane)():
            began.append(name)
            await trio.sleep(seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt, "first", 1)
        await trio.sleep(0.1)
        nursery.start_soon(attempt, "second", 1)
        await trio.sleep(0.1)
        admission.gate.shut()
        await trio.sleep(30)
        early = list(began)
        admission.gate.reopen()
    assert early == ["first"]
