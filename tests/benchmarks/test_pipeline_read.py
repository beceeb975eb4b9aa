"""The benchmark of reading measures a read of everything."""

import os
from pathlib import Path

import pytest
from tests.benchmarks.pipeline_read import _config, _read, _state_rows, fill

from fedsender_pipeline import ingest


@pytest.mark.long
def test_all_rows_are_read_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "ROWS_PER_COMMIT", 900)
    url = f"sqlite:///{tmp_path}/homeserver.db"
    fill(url, 1_500)
    told = _read(_config(tmp_path, url), url, os.getpid())
    assert told["events"]["rows"] == 1_500
    assert told["state"]["rows"] == _state_rows(1_500) > 300
