"""Server names as columns: the same answers as the daemon's functions give."""

from typing import TYPE_CHECKING, Any

import pytest
from tests.pipeline.worlds import US

from fedsender.config import from_values
from fedsender.matrix import server_of
from fedsender_pipeline import intervals, schemas
from fedsender_pipeline.lake import open_lake

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

NAMES = [
    "matrix.org", "example.com", "[::1]:8448", "1.2.3.4", "kde.org", "mozilla.org", "EXAMPLE.com",
    "localhost:8448", "a.bad.example", "b.bad.example", "a-b.example", "x.good.example", US,
    "example.com:443", "a.bad.example.", "B.bad.example.:8448", "[0::1]:08448", "[0::1]:443",
    "[::FFFF:102:304]:443", "1.2.3.4:1", "xa.bad.examples",
]  # fmt: skip


def test_servers_of_users_are_what_follows_the_first_colon(spark: "SparkSession") -> None:
    users = ["@a:b", "@a:b:8448", "@a:[::1]:1", "@a", "@a:", "", ":x"]
    frame = spark.createDataFrame([(user,) for user in users], "user STRING")
    rows = frame.selectExpr("user", f"{intervals.server_of('user')} as server").collect()

    def said(user: str) -> str | None:
        try:
            return server_of(user)
        except ValueError:
            return None

    assert {row["user"]: row["server"] for row in rows} == {user: said(user) for user in users}


def test_only_servers_that_we_may_send_to_are_looked_at(
    spark: "SparkSession", tmp_path: "Path"
) -> None:
    """By every list, and by the hash that shares servers among senders: as the daemon says it."""
    lists: list[dict[str, Any]] = [
        {},
        {"allow": ["*.example", "matrix.?rg"]},
        {"deny": ["*.BAD.example", "[::1]:8448", "a-b.example"]},
        {"deny": ["example.com", "1.2.3.4", "*a*.b*d.example", "[0:*]"]},
        {"allow": ["matrix.org", "example.com"]},
        {"allow": ["nobody.example"]},
        {"allow": ["*.example", "a.*"], "deny": ["a.bad.example"]},
    ]
    frame = spark.createDataFrame([(name,) for name in NAMES], "server STRING")
    for each in lists:
        values = {"server_name": US, "signing_key": "key", **each}
        config = from_values(values, directory=tmp_path)
        rows, servers = intervals.sent_to(frame, config.allows)
        found = {row["server"] for row in rows.collect()}
        assert found == {*servers} == {name for name in NAMES if config.allows(name)}
    assert 0 < len(found) < len(NAMES)


def test_a_list_may_have_thousands_of_names(spark: "SparkSession", tmp_path: "Path") -> None:
    """No plan grows with it: Spark's stack would be too small."""
    names = [f"bad{number}.example" for number in range(2_000)]
    values = {"server_name": US, "signing_key": "key", "deny": names}
    config = from_values(values, directory=tmp_path)
    some = [("bad7.example",), ("good.example",), ("bad1999.example",)]
    frame = spark.createDataFrame(some, "server STRING")
    assert [row["server"] for row in intervals.sent_to(frame, config.allows)[0].collect()] == [
        "good.example"
    ]


@pytest.mark.parametrize("most", [0, 1, 200_000])
def test_rows_of_some_rooms_whether_these_are_few_or_many(
    spark: "SparkSession", tmp_path: "Path", monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Of more keys than Arrow holds rows against, Spark finds the rows."""
    monkeypatch.setattr(intervals, "MOST_KEYS", most)
    lake = open_lake(tmp_path, US, create=True)
    pairs = (("!a", "1"), ("!b", "2"), ("!c", "3"), ("!c", "4"))
    rows = [{"room_id": room, "server": server, "first": 1, "last": 2} for room, server in pairs]
    with lake.commit() as commit:
        commit.append_rows(schemas.TOLD_SERVERS, rows)
    for wanted, expected in (["!a", "!c", "!a"], "134"), (["!b"], "2"), (["!d"], ""), ([], ""):
        keys = spark.createDataFrame([(name,) for name in wanted], "room_id STRING")
        found = intervals.among_rows(spark, lake, schemas.TOLD_SERVERS, intervals.few(keys))
        assert "".join(sorted(row["server"] for row in found.collect())) == expected
