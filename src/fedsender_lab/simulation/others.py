"""Events of other servers in catch-up, which an embedded store never offers, and a Synapse does.

A room's newest event is its forward extremity, if the store was told of it. A room may have partial
state, as after a join that is still under way at a Synapse: then the list of its servers is an old
one, with servers that were banned since.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fedsender.store.homeserver import HomeserverStore
from fedsender.store.records import EventRow, Hosts
from fedsender_lab.simulation.observations import Observations


def is_whole(observed: Observations, room_id: str) -> bool:
    """Whether all of the room's state is known."""
    return room_id not in observed.partial


def answer_as_synapse(homeserver: HomeserverStore, observed: Observations) -> None:
    """Have the store answer as one with events of other servers, and rooms with partial state."""
    by_id, before = homeserver.events_by_id, homeserver.servers_before
    now = homeserver.servers_now

    async def forward_extremities(room_id: str) -> list[str]:
        for room in observed.homeserver.rooms:
            if room.room_id == room_id and room.timeline.latest is not None:
                newest = [room.timeline.latest.event_id]
                return list(await by_id(newest))
        return []

    def of_others(row: EventRow) -> bool:
        step = observed.homeserver.by_id.get(row.event_id)
        return step is not None and not step.own

    async def events_by_id(event_ids: Sequence[str], *, bare: bool = False) -> dict[str, EventRow]:
        found = await by_id(event_ids, bare=bare)
        return {
            name: replace(row, partial=of_others(row) and not is_whole(observed, row.room_id))
            for name, row in found.items()
        }

    async def servers_before(events: Sequence[EventRow]) -> dict[str, Hosts]:
        found = dict(await before(events))
        for row in events:
            hosts = found[row.event_id]
            if of_others(row) and isinstance(hosts, frozenset):
                found[row.event_id] = hosts | observed.partial.get(row.room_id, frozenset())
        return found

    async def servers_now(room_ids: Sequence[str]) -> dict[str, frozenset[str]]:
        found = await now(room_ids)
        return {name: here | observed.partial.get(name, set()) for name, here in found.items()}

    async def rooms_known_with(destination: str, room_ids: Iterable[str]) -> set[str]:
        found = await servers_now(list(room_ids))
        here = {room_id for room_id, servers in found.items() if destination in servers}
        return {room_id for room_id in here if is_whole(observed, room_id)}

    homeserver.forward_extremities = forward_extremities  # type: ignore[method-assign]
    homeserver.events_by_id = events_by_id  # type: ignore[method-assign]
    homeserver.servers_before = servers_before  # type: ignore[method-assign]
    homeserver.servers_now = servers_now  # type: ignore[method-assign]
    homeserver.rooms_with = rooms_known_with  # type: ignore[method-assign]
