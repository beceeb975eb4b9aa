"""What a relay's rows are to a sender: facts for its store, and what is of use only now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsender.facts import STREAM, BadRow, EduRow, RelayRow, parse_relay_row
from fedsender.replication.sink import EduSink
from fedsender.store.records import PresenceState, Receipt
from fedsender.store.relay_load import Handles
from fedsender.streams import Json, RedactionRow

MAX_TYPISTS = 1000


def parse_record(token: int, rows: Sequence[Json], handles: Handles) -> list[RelayRow]:
    """The rows of one token that concern us. Raises BadRow.

    Durable EDUs for the servers of other shards are none of ours: they would lie here for ever.
    """
    found: list[RelayRow] = []
    for row in rows:
        try:
            parsed = parse_relay_row(row)
        except BadRow as bad:
            raise BadRow(f"stream {STREAM}, token {token}: {bad}") from bad
        if isinstance(parsed, EduRow) and not handles(parsed.destination):
            continue
        found.append(parsed)
    return found


def redacted_in(rows: Iterable[RelayRow]) -> set[str]:
    """The events that these rows say are redacted."""
    return {row.target for row in rows if isinstance(row, RedactionRow)}


def tell_ephemeral(edus: EduSink, stream: str, token: int, row: Json) -> Receipt | None:
    """Tell the sink of a row of typing or presence; a receipt is returned, to be stored.

    What cannot be read is passed over: it is of no use a moment later anyway.
    """
    match (stream, row):
        case ("typing", [str(room_id), list(users)]):
            typists = [user for user in users if isinstance(user, str)]
            edus.typing(room_id, typists[:MAX_TYPISTS], token)
        case ("receipts", [str(room), str(kind), str(user), str(event), thread, dict(data)]) if (
            thread is None or isinstance(thread, str)
        ):
            ts = data.get("ts")
            known = isinstance(ts, int) and not isinstance(ts, bool)
            return Receipt(0, room, kind, user, event, thread, ts if known else None)
        case (
            "presence",
            [str(user), str(state), int(active), status, bool(now), list(servers)],
        ) if status is None or isinstance(status, str):
            edus.presence(PresenceState(user, state, active, status, now))
            for server in servers:
                if isinstance(server, str):
                    edus.presence_wanted(server, user)
    return None
