"""Worlds for scenarios."""

from pathlib import Path

import pytest
import structlog
from tests.sender.synapse_world import SynapseWorld


@pytest.fixture
def world(tmp_path: Path) -> SynapseWorld:
    """A Synapse-shaped database; for tests on the virtual clock."""
    return SynapseWorld(tmp_path)


@pytest.fixture(autouse=True)
def plain_log() -> None:
    """Logged errors without the colourful traceback, which takes seconds to draw."""
    structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
