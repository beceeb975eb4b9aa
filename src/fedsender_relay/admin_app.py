"""The relay's endpoints for operators and machines; served as the daemon's are."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import structlog
from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from fedsender.admin.client import PREFIX
from fedsender.config import Config
from fedsender.http.application import DESCRIBED, Body, Error, json_answer, new_app
from fedsender.http.server import Admin, Refusal, not_found, serve_app
from fedsender.runtime import Runtime
from fedsender.store.engine import StoreError
from fedsender.telemetry import EXPOSITION_TYPE
from fedsender_relay.registry import Connected
from fedsender_relay.status import RelayMetrics, Status, problems, status_of

if TYPE_CHECKING:
    from fedsender_relay.daemon import RelayDaemon

log = structlog.get_logger()

open_router = APIRouter(tags=["probes"])
router = APIRouter(
    prefix=f"{PREFIX}/relay",
    tags=["relay"],
    dependencies=DESCRIBED,
    responses={status: {"model": Error} for status in (400, 401, 403, 404, 409)},
)


class Forget(Body):
    """The consumer to forget."""

    name: str = Field(min_length=1, max_length=64, description="The consumer's name.")


@dataclass(slots=True)
class RelayContext:
    """The relay as the endpoints see it.

    Attributes:
        relay: the running relay, which has the lease; None: it stands by.
        waits: the reason then.
    """

    relay: "RelayDaemon | None" = None
    waits: str = "the database has not answered yet"
    metrics: RelayMetrics = field(default_factory=RelayMetrics)

    def holding(self) -> "RelayDaemon":
        """The relay, while it has the lease. Raises Refusal."""
        if self.relay is None:
            raise Refusal(503, "M_UNKNOWN", f"standing by: {self.waits}")
        return self.relay


# Async, or FastAPI would go through a thread for it.
async def _context_of(request: Request) -> RelayContext:
    context = request.app.state.context
    assert isinstance(context, RelayContext)
    return context


Reach = Annotated[RelayContext, Depends(_context_of)]


@open_router.get("/health", summary="200 while the loop turns and the disk answers")
async def health(context: Reach) -> Response:
    hung = context.relay is not None and context.relay.hub.hung()
    return json_answer({"alive": not hung}, 503 if hung else 200)


@open_router.get("/ready", summary="200 if facts are taken in and nothing is wrong, else 503")
async def ready(context: Reach) -> Response:
    waits = f"standing by: {context.waits}"
    reasons = [waits] if context.relay is None else list(problems(context.relay))
    return json_answer({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@open_router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(context: Reach) -> Response:
    return Response(await context.metrics.exposition(context.relay), media_type=EXPOSITION_TYPE)


@router.get("", summary="The log, its consumers and snapshots")
async def status(context: Reach) -> Status:
    try:
        return await status_of(context.holding())
    except StoreError as error:
        raise Refusal(503, "M_UNKNOWN", str(error)) from None


@router.post("/forget", summary="Remove a consumer that is not connected; its log may go")
async def forget(request: Forget, context: Reach) -> dict[str, str]:
    relay = context.holding()
    try:
        relay.registry.forget(request.name)
    except KeyError:
        raise not_found("no consumer has that name") from None
    except Connected as connected:
        raise Refusal(409, "M_UNKNOWN", f"{connected}: stop it first") from None
    await relay.registry.save()
    relay.retention.look()
    log.warning("relay_consumer_forgotten", consumer=request.name)
    return {"forgotten": request.name}


def build_app(context: RelayContext) -> FastAPI:
    """The application."""
    summary = "What a relay holds, and for whom"
    path = f"{PREFIX}/relay/openapi.json"
    return new_app("fedsender relay", summary, path, context, open_router, router)


def open_admin(
    context: RelayContext, config: Config, runtime: Runtime
) -> AbstractAsyncContextManager[Admin]:
    """The endpoint of this relay; raises as `serve_app` does."""
    app, admin = build_app(context), config.admin
    return serve_app(lambda: app, admin.listen, admin.token_file, runtime, "relay's admin endpoint")
