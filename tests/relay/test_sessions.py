"""Connections to a relay: greeting, positions, rows, acknowledgements, snapshots handed out.

Numbers are those of the scenarios in docs/relay.md.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import trio
import trio.testing
from tests.relay.log_support import pdu, to_device
from tests.relay.relay_world import World

from fedsender.embedded.facts import prepare_ephemeral
from fedsender.replication.commands import Rdata, RdataBatches
from fedsender.replication.endpoint import Disconnected
from fedsender_lab.testing.clock import now_ms
from fedsender_relay import line_stream
from fedsender_relay.hub import SILENT_S
from fedsender_relay.line_server import MAX_CONNECTIONS
from fedsender_relay.line_stream import Wire
from fedsender_relay.protocol import Connection, Ping

Clock = trio.testing.MockClock


async def read_for_ever(wire: Wire) -> None:
    while True:
        await wire.next_command()


# --- following ------------------------------------------------------------------------------------


async def test_15_what_is_written_arrives_at_once_and_both_sides_know_where_they_are(
    autojump_clock: Clock,
) -> None:
    """15: a fresh consumer gets every record when it is durable; the relay shows its position."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        began = trio.current_time()
        for token in range(1, 6):
            await world.append()
            assert (await hands.until("RDATA ")).startswith(f"RDATA events {token} ")
        assert trio.current_time() == began
        await hands.ack(4)
        assert (world.state("sender-1"), world.pin("sender-1")) == ("FOLLOW", 4)


async def test_16_a_record_of_many_rows_needs_no_further_write_to_arrive(
    autojump_clock: Clock,
) -> None:
    """16: nothing holds back the last rows; they are one token."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        await world.append_rows(*(to_device(number) for number in range(21)))
        lines = await hands.hear_lines(21)
        assert [str(line).split()[2] for line in lines] == ["batch"] * 20 + ["1"]


async def test_17_a_small_record_after_a_large_one_is_not_kept_waiting(
    autojump_clock: Clock,
) -> None:
    """17: no hidden thresholds."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        await world.append(size=16_384)
        await trio.sleep(0.05)
        await world.append()
        with trio.fail_after(1):
            await hands.until("RDATA events 1 ")
            await hands.until("RDATA events 2 ")


async def test_18_an_observer_gets_no_edus_and_every_record_still_ends(
    autojump_clock: Clock,
) -> None:
    """18: rows that are left out take neither the record's end nor the next record with them."""
    async with World().running() as world:
        observer = world.connect()
        await observer.greet()
        await observer.say("NAME whoever", "REPLICATE events NOW")
        assert await observer.hear() == "POSITION events 0"
        await world.append_rows(pdu(1), to_device(1))
        await world.append_rows(to_device(2))
        await world.append_rows(pdu(3))
        lines = [await observer.until("RDATA "), await observer.until("RDATA ")]
        assert [line.split()[2] for line in lines] == ["1", "3"]
        assert all("to_device" not in line for line in lines)
        assert world.state("whoever") is None


async def test_18_an_observer_gets_each_record_once_while_more_come(autojump_clock: Clock) -> None:
    """18: what is appended while it reads comes after the POSITION that it asked for."""
    async with World().running() as world:
        await world.append(3, size=200_000)
        observer = world.connect(lockstep=True)
        await observer.greet()
        await observer.say("REPLICATE events 0")
        lines = [await observer.until("RDATA events 1 ")]
        await world.append(2)
        lines += [str(await observer.hear()) for _ in range(5)]
        words = [line.split()[::2][:2] for line in lines]
        assert words == [
            *(["RDATA", token] for token in "123"),
            ["POSITION", "3"],
            *(["RDATA", token] for token in "45"),
        ]


