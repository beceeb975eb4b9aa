"""What is looked at each time one of the daemon's databases has committed: I1, I2, I4, I9."""

from fedsender.simulation.books import Book
from fedsender.simulation.disk import Disk, QuarantinedItem
from fedsender.simulation.evidence import Evidence
from fedsender.simulation.homeserver import Happening
from fedsender.simulation.ledger_checks import LedgerChecks


class CommitChecks:
    """Compares what was committed with what it should mean."""

    def __init__(self, evidence: Evidence, ledger: LedgerChecks) -> None:
        self._evidence = evidence
        self._ledger = ledger
        self._outbox: dict[tuple[str, int], str] = {}
        self._quarantine: dict[int, QuarantinedItem] = {}

    def committed(self, database: str) -> None:
        """The daemon's database of that name has just committed."""
        evidence = self._evidence
        disk = evidence.disk
        if disk is None or not disk.ready():
            return
        disk.committed(database)
        self._ledger.catch_up()
        evidence.books.take_in(evidence.homeserver.history)
        if database == "homeserver":
            self._check_position(disk)
            self._check_marks(disk)
            self._check_outbox(disk)
        else:
            self._note_quarantine(disk)

    def restored(self, disk: Disk) -> None:
        """The databases are what they were long ago."""
        self._outbox = disk.outbox()
        self._quarantine = {item.id: item for item in disk.quarantine()}

    def _note_quarantine(self, disk: Disk) -> None:
        """An operator may empty it before anybody asks."""
        now = {item.id: item for item in disk.quarantine()}
        for item in disk.quarantine():
            if item.id not in self._quarantine:
                self._evidence.trace.note("quarantined", item.destination, item.event_id)
                self._evidence.counts["quarantined"] += 1
        for item in self._quarantine.values():
            if item.id not in now:
                self._evidence.trace.note("let go", item.destination, item.event_id)
        self._quarantine = now
        for item in disk.quarantine():
            if item.destination is None:
                continue
            thing = item.event_id or message_id(item.content.decode())
            self._evidence.books.of[item.destination].quarantined.add(thing)

    # --- I1 ---------------------------------------------------------------------------------------

    def _check_position(self, disk: Disk) -> None:
        evidence = self._evidence
        before, position = evidence.position, disk.position()
        if position == before:
            return
        if position < before:
            evidence.fail("I1", f"the events position went from {before} back to {position}")
        newest: dict[str, list[Happening]] = {}
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

    def _check_rows(self, disk: Disk, happening: Happening, rows: dict[str, int]) -> None:
        for server in happening.servers:
            if rows.get(server, 0) >= happening.token:
                continue
            if not disk.quarantined(None, happening.event_id):
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

    def _check_below(self, disk: Disk, book: Book, happening: Happening, mark: int) -> None:
        """An event that the mark has passed was answered, or is accounted for in another way."""
        evidence, server = self._evidence, book.name
        if happening.event_id in book.answered:
            recorded = happening.event_id in book.recorded or book.covered(happening)
            if not recorded and not evidence.disk_full:
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


def message_id(text: str) -> str:
    """The id of a simulated to-device message."""
    return text.split('"message_id":"', 1)[1].split('"', 1)[0]
