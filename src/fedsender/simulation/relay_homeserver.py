"""A homeserver that tells a relay what there is to send: several writers, and none gives up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

import trio

from fedsender.facts import BadRow, KeyReused
from fedsender.intake.intake import Append, Busy, Full, ReservationGone, Waiting
from fedsender.relay.daemon import RelayDaemon
from fedsender.simulation.relay_books import RelayBooks, name_of
from fedsender.simulation.relay_station import Away, RelayStation
from fedsender.streams import Json

SERVER = "hs.example"
ROOMS = 6
SERVERS = 20
WRITERS = 3
EVERY_S = 12.0
"""Between two records of a writer, on average."""
CALL_S = 30.0
"""A request is given up after so long."""


class RelayHomeserver:
    """See the module.

    Attributes:
        quiet: nothing new is written any more; what is under way goes on.
        busy: records that are not yet answered.
    """

    def __init__(self, station: RelayStation, books: RelayBooks, rng: random.Random) -> None:
        self.quiet = False
        self.busy = 0
        self._station = station
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
        elif chance > 0.97:
            here = self._random.sample(range(SERVERS), 5)
            rows.append(["servers", [room, [f"s{number}.example" for number in here]]])
        return rows

    def _server(self) -> str:
        return f"s{self._random.randrange(SERVERS)}.example"

    async def _tell(self, writer: str, record: str, rows: Sequence[Json]) -> None:
        """Until it is answered 200."""
        reserves, place = self._random.random() < 0.3, None
        while True:
            # A connection may break in the middle of anything.
            patience_s = CALL_S if self._random.random() < 0.95 else self._random.random() * 0.1
            with trio.move_on_after(patience_s) as call:
                if reserves and place is None:
                    place = self._reserve(writer)
                    await trio.sleep(self._random.random() * 3)
                if await self._append(Append(record, rows, place)):
                    return
                place = place if reserves and self._random.random() < 0.8 else None
            if call.cancelled_caught:
                self._books.counts["requests broken off"] += 1
            await trio.sleep(0.1 + self._random.random() * 5)

    def _reserve(self, writer: str) -> str | None:
        relay = self._station.relay
        with suppress(Busy):
            return None if relay is None else relay.intake.reserve(writer, 1)[0]
        return None

    async def _append(self, append: Append) -> bool:
        """Whether it was answered 200, and the answer came through."""

        async def ask(relay: RelayDaemon) -> tuple[str, int | None]:
            (token,) = await relay.intake.append([append])
            return relay.log.epoch, token

        try:
            epoch, token = await self._station.ask(ask)
        except ReservationGone:
            # The place is given up, and the next try has another one or none.
            self._books.counts["reservations gone"] += 1
            return await self._append(Append(append.id, append.rows))
        except (Full, Busy, Waiting, Away) as refused:
            self._books.counts[f"answered {type(refused).__name__}"] += 1
            return False
        except (KeyReused, BadRow) as wrong:
            self._books.fail("once", f"{append.id} is refused: {wrong}")
            return True
        assert token is not None
        if self._random.random() < 0.1:
            self._books.counts["answers lost"] += 1
            return False
        self._books.answer(epoch, token, append.id)
        self._books.counts["answered 200"] += 1
        return True
