"""The cache of server discovery: in memory, bounded, and in a table of the sender's database.

The table only saves a restarted daemon some ten thousand lookups. Changes are written to it in
small steps, once a minute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Final, Protocol, TypeVar

import structlog
import trio
from cachetools import TLRUCache
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from fedsender.matrix import parse_server_name
from fedsender.runtime import RecordType, Runtime
from fedsender.store.engine import StoreError
from fedsender.store.records import Discovered

_log = structlog.get_logger()

# In the last fifth of its life an answer is asked for again, and stands if that fails.
_FRESH: Final = 0.8
_RETRY_REFRESH_S: Final = 120.0
# Server-server API, "Resolving server names": errors are cached for up to an hour, and repeated
# ones back off exponentially. What came before is remembered for as long again.
ERROR_MAX_S: Final = 3600.0
# Nothing lives longer; a row that says otherwise was written under another clock.
_LIFE_MAX_S: Final = 48 * 3600.0
_SAVE_EVERY_S: Final = 60.0
# Entries that are written in one step: some milliseconds of the loop.
_STEP: Final = 500

SRV_SERVICES: Final = ("_matrix-fed._tcp", "_matrix._tcp")
"""The SRV services of a server, in the order to ask for them; the second is the deprecated one."""


# Lookups and delegations are read back from the database.
_CHECKED: Final = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer of the DNS for one name and record type.

    Attributes:
        values: the records in zone file form; none when they do not exist or the lookup failed.
        expires_at: end of its life, in the time of `trio.current_time()`.
        text: the reason why there are no values.
        failed: there was no answer, which is not the same as "no such name".
    """

    __pydantic_config__ = _CHECKED

    values: tuple[str, ...]
    expires_at: float
    text: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class WellKnown:
    """The result of one .well-known request.

    Attributes:
        server: the delegated server name, or None if it was an error.
        life_s: seconds for which it holds; of an error, the first of its kind.
        text: the error in words.
        broken: something was served, but it cannot be used.
        gone: it was status 410: the server is gone for good.
    """

    server: str | None
    life_s: float
    text: str = ""
    broken: bool = False
    gone: bool = False


def _server_name(text: str) -> str:
    parse_server_name(text)
    return text


@dataclass(frozen=True, slots=True)
class Delegation:
    """The cached answer of a host's .well-known.

    Attributes:
        server: the delegated server name, or None while it is an error.
        refresh_at: time of the next request, in the time of `trio.current_time()`.
        expires_at: time at which it is forgotten.
        failures: number of errors in a row.
        text: the error in words.
        broken: something was served, but it cannot be used.
        gone: it was status 410: the server is gone for good.
    """

    __pydantic_config__ = _CHECKED

    server: Annotated[str, AfterValidator(_server_name)] | None
    refresh_at: float
    expires_at: float
    failures: int = 0
    text: str = ""
    broken: bool = False
    gone: bool = False


def delegation_after(previous: Delegation | None, found: WellKnown, now: float) -> Delegation:
    """The delegation to cache after the result `found` of a request at `now`."""
    if found.server is not None:
        return Delegation(found.server, now + _FRESH * found.life_s, now + found.life_s)
    failures = 1 if previous is None else previous.failures + 1
    if previous is not None and previous.server is not None and not found.gone:
        retry_at = min(now + _RETRY_REFRESH_S, previous.expires_at)
        return Delegation(previous.server, retry_at, previous.expires_at, failures)
    life = min(found.life_s * 2.0 ** min(failures - 1, 20), ERROR_MAX_S)
    refresh_at = now + life
    return Delegation(
        None, refresh_at, refresh_at + ERROR_MAX_S, failures, found.text, found.broken, found.gone
    )


_WELL_KNOWN: Final = "well_known"
Known = TypeVar("Known", bound=Delegation | Lookup)


