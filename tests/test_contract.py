"""What other programs and other parts build on: docs/contract.md, held.

A red test here means that this page and whoever reads the ledger or the tables have to follow, or
that the change was not meant.
"""

import inspect
from dataclasses import fields
from pathlib import Path

from sqlalchemy import Table

from fedsender.ledger import Line, SentPdu, TransactionRecord
from fedsender.replication.feed_api import EduSink, Sink
from fedsender.sender.edus.flow import EduFlow
from fedsender.sender.fan_out import FanOut
from fedsender.sender.operations import Operations
from fedsender.sender.registry import Registry
from fedsender.sender.sender import Sender, open_sender
from fedsender.store import tables

PAGE = (Path(__file__).parents[1] / "docs" / "contract.md").read_text()


def columns(table: Table) -> set[str]:
    return {column.name for column in table.columns}


def test_the_homeserver_tables_keep_synapses_names() -> None:
    assert columns(tables.destination_rooms) == {"destination", "room_id", "stream_ordering"}
    assert columns(tables.destinations) == {
        "destination",
        "retry_last_ts",
        "retry_interval",
        "failure_ts",
        "last_successful_stream_ordering",
    }
    assert columns(tables.federation_stream_position) == {"type", "stream_id", "instance_name"}
    assert {"stream_ordering", "event_id", "room_id", "type", "sender"} <= columns(tables.events)
    assert {"event_id", "json", "internal_metadata", "format_version"} <= columns(tables.event_json)


def test_the_sender_tables_are_these() -> None:
    assert {table.name for table in tables.sender.sorted_tables} == {
        "frozen_transactions",
        "server_states",
        "catch_ups",
        "catch_up_rooms",
        "quarantine",
        "redeliveries",
        "receipt_positions",
        "receipt_debts",
        "generation",
        "sender_list",
        "walks",
        "requests",
        "discoveries",
        "leases",
    }


def test_the_two_databases_share_no_table() -> None:
    homeserver = {table.name for table in tables.homeserver.sorted_tables}
    assert not homeserver & {table.name for table in tables.sender.sorted_tables}


def test_a_ledger_line_has_the_fields_that_the_page_names() -> None:
    words = PAGE.split("one JSON object per attempt: `")[1].split("`")[0]
    outer, _, rest = words.partition("[")
    inner, _, tail = rest.partition("]")
    named = {*outer.split(), *tail.split()}

    written = {*Line._fields, *TransactionRecord._fields}
    assert named == written - {"record"} | {"v", "instance"}
    of_a_pdu = {field.name for field in fields(SentPdu) if field.init}
    assert {name.rstrip("?") for name in inner.split()} == of_a_pdu


def test_the_feed_calls_these_and_the_sender_has_them() -> None:
    """Synchronous: the feed must never wait for the sender."""
    properties = {"events", "edus"}
    calls = [name for name in vars(Sink) if not name.startswith("_") and name not in properties]

    assert sorted(calls) == ["backoff_changed", "redacted", "server_up", "to_device_changed"]
    for name in calls:
        method = getattr(Sender, name)
        assert not inspect.iscoroutinefunction(method)
        takes = "event_ids" if name == "redacted" else "server"
        assert list(inspect.signature(method).parameters) == ["self", takes]


def test_the_feed_tells_of_edus_by_these_and_the_sender_has_them() -> None:
    watermarks = {"device_lists", "receipts"}
    calls = [name for name in vars(EduSink) if not name.startswith("_") and name not in watermarks]

    words = PAGE.split("`edus` (")[1].split(")")[0]
    assert sorted(calls) == sorted(words.replace("`", "").split(", ")[2:])
    for name in calls:
        method = getattr(EduFlow, name)
        assert not inspect.iscoroutinefunction(method)
        assert inspect.signature(method).parameters.keys() == (
            inspect.signature(getattr(EduSink, name)).parameters.keys()
        )


def test_the_sender_offers_what_the_page_says() -> None:
    offered = PAGE.split("`open_sender` | an `async with`; ")[1].split(" |")[0]

    parts = {"registry": Registry, "operations": Operations, "fan_out": FanOut}
    for name in offered.replace("`", "").split(", "):
        part, method = name.split(".")
        assert callable(getattr(parts[part], method)), name
    assert "announcer" in inspect.signature(open_sender).parameters
