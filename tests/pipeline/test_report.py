"""The report: one page that needs nothing else, and answers before it shows figures."""

import datetime
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.lakes import (
    EVENT_MS,
    Rows,
    attempt,
    config_of,
    event,
    ingest_ledger,
    lake_of,
    note,
    pdu,
    write,
)
from tests.pipeline.test_audit import run as run_audit

from fedsender_pipeline import PipelineError, schemas
from fedsender_pipeline.audit import Audited
from fedsender_pipeline.health import DAY_MS, DAYS, HOUR_MS, Level
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.report import Figures, page, report
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

A, B, C = "a.example", "b.example", "c.example"
NASTY = "</title></style><script>alert(1)</script>&amp;\"'{{ 1 }}.example"


class Page(HTMLParser):
    """What a browser would make of it: the elements, and that all of them are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.addresses: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def make(spark: "SparkSession", lake: Lake, directory: Path) -> tuple[Figures, str]:
    path = directory / "report.html"
    steps = Steps(quiet=True)
    figures = report(spark, lake, config_of(directory), steps, path)
    return figures, path.read_text()


def lined(text: str) -> str:
    """The page in one line, with one space where there was any."""
    return " ".join(text.split())


def answer(text: str) -> str:
    (found,) = re.findall(r'<p class="(answer.*?) ?</p>', lined(text))
    return re.sub(r"</?b>", "", found).replace('">', ": ", 1)


def test_the_page_shows_what_is_in_the_lake(spark: "SparkSession", tmp_path: Path) -> None:
    """Losses are in groups; C fails in one of one attempt, which proves less than two of 22."""
    rows: Rows = {
        "events": [event(at, "!r") for at in range(1, 61)],
        "intervals": [
            {"room_id": "!r", "server": server, "first": 1, "last": None} for server in (A, B)
        ],
        "destination_rooms": [
            {"destination": server, "room_id": "!r", "stream_ordering": 60} for server in (A, B)
        ],
        "destinations": [
            {"destination": A, "last_successful_stream_ordering": 60},
            {"destination": B, "last_successful_stream_ordering": 20},
        ],
    }
    lake = lake_of(tmp_path, rows, 60)
    lines = [note("owned", 0)]
    lines += [attempt(A, pdu(at, "!r"), took_ms=at) for at in range(1, 61) if at not in (30, 31)]
    lines += [attempt(B, pdu(at, "!r")) for at in range(1, 21)]
    lines += [attempt(B, pdu(21, "!r"), outcome="failing", status=500, attempt=n) for n in (1, 2)]
    lines += [attempt(C, pdu(60, "!r"), outcome="busy", status=503, attempt=1)]
    # The first day that it shows, and the last one that it does not.
    lines += [note("delivered", 60 - days * DAY_MS // EVENT_MS, A) for days in (DAYS - 1, DAYS)]
    write(tmp_path / "ledger", "fedsender.b.000001.jsonl", *lines)
    ingest_ledger(spark, lake, tmp_path)
    figures, text = make(spark, lake, tmp_path)
    assert answer(text) == (
        "answer bad: Not known what is lost: no audit yet. Ill: 2 of 3 servers."
    )
    assert figures.audited.counts == {}
    # A day has twenty events, and the newest hour one; each was answered after a second.
    assert [point["pdus"] for _, point in sorted(figures.days.items())] == [0, 38, 19, 20, 1]
    newest = figures.hours[figures.newest_ms]
    assert (newest["pdus"], newest["failed"], newest["messages"]) == (1, 1, 1)
    assert (newest["p50"], newest["p99"]) == (1000, 1000)
    assert figures.level.share == 1.0
    assert [(row["server"], row["failed"], row["attempts"]) for row in figures.worst] == [
        (C, 1, 1), (B, 2, 22)]  # fmt: skip

    run_audit(spark, lake, tmp_path)
    figures, text = make(spark, lake, tmp_path)
    assert answer(text).startswith("answer bad: 2 missing of 120 deliveries. Ill: 2 of 3 servers.")
    (loss,) = figures.losses
    assert (loss["pairs"], loss["servers"], loss["room_id"], loss["server"]) == (2, 1, "!r", A)
    assert loss["event_id"] == "$30"
    assert loss["why"].startswith("no attempt in the ledger; the low-water mark N counts")
    assert figures.owed == {B: {"today": 1, "1 day": 20, "2-3 days": 19}}
    assert [each["missing"] for each in figures.audits] == [2]
    read = Page(text)
    assert read.addresses == []
    assert "script" not in read.tags
    assert read.tags.count("svg") == 2 + len(figures.worst)
    assert not re.search(r"https?:|@import|url\(", text)


# --- pages of made-up figures ---------------------------------------------------------------------


def figures_of(**changed: Any) -> Figures:
    level = Level(5000, 0.99, 0.995, 10, 1)
    plain = Figures("hs.example", made_ms=10 * DAY_MS, upto=1, newest_ms=0, hours={}, days={},
                    level=level, servers=0, ill=0, worst=[], owed={})  # fmt: skip
    return replace(plain, **changed)


def point(**changed: Any) -> dict[str, Any]:
    return {"attempts": 100, "failed": 0, "pdus": 7, "messages": 100, "p50": 3, "p90": 30,
            "p99": 300, **changed}  # fmt: skip


def audited(**changed: int) -> Audited:
    """Of five deliveries and these."""
    counts = dict.fromkeys(schemas.FATES, 0) | {"delivered": 5} | changed
    return Audited(1, sum(counts.values()), counts, 0, [])


def test_the_first_sentence_is_green_or_red() -> None:
    quiet = figures_of(audited=audited(), servers=2)
    assert answer(page(quiet)) == "answer: Nothing is lost of 5 deliveries. Ill: 0 of 2 servers."
    lost = page(replace(quiet, audited=audited(missing=1)))
    assert answer(lost).startswith("answer bad: 1 missing of 6 deliveries. Ill")
    both = replace(
        audited(missing=1, before_ledger=2), stray=2, unknown_hosts=3, purged=4, rejects=5
    )
    assert answer(page(replace(quiet, audited=both))).startswith(
        "answer bad: 1 missing of 6 deliveries; 2 cannot be judged; 3 events have servers that"
        " cannot be told; 4 events were purged before they were read; 5 lines of the ledger could"
        " not be read; 2 went astray or out of order. Ill"
    )
    before = replace(quiet, audited=audited(before_ledger=2))
    said = "Nothing is lost of 5 deliveries; 2 cannot be judged"
    assert answer(page(before)).startswith(f"answer: {said}. Ill")
    no_evidence = replace(before, audited=replace(before.audited, unproven="no segment"))
    assert answer(page(no_evidence)).startswith(f"answer bad: {said}; no segment. Ill")


def test_four_figures_have_those_of_a_day_before() -> None:
    then = {
        "at_ms": 8 * DAY_MS,
        "expected": 1,
        **audited().counts,
        "missing": 4,
        "pending": 1,
        "parked": 2,
    }
    later = then | {"at_ms": 10 * DAY_MS - HOUR_MS, "missing": 9}
    fates = {"missing": 1_234, "pending": 2}
    figures = figures_of(audited=audited(**fates), audits=[then, later], ill=3, servers=30)
    text = lined(page(figures))
    cards = re.findall(r'"card"><b(?: class="bad")?>(.*?)</b> (.*?) <small>(.*?)<', text)
    assert cards == [
        ("1,234", "deliveries missing", "4 a day before"),
        ("3", "servers ill", f"of 30 in {DAYS} days"),
        ("2", "events owed", "3 a day before"),
        ("99.5 %", "of servers have a message within 5 s", "this week; goal: 99.0 %"),
    ]
    # The history names the audits that found another number.
    assert re.findall(r'"missing">(\d+)<', text) == ["9", "4"]


def named(name: str) -> str:
    """A page on which a server, a room and an event have this name."""
    failures = dict.fromkeys(schemas.FAILURES, 1)
    worst = failures | {"server": name, "attempts": 2, "failed": 1, "p90": None, "ill_ms": 0,
                        "strip": {datetime.date(1970, 1, 1): 0.5}}  # fmt: skip
    loss = {"why": name, "day": name, "room_id": name, "pairs": 1, "servers": 1, "of_why": 1,
            "server": name, "event_id": name}  # fmt: skip
    return page(
        figures_of(
            server_name=name, worst=[worst], losses=[loss], owed={name: {"today": 1}},
            audited=replace(audited(**dict.fromkeys(schemas.FATES, 1)), rejects=1),
        )
    )  # fmt: skip


def test_a_server_with_a_nasty_name_stays_text() -> None:
    """A name changes no element of the page, and is shown letter for letter."""
    plain, nasty = Page(named(A)), Page(named(NASTY))
    assert nasty.tags == plain.tags
    assert nasty.text == plain.text.replace(A, NASTY)


def test_each_cell_says_which_column_it_is_of() -> None:
    """A phone has no room for columns."""
    tables = re.findall(r"<table>.*?</table>", lined(named(A)))
    assert len(tables) == 3
    for table in tables:
        columns = re.findall(r"<th>(.*?)</th>", table)
        rows = re.findall(r"<tr> <td.*?</tr>", table)
        assert [re.findall(r'<td data-name="(.*?)"', row) for row in rows] == [columns]


def test_time_without_attempts_is_shown_as_such() -> None:
    """No bar, and no line that leads across: latency is not known then. Its scale is logarithmic,
    with ticks that have a unit."""
    newest = 20 * DAY_MS
    hours = {newest - hour * HOUR_MS: point() for hour in (0, 1, 3)}
    hours[newest - 2 * HOUR_MS] = point(messages=0, p50=None, p90=None, p99=None)
    text = lined(page(figures_of(newest_ms=newest, hours=hours)))
    (panel, _) = re.findall(r"<svg.*?</svg>", text)
    lines = [line.split() for line in re.findall(r'points="(.*?)"', panel)]
    assert [len(line) for line in lines] == [1, 2, 1, 2, 1, 2]
    assert panel.count("<rect") == 4
    heights = [float(line[0].split(",")[1]) for line in lines[::2]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    ticks = re.findall(r'text-anchor="end"[^>]*>([^<]*)<', panel)
    assert ticks == ["7", "0", "1 ms", "10 ms", "100 ms", "1 s"]


def test_a_report_of_nothing(spark: "SparkSession", tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", "us.example", create=True)
    with pytest.raises(PipelineError, match="nothing was ingested"):
        make(spark, lake, tmp_path)
    lake = lake_of(tmp_path, {"destinations": [{"destination": A}]}, 1)
    with pytest.raises(PipelineError, match=r"no/report.html: cannot be written"):
        make(spark, lake, tmp_path / "no")
    _, text = make(spark, lake, tmp_path)
    assert "The ledger has no attempts." in text
    assert "No attempt has failed." in text
