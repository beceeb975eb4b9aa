"""The homeserver's side of the append endpoint, for homeservers in Python.

    async with IntakeClient.at("unix:/run/fedsender/append.sock", token) as sender:
        token = await sender.append([["pdu", [room_id, event_id, event, about]]], id=event_id)

When `append` returns, the sender has stored the rows. It tries again, with the same id, for as long
as the sender is away or full: cancel it to stop waiting. Of several senders on one store it finds
the one that takes the appends. A relay is asked in the same way. It runs on Trio and on asyncio.
"""

from __future__ import annotations

import json
import random
import secrets
import ssl
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import anyio
import httpx

from fedsender.config.values import HttpPeer, UnixAddress, parse_http_peer
from fedsender.embedded.facts import (
    EPHEMERAL_STREAMS,
    MAX_RECORD_BYTES,
    MAX_ROWS,
    RoomServers,
)
from fedsender.http.server import MAX_PARTS
from fedsender.streams import Json
from fedsender.tls import client_context

T = TypeVar("T")

PREFIX: Final = "/_fedsender/intake/v1"
FIRST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 10.0
# Longer than the endpoint takes before it gives up.
TIMEOUT_S: Final = 90.0
OUTCOMES_WAIT_S: Final = 30
SERVERS_IN_ROW: Final = 1000
"""So many names fit into a row, however long they are."""


class Refused(Exception):
    """The sender has understood, and says no; trying again would not help.

    Attributes:
        status, errcode: of its answer.
    """

    def __init__(self, status: int, errcode: str, error: str) -> None:
        super().__init__(f"{error} ({status} {errcode})")
        self.status = status
        self.errcode = errcode


class NotTrusted(Exception):
    """The listener at the address does not prove in TLS that it is the right one; trying again
    would not help: the address or `ca_file` is wrong, or the certificate."""


class ReservationLost(Refused):
    """The reservation lapsed, or the sender was restarted. Reserve again, and append by that."""


class EpochOver(Refused):
    """The epoch that the append named is over, and nothing was taken. Ask for the position, and
    append again what is not stored, before anything newer."""


class OutcomesLost(Refused):
    """The ledger is not kept back to the cursor: some outcomes will never be told.

    Attributes:
        oldest: the cursor at which the ledger begins now; None: it is empty.
    """

    def __init__(self, status: int, errcode: str, error: str, oldest: str | None) -> None:
        super().__init__(status, errcode, error)
        self.oldest = oldest


@dataclass(frozen=True, slots=True)
class Position:
    """The position of the homeserver's events; docs/homeservers.md explains each number.

    Attributes:
        delivered: speaks of events only, and not of EDUs.
        fanned_out, delivered, servers, behind: None while the sender begins; and of a relay.
        first: only of a relay: the oldest token in its log.
    """

    epoch: str
    stored: int
    fanned_out: int | None = None
    delivered: int | None = None
    servers: int | None = None
    behind: int | None = None
    first: int | None = None


@dataclass(frozen=True, slots=True)
class EventOutcome:
    """The outcome of one attempt to bring one event to one server.

    Attributes:
        token: the event's.
        server: `*`: all servers.
        outcome: a word of docs/ledger.md, "Outcomes of events".
        ms: when, in milliseconds since the epoch.
        supersedes: the tokens of its room, both ends included, that the event stands in for.
    """

    event_id: str
    token: int
    server: str
    outcome: str
    ms: int
    transaction_id: str | None
    reason: str | None
    supersedes: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The next outcomes of the ledger, in its order.

    Attributes:
        cursor: where to go on after these.
    """

    outcomes: Sequence[EventOutcome]
    cursor: str


class ServersOutdated(Refused):
    """Later rows are about the servers of rooms that were read `as_of` an older token.

    Attributes:
        rooms: the stored servers of the first of these rooms.
    """

    def __init__(self, status: int, errcode: str, error: str, rooms: Sequence[RoomServers]) -> None:
        super().__init__(status, errcode, error)
        self.rooms = rooms


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to append: rows that belong together.

    Attributes:
        rows: as docs/homeservers.md says; none, with a reservation: the work came to nothing.
        id: the caller's, the same whenever the same rows are sent.
    """

    rows: Sequence[Json]
    id: str
    reservation: str | None = None

    def as_json(self) -> dict[str, Json]:
        """The record as the endpoint takes it."""
        said: dict[str, Json] = {"id": self.id, "rows": list(self.rows)}
        if self.reservation is not None:
            said["reservation"] = self.reservation
        return said


