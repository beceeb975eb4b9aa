"""Receipts: the servers that get one at once, those that get it later, and the size of an EDU.

In small rooms, and for events of the last minute, all servers get a receipt at once: there it shows
that a user is present. Otherwise only the server of the event's sender gets it at once, and the
others in turn: in a room of thousands of servers each read message would cost thousands of
transactions.

A server's receipts wait in memory while it answers. When it fails, or when they are too many, they
are given up for a debt: the stream id above which it is owed receipts. They are read from the
database when it answers again. So none is lost, and memory is bounded.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsender.matrix import canonical_json, server_of
from fedsender.sender.pages import Pages
from fedsender.sender.transaction import RECEIPT, Draft, Edu, Key, in_edus
from fedsender.store.edus import EduStore
from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import Receipt
from fedsender.store.statements import in_chunks

SMALL_ROOM = 10
"""In a room with fewer other servers than this, all get a receipt at once."""
FRESH_MS = 60_000
"""For an event younger than this, all servers get a receipt at once."""
RECEIPTS_PER_EDU = 200
PAGE = 500
"""Receipts of all rooms that are read at once, to find those of a server with a debt."""
ASKED_AT_ONCE = 10
"""Rooms whose servers are asked for at once: one may have tens of thousands, 2 MB."""
MOST_SERVERS = 50_000
"""A page ends where its rooms have more servers, by those of `ASKED_AT_ONCE` rooms at most."""
PAGES_KEPT = 200_000
"""The receipts in the pages that are kept, and the servers of their rooms: 20 MB."""


def key_of(receipt: Receipt) -> Key:
    """The key of a receipt; a newer receipt of the same key replaces an older one."""
    thread = () if receipt.thread_id is None else (receipt.thread_id,)
    return (RECEIPT, receipt.room_id, receipt.receipt_type, receipt.user_id, *thread)


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """The event that was read. `received_ts` in ms."""

    sender: str
    received_ts: int | None


def at_once(servers: frozenset[str], event: ReadEvent | None, now_ms: int) -> frozenset[str]:
    """The servers that get a receipt at once; the others get it in turn."""
    if len(servers) < SMALL_ROOM:
        return servers
    if event is None:
        return frozenset()
    if event.received_ts is not None and now_ms - event.received_ts < FRESH_MS:
        return servers
    try:
        return servers & {server_of(event.sender)}
    except ValueError:
        return frozenset()


def compose(receipts: Iterable[Receipt]) -> Iterator[tuple[Edu, Sequence[Receipt]]]:
    """The receipts as EDUs, each with the receipts in it.

    An EDU has one place for each room, type and user, so further threads of a user go into further
    EDUs (Matrix server-server API, "Receipts"; the threads are those of the client-server API).
    """
    # By number, the first receipts of all places, then the second ones, and so on.
    numbered: defaultdict[int, list[Receipt]] = defaultdict(list)
    before = Counter[Key]()
    for receipt in receipts:
        place = (receipt.room_id, receipt.receipt_type, receipt.user_id)
        numbered[before[place]].append(receipt)
        before[place] += 1
    for of_places in numbered.values():
        for start in range(0, len(of_places), RECEIPTS_PER_EDU):
            yield from in_edus(of_places[start : start + RECEIPTS_PER_EDU], _edu)


def _edu(receipts: Sequence[Receipt]) -> Edu:
    content: dict[str, Any] = {}
    for receipt in receipts:
        data: dict[str, Any] = {} if receipt.ts is None else {"ts": receipt.ts}
        if receipt.thread_id is not None:
            data["thread_id"] = receipt.thread_id
        users = content.setdefault(receipt.room_id, {}).setdefault(receipt.receipt_type, {})
        users[receipt.user_id] = {"event_ids": [receipt.event_id], "data": data}
    wire = canonical_json({"content": content, "edu_type": RECEIPT}, allow_big_integers=True)
    return Edu(RECEIPT, wire, keys=tuple((key_of(item), item.stream_id) for item in receipts))


class ReceiptQueue:
    """The receipts that wait for one server: the newest of each key, at most `limit` of them.

    Attributes:
        waiting: by key, the receipts that wait here.
        debt: the stream id above which the server is owed receipts; they wait in the database.
            None: all that it is owed is here.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting: dict[Key, Receipt] = {}
        # None: it is to be looked for.
        self._oldest: int | None = None
        self._offered = 0
        self._page_after: int | None = None
        self.debt: int | None = None

    @property
    def oldest(self) -> int | None:
        """The smallest stream id that waits here."""
        if self._oldest is None:
            self._oldest = min((item.stream_id for item in self.waiting.values()), default=None)
        return self._oldest

    @property
    def owed_above(self) -> int | None:
        """The stream id above which the server is owed receipts, wherever they wait."""
        if self.debt is not None or self.oldest is None:
            return self.debt
        return self.oldest - 1

    def put(self, receipt: Receipt) -> None:
        """Queue this receipt, in place of an older one of its key."""
        self._offered += 1
        if self.debt is not None:
            self.debt = min(self.debt, receipt.stream_id - 1)
            return
        key = key_of(receipt)
        there = self.waiting.get(key)
        if there is None or there.stream_id < receipt.stream_id:
            self._leaves(there)
            self.waiting[key] = receipt
            if self._oldest is not None:
                self._oldest = min(self._oldest, receipt.stream_id)
        if len(self.waiting) > self._limit:
            self.give_up()

    def _leaves(self, item: Receipt | None) -> None:
        if item is not None and item.stream_id == self._oldest:
            self._oldest = None

    def give_up(self) -> None:
        """Give up the receipts that wait here for a debt."""
        self.owe(self.owed_above)

    def owe(self, after: int | None) -> None:
        """Note a debt: the server is owed the receipts above `after`. None changes nothing."""
        if after is not None:
            self.debt = after if self.debt is None else min(after, self.debt)
            self._forget()

    def clear(self) -> None:
        """Forget all receipts and the debt."""
        self.debt = None
        self._forget()

    def _forget(self) -> None:
        self.waiting.clear()
        self._oldest = None

    def fill(self, draft: Draft) -> None:
        """Put as many receipts as fit into the draft; they stay until they are answered."""
        for edu, _ in compose(self.waiting.values()):
            if not draft.add_edu(edu):
                return

    def answered(self, taken: Iterable[tuple[Key, int]]) -> None:
        """Remove these receipts, which arrived; a newer one of the same key stays."""
        for key, stream_id in taken:
            item = self.waiting.get(key)
            if item is not None and item.stream_id <= stream_id:
                del self.waiting[key]
                self._leaves(item)

    # --- Paying a debt, page by page --------------------------------------------------------------

    def begin_page(self) -> int:
        """Note that a page above the debt is read next; return the argument for `none_found`."""
        self._page_after = self.debt
        return self._offered

    def none_found(self, offered: int) -> None:
        """End the debt, as no receipt is above it, unless a receipt was put here since."""
        if self._offered == offered:
            self.debt = None

    def pay(self, upto: int) -> None:
        """Pay the debt up to `upto`: this server's receipts there, if any, were answered."""
        if self.debt is not None and self.debt == self._page_after:
            self.debt = self._page_after = upto


