"""Each invariant's check goes red within a few fixed seeds once the line that guards it is off.

A guard is switched off by replacing one method of the real code. If a test here turns green-in-vain
(no violation), either the guard has moved, or the simulation no longer looks where it should.
"""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import structlog
import trio
from sqlalchemy import Connection, delete, select

from fedsender.federation.client import Link, Peer
from fedsender.ledger import Ledger, Line
from fedsender.matrix import Pdu
from fedsender.sender import failure
from fedsender.sender.catch_up import CatchUp
from fedsender.sender.destination import Destination
from fedsender.sender.queue import PduQueue
from fedsender.sender.sender import Sender
from fedsender.sender.transaction import Draft, Transaction
from fedsender.simulation import simulate
from fedsender.store import delivery, embedded, room_servers, tables

SEEDS = (1, 4, 6)
SERVERS = 16
DAYS = 0.15

Patch = pytest.MonkeyPatch


def invariants_broken() -> str:
    """The invariant that breaks first, in the first world in which one does."""
    for seed in SEEDS:
        report = simulate(seed, SERVERS, DAYS, stop_at_first=True)
        if report.violations:
            return report.violations[0].invariant
    return "none"


def test_i1_rows_that_are_not_written_with_the_position(monkeypatch: Patch) -> None:
    monkeypatch.setattr(delivery, "record_owed", lambda connection, owed: None)

    assert invariants_broken() == "I1"


def test_i2_a_mark_that_passes_rooms_not_done(monkeypatch: Patch) -> None:
    fill = CatchUp.fill

    async def passes(self: CatchUp, draft: Draft, lsso: int) -> bool:
        more = await fill(self, draft, lsso)
        owed = await self.homeserver.owed_rooms(self.destination, lsso, 1000)
        draft.lsso = owed[-1][1] if owed else draft.lsso
        return more

    monkeypatch.setattr(CatchUp, "fill", passes)

    assert invariants_broken() == "I2"


def test_i3_a_failed_transaction_that_is_formed_anew(monkeypatch: Patch) -> None:
    async def forgets(self: Destination, transaction: Transaction) -> None:
        await trio.lowlevel.checkpoint()
        self.frozen = None

    monkeypatch.setattr(Destination, "_save_frozen", forgets)

    assert invariants_broken() == "I3"


def test_i3_a_second_transaction_while_one_is_in_flight(monkeypatch: Patch) -> None:
    put = Link.put_transaction

    async def twice(self: Link, transaction_id: str, body: bytes) -> Any:
        other = await self._peer._open()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(put, Link(self._peer, other), f"{transaction_id}x", body)
            answer = await put(self, transaction_id, body)
            nursery.cancel_scope.cancel()
        return answer

    monkeypatch.setattr(Link, "put_transaction", twice)

    assert invariants_broken() == "I3"


def test_i4_to_device_rows_deleted_up_to_an_id(monkeypatch: Patch) -> None:
    settle = delivery.settle

    def upto(connection: Connection, settlements: Sequence[Any]) -> list[str]:
        outbox = tables.device_federation_outbox
        for item in settlements:
            if item.outbox_ids:
                connection.execute(
                    delete(outbox).where(
                        outbox.c.destination == item.destination,
                        outbox.c.stream_id <= max(item.outbox_ids),
                    )
                )
        return settle(connection, settlements)

    monkeypatch.setattr(delivery, "settle", upto)

    assert invariants_broken() == "I4"


def test_i5_no_patience_after_a_failure(monkeypatch: Patch) -> None:
    monkeypatch.setattr(failure, "wait_s", lambda *arguments: 0.2)

    assert invariants_broken() == "I5"


def test_i6_a_server_that_has_left_is_still_told(monkeypatch: Patch) -> None:
    before = room_servers.embedded_servers_before

    def never_left(connection: Connection, events: Sequence[Any]) -> dict[str, Any]:
        found: dict[str, Any] = before(connection, events)
        servers = tables.room_servers.c
        for event in events:
            ever = connection.execute(
                select(servers.server).where(servers.room_id == event.room_id)
            ).scalars()
            found[event.event_id] |= frozenset(ever)
        return found

    monkeypatch.setattr(room_servers, "embedded_servers_before", never_left)

    assert invariants_broken() == "I6"


def test_i7_a_queue_without_a_bound(monkeypatch: Patch) -> None:
    def add(self: PduQueue, pdu: Pdu) -> bool:
        self._pdus.append(pdu)
        return True

    monkeypatch.setattr(PduQueue, "add", add)

    assert invariants_broken() == "I7"


def test_i8_a_start_that_waits_for_a_new_event(monkeypatch: Patch) -> None:
    async def nothing(self: Sender) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Sender, "load_book", nothing)
    monkeypatch.setattr(Sender, "sweep", nothing)

    assert invariants_broken() == "I8"


def test_i9_an_answer_without_a_line(monkeypatch: Patch) -> None:
    record = Ledger.record

    def forgets(self: Ledger, line: Line) -> None:
        if line.outcome != "delivered":
            record(self, line)

    monkeypatch.setattr(Ledger, "record", forgets)

    assert invariants_broken() == "I9"


def test_i10_content_in_a_log_line(monkeypatch: Patch) -> None:
    send: Callable[..., Awaitable[None]] = Destination._send

    async def tells(self: Destination, peer: Peer, link: Link, transaction: Transaction) -> None:
        structlog.get_logger().debug("sending", body=transaction.body)
        await send(self, peer, link, transaction)

    monkeypatch.setattr(Destination, "_send", tells)

    assert invariants_broken() == "I10"


def test_i10_files_that_others_can_read(monkeypatch: Patch) -> None:
    opened = os.open

    def careless(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        return opened(path, flags, 0o644 if mode == 0o600 else mode, **more)

    monkeypatch.setattr(os, "open", careless)

    assert invariants_broken() == "I10"
