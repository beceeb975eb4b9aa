"""The relay's figures: `python -m tests.benchmarks.relay fanout` (or `fullsync`)."""

import sys
from typing import Final

from fedsender.bench import Bench, main

COMMAND: Final = "python -m tests.benchmarks.relay"
BENCHES: Final = {
    # Events are records that each consumer gets.
    "fanout": Bench("tests.benchmarks.relay_fanout", servers=1, events=50_000, rounds=3),
    # Events are rooms, servers those in each room: 800,000 pairs.
    "fullsync": Bench("tests.benchmarks.relay_fullsync", servers=40, events=20_000, rounds=1),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], BENCHES, COMMAND))
