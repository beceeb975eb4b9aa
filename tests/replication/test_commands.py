"""The commands of Synapse's processes: each both ways, and rubbish; the rows of one token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replication.parts import rows, tokens, words

from fedsender.replication.commands import (
    SPOKEN,
    BadLine,
    Command,
    FederationAck,
    LockReleased,
    Position,
    Rdata,
    RdataBatches,
    RemoteServerUp,
    Replicate,
    Unknown,
    UnsendableCommand,
)

# Each line is what its command is written as, and what is read back.
LINES: list[tuple[str, Command]] = [
    ("REPLICATE ", Replicate()),
    ("REMOTE_SERVER_UP remote.example:8448", RemoteServerUp("remote.example:8448")),
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
    ('LOCK_RELEASED ["master","lock","!r:hs"]', LockReleased("master", "lock", "!r:hs")),
    ("CLEAR_USER_SYNC abcde", Unknown("CLEAR_USER_SYNC", "abcde")),
    ("FOO bar baz", Unknown("FOO", "bar baz")),
]


@pytest.mark.parametrize(("line", "command"), LINES)
def test_command_is_read_and_written(line: str, command: Command) -> None:
    assert SPOKEN.format(command) == line
    assert SPOKEN.parse(line) == command


@pytest.mark.parametrize("line", ["REPLICATE", "REPLICATE events 53"])
def test_what_follows_replicate_is_ignored(line: str) -> None:
    """As Synapse ignores it."""
    assert SPOKEN.parse(line) == Replicate()


@pytest.mark.parametrize(
    "line",
    [
        "RDATA typing x notanint []",
        "RDATA typing x 54",
        "RDATA typing x 54 [1",
        "RDATA typing x 54 [NaN]",
        "RDATA typing x 54 " + "[" * 10_000,
        "RDATA typing x 54 " + "9" * 5_000,
        "RDATA typing x 9223372036854775808 []",
        "RDATA typing x 5_4 []",
        "RDATA typing x \u0665 []",
        "RDATA typing  54 []",
        "FEDERATION_ACK fed1",
        "POSITION events ev2 24",
        "POSITION events 53",
        "REMOTE_SERVER_UP two words",
        'LOCK_RELEASED ["master",1,"x"]',
    ],
)
def test_bad_fields_are_an_error_that_names_the_word(line: str) -> None:
    with pytest.raises(BadLine, match=f"failed to parse line: {line.split()[0]}: "):
        SPOKEN.parse(line)


def test_error_about_a_row_does_not_show_it() -> None:
    """Rows of `caches` hold access tokens."""
    for line in (
        'RDATA caches 2 ["get_user_by_access_token",["syt_secret"],1]',
        "RDATA c m 1 syt_",
    ):
        with pytest.raises(BadLine) as caught:
            SPOKEN.parse(line)
        assert "syt_" not in str(caught.value)
    assert "tok" not in repr(SPOKEN.parse('USER_IP @u:hs ["tok"]'))


@pytest.mark.parametrize(
    "command",
    [
        Rdata("events", "a b", 1, []),
        Rdata("events", "", 1, []),
        Rdata("events", "a", 1, [float("nan")]),
        Rdata("events", "a", 1, {1, 2}),
        RemoteServerUp("a\nb"),
    ],
)
def test_command_that_is_no_line_is_not_sent(command: Command) -> None:
    with pytest.raises(UnsendableCommand):
        SPOKEN.format(command)


commands = st.one_of(
    st.just(Replicate()),
    st.builds(Position, words, words, tokens, tokens),
    st.builds(Rdata, words, words, st.none() | tokens, rows),
    st.builds(FederationAck, words, tokens),
    st.builds(RemoteServerUp, words),
    st.builds(LockReleased, words, st.text(max_size=9), st.text(max_size=9)),
)


@given(commands)
def test_what_is_written_is_read_back(command: Command) -> None:
    assert SPOKEN.parse(SPOKEN.format(command)) == command


# --- batches --------------------------------------------------------------------------------------


def test_rows_of_a_batch_come_out_together_at_its_token() -> None:
    batches = RdataBatches()
    assert batches.add(Rdata("caches", "master", None, 1)) is None
    assert batches.add(Rdata("caches", "master", None, 2)) is None
    assert batches.add(Rdata("caches", "master", 54, 3)) == (54, (1, 2, 3))
    assert batches.add(Rdata("caches", "master", 55, 4)) == (55, (4,))


def test_interleaved_batches_of_two_writers_stay_apart() -> None:
    batches = RdataBatches()
    assert batches.add(Rdata("events", "ev1", None, "a")) is None
    assert batches.add(Rdata("events", "ev2", None, "b")) is None
    assert batches.add(Rdata("events", "ev2", 8, "c")) == (8, ("b", "c"))
    assert batches.add(Rdata("events", "ev1", 7, "d")) == (7, ("a", "d"))


def test_discarded_batch_leaves_nothing_behind() -> None:
    batches = RdataBatches(max_bytes=10)
    for _ in range(5):
        batches.add(Rdata("events", "ev1", None, "a", size=9))
        batches.discard("events", "ev1")
    assert batches.add(Rdata("events", "ev1", 7, "d")) == (7, ("d",))


def test_batch_that_does_not_end_is_bounded_in_rows_and_bytes() -> None:
    few = RdataBatches(max_rows=2)
    few.add(Rdata("events", "master", None, 1))
    few.add(Rdata("events", "master", None, 2))
    with pytest.raises(BadLine, match="does not end"):
        few.add(Rdata("events", "master", None, 3))
    small = RdataBatches(max_bytes=100)
    small.add(Rdata("events", "a", None, 1, size=60))
    with pytest.raises(BadLine, match="does not end"):
        small.add(Rdata("events", "b", None, 1, size=60))