class DiscoveryCache:
    """Two bounded caches on the clock of `trio`; the least recently used entry goes first.

    Attributes:
        most: entries that both can hold together.
    """

    def __init__(self, entries: int) -> None:
        self.most = 2 * entries
        # What differs from the database, the longest-known difference first.
        self._changed: dict[tuple[str, str], None] = {}
        self._delegations: TLRUCache[str, Delegation] = TLRUCache(
            entries, lambda _key, value, _now: value.expires_at, timer=trio.current_time
        )
        self._lookups: TLRUCache[tuple[str, str], Lookup] = TLRUCache(
            entries, lambda _key, value, _now: value.expires_at, timer=trio.current_time
        )

    def __len__(self) -> int:
        return len(self._delegations) + len(self._lookups)

    def delegation(self, host: str) -> Delegation | None:
        """The cached delegation of `host`, or None; also if it is due for a refresh."""
        return self._delegations.get(host)

    def keep_delegation(self, host: str, delegation: Delegation) -> None:
        """Remember a delegation until its `expires_at`."""
        self._delegations[host] = delegation
        self._differs(_WELL_KNOWN, host)

    def lookup(self, name: str, rdtype: RecordType) -> Lookup | None:
        """The cached look-up of a DNS name, or None."""
        return self._lookups.get((name, rdtype))

    def keep_lookup(self, name: str, rdtype: RecordType, lookup: Lookup) -> None:
        """Remember a lookup until its `expires_at`."""
        self._lookups[name, rdtype] = lookup
        self._differs(rdtype, name)

    def invalidate(self, host: str) -> None:
        """Drop the lookups about `host`; a delegation is asked for again, and holds meanwhile."""
        delegation = self._delegations.get(host)
        hosts = {host}
        if delegation is not None and delegation.server is not None:
            hosts.add(parse_server_name(delegation.server)[0].lower())
            self.keep_delegation(host, replace(delegation, refresh_at=trio.current_time()))
        for each in hosts:
            self._drop_lookups(each)

    def doubt(self, host: str) -> None:
        """Drop the lookups about `host`, and ask its .well-known again, whatever it said: what was
        found there answers, but not as this server.

        A delegation that is not confirmed holds for an hour at most.
        """
        delegation = self._delegations.get(host)
        self.invalidate(host)
        if delegation is not None:
            now = trio.current_time()
            until = min(delegation.expires_at, now + ERROR_MAX_S)
            self.keep_delegation(host, replace(delegation, refresh_at=now, expires_at=until))

    def _drop_lookups(self, host: str) -> None:
        names: list[tuple[str, RecordType]] = [(host, "A"), (host, "AAAA")]
        for service in SRV_SERVICES:
            lookup = self._drop_lookup(f"{service}.{host}", "SRV")
            for value in () if lookup is None else lookup.values:
                target = value.rpartition(" ")[2].removesuffix(".").lower()
                names += [(target, "A"), (target, "AAAA")]
        for name, rdtype in names:
            self._drop_lookup(name, rdtype)

    def _drop_lookup(self, name: str, rdtype: RecordType) -> Lookup | None:
        self._differs(rdtype, name)
        return self._lookups.pop((name, rdtype), None)

    def forget(self, host: str) -> None:
        """Drop everything about `host` and the server it is delegated to."""
        self.invalidate(host)
        self._differs(_WELL_KNOWN, host)
        self._delegations.pop(host, None)

    # What differs from the database

    @property
    def changed(self) -> bool:
        """Whether any entry differs from the database."""
        return bool(self._changed)

    def _differs(self, kind: str, name: str) -> None:
        self._changed[kind, name] = None
        if len(self._changed) > self.most:
            # The database takes nothing. What it misses is looked up again.
            del self._changed[next(iter(self._changed))]

    def take_changes(self, now_ms: int) -> "Changes":
        """Some differences from the database. Who cannot write them gives them back."""
        offset = now_ms / 1000 - trio.current_time()
        changes = Changes([], [])
        for kind, name in list(islice(self._changed, _STEP)):
            del self._changed[kind, name]
            known: Delegation | Lookup | None
            if kind == _WELL_KNOWN:
                known = self._delegations.get(name)
            else:
                known = self._lookups.get((name, kind))
            if known is None or (isinstance(known, Lookup) and known.failed):
                changes.gone.append((kind, name))
                continue
            filed = _moved(known, lambda at: at + offset)
            text = _ADAPTERS[type(filed)].dump_json(filed).decode()
            expires_ms = round(filed.expires_at * 1000)
            changes.found.append(Discovered(kind, name, expires_ms, text))
        return changes

    def give_back(self, changes: "Changes") -> None:
        """Mark changes that could not be written as still different from the database."""
        for kind, name in (*(row[:2] for row in changes.found), *changes.gone):
            self._differs(kind, name)

    def take_in(self, found: Discovered, now_ms: int) -> bool:
        """Remember a discovery of the database; returns False if it is of another form.

        One that has lapsed drops out. So does one that would live longer than any may: the wall
        clock was set back since.
        """
        now = trio.current_time()

        def moment(wall_s: float) -> float:
            return now + wall_s - now_ms / 1000

        if found.expires_ms - now_ms > _LIFE_MAX_S * 1000:
            return True
        try:
            if found.kind == _WELL_KNOWN:
                delegation = _ADAPTERS[Delegation].validate_json(found.value)
                self._delegations[found.name] = _moved(delegation, moment)
            else:
                lookup = _ADAPTERS[Lookup].validate_json(found.value)
                self._lookups[found.name, found.kind] = _moved(lookup, moment)
        except ValidationError:
            return False
        return True


