"""What must be true once the world is well again and everything had its time."""

from collections.abc import Iterator

from fedsender.simulation.books import Book
from fedsender.simulation.commit_checks import is_stood_in_for, stand_ins_of
from fedsender.simulation.evidence import Evidence
from fedsender.testing.rooms import Step


class Ending:
    """Counts what is still missing, and says so in the end."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def missing(self) -> Iterator[tuple[Book, Step]]:
        """What should have reached a server, or be accounted for, and is not."""
        evidence = self._evidence
        disk = evidence.disk
        assert disk is not None
        evidence.books.take_in(evidence.homeserver.steps)
        for book in evidence.books.of.values():
            for happening in book.owed:
                event_id = happening.event_id
                if event_id in book.answered or book.covered(happening):
                    continue
                if disk.quarantined(book.name, event_id) or disk.quarantined(None, event_id):
                    continue
                if is_stood_in_for(evidence, book, happening):
                    continue
                # Held, or what stands in for it is: nothing else there could be a witness.
                held = (happening, *stand_ins_of(evidence, book.name, happening))
                if any(one.event_id in book.poison and self._is_owed(book, one) for one in held):
                    continue
                yield book, happening

    def _is_owed(self, book: Book, happening: Step) -> bool:
        disk, server = self._evidence.disk, book.name
        assert disk is not None
        if happening.token > book.mark or happening.event_id in disk.redeliveries(server):
            return True
        floor, newest = disk.catch_up_floor(server), disk.owed_room(server, happening.room_id)
        return newest > book.mark and floor is not None and floor < happening.token

    def messages_waiting(self) -> list[str]:
        """The servers for which there are to-device messages."""
        disk = self._evidence.disk
        assert disk is not None
        return sorted({server for server, _ in disk.outbox()})

    def judge(self) -> None:
        """Everything was delivered, is superseded by the ledger's word, in quarantine, or held."""
        for book, happening in self.missing():
            self._evidence.fail(
                "lost" if happening.token <= book.mark else "I8",
                f"{book.name} never got {happening.event_id} (token {happening.token} of"
                f" {happening.room_id}, {happening.kind}); LSSO is {book.mark}",
            )
        for server in self.messages_waiting():
            self._evidence.fail("lost", f"to-device messages for {server} were never sent")
        self._check_quarantine()
        self._check_modes()

    def _check_quarantine(self) -> None:
        disk = self._evidence.disk
        assert disk is not None
        for item in disk.quarantine():
            if not item.reason:
                self._evidence.fail("I9", f"quarantine item {item.id} has no reason")

    def _check_modes(self) -> None:
        """Files that hold content are nobody else's business (I10)."""
        disk = self._evidence.disk
        assert disk is not None
        for path in sorted(disk.directory.rglob("*")):
            content = ".sqlite3" in path.name or path.parent.name == "ledger"
            if path.is_file() and content and path.stat().st_mode & 0o077:
                self._evidence.fail("I10", f"{path.name} has mode {path.stat().st_mode & 0o777:o}")
