"""One Spark for all tests: starting one takes longer than most of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedsender.config import Spark
from fedsender.pipeline.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    # Small plans: planning costs more than running them, and compiling them more than both.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # With one compiler the room for its code is 48 MiB, which planning alone fills again and again.
    "spark.driver.extraJavaOptions": (
        "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=192m"
    ),
}


@contextmanager
def open_spark(logs: Path) -> Iterator["SparkSession"]:
    """A session on this machine, with two threads."""
    with spark_session(Spark(master="local[2]", settings=_SETTINGS), "tests", logs) as session:
        yield session
