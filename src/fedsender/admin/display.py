"""The endpoint's answers, as the command line prints them: tables for people, lines for scripts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from fedsender.console import safe, utc_text

if TYPE_CHECKING:
    from fedsender.config import PolicyLine


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


def listed(names: Sequence[str], most: int) -> str:
    """At most so many of these names, and the number of the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def mib(size: int | None) -> str:
    """Bytes in MiB, without the unit; less than 10 MiB with one decimal."""
    if size is None:
        return "?"
    return f"{size / 2**20:,.{0 if size % 2**20 == 0 or size >= 10 * 2**20 else 1}f}"


Answer = Mapping[str, Any]

AGES: Final = (("<1m", 60), ("<1h", 3_600), ("<1d", 86_400), ("<7d", 604_800), ("older", math.inf))
"""The classes of ages, each with its end in seconds."""
ROOMS_SHOWN: Final = 5
"""Rooms in which a server is owed events, as `why` prints them."""


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
    return None if at_ms is None else utc_text(at_ms)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a `Sheet`.

    Attributes:
        rank: the column with the highest rank leaves first when the screen is narrow; 0: it stays.
        least: the column may be cut down to this width; 0: it is never cut.
        right: whether it holds numbers.
    """

    title: str
    rank: int = 0
    least: int = 0
    right: bool = False


class Sheet:
    """A table with one line a row: no name, id or error goes over two lines.

    On a narrow screen columns leave by rank, and long texts are cut. A name that is longer than its
    column moves the rest of its line to the right. Without a screen nothing is cut.
    """

    GAP: Final = 2

    def __init__(self, *columns: Column) -> None:
        self.columns = columns
        self.rows: list[tuple[str | None, ...]] = []

    def add(self, *cells: object) -> None:
        """Add a row; None is shown as a dash."""
        assert len(cells) == len(self.columns)
        self.rows.append(tuple(None if cell is None else safe(cell) for cell in cells))

    def lines(self, width: int | None) -> list[Text]:
        """The header and each row; `width`: of the screen, in cells; None: there is none."""
        chosen = self._widths(width)
        header = Text(style="bold")
        for at, size in chosen.items():
            self._put(header, at, self.columns[at].title, size)
        lines = [header]
        for row in self.rows:
            line = Text()
            for at, size in chosen.items():
                self._put(line, at, row[at], size)
            lines.append(line)
        for line in lines:
            line.rstrip()
        return lines

    def _widths(self, width: int | None) -> dict[int, int]:
        """The width of each column that is shown, by its place."""
        natural = {}
        for at, column in enumerate(self.columns):
            sizes = [cell_len(row[at] or "-") for row in self.rows]
            if width is not None and not (column.rank or column.least):
                # One long name is not the reason why all other rows lose their columns.
                sizes = [size for size in sizes if size <= max(24, width * 2 // 5)]
            natural[at] = max(cell_len(column.title), *sizes, 0)
        if width is None:
            return natural
        least = {at: min(size, self.columns[at].least or size) for at, size in natural.items()}
        shown = dict(natural)
        while self._sum(least, shown) > width and len(shown) > 1:
            last = max(shown, key=lambda at: self.columns[at].rank)
            if not self.columns[last].rank:
                break
            del shown[last]
        spare = width - self._sum(least, shown)
        for at in sorted(shown, key=lambda at: self.columns[at].rank):
            more = min(max(0, spare), natural[at] - least[at])
            shown[at] = least[at] + more
            spare -= more
        return shown

    def _sum(self, sizes: Mapping[int, int], shown: Iterable[int]) -> int:
        return sum(sizes[at] + self.GAP for at in shown) - self.GAP

    def _put(self, line: Text, at: int, cell: str | None, size: int) -> None:
        column = self.columns[at]
        text = "-" if cell is None else cell
        if column.least:
            text = shortened(text, size)
        blank = max(0, size - cell_len(text))
        style = "dim" if cell is None else ""
        before = blank if column.right else 0
        line.append(" " * before)
        line.append(text, style)
        line.append(" " * (blank - before + self.GAP))


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` cells: the words before the first colon stay, and the last ones.

    What stands between them goes first: `closed: … Connection refused`. A text without such
    parts loses its end.
    """
    if cell_len(text) <= width:
        return text
    parts = text.split(": ")
    for kept in range(len(parts) - 2, 0, -1):
        short = f"{': '.join(parts[:kept])}: … {parts[-1]}"
        if cell_len(short) <= width:
            return short
    return set_cell_size(text, max(0, width - 1)).rstrip(" :,;") + "…"


