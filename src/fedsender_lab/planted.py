"""`fedsender plant`: faults planted into what a sender left, and whether the audit finds each by
name, and nothing else.

What was left is a directory with a configuration and a ledger: a demo's, with its embedded store,
or that of a sender beside a Synapse on PostgreSQL. Each world is a copy of it, and of its database,
with its ledger, or its homeserver's events, changed by hand. It is judged twice: all at once, and
after an audit of its first half.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
import yaml

from fedsender.config import Config, database_url, load
from fedsender.console import Mistake, say, say_json
from fedsender.matrix import server_of
from fedsender.segments import read_lines, segments_of
from fedsender.store import tables
from fedsender.store.connections import checked_url, words
from fedsender_pipeline import audit, fates, schemas, session
from fedsender_pipeline.ingest import ingest
from fedsender_pipeline.lake import open_lake
from fedsender_pipeline.session import Steps

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
    repeated without a reason, purged events, and whether evidence is missing."""

    missing: set[Pair] = field(default_factory=set)
    stray: set[tuple[str, str, str]] = field(default_factory=set)
    repeated: set[Pair] = field(default_factory=set)
    purged: set[str] = field(default_factory=set)
    unproven: bool = False

    def beyond(self, other: "Found") -> list[str]:
        """What is here and not there, a line each."""
        mine, theirs = asdict(self), asdict(other)
        unproven = ["evidence is missing"] if self.unproven and not other.unproven else []
        return unproven + [
            f"{kind} {fault}"
            for kind, some in mine.items()
            if kind != "unproven"
            for fault in sorted(some - theirs[kind])
        ]


@dataclass(slots=True)
class Scene:
    """A sender's ledger and its homeserver's store, in a directory of its own.

    Attributes:
        lines: of the ledger, in order.
    """

    directory: Path
    config: Config
    lines: list[Line]
    _used: set[tuple[str, str]] = field(default_factory=set)

    @property
    def half(self) -> int:
        """The number of lines that the first of two audits has."""
        return len(self.lines) // 2

    @property
    def purges(self) -> bool:
        """Whether its homeserver may purge the beginning of a room's history."""
        return self.config.homeserver.kind == "synapse"

    @contextmanager
    def store(self) -> Iterator[sa.Connection]:
        """The homeserver's database; all that the body does is committed when it ends."""
        engine = sa.create_engine(_url(self.config), poolclass=sa.NullPool)
        with engine.begin() as connection:
            yield connection

    def stays(self) -> list[tuple[str, str, int | None]]:
        """Each time of a server in a room, and the event with which it left; None: it is there."""
        with self.store() as store:
            if not self.purges:
                stays = tables.room_servers.c
                query = sa.select(stays.room_id, stays.server, stays.left)
                return [(room, server, left) for room, server, left in store.execute(query)]
            at = tables.events.c.stream_ordering
            members = tables.room_memberships.c
            changes = store.execute(
                sa.select(members.room_id, members.user_id, members.membership, at)
                .join(tables.events, tables.events.c.event_id == members.event_id)
                .order_by(at)
            ).all()
        found: dict[tuple[str, str], list[int | None]] = {}
        for room, user, membership, left in changes:
            times = found.setdefault((room, server_of(user) or ""), [])
            if membership not in ("leave", "ban"):
                times += [None] if not times or times[-1] is not None else []
            elif times and times[-1] is None:
                times[-1] = left
        return [(room, server, left) for (room, server), times in found.items() for left in times]

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

    def take(self, *, alone: bool = False, last: bool = False) -> tuple[int, Line, dict[str, Any]]:
        """The next of these, for a fault.

        Args:
            alone: it is the only one of its line.
            last: in place of the next one, the last.

        Raises:
            Mistake: there is none any more.
        """
        found = list(self._once())
        for number, line, pdu in reversed(found) if last else found:
            if not alone or len(line["pdus"]) == 1:
                self._used.add((line["destination"], pdu["room_id"]))
                return number, line, pdu
        raise Mistake(f"{self.directory}: too few deliveries: a demo with more events")

    def take_two(self, *, last: bool = False) -> tuple[Line, Line]:
        """The next, or the last, two lines with one event each, of one room, server and boot, one
        after the other.

        Raises:
            Mistake: there are none any more.
        """
        found = list(self._twos())
        if not found:
            raise Mistake(
                f"{self.directory}: no two deliveries of one room: a demo with more events"
            )
        key, one, other = found[-1 if last else 0]
        self._used.add(key)
        return one, other

    def _twos(self) -> Iterator[tuple[tuple[str, str], Line, Line]]:
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
                yield key, last, line

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

    stays = scene.stays()
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

    _, line, pdu = scene.take()  # An event that never was, in its order.
    never = pdu | {"event_id": "$never-was-at-the-homeserver"}
    line["pdus"].insert(line["pdus"].index(pdu), never)
    planted.stray.add((line["destination"], "$never-was-at-the-homeserver", NO_SUCH))

    _, line, pdu = scene.take()  # Under another room's name.
    pdu["room_id"] = "!other:planted"
    planted.stray.add((line["destination"], pdu["event_id"], fates.OF_ANOTHER_ROOM))

    first, second = scene.take_two()  # In the wrong order.
    first["pdus"], second["pdus"] = second["pdus"], first["pdus"]
    planted.stray.add((second["destination"], second["pdus"][0]["event_id"], fates.TOO_LATE))

    first, second = scene.take_two()  # Lost; an earlier one is said to stand in for it.
    (earlier,), (lost,) = first["pdus"], second["pdus"]
    earlier["supersedes"] = [earlier["stream_ordering"], lost["stream_ordering"]]
    second["pdus"] = []
    planted.missing.add((second["destination"], lost["event_id"]))
    scene.write(scene.half)
    return planted