async def test_19_a_record_that_was_cut_off_comes_again_whole(autojump_clock: Clock) -> None:
    """19: the connection ends inside a batch; what follows the last acknowledged token is sent."""
    async with World().running() as world:
        await world.append()
        await world.append_rows(*(to_device(number) for number in range(100, 130)))
        first = world.connect(lockstep=True)
        await first.resume("sender-1", 0)
        await first.until("RDATA events 1 ")
        await first.until("RDATA events batch ")
        await first.leave()
        assert world.pin("sender-1") == 0
        again = world.connect()
        await again.resume("sender-1", 1)
        batches = RdataBatches()
        connection = Connection()
        whole = None
        while whole is None:
            connection.receive_data(f"{await again.until('RDATA ')}\n".encode())
            rdata = connection.next_command()
            assert isinstance(rdata, Rdata)
            whole = batches.add(rdata)
        assert (whole[0], len(whole[1])) == (2, 30)


async def test_24_a_log_that_cannot_be_read_for_a_while_leaves_nothing_behind(
    autojump_clock: Clock,
) -> None:
    """24: the consumer is told, its name is free, and once the disk answers it is fed."""
    world = World(settings={"keep_min": "1h"})
    async with world.running():
        await world.append(3)
    async with world.running():
        # What is not in memory any more is read from the table, and that is damaged for a while.
        await world.change("UPDATE relay_log SET checksum = checksum + 1")
        first = world.connect()
        await first.resume("sender-1", 0)
        assert (await first.error()).startswith("BUSY ")
        await trio.testing.wait_all_tasks_blocked()
        assert not world.relay.registry.connected("sender-1")
        await world.change("UPDATE relay_log SET checksum = checksum - 1")
        again = world.connect()
        await again.resume("sender-1", 0)
        assert await again.tokens_until_level() == [1, 2, 3]


async def test_27_a_consumer_is_level_when_it_was_told_so(autojump_clock: Clock) -> None:
    """27: POSITION comes once everything is out, and not before."""
    async with World().running() as world:
        await world.append(50, size=10_000)
        hands = world.connect(lockstep=True)
        await hands.resume("sender-1", 0)
        await hands.until("RDATA events 3 ")
        session = world.relay.hub.owners["sender-1"]
        assert not session.level
        await hands.until("POSITION events 50")
        await trio.testing.wait_all_tasks_blocked()
        assert session.level


async def test_28_only_facts_have_tokens(autojump_clock: Clock) -> None:
    """28: joins, acks, snapshots and restarts on both sides move nothing but themselves."""
    world = World()
    async with world.running():
        hands = await world.follow("sender-1")
        await world.append(3)
        await hands.ack(2)
        await world.relay.snapshots.make()
        joined, _, token = await world.join("sender-2")
        assert token == 3
        await joined.leave()
    async with world.running():
        assert world.relay.log.head == 3
        hands = world.connect()
        await hands.resume("sender-1", 2)
        assert await hands.tokens_until_level() == [3]
        assert await world.append() == 4
        await hands.until("RDATA events 4 ")


# --- liveness -------------------------------------------------------------------------------------


async def test_31_37_a_commit_that_hangs_stops_the_pings_and_consumers_notice(
    autojump_clock: Clock,
) -> None:
    """31, 37: while the disk does not answer the relay does not pretend to be well."""
    async with World().running() as world:
        ours, theirs = trio.testing.memory_stream_pair()
        world.nursery.start_soon(lambda: world.relay.hub.serve(theirs, trusted=True))
        wire = Wire(ours, now_ms)
        world.thread_s = 1e6
        world.nursery.start_soon(world.append)
        hung_at = trio.current_time()
        with pytest.raises(Disconnected, match="ping timeout"):
            await read_for_ever(wire)
        assert 25 <= trio.current_time() - hung_at <= 40
        assert world.relay.hub.hung()


