"""One HTTP exchange after another with servers that misbehave in every way we know of."""

import gzip
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from tests.federation.servers import (
    Authority,
    Conversation,
    Listening,
    answering,
    read_request,
    response,
    serving,
)
from tests.garbage import left_of, no_search_for_cycles

from fedsender.config.values import IPRanges
from fedsender.fairness import PASS_S, Payer, Turns
from fedsender.federation.dialing import Dialer, TlsPolicy
from fedsender.federation.transport import (
    AnswerMemory,
    Bounds,
    Connection,
    ExchangeFailed,
    Response,
    ResponseReader,
    get,
    header_lines,
    request_head,
    words,
)
from fedsender.runtime import RealNetwork
from fedsender.tls import TlsStream
from fedsender_lab.testing.network import memory_connection

NAME = "b.example"
BOUNDS = Bounds(body_bytes=10_000, framing_bytes=4_000, headers=50)


async def dial(authority: Authority, server: Listening) -> Connection:
    dialer = Dialer(RealNetwork(), connect_s=5, handshake_s=5)
    return await dialer.open(
        [("127.0.0.1", server.port)], NAME, TlsPolicy(ca_file=authority.file), IPRanges()
    )


async def test_answer_is_parsed_in_the_turn_in_which_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 KiB of tiny chunks take 1 ms: 500 such answers took one pass of 300 ms."""
    spent_s, feed = 0.0, ResponseReader.feed

    def dear(reader: ResponseReader, data: bytes) -> None:
        nonlocal spent_s
        spent_s += PASS_S
        feed(reader, data)

    monkeypatch.setattr(ResponseReader, "feed", dear)
    authority, turns = Authority(tmp_path), Turns(lambda: spent_s)
    async with serving(authority.context(NAME), answering(response())) as server:
        tls, place = TlsPolicy(ca_file=authority.file), [("127.0.0.1", server.port)]
        dialer, payer = Dialer(RealNetwork(turns)), Payer(NAME)
        connection = await dialer.open(place, NAME, tls, IPRanges(), payer)
        await put(connection)
        assert turns.waited == 0
        await turns.take(payer.accounts, turns.answer, int)
        assert turns.waited == 1
        connection.close()


async def put(connection: Connection, body: bytes = b"{}") -> Response:
    with trio.fail_after(60):
        return await connection.exchange(
            "PUT", "/send/1", b"host: b\r\n", body, bounds=BOUNDS, memory=AnswerMemory()
        )


def raw(data: bytes) -> Conversation:
    return answering(data, then_close=True)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_connection_carries_one_exchange_after_another(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    seen = []

    async def converse(stream: trio.abc.Stream) -> None:
        while (request := await read_request(stream)) is not None:
            seen.append(request)
            await stream.send_all(response(200, b'{"pdus":{}}', "X-Header: One"))

    async with serving(authority.context(NAME), converse) as server:
        connection = await dial(authority, server)
        for body in (b'{"a":1}', b'{"b":2}'):
            answer = await put(connection, body)
            assert answer.status == 200
            assert answer.header(b"x-header") == b"One"
            assert answer.body == b'{"pdus":{}}'
            assert connection.reusable
        connection.close()

    assert [request.body for request in seen] == [b'{"a":1}', b'{"b":2}']
    assert seen[0].line == "PUT /send/1 HTTP/1.1"
    assert seen[0].headers == {"host": "b", "content-length": "7"}
    assert server.connections == 1


@pytest.mark.parametrize(
    ("data", "status", "body", "reusable"),
    [
        (CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", 200, b"abcde", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + response(200, b"x"), 200, b"x", True),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
            + response(201, b"xy"),
            201,
            b"xy",
            True,
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
        (response(200, b"x", "Connection: close"), 200, b"x", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, b"x", False),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end", False),
        # Longer than it says: the answer stands, but who knows what comes next.
        (response(200, b"x") + b"and more", 200, b"x", False),
        (response(200, b"x") + response(200, b"y"), 200, b"x", False),
        (response(200, b"x", "Connection: close") + b"and more", 200, b"x", False),
        (response(302, b"", "Location: https://elsewhere.example/"), 302, b"", True),
        (response(413, b"too much"), 413, b"too much", True),
    ],
)
async def test_answer_is_read_to_its_end_and_no_further(
    tmp_path: Path, data: bytes, status: int, body: bytes, reusable: bool
) -> None:
    authority = Authority(tmp_path)
    async with serving(authority.context(NAME), raw(data)) as server:
        connection = await dial(authority, server)
        answer = await put(connection)
        assert (answer.status, answer.body) == (status, body)
        assert connection.reusable is reusable
        connection.close()


@pytest.mark.parametrize(
    ("data", "kind", "heard", "text"),
    [
        (b"", "closed", False, "without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Len", "closed", True, "in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", "closed", True, "in the middle"),
        (CHUNKED + b"3\r\nabc\r\n", "closed", True, "in the middle"),
        (b"220 mail.example ESMTP\r\n", "protocol", True, "not an HTTP answer"),
        (b"\x00\xff" * 50, "protocol", True, "not an HTTP answer"),
        (CHUNKED + b"zz\r\nabc", "protocol", True, "not an HTTP answer"),
        (b"HTTP/1.1 101 S\r\nUpgrade: x\r\n\r\n", "protocol", True, "not an HTTP answer"),
        (
            b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            "protocol",
            True,
            "switched",
        ),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 5_000, "protocol", True, "more than 4000 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 60, "protocol", True, "more than 50 headers"),
        (b"HTTP/1.1 100 C\r\n\r\n" * 400, "protocol", True, "more than 4000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10001\r\n\r\n", "too_large", True, "10000 bytes"),
        (CHUNKED + b"4000\r\n" + b"x" * 0x4000, "too_large", True, "10000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 20_000, "too_large", True, "10000 bytes"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            "protocol",
            True,
            "not an HTTP answer",
        ),
    ],
)
async def test_nonsense_is_told_apart_and_ends_the_connection(
    tmp_path: Path, data: bytes, kind: str, heard: bool, text: str
) -> None:
    authority = Authority(tmp_path)
    async with serving(authority.context(NAME), raw(data)) as server:
        connection = await dial(authority, server)
        with pytest.raises(ExchangeFailed, match=text) as caught:
            await put(connection)
        assert caught.value.kind == kind
        assert (connection.sent, connection.heard) == (True, heard)
        assert not connection.reusable
        with pytest.raises(ExchangeFailed, match="is closed"):
            await put(connection)
        assert not connection.sent


@pytest.mark.parametrize("dripping", [False, True])
async def test_deadline_of_the_caller_ends_stalls_and_drips_and_the_connection(
    tmp_path: Path, dripping: bool
) -> None:
    authority = Authority(tmp_path)
    client_left = trio.Event()

    async def converse(stream: trio.abc.Stream) -> None:
        await read_request(stream)
        with suppress(trio.BrokenResourceError):
            for byte in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 40 if dripping else b"":
                await stream.send_all(bytes([byte]))
                await trio.sleep(0.02)
            assert await stream.receive_some() == b""
        client_left.set()

    async with serving(authority.context(NAME), converse) as server:
        connection = await dial(authority, server)
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.3):
            await connection.exchange("PUT", "/", b"", b"{}", bounds=BOUNDS, memory=AnswerMemory())
        assert connection.sent
        assert connection.heard is dripping
        assert not connection.reusable
        with trio.fail_after(60):
            await client_left.wait()


async def test_server_that_refuses_a_long_body_early_is_heard(tmp_path: Path) -> None:
    """A 413 says what to do; "connection reset while writing" would not."""
    authority = Authority(tmp_path)
    release = trio.Event()

    async def converse(stream: trio.abc.Stream) -> None:
        await stream.receive_some()
        await stream.send_all(response(413, b"no"))
        await release.wait()

    async with serving(authority.context(NAME), converse) as server:
        connection = await dial(authority, server)
        answer = await put(connection, b"x" * 20_000_000)
        assert (answer.status, answer.body) == (413, b"no")
        # Half of the body was never read: nothing else may go over this connection.
        assert not connection.reusable
        release.set()


async def test_long_body_arrives_whole_and_the_connection_stays(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    lengths = []

    async def converse(stream: trio.abc.Stream) -> None:
        while (request := await read_request(stream)) is not None:
            lengths.append(len(request.body))
            await stream.send_all(response())

    async with serving(authority.context(NAME), converse) as server:
        connection = await dial(authority, server)
        for size in (1_000_000, 100_000):
            assert (await put(connection, b"x" * size)).status == 200
        assert connection.reusable
        assert lengths == [1_000_000, 100_000]
        connection.close()


@pytest.mark.parametrize("size", [100, 1_000_000])
async def test_first_byte_leaves_in_the_turn_in_which_the_exchange_begins(size: int) -> None:
    """We have just looked whether we may send. Between two turns we may be frozen for long."""
    ours, theirs = memory_connection()
    connection = Connection(ours)

    class Look(trio.abc.Instrument):
        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            if connection.sent and not seen:
                seen.append(theirs.readable)

    seen: list[bool] = []
    trio.lowlevel.add_instrument(Look())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(put, connection, b"x" * size)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert seen == [True]


async def test_long_body_stands_in_memory_once() -> None:
    """Servers that come back together have hundreds of long bodies on their way."""
    ours, theirs = memory_connection()
    body, written = b"x" * 4_000_000, 0

    async def read() -> None:
        nonlocal written
        while not written or written < len(body):
            written += len(await theirs.receive_some(65_536))
        await theirs.send_all(response())

    tracemalloc.start()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await put(Connection(ours), body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(body) / 2


async def test_an_exchange_leaves_nothing_to_search_for(tmp_path: Path) -> None:
    """Its objects go at once; those of a thousand exchanges would fill memory until the search."""

    async def converse(stream: trio.abc.Stream) -> None:
        while await read_request(stream) is not None:
            await stream.send_all(response(200, b"{}"))

    authority = Authority(tmp_path)
    async with serving(authority.context(NAME), converse) as server:
        connection = await dial(authority, server)
        with no_search_for_cycles():
            for _ in range(5):
                await put(connection)
            left = left_of(ResponseReader)
        connection.close()
    assert not left


async def test_idle_connection_knows_whether_its_peer_has_left(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(authority.context(NAME), answering(response())) as server:
        connection = await dial(authority, server)
        await put(connection)
        assert await RealNetwork().deserted([connection.stream]) == []
        # Looking did no harm.
        assert (await put(connection)).status == 200
        connection.close()
    async with serving(authority.context(NAME), answering(response(), then_close=True)) as server:
        connection = await dial(authority, server)
        await put(connection)
        with trio.fail_after(60):
            assert isinstance(connection.stream, TlsStream)
            await trio.lowlevel.wait_readable(connection.stream.socket)
            assert await RealNetwork().deserted([connection.stream]) == [connection.stream]
        connection.close()


# --- the reader, without a network ----------------------------------------------------------------


def read(chunks: list[bytes], bounds: Bounds = BOUNDS) -> Response:
    reader = ResponseReader(bounds)
    for chunk in chunks:
        reader.feed(chunk)
    reader.end()
    return reader.response()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in pairwise(edges) if a < b]


@pytest.mark.slow
@given(
    status=st.integers(200, 599).filter(lambda status: status not in (204, 304)),
    headers=st.lists(
        st.tuples(
            st.text("abcXYZ-_09", min_size=1, max_size=20).map(lambda name: "x" + name),
            st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30),
        ),
        max_size=10,
    ),
    body=st.binary(max_size=300),
    chunked=st.booleans(),
    places=st.lists(st.integers(0, 2_000), max_size=8),
)
def test_answer_is_the_same_however_it_is_cut(
    status: int, headers: list[tuple[str, str]], body: bytes, chunked: bool, places: list[int]
) -> None:
    lines = [f"HTTP/1.1 {status} Reason", *(f"{name}: {value}" for name, value in headers)]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body)}")
        framed = body
    data = "\r\n".join([*lines, "", ""]).encode() + framed

    answer = read(cut(data, places))

    assert answer == read([data])
    one_by_one = [bytes([byte]) for byte in data]
    assert answer == read(one_by_one, Bounds(body_bytes=10_000, framing_bytes=100_000))
    assert (answer.status, answer.body) == (status, body)
    assert [(name.decode(), value.decode()) for name, value in answer.headers[:-1]] == [
        (name.lower(), value) for name, value in headers
    ]


@given(st.lists(st.binary(max_size=200), max_size=10), st.booleans())
def test_no_bytes_make_the_reader_fail_otherwise_than_it_says(
    chunks: list[bytes], as_http: bool
) -> None:
    if as_http:
        chunks = [b"HTTP/1.1 200 OK\r\n", *chunks]
    with suppress(ExchangeFailed):
        read(chunks)


EARLY = b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
CRUMB = b"2\r\nab\r\n"
FOREVER = [
    *((b"", b"a"), (b"", b"\r\n"), (b"", EARLY), (b"HTTP/1.1 200 ", b"a")),
    *((b"HTTP/1.1 200 OK\r\n", b"a"), (b"HTTP/1.1 200 OK\r\nX: ", b"a")),
    *((b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), (b"HTTP/1.1 200 OK\r\n\r\n", b"a")),
    *((CHUNKED, CRUMB), (CHUNKED, b"0"), (CHUNKED + b"1;", b"x"), (CHUNKED + b"1;a=", b"x")),
    *((CHUNKED + b"0\r\nX: ", b"a"), (CHUNKED + b"0\r\n", b"X: y\r\n")),
    *((CHUNKED + b"0\r\n", b"a"), (CHUNKED + b"ffffff\r\n", b"a")),
]


@pytest.mark.parametrize("piece", [1, 100, 16_384])
@pytest.mark.parametrize(("start", "unit"), FOREVER)
def test_nothing_is_read_for_ever(start: bytes, unit: bytes, piece: int) -> None:
    """Whatever goes on and on: headers, trailers, tiny chunks, chunk extensions, 1xx answers."""
    bounds = Bounds(body_bytes=50_000, framing_bytes=8_000)
    reader = ResponseReader(bounds)
    stream = start + unit * (80_000 // len(unit))
    fed = 0

    def feed() -> None:
        nonlocal fed
        for data in (stream[at : at + piece] for at in range(0, len(stream), piece)):
            reader.feed(data)
            fed += len(data)

    tracemalloc.start()
    try:
        with pytest.raises(ExchangeFailed):
            feed()
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fed <= 58_000
    # Each piece is work, so that of tiny ones fewer are read.
    assert fed <= 300 * piece
    # The body, what the parser holds of one header, and the latest piece in all its copies.
    assert held <= 200_000


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 404 X\r\n", b"HTTP/1.0 200 OK\r\n", EARLY),
                    *(CHUNKED, CRUMB, b"0\r\n", b"\r\n", b"X: y\r\n", b"1;x=y\r\na\r\n", b"a"),
                    *(b"Content-Length: 70000\r\n", b"Content-Length: 5\r\n", b"Trailer: X\r\n"),
                    *(b"Transfer-Encoding: gzip\r\n", b"Content-Encoding: br\r\n", b"ff\r\n"),
                    *(b"Connection: upgrade\r\nUpgrade: x\r\n", b"HTTP/1.1 101 S\r\n", b"\x00"),
                ]
            ),
            st.sampled_from([1, 1, 2, 10, 300, 5_000]),
        ),
        max_size=12,
    ),
    st.integers(1, 20_000),
)
def test_whatever_comes_is_bounded_and_fails_only_as_it_says(
    parts: list[tuple[bytes, int]], piece: int
) -> None:
    stream = b"".join(unit * times for unit, times in parts)
    reader = ResponseReader(BOUNDS)
    fed = 0
    with suppress(ExchangeFailed):
        while fed < len(stream) and not reader.complete:
            reader.feed(stream[fed : fed + piece])
            fed += piece
        reader.end()
        reader.response()
    assert fed <= BOUNDS.body_bytes + BOUNDS.framing_bytes + piece
    assert reader.size <= BOUNDS.body_bytes


@pytest.mark.parametrize(
    "headers",
    [
        *(["gzip"], ["identity", "gzip", "gzip"], ["identity, gzip"], ["gzip, identity"]),
        *(["x-gzip"], ["br"], ["BR"], ["identity, identity"], ["zstd"]),
    ],
)
@pytest.mark.parametrize("status", [200, 302, 404])
def test_every_encoding_but_identity_is_refused_before_the_body(
    headers: list[str], status: int
) -> None:
    lines = [f"HTTP/1.1 {status} X", *(f"Content-Encoding: {each}" for each in headers), "", ""]
    with pytest.raises(ExchangeFailed, match="compressed, though not asked for") as caught:
        read(["\r\n".join(lines).encode()])
    assert caught.value.kind == "protocol"


@pytest.mark.parametrize("value", ["gzip, chunked", "gzip", "chunked, chunked", "identity", "x"])
def test_every_transfer_encoding_but_chunked_is_refused(value: str) -> None:
    with pytest.raises(ExchangeFailed):
        read([f"HTTP/1.1 200 OK\r\nTransfer-Encoding: {value}\r\n\r\n0\r\n\r\n".encode()])


@pytest.mark.parametrize("value", ["identity", "Identity", "", ","])
def test_identity_is_no_encoding(value: str) -> None:
    assert read([response(200, b"x", f"Content-Encoding: {value}")]).body == b"x"


def test_trailers_are_no_headers() -> None:
    answer = read([CHUNKED + b"1\r\nx\r\n0\r\nRetry-After: 9\r\n\r\n"])
    assert (answer.body, answer.header(b"retry-after")) == (b"x", None)


@pytest.mark.parametrize("framing", [b"Content-Length: 20000\r\n", b""])
@pytest.mark.parametrize("piece", [300, 30_000])
@pytest.mark.parametrize("status", [300, 502])
def test_error_page_is_cut_and_its_status_counts(framing: bytes, piece: int, status: int) -> None:
    data = b"HTTP/1.1 %d Bad Gateway\r\n" % status + framing + b"\r\n" + b"x" * 20_000
    reader = ResponseReader(BOUNDS)
    for at in range(0, len(data), piece):
        reader.feed(data[at : at + piece])
        if reader.complete:
            break
    answer = reader.response()
    assert (answer.status, answer.body) == (status, b"x" * BOUNDS.body_bytes)
    assert not reader.keep_alive


# --- all answers together -------------------------------------------------------------------------


async def answers_from(
    memory: AnswerMemory, sizes: Sequence[tuple[int, bool]]
) -> list[Response | str]:
    """What becomes of answers that begin one after the other, so long and ended or not."""
    results: dict[int, Response | str] = {}

    async def one(number: int, size: int, ends: bool) -> None:
        ours, theirs = memory_connection()
        body = b"x" * size + (b"" if ends else b"y")
        answer = response(200, body)
        nursery.start_soon(theirs.send_all, answer if ends else answer[:-1])
        try:
            results[number] = await Connection(ours).exchange(
                "PUT", "/", b"", b"{}", bounds=Bounds(body_bytes=300_000), memory=memory
            )
        except ExchangeFailed as failure:
            results[number] = failure.kind

    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            for number, (size, ends) in enumerate(sizes):
                nursery.start_soon(one, number, size, ends)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
    assert memory.held == 0
    return [results.get(number, "under way") for number in range(len(sizes))]


async def test_where_answers_fill_the_memory_the_one_begun_first_is_given_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    never = (100_000, False)
    assert await answers_from(AnswerMemory(300_000), [never] * 5) == [
        *("crowded", "crowded"),
        *("under way", "under way", "under way"),
    ]


async def test_full_memory_stops_no_answer_that_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    never, ends = (100_000, False), (150_000, True)
    found = await answers_from(AnswerMemory(300_000), [*[never] * 5, ends, *[never] * 5, ends])
    assert [len(each.body) for each in found if isinstance(each, Response)] == [150_000] * 2


async def test_small_answers_need_no_room(autojump_clock: trio.testing.MockClock) -> None:
    small = (16_000, False)
    assert await answers_from(AnswerMemory(0), [small] * 50) == ["under way"] * 50


@pytest.mark.slow
@given(st.text(max_size=600))
def test_words_are_one_short_printable_line(text: str) -> None:
    line = words(text)
    assert len(line) <= 300
    assert line.isprintable()


@pytest.mark.parametrize(
    ("target", "value"),
    [("/a b", b"x"), ("/a\r\nX: y", b"x"), ("a", b"x"), ("/", b"x\r\nY: z"), ("/", b"\x00")],
)
def test_request_that_would_break_out_of_its_line_is_refused(target: str, value: bytes) -> None:
    with pytest.raises(ValueError, match=r"request target|control character"):
        request_head("GET", target, header_lines([(b"x", value)]), None)


# --- behind httpx ---------------------------------------------------------------------------------


class Web:
    """Web servers by host name; lends connections to them and notes which were asked for."""

    def __init__(self, pages: dict[str, bytes]) -> None:
        self.pages = pages
        self.asked: list[tuple[str, int]] = []
        self.closed = 0

    def lease(self, host: str, port: int) -> "Lent":
        self.asked.append((host, port))
        return Lent(self, self.pages[host])


class Lent:
    def __init__(self, web: Web, page: bytes) -> None:
        self._web = web
        self._page = page

    async def __aenter__(self) -> Connection:
        client, server = memory_connection()
        await server.send_all(self._page)
        return Connection(client)

    async def __aexit__(self, *_: object) -> None:
        self._web.closed += 1


def redirect(location: str) -> bytes:
    return response(302, b"", f"Location: {location}")


async def test_get_follows_redirects_with_a_connection_for_each_host() -> None:
    web = Web(
        {
            "a.example": redirect("https://b.example:8000/x"),
            "b.example": redirect("//c.example/y"),
            "c.example": response(200, b"found", "Cache-Control: max-age=5"),
        }
    )
    answer = await get("https://a.example/z", web.lease, BOUNDS, AnswerMemory(), user_agent="test")
    assert (answer.status, answer.body) == (200, b"found")
    assert answer.header(b"cache-control") == b"max-age=5"
    assert web.asked == [("a.example", 443), ("b.example", 8000), ("c.example", 443)]
    assert web.closed == 3


async def test_what_a_web_server_packed_is_never_unpacked() -> None:
    bomb = gzip.compress(gzip.compress(bytes(5_000_000)))
    packed = ("Content-Encoding: identity", *["Content-Encoding: gzip"] * 2)
    web = Web({"a.example": response(200, bomb, *packed)})
    tracemalloc.start()
    try:
        with pytest.raises(ExchangeFailed, match="compressed"):
            await get("https://a.example/", web.lease, BOUNDS, AnswerMemory(), user_agent="test")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (redirect("http://b.example/"), "http is not https"),
        (redirect("https://a.example/"), "redirects"),
        (redirect("https://[::1"), "."),
        (redirect("ftp://x/"), "not https"),
        (response(200, b"x" * 10_001), "larger than"),
        (response(200, b"\x1f\x8b", "Content-Encoding: gzip"), "compressed"),
        (redirect("https://" + "@" * 15_000 + "/"), "redirect of more than 2048 bytes"),
        (b"nonsense\r\n\r\n", "not an HTTP answer"),
    ],
)
async def test_get_goes_nowhere_it_should_not(page: bytes, text: str) -> None:
    web = Web({"a.example": page})
    with pytest.raises(ExchangeFailed, match=text) as caught:
        await get("https://a.example/", web.lease, BOUNDS, AnswerMemory(), user_agent="test")
    assert caught.value.kind in ("protocol", "too_large")
    assert web.closed == len(web.asked) <= 10
