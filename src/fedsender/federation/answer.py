"""The answer of a peer to a transaction, checked before it is used.

It has only facts: the sender's failure table decides on their consequences.
"""

import email.utils
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fedsender.federation.transport import Response, words

# A sanity cap; `failure.RULES` has the real bound.
MAX_RETRY_AFTER_S: Final = 30 * 86_400.0
_MAX_DATE: Final = 100
_MAX_REFUSED: Final = 50
_MAX_ERROR_BYTES: Final = 200
_ANSWER_BYTES: Final = 65_536
_ANSWER_BYTES_PER_PDU: Final = 4_096
# What an object or a list costs to parse is far more than its bytes.
_PARTS: Final = 1_000
_PARTS_PER_PDU: Final = 64


class Answer(NamedTuple):
    """A whole answer to a transaction.

    Attributes:
        status: HTTP status.
        is_answer: it is one in the sense of the specification: status 200 and accepted by
            `parse_answer`.
        refused: event id and error of each PDU that the peer refused though it took the
            transaction; of those that were in it, at most 50, each error at most 200 bytes.
        text: the error in the peer's words; "" if it gives none.
        retry_after_s: seconds for which the peer asks to be left alone, if this is no answer.
        reused: it came over a connection that had carried an exchange before.
        blank: it is none, but only because it says nothing: status 200, and a body that is empty,
            `null` or `[]`, or has a `pdus` that is `null` or `[]`.
    """

    status: int
    is_answer: bool
    refused: Mapping[str, str]
    text: str
    retry_after_s: float | None
    reused: bool
    blank: bool = False


def longest_answer(pdus: int) -> int:
    """The size limit of an answer to so many PDUs, in bytes."""
    return _ANSWER_BYTES + _ANSWER_BYTES_PER_PDU * pdus


def answer_of(
    response: Response,
    event_ids: Sequence[str],
    *,
    reused: bool,
    now_ms: Callable[[], int],
) -> Answer:
    """`response` as an `Answer`.

    Args:
        event_ids: of the PDUs that the transaction carried.
        now_ms: reads the wall clock, for dates in `Retry-After`.
    """
    content = parse_answer(response.body, len(event_ids)) if response.status == 200 else None
    if content is not None:
        return Answer(200, True, _refused(content, event_ids), "", None, reused)
    wait_s, text = retry_after_s(response, now_ms), _error_text(response)
    blank = response.status == 200 and _says_nothing(response.body)
    return Answer(response.status, False, {}, text, wait_s, reused, blank)


def parse_answer(body: bytes, pdus: int = 0) -> dict[str, Any] | None:
    """The JSON of an answer to a transaction with so many PDUs; None if the body is no such answer.

    An answer is a JSON object with a `pdus` that is absent or an object.
    """
    document = json_object(body, pdus)
    if document is None or not isinstance(document.get("pdus", {}), dict):
        return None
    return document


def _says_nothing(body: bytes) -> bool:
    if not body.strip():
        return True
    try:
        document = _decoded(body)
    except ValueError:
        return False
    if isinstance(document, dict):
        document = document.get("pdus", "")
    return document is None or document == []


def json_object(body: bytes, pdus: int = 0) -> dict[str, Any] | None:
    """The JSON object in `body`; None if there is none, or it has too many parts to be parsed.

    Args:
        pdus: number of PDUs that it answers; each may have some more parts.
    """
    try:
        document = _decoded(body, pdus)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _decoded(body: bytes, pdus: int = 0) -> object:
    """The JSON value in `body`, with the bounds of `json_object`; raises ValueError.

    The parts are counted first: a parser holds the event loop until it is done, in a thread too.
    """
    if body.count(b",") + body.count(b"{") + body.count(b"[") > _PARTS + _PARTS_PER_PDU * pdus:
        raise ValueError("too many parts to be parsed")
    try:
        # Not orjson: it refuses lone surrogates, which a peer may quote from an event it refused.
        return _decoder.decode(body.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("too deep to be parsed") from error


def retry_after_s(response: Response, now_ms: Callable[[], int]) -> float | None:
    """The seconds that `Retry-After`, or Matrix's older `retry_after_ms`, asks us to wait."""
    header = response.header(b"retry-after")
    if header is not None:
        text = header[:_MAX_DATE].decode("latin-1").strip()
        wait = _seconds_until(text, said_at_s(response, now_ms))
        if wait is not None:
            return min(max(wait, 0.0), MAX_RETRY_AFTER_S)
    if response.status in (429, 503):
        asked = (json_object(response.body) or {}).get("retry_after_ms")
        if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
            return min(asked, MAX_RETRY_AFTER_S * 1000) / 1000
    return None


def said_at_s(response: Response, now_ms: Callable[[], int]) -> float:
    """The time of an answer in seconds since the epoch: its own `Date`, by the clock of its other
    dates; by ours if it has none."""
    date = response.header(b"date")
    moment = None if date is None else moment_s(date[:_MAX_DATE].decode("latin-1"))
    return now_ms() / 1000 if moment is None else moment


def moment_s(date: str) -> float | None:
    """An HTTP date in seconds since the epoch; None if it is none."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _seconds_until(value: str, now_s: float) -> float | None:
    """Seconds until the moment in `value`, a number of seconds or an HTTP date; None if neither."""
    if value.isascii() and value.isdigit():
        return float(value[:12])
    moment = moment_s(value)
    return None if moment is None else moment - now_s


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_decoder: Final = json.JSONDecoder(parse_constant=_refuse)


def _refused(content: Mapping[str, Any], event_ids: Sequence[str]) -> dict[str, str]:
    pdus = content.get("pdus")
    if not pdus:
        return {}
    errors = ((each, _pdu_error(pdus[each])) for each in event_ids[:_MAX_REFUSED] if each in pdus)
    return {event_id: error for event_id, error in errors if error is not None}


def _pdu_error(result: object) -> str | None:
    if not isinstance(result, dict):
        return "not an object"
    if "error" not in result:
        return None
    error = result["error"]
    if not isinstance(error, str):
        return "an error that is not text"
    return words(error).encode()[:_MAX_ERROR_BYTES].decode(errors="ignore")


def _error_text(response: Response) -> str:
    """Errcode and error of a Matrix error, or the beginning of any other body."""
    document = json_object(response.body)
    if document is None:
        return words(response.body[:1000].decode("utf-8", errors="replace"))
    parts = [document.get("errcode"), document.get("error")]
    return words(": ".join(part for part in parts if isinstance(part, str)))
