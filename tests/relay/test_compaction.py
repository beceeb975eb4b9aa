"""Snapshots: what compaction makes of a log, whatever the disk does meanwhile."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.relay.memory_disk import MemoryDisk, PowerCut

from fedsender.intake.rows import prepare
from fedsender.relay import compaction, directories, snapshot
from fedsender.relay.disk import read_file
from fedsender.relay.segment import Record
from fedsender.relay.snapshot import MANIFEST, PARTS, BadSnapshot, SnapshotInfo
from fedsender.replication.commands import Json

ROOT = Path("/relay/snap")
HS = "hs.example"
EPOCH = "0123456789abcdef"
DAY_MS = 86_400_000
NOW_MS = 1_800_000_000_000
Rows = Sequence[Json]


def pdu(room: str, number: int, sender: str = f"@a:{HS}", **about: Json) -> Json:
    event = {"type": "m.room.message", "sender": sender, "content": {}, "prev_events": ["$p"]}
    return ["pdu", [room, f"$e{number}", event, {"room_version": "11", **about}]]


def hosts(room: str, joined: Sequence[str] = (), left: Sequence[str] = ()) -> Json:
    return ["hosts", [room, list(joined), list(left)]]


class Relay:
    """A log in memory, and the snapshots made of it."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = disk or MemoryDisk()
        self.records: list[Record] = []
        self.newest: SnapshotInfo | None = None
        self.now_ms = NOW_MS

    def say(self, *rows: Json) -> int:
        token = len(self.records) + 1
        lines = prepare(rows).lines(token)
        self.records.append(Record(token, self.now_ms, tuple(rows), lines))
        return token

    def compact(self, *, edu_floor: int = 0, whole: bool = False, **more: Any) -> SnapshotInfo:
        """The next snapshot; with `whole` from nothing."""
        previous = None if whole else self.newest
        after = 0 if previous is None else previous.token
        self.newest = compaction.compact(
            self.disk,
            ROOT,
            previous,
            iter(self.records[after:]),
            token=len(self.records),
            epoch=EPOCH,
            now_ms=self.now_ms,
            edu_floor=edu_floor,
            server_name=HS,
            **more,
        )
        return self.newest

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        assert self.newest is not None
        return [
            row
            for file in self.newest.files
            if file.table == table
            for row in snapshot.read_part(self.disk, self.newest, file)
        ]

    def owed(self) -> dict[tuple[str, str], str]:
        """(room, server) -> the newest event that it is to get, by the snapshot alone."""
        heads = {room: (token, event_id) for room, token, event_id in self.rows("heads")}
        found: dict[tuple[str, str], str] = {}
        bodies = {row[0] for row in self.rows("events")}
        for room, host, joined, left, _, event_id in self.rows("hosts"):
            if left is not None:
                found.setdefault((room, host), event_id)
            elif room in heads and heads[room][0] > joined:
                found[room, host] = heads[room][1]
        assert set(found.values()) <= bodies
        return found


def test_a_snapshot_says_who_is_where_and_what_was_said_last() -> None:
    """Of events only the newest of ours per room, and what made a server leave."""
    relay = Relay()
    relay.say(hosts("!r", ["a.x", "b.x"]))
    relay.say(pdu("!r", 1))
    relay.say(pdu("!r", 2), hosts("!r", left=["b.x"]))
    relay.say(pdu("!r", 3))
    relay.say(pdu("!r", 4, sender="@x:a.x"))
    info = relay.compact()
    assert relay.owed() == {("!r", "a.x"): "$e3", ("!r", "b.x"): "$e2"}
    assert sorted(row[0] for row in relay.rows("events")) == ["$e2", "$e3"]
    assert (info.token, info.id) == (5, f"{5:020d}.01234567")
    assert directories.list_snapshots(relay.disk, ROOT) == [info]


