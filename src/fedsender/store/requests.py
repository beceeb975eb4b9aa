"""What senders of one database ask of each other: rows of the database that they share.

Whoever asks leaves a row for each sender that is to do its part. That one looks for rows of its
name, and writes its answer into them. An *order* stays until it has done so, however long it is
away; if the list of senders changes before, the new one's have it to do, for the servers that were
the absent sender's. But an order of before a failover or a restore is not carried out: it may have
been, and been undone since.
"""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from fedsender.runtime import Runtime
from fedsender.store import tables
from fedsender.store.engine import Database, reading, writing
from fedsender.store.leases import PLACE

requests = tables.requests

MOST: Final = 1_000
"""Orders without an answer. Each has at most some MiB, as a request to the admin endpoint. Whoever
asks a question takes it back."""
AT_ONCE: Final = 8
KEPT: Final = 1_000
"""Rows. Whoever has asked has taken the answer when so many more were asked, or does not wait any
more. No clocks of two machines are compared."""
AWAY_MS: Final = 3_000
"""Whoever has asked does not wait any more for a sender that has not seen the row by then."""


Past = tuple[str, Sequence[str]]
"""A sender, and the list of senders by which a server was its own."""


class Request(NamedTuple):
    """A row for us to answer.

    Attributes:
        stands: it was written in this place, see `leases.PLACE`.
        past: it is only for servers that were, by each of these lists, this sender's; None: it was
            not handed on.
    """

    id: int
    what: str
    asked: str
    is_order: bool
    stands: bool
    past: Sequence[Past] | None


class Reply(NamedTuple):
    """A row as whoever has asked finds it; `answer` None: there is none yet."""

    taken: bool
    answer: str | None


HANDED_ON: Final = Reply(taken=False, answer=None)
"""In place of a row that is not there any more: see `hand_on`."""


class Requests:
    """Questions about these rows, and changes of them; all of several senders."""

    def __init__(self, database: Database, runtime: Runtime, instance: str) -> None:
        self._database = database
        self._now_ms = runtime.now_ms
        self._instance = instance

    @writing
    def ask(
        self,
        connection: Connection,
        senders: Sequence[str],
        what: str,
        asked: str,
        *,
        is_order: bool,
    ) -> dict[int, str] | None:
        """Ask these senders; returns the row of each, by its id. None: too many orders wait.

        An order that waits already counts as of now alone: it may undo what came between.
        """
        now_ms = self._now_ms()
        if is_order:
            waits = requests.c.is_order & requests.c.answer.is_(None)
            same = (requests.c.what == what) & (requests.c.asked == asked)
            of_these = requests.c.instance_name.in_(senders)
            given_up = ~requests.c.taken & (requests.c.asked_ms < now_ms - AWAY_MS)
            connection.execute(delete(requests).where(waits, same, of_these, given_up))
            waiting = select(func.count()).select_from(requests).where(waits)
            if connection.execute(waiting).scalar_one() >= MOST:
                return None
        return _insert(connection, senders, what, asked, is_order, now_ms, PLACE)

    @reading
    def replies(self, connection: Connection, ids: Collection[int]) -> dict[int, Reply]:
        """These rows, by id, as far as they are there."""
        query = select(requests.c.id, requests.c.taken, requests.c.answer)
        rows = connection.execute(query.where(requests.c.id.in_(ids)))
        return {row.id: Reply(row.taken, row.answer) for row in rows}

    @writing
    def leave(self, connection: Connection, ids: Collection[int]) -> None:
        """Wait for these rows no longer: orders without an answer stay."""
        done = (requests.c.answer.is_not(None)) | ~requests.c.is_order
        connection.execute(delete(requests).where(requests.c.id.in_(ids), done))

    @reading
    def ours(self, connection: Connection, under_way: Collection[int]) -> list[Request]:
        """The first rows that we have to answer, oldest first, without those `under_way`."""
        row = requests.c
        query = (
            select(row.id, row.what, row.asked, row.is_order, row.place == PLACE, row.past)
            .where(row.instance_name == self._instance, row.answer.is_(None))
            .where(row.id.not_in(under_way))
            .order_by(row.id)
            .limit(AT_ONCE - len(under_way))
        )
        return [Request(*each) for each in connection.execute(query)]

    @reading
    def last_order(self, connection: Connection, upto: int | None) -> int | None:
        """The id of the last order that we have to carry out, at most `upto`; None: none waits."""
        row = requests.c
        query = select(func.max(row.id)).where(row.instance_name == self._instance)
        query = query.where(row.answer.is_(None), row.is_order)
        if upto is not None:
            query = query.where(row.id <= upto)
        last: int | None = connection.execute(query).scalar_one()
        return last

    @writing
    def take(self, connection: Connection, ids: Collection[int]) -> None:
        """Note that we answer these soon."""
        connection.execute(update(requests).where(requests.c.id.in_(ids)).values(taken=True))

    @writing
    def answer(self, connection: Connection, request: int, answer: str) -> None:
        """Answer it. Those of our answers that nobody has fetched for long go."""
        query = update(requests).where(requests.c.id == request)
        connection.execute(query.values(answer=answer))
        old = requests.c.id < request - KEPT
        ours = requests.c.instance_name == self._instance
        connection.execute(delete(requests).where(ours, old, requests.c.answer.is_not(None)))


def hand_on(
    connection: Connection, before: Sequence[str], senders: Sequence[str], now_ms: int
) -> None:
    """Have each of these senders, a list that comes into force, carry out the orders that are left
    of the list before, for the servers of those who had them to do: the others have done their
    part, and it may have been undone since."""
    left = requests.c.answer.is_(None)
    query = select(requests).where(left, requests.c.is_order).order_by(requests.c.id)
    orders = connection.execute(query).all()
    connection.execute(delete(requests).where(left))
    for row in orders:
        past = [*(row.past or ()), (row.instance_name, list(before))]
        _insert(connection, senders, row.what, row.asked, True, now_ms, row.place, past)


def _insert(
    connection: Connection,
    senders: Sequence[str],
    what: str,
    asked: str,
    is_order: bool,
    now_ms: int,
    place: str | ColumnElement[str],
    past: Sequence[Past] | None = None,
) -> dict[int, str]:
    row = {"what": what, "asked": asked, "is_order": is_order, "asked_ms": now_ms, "taken": False}
    row |= {"place": place, "past": past}
    made = {}
    for name in senders:
        query = insert(requests).values(instance_name=name, **row).returning(requests.c.id)
        made[connection.execute(query).scalar_one()] = name
    return made