def harmless(scene: Scene) -> Found:
    """Clocks that are wrong by more than a year, times that are null, a line that is there twice:
    nothing is wrong."""
    for number, line in enumerate(scene.lines):
        line["ms"] += (400 if number % 2 else -400) * DAY_MS
    scene.lines.append(dict(scene.lines[scene.half]))
    with scene.store() as store:
        store.execute(sa.update(tables.events).values(received_ts=None))
    scene.write(scene.half)
    return Found()


def purged(scene: Scene) -> Found:
    """Three events are gone from the homeserver: from an embedded store, where nothing is ever
    purged, and from a Synapse's rooms, although it still has messages before them. And of a Synapse
    the beginning of another room's history, as a purge takes it."""
    some = {pdu["event_id"] for _, _, pdu in (scene.take(last=True) for _ in range(3))}
    planted = Found()
    if scene.purges:
        _, _, pdu = scene.take()
        events = tables.events.c
        early = sa.select(events.event_id).where(
            events.room_id == pdu["room_id"],
            events.state_key.is_(None),
            events.stream_ordering <= pdu["stream_ordering"],
        )
        with scene.store() as store:
            gone = set(store.execute(early).scalars())
        planted.purged = gone & {pdu["event_id"] for _, _, pdu in scene.answers()}
        _forget(scene, gone)
    _forget(scene, some)
    scene.write(scene.half)
    answers = ((line["destination"], pdu["event_id"]) for _, line, pdu in scene.answers())
    planted.stray = {(*pair, fates.NEVER_THERE) for pair in answers if pair[1] in some}
    return planted


def held_back(scene: Scene) -> Found:
    """An event that went to servers was to be kept from all."""
    _, _, pdu = scene.take()
    kept, own = pdu["event_id"], tables.event_json
    with scene.store() as store:
        of_it = sa.update(own).where(own.c.event_id == kept)
        store.execute(of_it.values(internal_metadata='{"proactively_send": false}'))
    scene.write(scene.half)
    live = (
        (line["destination"], each) for _, line, each in scene.answers() if each["lane"] == "live"
    )
    return Found(
        stray={(name, kept, fates.FOR_NOBODY) for name, each in live if each["event_id"] == kept}
    )


