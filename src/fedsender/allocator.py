"""The C library's memory: fewer arenas, and free pages given back to the system.

glibc gives each thread that allocates an arena of its own, up to eight per core. Free memory of one
arena serves no other. Our threads come and go with the work of the databases, so the same work
spreads over more arenas the longer the daemon runs, and its memory grows without a leak. glibc also
gives pages back only from the end of an arena: free pages between two long-lived objects stay.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Final

import trio

from fedsender.runtime import RunSync

ARENAS: Final = 2
"""One for the event loop, one for its threads: Python's lock lets few allocate at once."""
BETWEEN_TRIMS_S: Final = 60.0
_M_ARENA_MAX: Final = -8


def use_few_arenas() -> bool:
    """Bound the number of glibc's arenas for new threads; return False with another C library.

    The environment variable MALLOC_ARENA_MAX would bind every process that is started here, too.
    This call binds our process alone, however it was started.
    """
    mallopt = _of_c_library("mallopt")
    # musl has the name nowhere, and says no by 0 where it has it.
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, ARENAS))


async def give_memory_back(run_sync: RunSync) -> None:
    """Once a minute, give the system the free pages in the middle of the arenas; for ever.

    Takes a few ms of a thread; other threads that allocate may wait meanwhile. Returns at once
    with another C library, which has no need of it.
    """
    trim = _of_c_library("malloc_trim")
    if trim is None:
        return
    limiter = trio.CapacityLimiter(1)
    while True:
        await trio.sleep(BETWEEN_TRIMS_S)
        await run_sync(lambda: trim(ctypes.c_size_t(0)), limiter=limiter)


def _of_c_library(name: str) -> Callable[..., int] | None:
    """A function of glibc; None: it is another C library, or another system."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