async def test_32_many_acks_do_not_stand_in_for_pings(autojump_clock: Clock) -> None:
    """32: PING has a clock of its own, also while acknowledgements and rows flow."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        pings: list[float] = []
        while len(pings) < 4:
            token = await world.append()
            await hands.ack(token)
            line = await hands.hear_any()
            while line is not None and not line.startswith("RDATA "):
                if line.startswith("PING "):
                    pings.append(trio.current_time())
                line = await hands.hear_any()
            await trio.sleep(0.5)
        assert all(4 <= later - earlier <= 6 for earlier, later in itertools.pairwise(pings))


async def test_33_a_silent_consumer_is_dead_after_15_s_and_its_pin_stays(
    autojump_clock: Clock,
) -> None:
    """33: one that sent PINGs and stopped is closed."""
    async with World().running() as world:
        hands = await world.follow("sender-1")
        silent_since = trio.current_time()
        await hands.hear_rest()
        assert trio.current_time() - silent_since == pytest.approx(15, abs=0.1)
        assert (world.state("sender-1"), world.pin("sender-1")) == ("STOPPED", 0)
        consumer = world.relay.registry.get("sender-1")
        assert consumer is not None
        assert consumer.error == "ping timeout"


@pytest.mark.slow
async def test_34_35_slow_reads_hold_up_no_ping(autojump_clock: Clock) -> None:
    """34, 35: a read that takes eight time-outs, and many slow ones, with PINGs all the while."""
    world = World(settings={"keep_min": "1h"})
    async with world.running():
        await world.append(5)
    async with world.running():
        # Nothing of it is in memory.
        world.thread_s = 8 * 15.0
        hands = world.connect()
        await hands.resume("sender-1", 0)
        pings = 0
        while not (line := str(await hands.hear_any())).startswith("RDATA "):
            pings += line.startswith("PING ")
            await hands.say("PING 2")
        assert pings >= 20
        world.thread_s = 0.1
        await world.append(128, size=4096)
        seen = 0
        while seen < 132:
            line = str(await hands.hear_any())
            seen += line.startswith("RDATA ")
            await hands.say("PING 3")


async def test_36_a_line_that_comes_byte_by_byte_is_no_silence(autojump_clock: Clock) -> None:
    """36: any byte counts; a line may take longer than the time-out."""
    ours, theirs = trio.testing.memory_stream_pair()
    wire = Wire(ours, now_ms)
    async with trio.open_nursery() as nursery:

        async def trickle() -> None:
            await theirs.send_all(b"PING 1\n")
            for byte in b'RDATA events 1 ["pdu"]\n':
                await trio.sleep(5)
                await theirs.send_all(bytes([byte]))

        nursery.start_soon(trickle)
        assert await wire.next_command() == Ping("1")
        assert await wire.next_command() == Rdata("events", "", 1, ["pdu"])
    assert trio.current_time() > 100


async def test_38_one_that_takes_nothing_is_dropped_and_comes_back_without_a_snapshot(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """38: nothing waits in memory for it; its segments do."""
    monkeypatch.setattr(line_stream, "SEND_S", 3.0)
    async with World().running() as world:
        hands = world.connect(lockstep=True)
        await hands.resume("sender-1", 0)
        await hands.until("POSITION events 0")
        paused_at = trio.current_time()
        while world.state("sender-1") == "FOLLOW":
            await world.append(size=1000)
            await trio.sleep(0.1)
        assert trio.current_time() - paused_at < 15
        assert world.relay.hub.counts.slow == 1
        again = world.connect()
        await again.resume("sender-1", 0)
        assert await again.tokens_until_level() == list(range(1, world.relay.log.head + 1))
        assert world.relay.hub.counts.full_syncs == {}


async def test_41_an_old_ack_is_ignored_and_one_of_the_future_is_an_error(
    autojump_clock: Clock,
) -> None:
    """41: neither moves the pin; a bug in a consumer frees no log."""
    async with World().running() as world:
        await world.append(10)
        hands = await world.follow("sender-1", 5)
        await hands.ack(3)
        assert world.pin("sender-1") == 5
        assert world.relay.hub.counts.stale_acks == 1
        await hands.say("ACK events 11")
        assert (await hands.error()).startswith("PROTO ")
        assert world.pin("sender-1") == 5


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "epoch", "answer"),
    [
        (4, "0123456789abcdef", "RESYNC events EPOCH"),
        (21, None, "RESYNC events AHEAD"),
        (2, None, "RESYNC events GAP"),
    ],
)
async def test_60_67_a_position_is_checked_before_anything_is_registered(
    autojump_clock: Clock, token: int, epoch: str | None, answer: str
) -> None:
    """60, 65, 67: the answer says why and what there is; nothing is pinned, and JOIN is next."""
    async with World().running() as world:
        await world.append(20)
        await world.relay.snapshots.make()
        await world.relay.retention.expire()
        first = world.first
        assert first > 3
        hands = world.connect()
        ours = await hands.introduce("sender-1")
        await hands.say(f"REPLICATE events {token} {epoch or ours}")
        assert await hands.until("RESYNC ") == f"{answer} {first} 20"
        assert world.state("sender-1") is None
        assert world.relay.hub.counts.resyncs == {answer.split()[-1]: 1}
        await hands.say("JOIN events")
        assert (await hands.until("SNAPSHOT ")).split()[3] == "20"
        await hands.say(f"REPLICATE events 20 {ours}")
        await hands.until("POSITION events 20")
        assert world.state("sender-1") == "FOLLOW"


async def test_61_a_newer_position_than_the_stored_pin_moves_it_at_once(
    autojump_clock: Clock,
) -> None:
    """61: and an older one moves it back: the consumer was restored from a backup."""
    async with World().running() as world:
        await world.append(10)
        await world.stopped("sender-1", 3)
        await world.stopped("sender-1", 9)
        assert world.pin("sender-1") == 9
        await world.stopped("sender-1", 5)
        assert world.pin("sender-1") == 5


async def test_66_a_plain_client_that_is_ahead_is_told_where_the_log_ends(
    autojump_clock: Clock,
) -> None:
    """66: it sees that it has another history; the old protocol has no other word. No hang."""
    async with World().running() as world:
        await world.append(3)
        observer = world.connect()
        await observer.greet()
        await observer.say("REPLICATE events 9")
        await observer.until("POSITION events 3")


async def test_68_a_relay_follows_no_relay(autojump_clock: Clock) -> None:
    """68: one that is pointed at itself, or at another, is refused."""
    async with World().running() as world:
        hands = world.connect()
        await hands.say(f"RELAY 1 {' '.join(await hands.greet())}")
        assert await hands.error() == "invalid command: RELAY"


# --- names and servers ----------------------------------------------------------------------------


async def test_53_old_clients_read_and_hold_nothing(autojump_clock: Clock) -> None:
    """53: a connection without a name, as netcat makes it, is no consumer."""
    async with World().running() as world:
        await world.append(2)
        observer = world.connect()
        await observer.greet()
        await observer.say("REPLICATE events 0")
        assert await observer.tokens_until_level() == [1, 2]
        await world.append()
        await observer.until("RDATA events 3 ")
        assert list(world.relay.registry) == []
        assert world.relay.registry.floor() is None


async def test_a_silent_connection_leaves_its_name_to_the_next_one(autojump_clock: Clock) -> None:
    """Its process is frozen, or its machine is gone: the next sender does not wait for 15 s."""
    async with World().running() as world:
        first = await world.follow("fedsender")
        await world.append()
        await first.until("RDATA events 1 ")
        await trio.sleep(SILENT_S + 0.1)
        second = world.connect()
        await second.resume("fedsender", 0)
        await second.until("RDATA events 1 ")
        await world.append()
        await second.until("RDATA events 2 ")
        await trio.sleep(1)
        assert world.state("fedsender") == "FOLLOW"
        assert list(world.relay.hub.sessions) == [world.relay.hub.owners["fedsender"]]


async def test_a_name_belongs_to_one_database_until_it_is_forgotten(autojump_clock: Clock) -> None:
    """Whoever has another one would send all that the first sends, or what the first never will."""
    mine, other = "STORE 0123456789abcdef", "STORE fedcba9876543210"
    async with World().running() as world:

        async def come(*says: str) -> Any:
            hands = world.connect()
            epoch = await hands.introduce("fedsender")
            await hands.say(*says, f"REPLICATE events 0 {epoch}")
            return hands

        first = await come(mine)
        await world.append()
        await first.until("RDATA events 1 ")
        await trio.sleep(SILENT_S + 0.1)
        for says in ([other], []):
            assert "relay forget fedsender" in await (await come(*says)).error()
        await (await come(mine)).until("RDATA events 1 ")
        [there] = world.relay.registry
        await world.relay.registry.load()
        [stored] = world.relay.registry
        assert stored.store == there.store == mine.split()[1]


async def test_59_the_same_name_twice_is_refused_and_the_first_goes_on(
    autojump_clock: Clock,
) -> None:
    """59: what it says is heard, so it lives."""
    async with World().running() as world:
        first = await world.follow("sender-1")
        second = world.connect()
        await second.resume("sender-1", 0)
        assert (await second.error()).startswith("DUPLICATE ")
        await world.append()
        await first.until("RDATA events 1 ")
        assert world.state("sender-1") == "FOLLOW"


async def test_who_expects_another_homeserver_is_turned_away(autojump_clock: Clock) -> None:
    """The homeserver's name is checked on both sides, before a position means anything."""
    async with World().running() as world:
        wrong = world.connect()
        await wrong.greet()
        await wrong.say("SERVER other.example")
        assert (await wrong.error()).startswith("WRONG_SERVER ")
        silent = world.connect()
        epoch = world.relay.log.epoch
        await silent.say("NAME sender-1", f"REPLICATE events 0 {epoch}")
        assert (await silent.error()).startswith("WRONG_SERVER ")
        assert world.state("sender-1") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Sender", "a" * 65, "a b", "ä"])
