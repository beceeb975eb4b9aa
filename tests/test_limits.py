"""How many files and how much memory a configuration needs, and who is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedsender.admin.display import mib
from fedsender.config import Federation, Sending
from fedsender.limits import MAX_CONSUMERS, OF_RELAY, of_daemon, resident_bytes

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
    assert OF_RELAY.files > 10 * MAX_CONSUMERS


def test_the_memory_of_a_process_is_known_where_the_system_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = resident_bytes()
    assert before is not None
    held = b"x" * (64 * MIB)
    after = resident_bytes()
    assert after is not None
    assert len(held) // 2 < after - before < 2 * len(held)

    def absent(path: Path) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_bytes", absent)
    assert resident_bytes() is None
    sizes = (None, MIB * 3 // 2, 64 * MIB, 1500 * MIB + 1)
    assert [mib(size) for size in sizes] == ["?", "1.5", "64", "1,500"]


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
    assert ("too_few_files_allowed" in done.stdout) == raised.startswith("False")
