"""Several senders of one homeserver: one verdict, by all their ledgers."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from tests.pipeline.lakes import attempt, event, lake_of, note, pdu, write
from tests.pipeline.worlds import US, driver_url
from tests.servers import Databases
from tests.store import synapse_schema

from fedsender.config import Config, from_values
from fedsender.matrix import shard_of
from fedsender.store import tables
from fedsender_pipeline import PipelineError, ingest, schemas, sources
from fedsender_pipeline.audit import Audited, audit, summed_up
from fedsender_pipeline.lake import Lake, open_lake
from fedsender_pipeline.ledger_lines import fetched, read_ledger
from fedsender_pipeline.session import Steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOM = "!r"
SERVERS = tuple(f"s{number}.example" for number in range(12))
TWO, THREE = ("fed1", "fed2"), ("fed1", "fed2", "fed3")
CHANGED = 30
"""Up to this event the list is `TWO`."""
UPTO = 60


def config_of(directory: Path, **pipeline: Any) -> Config:
    values = {
        "server_name": US,
        "signing_key": "key",
        "instance_name": "fed1",
        "ledger": {"directory": "ledger1"},
        "pipeline": {"ledgers": ["ledger2", "ledger3"], **pipeline},
    }
    return from_values(values, directory=directory)


def sender_of(server: str, at: int) -> str:
    senders = TWO if at <= CHANGED else THREE
    return senders[shard_of(server, len(senders))]


MOVED = next(name for name in SERVERS if (sender_of(name, 1), sender_of(name, 60)) == TWO)
"""First fed1's, and then fed2's."""
THIRD = next(name for name in SERVERS if sender_of(name, 60) == "fed3")
LOST = {(MOVED, 14), (MOVED, 29), (MOVED, 31), (THIRD, 45)}


def lines_of(sender: str, first: int, last: int) -> list[dict[str, Any]]:
    """What this sender's ledger has of these events, but for what is lost.

    fed2 began at 5, and had given its servers back from 13 to 15, fed1 from 27 to 28. After the
    change whoever has gained a server repeats the last event, and after the next one."""
    lines = []
    for at in range(first, last + 1):
        for server in SERVERS:
            if sender_of(server, at) != sender:
                continue
            gained = at == CHANGED + 1 and sender_of(server, CHANGED) != sender
            for each in (at, CHANGED) if gained else (at,):
                gone = sender == "fed2" and (at <= 5 or 13 <= at <= 15)
                gone |= sender == "fed1" and 27 <= at <= 28
                if not gone and (server, each) not in LOST:
                    name = f"{sender}boot.{at}.{each}"
                    sent = pdu(each, ROOM)
                    lines.append(
                        attempt(server, sent, transaction_id=name, instance=sender, lsso=at)
                    )
    return lines


def rows() -> dict[str, list[dict[str, Any]]]:
    """To the homeserver's mind all is delivered."""
    return {
        "events": [event(at, ROOM) for at in range(1, UPTO + 1)],
        "intervals": [
            {"room_id": ROOM, "server": name, "first": 1, "last": None} for name in SERVERS
        ],
        "destination_rooms": [
            {"destination": name, "room_id": ROOM, "stream_ordering": UPTO} for name in SERVERS
        ],
        "destinations": [
            {"destination": name, "last_successful_stream_ordering": UPTO} for name in SERVERS
        ],
        "senders": [{"since": -1, "names": list(TWO), "ours": list(TWO)}],
    }


def change(lake: Lake) -> None:
    """An ingest finds the other list, long after it has come into force."""
    ingest.note_senders(lake, sources.Standing(THREE, THREE, UPTO, UPTO, CHANGED))


def judged(spark: "SparkSession", lake: Lake, config: Config, upto: int) -> Audited:
    steps = Steps(quiet=True)
    with lake.commit() as commit:
        commit.set_position("events", upto)
        commit.set_position("intervals", upto)
    read_ledger(spark, lake, fetched(config), steps)
    return audit(spark, lake, config, steps)


