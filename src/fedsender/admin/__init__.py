"""The operator's side: an HTTP endpoint on loopback or a Unix socket, and the client for it.

`fedsender.http` serves it. `app` puts the endpoints together: `endpoints` (ours), `probes` (health,
readiness, metrics). `client` is for the command line; `page`, `shown` and the files of `web` are
for browsers.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from fedsender.admin.context import AdminContext
    from fedsender.admin.page import Page
    from fedsender.admin.standby import StandsBy
    from fedsender.config import Config
    from fedsender.http.server import Admin
    from fedsender.runtime import Runtime

__all__ = ["open_admin", "open_standby"]


@asynccontextmanager
async def open_admin(context: "AdminContext") -> AsyncIterator["Admin"]:
    """The endpoint of this daemon, and that of its metrics, answering until the body is left.

    Raises:
        ConfigError: the token's file cannot be read.
        CannotListen: the address cannot be listened on; an OSError.
    """
    # Here, because the command line only needs the client.
    import trio

    from fedsender.admin.context import remember_for_ever
    from fedsender.http.server import PROBES, serve_app

    def make_app() -> "FastAPI":
        from fedsender.admin.app import build_app

        return build_app(context)

    def make_page(token: Callable[[], str | None]) -> "Page":
        from fedsender.admin.page import Page

        return Page(token, runtime.entropy)

    def make_probes() -> "FastAPI":
        from fedsender.admin.app import build_probes

        return build_probes(context)

    config, runtime = context.config, context.runtime
    admin, listen = config.admin, config.metrics.listen
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(
            serve_app(
                make_app,
                admin.listen,
                admin.token_file,
                runtime,
                "admin endpoint",
                make_page=make_page,
            )
        )
        if listen is not None:
            await stack.enter_async_context(
                serve_app(make_probes, listen, None, runtime, "metrics endpoint", PROBES)
            )
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(remember_for_ever, context)
        if context.store.shared:
            from fedsender.admin.together import answer_others

            nursery.start_soon(answer_others, context)
        stack.callback(context.outcomes.end)
        yield served
        nursery.cancel_scope.cancel()


def open_standby(
    context: "StandsBy", config: "Config", runtime: "Runtime"
) -> AbstractAsyncContextManager["Admin"]:
    """The endpoint of a daemon that stands by; raises as `open_admin` does."""
    from fedsender.http.server import serve_app

    def make_app() -> "FastAPI":
        from fedsender.admin.standby import build_app

        return build_app(context)

    admin = config.admin
    return serve_app(make_app, admin.listen, admin.token_file, runtime, "admin endpoint")
