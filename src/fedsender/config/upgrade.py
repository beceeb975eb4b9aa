"""A configuration of an older release, written anew.

Each setting that is gone becomes a comment, with what to do instead before it. All else stays to
the letter, the operator's comments too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedsender.config import instead_of
from fedsender.config.document import ConfigError, Document, Location, read_document


class Upgraded(NamedTuple):
    """A new text of a configuration.

    Attributes:
        text: the whole file.
        notes: what became a comment, one line each.
    """

    text: str
    notes: list[str]


def upgraded(path: Path) -> Upgraded:
    """The configuration of this file for this release.

    Raises ConfigError if it cannot be read, or a setting that is gone shares its line with others.
    """
    document = read_document(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    notes, by_hand = [], []
    for at, text in _gone(document):
        mark = document.keys[at]
        first, indent = mark.line - 1, mark.column - 1
        if lines[first][:indent].strip():
            by_hand.append(document.problem(at, f"is gone: {text}", at_key=True))
            continue
        last = _last_line(lines, first, indent)
        margin = " " * indent
        lines[first] = f"{margin}# Gone: {text}\n{margin}# {lines[first][indent:]}"
        for number in range(first + 1, last + 1):
            lines[number] = f"{margin}# {lines[number][indent:]}" if lines[number] else f"{margin}#"
        notes.append(document.problem(at, f"is a comment now: {text}", at_key=True))
    if by_hand:
        raise ConfigError(*by_hand)
    return Upgraded("\n".join(lines) + "\n", notes)


def _gone(document: Document) -> Iterator[tuple[Location, str]]:
    """The settings that are gone, and what to do instead; a section of nothing else as a whole."""
    found = {at: text for at in document.keys if (text := instead_of(at)) is not None}
    # The longest first: a section may be all that another one has.
    for section in sorted({at[:end] for at in found for end in range(1, len(at))}, key=len)[::-1]:
        inside = [at for at in document.keys if at[:-1] == section]
        if not isinstance(section[-1], int) and all(at in found for at in inside):
            found[section] = "; ".join(f"{at[-1]}: {found.pop(at)}" for at in inside)
    return (
        (at, text) for at, text in found.items() if not any(at[:n] in found for n in range(len(at)))
    )


def _last_line(lines: list[str], first: int, indent: int) -> int:
    """The last line of the value whose key stands in the line `first`."""
    last = first
    for number in range(first + 1, len(lines)):
        text = lines[number].lstrip(" ")
        depth = len(lines[number]) - len(text)
        if not text or text.startswith("#"):
            continue
        # The items of a list may stand below its key, and not further in.
        if depth < indent or (depth == indent and not text.startswith("- ")):
            break
        last = number
    return last
