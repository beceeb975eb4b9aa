"""Alembic over the live connection: our tables, made and brought up to date, then looked at.

There are two version lines, `homeserver` (the embedded store's tables) and `sender`. Their scripts
ship inside the wheel.
"""

from pathlib import Path
from typing import Literal

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text

import fedsender
from fedsender.store import tables
from fedsender.store.engine import StoreError

Line = Literal["homeserver", "sender"]

METADATA = {"homeserver": tables.homeserver, "sender": tables.sender}
# Two daemons that start together on one PostgreSQL migrate it one after the other.
_LOCK = 0x66656473


class SchemaDiffers(StoreError):
    """The live tables are not the ones this version was written for."""


def scripts() -> Path:
    """Where env.py and the versions are: in the wheel, or in the source tree."""
    package = Path(fedsender.__file__).resolve().parent
    shipped = package / "_alembic"
    return shipped if shipped.is_dir() else package.parents[1] / "alembic"


def alembic_config(line: Line) -> Config:
    """The configuration of one version line, with no file behind it."""
    config = Config()
    root = str(scripts()).replace("%", "%%")
    config.set_main_option("script_location", root)
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", f"{root}/{line}/versions")
    config.attributes["line"] = line
    return config


def upgrade(connection: Connection, line: Line) -> None:
    """Bring the line's tables to the newest version, in the connection's transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    config = alembic_config(line)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def revise(connection: Connection, line: Line, message: str) -> None:
    """Write the next version's script from the differences to `tables`, for a developer to edit."""
    config = alembic_config(line)
    config.attributes["connection"] = connection
    command.revision(config, message, autogenerate=True)


def check(connection: Connection, line: Line) -> None:
    """Raise SchemaDiffers, naming each difference, unless the tables are as `tables` has them."""
    metadata = METADATA[line]

    def ours(name: str | None, kind: str, _parents: object) -> bool:
        return kind != "table" or name in metadata.tables

    context = MigrationContext.configure(
        connection, opts={"compare_type": True, "include_name": ours}
    )
    differences = compare_metadata(context, metadata)
    if differences:
        # The whole objects print as whole tables; their names are what an operator needs.
        names = "; ".join(str(difference)[:200] for difference in differences[:5])
        raise SchemaDiffers(
            f"the {line} tables differ from what this version expects"
            f" ({len(differences)} differences): {names}"
        )
