"""Device lists and cross-signing keys, on their way to one server.

Updates of a user form a chain: each names in `prev_id` the one before it, so that a server that
missed one notices, and asks for all of the user's devices (Matrix server-server API, "Device
management"). An empty `prev_id` has the same effect. A device that changed several times is sent
once, with its present keys, under its newest stream id. Key updates have no place in the chain.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsender.ledger import DevicePoke
from fedsender.matrix import canonical_json
from fedsender.sender.transaction import Edu
from fedsender.store.records import CrossSigning, Device, DeviceChanges

DEVICE_LIST = "m.device_list_update"
SIGNING_KEYS = ("m.signing_key_update", "org.matrix.signing_key_update")
"""The name in the specification, and the unstable one before it: some servers know no other."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One changed device, or one user's changed keys (`device_id` None), with all its rows."""

    user_id: str
    device_id: str | None
    pokes: tuple[DevicePoke, ...]

    @property
    def stream_id(self) -> int:
        return self.pokes[-1].stream_id

    @property
    def edus(self) -> int:
        return 1 if self.device_id is not None else len(SIGNING_KEYS)


def compose(changes: DeviceChanges, room: int) -> list[tuple[Edu, ...]]:
    """The EDUs that go next, at most `room`: devices by stream id, then keys.

    Keys are two EDUs, of which the first carries the rows of both: they leave together. If there is
    room for only one more, they wait. But if `room` is 1, the first of the two goes alone.
    """
    chosen: list[_Change] = []
    left = room
    for change in _conflated(changes):
        if change.edus > left and (chosen or not left):
            break
        left -= min(left, change.edus)
        chosen.append(change)
    devices = [change for change in chosen if change.device_id is not None]
    keys = [change for change in chosen if change.device_id is None]
    edus = [(edu,) for edu in _device_edus(devices, changes.devices, changes.last_sent)]
    pairs = [_key_edus(change, changes.cross_signing[change.user_id]) for change in keys]
    return [*edus, *(pair[:room] for pair in pairs)]


def count(changes: DeviceChanges) -> int:
    """The number of EDUs for all the changes."""
    return sum(change.edus for change in _conflated(changes))


def _conflated(changes: DeviceChanges) -> list[_Change]:
    """The changes, each with all its rows, in the order of the newest row of each."""
    rows: dict[tuple[str, str | None], list[DevicePoke]] = {}
    for poke in changes.pokes:
        known = changes.cross_signing.get(poke.user_id)
        is_key = known is not None and poke.device_id in known.public_keys
        rows.setdefault((poke.user_id, None if is_key else poke.device_id), []).append(poke)
    found = [_Change(*about, tuple(sorted(pokes))) for about, pokes in rows.items()]
    return sorted(found, key=lambda change: (change.stream_id, change.device_id is None))


def _device_edus(
    chosen: Sequence[_Change],
    devices: Mapping[tuple[str, str], Device],
    last_sent: Mapping[str, int],
) -> Iterator[Edu]:
    last = dict(last_sent)
    for change in chosen:
        assert change.device_id is not None
        before = last.get(change.user_id)
        content: dict[str, Any] = {
            "user_id": change.user_id,
            "device_id": change.device_id,
            "stream_id": change.stream_id,
            "prev_id": [before] if before else [],
        }
        device = devices.get((change.user_id, change.device_id))
        if device is None:
            content["deleted"] = True
        elif device.keys is not None:
            content["keys"] = device.keys
        if device is not None and device.name is not None:
            content["device_display_name"] = device.name
        last[change.user_id] = change.stream_id
        yield _edu(DEVICE_LIST, content, change.pokes)


def _key_edus(change: _Change, keys: CrossSigning) -> tuple[Edu, ...]:
    content: dict[str, Any] = {"user_id": change.user_id}
    if keys.master is not None:
        content["master_key"] = keys.master
    if keys.self_signing is not None:
        content["self_signing_key"] = keys.self_signing
    stable, unstable = SIGNING_KEYS
    return _edu(stable, content, change.pokes), _edu(unstable, content, ())


def _edu(edu_type: str, content: Mapping[str, Any], pokes: tuple[DevicePoke, ...]) -> Edu:
    # Clients upload what they like; what a homeserver took in, others take too.
    try:
        wire = _encoded(edu_type, content)
    except ValueError:
        # Keys that are no JSON to anybody else: the change is told without them.
        wire = _encoded(edu_type, {key: content[key] for key in content if key not in _UPLOADED})
    return Edu(edu_type, wire, pokes=pokes)


_UPLOADED = ("keys", "master_key", "self_signing_key", "device_display_name")


def _encoded(edu_type: str, content: Mapping[str, Any]) -> bytes:
    return canonical_json(
        {"content": content, "edu_type": edu_type}, allow_fractions=True, allow_big_integers=True
    )
