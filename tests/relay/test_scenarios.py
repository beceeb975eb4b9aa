"""Every numbered scenario of docs/relay.md has a test whose docstring begins with its number."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

LAST = 70


def numbers() -> Iterator[int]:
    """The numbers before the colon at the beginning of tests' docstrings."""
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                said = ast.get_docstring(node) or ""
                found = re.match(r"(?:Scenario )?((?:[A-Z]?\d+, )*[A-Z]?\d+): ", said)
                if node.name.startswith("test_") and found:
                    yield from (int(one) for one in found[1].split(", ") if one.isdigit())


@pytest.mark.slow
def test_no_number_is_without_a_test() -> None:
    assert set(numbers()) == set(range(1, LAST + 1))
