"""The lake: Parquet files, and one manifest that lists the valid ones.

    MANIFEST.json                  the files of every table, and the position of each source
    views.sql                      the same files as views for DuckDB
    LOCK                           held by the one job that writes, from its start to its end
    events/part=0/00000003-0001.parquet, attempts/day=2026-01-31/..., intervals/..., ...
    staging/                       files that a job has begun and not committed

A job writes files that no reader uses yet, flushes them to the disk, and then renames a new
manifest over the old one. All its changes become visible at that moment, or none. Files that a
killed job left are not in the manifest, and the next job that writes removes them. Files that a
commit replaces stay for an hour, for other programs that read.

Files are read by their names, never by listing a directory. So a lake with a missing file is an
error and not a smaller result. A column that was added after a file was written is null in it.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fedsender.files import DRAFT, flush, replaced
from fedsender.runtime import real_runtime
from fedsender_pipeline import Busy, PipelineError, Usage
from fedsender_pipeline.schemas import FIRST_VERSION, LAKE_VERSION, TABLES, LakeTable
from fedsender_pipeline.session import CHECKPOINTS, LOG_NAME, in_parts

MANIFEST: Final = "MANIFEST.json"


@dataclass(frozen=True, slots=True)
class LakeFile:
    """One Parquet file of a table.

    Attributes:
        path: below the lake's directory.
        sha256: of its content, in hexadecimal digits.
        part: the value of the table's `part` column in all its rows, as text, or the month of its
            days, such as "2026-01"; "" without such a column.
    """

    path: str
    rows: int
    bytes: int
    sha256: str
    part: str = ""

    @property
    def commit(self) -> int:
        """The number of the commit that wrote it."""
        return int(Path(self.path).name.split("-")[0])


def _supported(version: int) -> int:
    """The version that a lake of this one becomes."""
    if FIRST_VERSION <= version <= LAKE_VERSION:
        return LAKE_VERSION
    remedy = (
        "use a newer one" if version > LAKE_VERSION else "ingest into a new lake (pipeline.lake)"
    )
    said = f"the lake has version {version}, and this fedsender knows {LAKE_VERSION}: {remedy}"
    raise PydanticCustomError("version", said)


@dataclass(slots=True)
class Manifest:
    """The manifest of a commit: immutable once it is on disk.

    Attributes:
        server_name: the homeserver's.
        positions: source -> the position up to which it was read.
        dropped: [path, time of its replacement in ms] of files that may be deleted.
    """

    lake: Annotated[int, AfterValidator(_supported)]
    server_name: str
    commit: int
    positions: dict[str, int]
    tables: dict[str, list[LakeFile]]
    dropped: list[tuple[str, int]]


_MANIFEST: Final = TypeAdapter(Manifest)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest on disk; None: there is no lake.

    Raises:
        Usage: the lake's path is not a directory.
        PipelineError: it cannot be read; the text names the field.
    """
    path = directory / MANIFEST
    try:
        return _MANIFEST.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise Usage(f"pipeline.lake: {directory}: is not a directory") from None
    except OSError as error:
        raise PipelineError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "manifest"
        raise PipelineError(f"{path}: {field}: {first['msg']}") from None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Put the manifest in place of the one on disk, by rename, durable."""
    with replaced(directory / MANIFEST) as file:
        file.write(_MANIFEST.dump_json(manifest).decode())


VIEWS: Final = "views.sql"
_SQL_TYPES: Final = {
    "STRING": "VARCHAR",
    "BINARY": "BLOB",
    "MAP<STRING,BIGINT>": "MAP(VARCHAR, BIGINT)",
}


def _sql_type(kind: str) -> str:
    if kind.startswith("ARRAY<"):
        return f"{_sql_type(kind[6:-1])}[]"
    return _SQL_TYPES.get(kind, kind)


def write_views(directory: Path, manifest: Manifest) -> None:
    """Write the tables of a commit as views for DuckDB: `duckdb -init views.sql`.

    Of a row that was written again, the newest one is seen. A column that no file has is null.
    """
    lines = [f"-- commit {manifest.commit} of {directory}: replaced by the next one"]
    with suppress(FileNotFoundError), (directory / VIEWS).open() as known:
        if known.readline().rstrip("\n") == lines[0]:
            return
    for table in TABLES.values():
        columns = (f'NULL::{_sql_type(kind)} AS "{name}"' for name, kind in table.columns.items())
        query = f"SELECT {', '.join(columns)} WHERE false"
        if files := manifest.tables.get(table.name):
            paths = ", ".join(f"'{_quoted(str(directory / file.path))}'" for file in files)
            query += (
                f" UNION ALL BY NAME SELECT * FROM read_parquet([{paths}],"
                " union_by_name = true, hive_partitioning = false)"
            )
        if table.is_versioned:
            newest = f"PARTITION BY {', '.join(table.key)} ORDER BY coalesce(version, 0) DESC"
            query = f"SELECT * FROM ({query}) QUALIFY row_number() OVER ({newest}) = 1"
        if table.name == "intervals":
            query = f"SELECT * FROM ({query}) WHERE last IS NULL OR first <= last"
        lines.append(f"CREATE OR REPLACE VIEW {table.name} AS {query};")
    with replaced(directory / VIEWS) as file:
        file.write("\n".join([*lines, ""]))


def _quoted(text: str) -> str:
    return text.replace("'", "''")


STAGING: Final = "staging"
LET_GO: Final = "let_go"
"""The last event whose lines the lake has let go, or may (`vacuum`)."""
KEEP_DROPPED_MS: Final = 3_600_000
ROW_GROUP: Final = 250_000
"""Rows that are put together in memory."""
MOST_WANTED: Final = 200_000
_INTACT: Final[set[tuple[Path, str]]] = set()
"""The files whose content this process has compared: each is read through once more for it."""
_CHECKED: Final = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
"""Later, pages are compared with their own checksums, which costs next to nothing."""
Faults = Callable[[str], None]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remedy(directory: Path) -> str:
    return (
        f"the lake is damaged; restore it, or remove {directory} and ingest anew (what the ledger"
        " no longer holds is lost then)"
    )


def in_days(days: Collection[str]) -> Callable[[str], bool]:
    """Select the files that may have rows of these days; a file may have those of a month."""
    return lambda part: any(day.startswith(part) for day in days)


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
            PipelineError: one of them is missing: the lake is damaged.
        """
        found = self.manifest.tables.get(table.name, [])
        if parts is not None:
            found = [file for file in found if parts(file.part)]
        self._check(found)
        return found

    def _paths(self, files: Iterable[LakeFile]) -> list[Path]:
        """The paths of files that are now read.

        Raises:
            PipelineError: one of them is not as it was written: the lake is damaged.
        """
        paths = []
        for file in files:
            path = self.directory / file.path
            if (path, file.sha256) not in _INTACT:
                if _sha256(path) != file.sha256:
                    raise self._damaged(path, "has another content than when it was written")
                _INTACT.add((path, file.sha256))
            paths.append(path)
        return paths

    def _check(self, files: Iterable[LakeFile]) -> None:
        for file in files:
            path = self.directory / file.path
            if not path.exists():
                raise self._damaged(path, "is gone")

    def _damaged(self, path: Path, why: str) -> PipelineError:
        return PipelineError(f"{path}: {why}: {_remedy(self.directory)}")

    def rows(self, table: LakeTable | None = None) -> int:
        """The number of rows in the table's files, or in those of all tables."""
        names = self.manifest.tables if table is None else [table.name]
        return sum(file.rows for name in names for file in self.manifest.tables.get(name, []))

    def frame(
        self,
        spark: SparkSession,
        table: LakeTable,
        parts: Callable[[str], bool] | None = None,
    ) -> DataFrame:
        """The table for Spark, with exactly the columns of its schema.

        Raises:
            PipelineError: the lake is damaged.
        """
        files = self.files(table, parts)
        if not files:
            return empty_frame(spark, table)
        paths = [f"file://{path}" for path in self._paths(files)]
        return in_parts(spark.read.schema(table.ddl).parquet(*paths))

    def some(self, spark: SparkSession, table: LakeTable, wanted: ds.Expression) -> DataFrame:
        """The rows that are wanted, for Spark; where they are many, perhaps all rows.

        Arrow passes by the other rows for a tenth of the CPU that Spark needs for it. Of a table in
        parts, whose files are in order, it does not even read most.
        """
        files = self.files(table)
        found, number = [], 0
        for batch in self.batches(table, files, filter=wanted):
            found.append(batch)
            number += batch.num_rows
            if number > MOST_WANTED:
                return self.frame(spark, table)
        # Spark would end at a batch without rows.
        rows = pa.Table.from_batches(found, table.arrow_schema()).combine_chunks()
        return in_parts(spark.createDataFrame(rows, schema=table.ddl))

    def read(
        self,
        table: LakeTable,
        columns: Sequence[str] | None = None,
        wanted: ds.Expression | None = None,
    ) -> pa.Table:
        """A table's wanted rows, few enough for memory, without Spark."""
        return self.dataset(table).to_table(columns=columns, filter=wanted)

    def batches(
        self, table: LakeTable, files: Sequence[LakeFile] | None = None, **what: Any
    ) -> Iterator[pa.RecordBatch]:
        """The rows of these files (None: all), of which `what` are the columns and the filter.

        Arrow reads far ahead of a slow reader, so it is asked for one file after the other: at most
        one of them is in memory.
        """
        dataset = self.dataset(table, files)
        for file in dataset.get_fragments():
            yield from file.to_batches(schema=dataset.schema, **what)

    def dataset(self, table: LakeTable, files: Sequence[LakeFile] | None = None) -> ds.Dataset:
        """These files of a table (None: all) for pyarrow, with the columns of its schema."""
        paths = [str(path) for path in self._paths(self.files(table) if files is None else files)]
        return ds.dataset(paths, schema=table.arrow_schema(), format=_CHECKED)

    @contextmanager
    def commit(self) -> Iterator["Commit"]:
        """Change the lake: all is visible when the body ends, or nothing if it raises.

        Where the body changes nothing, there is no commit.

        Afterwards this object is the changed lake. A job has it `locked`, and has opened it since.

        Raises:
            PipelineError: the lake is damaged.
        """
        # Nothing is built on what is half gone.
        self._check(file for files in self.manifest.tables.values() for file in files)
        self._sweep()
        commit = Commit(self, self.manifest, self._faults)
        yield commit
        self.manifest = commit.finish()
        shutil.rmtree(self.directory / STAGING, ignore_errors=True)

    def _sweep(self) -> None:
        """Delete files that killed jobs left, and replaced files that nobody reads."""
        since_ms = real_runtime().now_ms() - KEEP_DROPPED_MS
        self.manifest.dropped = [each for each in self.manifest.dropped if each[1] >= since_ms]
        known = {file.path for files in self.manifest.tables.values() for file in files}
        known.update(path for path, _ in self.manifest.dropped)
        shutil.rmtree(self.directory / STAGING, ignore_errors=True)
        for name in TABLES:
            for path in list((self.directory / name).rglob("*.parquet")):
                if str(path.relative_to(self.directory)) not in known:
                    path.unlink()
                    with suppress(OSError):
                        path.parent.rmdir()  # Unless it has other files.


