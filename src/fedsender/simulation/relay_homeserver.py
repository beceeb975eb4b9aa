"""A homeserver that tells a relay what there is to send: several writers, and none gives up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import trio

from fedsender.intake.intake import Append, Busy, ReservationGone, Waiting
from fedsender.relay.daemon import RelayDaemon
from fedsender.relay.log import Full, KeyReused, LogBroken
from fedsender.replication.commands import Json
from fedsender.replication.rows import BadRow
from fedsender.simulation.relay_books import RelayBooks, name_of

SERVER = "hs.example"
ROOMS = 6
SERVERS = 20
WRITERS = 3
EVERY_S = 12.0
"""Between two records of a writer, on average."""
CALL_S = 30.0
"""A request is given up after so long."""


class Site(Protocol):
    """Where the relay is, while it runs; and the requests that break when it does not any more."""

    @property
    def relay(self) -> RelayDaemon | None: ...
    @property
    def calls(self) -> set[trio.CancelScope]: ...


class RelayHomeserver:
    """See the module.

    Attributes:
        quiet: nothing new is written any more; what is under way goes on.
        busy: records that are not yet answered.
    """

    def __init__(self, site: Site, books: RelayBooks, rng: random.Random) -> None:
        self.quiet = False
        self.busy = 0
        self._site = site
        self._books = books
        self._random = rng
        self._number = 0

    async def run(self) -> None:
        """Write, until cancelled."""
        async with trio.open_nursery() as nursery:
            for number in range(WRITERS):
                nursery.start_soon(self._write, f"writer-{number}")

    async def _write(self, writer: str) -> None:
        while True:
            await trio.sleep(self._random.expovariate(1 / EVERY_S))
            if self.quiet:
                continue
            rows = self._record()
            record = name_of(rows)
            self._books.send_in(record, rows)
            self.busy += 1
            try:
                await self._tell(writer, record, rows)
                if self._random.random() < 0.1:
                    self._books.counts["repetitions"] += 1
                    await self._tell(writer, record, rows)
            finally:
                self.busy -= 1

    def _record(self) -> Sequence[Json]:
        self._number += 1
        name, chance = f"$e{self._number}", self._random.random()
        if chance < 0.1:
            body = ["to_device", self._server(), f"m{self._number}", {"n": self._number}]
            return [["edu", body]]
        room = f"!{self._random.randrange(ROOMS)}:{SERVER}"
        size = 16_000 if self._random.random() < 0.2 else 200
        event = {
            "type": "m.room.message",
            "room_id": room,
            "sender": f"@a:{SERVER}",
            "prev_events": ["$p"],
            "content": {"n": self._number, "body": "x" * size},
        }
        about: dict[str, Json] = {"room_version": "11", "plus": [], "minus": []}
        if 0.35 < chance < 0.45:
            about["plus" if chance < 0.4 else "minus"] = [self._server()]
        rows: list[Json] = [["pdu", [room, name, event, about]]]
        if chance < 0.25:
            rows.append(["hosts", [room, [self._server()], []]])
        elif chance < 0.35:
            rows.append(["hosts", [room, [], [self._server()]]])
        return rows

    def _server(self) -> str:
        return f"s{self._random.randrange(SERVERS)}.example"

    async def _tell(self, writer: str, record: str, rows: Sequence[Json]) -> None:
        """Until it is answered 200."""
        reserves, place = self._random.random() < 0.3, None
        while True:
            relay = self._site.relay
            if relay is not None:
                # A connection may break in the middle of anything.
                patience_s = CALL_S if self._random.random() < 0.95 else self._random.random() * 0.1
                with trio.move_on_after(patience_s) as call:
                    self._site.calls.add(call)
                    if reserves and place is None:
                        place = await self._reserve(relay, writer)
                    if await self._append(relay, Append(record, rows, place)):
                        self._site.calls.discard(call)
                        return
                    place = place if reserves and self._random.random() < 0.8 else None
                self._site.calls.discard(call)
                if call.cancelled_caught:
                    self._books.counts["requests broken off"] += 1
            await trio.sleep(0.1 + self._random.random() * 5)

    async def _reserve(self, relay: RelayDaemon, writer: str) -> str | None:
        try:
            (place,) = relay.intake.reserve(writer, 1)
        except Busy:
            return None
        await trio.sleep(self._random.random() * 3)
        return place

    async def _append(self, relay: RelayDaemon, append: Append) -> bool:
        """Whether it was answered 200, and the answer came through."""
        try:
            (token,) = await relay.intake.append([append])
        except ReservationGone:
            # The place is given up, and the next try has another one or none.
            self._books.counts["reservations gone"] += 1
            return await self._append(relay, Append(append.id, append.rows))
        except (Full, Busy, Waiting, LogBroken, OSError) as refused:
            self._books.counts[f"answered {type(refused).__name__}"] += 1
            return False
        except (KeyReused, BadRow) as wrong:
            self._books.fail("once", f"{append.id} is refused: {wrong}")
            return True
        assert token is not None
        return self._answered(relay, token, append.id)

    def _answered(self, relay: RelayDaemon, token: int, record: str) -> bool:
        """Whether the answer came through."""
        if self._random.random() < 0.1:
            self._books.counts["answers lost"] += 1
            return False
        self._books.answer(relay.log.epoch, token, record)
        self._books.counts["answered 200"] += 1
        return True
