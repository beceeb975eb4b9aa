"""What goes without Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Nobody searches for cycles in the body: in a daemon the next search may be an hour away. What
    was there before is gone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_of(kind: type[T]) -> list[T]:
    """The objects of this class that are there."""
    return [each for each in gc.get_objects() if isinstance(each, kind)]
