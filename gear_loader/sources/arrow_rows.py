"""Rows of Arrow from files, tables and data sets, in batches of bounded size; any number of times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import describe
from gear_loader.sources.source_files import files_of
from gear_loader.utils.paths import is_address

READ_BYTES = 32 * 2**20
"""Bytes of rows that are read at once, about, but at least one row."""
_MOST_ROWS = 2**16
_PART_ROWS = 2**12
"""Rows of a part of a data set of Hugging Face, a multiple of those read at once."""
_PURPOSE = "Reading Parquet, Arrow, data frames or data sets of Hugging Face"


class Rows:
    """Rows of a schema.

    Attributes:
        source: name in errors. schema: Arrow's.
        counts: rows of each part, as files or their row groups, that can be read without those before; known once all
            have been read.
    """

    def __init__(self, source: str, schema: Any, parts: int = 1) -> None:
        self.source, self.schema = source, schema
        self.counts = [0] * parts

    def batches(self, columns: Sequence[str], first: int = 0) -> Iterator[Any]:
        """Record batches with these top-level columns, in the order of rows, from the part `first` on.

        Raises:
            SourceError: the data cannot be read.
        """
        counts = [0] * len(self.counts)
        for part, batch in self.read(columns, first):
            counts[part] += len(batch)
            yield batch
        self.counts[first:] = counts[first:]

    def read(self, columns: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
        """As `batches`, each with the part that it belongs to."""
        raise NotImplementedError


@contextlib.contextmanager
def readable(source: str) -> Iterator[None]:
    """Turn what Arrow raises into a SourceError."""
    pa = require("pyarrow", _PURPOSE)
    try:
        yield
    except SourceError:
        raise
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        KeyError,
        MemoryError,
        RuntimeError,
        TypeError,
        OverflowError,
    ) as error:
        raise SourceError(
            f"{source} cannot be read: {type(error).__name__}: {error}. It is damaged, or was not written to its end: "
            "fetch or write it again."
        ) from error


def _watched(source: str, batches: Iterable[Any]) -> Iterator[Any]:
    with readable(source):
        yield from batches


class FileRows(Rows):
    """Rows of files of one schema, one after another.

    Args:
        open_schema: returns the schema of a file, and how many parts it has. read: yields the batches of a file
            from a part on, with some columns, and the number of the part.
    """

    def __init__(
        self,
        paths: Sequence[str],
        open_schema: Callable[[str], tuple[Any, int]],
        read: Callable[[str, int, Sequence[str]], Iterator[tuple[int, Any]]],
    ) -> None:
        self._paths, self._read = list(paths), read
        self._begins = [0]  # parts before each file
        schemas = []
        for path in paths:
            with readable(f"The file {path!r}"):
                schema, parts = open_schema(path)
            schemas.append(schema)
            self._begins.append(self._begins[-1] + parts)
        first = schemas[0]
        for path, schema in zip(paths, schemas, strict=True):
            if not schema.equals(first):
                differing = [f for f in schema if f not in list(first)] + [
                    f for f in first if f not in list(schema)
                ]
                raise SourceError(
                    f"The file {path!r} has other columns than {paths[0]!r}; expected the same. The first that "
                    f"differs: {differing[0] if differing else 'their order'}."
                )
        more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        super().__init__(f"The file {paths[0]!r}{more}", first, self._begins[-1])

    def read(self, columns: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
        for path, begin, end in zip(self._paths, self._begins, self._begins[1:], strict=False):
            if first < end:
                batches = self._read(path, max(first - begin, 0), columns)
                for part, batch in _watched(f"The file {path!r}", batches):
                    yield begin + part, batch


def parquet_rows(pattern: Any) -> Rows:
    """Rows of Parquet files."""
    parquet = require("pyarrow.parquet", _PURPOSE)
    files = files_of(pattern, (".parquet", ".pq"))

    def look(path: str, columns: Sequence[str]) -> tuple[list[str], bool]:
        """Columns of text and bytes; whether these columns are most of the file."""
        with files.open(path, whole=False) as source, parquet.ParquetFile(source) as file:
            schema, sizes = file.schema, {True: 0, False: 0}
            each = [schema.column(i) for i in range(len(schema))]
            for i, leaf in enumerate(each if file.metadata.num_row_groups else ()):
                size = file.metadata.row_group(0).column(i).total_compressed_size
                sizes[leaf.path.split(".")[0] in columns] += size
            texts = [leaf.path for leaf in each if leaf.physical_type == "BYTE_ARRAY"]
            return texts, sizes[True] >= sizes[False]

    def read(path: str, first: int, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        # An entry of a dictionary may be large, and often repeated: it stays one.
        texts, most = look(path, columns)
        with (
            files.open(path, whole=most) as source,
            parquet.ParquetFile(source, read_dictionary=texts) as file,
        ):
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            row = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1.0)
            size = max(1, min(_MOST_ROWS, int(READ_BYTES / max(row, 1.0))))
            options = {"batch_size": size, "columns": list(columns), "use_threads": False}
            for number in range(first, len(groups)):  # each has its own dictionary
                for batch in file.iter_batches(row_groups=[number], **options):
                    yield number, batch

    def schema(path: str) -> tuple[Any, int]:
        with files.open(path, whole=False) as source, parquet.ParquetFile(source) as file:
            return file.schema_arrow, file.metadata.num_row_groups

    return FileRows(files, schema, read)


def arrow_rows(pattern: Any) -> Rows:
    """Rows of files of Arrow's IPC format (Feather), of either kind: with an index, or a stream."""
    pa = require("pyarrow", _PURPOSE)
    ipc = require("pyarrow.ipc", _PURPOSE)
    files = files_of(pattern, (".arrow", ".feather", ".ipc"))

    def opened(path: str, stack: contextlib.ExitStack, columns: Sequence[str] | None) -> Any:
        source = files.open(path, whole=columns is not None) if is_address(path) else None
        memory = stack.enter_context(
            pa.memory_map(path) if source is None else pa.PythonFile(source, mode="r")
        )
        magic = memory.read(6)
        memory.seek(0)
        options = ipc.IpcReadOptions()
        kind = ipc.open_file if magic == b"ARROW1" else ipc.open_stream
        reader = stack.enter_context(kind(memory, options=options))
        if columns is not None:
            chosen = [i for i, name in enumerate(reader.schema.names) if name in columns]
            if len(chosen) < len(reader.schema.names):
                memory.seek(0)
                options.included_fields = chosen
                reader = stack.enter_context(kind(memory, options=options))
        return reader

    def read(path: str, first: int, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        with contextlib.ExitStack() as stack:
            reader = opened(path, stack, columns)
            numbers = range(reader.num_record_batches) if hasattr(reader, "num_record_batches") else None
            found = map(reader.get_batch, numbers) if numbers is not None else iter(reader)
            for batch in found:
                batch.validate(full=True)  # offsets that lead out of the file, text that is none
                for piece in _cut(batch.select(list(columns))):
                    yield 0, piece

    def schema(path: str) -> tuple[Any, int]:
        with contextlib.ExitStack() as stack:
            return opened(path, stack, None).schema, 1

    return FileRows(files, schema, read)


def _cut(batch: Any) -> Iterator[Any]:
    """A batch in pieces of about `READ_BYTES`: views."""
    count = len(batch)
    size = max(1, min(_MOST_ROWS, int(READ_BYTES * count / max(batch.nbytes, 1))))
    for first in range(0, count, size):
        yield batch.slice(first, size)


class MemoryRows(Rows):
    """Rows of an Arrow table in memory."""

    def __init__(self, source: str, table: Any) -> None:
        super().__init__(source, table.schema)
        self._table = table

    def read(self, columns: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
        with readable(self.source):
            for batch in self._table.select(list(columns)).to_batches(max_chunksize=_MOST_ROWS):
                for piece in _cut(batch):
                    yield 0, piece


class DatasetRows(Rows):
    """Rows of a data set of Hugging Face, with images in it; those that are files of their own are read."""

    def __init__(self, source: str, dataset: Any) -> None:
        with readable(source):
            if dataset.features is None:
                dataset = dataset._resolve_features()
            super().__init__(source, dataset.features.arrow_schema, max(1, -(-len(dataset) // _PART_ROWS)))
        self._dataset = dataset

    def read(self, columns: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
        embed = require("datasets.table", _PURPOSE).embed_table_storage
        images = [name for name in columns if _is_image(self._dataset.features[name])]
        chosen = self._dataset.select_columns(list(columns))
        if first:
            chosen = chosen.select(range(first * _PART_ROWS, len(chosen)))
        arrow, row = chosen.with_format("arrow"), first * _PART_ROWS
        size = min(16 if images else 1024, _PART_ROWS)
        for table in _watched(self.source, arrow.iter(batch_size=size)):
            with readable(self.source):
                table.validate(full=True)  # its files are mapped, and may be damaged
                table = embed(table) if images else table
                for batch in table.combine_chunks().to_batches():
                    for piece in _cut(batch):
                        yield row // _PART_ROWS, piece
                row += len(table)


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image"


class RayRows(Rows):
    """Rows of a data set of Ray Data."""

    def __init__(self, source: str, dataset: Any) -> None:
        with readable(source):
            first = next(iter(dataset.iter_batches(batch_format="pyarrow", batch_size=1)), None)
        if first is None:
            raise SourceError(f"{source} has no rows; expected at least one.")
        super().__init__(source, first.schema)
        self._dataset = dataset
        dataset.context.execution_options.preserve_order = True  # it is read more than once

    def read(self, columns: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
        chosen = self._dataset.select_columns(list(columns))
        for table in _watched(self.source, chosen.iter_batches(batch_format="pyarrow", batch_size=4096)):
            for batch in table.combine_chunks().to_batches():
                for piece in _cut(batch):
                    yield 0, piece


def object_rows(source: Any) -> Rows:
    """Rows of a table in memory, a data frame, or a data set of Hugging Face or Ray Data.

    Raises:
        SourceError: it is none of these.
    """
    pa = require("pyarrow", _PURPOSE)
    name = f"The {type(source).__module__.partition('.')[0]} {type(source).__name__}"
    if isinstance(source, Rows):
        return source
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return MemoryRows("The Arrow table", source)
    if all(hasattr(source, each) for each in ("features", "with_format", "iter")):
        return DatasetRows(name, source)
    if all(hasattr(source, each) for each in ("iter_batches", "select_columns", "schema")):
        return RayRows(name, source)
    with readable(name):
        if hasattr(source, "to_arrow"):  # polars
            return MemoryRows(name, source.to_arrow())
        if all(hasattr(source, each) for each in ("columns", "iloc", "dtypes")):  # pandas
            return MemoryRows(name, pa.Table.from_pandas(source, preserve_index=False))
    raise SourceError(
        f"{describe(source)} was received; expected an Arrow table, a data frame of pandas or polars, or a data set of "
        "Hugging Face or Ray Data."
    )
