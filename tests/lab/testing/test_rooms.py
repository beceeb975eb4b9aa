"""The demo's homeserver: its events are valid everywhere, and its truth is the truth."""

import random
from collections import defaultdict

import orjson
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from signedjson.key import decode_verify_key_bytes
from signedjson.sign import verify_signed_json
from tests.relay.log_support import open_replication_server

from fedsender.matrix import ROOM_VERSIONS, make_pdu, redact
from fedsender.replication.commands import Position, Rdata
from fedsender.runtime import real_runtime
from fedsender_lab.testing.rooms import ALL_VERSIONS, STREAM, Homeserver, Signer, Step
from fedsender_relay.protocol import Connection

NAME = "hs.example:8448"
SERVERS = [f"127.0.0.1:{port}" for port in range(4000, 4010)]
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)


def a_homeserver(seed: int, *, rooms: int = 12, acts: int = 600) -> Homeserver:
    homeserver = Homeserver(
        Signer(NAME, "ed25519:a1", KEY),
        SERVERS,
        rng=random.Random(seed),
        now_ms=lambda: 1_790_000_000_000,
    )
    for index in range(rooms):
        homeserver.create_room(SERVERS[: 1 + index % len(SERVERS)])
    for _ in range(acts):
        homeserver.act()
    return homeserver


def servers_by_brute_force(steps: list[Step], upto: int) -> tuple[str, ...]:
    """Who must get the step at index `upto`, from nothing but the events before it."""
    step = steps[upto]
    room = step.event.room_id
    members: dict[str, str] = {}
    for earlier in steps[:upto]:
        event = earlier.event.content
        if earlier.event.room_id == room and event["type"] == "m.room.member":
            members[event["state_key"]] = event["content"]["membership"]
    event = step.event.content
    (flags,) = [
        row[3].get("internal_metadata", {}) for kind, row in step.rows if kind == "pdu"
    ] or [{}]
    origin = flags.get("send_on_behalf_of")
    if origin is None and not event["sender"].endswith(":" + NAME):
        return ()
    if event["type"] == "m.room.create" or flags.keys() - {"send_on_behalf_of"}:
        return ()
    wanted = {user.partition(":")[2] for user, now in members.items() if now == "join"}
    target = str(event.get("state_key"))
    if (
        event["type"] == "m.room.member"
        and target != event["sender"]
        and members.get(target) in ("invite", "knock")
        and event["content"]["membership"] in ("leave", "ban")
    ):
        wanted.add(target.partition(":")[2])
    return tuple(sorted(wanted - {NAME, origin}))


@pytest.mark.parametrize("seed", [1, 2])
def test_truth_is_what_the_events_alone_say(seed: int) -> None:
    # The final check of every demo run rests on these sets.
    steps = a_homeserver(seed, rooms=4, acts=250).steps

    assert [step.servers for step in steps] == [
        servers_by_brute_force(steps, index) for index in range(len(steps))
    ]


def test_a_history_holds_every_kind_of_membership() -> None:
    # A history too tame would let a wrong fan-out through.
    steps = a_homeserver(3).steps

    turned_away = {
        step.event.content["content"]["membership"]
        for step in steps
        for server in step.servers
        if step.event.content["type"] == "m.room.member"
        and step.event.content["state_key"].endswith(server)
        and not step.evicted
    }
    assert turned_away >= {"leave", "ban"}
    assert any(step.evicted for step in steps)
    assert any(not step.rows for step in steps)
    assert any(kind == "redaction" for step in steps for kind, _ in step.rows)
    flags = [
        key
        for step in steps
        for kind, row in step.rows
        if kind == "pdu"
        for key in row[3].get("internal_metadata", ())
    ]
    assert {*flags} == {"send_on_behalf_of", "proactively_send", "out_of_band_membership"}


