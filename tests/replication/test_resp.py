"""RESP2, however the bytes are cut, and whatever they are."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender.replication.resp import (
    BadReply,
    ErrorReply,
    Reply,
    ReplyReader,
    request,
)

REPLIES: list[tuple[bytes, Reply]] = [
    (b"+OK\r\n", b"OK"),
    (b"-ERR no\r\n", ErrorReply("ERR no")),
    (b":-12\r\n", -12),
    (b"$5\r\nhello\r\n", b"hello"),
    (b"$0\r\n\r\n", b""),
    (b"*0\r\n", []),
    (
        b"*3\r\n$7\r\nmessage\r\n$10\r\nhs.example\r\n$10\r\nREPLICATE \r\n",
        [b"message", b"hs.example", b"REPLICATE "],
    ),
    (b"*2\r\n$4\r\na\r\nb\r\n:1\r\n", [b"a\r\nb", 1]),
]


def replies_in(pieces: list[bytes]) -> list[Reply]:
    reader = ReplyReader()
    replies: list[Reply] = []
    for piece in pieces:
        reader.receive_data(piece)
        while (reply := reader.next_reply()) is not None:
            replies.append(reply)
    return replies


@pytest.mark.parametrize(("raw", "reply"), REPLIES)
def test_reply_is_read_whole_by_bytes_and_with_more_behind(raw: bytes, reply: Reply) -> None:
    assert replies_in([raw]) == [reply]
    assert replies_in([bytes([byte]) for byte in raw]) == [reply]
    assert replies_in([raw + raw + raw[:1]]) == [reply, reply]


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$9999999999\r\n",
        b"$99999999999999999999999\r\n",
        b"$2\r\nabc\r\n",
        b"*-5\r\n",
        b"*100000\r\n",
        b"*1\r\n*1\r\n",
        b"*1000000000\r\n",
        b"$-1\r\n",
        b":\r\n",
        b"+" + b"x" * 9000,
    ],
)
def test_what_is_not_resp_or_beyond_a_bound_is_an_error(raw: bytes) -> None:
    with pytest.raises(BadReply):
        replies_in([raw])


def test_array_of_many_large_strings_is_bounded_as_a_whole() -> None:
    reader = ReplyReader(max_bulk=100)
    reader.receive_data(b"*10\r\n" + (b"$90\r\n" + b"x" * 90 + b"\r\n") * 9)
    with pytest.raises(BadReply, match="a reply of more than"):
        reader.next_reply()


def test_request_is_an_array_of_strings() -> None:
    assert request("PUBLISH", "hs.example", "é") == (
        b"*3\r\n$7\r\nPUBLISH\r\n$10\r\nhs.example\r\n$2\r\n\xc3\xa9\r\n"
    )


@given(st.lists(st.sampled_from([b"*", b"$", b":", b"-", b"+", b"\r\n", b"1", b"3", b"x"])))
def test_no_bytes_raise_anything_but_bad_reply(parts: list[bytes]) -> None:
    with contextlib.suppress(BadReply):
        replies_in(parts)
