"""What a process does to its disk, step by step: any may fail, or be the last one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import trio

from fedsender.simulation.lives import Crash

T = TypeVar("T")
SLOW_S: Final = 0.05


class Steps:
    """See the module.

    Attributes:
        count: how many there were.
        cut_at: the one at which the process is killed, or the next one of the kind `cut_in`; None:
            none.
        fail: step number -> the errno with which it fails.
        full: nothing can be written.
        over: it was killed; no code of it goes on.

    Args:
        killed: told at which step, before anything else can happen.
        threads_write: what is done in a thread is written to the disk, and may fail.
    """

    def __init__(
        self,
        rng: Random,
        killed: Callable[[str], None] = lambda _: None,
        *,
        threads_write: bool = False,
    ) -> None:
        self.count = 0
        self.cut_at: int | None = None
        self.cut_in = ""
        self.fail: dict[int, int] = {}
        self.full = False
        self.over = False
        self._random = rng
        self._killed = killed
        self._threads_write = threads_write

    def step(self, word: str, *, writes: bool = False) -> None:
        """One more. Raises Crash, and OSError where it `writes`."""
        self._check(word)
        number, self.count = self.count, self.count + 1
        if self.cut_at is not None and number >= self.cut_at and word.startswith(self.cut_in):
            self.cut(word)
        broken = self.fail.pop(number, None)
        if writes and (broken or self.full):
            raise OSError(broken or errno.ENOSPC, "injected")

    def _check(self, word: str) -> None:
        if self.over:
            raise Crash(word)

    def cut(self, word: str) -> None:
        """Kill it now. Raises Crash."""
        self._check(word)
        self.over = True
        self._killed(word)
        raise Crash(word)

    def begin(self) -> None:
        """Another life of it."""
        self.cut_at, self.cut_in, self.over = None, "", False
        self.fail.clear()

    async def run_sync(
        self, function: Callable[[], T], /, *, limiter: trio.CapacityLimiter, abandon: bool = False
    ) -> T:
        """What a worker thread would do, all at once: killed before it, or after it."""
        async with limiter:
            await self._take_time()
            self.step("thread", writes=self._threads_write)
            value = function()
            self.step("thread done")
            await self._take_time()
            return value

    async def _take_time(self) -> None:
        if self._random.random() < 0.1:
            with trio.CancelScope(shield=True):
                await trio.sleep(self._random.uniform(0, SLOW_S))


def flip_bit(path: Path, bit: int) -> None:
    """Spoil one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    # A file of its own: an older copy of the directory may share this one.
    spoiled = path.with_name(f"{path.name}.spoiled")
    spoiled.write_bytes(content)
    os.replace(spoiled, path)
