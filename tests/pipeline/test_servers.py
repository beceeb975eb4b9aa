"""Server names as columns: the same answers as the daemon's functions give."""

from typing import TYPE_CHECKING, Any

from tests.pipeline.worlds import US

from fedsender.config import from_values
from fedsender.matrix import server_of, shard_of
from fedsender.pipeline import servers

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
    rows = frame.select("user", servers.server_of(frame["user"]).alias("server")).collect()

    def said(user: str) -> str | None:
        try:
            return server_of(user)
        except ValueError:
            return None

    assert {row["user"]: row["server"] for row in rows} == {user: said(user) for user in users}


def test_who_is_allowed_and_which_shard_sends(spark: "SparkSession", tmp_path: "Path") -> None:
    """`Config.allows` and Synapse's hash, over a column."""
    lists: list[dict[str, Any]] = [
        {},
        {"allow": ["*.example", "matrix.?rg"]},
        {"deny": ["*.BAD.example", "[::1]:8448", "a-b.example"]},
        {"deny": ["example.com", "1.2.3.4", "*a*.b*d.example", "[0:*]"]},
        {"homeserver": {"domain_whitelist": ["matrix.org", "example.com"]}},
        {
            "destinations": {
                "defaults": {"deny": True},
                "overrides": [
                    {"match": "*.example", "deny": False},
                    {"match": "a.*", "deny": True},
                    {"match": "a.bad.example", "max_pdus": 1},
                ],
            }
        },
    ]
    frame = spark.createDataFrame([(name,) for name in NAMES], "server STRING")
    configs = [
        from_values({"server_name": US, "signing_key": "key", **each}, directory=tmp_path)
        for each in lists
    ]
    shards = (1, 2, 3, 4, 7, 1000)
    rows = frame.select(
        "server",
        *(
            servers.allowed(frame["server"], config).alias(f"allowed{index}")
            for index, config in enumerate(configs)
        ),
        *(servers.shard_of(frame["server"], n).alias(f"shard{n}") for n in shards),
    ).collect()
    for row in rows:
        for index, config in enumerate(configs):
            assert row[f"allowed{index}"] == config.allows(row["server"]), (index, row["server"])
        for n in shards:
            assert row[f"shard{n}"] == shard_of(row["server"], n)
