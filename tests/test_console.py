"""What is printed cannot do anything to a terminal, wherever it comes from."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsender.admin.client import AdminClient
from fedsender.cli import run_command
from fedsender.console import safe, say_json, say_text
from fedsender_pipeline import audit, ledger_lines
from fedsender_pipeline import commands as pipeline_commands
from fedsender_pipeline.audit import Audited

HOSTILE = "x\x1b[2J\x1b]0;title\x07\x9b31m\r\n\u202ey\x7f\u2028\udc80"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("server_name: hs.example\nsigning_key: key\n")
    return str(path)


def check(printed: str) -> None:
    """Every line can be seen, and the text that was given came out on one of them."""
    lines = printed.split("\n")
    assert all(line.isprintable() for line in lines), printed
    assert r"x\x1b[2J\x1b]0;title\x07\x9b31m\r\n\u202ey\x7f\u2028\udc80" in printed


def test_text_is_made_safe_and_what_can_be_seen_stays_as_it_is() -> None:
    check(safe(HOSTILE))
    assert safe("Zürich 東京 [red]x[/red] \\n") == "Zürich 東京 [red]x[/red] \\n"


def test_lines_of_ours_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    say_text("a:\n  b: \x1b[2J\n")
    assert capsys.readouterr().out == "a:\n  b: \\x1b[2J\n"


def test_an_object_is_one_line_that_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"text": HOSTILE})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"text": HOSTILE}
    assert printed.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["pause", "--pattern", "*"], {"servers": [HOSTILE]}),
        (["wake", "--all"], {"woken": [], "left_alone": {HOSTILE: "nothing is owed to it"}}),
        (["purge", "a.example"], {"purged": HOSTILE}),
        (
            ["quarantine", "release", "1"],
            {"released": [], "dropped": [], "kept": [HOSTILE], "refused": [], "more": False},
        ),
        (
            ["redeliver", "a.example", "$a"],
            {
                "accepted": 0,
                "refused": [{"destination": "a", "event_id": HOSTILE, "reason": "gone"}],
            },
        ),
    ],
)
def test_a_daemons_answer(
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    answer: dict[str, Any],
) -> None:
    monkeypatch.setattr(AdminClient, "post", lambda *_path, body: answer)
    run_command([*command, "-c", config])
    check(capsys.readouterr().out)


def test_what_an_audit_names(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"server": "a.example", "event_id": HOSTILE, "day": "2026-01-31", "reasons": ["none"]}
    counts = {"missing": 1, "before_ledger": 0}
    stray = row | {"why": HOSTILE, "line": "0"}
    found = Audited(1, 1, counts, unknown_hosts=0, shown=[row], stray=1, strays=[stray])

    @contextmanager
    def job(*_: object, **__: object) -> Iterator[tuple[object, ...]]:
        loaded = SimpleNamespace(ledger=SimpleNamespace(directory=None))
        yield SimpleNamespace(), SimpleNamespace(), loaded, SimpleNamespace()

    monkeypatch.setattr(pipeline_commands, "job", job)
    monkeypatch.setattr(ledger_lines, "read_ledger", lambda *_: None)
    monkeypatch.setattr(ledger_lines, "fetched", lambda *_: [])
    monkeypatch.setattr(audit, "audit", lambda *_: found)
    assert run_command(["pipeline", "audit", "-c", config]) == 1
    check(capsys.readouterr().out)
