"""Fixtures for tests of the admin endpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.sender.harness import World

if TYPE_CHECKING:
    from tests.admin.chromium import Chromium


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An empty world; for tests on the virtual clock."""
    return World(tmp_path)


@pytest.fixture(scope="session")
def chromium() -> Iterator["Chromium"]:
    """A browser; a test that wants it carries `program("chromium", "chromium")`."""
    from tests.admin.chromium import Chromium

    with Chromium() as browser:
        yield browser
