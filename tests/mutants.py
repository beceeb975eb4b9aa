"""How many faults the tests find: `python -m tests.mutants [--seed 1] [--count 30]`.

A mutant is our source with one fault: an inverted condition, a call left out, or a bound that is
off by one. They are drawn by a seed over the packages of `PACKAGES`, and each is tried in a copy of
the tree, against the tests of its own package, up to the first that fails: all quick ones, then the
slow ones in the files of its module and in those that name the module or the function. `--again
FILE` tries the mutants of an earlier run, whose output that is, found again by the names of their
functions; `--tree DIR` takes another checkout. No test runs this.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "src/fedsender/sender": "tests/sender",
    "src/fedsender/store": "tests/store",
    "src/fedsender/federation": "tests/federation",
    "src/fedsender_pipeline": "tests/pipeline",
}
LOGS = {"debug", "info", "warning", "error", "exception", "say"}
"""Calls that nobody misses."""
NONE_OF_THESE = 5
"""How pytest ends when it was told of no test."""
STRICT = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


@dataclass(frozen=True)
class Mutant:
    """One fault: the `nth` place of its kind in a function of a package."""

    package: str
    function: str
    kind: str
    nth: int


@dataclass(frozen=True)
class Place:
    """Where a mutant is, and what stands there instead: of one line or more, from byte to byte."""

    path: Path
    first: tuple[int, int]
    last: tuple[int, int]
    text: str

    def apply(self) -> None:
        """Write the fault into the file."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        (top, start), (bottom, end) = self.first, self.last
        lines[top : bottom + 1] = [lines[top][:start] + self.text.encode() + lines[bottom][end:]]
        self.path.write_bytes(b"".join(lines))


def faults(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Each kind of fault at this node, the part that is replaced, and by what."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "invert", test, f"(not ({ast.unparse(test)}))"
        case (
            ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call))
        ):
            if getattr(call.func, "attr", getattr(call.func, "id", "")) not in LOGS:
                yield "drop", node, "pass"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in STRICT:
            text = f"({ast.unparse(left)} {STRICT[type(op)]} {ast.unparse(right)})"
            yield "off by one", node, text
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=int(n)) as right):
            yield "off by one", right, str(n + 1)
        case (
            ast.Slice(lower=ast.Constant(value=int(n)) as bound)
            | ast.Slice(upper=ast.Constant(value=int(n)) as bound)
        ):
            yield "off by one", bound, str(n + 1)


def functions(node: ast.AST, within: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.AST]]:
    """Every node of a function, with the function's name; but none that is in an f-string."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        within = (*within, node.name)
    if isinstance(node, ast.JoinedStr):
        return
    if within:
        yield ".".join(within), node
    for child in ast.iter_child_nodes(node):
        yield from functions(child, within)


def places(tree: Path, package: str) -> dict[Mutant, Place]:
    """All mutants of a package of this tree."""
    found: dict[Mutant, Place] = {}
    for path in sorted((tree / package).rglob("*.py")):
        counts = Counter[tuple[str, str]]()
        for name, node in functions(ast.parse(path.read_text())):
            for kind, part, text in faults(node):
                mutant = Mutant(package, name, kind, counts[name, kind])
                counts[name, kind] += 1
                last = (part.end_lineno or 0) - 1, part.end_col_offset or 0
                place = Place(path, (part.lineno - 1, part.col_offset), last, text)
                found.setdefault(mutant, place)
    return found


def draw(tree: Path, random: Random, count: int) -> list[Mutant]:
    """So many mutants, of each package as many, each of another function."""
    drawn: list[Mutant] = []
    for number in range(count):
        package = list(PACKAGES)[number % len(PACKAGES)]
        by_function: dict[str, list[Mutant]] = defaultdict(list)
        taken = {mutant.function for mutant in drawn}
        for mutant in places(tree, package):
            if mutant.function not in taken:
                by_function[mutant.function].append(mutant)
        drawn.append(random.choice(by_function[random.choice(sorted(by_function))]))
    return drawn


def stages(tree: Path, mutant: Mutant, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Which tests of which files: the module's; of those that name it or the function; others."""
    stem, name = path.stem.strip("_"), mutant.function.rpartition(".")[2].strip("_")
    words = re.compile(rf"\b_*(?:{name}|{stem})\b")
    found: tuple[list[str], ...] = [], [], []
    for file in sorted((tree / PACKAGES[mutant.package]).glob("test_*.py")):
        number = 0 if file.stem == f"test_{stem}" else 1 if words.search(file.read_text()) else 2
        found[number].append(str(file.relative_to(tree)))
    for files in found:
        yield "not slow", files
    for files in found[:2]:
        yield "slow and not long", files


def caught_by(copy: Path, which: str, files: Iterable[str], seconds: float) -> str | None:
    """The first test that fails; "": the time is over; None: all are green."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    # With a fault it may wait for ever; without one none of these takes as long.
    command.append("--timeout=60")
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}:{copy}", "SEED": "1"}
    process = subprocess.Popen(
        [*command, "-m", which, *files],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # As from the keyboard: so it ends the servers that it has started.
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    if process.returncode in (0, NONE_OF_THESE):
        return None
    return failed[1] if failed else "the run itself"


def tried(tree: Path, mutant: Mutant, seconds: float) -> dict[str, object]:
    """What became of a mutant, in a copy of the tree."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="mutant-") as directory:
        copy = Path(directory) / "tree"
        hidden = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
        shutil.copytree(tree, copy, ignore=hidden)
        place = places(copy, mutant.package).get(mutant)
        if place is None:
            return asdict(mutant) | {"result": "gone"}
        place.apply()
        by: str | None = None
        for which, files in stages(copy, mutant, place.path):
            if not files:
                continue
            left = seconds - (time.monotonic() - began)
            by = caught_by(copy, which, files, left) if left > 0 else ""
            if by is not None:
                break
        where = f"{place.path.relative_to(copy)}:{place.first[0] + 1}"
    result = "survived" if by is None else "caught" if by else "out of time"
    took = round(time.monotonic() - began)
    return asdict(mutant) | {"result": result, "by": by, "place": where, "seconds": took}


def main(arguments: list[str] | None = None) -> None:
    """Print a line of JSON for each mutant, and how many were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=600, help="for each mutant, at most")
    parser.add_argument("--again", type=Path, help="the output of an earlier run")
    parser.add_argument("--tree", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    if options.again is None:
        mutants = draw(options.tree, Random(options.seed), options.count)
    else:
        earlier = [
            json.loads(line) for line in options.again.read_text().splitlines() if "{" in line
        ]
        names = Mutant.__dataclass_fields__
        mutants = [Mutant(**{name: row[name] for name in names}) for row in earlier]
    results = []
    for mutant in mutants:
        results.append(tried(options.tree, mutant, options.seconds))
        print(json.dumps(results[-1]), flush=True)
    counts = {each: sum(row["result"] == each for row in results) for each in
              ("caught", "survived", "out of time", "gone")}  # fmt: skip
    print(", ".join(f"{count} {each}" for each, count in counts.items() if count))


if __name__ == "__main__":
    main()
