"""Trajectories of a D4RL-style HDF5 file: flat arrays of all steps, split by two flags.

observations   o0 o1 o2 o3 o4 o5 o6 o7      [N, ...]
actions        a0 a1 a2 a3 a4 a5 a6 a7      [N, ...]
rewards        r0 r1 r2 r3 r4 r5 r6 r7      [N] or [N, 1]
terminals       .  .  1  .  .  .  .  .      [N] or [N, 1]: the episode ended there by itself
timeouts        .  .  .  .  .  1  .  .      [N] or [N, 1]: it was cut off there
               |--------|--------|-----|
                   0        1       2: unfinished
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import (
    STANDARD,
    Columns,
    Episode,
    EpisodeReader,
    check_count,
    chunk_starts,
    column_of,
    converted,
    is_finite_role,
    listing,
    plan_dtype,
    requested,
    select,
)
from gear_loader.sources.hdf5_file import (
    FileArray,
    ReadError,
    any_length,
    array_path,
    find_arrays,
    listed,
    open_file,
    read_rows,
    readable,
)
from gear_loader.sources.source_files import SourceFiles, one_file
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import flag

_NAMES = {
    "observations": "observation",
    "actions": "action",
    "rewards": "reward",
    "next_observations": "next_observation",
    "infos": "info",
}

READ_BYTES = 64 * 2**20
"""Bytes read at once, but at least one trajectory."""

_FLAG_ROWS = 2**20  # rows of the flags read at once
_SPARSE = 16  # steps of a trajectory from which on its last row is read alone


def read_hdf5(
    path: str | os.PathLike[str],
    *,
    columns: Columns = None,
    terminals: str = "terminals",
    timeouts: str | None = "timeouts",
    max_episode_steps: int | None = None,
    unfinished: Literal["keep", "drop"] = "keep",
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
) -> HDF5Episodes:
    """The trajectories of a D4RL-style HDF5 file.

    A trajectory ends with the step at which `terminals` or `timeouts` (or both) is set. The arrays get the
    standard names: observations -> observation, actions -> action, rewards -> reward, terminals ->
    terminated, timeouts -> truncated, next_observations -> next_observation, infos/qpos -> info.qpos; any
    other array of as many rows is a column of its own name, with dots for slashes. Strings are columns of ``str`` (of
    ASCII: ``bytes``), arrays of variable length those of any length. `Episode.final` has the last row of
    next_observations; it is empty if the file has none, as the next row of observations is that of another trajectory.

    Args:
        path: the file, or its address.
        columns: names of the columns to take, or {name in the table: name in the source}; a name in the
            source is the standard one or the path in the file. None takes observation, action, reward,
            terminated and truncated.
        terminals: path of the flags that end a trajectory by itself.
        timeouts: path of the flags that cut one off; None for a file that has none.
        max_episode_steps: cut longer trajectories after so many steps and mark them truncated; for files
            without timeouts.
        unfinished: what becomes of steps after the last flag: ``"keep"`` takes them as a trajectory that is
            truncated at its last step, ``"drop"`` leaves them out.
        keep_float64: keep float64 columns instead of making them float32.
        allow_nonfinite: take NaN and infinite rewards, which otherwise are an error.

    Returns:
        A reader: sized, with `lengths` and `schema` known, and good for any number of iterations. Opening
        reads the flags; iteration reads the other columns, about 64 MiB at a time. The arrays of an episode
        are views of what was read together: copy them to keep only a few.

    Raises:
        SourceError: no such file, a damaged one, a missing column, columns of uneven lengths, zero
            trajectories, or options that do not fit. Iteration raises it, too, naming the trajectory, the
            column and the step.
        ImportError: h5py is not installed.
    """
    require("h5py", "Reading an HDF5 file")
    if not isinstance(unfinished, str) or unfinished not in ("keep", "drop"):
        raise SourceError(f"unfinished={shown(unfinished)}; expected 'keep' or 'drop'.")
    for option, value in (("terminals", terminals), ("timeouts", timeouts)):
        if not isinstance(value, str) and (option == "terminals" or value is not None):
            raise SourceError(f"{option}={shown(value)}; expected the path of an array in the file.")
    check_count("max_episode_steps", max_episode_steps)
    flag("keep_float64", keep_float64)
    flag("allow_nonfinite", allow_nonfinite)
    return HDF5Episodes(
        one_file(path, "an HDF5 file"),
        columns,
        terminals=terminals,
        timeouts=timeouts,
        max_episode_steps=max_episode_steps,
        unfinished=unfinished,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
    )


class HDF5Episodes(EpisodeReader):
    """See `read_hdf5`."""

    def __init__(
        self,
        files: SourceFiles,
        columns: Columns,
        *,
        terminals: str,
        timeouts: str | None,
        max_episode_steps: int | None,
        unfinished: str,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        self._files = files
        source = f"The file {files[0]!r}"
        self._allow_nonfinite = allow_nonfinite
        with open_file(files, source) as file:
            names = dict(_NAMES)
            names[terminals] = "terminated"
            if timeouts is not None:
                names[timeouts] = "truncated"
            found = find_arrays(file, names, source)
            flags = {"terminated": terminals} | ({} if timeouts is None else {"truncated": timeouts})
            for role, flag in flags.items():
                if role not in found:
                    hint = "" if role == "terminated" else "; pass timeouts=None if it has none by design"
                    raise SourceError(
                        f"{source} has no {flag!r}, which splits it into trajectories; it has "
                        f"{listing(array_path(a) for a in found.values())}. Name the flags with "
                        f"terminals= and timeouts={hint}."
                    )
            chosen = _select(columns, found, source, has_timeouts=timeouts is not None)
            self._flags = [readable(found[role], source) for role in flags]
            # None in a file without timeouts: only trajectories cut by `_split` are truncated.
            self._columns = {
                name: readable(found[role], source) if role in found else None
                for name, role in chosen.items()
            }
            rows = self._check_rows(file, source)
            self._following = _following(chosen, found)
            self._ends, self._cut = _split(
                self._read_flags(file, source, rows), rows, max_episode_steps, unfinished == "keep"
            )
        if not len(self._ends):
            raise SourceError(
                f"{source} holds {rows} steps and no flag that ends a trajectory, and unfinished='drop' leaves "
                "out the rest: no trajectories. Pass unfinished='keep' or max_episode_steps=."
            )
        starts = np.concatenate([[0], self._ends[:-1]])
        schema = {}
        for name, array in self._columns.items():
            if array is None:
                schema[name] = Column(torch.bool)
                continue
            what = f"{source}: column {array.path!r}"
            column = any_length(array)
            if column is not None:
                schema[name] = column
                continue
            dtype = plan_dtype(array.role, array.dtype, what, keep_float64=keep_float64)
            schema[name] = column_of(dtype, array.step_shape, what)
        super().__init__(source, self._ends - starts, schema, self._following)
        chunks = [array.chunk_rows for array in self._columns.values() if array is not None]
        self.starts = chunk_starts(self._ends, max(chunks, default=1))

    def _check_rows(self, file: Any, source: str) -> int:
        for array in self._flags:
            if array.step_shape != ():
                raise SourceError(
                    f"{source}: {array.path!r} has shape {list(array.shape)}; expected one flag a step, [N] or [N, 1]."
                )
        arrays = {array.path: array for array in [*self._flags, *self._columns.values()] if array is not None}
        rows = {path: array.shape[0] for path, array in arrays.items()}
        longest = max(rows.values())
        short = {path: count for path, count in rows.items() if count < longest}
        if short:
            where = ""
            if all(array.path not in short for array in self._flags):
                ends, _ = _split(self._read_flags(file, source, longest), longest, None, True)
                first = min(short.values())
                number = int(np.searchsorted(ends, first, side="right"))
                start = int(ends[number - 1]) if number else 0
                where = (
                    f" The first trajectory that lacks steps is {number} (steps {start} to {int(ends[number]) - 1}, "
                    f"missing from its step {first - start} on)."
                )
            raise SourceError(
                f"{source} has columns of uneven lengths: {rows}. Expected {longest} steps in each; too short: "
                f"{list(short)}.{where} The file is damaged or was not written to its end: write it again, or leave "
                "the short columns out with columns=[...]."
            )
        if longest == 0:
            raise SourceError(f"{source} holds zero steps; expected at least one.")
        return longest

    def _read_flags(self, file: Any, source: str, rows: int) -> np.ndarray:
        """The steps at which a flag is set, int64."""
        found = []
        for start in range(0, rows, _FLAG_ROWS):
            stop = min(rows, start + _FLAG_ROWS)
            either = np.zeros(stop - start, dtype=bool)
            for array in self._flags:

                def place(step: int | None, start: int = start, path: str = array.path) -> str:
                    return f"{source}, step {start + (step or 0)}: column {path!r}"

                try:
                    either |= converted(read_rows(file, array, start, stop), torch.bool, place)
                except ReadError as error:
                    raise SourceError(
                        f"{source}: column {array.path!r} cannot be read at steps {start} to {stop - 1}, so that the "
                        f"trajectories are not known: {error}. The file is damaged: fetch or write it again."
                    ) from error
            found.append(np.flatnonzero(either).astype(np.int64) + start)
        return np.concatenate(found)

    def __iter__(self) -> Iterator[Episode]:
        """Read the trajectories in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        arrays = [array for array in self._columns.values() if array is not None]
        row_bytes = sum(array.row_bytes for array in arrays) + 1
        # A chunk is decompressed as a whole: reading less of it at a time would do so again and again.
        rows = max(READ_BYTES // row_bytes, *(array.chunk_rows for array in arrays), 1)
        with open_file(self._files, self.source) as file:
            while first < last:
                start = int(self._ends[first - 1]) if first else 0
                end = min(last, max(first + 1, int(np.searchsorted(self._ends, start + rows, side="right"))))
                stop = int(self._ends[end - 1])
                slab = {name: self._load(file, name, first, end, start, stop) for name in self._columns}
                finals = {name: self._load_finals(file, name, first, end) for name in self._following}
                for number in range(first, end):
                    place, length = int(self._ends[number]), int(self.lengths[number])
                    piece = slice(place - length - start, place - start)
                    yield Episode(
                        {name: values[piece] for name, values in slab.items()},
                        {name: values[number - first] for name, values in finals.items()},
                    )
                first = end

    def _load(self, file: Any, name: str, first: int, last: int, start: int, stop: int) -> Any:
        """Read one column of the trajectories `first` to `last` - 1, which are the steps `start` to `stop` - 1."""
        array = self._columns[name]
        if array is None:
            values = np.zeros(stop - start, dtype=bool)
        else:
            try:
                values = read_rows(file, array, start, stop)
            except ReadError as error:
                raise self._locate(file, array, first, last, error) from error
            if self.schema[name].ragged is not None:
                try:
                    return listed(values, self.schema[name])
                except UnicodeDecodeError as error:
                    raise SourceError(
                        f"{self.source}: column {array.path!r} is no UTF-8 at steps {start} to {stop - 1}: {error}."
                    ) from error
            path, finite = array.path, is_finite_role(array.role, self._allow_nonfinite)

            def place(step: int | None) -> str:
                return f"{self._place(start + (step or 0))}: column {path!r}"

            values = converted(values, self.schema[name].dtype, place, finite=finite)
        if array is None or array.role == "truncated":
            values[self._ends[first:last][self._cut[first:last]] - 1 - start] = True
        return values

    def _load_finals(self, file: Any, name: str, first: int, last: int) -> np.ndarray:
        """The next observations of the last steps of the trajectories `first` to `last` - 1, one row for each."""
        array, ends = self._following[name], self._ends[first:last]
        start = int(ends[0] - self.lengths[first])
        try:
            if int(ends[-1]) - start < _SPARSE * len(ends):
                values = read_rows(file, array, start, int(ends[-1]))[ends - 1 - start]
            else:
                values = np.concatenate([read_rows(file, array, end - 1, end) for end in ends.tolist()])
        except ReadError as error:
            raise self._locate(file, array, first, last, error) from error

        def place(step: int | None) -> str:
            return f"{self._place(int(ends[step or 0]) - 1)}: column {array.path!r}"

        return converted(values, self.schema[name].dtype, place)

    def _locate(self, file: Any, array: FileArray, first: int, last: int, error: ReadError) -> SourceError:
        """The error of a failed read, with the first trajectory that cannot be read."""
        number, cause = first, error
        for number in range(first, last):
            end, length = int(self._ends[number]), int(self.lengths[number])
            try:
                read_rows(file, array, end - length, end)
            except ReadError as found:
                cause = found
                break
        else:
            number = first
        end, length = int(self._ends[number]), int(self.lengths[number])
        return SourceError(
            f"{self.source}, trajectory {number}: column {array.path!r} cannot be read at steps {end - length} to "
            f"{end - 1}: {cause}. The file is damaged: fetch or write it again."
        )

    def _place(self, step: int) -> str:
        number = int(np.searchsorted(self._ends, step, side="right"))
        start = int(self._ends[number - 1]) if number else 0
        return f"{self.source}, trajectory {number}, step {step - start} (step {step} of the file)"


def _select(
    columns: Columns, found: dict[str, FileArray | Exception], source: str, *, has_timeouts: bool
) -> dict[str, str]:
    # A path of the file stands for the column's standard name.
    roles = {array.path: role for role, array in found.items() if isinstance(array, FileArray)}
    wanted = {name: roles.get(wish, wish) for name, wish in requested(columns, STANDARD).items()}
    return select(wanted, list(found) if has_timeouts else [*found, "truncated"], source)


def _following(chosen: dict[str, str], found: dict[str, FileArray | Exception]) -> dict[str, FileArray]:
    """The arrays of the next values of columns, without those that are damaged: name in the table -> array."""
    pairs = {name: (found.get(role), found.get(f"next_{role}")) for name, role in chosen.items()}
    return {
        name: array
        for name, (own, array) in pairs.items()
        if isinstance(own, FileArray) and isinstance(array, FileArray) and own.shape == array.shape
    }


def _split(
    flagged: np.ndarray, rows: int, max_episode_steps: int | None, keep_rest: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Split the steps of a file into trajectories.

    Args:
        flagged: int64, ascending: steps at which a flag is set.
        rows: number of steps of the file.
        max_episode_steps: steps of the longest trajectory, or None.
        keep_rest: whether the steps after the last flag are a trajectory.

    Returns:
        Two arrays [trajectories]: int64, the step after the last one of each; bool, whether no flag marks that end.
    """
    ends = flagged + 1
    has_rest = not len(ends) or int(ends[-1]) != rows
    cut = np.zeros(len(ends) + has_rest, dtype=bool)
    if has_rest:
        ends = np.append(ends, rows)
        cut[-1] = True
    if max_episode_steps is not None:
        starts = np.append(0, ends[:-1])
        pieces = -(-(ends - starts) // max_episode_steps)  # of each trajectory
        whole = np.repeat(np.arange(len(ends)), pieces)
        piece = np.arange(len(whole)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        inner = starts[whole] + (piece + 1) * max_episode_steps
        cut = np.where(inner < ends[whole], True, cut[whole])
        ends = np.minimum(inner, ends[whole])
    if has_rest and not keep_rest:
        rest = rows - (int(ends[-2]) if len(ends) > 1 else 0)
        if rest != max_episode_steps:  # a piece of exactly that length is a complete, truncated trajectory
            return ends[:-1], cut[:-1]
    return ends, cut
