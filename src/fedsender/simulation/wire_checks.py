"""What is seen on the wire: I3 (one frozen transaction at a time), I5, I6 (who may see), I9."""

from collections.abc import Callable, Sequence

import trio

from fedsender.simulation.books import STUBBORN, Book, Unanswered
from fedsender.simulation.evidence import Evidence
from fedsender.simulation.ledger_checks import LedgerChecks
from fedsender.simulation.receiver import Attempt
from fedsender.testing.rooms import Step

MIN_GAP_S = 0.998
"""One second, less what is lost in rounding to milliseconds."""
SETTLED_S = 10.0
"""Longer than any database here takes to say what a transaction is formed by."""
REQUEST_S = 60.0
"""One attempt, all its connections included, takes no longer: `federation.request_timeout`."""
MAY_BE_CONTENT = (400, 401, 403, 413)


class WireChecks:
    """The witness of everything that arrives anywhere."""

    def __init__(self, evidence: Evidence, ledger: LedgerChecks) -> None:
        self._evidence = evidence
        self._ledger = ledger
        self.at_point: Callable[[str], None] = lambda _point: None
        """Called when something has been seen, for those who let the daemon die there."""

    def _book(self, server: str) -> Book:
        return self._evidence.books.of[server]

    # --- the witness ------------------------------------------------------------------------------

    def contacted(self, server: str) -> None:
        """Somebody connects to the server."""
        self._ledger.catch_up()
        book = self._book(server)
        book.sought_at = trio.current_time()
        self._evidence.trace.note("contact", server)
        if book.failed_at is not None and book.failure == "unreachable":
            self._check_patience(book)

    def began(self, attempt: Attempt) -> None:
        """The head of a transaction is there."""
        self._ledger.catch_up()
        evidence, book = self._evidence, self._book(attempt.server)
        evidence.trace.note("began", attempt.server, attempt.transaction_id)
        book.sought_at = trio.current_time()
        if book.flight is not None and not book.flight.over:
            evidence.fail(
                "I3",
                f"{book.name}: {attempt.transaction_id} while {book.flight.transaction_id}"
                " is in flight",
            )
        book.flight = attempt
        attempt.life = evidence.life
        if not evidence.alive:
            return
        assert evidence.disk is not None
        attempt.searching, attempt.on_trial = evidence.disk.searching(attempt.server)
        attempt.second_try = self._is_second_try(book, attempt)
        if not attempt.second_try:
            self._check_patience(book)
            self._check_lines(book)
            self._check_succession(book, attempt)
        self.at_point("request began")

    def arrived(self, attempt: Attempt) -> None:
        """A transaction is there in whole."""
        evidence, book = self._evidence, self._book(attempt.server)
        assert attempt.digest is not None
        evidence.counts["transactions arrived"] += 1
        known = book.digests.setdefault(attempt.transaction_id, attempt.digest)
        if known != attempt.digest:
            evidence.fail("I3", f"{book.name}: {attempt.transaction_id} with another body")
        if attempt.contents is None:
            return
        tokens = [pdu.token for pdu in attempt.contents.pdus]
        evidence.trace.note("arrived", book.name, attempt.digest[:12], attempt.manner.value, tokens)
        repeated = book.unanswered is not None
        for pdu in attempt.contents.pdus:
            self._check_pdu(book, attempt, pdu, repeated=repeated)
        self.at_point("request arrived")

    def ended(self, attempt: Attempt) -> None:
        """An answer has begun to leave, or the connection is gone."""
        evidence, book = self._evidence, self._book(attempt.server)
        evidence.trace.note("ended", book.name, attempt.status, attempt.processed)
        book.last = attempt
        if attempt.poisoned and attempt.contents is not None and len(attempt.contents.pdus) == 1:
            book.poison.add(attempt.contents.pdus[0].event_id)
        if attempt.processed and attempt.contents is not None:
            self._take_in(book, attempt)
        if attempt.answered:
            self._answered(book, attempt)
        else:
            self._unanswered(book, attempt)
        if attempt.life != evidence.life or not evidence.alive:
            self._forget_unrecorded(book)
        elif not attempt.second_try and not evidence.disk_full:
            book.unlined += 1
        if attempt.status is not None:
            self.at_point("answer leaves")

    def broken(self, server: str, rule: str, text: str) -> None:
        """A transaction breaks a rule of the specification."""
        self._evidence.fail("spec", f"{server}: {rule}: {text}")

    # --- what the daemon's end does to it ---------------------------------------------------------

    def crashed(self) -> None:
        """A life was cut off: what it had tried once and not recorded may come under a new id."""
        evidence = self._evidence
        for book in evidence.books.of.values():
            book.unlined = 0
            self._forget_unrecorded(book)

    def _forget_unrecorded(self, book: Book) -> None:
        evidence, unanswered = self._evidence, book.unanswered
        if unanswered is None:
            return
        assert evidence.disk is not None
        wanted = unanswered.attempt.transaction_id
        record = evidence.disk.frozen(book.name)
        if record is not None and record[0] == wanted:
            return
        if unanswered.times > 1 and not self._isolated(book):
            evidence.fail(
                "I3", f"{book.name}: no record of {wanted}, tried {unanswered.times} times"
            )
        book.unanswered = None

    def drained(self) -> None:
        """A life has ended in order: what is unanswered must be on record."""
        evidence = self._evidence
        assert evidence.disk is not None
        for book in evidence.books.of.values():
            if book.unanswered is None:
                continue
            wanted = book.unanswered.attempt.transaction_id
            record = evidence.disk.frozen(book.name)
            if (record is None or record[0] != wanted) and not self._isolated(book):
                evidence.fail("I3", f"{book.name}: {wanted} is not on record after a drain")

    def _unanswered(self, book: Book, attempt: Attempt) -> None:
        known = book.unanswered
        if known is None or known.attempt.transaction_id != attempt.transaction_id:
            book.unanswered = Unanswered(attempt)
            return
        known.times += not attempt.second_try
        known.attempt = attempt

    # --- the rules --------------------------------------------------------------------------------

    def _is_second_try(self, book: Book, attempt: Attempt) -> bool:
        """The same attempt again: its reused connection turned out to be closed (I5).

        The line comes when both are over, unless the ledger's disk takes none.
        """
        last = book.last
        return (
            last is not None
            and last.reused
            and not last.second_try
            and not attempt.reused
            and last.status is None
            and last.life == attempt.life
            and last.transaction_id == attempt.transaction_id
            and attempt.began_at - last.began_at < REQUEST_S
            and (book.unlined > 0 or self._evidence.disk_full)
        )

    def _check_patience(self, book: Book) -> None:
        now = trio.current_time()
        if book.failed_at is not None and now < book.failed_at + MIN_GAP_S:
            self._evidence.fail(
                "I5", f"{book.name}: tried {now - book.failed_at:.3f} s after a failure"
            )

    def _check_lines(self, book: Book) -> None:
        if book.unlined > 0 and not self._evidence.disk_full:
            assert book.last is not None
            self._evidence.fail(
                "I9", f"{book.name}: no line for an attempt at {book.last.transaction_id}"
            )
        book.unlined = 0

    def _check_succession(self, book: Book, attempt: Attempt) -> None:
        """Another id follows only an answer, or an isolation that is on record (I3)."""
        before = book.unanswered
        if before is None or before.attempt.transaction_id == attempt.transaction_id:
            return
        status = before.attempt.status
        # A streak counts for the server: what it was sent meanwhile may have changed its id.
        stubborn = max(before.times, book.stubborn) >= STUBBORN
        suspect = status in MAY_BE_CONTENT or stubborn or before.attempt.searching
        if not (suspect and self._isolated(book)):
            self._evidence.fail(
                "I3",
                f"{book.name}: {attempt.transaction_id} after {before.attempt.transaction_id},"
                f" which ended {before.times} times without an answer (last: {status})",
            )
        self._evidence.counts["isolations"] += 1
        book.unanswered = None

    def _isolated(self, book: Book) -> bool:
        disk, before = self._evidence.disk, book.unanswered
        assert disk is not None
        assert before is not None
        if any(disk.searching(book.name)):
            return True
        contents = before.attempt.contents
        if contents is None:
            return False
        things = {*contents.messages, *(pdu.event_id for pdu in contents.pdus)}
        return not things.isdisjoint(book.quarantined)

    def _check_pdu(self, book: Book, attempt: Attempt, pdu: Step, *, repeated: bool) -> None:
        evidence = self._evidence
        assert evidence.disk is not None
        assert attempt.contents is not None
        if book.name not in pdu.servers:
            evidence.fail("I6", f"{book.name} must not see {pdu.event_id} (token {pdu.token})")
        if pdu.token > evidence.position:
            evidence.fail("I1", f"{book.name}: {pdu.token} sent, position is {evidence.position}")
        taken_back = evidence.homeserver.redacted.get(pdu.event_id)
        if pdu.event_id in attempt.contents.pruned:
            if taken_back is None:
                evidence.fail("redaction", f"{book.name}: {pdu.event_id} pruned for no reason")
        elif taken_back is not None and not repeated:
            self._check_redaction(book, pdu, taken_back)
        again = pdu.event_id in book.proven and pdu.event_id not in book.redelivered
        if again and not repeated and not _is_alone_on_trial(attempt):
            # What had a recorded answer is not sent again, unless an operator asked for it.
            evidence.fail(
                "I3", f"{book.name}: {pdu.event_id} (token {pdu.token}) again, LSSO is {book.mark}"
            )

    def _check_redaction(self, book: Book, pdu: Step, taken_back: int) -> None:
        evidence = self._evidence
        known_since = evidence.passed_at(taken_back)
        if known_since is not None and trio.current_time() - known_since > SETTLED_S:
            evidence.fail(
                "redaction",
                f"{book.name}: {pdu.event_id} whole, {trio.current_time() - known_since:.1f} s"
                " after its redaction was fanned out",
            )

    def _take_in(self, book: Book, attempt: Attempt) -> None:
        """A server has taken a transaction in: in each room it sees time go one way."""
        assert attempt.contents is not None
        for pdu in attempt.contents.pdus:
            if pdu.event_id in book.redelivered or _is_alone_on_trial(attempt):
                book.taken.add(pdu.event_id)
                continue
            newest = book.newest.get(pdu.room_id, 0)
            if pdu.token < newest and pdu.event_id not in book.taken:
                self._evidence.fail(
                    "order", f"{book.name}: {pdu.token} after {newest} in {pdu.room_id}"
                )
            book.newest[pdu.room_id] = max(newest, pdu.token)
            book.taken.add(pdu.event_id)

    def _answered(self, book: Book, attempt: Attempt) -> None:
        book.unanswered = None
        if attempt.contents is not None:
            book.answered.update(pdu.event_id for pdu in attempt.contents.pdus)
            if self._evidence.disk_full:
                _assume_recorded(book, attempt.contents.pdus)
            book.messages_answered.update(attempt.contents.messages)
            if book.honest:
                self._take_latencies(attempt.contents.pdus)
            self._evidence.counts["PDUs answered"] += len(attempt.contents.pdus)
            self._evidence.counts["to-device messages"] += len(attempt.contents.messages)
        self._evidence.counts["transactions answered"] += 1

    def _take_latencies(self, pdus: Sequence[Step]) -> None:
        evidence = self._evidence
        for pdu in pdus:
            fanned_out_at = evidence.passed_at(pdu.token)
            if fanned_out_at is not None and fanned_out_at >= evidence.calm_since:
                evidence.latencies.append(trio.current_time() - fanned_out_at)


def _is_alone_on_trial(attempt: Attempt) -> bool:
    """Whether it is the suspect of a search that is on record, or the witness of one."""
    contents = attempt.contents
    return attempt.on_trial and contents is not None and len(contents.pdus) == 1


def _assume_recorded(book: Book, pdus: Sequence[Step]) -> None:
    """The line that would say what the PDUs stand for cannot be written."""
    for pdu in pdus:
        book.recorded.add(pdu.event_id)
        book.superseded.setdefault(pdu.room_id, []).append((0, pdu.token))
