"""Files that a configuration names, looked at before anything starts."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import trustme

from fedsender.cli import run_command
from fedsender.config import load

KEY = "ed25519 a_1 " + 43 * "A" + "\n"


def config_with(directory: Path, text: str) -> Path:
    """A configuration with these settings, and a signing key that is one."""
    (directory / "key").write_text(KEY)
    config = directory / "config.yaml"
    config.write_text(f"server_name: hs.example\nsigning_key: key\n{text}\n")
    return config


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("federation: {ca_file: FILE}", "federation.ca_file"),
        ("federation: {ca_file: good.pem, more_ca_files: [FILE]}", "federation.more_ca_files[0]"),
        ("destinations: {defaults: {ca_file: FILE}}", "destinations.defaults.ca_file"),
        (
            "destinations: {overrides: [{match: a}, {match: b, ca_file: FILE}]}",
            "destinations.overrides[1].ca_file",
        ),
        ("feed: {redis: {tls: true, ca_file: FILE}}", "feed.redis.ca_file"),
    ],
)
def test_authorities_that_cannot_be_used_are_named_and_nothing_starts(
    tmp_path: Path, text: str, place: str
) -> None:
    """A daemon without authorities calls every server unreachable, and tells the homeserver so."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "good.pem"))
    (tmp_path / "empty.pem").write_text("# no certificate\n")
    for name, reason in (("missing", "No such file"), ("empty.pem", "holds no certificates")):
        config = config_with(tmp_path, text.replace("FILE", name))
        for words in (["config", "check"], ["run"]):
            err = io.StringIO()
            with redirect_stderr(err):
                assert run_command([*words, "-c", str(config)]) == 2
            (line,) = err.getvalue().splitlines()
            assert f" {place}: {tmp_path / name}: " in line
            assert reason in line
    assert load(config_with(tmp_path, text.replace("FILE", "good.pem"))).file_problems() == []


def test_a_signing_key_that_is_none_is_found_before_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with(tmp_path, "")
    (tmp_path / "key").write_text("ed25519 a_1 short\n")
    assert run_command(["config", "check", "-c", str(config)]) == 2
    assert f"{tmp_path}/key:1: " in capsys.readouterr().err