# --- what outlives a restart ----------------------------------------------------------------------


class Saved(Protocol):
    """The sender's database, as this cache uses it; both raise StoreError."""

    async def discoveries(self, most: int) -> Sequence[Discovered]: ...
    async def save_discoveries(
        self, found: Sequence[Discovered], gone: Sequence[tuple[str, str]], most: int
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of the database: discoveries to write, and those to remove by (kind, name)."""

    found: list[Discovered]
    gone: list[tuple[str, str]]


_ADAPTERS: Final[Mapping[type, TypeAdapter[Any]]] = {
    each: TypeAdapter(each) for each in (Delegation, Lookup)
}


def _moved(known: Known, to: Callable[[float], float]) -> Known:
    """The same entry with its times by another clock; in the database they are of the wall's, s."""
    if isinstance(known, Delegation):
        known = replace(known, refresh_at=to(known.refresh_at))
    return replace(known, expires_at=to(known.expires_at))


async def load_cache(cache: DiscoveryCache, saved: Saved, runtime: Runtime) -> None:
    """Remember what was found before the start.

    Nothing here can keep a daemon from its start: a row of another form is dropped, and so are all
    of them if the database cannot be read now. The log says so once.
    """
    dropped = 0
    try:
        rows = await saved.discoveries(cache.most)
    except StoreError as error:
        _log.warning("discoveries_not_read", reason=str(error))
        return
    for start in range(0, len(rows), _STEP):
        for row in rows[start : start + _STEP]:
            dropped += not cache.take_in(row, runtime.now_ms())
        await trio.lowlevel.checkpoint()
    if dropped:
        _log.warning("discoveries_dropped", count=dropped, reason="rows of another form")


async def save_cache(cache: DiscoveryCache, saved: Saved, runtime: Runtime) -> None:
    """Write the changes, in steps that do not block the loop."""
    while cache.changed:
        changes = cache.take_changes(runtime.now_ms())
        try:
            await saved.save_discoveries(changes.found, changes.gone, cache.most)
        except StoreError as error:
            cache.give_back(changes)
            _log.warning("discoveries_not_saved", reason=str(error))
            return


async def keep_saved(cache: DiscoveryCache, saved: Saved, runtime: Runtime) -> None:
    """Write the changes once a minute, for ever."""
    while True:
        await trio.sleep(_SAVE_EVERY_S)
        await save_cache(cache, saved, runtime)
