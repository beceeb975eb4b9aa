"""Several senders of one database seen as one, from any of them.

What an endpoint does or answers has a *part* for each sender: that of the servers that it sends to.
The part of the sender that was asked is done at once. The others' come over the database that they
share (`store/requests.py`): each looks for its rows four times a second. A sender without others
asks nobody.

An *order* changes something. It waits for a sender that is away, is carried out after those that
waited when it was given, and must do no harm when it is carried out twice at once. One that a
failover or a restore may have brought back is refused.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial, reduce
from importlib import import_module
from typing import Any, Final, Generic, TypeVar, get_type_hints

import structlog
import trio
from pydantic import TypeAdapter

from fedsender.admin.context import AdminContext
from fedsender.http.server import Refusal
from fedsender.store import requests
from fedsender.store.engine import StoreError
from fedsender.store.requests import HANDED_ON, Request
from fedsender.waiting import BeginAnew

log = structlog.get_logger()

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

LOOK_EVERY_S: Final = 0.25
AWAY_S: Final = 2.0
"""A sender that has not seen its row by then is away."""
PATIENCE_S: Final = 50.0
"""For the answer of one that has: less than a request may take."""
LEAVE_S: Final = 2.0
"""To take a question back, if its asker is cut off."""
AWAY: Final = "FEDSENDER_AWAY"
_SET_BACK: Final = "not carried out: the database was set back after the order was given"
NOTHING_HERE: Final = (404, 409)
"""What a sender answers that has no part in it."""


def ours(context: AdminContext, servers: Sequence[str]) -> list[str]:
    """Those of these servers that we have to do with."""
    if len(context.senders) == 1 and not context.past:
        return list(servers)
    return [each for each in servers if context.handles(each)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """An answer that several senders have a part in.

    Attributes:
        without: by name of a sender why its part is missing: an order is queued for it, or why it
            refuses.
    """

    without: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heard(Generic[Answer]):
    """The answers of the senders that were asked, by name; and why those of others are missing."""

    answers: Mapping[str, Answer]
    without: Mapping[str, str]

    def joined(self) -> Answer:
        """One answer: lists one after the other, mappings together, numbers summed up, a flag set
        if one is; else what the first one says. The answers are of a dataclass, or lists."""
        joint = summed(self.answers.values())
        if isinstance(joint, Joint):
            return replace(joint, without=self.without)
        return joint


def summed(values: Iterable[Answer]) -> Answer:
    """These together, as `Heard.joined` says."""
    return reduce(_both, values)


def _both(one: Any, other: Any) -> Any:
    match one:
        case bool():
            return one or other
        case int() | float():
            return one + other
        case list() | tuple():
            return type(one)([*one, *other])
        case Mapping():
            return {**one, **other} | {
                name: _both(one[name], other[name]) for name in one.keys() & other.keys()
            }
    if not is_dataclass(one) or isinstance(one, type):
        return one
    pairs = {
        each.name: (getattr(one, each.name), getattr(other, each.name)) for each in fields(one)
    }
    return replace(one, **{name: _both(*pair) for name, pair in pairs.items()})


class Part(Generic[Asked, Answer]):
    """What one sender does or answers, by its own memory and files.

    Attributes:
        here: does it, for the sender that we are. Raises Refusal.
    """

    def __init__(
        self, here: Callable[[AdminContext, Asked], Awaitable[Answer]], *, is_order: bool
    ) -> None:
        self.here = here
        self._name = here.__name__
        self._is_order = is_order
        PARTS[self._name] = self

    @cached_property
    def _types(self) -> tuple[TypeAdapter[Asked], TypeAdapter[Answer]]:
        _, asked, answer = get_type_hints(self.here, include_extras=True).values()
        return TypeAdapter(asked), TypeAdapter(answer)

    async def ask(
        self, context: AdminContext, asked: Asked, servers: Collection[str] | None = None
    ) -> Heard[Answer]:
        """Have each sender do it that sends to one of these servers; None: all of them.

        Raises Refusal if none does: the first one's, or that all are away.
        """
        wanted, began = context.senders, trio.current_time()
        if len(wanted) == 1:
            return Heard({wanted[0]: await self._do(context, asked, began)}, {})
        config = context.config
        me = config.instance_name
        if servers is not None:
            of = {config.sender_of(each) for each in servers}
            wanted = [name for name in wanted if name in of]
        answers: dict[str, Answer] = {}
        refusals: dict[str, Refusal] = {}
        rows = await self._ask_others(context, asked, [name for name in wanted if name != me])
        try:
            if me in wanted:
                try:
                    answers[me] = await self._do(context, asked, began)
                except Refusal as refusal:
                    refusals[me] = refusal
            if rows:
                await self._hear(context, rows, began, answers, refusals)
        finally:
            if rows:
                # Also if we are cut off: else a sender that is away would answer it when it is
                # back, before all that is asked then.
                with trio.move_on_after(LEAVE_S, shield=True):
                    await context.store.requests.leave(rows)
        if not answers:
            # Whoever has something to do with it says more than the others.
            raise min(refusals.values(), key=lambda each: each.status in NOTHING_HERE)
        without = {
            name: each.error for name, each in refusals.items() if each.status not in NOTHING_HERE
        }
        return Heard(answers, without)

    async def _do(self, context: AdminContext, asked: Asked, began: float) -> Answer:
        """Do our part: an order, after those that wait for us. Raises Refusal."""
        upto, queue = None, context.store.requests
        may_wait = self._is_order and context.store.shared and not context.asked_no_more.is_set()
        while may_wait and (last := await queue.last_order(upto)) is not None:
            if trio.current_time() - began >= PATIENCE_S:
                raise Refusal(503, AWAY, "not done: earlier orders are still being carried out")
            upto = last if upto is None else upto
            await trio.sleep(LOOK_EVERY_S / 2)
        return await self.here(context, asked)

    async def _ask_others(
        self, context: AdminContext, asked: Asked, senders: Sequence[str]
    ) -> Mapping[int, str]:
        if not senders:
            return {}
        text = json.dumps(self._types[0].dump_python(asked, mode="json"))
        rows = await context.store.requests.ask(senders, self._name, text, is_order=self._is_order)
        if rows is None:
            text = f"{requests.MOST} orders wait already for senders that are away"
            raise Refusal(503, "M_LIMIT_EXCEEDED", text)
        return rows

    async def _hear(
        self,
        context: AdminContext,
        rows: Mapping[int, str],
        began: float,
        answers: dict[str, Answer],
        refusals: dict[str, Refusal],
    ) -> None:
        """Wait for the answers to these rows; put them, or why there is none, by sender."""
        of_store, waiting = context.store.requests, dict(rows)
        while waiting:
            replies, waited_s = await of_store.replies(waiting), trio.current_time() - began
            for row in rows.keys() & waiting.keys():
                reply = replies.get(row, HANDED_ON)
                if reply.answer is not None:
                    name = waiting.pop(row)
                    said = json.loads(reply.answer)
                    if "refused" in said:
                        refusals[name] = Refusal(*said["refused"])
                    else:
                        answers[name] = self._types[1].validate_python(said["answer"])
                elif waited_s >= (PATIENCE_S if reply.taken else AWAY_S):
                    name = waiting.pop(row)
                    what = "it has not done it yet" if reply.taken else "its sender is away"
                    queued = "queued: " if self._is_order else ""
                    refusals[name] = Refusal(503, AWAY, f"{queued}{what} ({name})")
            if waiting:
                await trio.sleep(LOOK_EVERY_S / 2)

    async def answer(self, context: AdminContext, asked: str) -> str:
        """Do it for another sender; returns the answer, or the refusal, as its row has it.

        Raises BeginAnew.
        """
        said: dict[str, object]
        try:
            answer = await self.here(context, self._types[0].validate_python(json.loads(asked)))
            said = {"answer": self._types[1].dump_python(answer, mode="json")}
        except Refusal as refusal:
            refused = [refusal.status, refusal.errcode, refusal.error, refusal.more]
            said = {"refused": refused}
        except BeginAnew:
            raise  # It waits for whoever sends next.
        except Exception as error:
            log.exception("request_failed", path=self._name)
            said = {"refused": [500, "M_UNKNOWN", type(error).__name__]}
        return json.dumps(said)


PARTS: Final[dict[str, Part[Any, Any]]] = {}
"""By their names."""


def order(here: Callable[[AdminContext, Asked], Awaitable[Answer]]) -> Part[Asked, Answer]:
    """Make a part of a function that changes something."""
    return Part(here, is_order=True)


def question(here: Callable[[AdminContext, Asked], Awaitable[Answer]]) -> Part[Asked, Answer]:
    """Make a part of a function that only looks, or whose caller goes on from its answer."""
    return Part(here, is_order=False)


async def _answer(context: AdminContext, request: Request) -> str:
    if request.is_order and not request.stands:
        log.warning("order_not_carried_out", order=request.what, asked=request.asked[:200])
        return json.dumps({"refused": [503, "M_UNKNOWN", _SET_BACK]})
    part = PARTS.get(request.what)
    if part is None:
        unknown = f"it does not know {request.what}: its version is older"
        return json.dumps({"refused": [501, "M_UNRECOGNIZED", unknown]})
    return await part.answer(replace(context, past=request.past or ()), request.asked)


async def answer_others(context: AdminContext) -> None:
    """Do our part of what other senders are asked; for ever, or where we have none, until what a
    list of several left to us is done."""
    requests, one_by_one = context.store.requests, trio.Lock()
    under_way: set[int] = set()

    async def answer(request: Request) -> None:
        try:
            await requests.answer(request.id, await _answer(context, request))
        except StoreError as error:
            log.warning("request_not_answered", reason=str(error))
        finally:
            under_way.discard(request.id)

    async def carry_out(orders: Sequence[Request]) -> None:
        async with one_by_one:
            for each in orders:
                await answer(each)

    # They take 15 MB, and many a sender is never asked anything.
    load = partial(import_module, "fedsender.admin.endpoints")
    async with trio.open_nursery() as nursery:
        while True:
            try:
                found = await requests.ours(under_way)
                if len(context.senders) == 1 and not found and not under_way:
                    context.asked_no_more.set()
                    return
                if found:
                    await context.runtime.run_sync(load, limiter=context.rendering)
                    await requests.take([each.id for each in found])
            except StoreError as error:
                log.warning("requests_not_read", reason=str(error))
                found = []
            under_way.update(each.id for each in found)
            for each in found:
                if not each.is_order:
                    nursery.start_soon(answer, each)
            if orders := [each for each in found if each.is_order]:
                nursery.start_soon(carry_out, orders)
            await trio.sleep(LOOK_EVERY_S)
