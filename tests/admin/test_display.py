"""Tables on narrow and wide screens: one line a row, names whole, errors cut where it is best."""

from collections import defaultdict
from typing import Any

import pytest
from rich.cells import cell_len

from fedsender.admin import display
from fedsender.admin.display import Column, Sheet, shortened

LONG = "a-very-long-name-of-a-server-that-is-somewhere." * 3 + "example.org"


def entry(name: str, **values: Any) -> dict[str, Any]:
    return {
        "destination": name,
        "state": "failing",
        "behind": True,
        "rooms_owed": 1234,
        "events_owed": 0,
        "redeliveries": 0,
        "queued_pdus": 0,
        "in_flight": None,
        "owes_keys": True,
        "oldest_owed_s": 400_000.0,
        "failing_for_s": 399_000.0,
        "next_attempt_in_s": 3_700.0,
        "reason": None,
        "paused": None,
        "parked": None,
    } | values


REASONS = (
    "no connection within 10 s (198.51.100.4:8448, [2001:db8::4]:8448)",
    "certificate refused: certificate has expired (203.0.113.9:8448 as x.example)",
    "answered 429: M_LIMIT_EXCEEDED: Too Many Requests",
    "answered 403: M_FORBIDDEN: a very long sentence about those who are not welcome here",
)
ENTRIES = [
    entry(f"matrix.server{at}.example.org", reason=reason) for at, reason in enumerate(REASONS)
]
PAUSED = entry("p.example", state="paused", reason="answered 502", paused="moving house")


def lines(entries: list[dict[str, Any]], width: int | None) -> list[str]:
    return [line.plain for line in display.destinations(entries).lines(width)]


ALL = ["SERVER", "STATE", "OWED", "OLDEST", "FAILING", "NEXT TRY", "REASON"]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (80, ["SERVER", "STATE", "OWED", "REASON"]),
        (100, ["SERVER", "STATE", "OWED", "OLDEST", "FAILING", "REASON"]),
        (200, ALL),
        (None, ALL),
    ],
)
def test_columns_leave_by_their_rank_and_each_row_is_one_line(
    width: int | None, columns: list[str]
) -> None:
    header, *rows = lines(ENTRIES, width)
    assert [part.strip() for part in header.split("  ") if part] == columns
    assert len(rows) == len(ENTRIES)
    assert all(row.startswith(each["destination"]) for row, each in zip(rows, ENTRIES, strict=True))
    if width is not None:
        assert max(len(row) for row in rows) <= width


def test_one_long_name_takes_no_column_from_the_others() -> None:
    before = lines(ENTRIES, 100)
    header, *rows = lines([*ENTRIES, entry(LONG, reason="answered 502")], 100)
    assert header.split() == before[0].split()
    assert rows[-1].startswith(LONG)
    assert rows[-1].endswith("answered 502")


def test_without_a_screen_nothing_is_cut() -> None:
    text = "\n".join(lines([*ENTRIES, entry(LONG, reason="x" * 500)], None))
    assert LONG in text
    assert "x" * 500 in text
    assert "…" not in text


def test_an_operators_reason_stands_before_an_older_error_and_owed_keys_are_shown() -> None:
    row = lines([PAUSED], 200)[1]
    assert "moving house" in row
    assert "502" not in row
    assert "1,234 rooms, keys" in row


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("answered 502", 12, "answered 502"),
        ("refused: 192.0.2.7 port 8448: Connection refused", 30, "refused: … Connection refused"),
        (
            "closed: a new connection failed: 192.0.2.7 port 8448: No route to host",
            60,
            "closed: a new connection failed: … No route to host",
        ),
        ("answered 403: M_FORBIDDEN: not by our operators", 30, "answered 403: M_FORBIDDEN: no…"),
        ("東京東京東京", 7, "東京東…"),
    ],
)
def test_an_error_keeps_its_first_and_its_last_words(text: str, width: int, short: str) -> None:
    assert shortened(text, width) == short
    assert cell_len(short) <= width


def test_event_ids_are_whole_or_not_there() -> None:
    event_id = "$" + "x" * 43
    item = {
        "id": 7,
        "destination": "matrix.example.org",
        "kind": "pdu",
        "event_id": event_id,
        "room_id": "!" + "r" * 30 + ":hs.example",
        "at_ts": 1_800_000_000_000,
        "reason": "answered 400: M_BAD_JSON: no",
    }
    for width in (80, 100, 120, 200):
        _, row = (line.plain for line in display.quarantine([item]).lines(width))
        assert ("$x" not in row) or event_id in row
        assert row.startswith("7 ")
    assert event_id in row


def test_a_cell_cannot_move_the_cursor() -> None:
    sheet = Sheet(Column("A"))
    sheet.add("x\x1b[2J\ny")
    assert [line.plain for line in sheet.lines(80)] == ["A", r"x\x1b[2J\ny"]


def test_attempts_in_short_are_those_that_were_delivered() -> None:
    def of(outcome: str, took_ms: int) -> dict[str, object]:
        return {"outcome": outcome, "took_ms": took_ms}

    assert display.took_in_short([of("failing", 60_000)]) == "0 of 1 attempt delivered"
    entries = [of("delivered", number) for number in range(100, 0, -1)]
    said = display.took_in_short([*entries, of("failing", 60_000)])
    assert said == "100 of 101 attempts delivered in p50 50 ms, p95 95 ms, at most 100 ms"


def test_why_says_one_attempt_and_one_item() -> None:
    said: dict[str, Any] = {"destination": "a.example", "summary": "", "state": "failing"}
    said |= {"depth": {}, "held": [], "settings": [], "owed_in": [], "isolating": 1}
    said["in_flight"] = {"transaction_id": "b.1", "attempts": 1, "age_s": 25.0}
    facts = dict(display.why_facts(defaultdict(lambda: None, said)))
    assert facts["frozen transaction"] == "b.1, 1 attempt in 25 s"
    assert facts["isolating"] == "at most 1 item at once"
