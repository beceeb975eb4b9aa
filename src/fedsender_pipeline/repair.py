"""`audit --repair`: the daemon sends again what is missing."""

from dataclasses import dataclass, field
from typing import Any

from fedsender.admin.client import AdminClient, AdminError
from fedsender.admin.commands import PAIRS_AT_ONCE
from fedsender.config import Config
from fedsender_pipeline import PipelineError, schemas
from fedsender_pipeline.lake import Lake


@dataclass(slots=True)
class Repaired:
    """The daemon's answers for missing events.

    Attributes:
        accepted: the number of events that it sends again.
        refused: its refusals, with the reasons.
        without: of several senders those that are away or refuse, and why; an order waits for them.
    """

    accepted: int = 0
    refused: list[dict[str, Any]] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)


def repair(lake: Lake, config: Config) -> Repaired:
    """Hand the missing events of the last audit to the daemon, oldest first.

    It sends them again by its own rules: only to servers that may see the event, in its own time,
    with a line in the ledger. Of several senders any one gives the others what is theirs.

    Raises:
        PipelineError: the daemon cannot be asked; events that it has accepted stay accepted.
    """
    told, client = Repaired(), AdminClient.of(config)
    missing = lake.read(schemas.MISSING).sort_by("stream_ordering").select(["server", "event_id"])
    for rows in missing.to_batches(PAIRS_AT_ONCE):
        pairs = [list(row.values()) for row in rows.to_pylist()]
        try:
            answer = client.post("redeliver", body={"pairs": pairs})
        except AdminError as error:
            raise PipelineError(f"after {told.accepted} events: {error}") from None
        told.accepted += answer["accepted"]
        told.refused += answer["refused"]
        told.without |= answer.get("without", {})
    return told
