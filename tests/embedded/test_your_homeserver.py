"""docs/homeservers.md, "Test your homeserver": the test that stands there passes."""

import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsender.config import load
from fedsender.daemon import open_core
from fedsender.runtime import real_runtime
from fedsender_lab.demo import process
from fedsender_lab.intake_client import IntakeClient, NewRecord
from fedsender_lab.testing import receiver

PAGE = Path(__file__).parents[2] / "docs/homeservers.md"
SEED, TOKEN = b"k" * 32, "a token that is long enough"
ROOM = "!room:hs.example"


class Homeserver:
    def __init__(self, sender: IntakeClient) -> None:
        self.sender = sender

    async def say(self, text: str, to: Sequence[str]) -> str:
        event = {
            "type": "m.room.message",
            "room_id": ROOM,
            "sender": "@alice:hs.example",
            "content": {"msgtype": "m.text", "body": text},
            "origin_server_ts": 1_790_000_000_000,
            "depth": 12,
            "prev_events": ["$before"],
            "auth_events": ["$create"],
        }
        row = ["pdu", [ROOM, None, event, {"room_version": "11"}]]
        await self.sender.append([["servers", [ROOM, list(to)]]])
        ((_, signed),) = await self.sender.append_to_sign([NewRecord([row], "1")])
        assert signed is not None
        return str(signed["event_id"])


@asynccontextmanager
async def my_homeserver(directory: Path, *, ca_file: Path) -> AsyncIterator[Homeserver]:
    process.write_secret(
        directory / "signing.key", f"ed25519 a_1 {b64encode(SEED).rstrip(b'=').decode()}\n"
    )
    process.write_secret(directory / "append.token", TOKEN)
    feed: dict[str, Any] = {**process.push_feed(directory)}
    feed["push"] |= {"sign_events": True}
    path = directory / "config.yaml"
    settings = {**process.configuration(directory, feed, ca_file), "server_name": "hs.example"}
    path.write_text(json.dumps(settings))
    async with (
        open_core(load(path), real_runtime()) as core,
        core.serve_feed(),
        IntakeClient.at(feed["push"]["listen"], TOKEN) as sender,
    ):
        yield Homeserver(sender)


def shown() -> dict[str, Any]:
    """The names of the page's program, and what it leaves to its reader."""
    section = PAGE.read_text().partition("\n## Test your homeserver\n")[2]
    [program] = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    names = {"key": Ed25519PrivateKey.from_private_bytes(SEED), "my_homeserver": my_homeserver}
    exec(compile(program, "homeservers.md", "exec"), names)
    return names


async def test_the_test_of_the_page_passes(tmp_path: Path) -> None:
    await shown()["test_a_message_reaches_both_servers"](tmp_path)


def test_the_behaviours_that_the_page_names_are_there() -> None:
    section = PAGE.read_text().partition("\n## Test your homeserver\n")[2]
    named = re.search(r"`server\.become\((\w+)\(\)\)`(.*?)stand beside", section, re.DOTALL)
    assert named is not None
    for name in (named[1], *re.findall(r"`(\w+)", named[2])):
        assert hasattr(receiver, name), name
