"""The operator's side: an HTTP endpoint on loopback or a Unix socket, and the client for it.

`serving` listens; `access` is the only way in (token, sizes, deadlines); `app` puts the endpoints
together: `endpoints` (ours), `synapse_endpoints` (those that Synapse has, too), `probes` (health,
readiness, metrics). `client` is for the command line.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from fedsender.admin.context import Failing, Follows, Gate
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
    """The endpoint of this daemon, answering until the body is left.

    Raises:
        ConfigError: the token's file cannot be read.
        CannotListen: the address cannot be listened on; an OSError.
    """
    # Here, because the command line only needs the client.
    from fedsender.admin.serving import serve_app

    def make_app() -> "FastAPI":
        from fedsender.admin.app import build_app
        from fedsender.admin.context import AdminContext

        context = AdminContext(
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
        )
        return build_app(context)

    admin = policies.config.admin
    async with serve_app(
        make_app, admin.listen, admin.token_file, runtime, "admin endpoint"
    ) as served:
        yield served
