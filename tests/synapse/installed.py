"""A Synapse from the package index, in a virtual environment of its own, installed once.

Synapse is never imported: it runs as the other process, so nothing of it enters our tree.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The one place that says which Synapse the tests talk to.
REQUIREMENTS = ("matrix-synapse[redis]==1.163.2", "psycopg2-binary==2.9.13")


def cache_directory() -> Path:
    """Where downloads of the tests outlive a run: $FEDSENDER_TEST_CACHE, else the user's cache.

    A user without a writable home gets `.cache` in the checkout.
    """
    chosen = os.environ.get("FEDSENDER_TEST_CACHE")
    if chosen:
        directory = Path(chosen)
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    try:
        directory = Path.home() / ".cache" / "fedsender-tests"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        directory = Path(__file__).parents[2] / ".cache"
        directory.mkdir(exist_ok=True)
    return directory


def synapse_python() -> Path:
    """The interpreter of a virtual environment that holds Synapse; made by the first caller.

    Several test runs may ask at once: one installs, the others wait for it. Raises RuntimeError
    with pip's last lines if the installation fails.
    """
    wanted = hashlib.sha256(repr((REQUIREMENTS, sys.version_info[:2])).encode()).hexdigest()[:12]
    home = cache_directory() / f"synapse-{wanted}"
    with _locked(home.with_suffix(".lock")):
        # The interpreter it was made with may be gone since.
        if not (home / "ready").exists() or not (home / "bin" / "python").exists():
            _install(home)
    return home / "bin" / "python"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [*pip, "install", "--quiet", *REQUIREMENTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"Synapse could not be installed:\n{done.stdout[-2000:]}")
    (home / "ready").touch()
