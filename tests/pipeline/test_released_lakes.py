"""A lake of each released version is read as if it were new: what it lacks is null.

`lakes/VERSION.json` has the tables of a release, as `python -m tests.pipeline.test_released_lakes`
prints them. The lake is made from it.
"""

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.worlds import US

from fedsender_pipeline import vacuum
from fedsender_pipeline.lake import MANIFEST, Lake, open_lake
from fedsender_pipeline.schemas import ATTEMPTS, LAKE_VERSION, TABLES, LakeTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAKES = Path(__file__).with_name("lakes")
DAY = datetime.date(2026, 1, 31)
VALUES: dict[str, Any] = {
    "BIGINT": 7,
    "INT": 7,
    "BOOLEAN": True,
    "STRING": "x",
    "DATE": DAY,
    "BINARY": b"x",
    "ARRAY<STRING>": ["x"],
    "ARRAY<BIGINT>": [7],
    "ARRAY<ARRAY<STRING>>": [["x"]],
    "MAP<STRING,BIGINT>": [("x", 7)],
}


def rows_of(table: LakeTable) -> list[dict[str, Any]]:
    """Two rows, of two keys."""
    row = {name: VALUES[kind] for name, kind in table.columns.items()}
    other = dict(row)
    for name in table.key:
        other[name] = {"x": "y", 7: 8}.get(row[name], row[name])
    return [row, other]


def lake_of(release: dict[str, Any], directory: Path, tables: dict[str, LakeTable]) -> Lake:
    """A lake as that version left it, with two files in each table, of one row each."""
    lake = open_lake(directory, US, create=True)
    with lake.commit() as commit:
        for table in tables.values():
            for row in rows_of(table):
                commit.append_rows(table, [row])
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps(manifest | {"lake": release["lake"]}))
    return open_lake(directory, US)


@pytest.mark.parametrize("path", sorted(LAKES.iterdir()), ids=lambda path: path.stem)
def test_a_lake_of_a_released_version(
    spark: "SparkSession", tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = json.loads(path.read_text())
    tables = {
        name: LakeTable(
            name, given["columns"], tuple(given["required"]), given["part"], TABLES[name].key
        )
        for name, given in release["tables"].items()
    }
    for name, table in tables.items():
        now = TABLES[name]
        assert now.columns.items() >= table.columns.items(), f"{name}: a column is gone or differs"
        assert set(now.required) <= set(table.required), f"{name}: what is new may be null"
        assert now.part == table.part, name
    # A table that has got a column since.
    newer = replace(ATTEMPTS, columns=ATTEMPTS.columns | {"added": "ARRAY<BIGINT>"})
    monkeypatch.setitem(TABLES, "attempts", newer)
    lake = lake_of(release, tmp_path, tables)
    monkeypatch.setattr(vacuum, "MANY_FILES", 2)
    for _ in range(2):
        for table in TABLES.values():
            old = tables.get(table.name)
            nothing = dict.fromkeys(table.columns)
            expected = [] if old is None else [nothing | row for row in rows_of(old)]
            assert lake.read(table).to_pylist() == expected, table.name
            frame = lake.frame(spark, table)
            assert frame.columns == list(table.columns)
            assert frame.count() == len(expected)
            if table is newer:
                assert {each["added"] for each in frame.collect()} == {None}
        vacuum.vacuum(lake)
        assert {len(files) for files in lake.manifest.tables.values()} == {1}
    assert json.loads((tmp_path / MANIFEST).read_text())["lake"] == LAKE_VERSION


def _release() -> dict[str, Any]:
    tables = {
        table.name: {"columns": table.columns, "required": table.required, "part": table.part}
        for table in TABLES.values()
    }
    return {"lake": LAKE_VERSION, "tables": tables}


if __name__ == "__main__":
    print(json.dumps(_release(), indent=1))