def empty_frame(spark: SparkSession, table: LakeTable) -> DataFrame:
    """An empty frame of a table, without a Python worker, which `createDataFrame` would start.

    Spark sees that it is always empty, and leaves operations that only work on it out of a plan.
    """
    columns = (f"cast(null as {kind}) as `{name}`" for name, kind in table.columns.items())
    return spark.range(0).where("false").selectExpr(*columns)


def literal(rows: Sequence[Mapping[str, object]], columns: str) -> Column:
    """A few thousand rows from Python, as an array of structs; `columns` as Spark's DDL.

    It is one text in the plan. So many literals would be too deep or too slow for Spark, and
    `createDataFrame` would start a Python worker.
    """
    return F.from_json(F.lit(json.dumps(rows)), f"ARRAY<STRUCT<{columns}>>")


def listed(spark: SparkSession, rows: Sequence[Mapping[str, object]], columns: str) -> DataFrame:
    """A frame of a few thousand rows from Python (`literal`)."""
    return spark.range(1).select(F.inline(literal(rows, columns)))


def grouped(
    batches: Iterable[pa.RecordBatch], key: str, *ends: tuple[str, str]
) -> Iterator[dict[str, Any]]:
    """Aggregates of each batch by `key`, so that the rows are never in memory together.

    Args:
        ends: (column, "min" or "max").
    """
    for batch in batches:
        yield from pa.Table.from_batches([batch]).group_by(key).aggregate([*ends]).to_pylist()


