"""Other people's software from the package index, each in a virtual environment of its own.

Synapse and the encrypted client are never imported: they run as the other process, so nothing of
them enters our tree. Each is installed once and kept.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NEWEST_SYNAPSE = "1.163.2"
# The one place that says which Synapse the tests talk to; `tests.synapse.versions` says another.
SYNAPSE = os.environ.get("FEDSENDER_TEST_SYNAPSE", NEWEST_SYNAPSE)
_ENCRYPTED_CLIENT = ("matrix-nio[e2e]==0.26.0",)
_DATABASE_DRIVER = "psycopg2-binary==2.9.13"
# An old Synapse takes any newer release of what it depends on, and does not run with all of them.
_OF_ITS_TIME = (
    "attrs<24",
    "bcrypt<4.2",
    "cryptography<43",
    "jsonschema<4.22",
    "pillow<10.4",
    "prometheus-client<0.20",
    "psycopg2-binary==2.9.9",
    "pydantic<2.7",
    "pyopenssl<24.2",
    "service-identity<24.2",
    "setuptools<70",
    "treq<24",
    "twisted<24.4",
    "txredisapi<1.4.11",
)
# What is installed with a release: that of the first line which it is not older than.
_RESTS: Sequence[tuple[tuple[int, int], Sequence[str]]] = (
    ((1, 163), (_DATABASE_DRIVER,)),
    ((1, 130), ("prometheus-client<0.24", "txredisapi<1.4.11", _DATABASE_DRIVER)),
    ((0, 0), _OF_ITS_TIME),
)


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
    """The interpreter of a virtual environment that holds Synapse."""
    release = tuple(int(part) for part in SYNAPSE.split(".")[:2])
    rest = next(rest for since, rest in _RESTS if release >= since)
    return python_with("synapse", (f"matrix-synapse[redis]=={SYNAPSE}", *rest))


def encrypted_client_python() -> Path:
    """The interpreter of a virtual environment that holds matrix-nio with its encryption."""
    return python_with("nio", _ENCRYPTED_CLIENT)


def python_with(name: str, requirements: Sequence[str]) -> Path:
    """The interpreter of a virtual environment that holds these; made by the first caller.

    Several test runs may ask at once: one installs, the others wait for it. Raises RuntimeError
    with pip's last lines if the installation fails.
    """
    requirements = tuple(requirements)
    wanted = hashlib.sha256(repr((requirements, sys.version_info[:2])).encode()).hexdigest()[:12]
    home = cache_directory() / f"{name}-{wanted}"
    with _locked(home.with_suffix(".lock")):
        # The interpreter it was made with may be gone since.
        if not (home / "ready").exists() or not (home / "bin" / "python").exists():
            _install(home, requirements)
    return home / "bin" / "python"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(home: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [*pip, "install", "--quiet", *requirements],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(requirements)} could not be installed:\n{done.stdout[-2000:]}"
        )
    (home / "ready").touch()
