"""What a snapshot had in place of a gap's events: I1, I2, and what cannot be sent."""

from pathlib import Path

import pytest
import trio.testing

from fedsender_lab.simulation.checks import CommitChecks, LedgerChecks, is_stood_in_for
from fedsender_lab.simulation.disk import Disk
from fedsender_lab.simulation.observations import Observations, ServerViews
from fedsender_lab.simulation.world import Size, found
from fedsender_lab.testing.clock import Trace
from fedsender_lab.testing.rooms import Homeserver, Room, Step

A = "a.example"


class SaidDisk(Disk):
    """A sender's files that say what they are told to."""

    def __init__(self, directory: Path, homeserver: Homeserver) -> None:
        super().__init__(directory)
        self.homeserver = homeserver
        self.fed = self.fanned_out = 0
        self.here: set[str] = set()
        self.unsent: set[str] = set()
        self.set_aside: list[str] = []
        self.mark = 0

    def ready(self) -> bool:
        return True

    def base(self) -> int:
        return 0

    def feed_position(self) -> int:
        return self.fed

    def position(self) -> int:
        return self.fanned_out

    def has_events(self, event_ids: object) -> bool:
        return False

    def owed(self, room_id: str) -> dict[str, int]:
        tokens = [each.token for each in self.homeserver.steps if each.event_id in self.here]
        return {A: max(tokens, default=0)}

    def newest_owed(self) -> int:
        return 0

    def owed_room(self, server: str, room_id: str) -> int:
        return 0

    def catch_up_floor(self, server: str) -> int | None:
        return None

    def marks(self) -> dict[str, int]:
        return {A: self.mark}

    def outbox(self) -> dict[tuple[str, int], str]:
        return {}

    def quarantined(self, server: str | None, event_id: str) -> bool:
        return server is None and event_id in self.unsent

    def redeliveries(self, server: str) -> list[str]:
        return self.set_aside


class Gap:
    """A sender that has all of a room but its newest events, and then a snapshot."""

    def __init__(self, directory: Path) -> None:
        self.homeserver = found(Size(1, 1, 1.0), [A], dense=True).homeserver
        self.room: Room = self.homeserver.create_room([A])
        self.disk = SaidDisk(directory, self.homeserver)
        self.observed = Observations(self.homeserver, ServerViews([A]), Trace(), self.disk)
        self.checks = CommitChecks(self.observed, LedgerChecks(self.observed))
        self.disk.here = {each.event_id for each in self.homeserver.steps}
        self.commit()
        self.disk.mark = self.observed.views.of[A].mark = self.disk.fanned_out

    def commit(self) -> list[str]:
        """All there is is fanned out; what was found."""
        self.disk.fed = self.disk.fanned_out = self.homeserver.steps[-1].token
        self.checks.committed("homeserver")
        return [each.invariant for each in self.observed.violations]

    def stood_in_for(self, happening: Step) -> bool:
        """Whether it counts as accounted for."""
        return is_stood_in_for(self.observed, self.observed.views.of[A], happening)


@pytest.fixture
async def gap(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> Gap:
    return Gap(tmp_path)


async def test_a_stand_in_in_quarantine_accounts_for_what_it_stands_for(gap: Gap) -> None:
    """The position passes all of the gap, and nobody is owed anything of it."""
    older, newest = gap.homeserver.say(gap.room), gap.homeserver.say(gap.room)
    gap.disk.unsent = {newest.event_id}

    assert gap.commit() == []
    assert gap.stood_in_for(older)


async def test_an_event_in_quarantine_that_is_not_the_stand_in_accounts_for_nothing(
    gap: Gap,
) -> None:
    older, middle = gap.homeserver.say(gap.room), gap.homeserver.say(gap.room)
    gap.homeserver.say(gap.room)
    gap.disk.unsent = {middle.event_id}

    assert gap.commit() == ["I1", "I1"]
    assert not gap.stood_in_for(older)


async def test_a_stand_in_that_nobody_can_send_may_be_given_up(gap: Gap) -> None:
    """It is the newest of the room, so the snapshot has nothing else."""
    older, newest = gap.homeserver.say(gap.room), gap.homeserver.say_malformed(gap.room)
    gap.disk.unsent = {newest.event_id}
    assert gap.commit() == []

    gap.disk.unsent = set()
    assert not gap.stood_in_for(older)
    gap.observed.unsent = {newest.event_id}
    assert gap.stood_in_for(older)


async def test_a_stand_in_that_was_set_aside_accounts_for_what_it_stands_for(gap: Gap) -> None:
    """The room was locked when the snapshot came: a redelivery is on record, and no row."""
    gap.homeserver.say(gap.room)
    newest = gap.homeserver.say(gap.room)
    gap.disk.set_aside = [newest.event_id]

    assert gap.commit() == []
    gap.disk.mark = newest.token
    assert gap.commit() == []


async def test_an_event_set_aside_that_is_not_the_stand_in_accounts_for_itself_alone(
    gap: Gap,
) -> None:
    gap.homeserver.say(gap.room)
    middle, newest = gap.homeserver.say(gap.room), gap.homeserver.say(gap.room)
    gap.disk.set_aside = [middle.event_id]

    assert gap.commit() == ["I1", "I1"]
    gap.disk.mark = newest.token
    assert gap.commit() == ["I1", "I1", "I2", "I2"]


async def test_a_redelivery_of_the_stand_in_may_be_answered_before_the_position_moves(
    gap: Gap,
) -> None:
    gap.homeserver.say(gap.room)
    newest = gap.homeserver.say(gap.room)
    view = gap.observed.views.of[A]

    view.redelivered.add(newest.event_id)
    view.answered.add(newest.event_id)
    assert gap.commit() == []
