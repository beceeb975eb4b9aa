"""What server discovery has learnt, until it lapses: in memory, bounded, and in one file on disk.

The file only spares a restarted daemon some ten thousand lookups. It is replaced as a whole, and
one that cannot be read is as good as none.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import structlog
import trio
from cachetools import TLRUCache
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from fedsender.matrix import parse_server_name
from fedsender.outside import Outside, RecordType

_log = structlog.get_logger()

# In the last fifth of its life an answer is asked for again, and stands if that fails.
_FRESH: Final = 0.8
_RETRY_REFRESH_S: Final = 120.0
# Server-server API, "Resolving server names": errors are cached for up to an hour, and repeated
# ones back off exponentially. What came before is remembered for as long again.
ERROR_MAX_S: Final = 3600.0
# Nothing lives longer; a file that says otherwise was written under another clock.
_LIFE_MAX_S: Final = 48 * 3600.0
_FILE_MAX_BYTES: Final = 32 * 1024 * 1024
_SAVE_EVERY_S: Final = 60.0

SRV_SERVICES: Final = ("_matrix-fed._tcp", "_matrix._tcp")
"""The SRV records of a server, in the order to ask for them; the second is the deprecated one."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the DNS says of one name and record type.

    Attributes:
        values: the records in zone file form; none when they do not exist or the lookup failed.
        expires_at: until when to believe it, in the time of `trio.current_time()`.
        text: why there are no values.
        failed: there was no answer, which is not the same as "no such name".
    """

    values: tuple[str, ...]
    expires_at: float
    text: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class WellKnown:
    """What one .well-known request found out.

    Attributes:
        server: the delegated server name, or None if it was an error.
        life_s: for how many seconds it holds; of an error, the first of its kind.
        text: what the error was.
        broken: something was served, but it cannot be used.
    """

    server: str | None
    life_s: float
    text: str = ""
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Delegation:
    """What is remembered of a host's .well-known.

    Attributes:
        server: the delegated server name, or None while it is an error.
        refresh_at: when to ask again, in the time of `trio.current_time()`.
        expires_at: when to forget it.
        failures: how many errors there were in a row.
        text: what the error was.
        broken: something was served, but it cannot be used.
    """

    server: str | None
    refresh_at: float
    expires_at: float
    failures: int = 0
    text: str = ""
    broken: bool = False


def delegation_after(previous: Delegation | None, found: WellKnown, now: float) -> Delegation:
    """What to remember once a request at `now` has found `found`."""
    if found.server is not None:
        return Delegation(found.server, now + _FRESH * found.life_s, now + found.life_s)
    failures = 1 if previous is None else previous.failures + 1
    if previous is not None and previous.server is not None:
        retry_at = min(now + _RETRY_REFRESH_S, previous.expires_at)
        return Delegation(previous.server, retry_at, previous.expires_at, failures)
    life = min(found.life_s * 2.0 ** min(failures - 1, 20), ERROR_MAX_S)
    refresh_at = now + life
    return Delegation(
        None, refresh_at, refresh_at + ERROR_MAX_S, failures, found.text, found.broken
    )


class Remembered:
    """Two bounded caches on the clock of `trio`; the least recently used entry goes first.

    Attributes:
        changed: something was learnt since the last `to_file`.
    """

    def __init__(self, entries: int) -> None:
        self.changed = False
        self._delegations: TLRUCache[str, Delegation] = TLRUCache(
            entries, lambda _key, value, _now: value.expires_at, timer=trio.current_time
        )
        self._lookups: TLRUCache[tuple[str, RecordType], Lookup] = TLRUCache(
            entries, lambda _key, value, _now: value.expires_at, timer=trio.current_time
        )

    def __len__(self) -> int:
        return len(self._delegations) + len(self._lookups)

    def delegation(self, host: str) -> Delegation | None:
        """What is remembered of the .well-known of `host`, be it due for a refresh."""
        return self._delegations.get(host)

    def keep_delegation(self, host: str, delegation: Delegation) -> None:
        """Remember until its `expires_at`."""
        self._delegations[host] = delegation
        self.changed = True

    def lookup(self, name: str, rdtype: RecordType) -> Lookup | None:
        """What is remembered of a DNS name."""
        return self._lookups.get((name, rdtype))

    def keep_lookup(self, name: str, rdtype: RecordType, lookup: Lookup) -> None:
        """Remember until its `expires_at`."""
        self._lookups[name, rdtype] = lookup
        self.changed = True

    def doubt(self, host: str) -> None:
        """Drop the lookups about `host`; a delegation is due, and stands if nobody confirms it."""
        delegation = self._delegations.get(host)
        hosts = {host}
        if delegation is not None and delegation.server is not None:
            hosts.add(parse_server_name(delegation.server)[0].lower())
            self.keep_delegation(host, replace(delegation, refresh_at=trio.current_time()))
        for each in hosts:
            self._drop_lookups(each)

    def _drop_lookups(self, host: str) -> None:
        names: list[tuple[str, RecordType]] = [(host, "A"), (host, "AAAA")]
        for service in SRV_SERVICES:
            lookup = self._lookups.pop((f"{service}.{host}", "SRV"), None)
            for value in () if lookup is None else lookup.values:
                target = value.rpartition(" ")[2].removesuffix(".").lower()
                names += [(target, "A"), (target, "AAAA")]
        for name in names:
            self._lookups.pop(name, None)

    def forget(self, host: str) -> None:
        """Drop everything about `host` and what it is delegated to."""
        self.doubt(host)
        self._delegations.pop(host, None)

    def to_file(self, now_ms: int) -> "CacheFile":
        """Everything, with times of the wall clock. Failed lookups are not worth keeping."""
        self.changed = False
        offset = now_ms / 1000 - trio.current_time()

        def wall_ms(moment: float) -> int:
            return round((moment + offset) * 1000)

        return CacheFile(
            version=1,
            delegations=[
                FiledDelegation(
                    host=host,
                    server=each.server,
                    refresh_ms=wall_ms(each.refresh_at),
                    expires_ms=wall_ms(each.expires_at),
                    failures=each.failures,
                    text=each.text,
                    broken=each.broken,
                )
                for host, each in self._delegations.items()
            ],
            lookups=[
                FiledLookup(
                    name=name,
                    rdtype=rdtype,
                    values=list(each.values),
                    expires_ms=wall_ms(each.expires_at),
                    text=each.text,
                )
                for (name, rdtype), each in self._lookups.items()
                if not each.failed
            ],
        )

    def take_in(self, file: "CacheFile", now_ms: int) -> None:
        """Remember what a file holds; what has lapsed meanwhile drops out."""
        now = trio.current_time()

        def moment(wall_ms: int) -> float:
            return now + min((wall_ms - now_ms) / 1000, _LIFE_MAX_S)

        for filed in file.delegations:
            self._delegations[filed.host] = Delegation(
                filed.server,
                moment(filed.refresh_ms),
                moment(filed.expires_ms),
                filed.failures,
                filed.text,
                filed.broken,
            )
        for each in file.lookups:
            self._lookups[each.name, each.rdtype] = Lookup(
                tuple(each.values), moment(each.expires_ms), each.text
            )


# --- the file -------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _server_name(text: str) -> str:
    parse_server_name(text)
    return text


class FiledDelegation(_Strict):
    """A `Delegation` on disk; times in milliseconds since the epoch."""

    host: str
    server: Annotated[str, AfterValidator(_server_name)] | None
    refresh_ms: int
    expires_ms: int
    failures: int
    text: str
    broken: bool


class FiledLookup(_Strict):
    """A `Lookup` on disk; times in milliseconds since the epoch."""

    name: str
    rdtype: RecordType
    values: list[str]
    expires_ms: int
    text: str


class CacheFile(_Strict):
    """The whole file."""

    version: Literal[1]
    delegations: list[FiledDelegation]
    lookups: list[FiledLookup]


def read_cache(path: Path) -> CacheFile | None:
    """What `path` holds, or None, with a line in the log unless there is no such file."""
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_MAX_BYTES + 1)
        if len(raw) > _FILE_MAX_BYTES:
            raise ValueError(f"larger than {_FILE_MAX_BYTES} bytes")
        return CacheFile.model_validate_json(raw)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        _log.warning("discovery cache ignored", file=str(path), reason=problem["msg"])
    except (OSError, ValueError) as error:
        _log.warning("discovery cache ignored", file=str(path), reason=str(error))
    return None


def write_cache(path: Path, file: CacheFile) -> None:
    """Put `file` in the place of what `path` was. A failure is logged: the cache is a comfort."""
    beside = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as out:
            out.write(file.model_dump_json().encode())
        beside.replace(path)
    except OSError as error:
        _log.warning("discovery cache not saved", file=str(path), reason=error.strerror)


async def keep_saved(remembered: Remembered, path: Path, outside: Outside) -> None:
    """Write what changed to `path` once a minute, for ever."""
    limiter = trio.CapacityLimiter(1)
    while True:
        await trio.sleep(_SAVE_EVERY_S)
        if remembered.changed:
            write = _writing(path, remembered.to_file(outside.now_ms()))
            await outside.run_sync(write, limiter=limiter)


def _writing(path: Path, file: CacheFile) -> Callable[[], None]:
    return lambda: write_cache(path, file)
