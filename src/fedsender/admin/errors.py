"""How a request is refused: a status and Matrix's error object, and nothing that was secret."""

from collections.abc import Mapping

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

log = structlog.get_logger()

_LONGEST = 500


class Error(BaseModel):
    """What every refused request is answered with."""

    errcode: str = Field(description="Machine-readable, as in the Matrix specification.")
    error: str = Field(description="One sentence for people.")


class Refusal(Exception):
    """The request is refused.

    Attributes:
        more: further fields of the answer; `retry_after_ms` is also in its head, in seconds.
    """

    def __init__(
        self, status: int, errcode: str, error: str, more: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(error)
        self.status = status
        self.errcode = errcode
        self.error = error
        self.more = more or {}


def bad_param(error: str) -> Refusal:
    """A parameter has a value that cannot be used."""
    return Refusal(400, "M_INVALID_PARAM", error)


def not_found(error: str) -> Refusal:
    """There is no such thing."""
    return Refusal(404, "M_NOT_FOUND", error)


def error_body(errcode: str, error: str, more: Mapping[str, object] | None = None) -> bytes:
    """The answer's body."""
    # A request may hold lone surrogates, and texts about it repeat them.
    text = error[:_LONGEST].encode(errors="backslashreplace").decode()
    return orjson.dumps({"errcode": errcode, "error": text, **(more or {})})


def json_answer(value: object, status: int = 200) -> Response:
    """`value` as a JSON answer."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def install(app: FastAPI) -> None:
    """Make every error of `app` an answer of this kind."""
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)


def _answer(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    wait_ms = error.more.get("retry_after_ms")
    later = {"Retry-After": str(-(-wait_ms // 1000))} if isinstance(wait_ms, int) else None
    return _answer(error.status, error_body(error.errcode, error.error, error.more), later)


async def _on_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place, kind = first.get("loc", ()), first.get("type")
    if kind == "json_invalid":
        return _answer(400, error_body("M_NOT_JSON", "the body is not JSON"))
    errcode = "M_MISSING_PARAM" if kind == "missing" else "M_INVALID_PARAM"
    if place[:1] == ("body",) and len(place) == 1:
        errcode = "M_BAD_JSON"
    where = ".".join(str(part) for part in place)
    text = str(first.get("msg")).removeprefix("Value error, ")
    return _answer(400, error_body(errcode, f"{where}: {text}"))


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        return _answer(error.status_code, error_body("M_UNRECOGNIZED", "no such endpoint"))
    if error.status_code == 400:
        return _answer(400, error_body("M_NOT_JSON", "the body is not JSON"))
    return _answer(error.status_code, error_body("M_UNKNOWN", "the request failed"))
