"""A person at a homeserver: as much of the Matrix client API as the tests speak."""

import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

# Longer than any answer takes; the deadlines that matter are those of the tests.
_ANSWER_S = 90.0
_LONG_POLL_MS = 10_000
# As long as Synapse lets it be: on a slow machine a daemon takes its time to start.
_TYPING_MS = 120_000
_TRIES = 10
PASSWORD = "of a test"
# A cut timeline would look like messages that are missing.
_WHOLE_TIMELINES = quote(json.dumps({"room": {"include_leave": True, "timeline": {"limit": 1000}}}))


class ClientApiError(Exception):
    """The homeserver refused; the text is its answer."""


@dataclass(slots=True)
class User:
    """A user who is logged in.

    Attributes:
        mxid: `@localpart:server`.
    """

    mxid: str
    _http: httpx.AsyncClient
    _transactions: Iterator[int] = field(default_factory=itertools.count)

    @property
    def token(self) -> str:
        """The access token."""
        return str(self._http.headers["Authorization"]).removeprefix("Bearer ")

    async def create_room(self, **settings: object) -> str:
        """The id of a new room; `settings` are those of the client API."""
        answer = await self._call("POST", "createRoom", settings)
        return str(answer["room_id"])

    async def invite(self, room_id: str, mxid: str) -> None:
        await self._call("POST", f"rooms/{quote(room_id)}/invite", {"user_id": mxid})

    async def join(self, room_id: str, via: str | None = None) -> None:
        """Join, through the server `via` if it is another's room."""
        query = f"?server_name={quote(via)}&via={quote(via)}" if via else ""
        await self._call("POST", f"join/{quote(room_id)}{query}", {})

    async def leave(self, room_id: str) -> None:
        await self._call("POST", f"rooms/{quote(room_id)}/leave", {})

    async def kick(self, room_id: str, mxid: str) -> None:
        await self._call("POST", f"rooms/{quote(room_id)}/kick", {"user_id": mxid})

    async def ban(self, room_id: str, mxid: str) -> None:
        await self._call("POST", f"rooms/{quote(room_id)}/ban", {"user_id": mxid})

    async def send(self, room_id: str, text: str) -> str:
        """Send a text message; returns its event id."""
        path = f"rooms/{quote(room_id)}/send/m.room.message/{next(self._transactions)}"
        answer = await self._call("PUT", path, {"msgtype": "m.text", "body": text})
        return str(answer["event_id"])

    async def send_all(self, room_id: str, texts: Sequence[str]) -> list[str]:
        """Send text messages one after the other; returns their event ids."""
        return [await self.send(room_id, text) for text in texts]

    async def set_state(self, room_id: str, kind: str, content: Mapping[str, object]) -> str:
        """Set a piece of state with an empty state key; returns its event id."""
        path = f"rooms/{quote(room_id)}/state/{kind}/"
        return str((await self._call("PUT", path, content))["event_id"])

    async def redact(self, room_id: str, event_id: str) -> str:
        """Take an event back; returns the redaction's id."""
        path = f"rooms/{quote(room_id)}/redact/{quote(event_id)}/{next(self._transactions)}"
        return str((await self._call("PUT", path, {}))["event_id"])

    async def membership(self, room_id: str, mxid: str) -> str | None:
        """The membership of `mxid` in the room as this homeserver sees it; None if unknown."""
        try:
            answer = await self._call(
                "GET", f"rooms/{quote(room_id)}/state/m.room.member/{quote(mxid)}"
            )
        except ClientApiError:
            return None
        return str(answer["membership"])

    async def read_until(self, room_id: str, last: str) -> list[str]:
        """Wait until the message `last` has arrived; all texts of the room as sync shows them."""
        texts: list[str] = []
        since = None
        while last not in texts:
            rooms, since = await self._sync(since)
            texts += texts_of(rooms.get("join", {}).get(room_id, {}))
        return texts

    async def wait_until_out(self, room_id: str, since: str | None = None) -> list[str]:
        """Wait until this user is out of the room; all texts of the room seen up to then.

        since: as of `place`. A first sync does not name a room in which the user never was.
        """
        texts: list[str] = []
        out: Mapping[str, Any] | None = None
        while out is None:
            rooms, since = await self._sync(since)
            out = rooms.get("leave", {}).get(room_id)
            texts += texts_of(out or rooms.get("join", {}).get(room_id, {}))
        return texts

    async def wait_for_membership(self, room_id: str, mxid: str, membership: str) -> None:
        """Return once this homeserver knows `mxid` to have that membership of the room."""
        since = None
        while await self.membership(room_id, mxid) != membership:
            _, since = await self._sync(since)

    # --- what is not an event of a room ---

    async def login(self, device_id: str) -> "User":
        """The same user on another device, which has encryption keys."""
        http = httpx.AsyncClient(
            base_url=self._http.base_url, timeout=_ANSWER_S, trust_env=False, verify=False
        )
        body = {
            "type": "m.login.password",
            "identifier": {"type": "m.id.user", "user": self.mxid},
            "password": PASSWORD,
            "device_id": device_id,
        }
        told = await _call(http, "POST", "login", body)
        http.headers["Authorization"] = f"Bearer {told['access_token']}"
        other = User(mxid=self.mxid, _http=http)
        keys = {f"ed25519:{device_id}": "a" * 43, f"curve25519:{device_id}": "b" * 43}
        device_keys = {
            "user_id": self.mxid,
            "device_id": device_id,
            "algorithms": ["m.megolm.v1.aes-sha2"],
            "keys": keys,
            "signatures": {self.mxid: {f"ed25519:{device_id}": "c" * 86}},
        }
        await other._call("POST", "keys/upload", {"device_keys": device_keys})
        return other

    async def logout(self) -> None:
        """The device is gone for good."""
        await self._call("POST", "logout", {})
        await self.aclose()

    async def send_to_device(self, mxid: str, text: str) -> None:
        """A message to all devices of `mxid`."""
        path = f"sendToDevice/org.example.test/{next(self._transactions)}"
        await self._call("PUT", path, {"messages": {mxid: {"*": {"text": text}}}})

    async def type_in(self, room_id: str, typing: bool = True) -> None:
        """Begin or end typing."""
        path = f"rooms/{quote(room_id)}/typing/{quote(self.mxid)}"
        await self._call("PUT", path, {"typing": typing, "timeout": _TYPING_MS})

    async def read(self, room_id: str, event_id: str) -> None:
        """Read the room up to this event, and let everybody see it."""
        path = f"rooms/{quote(room_id)}/receipt/m.read/{quote(event_id)}"
        await self._call("POST", path, {})

    async def be(self, presence: str, status: str) -> None:
        """Say how present one is."""
        body = {"presence": presence, "status_msg": status}
        await self._call("PUT", f"presence/{quote(self.mxid)}/status", body)

    async def upload_signing_keys(self, keys: Mapping[str, Any]) -> None:
        """New cross-signing keys, as the client API wants them."""
        auth = {
            "type": "m.login.password",
            "identifier": {"type": "m.id.user", "user": self.mxid},
            "password": PASSWORD,
        }
        await self._call("POST", "keys/device_signing/upload", {**keys, "auth": auth})

    async def devices_of(self, mxid: str) -> set[str]:
        """The devices with keys that this homeserver knows of a user."""
        answer = await self._call("POST", "keys/query", {"device_keys": {mxid: []}})
        return set(answer["device_keys"].get(mxid, {}))

    async def place(self) -> str:
        """How far sync has come: what happens later is told after it."""
        return str((await self._call("GET", "sync"))["next_batch"])

    async def synced(self, since: str) -> AsyncGenerator[Mapping[str, Any], None]:
        """All that sync says after this place."""
        while True:
            query = f"since={quote(since)}&timeout={_LONG_POLL_MS}"
            answer = await self._call("GET", f"sync?{query}")
            since = answer["next_batch"]
            yield answer

    async def _sync(self, since: str | None) -> tuple[Mapping[str, Any], str]:
        """The rooms in which something happened after `since`, at once or when it happens."""
        query = f"filter={_WHOLE_TIMELINES}"
        if since is not None:
            query += f"&since={quote(since)}&timeout={_LONG_POLL_MS}"
        answer = await self._call("GET", f"sync?{query}")
        return answer.get("rooms", {}), answer["next_batch"]

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        return await _call(self._http, method, path, body)


