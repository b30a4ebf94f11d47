"""Arrays of an HDF5 file: finding them, reading rows of them, and errors that name the file."""

from __future__ import annotations

import dataclasses
import gc
import io
import math
import os
import threading
from typing import IO, Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.source_files import SourceFiles
from gear_loader.storage.dtypes import NUMPY_DTYPES, torch_dtypes
from gear_loader.storage.schema import Column
from gear_loader.utils.paths import is_address

_DEPTH = 16  # most nested groups; a deeper file is assumed to contain a cycle


@dataclasses.dataclass(frozen=True)
class FileArray:
    """One array of the file that becomes a column.

    Attributes:
        path: path in the file.
        role: standard name of the column.
        shape: shape of the whole array. dtype: dtype in the file.
        chunk_rows: rows that are compressed together; 1 if the array is not chunked.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int

    @property
    def step_shape(self) -> tuple[int, ...]:
        """Shape of one step. Scalars stored as [N, 1] have the shape ()."""
        scalar = self.role in ("reward", "terminated", "truncated") and self.shape[1:] == (1,)
        return () if scalar else self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, at least 1."""
        return max(1, math.prod(self.shape[1:]) * self.dtype.itemsize)


def any_length(array: FileArray) -> Column | None:
    """The column of strings, or of arrays of one dimension and any length; None of arrays of numbers."""
    h5py = require("h5py", "Reading an HDF5 file")
    if array.step_shape:
        return None
    text = h5py.check_string_dtype(array.dtype)
    if text is not None:
        return Column(str if text.encoding == "utf-8" else bytes)
    item = h5py.check_vlen_dtype(array.dtype)
    if item is None or item.kind not in "biuf":
        return None
    found = torch_dtypes().get(item.newbyteorder("=").name)
    return None if found is None else Column(found, (None,))


def listed(values: np.ndarray, column: Column) -> list[Any]:
    """The rows of an array of which `any_length` makes a column.

    Raises:
        UnicodeDecodeError: text is no UTF-8.
    """
    assert column.ragged is not None
    found: list[Any] = values.tolist() if values.dtype.kind == "S" else list(values)
    if column.ragged.kind == "array":
        dtype = NUMPY_DTYPES[column.ragged.dtype_name]
        return [np.ascontiguousarray(value, dtype) for value in found]
    return [value.decode() for value in found] if column.ragged.kind == "str" else found


class ReadError(Exception):
    """Rows or a description of an array cannot be read."""


class _NoCollection:
    """Context manager, of all threads together, in which Python collects no garbage by itself."""

    def __init__(self) -> None:
        self._mutex, self._inside, self._enabled = threading.Lock(), 0, False
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """The threads inside are the parent's."""
        if self._inside and self._enabled:
            gc.enable()
        self._mutex, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._mutex:
            if not self._inside:
                self._enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._inside -= 1
            if not self._inside and self._enabled:
                gc.enable()


_no_collection = _NoCollection()


