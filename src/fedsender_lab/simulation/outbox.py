"""The homeserver's outbox: its records are appended in order, each until its token is known.

It keeps the rules of "The outbox" in docs/homeservers.md and does no more: it names the epoch that
it knows with each append. When that is over, when a request was not answered, and from time to time
it asks for the position, and appends again what is not stored any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any, Final, Protocol, TypeVar

import trio

from fedsender.daemon import Daemon
from fedsender.embedded.facts import SERVER_UP, Full, prepare_ephemeral
from fedsender.embedded.intake import Busy, Intake, OtherEpoch, Waiting
from fedsender.embedded.push import PushFeed
from fedsender_lab.simulation.daemon_life import Away, Life
from fedsender_lab.simulation.observations import Observations
from fedsender_lab.testing.appends import append_of
from fedsender_lab.testing.rooms import Homeserver

T = TypeVar("T")

AT_ONCE: Final = 40
CALL_S: Final = 30.0
"""A request is given up after so long; some are broken off at once."""
LOOK_EVERY_S: Final = 60.0
"""Seconds between two questions for the position, when nothing else asks for one."""


class Ask(Protocol):
    """Puts a question to the intake. Raises Away, and the errors of the question."""

    async def __call__(self, question: Callable[[Intake], Awaitable[T]], /) -> T: ...


class Outbox:
    """The homeserver's records, on their way to a store that gives them the same tokens.

    Attributes:
        up: the homeserver is there.
        told: the token up to which all is known to be stored.

    Args:
        clock_sets: how often the store's wall clock was set so far: it knows an id for a day of
            that clock.
    """

    def __init__(
        self,
        homeserver: Homeserver,
        ask: Ask,
        rng: Random,
        counts: Counter[str],
        clock_sets: Callable[[], int] = lambda: 0,
    ) -> None:
        self.up = True
        self.told = 0
        self._homeserver = homeserver
        self._ask = ask
        self._random = rng
        self._counts = counts
        self._clock_sets = clock_sets
        self._set_before = 0
        self._epoch: str | None = None
        self._look_at = 0.0
        self._call = trio.CancelScope()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Append everything, until cancelled."""
        task_status.started()
        while True:
            if self.up and await self._exchange():
                continue
            await trio.sleep(self._random.uniform(0.05, 1.0))

    def go_down(self) -> None:
        """Be away: nothing is asked, and an answer on its way is lost."""
        self.up = False
        self._call.cancel()

    def post(self, server: str, message: str, content: dict[str, Any]) -> None:
        """A to-device message is to be sent."""
        name = f"{message}-{server}"
        self._homeserver.tell(name, ["edu", ["to_device", server, name, content]])

    def sending(self, name: str, rows: Sequence[Any]) -> None:
        """A record is about to be appended; perhaps not for the first time."""

    def answered(self, epoch: str, token: int, name: str) -> None:
        """A record was answered with its token."""

    def wrong(self, text: str) -> None:
        """An answer contradicts the ones before it."""
        raise NotImplementedError

    async def _exchange(self) -> bool:
        """Whether something was appended, so that there may be more."""
        patience_s = CALL_S if self._random.random() < 0.95 else self._random.random() * 0.1
        with trio.move_on_after(patience_s) as self._call:
            try:
                if self._epoch is None or trio.current_time() >= self._look_at:
                    await self._look()
                return await self._append()
            except (Full, Busy, Waiting, Away, OtherEpoch) as refused:
                self._counts[f"answered {type(refused).__name__}"] += 1
        if self._call.cancelled_caught:
            self._counts["requests broken off"] += 1
        self._epoch = None
        return False

    async def _look(self) -> None:
        """Ask for the position, and go back to it."""

        async def position(intake: Intake) -> tuple[str, int]:
            await trio.lowlevel.checkpoint()
            return intake.recorder.epoch, intake.recorder.stored()

        self._epoch, stored = await self._ask(position)
        self._look_at = trio.current_time() + LOOK_EVERY_S
        if stored > len(self._homeserver.records):
            self.wrong(f"{stored} is stored of {len(self._homeserver.records)} records")
        if stored < self.told:
            self._counts["records appended again"] += self.told - stored
        if stored < self.told or self._clock_sets() != self._set_before:
            # Nobody else appends here, and an id may be forgotten by now.
            self.told = stored
        if stored == self.told:
            self._set_before = self._clock_sets()

    async def _append(self) -> bool:
        records = self._homeserver.records[self.told : self.told + AT_ONCE]
        if not records:
            return False
        for name, rows in records:
            self.sending(name, rows)
        appends, epoch = [append_of(name, rows) for name, rows in records], self._epoch
        tokens = await self._ask(lambda intake: intake.append(appends, epoch))
        if self._random.random() < 0.05:
            self._counts["answers lost"] += 1
            self._epoch = None
            return False
        assert epoch is not None
        for (name, _), token in zip(records, tokens, strict=True):
            self.told += 1
            if token != self.told:
                self.wrong(f"{name} is {token}, not {self.told}")
            self.answered(epoch, token or 0, name)
        self._counts["records answered"] += len(records)
        self._set_before = self._clock_sets()
        return True


class PushFront(Outbox):
    """The homeserver of one sender, which takes its appends itself."""

    def __init__(self, homeserver: Homeserver, observed: Observations, rng: Random) -> None:
        super().__init__(
            homeserver, self._put, rng, observed.counts, lambda: observed.counts["clocks set"]
        )
        self._observed = observed
        self._life: Life | None = None

    def opened(self, life: Life) -> None:
        """This is the sender now."""
        self._life = life

    async def _put(self, question: Callable[[Intake], Awaitable[T]]) -> T:
        if self._life is None:
            raise Away
        return await self._life.ask(lambda daemon: question(_intake_of(daemon)))

    def wrong(self, text: str) -> None:
        self._observed.fail("token", text)

    def server_up(self, server: str) -> None:
        """Tell the sender that this server is alive."""
        daemon = None if self._life is None else self._life.daemon
        if self.up and daemon is not None:
            _intake_of(daemon).publish(prepare_ephemeral(SERVER_UP, server))

    def heal(self) -> None:
        """Be there; nothing else is wrong with it."""
        self.up = True


def _intake_of(daemon: Daemon) -> Intake:
    assert isinstance(daemon.feed, PushFeed)
    return daemon.feed.intake
