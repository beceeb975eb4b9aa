"""The endpoints put together, and their description."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from fedsender.admin import endpoints, homeserver, probes, refusal
from fedsender.admin.parts import Parts

OPENAPI_PATH = f"{endpoints.PREFIX}/openapi.json"

# For the description only: `access` has checked the token before any of this runs.
_DESCRIBED = [Security(HTTPBearer(auto_error=False, description="The text of admin.token_file."))]


def build_app(parts: Parts | None) -> FastAPI:
    """The application; without `parts` it can only be described."""
    app = FastAPI(
        title="fedsender",
        summary="What a federation sender is doing, and what an operator can do about it",
        version=_version(),
        openapi_url=OPENAPI_PATH,
        # Their pages load scripts from other people's servers.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.parts = parts
    app.include_router(probes.router)
    app.include_router(endpoints.router, dependencies=_DESCRIBED)
    app.include_router(homeserver.router, dependencies=_DESCRIBED)
    refusal.install(app)
    return app


def _version() -> str:
    try:
        return version("fedsender")
    except PackageNotFoundError:
        return "not installed"


def description() -> dict[str, Any]:
    """The OpenAPI document."""
    return build_app(None).openapi()
