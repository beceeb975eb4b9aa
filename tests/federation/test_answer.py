"""What a peer said to a transaction: only facts, and bounded ones."""

import json
import time
from collections.abc import Sequence

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender.federation.transport import (
    MAX_RETRY_AFTER_S,
    Answer,
    Response,
    answer_of,
    longest_answer,
    parse_answer,
    retry_after_s,
)

NOW_MS = 1_700_000_000_000  # Tue, 14 Nov 2023 22:13:20 GMT


def response(status: int, body: object = None, **headers: str) -> Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Response(status, tuple(pairs), raw)


@pytest.mark.parametrize(
    "body",
    [b'{"pdus":{}}', b"{}", b'{"pdus":{"$a":{"error":"\\ud800"}},"more":1}', b' {"x": 1e5}\n'],
)
def test_object_whose_pdus_are_absent_or_an_object_is_an_answer(body: bytes) -> None:
    assert parse_answer(body) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"[]", b'"x"', b"<html>", b'{"pdus":[]}', b'{"pdus":null}', b"{} {}"),
        *(b'{"pdus":NaN}', b'{"x":Infinity}', b"\xff", b"[" * 200_000, b'{"a":' * 200_000),
        b'{"x":' + b"9" * 10_000 + b"}",
    ],
)
def test_anything_else_is_none(body: bytes) -> None:
    assert parse_answer(body) is None


@pytest.mark.parametrize(
    ("status", "body", "blank"),
    [
        *((200, body, True) for body in (b"", b" \r\n", b"null", b"[]", b"\xef\xbb\xbf[ ]")),
        *((200, body, True) for body in (b'{"pdus":null}', b'{"pdus":[],"more":1}')),
        *((200, body, False) for body in (b"{}", b'{"pdus":{}}', b"<html></html>", b"OK", b"0")),
        *((200, body, False) for body in (b"[{}]", b'{"pdus":["x"]}', b'{"pdus":""}', b"[" * 9999)),
        *((status, b"", False) for status in (201, 202, 204, 302, 404, 503)),
    ],
)
def test_answer_that_says_nothing_is_told_from_others(
    status: int, body: bytes, blank: bool
) -> None:
    """Synapse#9065: to be judged by who says it, and to what."""
    said = answer_of(Response(status, (), body), [], reused=True, now_ms=lambda: NOW_MS)

    assert said.blank is blank
    assert not (said.blank and said.is_answer)


@given(st.binary(max_size=200))
def test_no_body_makes_parsing_fail(body: bytes) -> None:
    parse_answer(body)


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (response(429, {}, retry_after="120"), 120.0),
        (response(503, {}, retry_after="Tue, 14 Nov 2023 22:14:20 GMT"), 60.0),
        (response(503, {}, retry_after="Tue, 14 Nov 2023 22:12:20 GMT"), 0.0),
        (response(429, {}, retry_after="9" * 400), MAX_RETRY_AFTER_S),
        (response(429, {}, retry_after="soon"), None),
        (response(429, {}, retry_after="-5"), None),
        (response(429, {"retry_after_ms": 2500}), 2.5),
        (response(429, {"retry_after_ms": 10**30}), MAX_RETRY_AFTER_S),
        (response(429, {"retry_after_ms": True}), None),
        (response(429, {"retry_after_ms": -1}), None),
        (response(429, {"retry_after_ms": 1e999}), None),
        # The header is the newer of the two.
        (response(429, {"retry_after_ms": 2500}, retry_after="7"), 7.0),
        (response(500, {"retry_after_ms": 2500}), None),
        (response(500, {}, retry_after="7"), 7.0),
    ],
)
def test_wait_that_a_peer_asks_for_is_read_and_bounded(
    answer: Response, seconds: float | None
) -> None:
    assert retry_after_s(answer, lambda: NOW_MS) == seconds


@given(st.text(st.characters(max_codepoint=255), max_size=60))
def test_no_retry_after_makes_reading_fail(value: str) -> None:
    answer = Response(429, ((b"retry-after", value.encode("latin-1")),), b"")
    seconds = retry_after_s(answer, lambda: NOW_MS)
    assert seconds is None or 0 <= seconds <= MAX_RETRY_AFTER_S


def answer(status: int, body: object, event_ids: Sequence[str] = ()) -> Answer:
    said = response(status, body)
    return answer_of(said, event_ids, reused=True, now_ms=lambda: NOW_MS)


