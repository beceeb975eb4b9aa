"""What became of events, read from the ledger by a cursor: each line once, in order, or a GAP."""

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from tests.lab.test_intake_client import ANY_PORT, TOKEN
from tests.service import PATIENCE_S, open_world
from trio.testing import MockClock

from fedsender import outcomes as module
from fedsender.admin import commands
from fedsender.cli import run_command
from fedsender.config.sections import Ledger as Settings
from fedsender.embedded.endpoint import PREFIX, Feedback, serve_intake
from fedsender.embedded.intake import Intake
from fedsender.ledger import Ledger, Line, SentPdu, TransactionRecord, open_ledger
from fedsender.outcomes import (
    MAX_READERS,
    BadCursor,
    Cursor,
    Gap,
    Outcomes,
    Page,
    TooMany,
    read_page,
)
from fedsender.runtime import Runtime, real_runtime
from fedsender.segments import segments
from fedsender.sender.registry import Progress
from fedsender.telemetry import Count
from fedsender_lab.intake_client import IntakeClient, OutcomesLost, Position
from fedsender_lab.testing.clock import inline, until

RUNTIME = real_runtime()
FED1 = "fed1"


@asynccontextmanager
async def opened(
    directory: Path, *, size: int = 2**20, keep: int = 2**40, runtime: Runtime = RUNTIME
) -> AsyncIterator[Ledger]:
    """One life of a daemon's ledger; all that it says is settled at once."""
    settings = Settings(directory=directory).model_copy(update={"keep_bytes": keep})
    boot_id = os.urandom(8).hex()
    async with open_ledger(settings, FED1, boot_id, runtime, Count(), segment_bytes=size) as ledger:
        ledger.close_torn()
        yield ledger


def tell(
    ledger: Ledger,
    *numbers: int,
    pdus: Sequence[SentPdu] | None = None,
    edus: Mapping[str, int] | None = None,
    **values: Any,
) -> None:
    """An answer of b.example for each of these events."""
    for number in numbers:
        pdu = SentPdu(f"$e{number}", "!r:hs", number, "live")
        record = TransactionRecord([pdu] if pdus is None else pdus, edus or {})
        line = Line(5, "b.example", "delivered", f"t{number}", 1, record, status=200)
        ledger.record(line._replace(**values))
        ledger.settled("b.example")


def tokens(page: Page) -> list[int]:
    return [each["token"] for each in page.outcomes]


def all_pages(directory: Path, after: Cursor | None = None, limit: int = 1) -> Iterator[Page]:
    while not (page := read_page(directory, FED1, after, limit)).at_end:
        yield page
        after = page.cursor
    yield page


async def test_each_event_of_an_attempt_has_its_outcome(tmp_path: Path) -> None:
    """A 200 that says no to one of them is no delivery of it. EDUs alone say nothing here."""
    async with opened(tmp_path) as ledger:
        pdus = [SentPdu("$a", "!r", 3, "catch_up", (1, 3)), SentPdu("$b", "!r", 4, "live")]
        tell(ledger, 1, pdus=pdus, refused={"$b": "not allowed"})
        tell(ledger, 1, pdus=(), edus={"m.typing": 1})
        tell(ledger, 5, outcome="failing", reason="answered 500", attempt=2)
        page = read_page(tmp_path, FED1, None, 100)
    said = {"server": "b.example", "ms": 5, "transaction_id": "t1"}
    no = {"reason": None, "supersedes": None}
    assert page.outcomes == [
        {**said, "event_id": "$a", "token": 3, "outcome": "delivered", **no, "supersedes": [1, 3]},
        {**said, "event_id": "$b", "token": 4, "outcome": "refused", **no, "reason": "not allowed"},
        {
            **said,
            "event_id": "$e5",
            "token": 5,
            "outcome": "failing",
            **no,
            "transaction_id": "t5",
            "reason": "answered 500",
        },
    ]


