"""Who acts under a name, on a PostgreSQL and a clock of our own."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import trio
from sqlalchemy import Connection, create_engine, literal, text
from tests.servers import Databases
from tests.store.test_sender import ONE, config, frozen
from trio.testing import MockClock

from fedsender.embedded.taking import TRY_EVERY_S
from fedsender.runtime import RunSync, Runtime, real_runtime
from fedsender.store import (
    LockHeld,
    SenderStore,
    StoreError,
    WrongDatabase,
    free_lease,
    open_store,
)
from fedsender.store import leases as module
from fedsender.store.leases import DRIFT_S, LEASE_S, LOOK_EVERY_S, RENEWAL_S, Lease, LeaseLost
from fedsender.store.lock import LockUnknown
from fedsender_lab.testing.clock import virtual_runtime


@dataclass
class Process:
    """A process of the name, as much of it as the database sees."""

    sender: SenderStore
    said: list[str]

    @property
    def lease(self) -> Lease:
        assert self.sender._hold.lease is not None
        return self.sender._hold.lease

    @property
    def machine(self) -> Path:
        assert self.lease._here._path is not None
        return self.lease._here._path

    def on(self, machine: Path) -> None:
        """Run on another machine."""
        self.lease._here._path = machine

    def die(self) -> None:
        """What the machine sees of a kill: its locks of files go."""
        self.lease._here.close()

    async def stand_by(self) -> None:
        await self.sender.take_lock("Q", self.said.append)

    async def keep(self) -> None:
        """Renew, as the daemon does."""
        while True:
            await trio.sleep(RENEWAL_S)
            assert await self.sender.renew_lock()


@pytest.fixture
async def two(postgres: Databases, tmp_path: Path) -> AsyncIterator[tuple[Process, Process]]:
    """P and Q of one name. What they ask of the database takes no time."""
    url, runtime = postgres.create_database(), virtual_runtime(Random(1))
    async with AsyncExitStack() as stack:
        found = []
        for name in "PQ":
            settings = replace(
                config(url, tmp_path),
                homeserver_url=f"sqlite:///{tmp_path}/{name}",
                here=tmp_path / f"{name}.lease",
            )
            store = await stack.enter_async_context(open_store(settings, runtime))
            found.append(Process(store.sender, []))
        yield found[0], found[1]


async def test_a_lease_that_is_renewed_is_not_taken_and_one_that_is_not_is(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    p, q = two
    await p.sender.take_lock("P", p.said.append)

    async def stand_by() -> None:
        await trio.sleep(0.3)  # It sees each renewal so much later.
        await q.stand_by()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand_by)
        with trio.move_on_after(60):
            await p.keep()
        assert q.lease.has_ended()
        assert not p.lease.has_ended()
    # P's last renewal was at 58 s, and it is over before Q has the lease.
    assert p.lease.has_ended()
    assert not q.lease.has_ended()
    assert LEASE_S < trio.current_time() - 58 <= LEASE_S + DRIFT_S + LOOK_EVERY_S
    assert q.said == ["another process runs under our name"]
    # Its session is gone, and a new one finds another's name in the row.
    assert not await p.sender.renew_lock()
    with pytest.raises(LeaseLost):
        await p.sender.renew_lock()


def answer_after(process: Process, seconds: float) -> None:
    """Have the database do at once what the process asks, and answer late."""
    lock = process.lease._lock
    inline = lock._runtime.run_sync

    async def late(function: Callable[[], object], /, **options: object) -> object:
        value = await inline(function, **options)  # type: ignore[arg-type]
        await trio.sleep(seconds)
        return value

    lock._runtime = replace(lock._runtime, run_sync=cast(RunSync, late))


async def test_who_ends_of_itself_looks_at_the_clock_from_before_it_asked(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    """The database renews at once, and its answer takes 1.9 s."""
    p, _ = two
    await p.sender.take_lock("P", p.said.append)
    answer_after(p, 1.9)
    await trio.sleep(2)
    asked_s = trio.current_time()
    assert await p.lease.renew()
    with pytest.raises(LeaseLost):
        await p.sender.until_lost()
    assert trio.current_time() - asked_s == pytest.approx(LEASE_S, abs=0.01)


async def test_a_lease_without_a_stand_by_does_not_end_until_one_asks(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    p, q = two
    await p.sender.take_lock("P")
    await trio.sleep(60)
    assert not p.lease.has_ended()
    assert await p.sender.renew_lock()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(q.stand_by)
        await trio.sleep(60)
        # P has not confirmed that it ends.
        assert q.lease.has_ended()
        assert not p.lease.has_ended()
        why = "another process runs under our name"
        assert q.said[0] == f"{why}, and has not said yet that it ends if it fails"
        with trio.move_on_after(10):
            await p.keep()
        with pytest.raises(LeaseLost):
            await p.sender.until_lost()
        assert q.lease.has_ended()
        await trio.sleep(2)
        assert not q.lease.has_ended()


async def test_a_lease_ends_from_the_first_renewal_that_may_have_said_so(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    """The row says that it ends, and its holder never hears that it was written."""
    p, q = two
    await p.sender.take_lock("P")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(q.stand_by)
        await trio.sleep(1)
        assert await p.sender.renew_lock()
        answer_after(p, 60)
        asked_s = trio.current_time()
        assert not await p.lease.renew()
        with pytest.raises(LeaseLost):
            await p.sender.until_lost()
        assert trio.current_time() - asked_s == pytest.approx(LEASE_S, abs=0.01)
        assert q.lease.has_ended()


async def test_a_start_after_a_kill_does_not_wait_on_the_same_machine(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    p, q = two
    p.on(q.machine)
    await p.sender.take_lock("P")
    with pytest.raises(LockHeld, match="another daemon runs as 'fed1'"):
        await q.sender.take_lock("Q")
    p.die()
    await q.sender._lock.evict(q.sender._instance)
    began = trio.current_time()
    await q.sender.take_lock("Q")
    assert trio.current_time() == began
    assert not await p.sender.renew_lock()
    with pytest.raises(LeaseLost):
        await p.sender.renew_lock()


async def test_a_start_that_was_killed_before_it_had_the_lease_changes_nothing(
    autojump_clock: MockClock, two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has noted itself, and the row has still the one before."""
    p, q = two
    q.on(p.machine)
    await q.sender.take_lock("before")
    q.die()
    await q.sender._lock.evict(q.sender._instance)
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_swap", _never)
        with pytest.raises(NotImplementedError):
            await p.sender.take_lock("P")
    p.die()
    await p.sender._lock.evict(p.sender._instance)
    again = trio.current_time()
    await p.sender.take_lock("again")
    assert trio.current_time() == again


