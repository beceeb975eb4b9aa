"""What the README and the docs name exists: files, commands, settings."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests import log_events
from tests.pages import PAGES, ROOT, nothing_wrong, shown
from typer.core import TyperGroup

from fedsender import limits, runtime, tls
from fedsender.admin import page
from fedsender.cli import app
from fedsender.config import LEAST_SECRET, Federation, Policy, Sending
from fedsender.config.sections import Ledger
from fedsender.federation import client, dialing, discovery, places, transport
from fedsender.http import server
from fedsender.replication import resp
from fedsender.sender import admission, isolation
from fedsender.sender.destination import QUARANTINE_LIMIT
from fedsender.sender.failure import Outcome
from fedsender.store import tables
from fedsender.telemetry import Metrics, Standing
from fedsender_lab import bench
from fedsender_lab.simulation import coverage
from fedsender_relay import line_server
from fedsender_relay.protocol import MAX_LINE_BYTES

BY_ARGUMENT = {"simulate", "bench"}
"""Commands that parse the rest of the line themselves."""


COMMAND = r"`fedsender ([^`]+)`|^ {4}(?:.*[ /])?fedsender (.+)$"
"""Where a page shows a command: the words after `fedsender`."""


@cache
def whole_command() -> Any:
    return typer.main.get_command(app)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and the rest of them."""
    command = whole_command()
    rest = list(words)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        found = command.commands.get(rest[0].rstrip(",;:."))
        if found is None:
            break
        command = found
        rest.pop(0)
    return command, rest


def wrong_in(words: list[str]) -> Iterator[str]:
    """What these words of a command line name and no command has."""
    command, rest = command_of([word for word in words if word not in ("|", "...")])
    if command.name == whole_command().name:
        yield "no command"
    if command.name in BY_ARGUMENT or command.name == "pipeline":
        return
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for word in rest:
        option = re.match(r"\[?(--[a-z-]+)", word)
        if option is not None and option[1] not in {*known, "--help"}:
            yield option[1]


def test_commands_and_their_options_exist() -> None:
    nothing_wrong(
        f"{place} shows {found[0].strip()}: {wrong}"
        for place, found in shown(COMMAND, *PAGES)
        for wrong in wrong_in((found[1] or found[2]).split())
    )


def test_commands_that_open_the_databases_run_as_the_user_of_the_unit() -> None:
    """On the pages for root, whom PostgreSQL need not let in."""
    opens = r"^ *(?:[^`\n]* )?fedsender (?:db|senders|hand-back|config check) .*$"
    pages = ("backup", "clusters", "operations", "switching", "switching-single")
    blocks = r"^( *)```(?:sh)?\n((?s:.*?))^\1```$|^((?: {4}.*\n)+)"
    nothing_wrong(
        f"{place} runs as root: {command[0].strip()}"
        for place, block in shown(blocks, *(ROOT / f"docs/{page}.md" for page in pages))
        for command in re.finditer(opens, block[2] or block[3], re.M)
        if "runuser -u " not in command[0]
    )


def test_benchmarks_exist() -> None:
    nothing_wrong(
        f"{place} names bench {found[1] or found[2]}"
        for place, found in shown(r"\bfedsender bench ([a-z][\w-]*)|\| `bench ([\w-]+)", *PAGES)
        if (found[1] or found[2]) not in bench.BENCHES
    )
    nothing_wrong(
        f"{place} runs tests.benchmarks.{found[1]}"
        for place, found in shown(r"python -m tests\.benchmarks\.(\w+)", *PAGES)
        if not (ROOT / f"tests/benchmarks/{found[1]}.py").exists()
    )


