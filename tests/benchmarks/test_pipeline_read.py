"""The benchmark of reading measures a read of everything."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.benchmarks.pipeline_read import _config, _read, _state_rows, fill

from fedsender_pipeline import ingest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.long
def test_all_rows_are_read_and_counted_by_one_and_by_two(
    tmp_path: Path, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "ROWS_PER_COMMIT", 900)
    url = f"sqlite:///{tmp_path}/homeserver.db"
    fill(url, 1_500)
    for connections in (1, 2):
        told = _read(_config(tmp_path, url, connections), url, spark, os.getpid())
        assert told["events"]["rows"] == 1_500
        assert told["state"]["rows"] == _state_rows(1_500) > 300