def test_an_event_that_a_server_of_the_room_does_not_get_leaves_it_the_one_before() -> None:
    """`minus`, and the server on whose behalf we send; `plus` for one that is not in the room."""
    relay = Relay()
    relay.say(hosts("!r", ["a.x", "b.x"]))
    relay.say(pdu("!r", 1))
    relay.say(pdu("!r", 2, minus=["a.x"], plus=["c.x"]))
    relay.compact()
    assert relay.owed() == {("!r", "a.x"): "$e1", ("!r", "b.x"): "$e2", ("!r", "c.x"): "$e2"}
    relay.say(pdu("!r", 3, internal_metadata={"send_on_behalf_of": "b.x"}))
    relay.compact()
    assert relay.owed() == {("!r", "a.x"): "$e3", ("!r", "b.x"): "$e2", ("!r", "c.x"): "$e2"}


def test_what_made_a_server_leave_is_kept_for_thirty_days() -> None:
    """Then it goes, though nothing else has happened; a redaction is remembered as long."""
    relay = Relay()
    relay.say(hosts("!r", ["a.x", "b.x"]))
    relay.say(pdu("!r", 1), hosts("!r", left=["b.x"]))
    relay.say(["redaction", ["$e1", "$e0"]])
    relay.compact()
    relay.now_ms += 29 * DAY_MS
    relay.say(["redaction", ["$e2", "$e3"]])
    relay.compact()
    assert ("!r", "b.x") in relay.owed()
    assert len(relay.rows("redactions")) == 2
    relay.now_ms += 2 * DAY_MS
    relay.say(["redaction", ["$e4", "$e5"]])
    relay.compact()
    assert relay.owed() == {("!r", "a.x"): "$e1"}
    assert sorted(row[0] for row in relay.rows("redactions")) == ["$e3", "$e5"]


def test_edus_stay_until_every_consumer_has_them() -> None:
    """To-device messages all, device lists the newest of each user, with a mark if others were
    passed over: then the server has to ask for the whole list."""
    relay = Relay()
    relay.say(["edu", ["to_device", "a.x", "m1", {"n": 1}]])
    relay.say(["edu", ["device_list", "a.x", f"@u:{HS}", "D1", {"deleted": True}]])
    relay.compact()
    assert [row[4] for row in relay.rows("edus") if row[3] == "device_list"] == [False]
    relay.say(["edu", ["device_list", "a.x", f"@u:{HS}", "D2", {}]])
    relay.say(["edu", ["to_device", "a.x", "m2", {"n": 2}]])
    relay.compact(edu_floor=1)
    rows = relay.rows("edus")
    assert [(row[1], row[3], row[4]) for row in rows] == [
        (3, "device_list", True),
        (4, "to_device", False),
    ]
    assert json.loads(str(rows[1][5])) == ["edu", ["to_device", "a.x", "m2", {"n": 2}]]


def test_edus_that_nobody_takes_do_not_grow_without_end() -> None:
    """The oldest are dropped, and counted; but first device lists that every consumer has."""
    relay, dropped = Relay(), list[int]()
    for number in range(50):
        relay.say(["edu", ["device_list", "a.x", f"@{number}:{HS}", "D", {}]])
    for number in range(50):
        relay.say(["edu", ["to_device", "a.x", f"m{number}", {"n": "x" * 100}]])
    room = PARTS * 50 * 200
    relay.compact(edu_floor=50, edu_bytes=room, dropped=dropped.append)
    assert dropped == []
    assert {row[1] for row in relay.rows("edus")} >= set(range(51, 101))
    for number in range(50, 100):
        relay.say(["edu", ["to_device", "a.x", f"m{number}", {"n": "x" * 100}]])
    relay.compact(edu_floor=50, edu_bytes=room, dropped=dropped.append)
    kept = [row[1] for row in relay.rows("edus")]
    assert kept == list(range(min(kept), 151))
    assert 40 < len(kept) < 70
    assert dropped == [100 - len(kept)]


