"""Of the pipeline's tests: the seeds of random worlds."""

import os
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

import pytest
from tests.pipeline.lakes import MANY_ROWS, planning

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(params=range(int(os.environ.get("WORLDS", "1"))))
def seed(spark: "SparkSession") -> Iterator[int]:
    """Of another world at every run; `SEED=n` says which, `WORLDS=n` how many.

    For every second one plans are made as for many rows.
    """
    seed = int(os.environ.get("SEED") or Random().getrandbits(32))
    with planning(spark, MANY_ROWS if seed % 2 else {}):
        yield seed
