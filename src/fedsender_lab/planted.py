"""`fedsender plant`: faults planted into what a demo left, and whether the audit finds each by name
and nothing else.

Each world is a copy of a demo's directory with its ledger, or its homeserver's events, changed by
hand. It is judged twice: all at once, and after an audit of its first half.
"""

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from fedsender.config import load
from fedsender.console import Mistake, say_answer
from fedsender.segments import read_lines, segments_of
from fedsender_pipeline import audit, fates, schemas, session
from fedsender_pipeline.ingest import ingest
from fedsender_pipeline.lake import open_lake
from fedsender_pipeline.session import showing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Line = dict[str, Any]
Pair = tuple[str, str]
"""A server and an event."""
DAY_MS: Final = 86_400_000
NO_SUCH: Final = "the homeserver has no such event, but "


@dataclass(slots=True)
class Found:
    """What is planted, or found: missing pairs, pairs that are stray and how `why` begins, pairs
    repeated without a reason, and whether evidence is missing."""

    missing: set[Pair] = field(default_factory=set)
    stray: set[tuple[str, str, str]] = field(default_factory=set)
    repeated: set[Pair] = field(default_factory=set)
    unproven: bool = False


@dataclass(slots=True)
class Scene:
    """A demo's ledger and store, in a directory of its own.

    Attributes:
        lines: of the ledger, in order.
    """

    directory: Path
    lines: list[Line]
    _used: set[tuple[str, str]] = field(default_factory=set)

    @property
    def half(self) -> int:
        """The number of lines that the first of two audits has."""
        return len(self.lines) // 2

    def store(self) -> "closing[sqlite3.Connection]":
        """The homeserver's."""
        path = self.directory / "homeserver.sqlite3"
        return closing(sqlite3.connect(path, isolation_level=None))

    def write(self, *cuts: int, without: int | None = None) -> None:
        """Write the ledger anew, in segments that end at these lines; one may be left out."""
        ledger = self.directory / "ledger"
        for path in ledger.glob("*.*.*"):
            path.unlink()
        ends = [0, *cuts, len(self.lines)]
        for number in range(1, len(ends)):
            if number != without:
                some = self.lines[ends[number - 1] : ends[number]]
                path = ledger / f"{self.lines[0]['instance']}.planted.{number:06d}.jsonl"
                path.write_text("".join(json.dumps(line) + "\n" for line in some))

    def answers(self) -> Iterator[tuple[int, Line, dict[str, Any]]]:
        """Each answered PDU, with its line and the line's number."""
        for number, line in enumerate(self.lines):
            if line["outcome"] == "delivered":
                yield from ((number, line, pdu) for pdu in line["pdus"])

    def _once(self) -> Iterator[tuple[int, Line, dict[str, Any]]]:
        """Those of the second half that were live and nothing else, of rooms and servers without a
        fault so far, which nothing stands in for."""
        tried, stood_in = Counter[Pair](), set[tuple[str, str]]()
        for line in self.lines:
            tried.update((line["destination"], pdu["event_id"]) for pdu in line["pdus"])
            stood_in |= {
                (line["destination"], pdu["room_id"])
                for pdu in line["pdus"]
                if pdu.get("supersedes")
            }
        for number, line, pdu in self.answers():
            key, live = (line["destination"], pdu["room_id"]), pdu["lane"] == "live"
            once = tried[line["destination"], pdu["event_id"]] == 1
            if number >= self.half and live and once and key not in self._used | stood_in:
                yield number, line, pdu

    def lose(self) -> Pair:
        """Take a delivery out of its line."""
        _, line, pdu = self.take()
        line["pdus"].remove(pdu)
        return line["destination"], pdu["event_id"]

    def take(self, *, alone: bool = False) -> tuple[int, Line, dict[str, Any]]:
        """The next of these, for a fault; `alone`: it is the only one of its line.

        Raises:
            Mistake: there is none any more.
        """
        for number, line, pdu in self._once():
            if not alone or len(line["pdus"]) == 1:
                self._used.add((line["destination"], pdu["room_id"]))
                return number, line, pdu
        raise Mistake(f"{self.directory}: too few deliveries: a demo with more events")

    def take_two(self) -> tuple[Line, Line]:
        """Two lines with one event each, of one room, server and boot, one after the other."""
        before: dict[tuple[str, str], Line] = {}
        for number, line, pdu in self.answers():
            key = line["destination"], pdu["room_id"]
            last = before.get(key)
            before[key] = line
            if last is None or number < self.half or key in self._used or last is line:
                continue
            boots = {each["transaction_id"].partition(".")[0] for each in (last, line)}
            pdus = [each for both in (last, line) for each in both["pdus"]]
            if len(boots) == 1 and len(pdus) == 2 and {p["lane"] for p in pdus} == {"live"}:
                self._used.add(key)
                return last, line
        raise Mistake(f"{self.directory}: no two deliveries of one room: a demo with more events")

    def again(self, line: Line, name: str, *pdus: dict[str, Any], **changed: Any) -> None:
        """Add a line like this one at the end, of another transaction of its boot."""
        boot = line["transaction_id"].partition(".")[0]
        self.lines.append(
            line | {"pdus": list(pdus), "transaction_id": f"{boot}.{name}", **changed}
        )


