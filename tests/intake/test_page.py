"""docs/homeservers.md: what a stranger pastes from it works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import free_port

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "homeservers.md"
LISTENS = """
until (exec 3<> /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do sleep 0.1; done
"""
"""What a human need not say, who is slower."""
CURL = """#!{python}
import sys
import httpx
given = sys.argv[1:]
assert [given[0], given[1], given[4]] == ["-s", "-H", "-d"], given
name, _, value = given[2].partition(": ")
print(httpx.post(given[3], headers={{name: value}}, content=given[5]).text)
"""
"""Where a machine has none."""
OPENSSL = """#!{python}
import sys
import trustme
made = trustme.CA()
leaf = made.issue_cert("localhost")
leaf.private_key_pem.write_to_path("remote.key")
leaf.cert_chain_pems[0].write_to_path("remote.pem")
made.cert_pem.write_to_path("remote.pem", append=True)
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory with those of the page's commands that the machine may lack."""
    path = tmp_path / "commands"
    path.mkdir()
    for name, text in (("curl", CURL), ("openssl", OPENSSL)):
        (path / name).write_text(text.format(python=sys.executable))
        (path / name).chmod(0o755)
    return path


def test_five_steps_from_nothing_to_a_pdu_at_a_remote(tmp_path: Path, commands: Path) -> None:
    """All that stands there is pasted, step by step; only the ports are others."""
    section = PAGE.read_text().partition("## From nothing to a PDU")[2].partition("\n## ")[0]
    steps = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(steps) == 5
    ports = {given: free_port() for given in (8449, 9095)}
    steps[1] += LISTENS.format(port=8449)
    steps[2] += LISTENS.format(port=9095)
    steps[2] = steps[2].replace("admin:\n", f"admin:\n  listen: 127.0.0.1:{free_port()}\n")
    script = "\n".join(["set -eu", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT", *steps])
    for given, port in ports.items():
        script = script.replace(str(given), str(port))
    home = tmp_path / "home"
    home.mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], str(commands)])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=home,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = done.stdout
    assert "config.yaml: nothing wrong" in told, done.stderr
    assert '"tokens":[1,2]' in told
    assert f"localhost:{ports[8449]} delivered" in told
    assert '"body":"Hello"' in told
    assert '"body":"Hello again"' in told
    assert '"signatures":{"hs.example"' in told
    assert done.returncode == 0, done.stderr
