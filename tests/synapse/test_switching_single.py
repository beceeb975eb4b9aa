"""An operator of a Synapse without workers follows docs/switching-single.md, there and back.

Commands and settings are read from the page, so that text and test cannot drift.
"""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trustme
import yaml
from tests.servers import Valkey, free_port
from tests.synapse.client import User
from tests.synapse.guide import GUIDE_WITHOUT_WORKERS, open_host, snippets, steps, user_name
from tests.synapse.homeserver import Database, Homeserver
from tests.synapse.remote import Remote, open_remote
from tests.synapse.world import until

from fedsender.config import load
from fedsender.replication.feed import peers
from fedsender.replication.stream_updates import fetch_missed
from fedsender.runtime import real_runtime
from fedsender.segments import read_lines, segments

TEST_S = 300
A_HOST = "127.0.0.4"
REMOTE_HOST = "127.0.0.5"
SYNAPSE = "matrix-synapse"


pytestmark = pytest.mark.slow


@pytest.mark.long
async def test_there_and_back_by_the_guide(
    own_database: Database, synapse_authority: trustme.CA, synapse_valkey: Valkey, tmp_path: Path
) -> None:
    """Synapse sends the first message, fedsender the next ones, Synapse the last; each once."""
    port = free_port(A_HOST)
    single = Homeserver(
        name=f"{A_HOST}:{port}",
        directory=tmp_path / "a",
        listens_at=(A_HOST, port),
        authority=synapse_authority,
        database=own_database,
    )
    conf_d, state = tmp_path / "conf.d", tmp_path / "state"
    conf_d.mkdir()
    state.mkdir()
    command = single.main_command(single.config_path, conf_d)
    values = {
        "HOMESERVER": str(single.config_path),
        "CONF_D": str(conf_d),
        "SYNAPSE": SYNAPSE,
        "SYNAPSE_USER": user_name(),
        "CONFIG": str(tmp_path / "etc" / "config.yaml"),
        "STATE": str(state),
        "ADMIN": f"127.0.0.1:{free_port('127.0.0.1')}",
    }
    _, convert, switch = steps("There", GUIDE_WITHOUT_WORKERS)
    hand_back, switch_back = steps("Back", GUIDE_WITHOUT_WORKERS)
    restart, start, look = switch.splitlines()
    with (
        trio.fail_after(TEST_S),
        open_host(tmp_path / "host", values, GUIDE_WITHOUT_WORKERS) as host,
    ):
        host.add_unit(SYNAPSE, command)
        await host.follow(f"systemctl enable --now {SYNAPSE}")
        async with (
            open_remote(REMOTE_HOST, single, synapse_authority) as remote,
            open_talk(single, remote) as talk,
        ):
            await talk.say("by Synapse")
            await talk.has_come()
            there_already = tmp_path / "etc" / "config.yaml"
            there_already.parent.mkdir()
            there_already.write_text("it works\n")
            refused = await host.run(convert)
            assert refused.returncode == 2
            assert "missing here: Redis, instance_map, federation_sender" in refused.stderr
            assert there_already.read_text() == "it works\n"

            write_snippets(single, conf_d, synapse_valkey.port)
            await host.follow(convert)
            await host.follow(restart)
            await talk.say("while nobody sends")
            await host.follow(start)
            await talk.has_come()
            await talk.say("by fedsender")
            await talk.has_come()

            async def level() -> bool:
                return remote.name not in await host.follow(look)

            await until(level)
            # What fedsender missed it may ask for: address and secret are right.
            await talk.alice.type_in(talk.room)
            there = peers(load(Path(values["CONFIG"])))
            assert await fetch_missed(there, real_runtime(), "typing", "master", 0, 1)

            await host.follow(hand_back)
            await host.follow(switch_back)
            await talk.say("by Synapse again")
            await talk.has_come()
    texts = [pdu["content"].get("body") for pdu in remote.recording.pdus(talk.room)]
    assert [text for text in texts if text is not None] == list(talk.said)
    ours = {
        pdu["event_id"]
        for segment in segments(state / "ledger")
        for line in read_lines(segment)
        for pdu in line["pdus"]
    }
    by_us = [text for text, event_id in talk.said.items() if event_id in ours]
    assert by_us == ["while nobody sends", "by fedsender"]


def write_snippets(homeserver: Homeserver, conf_d: Path, redis_port: int) -> None:
    """Do the guide's first step, with the ports of this machine."""
    ports = {"6379": redis_port, "9093": homeserver.replication_port}
    file, more = snippets(GUIDE_WITHOUT_WORKERS)
    for shown, ours in ports.items():
        file, more = file.replace(shown, str(ours)), more.replace(shown, str(ours))
    (conf_d / "fedsender.yaml").write_text(file)
    settings = json.loads(homeserver.config_path.read_text())
    settings["listeners"] += yaml.safe_load(more)["listeners"]
    homeserver.config_path.write_text(json.dumps(settings))


@dataclass(slots=True)
class Talk:
    """A room with a user of the remote server, and what alice has said there, with event ids."""

    alice: User
    remote: Remote
    room: str
    said: dict[str, str] = field(default_factory=dict)

    async def say(self, text: str) -> None:
        self.said[text] = await self.alice.send(self.room, text)

    async def has_come(self) -> None:
        """Return once the remote server has what was said last."""
        last = list(self.said)[-1]

        async def come() -> bool:
            pdus = self.remote.recording.pdus(self.room)
            return any(pdu["content"].get("body") == last for pdu in pdus)

        await until(come)


@asynccontextmanager
async def open_talk(homeserver: Homeserver, remote: Remote) -> AsyncIterator[Talk]:
    """A new room of a new user's, joined by one of the remote server."""
    async with aclosing(await homeserver.register("alice")) as alice:
        room = await alice.create_room(preset="public_chat")
        await remote.join(room, remote.user("bob"))
        yield Talk(alice, remote, room)