class IntakeClient:
    """Appends to a sender or a relay; for any number of tasks."""

    def __init__(self, https: Sequence[httpx.AsyncClient]) -> None:
        """`https`: one for each address."""
        self._https = https
        self._at = 0

    @classmethod
    @asynccontextmanager
    async def at(
        cls, addresses: str | Sequence[str], token: str, *, ca_file: str | None = None
    ) -> AsyncIterator[IntakeClient]:
        """The client of the listener at `host:port`, `https://host:port` or `unix:/path`: a relay,
        or a sender, or at several addresses senders that share a store.

        Args:
            token: as it stands in its file; white space around it is no part of it.
            ca_file: certificates to trust there; None takes the system's.

        Raises ValueError for an address or a token that is none, and OSError for the file.
        """
        async with AsyncExitStack() as stack:
            https = []
            for address in [addresses] if isinstance(addresses, str) else addresses:
                http = _http_client(parse_http_peer(address), token, ca_file)
                https.append(await stack.enter_async_context(http))
            yield cls(https)

    async def append(
        self, rows: Sequence[Json], *, id: str | None = None, reservation: str | None = None
    ) -> int | None:
        """Append one record; its token. Raises the errors of `append_all`.

        Args:
            id: without one a random one is used, good for the retries of this call only.
        """
        record = NewRecord(rows, id or secrets.token_hex(16), reservation)
        return (await self.append_all([record]))[0]

    async def append_all(
        self, records: Sequence[NewRecord], *, epoch: str | None = None
    ) -> list[int | None]:
        """Append records, in this order; their tokens, None where there were no rows.

        Tries until they are on disk.

        Args:
            epoch: of the last `position`; None: they may come before what a restored store lacks.

        Raises:
            EpochOver.
            Refused: a row that the sender does not take, an id that came with other rows, a token
                that is not the sender's; none of them is there then, unless the id was.
            ReservationLost, ServersOutdated.
            NotTrusted: as does every other method that asks.
        """
        tokens: list[int | None] = (await self._append(records, epoch))["tokens"]
        return tokens

    async def append_to_sign(
        self, records: Sequence[NewRecord], *, epoch: str | None = None
    ) -> list[tuple[int | None, dict[str, Any] | None]]:
        """The same at a sender with `sign_events`; the token of each record, and its event.

        `event_id`, `hashes` and `signatures` of it; None for a record without an event.
        """
        answer = await self._append(records, epoch)
        return list(zip(answer["tokens"], answer["events"], strict=True))

    async def _append(
        self, records: Sequence[NewRecord], epoch: str | None = None
    ) -> dict[str, Any]:
        named = {} if epoch is None else {"epoch": epoch}
        appends = [each.as_json() for each in records]
        return await self._until_done("append", {"appends": appends, **named})

    async def set_servers(
        self, rooms: Mapping[str, Collection[str]], *, as_of: int | None = None
    ) -> None:
        """Tell the servers of each of the rooms: these and no others, for later events.

        In one record, or in several if there are more rooms than one holds.

        Args:
            as_of: the newest token, by `position`, before the rooms were read.

        Raises:
            ServersOutdated: some records may be stored. Ask for the position and read the rooms
                again.
            Refused.
        """
        for rows in _records_of(rooms, as_of):
            await self.append(rows)

    async def room_servers(self, room_id: str) -> RoomServers | None:
        """The stored servers of a room; None: no row was about them. Raises Refused."""
        try:
            found = await self._until_done(f"rooms/{quote(room_id, safe='')}", None)
        except Refused as refused:
            if refused.errcode == "M_NOT_FOUND":
                return None
            raise
        return _room_of(found)

    async def reserve(self, writer: str, count: int = 1) -> list[str]:
        """Reserve places for work that begins. Raises Refused."""
        answer = await self._until_done("reserve", {"writer": writer, "count": count})
        places: list[str] = answer["reservations"]
        return places

    @asynccontextmanager
    async def reserved(self, writer: str) -> AsyncIterator[str]:
        """A place for the work in the body; given up if the body fails before it appended."""
        (place,) = await self.reserve(writer)
        try:
            yield place
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await self._give_up(place)
            raise

    async def _give_up(self, place: str) -> None:
        record = NewRecord((), secrets.token_hex(16), place)
        try:
            await self._ask("append", {"appends": [record.as_json()]})
        except (Refused, _Later):
            # Completed already, or gone; if not, it lapses.
            return

    async def ephemeral(self, **rows: Sequence[Json]) -> None:
        """Hand on rows of `EPHEMERAL_STREAMS`; lost if no address takes them.

        Raises Refused.
        """
        if unknown := set(rows) - set(EPHEMERAL_STREAMS):
            raise ValueError(f"no such stream: {', '.join(sorted(unknown))}")
        for _ in self._https:
            try:
                await self._ask("ephemeral", {name: list(each) for name, each in rows.items()})
            except _Later:
                continue
            return

    async def position(self) -> Position:
        """The position of the homeserver's events. Raises Refused."""
        return _known(Position, await self._until_done("position", None))

    def outcomes(self, after: str | None = None) -> AsyncIterator[Outcomes]:
        """The outcomes of events since this cursor, for ever; None: since the oldest that is kept.

        Iterating raises OutcomesLost, Refused.
        """
        return _Pages(self._until_done, after)

    async def _until_done(self, what: str, body: dict[str, Json] | None) -> dict[str, Any]:
        wait_s = FIRST_WAIT_S
        for tries in count(1):
            try:
                return await self._ask(what, body)
            except _Later:
                if tries % len(self._https):
                    continue
                # All who wait for the same sender must not come back at the same moment.
                await anyio.sleep(wait_s * random.uniform(0.5, 1.5))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise AssertionError

    async def _ask(self, what: str, body: dict[str, Json] | None) -> dict[str, Any]:
        at = self._at
        try:
            response = await self._https[at].send(self._request(self._https[at], what, body))
            answer = response.json() if response.status_code != 502 else {}
        except (httpx.TransportError, ValueError) as error:
            if (why := _distrust(error)) is not None:
                raise NotTrusted(f"{self._https[at].base_url}: {why}") from error
            self._leave(at)
            raise _Later from error
        if response.status_code == 200 and isinstance(answer, dict):
            return answer
        if response.status_code >= 500 or response.status_code == 408:
            self._leave(at)
            raise _Later
        said = answer if isinstance(answer, dict) else {}
        errcode, error_text = str(said.get("errcode")), str(said.get("error"))
        if errcode == "FEDSENDER_GAP":
            raise OutcomesLost(response.status_code, errcode, error_text, said.get("oldest"))
        if errcode == "FEDSENDER_SERVERS_OUTDATED":
            rooms = [_room_of(room) for room in said["rooms"]]
            raise ServersOutdated(response.status_code, errcode, error_text, rooms)
        kind = _REFUSALS.get(errcode, Refused)
        raise kind(response.status_code, errcode, error_text)

    def _leave(self, at: int) -> None:
        """Go on to the next address, unless another task has done so."""
        if self._at == at:
            self._at = (at + 1) % len(self._https)

    @staticmethod
    def _request(http: httpx.AsyncClient, what: str, body: dict[str, Json] | None) -> httpx.Request:
        if body is None:
            return http.build_request("GET", f"{PREFIX}/{what}")
        # Our own text, since httpx's would not take half a surrogate pair.
        content = json.dumps(body, separators=(",", ":")).encode()
        url = http.base_url.join(f"{PREFIX}/{what}")
        size = {"Host": url.netloc.decode(), "Content-Length": str(len(content))}
        headers = {**http.headers, **size}
        return httpx.Request("POST", url, headers=headers, stream=_Body(content))


