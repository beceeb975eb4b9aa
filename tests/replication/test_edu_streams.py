"""Rows and positions of the streams of EDUs, and the HTTP endpoint that has what was missed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
import trio
import trio.lowlevel
import trio.testing
from tests.replication.support import ANYWHERE, HandNetwork, RecordingEduSink, runtime_with

from fedsender.replication.commands import Position
from fedsender.replication.edu_streams import EduStreams
from fedsender.replication.stream_updates import NotFetched, Peers, fetch_missed
from fedsender.store.records import PresenceState
from fedsender.streams import Json

ALICE = "@alice:hs.example"
Clock = trio.testing.MockClock


@dataclass
class Writer:
    """The process that has the rows; `failures` of its answers fail first."""

    rows: list[tuple[int, Json]] = field(default_factory=list)
    asked: list[tuple[str, str, int, int]] = field(default_factory=list)
    failures: int = 0
    acknowledged: list[int] = field(default_factory=list)

    async def acknowledge(self, token: int) -> None:
        await trio.lowlevel.checkpoint()
        self.acknowledged.append(token)

    async def fetch(
        self, stream: str, instance: str, after: int, upto: int
    ) -> Sequence[tuple[int, Json]]:
        await trio.lowlevel.checkpoint()
        self.asked.append((stream, instance, after, upto))
        if self.failures:
            self.failures -= 1
            raise NotFetched("not now")
        return [row for row in self.rows if after < row[0] <= upto]


@asynccontextmanager
async def streams(writer: Writer) -> AsyncIterator[tuple[EduStreams, RecordingEduSink]]:
    sink = RecordingEduSink()
    made = EduStreams(sink, writer.fetch, writer.acknowledge)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        yield made, sink
        nursery.cancel_scope.cancel()


async def test_rows_count_only_after_the_writer_has_said_where_it_stands(
    autojump_clock: Clock,
) -> None:
    writer = Writer()
    async with streams(writer) as (edus, sink):
        assert edus.rows("typing", "master", 1, [["!r", [ALICE]]])
        edus.position(Position("typing", "master", 0, 0))
        assert edus.rows("typing", "master", 1, [["!r", [ALICE, 7]], "nonsense", ["!s"]])
        assert edus.rows("typing", "master", 1, [["!r", []]])
        edus.begin()
        assert edus.rows("typing", "master", 2, [["!r", []]])
        await trio.sleep(10)

    assert sink.typed == ["reset", ("!r", [ALICE], 1)]
    assert writer.asked == []


async def test_missed_rows_are_asked_of_their_writer_and_again_if_that_fails(
    autojump_clock: Clock,
) -> None:
    """Synapse's N8: after a start from 0, which gives everybody who types now."""
    writer = Writer(rows=[(2, ["!r", [ALICE]])], failures=2)
    async with streams(writer) as (edus, sink):
        edus.position(Position("typing", "master", 3, 3))
        await trio.sleep(20)
        assert writer.asked == 3 * [("typing", "master", 0, 3)]
        assert sink.typed == ["reset", ("!r", [ALICE], 2)]
        edus.position(Position("typing", "master", 3, 4))
        edus.position(Position("typing", "master", 6, 7))
        await trio.sleep(1)

    assert writer.asked[3:] == [("typing", "master", 4, 7)]


@pytest.mark.parametrize("writer_name", ["master", "typist"])
async def test_a_writer_that_counts_anew_is_read_from_its_beginning(
    autojump_clock: Clock, writer_name: str
) -> None:
    """By its position, as after its restart; or another process has taken the role."""
    writer = Writer()
    async with streams(writer) as (edus, sink):
        edus.position(Position("typing", "master", 100, 100))
        await trio.sleep(1)
        edus.position(Position("typing", writer_name, 2, 2))
        await trio.sleep(1)
        assert edus.rows("typing", writer_name, 3, [["!r", []]])

    assert writer.asked == [("typing", "master", 0, 100), ("typing", writer_name, 0, 2)]
    assert sink.typed == ["reset", "reset", ("!r", [], 3)]


async def test_a_token_that_falls_without_a_position_makes_us_ask(autojump_clock: Clock) -> None:
    async with streams(Writer()) as (edus, sink):
        edus.position(Position("presence_federation", "master", 5, 5))
        assert not edus.rows("presence_federation", "master", 1, [["a.example", ALICE]])
        assert edus.rows("presence_federation", "master", 2, [["a.example", ALICE]])
        edus.position(Position("presence_federation", "master", 2, 2))
        assert edus.rows("presence_federation", "master", 3, [["b.example", ALICE]])

    assert sink.wanted == [("b.example", ALICE)]


async def test_presence_is_taken_as_it_comes_and_a_gap_is_left_to_the_database(
    autojump_clock: Clock,
) -> None:
    async with streams(Writer()) as (edus, sink):
        edus.position(Position("presence", "master", 9, 9))
        row: list[Any] = [ALICE, "online", 5, 6, 0, None, True]
        edus.rows("presence", "master", 10, [row, [ALICE, "online", None, 6, 0, None, True]])
        edus.position(Position("presence", "master", 10, 12))
        edus.position(Position("presence", "master", 15, 16))

    assert sink.states == [PresenceState(ALICE, "online", 5, None, True)]
    # The first: what was written since the sender looked.
    assert sink.gaps == [(-1, 9), (12, 16)]


