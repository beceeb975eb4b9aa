"""What a relay and its consumers say to each other: every word both ways, and rubbish."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from tests.relay.relay_world import World

from fedsender.replication.commands import BadLine
from fedsender_relay.protocol import (
    OLD,
    Ack,
    Command,
    Connection,
    Fetch,
    File,
    Join,
    Ping,
    Reason,
    Relay,
    ReplicateFrom,
    Resync,
    Snapshot,
)

EPOCH = "9f1c0a77d2e4b358"
SHA256 = "6b1f" * 16
WORDS: list[tuple[str, Command]] = [
    (f"RELAY 1 {EPOCH} events 120001 184220", Relay(1, EPOCH, "events", 120001, 184220)),
    (f"REPLICATE events 184211 {EPOCH}", ReplicateFrom("events", 184211, EPOCH)),
    (f"REPLICATE events NOW {EPOCH}", ReplicateFrom("events", None, EPOCH)),
    ("ACK events 184220", Ack("events", 184220)),
    ("RESYNC events GAP 120001 184220", Resync("events", Reason.GAP, 120001, 184220)),
    ("JOIN events", Join("events")),
    (
        f"SNAPSHOT events 00000000000000180000.9f1c0a77 180000 48 11423110 {SHA256}",
        Snapshot("events", "00000000000000180000.9f1c0a77", 180000, 48, 11423110, SHA256),
    ),
    ("FETCH 00180000.9f1c0a77 manifest.json 0", Fetch("00180000.9f1c0a77", "manifest.json", 0)),
    ("FILE hosts-07-3fa9.jsonl.gz 10 5214", File("hosts-07-3fa9.jsonl.gz", 10, 5214)),
]


@pytest.mark.parametrize(("line", "command"), WORDS)
def test_word_is_read_and_written(line: str, command: Command) -> None:
    """The layout is the one in docs/relay.md."""
    connection = Connection()
    assert connection.encode(command) == line.encode() + b"\n"
    connection.receive_data(line.encode() + b"\r\nPING 1\n")
    assert connection.next_command() == command


@pytest.mark.parametrize(
    "line",
    [
        "RELAY 1 9F1C0A77D2E4B358 events 1 2",
        "RELAY 1 9f1c events 1 2",
        f"RELAY 1 {EPOCH} events 1",
        f"RELAY 1 {EPOCH} events -1 2",
        "REPLICATE events 1 nonsense",
        f"REPLICATE events 1 {EPOCH} more",
        "ACK events",
        "ACK events -1",
        "ACK events 9999999999999999999",
        "RESYNC events WHATEVER 1 2",
        "JOIN",
        "JOIN events now",
        f"SNAPSHOT events ../../etc 1 2 3 {SHA256}",
        "SNAPSHOT events a 1 2 3 beef",
        "FETCH a /etc/passwd 0",
        "FETCH a .. 0",
        "FETCH a b -1",
        "FILE a 0 -5",
    ],
)
def test_a_word_with_other_fields_is_refused(line: str) -> None:
    """Names are never paths, counts never negative."""
    with pytest.raises(BadLine):
        OLD.parse(line)


def test_raw_bytes_stand_between_lines() -> None:
    """However they are cut; what follows them is a line again."""
    raw = b"FILE a 0 7\n\nab\xffcd\nPING 1\n"
    for cut in range(len(raw)):
        connection = Connection()
        connection.receive_data(raw[:cut])
        command = connection.next_command() if cut > 10 else None
        connection.receive_data(raw[cut:])
        command = command or connection.next_command()
        assert command == File("a", 0, 7)
        assert connection.take_raw(3) + connection.take_raw(4) == b"\nab\xffcd\n"
        assert connection.next_command() == Ping("1")


@pytest.mark.slow
async def test_a_relay_survives_whatever_a_client_says(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Mangled lines in any order end that connection at most; nothing is pinned by them, the
    names are free again, and other consumers are fed all the while."""
    rng = random.Random(4)
    lines = [line for line, _ in WORDS] + [
        "SERVER hs.example",
        "NAME sender-1",
        "NAME sender-2",
        "PING 1",
        "REPLICATE events 0 {epoch}",
        "REPLICATE events 3 {epoch}",
        "ACK events 2",
        "ERROR oh",
        "AUTH x",
        'RDATA events 5 ["pdu"]',
    ]
    async with World().running() as world:
        await world.append(3)
        fed = await world.follow("steady", 3)
        epoch = world.relay.log.epoch
        for _ in range(400):
            hands = world.connect()
            said = [rng.choice(lines).replace("{epoch}", epoch) for _ in range(rng.randint(1, 8))]
            text = bytearray("".join(line + "\n" for line in said).encode())
            for _ in range(rng.randint(0, 2)):
                text[rng.randrange(len(text))] = rng.randrange(256)
            try:
                await hands.stream.send_all(bytes(text))
                await trio.testing.wait_all_tasks_blocked()
            except trio.BrokenResourceError:
                pass
            await hands.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert set(world.relay.hub.owners) == {"steady"}
        assert [
            one.name for one in world.relay.registry if world.relay.registry.connected(one.name)
        ] == ["steady"]
        token = await world.append()
        await fed.until(f"RDATA events {token} ")
