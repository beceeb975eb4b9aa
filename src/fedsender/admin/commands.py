"""The operator's commands: their requests to a running daemon, and the printed answers.

All of them go through the admin endpoint. Its address and token stand in the configuration.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fedsender.console import (
    Mistake,
    json_line,
    safe,
    say,
    say_answer,
    say_json,
    say_live,
    show,
    wait_for_reader_to_leave,
)

if TYPE_CHECKING:
    from fedsender.admin.client import AdminClient
    from fedsender.config import Config

__all__ = [
    *(
        "DONE",
        "USAGE",
        "WRONG",
        "AsJson",
        "ConfigFile",
        "Server",
        "app",
        "known_servers",
    ),
]

DONE: Final = 0
WRONG: Final = 1
USAGE: Final = 2
"""Exit codes: done; it ran and found something wrong; usage or configuration."""

PAIRS_AT_ONCE: Final = 1_000
OUTCOMES_AT_ONCE: Final = 1_000
TAIL_SECONDS: Final = 0.25
"""Between two looks of `tail` at the ledger."""

LISTED: Final = 100
"""Rows of a list of servers that nobody limited."""

COMPLETION_SECONDS: Final = 0.5
"""For the connection to the daemon, and again for its answer, while a shell waits for names."""
COMPLETIONS: Final = 50


def known_servers(context: typer.Context, incomplete: str) -> list[str]:
    """The servers that begin so, those owed most first; none if the daemon does not answer.

    The configuration is that of the line so far, or of the environment.
    """
    from fedsender.admin.client import AdminClient, AdminError
    from fedsender.config import ConfigError, load

    config = context.params.get("config")
    if config is None:
        return []
    try:
        client = AdminClient.of(load(config), timeout=COMPLETION_SECONDS)
        asked = {"pattern": f"{incomplete}*", "sort": "owed", "limit": COMPLETIONS}
        page = client.get("destinations", **asked)
    except (AdminError, ConfigError):
        return []
    names = [entry["destination"] for entry in page["destinations"]]
    # Of a part of the names a shell would type what they have in common, and all do not.
    return names if page["next_from"] is None else [*names, incomplete]


app = typer.Typer()
quarantine_app = typer.Typer(help="What was taken out of the way.")
app.add_typer(quarantine_app, name="quarantine")

ConfigFile = Annotated[
    Path,
    typer.Option(
        "-c", "--config", envvar="FEDSENDER_CONFIG", metavar="FILE", help="The daemon's YAML file."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Server = Annotated[str, typer.Argument(autocompletion=known_servers)]
ServersGiven = Annotated[
    list[str] | None, typer.Argument(metavar="[SERVER]...", autocompletion=known_servers)
]
Pattern = Annotated[str | None, typer.Option(metavar="GLOB", help="Every server it covers.")]
Reason = Annotated[str | None, typer.Option(help="Shown wherever the servers' state is.")]
Ids = Annotated[list[int] | None, typer.Argument(metavar="[ID]...")]
Room = Annotated[
    str | None,
    typer.Option(
        metavar="ROOM", help="All that block this room, in order; it goes on behind them."
    ),
]


def _client(config: Path) -> "AdminClient":
    from fedsender.admin.client import AdminClient
    from fedsender.config import load

    return AdminClient.of(load(config))


# --- looking --------------------------------------------------------------------------------------


@app.command()
def destinations(
    config: ConfigFile,
    behind: Annotated[bool, typer.Option("--behind", help="Only those owed something.")] = False,
    pattern: Annotated[str, typer.Option(metavar="GLOB", help="Only those it covers.")] = "*",
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    sort: Annotated[str, typer.Option(help="name, owed, age or fails.")] = "name",
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only those that began to fail since, the latest first: 10m, or 2026-11-24T03:00.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=f"At most so many; {LISTED} without it, JSON: all."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(metavar="error|site|address", help="Count servers in place of a list."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List the destinations; say why the daemon is not ready, if it is not."""
    from fedsender.admin import display

    if by not in (None, "error", "site", "address"):
        raise Mistake("--by takes `error`, `site` or `address`")
    if by in ("site", "address"):
        if behind or state is not None or since or sort != "name":
            raise Mistake(f"--by {by} takes --pattern and --limit only")
        found = _client(config).get("groups", by=by, pattern=pattern, limit=limit or LISTED)
        if as_json:
            say_json(found)
        else:
            show(display.by_group(by, found["groups"]))
            _say_cut(len(found["groups"]), found["total"])
        return DONE
    filtered = behind or pattern != "*" or state is not None or limit is not None or since
    if by is not None and (filtered or sort != "name"):
        raise Mistake("--by error counts all failing servers; it takes no filter and no order")
    client = _client(config)
    for reason in client.problems():
        say(f"fedsender: not ready: {reason}", error=True)
    if by is not None:
        failing = client.get("overview", limit=1)["failing_by_age"]
        if as_json:
            say_json(failing)
        else:
            show(display.by_error(failing))
        return DONE
    if since is not None and sort == "name":
        sort = "fails"
    limit = limit if limit is not None or as_json else LISTED
    page: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    for page in client.pages(
        "destinations",
        behind="true" if behind else "false",
        pattern=pattern,
        state=state,
        sort=sort,
        since=0 if since is None else _since_ms(since),
        limit=min(1000, limit or 1000),
    ):
        entries += page["destinations"]
        if limit is not None and len(entries) >= limit:
            break
    _warn_missing(page)
    entries = entries[:limit]
    if as_json:
        for entry in entries:
            say_json(entry)
        return DONE
    if entries:
        show(display.destinations(entries))
    else:
        say("none")
    _say_cut(len(entries), page["total"])
    say(display.footer(page))
    return DONE