@cache
def headings_of(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_and_files_exist() -> None:
    nothing_wrong(
        f"{place} links to {found[0]}"
        for place, found in shown(r"\]\(([^)#]*)#?([^)]*)\)", *PAGES)
        if "://" not in found[1] and not is_there(ROOT / place.partition(":")[0], *found.groups())
    )
    nothing_wrong(
        f"{place} names {found[1]}"
        for place, found in shown(r"`((?:src|tests|docs|alembic)/[\w./-]+)`", *PAGES)
        if not (ROOT / found[1]).exists()
    )


def is_there(page: Path, target: str, heading: str) -> bool:
    """Whether what a page links to exists, and has the heading, if one is named."""
    linked = page.parent / target if target else page
    return linked.exists() and (not heading or heading in headings_of(linked))


def test_no_page_says_what_another_says() -> None:
    """As far as that can be counted: no fourteen words of one, commands aside, are in another."""
    said: dict[tuple[str, ...], Path] = {}
    twice = {}
    for each in PAGES:
        prose = re.sub(
            r"^ *```(?s:.*?)^ *```|^ {4}.*$|\]\([^)]*\)", "", each.read_text(), flags=re.M
        )
        words = re.findall(r"[\w'.-]+", prose)
        for run in zip(*(words[at:] for at in range(14)), strict=False):
            if said.setdefault(run, each) != each:
                twice[said[run], each] = " ".join(run)
    nothing_wrong(f"{one.name} and {other.name}: {words}" for (one, other), words in twice.items())


def test_settings_in_yaml_blocks_exist() -> None:
    """The top level of every YAML block that is ours is a section or setting of the example."""
    known = set(yaml.safe_load((ROOT / "config.example.yaml").read_text()))
    nothing_wrong(
        f"{place} sets {sorted(set(document) - known)}"
        for place, found in shown(r"```yaml\n((?s:.*?))```", *PAGES)
        if not re.match(r"\s*#.*Synapse", found[1])
        for document in yaml.safe_load_all(found[1])
        if isinstance(document, dict) and not set(document) <= known
    )


def settings_of(document: Any, before: str = "") -> Iterator[str]:
    """The dotted names of all settings, and of all sections."""
    for name, value in document.items() if isinstance(document, dict) else ():
        yield before + name
        yield from settings_of(value, f"{before}{name}.")


def test_dotted_names_of_settings_exist() -> None:
    """But in the changelog, which also has those that are gone."""
    example = yaml.safe_load((ROOT / "config.example.yaml").read_text())
    # The pages call it by its short name.
    example["backoff"] = example["destinations"]["defaults"]["backoff"]
    sections = "|".join(name for name, value in example.items() if isinstance(value, dict))
    known = {*settings_of(example), *map(str, tables.homeserver.tables["destinations"].columns)}
    nothing_wrong(
        f"{place} names {found[1]}"
        for place, found in shown(rf"`((?:{sections})\.(?!py`)[a-z_.]+)[`:]", *PAGES)
        if found[1] not in known and not place.startswith("docs/changelog.md")
    )


def test_numbers_of_the_security_page_are_those_of_the_code() -> None:
    """Whoever changes one of them says so there."""
    security = " ".join((ROOT / "docs/security.md").read_text().split())
    bounds, web = transport.Bounds(0), discovery.WELL_KNOWN_BOUNDS
    federation, sending, ledger = Federation(), Sending(), Ledger()
    kib, mib = 2**10, 2**20
    for text in (
        f"{transport.longest_answer(0) // kib} KiB and"
        f" {transport._ANSWER_BYTES_PER_PDU // kib} KiB more",
        f"{transport._PARTS:,} of the characters `[` `{{` `,` and {transport._PARTS_PER_PDU} more",
        f"{bounds.framing_bytes // kib} KiB in all and {bounds.headers} headers;"
        f" {transport._PIECE_BYTES} bytes at least are counted for each piece",
        f"{tls.MAX_HANDSHAKE_CPU_S * 1000:.0f} ms of CPU time (usual: 4) or"
        f" {tls.MAX_HANDSHAKE_BYTES // kib} KiB of certificates",
        f"{tls.MAX_TLS_RECORDS} records, {tls.MAX_TLS_BYTES // kib} KiB, without data between two"
        f" requests, and {tls.MAX_SMALL_PIECES} pieces of less than {tls.SMALL_PIECE_BYTES} bytes",
        f"{tls.MAX_TLS_RECORDS} records or {tls.MAX_TLS_BYTES // kib} KiB without data between two"
        " answers",
        f"{transport._COUNTED_BYTES // mib} MiB over all connections, beyond the first"
        f" {transport._UNCOUNTED_BYTES // kib} KiB of each",
        f"`request_timeout` ({Policy().request_timeout:.0f} s)",
        f"{transport._MAX_REFUSED} are kept, of PDUs that were in the transaction,"
        f" {transport._MAX_ERROR_BYTES} bytes each",
        f"{web.body_bytes // kib} KiB of body, {web.framing_bytes // kib} KiB of headers,"
        f" {web.headers} headers, {transport._MAX_REDIRECTS} redirects of"
        f" {transport._MAX_LOCATION:,} bytes (https only), {client._WELL_KNOWN_S:.0f} s in all",
        f"At most {discovery.MAX_CANDIDATES} addresses of a server are tried, of at most"
        f" {discovery.MAX_SRV_TARGETS} SRV targets and {discovery.MAX_RECORDS} records"
        f" of {discovery.MAX_RECORD_BYTES // kib} KiB. A DNS answer of more than"
        f" {runtime.MAX_DNS_BYTES // kib} KiB, {runtime.MAX_DNS_RECORDS} records or"
        f" {runtime.MAX_DNS_LABELS} labels to follow is ignored",
        f"{limits.MAX_CONNECTING:,} sockets are connecting, each server has one address tried",
        f"{client._PLACES} look-ups run at once, each for at most {client._LOOKUP_S:.0f} s",
        f"waited for {places.PATIENCE_S:.0f} s, it gives up its place",
        f"one of {client._PLACES // 2} slow places, at most {places.PER_SITE} of them",
        f"up to {client._PLACES + client._PLACES // 2} questions at once",
        f"{client._CACHE_ENTRIES:,} answers in all",
        f"`sending.max_in_flight` ({sending.max_in_flight:,}) in all",
        f"{limits.IN_FLIGHT_BYTES // mib} MiB in all, and"
        f" {admission._LEAST_BYTES // kib} KiB for each",
        f"`federation.max_connections` ({federation.max_connections:,})",
        f"({sending.handshakes_per_second:.0f}) new ones; {dialing.CONNECT_S:.0f} s to"
        f" connect, {dialing.HANDSHAKE_S:.0f} s for TLS",
        f"({sending.queue_pdus:,}) for each, `sending.window_bytes`"
        f" ({sending.window_bytes // mib} MiB) for all",
        f"{ledger.keep / 86_400:.0f} days, {ledger.keep_bytes // 2**30} GiB",
        f"no server is attempted for {admission.LACK_S:.0f} s",
        f"up to {isolation.WITNESSES} of them; at most {QUARANTINE_LIMIT:,} items of one server",
        f"1 in {1 / isolation.CHANCE:,.0f}",
        f"fewer than {LEAST_SECRET} characters",
        f"{server.OPERATORS.connections} connections, HTTP/1.1 only; headers of"
        f" {server.HEAD_BYTES // kib} KiB within {server.HEAD_SECONDS:.0f} s; a body of"
        f" {server.OPERATORS.body_bytes // mib} MiB within {server.BODY_SECONDS:.0f} s;"
        f" {server.OPERATORS.requests} requests with a token at once,"
        f" {server.REQUEST_SECONDS:.0f} s each, with {server.LARGE_BYTES // mib} MiB of bodies"
        f" beyond the first {server.SMALL_BODY // kib} KiB of each;"
        f" {server.SEND_SECONDS:.0f} s to read each 64 KiB",
        f"| {page.SESSION_SECONDS // 3600} h, in memory alone;",
        f"There are {page.MAX_SESSIONS}; one more",
        f"{page.WRONG_TOKENS} within {page.WRONG_SECONDS:.0f} s",
        f"| {page.LOGIN_BYTES // kib} KiB, compared",
        f"a drain waits {server.GRACE_SECONDS:.0f} s",
        f"a `Host` of any name; at most {server.PROBES.connections} connections",
        f"lines of {MAX_LINE_BYTES // kib} KiB, Redis replies of"
        f" {resp.MAX_BULK // mib} MiB, {line_server.MAX_CONNECTIONS} clients",
    ):
        assert text in security, text


def rows_of_metrics() -> list[str]:
    """The rows of the table of metrics: name as Prometheus stores it, type, labels, meaning."""
    metrics = Metrics("hs.example")
    labels = {each._name: each._labelnames for each in metrics._registry._collector_to_names}  # type: ignore[attr-defined]
    rows = []
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        if family.name.startswith("process_"):
            continue
        name = family.name + "_total" * (family.type == "counter")
        own = labels.get(family.name)
        if own is None:
            own = [label for label in family.samples[0].labels if label != "server_name"]
        shown = ", ".join(f"`{label}`" for label in own)
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return rows


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    """When this fails: put the rows of `rows_of_metrics` into the page."""
    section = (ROOT / "docs/admin.md").read_text().split("\n## Metrics\n")[1]
    shown = re.findall(r"^\| `(?:fedsender|synapse)_.*$", section, re.M)
    assert shown == rows_of_metrics()


def named_in(page: str, header: str) -> set[str]:
    """The words in the first column of the first table with this header."""
    table = (ROOT / page).read_text().split(f"{header}\n", 1)[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[1:]]
    return {word for cell in cells for word in re.findall("`([^`]+)`", cell)}


def test_whatever_lists_the_outcomes_or_the_states_lists_them_all() -> None:
    """When this fails: write the new outcome, or the new state, there."""
    outcomes = {outcome.value for outcome in Outcome}
    states = {state.value for state in Standing}
    ends = named_in("docs/states.md", "| outcome | when | what follows |")
    stands = named_in("docs/states.md", "| state | meaning |")
    script = (ROOT / "src/fedsender/admin/web/page.js").read_text()
    words = script.split("const WORDS = {")[1].split("};")[0]
    marked = set(re.findall(r"([a-z][\w ]*)\"?: \[", words))
    # It brings each of them about; a rejected item by poison.
    simulated = {outcome.value for outcome in (*coverage.OUTCOMES, Outcome.REJECTING)}
    lacks = {
        "docs/states.md, How an attempt ends": outcomes - ends,
        "docs/states.md, States of a server": states - stands,
        "admin/web/page.js, WORDS": (outcomes | {at.replace("_", " ") for at in states}) - marked,
        "simulation/coverage.py, OUTCOMES": outcomes - simulated,
    }
    nothing_wrong(f"{place} lacks {word}" for place, words in lacks.items() for word in words)


def test_each_command_stands_in_a_page() -> None:
    """As `fedsender NAME`, or as `NAME` after another command of its row."""
    said = "\n".join(page.read_text() for page in PAGES)
    nothing_wrong(
        f"no page shows {name}"
        for name in commands_of(whole_command())
        if not re.search(rf"[`/ ]{name}(?![\w-])", said)
    )


def commands_of(group: Any, before: str = "") -> Iterator[str]:
    """The names of all commands, each with those of its groups."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands_of(command, f"{before}{name} ")
        elif not command.hidden:
            yield f"{before}{name}"


def test_metrics_exist() -> None:
    known = {row.split("`")[1] for row in rows_of_metrics()}
    nothing_wrong(
        f"{place} names {found[1]}"
        for place, found in shown(r"`(fedsender_\w+_(?:total|seconds|items|rooms))`", *PAGES)
        if found[1] not in known
    )


def test_the_page_of_the_log_has_every_event_of_the_code() -> None:
    """When this fails: `python -m tests.log_events docs/log.md`, and a remark if needed."""
    page = (ROOT / "docs/log.md").read_text()
    remarks = dict(log_events.ROW.findall(page))
    assert re.findall(r"^\| `.*$", page, re.M) == log_events.rows(remarks)


def test_events_of_the_log_are_of_one_dialect() -> None:
    for name, event in log_events.log_events().items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name), name
        assert event.levels, name
        # One name for one thing.
        assert not event.fields & {"error", "n", "number", "room_id", "event"}, name