async def test_a_consumer_has_a_plain_name(autojump_clock: Clock, name: str) -> None:
    """Names are labels of metrics and keys of a file."""
    async with World().running() as world:
        hands = world.connect()
        await hands.resume(name, 0)
        assert (await hands.error()).startswith("PROTO ")


async def test_what_a_relay_does_not_know_is_refused(autojump_clock: Clock) -> None:
    """And never repeated: a client that forgot AUTH may have sent the secret as a word."""
    async with World().running() as world:
        hands = world.connect()
        await hands.greet()
        await hands.say("ABRACADABRA")
        assert "ABRACADABRA" not in await hands.error()


# --- ephemeral rows -------------------------------------------------------------------------------


async def test_ephemeral_rows_go_to_consumers_that_are_fed_and_to_nobody_else(
    autojump_clock: Clock,
) -> None:
    """Best effort: they have no token of the log and no way into it."""
    async with World().running() as world:
        fed = await world.follow("sender-1")
        observer = world.connect()
        await observer.greet()
        await observer.say("REPLICATE events NOW")
        await observer.until("POSITION ")
        world.relay.hub.publish(prepare_ephemeral("typing", ["!r:hs.example", ["@u:hs.example"]]))
        line = await fed.until("RDATA typing 1 ")
        assert json.loads(line.split(" ", 3)[3]) == ["!r:hs.example", ["@u:hs.example"]]
        world.relay.hub.publish(prepare_ephemeral("server_up", "b.example:8448"))
        assert await fed.hear() == "REMOTE_SERVER_UP b.example:8448"
        await world.append()
        assert (await observer.hear() or "").startswith("RDATA events 1 ")
        assert world.relay.log.head == 1


