"""The small homeserver of the laboratory, with a life of its own.

    python -m tests.embedded.small_homeserver DIRECTORY SERVER... [--rate 50] [--seed 1]

Things happen in its rooms: messages, servers that come, servers that are thrown out. Now and then
it appends what nobody takes. It may be killed at any point. Once there is a file `stop` nothing
happens any more, and it ends when all of its outbox has been appended.

DIRECTORY has `signing.key`, `append.token`, and the socket `append.sock` while fedsender runs.
"""

import argparse
import json
import random
import socket
import sqlite3
import time
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from fedsender_lab.small_homeserver import VERSION, Homeserver, Worker

NAME = "hs.demo"
ROOMS = 5
MOST_WAITING = 2_000

SCHEMA = """
CREATE TABLE IF NOT EXISTS due (event_id TEXT PRIMARY KEY, servers TEXT);
CREATE TABLE IF NOT EXISTS nonsense (id TEXT PRIMARY KEY);
"""


class SmallHomeserver(Homeserver):
    """What happens is random; beside each event stands who is to get it."""

    def __init__(self, directory: Path, servers: list[str], seed: int) -> None:
        super().__init__(directory, NAME)
        self.db = self.connect()
        self.db.executescript(SCHEMA)
        self.servers = servers
        (lived,) = self.db.execute("SELECT count(*) FROM events").fetchone()
        self.rng = random.Random(seed * 1_000_003 + lived)
        with self.db:
            self.db.execute("BEGIN IMMEDIATE")
            if not self.db.execute("SELECT 1 FROM rooms").fetchone():
                for number in range(ROOMS):
                    here = servers[: 1 + number % len(servers)]
                    self.set_servers(self.db, f"!room{number}:{NAME}", here)

    def happen(self) -> None:
        """Something happens: one transaction."""
        rng, db = self.rng, self.db
        with db:
            db.execute("BEGIN IMMEDIATE")
            room = f"!room{rng.randrange(ROOMS)}:{NAME}"
            here = self.members(db, room)
            away = [server for server in self.servers if server not in here]
            chance = rng.random()
            if chance < 0.04 and away:
                self.arrive(room, rng.choice(away))
            elif chance < 0.08 and len(here) > 1:
                self.throw_out(room, rng.choice(here))
            else:
                self.say(db, room, f"number {rng.random()}")
            if chance > 0.97:
                self.talk_nonsense()

    def members(self, db: sqlite3.Connection, room: str) -> list[str]:
        query = "SELECT server FROM members WHERE room_id = ? ORDER BY server"
        return [server for (server,) in db.execute(query, (room,))]

    def arrive(self, room: str, server: str) -> None:
        """A user of another server joins; that server tells everybody."""
        self.db.execute("INSERT INTO members VALUES (?, ?)", (room, server))
        (count,) = self.db.execute("SELECT max(place) FROM outbox").fetchone()
        name = f"{server} into {room} {count} {self.rng.random()}"
        self.to_append(self.db, name, [["hosts", [room, [server], []]]])

    def throw_out(self, room: str, server: str) -> None:
        """The only user of a server is kicked: the server still gets to know that."""
        content = {"membership": "leave"}
        row = self.event(self.db, room, "m.room.member", content, state_key=f"@u:{server}")
        query = "DELETE FROM members WHERE room_id = ? AND server = ?"
        self.db.execute(query, (room, server))
        self.to_append(self.db, row[1][1], [row, ["hosts", [room, [], [server]]]])

    def talk_nonsense(self) -> None:
        """A record that can never be stored."""
        name = f"nonsense {self.rng.random()}"
        self.db.execute("INSERT INTO nonsense VALUES (?)", (name,))
        event = {"type": "m.room.message", "sender": f"@a:{NAME}", "depth": 1.5, "content": {}}
        row = ["pdu", [f"!room0:{NAME}", f"${name}", event, {"room_version": VERSION}]]
        self.to_append(self.db, name, [row])

    def event(
        self, db: sqlite3.Connection, room: str, kind: str, content: Mapping[str, str], **more: str
    ) -> list[Any]:
        row = super().event(db, room, kind, content, **more)
        due = (row[1][1], json.dumps(self.members(db, room)))
        db.execute("INSERT INTO due VALUES (?, ?)", due)
        return row

    def waiting(self) -> int:
        query = "SELECT count(*) FROM outbox WHERE token IS NULL AND refused IS NULL"
        (count,) = self.db.execute(query).fetchone()
        return int(count)


class UnixConnection(HTTPConnection):
    """HTTP over a Unix socket: its host is the path."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


class UnixWorker(Worker):
    """It appends at a Unix socket."""

    def connection(self) -> UnixConnection:
        return UnixConnection(self.intake, timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    homeserver = SmallHomeserver(given.directory, given.servers, given.seed)
    worker = UnixWorker(homeserver, str(given.directory / "append.sock"))
    worker.start()
    while not (given.directory / "stop").exists():
        time.sleep(1 / given.rate)
        if homeserver.waiting() < MOST_WAITING:
            homeserver.happen()
    worker.stopping.set()
    worker.join()


if __name__ == "__main__":
    main()
