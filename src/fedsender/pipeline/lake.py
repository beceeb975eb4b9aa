"""The lake: Parquet files, and one manifest that lists the valid ones.

    MANIFEST.json                  the files of every table, and the position of each source
    LOCK                           held by the one job that writes
    events/part=0/00000003-000.parquet, attempts/day=2026-01-31/..., intervals/..., ...
    staging/                       files that a job has begun and not committed

A job writes files that no reader uses yet, flushes them to the disk, and then renames a new
manifest over the old one. All its changes become visible at that moment, or none. Files that a
killed job left are not in the manifest, and the next job that writes removes them. Files that a
commit replaces stay for an hour, for readers that began before it.

Files are read by their names, never by listing a directory. So a lake with a missing file is an
error and not a smaller result.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from fedsender.pipeline import Busy, PipelineError, Usage
from fedsender.pipeline.schemas import TABLES, LakeTable
from fedsender.pipeline.session import CHECKPOINTS, LOG_NAME
from fedsender.runtime import real_runtime

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import Column, DataFrame, SparkSession

from dataclasses import asdict, dataclass, field
from typing import Any

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
    """The manifest of a commit: immutable once it is on disk.

    Attributes:
        server_name: the homeserver's.
        positions: source -> the position up to which it was read.
        dropped: [path, time of its replacement in ms] of files that may be deleted.
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
        Usage: the lake's path is not a directory.
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


STAGING: Final = "staging"
RELAY: Final = "relay"
"""The directory, below the lake's, for the records of a relay (`relay_source`)."""
KEEP_DROPPED_MS: Final = 3_600_000
# A run every hour makes small files; that many of one part are put together, up to a size.
SMALL_BYTES: Final = 16 * 2**20
SMALL_FILES: Final = 32
Faults = Callable[[str], None]


