"""What the page shows: the facts and tables of the command line, made by the same code.

The form of these answers belongs to the page of the same version. Other programs ask `endpoints`.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query
from starlette.responses import Response

from fedsender.admin import display, endpoints
from fedsender.admin.bodies import MAX_INTEGER, EventId, Reach
from fedsender.admin.endpoints import Listed
from fedsender.admin.overview import overview
from fedsender.config.values import ServerName
from fedsender.console import safe
from fedsender.http.application import json_answer

PREFIX: Final = "/page"
ATTEMPTS: Final = 200

router = APIRouter(prefix=PREFIX, include_in_schema=False)


def _plain(found: object) -> dict[str, Any]:
    """The answer of an endpoint, as the command line gets it."""
    answer: dict[str, Any] = orjson.loads(orjson.dumps(found))
    return answer


def _table(sheet: display.Sheet) -> dict[str, object]:
    return {"columns": [column.title for column in sheet.columns], "rows": sheet.rows}


def _facts(found: Iterable[tuple[str, object]]) -> list[tuple[str, str]]:
    return [(name, safe(value)) for name, value in found]


def _keys(entries: Iterable[display.Answer], name: str) -> list[object]:
    """The name of each row, as the endpoints take it."""
    return [entry[name] for entry in entries]


@router.get("/overview")
async def shown_overview(context: Reach, listing: Listed) -> Response:
    answer = _plain(await overview(context, listing))
    page = answer["page"]
    return json_answer(
        {
            "title": safe(display.title(answer)),
            "ready": answer["ready"],
            "readiness": [safe(each) for each in display.readiness(answer)],
            "facts": _facts(display.overview_facts(answer)),
            "hour": display.hour(answer["hour"]),
            "by_error": _table(display.by_error(answer["failing_by_age"])),
            "table": _table(display.destinations(page["destinations"])),
            "keys": _keys(page["destinations"], "destination"),
            "total": page["total"],
            "footer": display.footer(page),
            "next_from": page["next_from"],
        }
    )


@router.get("/why/{server:path}")
async def shown_why(server: ServerName, context: Reach) -> Response:
    answer = _plain(await endpoints.why(server, context))
    rooms, all_rooms = answer["oldest_rooms"], answer["depth"]["rooms"]
    said = display.many(all_rooms, "room")
    if len(rooms) < all_rooms:
        said += f"; the {len(rooms)} that have waited the longest:"
    return json_answer(
        {
            "facts": _facts(display.why_facts(answer)),
            "table": _table(display.owed_rooms(rooms)),
            "said": said,
            "held": answer["paused"] is not None or answer["parked"] is not None,
        }
    )


@router.get("/attempts/{server:path}")
async def shown_attempts(server: ServerName, context: Reach) -> Response:
    answer = _plain(await endpoints.attempts(server, context, limit=ATTEMPTS))
    newest_first = answer["attempts"][::-1]
    return json_answer(
        {
            "table": _table(display.attempts(newest_first)),
            "points": [(each["at_ts"], each["took_ms"]) for each in newest_first],
            "said": display.took_in_short(newest_first),
            "cut": answer["cut"],
        }
    )


@router.get("/trace/{event_id:path}")
async def shown_trace(event_id: EventId, context: Reach) -> Response:
    answer = _plain(await endpoints.trace_event(event_id, context))
    return json_answer(
        {
            "facts": [safe(each) for each in display.trace_facts(answer)],
            "table": _table(display.fates(answer["destinations"])),
            "keys": _keys(answer["destinations"], "destination"),
        }
    )


@router.get("/quarantine")
async def shown_quarantine(
    context: Reach,
    destination: ServerName | None = None,
    after: Annotated[int, Query(alias="from", ge=0, le=MAX_INTEGER)] = 0,
) -> Response:
    answer = _plain(await endpoints.quarantine(context, destination, after))
    return json_answer(
        {
            "table": _table(display.quarantine(answer["items"])),
            "keys": _keys(answer["items"], "id"),
            "next_from": answer["next_from"],
        }
    )
