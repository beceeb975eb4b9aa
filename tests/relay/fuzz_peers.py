"""Fuzzing of what takes several steps: bodies of appends, parts of snapshots, fetching them."""

import gzip
import json
import os
import random
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import trio
from fastapi import FastAPI
from tests.relay.log_support import hosts, pdu, runtime, to_device

from fedsender.embedded.endpoint import PREFIX, build_app
from fedsender.embedded.facts import Ephemeral, Record
from fedsender.embedded.intake import Intake
from fedsender_relay.feed import Fetcher, FetchFailed
from fedsender_relay.line_stream import Wire
from fedsender_relay.protocol import File, Snapshot, format_command
from fedsender_relay.snapshot import (
    COLUMNS,
    BadSnapshot,
    FileInfo,
    decode_table,
    file_name,
    format_manifest,
    snapshot_id,
)

# --- how an input that was good is spoiled a little ---------------------------------------------

ODD: Final = [b"\n", b"\r\n", b" ", b"\0", b"\xff", b"[" * 200, b"9" * 30, b'"', b"\\ud800", b"NaN"]
VALUES: Final[list[object]] = [
    None, True, 0, -1, 2**63, 10**400, 0.5, float("nan"), "", "\0", "\ud800", "x" * 300, [], {},
]  # fmt: skip


def spoil(rng: random.Random, data: bytes, splices: list[bytes]) -> bytes:
    """A few of: bits flipped, bytes cut, doubled, zeroed, or something else put in."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randint(0, len(found))
        end = min(len(found), at + rng.choice((1, 1, 4, 40, 600)))
        match rng.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at:end]
            case 2:
                found[at:at] = found[at:end]
            case 3:
                found[at:end] = bytes(end - at)
            case 4:
                found[at:end] = rng.randbytes(end - at)
            case _:
                found[at:at] = rng.choice(splices)
    return bytes(found)


def spoil_json(rng: random.Random, value: object) -> object:
    """The value with something in it that is of another kind."""
    if rng.random() < 0.2 or not isinstance(value, list | dict) or not value:
        return rng.choice(VALUES)
    if isinstance(value, list):
        number = rng.randrange(len(value))
        return [*value[:number], spoil_json(rng, value[number]), *value[number + 1 :]]
    name = rng.choice(list(value))
    return {**value, name: spoil_json(rng, value[name])}


EPOCH: Final = "9f1c0a77d2e4b358"
DEEP: Final = [b"[" * 20_000, b'{"a":' * 20_000, b"1" * 5000]

# --- what a homeserver posts ----------------------------------------------------------------------

BODIES: Final[Mapping[str, object]] = {
    "append": {
        "appends": [
            {"id": "$e:1", "rows": [pdu(1), hosts(1)]},
            {"id": "$e:2", "rows": [to_device(1)], "reservation": None},
        ]
    },
    "reserve": {"writer": "persister-1", "count": 2},
    "ephemeral": {
        "typing": [["!r:hs.example", ["@a:hs.example"]]],
        "receipts": [["!r:hs.example", "m.read", "@a:hs.example", "$e", None, {"ts": 1}]],
        "presence": [["@a:hs.example", "online", 5, None, True, ["b.example"]]],
    },
}


class _Log:
    """Notes what would be written."""

    epoch = EPOCH

    def __init__(self) -> None:
        self.taken: list[Record] = []

    async def known(self, records: Sequence[Record]) -> set[bytes]:
        return set()

    async def append_all(self, records: Sequence[Record]) -> list[int]:
        self.taken += records
        return list(range(1, len(records) + 1))


@cache
def _app() -> FastAPI:
    return build_app(None)


async def fuzz_bodies(rng: random.Random) -> None:
    """The body of a request: 200, and what it says is taken as it stands; or an error in words."""
    path = rng.choice(("append", "append", "append", "reserve", "ephemeral"))
    if rng.random() < 0.5:
        body = spoil(rng, json.dumps(BODIES[path]).encode(), [*ODD, *DEEP])
    else:
        body = json.dumps(spoil_json(rng, BODIES[path])).encode()
    log, published = _Log(), list[Ephemeral]()
    app = _app()
    app.state.context = Intake(log, runtime(1), published.append)  # type: ignore[arg-type]
    status, answer = await _post(app, path, body)
    if status != 200:
        # 409: a reservation that there is not.
        assert status in (400, 409), (status, answer)
        assert set(answer) == {"errcode", "error"}
        assert not log.taken
        return
    said = json.loads(body)
    if path == "append":
        rows = [[json.loads(row) for row in each.texts] for each in log.taken]
        assert rows == [each["rows"] for each in said["appends"]]
        assert answer == {"epoch": EPOCH, "tokens": list(range(1, len(rows) + 1))}
    elif path == "reserve":
        assert len(answer["reservations"]) == said.get("count", 1)
    else:
        streams = ("typing", "receipts", "presence")
        told = [row for stream in streams for row in said.get(stream, [])]
        assert [json.loads(each.row) for each in published] == told


async def _post(app: FastAPI, path: str, body: bytes) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": f"{PREFIX}/{path}",
        "raw_path": f"{PREFIX}/{path}".encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "scheme": "http",
        "server": ("relay", 80),
        "client": ("hs", 1),
        "root_path": "",
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    content = b"".join(each.get("body", b"") for each in sent)
    return sent[0]["status"], json.loads(content)


# --- parts of snapshots ---------------------------------------------------------------------------

_ROW: Final = json.dumps(pdu(1))
ROWS: Final[Mapping[str, Sequence[tuple[Any, ...]]]] = {
    "hosts": [
        ("!r:hs.example", "a.example", 3, None),
        ("!r:hs.example", "b.example", 3, 8),
    ],
    "events": [("!r:hs.example", 9, _ROW), ("!r:hs.example", 12, _ROW)],
    "edus": [("b.example", 7, 0, "to_device", False, json.dumps(to_device(1)))],
    "redactions": [("$e1", "$e2", 1_790_000_000_000)],
}


@cache
def _part(table: str) -> bytes:
    lines = "".join(f"{json.dumps(row)}\n" for row in ROWS[table])
    return gzip.compress(lines.encode(), mtime=0)


def fuzz_parts(rng: random.Random) -> None:
    """A file, or the lines in it: rows of the table's types, or BadSnapshot."""
    table = rng.choice(list(ROWS))
    source = table if rng.random() < 0.9 else rng.choice(list(ROWS))
    if rng.random() < 0.5:
        content = gzip.compress(spoil(rng, gzip.decompress(_part(source)), ODD), 1)
    else:
        content = spoil(rng, _part(source), [*ODD, _part("hosts")[:10], _part("hosts")[-8:]])
    try:
        rows = list(decode_table(table, [content], Path("/relay/part")))
    except BadSnapshot:
        return
    for row in rows:
        for value, (_, kind, nullable) in zip(row, COLUMNS[table], strict=True):
            assert (value is None and nullable) or type(value) is kind


