"""Episodes of a Minari data set on this machine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import (
    STANDARD,
    Columns,
    Episode,
    EpisodeReader,
    column_of,
    converted,
    describe,
    is_finite_role,
    plan_dtype,
    requested,
    select,
)
from gear_loader.sources.hdf5_file import RemoteHDF5
from gear_loader.sources.recording import check_leaves, leaf_column, leaves
from gear_loader.sources.source_files import SourceFolder
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import shown
from gear_loader.utils.paths import is_address, local_path

_DATA = "main_data.hdf5"
_MOST_BYTES = 2**26  # of metadata
_FLAT = {"reward": "rewards", "terminated": "terminations", "truncated": "truncations"}


def read_minari(
    dataset: Any,
    *,
    columns: Columns = None,
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
    download: bool = False,
) -> MinariEpisodes:
    """The episodes of a Minari data set.

    Minari keeps T + 1 observations for T steps: `observation` holds the first T of them, `next_observation`
    (when `columns` asks for it) the last T, and `Episode.final` the last one. Infos, where the data set has them, are
    columns `info.<key>`, aligned with `observation`, and their last one is in `Episode.final` too. An info that `reset`
    does not give has T values, those of the observations 1 to T; at step 0 it is NaN, or 0 or False in a dtype without
    NaN. Dict and Tuple spaces become one column for each leaf.

    Args:
        dataset: a `minari.MinariDataset` (with its selection of episodes), the id of one, or the directory
            that holds it, or its address (in hdf5 format).
        columns: names of the columns to take, or {name in the table: name in the source}. None takes
            observation, action, reward, terminated and truncated.
        keep_float64: keep float64, which rewards are taken for, too, instead of making it float32.
        allow_nonfinite: take NaN and infinite rewards, which otherwise are an error.
        download: fetch a data set that is not on this machine, by its id.

    Returns:
        A reader: sized, with `lengths` and `schema` known, and good for any number of iterations. The data
        are read during iteration, one episode at a time.

    Raises:
        SourceError: no such data set, damaged metadata, no episodes, or columns that do not fit. Iteration
            raises it, too, naming the episode, the column and the step.
        ImportError: Minari, or what its storage needs, is not installed.
    """
    minari = require("minari", "Reading a Minari data set")
    if not isinstance(dataset, minari.MinariDataset):
        dataset = _open(minari, dataset, download)
    return MinariEpisodes(dataset, columns, keep_float64=keep_float64, allow_nonfinite=allow_nonfinite)


def _open(minari: Any, dataset: Any, download: bool) -> Any:
    if not isinstance(dataset, (str, os.PathLike)):
        raise SourceError(
            f"{describe(dataset)} was received; expected a minari.MinariDataset, the id of one, or its directory."
        )
    if is_address(dataset):
        return _open_remote(minari, SourceFolder(dataset))
    path = Path(local_path(dataset, SourceError))
    folder = next((p for p in (path, path / "data") if (p / "metadata.json").is_file()), None)
    try:
        if folder is not None:
            return minari.MinariDataset(folder)
        if isinstance(dataset, str) and not path.is_dir():
            return minari.load_dataset(dataset, download=download)
    except ImportError as error:
        raise _missing(str(dataset), error) from error
    except Exception as error:
        raise SourceError(
            f"The Minari data set {str(dataset)!r} cannot be opened: {_text(error).rstrip('.')}. Expected an "
            "id that minari.list_local_datasets() shows, or the directory of an undamaged data set."
        ) from error
    raise SourceError(
        f"{str(dataset)!r} is no Minari data set: it holds no metadata.json, nor does its folder 'data'. "
        "Expected the directory that minari.load_dataset(id).storage.data_path names. A directory of another kind is "
        f"named with its kind, such as 'parquet:{dataset}' or 'lerobot:{dataset}'."
    )


def _open_remote(minari: Any, folder: SourceFolder) -> Any:
    """The data set of a directory at an address: Minari's own, of which the file of arrays is read where it is."""
    below = next((each for each in ("", "data/") if folder.has(f"{each}metadata.json")), None)
    if below is None:
        raise SourceError(
            f"{folder.path!r} is no Minari data set: it holds no metadata.json, nor does its folder 'data'. Expected a "
            "copy of the directory that minari.load_dataset(id).storage.data_path names."
        )
    about, data = f"{below}metadata.json", f"{below}{_DATA}"
    try:
        text = folder.read(about, _MOST_BYTES)
        form = json.loads(text)["data_format"]
        if form != "hdf5":
            raise SourceError(
                f"The Minari data set {folder.path!r} has the format {shown(form)}; expected hdf5, which alone is read "
                "at an address. Copy the directory to this machine."
            )
        with tempfile.TemporaryDirectory() as local:
            (Path(local) / "metadata.json").write_bytes(text)
            (Path(local) / _DATA).touch()
            dataset = minari.MinariDataset(local)
        dataset.storage._file_path = RemoteHDF5(folder.open(data, whole=False))
        return dataset
    except (SourceError, ImportError):
        raise
    except Exception as error:  # of damaged metadata, of several types
        raise SourceError(
            f"The Minari data set {folder.path!r} cannot be opened: {_text(error).rstrip('.')}. Expected the directory "
            "of an undamaged data set."
        ) from error


