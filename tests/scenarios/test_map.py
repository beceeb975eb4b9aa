"""docs/weaknesses.md names a test for each weakness and scenario, and the test is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "weaknesses.md"


def rows() -> Iterator[tuple[list[str], str]]:
    """The numbers of each row of the tables, and its last column."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        numbers = re.findall(r"\b[WSCHTPDN]\d+\b", cells[0])
        if line.startswith("|") and numbers:
            yield numbers, cells[-1]


def test_no_number_is_missing() -> None:
    """Issue 3: each weakness, and S1-S14, C1-C7, H1-H3, T1-T5, P1-P8, D1, N1-N9."""
    counts = {"W": 44, "S": 14, "C": 7, "H": 3, "T": 5, "P": 8, "D": 1, "N": 9}
    named = [number for numbers, _ in rows() for number in numbers]

    assert sorted(named) == sorted(
        f"{k}{n}" for k, upto in counts.items() for n in range(1, upto + 1)
    )


@pytest.mark.parametrize(("numbers", "shown"), list(rows()))
def test_the_test_that_a_row_names_exists(numbers: list[str], shown: str) -> None:
    named = re.fullmatch(r"`(tests/[\w/]+\.py)` `(test_\w+)`", shown)
    if named is None:
        assert shown.startswith("not ours: "), numbers
        return
    text = (ROOT / named[1]).read_text()
    assert re.search(rf"^(?:async )?def {named[2]}\(", text, re.M), shown
