"""Which receipts are still owed: a position in their stream, and the servers that are behind it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, or_, select

from fedsender.store import sender_tables as tables
from fedsender.store.engine import Database
from fedsender.store.event_rows import in_chunks
from fedsender.store.rows import replace_rows


@dataclass(frozen=True, slots=True)
class OwedReceipts:
    """Which receipts are still owed.

    Attributes:
        position: each receipt up to this stream id is answered, or covered by `debts`. None:
            nobody has begun to count.
        debts: by server the stream id above which it is owed receipts.
    """

    position: int | None
    debts: Mapping[str, int]


class ReceiptBook:
    """Keeps it in the sender's database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self, instance: str) -> OwedReceipts:
        """As it was last saved; debts to the instance's own servers."""
        positions, debts = tables.receipt_positions, tables.receipt_debts
        query = select(positions.c.stream_id).where(positions.c.instance_name == instance)

        def look(connection: Connection) -> OwedReceipts:
            holder = debts.c.instance_name
            rows = connection.execute(
                select(debts.c.destination, debts.c.stream_id).where(
                    or_(holder == instance, holder.is_(None))
                )
            )
            owed = {row.destination: row.stream_id for row in rows}
            return OwedReceipts(connection.execute(query).scalar(), owed)

        return await self._database.read(look)

    async def save(
        self, instance: str, position: int, debts: Mapping[str, int], paid: Collection[str]
    ) -> None:
        """The position, new or changed debts, and servers without one, in one transaction."""

        def write(connection: Connection) -> None:
            for chunk in in_chunks(sorted(paid)):
                table = tables.receipt_debts
                connection.execute(delete(table).where(table.c.destination.in_(chunk)))
            owed = [
                {"destination": name, "stream_id": after, "instance_name": instance}
                for name, after in sorted(debts.items())
            ]
            if owed:
                replace_rows(connection, tables.receipt_debts, ("destination",), owed)
            row = {"instance_name": instance, "stream_id": position}
            replace_rows(connection, tables.receipt_positions, ("instance_name",), [row])

        await self._database.write(write)
