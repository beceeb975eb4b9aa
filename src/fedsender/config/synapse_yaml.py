"""Synapse's YAML files as Synapse reads them, asked setting by setting.

Later files replace whole top-level settings of earlier ones, as several `-c` of Synapse do, and a
directory stands for all `*.yaml` in it, in the order of their names. Errors name the file and the
setting and say what it must be, but never what it is: secrets stand there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from fedsender.config.document import ConfigError, cannot_be_read

MAX_BYTES: Final = 4 * 1024 * 1024
MAX_ITEMS: Final = 10_000
# What PyYAML's constructors raise for scalars that are not what their tag or form says.
_NOT_YAML: Final = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
    RecursionError,
)
_MS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 365 * 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,15})([smhdwy]?)")


@dataclass(frozen=True, slots=True)
class Settings:
    """Some settings of Synapse, and where each top-level one stands.

    Attributes:
        at: where these are, below the top: `redis`, `databases.main.args`, or nothing.
        sources: the file of each top-level setting, or of all of these.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, Path]
    at: str = ""
    file: Path = field(default_factory=Path)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def source(self, name: str) -> Path:
        """The file that sets `name`."""
        return self.file if self.at else self.sources.get(name, self.file)

    def name_of(self, name: str) -> str:
        """The whole name of a setting here, as an operator would write it."""
        return f"{self.at}.{name}" if self.at else name

    def wrong(self, name: str, must: str) -> ConfigError:
        """The error for a setting: `must` says what it must be."""
        return ConfigError(f"{self.source(name)}: {self.name_of(name)}: {must}")

    def section(self, name: str) -> "Settings":
        """The settings below `name`; none of them where it is not set."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.wrong(name, "must hold settings, one per line")
        return Settings(value, {}, self.name_of(name), self.source(name))

    def sections(self) -> Iterator[tuple[str, "Settings"]]:
        """Every one of these settings as a section."""
        for name in self.values:
            yield name, self.section(name)

    def text(self, name: str) -> str | None:
        """A text; a number counts as one. None where it is not set."""
        value = self.values.get(name)
        return None if value is None else self._text(name, value)

    def line(self, name: str) -> str | None:
        """A text; the line break that YAML's block style leaves at its end is no part of it."""
        value = self.values.get(name)
        return self._text(name, value.rstrip("\r\n")) if isinstance(value, str) else self.text(name)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def integer(self, name: str, default: int, *, least: int, most: int) -> int:
        """A whole number between two bounds."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"must be a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float | None:
        """A number, or None where it is not set."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
            raise self.wrong(name, "must be a number")
        return float(value)

    def seconds(self, name: str) -> float | None:
        """A duration in seconds, from Synapse's `10m` or its milliseconds; None: not set."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise self.wrong(name, "must be a duration such as 30s, 10m or 7d")
        return int(match[1]) * (_MS[match[2]] if match[2] else 0.001)

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of texts; one alone, and the keys of a mapping, count as one. None: not set."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | dict) or len(value) > MAX_ITEMS:
            raise self.wrong(name, "must be a list")
        return tuple(self._text(name, item) for item in value)

    def path(self, name: str) -> str | None:
        """The path of a file, made absolute; None where it is not set."""
        text = self.text(name)
        return None if text is None else absolute(text, self.source(name))

    def paths(self, name: str) -> tuple[str, ...]:
        """The paths of files, made absolute."""
        return tuple(absolute(text, self.source(name)) for text in self.texts(name) or ())

    def _text(self, name: str, value: object) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value or not is_plain(value):
            raise self.wrong(name, "must be text")
        return value


def is_plain(text: str) -> bool:
    """Whether there is nothing in it that no file could hold, and no control character."""
    return all(char >= " " and char != "\x7f" and not "\ud800" <= char <= "\udfff" for char in text)


def absolute(path: str, file: Path) -> str:
    """A path of `file`, absolute: a relative one is taken from the file's own directory."""
    return str(file.absolute().parent / path)


def read_synapse(paths: Sequence[Path]) -> Settings:
    """The settings of these files and directories together. Raises ConfigError."""
    values: dict[str, Any] = {}
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise ConfigError(f"{paths[0]}: no *.yaml in it")
    sources: dict[str, Path] = {}
    workers: dict[object, Path] = {}
    for file in files:
        found = _read(file)
        if "worker_name" in found:
            workers.setdefault(str(found["worker_name"]), file)
        values |= found
        sources |= dict.fromkeys(found, file)
    if len(workers) > 1:
        names = " and ".join(str(file) for file in workers.values())
        raise ConfigError(f"{names} are of different workers: give the file of one")
    return Settings(values, sources, file=files[0])


def _files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        return sorted(file for file in path.iterdir() if file.suffix == ".yaml" and file.is_file())
    except OSError as error:
        raise cannot_be_read(path, error) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise cannot_be_read(file, error) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_BYTES} bytes")
    try:
        values = yaml.load(raw, Loader=_Loader)
    except _NOT_YAML as error:
        raise ConfigError(f"{file}: {_place(error)}not YAML") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file}: must be a mapping of settings")
    return values


def _place(error: Exception) -> str:
    """Where it is. What PyYAML says of it may quote the file, and is not told."""
    mark = error.problem_mark or error.context_mark if isinstance(error, _Marked) else None
    return f"line {mark.line + 1}: " if mark else ""


_Marked: Final = yaml.MarkedYAMLError
# libyaml's, where it is there: ten times as fast.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
