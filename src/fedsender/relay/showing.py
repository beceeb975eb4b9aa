"""A relay's status for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from fedsender.admin.display import lasting, new_table, plain
from fedsender.admin.words import duration

Answer = Mapping[str, Any]


def facts(answer: Answer) -> Iterator[str]:
    """What there is, one line each."""
    yield f"relay of {answer['server_name']}, history {answer['epoch']}"
    mib = answer["log_bytes"] / 2**20
    yield (
        f"log: {answer['first']} to {answer['head']},"
        f" {mib:.1f} MiB ({answer['cap_used']:.0%} of what it may be)"
    )
    if answer["held_by"] is not None:
        yield f"oldest pin: {answer['oldest_pin']}, held by {answer['held_by']}"
    for snapshot in answer["snapshots"][-1:]:
        yield f"newest snapshot: {snapshot['token']}, {duration(snapshot['age_s'])} old"
    if answer["full_syncs"]:
        reasons = (f"{count} {reason}" for reason, count in sorted(answer["full_syncs"].items()))
        yield f"snapshots handed out: {', '.join(reasons)}"
    for doubt in answer["doubts"]:
        yield f"wrong: {doubt}"


def consumers(found: Sequence[Answer]) -> Table:
    """The consumers, one row each."""
    shown = new_table("CONSUMER", "STATE", "PIN", "BEHIND", "FOR", "LAST SEEN", "LAST ERROR")
    for one in found:
        shown.add_row(
            plain(one["name"]),
            plain(one["state"]),
            plain(one["pin"]),
            plain(one["lag_tokens"]),
            plain(lasting(one["lag_s"]) if one["lag_tokens"] else None),
            plain("connected" if one["connected"] else f"{duration(one['seen_s'])} ago"),
            plain(one["error"]),
        )
    return shown