def _say_cut(shown: int, total: int) -> None:
    if total > shown:
        say(f"the first {shown:,} of {total:,}; --limit N shows more")


@app.command()
def status(config: ConfigFile, as_json: AsJson = False) -> int:
    """Show the daemon at a glance; exit code 1 if it is not ready."""
    from fedsender.admin import display

    answer = _client(config).get("overview", behind="true", sort="age", limit=5)
    if as_json:
        say_json(answer)
    else:
        show(*display.head(answer))
    return DONE if answer["ready"] else WRONG


@app.command()
def top(
    config: ConfigFile,
    sort: Annotated[str, typer.Option(help="name, owed, age or fails.")] = "age",
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    pattern: Annotated[str, typer.Option(metavar="GLOB", help="Only those it covers.")] = "*",
) -> int:
    """Watch the daemon: the overview and those behind, drawn anew each second until Ctrl-C."""
    from fedsender.admin.top import watch

    return DONE if watch(_client(config), sort=sort, state=state, pattern=pattern) else WRONG


@app.command()
def why(server: Server, config: ConfigFile, as_json: AsJson = False) -> int:
    """Say why a destination is where it is."""
    from fedsender.admin import display

    answer = _client(config).get("why", server)
    if as_json:
        say_json(answer)
    else:
        show(display.why(answer))
    return DONE


@app.command()
def trace(event_id: str, config: ConfigFile, as_json: AsJson = False) -> int:
    """Print the fate of an event at every server."""
    from fedsender.admin import display

    answer = _client(config).get("trace", event_id)
    _warn_missing(answer)
    if as_json:
        say_json(answer)
        return DONE
    for line in display.trace_facts(answer):
        say(line)
    if answer["destinations"]:
        show(display.fates(answer["destinations"]))
    return DONE


@app.command()
def attempts(
    server: Server,
    config: ConfigFile,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="No older ones: 1h, or 2026-11-24T03:00 (in UTC)."),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The newest ones.")] = 100,
    as_json: AsJson = False,
) -> int:
    """List the attempts at a server, from the ledger; also if the daemon is stopped."""
    from fedsender.admin import display

    since_ms = 0 if since is None else _since_ms(since)
    answer = _attempts(config, server, since_ms, failed=failed, limit=limit)
    _warn_missing(answer)
    if answer["cut"] is not None:
        say(f"fedsender: {answer['cut']}", error=True)
    if as_json:
        for entry in answer["attempts"]:
            say_json(entry)
    elif answer["attempts"]:
        show(display.attempts(answer["attempts"]))
        say(display.took_in_short(answer["attempts"]))
        if answer["ledgers"]:
            from_them = (f"{name} ({host})" for name, host in answer["ledgers"].items())
            say(f"from the ledgers of {', '.join(from_them)}")
    else:
        say(f"no such attempt at {server} in the ledger")
    return DONE


def _attempts(
    config: Path, server: str, since_ms: int, *, failed: bool, limit: int
) -> dict[str, Any]:
    """The daemon's answer; without a daemon, that of the ledger's files."""
    from dataclasses import asdict

    from fedsender.admin.attempts import read_attempts
    from fedsender.admin.client import AdminClient, AdminError
    from fedsender.config import load
    from fedsender.matrix import is_server_name

    if not is_server_name(server):
        raise Mistake(f"{server[:300]!r} is not a server name")
    loaded = load(config)
    asked = {"since": since_ms, "failed": "true" if failed else "false", "limit": limit}
    try:
        return AdminClient.of(loaded).get("attempts", server, **asked)
    except AdminError as error:
        if not isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            raise
    directory = loaded.ledger.directory
    found = read_attempts(directory, server, since_ms=since_ms, failed=failed, limit=limit)
    say(f"fedsender: no daemon answers; this is from {directory}", error=True)
    return asdict(found)


