"""The operator's side: an HTTP endpoint on loopback or a Unix socket, and the client for it.

`serving` listens; `access` is the only way in (token, sizes, deadlines); `app` puts the endpoints
together: `endpoints` (ours), `homeserver` (those that Synapse has, too), `probes` (health,
readiness, metrics). `client` is what the command line uses.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from fedsender.admin.app import Daemon
    from fedsender.admin.serving import Admin
    from fedsender.runtime import Runtime

__all__ = ["open_admin"]


@asynccontextmanager
async def open_admin(daemon: "Daemon", runtime: "Runtime") -> AsyncIterator["Admin"]:
    """The endpoint of this daemon, answering until the body is left.

    Raises:
        ConfigError: the token's file cannot be read.
        CannotListen: the address cannot be listened on; an OSError.
    """
    # Here, because the command line only needs the client.
    from fedsender.admin.serving import serve_app

    def make_app() -> "FastAPI":
        from fedsender.admin.app import build_app, parts_of

        return build_app(parts_of(daemon, runtime))

    admin = daemon.policies.config.admin
    async with serve_app(
        make_app, admin.listen, admin.token_file, runtime, "admin endpoint"
    ) as served:
        yield served
