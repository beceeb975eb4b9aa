"""Caches bounded by the size of their values."""

from typing import TypeVar

from cachetools import Cache

K = TypeVar("K")
V = TypeVar("V")


def remember(cache: "Cache[K, V]", key: K, value: V) -> None:
    """Put the value into the cache, in place of any other, unless it alone is larger than that.

    A cache of `cachetools` raises ValueError for such a value. Nothing may depend on what a cache
    has room for.
    """
    cache.pop(key, None)
    if cache.getsizeof(value) <= cache.maxsize:
        cache[key] = value