def by_name(scene: Scene) -> Found:
    """All faults of single deliveries, each at another room and server."""
    planted = Found(missing={scene.lose()})

    _, line, pdu = scene.take(alone=True)  # Not answered.
    line |= {"outcome": "failing", "status": 500, "lsso": None}
    planted.missing.add((line["destination"], pdu["event_id"]))

    _, line, pdu = scene.take()  # Twice.
    scene.again(line, "twice", pdu, ms=line["ms"] + 4000)
    planted.repeated.add((line["destination"], pdu["event_id"]))

    with scene.store() as store:
        stays = store.execute('SELECT room_id, server, "left" FROM room_servers').fetchall()
    inside = {(room, server) for room, server, _ in stays}
    servers = sorted({line["destination"] for _, line, _ in scene.answers()})
    line, pdu, stranger = next(  # To a server that was never there.
        (line, pdu, name)
        for _, line, pdu in scene.answers()
        for name in servers
        if (pdu["room_id"], name) not in inside
    )
    scene.again(line, "stranger", pdu, destination=stranger)
    planted.stray.add((stranger, pdu["event_id"], fates.NOT_FOR_IT))

    gone = next((room, server, left) for room, server, left in stays if left and server in servers
                and sum(each[:2] == (room, server) for each in stays) == 1)  # fmt: skip
    line, pdu = next((line, pdu) for _, line, pdu in scene.answers()  # To one that had left.
                     if pdu["room_id"] == gone[0] and pdu["stream_ordering"] > gone[2] + 1
                     and line["destination"] != gone[1])  # fmt: skip
    scene.again(line, "gone", pdu, destination=gone[1])
    planted.stray.add((gone[1], pdu["event_id"], fates.NOT_FOR_IT))

    _, line, pdu = scene.take()  # An event that never was.
    line["pdus"].append(pdu | {"event_id": "$never-was-at-the-homeserver"})
    planted.stray.add((line["destination"], "$never-was-at-the-homeserver", NO_SUCH))

    _, line, pdu = scene.take()  # Under another room's name.
    pdu["room_id"] = "!other:planted"
    planted.stray.add((line["destination"], pdu["event_id"], fates.OF_ANOTHER_ROOM))

    first, second = scene.take_two()  # In the wrong order.
    first["pdus"], second["pdus"] = second["pdus"], first["pdus"]
    planted.stray.add((second["destination"], second["pdus"][0]["event_id"], fates.TOO_LATE))
    scene.write(scene.half)
    return planted


def harmless(scene: Scene) -> Found:
    """Clocks that are wrong by more than a year, times that are null, a line that is there twice:
    nothing is wrong."""
    for number, line in enumerate(scene.lines):
        line["ms"] += (400 if number % 2 else -400) * DAY_MS
    scene.lines.append(dict(scene.lines[scene.half]))
    with scene.store() as store:
        store.execute("UPDATE events SET received_ts = NULL")
    scene.write(scene.half)
    return Found()


def purged(scene: Scene) -> Found:
    """Three events are gone from the homeserver, where nothing is ever purged."""
    some = {pdu["event_id"] for _, _, pdu in (scene.take() for _ in range(3))}
    with scene.store() as store:
        store.executemany("DELETE FROM events WHERE event_id = ?", [(each,) for each in some])
    scene.write(scene.half)
    answers = ((line["destination"], pdu["event_id"]) for _, line, pdu in scene.answers())
    return Found(stray={(*pair, fates.NEVER_THERE) for pair in answers if pair[1] in some})


