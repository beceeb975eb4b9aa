"""What is known of one consumer, and the file that keeps it."""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from fedsender.relay.disk import Disk, read_file
from fedsender.replication.commands import Shard

FILE: Final = "consumers.json"
MAX_FILE_BYTES: Final = 16 * 2**20
ERROR_LENGTH: Final = 200
_NAME: Final = re.compile(r"[a-z0-9_.-]{1,64}\Z")


class State(enum.StrEnum):
    """What a consumer is doing.

    Attributes:
        JOIN: it was handed a snapshot, and the log behind that is kept.
        FOLLOW: it is connected and gets what is new.
        STOPPED: it is not connected, and the log behind its pin is kept.
        LOST: the log behind its pin is gone, or is not kept any more: it may need a snapshot.
    """

    JOIN = "JOIN"
    FOLLOW = "FOLLOW"
    STOPPED = "STOPPED"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class Handed:
    """The snapshot that a consumer was handed."""

    snapshot: str
    token: int


@dataclass(slots=True)
class Consumer:
    """One consumer.

    Attributes:
        acked: what it last said it holds; None: it never did.
        lost: what follows `acked` is not kept for it in the log any more.
        following: one of them is being fed; not stored.
        full_syncs: snapshots handed out, by why.
        shard: which servers it says that it sends to, as `str(Shard)`; None: it has not said.
        first_seen_ms, last_seen_ms: in ms since the epoch; the latter is kept while it is away.
    """

    name: str
    first_seen_ms: int
    last_seen_ms: int
    acked: int | None = None
    handed: Handed | None = None
    lost: bool = False
    error: str | None = None
    full_syncs: dict[str, int] = field(default_factory=dict)
    shard: str | None = None
    following: bool = False

    @property
    def state(self) -> State:
        """What it is doing."""
        if self.handed is not None:
            return State.JOIN
        if self.following:
            return State.FOLLOW
        return State.LOST if self.lost else State.STOPPED

    @property
    def pin(self) -> int | None:
        """What follows this token is kept for it; None: nothing is."""
        pins = [] if self.acked is None or self.lost else [self.acked]
        if self.handed is not None:
            pins.append(self.handed.token)
        return min(pins, default=None)


def is_consumer_name(name: str) -> bool:
    """Whether a consumer may be called so."""
    return _NAME.match(name) is not None


# --- the file -------------------------------------------------------------------------------------


class Records(NamedTuple):
    """What the file says.

    Attributes:
        epoch: the history that the consumers' tokens belong to.
        consumers: each with whether it was connected.
        blind_until_ms: until then others are expected that nothing is known of.
    """

    epoch: str
    consumers: Sequence[tuple[Consumer, bool]]
    blind_until_ms: int = 0


def to_json(records: Records) -> bytes:
    """The file's text, with a checksum: a digit of a position may not become another."""
    values = {
        "epoch": records.epoch,
        "blind_until_ms": records.blind_until_ms,
        "consumers": [
            {
                "name": one.name,
                "acked": one.acked,
                "lost": one.lost,
                "snapshot": None if one.handed is None else [one.handed.snapshot, one.handed.token],
                "first_seen_ms": one.first_seen_ms,
                "last_seen_ms": one.last_seen_ms,
                "error": one.error,
                "full_syncs": one.full_syncs,
                "shard": one.shard,
                "connected": connected,
            }
            for one, connected in records.consumers
        ],
    }
    return orjson.dumps({**values, "crc32": _check_of(values)}, option=orjson.OPT_INDENT_2)


def _check_of(values: dict[str, Any]) -> int:
    return zlib.crc32(orjson.dumps(values, option=orjson.OPT_SORT_KEYS))


def read_records(disk: Disk, path: Path) -> Records:
    """What a file of consumers says. Raises OSError, ValueError."""
    values = orjson.loads(read_file(disk, path, MAX_FILE_BYTES))
    try:
        check = values.pop("crc32")
        if check != _check_of(values):
            raise ValueError("a file of consumers whose checksum is wrong")
        found = [(_consumer(each), each["connected"] is True) for each in values["consumers"]]
        return Records(str(values["epoch"]), found, int(values["blind_until_ms"]))
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"not a file of consumers: {error!r}") from error


def _consumer(record: dict[str, Any]) -> Consumer:
    name, acked, handed = record["name"], record["acked"], record["snapshot"]
    if not is_consumer_name(name) or not (acked is None or type(acked) is int):
        raise ValueError("a consumer with another name or position than it could have")
    return Consumer(
        name=name,
        first_seen_ms=int(record["first_seen_ms"]),
        last_seen_ms=int(record["last_seen_ms"]),
        acked=acked,
        handed=None if handed is None else Handed(str(handed[0]), int(handed[1])),
        lost=bool(record["lost"]),
        error=None if record["error"] is None else str(record["error"])[:ERROR_LENGTH],
        full_syncs={str(reason): int(count) for reason, count in record["full_syncs"].items()},
        shard=None if record["shard"] is None else str(Shard.of_text(record["shard"])),
    )
