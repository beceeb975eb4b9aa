"""docs/homeservers.md: what a stranger pastes from it works."""

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

PAGE = Path(__file__).parents[2] / "docs" / "homeservers.md"
OPENSSL = """#!{python}
import sys
import trustme
made = trustme.CA()
leaf = made.issue_cert("localhost")
leaf.private_key_pem.write_to_path("remote.key")
leaf.cert_chain_pems[0].write_to_path("remote.pem")
made.cert_pem.write_to_path("remote.pem", append=True)
"""


def test_five_steps_from_nothing_to_a_pdu_at_a_remote(tmp_path: Path) -> None:
    """All that stands there is pasted at once; only the ports are others."""
    section = PAGE.read_text().partition("## From nothing to a PDU")[2].partition("\n## ")[0]
    steps = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(steps) == 5
    script = "".join(steps).replace("admin:\n", f"admin:\n  listen: 127.0.0.1:{free_port()}\n")
    remote = free_port()
    for given, port in (("8449", remote), ("9095", free_port())):
        script = script.replace(given, str(port))
    commands, home = tmp_path / "commands", tmp_path / "home"
    for directory in (commands, home):
        directory.mkdir()
    (commands / "openssl").write_text(OPENSSL.format(python=sys.executable))
    (commands / "openssl").chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], str(commands)])
    with (home / "told").open("w+") as told:
        pasted = subprocess.Popen(
            ["bash", "-c", script],
            cwd=home,
            env={**os.environ, "PATH": path},
            stdout=told,
            stderr=told,
            start_new_session=True,
        )
        try:
            code = pasted.wait(120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pasted.pid, signal.SIGKILL)
            pasted.wait()
    text = (home / "told").read_text()
    assert "config.yaml: nothing wrong" in text
    assert '"tokens":[1,2]' in text
    assert f"localhost:{remote} delivered" in text
    assert '"body":"Hello"' in text
    assert '"body":"Hello again"' in text
    assert '"signatures":{"hs.example"' in text
    assert code == 0, text