class RemoteHDF5(io.RawIOBase):
    """A file at an address, for h5py.

    h5py holds its lock while it reads, and takes it to end an object. The thread that moves the bytes would wait for it
    there without end, if it collected garbage with such objects: so nobody does meanwhile.

    Args:
        file: the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file: Any = file

    @property
    def failure(self) -> Exception | None:
        """What reading has raised last."""
        found: Exception | None = getattr(self._file, "failure", None)
        return found

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The byte that is read next."""
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of `io.IOBase`."""
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        """As of `io.RawIOBase`."""
        with _no_collection:
            return int(self._file.readinto(buffer))


class open_file:
    """Context manager that opens an HDF5 file for reading.

    Args:
        files: the file, of `one_file`. source: name of the file in errors.

    Raises:
        SourceError: it is no readable HDF5 file, or the store that it is in fails while it is read.
    """

    def __init__(self, files: SourceFiles, source: str) -> None:
        h5py = require("h5py", "Reading an HDF5 file")
        path = files[0]
        if not is_address(path) and not os.path.isfile(path):
            raise SourceError(f"{source} does not exist any more; expected data that stay as they are.")
        self._raw = RemoteHDF5(files.open(path, whole=False)) if is_address(path) else None
        try:
            self._file = h5py.File(path if self._raw is None else self._raw, "r")
        except Exception as error:  # the HDF5 library reports damage with several types
            self._raise_failure()
            size = os.path.getsize(path) if self._raw is None else self._raw.seek(0, os.SEEK_END)
            raise SourceError(
                f"{source} ({size} bytes) cannot be opened as HDF5: {error}. Expected a complete, undamaged file: "
                "fetch or write it again."
            ) from error

    def _raise_failure(self) -> None:
        """Raise what reading an object has raised, which the HDF5 library takes for a damaged file."""
        failure = getattr(self._raw, "failure", None)
        if failure is not None:
            raise failure

    def __enter__(self) -> Any:
        return self._file

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._file.close()
        if not isinstance(error, GeneratorExit):
            self._raise_failure()  # even where a damaged array would have been left out


def read_rows(file: Any, array: FileArray, start: int, stop: int) -> np.ndarray:
    """Read the rows `start` to `stop` - 1 of an array.

    Raises:
        ReadError: the rows cannot be read, or the array has changed since `find_arrays`.
    """
    try:
        dataset = file[array.path]
        if dataset.shape != array.shape or dataset.dtype != array.dtype:
            raise ReadError(
                f"it now is {dataset.dtype} {list(dataset.shape)}, but was {array.dtype} {list(array.shape)}"
            )
        values = np.asarray(dataset[start:stop])
    except ReadError:
        raise
    except Exception as error:  # the HDF5 library reports damage with several types
        raise ReadError(f"{type(error).__name__}: {error}") from error
    return values.reshape(stop - start, *array.step_shape)


def find_arrays(file: Any, names: dict[str, str], source: str) -> dict[str, FileArray | Exception]:
    """All arrays of a file by standard name; an exception in place of an array whose description cannot be read.

    Args:
        file: the open file. names: path or top-level name in the file -> standard name. source: file name in errors.

    Raises:
        SourceError: the file cannot be listed.
    """
    h5py = require("h5py", "Reading an HDF5 file")
    found: dict[str, FileArray | Exception] = {}

    def walk(group: Any, path: str, depth: int) -> None:
        for key in group:
            where = f"{path}{key}"
            head, _, rest = where.partition("/")
            # The flags may be inside a group, so the whole path is tried before its first part.
            role = names.get(where) or ".".join([names.get(head, head), *(rest.split("/") if rest else ())])
            named = (
                where in names or head in names
            )  # takes precedence over an array with the same name by chance
            try:
                item = group[key]
                if isinstance(item, h5py.Group):
                    if depth < _DEPTH:
                        walk(item, f"{where}/", depth + 1)
                elif isinstance(item, h5py.Dataset) and item.shape and (named or role not in found):
                    chunk = item.chunks[0] if item.chunks else 1
                    found[role] = FileArray(where, role, tuple(item.shape), item.dtype, chunk)
            except Exception as error:  # the HDF5 library reports damage with several types
                found[role] = ReadError(f"{where!r}: {type(error).__name__}: {error}")

    try:
        walk(file, "", 0)
    except Exception as error:  # the HDF5 library reports damage with several types
        raise SourceError(
            f"{source} cannot be listed: {error}. The file is damaged: fetch or write it again."
        ) from error
    return found


def readable(array: FileArray | Exception, source: str) -> FileArray:
    """Return the array, or raise SourceError if its description could not be read."""
    if isinstance(array, Exception):
        raise SourceError(
            f"{source} cannot be read at {array}. The file is damaged: fetch or write it again, or leave the column "
            "out with columns=[...]."
        ) from array
    return array


def array_path(array: FileArray | Exception) -> str:
    """Path of an array, or the text of the error, for messages."""
    return array.path if isinstance(array, FileArray) else str(array)
