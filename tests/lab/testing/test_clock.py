"""The time of a simulated loop: what each kind of turn costs passes on the virtual clock."""

import random
import ssl

import trio

from fedsender.fairness import Payer
from fedsender.tls import MAX_HANDSHAKE_CPU_S
from fedsender_lab.testing.clock import run_virtually
from fedsender_lab.testing.network import Internet, MemoryNetwork, memory_connection

NAMES = [f"s{number}.site{number}.example" for number in range(20)]


async def shake_hands(dear: set[str]) -> list[tuple[float, str]]:
    """All of them shake hands at once, some being dear; who was done when, in seconds."""
    done: list[tuple[float, str]] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    async with trio.open_nursery() as nursery:
        internet = Internet(random.Random(1), nursery, by_table=True, dear=dear)
        network = MemoryNetwork(internet)
        trio.lowlevel.add_instrument(network.turns)

        async def shake(name: str) -> None:
            stream, _ = memory_connection()
            stream.certificate = (name,)
            await network.start_tls(stream, context, name, Payer(name))
            done.append((trio.current_time(), name))

        for name in NAMES:
            nursery.start_soon(shake, name)
    return done


def test_dear_handshakes_take_time() -> None:
    cheap = run_virtually(0, lambda: shake_hands(set()))
    dear = run_virtually(0, lambda: shake_hands(set(NAMES)))

    # The longest way there and back is 0.3 s.
    assert cheap[-1][0] < 0.4
    # What the last one costs passes after it.
    others_s = (len(NAMES) - 1) * MAX_HANDSHAKE_CPU_S
    assert others_s < dear[-1][0] < others_s + 0.4


def test_the_time_that_passes_is_the_same_in_each_run() -> None:
    runs = [run_virtually(5, lambda: shake_hands(set(NAMES[::3]))) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
