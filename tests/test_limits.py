"""How many files and how much memory a configuration needs, and who is told."""

import subprocess
import sys

import pytest

from fedsender.config import Federation, Sending
from fedsender.config.sections import Relay
from fedsender.limits import of_daemon, of_relay

MIB = 2**20


def test_the_caps_of_the_configuration_decide() -> None:
    few = of_daemon(Federation(max_connections=100), Sending(max_in_flight=100))
    many = of_daemon(
        Federation(max_connections=20_000), Sending(max_in_flight=100, window_bytes=512 * MIB)
    )
    assert few.files >= 100 + 1000
    assert many.files >= 20_000 + 1000
    assert 1000 * MIB < few.bytes < 2000 * MIB
    # What a connection costs with its transaction, 91 KB, and what may stand in queues.
    assert many.bytes > 20_000 * 91_000 + 512 * MIB + 256 * MIB
    assert of_relay(Relay(max_consumers=1000)).files > 5 * of_relay(Relay()).files


RAISED = """
import resource, sys
from fedsender.limits import raise_file_limit
soft, hard, files = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_file_limit(files), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("soft", "hard", "files", "raised"),
    [(256, 900, 800, "True 800"), (256, 900, 2000, "False 900"), (512, 900, 300, "True 512")],
)
def test_a_process_gives_itself_the_files_that_it_may_have_and_says_if_they_are_too_few(
    soft: int, hard: int, files: int, raised: str
) -> None:
    words = [sys.executable, "-c", RAISED, str(soft), str(hard), str(files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    # The warning goes to standard output, where no log is configured.
    assert done.stdout.splitlines()[-1] == raised
    assert ("too few files" in done.stdout) == raised.startswith("False")