async def test_a_consumer_that_lags_does_without_ephemeral_rows(autojump_clock: Clock) -> None:
    """What waits for one connection is bounded."""
    async with World().running() as world:
        hands = world.connect(lockstep=True)
        await hands.resume("sender-1", 0)
        await hands.until("POSITION ")
        for _ in range(3000):
            world.relay.hub.publish(prepare_ephemeral("typing", ["!r:hs.example", []]))
        assert world.relay.hub.counts.dropped_rows >= 1000


# --- the plain protocol ---------------------------------------------------------------------------


async def test_a_session_of_the_plain_protocol_works_as_it_is_written(
    autojump_clock: Clock,
) -> None:
    """Raw bytes, as a person types them into netcat: no word but those of the old document."""
    async with World().running() as world:
        await world.append_rows(["redaction", ["$a", "$b"]])
        await world.append_rows(["redaction", ["$c", "$d"]], ["redaction", ["$e", "$f"]])
        netcat = world.connect().stream
        told = bytearray()

        async def listen() -> None:
            async for data in netcat:
                told.extend(data)

        world.nursery.start_soon(listen)
        await netcat.send_all(b"\n\r\nNAME a person\n \nREPLICATE events 1\n")
        await trio.sleep(1000)
        await world.append_rows(["redaction", ["$g", "$h"]])
        await netcat.send_all(b"\n")
        await trio.sleep(1)
        lines = [line for line in told.decode().splitlines() if not line.startswith("PING ")]
        assert lines == [
            "SERVER hs.example",
            'RDATA events batch ["redaction",["$c","$d"]]',
            'RDATA events 2 ["redaction",["$e","$f"]]',
            "POSITION events 2",
            'RDATA events 3 ["redaction",["$g","$h"]]',
        ]


