"""Every metric that is declared is set by what really happens, and means what it says."""

import sqlite3
from pathlib import Path

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError
from tests.replication.test_synapse import Tables, fed
from tests.sender.harness import HS, Request, World, answer
from tests.sender.synapse_world import ALICE, SynapseWorld
from tests.sender.test_database_errors import broken_table
from tests.service import open_world
from trio.testing import MockClock

from fedsender.admin.probes import observe
from fedsender.config import load
from fedsender.daemon import open_core
from fedsender.federation.client import Answer
from fedsender.runtime import real_runtime
from fedsender.telemetry import Metrics
from fedsender_lab.testing.clock import until
from fedsender_lab.testing.receiver import healthy, slow

A, B = "a.example", "b.example"
R1, R2 = "!1:hs.example", "!2:hs.example"

BY_TROUBLE = {
    "fedsender_attempt_seconds",
    "fedsender_attempts",
    "fedsender_crashes",
    "fedsender_destinations",
    "fedsender_dropped_edus",
    "fedsender_isolations",
    "fedsender_ledger_failures",
    "fedsender_ledger_lines",
    "fedsender_ledger_seconds",
    "fedsender_quarantined",
    "fedsender_refused_pdus",
    "fedsender_sent_pdus",
    "fedsender_spills",
    "fedsender_stream_held_seconds",
    "fedsender_stream_position",
    "synapse_event_processing_lag",
    "synapse_event_processing_lag_by_event",
    "synapse_event_processing_last_ts",
    "synapse_event_processing_loop_count",
    "synapse_event_processing_positions",
    "synapse_federation_client_events_processed",
    "synapse_federation_client_sent_edus",
    "synapse_federation_client_sent_edus_by_type",
    "synapse_federation_client_sent_pdu_destinations",
    "synapse_federation_client_sent_pdu_destinations_count",
    "synapse_federation_client_sent_transactions",
    "synapse_federation_transaction_queue_pending_destinations",
    "synapse_federation_transaction_queue_pending_edus",
    "synapse_federation_transaction_queue_pending_pdus",
    "synapse_replication_tcp_protocol_inbound_rdata_count",
    "synapse_util_metrics_block_count",
}
"""What the first test sees move; the second one sees all the others."""

BY_SOCKETS = {
    "fedsender_connections",
    "fedsender_database_retries",
    "fedsender_database_seconds",
    "fedsender_delivery_seconds",
    "fedsender_destination_sent_pdus",
    "fedsender_destination_sent_transactions",
    "fedsender_discoveries",
    "fedsender_feed_connected",
    "fedsender_feed_connects",
    "fedsender_handshakes",
    "fedsender_in_flight",
    "synapse_federation_last_sent_pdu_time",
    "synapse_http_matrixfederationclient_requests",
    "synapse_http_matrixfederationclient_responses",
}


BY_RELAY = {"fedsender_feed_full_sync_alarms", "fedsender_feed_full_syncs"}
"""What tests/relay/test_relay_feed.py sees move, with a relay."""
BY_LACK = {"fedsender_out_of_resources"}
"""What tests/sender/test_out_of_descriptors.py sees move, without descriptors."""
BY_LOOP = {"fedsender_loop_longest_step_seconds"}
"""What tests/test_telemetry.py sees move."""

BY_PURGE = {"fedsender_given_up_events"}
"""What tests/sender/test_purged_history.py sees move."""

BY_QUARANTINE = {"fedsender_full_quarantines", "fedsender_quarantine_items"}
"""What tests/admin/test_probes.py sees move."""

BY_OUTAGE = {
    "fedsender_feed_lag_seconds",
    "fedsender_admission_used",
    "fedsender_admission_waiting",
    "fedsender_build_info",
    "fedsender_loop_lag_seconds",
    "fedsender_oldest_owed_healthy_seconds",
    "fedsender_oldest_owed_seconds",
    "fedsender_owed_redeliveries",
    "fedsender_owed_rooms",
    "fedsender_ready",
    "fedsender_servers_lately",
}
"""What tests/admin/test_outage.py and test_skip.py see move."""

BY_NATURE = {
    "synapse_server_name_info",
    "synapse_util_metrics_block_ru_stime_seconds",
    "synapse_util_metrics_block_ru_utime_seconds",
}
"""What is never zero."""

BY_PUSH = {"fedsender_notices_dropped", "fedsender_takes_appends"}
"""What tests/embedded/test_processes.py and tests/relay/test_followers.py see move."""


