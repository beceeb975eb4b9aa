"""Writes that wait to be committed, and how a batch of them is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import trio
from sqlalchemy import Connection


@dataclass(slots=True, eq=False)
class Job:
    """One caller's write. `running` while its transaction may be under way.

    Attributes:
        items: with `Database.write_together`, what `run` is given besides the connection.
    """

    run: Callable[..., Any]
    items: Sequence[Any] | None = None
    value: Any = None
    done: trio.Event = field(default_factory=trio.Event)
    running: bool = False
    withdrawn: bool = False
    alone: bool = False
    error: Exception | None = None


def run_jobs(connection: Connection, batch: Sequence[Job]) -> None:
    """Run these in their order; neighbours that are to be written together in one call."""
    for (run, together), group in groupby(batch, lambda job: (job.run, job.items is not None)):
        jobs = list(group)
        if not together:
            for job in jobs:
                job.value = run(connection)
            continue
        value = run(connection, [item for job in jobs for item in job.items or ()])
        for job in jobs:
            job.value = value
