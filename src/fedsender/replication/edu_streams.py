"""The streams of EDUs as Synapse's processes announce them, for an `EduSink`.

Receipts and device lists stand in the database: only their position is followed. Presence stands
there too, but most of it is other servers' and of no use. So its rows are taken as they come, and
only a gap is read from the database. Only their writer has typing, the servers to be told of
presence, and the EDUs of the `federation` stream: a gap is asked of it. When it starts anew it
counts from 0 again.

The writer of `federation` keeps its rows for five minutes, or until every sender has acknowledged
them. So they are acknowledged when they are with the sink, and not while a gap is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
import trio

from fedsender.matrix import is_server_name
from fedsender.replication.commands import Position
from fedsender.replication.feed_api import EduSink
from fedsender.replication.stream_updates import NotFetched
from fedsender.store.records import PresenceState
from fedsender.streams import HeardPositions, Json
from fedsender.waiting import again, doubling

log = structlog.get_logger()

EDU_STREAMS = frozenset(
    ("device_lists", "receipts", "typing", "presence", "presence_federation", "federation")
)
STORED_AS = {"device_lists": "device_lists_stream", "receipts": "receipts"}
"""Streams that are followed by position alone, and their names in `stream_positions`."""
IN_MEMORY = frozenset(("typing", "presence_federation", "federation"))
FETCH_S = 60.0
FETCHES = 4

Fetch = Callable[[str, str, int, int], Awaitable[Sequence[tuple[int, Json]]]]
"""Ask a writer for missed rows: (stream, instance, after, upto). Raises NotFetched."""

Acknowledge = Callable[[int], Awaitable[None]]
"""Acknowledge the `federation` stream up to this token."""


@dataclass(frozen=True, slots=True)
class _Missed:
    instance: str
    after: int
    upto: int

    def with_older(self, older: _Missed) -> _Missed:
        """Both in one, unless the writer is another one now, or counts anew."""
        if older.instance != self.instance or older.upto > self.after:
            return self
        return _Missed(self.instance, older.after, self.upto)


class EduStreams:
    """The EDU streams of a Synapse. `run` does the slow work; all other calls return at once."""

    def __init__(self, sink: EduSink, fetch: Fetch, acknowledge: Acknowledge) -> None:
        self._sink = sink
        self._fetch = fetch
        self._acknowledge = acknowledge
        # Of the others, which have one writer at a time: who it is, and where it stands.
        self._tokens: dict[str, tuple[str, int]] = {}
        self._connected: set[str] = set()
        self._missed: dict[str, _Missed] = {}
        self._asking: str | None = None
        self._news = trio.Event()
        self._held = trio.Event()

    def start(self, stream: str, stored: Mapping[str, int]) -> None:
        """Set the positions of the writers of one of `STORED_AS`, from the database."""
        self._tell_late(stream, self._heard(stream).start(stored, trio.current_time()))

    def begin(self) -> None:
        """Begin a new connection: no position is known until its writer has announced it."""
        self._connected.clear()
        for stream in STORED_AS:
            self._heard(stream).wait_anew(trio.current_time())

    def _hear(self, stream: str, writer: str, token: int) -> None:
        """Note the position of a writer of one of `STORED_AS`."""
        self._tell_late(stream, self._heard(stream).hear({writer: token}, trio.current_time()))

    def _heard(self, stream: str) -> HeardPositions:
        return self._sink.device_lists if stream == "device_lists" else self._sink.receipts

    def _tell_late(self, stream: str, late: Iterable[tuple[str, int, int]]) -> None:
        for gap in late:
            self._sink.written_late(stream, *gap)

    def position(self, said: Position) -> None:
        """Take a writer's announced position."""
        stream = said.stream
        if stream in STORED_AS:
            self._hear(stream, said.instance, said.token)
            return
        known = self._tokens.get(stream)
        self._tokens[stream] = (said.instance, said.token)
        self._connected.add(stream)
        if stream == "presence":
            if known is None:
                # What was written since the sender looked, it has to look for itself.
                self._sink.presence_missed(-1, said.token)
            elif known[1] < said.previous:
                self._sink.presence_missed(known[1], said.token)
            return
        anew = known is None or known[0] != said.instance or known[1] > said.token
        if anew and stream == "typing":
            self._sink.typing_reset()
        after = 0 if anew or known is None else known[1]
        if after < said.token and (anew or after < said.previous):
            if anew:
                self._missed.pop(stream, None)
            self._miss(stream, _Missed(said.instance, after, said.token))
        elif stream == "federation":
            self._held.set()

    def rows(self, stream: str, instance: str, token: int, rows: Sequence[Json]) -> bool:
        """Take the rows of one token.

        False: the writer counts anew, and its position must be asked for.
        """
        if stream in STORED_AS:
            self._hear(stream, instance, token)
            return True
        if stream not in self._connected:
            return True
        writer, known = self._tokens[stream]
        if writer != instance or (token < known and stream in IN_MEMORY):
            self._connected.discard(stream)
            return False
        if token > known:
            self._tokens[stream] = (instance, token)
            if stream == "federation" and self._gap_open:
                # What is missing comes first; and until we acknowledge this, it can be asked for.
                self._miss(stream, _Missed(instance, known, token))
                return True
            for row in rows:
                self._tell(stream, token, row)
            if stream == "federation":
                self._held.set()
        return True

    @property
    def _gap_open(self) -> bool:
        """Whether rows of `federation` are missing."""
        return self._asking == "federation" or "federation" in self._missed

    def _miss(self, stream: str, gap: _Missed) -> None:
        older = self._missed.get(stream)
        self._missed[stream] = gap if older is None else gap.with_older(older)
        self._news.set()

    async def run(self) -> None:
        """Fetch missed rows and acknowledge rows of `federation`, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._make_up_for_ever)
            nursery.start_soon(self._acknowledge_for_ever)

    async def _make_up_for_ever(self) -> None:
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._missed:
                self._asking = next(iter(self._missed))
                stream = self._asking
                await self._make_up(stream, self._missed.pop(stream))
                self._asking = None
                if stream == "federation":
                    self._held.set()

    async def _acknowledge_for_ever(self) -> None:
        while True:
            await self._held.wait()
            self._held = trio.Event()
            _, token = self._tokens.get("federation", ("", 0))
            # With a gap open, this is woken again when it is closed.
            if not self._gap_open:
                await self._acknowledge(token)

    async def _make_up(self, stream: str, gap: _Missed) -> None:
        async def fetch() -> Sequence[tuple[int, Json]]:
            try:
                with trio.fail_after(FETCH_S):
                    return await self._fetch(stream, gap.instance, gap.after, gap.upto)
            except trio.TooSlowError:
                raise NotFetched(f"no answer in {FETCH_S:.0f} s") from None

        try:
            found = await again(fetch, NotFetched, doubling(1.0, 4.0), tries=FETCHES)
        except NotFetched as error:
            newer = self._missed.get(stream)
            if newer is None:
                reason = str(error)
                log.warning("missed_rows_lost", stream=stream, writer=gap.instance, reason=reason)
            else:
                self._missed[stream] = newer.with_older(gap)
            return
        for token, row in found:
            self._tell(stream, token, row)

    def _tell(self, stream: str, token: int, row: Json) -> None:
        match row:
            case [str(room_id), list(users)] if stream == "typing":
                typists = [user for user in users if isinstance(user, str)]
                self._sink.typing(room_id, typists, token)
            case [str(server), str(user_id)] if stream == "presence_federation":
                self._sink.presence_wanted(server, user_id)
            case [str(user_id), str(state), int(active), _, _, status, bool(currently), *_] if (
                stream == "presence" and (status is None or isinstance(status, str))
            ):
                told = PresenceState(user_id, state, active, status, currently)
                self._sink.presence(told)
            case [str(kind), dict(data)] if stream == "federation":
                self._tell_federation(kind, data)

    def _tell_federation(self, kind: str, data: Mapping[str, Json]) -> None:
        """Tell the sink of a row of `federation`.

        It is an EDU, an EDU with a key, or presence for certain servers.
        """
        match kind, data:
            case "e", {"edu_type": str(), "destination": str()}:
                self._tell_edu(data, None)
            case "k", {"key": [*key], "edu": dict(edu)} if all(isinstance(k, str) for k in key):
                self._tell_edu(edu, key)
            case "pd", {"state": {"user_id": str(user_id)}, "dests": [*servers]}:
                for server in servers:
                    if isinstance(server, str) and is_server_name(server):
                        self._sink.presence_wanted(server, user_id)
            case _:
                log.debug("federation_row_ignored", kind=kind[:20])

    def _tell_edu(self, edu: Mapping[str, Json], key: Sequence[str] | None) -> None:
        match edu:
            case {"edu_type": str(kind), "destination": str(server), "content": dict(content)}:
                if is_server_name(server):
                    self._sink.edu(server, kind, content, key)