@pytest.mark.parametrize("asked", ["events NOW", "ALL NOW", "ALL now"])
async def test_now_and_all_on_a_relay(autojump_clock: Clock, asked: str) -> None:
    """What was is passed over."""
    async with World().running() as world:
        await world.append(5)
        netcat = world.connect()
        await netcat.say(f"REPLICATE {asked}")
        assert await netcat.hear_lines(2) == ["SERVER hs.example", "POSITION events 5"]
        await world.append()
        assert str(await netcat.hear()).startswith("RDATA events 6 ")


class Handshaking(trio.abc.HalfCloseableStream):
    """A client that connected to a TLS listener and says nothing: whoever sends waits for it."""

    def __init__(self) -> None:
        self.closed = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.closed.wait()
        raise trio.ClosedResourceError

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await self.closed.wait()
        raise trio.ClosedResourceError

    async def aclose(self) -> None:
        self.closed.set()
        await trio.lowlevel.checkpoint()


@pytest.mark.slow
async def test_clients_that_stay_in_the_handshake_take_no_more_than_their_places(
    autojump_clock: Clock,
) -> None:
    """They have not given a secret either: 32 of them, for ten seconds."""
    async with World().running() as world:
        hub = world.relay.hub
        for _ in range(MAX_CONNECTIONS):
            world.nursery.start_soon(lambda: hub.serve(Handshaking(), trusted=False))
        # Those that are too many have a second to read why.
        await trio.sleep(2)
        assert len(hub.sessions) == 32
        await world.follow("sender-1", 0)
        await trio.sleep(10)
        assert len(hub.sessions) == 1


@pytest.mark.slow
async def test_nothing_is_level_after_its_place_was_lost(autojump_clock: Clock) -> None:
    """POSITION means that C has all: one that was told RESYNC has not, whatever came before."""
    cap = {"log_cap": "256KiB", "keep_min": "1h"}
    async with World(settings=cap).running() as world:
        hands = world.connect(lockstep=True)
        await hands.resume("sender-1", 0)
        await hands.until("POSITION ")
        for _ in range(60):
            await world.append(1, size=10_000)
            await world.relay.retention.expire()
        await hands.until("RESYNC ")
        for _ in range(2):
            line = str(await hands.hear_any())
            assert line.startswith("PING "), line
