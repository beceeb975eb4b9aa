"""A terminal, in which a newcomer types the commands of the pages."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EACH_LOOK_S = 0.5


class Terminal:
    """Where the newcomer types."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = directory
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "FEDSENDER_CONFIG": "try/config.yaml"}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command.split(),
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def until(self, command: str, wanted: str) -> str:
        """Type it until it says that: a killed daemon does not answer, and servers come back."""
        end_s = time.monotonic() + 60
        while True:
            said = self.run(command).stdout
            if re.search(wanted, said, re.M):
                return said
            assert time.monotonic() < end_s, (command, said)
            time.sleep(EACH_LOOK_S)

    @contextmanager
    def running(self, command: str) -> Iterator[subprocess.Popen[str]]:
        """A command in the other terminal."""
        with subprocess.Popen(
            command.split(),
            cwd=self._directory,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
