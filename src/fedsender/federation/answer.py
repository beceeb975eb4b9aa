"""What a peer said to a transaction, checked before anybody believes it.

Only the facts: what follows from them is the sender's failure table.
"""

import email.utils
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fedsender.federation.transport import Response, words

# Far beyond any wait that makes sense; what it really comes to is for the failure table to say.
MAX_RETRY_AFTER_S: Final = 30 * 86_400.0
# A transaction has 50 PDUs at most, so an honest answer has no more.
_MAX_REFUSED: Final = 50
_MAX_EVENT_ID: Final = 255


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer to a transaction.

    Attributes:
        status: HTTP status.
        content: its JSON, if it is an answer in the sense of the specification: status 200 and
            what `parse_answer` takes.
        text: what the peer says went wrong, in words; "" if it says nothing.
        retry_after_s: for how many seconds the peer asks to be left alone.
        ms: how long the exchange took, in milliseconds, a repetition on a new connection included.
        reused: it came over a connection that had carried an exchange before.
        request_bytes: size of the request's body.
        answer_bytes: size of the answer's body.
    """

    status: int
    content: dict[str, Any] | None
    text: str
    retry_after_s: float | None
    ms: int
    reused: bool
    request_bytes: int
    answer_bytes: int

    @property
    def refused(self) -> Mapping[str, str]:
        """Event id and error of each PDU that the peer refused though it took the transaction."""
        pdus = (self.content or {}).get("pdus") or {}
        refused: dict[str, str] = {}
        for event_id, result in pdus.items():
            error = _pdu_error(result)
            if error is not None and len(refused) < _MAX_REFUSED:
                refused[event_id[:_MAX_EVENT_ID]] = error
        return refused


def answer_of(
    response: Response, *, ms: int, reused: bool, request_bytes: int, now_ms: int
) -> Answer:
    """`response` as an `Answer`; `now_ms` is the wall clock, for dates in `Retry-After`."""
    content = parse_answer(response.body) if response.status == 200 else None
    return Answer(
        status=response.status,
        content=content,
        text="" if content is not None else _error_text(response),
        retry_after_s=retry_after_s(response, now_ms),
        ms=ms,
        reused=reused,
        request_bytes=request_bytes,
        answer_bytes=len(response.body),
    )


def parse_answer(body: bytes) -> dict[str, Any] | None:
    """The JSON of an answer to a transaction; None if it is none.

    It is one if it is a JSON object whose `pdus` is absent or an object.
    """
    document = _json_object(body)
    if document is None or not isinstance(document.get("pdus", {}), dict):
        return None
    return document


def retry_after_s(response: Response, now_ms: int) -> float | None:
    """The seconds that `Retry-After`, or Matrix's older `retry_after_ms`, asks us to wait."""
    header = response.header(b"retry-after")
    if header is not None:
        wait = _seconds_until(header.decode("latin-1").strip(), now_ms)
        if wait is not None:
            return min(max(wait, 0.0), MAX_RETRY_AFTER_S)
    if response.status in (429, 503):
        asked = (_json_object(response.body) or {}).get("retry_after_ms")
        if isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0:
            return min(asked, MAX_RETRY_AFTER_S * 1000) / 1000
    return None


def _seconds_until(value: str, now_ms: int) -> float | None:
    """From a number of seconds or an HTTP date; None if it is neither."""
    if value.isascii() and value.isdigit():
        return float(value[:12])
    try:
        return email.utils.parsedate_to_datetime(value).timestamp() - now_ms / 1000
    except (ValueError, OverflowError):
        return None


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        # Not orjson: it refuses lone surrogates, which a peer may quote from an event it refused.
        document = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _pdu_error(result: object) -> str | None:
    if not isinstance(result, dict):
        return "not an object"
    if "error" not in result:
        return None
    error = result["error"]
    return words(error) if isinstance(error, str) else "an error that is not text"


def _error_text(response: Response) -> str:
    """Errcode and error of a Matrix error, or the beginning of whatever else it is."""
    document = _json_object(response.body)
    if document is None:
        return words(response.body[:1000].decode("utf-8", errors="replace"))
    parts = [document.get("errcode"), document.get("error")]
    return words(": ".join(part for part in parts if isinstance(part, str)))
