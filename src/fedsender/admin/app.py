"""The endpoints put together, and their description."""

from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from fedsender import version
from fedsender.admin import bodies, endpoints, probes, shown
from fedsender.admin.client import PREFIX
from fedsender.admin.context import AdminContext

OPENAPI_PATH = f"{PREFIX}/openapi.json"

# For the description only: `access` has checked the token before any of this runs.
DESCRIBED = [Security(HTTPBearer(auto_error=False, description="The text of admin.token_file."))]


def new_app(title: str, summary: str, openapi_url: str, context: object) -> FastAPI:
    """An application without endpoints; each of its errors is one of `refusal`.

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
    bodies.install(app)
    return app


def build_app(context: AdminContext | None) -> FastAPI:
    """The application; without `context` it can only be described."""
    summary = "What a federation sender is doing, and what an operator can do about it"
    app = new_app("fedsender", summary, OPENAPI_PATH, context)
    app.include_router(probes.router)
    app.include_router(endpoints.router, dependencies=DESCRIBED)
    app.include_router(shown.router)
    return app


def build_probes(context: AdminContext) -> FastAPI:
    """The application that answers machines on other hosts: health, readiness, metrics."""
    app = new_app("fedsender", "Health, readiness and metrics", "", context)
    app.include_router(probes.router)
    return app


def description() -> dict[str, Any]:
    """The OpenAPI document."""
    return build_app(None).openapi()
