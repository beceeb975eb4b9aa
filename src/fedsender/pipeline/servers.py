"""Server names as Spark columns: whose they are, who may be sent to, which shard sends."""

import ipaddress
import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from fedsender.config import Config
from fedsender.matrix import address_of, host_and_port

if TYPE_CHECKING:
    from pyspark.sql import Column

_HEX_DIGITS_OF_SHA256: Final = 64


def server_of(user: "Column") -> "Column":
    """What follows an identifier's first colon; null where nothing does (`matrix.server_of`)."""
    from pyspark.sql import functions as F  # noqa: N812

    colon = F.instr(user, ":")
    name = F.substring(user, colon + F.lit(1), F.length(user))
    return F.when((colon > 0) & (F.length(name) > 0), name)


def allowed(server: "Column", config: Config) -> "Column":
    """Whether anything may be sent to a server, by every list, as `Config.allows` says it."""
    from pyspark.sql import functions as F  # noqa: N812

    fine = server != config.server_name
    whitelist = config.homeserver.domain_whitelist
    if whitelist is not None:
        fine = fine & server.isin(*whitelist)
    denied = F.lit(config.destinations.defaults.deny)
    for override in config.destinations.overrides:
        if "deny" in override.model_fields_set:
            denied = F.when(_matches(server, override.match), override.deny).otherwise(denied)
    return fine & ~_any(server, config.deny) & _any(server, config.allow) & ~denied


def handled(server: "Column", config: Config) -> "Column":
    """Whether a server is ours among the federation senders, as `Config.handles` says it."""
    from pyspark.sql import functions as F  # noqa: N812

    senders = config.homeserver.federation_sender_instances
    if not senders:
        return F.lit(True)
    return shard_of(server, len(senders)) == senders.index(config.instance_name)


def shard_of(server: "Column", shards: int) -> "Column":
    """The index of the sender that handles a server, as `matrix.shard_of` says it.

    All 32 bytes of the SHA-256 as one little-endian number, modulo `shards`: byte by byte, so that
    no number outgrows a column.
    """
    from pyspark.sql import functions as F  # noqa: N812

    if shards < 1:
        raise ValueError("no sender to choose from")
    digest = F.sha2(server, 256)
    index = F.lit(0).cast("bigint")
    for place in range(_HEX_DIGITS_OF_SHA256 // 2):
        byte = F.conv(F.substring(digest, 2 * place + 1, 2), 16, 10).cast("bigint")
        index = index + byte * pow(256, place, shards)
    return (index % shards).cast("int")


def _any(server: "Column", patterns: tuple[str, ...]) -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    found = F.lit(False)
    for pattern in patterns:
        found = found | _matches(server, pattern)
    return found


def _matches(server: "Column", pattern: str) -> "Column":
    """`matrix.matches` as a regular expression over a name as it stands."""
    from pyspark.sql import functions as F  # noqa: N812

    if pattern == "*":
        return F.lit(True)
    host, port = host_and_port(pattern)
    address = address_of(host)
    name = _glob(host) if address is None else "|".join(_spellings(address))
    ending = "(:[0-9]+)?" if port is None else f":0*{_glob(port)}"
    return server.rlike(f"(?is)\\A({name})\\.*{ending}\\z")


def _glob(pattern: str) -> str:
    return "".join(
        ".*" if letter == "*" else "." if letter == "?" else re.escape(letter) for letter in pattern
    )


def _spellings(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Iterator[str]:
    """Regular expressions for every way in which a server name may write this IP."""
    if isinstance(address, ipaddress.IPv4Address):
        yield re.escape(str(address))
        address = ipaddress.IPv6Address(f"::ffff:{address}")
    groups = [f"{int(group, 16):x}" for group in address.exploded.split(":")]
    low = re.escape(str(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)))
    for parts in ([f"0*{group}" for group in groups], [*(f"0*{g}" for g in groups[:6]), low]):
        yield f"\\[{':'.join(parts)}\\]"
        for start, end in itertools.combinations(range(len(parts) + 1), 2):
            if all(part == "0*0" for part in parts[start:end]):
                yield f"\\[{':'.join(parts[:start])}::{':'.join(parts[end:])}\\]"
