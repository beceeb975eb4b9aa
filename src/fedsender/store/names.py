"""What all tables have in common."""

from sqlalchemy import BigInteger, Integer

# Constraints with names, so that a later migration can take hold of them on SQLite too.
NAMES = {
    "uq": "%(table_name)s_%(column_0_N_name)s_key",
    "ix": "%(table_name)s_%(column_0_N_name)s_idx",
}
# Row ids: SQLite only counts an INTEGER primary key up by itself.
RowId = BigInteger().with_variant(Integer, "sqlite")