_REFUSALS: Final = {
    "FEDSENDER_OTHER_EPOCH": EpochOver,
    "FEDSENDER_RESERVATION_GONE": ReservationLost,
}


def _http_client(peer: HttpPeer, token: str, ca_file: str | None) -> httpx.AsyncClient:
    where = peer.address
    path = str(where.path) if isinstance(where, UnixAddress) else None
    verify = client_context(ca_file) if peer.tls else False
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError("the token has characters that no header takes")
    return httpx.AsyncClient(
        base_url=str(peer) if peer.tls else f"http://{'relay' if path else where}",
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        timeout=TIMEOUT_S,
        transport=httpx.AsyncHTTPTransport(uds=path, verify=verify),
        trust_env=False,
    )


def _distrust(error: BaseException | None) -> str | None:
    """The objection of TLS to the other side, by the errors that led to this one; None: none."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {error.verify_message}"
        if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
            return "it does not speak TLS"
        error = error.__cause__ or error.__context__
    return None


def _known(kind: type[T], said: Mapping[str, Any]) -> T:
    """`said` without the members that only a newer daemon sends."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: said[name] for name in names if name in said})


class _Pages:
    """Pages of outcomes; no generator, so that it can be left at any page."""

    def __init__(
        self,
        ask: Callable[[str, dict[str, Json] | None], Awaitable[dict[str, Any]]],
        after: str | None,
    ) -> None:
        self._ask = ask
        self._after = after

    def __aiter__(self) -> _Pages:
        return self

    async def __anext__(self) -> Outcomes:
        while True:
            asked = {"wait_s": str(OUTCOMES_WAIT_S), "after": self._after or ""}
            answer = await self._ask(f"outcomes?{urlencode(asked)}", None)
            if answer["cursor"] != self._after:
                self._after = cursor = answer["cursor"]
                said = [_known(EventOutcome, each) for each in answer["outcomes"]]
                return Outcomes(said, cursor)


