"""Fuzzing of everything that a relay and its consumers read: lines, rows, files, bodies.

`python -m tests.relay.fuzz_lines N [TARGET...] [--seed S]` gives each target N inputs: mostly good
ones that were spoiled a little. Held: no error but the parser's own, no input that takes seconds,
no memory that grows.
"""

import argparse
import json
import logging
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
import trio
import trio.testing
from tests.relay.fuzz_peers import (
    EPOCH,
    ODD,
    fuzz_bodies,
    fuzz_fetches,
    fuzz_parts,
    spoil,
    spoil_json,
)
from tests.relay.log_support import hosts, pdu, to_device

from fedsender.embedded.facts import BadRow, parse_relay_row, prepare, prepare_ephemeral
from fedsender.replication.commands import BadLine, Rdata, RdataBatches, UnsendableCommand
from fedsender_relay.protocol import OLD, Connection, lines_of, rows_of, without_edus
from fedsender_relay.snapshot import (
    BadSnapshot,
    FileInfo,
    file_name,
    format_manifest,
    parse_manifest,
)

SLOW_S: Final = 5.0
GROWTH_BYTES: Final = 256 * 2**20

LINES: Final = [
    b"SERVER hs.example",
    b"RELAY 1 9f1c0a77d2e4b358 events 120001 184220",
    b"SHARD 1 3",
    b"PING 1790000000000",
    b"NAME sender-2",
    b"AUTH secret",
    b"REPLICATE events 184211 9f1c0a77d2e4b358",
    b"REPLICATE events NOW",
    b"REPLICATE ",
    b"POSITION events 184220",
    b"ACK events 184220",
    b"RESYNC events GAP 120001 184220",
    b"JOIN events",
    b"SNAPSHOT events 00000000000000180000.9f1c0a77 180000 48 11423110 " + b"6b1f" * 16,
    b"FETCH 00000000000000180000.9f1c0a77 manifest.json 0",
    b"FILE hosts-07-6b1f6b1f6b1f6b1f.jsonl.gz 65536 5214",
    b"ERROR SLOW too slow",
    b"REMOTE_SERVER_UP b.example",
    *lines_of(prepare([pdu(1), hosts(1), to_device(1)]).texts, 184212).splitlines(),
    b'RDATA typing 5 ["!r:hs.example",["@a:hs.example"]]',
]
ROWS: Final = [
    pdu(1),
    hosts(1),
    to_device(1),
    ["redaction", ["$a", "$b"]],
    ["edu", ["device_list", "b.example", "@a:hs.example", "DEV", None]],
    ["edu", ["device_list", "b.example", "@a:hs.example", "DEV", {"keys": {}}]],
]
NOW_ROWS: Final = [
    ("typing", ["!r:hs.example", ["@a:hs.example"]]),
    ("receipts", ["!r:hs.example", "m.read", "@a:hs.example", "$e", None, {"ts": 1}]),
    ("presence", ["@a:hs.example", "online", 5, None, True, ["b.example"]]),
]
# --- the targets ----------------------------------------------------------------------------------


def fuzz_lines(rng: random.Random) -> None:
    """Bytes of a peer, in pieces: commands, or BadLine; what was understood can be said again."""
    data = b"\n".join(rng.choices(LINES, k=rng.randint(1, 4))) + b"\n"
    data = spoil(rng, data, ODD)
    peer = Connection()
    batches = RdataBatches(max_rows=10, max_bytes=10_000)
    at = 0
    while at < len(data):
        size = rng.choice((1, 7, 200, 10_000)) if len(data) < 2000 else 10_000
        peer.receive_data(data[at : at + size])
        at += size
        try:
            while (command := peer.next_command()) is not None:
                if isinstance(command, Rdata):
                    batches.add(command)
                    parse_relay_row(command.row)
                said = peer.encode(command).decode().rstrip("\n")
                assert OLD.parse(said) == command, said
        except (BadLine, BadRow, UnsendableCommand):
            continue
        except ValueError as error:
            # A row may hold a number that Python will not write out; then it cannot be sent.
            if "integer string conversion" not in str(error):
                raise


def fuzz_rows(rng: random.Random) -> None:
    """A homeserver's rows: prepared, or BadRow; what is prepared comes back as it was."""
    rows = rng.choices(ROWS, k=rng.randint(1, 3))
    spoiled = rows if rng.random() < 0.2 else spoil_json(rng, rows)
    if not isinstance(spoiled, list):
        return
    try:
        prepared = prepare(spoiled)
    except BadRow:
        pass
    else:
        lines = lines_of(prepared.texts, rng.randint(1, 2**63 - 1))
        assert lines.count(b"\n") == len(spoiled)
        assert [json.loads(row) for row in rows_of(lines)] == spoiled
        assert b'["edu"' not in b"".join(
            line.split(b" ", 3)[3][:7] for line in without_edus(lines).splitlines()
        )
    stream, row = rng.choice(NOW_ROWS)
    try:
        prepare_ephemeral(stream, spoil_json(rng, row))
    except BadRow:
        return


def _manifest() -> bytes:
    digest = "6b1f" * 16
    files = [
        FileInfo(file_name(table, part, digest), table, part, 5, 100, digest)
        for table in ("hosts", "events")
        for part in range(3)
    ]
    return format_manifest(180_000, EPOCH, 1_790_000_000_000, files)


_MANIFEST: Final = _manifest()
_MANIFEST_JSON: Final = json.loads(_MANIFEST)


def fuzz_manifests(rng: random.Random) -> None:
    """A manifest: what it describes stays in its directory, or BadSnapshot."""
    if rng.random() < 0.5:
        content = spoil(rng, _MANIFEST, ODD)
    else:
        content = json.dumps(spoil_json(rng, _MANIFEST_JSON)).encode()
    root = Path("/relay/snap/x")
    try:
        info = parse_manifest(content, root)
    except BadSnapshot:
        return
    for file in info.files:
        assert info.path(file.name).parent == root
        assert "/" not in file.name


TARGETS: Final[dict[str, Callable[[random.Random], Awaitable[None] | None]]] = {
    "lines": fuzz_lines,
    "rows": fuzz_rows,
    "manifests": fuzz_manifests,
    "bodies": fuzz_bodies,
    "parts": fuzz_parts,
    "fetches": fuzz_fetches,
}


def fuzz(target: str, count: int, seed: int) -> float:
    """Give a target `count` inputs; seconds that the slowest took. Raises what is wrong."""
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    async def main() -> None:
        nonlocal slowest
        for number in range(count):
            rng = random.Random(f"{seed} {target} {number}")
            begun = time.perf_counter()
            try:
                if (waiting := TARGETS[target](rng)) is not None:
                    await waiting
            except BaseException:
                print(f"{target}: input {number} of seed {seed}", file=sys.stderr)
                raise
            slowest = max(slowest, time.perf_counter() - begun)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert slowest < SLOW_S, f"an input of {target} took {slowest:.1f} s"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < GROWTH_BYTES, f"{target} took {grown} bytes of memory"
    return slowest


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # What is wrong with an input is said of each.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for target in options.targets or TARGETS:
        begun = time.perf_counter()
        slowest = fuzz(target, options.count, options.seed)
        seconds = time.perf_counter() - begun
        print(
            f"{target}: {options.count} inputs in {seconds:.0f} s, slowest {slowest * 1000:.1f} ms"
        )


if __name__ == "__main__":
    main()
