"""The endpoints that Synapse has for federation destinations: same paths, parameters, answers.

They read and reset the same rows; tools written for Synapse's admin API work with them. Only a
`limit` above 10,000 differs: it counts as 10,000, and `next_token` leads to the rest.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from fedsender.admin.bodies import (
    MAX_INTEGER,
    Error,
    Reach,
    Refusal,
    bad_param,
    json_answer,
    not_found,
)
from fedsender.admin.context import AdminContext
from fedsender.store.homeserver import SORTABLE
from fedsender.store.records import DestinationRow

PREFIX = "/_synapse/admin/v1/federation/destinations"
MAX_ROWS = 10_000

router = APIRouter(
    prefix=PREFIX,
    tags=["as Synapse"],
    responses={400: {"model": Error}, 401: {"model": Error}, 404: {"model": Error}},
)

# Described for OpenAPI, and read by hand: Synapse's errors are not those of FastAPI.
From = Annotated[str, Query(alias="from", description="Rows to skip: a `next_token`.")]
Limit = Annotated[str, Query(description="Rows at most.")]
Direction = Annotated[str, Query(alias="dir", description="f (ascending) or b.")]


def _integer(name: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19:
        raise bad_param(f"Query parameter {name} must be an integer")
    if digits != text or int(text) > MAX_INTEGER:
        raise bad_param(f"Query parameter {name} must be a positive integer.")
    return int(text)


def _direction(text: str) -> Literal["f", "b"]:
    if text == "f":
        return "f"
    if text == "b":
        return "b"
    raise bad_param("Query parameter 'dir' must be one of ['b', 'f']")


def _with_token(answer: dict[str, Any], start: int, limit: int, total: int) -> Response:
    if start + limit < total:
        answer["next_token"] = str(start + limit)
    return json_answer(answer)


@router.get("", summary="The rows of the destinations table, in pages")
async def list_destinations(
    context: Reach,
    start: From = "0",
    limit: Limit = "100",
    destination: Annotated[str | None, Query(description="Part of the name, any case.")] = None,
    order_by: Annotated[str, Query(description=", ".join(SORTABLE))] = "destination",
    direction: Direction = "f",
) -> Response:
    skip, most = _integer("from", start), min(_integer("limit", limit), MAX_ROWS)
    if order_by not in SORTABLE:
        raise bad_param(f"Query parameter 'order_by' must be one of {list(SORTABLE)}")
    if destination is not None and len(destination) > 300:
        raise bad_param("Query parameter 'destination' is too long")
    await context.homeserver.write_marks()
    page = await context.homeserver.destinations_page(
        skip, most, order_by, _direction(direction), destination
    )
    return _with_token({"destinations": page.rows, "total": page.total}, skip, most, page.total)


async def _row(context: AdminContext, destination: str) -> DestinationRow:
    await context.homeserver.write_marks(destination)
    row = await context.homeserver.backoff(destination) if len(destination) <= 300 else None
    if row is None:
        raise not_found("Unknown destination")
    return DestinationRow(
        destination, row.retry_last_ts or 0, row.retry_interval or 0, row.failure_ts, row.lsso
    )


@router.get("/{destination}", summary="One row")
async def one_destination(destination: str, context: Reach) -> Response:
    return json_answer(await _row(context, destination))


@router.get("/{destination}/rooms", summary="Its rooms, each with the newest event it is owed")
async def rooms(
    destination: str,
    context: Reach,
    start: From = "0",
    limit: Limit = "100",
    direction: Direction = "f",
) -> Response:
    skip, most = _integer("from", start), min(_integer("limit", limit), MAX_ROWS)
    order = _direction(direction)
    await _row(context, destination)
    page = await context.homeserver.destination_rooms_page(destination, skip, most, order)
    found = [{"room_id": room, "stream_ordering": ordering} for room, ordering in page.rows]
    return _with_token({"rooms": found, "total": page.total}, skip, most, page.total)


@router.post("/{destination}/reset_connection", summary="Forget its failures and try it now")
async def reset_connection(destination: str, request: Request, context: Reach) -> Response:
    row = await _row(context, destination)
    status = context.sender.registry.status(destination)
    if not row.retry_last_ts and (status is None or status.state.healthy):
        text = "The retry timing does not need to be reset for this destination."
        raise Refusal(400, "M_UNKNOWN", text)
    stream_id = await context.homeserver.store_backoff(destination, None, 0, 0)
    announcer = context.sender.context.announcer
    if stream_id is not None:
        await announcer.publish_backoff(destination, stream_id, context.runtime.now_ms())
    # For the sender whose server it is, if it is not ours.
    await announcer.publish_server_up(destination)
    context.sender.registry.wake([destination], by_admin=True)
    return json_answer({})