def values(metrics: Metrics) -> dict[str, float]:
    """Each declared metric and the sum of its samples; all of them carry the server's name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        if family.name.startswith(("fedsender_", "synapse_")):
            assert all("server_name" in sample.labels for sample in family.samples), family.name
            # No time passes on the virtual clock.
            lag = family.name == "synapse_event_processing_lag"
            found[family.name] = sum(1 if lag else sample.value for sample in family.samples)
    return found


def touched(metrics: Metrics) -> set[str]:
    return {name for name, value in values(metrics).items() if value}


def test_every_declared_metric_is_in_one_of_the_lists() -> None:
    """A new metric must be shown to move, or it is dead weight on a dashboard."""
    known = BY_TROUBLE | BY_SOCKETS | BY_RELAY | BY_LACK | BY_LOOP | BY_QUARANTINE | BY_PUSH
    known |= BY_OUTAGE | BY_NATURE | BY_PURGE
    assert set(values(Metrics(HS))) == known
    assert not BY_TROUBLE & BY_SOCKETS


def poisoned(request: Request) -> Answer:
    """Refuses what is poison, and one PDU of an answer."""
    if "poison" in request.bodies:
        return answer(400)
    return answer(200, {"pdus": {each: {"error": "no"} for each in request.event_ids[:1]}})


async def test_trouble_of_every_kind_shows_in_the_metrics(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Sending, EDUs, failing, spilling, catch-up, quarantine, a lost table and a lost ledger."""
    world = World(tmp_path, sending={"queue_pdus": 50})
    world.server(A, reply=poisoned)
    writers = Tables({"ev1": 24, "ev2": 24})
    async with world.run() as sender, fed(writers) as synapse:
        metrics = synapse.feed.metrics = world.metrics
        await synapse.hear("POSITION events ev1 24 24", "POSITION events ev2 24 24")
        await synapse.hear('RDATA events ev1 26 ["ev",[]]')
        await world.join(R1, A)
        await world.join(R2, B)
        for text in ("one", "poison", "two"):
            await world.say(R1, text)
        sender.edus.typing(R1, [ALICE], 1)
        await trio.sleep(120)

        world.servers[B].latency = 20
        await world.say(R2, "first")
        await trio.sleep(1)
        for number in range(70):
            await world.say(R2, str(number))
            if number == 3:
                sender.edus.typing(R2, [ALICE], 2)
                await trio.sleep(1)
                await observe(sender, synapse.feed, metrics)
                waiting = touched(metrics)
        sender.edus.typing(R2, [], 3)
        await trio.sleep(200)

        with broken_table(tmp_path / "homeserver.sqlite3", "destinations"):
            await world.say(R1, "later")
            await trio.sleep(5)
        await trio.sleep(60)
        ledger = tmp_path / "ledger"
        ledger.rename(tmp_path / "away")
        await trio.sleep(3700)
        await world.say(R1, "unrecorded")
        await trio.sleep(5)
        (tmp_path / "away").rename(ledger)

    assert BY_TROUBLE - (touched(metrics) | waiting) == set()


@pytest.mark.slow
async def test_a_daemon_on_real_sockets_sets_all_the_others(tmp_path: Path) -> None:
    failing = ["homeserver: before commit"]

    def fail_once(point: str) -> None:
        if point in failing:
            failing.remove(point)
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise OperationalError("", {}, error)

    async with open_world(tmp_path) as world:
        (server,) = world.servers
        world.configure(metrics={"per_destination": [server.name]})
        server.become(slow(1.0))
        async with (
            open_core(load(world.config), real_runtime(), faults=fail_once) as daemon,
            daemon.serve_feed(),
        ):
            metrics = daemon.metrics

            with trio.fail_after(60):
                while not {"fedsender_in_flight", "fedsender_feed_connected"} <= touched(metrics):
                    await observe(daemon.sender, daemon.feed, metrics)
                    await trio.sleep(0.01)
            server.become(healthy())
            last = world.say()
            await until(lambda: last in server.received)
            await until(lambda: "fedsender_destination_sent_pdus" in touched(metrics))
            assert BY_SOCKETS - touched(metrics) == set()
            assert metrics.feed_connects.value == 1


async def test_the_gauge_of_edus_counts_receipts_and_the_counters_what_was_answered(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """W35: Synapse's gauge leaves receipts out, and its counters count what was queued."""
    world = SynapseWorld(tmp_path)
    async with world.run() as sender, fed() as synapse:
        await world.members(R1, ALICE, f"@x:{A}")
        world.servers[A].latency = 20
        sender.edus.typing(R1, [ALICE], 1)
        await trio.sleep(1)
        await world.event("$e", R1, f"@x:{A}", age_s=1)
        await world.read(R1, ALICE)
        await trio.sleep(1)
        await observe(sender, synapse.feed, world.metrics)
        found = values(world.metrics)
        # One that is under way, and the receipt behind it.
        assert found["synapse_federation_transaction_queue_pending_edus"] == 2
        assert found["synapse_federation_client_sent_edus"] == 0
        await trio.sleep(60)
        await observe(sender, synapse.feed, world.metrics)
        found = values(world.metrics)
        assert found["synapse_federation_transaction_queue_pending_edus"] == 0
        assert found["synapse_federation_client_sent_edus"] >= 2


async def test_how_long_a_stream_is_held_is_counted_from_its_beginning(
    autojump_clock: MockClock,
) -> None:
    async with fed(Tables({"ev1": 24, "ev2": 24})) as world:
        await world.hear("POSITION events ev1 24 24", "POSITION events ev2 24 24")
        assert world.feed.status().held_s == 0
        await world.hear('RDATA events ev1 26 ["ev",[]]')
        await trio.sleep(20)
        assert 19 < world.feed.status().held_s < 22
