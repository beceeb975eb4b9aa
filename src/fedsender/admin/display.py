"""The endpoint's answers, as the command line prints them: tables for people, lines for scripts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from rich.cells import cell_len
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

AGES: Final = (("<1m", 60), ("<1h", 3_600), ("<1d", 86_400), ("<7d", 604_800), ("older", math.inf))
"""The classes of ages, each with its end in seconds."""


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


# The columns of the list of destinations before the reason, each with the narrowest terminal that
# shows it.
_COLUMNS: Final = (
    ("SERVER", 0),
    ("STATE", 0),
    ("OWED", 0),
    ("OLDEST", 0),
    ("FAILING", 100),
    ("NEXT TRY", 100),
)
_LEAST_REASON: Final = 12


def destinations(entries: Iterable[Answer], width: int) -> list[Text]:
    """A list of destinations, for a terminal of `width` columns: a line for each, after a head.

    The reason is cut at the edge. Nothing else is: a long name makes the line longer.
    """
    names = [name for name, least in _COLUMNS if width >= least]
    rows = [[*names, "REASON"]]
    for entry in entries:
        cells = {
            "SERVER": entry["destination"],
            "STATE": entry["state"].replace("_", " "),
            "OWED": _owed(entry),
            "OLDEST": _roughly(entry["oldest_owed_s"]),
            "FAILING": _roughly(entry["failing_for_s"]),
            "NEXT TRY": _roughly(entry["next_attempt_in_s"]),
        }
        # An operator's reason is why nothing is sent; the last error is older.
        reason = entry["paused"] or entry["parked"] or entry["reason"]
        rows.append([safe(cells[name] or "-") for name in names] + [safe(reason or "-")])
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)][:-1]
    room = max(_LEAST_REASON, width - sum(widths) - 2 * len(widths))
    lines = []
    for number, (*cells_, reason) in enumerate(rows):
        line = Text(style="" if number else "bold")
        for cell, size in zip(cells_, widths, strict=True):
            line.append(cell + " " * (size - cell_len(cell) + 2))
        last = Text(reason)
        last.truncate(room, overflow="ellipsis")
        lines.append(line.append(last))
    return lines


def _roughly(seconds: float | None) -> str | None:
    """A duration in its largest unit: "3 h"."""
    said = lasting(seconds)
    return said and " ".join(said.split()[:2])


def _owed(entry: Answer) -> str | None:
    if not entry["behind"]:
        return None
    parts = [many(entry["rooms_owed"], "room")] if entry["rooms_owed"] else []
    events = entry["events_owed"] or entry["queued_pdus"]
    parts += [many(events, "event")] if events and not parts else []
    parts += ["keys"] if entry["owes_keys"] else []
    if not parts and entry["in_flight"]:
        return "1 transaction"
    return ", ".join(parts) or "not counted yet"


def footer(page: Answer) -> str:
    """The last line of a list: how many there are, and how old the count of rooms is."""
    counted = f"; rooms as counted {lasting(page['counted_s'])} ago" if page["behind"] else ""
    return f"{page['behind']:,} behind of {page['known']:,}{counted}"


def by_error(failing: Mapping[str, Mapping[str, int]]) -> Table:
    """The failing servers: class of the last failure, by the time since the first one."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ERROR", no_wrap=True)
    for name in ("SERVERS", *(age for age, _ in AGES)):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome, ages in failing.items():
        counts = [sum(ages.values()), *(ages.get(age, 0) for age, _ in AGES)]
        table.add_row(plain(outcome), *(f"{count:,}" if count else "-" for count in counts))
    return table


def head(answer: Answer) -> list[Text]:
    """The overview, a line for each fact."""
    feed, rates, page = answer["feed"], answer["rates"], answer["page"]
    up = lasting(answer["uptime_s"])
    lines = [
        Text(
            f"fedsender {answer['version']}, {safe(answer['instance'])} of"
            f" {safe(answer['server_name'])}, up {up}",
            style="bold",
        )
    ]
    if answer["ready"]:
        lines.append(Text("ready", style="green"))
    lines += [Text(safe(f"not ready: {reason}"), style="red") for reason in answer["reasons"]]

    def fact(name: str, text: str) -> None:
        lines.append(Text.assemble((f"{name:<11}", "dim"), safe(text)))

    left = max(0, feed["head"] - feed["fanned_out"])
    fact("feed", f"at token {feed['fanned_out']:,}, {left:,} behind the homeserver")
    if rates is not None:
        fact(
            "delivered",
            f"{rates['pdus_per_s']:,.1f} PDUs/s, {rates['edus_per_s']:,.1f} EDUs/s in"
            f" {rates['transactions_per_s']:,.1f} transactions/s; {answer['in_flight']} in flight",
        )
        if rates["p50_ms"] is not None:
            said = (f"p{share} {took(rates[f'p{share}_ms'])}" for share in (50, 95, 99))
            fact("latency", ", ".join(said))
    states = sorted(answer["states"].items(), key=lambda each: -each[1])
    counts = (f"{number:,} {name.replace('_', ' ')}" for name, number in states if number)
    fact("servers", f"{page['known']:,}: {', '.join(counts) or 'none'}")
    owed = ((age, each) for age, each in answer["owed_by_age"].items() if each["servers"])
    ages = ", ".join(f"{age} {each['servers']:,}" for age, each in owed)
    rooms = sum(each["rooms"] for each in answer["owed_by_age"].values())
    to = f"{many(rooms, 'room')} to {many(page['behind'], 'server')}"
    fact("owed", f"{to}: {ages}" if ages else "nothing")
    if failing := answer["failing_by_age"]:
        errors = (f"{outcome} {sum(found.values()):,}" for outcome, found in failing.items())
        fact("failing", ", ".join(errors))
    if answer["quarantine_items"]:
        fact("quarantine", many(answer["quarantine_items"], "item"))
    return lines


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
