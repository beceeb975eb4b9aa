"""A small consumer in another style than ours: sqlite3 and a blocking socket, by docs/relay.md.

    python -m tests.relay.small_consumer DIRECTORY NAME SOCKET...

It follows the relay at the first of these sockets that answers, puts each record into its own
SQLite in one transaction with its position, and acknowledges it after that. It may be killed at any
point. A relay that refuses its position is written down, and ends it.
"""

import argparse
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import cycle
from pathlib import Path

SERVER = "hs.demo"
PING_S = 5.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    place INTEGER PRIMARY KEY AUTOINCREMENT, epoch TEXT, token INTEGER, rows TEXT);
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY, epoch TEXT, token INTEGER);
CREATE TABLE IF NOT EXISTS refused (line TEXT);
"""


class Refused(Exception):
    """The relay does not take our position for one of its own."""


class Consumer:
    """What it has, and one connection."""

    def __init__(self, directory: Path, name: str) -> None:
        self.db = sqlite3.connect(directory / "consumer.sqlite3", isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.executescript(SCHEMA)
        self.name = name
        self.epoch = ""
        self.rows: list[str] = []
        self.records: list[tuple[str, int, str]] = []

    def follow(self, connection: socket.socket) -> None:
        """Until the connection ends. Raises Refused, OSError."""
        self.rows, self.records = [], []
        lines = self.lines(connection)
        for line in lines:
            words = line.split(" ", 3)
            if words[0] == "SERVER":
                connection.sendall(f"SERVER {SERVER}\nNAME {self.name}\n".encode())
            elif words[0] == "RELAY":
                self.epoch = words[2]
                connection.sendall(f"PING 1\nREPLICATE events {self.position()}\n".encode())
            elif words[:2] == ["RDATA", "events"]:
                self.rows.append(words[3])
                if words[2] != "batch":
                    self.records.append((self.epoch, int(words[2]), f"[{','.join(self.rows)}]"))
                    self.rows = []
            elif words[0] == "RESYNC":
                raise Refused(line)
            elif words[0] == "":
                self.store(connection)

    def lines(self, connection: socket.socket) -> Iterator[str]:
        """Its lines; an empty one behind all that came at once."""
        connection.settimeout(PING_S)
        buffer = b""
        while True:
            try:
                piece = connection.recv(65_536)
            except TimeoutError:
                connection.sendall(b"PING 1\n")
                continue
            if not piece:
                return
            *whole, buffer = (buffer + piece).split(b"\n")
            yield from (line.decode() for line in whole)
            yield ""

    def position(self) -> str:
        """What it has, in the words of the protocol."""
        row = self.db.execute("SELECT token, epoch FROM position").fetchone()
        return f"{row[0]} {row[1]}" if row else f"0 {self.epoch}"

    def store(self, connection: socket.socket) -> None:
        """What came, and then say so."""
        if not self.records:
            return
        epoch, token, _ = self.records[-1]
        with self.db:
            self.db.execute("BEGIN IMMEDIATE")
            query = "INSERT INTO records (epoch, token, rows) VALUES (?, ?, ?)"
            self.db.executemany(query, self.records)
            self.db.execute("INSERT OR REPLACE INTO position VALUES (1, ?, ?)", (epoch, token))
        self.records = []
        connection.sendall(f"PING 1\nACK events {token}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("name")
    parser.add_argument("sockets", nargs="+")
    given = parser.parse_args()
    consumer = Consumer(given.directory, given.name)
    for path in cycle(given.sockets):
        try:
            with suppress(OSError), closing(socket.socket(socket.AF_UNIX)) as connection:
                connection.connect(path)
                consumer.follow(connection)
        except Refused as refused:
            consumer.db.execute("INSERT INTO refused VALUES (?)", (str(refused),))
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
