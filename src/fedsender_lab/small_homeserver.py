"""A small homeserver, to read and to begin with: rooms, signed events, keys, and an outbox.

    python -m fedsender_lab.small_homeserver DIRECTORY SERVER_NAME PORT INTAKE

It needs the standard library and `cryptography` alone. DIRECTORY has `signing.key` and
`append.token`; INTAKE is the sender's `feed.push.listen`. At PORT of loopback it listens:

    PUT /rooms/ROOM            ["remote.example"]   these servers are in the room, and no others
    POST /rooms/ROOM           a text               a message of @alice; its event id
    GET /_matrix/key/v2/server                      its keys, as other servers ask for them
"""

import base64
import hashlib
import json
import sqlite3
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

VERSION = "11"
BATCH = 50
LOOK_EVERY_S = 1.0
KEPT_MS = 14 * 86_400_000
"""As old as the oldest backup of the sender's store that one would restore."""
VALID_MS = 86_400_000
SCHEMA = """
CREATE TABLE IF NOT EXISTS rooms (room_id TEXT PRIMARY KEY, depth INTEGER, latest TEXT);
CREATE TABLE IF NOT EXISTS members (room_id TEXT, server TEXT, PRIMARY KEY (room_id, server));
CREATE TABLE IF NOT EXISTS events (place INTEGER PRIMARY KEY, event_id TEXT UNIQUE, event TEXT);
CREATE TABLE IF NOT EXISTS outbox (place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT, rows TEXT, ms INTEGER, token INTEGER, refused TEXT);
CREATE INDEX IF NOT EXISTS outbox_token ON outbox (token, place);
CREATE TABLE IF NOT EXISTS keys (key_id TEXT PRIMARY KEY, public TEXT, expired_ms INTEGER);
"""
REDACTED = {
    *("type", "room_id", "sender", "state_key", "content", "hashes", "signatures", "depth"),
    *("prev_events", "auth_events", "origin_server_ts"),
}
"""What a redaction leaves of an event (specification of room version 11)."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def canonical(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode().rstrip("=")


class Homeserver:
    """Its own half: what happens, each in one transaction with what is to be appended."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        with closing(self.connect()) as db:
            db.executescript(SCHEMA)

    def connect(self) -> sqlite3.Connection:
        path = self.directory / "small.sqlite3"
        db = sqlite3.connect(path, timeout=30, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        return db

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction of its own."""
        with closing(self.connect()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            yield db

    def signing_keys(self) -> dict[str, Ed25519PrivateKey]:
        """The keys of `signing.key`, as it is now; the first one signs."""
        lines = (self.directory / "signing.key").read_text().splitlines()
        fields = [line.split() for line in lines]
        return {
            f"ed25519:{name}": Ed25519PrivateKey.from_private_bytes(base64.b64decode(seed + "=="))
            for _, name, seed in fields
        }

    def key_document(self) -> dict[str, Any]:
        """What other servers check our signatures with. A key that left the file has expired."""
        keys = self.signing_keys()
        current = {
            name: base64_of(key.public_key().public_bytes_raw()) for name, key in keys.items()
        }
        with self.changing() as db:
            db.executemany("INSERT OR IGNORE INTO keys VALUES (?, ?, NULL)", current.items())
            known = db.execute("SELECT key_id, public, expired_ms FROM keys").fetchall()
            gone = [(now_ms(), name) for name, _, ms in known if name not in current and ms is None]
            db.executemany("UPDATE keys SET expired_ms = ? WHERE key_id = ?", gone)
            old = db.execute("SELECT * FROM keys WHERE expired_ms IS NOT NULL").fetchall()
        document: dict[str, Any] = {
            "server_name": self.name,
            "valid_until_ts": now_ms() + VALID_MS,
            "verify_keys": {name: {"key": public} for name, public in current.items()},
            "old_verify_keys": {n: {"key": public, "expired_ts": ms} for n, public, ms in old},
        }
        text = canonical(document)
        signatures = {name: base64_of(key.sign(text)) for name, key in keys.items()}
        return {**document, "signatures": {self.name: signatures}}

    def set_servers(self, db: sqlite3.Connection, room: str, servers: list[str]) -> None:
        """Exactly these servers are in the room from now on."""
        db.execute("INSERT OR IGNORE INTO rooms VALUES (?, 1, ?)", (room, f"$create{room}"))
        db.execute("DELETE FROM members WHERE room_id = ?", (room,))
        db.executemany("INSERT INTO members VALUES (?, ?)", [(room, each) for each in servers])
        self.to_append(db, f"{room} {time.time_ns()}", [["servers", [room, servers]]])

    def say(self, db: sqlite3.Connection, room: str, text: str) -> str:
        """A message; its event id."""
        row = self.event(db, room, "m.room.message", {"msgtype": "m.text", "body": text})
        event_id: str = row[1][1]
        self.to_append(db, event_id, [row])
        return event_id

    def to_append(self, db: sqlite3.Connection, name: str, rows: list[Any]) -> None:
        """The outbox: with the transaction that it belongs to, or not at all."""
        query = "INSERT INTO outbox (id, rows, ms) VALUES (?, ?, ?)"
        db.execute(query, (name, json.dumps(rows), now_ms()))

    def event(
        self, db: sqlite3.Connection, room: str, kind: str, content: Mapping[str, str], **more: str
    ) -> list[Any]:
        """The room's next event, stored; its row for the sender."""
        query = "SELECT depth, latest FROM rooms WHERE room_id = ?"
        depth, latest = db.execute(query, (room,)).fetchone()
        event: dict[str, Any] = {
            "type": kind,
            "room_id": room,
            "sender": f"@alice:{self.name}",
            "content": content,
            "depth": depth + 1,
            "origin_server_ts": now_ms(),
            "prev_events": [latest],
            "auth_events": [],
            **more,
        }
        event["hashes"] = {"sha256": base64_of(hashlib.sha256(canonical(event)).digest())}
        left = {key: value for key, value in event.items() if key in REDACTED}
        left["content"] = {key: content[key] for key in content if key == "membership"}
        digest = hashlib.sha256(canonical(left)).digest()
        event_id = "$" + base64.urlsafe_b64encode(digest).decode().rstrip("=")
        key_id, key = next(iter(self.signing_keys().items()))
        event["signatures"] = {self.name: {key_id: base64_of(key.sign(canonical(left)))}}
        changed = (depth + 1, event_id, room)
        db.execute("UPDATE rooms SET depth = ?, latest = ? WHERE room_id = ?", changed)
        stored = (event_id, json.dumps(event))
        db.execute("INSERT INTO events (event_id, event) VALUES (?, ?)", stored)
        return ["pdu", [room, event_id, event, {"room_version": VERSION}]]


class Worker(threading.Thread):
    """The only one who appends: in order, and one request after the other."""

    def __init__(self, homeserver: Homeserver, intake: str) -> None:
        super().__init__(daemon=True)
        self.homeserver, self.intake = homeserver, intake
        self.token = (homeserver.directory / "append.token").read_text().strip()
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
            query = (
                "SELECT place, id, rows FROM outbox WHERE token IS NULL AND refused IS NULL"
                " ORDER BY place LIMIT ?"
            )
            batch = db.execute(query, (size,)).fetchall()
            if not batch:
                if self.stopping.is_set():
                    return
                time.sleep(0.01)
                continue
            appends = [{"id": name, "rows": json.loads(rows)} for _, name, rows in batch]
            body = json.dumps({"appends": appends, "epoch": self.epoch})
            status, answer = self.request("POST", "append", body)
            if status == 200:
                tokens = zip(answer["tokens"], (place for place, _, _ in batch), strict=True)
                with db:
                    db.execute("BEGIN IMMEDIATE")
                    db.executemany("UPDATE outbox SET token = ? WHERE place = ?", tokens)
                size = min(BATCH, 2 * size)
            elif status == 400 and len(batch) > 1:
                size = 1  # One of them; which one shows when each goes alone.
            elif status == 400:
                refused = (answer["error"], batch[0][0])
                db.execute("UPDATE outbox SET refused = ? WHERE place = ?", refused)
            else:
                # It may be another store that answers next, or does already (409).
                looked = float("-inf")

    def compare(self, db: sqlite3.Connection) -> bool:
        """Delete what is delivered and old; append again what a restored store lacks.

        False: no answer.
        """
        status, answer = self.request("GET", "position")
        if status != 200:
            return False
        self.epoch = answer["epoch"]
        db.execute("UPDATE outbox SET token = NULL WHERE token > ?", (answer["stored"],))
        if answer["delivered"] is not None:
            done = (answer["delivered"], now_ms() - KEPT_MS)
            db.execute("DELETE FROM outbox WHERE token <= ? AND ms < ?", done)
        return True

    def connection(self) -> HTTPConnection:
        return HTTPConnection(self.intake, timeout=60)

    def request(
        self, method: str, name: str, body: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer; 0 if there is none, and nobody knows what became of it."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        with closing(self.connection()) as connection:
            try:
                connection.request(method, f"/_fedsender/intake/v1/{name}", body, headers)
                response = connection.getresponse()
                return response.status, json.loads(response.read())
            except (OSError, HTTPException, ValueError):
                return 0, {}


def main() -> None:
    directory, name, port, intake = sys.argv[1:]
    homeserver = Homeserver(Path(directory), name)

    class Door(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            with homeserver.changing() as db:
                homeserver.set_servers(db, self.room(), json.loads(self.body()))
            self.answer({})

        def do_POST(self) -> None:
            with homeserver.changing() as db:
                event_id = homeserver.say(db, self.room(), self.body())
            self.answer({"event_id": event_id})

        def do_GET(self) -> None:
            self.answer(homeserver.key_document())

        def room(self) -> str:
            return urllib.parse.unquote(self.path.removeprefix("/rooms/"))

        def body(self) -> str:
            return self.rfile.read(int(self.headers["Content-Length"])).decode()

        def answer(self, said: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(canonical(said) + b"\n")

    Worker(homeserver, intake).start()
    ThreadingHTTPServer(("127.0.0.1", int(port)), Door).serve_forever()


if __name__ == "__main__":
    main()