@app.command()
def tail(
    config: ConfigFile,
    pattern: Annotated[str, typer.Argument(metavar="[GLOB]", help="Only these servers.")] = "*",
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed.")] = False,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="CURSOR",
            help="With --json: what became of each event, from there on; oldest: from the first.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Print attempts as they end, one a line, until Ctrl-C or until nobody reads them.

    With `--json --since CURSOR`, an object for each event and attempt from there on. Each has
    the `cursor` from which to go on after it: what follows may come again, and none is left out.
    """
    from dataclasses import asdict

    from fedsender.admin import display
    from fedsender.admin.attempts import follow
    from fedsender.config import load

    loaded = load(config)
    directory = loaded.ledger.directory
    if str(loaded.sender_database).startswith("postgresql"):
        _say_whose_lines(loaded)
    if since is not None:
        if not as_json:
            raise Mistake("--since goes with --json")
        return _tail_outcomes(directory, loaded.instance_name, since, pattern, failed=failed)
    with suppress(KeyboardInterrupt):
        for attempt in follow(directory, loaded.instance_name, pattern, failed=failed):
            if attempt is None:
                if wait_for_reader_to_leave(TAIL_SECONDS):
                    break
                continue
            entry = asdict(attempt)
            if not say_live(json_line(entry) if as_json else display.attempt(entry)):
                break
    return DONE


def _say_whose_lines(loaded: "Config") -> None:
    """Say where the lines of the other senders are, if the daemon knows."""
    from fedsender.admin.client import AdminClient, AdminError

    with suppress(AdminError):
        senders = AdminClient.of(loaded).get("overview", limit=1)["senders"]
        others = [
            f"{name} ({host})" for name, host in senders.items() if name != loaded.instance_name
        ]
        if others:
            say(f"fedsender: the lines of others are with {', '.join(others)}", error=True)


def _tail_outcomes(
    directory: "Path", instance: str, since: str, pattern: str, *, failed: bool
) -> int:
    """Print the outcomes of events from a cursor on, as `tail` does; 1: there is a gap."""
    from fedsender.matrix import matches
    from fedsender.outcomes import BadCursor, Cursor, Gap, read_page

    try:
        cursor = None if since == "oldest" else Cursor.parse(since)
    except BadCursor as bad:
        raise Mistake(f"--since: {bad}") from None
    with suppress(KeyboardInterrupt):
        while True:
            try:
                page = read_page(directory, instance, cursor, limit=OUTCOMES_AT_ONCE)
            except Gap as gap:
                begins = f"; it begins at {gap.oldest}" if gap.oldest else ""
                say(f"fedsender: tail: --since: {gap}{begins}", error=True)
                return WRONG
            before, cursor = cursor, page.cursor
            for left, entry in zip(reversed(range(len(page.outcomes))), page.outcomes, strict=True):
                if failed and entry["outcome"] == "delivered":
                    continue
                if not matches(pattern, entry["server"]):
                    continue
                on_from = before or "oldest" if left else cursor
                if not say_live(json_line(entry | {"cursor": str(on_from)})):
                    return DONE
            if page.at_end and wait_for_reader_to_leave(TAIL_SECONDS):
                return DONE
    return DONE


def _since_ms(text: str) -> int:
    """Milliseconds since the epoch, of a duration before now or of a time."""
    from datetime import UTC, datetime

    from fedsender.config.values import parse_duration
    from fedsender.runtime import real_runtime

    with suppress(ValueError):
        return max(0, real_runtime().now_ms() - round(parse_duration(text) * 1000))
    try:
        at = datetime.fromisoformat(text)
        at_ms = round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        at_ms = -1
    if at_ms < 0:
        raise Mistake(
            f"--since {text[:100]!r}: must be a duration such as 2h, or a time such as"
            " 2026-11-24T03:00"
        )
    return at_ms


# --- quarantine -----------------------------------------------------------------------------------


@quarantine_app.command("list")
def quarantine_list(
    config: ConfigFile,
    server: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of this one only.", autocompletion=known_servers),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List the items in quarantine."""
    from fedsender.admin import display

    pages = _client(config).pages("quarantine", destination=server, limit=1000)
    entries = (item for page in pages for item in page["items"])
    if as_json:
        for entry in entries:
            say_json(entry)
    elif found := list(entries):
        show(display.quarantine(found))
    else:
        say("nothing in quarantine")
    return DONE


@quarantine_app.command("release")
def quarantine_release(
    config: ConfigFile, ids: Ids = None, room: Room = None, as_json: AsJson = False
) -> int:
    """Send quarantined PDUs after all."""
    answer = _free(config, "release", ids, room)
    kept = [f"still in quarantine: {_listed(answer['kept'])}"] if answer["kept"] else []
    if kept and room is not None:
        number = answer["kept"][0]
        kept = [
            f"still in quarantine: {number}, and what waits behind it; "
            f"`fedsender quarantine drop {number}` gives it up, then release the room again"
        ]
    gone = [f"dropped: {_listed(answer['dropped'])}"] if answer["dropped"] else []
    said = [f"released: {_listed(answer['released'])}", *_refused(answer), *gone, *kept]
    say_answer(answer, as_json, *said, *_missing(answer))
    return WRONG if kept or _missing(answer) else DONE


@quarantine_app.command("drop")
def quarantine_drop(
    config: ConfigFile, ids: Ids = None, room: Room = None, as_json: AsJson = False
) -> int:
    """Give quarantined items up for good."""
    answer = _free(config, "drop", ids, room)
    say_answer(answer, as_json, f"dropped: {_listed(answer['dropped'])}", *_missing(answer))
    return WRONG if _missing(answer) else DONE


def _free(config: Path, verb: str, ids: list[int] | None, room: str | None) -> dict[str, Any]:
    """The daemon's answer for these items, or for all that block a room, one part after the other.

    What has left quarantine stays so if this is cut off.
    """
    if bool(ids) == (room is not None):
        raise Mistake("name items by id, or give --room, and not both")
    client = _client(config)
    body: dict[str, object] = {"ids": ids} if ids else {"room_id": room}
    answer = client.post("quarantine", verb, body=body)
    more = answer.pop("more")
    while more:
        part = client.post("quarantine", verb, body=body)
        more = part.pop("more")
        for name, items in part.items():
            if name == "without":
                answer[name] = items
            else:
                answer[name] += items
    return answer


@app.command()
def skip(
    token: Annotated[int, typer.Argument(help="The one that /ready names.")],
    config: ConfigFile,
    as_json: AsJson = False,
) -> int:
    """Pass over the event that the fan-out stands at; it goes to quarantine."""
    answer = _client(config).post("skip", body={"token": token})
    said = f"skipped: {answer['event_id']} of {answer['room_id']}; {answer['stood_at']}"
    say_answer(answer, as_json, said)
    return DONE


# --- telling --------------------------------------------------------------------------------------


def _chosen(servers: list[str] | None, pattern: str | None) -> dict[str, object]:
    if bool(servers) == (pattern is not None):
        raise Mistake("name servers, or give --pattern, and not both")
    return {"servers": servers} if servers else {"pattern": pattern}


@app.command()
def wake(
    config: ConfigFile,
    servers: ServersGiven = None,
    pattern: Pattern = None,
    everyone: Annotated[bool, typer.Option("--all", help="Every server.")] = False,
    as_json: AsJson = False,
) -> int:
    """Try servers now instead of later."""
    if everyone and (servers or pattern is not None):
        raise Mistake("--all stands alone")
    body = _chosen(servers, "*" if everyone else pattern)
    answer = _client(config).post("notify_remote_server_up", body=body)
    left = (f"left alone: {server}: {reason}" for server, reason in answer["left_alone"].items())
    say_answer(answer, as_json, f"woken: {_listed(answer['woken'])}", *left, *_missing(answer))
    return WRONG if (servers and answer["left_alone"]) or _missing(answer) else DONE


@app.command()
def pause(
    config: ConfigFile,
    servers: ServersGiven = None,
    pattern: Pattern = None,
    lasting: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Until so long from now: 2h, 30m.")
    ] = None,
    reason: Reason = None,
    by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who says so; else the user's name.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Send nothing to servers for now; their backlog is kept."""
    more: dict[str, object] = {"by": _operator() if by is None else by}
    if lasting is not None:
        more["for_ms"] = _ms(lasting, "--for")
    return _hold(config, "pause", servers, pattern, reason, as_json, more)


def _operator() -> str | None:
    """The name of the user who runs this command, also behind sudo; None: there is none."""
    import getpass
    import os

    try:
        name = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return None
    return safe(name)[:100] or None


def _ms(text: str, option: str) -> int:
    """Milliseconds of a duration that was given to this option."""
    from fedsender.config.values import parse_duration

    try:
        return round(parse_duration(text) * 1000)
    except ValueError as error:
        raise Mistake(f"{option} {text[:100]!r}: {error}") from None


@app.command()
def park(
    config: ConfigFile,
    servers: ServersGiven = None,
    pattern: Pattern = None,
    reason: Reason = None,
    as_json: AsJson = False,
) -> int:
    """Give servers up until `resume`."""
    return _hold(config, "park", servers, pattern, reason, as_json)


@app.command()
def resume(
    config: ConfigFile,
    servers: ServersGiven = None,
    pattern: Pattern = None,
    as_json: AsJson = False,
) -> int:
    """Undo pause and park."""
    return _hold(config, "resume", servers, pattern, None, as_json)


def _hold(
    config: Path,
    verb: str,
    servers: list[str] | None,
    pattern: str | None,
    reason: str | None,
    as_json: bool,
    more: Mapping[str, object] | None = None,
) -> int:
    body = _chosen(servers, pattern) | ({} if reason is None else {"reason": reason})
    body |= more or {}
    answer = _client(config).post(verb, body=body)
    say_answer(answer, as_json, f"{verb}: {_listed(answer['servers'])}", *_missing(answer))
    return WRONG if _missing(answer) else DONE


@app.command()
def purge(
    server: Server,
    config: ConfigFile,
    force: Annotated[bool, typer.Option("--force", help="Also while rooms are shared.")] = False,
    as_json: AsJson = False,
) -> int:
    """Forget a server and all it is owed."""
    from fedsender.admin.client import AdminError

    try:
        answer = _client(config).post("purge", body={"server": server, "force": force})
    except AdminError as error:
        if rooms := error.answer.get("rooms"):
            more = error.answer["rooms_total"] - len(rooms)
            rest = f" and {more} more" if more else ""
            say(f"fedsender: {error}: {_listed(rooms)}{rest}", error=True)
            say("fedsender: with --force it is purged all the same", error=True)
            return WRONG
        raise
    say_answer(answer, as_json, f"purged: {answer['purged']}")
    return DONE


@app.command()
def redeliver(
    server: Server,
    config: ConfigFile,
    events: Annotated[list[str] | None, typer.Argument(metavar="[EVENT_ID]...")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="All its events since 2h ago, or 2026-11-24T03:00."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --since: only list the events.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Send events to a server again: some by their ids, or all since a time."""
    if bool(events) == (since is not None):
        raise Mistake("name events, or give --since, and not both")
    if since is not None:
        return _redeliver_since(config, server, _since_ms(since), dry_run=dry_run, as_json=as_json)
    if dry_run:
        raise Mistake("--dry-run goes with --since")
    assert events is not None
    pairs = [[server, event_id] for event_id in events]
    answer = _client(config).post("redeliver", body={"pairs": pairs})
    return _say_redelivered(answer, as_json)


def _redeliver_since(
    config: Path, server: str, since_ms: int, *, dry_run: bool, as_json: bool
) -> int:
    """Ask for one part after the other; what was accepted stays so if this is cut off."""
    from fedsender.admin import display

    client = _client(config)
    body: dict[str, object] = {"server": server, "since_ts": since_ms, "dry_run": dry_run}
    total, more = 0, True
    while more:
        part = client.post("redeliver_since", body=body)
        total += len(part["events"])
        for each in part["events"] if dry_run else ():
            if as_json:
                say_json(each)
            else:
                received = display.moment(each["received_ts"]) or "-"
                say(f"{received} {each['event_id']} {each['room_id']}")
        more = part["next_after"] is not None
        body |= {"after": part["next_after"], "upto": part["upto"]}
    if not as_json:
        say(f"would be sent again: {total}" if dry_run else f"accepted: {total}")
    elif not dry_run:
        say_json({"accepted": total, "refused": []})
    return DONE


def _missing(answer: Mapping[str, Any]) -> list[str]:
    """Of several senders those whose part is missing, a line each."""
    return [f"{name}: {why}" for name, why in answer.get("without", {}).items()]


def _warn_missing(answer: Mapping[str, Any]) -> None:
    for line in _missing(answer):
        say(f"fedsender: without {line}", error=True)


def _listed(names: Sequence[object]) -> str:
    return ", ".join(str(name) for name in names) or "none"


def _say_redelivered(answer: Mapping[str, Any], as_json: bool) -> int:
    said = f"accepted: {answer['accepted']}"
    say_answer(answer, as_json, said, *_refused(answer), *_missing(answer))
    return WRONG if answer["refused"] or _missing(answer) else DONE


def _refused(answer: Mapping[str, Any]) -> Iterator[str]:
    for each in answer["refused"]:
        yield f"refused: {each['destination']} {each['event_id']}: {each['reason']}"
