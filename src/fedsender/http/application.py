"""What the applications behind the server share: checked bodies, answers, errors of one kind."""

from collections.abc import Mapping

import orjson
from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fedsender import version
from fedsender.http.server import Refusal, error_body


class Error(BaseModel):
    """The answer to every refused request."""

    errcode: str = Field(description="Machine-readable, as in the Matrix specification.")
    error: str = Field(description="One sentence for people.")


def json_answer(value: object, status: int = 200) -> Response:
    """`value` as a JSON answer."""
    return Response(orjson.dumps(value), status, media_type="application/json")


def _install(app: FastAPI) -> None:
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
    if place[:1] == ("path",):
        where = repr(first.get("input"))[:300]  # The one who asks gave it no name.
    text = str(first.get("msg")).removeprefix("Value error, ")
    return _answer(400, error_body(errcode, f"{where}: {text}"))


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        return _answer(error.status_code, error_body("M_UNRECOGNIZED", "no such endpoint"))
    if error.status_code == 400:
        return _answer(400, error_body("M_NOT_JSON", "the body is not JSON"))
    return _answer(error.status_code, error_body("M_UNKNOWN", "the request failed"))


class Body(BaseModel):
    """A request's JSON object; keys that it does not know are refused."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        """The first unknown key is enough: Pydantic makes an error of 1 KiB for each."""
        if isinstance(value, dict):
            unknown = value.keys() - cls.model_fields.keys()
            if unknown:
                raise ValueError(f"there is no key {min(unknown)!r:.100}")
        return value


# For the description only: the doorkeeper has checked the token before any of this runs.
DESCRIBED = [Security(HTTPBearer(auto_error=False, description="The text of admin.token_file."))]


def new_app(
    title: str, summary: str, openapi_url: str, context: object, *routers: APIRouter
) -> FastAPI:
    """An application with the endpoints of `routers`; each of its errors is a `Refusal`.

    Args:
        context: the objects that its endpoints use, as `app.state.context`; None: it can only be
        described.
    """
    app = FastAPI(
        title=title,
        summary=summary,
        version=version(),
        openapi_url=openapi_url,
        # Their pages load scripts from other people's servers.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    _install(app)
    # Not `include_router`, which makes every endpoint's models again for each application.
    for router in routers:
        app.router.routes.extend(router.routes)
    return app
