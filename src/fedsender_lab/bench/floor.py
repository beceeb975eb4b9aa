"""The floor: the cost of a signed transaction without a sender around it.

A keep-alive TLS exchange with the same receivers, of the same size both ways, on the daemon's TLS
stream, and one Ed25519 signature. Nothing is parsed, kept, retried or written down.
"""

import ssl
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, islice
from typing import Any

import orjson
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.federation.dialing import TlsPolicy
from fedsender_lab.bench.homeserver import SERVER_NAME, Room, signer
from fedsender_lab.bench.meter import Meter, Options, median
from fedsender_lab.bench.receivers import FLOOR, answer_for
from fedsender_lab.bench.stage import Servers, Stage, open_stage

AT_ONCE = 20
OpenStream = Callable[[str, int], Awaitable[trio.abc.Stream]]


class Floor:
    """Connections to all receiving servers, for exchanges; made by `open_floor`."""

    def __init__(self, seed: str, now_ms: int) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(b64decode(seed))
        self._room = Room(0, signer(seed), now_ms)
        self._bodies: dict[int, bytes] = {}
        self.streams: list[tuple[str, trio.abc.Stream]] = []

    async def connect(self, name: str, open_stream: OpenStream) -> None:
        """One connection, kept until the end."""
        host, port = name.rsplit(":", 1)
        self.streams.append((name, await open_stream(host, int(port))))

    async def measure(self, exchanges: int, pdus: int) -> float:
        """CPU time of one exchange with so many PDUs, in ms: the mean of so many exchanges."""
        self._body(pdus)
        meter = Meter()
        workers = min(AT_ONCE, len(self.streams))
        async with trio.open_nursery() as nursery:
            for worker in range(workers):
                share = len(range(worker, exchanges, workers))
                nursery.start_soon(self._exchange, self.streams[worker::workers], share, pdus)
        return meter.read().cpu_s * 1000 / exchanges

    async def measure_wall(self, exchanges: int) -> float:
        """How long one exchange with 1 PDU takes, one at a time, in ms: the median."""
        self._body(1)
        seconds = []
        for stream in islice(cycle(self.streams), exchanges):
            started = trio.current_time()
            await self._exchange([stream], 1, 1)
            seconds.append(trio.current_time() - started)
        return median(seconds, 6) * 1000

    async def _exchange(self, streams: Sequence[Any], exchanges: int, pdus: int) -> None:
        body = self._body(pdus)
        ending = b"\r\n\r\n" + answer_for(pdus)
        for _, (name, stream) in zip(range(exchanges), cycle(streams), strict=False):
            signature = b64encode(self._key.sign(body)).rstrip(b"=").decode()
            head = (
                f"PUT {FLOOR} HTTP/1.1\r\nhost: {name}\r\nuser-agent: fedsender/floor\r\n"
                "content-type: application/json\r\n"
                f'authorization: X-Matrix origin="{SERVER_NAME}",destination="{name}",'
                f'key="ed25519:a_bench",sig="{signature}"\r\ncontent-length: {len(body)}\r\n\r\n'
            )
            await stream.send_all(head.encode() + body)
            answer = await stream.receive_some()
            while not answer.endswith(ending):
                answer += await stream.receive_some()

    def _body(self, pdus: int) -> bytes:
        if pdus not in self._bodies:
            events = [self._room.say().content for _ in range(pdus)]
            transaction = {"origin": SERVER_NAME, "origin_server_ts": 0, "pdus": events}
            self._bodies[pdus] = orjson.dumps(transaction, option=orjson.OPT_SORT_KEYS)
        return self._bodies[pdus]


@asynccontextmanager
async def open_floor(
    stage: Stage, names: Sequence[str], *, of_trio: bool = False
) -> AsyncIterator[Floor]:
    """Connected to these receiving servers while the body runs.

    `of_trio`: by `trio.SSLStream`, for comparison.
    """
    floor = Floor(stage.seed, stage.runtime.now_ms())
    context = TlsPolicy(stage.ca_file).context()
    network = stage.runtime.network

    async def by_ours(host: str, port: int) -> trio.abc.Stream:
        return await network.start_tls(await network.open_tcp(host, port), context, host)

    async def by_trio(host: str, port: int) -> trio.abc.Stream:
        plain = await trio.open_tcp_stream(host, port)
        context = ssl.create_default_context(cafile=stage.ca_file)
        stream = trio.SSLStream(plain, context, server_hostname=host, https_compatible=True)
        await stream.do_handshake()
        return stream

    try:
        for name in names:
            await floor.connect(name, by_trio if of_trio else by_ours)
        yield floor
    finally:
        for _, stream in floor.streams:
            await trio.aclose_forcefully(stream)


async def floor(options: Options) -> dict[str, Any]:
    """`events` exchanges a round with 1 PDU, and as many with 50; and the same by Trio's stream."""
    costs: dict[tuple[bool, int], list[float]] = defaultdict(list)
    async with (
        open_stage([Servers(options.servers)]) as stage,
        open_floor(stage, stage.names) as measured,
        open_floor(stage, stage.names, of_trio=True) as of_trio,
    ):
        for number in range(1 + options.rounds):
            for of, each in ((False, measured), (True, of_trio)):
                for pdus in (1, 50):
                    cost = await each.measure(options.events, pdus)
                    if number:
                        costs[of, pdus].append(cost)
        sizes = [round(len(measured._body(pdus)) / 1000, 1) for pdus in (1, 50)]
    return {
        "servers": options.servers,
        "exchanges": options.events * options.rounds,
        "body_kb": sizes,
        "cpu_ms_1_pdu": median(costs[False, 1]),
        "cpu_ms_50_pdus": median(costs[False, 50]),
        "lowest_ms": [round(min(costs[False, pdus]), 3) for pdus in (1, 50)],
        "cpu_ms_by_trio": [median(costs[True, pdus]) for pdus in (1, 50)],
    }
