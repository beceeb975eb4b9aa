"""The admin endpoint over a real sender and store; remote servers that do as they are told."""

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.sender.harness import World

from fedsender.admin import open_admin
from fedsender.admin.app import build_app
from fedsender.admin.context import AdminContext
from fedsender.admin.page import Page
from fedsender.config import Policies
from fedsender.federation.signing import KeyRing, signing_key_from_seed
from fedsender.http.server import Admin, Doorkeeper
from fedsender.outcomes import Outcomes
from fedsender.streams import FeedStatus

TOKEN = "the admin token"
OURS = "/_fedsender/admin/v1"


@dataclass
class Standing:
    """The rest of a daemon: its feed, ledger and gate, as a test wants them to stand."""

    feed: FeedStatus = field(
        default_factory=lambda: FeedStatus("tcp", connected=True, level=True, position=1, head=1)
    )
    failing: str | None = None
    open: bool = True
    lack: str | None = None

    def status(self) -> FeedStatus:
        return self.feed


@dataclass
class Desk:
    """A client with the token, and what stands behind the endpoint, whose token may change."""

    http: httpx.AsyncClient
    world: World
    context: AdminContext
    standing: Standing
    token: str | None

    async def get(self, path: str, status: int = 200, **query: Any) -> dict[str, Any]:
        response = await self.http.get(path if path[0] == "/" else f"{OURS}/{path}", params=query)
        return checked(response, status)

    async def post(self, path: str, body: object, status: int = 200) -> dict[str, Any]:
        url = path if path[0] == "/" else f"{OURS}/{path}"
        # Not httpx's own encoding, which knows no lone surrogates.
        response = await self.http.post(url, content=json.dumps(body).encode())
        return checked(response, status)


def checked(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    content: dict[str, Any] = response.json()
    if status >= 400 and "reasons" not in content:
        assert set(content) >= {"errcode", "error"}
    return content


def serve(world: World, standing: Standing) -> AbstractAsyncContextManager[Admin]:
    """The endpoint of this running sender, on the address of its configuration."""
    return open_admin(context_of(world, standing))


def context_of(world: World, standing: Standing) -> AdminContext:
    config = world.config()
    return AdminContext(
        policies=Policies(config),
        keys=KeyRing(signing_key_from_seed("a_1", bytes(32))),
        sender=world.sender,
        homeserver=world.store.homeserver,
        store=world.store.sender,
        feed=standing,
        ledger=standing,
        outcomes=Outcomes(world.sender.context.ledger, world.runtime),
        gate=standing,
        runtime=world.runtime,
        metrics=world.metrics,
        senders=config.senders,
    )


@asynccontextmanager
async def open_desk(world: World, token: str | None = TOKEN) -> AsyncIterator[Desk]:
    """A running sender and its endpoint, without sockets."""
    standing = Standing()
    async with world.run():
        context = context_of(world, standing)

        def current() -> str | None:
            return desk.token

        page = Page(current, world.runtime.entropy)
        app: Any = Doorkeeper(build_app(context), current, page=page)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, raise_app_exceptions=True),
            base_url="http://127.0.0.1:9009",
            headers={"Authorization": f"Bearer {TOKEN}"},
        ) as http:
            desk = Desk(http, world, context, standing, token)
            yield desk
