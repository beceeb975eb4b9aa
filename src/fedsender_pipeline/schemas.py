"""The tables of the lake. The page beside this module (`lake.md`) declares and explains them."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedsender.sender.failure import RULES

if TYPE_CHECKING:
    import pyarrow

LAKE_VERSION: Final = 6
FIRST_VERSION: Final = 6
"""That of 0.3.0. A version that is newer has more tables and columns; these are never required."""
EVENTS_PER_PART: Final = 1_000_000
FATES: Final = (
    "delivered_again",
    "delivered",
    "refused",
    "quarantined",
    "superseded",
    "stand_in_refused",
    "parked",
    "pending",
    "unknown",
    "given_up",
    "not_ours",
    "before_ledger",
    "accepted",
    "missing",
)
"""The possible fates of an event at a server that should get it (`fates`)."""
FAILURES: Final = tuple(outcome.value for outcome in RULES)
"""The outcomes of an attempt that are the server's fault."""


@dataclass(frozen=True, slots=True)
class LakeTable:
    """One table of the lake.

    Attributes:
        columns: name -> Spark's type.
        required: columns that are never null.
        part: the column by which rows are put into files (`LakeFile.part`); None: there is none.
        key: the columns that identify a row; the row of the newest commit counts. () where rows are
            never written twice.
    """

    name: str
    columns: dict[str, str]
    required: tuple[str, ...]
    part: str | None = None
    key: tuple[str, ...] = ()

    @property
    def is_versioned(self) -> bool:
        """Whether a row may be written again, with a newer `version`."""
        # Elsewhere it only says which commit wrote the row.
        return "version" in self.columns and bool(self.key) and self.part is None

    def only(self, *columns: str) -> "LakeTable":
        """The same table for a reader of these columns alone."""
        return replace(self, columns={name: self.columns[name] for name in columns})

    @property
    def part_type(self) -> Any:
        """The type of the part column, for pyarrow."""
        return _arrow_type(self.columns[self.part or ""])

    @property
    def ddl(self) -> str:
        """The schema for Spark's readers."""
        return ", ".join(f"`{name}` {kind}" for name, kind in self.columns.items())

    def arrow_schema(self) -> "pyarrow.Schema":
        """The schema for pyarrow."""
        import pyarrow as pa

        return pa.schema(
            pa.field(name, _arrow_type(kind), nullable=name not in self.required)
            for name, kind in self.columns.items()
        )


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    plain = {
        "BIGINT": pa.int64(),
        "INT": pa.int32(),
        "BOOLEAN": pa.bool_(),
        "STRING": pa.string(),
        "DATE": pa.date32(),
        "BINARY": pa.binary(),
    }
    if kind in plain:
        return plain[kind]
    if kind.startswith("ARRAY<"):
        return pa.list_(_arrow_type(kind[6:-1]))
    if kind == "MAP<STRING,BIGINT>":
        return pa.map_(pa.string(), pa.int64())
    raise ValueError(f"no pyarrow type for {kind}")


PAGE: Final = Path(__file__).with_name("lake.md").read_text(encoding="utf-8")
_COLUMN: Final = re.compile(r"^\| `(\w+)` \| `(\S+)` \| (yes|) \|", re.MULTILINE)


def _declared(section: str) -> LakeTable:
    """The table of a section of the page, which begins with its name.

    Raises:
        ValueError: a row of it is none of a column.
    """
    columns = _COLUMN.findall(section)
    if section.count("\n| ") != 1 + len(columns):
        raise ValueError(f"lake.md: {section[:500]}: a row is no column")
    key = re.search(r" Key: (.*?)\.", section)
    part = re.search(r" Files by `(\w+)`\.", section)
    return LakeTable(
        section.partition("\n")[0],
        {name: kind for name, kind, _ in columns},
        tuple(name for name, _, may_be_null in columns if not may_be_null),
        part[1] if part else None,
        tuple(re.findall(r"\w+", key[1])) if key else (),
    )


TABLES: Final = {table.name: table for table in map(_declared, PAGE.split("\n## ")[1:])}

EVENTS: Final = TABLES["events"]
STATE_GROUPS: Final = TABLES["state_groups"]
STATE_MEMBERS: Final = TABLES["state_members"]
ROOM_SERVERS: Final = TABLES["room_servers"]
TOLD_SERVERS: Final = TABLES["told_servers"]
INTERVALS: Final = TABLES["intervals"]
UNKNOWN_HOSTS: Final = TABLES["unknown_hosts"]
ATTEMPTS: Final = TABLES["attempts"]
PDUS: Final = TABLES["pdus"]
REJECTS: Final = TABLES["rejects"]
SEGMENTS: Final = TABLES["segments"]
DESTINATION_ROOMS: Final = TABLES["destination_rooms"]
DESTINATIONS: Final = TABLES["destinations"]
QUARANTINE: Final = TABLES["quarantine"]
SERVER_STATES: Final = TABLES["server_states"]
SENDERS: Final = TABLES["senders"]
REDELIVERIES: Final = TABLES["redeliveries"]
CATCH_UPS: Final = TABLES["catch_ups"]
AUDIT: Final = TABLES["audit"]
MISSING: Final = TABLES["missing"]
STRAY: Final = TABLES["stray"]
REPEATED: Final = TABLES["repeated"]
PURGED: Final = TABLES["purged"]
CLAIMS: Final = TABLES["claims"]
DAYS: Final = TABLES["days"]
AUDITS: Final = TABLES["audits"]
HEALTH: Final = TABLES["health"]
HEALTH_DAYS: Final = TABLES["health_days"]
ACCEPTED: Final = TABLES["accepted"]