def read_ahead(scene: Scene) -> Found:
    """Two of the last events went in the wrong order, and the first of two audits has all lines of
    the ledger: the other one has no new ones."""
    first, second = scene.take_two(last=True)
    first["pdus"], second["pdus"] = second["pdus"], first["pdus"]
    scene.write()
    late = second["destination"], second["pdus"][0]["event_id"]
    return Found(stray={(*late, fates.TOO_LATE)})


def _forget(scene: Scene, event_ids: Iterable[str]) -> None:
    with scene.store() as store:
        if store.dialect.name == "postgresql":
            # Rows of Synapse's other tables may name them: nothing here reads those.
            store.execute(sa.text("SET LOCAL session_replication_role = replica"))
        store.execute(sa.delete(tables.events).where(tables.events.c.event_id.in_(event_ids)))


def _segment_gone(scene: Scene, without: int) -> Found:
    cuts = [0, scene.half, scene.half * 3 // 2, len(scene.lines)]
    gone = range(cuts[without - 1], cuts[without])
    there, lost = set[Pair](), set[Pair]()
    for number, line, pdu in scene.answers():
        (lost if number in gone else there).add((line["destination"], pdu["event_id"]))
    scene.write(*cuts[1:-1], without=without)
    return Found(missing=lost - there)


def middle_gone(scene: Scene) -> Found:
    """Of three segments the second one is gone: that is said, and all in it is missing."""
    found = _segment_gone(scene, 2)
    found.unproven = True
    return found


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


def head_gone(scene: Scene) -> Found:
    """The first segment has lost its head, with the note of the first start."""
    # Here all starts are in one segment.
    scene.lines[:] = (line for line in scene.lines[scene.half :] if line["outcome"] != "owned")
    scene.write()
    return Found(unproven=True)


Plant = Callable[[Scene], Found]
WORLDS: Final[Mapping[Plant, Sequence[bool]]] = {
    by_name: (False, True),
    harmless: (False, True),
    purged: (False, True),
    held_back: (False, True),
    read_ahead: (False, True),
    middle_gone: (False, True),
    last_gone: (False, True),
    # Whatever was read of it cannot be forgotten.
    first_gone: (False,),
    ledger_gone: (False,),
    head_gone: (False,),
}
"""By world whether it is judged at once (False) and after its first half (True)."""


def open_scene(directory: Path) -> Scene:
    """The scene that a sender has left.

    Raises:
        Mistake: it is no directory with a configuration and a ledger.
    """
    if not (directory / "config.yaml").is_file():
        raise Mistake(f"{directory}: is not what `fedsender demo --keep` has left")
    config = load(directory / "config.yaml")
    lines: list[Line] = []
    for segment in segments_of(config.ledger.directory, config.instance_name):
        path = segment.name.with_name(f"{segment.name.name}.jsonl")
        lines += read_lines(path if path.exists() else path.with_suffix(".open"))
    return Scene(directory, config, lines)


def _url(config: Config) -> sa.URL:
    homeserver = config.homeserver
    return checked_url(database_url(homeserver.database, homeserver.database_password_file))


@contextmanager
def copied(original: Scene, directory: Path) -> Iterator[Scene]:
    """A copy of a scene; a database on PostgreSQL is copied by its server until the body ends.

    Raises:
        Mistake: the server does not copy it, as while others are connected to it.
    """
    gone = shutil.ignore_patterns("lake", "*.sock", "*.lock")
    shutil.copytree(original.directory, directory, ignore=gone)
    url = _url(original.config)
    if url.get_backend_name() == "sqlite":
        yield open_scene(directory)
        return
    copy, path = f"{url.database}_planted", directory / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["homeserver"]["database"] = url.set(database=copy).render_as_string(hide_password=False)
    values["homeserver"].pop("database_password_file", None)
    path.write_text(yaml.safe_dump(values))
    around = url.set(database="postgres")
    server = sa.create_engine(around, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    drop = sa.text(f'DROP DATABASE IF EXISTS "{copy}" WITH (FORCE)')
    with server.connect() as connection:
        connection.execute(drop)
        try:
            connection.execute(sa.text(f'CREATE DATABASE "{copy}" TEMPLATE "{url.database}"'))
        except sa.exc.DBAPIError as error:
            raise Mistake(f"{url.database}: cannot be copied: {words(error)}") from None
        try:
            yield open_scene(directory)
        finally:
            connection.execute(drop)


def judge(spark: "SparkSession", scene: Scene, *, in_two: bool = False) -> Found:
    """What the audit finds; `in_two`: after an audit of the first half of events and lines."""
    config = scene.config
    lake = open_lake(config.pipeline.lake, config.server_name, create=True)
    later = sorted(config.ledger.directory.glob("*.planted.*"))[1:] if in_two else []
    orderings = {pdu["stream_ordering"] for _, _, pdu in scene.answers()}
    position = tables.federation_stream_position
    of_events = position.c.type == "events"
    with scene.store() as store:
        (upto,) = store.execute(sa.select(sa.func.max(position.c.stream_id)).where(of_events)).one()
    steps = Steps(quiet=True)
    for path in later:
        path.rename(path.with_suffix(".later"))
    for at in ((min(orderings) + upto) // 2, upto) if in_two else (upto,):
        with scene.store() as store:
            store.execute(sa.update(position).where(of_events).values(stream_id=at))
        if at == upto:
            for path in later:
                path.with_suffix(".later").rename(path)
        ingest(spark, lake, config, steps)
        told = audit.audit(spark, lake, config, steps)
    begins = (
        *(fates.NOT_FOR_IT, NO_SUCH, fates.NEVER_THERE, fates.OF_ANOTHER_ROOM, fates.FOR_NOBODY),
        fates.TOO_LATE,
    )
    found = Found(
        _pairs(lake.read(schemas.MISSING).to_pylist()),
        {
            (row["server"], row["event_id"], next(filter(row["why"].startswith, begins)))
            for row in lake.read(schemas.STRAY).to_pylist()
        },
        _pairs(row for row in lake.read(schemas.REPEATED).to_pylist() if not row["expected"]),
        {row["event_id"] for row in lake.read(schemas.PURGED).to_pylist()},
        told.unproven is not None,
    )
    assert told.is_red == (found.unproven or bool(found.missing or found.stray))
    return found


def _pairs(rows: Iterable[dict[str, Any]]) -> set[Pair]:
    return {(row["server"], row["event_id"]) for row in rows}


def plant(directory: Path, names: Sequence[str] | None = None, *, as_json: bool = False) -> int:
    """Plant each world into a copy of what a sender left; 1: one of them was judged wrongly.

    Raises:
        Mistake: it cannot be used, or there is no world of a name.
    """
    worlds = {world.__name__: (world, ways) for world, ways in WORLDS.items()}
    for name in names or ():
        if name not in worlds:
            raise Mistake(f"{name}: is none of {', '.join(worlds)}")
    answer: dict[str, bool] = {}
    with TemporaryDirectory(prefix="fedsender-plant-") as temporary:
        work = Path(temporary)
        left = open_scene(directory)
        settings = left.config.pipeline.spark
        with session.spark_session(settings, "plant", work, rows=1) as spark:
            for name in names or worlds:
                world, ways = worlds[name]
                for in_two in ways:
                    with copied(left, work / f"{name}{in_two}") as scene:
                        planted = world(scene)
                        told = f"{name}{', in two' if in_two else ''}"
                        found = judge(spark, scene, in_two=in_two)
                        if planted == Found(unproven=True):
                            # What is older than the evidence nobody can say more of.
                            found = Found(unproven=found.unproven)
                        answer[told] = found == planted
                        if as_json:
                            continue
                        say(f"{'found' if answer[told] else 'WRONG':7}{told}")
                        for kind, one, other in (
                            ("missed", planted, found),
                            ("more", found, planted),
                        ):
                            for fault in one.beyond(other):
                                say(f"{kind:>9}: {fault}")
    if as_json:
        say_json(answer)
    return 0 if all(answer.values()) else 1
