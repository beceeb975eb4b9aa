"""The operator's side: an HTTP endpoint on loopback or a Unix socket, and the client for it.

`serving` listens; `access` is the only way in (token, sizes, deadlines); `app` puts the endpoints
together: `endpoints` (ours), `synapse_endpoints` (those that Synapse has, too), `probes` (health,
readiness, metrics). `client` is for the command line; `page`, `shown` and the files of `web` are
for browsers.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from fedsender.admin.context import AdminContext, Failing, Follows, Gate
    from fedsender.admin.serving import Admin
    from fedsender.config import Policies
    from fedsender.runtime import Runtime
    from fedsender.sender.sender import Sender
    from fedsender.store import Store
    from fedsender.telemetry import Metrics

__all__ = ["open_admin"]


@asynccontextmanager
async def open_admin(
    *,
    policies: "Policies",
    store: "Store",
    sender: "Sender",
    feed: "Follows",
    ledger: "Failing",
    gate: "Gate",
    metrics: "Metrics",
    runtime: "Runtime",
) -> AsyncIterator["Admin"]:
    """The endpoint of this daemon, and that of its metrics, answering until the body is left.

    Raises:
        ConfigError: the token's file cannot be read.
        CannotListen: the address cannot be listened on; an OSError.
    """
    # Here, because the command line only needs the client.
    import trio

    from fedsender.admin.http1 import PROBES
    from fedsender.admin.serving import serve_app

    began = trio.current_time()

    def context() -> "AdminContext":
        from fedsender.admin.context import AdminContext

        return AdminContext(
            policies=policies,
            sender=sender,
            homeserver=store.homeserver,
            store=store.sender,
            feed=feed,
            ledger=ledger,
            gate=gate,
            runtime=runtime,
            metrics=metrics,
            ledger_directory=policies.config.ledger.directory,
            began=began,
        )

    def make_app() -> "FastAPI":
        from fedsender.admin.app import build_app

        return build_app(context())

    def make_probes() -> "FastAPI":
        from fedsender.admin.app import build_probes

        return build_probes(context())

    admin, listen = policies.config.admin, policies.config.metrics.listen
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(
            serve_app(
                make_app, admin.listen, admin.token_file, runtime, "admin endpoint", with_page=True
            )
        )
        if listen is not None:
            await stack.enter_async_context(
                serve_app(make_probes, listen, None, runtime, "metrics endpoint", PROBES)
            )
        if policies.config.notify.command or policies.config.notify.url:
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            nursery.start_soon(_notify, context)
        yield served


async def _notify(make_context: "Callable[[], AdminContext]") -> None:
    from fedsender.admin.notify import notify

    await notify(make_context())
