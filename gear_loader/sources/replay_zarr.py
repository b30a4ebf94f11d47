"""Episodes of a zarr group: the replay buffer of Diffusion Policy and UMI, in zarr's formats 2 and 3.

::

    data/KEY             [N, ...]     all steps of all episodes, one after another
    meta/episode_ends    [episodes]   the step after the last one of each
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import (
    Columns,
    Episode,
    EpisodeReader,
    chunk_starts,
    column_of,
    converted,
    is_finite_role,
    listing,
    plan_dtype,
    requested,
    select,
)
from gear_loader.sources.zarr_stores import ZarrPlace, place_of, store_of
from gear_loader.utils.checks import flag

READ_BYTES = 64 * 2**20
"""Bytes read at once, but at least one episode, and whole chunks."""
_MOST_CHUNK = 2**32  # bytes of a chunk, which is decompressed as a whole
_MOST_EPISODES = 2**31
_DEPTH = 16


def read_zarr(
    path: str | os.PathLike[str],
    *,
    columns: Columns = None,
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
) -> ZarrEpisodes:
    """The episodes of a zarr group with the arrays ``data/KEY`` and ``meta/episode_ends``.

    Columns have the names of the arrays in ``data``, with dots for slashes. Chunks that are not there have the array's
    fill value, by the rule of zarr: files that were lost cannot be told from chunks that were never written.

    Args:
        path: the directory of the group, or a zip file of it (``.zip``); or the address of one.
        columns: names of the columns to take, or {name in the table: name in the source}. None takes all.
        keep_float64: keep float64 columns instead of making them float32.
        allow_nonfinite: take NaN and infinite values of the column ``reward``, which otherwise are an error.

    Returns:
        A reader. Opening it reads ``episode_ends``; iteration reads the other arrays, about 64 MiB at a time. The
        arrays of an episode are views of what was read together: copy them to keep only a few.

    Raises:
        SourceError: no such group, missing arrays, arrays of uneven lengths, or ends that do not ascend. Iteration
            raises it, too, naming the episode and the column.
        ImportError: zarr is not installed.
    """
    flag("keep_float64", keep_float64)
    flag("allow_nonfinite", allow_nonfinite)
    return ZarrEpisodes(place_of(path), columns, keep_float64=keep_float64, allow_nonfinite=allow_nonfinite)


class _OpenGroup:
    """Context manager of a group."""

    def __init__(self, place: ZarrPlace, source: str) -> None:
        zarr = require("zarr", "Reading a zarr group")
        self._store: Any = None
        try:
            self._store = store_of(place)
            self._group = zarr.open_group(self._store, mode="r")
        except SourceError:
            raise
        except Exception as error:  # zarr and its stores report damage with many types
            raise SourceError(
                f"{source} cannot be opened as a zarr group: {_text(error)}. Expected a directory with .zgroup or "
                "zarr.json, or a zip file of one."
            ) from error

    def __enter__(self) -> Any:
        return self._group

    def __exit__(self, *_: object) -> None:
        if not isinstance(self._store, str):
            self._store.close()


class ZarrEpisodes(EpisodeReader):
    """See `read_zarr`."""

    def __init__(
        self, place: ZarrPlace, columns: Columns, *, keep_float64: bool, allow_nonfinite: bool
    ) -> None:
        source = f"The zarr group {place.path!r}"
        self._place, self._nonfinite = place, allow_nonfinite
        with _OpenGroup(place, source) as group:
            found = _arrays(group, source)
            self._ends = _ends(found.pop("meta/episode_ends", None), source)
            paths = {
                path.removeprefix("data/").replace("/", "."): path
                for path in sorted(found)
                if path.startswith("data/")
            }
            data = {name: found[path] for name, path in paths.items()}
            if not data:
                raise SourceError(f"{source} has no arrays in 'data'; it has {listing(found)}.")
            self._chosen = select(requested(columns, list(data)), list(data), source)
            rows = int(self._ends[-1])
            schema = {}
            self._rows = 1  # of the largest chunk
            self._known: dict[str, tuple[Any, ...]] = {}
            row_bytes = 0
            for name, role in self._chosen.items():
                array, what = data[role], f"{source}: column {role!r}"
                if not array.shape or array.shape[0] != rows:
                    raise SourceError(
                        f"{what} has the shape {list(array.shape)}, and the episodes end at step {rows}; expected as "
                        "many steps. It was not written to its end: write it again."
                    )
                dtype = plan_dtype(role, _dtype(array, what), what, keep_float64=keep_float64)
                schema[name] = column_of(dtype, tuple(array.shape[1:]), what)
                chunk = math.prod(array.chunks) * array.dtype.itemsize
                if chunk > _MOST_CHUNK:
                    raise SourceError(
                        f"{what} has chunks of {chunk:,} bytes; expected at most {_MOST_CHUNK:,}."
                    )
                self._rows = max(self._rows, int(array.chunks[0]))
                self._known[name] = (paths[role], tuple(array.shape), array.dtype)
                row_bytes += math.prod(array.shape[1:]) * array.dtype.itemsize
            chunk, self._rows = self._rows, max(READ_BYTES // max(row_bytes, 1), min(self._rows, rows))
        super().__init__(source, np.diff(self._ends, prepend=0), schema)
        self.starts = chunk_starts(self._ends, chunk)

    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        with _OpenGroup(self._place, self.source) as group:
            while first < last:
                start = int(self._ends[first - 1]) if first else 0
                end = min(
                    last, max(first + 1, int(np.searchsorted(self._ends, start + self._rows, side="right")))
                )
                stop = int(self._ends[end - 1])
                slab = {name: self._load(group, name, first, start, stop) for name in self._chosen}
                for number in range(first, end):
                    place, length = int(self._ends[number]), int(self.lengths[number])
                    piece = slice(place - length - start, place - start)
                    yield Episode({name: values[piece] for name, values in slab.items()})
                first = end

    def _load(self, group: Any, name: str, first: int, start: int, stop: int) -> np.ndarray:
        """One column of the steps `start` to `stop` - 1, the first of which begins an episode."""
        (path, shape, dtype), role = self._known[name], self._chosen[name]
        try:
            array = group[path]
            if (tuple(array.shape), array.dtype) != (shape, dtype):
                raise ValueError(
                    f"it now is {array.dtype} {list(array.shape)}, but was {dtype} {list(shape)}"
                )
            values = np.asarray(array[start:stop])
        except SourceError:
            raise
        except Exception as error:  # zarr and its codecs report damage with many types
            raise SourceError(
                f"{self.source}, from episode {first} on: column {role!r} cannot be read at steps {start} to "
                f"{stop - 1}: {_text(error)}. A chunk is damaged: fetch or write it again."
            ) from error

        def place(step: int | None) -> str:
            at = start + (step or 0)
            number = int(np.searchsorted(self._ends, at, side="right"))
            begin = int(self._ends[number - 1]) if number else 0
            return f"{self.source}, episode {number}, step {at - begin}: column {role!r}"

        finite = is_finite_role(role, self._nonfinite)
        return converted(values, self.schema[name].dtype, place, finite=finite)


def _arrays(group: Any, source: str) -> dict[str, Any]:
    """The arrays of a group by their paths."""
    found: dict[str, Any] = {}

    def walk(inner: Any, prefix: str, depth: int) -> None:
        for name, array in inner.arrays():
            found[f"{prefix}{name}"] = array
        for name, below in inner.groups() if depth < _DEPTH else ():
            walk(below, f"{prefix}{name}/", depth + 1)

    try:
        walk(group, "", 0)
    except SourceError:
        raise
    except Exception as error:  # zarr and its stores report damage with many types
        raise SourceError(f"{source} cannot be listed: {_text(error)}. Fetch or write it again.") from error
    return found


def _ends(array: Any, source: str) -> np.ndarray:
    """The ends of the episodes, int64."""
    try:
        if (
            array is None
            or array.ndim != 1
            or array.dtype.kind not in "iu"
            or array.shape[0] > _MOST_EPISODES
        ):
            raise SourceError(
                f"{source} has no list of integers 'meta/episode_ends'; expected one, as the replay buffer of "
                "Diffusion Policy has it."
            )
        ends = np.asarray(array[:]).astype(np.int64)
    except SourceError:
        raise
    except Exception as error:  # zarr and its codecs report damage with many types
        raise SourceError(
            f"{source}: 'meta/episode_ends' cannot be read: {_text(error)}. Fetch or write it again."
        ) from error
    lengths = np.diff(ends, prepend=0)
    if not len(ends) or (lengths < 1).any():
        what = "it is empty" if not len(ends) else f"entry {int(np.argmax(lengths < 1))} does not"
        raise SourceError(
            f"{source}: 'meta/episode_ends' should ascend from 1 on; {what}. Expected the step after each episode."
        )
    return ends


def _dtype(array: Any, what: str) -> Any:
    try:
        return np.dtype(array.dtype)
    except Exception as error:  # extension types
        raise SourceError(f"{what} has a dtype that numpy lacks: {_text(error)}.") from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
