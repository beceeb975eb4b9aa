"""The endpoint that a homeserver appends to, over HTTP."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import trio
from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.security import HTTPBearer
from pydantic import Field
from starlette.responses import Response

from fedsender.config import Address
from fedsender.embedded.facts import (
    EPHEMERAL_STREAMS,
    BadRow,
    Elsewhere,
    Full,
    KeyReused,
    Outdated,
    id_of,
)
from fedsender.embedded.intake import (
    MAX_APPENDS,
    Append,
    Busy,
    Intake,
    OtherEpoch,
    ReservationGone,
    Waiting,
)
from fedsender.http.application import Body, Error, json_answer, new_app
from fedsender.http.outcomes import (
    MAX_OUTCOMES,
    RETRY_AFTER_MS,
    After,
    Limit,
    OutcomesPage,
    WaitS,
    answer_outcomes,
)
from fedsender.http.server import Admin, Bounds, MakeTls, Refusal, not_found, serve_app
from fedsender.outcomes import Outcomes
from fedsender.runtime import Runtime

if TYPE_CHECKING:
    from fedsender.sender.registry import Progress

PREFIX: Final = "/_fedsender/intake/v1"
OPENAPI_PATH: Final = f"{PREFIX}/openapi.json"
BOUNDS: Final = Bounds(
    body_bytes=8 * 2**20,
    smaller="send fewer records at once",
    requests=128,
    setting="intake token_file",
)
ANSWER_S: Final = 30.0
"""A request that the database has not answered by then is told to come again."""
PROGRESS: Final = ("fanned_out", "delivered", "servers", "behind")


@dataclass(slots=True)
class Feedback:
    """What the sender that takes the appends says of them.

    Attributes:
        progress: says how far it is; None while it does not know its backlog.
    """

    progress: "Callable[[], Progress | None]"
    outcomes: Outcomes


router = APIRouter(
    prefix=PREFIX,
    tags=["intake"],
    dependencies=[
        Security(HTTPBearer(auto_error=False, description=f"The text of {BOUNDS.setting}."))
    ],
    responses={status: {"model": Error} for status in (400, 401, 403, 404, 409, 410, 413, 503)},
)


class Appends(Body):
    """Records in the order in which they are to stand."""

    appends: list[Append] = Field(min_length=1, max_length=MAX_APPENDS)
    epoch: str | None = Field(
        default=None,
        max_length=64,
        description="The epoch of the last answer. Once it is over nothing is taken, so that "
        "records which a restored store lacks can come first.",
    )


class Reserve(Body):
    """Places in the stream, for work that is about to begin."""

    writer: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Who; shown to operators.")
    count: int = Field(default=1, ge=1, le=100)


class EphemeralRows(Body):
    """The body of `ephemeral`: rows that are of use only now."""

    typing: list[Any] = Field(
        default=[], max_length=MAX_APPENDS, description="[room_id, [users that type now]]"
    )
    receipts: list[Any] = Field(
        default=[],
        max_length=MAX_APPENDS,
        description='[room_id, receipt_type, user_id, event_id, thread_id or null, {"ts": ms}]',
    )
    presence: list[Any] = Field(
        default=[],
        max_length=MAX_APPENDS,
        description="[user_id, state, last_active_ms, status or null, currently_active, [servers]]",
    )
    server_up: list[Any] = Field(
        default=[],
        max_length=MAX_APPENDS,
        description="Names of servers that the homeserver heard from: what waits for them to be "
        "back is tried now.",
    )


# Async, or FastAPI would go through a thread for it.
async def _intake_of(request: Request) -> Intake:
    intake = request.app.state.context
    assert isinstance(intake, Intake)
    return intake


AnyReach = Annotated[Intake, Depends(_intake_of)]


async def _open_intake(intake: AnyReach) -> Intake:
    if intake.closed is not None:
        raise _elsewhere(intake.closed)
    return intake


Reach = Annotated[Intake, Depends(_open_intake)]


@router.post("/append", summary="Append records; 200: all are on disk")
async def append(request: Appends, intake: Reach) -> Response:
    """`{"epoch": "...", "tokens": [...]}`, a token per append (null where there were no rows).

    With `sign_events` also `"events": [...]`, one per append, null where it has none: each as it is
    stored, `{"event_id": "$...", "hashes": {...}, "signatures": {...}}`.

    After anything but a 200, or none, some may be there: send the same again, with the same ids.
    409 FEDSENDER_OTHER_EPOCH: `epoch` is over, and nothing was taken; ask for the position. 409
    FEDSENDER_RESERVATION_GONE: reserve again. 409 FEDSENDER_ID_REUSED: an id came with other
    rows before. 409 FEDSENDER_SERVERS_OUTDATED: rooms have later rows than `as_of`; nothing of the
    record is stored, and `rooms` has the stored servers of the first of them, `others` counts the
    rest. 503 FEDSENDER_FULL, _BUSY, _WAITING (for a place before it), _DISK: try later
    (Retry-After). 503 FEDSENDER_ELSEWHERE: `instance` takes the appends, of several senders.
    """
    epoch = intake.recorder.epoch
    if intake.signer is None:
        with _refusals():
            tokens = await intake.append(request.appends, request.epoch)
        return json_answer({"epoch": epoch, "tokens": tokens})
    with _refusals():
        tokens, events = await intake.append_shown(request.appends, request.epoch)
    return json_answer({"epoch": epoch, "tokens": tokens, "events": events})


@router.post("/reserve", summary="Reserve places, in this order")
async def reserve(request: Reserve, intake: Reach) -> Response:
    """`{"reservations": [...], "lapse_ms": 60000}`. Each is to be completed by an append within
    that time, or is given up; whatever is appended meanwhile waits for it."""
    with _refusals():
        places = intake.reserve(request.writer, request.count)
    lapse_ms = round(intake.settings.lapse_s * 1000)
    return json_answer({"reservations": places, "lapse_ms": lapse_ms})


@router.post("/ephemeral", summary="Hand on what is of use only now")
async def ephemeral(request: EphemeralRows, intake: Reach) -> Response:
    """`{}`. Nothing of it is kept: a sender that is not connected never learns of it."""
    rows = [(stream, row) for stream in EPHEMERAL_STREAMS for row in getattr(request, stream)]
    with _refusals():
        await intake.ephemeral(rows)
    return json_answer({})


@router.get("/position", summary="How far the homeserver's events are")
async def position(request: Request, intake: AnyReach) -> Response:
    """`{"epoch": "...", "stored": 9, "fanned_out": 9, "delivered": 8, "servers": 42, "behind": 1}`:
    up to `stored` all is durable, and need not be kept for another try. Up to `delivered` all
    servers have answered to events, but `behind` of them: they fail, wait, or are held by an
    operator. It says nothing of EDUs: to-device messages, device lists and keys may still wait.

    Unknown values are null: the last four while the sender begins, and of a relay. `first` is the
    oldest token in a relay's log.
    """
    recorder, feedback = intake.recorder, request.app.state.feedback
    with _refusals():
        stored = recorder.stored()
    said = None if feedback is None else feedback.progress()
    return json_answer(
        {
            "epoch": recorder.epoch,
            "first": recorder.first,
            "stored": stored,
            **(dict.fromkeys(PROGRESS) if said is None else said._asdict()),
        }
    )


@router.get(
    "/outcomes", summary="What became of events at each server", response_model=OutcomesPage
)
async def outcomes(
    request: Request, after: After = "", limit: Limit = MAX_OUTCOMES, wait_s: WaitS = 0.0
) -> Response:
    """`{"outcomes": [{"event_id", "token", "server", "outcome", "ms", "transaction_id", "reason",
    "supersedes"}], "cursor": "..."}`, in the order of the ledger: an entry for each attempt.

    410 FEDSENDER_GAP: the ledger is not kept back to `after`; `oldest` is where it begins now. 404:
    a relay sends nothing itself. 503 FEDSENDER_BUSY: too many readers.
    """
    feedback: Feedback | None = request.app.state.feedback
    if feedback is None:
        raise Refusal(404, "M_NOT_FOUND", "a relay sends nothing; ask its senders")
    return await answer_outcomes(feedback.outcomes, after, limit, wait_s)


@router.get("/rooms/{room_id:path}", summary="Which servers are in a room, as far as it was said")
async def room(room_id: str, intake: Reach) -> Response:
    """`{"epoch": "...", "room_id": "!r:hs.example", "token": 17, "servers": [...]}`: the servers
    that get the room's next event, and the token of the last `hosts` or `servers` row about it.
    404: none came.
    """
    with _refusals():
        found = await intake.recorder.room_servers(id_of(room_id, "room id"))
    if found is None:
        raise not_found("no row has said who is in this room")
    return json_answer({"epoch": intake.recorder.epoch, **found._asdict()})


def _elsewhere(closed: Elsewhere) -> Refusal:
    more = {"instance": closed.instance, "retry_after_ms": RETRY_AFTER_MS}
    return Refusal(503, "FEDSENDER_ELSEWHERE", str(closed), more)


@contextmanager
def _refusals(within_s: float = ANSWER_S) -> Iterator[None]:
    """Raise the body's errors as refusals; a refusal, too, if it takes too long."""
    later = {"retry_after_ms": RETRY_AFTER_MS}
    try:
        with trio.move_on_after(within_s) as scope:
            yield
        if scope.cancelled_caught:
            raise Full(f"the database has not answered for {within_s:.0f} s: send the same again")
    except BadRow as bad:
        raise Refusal(400, "M_BAD_JSON", str(bad)) from bad
    except KeyReused as reused:
        raise Refusal(409, "FEDSENDER_ID_REUSED", str(reused)) from reused
    except Outdated as outdated:
        rooms = [each._asdict() for each in outdated.rooms]
        more = {"rooms": rooms, "others": outdated.others}
        raise Refusal(409, "FEDSENDER_SERVERS_OUTDATED", str(outdated), more) from outdated
    except OtherEpoch as other:
        raise Refusal(409, "FEDSENDER_OTHER_EPOCH", str(other)) from other
    except ReservationGone as gone:
        raise Refusal(409, "FEDSENDER_RESERVATION_GONE", str(gone)) from gone
    except Elsewhere as closed:
        raise _elsewhere(closed) from closed
    except Waiting as waiting:
        raise Refusal(503, "FEDSENDER_WAITING", str(waiting), later) from waiting
    except Busy as busy:
        raise Refusal(503, "FEDSENDER_BUSY", str(busy), later) from busy
    except Full as full:
        raise Refusal(503, "FEDSENDER_FULL", str(full), later) from full
    except OSError as error:
        raise Refusal(503, "FEDSENDER_DISK", str(error), later) from error


def build_app(intake: Intake | None, feedback: Feedback | None = None) -> FastAPI:
    """The application; without an intake it can only be described."""
    summary = "Where a homeserver appends what its federation senders are to send"
    app = new_app("fedsender relay", summary, OPENAPI_PATH, intake, router)
    app.state.feedback = feedback
    return app


@asynccontextmanager
async def serve_intake(
    intake: Intake,
    listen: Address,
    token_file: Path | None,
    runtime: Runtime,
    make_tls: MakeTls | None = None,
    feedback: Feedback | None = None,
) -> AsyncIterator[Admin]:
    """The endpoint, answering until the body is left. Raises ConfigError, CannotListen.

    `feedback`: of the sender that takes the appends; None: there is a relay in between. Where a
    token is asked for, our group may open a Unix socket: a homeserver is another user.
    """
    app, mode = build_app(intake, feedback), 0o600 if token_file is None else 0o660
    async with serve_app(
        lambda: app, listen, token_file, runtime, "append endpoint", BOUNDS, make_tls, mode
    ) as served:
        try:
            yield served
        finally:
            if feedback is not None:
                feedback.outcomes.end()


def description() -> dict[str, Any]:
    """The OpenAPI document."""
    return build_app(None).openapi()