@pytest.mark.parametrize("size", [1, 700, 2**20])
async def test_a_cursor_goes_on_in_a_segment_and_in_the_next(tmp_path: Path, size: int) -> None:
    """Through restarts, and whatever the times of the files say."""
    after: Cursor | None = None
    got: list[int] = []
    for life in range(3):
        async with opened(tmp_path, size=size) as ledger:
            tell(ledger, *range(10 * life, 10 * life + 10))
            for path in segments(tmp_path):
                os.utime(path, (10**9 - life, 10**9 - life))
            for page in all_pages(tmp_path, after):
                got += tokens(page)
                after = page.cursor and Cursor.parse(str(page.cursor))
                if len(got) % 10 == 7:
                    break
    got += [token for page in all_pages(tmp_path, after) for token in tokens(page)]
    assert got == list(range(30))


async def test_what_a_crash_left_is_read_and_a_torn_line_is_not(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        tell(ledger, 1)
        (path,) = segments(tmp_path)
        with path.open("ab") as file:
            file.write(b'{"pdus": [')
        page = read_page(tmp_path, FED1, None, 100)
        assert (tokens(page), page.at_end) == ([1], True)
        # A disk that was full: the next line begins behind a line break.
        ledger._torn = True
        tell(ledger, 2)
        page = read_page(tmp_path, FED1, page.cursor, 100)
        assert tokens(page) == [2]
        with path.open("ab") as file:
            file.write(b'{"pdus": [')
        ledger._owe("c.example")
    # It was killed: the segment is open, and the next start cuts it.
    assert segments(tmp_path) == [path]
    async with opened(tmp_path) as ledger:
        assert read_page(tmp_path, FED1, page.cursor, 100) == Page([], page.cursor, True)
        tell(ledger, 3)
        assert tokens(read_page(tmp_path, FED1, page.cursor, 100)) == [3]


async def test_other_instances_and_other_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / f"{FED1}.old.000001.jsonl").write_bytes(b'no json\n[1]\n"x"\n{"v": 1}\n')
    (tmp_path / "fed2.old.000001.jsonl").write_bytes(b'{"pdus": 1}\n')
    async with opened(tmp_path) as ledger:
        tell(ledger, 1)
        assert tokens(read_page(tmp_path, FED1, None, 100)) == [1]


async def test_a_reader_below_what_is_kept_is_told_gap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """And where the ledger begins now; one that is in what is kept goes on."""
    run_inline = replace(RUNTIME, run_sync=inline)
    async with opened(tmp_path, size=1000, keep=4000, runtime=run_inline) as ledger:
        tell(ledger, 0)
        early = read_page(tmp_path, FED1, None, 100).cursor
        for number in range(1, 100):
            tell(ledger, number)
            await trio.sleep(1)
        with pytest.raises(Gap) as gap:
            read_page(tmp_path, FED1, early, 100)
        kept = tokens(read_page(tmp_path, FED1, gap.value.oldest, 100))
        assert kept == list(range(kept[0], 100))
        assert 0 < len(kept) < 20
        assert kept == tokens(read_page(tmp_path, FED1, None, 100))


async def test_a_cursor_of_another_ledger_is_told_gap(tmp_path: Path) -> None:
    with pytest.raises(Gap) as gap:
        read_page(tmp_path, FED1, Cursor("b00t", 1), 1)
    assert gap.value.oldest is None
    async with opened(tmp_path) as ledger:
        tell(ledger, 1)
        at = read_page(tmp_path, FED1, None, 1).cursor
        assert at is not None
        for other in (replace(at, boot_id="x"), replace(at, number=9), replace(at, offset=10**6)):
            with pytest.raises(Gap) as gap:
                read_page(tmp_path, FED1, other, 1)
            assert gap.value.oldest == replace(at, offset=0)


