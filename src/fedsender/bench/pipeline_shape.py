"""Which event of the pipeline's benchmark is in which room, who is there, and when it came."""

from typing import Final

LARGE_ROOM_EVENTS: Final = 1_000_000
SMALL_ROOM_EVENTS: Final = 9
SMALL_ROOM_SERVERS: Final = 4
CHANGE_EVERY: Final = 50
_DAY_MS: Final = 86_400_000
_BEGAN_MS: Final = 1_700_000_000_000 // _DAY_MS * _DAY_MS
_DAYS_BEFORE: Final = 20
_DAYS_OF_LEDGER: Final = 10


class Shape:
    """Which event is in which room: arithmetic, so that nothing must be looked up.

    Of every `every` events in stream order the last is the large room's; the n-th of the others is
    in small room n / 9.
    """

    def __init__(self, *, servers: int, events: int) -> None:
        if servers < SMALL_ROOM_SERVERS or events < 4 * CHANGE_EVERY:
            raise ValueError(f"{SMALL_ROOM_SERVERS} servers and {4 * CHANGE_EVERY} events at least")
        self.servers = servers
        self.every = max(2, events // min(events // 2, LARGE_ROOM_EVENTS))
        self.large = events // self.every
        self.events = self.large * self.every
        self.small = self.events - self.large
        self.rooms = -(-self.small // SMALL_ROOM_EVENTS)
        self.large_groups = self.large // CHANGE_EVERY + 1
        # Pairs per event, so that the ledger has about as many PDUs as there are events.
        per_event = (servers + (self.every - 1) * SMALL_ROOM_SERVERS) / self.every
        recent = max(int(self.events / per_event), 4 * self.every)
        self.began = max(self.events - recent, 0) // self.every * self.every + 1
        """The first event in the ledger, and the first of its second half."""
        self.middle = (self.began + self.events) // 2 // self.every * self.every + 1

    def at_of_small(self, number: str) -> str:
        """Stream ordering of the n-th small-room event, from 0, in SQL."""
        others = self.every - 1
        return f"(({number}) div {others} * {self.every} + ({number}) % {others} + 1)"

    def ms_of(self, at: str) -> str:
        """When an event came, in SQL: all that is before the ledger in some days, and it in ten."""
        before = _DAYS_BEFORE * _DAY_MS
        ledger = _DAYS_OF_LEDGER * _DAY_MS - 1
        length = self.events - self.began + 1
        return (
            f"({_BEGAN_MS} + if({at} < {self.began}, {at} * {before} div {self.began},"
            f" {before} + ({at} - {self.began}) * {ledger} div {length}))"
        )

    def server_of_small(self, room: str, place: str) -> str:
        """The name of the n-th of a small room's servers, in SQL."""
        step = self.servers // SMALL_ROOM_SERVERS
        return f"concat('s', pmod(hash({room}) + {place} * {step}, {self.servers}), '.example')"