def test_only_200_is_an_answer_and_all_else_has_words() -> None:
    taken = answer(200, {"pdus": {}})
    assert (taken.is_answer, taken.text) == (True, "")
    refused = answer(403, {"errcode": "M_FORBIDDEN", "error": "Go\naway"})
    assert (refused.is_answer, refused.text) == (False, "M_FORBIDDEN: Go away")
    assert not answer(202, {"pdus": {}}).is_answer
    assert answer(502, b"<html>\xff" + b"x" * 5000).text.startswith("<html>")
    assert len(answer(502, b"x" * 5000).text) == 300
    assert answer(500, {"errcode": 5}).text == ""


PDUS = {
    "$good": {},
    "$bad": {"error": "not\x00allowed"},
    "$odd": {"error": {"x": 1}},
    "$worse": None,
}


def test_pdus_that_were_refused_are_named_with_their_errors() -> None:
    assert answer(200, {"pdus": PDUS}, list(PDUS)).refused == {
        "$bad": "not allowed",
        "$odd": "an error that is not text",
        "$worse": "not an object",
    }
    assert answer(200, {}, list(PDUS)).refused == {}
    assert answer(403, {"pdus": PDUS}, list(PDUS)).refused == {}


def test_only_pdus_that_were_in_the_transaction_can_be_refused() -> None:
    assert answer(200, {"pdus": PDUS}, ["$good", "$odd"]).refused.keys() == {"$odd"}
    assert answer(200, {"pdus": PDUS | {"\ud800": {"error": "x"}}}, ["$other"]).refused == {}


@pytest.mark.parametrize("error", ["y" * 1_000, "\U0001f600" * 1_000, "\x01" * 1_000, "\ud800"])
def test_what_a_ledger_line_keeps_of_an_answer_is_small(error: str) -> None:
    sent = [f"${n:043}" for n in range(60)]
    named = sent + [str(n) + "\x01" * 250 for n in range(40)]
    said = answer(200, {"pdus": {each: {"error": error} for each in named}}, sent)
    assert said.is_answer
    assert said.refused.keys() == set(sent[:50])
    assert len(orjson.dumps(said.refused)) < 50 * 260


def test_honest_answer_with_fifty_long_errors_fits() -> None:
    text = "403: You are not allowed (power 0 of 50, [x]), " * 20
    sent = [f"${n:043}" for n in range(50)]
    body = json.dumps({"pdus": {each: {"error": text} for each in sent}}).encode()
    assert len(body) <= longest_answer(50) == 264 * 1024
    assert len(answer(200, body, sent).refused) == 50


@pytest.mark.parametrize("part", [b"[]", b"{}", b"1", b'["x"]'])
def test_body_of_too_many_parts_is_not_parsed(part: bytes) -> None:
    def body(parts: int) -> bytes:
        """So many of the characters that are counted."""
        each = part.count(b"[") + part.count(b"{") + 1
        return b'{"x":[' + b",".join([part] * ((parts - 1) // each)) + b"]}"

    assert parse_answer(body(1_000)) is not None
    assert parse_answer(body(1_010)) is None
    assert parse_answer(body(4_200), pdus=50) is not None
    assert parse_answer(body(4_210), pdus=50) is None
    assert parse_answer(body(1_010).decode().encode("utf-16")) is None


def longest(start: bytes, unit: bytes, end: bytes) -> bytes:
    """The longest body that is read, of so many units."""
    return start + unit * ((longest_answer(50) - len(start) - len(end)) // len(unit)) + end


@pytest.mark.parametrize(
    "body",
    [
        *(longest(b'{"a":[', b"[],", b"1]}"), longest(b"", b"[", b""), longest(b"", b'{"a":', b"")),
        *(b"[" * 4_200 + b"]" * 4_200, b'{"a":' * 4_200 + b"1" + b"}" * 4_200),
        *(longest(b'{"a":', b"1", b"}"), longest(b'{"a":1.', b"1", b"}")),
        *(longest(b'{"a":[', b"9" * 4_299 + b",", b"1]}"), longest(b'{"a":', b" ", b"1}")),
        *(longest(b'{"a":"', b"\\ud800", b'"}'), longest(b"", b"\xff", b"")),
    ],
)
@pytest.mark.parametrize("status", [200, 429])
def test_no_body_holds_the_loop(status: int, body: bytes) -> None:
    def cost() -> float:
        before = time.thread_time()
        answer(status, body, [f"${n}" for n in range(50)])
        return time.thread_time() - before

    # The least of a few: Python's search for garbage of other tests may fall into one. A tenth of
    # this on a quiet machine; the answer of 10 MiB took three seconds.
    assert min(cost() for _ in range(5)) < 0.1