def check(lake: Lake, told: Audited) -> None:
    missing = {(row["server"], row["stream_ordering"])
               for row in lake.read(schemas.MISSING).to_pylist()}  # fmt: skip
    assert missing == {each for each in LOST if each[1] <= told.upto}
    early = sum(sender_of(server, 1) == "fed2" for server in SERVERS)
    away = 2 * (len(SERVERS) - early) * (told.upto > CHANGED)
    counts = {name: n for name, n in told.counts.items() if n}
    assert counts.pop("delivered") + counts.pop("delivered_again", 0) + len(missing) == (
        told.upto * len(SERVERS) - 8 * early - away
    )
    expected = {"before_ledger": 5 * early, "not_ours": 3 * early + away, "missing": len(missing)}
    assert counts == expected
    assert told.stray == 0
    assert told.unproven is None
    repeated = lake.read(schemas.REPEATED).to_pylist()
    assert all(row["expected"] and "another sender" in row["why"] for row in repeated)
    assert len(repeated) == (told.upto > CHANGED) * sum(
        sender_of(server, CHANGED) != sender_of(server, CHANGED + 1) for server in SERVERS
    )


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.long)])
def test_servers_that_changed_hands_are_judged_by_all_ledgers(
    anew: bool, spark: "SparkSession", tmp_path: Path
) -> None:
    """First and incrementally, or anew: what one of three has lost is missing, by name, and nothing
    else; what changed hands within the ledgers is in order. Without one of the ledgers it is red.
    """
    lake, config = lake_of(tmp_path, rows(), 0), config_of(tmp_path)
    begun = {
        # What one drops everywhere, others may have lost.
        "fed1": [note("owned", 0, instance="fed1"),
                 note("dropped", 45, instance="fed1", pdus=[pdu(45, ROOM, "quarantine")])],
        "fed2": [note("owned", 5, instance="fed2"),
                 note("handed_over", 12, instance="fed2"), note("owned", 15, instance="fed2")],
        "fed3": [note("owned", CHANGED, instance="fed3")],
    }  # fmt: skip

    away = [note("handed_over", 26, instance="fed1"), note("owned", 28, instance="fed1")]

    def ledger(sender: str, segment: int, first: int, last: int) -> None:
        more = begun[sender] if segment == 1 else away if sender == "fed1" else []
        lines = lines_of(sender, first, last)
        write(tmp_path / f"ledger{sender[-1]}", f"{sender}.b.{segment:06d}.jsonl", *more, *lines)

    for sender in TWO:
        ledger(sender, 1, 1, 20)
    (tmp_path / "ledger3").mkdir()
    looks = (UPTO,) if anew else (20, UPTO)
    if not anew:
        check(lake, judged(spark, lake, config, 20))
    change(lake)
    for sender in TWO:
        ledger(sender, 2, 21, UPTO)
    if not anew:
        told = summed_up(lake, config)
        assert told.unproven == "no segment of the ledger of fed3 was ever read"
        assert told.is_red
    ledger("fed3", 1, CHANGED, 50)
    ledger("fed3", 2, 51, UPTO)
    # A copy of what is there, as a directory that is copied again and again may have one.
    write(tmp_path / "ledger2", "fed3.b.000002.open", *lines_of("fed3", 51, 52))
    told = judged(spark, lake, config, UPTO)
    check(lake, told)
    assert told.began == 5
    history = lake.read(schemas.AUDITS).sort_by("at_ms").to_pylist()
    missing = [sum(at <= upto for _, at in LOST) for upto in looks]
    assert [(row["upto"], row["missing"]) for row in history] == [*zip(looks, missing, strict=True)]


