"""The endpoints put together, and their description."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from fedsender.admin import bodies, endpoints, probes, synapse_endpoints
from fedsender.admin.context import AdminContext
from fedsender.admin.probes import Failing, Follows, Gate, observe, problems
from fedsender.admin.serving import Admin, serve_app
from fedsender.config import Policies
from fedsender.runtime import Runtime
from fedsender.sender.sender import Sender
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.sender import SenderStore
from fedsender.telemetry import Metrics

OPENAPI_PATH = f"{endpoints.PREFIX}/openapi.json"

# For the description only: `access` has checked the token before any of this runs.
DESCRIBED = [Security(HTTPBearer(auto_error=False, description="The text of admin.token_file."))]


def new_app(title: str, summary: str, openapi_url: str, context: object) -> FastAPI:
    """An application without endpoints, whose every error is one of `refusal`.

    Args:
        context: what its endpoints reach, as `app.state.context`; None: it can only be described.
    """
    app = FastAPI(
        title=title,
        summary=summary,
        version=_version(),
        openapi_url=openapi_url,
        # Their pages load scripts from other people's servers.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    bodies.install(app)
    return app


def build_app(context: AdminContext | None) -> FastAPI:
    """The application; without `context` it can only be described."""
    summary = "What a federation sender is doing, and what an operator can do about it"
    app = new_app("fedsender", summary, OPENAPI_PATH, context)
    app.include_router(probes.router)
    app.include_router(endpoints.router, dependencies=DESCRIBED)
    app.include_router(synapse_endpoints.router, dependencies=DESCRIBED)
    return app


def _version() -> str:
    try:
        return version("fedsender")
    except PackageNotFoundError:
        return "not installed"


def description() -> dict[str, Any]:
    """The OpenAPI document."""
    return build_app(None).openapi()


class Stores(Protocol):
    """Both stores."""

    @property
    def homeserver(self) -> HomeserverStore: ...
    @property
    def sender(self) -> SenderStore: ...


class Admission(Protocol):
    """What says whether this daemon may send."""

    @property
    def gate(self) -> Gate: ...


class Daemon(Protocol):
    """The context of the daemon that the endpoint shows and moves."""

    @property
    def policies(self) -> Policies: ...
    @property
    def store(self) -> Stores: ...
    @property
    def sender(self) -> Sender: ...
    @property
    def feed(self) -> Follows: ...
    @property
    def ledger(self) -> Failing: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def admission(self) -> Admission: ...


def parts_of(daemon: Daemon, runtime: Runtime) -> AdminContext:
    """What the endpoints reach of this daemon."""
    homeserver, own = daemon.store.homeserver, daemon.store.sender
    return AdminContext(
        policies=daemon.policies,
        sender=daemon.sender,
        homeserver=homeserver,
        store=own,
        runtime=runtime,
        metrics=daemon.metrics,
        appends=lambda: daemon.feed.status().appends,
        observe=lambda: observe(daemon.sender, daemon.feed, daemon.metrics),
        ledger_directory=daemon.policies.config.ledger.directory,
        problems=lambda: problems(
            daemon.feed,
            homeserver,
            own,
            daemon.ledger,
            daemon.admission.gate,
            daemon.sender.registry.complete,
            daemon.sender.context.troubles,
            daemon.sender.fan_out.standstill,
        ),
    )


@asynccontextmanager
async def serve_parts(context: AdminContext) -> AsyncIterator[Admin]:
    """The endpoint, answering until the body is left.

    Raises:
        ConfigError: the token's file cannot be read.
        CannotListen: the address cannot be listened on.
    """
    admin = context.config.admin
    async with serve_app(
        lambda: build_app(context),
        admin.listen,
        admin.token_file,
        context.runtime,
        "admin endpoint",
    ) as served:
        yield served
