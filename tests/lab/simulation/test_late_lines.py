"""The ledger of a sender that was frozen has a line for its last attempt once it goes on."""

from pathlib import Path

import orjson
import pytest
import trio
import trio.testing
from tests.lab.simulation.test_stand_ins import A, Gap

from fedsender.ledger import Line, SentPdu, TransactionRecord
from fedsender_lab.simulation.checks import LedgerChecks
from fedsender_lab.simulation.disk import LedgerTail
from fedsender_lab.testing.clock import now_ms


class SaidTail(LedgerTail):
    """A ledger that has one line, once."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._lines = [orjson.dumps(line.as_json())]

    def new_lines(self, _: Path) -> list[bytes]:
        lines, self._lines = self._lines, []
        return lines


@pytest.mark.parametrize(("began_s", "broken"), [(4.0, []), (6.0, ["I2"])])
async def test_a_line_that_comes_late_says_nothing_of_the_next_sender(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, began_s: float, broken: list[str]
) -> None:
    """It has the server since 5 s, and has sent what is newer."""
    gap = Gap(tmp_path)
    older, newer = gap.homeserver.say(gap.room), gap.homeserver.say(gap.room)
    view = gap.observed.views.of[A]
    view.since, view.newest_live = 5.0, newer.token
    await trio.sleep(10)
    pdu = SentPdu(older.event_id, older.room_id, older.token, "live")
    took_ms = round((10 - began_s) * 1000)
    gap.observed.tail = SaidTail(
        Line(now_ms(), A, "delivered", "t", 1, TransactionRecord([pdu]), took_ms=took_ms)
    )
    LedgerChecks(gap.observed).catch_up()

    assert [each.invariant for each in gap.observed.violations] == broken
    assert older.event_id in view.recorded
    assert (older.event_id in view.proven) == bool(broken)
