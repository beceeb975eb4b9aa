"""The endpoint's answers, as the command line prints them: tables for people, lines for scripts."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from fedsender.console import safe


def duration(seconds: float) -> str:
    """`seconds` in its two largest units: "3 h 5 min", "12 s"; less than a second is "0 s"."""
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    context = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    said = [f"{number} {unit}" for number, unit in context if number]
    return " ".join(said[:2]) or "0 s"


def took(ms: float) -> str:
    """A measured time: "12 ms", "15.0 s"."""
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def many(number: int, thing: str) -> str:
    """`number` of a thing; its plural takes an s: "1 room", "2 rooms"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


Answer = Mapping[str, Any]


class Measured(Protocol):
    """One step of a probe."""

    @property
    def name(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def took_ms(self) -> float: ...
    @property
    def lines(self) -> Sequence[str]: ...


class Line(Protocol):
    """One setting of a server's policy."""

    @property
    def field(self) -> str: ...
    @property
    def value(self) -> object: ...
    @property
    def source(self) -> str: ...


def plain(value: object) -> Text:
    """`value` as text that cannot move the cursor: peers choose parts of the shown text."""
    if value is None:
        return Text("-", style="dim")
    return Text(safe(value))


def lasting(seconds: float | None) -> str | None:
    """A duration in words."""
    return None if seconds is None else duration(seconds)


def moment(at_ms: int | None) -> str | None:
    """A time as people write it, in UTC."""
    if at_ms is None:
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def new_table(*columns: str) -> Table:
    """An empty table in our style."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def destinations(entries: Iterable[Answer]) -> Table:
    """A list of destinations."""
    table = new_table("SERVER", "STATE", "OWED", "OLDEST", "FAILING FOR", "NEXT TRY IN", "REASON")
    for entry in entries:
        table.add_row(
            plain(entry["destination"]),
            plain(entry["state"]),
            plain(_owed(entry)),
            plain(lasting(entry["oldest_owed_s"])),
            plain(lasting(entry["failing_for_s"])),
            plain(lasting(entry["next_attempt_in_s"])),
            # An operator's reason is why nothing is sent; the last error is older.
            plain(entry["paused"] or entry["parked"] or entry["reason"]),
        )
    return table


def _owed(entry: Answer) -> str | None:
    rooms = [many(entry["rooms_owed"], "room")] if entry["rooms_owed"] else []
    keys = ["keys"] if entry["owes_keys"] else []
    return ", ".join(rooms + keys) or None


def why(answer: Answer) -> Table:
    """Everything about one destination, one fact a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(answer):
        if value is not None:
            table.add_row(name, plain(value))
    return table


def _facts(answer: Answer) -> Iterable[tuple[str, object]]:
    yield "server", answer["destination"]
    yield "in short", answer["summary"]
    yield "state", answer["state"]
    yield "since", moment(answer["since_ts"])
    for name, number in answer["depth"].items():
        yield name.replace("_", " "), number or None
    if oldest := answer["oldest"]:
        age = f", {duration(oldest['age_s'])} old" if oldest["age_s"] is not None else ""
        yield "oldest", f"{oldest['event_id']} at {oldest['stream_ordering']}{age}"
    if error := answer["last_error"]:
        yield "last error", f"{error['outcome']}: {error['meaning']}"
        if error["reason"] not in answer["summary"]:
            yield "", error["reason"]
        yield "failures", f"{error['failures']} since {moment(error['failing_since_ts'])}"
    yield "last answer", moment(answer["last_success_ts"])
    yield "next attempt", moment(answer["next_attempt_ts"])
    if flight := answer["in_flight"]:
        attempts = f"{flight['attempts']} attempts in {duration(flight['age_s'])}"
        yield "frozen transaction", f"{flight['transaction_id']}, {attempts}"
    yield "isolating", answer["isolating"] and f"at most {answer['isolating']} items at once"
    for sentence in answer["held"]:
        yield "held", sentence
    yield "paused", answer["paused"]
    yield "parked", answer["parked"]
    if health := answer["health"]:
        rate, attempts = health["success_rate"], health["attempts"]
        took = f", half of them within {health['p50_ms']} ms" if health["p50_ms"] else ""
        yield "last day", f"{rate:.1%} of {attempts:,} attempts delivered{took}"
    for setting in answer["settings"]:
        yield setting["field"], f"{setting['value']} ({setting['source']})"


def trace_facts(answer: Answer) -> list[str]:
    """The facts of an event before the list of its servers."""
    said = [
        f"{answer['type']} by {answer['sender']} in {answer['room_id']},"
        f" stream ordering {answer['stream_ordering']}, {lasting(answer['age_s']) or '?'} ago"
    ]
    if answer["reason"] is not None:
        said.append(f"sent to nobody: {answer['reason']}")
    if not answer["fanned_out"]:
        said.append("the fan-out has not come to it yet")
    if not answer["ledger_complete"]:
        said.append("the ledger was too long to be read to the end")
    return said


def fates(entries: Sequence[Answer]) -> Table:
    """The fate of an event, server by server."""
    table = new_table("SERVER", "OUTCOME", "WHEN", "TRANSACTION", "FAILED", "MORE")
    for entry in entries:
        table.add_row(
            plain(entry["destination"]),
            plain(entry["outcome"]),
            plain(moment(entry["at_ts"])),
            plain(entry["transaction_id"]),
            plain(entry["attempts"] or None),
            plain(entry["reason"]),
        )
    return table


def quarantine(entries: Iterable[Answer]) -> Table:
    """The items in quarantine."""
    table = new_table("ID", "SERVER", "WHAT", "EVENT", "ROOM", "SINCE", "REASON")
    for entry in entries:
        table.add_row(
            plain(entry["id"]),
            plain(entry["destination"] or "every server"),
            plain(entry["kind"]),
            plain(entry["event_id"]),
            plain(entry["room_id"]),
            plain(moment(entry["at_ts"])),
            plain(entry["reason"]),
        )
    return table


def policy(lines: Iterable[Line]) -> Table:
    """The settings for one server, each with the line of the configuration that sets it."""
    table = new_table("SETTING", "VALUE", "SET BY")
    for line in lines:
        table.add_row(plain(line.field), plain(line.value), plain(line.source))
    return table


def step(done: Measured) -> Iterable[str]:
    """The lines of one step of a probe; the first has its name and its time."""
    start = f"{done.name:<12}{took(done.took_ms):>8}  "
    for number, line in enumerate(done.lines):
        failed = "" if done.ok or number else "failed: "
        yield f"{start if number == 0 else ' ' * len(start)}{failed}{line}"
