"""Typing: the users that type in each room, their changes, and the typing that is sent again.

A receiver forgets a typing user after a while, so typing is sent to it repeatedly (Matrix
server-server API, "Typing notifications"). The homeserver names the whole set of users that type in
a room each time that set changes. Of two sets the one with the larger token is newer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TYPING = "m.typing"
KEEP_ALIVE_S = 40.0
FORGET_S = 600.0
"""The time without news after which a room is forgotten: its users are not typing any more."""
LIFETIME_S = 60.0
"""The age at which a notification is dropped unsent."""
MAX_ROOMS = 10_000


@dataclass(frozen=True, slots=True)
class Typing:
    """A user begins or goes on typing in a room, or has stopped."""

    room_id: str
    user_id: str
    typing: bool

    @property
    def key(self) -> tuple[str, ...]:
        """The key of a change; a newer change of the same key replaces an older one."""
        return (TYPING, self.room_id, self.user_id)

    def content(self) -> Mapping[str, Any]:
        """The content of the EDU."""
        return {"room_id": self.room_id, "user_id": self.user_id, "typing": self.typing}


@dataclass(slots=True)
class _Room:
    token: int
    heard_at: float
    users: dict[str, float] = field(default_factory=dict)  # user -> when it was last told


class TypingRooms:
    """The rooms in which our users type. Times are seconds on any one clock."""

    def __init__(self) -> None:
        self._rooms: dict[str, _Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def update(self, room_id: str, users: Iterable[str], token: int, now: float) -> list[Typing]:
        """Note our users that type in the room now; return the changes to send.

        An older token than the room's last one changes nothing. Beyond `MAX_ROOMS` further rooms
        are not followed.
        """
        room = self._rooms.get(room_id)
        if room is None:
            if len(self._rooms) >= MAX_ROOMS:
                return []
            room = self._rooms[room_id] = _Room(token - 1, now)
        if token <= room.token:
            return []
        wanted = set(users)
        stopped, began = room.users.keys() - wanted, wanted - room.users.keys()
        room.token, room.heard_at = token, now
        room.users = {user: room.users.get(user, now) for user in wanted}
        return [
            *(Typing(room_id, user, False) for user in sorted(stopped)),
            *(Typing(room_id, user, True) for user in sorted(began)),
        ]

    def due(self, now: float) -> list[Typing]:
        """The typing that must be sent again now. Rooms without news are forgotten."""
        again: list[Typing] = []
        for room_id, room in list(self._rooms.items()):
            # The token of a room where nobody types any more only guards against late rows.
            patience = FORGET_S if room.users else LIFETIME_S
            if now - room.heard_at >= patience:
                del self._rooms[room_id]
                continue
            for user, told in room.users.items():
                if now - told >= KEEP_ALIVE_S:
                    room.users[user] = now
                    again.append(Typing(room_id, user, True))
        return again

    def reset(self) -> None:
        """Forget all rooms: tokens start from 0 again, and all users that type will be named."""
        self._rooms.clear()