# --- fetching -------------------------------------------------------------------------------------

STAGING: Final = Path("/sender/snapshot")


@cache
def _snapshot() -> tuple[Snapshot, bytes, dict[str, bytes]]:
    """What is offered, its manifest and its files."""
    contents, files = {}, []
    for table in ("hosts", "events"):
        content = _part(table)
        digest = sha256(content).hexdigest()
        name = file_name(table, 3, digest)
        contents[name] = content
        files.append(FileInfo(name, table, 3, len(ROWS[table]), len(content), digest))
    manifest = format_manifest(12, EPOCH, 5, files)
    offer = Snapshot(
        "events",
        snapshot_id(12, EPOCH),
        12,
        len(files),
        sum(map(len, contents.values())),
        sha256(manifest).hexdigest(),
    )
    return offer, manifest, contents


class _Told:
    """A stream on which a peer says what it will, in pieces, and then nothing more."""

    def __init__(self, rng: random.Random, said: bytes) -> None:
        self._rng = rng
        self._said = said

    async def send_all(self, data: object) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        size = self._rng.choice((1, 40, 5000))
        piece, self._said = self._said[:size], self._said[size:]
        return piece

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


def _file(name: str, offset: int, content: bytes) -> bytes:
    return format_command(File(name, offset, len(content) - offset)).encode() + b"\n" + content


async def fuzz_fetches(rng: random.Random) -> None:
    """A relay that hands out a snapshot: all of it is here and right, or FetchFailed; and nothing
    but its files is ever written."""
    with TemporaryDirectory(prefix="fuzz-") as name:
        await _fuzz_fetch(rng, Path(name) / "staging")


async def _fuzz_fetch(rng: random.Random, staging: Path) -> None:
    offer, manifest, contents = _snapshot()
    # The largest first, as it is asked for.
    names = sorted(contents, key=lambda name: -len(contents[name]))
    answers = [_file("manifest.json", 0, manifest), *(_file(n, 0, contents[n]) for n in names)]
    asked = 0

    async def open_wire(_nursery: trio.Nursery) -> Wire:
        nonlocal asked
        said = answers[0] if asked == 0 else b"".join(answers[1:])
        asked += 1
        # Its header most of all.
        end = said.index(b"\n") if rng.random() < 0.7 else len(said)
        if rng.random() < 0.7:
            said = spoil(rng, said[:end], [*ODD, b"FILE ", b" 0 5\n", b"../x "]) + said[end:]
        return Wire(_Told(rng, said), lambda: 5)  # type: ignore[arg-type]

    try:
        info = await Fetcher(staging, runtime(1), open_wire, 1).fetch(offer)
        assert {file.name for file in info.files} == set(contents)
        for name, content in contents.items():
            assert (staging / name).read_bytes() == content
    except FetchFailed:
        pass
    known = {f"{name}{end}" for name in contents for end in ("", ".part")}
    found = os.listdir(staging)
    assert set(found) <= known | {
        "manifest.json",
        "manifest.json.tmp",
    }
    assert os.listdir(staging.parent) == [staging.name]
