"""What the samples of a soak say: windows, the slope of memory, and whether the goals are met.

Pure functions, so that a run of half an hour need not be repeated to know what would be said of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

WINDOW_S: Final = 600.0
WINDOWS: Final = 3
"""At least so many: the first is for warming up, the second is what the last is held against."""
JUDGED_S: Final = WINDOWS * WINDOW_S
"""A shorter run has figures and no verdict: caches and connections still fill in it."""
NEARLY: Final = 0.99
"""What the clock leaves of a whole."""
MAX_GROWTH_MB: Final = 1.0
"""Own memory may grow by less than this per 10 minutes after the first window."""
MAX_RISE: Final = 1.1
"""CPU per transaction has not risen if the last window takes at most so many times the second:
the same run twice differs by a few percent, for what else the machine does."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The daemon's process at one moment.

    Attributes:
        at_s: since the traffic began.
        own_mb: memory that is its own: pages that it wrote, and that it has in swap. Those of
            libraries, which other processes share or not as they come and go, are not in it.
        rss_mb: all that is resident.
        cpu_s: user and system time of all threads since its start.
        transactions: that were answered since its start.
    """

    at_s: float
    own_mb: float
    rss_mb: float
    cpu_s: float
    transactions: int


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the run.

    Attributes:
        own_mb: own memory at its end.
        growth_mb: by how much it grew per 10 minutes, by least squares.
        transactions: answered in it; None in the next if there were none.
    """

    from_s: float
    upto_s: float
    own_mb: float
    rss_mb: float
    growth_mb: float
    transactions: int
    cpu_s: float

    @property
    def cpu_ms_per_transaction(self) -> float | None:
        """What one took; None where there was none."""
        return self.cpu_s * 1000 / self.transactions if self.transactions else None


def windows(samples: Sequence[Sample]) -> list[Window]:
    """The run in stretches of 10 minutes, or in thirds where it is shorter than three of them.

    What is left over at the end is part of the last one. `samples` are ascending, at least two.
    """
    first, last = samples[0].at_s, samples[-1].at_s
    long = last - first >= JUDGED_S * NEARLY
    length = WINDOW_S if long else (last - first) / WINDOWS
    count = int((last - first) / length + 1 - NEARLY)
    # A sample on the border ends one and begins the next; the clock never meets it exactly.
    borders = [_nearest(samples, first + index * length) for index in range(count)]
    borders.append(len(samples) - 1)
    return [_window(samples[start : end + 1]) for start, end in pairwise(borders) if end > start]


def _nearest(samples: Sequence[Sample], at_s: float) -> int:
    return min(range(len(samples)), key=lambda index: abs(samples[index].at_s - at_s))


def _window(samples: Sequence[Sample]) -> Window:
    first, last = samples[0], samples[-1]
    return Window(
        from_s=first.at_s,
        upto_s=last.at_s,
        own_mb=last.own_mb,
        rss_mb=last.rss_mb,
        growth_mb=growth(samples),
        transactions=last.transactions - first.transactions,
        cpu_s=last.cpu_s - first.cpu_s,
    )


def growth(samples: Sequence[Sample]) -> float:
    """The slope of own memory by least squares, in MB per 10 minutes; 0 of less than two."""
    count = len(samples)
    if count < 2:
        return 0.0
    middle_s = sum(each.at_s for each in samples) / count
    middle_mb = sum(each.own_mb for each in samples) / count
    spread = sum((each.at_s - middle_s) ** 2 for each in samples)
    if not spread:
        return 0.0
    together = sum((each.at_s - middle_s) * (each.own_mb - middle_mb) for each in samples)
    return together / spread * WINDOW_S


@dataclass(frozen=True, slots=True)
class Trend:
    """The outcome.

    Attributes:
        growth_mb: of own memory per 10 minutes, over everything after the first window.
        rise: CPU per transaction in the last window as a multiple of the second; None: unknown.
        judged: the run was long enough for a verdict.
        missed: goals that were missed, one sentence each; none of a run that is not judged.
    """

    windows: tuple[Window, ...]
    growth_mb: float
    rise: float | None
    judged: bool
    missed: tuple[str, ...]


def trend(samples: Sequence[Sample]) -> Trend:
    """What the samples of a run say. `samples` are ascending, at least two."""
    parts = windows(samples)
    after = [each for each in samples if each.at_s >= parts[0].upto_s]
    growth_mb = growth(after)
    rise = _rise(parts)
    judged = samples[-1].at_s - samples[0].at_s >= JUDGED_S * NEARLY
    missed = tuple(_missed(parts, growth_mb, rise)) if judged else ()
    return Trend(tuple(parts), growth_mb, rise, judged, missed)


def _rise(parts: Sequence[Window]) -> float | None:
    if len(parts) < WINDOWS:
        return None
    before, now = parts[1].cpu_ms_per_transaction, parts[-1].cpu_ms_per_transaction
    return now / before if before and now is not None else None


def _missed(parts: Sequence[Window], growth_mb: float, rise: float | None) -> list[str]:
    found = []
    if growth_mb >= MAX_GROWTH_MB:
        found.append(
            f"memory grows by {growth_mb:.2f} MB per 10 minutes after the first 10,"
            f" and less than {MAX_GROWTH_MB:g} MB is allowed"
        )
    if rise is None:
        found.append("CPU per transaction is unknown: a window had no transactions")
    elif rise > MAX_RISE:
        before, now = parts[1].cpu_ms_per_transaction, parts[-1].cpu_ms_per_transaction
        found.append(
            f"CPU per transaction rises: {now:.2f} ms in the last 10 minutes, {before:.2f} ms"
            f" in the second, which is {rise:.2f} times and not at most {MAX_RISE:g}"
        )
    return found
