"""docs/homeservers.md, "Which events are sent": its records are appended, and go where it says."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.embedded.test_push import pushed_to

from fedsender.matrix import ROOM_VERSIONS, server_of
from fedsender.runtime import real_runtime
from fedsender.sender.routing import Routed, Router
from fedsender.store import Store, StoreConfig
from fedsender_lab.testing.appends import append_of
from fedsender_lab.testing.rooms import Event, Signer, Timeline, new_timeline

PAGE = Path(__file__).parents[2] / "docs/homeservers.md"
OURS = "hs.example"
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
ALICE, BOB, CAROL, DAN = "@alice:hs.example", "@bob:b.example", "@carol:c.example", "@dan:d.example"
HAPPENS = [
    (ALICE, ALICE, "join"),
    (BOB, BOB, "join"),
    (CAROL, CAROL, "join"),
    (ALICE, DAN, "invite"),
    (ALICE, DAN, "leave"),
    (BOB, BOB, "leave"),
]


@dataclass(frozen=True)
class Shown:
    """A record as the page shows it, and the servers that are to get its event."""

    rows: str
    servers: frozenset[str]

    def filled(self, event: Event) -> Any:
        """Its rows, with this event in place of what the page leaves out."""
        named = {"room_id": event.room_id, "event_id": event.event_id, "event": event.content}
        of_names = "|".join(named)
        text = re.sub(
            rf"(?<![\w\"])({of_names})(?![\w\"])",
            lambda found: json.dumps(named[found[1]]),
            self.rows,
        )
        return json.loads(f"[{text}]")


def shown() -> list[Shown]:
    section = PAGE.read_text().partition("### Which events are sent")[2].partition("\n## ")[0]
    found = re.findall(r"^    # .*: (.*)\n    (\[.*)$", section, re.MULTILINE)
    return [
        Shown(rows, frozenset(re.findall(r"\b[b-d]\.example\b", servers.partition(" since ")[0])))
        for servers, rows in found
    ]


def happen(room: Timeline, kind: str, sender: str, target: str, content: dict[str, Any]) -> Event:
    signer = Signer(server_of(sender), "ed25519:1", KEY)
    return room.append(
        kind, sender, content, signer=signer, now_ms=1_790_000_000_000, state_key=target
    )


async def sent_to(store: Store) -> dict[str, frozenset[str]]:
    """By event the servers that get it; one that is not sent is left out."""
    turns = real_runtime().turns
    router = Router(store.homeserver, OURS, lambda _: True, turns, cache_bytes=10**6)
    routed = await router.route(await store.homeserver.read_events(0, 99, 99))
    assert all(isinstance(each, Routed) for each in routed)
    return {each.pdu.event_id: each.servers for each in routed if isinstance(each, Routed)}


async def test_the_first_records_of_a_room_go_where_the_page_says(config: StoreConfig) -> None:
    records = shown()
    room = new_timeline(ROOM_VERSIONS["11"], "room", ALICE)
    happen(room, "m.room.create", ALICE, "", {"room_version": "11"})
    events = [
        happen(room, "m.room.member", sender, target, {"membership": membership})
        for sender, target, membership in HAPPENS
    ]
    async with pushed_to(config) as (feed, store):
        for record, event in zip(records, events, strict=True):
            await feed.intake.append([append_of(event.event_id, record.filled(event))])
        servers = [record.servers for record in records]
        assert await sent_to(store) == dict(
            zip([event.event_id for event in events], servers, strict=True)
        )


async def test_neither_a_create_event_nor_one_of_another_server_is_sent(
    config: StoreConfig,
) -> None:
    """Whoever is in the room, and whoever is named."""
    room = new_timeline(ROOM_VERSIONS["11"], "room", ALICE)
    events = [
        happen(room, "m.room.create", ALICE, "", {"room_version": "11"}),
        happen(room, "m.room.member", BOB, BOB, {"membership": "join"}),
    ]
    about = {"room_version": "11", "plus": ["d.example"]}
    async with pushed_to(config) as (feed, store):
        servers = ["servers", [room.room_id, ["b.example", "c.example"]]]
        await feed.intake.append([append_of("1", [servers])])
        for event in events:
            row = ["pdu", [event.room_id, event.event_id, event.content, about]]
            await feed.intake.append([append_of(event.event_id, [row])])
        assert await sent_to(store) == {}
