"""The relay's fan-out: how fast a log goes out to 1, 4 and 16 consumers, all from its start.

The relay is the measured process; the consumers are one of their own, come by a Unix socket, and
count lines. The floor is the same bytes out of memory, sent in the same pieces to as many
connections with nothing around it.
"""

import re
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import trio

from fedsender.config import Config, from_values
from fedsender.config.values import parse_address
from fedsender.embedded.facts import prepare
from fedsender.runtime import real_runtime
from fedsender_lab.bench.append import row
from fedsender_lab.bench.meter import Meter, Options, median
from fedsender_lab.testing.children import BenchFailed, Child, Order, open_child, serve_orders
from fedsender_relay.daemon import RelayDaemon, open_relay
from fedsender_relay.line_server import open_doors
from fedsender_relay.line_stream import SEND_PIECE

CONSUMERS: Final = (1, 4, 16)
SERVER: Final = "hs.example"
PATIENCE_S: Final = 600.0
_ROW: Final = b"\nRDATA events "
_SEAM: Final = len(_ROW) - 1


async def relay_fanout(options: Options) -> dict[str, Any]:
    """Lines per second in total, by how many consumers there are.

    `options.events` is how many records of about 1 KB each of them gets.
    """
    groups: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="fedsender-bench-") as name:
        config = _config(Path(name))
        doors = open_doors([parse_address(f"unix:{name}/relay.sock")])
        async with (
            open_relay(config, real_runtime(), doors) as relay,
            open_child("tests.benchmarks.relay_fanout") as child,
        ):
            await _fill(relay, options.events)
            for consumers in CONSUMERS:
                rounds = [
                    await _round(relay, child, f"{name}/relay.sock", consumers)
                    for _ in range(options.rounds)
                ]
                groups[str(consumers)] = {
                    figure: median([each[figure] for each in rounds], 2) for figure in rounds[0]
                }
    return {"records": options.events, "consumers": groups}


def _config(directory: Path) -> Config:
    relay = {"directory": "relay", "disk_reserve": 0, "snapshot_every": "52w"}
    values = {"server_name": SERVER, "signing_key": "none", "relay": relay}
    return from_values(values, directory=directory)


async def _fill(relay: RelayDaemon, records: int) -> None:
    for first in range(1, records + 1, 1000):
        numbers = range(first, min(first + 1000, records + 1))
        await relay.log.writer.append_all(
            [prepare([row(number)], key=b"%016d" % number) for number in numbers]
        )


async def _round(relay: RelayDaemon, child: Child, path: str, consumers: int) -> dict[str, float]:
    head = relay.log.head
    # The names of the round before are taken until its connections are gone.
    while relay.hub.sessions:  # noqa: ASYNC110
        await trio.sleep(0.01)
    meter = Meter()
    with trio.move_on_after(PATIENCE_S) as scope:
        got = await child.ask("follow", path=path, consumers=consumers, head=head)
    if scope.cancelled_caught or got["lines"] != consumers * head:
        raise BenchFailed(f"{consumers} consumers did not get {head} lines each")
    used = meter.read()
    floor = await _floor(got["bytes"] // consumers, consumers)
    return {
        "lines_per_s": got["lines"] / used.wall_s,
        "mib_per_s": got["bytes"] / used.wall_s / 2**20,
        "cpu_us_per_line": used.cpu_s / got["lines"] * 1e6,
        "floor_lines_per_s": got["lines"] / floor,
        "ratio": used.wall_s / floor,
    }


async def _floor(size: int, consumers: int) -> float:
    """Seconds for as many bytes out of memory, sent and thrown away in this process."""
    piece = bytes(SEND_PIECE)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(consumers):
            ours, theirs = trio.socket.socketpair()
            nursery.start_soon(_send, trio.SocketStream(ours), piece, size)
            nursery.start_soon(_drain, trio.SocketStream(theirs))
    return trio.current_time() - began


async def _send(stream: trio.SocketStream, piece: bytes, size: int) -> None:
    async with stream:
        for _ in range(0, size, len(piece)):
            await stream.send_all(piece)


async def _drain(stream: trio.SocketStream) -> None:
    async with stream:
        while await stream.receive_some(SEND_PIECE):
            pass


# --- the consumers' process -----------------------------------------------------------------------


async def _follow(path: str, consumers: int, head: int) -> Order:
    counted = [0, 0]
    async with trio.open_nursery() as nursery:
        for number in range(consumers):
            nursery.start_soon(_consume, path, f"consumer-{number}", head, counted)
    return {"lines": counted[0], "bytes": counted[1]}


async def _consume(path: str, name: str, head: int, counted: list[int]) -> None:
    """Read until level, and hold everything."""
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(f"SERVER {SERVER}\nNAME {name}\n".encode())
        greeting = b""
        while not (relay := re.search(rb"^RELAY 1 (\w+) .*\n", greeting, re.MULTILINE)):
            greeting += await stream.receive_some(4096)
        asked = f"REPLICATE events 0 {relay[1].decode()}\n"
        await stream.send_all(asked.encode())
        level, tail = b"POSITION events %d\n" % head, b"\n"
        while level not in tail:
            data = await stream.receive_some(SEND_PIECE)
            if not data:
                return
            # What began in the last piece and ends in this one is counted once.
            seam = tail[-_SEAM:] + data
            counted[0] += seam.count(_ROW) - tail[-_SEAM:].count(_ROW)
            counted[1] += len(data)
            tail = seam[-200:]
        await stream.send_all(b"ACK events %d\n" % head)


if __name__ == "__main__":
    trio.run(partial(serve_orders, {"follow": _follow}))