def _room_of(said: Mapping[str, Any]) -> RoomServers:
    return RoomServers(said["room_id"], said["token"], said["servers"])


def _records_of(
    rooms: Mapping[str, Collection[str]], as_of: int | None
) -> Iterator[list[list[Json]]]:
    """Rows that name the servers of rooms, in records of allowed size; a room is in one of them."""
    record: list[list[Json]] = []
    # Of rows, bytes, and parts but for those around the rows.
    most = (MAX_ROWS, MAX_RECORD_BYTES, MAX_PARTS - 10)
    held = [0, 0, 0]
    for room_id, servers in rooms.items():
        rows = _rows_of(room_id, sorted(servers), as_of)
        text = json.dumps(rows, separators=(",", ":"))
        added = [len(rows), len(text), sum(map(text.count, "[{,"))]
        held = [sum(each) for each in zip(held, added, strict=True)]
        if record and any(here > allowed for here, allowed in zip(held, most, strict=True)):
            yield record
            record, held = [], added
        record += rows
    if record:
        yield record


def _rows_of(room_id: str, servers: list[str], as_of: int | None) -> list[list[Json]]:
    """The rows of one room: those that do not fit into the first one join it."""
    about: list[Json] = [] if as_of is None else [{"as_of": as_of}]
    rows: list[list[Json]] = [["servers", [room_id, servers[:SERVERS_IN_ROW], *about]]]
    for start in range(SERVERS_IN_ROW, len(servers), SERVERS_IN_ROW):
        rows.append(["hosts", [room_id, servers[start : start + SERVERS_IN_ROW], []]])
    return rows


class _Body(httpx.AsyncByteStream):
    """A body, for one request: no generator, which a connection that breaks would leave behind."""

    def __init__(self, content: bytes) -> None:
        self._pieces = [content]

    def __aiter__(self) -> _Body:
        return self

    async def __anext__(self) -> bytes:
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop()


class _Later(Exception):
    """No answer, or one that says to come again."""
