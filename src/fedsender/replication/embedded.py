"""The feed of an embedded store: the homeserver, or a relay, sends the facts themselves.

The rows of a token are stored in one transaction together with the token, and only then does the
events position move. The link reads only when it is asked, so what has been received and is not
stored is never more than what one read brought, and one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from fedsender.intake.rows import RelayRow
from fedsender.matrix import is_server_name
from fedsender.outside import Outside
from fedsender.replication.commands import RemoteServerUp
from fedsender.replication.link import (
    HistoryLost,
    Received,
    TcpLink,
    TcpLinkSettings,
    open_tcp_link,
)
from fedsender.replication.rows import BadRow, parse_row
from fedsender.replication.sink import Feed, FeedStatus, Sink
from fedsender.store.embedded import FeedError
from fedsender.streams import FeedRow, RedactionRow


def redacted_in(rows: Iterable[RelayRow]) -> set[str]:
    """The events that these rows say are redacted."""
    return {row.target for row in rows if isinstance(row, RedactionRow)}


class EmbeddedStore(Protocol):
    """What a feed of facts needs of the store."""

    async def feed_position(self) -> int: ...

    async def apply_feed_batch(self, batch: Sequence[tuple[int, Sequence[RelayRow]]]) -> None: ...


class TcpFeed(Feed):
    """Facts from the line protocol into an embedded store.

    There are no rows of EDUs yet; when there are, `Sink.edus` is where they go.
    """

    def __init__(
        self, settings: TcpLinkSettings, outside: Outside, store: EmbeddedStore, sink: Sink
    ) -> None:
        super().__init__(outside)
        self._settings = settings
        self._store = store
        self._sink = sink
        self._link: TcpLink | None = None
        self._position = 0

    def _status(self) -> FeedStatus:
        link = self._link
        return FeedStatus(
            kind="tcp",
            connected=link is not None and link.connected,
            level=link is not None and link.level,
            position=self._position,
            head=max(self._position, link.head if link is not None else 0),
            stopped=self.stopped,
            last_error=link.last_error if link is not None else None,
        )

    async def run(self) -> None:
        # -1 is "nothing yet", and so is 0: tokens begin at 1.
        self._position = max(0, await self.insist(self._store.feed_position))
        self._sink.events.advance(self._position)
        async with open_tcp_link(
            self._settings,
            self._outside,
            lambda: self._position,
            on_connect=self.note_connected,
            server_up=self._take_server_up,
        ) as link:
            self._link = link
            try:
                while True:
                    await self._apply(await link.next_facts())
            except (BadRow, HistoryLost, FeedError) as stop:
                self.stop_events(str(stop))
        self._link = None

    async def publish_server_up(self, server: str) -> None:
        """Tell whoever feeds us; it tells its other clients. Nothing is queued for it."""
        if self._link is not None:
            await self._link.send(RemoteServerUp(server))

    def _take_server_up(self, server: str) -> None:
        if is_server_name(server):
            self._sink.server_up(server)

    async def _apply(self, facts: Sequence[Received]) -> None:
        """Store whole tokens in one transaction, and then let the sender see them."""
        batch = [(fact.token, self._parse(fact)) for fact in facts]
        await self.insist(partial(self._store.apply_feed_batch, batch))
        self.note_rows("events", sum(len(fact.rows) for fact in facts))
        self._sink.redacted(redacted_in(row for _, rows in batch for row in rows))
        self._position = facts[-1].token
        self._sink.events.advance(self._position)

    def _parse(self, fact: Received) -> list[FeedRow]:
        try:
            return [parse_row(row) for row in fact.rows]
        except BadRow as bad:
            raise BadRow(f"stream {self._settings.stream}, token {fact.token}: {bad}") from bad
