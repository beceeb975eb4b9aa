"""A sender on an embedded store and the virtual clock; remote servers that do as they are told.

Everything is real but the network: the store is SQLite, inline; the ledger writes files; the
servers answer at the place where a connection would be lent.
"""

import hashlib
import json
import random
from base64 import urlsafe_b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import canonicaljson
import orjson
import trio
from tests.store.ready_made import lay

from fedsender.config import Config, Policies, Policy, from_values
from fedsender.config.sections import Ledger as Settings
from fedsender.embedded.facts import RelayRow
from fedsender.embedded.store import EmbeddedStore, own_store
from fedsender.federation.client import SendFailed, Unreachable
from fedsender.federation.transport import Answer, Response, answer_of
from fedsender.ledger import open_ledger
from fedsender.segments import read_lines, segments
from fedsender.sender.admission import Admission, Permit
from fedsender.sender.sender import Sender, open_sender
from fedsender.store import HomeserverSettings, Store, StoreConfig, open_store
from fedsender.streams import HostsRow, PduRow, RedactionRow
from fedsender.telemetry import Metrics
from fedsender_lab.testing.clock import virtual_runtime

T = TypeVar("T")

HS = "hs.example"
EPOCH_MS = 1_800_000_000_000
SENDING = {
    "max_in_flight": 100,
    # There is no network, so that what is measured is something else.
    "handshakes_per_second": 10_000,
}


@dataclass
class Request:
    """A transaction as a server saw it, and when (virtual seconds)."""

    at: float
    id: str
    body: bytes
    event_ids: Sequence[str]

    @property
    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = orjson.loads(self.body)
        return content

    @property
    def bodies(self) -> list[str]:
        """What its message PDUs say."""
        return [pdu["content"].get("body", pdu["type"]) for pdu in self.content["pdus"]]

    @property
    def edus(self) -> list[dict[str, Any]]:
        return list(self.content.get("edus", []))


Reply = Callable[[Request], Answer]


def answer(status: int, content: Any = None, *, retry_after_s: float | None = None) -> Answer:
    """What a server says."""
    response = Response(status, (), json.dumps(content).encode())
    named = list(content.get("pdus", ())) if isinstance(content, dict) else []
    said = answer_of(response, named, reused=True, now_ms=lambda: EPOCH_MS)
    return said._replace(text="", retry_after_s=retry_after_s)


def ok(request: Request) -> Answer:
    return answer(200, {"pdus": {}})


@dataclass
class RemoteServer:
    """One remote server: `down` refuses connections, `reply` answers, `latency` in seconds; `near`:
    there is a connection that was in use a moment ago."""

    name: str
    down: bool = False
    latency: float = 0.01
    near: bool = False
    reply: Reply = ok
    version: bool = True
    versions_asked: int = 0
    doubts: list[float] = field(default_factory=list)
    forgotten: list[float] = field(default_factory=list)
    attempts: list[float] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    answered: list[Request] = field(default_factory=list)
    in_flight: int = 0
    connecting: Callable[[], object] | None = None

    @property
    def got(self) -> list[str]:
        """What all PDUs say that it answered for, in order."""
        return [body for request in self.answered for body in request.bodies]


class FakePeer:
    def __init__(self, server: RemoteServer, permit: Permit) -> None:
        self.server = server
        self.permit = permit
        self.sent = False
        self._exchange: trio.CancelScope | None = None

    def at_hand(self) -> bool:
        """Each attempt connects, unless the server is near."""
        self.sent = False
        return self.server.near and self.permit.at_once()

    async def connect(self) -> None:
        await self.permit.handshake()
        await trio.sleep(0.01)
        self.server.attempts.append(trio.current_time())
        if self.server.connecting is not None:
            self.server.connecting()
        if self.server.down:
            raise Unreachable("refused", "connection refused")

    async def put_transaction(
        self, transaction_id: str, body: bytes, event_ids: Sequence[str]
    ) -> Answer:
        server = self.server
        self.permit.asked()
        assert server.in_flight == 0, "two transactions in flight"
        server.in_flight += 1
        try:
            self.sent = True
            request = Request(trio.current_time(), transaction_id, body, event_ids)
            server.requests.append(request)
            with trio.CancelScope() as self._exchange:
                await trio.sleep(server.latency)
            if server.down or self._exchange.cancelled_caught:
                raise SendFailed("closed", "connection lost", sent=True)
            reply = server.reply(request)
            if reply.is_answer:
                server.answered.append(request)
            sent = {each: text for each, text in reply.refused.items() if each in event_ids}
            return reply._replace(refused=sent)
        finally:
            server.in_flight -= 1

    def cut(self) -> None:
        if self._exchange is not None:
            self._exchange.cancel()

    def release(self) -> None: ...

    def forget(self) -> None:
        self.server.forgotten.append(trio.current_time())

    def doubt(self) -> None:
        self.server.doubts.append(trio.current_time())

    async def version_answers(self) -> bool:
        self.server.versions_asked += 1
        await trio.sleep(self.server.latency)
        return self.server.version and not self.server.down


