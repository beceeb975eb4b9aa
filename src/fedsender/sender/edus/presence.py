"""Presence: the changes that are sent, and their EDUs.

A homeserver notes many changes of a user that other servers need not hear of. Only the newest state
of each user waits for a server. The time since the user was active is computed when the EDU is made
(Matrix server-server API, "Presence").
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from fedsender.matrix import canonical_json
from fedsender.sender.transaction import Draft, Edu, Key
from fedsender.store.records import PresenceState

PRESENCE = "m.presence"
STATES_PER_EDU = 50
LIFETIME_S = 300.0
"""The age at which a state is dropped unsent."""
MAX_USERS = 100_000


def notable(old: PresenceState | None, new: PresenceState, granularity_ms: int) -> bool:
    """Whether other servers should hear of this change."""
    if old is None or (old.state, old.status_msg) != (new.state, new.status_msg):
        return True
    longer_active = new.last_active_ts - old.last_active_ts > granularity_ms
    if old.state != "online":
        return longer_active
    if old.currently_active != new.currently_active:
        return True
    # Who is active all the time is told once; the flag says the rest.
    return longer_active and not new.currently_active


class PresenceStates:
    """The last known states of our users; of more than `MAX_USERS`, those used last."""

    def __init__(self, granularity_ms: int) -> None:
        self._granularity_ms = granularity_ms
        self._states: LRUCache[str, PresenceState] = LRUCache(MAX_USERS)

    def get(self, user_id: str) -> PresenceState | None:
        """The user's last known state."""
        return self._states.get(user_id)

    def note(self, state: PresenceState) -> bool:
        """Remember the state; return whether other servers should hear of it."""
        old = self._states.get(state.user_id)
        self._states[state.user_id] = state
        return notable(old, state, self._granularity_ms)


def key_of(state: PresenceState) -> Key:
    """The key of a state; a newer state of the same key replaces an older one."""
    return (PRESENCE, state.user_id)


def entry(state: PresenceState, now_ms: int) -> dict[str, Any]:
    """The entry of one user in an EDU."""
    told: dict[str, Any] = {"user_id": state.user_id, "presence": state.state}
    if state.last_active_ts > 0:
        told["last_active_ago"] = max(0, now_ms - state.last_active_ts)
    if state.status_msg:
        told["status_msg"] = state.status_msg
    if state.state == "online":
        told["currently_active"] = state.currently_active
    return told


@dataclass(slots=True)
class _Waiting:
    state: PresenceState
    version: int
    expires_at: float


class PresenceQueue:
    """The states that wait for one server: one for each user, at most `limit`.

    `count` gets a reason ("expired", "replaced", "crowded out") and number of states lost.

    Attributes:
        waiting: by user, in the order in which the users came.
    """

    def __init__(self, limit: int, count: Callable[[str, int], None]) -> None:
        self._limit = limit
        self._count = count
        self.waiting: dict[Key, _Waiting] = {}
        self._version = 0

    def put(self, state: PresenceState, *, expires_at: float) -> None:
        """Queue this state, in the place of any other of its user."""
        self._version += 1
        key = key_of(state)
        if key in self.waiting:
            self._count("replaced", 1)
        elif len(self.waiting) >= self._limit:
            del self.waiting[next(iter(self.waiting))]
            self._count("crowded out", 1)
        self.waiting[key] = _Waiting(state, self._version, expires_at)

    def expire(self, now: float) -> None:
        """Drop the states that have expired."""
        stale = [key for key, item in self.waiting.items() if item.expires_at <= now]
        for key in stale:
            del self.waiting[key]
        if stale:
            self._count("expired", len(stale))

    def clear(self) -> None:
        """Forget all."""
        self.waiting.clear()

    def fill(self, draft: Draft, now_ms: int) -> None:
        """Put as many states as fit into the draft; they stay until they are answered."""
        items = list(self.waiting.items())
        for start in range(0, len(items), STATES_PER_EDU):
            if not draft.add_edu(_edu(items[start : start + STATES_PER_EDU], now_ms)):
                return

    def answered(self, taken: Iterable[tuple[Key, int]]) -> None:
        """Remove these versions, which arrived; a newer state of the same user stays."""
        for key, version in taken:
            item = self.waiting.get(key)
            if item is not None and item.version == version:
                del self.waiting[key]


def _edu(items: Sequence[tuple[Key, _Waiting]], now_ms: int) -> Edu:
    push = [entry(item.state, now_ms) for _, item in items]
    wire = canonical_json({"content": {"push": push}, "edu_type": PRESENCE})
    return Edu(PRESENCE, wire, keys=tuple((key, item.version) for key, item in items))
