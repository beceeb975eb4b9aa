"""The pages of the documentation, for tests that hold them against the tree."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "src/fedsender_pipeline/lake.md",
)


def shown(pattern: str, *pages: Path) -> Iterator[tuple[str, re.Match[str]]]:
    """What a pattern finds in these pages, each with its place, such as `docs/relay.md:12`.

    A pattern that finds nothing at all fails: it would hold the pages to nothing.
    """
    none = True
    for page in pages:
        text = page.read_text()
        for match in re.finditer(pattern, text, re.M):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", match
            none = False
    assert not none, f"no page has {pattern}"


def nothing_wrong(found: Iterable[str]) -> None:
    """Fail with everything that was found, one a line."""
    if wrong := list(found):
        pytest.fail("\n".join(wrong), pytrace=False)
