"""The PDUs that stand in queues: each once, for however many servers it waits. No I/O here."""

from collections.abc import Iterable
from itertools import accumulate

from fedsender.matrix import Pdu


class PduPool:
    """Every PDU that a queue holds, and how those go out that were redacted since.

    What the last queue lets go is gone. Bounded by the bytes of the PDUs: if it overflows, whoever
    has the oldest queued has to give its queue up.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        # In the order in which they were first queued, which is the stream's.
        self._pdus: dict[str, Pdu] = {}
        self._holders: dict[str, int] = {}
        self._pruned: dict[str, Pdu] = {}
        self.bytes = 0

    def __contains__(self, event_id: str) -> bool:
        return event_id in self._pdus

    def __len__(self) -> int:
        return len(self._pdus)

    def hold(self, pdu: Pdu) -> None:
        """One more queue holds the PDU."""
        holders = self._holders.get(pdu.event_id, 0)
        self._holders[pdu.event_id] = holders + 1
        if not holders:
            self._pdus[pdu.event_id] = pdu
            self.bytes += len(pdu.wire)

    def let_go(self, pdus: Iterable[Pdu]) -> None:
        """One queue less holds each of these PDUs."""
        for pdu in pdus:
            event_id = pdu.event_id
            holders = self._holders[event_id] - 1
            if holders:
                self._holders[event_id] = holders
                continue
            del self._holders[event_id]
            self._pruned.pop(event_id, None)
            self.bytes -= len(self._pdus.pop(event_id).wire)

    def overflow(self) -> int | None:
        """The stream ordering up to which PDUs have to leave their queues; None: there is room.

        A quarter more than must be, so that it is not asked for with every event that follows.
        """
        excess = self.bytes - self._limit
        if excess <= 0:
            return None
        pdus = list(self._pdus.values())
        sums = accumulate(len(pdu.wire) for pdu in pdus)
        enough = excess + self._limit // 4
        # The newest one stays, however large it is.
        for pdu, total in zip(pdus[:-1], sums, strict=False):
            if total >= enough:
                return pdu.stream_ordering
        return pdus[-2].stream_ordering if len(pdus) > 1 else None

    def sent_by(self, user_id: str, room_id: str) -> list[str]:
        """The events of this user in this room."""
        return [
            pdu.event_id
            for pdu in self._pdus.values()
            if pdu.sender == user_id and pdu.room_id == room_id
        ]

    def prune(self, event_id: str, pruned: Pdu) -> None:
        """The event was redacted: it goes out like this."""
        if event_id in self._pdus:
            self._pruned[event_id] = pruned

    def as_it_goes_out(self, pdu: Pdu) -> Pdu:
        """The PDU, or what is left of it if it was redacted since it was queued."""
        return self._pruned.get(pdu.event_id, pdu)
