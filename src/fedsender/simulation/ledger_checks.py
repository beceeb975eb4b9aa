"""What every line of the ledger is held against: I2 (order), I5 (patience), I10 (secrets)."""

from typing import Any

import orjson

from fedsender.ledger import EVERY_SERVER, NOTES
from fedsender.simulation.books import DAY_S, Book
from fedsender.simulation.evidence import Evidence
from fedsender.testing.clock import EPOCH_MS

MOST_BY_TIMER = 60
MOST_WITH_WAKES = 300


class LedgerChecks:
    """Reads the ledger as it grows."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def catch_up(self) -> None:
        """Read what is new."""
        evidence = self._evidence
        if evidence.disk is None:
            return
        for text in evidence.tail.new_lines(evidence.disk.directory / "ledger"):
            evidence.check_secrets("the ledger", text)
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError:
                if not evidence.disk_full:
                    evidence.fail("I9", f"a torn line: {text[:80]!r}")
                continue
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        evidence = self._evidence
        outcome = line["outcome"]
        evidence.counts[f"outcome: {outcome}"] += 1
        if line["destination"] == EVERY_SERVER:
            return
        book = evidence.books.of[line["destination"]]
        at = (line["ms"] - EPOCH_MS) / 1000
        evidence.trace.note(
            "line", book.name, outcome, line["transaction_id"], line["attempt"], line["status"]
        )
        for pdu in line["pdus"]:
            if pdu["lane"] != "live" and outcome == "delivered":
                evidence.trace.note("lane", book.name, *pdu.values())
        if outcome == "discarded":
            book.unanswered = None
        if outcome in NOTES:
            return
        book.sought_at = max(book.sought_at, at)
        if line["transaction_id"] is not None and line["attempt"] > 0:
            book.unlined = 0
        if outcome == "delivered":
            self._delivered(book, line)
        elif outcome != "unknown":
            self._failed(book, at, line)

    def _delivered(self, book: Book, line: dict[str, Any]) -> None:
        book.failed_at = None
        book.failures.clear()
        book.stubborn = 0
        for pdu in line["pdus"]:
            token_of = self._evidence.orderings.token
            lane, token = pdu["lane"], token_of(pdu["stream_ordering"])
            self._evidence.counts[f"PDUs: {lane}"] += 1
            book.recorded.add(pdu["event_id"])
            book.proven.add(pdu["event_id"])
            if "supersedes" in pdu:
                first, last = map(token_of, pdu["supersedes"])
                book.superseded.setdefault(pdu["room_id"], []).append((first, last))
                self._evidence.counts["large gaps"] += 1
            elif lane == "catch_up":
                self._evidence.counts["PDUs of small gaps"] += 1
            if lane == "live":
                self._check_order(book, token)
        book.refused.update(line["refused"])
        self._evidence.counts["refused PDUs"] += len(line["refused"])

    def _check_order(self, book: Book, token: int) -> None:
        if token <= book.newest_live:
            self._evidence.fail(
                "I2", f"{book.name}: live PDU {token} recorded after {book.newest_live}"
            )
        book.newest_live = max(token, book.newest_live)

    def _failed(self, book: Book, at: float, line: dict[str, Any]) -> None:
        evidence = self._evidence
        if book.failed_at is not None and at < book.failed_at + 0.999:
            evidence.fail("I5", f"{book.name}: attempts failed at {book.failed_at} and {at}")
        book.failed_at = at
        book.failure = line["outcome"]
        book.failures.append(at)
        book.stubborn += line["outcome"] == "failing"
        while book.failures[0] <= at - DAY_S:
            book.failures.popleft()
        allowed = self._allowed(book, at)
        if len(book.failures) > allowed:
            evidence.fail(
                "I5",
                f"{book.name}: {len(book.failures)} attempts in 24 h without an answer,"
                f" {allowed} are allowed",
            )

    def _allowed(self, book: Book, at: float) -> int:
        """How many attempts the last 24 h may have seen.

        A life that was cut off may not have written down that it had failed, and when to go on.
        """
        evidence = self._evidence
        while book.wakes and book.wakes[0][0] <= at - DAY_S:
            book.wakes.popleft()
        while evidence.crashed_at and evidence.crashed_at[0] <= at - DAY_S:
            evidence.crashed_at.popleft()
        by_admin = sum(admin for _, admin in book.wakes)
        most = MOST_BY_TIMER if len(book.wakes) == by_admin else MOST_WITH_WAKES
        return most + by_admin + len(evidence.crashed_at)