class Lake:
    """A lake as of its newest commit when this was opened. See `open_lake`."""

    def __init__(self, directory: Path, manifest: Manifest, *, faults: Faults | None) -> None:
        self.directory = directory
        self.manifest = manifest
        self._faults = faults or (lambda _: None)

    def position(self, source: str, default: int = -1) -> int:
        """The position up to which `source` was read."""
        return self.manifest.positions.get(source, default)

    def files(self, table: LakeTable, parts: Callable[[str], bool] | None = None) -> list[LakeFile]:
        """The table's files; `parts` selects by the value of the part column.

        Raises:
            PipelineError: one of them is missing or has another size: the lake is damaged.
        """
        found = self.manifest.tables.get(table.name, [])
        if parts is not None:
            found = [file for file in found if parts(file.part)]
        self._check(found)
        return found

    def _check(self, files: Iterable[LakeFile]) -> None:
        for file in files:
            path = self.directory / file.path
            try:
                size = path.stat().st_size
            except OSError as error:
                raise self._damaged(path, error.strerror or "cannot be read") from None
            if size != file.bytes:
                raise self._damaged(path, f"has {size} bytes in place of {file.bytes}")

    def _damaged(self, path: Path, why: str) -> PipelineError:
        return PipelineError(
            f"{path}: {why}: the lake is damaged; restore it, or remove {self.directory} and"
            " ingest anew (what the ledger no longer holds is lost then)"
        )

    def rows(self, table: LakeTable | None = None) -> int:
        """The number of rows in the table's files, or in those of all tables."""
        names = self.manifest.tables if table is None else [table.name]
        return sum(file.rows for name in names for file in self.manifest.tables.get(name, []))

    def frame(
        self,
        spark: "SparkSession",
        table: LakeTable,
        parts: Callable[[str], bool] | None = None,
    ) -> "DataFrame":
        """The table for Spark, with exactly the columns of its schema.

        Raises:
            PipelineError: the lake is damaged.
        """
        files = self.files(table, parts)
        if not files:
            return empty_frame(spark, table)
        paths = [self.url(file.path) for file in files]
        return spark.read.schema(table.ddl).parquet(*paths)

    def read(self, table: LakeTable, columns: Sequence[str] | None = None) -> "pyarrow.Table":
        """A table small enough for memory, without Spark."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = table.arrow_schema()
        names = list(columns or schema.names)
        pieces = [
            pq.read_table(self.directory / file.path, columns=names, partitioning=None)
            for file in self.files(table)
        ]
        empty = pa.schema([schema.field(name) for name in names]).empty_table()
        return pa.concat_tables([empty, *pieces], promote_options="permissive")

    def url(self, path: str) -> str:
        """The URL of a file of the lake, for Spark."""
        return f"file://{self.directory / path}"

    @contextmanager
    def commit(self) -> Iterator["Commit"]:
        """Change the lake: all is visible when the body ends, or nothing if it raises.

        Afterwards this object is the changed lake.

        Raises:
            Busy: another job is writing, or has written since this lake was opened.
            PipelineError: the lake is damaged.
        """
        with locked(self.directory):
            current = read_manifest(self.directory)
            if current is not None and current.commit != self.manifest.commit:
                raise Busy(f"{self.directory}: another job has written to the lake")
            # Nothing is built on what is half gone.
            self._check(file for files in self.manifest.tables.values() for file in files)
            self._sweep()
            commit = Commit(self, self.manifest, self._faults)
            yield commit
            self.manifest = commit.finish()
            shutil.rmtree(self.directory / STAGING, ignore_errors=True)

    def expire(self) -> int:
        """Merge small files of parts with many, in at most one commit; return how many."""
        crowds: list[tuple[LakeTable, list[LakeFile]]] = []
        for name, files in self.manifest.tables.items():
            parts: dict[str, list[LakeFile]] = {}
            for file in files:
                if file.bytes < SMALL_BYTES:
                    parts.setdefault(file.part, []).append(file)
            crowds += [
                (TABLES[name], crowd[:SMALL_FILES])
                for crowd in parts.values()
                if len(crowd) >= SMALL_FILES
            ]
        if crowds:
            with self.commit() as commit:
                for table, crowd in crowds:
                    commit.merge(table, crowd)
        return sum(len(crowd) for _, crowd in crowds)

    def _sweep(self) -> None:
        """Remove files that killed jobs left, and files that were replaced long ago."""
        now_ms = real_runtime().now_ms()
        old = [path for path, ms in self.manifest.dropped if ms + KEEP_DROPPED_MS < now_ms]
        self.manifest.dropped = [item for item in self.manifest.dropped if item[0] not in old]
        known = {file.path for files in self.manifest.tables.values() for file in files}
        known.update(path for path, _ in self.manifest.dropped)
        shutil.rmtree(self.directory / STAGING, ignore_errors=True)
        for name in TABLES:
            for path in (self.directory / name).rglob("*.parquet"):
                if str(path.relative_to(self.directory)) not in known:
                    path.unlink(missing_ok=True)


def empty_frame(spark: "SparkSession", table: LakeTable) -> "DataFrame":
    """An empty frame of a table, without a Python worker, which `createDataFrame` would start.

    Spark sees that it is always empty, and leaves operations that only work on it out of a plan.
    """
    from pyspark.sql import functions as F  # noqa: N812

    columns = (F.lit(None).cast(kind).alias(name) for name, kind in table.columns.items())
    return spark.range(0).where(F.lit(False)).select(*columns)


def literal(rows: Sequence[Mapping[str, object]], columns: str) -> "Column":
    """A few thousand rows from Python, as an array of structs; `columns` as Spark's DDL.

    It is one text in the plan. So many literals would be too deep or too slow for Spark, and
    `createDataFrame` would start a Python worker.
    """
    from pyspark.sql import functions as F  # noqa: N812

    return F.from_json(F.lit(json.dumps(rows)), f"ARRAY<STRUCT<{columns}>>")


class Commit:
    """A change under way. See `Lake.commit`."""

    def __init__(self, lake: Lake, base: Manifest, faults: Faults) -> None:
        self._directory = lake.directory
        self._lake = lake
        self._faults = faults
        self._dropped: list[str] = []
        self._files = 0
        self._manifest = Manifest(
            base.server_name,
            commit=base.commit + 1,
            positions=dict(base.positions),
            tables={name: list(files) for name, files in base.tables.items()},
            dropped=list(base.dropped),
        )

    @property
    def version(self) -> int:
        """This commit's number, for `version` columns: higher is newer."""
        return self._manifest.commit

    def set_position(self, source: str, position: int) -> None:
        """Set the position up to which `source` is read once this is committed."""
        self._manifest.positions[source] = position

    def clear(self, table: LakeTable, parts: Callable[[str], bool] = lambda _: True) -> None:
        """Remove the table's rows, or those of some parts, which this commit replaces."""
        files = self._manifest.tables.pop(table.name, [])
        self._dropped += [file.path for file in files if parts(file.part)]
        if kept := [file for file in files if not parts(file.part)]:
            self._manifest.tables[table.name] = kept

    def append(self, table: LakeTable, rows: "pyarrow.Table", part: object = "") -> None:
        """Add rows, all with the same value of the table's part column; no rows add no file.

        Columns that the rows do not have are null; `version` is this commit's.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if rows.num_rows == 0:
            return
        path = self._new_path(table, part)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        schema = table.arrow_schema()
        for name in table.columns:
            if name not in rows.column_names:
                value = self.version if name == "version" else None
                rows = rows.append_column(
                    name, pa.array([value] * rows.num_rows, schema.field(name).type)
                )
        pq.write_table(rows.select(schema.names).cast(schema), path, compression="zstd")
        self._adopt(table, path, rows.num_rows, part)

    def merge(self, table: LakeTable, files: Sequence[LakeFile]) -> None:
        """Merge several files of one part into one, in batches; no other file is read."""
        import pyarrow.parquet as pq

        part = files[0].part
        path = self._new_path(table, part)
        with pq.ParquetWriter(path, table.arrow_schema(), compression="zstd") as writer:
            for file in files:
                with pq.ParquetFile(self._directory / file.path) as source:
                    for rows in source.iter_batches(columns=list(table.columns)):
                        writer.write_batch(rows.cast(table.arrow_schema()))
        merged = set(files)
        kept = [file for file in self._manifest.tables[table.name] if file not in merged]
        self._manifest.tables[table.name] = kept
        self._dropped += [file.path for file in files]
        self._adopt(table, path, sum(file.rows for file in files), part)

    def append_frame(self, table: LakeTable, frame: "DataFrame") -> int:
        """Add the rows of a Spark job; return their number.

        Columns that the rows do not have are null; `version` is this commit's. It makes a file for
        each of the frame's partitions (and of the table's parts): repartition it before.
        """
        import pyarrow.parquet as pq
        from pyspark.sql import functions as F  # noqa: N812

        staging = f"{STAGING}/{table.name}-{self._files:03d}"
        (self._directory / STAGING).mkdir(parents=True, exist_ok=True, mode=0o700)
        given = {"version": F.lit(self.version)} | {name: F.col(name) for name in frame.columns}
        contract = frame.select(
            *(
                given.get(name, F.lit(None)).cast(kind).alias(name)
                for name, kind in table.columns.items()
            )
        )
        if table.part is None:
            writer = contract.write
        else:
            # The column stays in the files: the copy names the directories and goes.
            writer = contract.withColumn("_part", F.col(table.part)).write.partitionBy("_part")
        writer.option("compression", "zstd").parquet(self._lake.url(staging))
        self._faults(f"{table.name}: staged")
        total = 0
        for path in sorted((self._directory / staging).rglob("*.parquet")):
            rows = pq.read_metadata(path).num_rows
            part = "" if table.part is None else path.parent.name.removeprefix("_part=")
            if rows:
                target = self._new_path(table, part)
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.replace(path, target)
                self._adopt(table, target, rows, part)
            total += rows
        return total

    def _new_path(self, table: LakeTable, part: object) -> Path:
        self._files += 1
        name = f"{self._manifest.commit:08d}-{self._files:04d}.parquet"
        directory = self._directory / table.name
        if table.part is not None:
            directory /= f"{table.part}={quote(str(part), safe='-')}"
        return directory / name

    def _adopt(self, table: LakeTable, path: Path, rows: int, part: object) -> None:
        os.chmod(path, 0o600)
        flush(path)
        file = LakeFile(
            str(path.relative_to(self._directory)), rows, path.stat().st_size, str(part)
        )
        self._manifest.tables.setdefault(table.name, []).append(file)
        self._faults(f"{table.name}: written")

    def finish(self) -> Manifest:
        """Put the new manifest in the old one's place."""
        now_ms = real_runtime().now_ms()
        self._manifest.dropped += [(path, now_ms) for path in self._dropped]
        for files in self._manifest.tables.values():
            for directory in {(self._directory / file.path).parent for file in files}:
                flush(directory)
        self._faults("before commit")
        write_manifest(self._directory, self._manifest)
        self._faults("after commit")
        return self._manifest


