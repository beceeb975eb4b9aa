"""docs/homeservers.md and small-homeserver.md: what a stranger pastes from them works."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.servers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.program("curl", "curl")]

DOCS = Path(__file__).parents[2] / "docs"
OPENSSL = """#!{python}
import sys
import trustme
made = trustme.CA()
leaf = made.issue_cert("localhost")
leaf.private_key_pem.write_to_path("remote.key")
leaf.cert_chain_pems[0].write_to_path("remote.pem")
made.cert_pem.write_to_path("remote.pem", append=True)
"""


def steps(page: str, heading: str) -> list[str]:
    """What there is to paste below a heading of a page."""
    section = (DOCS / page).read_text().partition(f"# {heading}")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


FIRST = steps("homeservers.md", "From nothing to a PDU")


def pasted(script: str, directory: Path, remote: int) -> str:
    """What the commands print; only their ports are others. Raises AssertionError if they fail."""
    for given, port in (("8449", remote), ("9095", free_port()), ("8020", free_port())):
        script = script.replace(given, str(port))
    script = script.replace("admin:\n", f"admin:\n  listen: 127.0.0.1:{free_port()}\n")
    commands, home = directory / "commands", directory / "home"
    for each in (commands, home):
        each.mkdir()
    (commands / "openssl").write_text(OPENSSL.format(python=sys.executable))
    (commands / "openssl").chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], str(commands)])
    with (home / "told").open("w+") as told:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=home,
            env={**os.environ, "PATH": path},
            stdout=told,
            stderr=told,
            start_new_session=True,
        )
        try:
            code = shell.wait(120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    text = (home / "told").read_text()
    assert code == 0, text
    return text


def test_five_steps_from_nothing_to_a_pdu_at_a_remote(tmp_path: Path) -> None:
    """All that stands there is pasted at once."""
    assert len(FIRST) == 5
    remote = free_port()
    text = pasted("".join(FIRST), tmp_path, remote)
    assert "config.yaml: nothing wrong" in text
    assert '"tokens":[1,2]' in text
    assert f"localhost:{remote} delivered" in text
    assert '"body":"Hello"' in text
    assert '"body":"Hello again"' in text
    assert '"signatures":{"hs.example"' in text


def test_a_small_homeserver_changes_its_key_and_gets_over_a_restore(tmp_path: Path) -> None:
    script = "".join([*FIRST[:3], *steps("small-homeserver.md", "A small homeserver")])
    text = pasted(script, tmp_path, free_port())
    assert "Up to date" in text
    both, new = (json.loads(each) for each in re.findall(r'^\{"old_verify.*$', text, re.MULTILINE))
    assert (both["old_verify_keys"], sorted(both["verify_keys"])) == (
        {},
        ["ed25519:a_1", "ed25519:a_2"],
    )
    assert [*new["old_verify_keys"], *new["verify_keys"]] == ["ed25519:a_1", "ed25519:a_2"]
    assert re.search(r"signs with +ed25519:a_2$", text, re.MULTILINE)
    assert text.count("After the backup") == 2
    assert text.index("After the backup") < text.rindex("After the restore")
    got = (tmp_path / "home" / "remote.txt").read_text()
    [event] = re.findall(r'"By the new key".*?"signatures":\{"hs.example":\{"(.*?)"', got)
    assert event == "ed25519:a_2"