def test_events_of_every_room_version_are_taken_by_the_sender() -> None:
    # The sender recomputes each id and refuses an event whose hash is another.
    versions = set()
    for step in a_homeserver(4).steps:
        for kind, row in step.rows:
            if kind == "pdu":
                room_id, event_id, event, details = row
                versions.add(details["room_version"])
                make_pdu(
                    event_id, room_id, step.token, orjson.dumps(event), details["room_version"]
                )
    assert versions == set(ALL_VERSIONS)


def test_own_events_carry_a_valid_signature_of_the_homeserver() -> None:
    homeserver = a_homeserver(5, acts=100)
    public = decode_verify_key_bytes("ed25519:a1", KEY.public_key().public_bytes_raw())

    for step in homeserver.steps:
        event = step.event.content
        if event["sender"].endswith(":" + NAME):
            version = ROOM_VERSIONS[homeserver.room_versions[step.event.room_id]]
            verify_signed_json(redact(event, version), NAME, public)


@pytest.mark.slow
def test_tokens_count_up_by_one_and_the_same_seed_tells_the_same_story() -> None:
    one, other = a_homeserver(6), a_homeserver(6)

    told = [(step.token, step.event_id, step.rows) for step in one.steps if step.rows]
    assert told == [(token, *record) for token, record in enumerate(one.records, 1)]
    assert [step.rows for step in one.steps] == [step.rows for step in other.steps]


def test_hosts_rows_add_up_to_the_servers_of_each_room() -> None:
    homeserver = a_homeserver(7)
    told: defaultdict[str, set[str]] = defaultdict(set)
    for step in homeserver.steps:
        for kind, row in step.rows:
            if kind == "hosts":
                told[row[0]] |= set(row[1])
                told[row[0]] -= set(row[2])

    assert dict(told) == {room.room_id: room.servers() for room in homeserver.rooms}


def test_evicting_a_server_tells_it_and_then_no_more() -> None:
    homeserver = a_homeserver(8, rooms=1, acts=0)
    (room,) = homeserver.rooms
    kicked = SERVERS[0]

    (kick,) = homeserver.evict(room, kicked)
    after = homeserver.say(room)

    assert kick.evicted == {kicked}
    assert kicked in kick.servers
    assert kicked not in after.servers


async def test_the_history_can_be_followed_over_tcp_and_is_told_once() -> None:
    homeserver = a_homeserver(9, rooms=3, acts=100)
    told: list[tuple[int | None, object]] = []
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with open_replication_server(NAME, {STREAM: homeserver}, listeners, real_runtime()):
        port = listeners[0].socket.getsockname()[1]
        with trio.fail_after(60):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(b"REPLICATE events 0\n")
            homeserver.act()
            connection = Connection()
            reached = 0
            while reached < homeserver.watermark.value:
                connection.receive_data(bytes(await stream.receive_some()))
                while (command := connection.next_command()) is not None:
                    if isinstance(command, Rdata):
                        told.append((command.token, command.row))
                        reached = command.token or reached
                    elif isinstance(command, Position):
                        reached = command.token
            await stream.aclose()

    rows = [row for step in homeserver.steps for row in step.rows]
    assert [row for _, row in told] == orjson.loads(orjson.dumps(rows))
    assert [token for token, _ in told if token is not None] == [
        step.token for step in homeserver.steps if step.rows
    ]


def test_who_is_turned_away_can_always_be_told() -> None:
    # Otherwise a run would fail for what no sender can know.
    told: set[str] = set()
    turned_away = 0
    for step in a_homeserver(10).steps:
        for kind, row in step.rows:
            if kind == "pdu":
                _, event_id, event, details = row
                told.add(event_id)
                was = event["unsigned"].get("prev_content", {}).get("membership")
                now = event["content"].get("membership")
                if was in ("invite", "knock") and now in ("leave", "ban"):
                    turned_away += 1
                    assert details["plus"] or event["unsigned"]["replaces_state"] in told
    assert turned_away > 5