def _missing(source: str, error: ImportError) -> ImportError:
    return ImportError(
        f"Reading {source} needs a package that cannot be imported ({error}). Install it: "
        "pip install '.[sources]' (in a clone of Gear Loader); for data sets in arrow or parquet format: "
        "pip install 'minari[arrow]'",
        name=error.name,
    )


class MinariEpisodes(EpisodeReader):
    """See `read_minari`."""

    def __init__(self, dataset: Any, columns: Columns, *, keep_float64: bool, allow_nonfinite: bool) -> None:
        source = f"The Minari data set {dataset.id!r}"
        self._storage = dataset.storage
        self._indices = [int(i) for i in dataset.episode_indices]
        self._allow_nonfinite = allow_nonfinite
        if not self._indices:
            raise SourceError(f"{source} has no episodes; expected at least one.")
        observed = leaves(dataset.observation_space, "observation")
        self._leaves = observed | leaves(dataset.action_space, "action")
        self._leaves |= {f"next_{name}": leaf for name, leaf in observed.items()}
        lengths = self._read_lengths(source)
        wanted = requested(columns, STANDARD)
        self._infos: dict[str, tuple[Any, tuple[int, ...]]] = {}  # name -> dtype and shape of one step
        if any(wish.split(".")[0] == "info" for wish in wanted.values()):
            # Metadata do not list the infos, so they are read from the first episode.
            found = _walk_infos(self._load(source, 0).get("infos"))
            self._infos = {name: (values.dtype, values.shape[1:]) for name, values in found}
        self._chosen = select(wanted, [*self._leaves, *_FLAT, *self._infos], source)
        check_leaves(self._leaves, self._chosen, source)
        schema = {
            name: self._column(role, f"{source}: column {role!r}", keep_float64)
            for name, role in self._chosen.items()
        }
        last = {*observed, *self._infos}
        super().__init__(source, lengths, schema, [n for n, role in self._chosen.items() if role in last])
        self.starts = np.arange(len(lengths))

    def _column(self, role: str, what: str, keep_float64: bool) -> Column:
        if role in self._leaves:
            return leaf_column(self._leaves[role], role, what, keep_float64=keep_float64)
        if role in self._infos:
            dtype, shape = self._infos[role]
            return column_of(plan_dtype(role, dtype, what, keep_float64=keep_float64), shape, what)
        # Metadata do not have the dtype of rewards; Minari stores the values as the environment returned them.
        stored = np.float64 if role == "reward" else np.bool_
        return Column(plan_dtype(role, stored, what, keep_float64=keep_float64))

    def _read_lengths(self, source: str) -> np.ndarray:
        lengths = []
        try:
            for metadata in self._storage.get_episode_metadata(self._indices):
                lengths.append(int(metadata["total_steps"]))
        except ImportError as error:
            raise _missing(source, error) from error
        except Exception as error:
            raise _damaged(
                source, self._indices[len(lengths)], f"its metadata cannot be read: {_text(error)}"
            ) from error
        for index, length in zip(self._indices, lengths, strict=False):
            if length < 1:
                raise _damaged(source, index, f"its metadata give it {length} steps; expected at least one")
        return np.array(lengths, dtype=np.int64)

    def _load(self, source: str, position: int) -> dict[str, Any]:
        index = self._indices[position]
        try:
            # One episode at a time, so that an error names the right one.
            loaded: dict[str, Any] = next(iter(self._storage.get_episodes([index])))
        except ImportError as error:
            raise _missing(source, error) from error
        except Exception as error:
            raise _damaged(source, index, f"it cannot be read: {_text(error)}") from error
        return loaded

    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        for position in range(first, last):
            loaded = self._load(self.source, position)
            self._check_lengths(position, loaded)
            values = {name: self._values(position, loaded, name, role) for name, role in self._chosen.items()}
            steps = int(self.lengths[position])
            yield Episode(
                {name: value[:steps] for name, value in values.items()},
                {name: values[name][steps] for name in values if name in self.finals},
            )

    def _check_lengths(self, position: int, loaded: dict[str, Any]) -> None:
        index, steps = self._indices[position], int(self.lengths[position])
        for part in _FLAT.values():
            if np.ndim(loaded[part]) < 1 or len(loaded[part]) != steps:
                remedy = ""
                if self._storage.FORMAT != "hdf5":
                    remedy = (
                        ". Minari's arrow and parquet storages return only a piece of an episode of more than "
                        "32,767 steps: write the data set in hdf5 format"
                    )
                raise _damaged(
                    self.source,
                    index,
                    f"its metadata give it {steps} steps, but {part!r} has {_length(loaded[part])}{remedy}",
                )

    def _values(self, position: int, loaded: dict[str, Any], name: str, role: str) -> np.ndarray:
        """One column of an episode of T steps: T + 1 observations, T values of anything else."""
        index, steps = self._indices[position], int(self.lengths[position])
        kind = role.split(".")[0]
        try:
            if role in self._leaves:
                part = "actions" if kind == "action" else "observations"
                values = np.asarray(self._leaves[role].take(loaded[part]))
            elif role in self._infos:
                values = dict(_walk_infos(loaded.get("infos")))[role]
            else:
                values = np.asarray(loaded[_FLAT[role]])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _damaged(self.source, index, f"column {role!r} cannot be read: {_text(error)}") from error
        # T + 1 observations and infos, T actions.
        expected = steps + 1 if kind in ("observation", "next_observation", "info") else steps
        if kind == "info" and len(values) == steps:  # reset gives none: they are those of the steps 1 to T
            values = np.concatenate((_absent(values), values))
        shape = self.schema[name].shape
        if values.shape != (expected, *shape):
            raise _damaged(
                self.source,
                index,
                f"column {role!r} has shape {list(values.shape)}; expected {[expected, *shape]} for {steps} steps",
            )
        values = values[1:] if kind == "next_observation" else values
        finite = is_finite_role(role, self._allow_nonfinite)

        def place(step: int | None) -> str:
            at = "" if step is None else f", step {step}"
            return f"{self.source}, episode {index}{at}: column {role!r}"

        return converted(values, self.schema[name].dtype, place, finite=finite)


def _walk_infos(infos: Any, name: str = "info") -> Iterator[tuple[str, np.ndarray]]:
    for key, value in (infos or {}).items():
        if isinstance(value, dict):
            yield from _walk_infos(value, f"{name}.{key}")
        elif np.ndim(value) >= 1:
            yield f"{name}.{key}", np.asarray(value)


def _absent(values: np.ndarray) -> np.ndarray:
    """A row for a step without a value, of the dtype of the other rows."""
    return np.full((1, *values.shape[1:]), np.nan if values.dtype.kind == "f" else 0, values.dtype)


def _length(values: Any) -> int | None:
    return len(values) if np.ndim(values) else None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _damaged(source: str, index: int, problem: str) -> SourceError:
    return SourceError(
        f"{source}, episode {index}: {problem}. Repair the data set, or leave this episode out: "
        "dataset.episode_indices = [...], then read_minari(dataset)."
    )