def test_the_other_ledgers_are_fetched_before_they_are_read(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """By a program of the operator's; what it says where it fails is said."""
    program = tmp_path / "fetch"
    program.write_text(f"#!/bin/sh\ncp -r {tmp_path}/far/. {tmp_path}/near\n")
    config = config_of(tmp_path, ledgers=["near"], fetch=str(program))
    lake = open_lake(tmp_path / "lake", US, create=True)
    (tmp_path / "ledger1").mkdir()
    steps = Steps(quiet=True)
    with pytest.raises(PipelineError, match=r"^pipeline.fetch: .*Permission denied"):
        read_ledger(spark, lake, fetched(config), steps)
    program.chmod(0o700)
    with pytest.raises(PipelineError, match=r"^pipeline.fetch: .*exited with 1: cp: .*far"):
        read_ledger(spark, lake, fetched(config), steps)
    program.write_text("#!/bin/sh\n")
    with pytest.raises(PipelineError, match=r"^pipeline.ledgers.0: .*near: is not a directory"):
        read_ledger(spark, lake, fetched(config), steps)
    program.write_text(f"#!/bin/sh\ncp -r {tmp_path}/far/. {tmp_path}/near\n")
    write(tmp_path / "far", "fed2.b.000001.jsonl", *lines_of("fed2", 9, 9))
    read_ledger(spark, lake, fetched(config), steps)
    assert lake.rows(schemas.SEGMENTS) == 1


def test_events_are_read_as_far_as_each_sender_has_noted_what_is_owed(
    tmp_path: Path, postgres: Databases
) -> None:
    """The lowest position in force, and the lowest of a walk that is under way. One whom no list
    names counts no more; one that never ran, such as a worker of Synapse's, is not judged."""
    urls = [driver_url(postgres.create_database()) for _ in range(2)]
    engines = [sa.create_engine(url) for url in urls]
    with engines[0].begin() as connection:
        synapse_schema.create(connection)
        position = tables.federation_stream_position
        connection.execute(sa.delete(position))
        places = {"fed1": 50, "fed2": 40, "worker": 10, "gone": 3}
        connection.execute(sa.insert(position), [
            {"type": "events", "instance_name": name, "stream_id": at}
            for name, at in places.items()
        ])  # fmt: skip
    tables.sender.create_all(engines[1])
    values = {
        "server_name": US,
        "signing_key": "key",
        "instance_name": "fed1",
        "homeserver": {"kind": "synapse", "database": urls[0],
                       "federation_sender_instances": ["fed1", "worker"]},
        "feed": {"kind": "redis"},
        "sender_database": urls[1],
    }  # fmt: skip
    config = from_values(values, directory=tmp_path)
    lake = open_lake(tmp_path / "lake", US, create=True)

    def now() -> sources.Standing:
        with ingest.opened(config) as (main, _, own):
            found = sources.standing(main, own, config)
        ingest.note_senders(lake, found)
        return found

    assert now() == (("fed1", "worker"), ("fed1",), 50, 50, None)
    lease = {"holder": "x", "renewal": 1, "ends": True, "asked": False, "place": ""}
    with engines[1].begin() as connection:
        connection.execute(sa.insert(tables.leases), [
            {"instance_name": name, **lease} for name in ("fed1", "fed2", "gone")
        ])  # fmt: skip
        listed = ["fed1", "fed2", "worker"]
        connection.execute(
            sa.insert(tables.sender_list), [{"id": 1, "in_force": listed, "since": 30}]
        )
    assert now() == (("fed1", "fed2", "worker"), ("fed1", "fed2"), 40, 50, 30)
    with engines[1].begin() as connection:
        connection.execute(sa.insert(tables.walks), [
            {"instance_name": "fed2", "after": 20, "upto": 50}
        ])  # fmt: skip
    assert now() == (("fed1", "fed2", "worker"), ("fed1", "fed2"), 20, 50, 30)
    lists = [(row["since"], row["names"], row["ours"])
             for row in lake.read(schemas.SENDERS).sort_by("version").to_pylist()]  # fmt: skip
    assert lists == [
        (-1, ["fed1", "worker"], ["fed1"]),
        (30, ["fed1", "fed2", "worker"], ["fed1", "fed2"]),
    ]
    for engine in engines:
        engine.dispose()
