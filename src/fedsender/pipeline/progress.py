"""What a job shows while it runs: a bar per step on a terminal, a line per step elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedsender.console import say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.progress import Progress, TaskID


class Steps:
    """Shows the steps of one job. See `showing`."""

    def __init__(self, progress: "Progress", *, live: bool) -> None:
        self._progress = progress
        self._live = live

    @contextmanager
    def step(self, title: str, total: float | None = None) -> Iterator["Step"]:
        """One step; `total`: how much there is to do, None where that is not known."""
        task = self._progress.add_task(title, total=total, note="")
        step = Step(self._progress, task)
        yield step
        self._progress.update(task, total=step.done, completed=step.done)
        if not self._live:
            told = f": {step.note}" if step.note else ""
            say(f"{title}{told}", error=True)

    @contextmanager
    def spark(self, title: str, session: "SparkSession") -> Iterator["Step"]:
        """One step that is Spark's: the bar shows the tasks of the stages under way."""
        tracker = session.sparkContext.statusTracker()
        over = threading.Event()
        with self.step(title) as step:

            def watch() -> None:
                while not over.wait(0.5):
                    done = total = 0
                    for stage in tracker.getActiveStageIds():
                        info = tracker.getStageInfo(stage)
                        if info is not None:
                            done, total = done + info.numCompletedTasks, total + info.numTasks
                    step.show(done, total or None)

            watcher = threading.Thread(target=watch, name="spark progress", daemon=True)
            if self._live:
                watcher.start()
            try:
                yield step
            finally:
                over.set()
                if self._live:
                    watcher.join()


class Step:
    """One step under way."""

    def __init__(self, progress: "Progress", task: "TaskID") -> None:
        self._progress = progress
        self._task = task
        self.done = 1.0
        self.note = ""

    def show(self, done: float, total: float | None = None) -> None:
        """How far it is; `total` only where it has changed."""
        self.done = max(done, 1.0)
        if total is None:
            self._progress.update(self._task, completed=done)
        else:
            self._progress.update(self._task, completed=done, total=total)

    def say(self, note: str) -> None:
        """What came of it, in a few words."""
        self.note = note
        self._progress.update(self._task, note=note)


@contextmanager
def showing(*, quiet: bool = False) -> Iterator[Steps]:
    """The display of a job, on standard error; `quiet` shows nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, quiet=quiet)
    live = console.is_terminal and not quiet
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not live) as progress:
        yield Steps(progress, live=live or quiet)
