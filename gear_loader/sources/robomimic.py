"""Episodes of a robomimic file: HDF5 with a group for each demonstration.

::

    data/demo_0/actions     [T, ...]       rewards, dones, states: [T, ...] too
    data/demo_0/obs/KEY     [T, ...]       next_obs/KEY: what was seen afterwards
    data/demo_1/...
    mask/train              names of the demonstrations of a split; mask/valid and others, too
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
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
from gear_loader.sources.hdf5_file import FileArray, ReadError, find_arrays, open_file, read_rows, readable
from gear_loader.sources.source_files import SourceFiles, one_file
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import flag

_NAMES = {
    "obs": "observation",
    "next_obs": "next_observation",
    "actions": "action",
    "rewards": "reward",
    "dones": "done",
    "states": "state",
}
_DEFAULT = ("observation", "action", "reward", "done")
_MOST_NAMES = 10_000_000  # in a mask


def read_robomimic(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    columns: Columns = None,
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
) -> RobomimicEpisodes:
    """The demonstrations of a robomimic file (robosuite, MimicGen and LIBERO write this layout, too).

    The arrays get the standard names: obs/KEY -> observation.KEY, next_obs/KEY -> next_observation.KEY, actions ->
    action, rewards -> reward, dones -> done, states -> state; others keep theirs, with dots for slashes.
    `Episode.final` has the last row of next_obs, where the file has one.

    Args:
        path: the file, or its address.
        split: the name of a mask, such as ``"train"`` or ``"valid"``; by default all demonstrations.
        columns: names of the columns to take, or {name in the table: name in the source}; a name in the source is the
            standard one or the path in a demonstration, ``obs/robot0_eef_pos``. None takes those of observation,
            action, reward and done that are there.
        keep_float64: keep float64 columns instead of making them float32.
        allow_nonfinite: take NaN and infinite rewards, which otherwise are an error.

    Returns:
        A reader, in the order of the numbers of the demonstrations. Opening it reads shapes; iteration reads one
        demonstration at a time.

    Raises:
        SourceError: no such file or mask, a damaged one, or demonstrations whose columns differ. Iteration raises it,
            too, naming the demonstration, the column and the step.
        ImportError: h5py is not installed.
    """
    flag("keep_float64", keep_float64)
    flag("allow_nonfinite", allow_nonfinite)
    if split is not None and not isinstance(split, str):
        raise SourceError(f"split={shown(split)}; expected the name of a mask, such as 'train', or None.")
    return RobomimicEpisodes(
        one_file(path, "an HDF5 file"),
        split,
        columns,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
    )


class RobomimicEpisodes(EpisodeReader):
    """See `read_robomimic`.

    Attributes:
        demos: names of the demonstrations.
    """

    def __init__(
        self,
        files: SourceFiles,
        split: str | None,
        columns: Columns,
        *,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        self._files, self._nonfinite = files, allow_nonfinite
        source = f"The file {files[0]!r}"
        with open_file(files, source) as file:
            self.demos = _demos(file, split, source)
            self._arrays: list[dict[str, FileArray]] = []
            self._next: list[dict[str, FileArray]] = []
            chosen: dict[str, str] = {}
            for demo in self.demos:
                found = _arrays_of(file, demo, source)
                if not chosen:
                    chosen = _select(columns, found, source)
                lacking = [role for role in chosen.values() if role not in found]
                if lacking:
                    raise SourceError(
                        f"{source}: {demo!r} lacks the columns {listing(lacking)}, which {self.demos[0]!r} has; leave "
                        "them out with columns=[...]."
                    )
                arrays = {n: readable(found[role], f"{source}, {demo!r}") for n, role in chosen.items()}
                self._check(arrays, demo, source)
                self._arrays.append(arrays)
                following = {name: found.get(f"next_{role}") for name, role in chosen.items()}
                self._next.append(
                    {
                        name: array
                        for name, array in following.items()
                        if isinstance(array, FileArray) and array.shape == arrays[name].shape
                    }
                )
        schema = {}
        for name, array in self._arrays[0].items():
            what = f"{source}: column {array.role!r}"
            dtype = plan_dtype(array.role, array.dtype, what, keep_float64=keep_float64)
            schema[name] = column_of(dtype, array.step_shape, what)
        lengths = [next(iter(arrays.values())).shape[0] for arrays in self._arrays]
        finals = [name for name in chosen if all(name in each for each in self._next)]
        super().__init__(source, np.array(lengths, dtype=np.int64), schema, finals)
        self.starts = np.arange(len(lengths))

    def _check(self, arrays: dict[str, FileArray], demo: str, source: str) -> None:
        """Raise SourceError unless a demonstration has steps, as many in each column, as the first one has them."""
        rows = {array.role: array.shape[0] for array in arrays.values()}
        if len(set(rows.values())) > 1 or not min(rows.values()):
            raise SourceError(
                f"{source}: {demo!r} has columns of {rows} steps; expected as many in each, at least one. The file is "
                "damaged or was not written to its end: write it again, or leave columns out with columns=[...]."
            )
        for name, array in (self._arrays[0] if self._arrays else arrays).items():
            own = arrays[name]
            if (own.step_shape, own.dtype) != (array.step_shape, array.dtype):
                raise SourceError(
                    f"{source}: {own.role!r} of {demo!r} is {own.dtype} {list(own.step_shape)}; expected "
                    f"{array.dtype} {list(array.step_shape)}, as in {self.demos[0]!r}."
                )

    def __iter__(self) -> Iterator[Episode]:
        """Read the demonstrations in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        with open_file(self._files, self.source) as file:
            for position, steps in enumerate(self.lengths[first:last].tolist(), first):
                arrays, following = self._arrays[position], self._next[position]
                yield Episode(
                    {name: self._read(file, position, name, arrays[name], 0, steps) for name in arrays},
                    {
                        name: self._read(file, position, name, following[name], steps - 1, steps)[0]
                        for name in self.finals
                    },
                )

    def _read(
        self, file: Any, position: int, name: str, array: FileArray, start: int, stop: int
    ) -> np.ndarray:
        where = f"{self.source}, {self.demos[position]!r}"
        try:
            values = read_rows(file, array, start, stop)
        except ReadError as error:
            raise SourceError(
                f"{where}: column {array.role!r} cannot be read: {error}. The file is damaged: fetch or write it again."
            ) from error

        def place(step: int | None) -> str:
            at = "" if step is None else f", step {start + step}"
            return f"{where}{at}: column {array.role!r}"

        finite = is_finite_role(array.role, self._nonfinite)
        return converted(values, self.schema[name].dtype, place, finite=finite)


