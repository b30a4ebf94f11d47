"""WebDataset: tar files, in which members of one name with different endings are a sample."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import tarfile
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.arrow_rows import READ_BYTES, Rows, readable
from gear_loader.sources.arrow_sources import read_rows
from gear_loader.sources.episodes import Columns, EpisodeReader, listing
from gear_loader.sources.source_files import SourceFiles, files_of
from gear_loader.utils.checks import one_of

MOST_BYTES = 2**30
"""Most bytes of a member of a tar file."""
_FIRST = 32  # samples whose columns are looked at
_IMAGES = ("jpg", "jpeg", "png", "webp")
_TEXT = ("txt", "text", "transcript")
_INTEGERS = ("cls", "cls2", "id", "index", "inx")
_PURPOSE = "Reading a WebDataset"


def read_webdataset(
    path: str | os.PathLike[str],
    *,
    episode: str | None = None,
    step: str | None = None,
    rows: Literal["steps", "episodes"] = "steps",
    per_trajectory: Collection[str] = (),
    columns: Columns = None,
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
) -> EpisodeReader:
    """The episodes of tar files of WebDataset, plain or gzip.

    A member ``a/b/17.left.jpg`` belongs to the sample ``a/b/17`` and is its column ``left.jpg``. Images are kept as
    they are; ``npy`` is an array, ``json`` a column for each entry (``json.reward``), ``txt`` text, ``cls`` and ``id``
    an integer, and anything else bytes. ``__key__`` is the name of the sample, ``__folder__`` the part before the last
    slash. Pickles are not read.

    Args:
        path: a file, a pattern, or a directory; files are read in the order of their names.
        episode: the column that says to which episode a sample belongs; by default ``__folder__``.
        step, rows, per_trajectory, columns, keep_float64, allow_nonfinite: as of `read_rows`. None takes all columns
            but ``__key__`` and ``__folder__``.

    Returns:
        A reader; opening it reads the files once.

    Raises:
        SourceError, ImportError: as `read_rows`.
    """
    one_of("rows", rows, ("steps", "episodes"), error=SourceError)
    found = TarRows(files_of(path, (".tar", ".tar.gz", ".tgz")), whole=rows == "episodes")
    if columns is None:
        columns = [name for name in found.schema.names if name not in ("__key__", "__folder__")]
    return read_rows(
        found,
        episode=("__folder__" if episode is None else episode) if rows == "steps" else episode,
        step=step,
        rows=rows,
        per_trajectory=per_trajectory,
        columns=columns,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
    )


class TarRows(Rows):
    """Samples of tar files as rows of Arrow.

    Args:
        whole: whether a sample is an episode, whose arrays are of different lengths.
    """

    def __init__(self, paths: SourceFiles, *, whole: bool) -> None:
        pa = require("pyarrow", _PURPOSE)
        self._paths = paths
        source = f"The file {paths[0]!r}" + (f" and {len(paths) - 1:,} more" if len(paths) > 1 else "")
        first: list[dict[str, Any]] = []
        size = 0
        with readable(source):
            for sample, length in itertools.chain.from_iterable(self._samples(path, None) for path in paths):
                first.append(sample)
                size += length
                if len(first) == _FIRST or size > READ_BYTES:
                    break
            if not first:
                raise SourceError(f"{source} has no samples; expected one at least.")
            fields, features = [], {}
            for name in dict.fromkeys(name for sample in first for name in sample):
                values = [sample[name] for sample in first if name in sample]
                fields.append(pa.field(name, _type_of(name, values, whole)))
                if _ending(name) in _IMAGES:
                    features[name] = {"_type": "Image"}
            metadata = {"huggingface": json.dumps({"info": {"features": features}})}
            super().__init__(source, pa.schema(fields, metadata=metadata), len(paths))

    def read(self, columns: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
        for part in range(first, len(self._paths)):
            for batch in self._batches(self._paths[part], list(columns)):
                yield part, batch

    def _batches(self, path: str, names: list[str]) -> Iterator[Any]:
        pending: list[dict[str, Any]] = []
        taken = 0
        for sample, length in self._samples(path, set(names)):
            if pending and (taken + length > READ_BYTES or len(pending) == 4096):
                yield self._batch(pending, names)
                pending, taken = [], 0
            pending.append(sample)
            taken += length
        if pending:
            yield self._batch(pending, names)

    def _batch(self, samples: list[dict[str, Any]], names: list[str]) -> Any:
        pa = require("pyarrow", _PURPOSE)
        arrays = []
        for name in names:
            kind = self.schema.field(name).type
            missing = next((sample["__key__"] for sample in samples if name not in sample), None)
            if missing is not None:
                raise SourceError(
                    f"{self.source}: the sample {missing!r} has no {name!r}; expected one in each."
                )
            with readable(f"{self.source}: {name!r} of the samples from {samples[0]['__key__']!r} on"):
                arrays.append(_array([sample[name] for sample in samples], kind))
        return pa.RecordBatch.from_arrays(
            arrays, schema=pa.schema([self.schema.field(name) for name in names])
        )

    def _samples(self, path: str, wanted: set[str] | None) -> Iterator[tuple[dict[str, Any], int]]:
        """Samples of a file, with all or some of their columns, and how many bytes were read for them."""
        sample: dict[str, Any] = {}
        size, seen = 0, set[str]()
        with _Tar(self._paths, path) as tar:
            for key, name, member in tar.members():
                if not sample or sample["__key__"] != key:
                    if sample:
                        yield sample, size
                    sample = {"__key__": key, "__folder__": key.rpartition("/")[0]}
                    size, seen = 0, set()
                if name in seen:
                    raise SourceError(
                        f"The file {path!r}: the sample {key!r} has two of {name!r}; expected one."
                    )
                seen.add(name)
                if wanted is None or name in wanted:
                    data = tar.read(member)
                    size += len(data)
                    sample[name] = _decoded(name, data, f"The file {path!r}: {member.name!r}")
        if sample:
            yield sample, size


class _Tar:
    """A tar file, read from its beginning to its end; what that raises becomes a SourceError."""

    def __init__(self, files: SourceFiles, path: str) -> None:
        self._files, self._path = files, path

    def __enter__(self) -> _Tar:
        with readable(f"The file {self._path!r}"):
            self._raw = self._files.open(self._path)
            packed = self._raw.read(2) == b"\x1f\x8b"
            self._raw.seek(0)
        self._file = _Bounded(gzip.GzipFile(fileobj=self._raw) if packed else self._raw)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._file.close()
        self._raw.close()
        if isinstance(error, Exception) and not isinstance(error, SourceError):  # of tarfile, gzip and zlib
            raise SourceError(
                f"The file {self._path!r} cannot be read as a tar file: {type(error).__name__}: {error}. Expected a "
                "complete one: fetch or write it again."
            ) from error

    def members(self) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
        """Key, column and member of each file."""
        with tarfile.open(fileobj=self._file, mode="r:", tarinfo=_TarHeader) as self._tar:
            for member in self._tar:
                folder, slash, base = member.name.rpartition("/")
                stem, dot, ending = base.partition(".")
                if member.isfile() and dot and stem:
                    yield f"{folder}{slash}{stem}", ending.lower(), member
                self._tar.members.clear()  # type: ignore[attr-defined]  # which would grow with the file

    def read(self, member: tarfile.TarInfo) -> bytes:
        """The bytes of a member."""
        file = self._tar.extractfile(member)
        data = b"" if file is None else file.read()
        if len(data) != member.size:
            raise tarfile.ReadError(f"{member.name!r} ends after {len(data)} of {member.size} bytes")
        return data


class _TarHeader(tarfile.TarInfo):
    """A header; where there is none, and no end of the archive, tarfile would end as if there were no more members."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _TarHeader:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(
                f"no header and no end of the archive at byte {tar.offset:,}: {error}"
            ) from error


