"""How the C library keeps memory that was given back to it.

glibc gives threads that allocate at the same time an arena each, up to eight per core, and what is
free in one serves no other. Our threads come and go with what the databases are asked, so that the
same work spreads over more arenas the longer the daemon runs: its memory grows and nothing leaks.
"""

import ctypes
import sys
from typing import Final

ARENAS: Final = 2
"""For the event loop, and for the threads beside it: Python's lock lets few allocate at once."""
_M_ARENA_MAX: Final = -8


def use_few_arenas() -> bool:
    """Bound glibc's arenas, for threads that start from now on; False: it is another C library.

    What the environment says (MALLOC_ARENA_MAX) it would say to every process that is started
    here; this holds for ours alone, however it was started.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # musl has the name nowhere, and says no by 0 where it has it.
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, ARENAS))
