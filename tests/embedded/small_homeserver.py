"""A small homeserver in another style than ours: threads, sqlite3 and http.client.

    python -m tests.embedded.small_homeserver DIRECTORY SERVER... [--rate 50] [--seed 1]

Things happen in its rooms: messages, servers that come, servers that are thrown out. What happens
goes into its database in one transaction with what is to be appended (`outbox`). One thread reads
that table in order, appends, and notes the token of a row after a 200 or sets it aside after a 400.
A row stays until what it says is delivered; if an older copy of fedsender's database has taken its
place, what that lacks is appended again. Now and then it appends what nobody takes. It may be
killed at any point. Once there is a file `stop` nothing happens any more, and it ends when all of
its outbox has been appended.

DIRECTORY has `signing.key`, `append.token`, and the socket `append.sock` while fedsender runs.
"""

import argparse
import base64
import hashlib
import http.client
import json
import random
import socket
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NAME = "hs.demo"
VERSION = "11"
ROOMS = 5
BATCH = 50
MOST_WAITING = 2_000
LOOK_EVERY_S = 1.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS rooms (room_id TEXT PRIMARY KEY, depth INTEGER, latest TEXT);
CREATE TABLE IF NOT EXISTS members (room_id TEXT, server TEXT, PRIMARY KEY (room_id, server));
CREATE TABLE IF NOT EXISTS events (
    place INTEGER PRIMARY KEY AUTOINCREMENT, event_id TEXT UNIQUE, room_id TEXT, servers TEXT);
