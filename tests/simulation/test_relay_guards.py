"""For each invariant of the relay a line that guards it is switched off, and it has to turn red."""

from typing import Any

import pytest

from fedsender.relay import compaction, daemon, log
from fedsender.relay.disk import Disk
from fedsender.relay.files import LogFiles
from fedsender.relay.history import Room
from fedsender.relay.hub import Hub
from fedsender.relay.keys import Keys
from fedsender.relay.log import Log
from fedsender.relay.registry import Registry
from fedsender.relay.retention import Limits, Retention
from fedsender.relay.session import Session
from fedsender.relay.shelf import Shelf
from fedsender.simulation import relay_world
from fedsender.simulation.relay import simulate_relay

FAR = 2**40


def goes_red(invariant: str, *seeds: int, days: float = 0.02) -> bool:
    """Whether one of the seeds sees this invariant broken."""
    for seed in seeds:
        report = simulate_relay(seed, days, stop_at=invariant)
        if any(violation.invariant == invariant for violation in report.violations):
            return True
    return False


@pytest.mark.parametrize("invariant", ["durable", "kept"])
def test_a_log_that_is_not_synced(invariant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told before it is durable, and what anybody was told of is there after a crash."""
    monkeypatch.setattr(LogFiles, "_sync", lambda *_: None)

    assert goes_red(invariant, 2, 3)


def test_an_epoch_that_stays_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token never means two things in one epoch."""
    monkeypatch.setattr(log, "_new_epoch", lambda _: "0" * 16)

    assert goes_red("epoch", 10, 7, 3)


def test_tokens_that_are_given_again_in_the_same_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given before the power went has another epoch than what is given after it: so a
    token has one meaning also on a disk that does not keep what it says it has."""

    async def no_epoch(self: Log) -> str:
        return self.epoch

    monkeypatch.setattr(LogFiles, "_sync", lambda *_: None)
    monkeypatch.setattr(Log, "begin_epoch", no_epoch)

    assert goes_red("token", 6, 2, 3)


def test_a_feed_that_begins_behind_where_its_consumer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer gets every record."""
    cursor = Log.cursor
    monkeypatch.setattr(Log, "cursor", lambda self, at: cursor(self, min(at + 1, self.head)))

    assert goes_red("gap", 2, 3, days=0.004)


def test_a_name_that_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was away comes back and gets all."""

    def remove(self: Hub, session: Session) -> None:
        """Nothing."""

    monkeypatch.setattr(Hub, "gone", remove)
    monkeypatch.setattr(relay_world, "HEALED_S", 3600.0)

    assert goes_red("level", 1, 2, 3, days=0.004)


def test_ids_that_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record has one token, however often it is sent in."""
    monkeypatch.setattr(Keys, "token", lambda *_: None)

    assert goes_red("once", 2, 3)


def test_pins_that_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a consumer has not acknowledged is not deleted."""
    monkeypatch.setattr(Registry, "floor", lambda _: None)

    assert goes_red("pin", 1, 5, 4)


def test_a_pin_ahead_of_its_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin is never above what the consumer has."""
    ack = Registry.ack
    monkeypatch.setattr(
        Registry, "ack", lambda self, name, token, first: ack(self, name, token + 1, first)
    )

    assert goes_red("ack", 2, 3)


def test_a_log_that_goes_as_soon_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything stays for a while."""

    def at_once(keep_min_s: float, *others: Any) -> Limits:
        return Limits(0, *others)

    monkeypatch.setattr(daemon, "Limits", at_once)
    # Who holds it, holds it for longer than that.
    monkeypatch.setattr(Registry, "floor", lambda _: None)

    assert goes_red("keep", 2, 1, 4)


def test_a_log_that_goes_before_there_is_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lost its place can take a snapshot and go on behind it."""
    monkeypatch.setattr(Shelf, "floor", lambda _: FAR)

    assert goes_red("snapshot", 1, 3)


def test_a_consumer_that_is_overtaken_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot go on by the log any more is shown as lost."""
    monkeypatch.setattr(Registry, "overtake", lambda *_: [])

    assert goes_red("lost", 1, 2, 4)


def test_a_cap_that_nobody_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log does not grow for ever."""

    async def never(_: Retention) -> int:
        return 0

    monkeypatch.setattr(Retention, "_short_by", never)

    assert goes_red("cap", 3, 4, 1)


def test_a_snapshot_that_knows_nobody_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot says which is the newest event for each server, also for who has left."""

    def leave(self: Room, host: str, *_: object) -> None:
        del self.present[host]

    monkeypatch.setattr(Room, "_leave", leave)

    assert goes_red("content", 6, 7, 2)


def test_a_snapshot_that_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offered is durable, and all there."""

    def write(disk: Disk, path: Any, content: bytes) -> None:
        disk.open(path, create=True).append(content)

    monkeypatch.setattr(compaction, "_write", write)

    assert goes_red("whole", 1, 4)


def test_messages_that_are_dropped_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A to-device message stays until everybody has it."""
    monkeypatch.setattr(Registry, "edu_floor", lambda _: FAR)

    assert goes_red("edu", 2, 3, days=0.01)
