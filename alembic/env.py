"""Runs migrations over the connection that fedsender hands in, or from the command line:

alembic -x line=sender -x url=sqlite:///sender.db upgrade sender@head
"""

from alembic import context
from sqlalchemy import Connection, create_engine

from fedsender.store.migrations import METADATA

arguments = context.get_x_argument(as_dictionary=True)
given = context.config.attributes
line = given.get("line") or arguments["line"]


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=METADATA[line],
        version_table=f"fedsender_{line}_version",
        render_as_batch=True,
        include_name=lambda name, kind, _: kind != "table" or name in METADATA[line].tables,
    )
    with context.begin_transaction():
        context.run_migrations()


if "connection" in given:
    run(given["connection"])
else:
    with create_engine(arguments["url"]).begin() as live:
        run(live)
