"""Configurations of older releases, written anew."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender import config
from fedsender.cli import run_command
from fedsender.config import loads
from fedsender.config.upgrade import upgraded

OLD = """\
# Ours since 2026.
server_name: hs.example
signing_key: key   # Synapse's own

federation:
  # Slow networks.
  connect_timeout: 30s
  max_connections: 3000

notify:
  url: https://chat.example/hook

  events:
  - down
# The relay was here.
destinations:
  overrides:
  - match: a.example
    backoff:
      jitter: 0.5
    max_pdus: 3
"""

NEW = """\
# Ours since 2026.
server_name: hs.example
signing_key: key   # Synapse's own

federation:
  # Slow networks.
  # Gone: it is ten seconds; remove it
  # connect_timeout: 30s
  max_connections: 3000

# Gone: a timer and the exit code of `fedsender status` do this: docs/monitoring.md, Mail
# notify:
#   url: https://chat.example/hook
#
#   events:
#   - down
# The relay was here.
destinations:
  overrides:
  - match: a.example
    # Gone: jitter: a wait is up to 20 % longer or shorter; remove it
    # backoff:
    #   jitter: 0.5
    max_pdus: 3
"""


def test_what_is_gone_becomes_a_comment_and_all_else_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(OLD)
    assert run_command(["config", "upgrade", "-c", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out == NEW
    assert [line.split(": ")[2] for line in printed.err.splitlines()] == [
        "federation.connect_timeout",
        "notify",
        "destinations.overrides[0].backoff",
    ]
    assert loads(printed.out, directory=tmp_path).federation.max_connections == 3000
    # Once more it has nothing to do.
    file.write_text(printed.out)
    assert run_command(["config", "upgrade", "-c", str(file)]) == 0
    assert capsys.readouterr() == (NEW, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("federation: {connect_timeout: 30s, max_connections: 9}", ":3:14: federation.connect"),
        ("federation: {connect_timeout: 30s}\nlogs: {}", "upgraded:5:1: logs: unknown setting"),
    ],
)
def test_what_cannot_be_done_is_said_with_its_line(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"server_name: hs.example\nsigning_key: key\n{text}\n")
    assert run_command(["config", "upgrade", "-c", str(file)]) == 2
    assert expected in capsys.readouterr().err


@given(st.sets(st.sampled_from(sorted(config._GONE)), min_size=1), st.booleans())
def test_whatever_is_gone_the_new_file_can_be_used(names: set[str], spaced: bool) -> None:
    """Each as the only setting of its section, or beside others that are gone, too."""
    tree: dict[str, object] = {"server_name": "hs.example", "signing_key": "key"}
    for name in names:
        *sections, last = name.split(".")
        place = tree
        for each in sections:
            place = place.setdefault(each, {})  # type: ignore[assignment]
        place[last] = 1

    def lines(values: dict[str, object], indent: str) -> list[str]:
        found: list[str] = []
        for key, value in values.items():
            nested = isinstance(value, dict)
            found += [f"{indent}{key}:" if nested else f"{indent}{key}: {value}", *[""] * spaced]
            if isinstance(value, dict):
                found += lines(value, indent + "  ")
        return found

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "config.yaml")
        file.write_text("\n".join(lines(tree, "")) + "\n")
        made = upgraded(file)
        loads(made.text, directory=Path(directory))
    assert made.notes
