"""Signing for a homeserver: hash, id and signatures in every room version, and what a retry is
answered. On SQLite and on PostgreSQL where the store is concerned; signedjson is the oracle."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import signedjson.key
import signedjson.sign
import trio
from hypothesis import HealthCheck, given, settings
from tests.embedded.support import whole_daemon
from tests.embedded.test_push import abouts, events, ids
from tests.lab.testing.test_rooms import NAME, a_homeserver
from tests.replication.support import RecordingSink

from fedsender.embedded.facts import BadRow, prepare
from fedsender.embedded.intake import Append, Intake
from fedsender.embedded.push import PushFeed
from fedsender.embedded.signing import EventSigner
from fedsender.embedded.store import own_store
from fedsender.federation.signing import (
    KeyRing,
    SigningKey,
    parse_signing_keys,
    signing_key_from_seed,
)
from fedsender.matrix import ROOM_VERSIONS, redact
from fedsender.runtime import real_runtime
from fedsender.store import StoreConfig, open_store
from fedsender_lab.demo import process
from fedsender_lab.intake_client import EpochOver, NewRecord
from fedsender_lab.testing.appends import append_of
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.rules import ReceivedPdu, pdu_reader

OURS = "hs.example"
ONE, TWO = (signing_key_from_seed(name, name.encode() * 32) for name in ("a", "b"))


async def no_read(event_ids: object) -> Mapping[str, Any]:
    raise AssertionError("nothing is read")


def signer(*keys: SigningKey, name: str = OURS) -> EventSigner:
    return EventSigner(name, KeyRing(*(keys or (ONE,))), no_read)


def verify(event: dict[str, Any], room_version: str, key: SigningKey, name: str = OURS) -> None:
    """Check a signature as a receiver does; raises SignatureVerifyException."""
    public = signedjson.key.decode_verify_key_base64("ed25519", key.version, key.public_key())
    signedjson.sign.verify_signed_json(redact(event, ROOM_VERSIONS[room_version]), name, public)


def message(number: int, **more: object) -> dict[str, Any]:
    return {
        "type": "m.room.message",
        "sender": f"@a:{OURS}",
        "room_id": "!r:hs.example",
        "content": {"body": f"message {number}"},
        "depth": number,
        "origin_server_ts": 1_790_000_000_000 + number,
        "prev_events": ["$before"],
        "auth_events": [],
        **more,
    }


def added(event: dict[str, Any]) -> dict[str, Any]:
    return {name: event[name] for name in ("hashes", "signatures")}


def row(event: dict[str, Any], version: str = "11", event_id: str | None = None) -> list[Any]:
    return ["pdu", ["!r:hs.example", event_id, event, {"room_version": version}]]


# --- what is signed -------------------------------------------------------------------------------


def test_events_of_every_room_version_are_completed_as_their_homeserver_did() -> None:
    """Ed25519 gives the same bytes each time. Events that are complete stay as they are."""
    key = signing_key_from_seed("a1", b"k" * 32)
    signs = signer(key, name=NAME)
    homeserver = a_homeserver(7, acts=300)
    read = pdu_reader(homeserver.room_versions.__getitem__)
    versions = set()
    for step in homeserver.steps:
        for told in step.rows:
            if told[0] != "pdu":
                continue
            room_id, event_id, event, about = told[1]
            assert signs.complete(told) is told
            if not event["sender"].endswith(f":{NAME}"):
                continue
            bare = {name: event[name] for name in event if name not in ("hashes", "signatures")}
            creates = event["type"] == "m.room.create" and about["room_version"] == "12"
            (_, completed) = signs.complete(
                ["pdu", [None if creates else room_id, None, bare, about]]
            )
            assert completed == [room_id, event_id, event, about]
            assert (read(event).whole, read(event).event_id) == (True, event_id)
            verify(event, about["room_version"], key, NAME)
            versions.add(about["room_version"])
    assert versions == set(map(str, range(1, 13)))


def test_all_keys_sign_an_event_and_what_peers_do_not_see_is_not_covered() -> None:
    event = message(1, event_id="$own", unsigned={"age_ts": 5})
    _, (_, event_id, signed, _) = signer(ONE, TWO).complete(row(event))
    assert list(signed["signatures"][OURS]) == ["ed25519:a", "ed25519:b"]
    for key in (ONE, TWO):
        verify(signed, "11", key)
    again = signer(ONE, TWO).complete(row(message(1)))[1]
    assert (again[1], again[2]["hashes"]) == (event_id, signed["hashes"])


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (row(message(1, sender="@a:b.example")), "its sender is not ours"),
        (row(message(1, signatures={OURS: {"ed25519:a": "x"}})), "signatures without hashes"),
        (row(message(1), "99"), "unknown room version"),
        (row(message(1), event_id="$other"), "not the event's id"),
        (row(message(1), "1"), "without an event_id"),
        (row(message(1, content={"n": 1.5})), "number that room version 11 does not allow"),
        (row(message(1, content={"n": float("nan")}), "1"), "cannot be written"),
        (row(message(1, content={"half": "\ud83d"})), "cannot be written"),
        (row(message(1, content={"body": "x" * 70_000})), "above the limit of 65536"),
        (row(message(1, depth=None)), "depth is missing"),
        (row(message(1, room_id="!other:hs.example")), "event of another room"),
    ],
)
def test_an_event_that_could_not_be_sent_is_refused_and_not_signed(told: Any, why: str) -> None:
    with pytest.raises(BadRow, match=why):
        prepare([told], signer().complete)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(ids, events, abouts)
def test_whatever_comes_is_refused_with_a_reason_or_is_an_event(
    room_id: str, event: dict[str, Any], about: dict[str, Any]
) -> None:
    event["sender"] = f"@a:{OURS}"
    try:
        prepare([["pdu", [room_id, None, event, about]]], signer().complete)
    except BadRow:
        return


# --- what is answered -----------------------------------------------------------------------------


@asynccontextmanager
async def pushed_to(config: StoreConfig, *keys: SigningKey) -> AsyncIterator[Intake]:
    runtime = real_runtime()
    async with open_store(config, runtime) as store, trio.open_nursery() as nursery:
        signs = EventSigner(OURS, KeyRing(*keys), store.homeserver.events_by_id)
        feed = PushFeed(runtime, own_store(store.homeserver), RecordingSink(), signs)
        nursery.start_soon(feed.run)
        await feed.connected.wait()
        yield feed.intake
        nursery.cancel_scope.cancel()


async def test_each_event_is_answered_as_it_is_stored_also_after_a_change_of_keys(
    config: StoreConfig,
) -> None:
    def appends(*numbers: int) -> list[Append]:
        return [append_of(f"id{number}", [row(message(number))]) for number in numbers]

    hosts = append_of("hosts", [["hosts", ["!r:hs.example", ["b.example"], []]]])
    async with pushed_to(config, ONE) as intake:
        tokens, shown = await intake.append_shown([*appends(1), hosts, *appends(2)])
        assert tokens == [1, 2, 3]
        assert shown[1] is None
        first = shown[0]
        assert first is not None
        first_id = first["event_id"]
        assert first == {"event_id": first_id, **added(first)}
        verify({**message(1), **added(first)}, "11", ONE)
        assert await intake.append_shown([*appends(1), hosts, *appends(2)]) == (tokens, shown)
    async with pushed_to(config, TWO, ONE) as intake:
        tokens, later = await intake.append_shown(appends(3, 1))
        assert tokens == [4, 1]
        assert later[1] == first
        assert later[0] is not None
        assert list(later[0]["signatures"][OURS]) == ["ed25519:b", "ed25519:a"]


def test_events_are_signed_with_the_keys_of_the_moment() -> None:
    ring = KeyRing(ONE)
    signs = EventSigner(OURS, ring, no_read)
    ring.keys = (TWO,)
    match signs.complete(row(message(1))):
        case ["pdu", [_, _, dict(event), _]]:
            assert list(event["signatures"][OURS]) == [TWO.key_id]
            verify(event, "11", TWO)
        case other:
            raise AssertionError(other)


async def test_what_is_signed_arrives_and_its_receiver_can_check_it(tmp_path: Path) -> None:
    """From a plain event to a server that checks the transaction, the content hash and, with
    signedjson, the event's signature; over the endpoint, with the client."""
    arrived: list[tuple[dict[str, Any], ReceivedPdu]] = []
    read = pdu_reader(lambda _room: "11")

    def reading(event: Mapping[str, Any]) -> ReceivedPdu:
        arrived.append((dict(event), read(event)))
        return arrived[-1][1]

    room_id = f"!r:{process.SERVER_NAME}"
    event = message(1, sender=f"@a:{process.SERVER_NAME}", room_id=room_id, prev_events=["$x"])
    async with whole_daemon(tmp_path, reading, sign_events=True) as (client, server, _):
        records = [
            NewRecord([["hosts", [room_id, [server.name], []]]], "hosts"),
            NewRecord([["pdu", [room_id, None, event, {"room_version": "11"}]]], "one"),
        ]
        with pytest.raises(EpochOver):
            await client.append_to_sign(records, epoch="another")
        epoch = (await client.position()).epoch
        first, (token, shown) = await client.append_to_sign(records, epoch=epoch)
        assert (first, token) == ((1, None), 2)
        assert (await client.append_to_sign(records))[1] == (token, shown)
        await until(lambda: arrived)
    ((received, pdu),) = arrived
    assert shown is not None
    assert pdu.whole
    assert pdu.event_id == shown["event_id"]
    assert added(received) == added(shown)
    (key,) = parse_signing_keys((tmp_path / "signing.key").read_bytes(), "signing.key")
    verify(received, "11", key, process.SERVER_NAME)
