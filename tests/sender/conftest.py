"""Fixtures for tests of the whole sender."""

from pathlib import Path

import pytest
import structlog
from tests.sender.harness import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """An empty world; for tests on the virtual clock."""
    return World(tmp_path)


@pytest.fixture(autouse=True)
def plain_log() -> None:
    """Logged errors without the colourful traceback, which takes seconds to draw."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["level", "event"]),
        ]
    )
