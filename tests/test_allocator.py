"""Whatever threads a daemon has, what they give back serves the others."""

import re
import subprocess
import sys

import pytest

ARENAS_AFTER_THREADS = """
import ctypes, os, sys, tempfile, threading
from fedsender.allocator import use_few_arenas
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_info"):
    sys.exit(77)
if sys.argv[1] == "few" and not use_few_arenas():
    sys.exit("not taken")
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(6)
def work():
    # A libc call leaves Python's lock: all of them allocate at once.
    together.wait()
    for _ in range(200):
        libc.malloc(2000)
    together.wait()
threads = [threading.Thread(target=work) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fflush.argtypes = [ctypes.c_void_p]
sys.stdout.flush()
out = libc.fdopen(1, b"w")
libc.malloc_info(0, out)
libc.fflush(out)
"""


def told_by(program: str, argument: str) -> bytes:
    """What this program prints, in a process of its own."""
    command = [sys.executable, "-c", program, argument]
    done = subprocess.run(command, capture_output=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("another C library than glibc")
    assert done.returncode == 0, done.stderr
    return done.stdout


def arenas(how: str) -> int:
    return len(re.findall(rb"<heap nr=", told_by(ARENAS_AFTER_THREADS, how)))


@pytest.mark.slow
def test_threads_share_two_arenas_once_a_daemon_has_asked_for_it() -> None:
    assert arenas("few") <= 2
    assert arenas("as it comes") > 2


FREE_BETWEEN_WHAT_STAYS = """
import ctypes, sys
import trio, trio.testing
from fedsender.allocator import BETWEEN_TRIMS_S, give_memory_back
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_trim"):
    sys.exit(77)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
pieces = [libc.malloc(2000) for _ in range(20_000)]
for piece in pieces:
    ctypes.memset(ctypes.c_void_p(piece), 1, 2000)
for number, piece in enumerate(pieces):
    if number % 100 != 99:
        libc.free(piece)
async def inline(function, /, *, limiter):
    return function()
async def main():
    kept = resident()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_memory_back, inline)
        await trio.sleep(float(sys.argv[1]) * BETWEEN_TRIMS_S)
        nursery.cancel_scope.cancel()
    print(kept - resident())
trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
"""


def given_back(intervals: str) -> int:
    """Of the 40 MB that were freed, how many bytes the system has again after so many intervals."""
    return int(told_by(FREE_BETWEEN_WHAT_STAYS, intervals))


@pytest.mark.slow
def test_what_is_free_between_things_that_stay_goes_back_to_the_system_once_a_minute() -> None:
    assert given_back("0.9") < 5_000_000
    assert given_back("1.1") > 20_000_000
