"""The configuration of the data pipeline: where the lake is, and on which Spark jobs run."""

import re
from pathlib import Path
from typing import Final

from pydantic import Field

from fedsender.config.policy import Contradictions, Section
from fedsender.config.values import Database, FilePath, SecretPath

_SETTING: Final = re.compile(r"spark\.[A-Za-z0-9_.-]{1,200}")
_OURS: Final = ("spark.master", "spark.app.name")
_SECRET: Final = "spark.authenticate.secret"


class Spark(Section):
    """Which Spark runs the jobs."""

    master: str = Field(
        default="local[*]",
        min_length=1,
        max_length=1000,
        description="local[N] runs them here on N cores; or a cluster's URL, such as"
        " spark://host:7077.",
    )
    settings: dict[str, str] = Field(
        default_factory=dict,
        description="Spark's own settings, by their names, such as spark.driver.memory: 4g.",
    )

    def contradictions(self) -> Contradictions:
        for name in self.settings:
            if not _SETTING.fullmatch(name):
                yield ("settings", name), "must be a name such as spark.driver.memory"
            elif name in _OURS:
                yield ("settings", name), "is not set here (spark.master is pipeline.spark.master)"
            elif name == _SECRET:
                # Settings go onto Java's command line.
                text = "would be seen by every user of this machine: put it into"
                yield ("settings", name), f"{text} spark-defaults.conf, mode 0600"


class Pipeline(Section):
    """The data pipeline: `fedsender pipeline`."""

    lake: FilePath = Field(
        default=Path("lake"),
        description="Directory of the lake; on a cluster, one that every worker sees too. No URL.",
    )
    health: FilePath = Field(
        default=Path("health.sqlite3"),
        description="What `pipeline health` found out about servers; the daemon reads it, if it is"
        " there.",
    )
    relay: Database | None = Field(
        default=None,
        description="The relay's database, a file or a URL: events and rooms are read there, not in"
        " our own store.",
    )
    relay_password_file: SecretPath | None = Field(
        default=None, description="File with the password of that database's user."
    )
    spark: Spark = Field(default_factory=Spark, description="Which Spark runs the jobs.")

    def contradictions(self) -> Contradictions:
        for place, text in self.spark.contradictions():
            yield ("spark", *place), text
