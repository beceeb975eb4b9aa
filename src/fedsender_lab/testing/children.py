"""The other processes of a demo or a benchmark: they are not measured, and do as they are told.

Signals go to a child's standard input and answers come from its standard output, one JSON object
per line, one answer per order. A child ends when its input does.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
import trio

from fedsender.config import Log
from fedsender.runtime import real_runtime
from fedsender.telemetry import configure_logging
from fedsender.waiting import leaves

Order = dict[str, Any]
Handler = Callable[..., Awaitable[Order]]


class BenchFailed(Exception):
    """The run came to no figures; the text says why."""


def texts_of(group: BaseExceptionGroup[BaseException]) -> list[str]:
    """The text of each exception in it."""
    return [str(error) for error in leaves(group)]


MAX_LINE = 64 * 2**20
ENDING_SECONDS = 5.0


class _Lines:
    """The lines of a stream."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._pieces = bytearray()

    async def next(self) -> bytes | None:
        """The next line; None at the end."""
        while b"\n" not in self._pieces:
            data = await self._stream.receive_some(65_536)
            if not data or len(self._pieces) > MAX_LINE:
                return None
            self._pieces += data
        line, _, rest = bytes(self._pieces).partition(b"\n")
        self._pieces = bytearray(rest)
        return line


class Child:
    """One child process, as its parent sees it."""

    def __init__(self, name: str, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._name = name
        self._orders = process.stdin
        self._answers = _Lines(process.stdout)

    async def ask(self, do: str, **details: object) -> Order:
        """Have something done; the answer comes when it is. Raises BenchFailed if the child ended.

        The deadline is the caller's.
        """
        await self._orders.send_all(orjson.dumps({"do": do, **details}) + b"\n")
        line = await self._answers.next()
        if line is None:
            raise BenchFailed(f"{self._name} ended while it was asked to {do}")
        answer: Order = orjson.loads(line)
        return answer

    async def dismiss(self) -> None:
        """Let it end."""
        await self._orders.aclose()


@asynccontextmanager
async def open_child(
    module: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """`python -m MODULE`, for as long as the body runs; `environment` is beside our own."""
    command = [sys.executable, "-m", module]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    pipes["env"] = {**os.environ, **(environment or {})}
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, check=False, **pipes)
        child = Child(module, await nursery.start(run))
        yield child
        await child.dismiss()
        nursery.cancel_scope.deadline = trio.current_time() + ENDING_SECONDS


async def serve_orders(handlers: Mapping[str, Handler]) -> None:
    """In a child: carry out the signals that come in, in turn, until there are no more."""
    # A line of the log on standard output would be taken for an answer.
    configure_logging(Log(level="error"), now_ms=real_runtime().now_ms)
    async with trio.lowlevel.FdStream(os.dup(0)) as below, trio.lowlevel.FdStream(os.dup(1)) as out:
        signals = _Lines(below)
        while (line := await signals.next()) is not None:
            order = orjson.loads(line)
            answer = await handlers[order.pop("do")](**order)
            await out.send_all(orjson.dumps(answer) + b"\n")
