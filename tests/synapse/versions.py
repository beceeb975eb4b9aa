"""The core of the tests with real Synapses against one release of each schema version.

    python -m tests.synapse.versions [--only RELEASE]...

Each release is installed once into a virtual environment of its own (with dependencies of its time
where it does not run with today's), and both homeservers of the tests run it. Prints a table; exits
with 1 if anything failed. What it printed last is in docs/switching.md.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.synapse.installed import NEWEST_SYNAPSE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# One release for each SCHEMA_VERSION (synapse/storage/schema/__init__.py of the release) from the
# oldest that is supported to the newest. No release has 90.
RELEASES: Mapping[str, int] = {
    "1.100.0": 84,
    "1.110.0": 85,
    "1.112.0": 86,
    "1.114.0": 87,
    "1.118.0": 88,
    "1.126.0": 89,
    "1.128.0": 91,
    "1.135.0": 92,
    "1.145.0": 93,
    NEWEST_SYNAPSE: 94,
}

_REAL = "test_real_synapse.py::"
PARTS: Mapping[str, Sequence[str]] = {
    "PDUs": (
        _REAL + "test_a_message_of_a_is_read_at_b",
        _REAL + "test_what_was_sent_while_b_was_down_arrives_in_order_when_b_is_up",
        _REAL + "test_a_kill_while_b_is_slow_loses_nothing",
        _REAL + "test_the_rest_of_synapse_is_told_that_b_fails_and_that_it_is_back",
        _REAL + "test_a_kicked_server_gets_the_kick_and_nothing_later",
    ),
    "EDUs": ("test_real_edus.py",),
    "there and back": ("test_switching.py",),
}


def run_part(release: str, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether these tests pass with that release, and the end of what they print."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(HERE / test) for test in tests)],
        cwd=ROOT,
        env=os.environ | {"FEDSENDER_TEST_SYNAPSE": release},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode == 0, done.stdout[-3000:]


def rows(releases: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """For each release whether all went well, and its row of the table."""
    for release in releases:
        began = time.monotonic()
        cells, fine = [], True
        for name, tests in PARTS.items():
            passed, output = run_part(release, tests)
            fine &= passed
            cells.append("passed" if passed else "FAILED")
            if not passed:
                print(f"--- {release}, {name} ---\n{output}", file=sys.stderr, flush=True)
        took = f"{time.monotonic() - began:.0f} s"
        yield fine, f"| {release} | {RELEASES[release]} | {' | '.join(cells)} | {took} |"


def main() -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="tests.synapse.versions")
    parser.add_argument("--only", action="append", choices=RELEASES, metavar="RELEASE")
    chosen = parser.parse_args().only or list(RELEASES)
    print(f"| Synapse | schema | {' | '.join(PARTS)} | took |")
    print("|---|---|" + "---|" * (len(PARTS) + 1), flush=True)
    fine = True
    for passed, row in rows(chosen):
        fine &= passed
        print(row, flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
