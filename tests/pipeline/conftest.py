"""Of the pipeline's tests: the seeds of random worlds."""

import os
from random import Random

import pytest


@pytest.fixture(params=range(int(os.environ.get("WORLDS", "1"))))
def seed() -> int:
    """Of another world at every run; `SEED=n` says which, `WORLDS=n` how many."""
    return int(os.environ.get("SEED") or Random().getrandbits(32))
