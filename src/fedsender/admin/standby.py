"""The endpoints of a daemon that stands by: alive, not ready, and why; all others say so too."""

from typing import Protocol

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from fedsender.http.application import json_answer, new_app
from fedsender.http.server import Refusal


class StandsBy(Protocol):
    """The daemon that stands by."""

    @property
    def why(self) -> str:
        """Why it waits, in words."""
        ...


router = APIRouter()


@router.get("/health")
async def health() -> dict[str, bool]:
    return {"alive": True}


@router.get("/ready")
async def ready(request: Request) -> Response:
    return json_answer({"ready": False, "reasons": [_reason(request)]}, 503)


@router.api_route("/{path:path}", methods=["GET", "POST"])
async def any_other(request: Request) -> Response:
    raise Refusal(503, "M_UNKNOWN", _reason(request))


def _reason(request: Request) -> str:
    return f"standing by: {request.app.state.context.why}"


def build_app(context: StandsBy) -> FastAPI:
    """The application."""
    return new_app("fedsender", "A daemon that stands by", "", context, router)