def test_a_part_that_stayed_the_same_is_the_same_file() -> None:
    """So that a consumer that syncs again skips it: one changed room changes one part of 16."""
    relay = Relay()
    for number in range(100):
        relay.say(hosts(f"!{number}", ["a.x"]))
        relay.say(pdu(f"!{number}", number))
    before = relay.compact()
    relay.say(pdu("!7", 1000))
    after = relay.compact()
    old, new = {file.name for file in before.files}, {file.name for file in after.files}
    assert len(new - old) == 2  # heads and events of one part
    assert len(after.parts("hosts")) == PARTS
    directories.remove_snapshot(relay.disk, before)
    assert directories.is_whole(relay.disk, after)
    assert len(relay.owed()) == 100


_SERVERS = ["a.x", "b.x", "c.x"]
_HAPPENING = st.tuples(
    st.sampled_from(["say", "say", "join", "leave", "kick", "foreign", "minus", "plus"]),
    st.sampled_from(["!1", "!2"]),
    st.sampled_from(_SERVERS),
)


@settings(max_examples=25, deadline=None)
@example([("join", "!1", "c.x"), ("minus", "!1", "c.x"), ("say", "!1", "a.x")], [1])
@given(st.lists(_HAPPENING, max_size=30), st.lists(st.integers(0, 30), max_size=3))
def test_in_how_many_steps_it_is_made_makes_no_difference(
    happenings: list[tuple[str, str, str]], cuts: list[int]
) -> None:
    """Compared with a model that knows only the rule: the newest event that each server was to get,
    of those since what it might be missing; and one snapshot equals many in a row."""
    relay, present = Relay(), {room: set[str]() for room in ("!1", "!2")}
    newest: dict[tuple[str, str], str] = {}
    for number, (what, room, server) in enumerate(happenings):
        here, to = present[room], set(present[room])
        rows: list[Json] = [pdu(room, number)]
        if what == "minus":
            rows, to = [pdu(room, number, minus=[server])], to - {server}
        elif what == "plus":
            rows, to = [pdu(room, number, plus=[server])], to | {server}
        elif what == "foreign":
            rows, to = [pdu(room, number, sender="@x:d.x")], set()
        elif what == "join":
            rows, to = [hosts(room, [server])], set()
            here.add(server)
        elif what in ("leave", "kick"):
            rows = (
                [hosts(room, left=[server])]
                if what == "leave"
                else [
                    pdu(room, number),
                    hosts(room, left=[server]),
                ]
            )
            to = set() if what == "leave" else to
            here.discard(server)
        relay.say(*rows)
        newest |= {(room, name): f"$e{number}" for name in to}
        if number in cuts:
            relay.compact()
    if not relay.records:
        return
    relay.compact()
    stepwise = {table: sorted(relay.rows(table)) for table in ("hosts", "heads", "events")}
    assert relay.owed() == newest
    relay.compact(whole=True)
    assert stepwise == {table: sorted(relay.rows(table)) for table in stepwise}


# --- the disk -------------------------------------------------------------------------------------


ROOMS = 3


def furnished() -> Relay:
    relay = Relay()
    relay.disk.make_directory(ROOT.parent)
    relay.disk.settle()
    for number in range(ROOMS):
        relay.say(hosts(f"!{number}", ["a.x"]))
        relay.say(pdu(f"!{number}", number))
    relay.compact()
    for number in range(ROOMS):
        relay.say(pdu(f"!{number}", 100 + number))
    return relay


def steps_of_one() -> int:
    relay = furnished()
    before = relay.disk.steps
    relay.compact()
    return int(relay.disk.steps - before)


@pytest.mark.parametrize("fault", ["power", "full"])
def test_03_one_that_was_not_finished_is_none_whatever_step_was_the_last(fault: str) -> None:
    """3, 8: no power, or no room, at every step of the making: afterwards the old snapshot is
    there, whole, and the new one is either whole or gone; the next try succeeds."""
    steps = steps_of_one()
    rng = random.Random(3)
    for step in sorted(rng.sample(range(steps), min(steps, 12))):
        relay = furnished()
        old = relay.newest
        if fault == "power":
            relay.disk.cut_at = relay.disk.steps + step
        else:
            relay.disk.fail[relay.disk.steps + step] = errno.ENOSPC
        try:
            relay.compact()
        except (PowerCut, OSError):
            relay.newest = old
        if fault == "power":
            relay.disk.crash(power=True)
        found = directories.list_snapshots(relay.disk, ROOT)
        assert found[0] == old
        for info in found:
            for file in info.files:
                snapshot.read_part(relay.disk, info, file)
        names = set(relay.disk.list(ROOT))
        assert names == {info.id for info in found}
        relay.newest = found[-1]
        if relay.newest.token < len(relay.records):
            relay.compact()
        assert set(relay.owed().values()) == {f"$e{100 + number}" for number in range(ROOMS)}


