"""Fixtures for tests of the admin endpoint."""

from pathlib import Path

import pytest
from tests.sender.harness import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An empty world; for tests on the virtual clock."""
    return World(tmp_path)