def open_lake(
    directory: Path, server_name: str, *, create: bool = False, faults: Faults | None = None
) -> Lake:
    """Open the lake in `directory`.

    Args:
        create: make it if there is none.
        faults: called at the points of a commit, for tests.

    Raises:
        Usage: there is none, it is another homeserver's, or its path cannot be used.
        PipelineError: its manifest is damaged or of a newer version.
    """
    directory = directory.absolute()
    if any(letter in str(directory) for letter in "*?[]{}\\\n"):
        raise Usage(f"pipeline.lake: {directory}: none of * ? [ ] {{ }} \\ may be in this path")
    manifest = read_manifest(directory)
    if manifest is None:
        if not create:
            raise Usage(f"{directory}: there is no lake; `fedsender pipeline ingest` makes it")
        _make(directory)
        manifest = Manifest(server_name)
    if manifest.server_name != server_name:
        raise Usage(
            f"{directory}: is the lake of {manifest.server_name}, and server_name is {server_name}"
        )
    return Lake(directory, manifest, faults=faults)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = [path for name in TABLES for path in (directory / name).rglob("*.parquet")]
        known = {"LOCK", STAGING, RELAY, CHECKPOINTS, LOG_NAME, *TABLES}
        strange = sorted({path.name for path in directory.iterdir()} - known)
    except OSError as error:
        raise Usage(f"pipeline.lake: {directory}: {error.strerror}") from None
    # What a killed first commit left is no loss; a later one followed a manifest.
    if any(not path.name.startswith(f"{1:08d}-") for path in files):
        raise Usage(
            f"{directory / MANIFEST}: is gone, and the lake's files are there: the lake is damaged;"
            f" restore it, or remove {directory} and ingest anew (what the ledger no longer holds"
            " is lost then)"
        )
    if strange:
        raise Usage(f"pipeline.lake: {directory}: is not empty and is no lake: it has {strange[0]}")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock while the body runs; raises Busy: another job does."""
    descriptor = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{directory}: another job is writing here") from None
        yield
    finally:
        os.close(descriptor)
