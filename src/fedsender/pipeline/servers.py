"""Server names in Spark: the server of a user, the permitted ones, and the shard of each."""

from typing import TYPE_CHECKING, Final

from fedsender.config import Config
from fedsender.pipeline.lake import literal

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_HEX_DIGITS_OF_SHA256: Final = 64


def server_of(user: "Column") -> "Column":
    """The part behind an identifier's first colon; null if there is none (`matrix.server_of`)."""
    from pyspark.sql import functions as F  # noqa: N812

    colon = F.instr(user, ":")
    name = F.substring(user, colon + F.lit(1), F.length(user))
    return F.when((colon > 0) & (F.length(name) > 0), name)


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


def sent_to(rows: "DataFrame", config: Config) -> "DataFrame":
    """The rows whose `server` this sender may send to, by the daemon's own word.

    It is asked once for each server; of servers there are some ten thousand at most.
    """
    from pyspark.sql import functions as F  # noqa: N812

    names = (row["server"] for row in rows.select("server").distinct().toLocalIterator())
    barred = [name for name in names if not (config.handles(name) and config.allows(name))]
    if not barred:
        return rows
    listed = literal([{"server": name} for name in barred], "server: STRING")
    table = rows.sparkSession.range(1).select(F.inline(listed))
    return rows.join(F.broadcast(table), on="server", how="left_anti")
