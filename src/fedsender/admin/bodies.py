"""The bodies of requests, checked before anything is touched; how a request is refused; and
`Reach`, by which an endpoint gets the daemon."""

from collections.abc import Mapping
from typing import Annotated, Self

import orjson
import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fedsender.admin.context import AdminContext
from fedsender.config.values import ServerName, ServerPattern

log = structlog.get_logger()

_LONGEST = 500


# Async, or FastAPI would go through a thread for it.
async def _context_of(request: Request) -> AdminContext:
    context = request.app.state.context
    assert isinstance(context, AdminContext)
    return context


Reach = Annotated[AdminContext, Depends(_context_of)]


class Error(BaseModel):
    """The answer to every refused request."""

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


MAX_SERVERS = 10_000
MAX_PAIRS = 10_000
MAX_IDS = 1_000
MAX_INTEGER = 2**63 - 1


def _event_id(value: str) -> str:
    if not value.startswith("$") or not 2 <= len(value.encode(errors="replace")) <= 255:
        raise ValueError("not an event id")
    if not value.isprintable() or " " in value:
        raise ValueError("not an event id")
    return value


EventId = Annotated[str, AfterValidator(_event_id)]


class Body(BaseModel):
    """A request's JSON object; keys that it does not know are refused."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        """The first unknown key is enough: Pydantic makes an error of 1 KiB for each."""
        if isinstance(value, dict):
            unknown = next((key for key in value if key not in cls.model_fields), None)
            if unknown is not None:
                raise ValueError(f"there is no key {unknown!r:.100}")
        return value


class Servers(Body):
    """Either servers by name, or every known server that a pattern covers."""

    servers: list[ServerName] | None = Field(
        default=None, min_length=1, max_length=MAX_SERVERS, description="Server names."
    )
    pattern: ServerPattern | None = Field(
        default=None, description="A name or a pattern with * and ?; case is ignored."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.servers is None) == (self.pattern is None):
            raise ValueError("either servers or pattern must be given")
        return self


_ONE_LINE = r"^[^\x00-\x1f\x7f]*$"
MAX_PAUSE_MS = 366 * 86_400_000


class ServersWithReason(Servers):
    """Servers, and why."""

    reason: str = Field(
        default="by an operator",
        min_length=1,
        max_length=500,
        pattern=_ONE_LINE,
        description="Shown wherever the servers' state is.",
    )


class Pause(ServersWithReason):
    """Servers to send nothing to, why, and for how long."""

    for_ms: StrictInt | None = Field(
        default=None,
        ge=1_000,
        le=MAX_PAUSE_MS,
        description="The pause ends by itself after so many milliseconds; else by resume only.",
    )
    by: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        pattern=_ONE_LINE,
        description="The operator's name, as why shows it.",
    )


class Purge(Body):
    """One server to forget."""

    server: ServerName
    force: StrictBool = Field(
        default=False,
        description="Also while rooms are shared with it, whose events it then misses.",
    )


class Since(Body):
    """A server that is to get again what it got since a time, part by part."""

    server: ServerName
    since_ts: Annotated[
        StrictInt, Field(ge=0, le=MAX_INTEGER, description="Milliseconds since the epoch.")
    ]
    after: Annotated[StrictInt, Field(ge=0, le=MAX_INTEGER)] | None = Field(
        default=None, description="`next_after` of the part before."
    )
    upto: Annotated[StrictInt, Field(ge=0, le=MAX_INTEGER)] | None = Field(
        default=None, description="`upto` of the part before."
    )
    dry_run: StrictBool = Field(default=False, description="Only list the events.")


class Skip(Body):
    """The event to pass over."""

    token: Annotated[StrictInt, Field(ge=1, le=MAX_INTEGER, description="Its stream ordering.")]


class InQuarantine(Body):
    """Either items of the quarantine, or those that block a room."""

    ids: list[Annotated[StrictInt, Field(ge=1, le=MAX_INTEGER)]] | None = Field(
        default=None, min_length=1, max_length=MAX_IDS, description="Items by id."
    )
    room_id: str | None = Field(
        default=None,
        min_length=2,
        max_length=255,
        pattern=_ONE_LINE,
        description="The first events of this room that no server got, in order; see `more`.",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.ids is None) == (self.room_id is None):
            raise ValueError("either ids or room_id must be given")
        return self


class Pairs(Body):
    """Events, each with the server that is to get it again."""

    pairs: list[tuple[ServerName, EventId]] = Field(
        min_length=1, max_length=MAX_PAIRS, description="[[server, event id], ...]"
    )
