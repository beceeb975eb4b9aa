"""What a peer said to a transaction: only facts, and bounded ones."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsender.federation.answer import MAX_RETRY_AFTER_S, answer_of, parse_answer, retry_after_s
from fedsender.federation.transport import Response

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
    assert retry_after_s(answer, NOW_MS) == seconds


@given(st.text(st.characters(max_codepoint=255), max_size=60))
def test_no_retry_after_makes_reading_fail(value: str) -> None:
    answer = Response(429, ((b"retry-after", value.encode("latin-1")),), b"")
    seconds = retry_after_s(answer, NOW_MS)
    assert seconds is None or 0 <= seconds <= MAX_RETRY_AFTER_S


def answer(status: int, body: object) -> Any:
    return answer_of(response(status, body), ms=5, reused=True, request_bytes=10, now_ms=NOW_MS)


def test_only_200_has_content_and_all_else_has_words() -> None:
    assert answer(200, {"pdus": {}}).content == {"pdus": {}}
    assert answer(200, {"pdus": {}}).text == ""
    refused = answer(403, {"errcode": "M_FORBIDDEN", "error": "Go\naway"})
    assert (refused.content, refused.text) == (None, "M_FORBIDDEN: Go away")
    assert answer(202, {"pdus": {}}).content is None
    assert answer(502, b"<html>\xff" + b"x" * 5000).text.startswith("<html>")
    assert len(answer(502, b"x" * 5000).text) == 300
    assert answer(500, {"errcode": 5}).text == ""


def test_pdus_that_were_refused_are_named_with_their_errors() -> None:
    pdus = {
        "$good": {},
        "$bad": {"error": "not\x00allowed"},
        "$odd": {"error": {"x": 1}},
        "$worse": None,
    }
    assert answer(200, {"pdus": pdus}).refused == {
        "$bad": "not allowed",
        "$odd": "an error that is not text",
        "$worse": "not an object",
    }
    assert answer(200, {}).refused == {}
    assert answer(403, {"pdus": pdus}).refused == {}


def test_refusals_are_bounded_in_number_and_length() -> None:
    pdus = {"$" + "x" * 1000 + str(n): {"error": "y" * 1000} for n in range(500)}
    pdus |= {f"${n}": {"error": "y" * 1000} for n in range(500)}
    refused = answer(200, {"pdus": pdus}).refused
    assert len(refused) <= 50
    assert all(len(key) <= 255 and len(text) <= 300 for key, text in refused.items())
