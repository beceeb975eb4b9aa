"""Time, order and chance that a seed decides, so that a run replays exactly. And `until`, for
conditions that send no signal.
"""

import hashlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import count
from typing import TypeVar

import trio
import trio.testing

from fedsender.fairness import Payers, Turns, Usual
from fedsender.runtime import Limiter, Network, RunSync, Runtime

T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000
"""The wall clock when virtual time is 0. It lies in the past, or segments of the ledger, which the
file system stamps with the real time, would look old."""
KEPT_LINES = 400


def run_virtually(seed: int, main: Callable[[], Awaitable[T]]) -> T:
    """Run `main` on a virtual clock that jumps whenever all tasks wait, in an order by `seed`.

    Holds only without threads, sockets, or sets with an order that reaches behaviour.
    """
    _seed_scheduler(seed)
    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def _seed_scheduler(seed: int) -> None:
    # Trio runs the tasks of one tick in a random order. These two private names are the only way to
    # seed it: python-trio/trio issues 2675 and 3089. Without the flag the order would still depend
    # on that of a set.
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio._core._run._r.seed(seed)


class _RunQueue(deque[trio.lowlevel.Task]):
    def __init__(self, tasks: Iterable[trio.lowlevel.Task], keeps: Callable[..., bool]) -> None:
        super().__init__(tasks)
        self._keeps = keeps

    def append(self, task: trio.lowlevel.Task) -> None:
        if not self._keeps(task):
            super().append(task)


def keep_tasks(keeps: Callable[[trio.lowlevel.Task], bool]) -> None:
    """Ask `keeps` of each task that is to run next whether it stands still instead, as one of a
    process that is frozen. `run_on` has it go on."""
    runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
    runner.runq = _RunQueue(runner.runq, keeps)


def run_on(tasks: Iterable[trio.lowlevel.Task]) -> None:
    """Have these tasks run."""
    trio._core._run.GLOBAL_RUN_CONTEXT.runner.runq.extend(tasks)


def now_ms() -> int:
    """The wall clock of the simulated world, in milliseconds since the epoch."""
    return EPOCH_MS + round(trio.current_time() * 1000)


def turns_cpu(step_s: float = 0.0002) -> Callable[[], float]:
    """A clock of CPU time by which each turn costs the same."""
    return partial(next, count(0.0, step_s))


class TurnsByTable(Turns):
    """The time of a loop where each turn costs what a table says for its kind, and nothing else
    costs any.

    On a virtual clock that time passes: whoever waits behind dear turns is late there too.
    """

    def __init__(self) -> None:
        self._worked_s = self._passed_s = 0.0
        super().__init__(lambda: self._worked_s)
        # As measured; a handshake takes two or three.
        self._costs_s = {
            self.handshake: 0.001,
            self.lookup: 0.0002,
            self.answer: 0.0001,
            None: 0.00002,  # The rest of an answer.
        }

    def work(self, seconds: float) -> None:
        """What one turn costs beyond that; called in it."""
        self._worked_s += seconds

    async def take(
        self, payers: Payers, usual: Usual | None, body: Callable[..., T], *args: object
    ) -> T:
        def charged() -> T:
            self.work(self._costs_s[usual])
            return body(*args)

        return await super().take(payers, usual, charged)

    def before_io_wait(self, timeout: float) -> None:
        clock = trio.lowlevel.current_clock()
        if isinstance(clock, trio.testing.MockClock):
            clock.jump(self._worked_s - self._passed_s)
        self._passed_s = self._worked_s
        super().before_io_wait(timeout)


async def inline(
    function: Callable[[], T], /, *, limiter: Limiter, abandon_on_cancel: bool = False
) -> T:
    """A thread that is none; whoever comes meanwhile waits in front of the limiter."""
    async with limiter:
        return function()


def virtual_runtime(
    rng: random.Random,
    network: Network | None = None,
    *,
    run_sync: RunSync = inline,
    now_ms: Callable[[], int] = now_ms,
    turns: Turns | None = None,
) -> Runtime:
    """The runtime of a daemon in a simulated world; without `network` it must not ask for one.

    `turns`: those of the network, if it has any.
    """
    return Runtime(
        now_ms=now_ms,
        elapsed_s=trio.current_time,
        random=rng,
        entropy=rng.randbytes,
        run_sync=run_sync,
        network=network,  # type: ignore[arg-type]  # where there is none, its use is an error
        turns=turns or Turns(turns_cpu()),
    )


async def until(
    holds: Callable[[], object], *, seconds: float = 60.0, every_s: float = 0.01
) -> None:
    """Wait until the condition holds, by the work of other tasks or processes. Raises
    trio.TooSlowError after so long."""
    with trio.fail_after(seconds):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(every_s)


def derived(seed: int, *names: object) -> random.Random:
    """A source of chance for one part of the world alone, so that parts do not disturb others."""
    text = ":".join([str(seed), *map(str, names)])
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


class Trace:
    """The events of a run, in order, as a hash; and the newest lines in words."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self.count = 0

    def note(self, *parts: object) -> None:
        """Something happened now."""
        line = f"{trio.current_time():.6f} {' '.join(map(str, parts))}"
        self._hash.update(line.encode() + b"\n")
        self.last.append(line)
        self.count += 1

    def digest(self) -> str:
        """The hash of all lines so far."""
        return self._hash.hexdigest()