def _in_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in groups of `ROW_GROUP`, or a little more."""
    group: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        group.append(batch)
        rows += batch.num_rows
        if rows >= ROW_GROUP:
            yield pa.Table.from_batches(group)
            group, rows = [], 0
    if group:
        yield pa.Table.from_batches(group)


def _by_part(table: LakeTable, rows: pa.Table) -> list[tuple[str, pa.Table]]:
    """The rows by the value of the part column, as text; "" without such a column."""
    if table.part is None:
        return [("", rows)]
    parts = rows[table.part].cast("string")
    return [(part, rows.filter(pc.equal(parts, part))) for part in pc.unique(parts).to_pylist()]


class Commit:
    """A change under way. See `Lake.commit`."""

    def __init__(self, lake: Lake, base: Manifest, faults: Faults) -> None:
        self._directory = lake.directory
        self._lake = lake
        self._faults = faults
        self._dropped: list[str] = []
        self._changed: set[Path] = set()
        self._written: set[tuple[str, str]] = set()
        self._files = 0
        self._manifest = replace(
            base,
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
        self._drop(table, [f for f in self._manifest.tables.get(table.name, []) if parts(f.part)])

    def replace(self, table: LakeTable, frame: DataFrame) -> None:
        """Put the rows of a Spark job in place of the table's rows."""
        self.clear(table)
        self.append_frame(table, frame)

    def _drop(self, table: LakeTable, files: Sequence[LakeFile]) -> None:
        gone = set(files)
        kept = [file for file in self._manifest.tables.get(table.name, []) if file not in gone]
        self._manifest.tables[table.name] = kept
        self._dropped += [file.path for file in files]

    def written(self, table: LakeTable) -> ds.Dataset:
        """The rows that this commit has written so far."""
        files = self._manifest.tables.get(table.name, [])
        return self._lake.dataset(table, [each for each in files if each.commit == self.version])

    def append(self, table: LakeTable, batches: Iterable[pa.RecordBatch]) -> int:
        """Add rows, in one file for each value of the part column; return their number.

        Columns that the rows do not have are null; `version` is this commit's.
        """
        groups = (self._complete(table, rows) for rows in _in_groups(batches))
        parts = (each for rows in groups for each in _by_part(table, rows))
        return self._write(table, parts, are_new=True)

    def append_rows(self, table: LakeTable, rows: Sequence[Mapping[str, object]]) -> int:
        """Add a few rows, as `append` does."""
        given = (field for field in table.arrow_schema() if any(field.name in row for row in rows))
        return self.append(table, [pa.RecordBatch.from_pylist(rows, pa.schema(given))])

    def rewrite(
        self,
        table: LakeTable,
        files: Sequence[LakeFile],
        part: str,
        only: pc.Expression | None = None,
    ) -> None:
        """Put the rows of these files into one, in batches; `only`: the rows that stay.

        Raises:
            PipelineError: rows that should stay have got lost, or come twice.
        """
        rows = self._lake.batches(table, files, filter=only, batch_readahead=2)
        self._drop(table, files)
        groups = ((part, group) for group in _in_groups(rows))
        number = self._write(table, groups, are_new=False)
        if only is None and number != (before := sum(file.rows for file in files)):
            raise PipelineError(
                f"{table.name}: {before} rows of {len(files)} files became {number}"
            )

    def _complete(self, table: LakeTable, rows: pa.Table) -> pa.Table:
        nothing, version = pa.nulls(rows.num_rows), pa.repeat(self.version, rows.num_rows)
        given = {"version": version} | dict(zip(rows.column_names, rows.columns, strict=True))
        schema = table.arrow_schema()
        columns = [given.get(field.name, nothing).cast(field.type) for field in schema]
        return pa.table(columns, schema=schema)

    def _write(
        self, table: LakeTable, groups: Iterable[tuple[str, pa.Table]], *, are_new: bool
    ) -> int:
        """Write a file for each part, with a row group for each of the groups."""
        files: dict[str, tuple[Path, pq.ParquetWriter]] = {}
        with ExitStack() as stack:
            for part, rows in groups:
                if part not in files:
                    path = self.stage(table)
                    writer = pq.ParquetWriter(
                        path, rows.schema, compression="zstd", write_page_checksum=True
                    )
                    files[part] = path, stack.enter_context(writer)
                files[part][1].write_table(rows)
        if are_new:
            self._written |= {(table.name, part) for part in files}
        return sum(self._adopt(table, path, part) for part, (path, _) in files.items())

    def stage(self, table: LakeTable) -> Path:
        """A path for files about this table, which is gone after the commit."""
        self._files += 1
        (self._directory / STAGING).mkdir(exist_ok=True, mode=0o700)
        return self._directory / STAGING / f"{table.name}-{self._files:03d}"

    def append_frame(self, table: LakeTable, frame: DataFrame) -> int:
        """Add the rows of a Spark job; return their number.

        Columns that the rows do not have are null; `version` is this commit's. It makes a file for
        each of the frame's partitions (and of the table's parts): repartition it before.
        """
        staging = self.stage(table)
        given = {"version": f"{self.version}L"} | {name: f"`{name}`" for name in frame.columns}
        values = {
            name: f"cast({given.get(name, 'null')} as {kind})"
            for name, kind in table.columns.items()
        }
        columns = [f"{value} as `{name}`" for name, value in values.items()]
        if table.part is None:
            writer = frame.selectExpr(*columns).write
        else:
            # The column stays in the files: the copy names the directories and goes.
            columns.append(f"{values[table.part]} as _part")
            writer = frame.selectExpr(*columns).write.partitionBy("_part")
        writer.option("compression", "zstd").parquet(f"file://{staging}")
        self._faults(f"{table.name}: staged")
        total = 0
        for path in sorted(staging.rglob("*.parquet")):
            part = "" if table.part is None else path.parent.name.removeprefix("_part=")
            self._written.add((table.name, part))
            total += self._adopt(table, path, part)
        return total

    def _adopt(self, table: LakeTable, staged: Path, part: str) -> int:
        """Take a staged file into the lake, unless it is empty; return the number of its rows."""
        rows = int(pq.read_metadata(staged).num_rows)
        if rows == 0:
            return 0
        self._files += 1
        name = f"{self._manifest.commit:08d}-{self._files:04d}.parquet"
        directory = self._directory / table.name
        if table.part is not None:
            directory /= f"{table.part}={quote(part, safe='-')}"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(staged, 0o600)
        flush(staged)
        path = directory / name
        os.replace(staged, path)
        self._changed |= {directory, directory.parent}
        file = LakeFile(
            str(path.relative_to(self._directory)), rows, path.stat().st_size, _sha256(path), part
        )
        self._manifest.tables.setdefault(table.name, []).append(file)
        self._faults(f"{table.name}: written")
        return rows

    def _check_keys(self, table: LakeTable, part: str) -> None:
        """Hold that no row of a part is there twice.

        PDUs are those of lines that are there once: their number is compared where they are made.

        Raises:
            PipelineError: one is.
        """
        if not table.key or table.is_versioned or table.name == "pdus":
            return
        known = self._manifest.tables.get(table.name, [])
        files = [file for file in known if part.startswith(file.part)]
        if not files:
            return
        # A file may have the days of a month.
        value = None if table.part is None else pa.scalar(part).cast(table.part_type)
        wanted = None if value is None else ds.field(table.part) == value
        rows = self._lake.dataset(table, files).to_table(columns=[*table.key], filter=wanted)
        number = len(rows.group_by([*table.key], use_threads=False).aggregate([]))
        if number != len(rows):
            raise PipelineError(
                f"{table.name} {part}: {len(rows) - number} rows have the {', '.join(table.key)} of"
                " another one: nothing was committed; this is a fault of fedsender"
            )

    def finish(self) -> Manifest:
        """Put the new manifest in the old one's place, if it says anything else.

        Raises:
            PipelineError: a row would be there twice.
        """
        old, new = self._lake.manifest, self._manifest
        if old.commit and (new.tables, new.positions) == (old.tables, old.positions):
            # A job that was killed may have left those of an earlier commit.
            write_views(self._directory, old)
            return old
        for name, part in sorted(self._written):
            self._check_keys(TABLES[name], part)
        now_ms = real_runtime().now_ms()
        self._manifest.dropped += [(path, now_ms) for path in self._dropped]
        for directory in self._changed:
            flush(directory)
        self._faults("before commit")
        write_manifest(self._directory, self._manifest)
        self._faults("after commit")
        write_views(self._directory, self._manifest)
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
        manifest = Manifest(LAKE_VERSION, server_name, 0, {}, {}, [])
    if manifest.server_name != server_name:
        raise Usage(
            f"{directory}: is the lake of {manifest.server_name}, and server_name is {server_name}"
        )
    return Lake(directory, manifest, faults=faults)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = [path for name in TABLES for path in (directory / name).rglob("*.parquet")]
        known = {"LOCK", VIEWS, STAGING, CHECKPOINTS, LOG_NAME, *TABLES}
        strange = sorted(
            path.name
            for path in directory.iterdir()
            if path.name not in known and path.suffix != DRAFT
        )
    except OSError as error:
        raise Usage(f"pipeline.lake: {directory}: {error.strerror}") from None
    # What a killed first commit left is no loss; a later one followed a manifest.
    if any(not path.name.startswith(f"{1:08d}-") for path in files):
        why = "is gone, and the lake's files are there"
        raise Usage(f"{directory / MANIFEST}: {why}: {_remedy(directory)}")
    if strange:
        raise Usage(f"pipeline.lake: {directory}: is not empty and is no lake: it has {strange[0]}")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock while the body runs; raises Busy: another job does."""
    try:
        descriptor = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Usage(f"pipeline.lake: {directory}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{directory}: another job is writing here") from None
        yield
    finally:
        os.close(descriptor)
