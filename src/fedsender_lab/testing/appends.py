"""Appends for an intake, as a request brings them, and such as no request lets through."""

from collections.abc import Sequence

from fedsender.embedded.intake import Append
from fedsender.streams import Json


def append_of(id: str, rows: Sequence[Json], reservation: str | None = None) -> Append:
    """One append, unchecked."""
    return Append.model_construct(id=id, rows=list(rows), reservation=reservation)