def destinations(entries: Iterable[Answer]) -> Sheet:
    """A list of destinations."""
    sheet = Sheet(
        Column("SERVER"),
        Column("STATE"),
        Column("OWED", 1),
        Column("OLDEST", 3),
        Column("FAILING", 4),
        Column("NEXT TRY", 5),
        Column("REASON", 2, 24),
    )
    for entry in entries:
        sheet.add(
            entry["destination"],
            entry["state"].replace("_", " "),
            _owed(entry),
            _roughly(entry["oldest_owed_s"]),
            _roughly(entry["failing_for_s"]),
            _roughly(entry["next_attempt_in_s"]),
            # An operator's reason is why nothing is sent; the last error is older.
            entry["paused"] or entry["parked"] or entry["reason"],
        )
    return sheet


def _roughly(seconds: float | None) -> str | None:
    """A duration in its largest unit: "3 h"."""
    said = lasting(seconds)
    return said and " ".join(said.split()[:2])


def _owed(entry: Answer) -> str | None:
    if not entry["behind"]:
        return None
    keys = "keys" if entry["owes_keys"] else ""
    events = entry["events_owed"]
    said = _in_words(events, 0 if events else entry["rooms_owed"], entry["redeliveries"], keys)
    return said or ("1 transaction" if entry["in_flight"] else "not counted yet")


def _in_words(events: int, rooms: int | None, redeliveries: int, keys: str) -> str:
    """What is owed: "2 events, 1 room, keys"; "": nothing that is known."""
    parts = [
        many(number, thing) for number, thing in ((events, "event"), (rooms, "room")) if number
    ]
    parts += [f"{redeliveries:,} to send again"] if redeliveries else []
    parts += [keys] if keys else []
    return ", ".join(parts)


def footer(page: Answer) -> str:
    """The last line of a list: how many there are, and how old the count of rooms is."""
    counted = f"; rooms as counted {lasting(page['counted_s'])} ago" if page["behind"] else ""
    return f"{page['behind']:,} behind of {page['known']:,}{counted}"


def by_error(failing: Mapping[str, Mapping[str, int]]) -> Sheet:
    """The failing servers: class of the last failure, by the time since the first one."""
    ages = [age for age, _ in AGES]
    sheet = Sheet(Column("ERROR"), *(Column(name, right=True) for name in ("SERVERS", *ages)))
    for outcome, found in failing.items():
        counts = [sum(found.values()), *(found.get(age, 0) for age in ages)]
        sheet.add(outcome, *(f"{count:,}" if count else None for count in counts))
    return sheet


def hour(minutes: Sequence[Answer]) -> list[Answer]:
    """The pictures of the last hour: each has a title, the latest value in words, and its lines,
    a value for each minute; None: there was nothing to measure."""
    if not minutes:
        return []
    last = minutes[-1]
    measured = last["p50_ms"] is not None
    delay = ", ".join(f"p{share} {took(last[f'p{share}_ms'])}" for share in (50, 99) if measured)
    shown = (
        ("Delivered", f"{last['pdus_per_s']:,.1f} PDUs/s", ("pdus_per_s",)),
        ("Delay", delay or "nothing was delivered", ("p50_ms", "p99_ms")),
        ("Behind", many(last["behind"], "server"), ("behind",)),
        ("Owed", "at least " * bool(last["owed"]) + many(last["owed"], "event"), ("owed",)),
        ("Failing", many(last["failing"], "server"), ("failing",)),
    )
    return [
        {"title": title, "now": now, "lines": [[each[name] for each in minutes] for name in names]}
        for title, now, names in shown
    ]


def by_group(what: str, entries: Iterable[Answer]) -> Sheet:
    """Servers by what they share."""
    counts = ("SERVERS", "FAILING", "BEHIND")
    sheet = Sheet(Column(what.upper()), *(Column(name, right=True) for name in counts))
    for entry in entries:
        numbers = (entry["servers"], entry["failing"], entry["behind"])
        sheet.add(entry["name"], *(f"{number:,}" if number else None for number in numbers))
    return sheet


def head(answer: Answer) -> list[Text]:
    """The overview, a line for each fact."""
    lines = [Text(safe(title(answer)), style="bold")]
    style = "green" if answer["ready"] else "red"
    lines += [Text(safe(each), style=style) for each in readiness(answer)]
    for name, text in overview_facts(answer):
        lines.append(Text.assemble((f"{name:<11}", "dim"), safe(text)))
    return lines


