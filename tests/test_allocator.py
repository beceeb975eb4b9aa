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


def arenas(how: str) -> int:
    command = [sys.executable, "-c", ARENAS_AFTER_THREADS, how]
    done = subprocess.run(command, capture_output=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("another C library than glibc")
    assert done.returncode == 0, done.stderr
    return len(re.findall(rb"<heap nr=", done.stdout))


def test_threads_share_two_arenas_once_a_daemon_has_asked_for_it() -> None:
    assert arenas("few") <= 2
    assert arenas("as it comes") > 2
