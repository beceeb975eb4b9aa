"""`audit --accept FILE`: deliveries that an operator accepts as not made, so that they are not
missing. A line is a server (`*`: every one) and an event, or a range of stream orderings:

    a.example $event                  one event
    a.example 100-250                 from the 100th to the 250th, both included
    * 100-250                         the same at every server
    fed1 1-12                         segments of this sender's ledger that were never read
    # a comment

They are stored in the lake and hold for later audits, until another file replaces them. An empty
file removes all of them.
"""

import re
from pathlib import Path
from typing import Any, Final

from fedsender_pipeline import Usage, schemas
from fedsender_pipeline.lake import Lake

MOST_BYTES: Final = 64 * 2**20
_LINE: Final = re.compile(
    r"(?P<server>[^\s#]{1,255})\s+"
    r"(?:(?P<event>\$\S{1,254})|(?P<first>[0-9]{1,18})-(?P<last>[0-9]{1,18}))"
)


def read_accepted(path: Path) -> list[dict[str, Any]]:
    """The rows for the table `accepted`.

    Raises:
        Usage: the file, or a line of it, cannot be read; the text has the line's number.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise Usage(f"--accept: {path}: is larger than {MOST_BYTES // 2**20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Usage(f"--accept: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Usage(f"--accept: {path}: is not text: {error}") from None
    rows = []
    for number, text in enumerate(lines, 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(text.strip())
        if found is None or int(found["first"] or 0) > int(found["last"] or 0):
            said = f"must be SERVER $EVENT or SERVER FIRST-LAST, not {text.strip()[:80]!r}"
            raise Usage(f"--accept: {path}:{number}: {said}")
        row: dict[str, Any] = {"server": found["server"], "event_id": found["event"]}
        if not found["event"]:
            row |= {"first": int(found["first"]), "last": int(found["last"])}
        rows.append(row)
    return rows


def accept(lake: Lake, rows: list[dict[str, Any]]) -> None:
    """Replace the accepted deliveries by these rows."""
    with lake.commit() as commit:
        commit.clear(schemas.ACCEPTED)
        commit.append_rows(schemas.ACCEPTED, rows)