def _segment_gone(scene: Scene, without: int) -> Found:
    cuts = [0, scene.half, scene.half * 3 // 2, len(scene.lines)]
    gone = range(cuts[without - 1], cuts[without])
    there, lost = set[Pair](), set[Pair]()
    for number, line, pdu in scene.answers():
        (lost if number in gone else there).add((line["destination"], pdu["event_id"]))
    scene.write(*cuts[1:-1], without=without)
    return Found(missing=lost - there)


def middle_gone(scene: Scene) -> Found:
    """Of three segments the second one is gone: all in it is missing."""
    return _segment_gone(scene, 2)


def last_gone(scene: Scene) -> Found:
    """Of three segments the last one is gone: all in it is missing."""
    return _segment_gone(scene, 3)


def first_gone(scene: Scene) -> Found:
    """The first segment was never read: nobody knows where the ledger begins."""
    scene.write(scene.half, without=1)
    return Found(unproven=True)


def ledger_gone(scene: Scene) -> Found:
    """No segment was ever read."""
    scene.write(without=1)
    return Found(unproven=True)


Plant = Callable[[Scene], Found]
WORLDS: Final[Mapping[Plant, Sequence[bool]]] = {
    by_name: (False, True),
    harmless: (False, True),
    purged: (False, True),
    middle_gone: (False, True),
    last_gone: (False, True),
    # Whatever was read of it cannot be forgotten.
    first_gone: (False,),
    ledger_gone: (False,),
}
"""By world whether it is judged at once (False) and after its first half (True)."""


def open_scene(directory: Path) -> Scene:
    """The scene that a demo has left.

    Raises:
        Mistake: it is no directory that a demo has kept.
    """
    if not (directory / "config.yaml").is_file():
        raise Mistake(f"{directory}: is not what `fedsender demo --keep` has left")
    config = load(directory / "config.yaml")
    lines: list[Line] = []
    for segment in segments_of(config.ledger.directory, config.instance_name):
        path = segment.name.with_name(f"{segment.name.name}.jsonl")
        lines += read_lines(path if path.exists() else path.with_suffix(".open"))
    return Scene(directory, lines)


def copied(demo: Path, directory: Path) -> Scene:
    """A copy of what a demo has left; raises Mistake as `open_scene` does."""
    open_scene(demo)
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("lake", "*.sock", "*.lock"))
    return open_scene(directory)


def judge(spark: "SparkSession", scene: Scene, *, in_two: bool = False) -> Found:
    """What the audit finds; `in_two`: after an audit of the first half of events and lines."""
    config = load(scene.directory / "config.yaml")
    lake = open_lake(config.pipeline.lake, config.server_name, create=True)
    later = sorted(config.ledger.directory.glob("*.planted.*"))[1:] if in_two else []
    with scene.store() as store, showing(quiet=True) as steps:
        (upto,) = store.execute(_POSITION).fetchone()
        for path in later:
            path.rename(path.with_suffix(".later"))
        for share in (2, 1) if in_two else (1,):
            store.execute(_MOVE, (upto // share,))
            if share == 1:
                for path in later:
                    path.with_suffix(".later").rename(path)
            ingest(spark, lake, config, steps)
            told = audit.audit(spark, lake, config, steps)
    begins = (fates.NOT_FOR_IT, NO_SUCH, fates.NEVER_THERE, fates.OF_ANOTHER_ROOM, fates.TOO_LATE)
    found = Found(
        _pairs(lake.read(schemas.MISSING).to_pylist()),
        {
            (row["server"], row["event_id"], next(filter(row["why"].startswith, begins)))
            for row in lake.read(schemas.STRAY).to_pylist()
        },
        _pairs(row for row in lake.read(schemas.REPEATED).to_pylist() if not row["expected"]),
        told.unproven is not None,
    )
    assert told.is_red == (found.unproven or bool(found.missing or found.stray))
    # What is older than the evidence nobody can say more of.
    return Found(unproven=True) if found.unproven else found


def _pairs(rows: Iterable[dict[str, Any]]) -> set[Pair]:
    return {(row["server"], row["event_id"]) for row in rows}


_POSITION: Final = "SELECT stream_id FROM federation_stream_position WHERE type = 'events'"
_MOVE: Final = "UPDATE federation_stream_position SET stream_id = ? WHERE type = 'events'"


def plant(demo: Path, names: Sequence[str] | None = None, *, as_json: bool = False) -> int:
    """Plant each world into a copy of this demo; 1: one of them was judged wrongly.

    Raises:
        Mistake: the demo cannot be used, or there is no world of a name.
    """
    worlds = {world.__name__: (world, ways) for world, ways in WORLDS.items()}
    for name in names or ():
        if name not in worlds:
            raise Mistake(f"{name}: is none of {', '.join(worlds)}")
    answer: dict[str, bool] = {}
    with TemporaryDirectory(prefix="fedsender-plant-") as directory:
        work = Path(directory)
        open_scene(demo)
        settings = load(demo / "config.yaml").pipeline.spark
        with session.spark_session(settings, "plant", work, rows=1) as spark:
            for name in names or worlds:
                world, ways = worlds[name]
                for in_two in ways:
                    scene = copied(demo, work / f"{name}{in_two}")
                    planted = world(scene)
                    told = f"{name}{', in two' if in_two else ''}"
                    answer[told] = judge(spark, scene, in_two=in_two) == planted
    lines = [f"{'found' if well else 'WRONG':7}{told}" for told, well in answer.items()]
    say_answer(answer, as_json, *lines)
    return 0 if all(answer.values()) else 1
