"""Episodes that are NumPy's files, one ``.npz`` each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zipfile
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import (
    Columns,
    Episode,
    EpisodeReader,
    column_of,
    converted,
    is_finite_role,
    listing,
    plan_dtype,
    requested,
    select,
)
from gear_loader.sources.source_files import SourceFiles, files_of
from gear_loader.storage.schema import Column
from gear_loader.utils.checks import flag


def read_npz(
    path: str | os.PathLike[str],
    *,
    per_trajectory: Collection[str] = (),
    columns: Columns = None,
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
) -> NpzEpisodes:
    """The episodes of a directory of ``.npz`` files, one each, as `numpy.savez` writes them.

    An array ``[T, ...]`` is a column of its name, with dots for slashes; one without dimensions is a value that the
    episode has once, and so are those that `per_trajectory` names. Arrays of text are columns of ``str``. Pickles are
    refused.

    Args:
        path: a directory, a pattern or a file; files are read in the order of their names.
        per_trajectory: columns that an episode has once, ``[*shape]``.
        columns: names of the columns to take, or {name in the table: name in the source}; None takes all of the first
            file's.
        keep_float64: keep float64 columns instead of making them float32.
        allow_nonfinite: take NaN and infinite values of the column ``reward``, which otherwise are an error.

    Returns:
        A reader; opening it reads the headers of all files.

    Raises:
        SourceError: no such file, a damaged one, or arrays that do not fit; iteration raises it too.
    """
    flag("keep_float64", keep_float64)
    flag("allow_nonfinite", allow_nonfinite)
    return NpzEpisodes(
        files_of(path, (".npz",)),
        per_trajectory,
        columns,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
    )


@dataclasses.dataclass(frozen=True)
class _ArrayHeader:
    """Shape and dtype of an array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class NpzEpisodes(EpisodeReader):
    """See `read_npz`."""

    def __init__(
        self,
        paths: SourceFiles,
        per_trajectory: Collection[str],
        columns: Columns,
        *,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        self._paths, self._nonfinite = paths, allow_nonfinite
        first = _headers(paths, paths[0])
        if not first:
            raise SourceError(f"The file {paths[0]!r} holds no arrays; expected one at least.")
        self._chosen = select(requested(columns, list(first)), list(first), f"The file {paths[0]!r}")
        once = {
            name for name, role in self._chosen.items() if name in per_trajectory or not first[role].shape
        }
        if unknown := [name for name in per_trajectory if name not in self._chosen]:
            raise SourceError(
                f"per_trajectory= names {listing(unknown)}; expected some of the columns {listing(self._chosen)}."
            )
        if len(once) == len(self._chosen):
            raise SourceError(
                f"The file {paths[0]!r}: none of {listing(self._chosen)} is an array [T, ...]; expected one at least."
            )
        schema: dict[str, Column] = {}
        for name, role in self._chosen.items():
            schema[name] = self._planned(first[role], role, paths[0], name in once, keep_float64)
        lengths, payload = [], 0
        for number, path in enumerate(paths):
            headers = first if number == 0 else _headers(paths, path)
            lengths.append(self._length(headers, path, schema))
            payload += sum(
                int(np.prod(headers[role].shape, dtype=np.int64)) * headers[role].dtype.itemsize
                for name, role in self._chosen.items()
                if schema[name].ragged is not None
            )
        super().__init__(
            f"The directory {os.path.dirname(paths[0])!r}", np.array(lengths), schema, payload=payload
        )
        self.starts = np.arange(len(lengths))

    def _planned(self, header: _ArrayHeader, role: str, path: str, once: bool, keep_float64: bool) -> Column:
        what = f"The file {path!r}: column {role!r}"
        shape = header.shape if once else header.shape[1:]
        per: Any = "trajectory" if once else "step"
        if header.dtype.kind in "US" and not shape:
            return Column(str if header.dtype.kind == "U" else bytes, per=per)
        dtype = plan_dtype(role, header.dtype, what, keep_float64=keep_float64)
        return dataclasses.replace(column_of(dtype, shape, what), per=per)

    def _length(self, headers: dict[str, _ArrayHeader], path: str, schema: dict[str, Column]) -> int:
        """Steps of an episode; SourceError if its arrays do not fit."""
        lengths = {}
        for name, role in self._chosen.items():
            if role not in headers:
                raise SourceError(f"The file {path!r} has no array {role!r}; it has {listing(headers)}.")
            shape, column = headers[role].shape, schema[name]
            wanted = () if column.ragged is not None else column.shape
            if not column.trajectory and shape:
                lengths[role], shape = shape[0], shape[1:]
            elif not column.trajectory:
                shape = (-1,)
            if shape != wanted:
                expected = list(wanted) if column.trajectory else ["T", *wanted]
                raise SourceError(
                    f"The file {path!r}: column {role!r} has shape {list(headers[role].shape)}; expected {expected}, "
                    f"as in {self._paths[0]!r}."
                )
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise SourceError(
                f"The file {path!r} has columns of {lengths} steps; expected as many in each, at least one. Name those "
                "that an episode has once: per_trajectory=."
            )
        return next(iter(lengths.values()))

    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        for number, path in enumerate(self._paths[first:last], first):
            arrays = _read(self._paths, path, self._chosen.values())
            found = {role: _ArrayHeader(array.shape, array.dtype) for role, array in arrays.items()}
            if self._length(found, path, self.schema) != self.lengths[number]:
                raise SourceError(f"The file {path!r} has changed; expected data that stay as they are.")
            episode = Episode()
            for name, role in self._chosen.items():
                column, values = self.schema[name], arrays[role]
                if column.ragged is not None:
                    if values.dtype.kind not in "US":
                        raise SourceError(
                            f"The file {path!r}: column {role!r} has dtype {values.dtype}; expected text."
                        )
                    episode[name] = values.tolist()
                    continue

                def place(step: int | None, path: str = path, role: str = role) -> str:
                    return f"The file {path!r}{'' if step is None else f', step {step}'}: column {role!r}"

                once = column.trajectory
                values = values[None] if once else values
                values = converted(values, column.dtype, place, finite=is_finite_role(role, self._nonfinite))
                episode[name] = values[0] if once else values
            yield episode


def _headers(files: SourceFiles, path: str) -> dict[str, _ArrayHeader]:
    """The arrays of a file, by name."""
    with _opened(files, path, whole=False) as file:
        found = {}
        for member in file.namelist():
            if member.endswith(".npy"):
                with file.open(member) as stream:
                    version = np.lib.format.read_magic(stream)
                    read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
                        version, np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read(stream)
                found[_name(member)] = _ArrayHeader(tuple(shape), dtype)
        return found


def _read(files: SourceFiles, path: str, names: Collection[str]) -> dict[str, np.ndarray]:
    with _opened(files, path) as file:
        members = {_name(member): member for member in file.namelist() if member.endswith(".npy")}
        found = {}
        for name in names:
            if name not in members:
                raise SourceError(f"The file {path!r} has no array {name!r} any more.")
            with file.open(members[name]) as stream:
                found[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return found


def _name(member: str) -> str:
    return member.removesuffix(".npy").replace("/", ".")


class _opened:
    """A file of arrays; what reading it raises becomes a SourceError."""

    def __init__(self, files: SourceFiles, path: str, *, whole: bool = True) -> None:
        self._files, self._path, self._whole = files, path, whole

    def __enter__(self) -> zipfile.ZipFile:
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(
                    zipfile.ZipFile(stack.enter_context(self._files.open(self._path, whole=self._whole)))
                )
            except SourceError:
                raise
            except Exception as error:
                raise self._damaged(error) from error
            self._stack = stack.pop_all()
        return self._file

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._stack.close()
        if isinstance(error, Exception) and not isinstance(error, SourceError):
            raise self._damaged(error) from error  # zipfile, zlib and numpy raise several types

    def _damaged(self, error: Exception) -> SourceError:
        return SourceError(
            f"The file {self._path!r} cannot be read as .npz: {type(error).__name__}: {error}. Expected a complete "
            "file of numpy.savez, without pickles: write it again."
        )
