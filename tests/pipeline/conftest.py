"""One Spark for all tests of the pipeline: starting one takes longer than most of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fedsender.config import Spark
from fedsender.pipeline.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    # Small plans: planning costs more than running them.
    "spark.sql.codegen.wholeStage": "false",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """A session on this machine, with two threads."""
    logs: Path = tmp_path_factory.mktemp("spark")
    with spark_session(Spark(master="local[2]", settings=SETTINGS), "tests", logs) as session:
        yield session
