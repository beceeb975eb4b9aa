"""Which of the newest records came under which key, so that a repeated append is told its token."""

from __future__ import annotations

from collections import deque
from typing import Final

from fedsender.intake.intake import NO_KEY, KeyReused
from fedsender.intake.rows import check_of, rows_of
from fedsender.relay.cursor import read_range
from fedsender.relay.disk import Disk
from fedsender.relay.segment import SegmentInfo

_CHECK_BITS: Final = 32


class Keys:
    """The keys of the last `window` tokens. They are in the log, so a restart finds them again.

    They are most of what a relay holds in memory, and grow until there are as many as the window
    has tokens: some 140 bytes for each.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        # One number of token and check for each key, for two would take as much again.
        self._known: dict[bytes, int] = {}
        self._order: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: bytes, token: int, check: int) -> None:
        """The rows that `check` (32 bits) came of were given this token."""
        if key != NO_KEY:
            self._known[key] = token << _CHECK_BITS | check
            self._order.append(key)
        last_gone = token - self._window
        while self._order and self._known.get(self._order[0], 0) >> _CHECK_BITS <= last_gone:
            # Nothing is known of one that had come twice, when its turn has come again.
            self._known.pop(self._order.popleft(), None)

    def token(self, key: bytes, check: int) -> int | None:
        """The token that was given under this key, if it is remembered.

        Raises KeyReused if it was for other rows.
        """
        found = self._known.get(key)
        if found is None:
            return None
        token = found >> _CHECK_BITS
        if found != token << _CHECK_BITS | check:
            raise KeyReused(f"this id was given to other rows, which have token {token}")
        return token


def load_keys(segments: tuple[SegmentInfo, ...], disk: Disk, window: int, max_bytes: int) -> Keys:
    """The keys in the newest segments, of which not more than `max_bytes` are read. Blocks.

    Raises DamagedSegment, OSError.
    """
    keys = Keys(window)
    newest: list[SegmentInfo] = []
    size = 0
    for info in reversed(segments):
        size += info.bytes
        if newest and (size > max_bytes or info.last <= segments[-1].last - window):
            break
        newest.insert(0, info)
    after = max(newest[0].first - 1, segments[-1].last - window) if newest else 0
    for frame in read_range(tuple(newest), disk, after):
        keys.add(frame.key, frame.token, check_of(rows_of(frame.payload)))
    return keys