@pytest.mark.parametrize("text", ["", "x", "a-1", "a-1-2-3", "a-b-1", "a-1-", "a-1-²", "a-1--1"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(BadCursor):
        Cursor.parse(text)


async def test_an_answer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By events, to whole attempts; by bytes read; and a line that is too long by neither."""
    async with opened(tmp_path) as ledger:
        three = [SentPdu(f"$x{number}", "!r", number, "live") for number in (1, 2, 3)]
        tell(ledger, 1, pdus=three)
        tell(ledger, *range(4, 50))
        pages = list(all_pages(tmp_path, limit=2))
        assert [tokens(page) for page in pages[:3]] == [[1, 2, 3], [4, 5], [6, 7]]
        tell(ledger, *range(1000), pdus=())
        tell(ledger, 50, reason="x" * 20_000)
        tell(ledger, 51)
        monkeypatch.setattr(module, "READ_BYTES", 30_000)
        monkeypatch.setattr(module, "LINE_BYTES", 9_000)
        pages = list(all_pages(tmp_path, pages[-1].cursor, 1000))
        assert [token for page in pages for token in tokens(page)] == [51]
        assert len(pages) >= 10


# --- waiting --------------------------------------------------------------------------------------


@asynccontextmanager
async def waiting(directory: Path) -> AsyncIterator[tuple[Outcomes, Ledger]]:
    async with opened(directory) as ledger:
        yield Outcomes(ledger, RUNTIME), ledger


async def test_a_reader_that_waits_is_woken_by_the_next_answer(tmp_path: Path) -> None:
    """Lines without events do not end its wait."""
    got: list[list[int]] = []
    async with waiting(tmp_path) as (outcomes, ledger), trio.open_nursery() as nursery:

        async def read() -> None:
            page = await outcomes.read(None, 100, 60)
            got.append(tokens(page))
            page = await outcomes.read(page.cursor, 100, 60)
            got.append(tokens(page))

        nursery.start_soon(read)
        await trio.sleep(0.2)
        tell(ledger, 1, pdus=())
        await trio.sleep(0.2)
        assert got == []
        with trio.fail_after(20):
            tell(ledger, 2)
            while len(got) < 1:  # noqa: ASYNC110
                await trio.sleep(0.01)
            tell(ledger, 3)
            while len(got) < 2:  # noqa: ASYNC110
                await trio.sleep(0.01)
    assert got == [[2], [3]]


async def test_a_wait_has_an_end_and_a_stop_ends_it_at_once(tmp_path: Path) -> None:
    async with waiting(tmp_path) as (outcomes, _):
        assert (await outcomes.read(None, 100, 0.05)).at_end
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(outcomes.read, None, 100, 60)
                await trio.sleep(0.1)
                outcomes.end()
            await outcomes.read(None, 100, 60)


async def test_readers_are_few_and_leave_their_places(tmp_path: Path) -> None:
    """Who waits must not keep out those that append."""
    async with waiting(tmp_path) as (outcomes, ledger):
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(MAX_READERS):
                    nursery.start_soon(outcomes.read, None, 100, 60)
                await trio.sleep(0.1)
                with pytest.raises(TooMany):
                    await outcomes.read(None, 100, 0)
                nursery.cancel_scope.cancel()
        tell(ledger, 1)
        assert tokens(await outcomes.read(None, 100, 0)) == [1]


# --- over HTTP ------------------------------------------------------------------------------------


class Recorder:
    """What `position` asks of it."""

    epoch, first = "e90c", None

    def stored(self) -> int:
        return 9


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[str, Ledger, Feedback]]:
    secret = directory / "token"
    secret.write_text(TOKEN)
    async with waiting(directory / "ledger") as (outcomes, ledger):
        feedback = Feedback(lambda: Progress(9, 8, 42, 1), outcomes)
        intake = Intake(Recorder(), RUNTIME, lambda row: None)  # type: ignore[arg-type]
        async with serve_intake(intake, ANY_PORT, secret, RUNTIME, feedback=feedback) as endpoint:
            yield str(endpoint.address), ledger, feedback


async def test_the_client_reads_them_for_ever_and_goes_on_by_its_cursor(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (address, ledger, feedback),
        IntakeClient.at(address, TOKEN) as client,
    ):
        assert await client.position() == Position("e90c", 9, 9, 8, 42, 1)
        feedback.progress = lambda: None
        assert await client.position() == Position("e90c", 9)
        tell(ledger, 1, 2)
        with trio.fail_after(60):
            async for page in client.outcomes():
                assert [each.event_id for each in page.outcomes] == ["$e1", "$e2"]
                break
            tell(ledger, 3)
            async for further in client.outcomes(page.cursor):
                (only,) = further.outcomes
                assert (only.event_id, only.server, only.outcome) == (
                    "$e3",
                    "b.example",
                    "delivered",
                )
                break
        with pytest.raises(OutcomesLost) as lost:
            await anext(client.outcomes("b00t-1-0"))
        assert lost.value.oldest is not None
        page = await anext(client.outcomes(lost.value.oldest))
        assert len(page.outcomes) == 3


async def test_what_is_asked_wrongly_is_refused(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (address, _, _),
        httpx.AsyncClient(verify=False, trust_env=False) as http,
    ):
        ask = partial(http.get, headers={"Authorization": f"Bearer {TOKEN}"})
        url = f"http://{address}{PREFIX}/outcomes"
        for wrong in ("after=x", "limit=0", "limit=1001", "wait_s=61", "wait_s=nan", "wait_s=-1"):
            assert (await ask(f"{url}?{wrong}")).status_code == 400, wrong
        gone = await ask(f"{url}?after=b00t-1-0")
        assert (gone.status_code, gone.json()["errcode"]) == (410, "FEDSENDER_GAP")
        assert gone.json()["oldest"] is None
        assert (await ask(url)).json() == {"outcomes": [], "cursor": None}
        assert (await http.get(url)).status_code == 401


async def test_who_waits_is_answered_when_the_endpoint_closes(tmp_path: Path) -> None:
    """And the daemon's stop does not wait for the whole of a wait."""
    answers = []

    async def ask(address: str) -> None:
        async with httpx.AsyncClient(verify=False, trust_env=False, timeout=PATIENCE_S) as http:
            answer = await http.get(
                f"http://{address}{PREFIX}/outcomes?wait_s=60",
                headers={"Authorization": f"Bearer {TOKEN}"},
            )
            answers.append(answer.status_code)

    async with trio.open_nursery() as nursery, served(tmp_path) as (address, _, feedback):
        nursery.start_soon(ask, address)
        await until(lambda: feedback.outcomes._waits)
    assert answers == [200]


# --- on the command line --------------------------------------------------------------------------


async def test_tail_goes_on_from_a_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a page has the cursor behind it; those before it one from which none is lost."""
    config = tmp_path / "config.yaml"
    config.write_text(
        f"server_name: hs\nsigning_key: key\ninstance_name: {FED1}\n"
        f"ledger:\n  directory: {tmp_path / 'ledger'}\n"
    )

    def tail(since: str, *options: str) -> list[dict[str, Any]]:
        command = ["tail", *options, "-c", str(config), "--json", "--since", since]
        assert run_command(command) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def interrupted(seconds: float) -> bool:
        raise KeyboardInterrupt

    async with opened(tmp_path / "ledger") as ledger:
        tell(ledger, 1, 2)
        tell(ledger, 3, outcome="failing")
        monkeypatch.setattr(commands, "wait_for_reader_to_leave", interrupted)
        first = tail("oldest")
        assert [each["event_id"] for each in first] == ["$e1", "$e2", "$e3"]
        assert first[0]["cursor"] == "oldest"
        assert tail(first[-1]["cursor"]) == []
        tell(ledger, 4)
        (fourth,) = tail(first[-1]["cursor"])
        assert (fourth["event_id"], fourth["server"]) == ("$e4", "b.example")
        assert [each["outcome"] for each in tail("oldest", "--failed")] == ["failing"]
        assert tail("oldest", "*.other") == []
    command = ["tail", "-c", str(config), "--json", "--since"]
    assert run_command([*command, "b00t-1-0"]) == 1
    assert "does not reach back to this cursor; it begins at " in capsys.readouterr().err
    assert run_command([*command, "x"]) == 2
    assert run_command(["tail", "-c", str(config), "--since", "oldest"]) == 2


# --- of a daemon ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_daemon_tells_its_homeserver(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All of it, over its own endpoint."""
    home = tmp_path_factory.mktemp("d")
    async with (
        open_world(home, servers=2) as world,
        world.service() as service,
        world.client() as client,
    ):
        await service.manager.ready()
        event_id = world.say()
        got: set[tuple[str, str, str]] = set()
        with trio.fail_after(PATIENCE_S):
            pages = client.outcomes()
            while len(got) < 2:
                page = await anext(pages)
                got |= {
                    (each.event_id, each.server, each.outcome)
                    for each in page.outcomes
                    if each.event_id == event_id
                }
            while True:
                position = await client.position()
                if position.delivered == position.stored:
                    break
        assert got == {(event_id, server.name, "delivered") for server in world.servers}
        assert (position.servers, position.behind) == (2, 0)
        assert position.fanned_out == position.stored
