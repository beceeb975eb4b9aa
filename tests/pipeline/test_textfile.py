"""The figures of a run for Prometheus."""

import datetime
import os
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.pipeline.worlds import US

from fedsender.config import from_values
from fedsender_pipeline.audit import Audited
from fedsender_pipeline.lake import open_lake
from fedsender_pipeline.schemas import AUDIT, FATES
from fedsender_pipeline.textfile import write_textfile


def test_prometheus_can_read_the_file_and_no_draft_is_left(tmp_path: Path) -> None:
    path = tmp_path / "fedsender.prom"
    values = {"server_name": US, "signing_key": "key", "pipeline": {"textfile": str(path)}}
    config = from_values(values, directory=tmp_path)
    fates = dict.fromkeys(FATES, 0) | {"missing": 3, "pending": 2}
    found = Audited(7, 15, fates | {"before_ledger": 8}, unknown_hosts=9, shown=[], stray=4)
    lake = open_lake(tmp_path / "lake", US, create=True)
    pending = {30: 0, 31: 2}
    nothing: dict[str, Any] = dict.fromkeys(AUDIT.columns, 0)
    rows = [
        nothing
        | {"server": "a.example", "room_id": "!r", "day": datetime.date(2026, 1, day)}
        | {"pending": number}
        for day, number in pending.items()
    ]
    with lake.commit() as commit:
        commit.append_rows(AUDIT, rows)
    before = os.umask(0o077)
    try:
        write_textfile(config, lake, found)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    samples = {
        (sample.name.removeprefix("fedsender_pipeline_"), sample.labels.get("fate")): sample
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }
    assert {name for name, _ in samples} == {
        "last_success_timestamp_seconds",
        "judged",
        "unknown_hosts",
        "missing",
        "stray",
        "unproven",
        "deliveries",
        "pending_since_timestamp_seconds",
    }
    assert abs(samples["last_success_timestamp_seconds", None].value - time.time()) < 60
    assert samples["missing", None].value == samples["deliveries", "missing"].value == 3
    assert samples["deliveries", "pending"].value == 2
    assert samples["stray", None].value == 4
    assert (samples["judged", None].value, samples["unknown_hosts", None].value) == (7, 9)
    assert samples["pending_since_timestamp_seconds", None].value == 1_769_817_600
    assert {each.labels["server_name"] for each in samples.values()} == {US}
    with lake.commit() as commit:
        commit.clear(AUDIT)
    write_textfile(config, lake, found)
    assert "pending_since_timestamp_seconds{" not in path.read_text()
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "lake"}
