"""The line protocol: every command both ways, in both dialects, however the bytes are cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replication.parts import rows, tokens, words

from fedsender.replication.commands import (
    BadLine,
    FederationAck,
    LockReleased,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    Unknown,
    UnsendableCommand,
    Vocabulary,
)
from fedsender_relay.protocol import (
    MAX_LINE_BYTES,
    OLD,
    TODAY,
    Auth,
    Command,
    Connection,
    Error,
    Name,
    Ping,
    ReplicateFrom,
    Server,
)

# Each line is what its command is written as, and what is read back.
BOTH: list[tuple[str, Command]] = [
    ("SERVER hs.example", Server("hs.example")),
    ("PING 1490197665618", Ping("1490197665618")),
    ("PING ", Ping()),
    ("NAME synapse.app.appservice", Name("synapse.app.appservice")),
    ("AUTH correct horse", Auth("correct horse")),
    ("ERROR Wrong remote", Error("Wrong remote")),
    ("REPLICATE ", Replicate()),
    ("REPLICATE events 53", ReplicateFrom("events", 53)),
    ("REPLICATE ALL NOW", ReplicateFrom("ALL")),
    ("REMOTE_SERVER_UP remote.example:8448", RemoteServerUp("remote.example:8448")),
    ("CLEAR_USER_SYNC abcde", Unknown("CLEAR_USER_SYNC", "abcde")),
    (
        'USER_IP @u:hs.example ["tok","1.2.3.4","UA \\u2603",null,123]',
        Unknown("USER_IP", '@u:hs.example ["tok","1.2.3.4","UA \\u2603",null,123]'),
    ),
    ('LOCK_RELEASED ["master","lock","!r:hs"]', LockReleased("master", "lock", "!r:hs")),
    ("FOO bar baz", Unknown("FOO", "bar baz")),
]
ONLY_OLD: list[tuple[str, Command]] = [
    ("POSITION events 53", Position("events", "", 53, 53)),
    (
        'RDATA events 54 ["$foo1:bar.com","a b"]',
        Rdata("events", "", 54, ["$foo1:bar.com", "a b"]),
    ),
    ("RDATA caches batch [null]", Rdata("caches", "", None, [None])),
    ("FEDERATION_ACK 12", FederationAck("", 12)),
]
ONLY_TODAY: list[tuple[str, Command]] = [
    ("POSITION events ev2 24 25", Position("events", "ev2", 24, 25)),
    (
        'RDATA typing master 2 ["!r:hs.example",[]]',
        Rdata("typing", "master", 2, ["!r:hs.example", []]),
    ),
    (
        'RDATA events master batch ["ev",[null]]',
        Rdata("events", "master", None, ["ev", [None]]),
    ),
    ("FEDERATION_ACK fed1 0", FederationAck("fed1", 0)),
]
LINES = [
    *((OLD, line, command) for line, command in BOTH + ONLY_OLD),
    *((TODAY, line, command) for line, command in BOTH + ONLY_TODAY),
]


def commands_in(dialect: Vocabulary[Command], pieces: Iterable[bytes]) -> list[Command]:
    connection = Connection(dialect=dialect)
    commands: list[Command] = []
    for piece in pieces:
        connection.receive_data(piece)
        while (command := connection.next_command()) is not None:
            commands.append(command)
    return commands


@pytest.mark.parametrize(("dialect", "line", "command"), LINES)
def test_command_is_read_and_written(
    dialect: Vocabulary[Command], line: str, command: Command
) -> None:
    raw = line.encode() + b"\n"
    assert Connection().encode(command) == raw
    assert commands_in(dialect, [raw]) == [command]
    assert commands_in(dialect, [bytes([byte]) for byte in raw]) == [command]
    assert commands_in(dialect, [b"\n \n", raw[:-1] + b"\r\n"]) == [command]


@pytest.mark.parametrize(("dialect", "line", "command"), LINES)
def test_rubbish_behind_a_command_does_not_touch_it(
    dialect: Vocabulary[Command], line: str, command: Command
) -> None:
    connection = Connection(dialect=dialect)
    connection.receive_data(line.encode() + b"\n\xff\xfe\nPING 1\n")
    assert connection.next_command() == command
    with pytest.raises(BadLine, match="not UTF-8"):
        connection.next_command()
    assert connection.next_command() == Ping("1")


def test_now_may_be_written_small() -> None:
    assert OLD.parse("REPLICATE events now") == ReplicateFrom("events")


@pytest.mark.parametrize(
    ("dialect", "line"),
    [
        (OLD, "RDATA events 54"),
        (OLD, "RDATA events fifty []"),
        (OLD, "RDATA events 54 [1"),
        (OLD, "RDATA events 54 [NaN]"),
        (OLD, "RDATA events 54 " + "[" * 10_000),
        (OLD, "RDATA events 54 " + "9" * 5_000),
        (OLD, "RDATA events 99999999999999999999 []"),
        (OLD, "RDATA events 9223372036854775808 []"),
        (OLD, "RDATA events 5_4 []"),
        (OLD, "RDATA events \u0665 []"),
        (OLD, "POSITION events master 53 54"),
        (OLD, "REPLICATE events"),
        (OLD, "REPLICATE  53"),
        (OLD, "SERVER "),
        (OLD, "SERVER two words"),
        (TODAY, "FEDERATION_ACK fed1"),
        (TODAY, "RDATA typing x notanint []"),
        (TODAY, "POSITION events ev2 24"),
        (TODAY, 'LOCK_RELEASED ["master",1,"x"]'),
    ],
)
def test_bad_fields_are_an_error_that_names_the_word(
    dialect: Vocabulary[Command], line: str
) -> None:
    with pytest.raises(BadLine, match=f"failed to parse line: {line.split()[0]}: "):
        dialect.parse(line)


def test_error_about_a_row_does_not_show_it() -> None:
    """Rows of `caches` hold access tokens."""
    for line in (
        'RDATA caches 2 ["get_user_by_access_token",["syt_secret"],1]',
        "RDATA c m 1 syt_",
    ):
        with pytest.raises(BadLine) as caught:
            TODAY.parse(line)
        assert "syt_" not in str(caught.value)


def test_secrets_are_not_in_a_command_that_is_shown() -> None:
    assert "horse" not in repr(Auth("horse"))
    assert "tok" not in repr(OLD.parse('USER_IP @u:hs ["tok"]'))


# --- limits ---------------------------------------------------------------------------------------


def test_line_of_the_greatest_length_passes_and_one_byte_more_does_not() -> None:
    connection = Connection(max_line=16_384)
    longest = b"PING " + b"x" * (16_384 - 5)
    connection.receive_data(longest + b"\n" + longest + b"\r\n")
    assert connection.next_command() == connection.next_command() == Ping("x" * (16_384 - 5))
    connection.receive_data(longest + b"xx\n")
    with pytest.raises(BadLine, match="Line length exceeded"):
        connection.next_command()


def test_line_that_does_not_end_is_an_error_before_it_is_all_there() -> None:
    connection = Connection(max_line=100)
    connection.receive_data(b"PING " + b"x" * 97)
    with pytest.raises(BadLine, match="Line length exceeded"):
        connection.next_command()


@pytest.mark.parametrize(
    "command",
    [
        Server("two words"),
        Server(""),
        Name("a\nb"),
        Error("a\rb"),
        Rdata("events", "a b", 1, []),
        Rdata("events", "", 1, [float("nan")]),
        Rdata("events", "", 1, ["x" * MAX_LINE_BYTES]),
        Rdata("events", "", 1, {1, 2}),
        Ping("\ud800"),
    ],
)
def test_command_that_is_no_line_is_not_sent(command: Command) -> None:
    with pytest.raises(UnsendableCommand):
        Connection().encode(command)


def test_rows_are_compact_and_escaped() -> None:
    assert Connection().encode(Rdata("s", "", 1, ["é", {"a": 1}])) == (
        b'RDATA s 1 ["\\u00e9",{"a":1}]\n'
    )


# --- fuzz -----------------------------------------------------------------------------------------

old_commands = st.one_of(
    st.builds(Server, words),
    st.builds(Ping, words),
    st.builds(Replicate),
    st.builds(ReplicateFrom, words, st.none() | tokens),
    st.builds(lambda stream, token: Position(stream, "", token, token), words, tokens),
    st.builds(Rdata, words, st.just(""), st.none() | tokens, rows),
    st.builds(FederationAck, st.just(""), tokens),
)
today_commands = st.one_of(
    st.builds(Position, words, words, tokens, tokens),
    st.builds(Rdata, words, words, st.none() | tokens, rows),
    st.builds(FederationAck, words, tokens),
    st.builds(LockReleased, words, st.text(max_size=9), st.text(max_size=9)),
)


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(raw) + 1) for place in places} | {0, len(raw)})
    return [raw[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.slow
@given(
    st.one_of(
        st.tuples(st.just(OLD), st.lists(old_commands, max_size=5)),
        st.tuples(st.just(TODAY), st.lists(today_commands, max_size=5)),
    ),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_what_is_written_is_read_back_wherever_it_is_cut(
    said: tuple[Vocabulary[Command], list[Command]], places: list[int]
) -> None:
    dialect, commands = said
    raw = b"".join(map(Connection().encode, commands))
    assert commands_in(dialect, cut(raw, places)) == commands


alphabet = st.sampled_from(
    [
        b"RDATA ",
        b"POSITION ",
        b"REPLICATE",
        b"USER_SYNC ",
        b"events ",
        b"batch ",
        b"1 ",
        b"-",
        b"[",
        b"]",
        b'"',
        b"{}",
        b"\n",
        b"\r\n",
        b" ",
        b"\x00",
        b"\xff",
        b"\xf0\x9f",
        b"NaN",
        b"x" * 60,
    ]
)


@given(
    st.sampled_from([OLD, TODAY]),
    st.lists(alphabet | st.binary(max_size=8), max_size=60),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_no_bytes_raise_anything_but_bad_line_or_stay_in_memory(
    dialect: Vocabulary[Command], parts: list[bytes], places: list[int]
) -> None:
    connection = Connection(dialect=dialect, max_line=200)
    for piece in cut(b"".join(parts), places):
        connection.receive_data(piece)
        more = True
        while more:
            try:
                more = connection.next_command() is not None
            except BadLine:
                more = True
    assert len(connection._buffer) <= 201