@dataclass(frozen=True, slots=True)
class ReceiptPage:
    """The receipts with `after` < stream id <= `upto` in all rooms, and who is in these."""

    after: int
    upto: int
    receipts: Sequence[Receipt]
    servers: Mapping[str, frozenset[str]]

    def owed_to(self, server: str, above: int) -> list[Receipt]:
        """Those for this server, ascending, above this stream id."""
        return [
            receipt
            for receipt in self.receipts
            if receipt.stream_id > above and server in self.servers[receipt.room_id]
        ]


def _size(page: ReceiptPage) -> int:
    return len(page.receipts) + sum(map(len, page.servers.values()))


def receipt_pages(
    edus: EduStore, homeserver: HomeserverStore, origin: str
) -> Pages[None, ReceiptPage]:
    """The pages that servers with a debt go through: it is the same question for each of them whom
    a page concerns."""

    async def read(_all: None, debt: int, _upto: int) -> ReceiptPage | None:
        receipts = await edus.receipts(origin, debt, None, PAGE)
        if not receipts:
            return None
        servers: dict[str, frozenset[str]] = {}
        for rooms in in_chunks(dict.fromkeys(item.room_id for item in receipts), ASKED_AT_ONCE):
            if sum(map(len, servers.values())) > MOST_SERVERS:
                others = (n for n, item in enumerate(receipts) if item.room_id not in servers)
                receipts = receipts[: next(others)]
                break
            servers |= await homeserver.servers_now(rooms)
        return ReceiptPage(debt, receipts[-1].stream_id, receipts, servers)

    return Pages(read, kept=PAGES_KEPT, size=_size)


def fill_page(draft: Draft, receipts: Sequence[Receipt], last: int) -> int:
    """Put in receipts of a debt; return the stream id up to which an answer to them pays it.

    `receipts` are those for this server, ascending, of a page that ends at `last`.
    """
    unsent: set[int] = set()
    full = False
    for edu, inside in compose(receipts):
        full = full or not draft.add_edu(edu)
        if full or not draft.is_for(edu.mark):
            unsent |= {receipt.stream_id for receipt in inside}
    return min(unsent) - 1 if unsent else last