async def _call(
    http: httpx.AsyncClient, method: str, path: str, body: object = None
) -> dict[str, Any]:
    """One call of the client API; raises ClientApiError for any answer but 200.

    After its database was restarted Synapse answers 500 once for each connection in its pool.
    """
    for _ in range(_TRIES):
        answer = await http.request(method, f"/_matrix/client/v3/{path}", json=body)
        if answer.status_code != 500:
            break
    if answer.status_code != 200:
        raise ClientApiError(f"{method} {path}: {answer.status_code} {answer.text}")
    content: dict[str, Any] = answer.json()
    return content


def texts_of(room: Mapping[str, Any]) -> list[str]:
    """The bodies of the messages in a room's part of a sync answer."""
    events = room.get("timeline", {}).get("events", [])
    return [e["content"]["body"] for e in events if e["type"] == "m.room.message"]


async def register(client_url: str, localpart: str) -> User:
    """A new user, logged in."""
    http = httpx.AsyncClient(base_url=client_url, timeout=_ANSWER_S, trust_env=False, verify=False)
    body = {
        "username": localpart,
        "password": PASSWORD,
        "auth": {"type": "m.login.dummy"},
    }
    told = await _call(http, "POST", "register", body)
    http.headers["Authorization"] = f"Bearer {told['access_token']}"
    return User(mxid=told["user_id"], _http=http)
