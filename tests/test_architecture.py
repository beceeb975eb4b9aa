"""Files and functions that the pages name exist; imports run down the table of packages in
docs/architecture.md."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.pages import PAGES, ROOT, nothing_wrong, shown

SOURCE = ROOT / "src" / "fedsender"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the table below its heading row, each as its cells."""
    lines = PAGE.split(heading + "\n")[1].splitlines()[1:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def names_in(cell: str) -> list[str]:
    """The words of a cell that are set as code."""
    return re.findall(r"`([\w.]+)`", cell)


LAYERS = [names_in(row[0]) for row in rows_of("| packages | what they are |")]


def path_of(name: str) -> Path:
    """A file that the page names: of the package, or of the whole tree."""
    places = [top / name for top in (SOURCE, SOURCE.parent, ROOT)]
    return next((path for path in places if path.exists()), places[0])


def defined_in(body: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Each name that these statements define, with the body of its class."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, []
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, []
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, []


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_each_file_that_is_named_exists() -> None:
    nothing_wrong(
        f"{place} names {found[1]}"
        for place, found in shown(r"`([\w/]+\.py)`", *PAGES)
        if not path_of(found[1]).is_file()
    )


def test_each_function_that_is_named_exists() -> None:
    nothing_wrong(
        f"{place} names {found[2]} in {found[1]}"
        for place, found in shown(r"`([\w/]+\.py)` `([\w.]+)`", *PAGES)
        if not defines(path_of(found[1]), found[2])
    )


def defines(path: Path, name: str) -> bool:
    """Whether a file has a class, function or constant of this name, perhaps inside a class."""
    body = parsed(path).body
    for part in name.split("."):
        found = dict(defined_in(body))
        if part not in found:
            return False
        body = found[part]
    return True


def test_the_path_has_twelve_stages() -> None:
    stages = rows_of("| stage | what happens | file and function |")
    assert [row[0].split()[0] for row in stages] == [str(number) for number in range(1, 13)]
    assert all(re.search(r"`[\w/]+\.py` `", row[2]) for row in stages)


@cache
def imports() -> dict[str, set[str]]:
    """By module the modules of ours that it imports, in functions and for types too."""
    source = SOURCE.parent
    files = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.rglob("*.py")
    }
    found: dict[str, set[str]] = defaultdict(set)
    for module, path in files.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module in files:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found[module].add(whole if whole in files else node.module)
        found[module] -= {module, SOURCE.name}  # The package itself imports nothing.
    return dict(found)


def package_of(module: str) -> str:
    """A package of the daemon, or a product beside it."""
    product, _, rest = module.partition(".")
    return rest.partition(".")[0] if product == SOURCE.name else product


def test_each_package_has_its_row() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.stem.strip("_")}
    found |= {path.name for path in SOURCE.parent.iterdir() if path.name != SOURCE.name}
    found -= {"__init__", "__pycache__", "py"}
    listed = [name for row in LAYERS for name in row]
    assert sorted(listed) == sorted(found)


def test_each_directory_of_tests_has_its_row() -> None:
    listed = {
        name for row in rows_of("| tests | hold |") for name in re.findall(r"tests/(\w+)", row[0])
    }
    found = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert found <= listed


def test_imports_run_down_the_table_of_packages() -> None:
    level = {name: -number for number, row in enumerate(LAYERS) for name in row}
    up = Counter(
        (package_of(module), package)
        for module, imported in imports().items()
        for package in {package_of(each) for each in imported}
        if level.get(package, 0) > level.get(package_of(module), 0)
    )
    assert not up, "imports that run up, by package"


def test_the_daemon_imports_none_of_the_products_beside_it() -> None:
    for module, imported in imports().items():
        if module.startswith(f"{SOURCE.name}."):
            assert {each.partition(".")[0] for each in imported} <= {SOURCE.name}, module


def test_who_runs_synapse_may_ignore_the_store_of_our_own() -> None:
    """It comes in by its name (`store/__init__.py`, the entry points); the command line prints the
    description of its endpoint."""
    users = {
        module
        for module, imported in imports().items()
        if any(each.startswith("fedsender.embedded") for each in imported)
        and module.startswith("fedsender.")
    }
    assert {each for each in users if package_of(each) != "embedded"} == {"fedsender.cli"}


SQL_IN = ("fedsender.store.", "fedsender.embedded.")


def test_sql_is_written_in_the_stores_alone() -> None:
    users = set()
    for path in SOURCE.rglob("*.py"):
        names = {
            alias.name
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.ImportFrom | ast.Import)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).partition(".")[0] == "sqlalchemy"
        }
        if names - {"URL", "make_url", "ArgumentError", "Connection"}:
            users.add(".".join(path.relative_to(SOURCE.parent).with_suffix("").parts))
    assert {each for each in users if not each.startswith(SQL_IN)} == set()
    inside = {each.removeprefix("fedsender.embedded.") for each in users if "embedded" in each}
    assert inside == {"appends", "feeding", "stays", "store"}


def circles() -> list[list[str]]:
    """The sets of modules that import each other, directly or not, each sorted."""
    edges = imports()
    reached: dict[str, set[str]] = {}
    for module in edges:
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            for each in edges.get(ahead.pop(), ()):
                if each not in seen:
                    seen.add(each)
                    ahead.append(each)
        reached[module] = seen
    sets = {
        tuple(sorted(other for other in seen if module in reached.get(other, ())))
        for module, seen in reached.items()
        if module in seen
    }
    return [list(each) for each in sorted(sets)]


def test_modules_import_each_other_in_no_circle() -> None:
    assert circles() == []