async def test_nothing_is_acknowledged_while_a_gap_is_open(autojump_clock: Clock) -> None:
    """Its writer forgets what is acknowledged, and with it the rows that are being asked for."""
    edu = {"edu_type": "m.x", "destination": "b.example", "content": {}}
    writer = Writer(rows=[(4, ["e", edu])], failures=2)
    async with streams(writer) as (edus, sink):
        edus.position(Position("federation", "master", 5, 5))
        await trio.sleep(0.5)
        assert edus.rows("federation", "master", 6, [["e", edu]])
        await trio.sleep(0.5)
        assert writer.acknowledged == []
        writer.rows.append((6, ["e", edu]))
        await trio.sleep(20)
        assert set(writer.acknowledged) == {6}
        assert len(sink.sent) == 2


async def test_what_is_said_while_a_gap_is_open_comes_after_what_is_missing(
    autojump_clock: Clock,
) -> None:
    """A newer EDU of a key replaces an older one, so the older one must not come last."""

    def typing(started: bool) -> list[Json]:
        edu = {"edu_type": "m.typing", "destination": "b.example", "content": {"typing": started}}
        return ["k", {"key": ["!r", ALICE], "edu": edu}]

    writer = Writer(rows=[(4, typing(True)), (6, typing(False))], failures=1)
    async with streams(writer) as (edus, sink):
        edus.position(Position("federation", "master", 5, 5))
        await trio.sleep(0.5)
        assert edus.rows("federation", "master", 6, [typing(False)])
        await trio.sleep(20)
        assert edus.rows("federation", "master", 7, [typing(True)])

    assert [content["typing"] for _, _, content, _ in sink.sent] == [True, False, True]


async def test_a_gap_that_could_not_be_closed_is_asked_for_with_the_next(
    autojump_clock: Clock,
) -> None:
    """A newer gap of the same writer does not take the place of an older one."""
    writer = Writer(failures=1)
    async with streams(writer) as (edus, _sink):
        edus.position(Position("presence_federation", "master", 3, 3))
        await trio.lowlevel.checkpoint()
        edus.position(Position("presence_federation", "master", 6, 7))
        await trio.sleep(20)

    assert writer.asked[-1] == ("presence_federation", "master", 0, 7)


# --- the endpoint ---------------------------------------------------------------------------------


class Endpoint:
    """Answers each request with the next of `answers`; keeps their heads."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.heads: list[str] = []

    async def serve(self, stream: trio.abc.Stream) -> None:
        async with stream:
            while self.answers:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += bytes(await stream.receive_some(1000)) or b"\r\n\r\n"
                self.heads.append(head.decode())
                status, content = self.answers.pop(0)
                body = orjson.dumps(content)
                await stream.send_all(
                    b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
                )


async def fetched(endpoint: Endpoint, secret: str | None = "s3cret") -> list[tuple[int, Json]]:
    network = HandNetwork()
    peers = Peers({"master": ANYWHERE}, secret)
    failed: NotFetched | None = None
    rows: list[tuple[int, Json]] = []
    async with trio.open_nursery() as nursery:
        network.answers.append(lambda stream: nursery.start_soon(endpoint.serve, stream))
        try:
            rows = await fetch_missed(peers, runtime_with(network), "typing", "master", 2, 9)
        except NotFetched as error:
            failed = error
        nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return rows


async def test_pages_are_read_to_the_end_with_an_id_of_its_own_each(autojump_clock: Clock) -> None:
    """And rows beyond the page's end are left: they come again."""
    endpoint = Endpoint(
        (200, {"updates": [[3, ["!r", []]], [8, "later"]], "upto_token": 5, "limited": True}),
        (200, {"updates": [[8, "later"]], "upto_token": 9, "limited": False}),
    )

    assert await fetched(endpoint) == [(3, ["!r", []]), (8, "later")]
    first, second = (head.splitlines()[0].split() for head in endpoint.heads)
    start = "/_synapse/replication/get_repl_stream_updates/typing/"
    assert first[1].startswith(start)
    assert first[1].endswith("?from_token=2&upto_token=9")
    assert second[1].endswith("?from_token=5&upto_token=9")
    assert first[1].split("?")[0] != second[1].split("?")[0]
    assert "authorization: Bearer s3cret" in endpoint.heads[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, {}), "secret may be wrong"),
        ((404, {}), "answered 404"),
        ((200, []), "no answer of the kind"),
        ((200, {"updates": [[1]], "upto_token": 9, "limited": False}), "no answer of the kind"),
    ],
)
async def test_what_is_no_answer_is_said_without_the_secret(
    autojump_clock: Clock, answer: tuple[int, Any], words: str
) -> None:
    with pytest.raises(NotFetched, match=words) as error:
        await fetched(Endpoint(answer))
    assert "s3cret" not in str(error.value)


async def test_a_writer_without_an_address_cannot_be_asked(autojump_clock: Clock) -> None:
    with pytest.raises(NotFetched, match="no address is configured for 'typist'"):
        await fetch_missed(Peers(), runtime_with(HandNetwork()), "typing", "typist", 0, 1)
