"""A homeserver with a key and no memory: it joins rooms of A's, and records what A sends it.

It speaks as much of the federation API as A needs to believe in it: its key, joins and leaves,
invitations, and transactions, each of which it answers at once. Everything else is not found.
"""

import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import httpx
import orjson
import trio
import trustme
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.proxy import reserve
from tests.synapse.homeserver import Homeserver
from tests.synapse.recorder import Recording, Sent

from fedsender.federation.signing import SigningKey, authorization_header, signing_key_from_seed
from fedsender.matrix import RoomVersion, canonical_json, event_id_of, redact, room_version_of
from fedsender_lab.testing.http import Conversation, Reply, Request, TlsStream
from fedsender_lab.testing.rooms import Signer
from fedsender_lab.testing.rules import SEND

_FEDERATION = "/_matrix/federation"
_ANSWER_S = 60.0
# A key that is valid for as long as a test may run, in ms since the epoch: the year 2100.
_VALID_UNTIL_MS = 4_102_444_800_000


class RefusedByA(Exception):
    """A did not let us in, or out; the text is its answer."""


@dataclass(slots=True)
class Remote:
    """See the module; made by `open_remote`.

    Attributes:
        name: its server name, `address:port`.
        recording: what A sent it.
        latency_s: how long it takes to answer a transaction.
    """

    name: str
    recording: Recording
    _a: Homeserver
    _http: httpx.AsyncClient
    latency_s: float = 0.0
    _private: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    def user(self, localpart: str) -> str:
        """The id of a user of this server; all exist."""
        return f"@{localpart}:{self.name}"

    async def join(self, room_id: str, mxid: str) -> str:
        """`mxid` joins a room of A's through A; returns the event's id."""
        return await self._change_membership("join", room_id, mxid)

    async def leave(self, room_id: str, mxid: str) -> str:
        """`mxid` leaves a room of A's through A; returns the event's id."""
        return await self._change_membership("leave", room_id, mxid)

    async def _change_membership(self, membership: str, room_id: str, mxid: str) -> str:
        place = f"{quote(room_id, safe='')}/{quote(mxid, safe='')}"
        path = f"{_FEDERATION}/v1/make_{membership}/{place}"
        if membership == "join":
            path += "?" + "&".join(f"ver={number}" for number in range(1, 13))
        made = await self._ask("GET", path)
        # Synapse names no version where the room is of version 1.
        version = room_version_of(made.get("room_version", "1"))
        event = self._finish(made["event"], version)
        event_id = event_id_of(event, version)
        end = f"{quote(room_id, safe='')}/{quote(event_id, safe='')}"
        await self._ask("PUT", f"{_FEDERATION}/v2/send_{membership}/{end}", event)
        return event_id

    def _finish(self, template: Mapping[str, Any], version: RoomVersion) -> dict[str, Any]:
        """The event hashed and signed (server-server API, "Adding hashes and signatures")."""
        event = {k: v for k, v in template.items() if k not in ("unsigned", "signatures", "hashes")}
        digest = sha256(canonical_json(event)).digest()
        event["hashes"] = {"sha256": b64encode(digest).rstrip(b"=").decode()}
        return self._sign_event(event, version)

    def _sign_event(self, event: dict[str, Any], version: RoomVersion) -> dict[str, Any]:
        remains = redact(event, version)
        for name in ("signatures", "unsigned"):
            remains.pop(name, None)
        event.setdefault("signatures", {}).update(self._signer.signatures(canonical_json(remains)))
        return event

    @property
    def _signer(self) -> Signer:
        return Signer(self.name, self._key.key_id, self._private)

    @property
    def _key(self) -> SigningKey:
        return signing_key_from_seed("r", self._private.private_bytes_raw())

    async def _ask(self, method: str, path: str, content: object = None) -> dict[str, Any]:
        body = None if content is None else canonical_json(content)
        header = authorization_header(self.name, self._a.name, method, path, body, self._key)
        headers = {"Authorization": header, "Content-Type": "application/json"}
        answer = await self._http.request(
            method, f"https://{self._a.name}{path}", content=body, headers=headers
        )
        if answer.status_code != 200:
            raise RefusedByA(f"{method} {path}: {answer.status_code} {answer.text}")
        told: dict[str, Any] = answer.json()
        return told

    # --- what others ask of it, called by a connection --------------------------------------------

    def request_began(self, request: Request) -> None:
        """Nothing is counted."""

    def request_ended(self, request: Request, status: int | None) -> None:
        """Nothing is counted."""

    def reply_to(self, request: Request) -> Reply:
        """What this server says to a request that is there in whole."""
        if request.target.startswith("/_matrix/key/v2/server"):
            return Reply(200, orjson.dumps(self._keys()))
        if request.target.startswith(SEND):
            return self._take(request.target.removeprefix(SEND), orjson.loads(request.body))
        if request.target.startswith(f"{_FEDERATION}/v2/invite/"):
            invitation = orjson.loads(request.body)
            version = room_version_of(invitation["room_version"])
            event = self._sign_event(invitation["event"], version)
            return Reply(200, orjson.dumps({"event": event}))
        return Reply(404, b'{"errcode":"M_UNRECOGNIZED","error":"not here"}')

    def _take(self, transaction_id: str, content: Mapping[str, Any]) -> Reply:
        if content["origin"] == self._a.name:
            self.recording.add(Sent(transaction_id, content))
        return Reply(200, b'{"pdus":{}}', after=self.latency_s)

    def _keys(self) -> Mapping[str, Any]:
        told: dict[str, Any] = {
            "server_name": self.name,
            "valid_until_ts": _VALID_UNTIL_MS,
            "verify_keys": {self._key.key_id: {"key": self._key.public_key()}},
            "old_verify_keys": {},
        }
        return told | {"signatures": self._signer.signatures(canonical_json(told))}


@asynccontextmanager
async def open_remote(host: str, a: Homeserver, authority: trustme.CA) -> AsyncIterator[Remote]:
    """A new homeserver at a free port of `host` (a loopback address), until the body is left."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(trusting)
    with reserve(host) as held:
        port: int = held.getsockname()[1]
        async with (
            httpx.AsyncClient(verify=trusting, timeout=_ANSWER_S, trust_env=False) as http,
            trio.open_nursery() as nursery,
        ):
            remote = Remote(f"{host}:{port}", Recording(), a, http)

            async def converse(stream: trio.SocketStream) -> None:
                await Conversation(TlsStream(stream, context), remote).run()

            listener = trio.socket.socket()
            listener.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEPORT, 1)
            await listener.bind((host, port))
            listener.listen(64)
            nursery.start_soon(
                partial(trio.serve_listeners, converse, [trio.SocketListener(listener)])
            )
            yield remote
            nursery.cancel_scope.cancel()