CREATE TABLE IF NOT EXISTS outbox (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT, rows TEXT, token INTEGER);
CREATE INDEX IF NOT EXISTS outbox_token ON outbox (token, place);
CREATE TABLE IF NOT EXISTS nonsense (id TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS set_aside (id TEXT PRIMARY KEY, rows TEXT, reason TEXT);
"""
KEPT = {
    *("type", "room_id", "sender", "state_key", "content", "hashes", "signatures", "depth"),
    *("prev_events", "auth_events", "origin_server_ts"),
}
"""What a redaction leaves of an event, by the specification of room version 11."""


def canonical(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode().rstrip("=")


class SmallHomeserver:
    """The maker's half: what happens, and its transactions."""

    def __init__(self, directory: Path, servers: list[str], seed: int) -> None:
        self.database = directory / "small.sqlite3"
        self.db = self.connect()
        self.db.executescript(SCHEMA)
        self.servers = servers
        _, key_id, key = (directory / "signing.key").read_text().split()
        self.key_id = f"ed25519:{key_id}"
        self.key = Ed25519PrivateKey.from_private_bytes(base64.b64decode(key + "=="))
        (lived,) = self.db.execute("SELECT count(*) FROM events").fetchone()
        self.rng = random.Random(seed * 1_000_003 + lived)
        with self.db:
            self.db.execute("BEGIN IMMEDIATE")
            if not self.db.execute("SELECT 1 FROM rooms").fetchone():
                self.furnish()

    def connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.database, timeout=30, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        return db

    def furnish(self) -> None:
        """Rooms of several sizes, with some of the servers each."""
        for number in range(ROOMS):
            room = f"!room{number}:{NAME}"
            self.db.execute("INSERT INTO rooms VALUES (?, 1, ?)", (room, f"$create{number}"))
            here = self.servers[: 1 + number % len(self.servers)]
            self.db.executemany("INSERT INTO members VALUES (?, ?)", [(room, s) for s in here])
            self.to_append(f"hosts {room}", [["hosts", [room, here, []]]])

    def to_append(self, name: str, rows: list[Any]) -> None:
        self.db.execute("INSERT INTO outbox (id, rows) VALUES (?, ?)", (name, json.dumps(rows)))

    def happen(self) -> None:
        """Something happens: one transaction."""
        rng = self.rng
        with self.db:
            self.db.execute("BEGIN IMMEDIATE")
            room = f"!room{rng.randrange(ROOMS)}:{NAME}"
            here = self.members(room)
            away = [server for server in self.servers if server not in here]
            chance = rng.random()
            if chance < 0.04 and away:
                self.arrive(room, rng.choice(away))
            elif chance < 0.08 and len(here) > 1:
                self.throw_out(room, rng.choice(here))
            else:
                self.say(room, f"number {rng.random()}")
            if chance > 0.97:
                self.talk_nonsense()

    def members(self, room: str) -> list[str]:
        query = "SELECT server FROM members WHERE room_id = ? ORDER BY server"
        return [server for (server,) in self.db.execute(query, (room,))]

    def arrive(self, room: str, server: str) -> None:
        """A user of another server joins; that server tells everybody."""
        self.db.execute("INSERT INTO members VALUES (?, ?)", (room, server))
        (count,) = self.db.execute("SELECT max(place) FROM outbox").fetchone()
        name = f"{server} into {room} {count} {self.rng.random()}"
        self.to_append(name, [["hosts", [room, [server], []]]])

    def throw_out(self, room: str, server: str) -> None:
        """The only user of a server is kicked: the server still gets to know that."""
        content = {"membership": "leave"}
        row = self.event(room, "m.room.member", content, state_key=f"@u:{server}")
        self.db.execute("DELETE FROM members WHERE room_id = ? AND server = ?", (room, server))
        self.to_append(row[1][1], [row, ["hosts", [room, [], [server]]]])

    def say(self, room: str, text: str) -> None:
        row = self.event(room, "m.room.message", {"msgtype": "m.text", "body": text})
        self.to_append(row[1][1], [row])

    def talk_nonsense(self) -> None:
        """A record that can never be stored."""
        name = f"nonsense {self.rng.random()}"
        self.db.execute("INSERT INTO nonsense VALUES (?)", (name,))
        event = {"type": "m.room.message", "sender": f"@a:{NAME}", "depth": 1.5, "content": {}}
        row = ["pdu", [f"!room0:{NAME}", f"${name}", event, {"room_version": VERSION}]]
        self.to_append(name, [row])

    def event(self, room: str, kind: str, content: dict[str, str], **more: str) -> list[Any]:
        """The room's next event, put down with the servers that are to get it; its row."""
        query = "SELECT depth, latest FROM rooms WHERE room_id = ?"
        depth, latest = self.db.execute(query, (room,)).fetchone()
        made: dict[str, Any] = {
            "type": kind,
            "room_id": room,
            "sender": f"@a:{NAME}",
            "content": content,
            "depth": depth + 1,
            "origin_server_ts": int(time.time() * 1000),
            "prev_events": [latest],
            "auth_events": [],
            **more,
        }
        made["hashes"] = {"sha256": base64_of(hashlib.sha256(canonical(made)).digest())}
        left = {key: value for key, value in made.items() if key in KEPT}
        left["content"] = {"membership": "leave"} if kind == "m.room.member" else {}
        digest = hashlib.sha256(canonical(left)).digest()
        event_id = "$" + base64.urlsafe_b64encode(digest).decode().rstrip("=")
        made["signatures"] = {NAME: {self.key_id: base64_of(self.key.sign(canonical(left)))}}
        changed = (depth + 1, event_id, room)
        self.db.execute("UPDATE rooms SET depth = ?, latest = ? WHERE room_id = ?", changed)
        servers = json.dumps(self.members(room))
        self.db.execute(
            "INSERT INTO events (event_id, room_id, servers) VALUES (?, ?, ?)",
            (event_id, room, servers),
        )
        return ["pdu", [room, event_id, made, {"room_version": VERSION}]]

    def waiting(self) -> int:
        query = "SELECT count(*) FROM outbox WHERE token IS NULL"
        (count,) = self.db.execute(query).fetchone()
        return int(count)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("fedsender", timeout=60)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


class Worker(threading.Thread):
    """The only one who appends: in order, and one request after the other."""

    def __init__(self, homeserver: SmallHomeserver, directory: Path) -> None:
        super().__init__(daemon=True)
        self.homeserver = homeserver
        self.socket = directory / "append.sock"
        self.token = (directory / "append.token").read_text().strip()
        self.stopping = threading.Event()
        self.epoch = ""

    def run(self) -> None:
        db, size, looked = self.homeserver.connect(), BATCH, float("-inf")
        while True:
            if time.monotonic() - looked > LOOK_EVERY_S:
                if not self.compare(db):
                    time.sleep(0.05)
                    continue
                looked = time.monotonic()
            query = "SELECT place, id, rows FROM outbox WHERE token IS NULL ORDER BY place LIMIT ?"
            batch = db.execute(query, (size,)).fetchall()
            if not batch:
                if self.stopping.is_set():
                    return
                time.sleep(0.01)
                continue
            status, answer = self.append(batch)
            if status == 200:
                tokens = zip(answer["tokens"], (place for place, _, _ in batch), strict=True)
                with db:
                    db.execute("BEGIN IMMEDIATE")
                    db.executemany("UPDATE outbox SET token = ? WHERE place = ?", tokens)
                size = min(BATCH, 2 * size)
            elif status == 400 and len(batch) > 1:
                size = 1  # One of them; which one shows when each goes alone.
            elif status == 400:
                self.set_aside(db, batch[0], answer["error"])
            else:
                # It may be another store that answers next, or does already (409).
                looked = float("-inf")

    def compare(self, db: sqlite3.Connection) -> bool:
        """What is delivered goes; what a restored store lacks waits again. False: no answer."""
        status, answer = self.request("GET", "position")
        if status != 200:
            return False
        self.epoch = answer["epoch"]
        db.execute("UPDATE outbox SET token = NULL WHERE token > ?", (answer["stored"],))
        if answer["delivered"] is not None:
            db.execute("DELETE FROM outbox WHERE token <= ?", (answer["delivered"],))
        return True

    def append(self, batch: list[tuple[int, str, str]]) -> tuple[int, dict[str, Any]]:
        appends = [{"id": name, "rows": json.loads(rows)} for _, name, rows in batch]
        return self.request("POST", "append", json.dumps({"appends": appends, "epoch": self.epoch}))

    def request(
        self, method: str, name: str, body: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer; 0 if there is none, and nobody knows what became of it."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        with closing(UnixConnection(self.socket)) as connection:
            try:
                connection.request(method, f"/_fedsender/intake/v1/{name}", body, headers)
                response = connection.getresponse()
                return response.status, json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError):
                return 0, {}

    def set_aside(self, db: sqlite3.Connection, record: tuple[int, str, str], reason: str) -> None:
        place, name, rows = record
        with db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO set_aside VALUES (?, ?, ?)", (name, rows, reason))
            db.execute("DELETE FROM outbox WHERE place = ?", (place,))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("servers", nargs="+")
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    homeserver = SmallHomeserver(given.directory, given.servers, given.seed)
    worker = Worker(homeserver, given.directory)
    worker.start()
    while not (given.directory / "stop").exists():
        time.sleep(1 / given.rate)
        if homeserver.waiting() < MOST_WAITING:
            homeserver.happen()
    worker.stopping.set()
    worker.join()


if __name__ == "__main__":
    main()
