"""A YAML file as plain values, with the line of every one of them.

YAML is taken in its plain form: strings, whole and broken numbers, true/false, null, lists and
mappings. The surprises of YAML 1.1 are off (`no` is the word "no", `010` is no octal number,
`1:30` is text), tags are refused, and a key may stand in a mapping once.
"""

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES: Final = 1024 * 1024
MAX_DEPTH: Final = 20
_TOO_DEEP: Final = f"nested deeper than {MAX_DEPTH} levels"
# Counted with aliases followed, so that a small file cannot grow into a large one.
MAX_NODES: Final = 100_000

OUR_LACK: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Errors that say that a limit of this process or machine is reached."""

Location = tuple[str | int, ...]
"""The way to a value from the top: keys and list indices."""


class ConfigError(Exception):
    """The configuration cannot be used.

    Attributes:
        problems: one line each, `file:line:column: key: the error`.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class OutOfReach(ConfigError):
    """A file cannot be read now: this process has run out of descriptors, or the machine of memory.

    Nothing that is configured is wrong.
    """


def cannot_be_read(place: object, error: OSError) -> ConfigError:
    """The error to raise where a file cannot be read; `place` is the file, maybe with its line."""
    kind = OutOfReach if error.errno in OUR_LACK else ConfigError
    return kind(f"{place}: cannot be read: {error.strerror}")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Document:
    """The values of one YAML file, and where each stands.

    Attributes:
        values: the mapping at the top.
        keys: where the key (or the list item) of each value stands.
        marks: where each value itself stands.
    """

    file: str
    values: Mapping[str, object]
    keys: Mapping[Location, Mark]
    marks: Mapping[Location, Mark]

    def problem(self, location: Location, text: str, *, at_key: bool = False) -> str:
        """`text` as one line that names the file, the place nearest to `location`, and the key."""
        marks = self.keys if at_key else self.marks
        place = location
        while place and place not in marks:
            place = place[:-1]
        mark = marks.get(place, Mark(1, 1))
        key = dotted(location)
        return f"{self.file}:{mark.line}:{mark.column}: {key + ': ' if key else ''}{text}"

    def source(self, location: Location) -> str | None:
        """`file:line` of the key at `location`, or None where the file does not set it."""
        mark = self.keys.get(location)
        return None if mark is None else f"{self.file}:{mark.line}"


def dotted(location: Location) -> str:
    """`("a", 0, "b")` as `a[0].b`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def read_document(path: Path) -> Document:
    """Read and check one YAML file; raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise cannot_be_read(f"{path}:1:1", error) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}:1:1: larger than {MAX_BYTES} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}:1: not UTF-8") from None
    return parse_document(text, file=str(path))


def parse_document(text: str, *, file: str) -> Document:
    """The values of a YAML text; raises ConfigError with `file` as the file's name."""
    walk = _Walk(file)
    try:
        node = yaml.compose(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        raise ConfigError(f"{file}:{place}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", "cannot be parsed")
        raise ConfigError(f"{file}:1:1: not YAML: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{file}:1:1: {_TOO_DEEP}") from None
    values: object = {} if node is None else walk.value(node, ())
    if not isinstance(values, dict):
        walk.problems.append(f"{file}:1:1: the file must be a mapping of settings")
    if walk.problems:
        raise ConfigError(*walk.problems)
    assert isinstance(values, dict)
    return Document(file, values, walk.keys, walk.marks)


class _PlainLoader(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2's core schema, in their decimal forms."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")
)
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]
)
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})\Z"), list("-+0123456789")
)
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})\.[0-9]{1,18}\Z"),
    list("-+0123456789"),
)

_PLAIN_TAGS: Final = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "bool", "null"))
_NUMBER_TAGS: Final = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float"))


@dataclass(slots=True)
class _Walk:
    """From nodes to values, noting places and collecting the errors."""

    file: str
    problems: list[str] = field(default_factory=list)
    keys: dict[Location, Mark] = field(default_factory=dict)
    marks: dict[Location, Mark] = field(default_factory=dict)
    nodes: int = 0

    def value(self, node: Node, location: Location) -> object:
        """The plain value of `node`; an alias counts and is walked at each use."""
        self.nodes += 1
        if len(location) > MAX_DEPTH:
            raise ConfigError(self._at(node, location, _TOO_DEEP))
        if self.nodes > MAX_NODES:
            raise ConfigError(self._at(node, location, "too much is built from aliases"))
        self.marks[location] = _mark(node)
        if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return dict(self._pairs(node, location))
        if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return list(self._items(node, location))
        return self._scalar(node, location)

    def _pairs(self, node: MappingNode, location: Location) -> Iterator[tuple[str, object]]:
        seen: dict[str, Mark] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                self.problems.append(self._at(key_node, location, "a key must be text"))
                continue
            key: str = key_node.value
            if key in seen:
                text = f"already set in line {seen[key].line}"
                self.problems.append(self._at(key_node, (*location, key), text))
                continue
            seen[key] = self.keys[*location, key] = _mark(key_node)
            yield key, self.value(value_node, (*location, key))

    def _items(self, node: SequenceNode, location: Location) -> Iterator[object]:
        for index, item in enumerate(node.value):
            self.keys[*location, index] = _mark(item)
            yield self.value(item, (*location, index))

    def _scalar(self, node: Node, location: Location) -> object:
        if not isinstance(node, ScalarNode) or node.tag not in _PLAIN_TAGS | _NUMBER_TAGS:
            self.problems.append(self._at(node, location, f"tag {node.tag!r} is not allowed"))
            return None
        try:
            return SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError, KeyError):
            self.problems.append(self._at(node, location, f"not a value of type {node.tag!r}"))
            return None

    def _at(self, node: Node, location: Location, text: str) -> str:
        mark, key = _mark(node), dotted(location)
        return f"{self.file}:{mark.line}:{mark.column}: {key + ': ' if key else ''}{text}"


def _mark(node: Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)
