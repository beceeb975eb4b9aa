"""Messages of the size that the figures are quoted for."""

from base64 import b64decode, b64encode
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.matrix import ROOM_VERSIONS
from fedsender.testing.rooms import Event, Signer, new_timeline

SERVER_NAME = "hs.bench"
KEY_ID = "ed25519:a_bench"
ROOM_VERSION = "10"
TEXT = "x" * 380
"""With it a message has about 960 bytes: 50 of them make the 48 KB of a full transaction."""


def encode_seed(seed: bytes) -> str:
    """A signing key's seed, for a child."""
    return b64encode(seed).decode()


def signer(encoded_seed: str) -> Signer:
    """What the homeserver signs its events with."""
    key = Ed25519PrivateKey.from_private_bytes(b64decode(encoded_seed))
    return Signer(SERVER_NAME, KEY_ID, key)


class Room:
    """A room of a local user, who talks."""

    def __init__(self, number: int, signer: Signer, now_ms: int) -> None:
        self.creator = f"@creator:{SERVER_NAME}"
        self._signer = signer
        self._now_ms = now_ms
        self._timeline = new_timeline(ROOM_VERSIONS[ROOM_VERSION], f"room{number}", self.creator)
        self._state("m.room.create", "", {"room_version": ROOM_VERSION, "creator": self.creator})
        self._state("m.room.member", self.creator, {"membership": "join"})
        self._state("m.room.power_levels", "", {"users": {self.creator: 100}})

    @property
    def room_id(self) -> str:
        return self._timeline.room_id

    def _state(self, kind: str, state_key: str, content: dict[str, Any]) -> None:
        self._append(kind, content, state_key=state_key)

    def say(self, stamp: int | None = None) -> Event:
        """A message; `stamp` travels with it."""
        content: dict[str, Any] = {"msgtype": "m.text", "body": TEXT}
        if stamp is not None:
            content["sent_us"] = stamp
        return self._append("m.room.message", content)

    def _append(self, kind: str, content: dict[str, Any], *, state_key: str | None = None) -> Event:
        return self._timeline.append(
            kind,
            self.creator,
            content,
            signer=self._signer,
            now_ms=self._now_ms,
            state_key=state_key,
        )
