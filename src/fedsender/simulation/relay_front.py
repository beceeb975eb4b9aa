"""A homeserver whose senders are told by a relay: it knows nothing of it but how to append."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import trio

from fedsender.intake.intake import Append, Busy, Full, Waiting
from fedsender.relay.daemon import RelayDaemon
from fedsender.simulation.evidence import Evidence
from fedsender.simulation.relay_books import RelayBooks
from fedsender.simulation.relay_station import Away, RelayStation
from fedsender.testing.network import MemoryStream
from fedsender.testing.rooms import Homeserver

DOOR: Final = Path("/run/relay.sock")
AT_ONCE: Final = 40
CALL_S: Final = 30.0


class RelayFront:
    """The homeserver's way to its senders; also the door of the relay, for them.

    Attributes:
        up: the homeserver is there.
    """

    certificate: tuple[str, ...] = ()

    def __init__(
        self, homeserver: Homeserver, station: RelayStation, books: RelayBooks, rng: Random
    ) -> None:
        self.up = True
        self.told = 0
        self._homeserver = homeserver
        self._station = station
        self._books = books
        self._random = rng

    # --- the door ---------------------------------------------------------------------------------

    def knock(self) -> str:
        return "open" if self._station.links.up and self._station.relay else "refused"

    async def converse(self, stream: MemoryStream) -> None:
        try:
            self._station.serve(self._station.links.end(stream))
        except ConnectionRefusedError:
            stream.close()
        await trio.lowlevel.checkpoint()

    # --- the homeserver's side --------------------------------------------------------------------

    def go_down(self) -> None:
        self.up = False

    def server_up(self, server: str) -> None:
        """A relay has no word for it."""

    def heal(self) -> None:
        self.up = True
        self._station.heal()

    def post(self, server: str, message: str, content: dict[str, Any]) -> None:
        """A to-device message is to be sent."""
        name = f"{message}-{server}"
        self._homeserver.tell(name, ["edu", ["to_device", server, name, content]])

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell the relay of everything, in order, until cancelled."""
        task_status.started()
        audience = {happening.event_id: happening.servers for happening in self._homeserver.steps}
        seen = len(self._homeserver.steps)
        while True:
            for happening in self._homeserver.steps[seen:]:
                audience[happening.event_id] = happening.servers
            seen = len(self._homeserver.steps)
            waiting = self._homeserver.records[self.told : self.told + AT_ONCE]
            for name, rows in waiting:
                if name not in self._books.rows:
                    self._books.send_in(name, rows)
                    self._books.audience[name] = audience.get(name, ())
            if waiting and self.up and await self._append(waiting):
                self.told += len(waiting)
                continue
            await trio.sleep(self._random.uniform(0.05, 1.0))

    async def _append(self, records: Sequence[tuple[str, Sequence[Any]]]) -> bool:
        """Whether they were answered 200, and the answer came through."""
        counts = self._books.counts
        appends = [Append(name, rows) for name, rows in records]

        async def ask(relay: RelayDaemon) -> tuple[str, list[int | None]]:
            return relay.log.epoch, await relay.intake.append(appends)

        with trio.move_on_after(CALL_S) as call:
            try:
                epoch, tokens = await self._station.ask(ask)
            except (Full, Busy, Waiting, Away) as refused:
                counts[f"answered {type(refused).__name__}"] += 1
                return False
        if call.cancelled_caught or self._random.random() < 0.05:
            counts["answers lost"] += 1
            return False
        for number, (token, (name, _)) in enumerate(zip(tokens, records, strict=True)):
            if token != self.told + number + 1:
                self._books.fail("token", f"{name} is {token}, not {self.told + number + 1}")
            self._books.answer(epoch, token or 0, name)
            counts["answered 200"] += 1
        return True

    # --- at the end -------------------------------------------------------------------------------

    def check_messages(self, evidence: Evidence) -> None:
        """Each to-device message has reached its server, or stands in quarantine.

        A sender that was restored to before some of them came may have told the relay that it had
        them.
        """
        for token, (name, rows) in enumerate(self._homeserver.records, 1):
            kind, body = rows[0]
            book = evidence.books.of.get(body[1]) if kind == "edu" else None
            if book is None or any(low < token <= high for low, high in evidence.given_back):
                continue
            if name not in book.messages_answered and name not in book.quarantined:
                evidence.fail("lost", f"{book.name} never got {name}, token {token}")