async def _never(*_: object, **__: object) -> None:
    raise NotImplementedError


async def test_elsewhere_nobody_takes_a_lease_that_does_not_end_before_it_is_freed(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    """Its sessions are gone, and nobody can tell from afar whether it has ended or is cut off."""
    p, q = two
    await p.sender.take_lock("P")
    await q.sender._lock.evict(q.sender._instance)
    with pytest.raises(LockHeld, match="if its machine is dead, run `fedsender senders free fed1`"):
        await q.sender.take_lock("Q")
    # It reaches the database again: it has the lease still.
    assert not p.lease.has_ended()
    assert not await p.sender.renew_lock()
    await p.sender.take_lock("P")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(q.stand_by)
        await trio.sleep(600)
        assert q.lease.has_ended()
        assert q.said[-1].endswith("if its machine is dead, run `fedsender senders free fed1`")
        await q.lease.free()
    assert not q.lease.has_ended()
    # P has not looked since: by its clock it has the lease, by its row it has not.
    assert not p.lease.has_ended()
    assert await q.sender.name_is_ours()
    with pytest.raises(LeaseLost):
        await p.sender.name_is_ours()


async def test_a_lease_that_is_renewed_is_not_freed(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    p, q = two
    await p.sender.take_lock("P")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(p.keep)
        with pytest.raises(LockHeld, match="another daemon runs as 'fed1'"):
            await q.lease.free()
        nursery.cancel_scope.cancel()


async def test_a_start_waits_for_a_lease_that_ends_and_is_refused_if_it_does_not(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    p, q = two
    await p.sender.take_lock("P", p.said.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(p.keep)
        with pytest.raises(LockHeld, match="another daemon runs as 'fed1'"):
            await q.sender.take_lock("Q")
        nursery.cancel_scope.cancel()
    await q.sender.take_lock("Q")
    assert p.lease.has_ended()


async def test_one_that_was_given_back_is_taken_at_once(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    p, q = two
    await p.sender.take_lock("P", p.said.append)
    await p.sender.give_lock_back()
    began = trio.current_time()
    await q.stand_by()
    assert trio.current_time() == began


async def test_a_lease_that_was_taken_unheard_is_ours(
    autojump_clock: MockClock, two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has it, its answer was lost, and no file says who ran here."""
    p, _ = two
    monkeypatch.setattr(p.lease._here, "_path", None)
    write = p.lease._write

    async def unheard(*args: Any, **rest: Any) -> None:
        await write(*args, **rest)
        raise LockUnknown("connection reset")

    async def alone() -> None: ...

    with monkeypatch.context() as broken:
        broken.setattr(p.lease, "_write", unheard)
        with pytest.raises(LockUnknown):
            await p.lease.take("P", None, alone, ends=True)
    assert p.lease.has_ended()
    await p.lease.take("P", None, alone, ends=True)
    assert not p.lease.has_ended()
    assert trio.current_time() == 0


async def test_who_has_watched_for_long_does_not_take_what_was_renewed_just_now(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    p, q = two
    await p.sender.take_lock("P", p.said.append)
    seen = await q.lease._lock.run(q.lease._look)
    assert await p.sender.renew_lock()
    with pytest.raises(LockUnknown, match="somebody else"):
        await q.lease._swap(seen, "Q", ends=True)
    assert await p.sender.renew_lock()


async def test_after_a_failover_every_lease_is_void_and_watched_anew(
    autojump_clock: MockClock, two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q sees the row from before P's last renewal once more, on the replica."""
    p, q = two
    await p.sender.take_lock("P", p.said.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(q.stand_by)
        await trio.sleep(5)
        monkeypatch.setattr(module, "PLACE", literal("the replica"))
        with pytest.raises(LeaseLost):
            await p.sender.renew_lock()
        await trio.sleep(5)
        assert q.lease.has_ended()
    assert not q.lease.has_ended()
    assert trio.current_time() == pytest.approx(5 + LEASE_S, abs=1)


async def test_after_a_failover_nobody_takes_what_was_free_before_it(
    autojump_clock: MockClock, two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have taken it since, in what the failover has lost."""
    p, q = two
    await p.sender.take_lock("P", p.said.append)
    await p.sender.give_lock_back()
    monkeypatch.setattr(module, "PLACE", literal("the replica"))
    began = trio.current_time()
    await q.sender.take_lock("Q")
    assert trio.current_time() - began == pytest.approx(LEASE_S, abs=1)


async def test_a_failover_changes_the_place(postgres: Databases, tmp_path: Path) -> None:
    async with open_store(config(postgres.create_database(), tmp_path), real_runtime()) as opened:
        await opened.sender.take_lock("P")
        await trio.to_thread.run_sync(postgres.server.copy)
        await trio.to_thread.run_sync(postgres.server.fail_over)

        async def renewed() -> None:
            while not await opened.sender.renew_lock():  # noqa: ASYNC110
                await trio.sleep(0.05)

        with pytest.raises(LeaseLost):
            await renewed()


async def test_a_row_that_a_failover_has_brought_back_is_known_to_its_machine(
    autojump_clock: MockClock, two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, _ = two
    for boot_id in ("one", "two", "three"):
        await p.sender.take_lock(boot_id)
        await p.sender.give_lock_back()
    engine = create_engine(p.sender._database.url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE leases SET holder = 'one'"))
    engine.dispose()
    monkeypatch.setattr(module, "PLACE", literal("the replica"))
    await p.sender.take_lock("four")


async def test_a_machine_knows_whether_another_one_has_had_the_lease_since(
    autojump_clock: MockClock, two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers in the ledger of `one` and `two` count for `three`, and not for `four`."""
    p, q = two

    async def take(process: Process, boot_id: str) -> list[str]:
        process.lease._holder = ""
        with suppress(LockUnknown):  # Its session has ended.
            await process.sender.take_lock(boot_id, process.said.append)
        await process.sender.take_lock(boot_id, process.said.append)
        process.die()
        return [each for each in ("one", "two", "three") if process.sender.has_followed(each)]

    assert await take(p, "one") == []
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_swap", _never)
        with pytest.raises(NotImplementedError):
            await take(p, "two")
    p.die()
    assert await take(p, "three") == ["one", "two"]
    assert await take(q, "elsewhere") == []
    assert await take(p, "four") == []
    assert await take(p, "five") == []


async def test_what_a_machine_had_answered_before_a_failover_does_not_count(
    autojump_clock: MockClock, two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: ids that the failover has taken may stand for other rows now, and nobody else had the
    lease: `before` was killed, or has lost it by the failover itself."""
    p, _ = two
    await p.sender.take_lock("before")
    p.die()
    p.lease._holder = ""
    monkeypatch.setattr(module, "PLACE", literal("the replica"))
    with suppress(LockUnknown):  # Its session has ended.
        await p.sender.take_lock("again")
    await p.sender.take_lock("again")
    assert not p.sender.has_followed("before")


async def test_who_has_lost_its_lease_knows_whether_somebody_else_had_it(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    """It was frozen for so long, and its ledger has answers that the databases lack."""
    p, q = two
    for others in (False, True):
        await p.sender.take_lock("before", p.said.append)
        await trio.sleep(LEASE_S)
        with pytest.raises(LeaseLost):
            await p.sender.until_lost()
        await p.sender.give_lock_back()
        if others:
            await q.stand_by()
            await q.sender.give_lock_back()
        with suppress(LockUnknown):  # Its session has ended.
            await p.sender.take_lock("again", p.said.append)
        await p.sender.take_lock("again", p.said.append)
        assert p.sender.has_followed("before") is not others
        await p.sender.give_lock_back()


async def test_the_operator_frees_the_lease_of_a_machine_that_is_dead(
    postgres: Databases, tmp_path: Path, autojump_clock: MockClock
) -> None:
    settings, runtime = config(postgres.create_database(), tmp_path), virtual_runtime(Random(1))
    async with open_store(settings, runtime) as store:
        await store.sender.take_lock("P")
        await free_lease(settings, runtime, "fed1")
        with pytest.raises(LeaseLost):
            await store.sender.renew_lock()
        with pytest.raises(StoreError, match="nobody has ever run as 'fed'"):
            await free_lease(settings, runtime, "fed")
    sqlite = replace(settings, sender_url=f"sqlite:///{tmp_path}/sender.db")
    with pytest.raises(WrongDatabase, match="no other machine"):
        await free_lease(sqlite, runtime, "fed1")


# --- the fence ------------------------------------------------------------------------------------


async def test_a_former_holder_writes_nothing(
    autojump_clock: MockClock, two: tuple[Process, Process]
) -> None:
    p, q = two
    await p.sender.take_lock("P", p.said.append)
    await p.sender.save_frozen(frozen())
    await q.stand_by()
    for _ in range(2):
        with pytest.raises(LeaseLost):
            await p.sender.drop_frozen(ONE)
    await q.sender.drop_frozen(ONE)
    assert await p.sender.load_frozen(ONE) is None


async def test_a_write_that_hangs_is_not_committed_once_another_has_the_lease(
    postgres: Databases, tmp_path: Path
) -> None:
    """Else it would come after its successor has read what it changes."""
    url, hangs, go_on = postgres.create_database(), threading.Event(), threading.Event()
    clock = [0.0]
    runtime: Runtime = replace(real_runtime(), elapsed_s=lambda: clock[0])

    def hang(connection: Connection) -> None:
        connection.execute(text("DELETE FROM frozen_transactions"))
        hangs.set()
        go_on.wait(60)

    @asynccontextmanager
    async def process(name: str) -> AsyncIterator[SenderStore]:
        settings = replace(config(url, tmp_path), homeserver_url=f"sqlite:///{tmp_path}/{name}")
        async with open_store(settings, runtime) as store:
            yield store.sender

    async with process("P") as p, process("Q") as q:
        await p.take_lock("P", lambda _: None)
        await p.save_frozen(frozen())

        async def write() -> None:
            with pytest.raises(LeaseLost):
                await p._database.write(hang)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.to_thread.run_sync(hangs.wait)
            async with trio.open_nursery() as watching:
                watching.start_soon(partial(q.take_lock, "Q", lambda _: clock.append(0)))
                while len(clock) == 1:  # noqa: ASYNC110
                    await trio.sleep(0.05)
                clock[0] += LEASE_S + 1
            go_on.set()
        assert await q.load_frozen(ONE) == frozen()


def test_ten_seconds_leave_time_for_the_databases() -> None:
    """From the last renewal of one that died: the row is seen, and then has not changed."""
    assert LOOK_EVERY_S + LEASE_S + DRIFT_S < 6.7  # It looks again when that is over.
    assert TRY_EVERY_S + LEASE_S + DRIFT_S + TRY_EVERY_S < 7.2
