"""What the tests of replication share: a sender that only notes, a network by hand."""

from __future__ import annotations

import random
import ssl
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
import trio.testing

from fedsender.config import TcpAddress
from fedsender.fairness import Payer
from fedsender.replication.endpoint import Endpoint
from fedsender.runtime import NameNotFound, Records, RecordType, Runtime, real_runtime
from fedsender.store.records import PresenceState
from fedsender.streams import HeardPositions
from fedsender.waiting import Watermark

SERVER = "hs.example"
ANYWHERE = Endpoint(TcpAddress("192.0.2.1", 9092))


class RecordingEduSink:
    """Notes what it is told: typing as (room, users, token), "reset"; presence; gaps; pings."""

    def __init__(self) -> None:
        self.device_lists = HeardPositions()
        self.receipts = HeardPositions()
        self.typed: list[tuple[str, list[str], int] | str] = []
        self.states: list[PresenceState] = []
        self.gaps: list[tuple[int, int]] = []
        self.late: list[tuple[str, str, int, int]] = []
        self.wanted: list[tuple[str, str]] = []
        self.sent: list[tuple[str, str, Any, Any]] = []

    def written_late(self, stream: str, writer: str, after: int, upto: int) -> None:
        self.late.append((stream, writer, after, upto))

    def typing(self, room_id: str, users: Sequence[str], token: int) -> None:
        self.typed.append((room_id, list(users), token))

    def typing_reset(self) -> None:
        self.typed.append("reset")

    def presence(self, state: PresenceState) -> None:
        self.states.append(state)

    def presence_missed(self, after: int, upto: int) -> None:
        self.gaps.append((after, upto))

    def presence_wanted(self, server: str, user_id: str) -> None:
        self.wanted.append((server, user_id))

    def edu(
        self, server: str, edu_type: str, content: Mapping[str, Any], key: Sequence[str] | None
    ) -> None:
        self.sent.append((server, edu_type, content, key))


class RecordingSink:
    """A sender that only notes what it is told."""

    def __init__(self) -> None:
        self.events = Watermark()
        self.edus = RecordingEduSink()
        self.up: list[str] = []
        self.backoffs: list[str] = []
        self.to_device: list[str] = []
        self.redactions: list[str] = []

    def server_up(self, server: str) -> None:
        self.up.append(server)

    def backoff_changed(self, server: str) -> None:
        self.backoffs.append(server)

    def to_device_changed(self, server: str) -> None:
        self.to_device.append(server)

    def redacted(self, event_ids: Collection[str]) -> None:
        self.redactions += event_ids


class HandNetwork:
    """Connections are made by what the test has put in `answers`: a function that is given the
    server's end, or an error; `otherwise` where there is nothing."""

    def __init__(self) -> None:
        self.answers: deque[Callable[[trio.abc.Stream], None] | OSError] = deque()
        self.otherwise: Callable[[trio.abc.Stream], None] | OSError = OSError("refused")
        self.tried_at: list[float] = []

    async def open_tcp(self, address: str, port: int, source: str | None = None) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        self.tried_at.append(trio.current_time())
        answer = self.answers.popleft() if self.answers else self.otherwise
        if isinstance(answer, OSError):
            raise answer
        ours, theirs = trio.testing.memory_stream_pair()
        answer(theirs)
        return ours

    async def open_unix(self, path: Path) -> trio.abc.Stream:
        return await self.open_tcp(str(path), 0)

    async def start_tls(
        self,
        stream: trio.abc.Stream,
        context: ssl.SSLContext,
        server_hostname: str,
        payer: Payer | None = None,
    ) -> trio.abc.Stream:
        raise NotImplementedError

    async def resolve(
        self, name: str, rdtype: RecordType, nameservers: Sequence[tuple[str, int]] = ()
    ) -> Records:
        raise NameNotFound(name, ttl_s=0)

    async def deserted(self, streams: Sequence[trio.abc.Stream]) -> list[trio.abc.Stream]:
        return []


def runtime_with(network: HandNetwork) -> Runtime:
    """The real runtime, but for the network and the dice."""
    return replace(real_runtime(), network=network, random=random.Random(7))