class FakeClient:
    def __init__(self, servers: dict[str, RemoteServer]) -> None:
        self.servers = servers
        self.opened: defaultdict[str, list[Policy]] = defaultdict(list)

    @asynccontextmanager
    async def peer(self, name: str, policy: Policy, permit: Permit) -> AsyncIterator[FakePeer]:
        self.opened[name].append(policy)
        yield FakePeer(self.servers[name], permit)


class StepsOf(trio.abc.Instrument):
    """Counts the calls of one of our functions in each step of the loop.

    Attributes:
        most: the most of them in one step.
    """

    def __init__(self) -> None:
        self.most = self._now = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._now = 0

    def counting(self, function: Callable[..., T]) -> Callable[..., T]:
        """The same function, counted."""

        def counted(*args: Any, **values: Any) -> T:
            self._now += 1
            self.most = max(self.most, self._now)
            return function(*args, **values)

        return counted


class Silence:
    async def publish_backoff(self, server: str, stream_id: int, now_ms: int) -> None: ...
    async def publish_server_up(self, server: str) -> None: ...


class World:
    """A homeserver's history, remote servers, and a sender that can be started and killed."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.servers: dict[str, RemoteServer] = {}
        self.settings = settings
        self.slow_share = 0.25
        self.token = 0
        self.set_by_ms = 0
        self.sender: Sender
        self.store: Store
        self.metrics: Metrics
        self.faults: Callable[[str], None] | None = None
        self.runtime = virtual_runtime(
            random.Random(1),
            now_ms=lambda: EPOCH_MS + self.set_by_ms + round(trio.current_time() * 1000),
        )

    def server(self, name: str, **values: Any) -> RemoteServer:
        return self.servers.setdefault(name, RemoteServer(name, **values))

    def config(self) -> Config:
        sending = {**SENDING, **self.settings.get("sending", {})}
        values = {"server_name": HS, "signing_key": "none", **self.settings, "sending": sending}
        return from_values(values, directory=self.directory)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        settings = StoreConfig(
            HomeserverSettings("embedded", "fedsender", ("fedsender",)),
            lay(self.directory / "homeserver.sqlite3", "homeserver"),
            lay(self.directory / "sender.sqlite3", "sender"),
            synchronous="OFF",
        )
        async with open_store(settings, self.runtime, faults=self.faults) as self.store:
            yield self.store

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Sender]:
        """The sender, until the body is left; leave it by `kill` to leave as kill -9 would."""
        config = self.config()
        self.policies = Policies(config)
        self.client = FakeClient(self.servers)
        self.admission = Admission(
            max_in_flight=config.sending.max_in_flight,
            slow_share=self.slow_share,
            handshakes_per_second=config.sending.handshakes_per_second,
            loop=self.runtime.turns,
        )
        self.metrics = Metrics(HS)
        async with (
            self.open() as store,
            open_ledger(
                Settings(directory=self.directory / "ledger", keep=3650 * 86_400.0),
                "fedsender",
                self.runtime.entropy(4).hex(),
                self.runtime,
                self.metrics.ledger_failures,
            ) as ledger,
            open_sender(
                policies=self.policies,
                runtime=self.runtime,
                store=store,
                client=self.client,  # type: ignore[arg-type]  # no sockets
                ledger=ledger,
                metrics=self.metrics,
                admission=self.admission,
                announcer=Silence(),
            ) as self.sender,
        ):
            # As a feed does: it asks the database before it tells the sender anything.
            if isinstance(store.homeserver, EmbeddedStore):
                self.token = max(self.token, await store.homeserver.feed_position())
            else:
                await store.homeserver.event_writer_positions()
            self.sender.events.advance(self.token)
            yield self.sender

    def reload(self, sender: Sender) -> None:
        """Take over the settings as they are now."""
        self.policies.use(self.config())
        sender.use_policies()

    # --- the homeserver ---

    async def apply(self, *rows: RelayRow) -> int:
        """One token's rows; the sender, if it runs, is told."""
        self.token += 1
        await own_store(self.store.homeserver).apply_feed_batch([(self.token, rows)])
        if hasattr(self, "sender"):
            self.sender.redacted([row.target for row in rows if isinstance(row, RedactionRow)])
            self.sender.events.advance(self.token)
        return self.token

    async def join(self, room: str, *servers: str) -> int:
        for name in servers:
            self.server(name)
        return await self.apply(
            self.pdu(room, f"join {servers}", sender=f"@x:{servers[0]}"),
            HostsRow(room, tuple(servers), ()),
        )

    async def leave(self, room: str, server: str, *, by: str | None = None) -> int:
        """The last user of a server leaves, or is kicked by our user `by`."""
        sender = f"@x:{server}" if by is None else by
        pdu = self.pdu(
            room,
            f"{server} leaves",
            sender=sender,
            type="m.room.member",
            state_key=f"@x:{server}",
            content={"membership": "leave", "body": f"{server} leaves"},
        )
        return await self.apply(pdu, HostsRow(room, (), (server,)))

    async def say(self, room: str, text: str, **values: Any) -> int:
        return await self.apply(self.pdu(room, text, **values))

    async def redact(self, room: str, event_id: str) -> int:
        pdu = self.pdu(
            room, "redaction", type="m.room.redaction", extra={"redacts": event_id}, content={}
        )
        return await self.apply(pdu, RedactionRow(pdu.event_id, event_id))

    def pdu(
        self,
        room: str,
        text: str,
        *,
        sender: str = f"@a:{HS}",
        type: str = "m.room.message",
        state_key: str | None = None,
        content: dict[str, Any] | None = None,
        plus: Iterable[str] = (),
        minus: Iterable[str] = (),
        metadata: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        event_id: str | None = None,
    ) -> PduRow:
        """An event of room version 10, with the id that its content gives it."""
        event: dict[str, Any] = {
            "type": type,
            "room_id": room,
            "sender": sender,
            "content": {"body": text} if content is None else content,
            "depth": self.token + 1,
            "origin_server_ts": EPOCH_MS,
            "prev_events": ["$before"],
            "auth_events": [],
            "hashes": {"sha256": hashlib.sha256(text.encode()).hexdigest()},
            **(extra or {}),
        }
        if state_key is not None:
            event["state_key"] = state_key
        return PduRow(
            room_id=room,
            event_id=event_id or id_of(event),
            json=json.dumps(event),
            event=event,
            room_version="10",
            plus=tuple(plus),
            minus=tuple(minus),
            internal_metadata=metadata or {},
        )

    def ledger(self, destination: str | None = None) -> list[dict[str, Any]]:
        lines = [line for path in segments(self.directory / "ledger") for line in read_lines(path)]
        return [line for line in lines if destination in (None, line["destination"])]


# What redaction leaves of these event types' content in room version 10.
_KEPT = {"m.room.member": {"membership"}}
_TOP = {
    *("auth_events", "content", "depth", "event_id", "hashes", "membership", "origin"),
    *("origin_server_ts", "prev_events", "prev_state", "room_id", "sender", "state_key", "type"),
}


def id_of(event: dict[str, Any]) -> str:
    """The reference hash of an event of room version 10, by other code than the package's."""
    pruned = {key: value for key, value in event.items() if key in _TOP}
    kept = _KEPT.get(event["type"], set())
    pruned["content"] = {k: v for k, v in event["content"].items() if k in kept}
    digest = hashlib.sha256(canonicaljson.encode_canonical_json(pruned)).digest()
    return "$" + urlsafe_b64encode(digest).decode().rstrip("=")
