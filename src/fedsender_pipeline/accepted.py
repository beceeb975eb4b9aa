"""`audit --accept FILE`: deliveries that an operator accepts as not made, so that they are not
missing. A line is a server (`*`: every one) and an event, or a range of stream orderings:

    a.example $event                  one event
    a.example 100-250                 from the 100th to the 250th, both included
    * 100-250                         the same at every server
    fedsender 1-12                    segments of this sender's ledger that were never read
    # a comment

They are stored in the lake and hold for later audits, until another file replaces them. An empty
file removes all of them.
"""

import re
from pathlib import Path
from typing import Any, Final

from fedsender_pipeline import Usage, schemas
from fedsender_pipeline.lake import Lake

MOST_NAMED: Final = 20
"""Lines that are named when they cannot be read."""
MOST_BYTES: Final = 64 * 2**20
_LINE: Final = re.compile(
    r"(?P<server>[^\s#]{1,255})\s+"
    r"(?:(?P<event>\$\S{1,254})|(?P<first>[0-9]{1,18})-(?P<last>[0-9]{1,18}))"
)


def read_accepted(path: Path) -> list[dict[str, Any]]:
    """The rows for the table `accepted`.

    Raises:
        Usage: the file, or a line of it, cannot be read; the text has the numbers of such lines.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise Usage(f"--accept: {path}: is larger than {MOST_BYTES // 2**20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Usage(f"--accept: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Usage(f"--accept: {path}: is not text: {error}") from None
    rows, bad = [], []
    for number, text in enumerate(lines, 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(text.strip())
        first, last = (int(found[name] or 0) for name in ("first", "last")) if found else (0, 0)
        if found is None:
            said = repr(text.strip()[:80])
            bad.append(f"{path}:{number}: must be SERVER $EVENT or SERVER FIRST-LAST, not {said}")
        elif first > last:
            bad.append(f"{path}:{number}: the range {first}-{last} ends before it begins")
        elif found["event"]:
            rows.append({"server": found["server"], "event_id": found["event"]})
        else:
            rows.append({"server": found["server"], "first": first, "last": last})
    if bad:
        more = [f"and {len(bad) - MOST_NAMED} more"] if len(bad) > MOST_NAMED else []
        raise Usage("\n".join(("--accept: nothing was accepted:", *bad[:MOST_NAMED], *more)))
    return rows


def accept(lake: Lake, rows: list[dict[str, Any]]) -> None:
    """Replace the accepted deliveries by these rows."""
    with lake.commit() as commit:
        commit.clear(schemas.ACCEPTED)
        commit.append_rows(schemas.ACCEPTED, rows)
