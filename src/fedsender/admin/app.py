"""The endpoints put together, and their description."""

from typing import Any

from fastapi import FastAPI

from fedsender.admin import endpoints, probes, shown
from fedsender.admin.client import PREFIX
from fedsender.admin.context import AdminContext
from fedsender.http.application import DESCRIBED, new_app

OPENAPI_PATH = f"{PREFIX}/openapi.json"


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