def _demos(file: Any, split: str | None, source: str) -> list[str]:
    """The names of the demonstrations, in the order of their numbers."""
    h5py = require("h5py", "Reading an HDF5 file")
    try:
        data = file.get("data")
        if not isinstance(data, h5py.Group):
            raise SourceError(
                f"{source} has no group 'data'; it has {listing(file)}. Expected a robomimic file: a group "
                "data/demo_0 for each demonstration."
            )
        names = [name for name in data if isinstance(data.get(name), h5py.Group)]
        if split is not None:
            masks = file.get("mask")
            mask = masks.get(split) if isinstance(masks, h5py.Group) else None
            if not isinstance(mask, h5py.Dataset) or mask.ndim != 1 or len(mask) > _MOST_NAMES:
                known = listing(masks) if isinstance(masks, h5py.Group) else "none"
                raise SourceError(f"{source} has no mask {split!r}; it has {known}. Expected one: split=.")
            wanted = [each.decode() if isinstance(each, bytes) else str(each) for each in mask[:]]
            strange = sorted(set(wanted) - set(names))
            if strange:
                raise SourceError(
                    f"{source}: the mask {split!r} names {listing(strange)}, which are not there."
                )
            names = list(dict.fromkeys(wanted))
    except SourceError:
        raise
    except Exception as error:  # the HDF5 library reports damage with several types
        raise SourceError(
            f"{source} cannot be listed: {error}. The file is damaged: fetch or write it again."
        ) from error
    if not names:
        raise SourceError(f"{source} has no demonstrations to take; expected at least one.")
    return sorted(names, key=_number)


def _number(name: str) -> tuple[int, str]:
    found = re.search(r"\d{1,15}$", name)
    return int(found[0]) if found else -1, name


def _arrays_of(file: Any, demo: str, source: str) -> dict[str, FileArray | Exception]:
    """The arrays of a demonstration, by standard name, with their paths in the file."""
    try:
        group = file["data"][demo]
    except Exception as error:  # the HDF5 library reports damage with several types
        raise SourceError(f"{source}: {demo!r} cannot be read: {error}. Fetch or write it again.") from error
    found: dict[str, FileArray | Exception] = {}
    for role, array in find_arrays(group, _NAMES, f"{source}, {demo!r}").items():
        if isinstance(array, FileArray):
            path = f"data/{demo}/{array.path}"
            array = FileArray(path, array.role, array.shape, array.dtype, array.chunk_rows)
        found[role] = array
    return found


def _select(columns: Columns, found: dict[str, FileArray | Exception], source: str) -> dict[str, str]:
    # A path in a demonstration stands for the column's standard name.
    paths = {a.path.split("/", 2)[2]: role for role, a in found.items() if isinstance(a, FileArray)}
    default = [name for name in _DEFAULT if any(r == name or r.startswith(f"{name}.") for r in found)]
    if not default and columns is None:
        raise SourceError(f"{source}: the first demonstration has {listing(found)}; expected obs or actions.")
    wanted = {name: paths.get(wish, wish) for name, wish in requested(columns, default).items()}
    return select(wanted, list(found), source)