def title(answer: Answer) -> str:
    """The daemon of an overview."""
    daemon = f"{answer['instance']} of {answer['server_name']}"
    return f"fedsender {answer['version']}, {daemon}, up {lasting(answer['uptime_s'])}"


def readiness(answer: Answer) -> list[str]:
    """Whether the daemon is ready; if not, a line for each reason; and a line for each warning."""
    said = ["ready"] if answer["ready"] else [f"not ready: {each}" for each in answer["reasons"]]
    return said + [f"warning: {each}" for each in answer["warnings"]]


def overview_facts(answer: Answer) -> Iterator[tuple[str, str]]:
    """The facts of an overview, each with its name."""
    feed, rates, page = answer["feed"], answer["rates"], answer["page"]
    if len(answer["senders"]) > 1:
        senders = (f"{name} ({host})" for name, host in answer["senders"].items())
        yield "senders", f"{', '.join(senders)}; memory and keys are {answer['instance']}'s"
    left = max(0, feed["head"] - feed["fanned_out"])
    behind = f"{left:,} behind the homeserver"
    if feed["lag_s"]:
        behind += f" for {lasting(feed['lag_s'])}"
    yield "feed", f"at token {feed['fanned_out']:,}, {behind}"
    if rates is not None:
        yield (
            "delivered",
            f"{rates['pdus_per_s']:,.1f} PDUs/s, {rates['edus_per_s']:,.1f} EDUs/s in"
            f" {rates['transactions_per_s']:,.1f} transactions/s; {answer['in_flight']} in flight",
        )
        if rates["p50_ms"] is not None:
            said = (f"p{share} {took(rates[f'p{share}_ms'])}" for share in (50, 95, 99))
            yield "latency", ", ".join(said)
    memory = {name: mib(size) for name, size in answer["memory"].items()}
    yield (
        "memory",
        f"{memory['resident']} of {memory['most']} MiB; queued events {memory['queued']} of"
        f" {memory['most_queued']}, transactions under way {memory['bodies']} of"
        f" {memory['most_bodies']}",
    )
    yield "signs with", ", ".join(answer["signing_keys"])
    states = sorted(answer["states"].items(), key=lambda each: -each[1])
    counts = (f"{number:,} {name.replace('_', ' ')}" for name, number in states if number)
    yield "servers", f"{page['known']:,}: {', '.join(counts) or 'none'}"
    yield "owed", _owed_to_all(answer["owed"], answer["owed_by_age"])
    if failing := answer["failing_by_age"]:
        errors = (f"{outcome} {sum(found.values()):,}" for outcome, found in failing.items())
        yield "failing", ", ".join(errors)
    if answer["quarantine_items"]:
        yield "quarantine", many(answer["quarantine_items"], "item")


def _owed_to_all(owed: Answer, by_age: Mapping[str, int]) -> str:
    if not owed["servers"]:
        return "nothing"
    keys = f"keys for {owed['keys']:,}" if owed["keys"] else ""
    said = _in_words(owed["events"], owed["rooms"], owed["redeliveries"], keys)
    ages = ", ".join(f"{age} {servers:,}" for age, servers in by_age.items() if servers)
    to = f"{said or 'not counted yet'}; {many(owed['servers'], 'server')}"
    return f"{to}, by age: {ages}" if ages else to


