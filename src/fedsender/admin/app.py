"""The endpoints put together, and their description."""

from typing import Any

from fastapi import FastAPI

from fedsender.admin import endpoints, probes, shown
from fedsender.admin.client import PREFIX
from fedsender.admin.context import AdminContext
from fedsender.http.application import new_app

OPENAPI_PATH = f"{PREFIX}/openapi.json"


def build_app(context: AdminContext | None) -> FastAPI:
    """The application; without `context` it can only be described."""
    summary = "What a federation sender is doing, and what an operator can do about it"
    routers = probes.router, endpoints.router, shown.router
    return new_app("fedsender", summary, OPENAPI_PATH, context, *routers)


def build_probes(context: AdminContext) -> FastAPI:
    """The application that answers machines on other hosts: health, readiness, metrics."""
    return new_app("fedsender", "Health, readiness and metrics", "", context, probes.router)


def description() -> dict[str, Any]:
    """The OpenAPI document."""
    return build_app(None).openapi()
