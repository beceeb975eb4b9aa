"""`pipeline.textfile`: the figures of a run, as Prometheus' node exporter reads them from a file.

A run that fails leaves the file as it is: so the time in it says when the last one succeeded.
"""

from datetime import UTC, datetime, time

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from fedsender.config import Config
from fedsender.files import replaced
from fedsender.runtime import real_runtime
from fedsender_pipeline.audit import Audited, oldest
from fedsender_pipeline.lake import Lake


def write_textfile(config: Config, lake: Lake, audited: Audited) -> None:
    """Replace the file, if the configuration names one.

    Args:
        lake: after the audit.
        audited: the findings of the audit.

    Raises:
        OSError: the file cannot be written.
    """
    path = config.pipeline.textfile
    if path is None:
        return
    registry = CollectorRegistry()
    now_s = real_runtime().now_ms() / 1000
    sender = {"server_name": config.server_name, "sender": config.instance_name}

    def gauge(name: str, about: str, *labels: str) -> Gauge:
        name = f"fedsender_pipeline_{name}"
        return Gauge(name, about, [*sender, *labels], registry=registry)

    for name, about, value in (
        ("last_success_timestamp_seconds", "The end of the last run that did not fail.", now_s),
        ("judged", "Deliveries of which the ledger can say something.", audited.judged),
        ("unknown_hosts", "Events whose servers cannot be told.", audited.unknown_hosts),
        ("missing", "Deliveries that no record accounts for.", audited.missing),
        ("stray", "Answered deliveries that should not have been, or not so late.", audited.stray),
        ("unproven", "1: evidence is missing.", bool(audited.unproven)),
    ):
        gauge(name, about).labels(**sender).set(value)
    deliveries = gauge("deliveries", "Deliveries that should be, by their fate.", "fate")
    for fate, number in audited.counts.items():
        deliveries.labels(**sender, fate=fate).set(number)
    since = gauge("pending_since_timestamp_seconds", "The day of the oldest event that is pending.")
    if (day := oldest(lake, "pending")) is not None:
        since.labels(**sender).set(datetime.combine(day, time(), UTC).timestamp())
    with replaced(path, 0o644) as file:
        file.write(generate_latest(registry).decode())
