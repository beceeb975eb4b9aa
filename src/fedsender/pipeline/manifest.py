"""The lake's manifest: which files count, and up to where each source was read."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fedsender.pipeline import PipelineError, Usage
from fedsender.pipeline.schemas import LAKE_VERSION

MANIFEST: Final = "MANIFEST.json"


@dataclass(frozen=True, slots=True)
class LakeFile:
    """One Parquet file of a table.

    Attributes:
        path: below the lake's directory.
        part: the value of the table's `part` column in all its rows, as text; "" without one.
    """

    path: str
    rows: int
    bytes: int
    part: str = ""


@dataclass(slots=True)
class Manifest:
    """What a commit leaves: immutable once it is on disk.

    Attributes:
        server_name: whose lake it is.
        positions: source -> up to where it was read.
        dropped: [path, when it was replaced in ms] of files that may go.
    """

    server_name: str
    lake: int = LAKE_VERSION
    commit: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[LakeFile]] = field(default_factory=dict)
    dropped: list[tuple[str, int]] = field(default_factory=list)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest on disk; None: there is no lake.

    Raises:
        Usage: this is no directory.
        PipelineError: it cannot be read.
    """
    path = directory / MANIFEST
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise Usage(f"pipeline.lake: {directory}: is not a directory") from None
    except OSError as error:
        raise PipelineError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path}: is not a manifest of a lake: {error}") from None
    try:
        values: dict[str, Any] = json.loads(text)
        version = values["lake"]
        if version != LAKE_VERSION:
            raise PipelineError(
                f"{path}: the lake has version {version}, and this fedsender knows {LAKE_VERSION}:"
                " ingest into a new lake (pipeline.lake)"
            )
        tables = {
            name: [LakeFile(**file) for file in files] for name, files in values["tables"].items()
        }
        dropped = [(str(name), int(ms)) for name, ms in values["dropped"]]
        return Manifest(**(values | {"tables": tables, "dropped": dropped}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PipelineError(f"{path}: is not a manifest of a lake: {error!r}") from None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Put the manifest in place of the one on disk, by rename, durable."""
    draft = directory / f"{MANIFEST}.new"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(manifest), file, indent=None, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, directory / MANIFEST)
    flush(directory)


def flush(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
