"""How an input that was good is spoiled a little."""

import random
from typing import Final

ODD: Final = [b"\n", b"\r\n", b" ", b"\0", b"\xff", b"[" * 200, b"9" * 30, b'"', b"\\ud800", b"NaN"]
VALUES: Final[list[object]] = [
    None, True, 0, -1, 2**63, 10**400, 0.5, float("nan"), "", "\0", "\ud800", "x" * 300, [], {},
]  # fmt: skip


def spoil(rng: random.Random, data: bytes, splices: list[bytes]) -> bytes:
    """A few of: bits flipped, bytes cut, doubled, zeroed, or something else put in."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randint(0, len(found))
        end = min(len(found), at + rng.choice((1, 1, 4, 40, 600)))
        match rng.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at:end]
            case 2:
                found[at:at] = found[at:end]
            case 3:
                found[at:end] = bytes(end - at)
            case 4:
                found[at:end] = rng.randbytes(end - at)
            case _:
                found[at:at] = rng.choice(splices)
    return bytes(found)


def spoil_json(rng: random.Random, value: object) -> object:
    """The value with something in it that is of another kind."""
    if rng.random() < 0.2 or not isinstance(value, list | dict) or not value:
        return rng.choice(VALUES)
    if isinstance(value, list):
        number = rng.randrange(len(value))
        return [*value[:number], spoil_json(rng, value[number]), *value[number + 1 :]]
    name = rng.choice(list(value))
    return {**value, name: spoil_json(rng, value[name])}
