"""What the README promises a newcomer, and what runs on a new machine, are the same commands."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readmes_test_command_is_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    commands = [line.strip() for line in readme if line.startswith("    python3 -m venv ")]
    (test_command,) = [command for command in commands if command.endswith(" -m pytest")]

    assert test_command in (ROOT / ".ci" / "run").read_text().splitlines()