def test_03_a_snapshot_with_a_file_gone_or_cut_is_not_offered() -> None:
    """3: an operator's hand, or a disk's."""
    relay = furnished()
    newest = relay.compact()
    assert len(directories.list_snapshots(relay.disk, ROOT)) == 2
    relay.disk.remove(newest.path(newest.files[0].name))
    assert [info.id for info in directories.list_snapshots(relay.disk, ROOT, clean=False)] != [
        newest.id
    ]
    assert len(directories.list_snapshots(relay.disk, ROOT)) == 1


def test_07_a_flipped_bit_in_the_snapshot_before_stops_the_making_with_the_files_name() -> None:
    """7: nothing wrong is carried on into the next snapshot."""
    relay = furnished()
    assert relay.newest is not None
    path = relay.newest.path(relay.newest.parts("heads")[snapshot.part_of("!2")].name)
    relay.disk.flip_bit(path, 160)
    with pytest.raises(BadSnapshot, match=path.name):
        relay.compact()
    assert len(directories.list_snapshots(relay.disk, ROOT)) == 1


def test_snapshot_0_holds_the_rooms_there_were() -> None:
    """The homeserver's own base state, before the log begins; compaction goes on from it."""
    relay = Relay()
    rooms = [(f"!{number}", ["a.x", "b.x", "a.x"]) for number in range(40)]
    relay.newest = compaction.import_base(relay.disk, ROOT, rooms=rooms, epoch=EPOCH, now_ms=NOW_MS)
    assert len(relay.rows("hosts")) == 80
    relay.say(pdu("!3", 1), hosts("!3", left=["b.x"]))
    relay.compact()
    assert relay.owed() == {("!3", "a.x"): "$e1", ("!3", "b.x"): "$e1"}
    assert len(relay.rows("hosts")) == 80


# --- manifests ------------------------------------------------------------------------------------


def test_no_name_in_a_manifest_leads_out_of_the_directory() -> None:
    relay = furnished()
    assert relay.newest is not None
    document = json.loads(read_file(relay.disk, relay.newest.path(MANIFEST), 2**20))
    with pytest.raises(KeyError):
        relay.newest.path("../consumers.json")
    for name in ("../epoch", "/etc/passwd", "hosts-00-0123456789abcdef.jsonl.gz"):
        document["files"][0]["name"] = name
        with pytest.raises(BadSnapshot):
            snapshot.parse_manifest(json.dumps(document).encode(), ROOT)


def _spoiled() -> Iterator[bytes]:
    relay = furnished()
    assert relay.newest is not None
    good = read_file(relay.disk, relay.newest.path(MANIFEST), 2**20)
    rng = random.Random(5)
    for _ in range(3_000):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad))] = rng.choice(b'{}[]",:0129ae\\\x00\xff-.')
        yield bytes(bad[: rng.randint(0, len(bad))] if rng.random() < 0.2 else bad)
    yield b"[" * 100_000
    yield b"{}"
    yield b'{"format": 1}'


def test_a_spoiled_manifest_is_refused_in_one_way() -> None:
    """Whatever stands there: a SnapshotInfo or BadSnapshot, nothing else, and at once."""
    for content in _spoiled():
        try:
            info = snapshot.parse_manifest(content, ROOT)
        except BadSnapshot:
            continue
        assert all(info.path(file.name).parent == ROOT for file in info.files)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_a_file_that_is_no_table_is_refused(content: bytes) -> None:
    with pytest.raises(BadSnapshot):
        list(snapshot.decode_table("hosts", [content], ROOT))
