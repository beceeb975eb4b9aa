"""What requests may say, checked before anything is touched."""

from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from fedsender.config.values import ServerName, ServerPattern

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


class Body(BaseModel):
    """A request's JSON object; keys that it does not know are refused."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class Servers(Body):
    """Either servers by name, or every known server that a pattern covers."""

    servers: list[ServerName] | None = Field(
        default=None, min_length=1, max_length=MAX_SERVERS, description="Server names."
    )
    pattern: ServerPattern | None = Field(
        default=None, description="A name or a pattern with * and ?; case is ignored."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.servers is None) == (self.pattern is None):
            raise ValueError("either servers or pattern must be given")
        return self


class ServersWithReason(Servers):
    """Servers, and why."""

    reason: str = Field(
        default="by an operator",
        min_length=1,
        max_length=500,
        pattern=r"^[^\x00-\x1f\x7f]*$",
        description="Shown wherever the servers' state is.",
    )


class Purge(Body):
    """One server to forget."""

    server: ServerName
    force: StrictBool = Field(
        default=False,
        description="Also while rooms are shared with it, whose events it then misses.",
    )


class Skip(Body):
    """The event to pass over."""

    token: Annotated[StrictInt, Field(ge=1, le=MAX_INTEGER, description="Its stream ordering.")]


class Ids(Body):
    """Items of the quarantine."""

    ids: list[Annotated[StrictInt, Field(ge=1, le=MAX_INTEGER)]] = Field(
        min_length=1, max_length=MAX_IDS
    )


class Pairs(Body):
    """Events, each with the server that is to get it again."""

    pairs: list[tuple[ServerName, EventId]] = Field(
        min_length=1, max_length=MAX_PAIRS, description="[[server, event id], ...]"
    )
