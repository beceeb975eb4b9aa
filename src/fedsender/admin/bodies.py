"""The bodies of requests, checked before anything is touched; and `Reach`, by which an endpoint
gets the daemon."""

from typing import Annotated, Self

from fastapi import Depends, Request
from pydantic import (
    AfterValidator,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from fedsender.admin.context import AdminContext
from fedsender.config.values import ServerName, ServerPattern
from fedsender.http.application import Body


# Async, or FastAPI would go through a thread for it.
async def _context_of(request: Request) -> AdminContext:
    context = request.app.state.context
    assert isinstance(context, AdminContext)
    return context


Reach = Annotated[AdminContext, Depends(_context_of)]


MAX_SERVERS = 10_000
MAX_PAIRS = 10_000
MAX_IDS = 1_000
MAX_INTEGER = 2**63 - 1


def _event_id(value: str) -> str:
    if not value.startswith("$") or not 2 <= len(value.encode(errors="replace")) <= 255:
        raise ValueError("not an event id")
    if not value.isprintable() or " " in value:
        raise ValueError("not an event id")
    return value


EventId = Annotated[str, AfterValidator(_event_id)]


class Servers(Body):
    """Either servers by name, or every known server that a pattern covers."""

    servers: list[ServerName] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SERVERS,
        fail_fast=True,
        description="Server names.",
    )
    pattern: ServerPattern | None = Field(
        default=None, description="A name or a pattern with * and ?; case is ignored."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.servers is None) == (self.pattern is None):
            raise ValueError("either servers or pattern must be given")
        return self


_ONE_LINE = r"^[^\x00-\x1f\x7f]*$"
MAX_PAUSE_MS = 366 * 86_400_000


class ServersWithReason(Servers):
    """Servers, and why."""

    reason: str = Field(
        default="by an operator",
        min_length=1,
        max_length=500,
        pattern=_ONE_LINE,
        description="Shown wherever the servers' state is.",
    )


class Pause(ServersWithReason):
    """Servers to send nothing to, why, and for how long."""

    for_ms: StrictInt | None = Field(
        default=None,
        ge=1_000,
        le=MAX_PAUSE_MS,
        description="The pause ends by itself after so many milliseconds; else by resume only.",
    )
    by: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        pattern=_ONE_LINE,
        description="The operator's name, as why shows it.",
    )


class Purge(Body):
    """One server to forget."""

    server: ServerName
    force: StrictBool = Field(
        default=False,
        description="Also while rooms are shared with it, whose events it then misses.",
    )


class Since(Body):
    """A server that is to get again what it got since a time, part by part."""

    server: ServerName
    since_ts: Annotated[
        StrictInt, Field(ge=0, le=MAX_INTEGER, description="Milliseconds since the epoch.")
    ]
    after: Annotated[StrictInt, Field(ge=0, le=MAX_INTEGER)] | None = Field(
        default=None, description="`next_after` of the part before."
    )
    upto: Annotated[StrictInt, Field(ge=0, le=MAX_INTEGER)] | None = Field(
        default=None, description="`upto` of the part before."
    )
    dry_run: StrictBool = Field(default=False, description="Only list the events.")


class Skip(Body):
    """The event to pass over."""

    token: Annotated[StrictInt, Field(ge=1, le=MAX_INTEGER, description="Its stream ordering.")]


class InQuarantine(Body):
    """Either items of the quarantine, or those that block a room."""

    ids: list[Annotated[StrictInt, Field(ge=1, le=MAX_INTEGER)]] | None = Field(
        default=None, min_length=1, max_length=MAX_IDS, description="Items by id."
    )
    room_id: str | None = Field(
        default=None,
        min_length=2,
        max_length=255,
        pattern=_ONE_LINE,
        description="The first events of this room that no server got, in order; see `more`.",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.ids is None) == (self.room_id is None):
            raise ValueError("either ids or room_id must be given")
        return self


class Pairs(Body):
    """Events, each with the server that is to get it again."""

    pairs: list[tuple[ServerName, EventId]] = Field(
        min_length=1, max_length=MAX_PAIRS, fail_fast=True, description="[[server, event id], ...]"
    )
