"""For each invariant of the relay a line that guards it is switched off, and it has to turn red."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import trio
from sqlalchemy import Connection

from fedsender.embedded import appends
from fedsender.embedded.facts import Answer, Record
from fedsender.embedded.stays import Ended, store_hosts
from fedsender_lab.simulation import relay as relay_world
from fedsender_lab.simulation.relay import simulate_relay
from fedsender_relay import database as store
from fedsender_relay import hub, snapshots
from fedsender_relay.database import LogRecord, RelayStore
from fedsender_relay.hub import Hub
from fedsender_relay.log import RelayLog
from fedsender_relay.registry import Registry
from fedsender_relay.retention import Retention

pytestmark = pytest.mark.slow

FAR = 2**40


def goes_red(invariant: str, *seeds: int, days: float = 0.02) -> bool:
    """Whether one of the seeds sees this invariant broken."""
    for seed in seeds:
        report = simulate_relay(seed, days, stop_at=invariant)
        if any(violation.invariant == invariant for violation in report.violations):
            return True
    return False


@pytest.mark.parametrize("invariant", ["durable", "kept", "ahead"])
def test_a_log_that_is_told_before_it_is_stored(
    invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told before it is durable, and what anybody was told of is there after a crash."""
    append = RelayStore.append_records

    async def later(self: RelayStore, records: Sequence[Record]) -> list[Answer]:
        async def store_them() -> None:
            with suppress(BaseException):
                await trio.sleep(3)
                await append(self, records)

        head = (await self.bounds()).head
        trio.lowlevel.spawn_system_task(store_them)
        return [head + number + 1 for number in range(len(records))]

    monkeypatch.setattr(RelayStore, "append_records", later)

    assert goes_red(invariant, 14, 20, 23)


@pytest.mark.parametrize("invariant", ["epoch", "token"])
def test_an_epoch_that_stays(invariant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given out by an older copy of the files has another epoch than what was before: so a
    token never means two things."""
    begin = RelayStore.begin_intake
    monkeypatch.setattr(RelayStore, "begin_intake", lambda self, *_: begin(self, "0" * 16))

    assert goes_red(invariant, 16, 2, 3)


def test_a_feed_that_leaves_records_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer gets every record."""
    read = RelayLog.read

    async def skip(self: RelayLog, after: int, max_bytes: int) -> list[LogRecord]:
        found = await read(self, after, max_bytes)
        return found[1:] or found

    monkeypatch.setattr(RelayLog, "read", skip)

    assert goes_red("gap", 2, 3, days=0.004)


def test_a_name_that_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was away comes back and gets all."""

    monkeypatch.setattr(Hub, "gone", lambda self, session: None)
    monkeypatch.setattr(hub, "SILENT_S", math.inf)
    monkeypatch.setattr(relay_world, "HEALED_S", 3600.0)

    assert goes_red("level", 1, 2, 3, days=0.004)


def test_ids_that_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record has one token, however often it is sent in."""
    monkeypatch.setattr(appends, "find_appends", lambda *_args, **_keys: {})

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

    last_before = RelayStore.last_before
    monkeypatch.setattr(RelayStore, "last_before", lambda self, _ms: last_before(self, 2**62))
    # Who holds it, holds it for longer than that.
    monkeypatch.setattr(Registry, "floor", lambda _: None)

    assert goes_red("keep", 2, 1, 4)


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

    def forget(connection: Connection, told: Sequence[tuple[int, Any]]) -> list[Ended]:
        store_hosts(connection, told)
        return []

    monkeypatch.setattr(store, "store_hosts", forget)

    assert goes_red("content", 6, 7, 2)


def test_a_snapshot_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offered is all there, and as it was written."""
    monkeypatch.setattr(snapshots, "_verify", lambda _: None)

    assert goes_red("whole", 1, 4, days=0.1)


def test_messages_that_are_dropped_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A to-device message stays until everybody has it."""
    monkeypatch.setattr(Registry, "edu_floor", lambda _: FAR)

    assert goes_red("edu", 2, 3, days=0.01)
