"""From what `load` is given to a reader of episodes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from gear_loader.errors import SourceError
from gear_loader.sources.derived import Following, Renamed
from gear_loader.sources.episodes import EpisodeReader, describe, requested, select
from gear_loader.sources.hdf5 import read_hdf5
from gear_loader.sources.iterables import IterableReader
from gear_loader.sources.minari import read_minari
from gear_loader.sources.time_steps import how_to_cut, is_frame
from gear_loader.storage.schema import Column, as_mapping


@dataclasses.dataclass(frozen=True)
class Named:
    """A source that an opener makes of a name.

    Attributes:
        opener: returns a reader, or an iterable of episodes. name: its argument. options: of the opener alone.
        shared: options of `load` that the opener takes too.
    """

    opener: Callable[..., Any]
    name: str
    options: Mapping[str, Any]
    shared: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Opening:
    """How a source is opened.

    Attributes:
        columns, keep_float64, allow_nonfinite, max_trajectories, download: as of `load`.
        schema: the columns of the table that is given, without those that nobody adds; else None.
        finals: the columns whose values after the last step are wanted; None: all that the source has them for.
        once: the columns of which an episode has one value, of a table that is made.
        lazy: whether an iterator is not read to its end.
    """

    columns: Any
    keep_float64: bool
    allow_nonfinite: bool
    max_trajectories: int | None
    download: bool
    schema: Mapping[str, Column] | None
    finals: Collection[str] | None
    once: frozenset[str]
    lazy: bool

    def open(self, source: Any) -> EpisodeReader:
        """The reader of a source.

        Raises:
            SourceError: it is nothing that `load` takes, or damaged.
        """
        opening = self
        if isinstance(source, Named):
            source, opening = self._of_name(source)
        return opening._reader(source)

    def _of_name(self, source: Named) -> tuple[Any, Opening]:
        """What the opener of a name returns, and how that is opened."""
        own = self.once
        if self.schema is not None:
            own = frozenset(name for name, column in self.schema.items() if column.trajectory)
        known = {**self._common(), "max_trajectories": self.max_trajectories, "download": self.download}
        known["per_trajectory"] = sorted(own)
        shared = {name: known[name] for name in known if name in source.shared}
        opening = self
        if "per_trajectory" in shared:
            opening = dataclasses.replace(opening, once=frozenset())
        if "columns" in shared:
            opening = dataclasses.replace(opening, columns=None)
        return source.opener(source.name, **source.options, **shared), opening

    def _reader(self, source: Any) -> EpisodeReader:
        """The reader of a source without a name."""
        listed = not isinstance(source, (EpisodeReader, str, os.PathLike)) and not _is_minari(source)
        if self.once and not listed:
            raise SourceError(
                f"per_trajectory={sorted(self.once)!r} was given with {describe(source)}; expected an iterable of "
                "episodes: files have a value for each step."
            )
        if isinstance(source, EpisodeReader):
            reader = Following(source) if self.finals is None and not source.finals else source
            if self.columns is None:
                return reader
            return Renamed(reader, select(requested(self.columns, ()), list(reader.schema), reader.source))
        if isinstance(source, (str, os.PathLike)):
            if is_hdf5(os.fspath(source)):
                return read_hdf5(source, **self._common())
            return read_minari(source, **self._common(), download=self.download)
        if _is_minari(source):
            return read_minari(source, **self._common())
        return self._iterable(source)

    def _iterable(self, source: Any) -> EpisodeReader:
        """The reader of an iterable of episodes."""
        if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Iterable):
            source = map(source.__getitem__, range(len(source)))  # a map-style data set of torch
        single = isinstance(as_mapping(source), Mapping)
        if single or not isinstance(source, Iterable) or getattr(source, "ndim", 1) == 0:
            raise SourceError(
                f"{describe(source)} was received; expected a path, a Minari data set, a reader or an iterable of "
                f"episodes. A single episode goes into a list: load([episode]). {how_to_cut(source)}"
            )
        if is_frame(source):
            raise SourceError(
                f"{describe(source)} was received, whose rows are time steps. {how_to_cut(source)}"
            )
        lazy = self.lazy and isinstance(source, Iterator)
        return IterableReader(
            source, self.max_trajectories, self.schema, self.finals, self.once, lazy=lazy, **self._common()
        )

    def _common(self) -> dict[str, Any]:
        """The options that all readers have."""
        return {
            "columns": self.columns,
            "keep_float64": self.keep_float64,
            "allow_nonfinite": self.allow_nonfinite,
        }


def is_hdf5(path: Any) -> bool:
    """Whether a path is that of a file of HDF5."""
    return isinstance(path, str) and path.lower().endswith((".hdf5", ".h5"))


def _is_minari(source: Any) -> bool:
    return hasattr(source, "storage") and hasattr(source, "iterate_episodes")
