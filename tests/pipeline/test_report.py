"""The report: one page that needs nothing else, and says what has changed."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.pipeline.test_audit import (
    Rows,
    attempt,
    config_of,
    event,
    ingest_ledger,
    lake_of,
    pdu,
)
from tests.pipeline.test_audit import run as run_audit
from tests.pipeline.test_ledger_lines import write

from fedsender.pipeline import PipelineError, schemas
from fedsender.pipeline.lake import Lake, open_lake
from fedsender.pipeline.report import POINTS, Figures, last_figures, page, report, step_for
from fedsender.pipeline.session import showing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

A, B = "a.example", "b.example"
NASTY = "</script><script>alert(1)</script>&.example"


class Page(HTMLParser):
    """What a browser would make of it: the elements, and that all of them are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
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

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def make(spark: "SparkSession", lake: Lake, directory: Path) -> tuple[Figures, str]:
    path = directory / "report.html"
    with showing(quiet=True) as steps:
        figures = report(spark, lake, config_of(directory), steps, path)
    return figures, path.read_text()


def test_the_page_shows_what_is_in_the_lake(spark: "SparkSession", tmp_path: Path) -> None:
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
    lines = [attempt(A, pdu(at, "!r"), took_ms=at) for at in range(1, 61) if at != 30]
    lines += [attempt(B, pdu(at, "!r")) for at in range(1, 21)]
    lines += [attempt(B, pdu(21, "!r"), outcome="failing", status=500, attempt=n) for n in (1, 2)]
    write(tmp_path / "ledger", "f.b.000001.jsonl", *lines)
    ingest_ledger(spark, lake, tmp_path)
    figures, text = make(spark, lake, tmp_path)
    assert "No audit yet" in text
    assert "This is the first one here." in text
    assert sum(point["pdus"] for point in figures.series) == 79
    assert figures.outcomes == {"delivered": 79, "failing": 2}
    (ill,) = figures.illnesses
    assert (ill["server"], ill["ended_ms"], ill["attempts"]) == (B, None, 2)
    assert [(row["server"], row["failed"]) for row in figures.worst] == [(B, 2)]

    run_audit(spark, lake, tmp_path)
    figures, text = make(spark, lake, tmp_path)
    assert figures.fates["missing"] == 1
    assert figures.owed == {B: {"today": 1, "1 day": 20, "2-3 days": 19}}
    assert ">$30<" in text
    cells = re.sub(' data-name="[^"]*"', "", text)
    assert '<td>events missing</td><td class="n">0</td><td class="n">1</td>' in cells
    assert last_figures(tmp_path / "report.html") == figures
    read = Page(text)
    assert read.addresses == []
    assert read.tags.count("svg") == 4
    assert not re.search(r"https?:|@import|url\(", text)


def test_a_server_with_a_nasty_name_stays_text() -> None:
    ill = {"server": NASTY, "began_ms": 0, "ended_ms": None, "attempts": 1, "outcome": NASTY}
    worst = {"server": NASTY, "attempts": 2, "failed": 1, "p90": None, "outcome": "failing"}
    missing = {"server": NASTY, "event_id": NASTY, "day": "2026-01-01", "reasons": [NASTY]}
    point = {"at_ms": 0, "attempts": 2, "failed": 1, "pdus": 1, "bytes": 1}
    figures = Figures(
        server_name=NASTY, made_ms=0, upto=1, first_ms=0, last_ms=9, step_ms=60_000,
        series=[point | {"p50": None, "p90": 1, "p99": 1}], outcomes={"failing": 1},
        owed={NASTY: {"today": 1}}, worst=[worst], illnesses=[ill], missing=[missing],
        fates=dict.fromkeys(schemas.FATES, 1),
    )  # fmt: skip
    text = page(figures, figures)
    assert Page(text).tags.count("script") == 1
    assert "alert(1)" in text
    # Where a phone has no room for columns, each cell says which it is of.
    for table in re.findall(r'<table class="stacked">.*?</table>', text):
        (head,) = re.findall(r"<thead>(.*?)</thead>", table)
        columns = re.findall(r"<th[^>]*>(.*?)</th>", head)
        assert len(columns) > 3
        for row in re.findall(r"<tr>(?:<td).*?</tr>", table):
            assert re.findall(r'<td[^>]* data-name="(.*?)"', row) == columns
    assert [
        len(re.findall("<th[ >]", each)) for each in re.findall("<table>.*?</table>", text)
    ] == [3]


def test_a_report_of_nothing(spark: "SparkSession", tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake", "us.example", create=True)
    with pytest.raises(PipelineError, match="nothing was ingested"):
        make(spark, lake, tmp_path)
    lake = lake_of(tmp_path, {"destinations": [{"destination": A}]}, 1)
    with pytest.raises(PipelineError, match=r"no/report.html: cannot be written"):
        make(spark, lake, tmp_path / "no")
    (tmp_path / "report.html").write_text(
        '<script type="application/json" id="figures">{}</script>'
    )
    _, text = make(spark, lake, tmp_path)
    assert "The ledger has no attempts." in text
    assert "This is the first one here." in text


def test_curves_have_points_that_can_be_told_apart() -> None:
    for span_ms in (0, 1, 3_600_000, 86_400_000, 400 * 86_400_000, 40_000 * 86_400_000):
        step = step_for(span_ms)
        assert span_ms // step <= POINTS
        assert step >= 1_000


def test_time_without_attempts_is_shown_as_such() -> None:
    """Nothing was delivered then, and latency is not known: no line leads across. Seconds are told
    where steps are that short, and of many names the first."""
    point = {"attempts": 1, "failed": 0, "pdus": 7, "bytes": 1, "p50": 3, "p90": 3, "p99": 3}
    series = [point | {"at_ms": at_ms} for at_ms in (5_000, 6_000, 8_000)]
    figures = Figures(
        "hs", made_ms=0, upto=1, first_ms=5_000, last_ms=8_500, step_ms=1_000, series=series,
        outcomes={"delivered": 3}, owed={}, worst=[], illnesses=[],
    )  # fmt: skip
    ill = [{"server": f"s{n:02}", "began_ms": 5_000, "ended_ms": None, "attempts": 1,
            "outcome": "busy"} for n in range(32)]  # fmt: skip
    text = page(replace(figures, illnesses=ill), figures)
    deliveries, latency = re.findall(r"<h2>(?:Del|Lat).*?</section>", text)
    lines = [line.split() for line in re.findall(r'points="(.*?)"', deliveries)]
    assert [len(line) for line in lines] == [4, 4]
    assert len({place.split(",")[1] for place in lines[0]}) == 2
    lines = [line.split() for line in re.findall(r'points="(.*?)"', latency)]
    assert [len(line) for line in lines] == [2, 1, 2, 1, 2, 1]
    assert "1970-01-01 00:00:05 UTC" in deliveries
    assert "per second" in deliveries
    assert re.search(r"Fallen ill: s00, .*, s29, and 2 more<", text)
    empty = page(replace(figures, first_ms=None, last_ms=None, series=[], outcomes={}), None)
    assert "nothing in the ledger yet" in empty
