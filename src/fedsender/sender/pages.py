"""Pages that are read once for all that come by.

Servers that return together have the same pages before them: of a room's events, or of the receipts
of all rooms. Whoever comes first reads a page; who wants it meanwhile waits for that, and who comes
soon after finds it.
"""

from bisect import bisect_right, insort
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import trio
from cachetools import TTLCache

from fedsender.waiting import Locks

PAGE_LIFE_S = 30.0
"""The time for which a page is kept, and who is in its rooms is believed."""


NO_END = 2**63 - 1
"""A place above all others."""


class Page(Protocol):
    """What was found with `after` < place <= `upto`, in some order of places."""

    @property
    def after(self) -> int: ...
    @property
    def upto(self) -> int: ...


G = TypeVar("G")
P = TypeVar("P", bound=Page)


class Pages(Generic[G, P]):
    """The pages of some groups, for example of rooms; bounded by the size of all that are kept."""

    def __init__(
        self,
        read: Callable[[G, int, int], Awaitable[P | None]],
        *,
        kept: int,
        size: Callable[[P], int],
    ) -> None:
        """
        Args:
            read: reads a group's page above the first place, up to the second or less far; None:
                there is nothing.
            kept: the most that the sizes of all pages may be together.
        """
        self._read = read
        self._pages: TTLCache[tuple[G, int], P] = TTLCache(
            kept, PAGE_LIFE_S, timer=trio.current_time, getsizeof=size
        )
        # By group where its pages begin, ascending; some of them may be gone.
        self._begins: dict[G, list[int]] = {}
        self._reading = Locks[G]()
        self._news = 0

    async def above(self, group: G, after: int, upto: int = NO_END) -> P | None:
        """A page of this group with what comes next after this place; it may begin below it, and
        end before or behind `upto`. None: there is nothing.

        Raises what `read` raises, for each one that asks anew.
        """
        async with self._reading.of(group):
            known = self._known(group, after)
            if known is not None:
                return known
            news = self._news
            page = await self._read(group, after, upto)
            if page is not None and news == self._news:
                self._keep(group, page)
            return page

    def _known(self, group: G, after: int) -> P | None:
        begins = self._begins.get(group, [])
        while number := bisect_right(begins, after):
            page = self._pages.get((group, begins[number - 1]))
            if page is not None:
                return page if after < page.upto else None
            del begins[number - 1]
        return None

    def _keep(self, group: G, page: P) -> None:
        with suppress(ValueError):  # It alone is larger than the cache.
            self._pages[(group, page.after)] = page
        begins = self._begins.setdefault(group, [])
        if page.after not in begins:
            insort(begins, page.after)
        if len(self._begins) > 2 * len(self._pages) + 100:
            self._begins.clear()
            for known, after in sorted(self._pages, key=lambda key: key[1]):
                self._begins.setdefault(known, []).append(after)

    def came(self, place: int) -> None:
        """Forget what may lack something from this place on: it came just now."""
        self._news += 1
        for key, page in [*self._pages.items()]:
            if page.upto >= place:
                del self._pages[key]

    def forget(self) -> None:
        """Forget all pages: they may say something else now."""
        self._news += 1
        self._pages.clear()
        self._begins.clear()
