"""What is looked at each time one of the daemon's databases has committed: I1, I2, I4, I9."""

import re
from typing import Final

from fedsender.simulation.books import Book
from fedsender.simulation.disk import Disk, QuarantinedItem
from fedsender.simulation.evidence import Evidence
from fedsender.simulation.ledger_checks import LedgerChecks
from fedsender.testing.rooms import Step

_MESSAGE_ID: Final = re.compile(r'"message_id": ?"([^"]+)"')


class CommitChecks:
    """Compares what was committed with what it should mean."""

    def __init__(self, evidence: Evidence, ledger: LedgerChecks) -> None:
        self._evidence = evidence
        self._ledger = ledger
        self._outbox: dict[tuple[str, int], str] = {}
        self._fed_upto = 0
        self._quarantine: dict[int, QuarantinedItem] = {}

    def committed(self, database: str) -> None:
        """The daemon's database of that name has just committed."""
        evidence = self._evidence
        disk = evidence.disk
        if disk is None or not disk.ready():
            return
        disk.committed(database)
        if database == "homeserver":
            evidence.orderings.note(disk.base())
        self._ledger.catch_up()
        evidence.books.take_in(evidence.homeserver.steps)
        if database == "homeserver":
            self._note_skipped(disk)
            self._check_position(disk)
            self._check_marks(disk)
            self._check_outbox(disk)
        else:
            self._note_quarantine(disk)

    def restored(self, disk: Disk) -> None:
        """The databases are what they were long ago."""
        self._evidence.orderings.back_to(disk.base())
        self._outbox = disk.outbox()
        self._fed_upto = disk.feed_position()
        self._quarantine = {item.id: item for item in disk.quarantine()}

    def _note_quarantine(self, disk: Disk) -> None:
        """An operator may empty it before anybody asks."""
        now = {item.id: item for item in disk.quarantine()}
        for item in disk.quarantine():
            if item.id not in self._quarantine:
                self._evidence.trace.note("quarantined", item.destination, item.event_id)
                self._evidence.counts["quarantined"] += 1
                self._check_guilt(item)
        for item in self._quarantine.values():
            if item.id not in now:
                self._evidence.trace.note("let go", item.destination, item.event_id)
        self._quarantine = now
        for item in disk.quarantine():
            if item.destination is None:
                self._evidence.unsent.add(str(item.event_id))
                continue
            thing = item.event_id or message_id(item.content.decode())
            self._evidence.books.of[item.destination].quarantined.add(thing)

    def _check_guilt(self, item: QuarantinedItem) -> None:
        """For one server stands in quarantine what that server always refuses, and nothing that
        it refused because it was ill."""
        evidence, event_id = self._evidence, item.event_id
        if item.destination is None or event_id is None:
            return
        happening = evidence.homeserver.by_id.get(event_id)
        guilty = event_id in evidence.books.of[item.destination].poison
        if happening is not None and happening.sendable and not guilty:
            evidence.fail("guilt", f"{item.destination}: {event_id} in quarantine: {item.reason}")

    def _note_skipped(self, disk: Disk) -> None:
        """Where the feed went on by a snapshot, not all that happened is here."""
        evidence, before, now = self._evidence, self._fed_upto, disk.feed_position()
        if now > before + 1:
            between = evidence.homeserver.between(before, now)
            told = [each.event_id for each in between if any(row[0] == "pdu" for row in each.rows)]
            if not disk.has_events(told):
                evidence.skipped.append((before, now))
                evidence.counts["skipped by a snapshot"] += 1
        self._fed_upto = max(before, now)

    # --- I1 ---------------------------------------------------------------------------------------

    def _check_position(self, disk: Disk) -> None:
        evidence = self._evidence
        before, position = evidence.position, disk.position()
        if position == before:
            return
        if position < before:
            evidence.fail("I1", f"the events position went from {before} back to {position}")
        newest: dict[str, list[Step]] = {}
        for happening in evidence.homeserver.between(before, position):
            if happening.servers and happening.sendable:
                newest.setdefault(happening.room_id, []).append(happening)
        for room_id, happenings in newest.items():
            rows = disk.owed(room_id)
            for happening in happenings:
                self._check_rows(disk, happening, rows)
        if disk.newest_owed() > position:
            evidence.fail("I1", f"{disk.newest_owed()} is owed, the position is {position}")
        evidence.moved(position)

    def _check_rows(self, disk: Disk, happening: Step, rows: dict[str, int]) -> None:
        for server in happening.servers:
            if server not in self._evidence.books.of or rows.get(server, 0) >= happening.token:
                continue
            if disk.quarantined(None, happening.event_id):
                continue
            stand_ins = stand_ins_of(self._evidence, server, happening)
            if any(disk.quarantined(None, each.event_id) for each in stand_ins):
                continue
            self._evidence.fail(
                "I1",
                f"position past {happening.token}, but {server} is owed"
                f" {rows.get(server)} of {happening.room_id}",
            )

    # --- I2, I9 -----------------------------------------------------------------------------------

    def _check_marks(self, disk: Disk) -> None:
        evidence = self._evidence
        for server, mark in disk.marks().items():
            book = evidence.books.of[server]
            if mark == book.mark:
                continue
            evidence.trace.note("mark", server, mark)
            if mark < book.mark:
                evidence.fail("I2", f"{server}: LSSO went from {book.mark} back to {mark}")
            for happening in book.owed_between(book.mark, mark):
                self._check_below(disk, book, happening, mark)
            book.mark = mark

    def _check_below(self, disk: Disk, book: Book, happening: Step, mark: int) -> None:
        """An event that the mark has passed was answered, or is accounted for in another way."""
        evidence, server = self._evidence, book.name
        if happening.event_id in book.answered:
            recorded = happening.event_id in book.recorded or book.covered(happening)
            # A crash cut the answer off, and the server refused the event when it came again.
            refused = disk.quarantined(server, happening.event_id)
            if not recorded and not refused and not evidence.disk_full:
                evidence.fail(
                    "I9", f"{server}: LSSO {mark} committed, no line has {happening.token}"
                )
            return
        if book.covered(happening) or disk.quarantined(server, happening.event_id):
            return
        if disk.quarantined(None, happening.event_id):
            return
        if happening.event_id in disk.redeliveries(server):
            return
        if is_stood_in_for(evidence, book, happening):
            return
        floor = disk.catch_up_floor(server)
        still_owed = disk.owed_room(server, happening.room_id) > mark
        if not (still_owed and floor is not None and floor < happening.token):
            evidence.fail(
                "I2",
                f"{server}: LSSO {mark} passed {happening.token} of {happening.room_id},"
                f" which was not answered (catch-up from {floor}, still owed: {still_owed})",
            )

    # --- I4 ---------------------------------------------------------------------------------------

    def _check_outbox(self, disk: Disk) -> None:
        evidence = self._evidence
        now = disk.outbox()
        for key in [key for key in self._outbox if key not in now]:
            server, message = key[0], message_id(self._outbox[key])
            evidence.trace.note("outbox", server, key[1], "gone")
            book = evidence.books.of[server]
            if message not in book.messages_answered and message not in book.quarantined:
                evidence.fail("I4", f"{server}: row {key[1]} was deleted without an answer")
        self._outbox = now


def stand_ins_of(evidence: Evidence, server: str, happening: Step) -> list[Step]:
    """What a snapshot had in place of the event: the newest of the room that the server is to get.

    It may be one that nobody can send.
    """
    found = []
    for after, upto in evidence.skipped:
        if after < happening.token <= upto:
            later = evidence.homeserver.between(happening.token - 1, upto)
            alike = [each for each in later if each.room_id == happening.room_id]
            found.append([each for each in alike if server in each.servers][-1])
    return found


def is_stood_in_for(evidence: Evidence, book: Book, happening: Step) -> bool:
    """Whether what a snapshot had in place of the event stands in quarantine.

    That it could not be sent is on record; what it stood for is not here. One that nobody can send
    an operator may have given up since.
    """
    disk = evidence.disk
    assert disk is not None
    for each in stand_ins_of(evidence, book.name, happening):
        name = each.event_id
        if name in book.quarantined or disk.quarantined(None, name):
            return True
        if not each.sendable and name in evidence.unsent:
            return True
    return False


def message_id(text: str) -> str:
    """The id of a simulated to-device message."""
    found = _MESSAGE_ID.search(text)
    assert found is not None
    return found[1]