class _Bounded(io.RawIOBase):
    """A file of which no read is larger than `MOST_BYTES`, whatever its headers say."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_BYTES:
            raise ValueError(f"a part of {size:,} bytes; expected at most {MOST_BYTES:,}")
        data: bytes = self._file.read(size)
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        return int(self._file.seek(place, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _decoded(name: str, data: bytes, where: str) -> Any:
    """The value of a member."""
    ending = _ending(name)
    try:
        if ending in _IMAGES:
            return {"bytes": data}
        if ending in _TEXT:
            return data.decode()
        if ending in _INTEGERS:
            return int(data)
        if ending == "json":
            return json.loads(data)
        if ending == "npy":
            return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, RecursionError, MemoryError, OverflowError, EOFError, SyntaxError) as error:
        raise SourceError(f"{where} cannot be read: {type(error).__name__}: {error}.") from error
    return data


def _type_of(name: str, values: list[Any], whole: bool) -> Any:
    """The Arrow type of the first values of a column."""
    pa = require("pyarrow", _PURPOSE)
    if not isinstance(values[0], np.ndarray):
        return pa.struct([("bytes", pa.binary())]) if _ending(name) in _IMAGES else pa.infer_type(values)
    array = values[0]
    if array.dtype.kind not in "biuf":
        raise SourceError(f"{name!r} is an array of {array.dtype}; expected numbers or flags.")
    kind = pa.from_numpy_dtype(array.dtype)
    for extent in array.shape[:0:-1] if whole else array.shape[::-1]:
        kind = pa.list_(kind, extent)
    return pa.list_(kind) if whole and array.ndim else kind


def _array(values: list[Any], kind: Any) -> Any:
    """Values as an Arrow array; arrays of NumPy without a list of their numbers."""
    pa = require("pyarrow", _PURPOSE)
    if not isinstance(values[0], np.ndarray):
        return pa.array(values, kind)
    whole = pa.types.is_list(kind)
    shapes = {value.shape[1:] if whole else value.shape for value in values if isinstance(value, np.ndarray)}
    wanted, shape = kind.value_type if whole else kind, []
    while pa.types.is_fixed_size_list(wanted):
        shape.append(wanted.list_size)
        wanted = wanted.value_type
    dtypes = {str(value.dtype.newbyteorder("=")) for value in values if isinstance(value, np.ndarray)}
    if shapes != {tuple(shape)} or dtypes != {str(np.dtype(wanted.to_pandas_dtype()))}:
        raise SourceError(
            f"Arrays of the shapes {listing(map(str, shapes), 4)} and dtypes {listing(dtypes, 4)} were read; expected "
            f"{wanted} of {shape}{' for each step' if whole else ''}, as in the first sample."
        )
    flat = np.concatenate([np.ascontiguousarray(v, v.dtype.newbyteorder("=")).reshape(-1) for v in values])
    array = pa.array(flat, wanted)
    for extent in reversed(shape):
        array = pa.FixedSizeListArray.from_arrays(array, extent)
    if not whole:
        return array
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), array)
