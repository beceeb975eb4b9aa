"""docs/weaknesses.md names a test for each weakness and scenario, and the test is there."""

import re
from collections.abc import Iterator

from tests.pages import ROOT, nothing_wrong, shown

PAGE = ROOT / "docs" / "weaknesses.md"


def rows() -> Iterator[tuple[str, list[str], str]]:
    """The place of each row of the tables, its numbers, and its last column."""
    for place, row in shown(r"^\|(.*)\|$", PAGE):
        cells = [cell.strip() for cell in row[1].split("|")]
        numbers = re.findall(r"\b[WSCHTPDN]\d+\b", cells[0])
        if numbers:
            yield place, numbers, cells[-1]


def test_no_number_is_missing() -> None:
    """Each weakness, and S1-S14, C1-C7, H1-H3, T1-T5, P1-P8, D1, N1-N9."""
    counts = {"W": 44, "S": 14, "C": 7, "H": 3, "T": 5, "P": 8, "D": 1, "N": 9}
    named = [number for _, numbers, _ in rows() for number in numbers]

    assert sorted(named) == sorted(
        f"{k}{n}" for k, upto in counts.items() for n in range(1, upto + 1)
    )


def is_there(shown_by: str) -> bool:
    """Whether the cell names a test that exists, or says that the row is not ours."""
    named = re.fullmatch(r"`(tests/[\w/]+\.py)` `(test_\w+)`", shown_by)
    if named is None:
        return shown_by.startswith("not ours: ")
    path = ROOT / named[1]
    test = rf"^(?:async )?def {named[2]}\("
    return path.is_file() and re.search(test, path.read_text(), re.M) is not None


def test_the_test_that_a_row_names_exists() -> None:
    nothing_wrong(
        f"{place}: {' '.join(numbers)} is shown by {shown_by}"
        for place, numbers, shown_by in rows()
        if not is_there(shown_by)
    )
