"""`GET outcomes`, as the endpoints of operators and of homeservers have it."""

from typing import Annotated, Any, Final

import trio
from fastapi import Query
from pydantic import BaseModel
from starlette.responses import Response

from fedsender.http.application import json_answer
from fedsender.http.server import Refusal, bad_param
from fedsender.outcomes import BadCursor, Cursor, Gap, Outcomes, TooMany

MAX_OUTCOMES: Final = 1000
MAX_WAIT_S: Final = 60.0
READ_S: Final = 30.0
"""The disk may take so long."""
RETRY_AFTER_MS: Final = 1000

After = Annotated[
    str, Query(max_length=100, description="The cursor of the last answer; none: the oldest.")
]
Limit = Annotated[
    int, Query(ge=1, le=MAX_OUTCOMES, description="Events; an attempt is not cut in two.")
]
WaitS = Annotated[
    float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait, if there is nothing new.")
]


class OutcomesPage(BaseModel):
    """What is answered, for the description of the endpoint: outcomes in the ledger's order."""

    outcomes: list[dict[str, Any]]
    cursor: str | None


async def answer_outcomes(outcomes: Outcomes, after: str, limit: int, wait_s: float) -> Response:
    """The answer: `outcomes` and `cursor`.

    Raises:
        Refusal: 400: no cursor. 410 FEDSENDER_GAP: the ledger is not kept back to it. 503: too many
            readers, or the disk does not answer.
    """
    later = {"retry_after_ms": RETRY_AFTER_MS}
    try:
        cursor = Cursor.parse(after) if after else None
        with trio.fail_after(wait_s + READ_S):
            page = await outcomes.read(cursor, limit, wait_s)
    except BadCursor as bad:
        raise bad_param(f"after: {bad}") from bad
    except Gap as gap:
        oldest = {"oldest": None if gap.oldest is None else str(gap.oldest)}
        raise Refusal(410, "FEDSENDER_GAP", str(gap), oldest) from gap
    except TooMany as many:
        raise Refusal(503, "FEDSENDER_BUSY", str(many), later) from many
    except trio.TooSlowError as slow:
        raise Refusal(503, "FEDSENDER_DISK", "the ledger cannot be read in time", later) from slow
    except OSError as error:
        raise Refusal(503, "FEDSENDER_DISK", str(error), later) from error
    at = None if page.cursor is None else str(page.cursor)
    return json_answer({"outcomes": page.outcomes, "cursor": at})
