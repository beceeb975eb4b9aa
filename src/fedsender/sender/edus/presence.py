"""Presence: the changes that are sent, and their EDUs.

A homeserver notes many changes of a user that other servers need not hear of. Only the newest state
of each user waits for a server. The time since the user was active is computed when the EDU is made
(Matrix server-server API, "Presence").
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cachetools import LRUCache

from fedsender.matrix import MAX_EDU_BYTES, canonical_json
from fedsender.sender.transaction import Key, Ready
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


def edu_of(states: Sequence[PresenceState], now_ms: int) -> Ready:
    """The EDU of these states, at most `STATES_PER_EDU`.

    A status message with which one state alone would be too large is left out.
    """
    push = [entry(state, now_ms) for state in states]
    wire = canonical_json({"content": {"push": push}, "edu_type": PRESENCE})
    if len(wire) > MAX_EDU_BYTES and len(states) == 1 and states[0].status_msg:
        return edu_of([replace(states[0], status_msg=None)], now_ms)
    return PRESENCE, wire