def why(answer: Answer) -> Table:
    """Everything about one destination, one fact a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in why_facts(answer):
        table.add_row(name, plain(value))
    rooms = answer["oldest_rooms"]
    for number, room in enumerate(rooms[:ROOMS_SHOWN]):
        table.add_row("owed in" if number == 0 else "", plain(_owed_in(room)))
    if (more := answer["depth"]["rooms"] - ROOMS_SHOWN) > 0:
        table.add_row("", plain(f"and {many(more, 'room')} more"))
    return table


def _owed_in(room: Answer) -> str:
    received = "" if room["received_ts"] is None else f", received {moment(room['received_ts'])}"
    return f"{room['room_id']}: newest event at {room['stream_ordering']}{received}"


def why_facts(answer: Answer) -> Iterator[tuple[str, object]]:
    """The facts of a destination, each with its name; "": it belongs to the one before."""
    return ((name, value) for name, value in _facts(answer) if value is not None)


def owed_rooms(entries: Iterable[Answer]) -> Sheet:
    """The rooms in which a destination is owed events."""
    sheet = Sheet(Column("ROOM"), Column("NEWEST AT", right=True), Column("RECEIVED", 1))
    for entry in entries:
        sheet.add(entry["room_id"], entry["stream_ordering"], moment(entry["received_ts"]))
    return sheet


def _facts(answer: Answer) -> Iterable[tuple[str, object]]:
    yield "server", answer["destination"]
    yield "in short", answer["summary"]
    yield "state", answer["state"].replace("_", " ")
    yield "doing", answer["doing"]
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
        attempts = f"{many(flight['attempts'], 'attempt')} in {duration(flight['age_s'])}"
        yield "frozen transaction", f"{flight['transaction_id']}, {attempts}"
    if most := answer["isolating"]:
        yield "isolating", f"at most {many(most, 'item')} at once"
    for sentence in answer["held"]:
        yield "held", sentence
    yield "paused", answer["paused"]
    if answer["paused"] is not None:
        yield "paused by", answer["paused_by"]
        yield "paused at", moment(answer["paused_ts"])
        yield "paused until", moment(answer["paused_until_ts"]) or "an operator resumes it"
    yield "parked", answer["parked"]
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


def fates(entries: Sequence[Answer]) -> Sheet:
    """The fate of an event, server by server."""
    sheet = Sheet(
        Column("SERVER"),
        Column("OUTCOME"),
        Column("WHEN", 2),
        Column("TRANSACTION", 4),
        Column("FAILED", 3),
        Column("MORE", 1, 20),
    )
    for entry in entries:
        sheet.add(
            entry["destination"],
            entry["outcome"],
            moment(entry["at_ts"]),
            entry["transaction_id"],
            entry["attempts"] or None,
            entry["reason"],
        )
    return sheet


def attempts(entries: Iterable[Answer]) -> Sheet:
    """The attempts at one server."""
    sheet = Sheet(
        Column("WHEN"),
        Column("TRANSACTION", 4),
        Column("TRY", 3),
        Column("PDUS", 2),
        Column("EDUS", 2, 20),
        Column("OUTCOME"),
        Column("TOOK", 2),
        Column("REASON", 1, 26),
    )
    for entry in entries:
        sheet.add(
            moment(entry["at_ts"]),
            entry["transaction_id"],
            entry["attempt"] or None,
            entry["pdus"],
            ", ".join(f"{number} {name}" for name, number in entry["edu_types"].items()) or 0,
            _outcome(entry),
            took(entry["took_ms"]),
            entry["reason"] or None,
        )
    return sheet


def took_in_short(entries: Sequence[Answer]) -> str:
    """How many of these attempts were delivered, and how long those took."""
    times = sorted(entry["took_ms"] for entry in entries if entry["outcome"] == "delivered")
    said = f"{len(times):,} of {many(len(entries), 'attempt')} delivered"
    if times:
        shares = (f"p{each} {took(times[(len(times) - 1) * each // 100])}" for each in (50, 95))
        said += f" in {', '.join(shares)}, at most {took(times[-1])}"
    return said


def attempt(entry: Answer) -> str:
    """One attempt in one line."""
    carried = f"{many(entry['pdus'], 'PDU')} {many(entry['edus'], 'EDU')}"
    reason = f": {entry['reason']}" if entry["reason"] else ""
    said = f"{moment(entry['at_ts'])} {entry['destination']} {_outcome(entry)}, {carried},"
    return f"{said} {took(entry['took_ms'])}, {entry['transaction_id'] or '-'}{reason}"


def _outcome(entry: Answer) -> str:
    status = "" if entry["status"] is None else f" {entry['status']}"
    refused = f", {many(entry['refused'], 'PDU')} refused" if entry["refused"] else ""
    return f"{entry['outcome']}{status}{refused}"


def quarantine(entries: Iterable[Answer]) -> Sheet:
    """The items in quarantine."""
    sheet = Sheet(
        Column("ID"),
        Column("SERVER"),
        Column("WHAT", 2),
        Column("EVENT", 3),
        Column("ROOM", 5),
        Column("SINCE", 4),
        Column("REASON", 1, 26),
    )
    for entry in entries:
        sheet.add(
            entry["id"],
            entry["destination"] or "every server",
            entry["kind"],
            entry["event_id"],
            entry["room_id"],
            moment(entry["at_ts"]),
            entry["reason"],
        )
    return sheet


def policy(lines: "Iterable[PolicyLine]") -> Sheet:
    """The settings for one server, each with the line of the configuration that sets it."""
    sheet = Sheet(Column("SETTING"), Column("VALUE"), Column("SET BY"))
    for line in lines:
        sheet.add(line.field, line.text, line.source)
    return sheet
