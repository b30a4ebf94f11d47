"""Readers of some columns, or of some episodes, of another reader."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import CodecError, SourceError
from gear_loader.sources.episodes import Episode, EpisodeReader
from gear_loader.sources.fitting import final_of
from gear_loader.storage.codecs import CHANNELS, Coded
from gear_loader.storage.coders import video_of
from gear_loader.storage.decoding import Group, decoded, decoded_frames
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import shown
from gear_loader.utils.progress import progress_bar


class Renamed(EpisodeReader):
    """Selects and renames columns of another reader."""

    def __init__(self, reader: EpisodeReader, chosen: dict[str, str]) -> None:
        super().__init__(
            reader.source,
            reader.lengths,
            {name: reader.schema[c] for name, c in chosen.items()},
            [name for name, c in chosen.items() if c in reader.finals],
        )
        self._reader, self._chosen, self.starts = reader, chosen, reader.starts

    def __iter__(self) -> Iterator[Episode]:
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        for episode in self._reader.between(first, last):
            final = final_of(episode)
            yield Episode(
                {name: episode[column] for name, column in self._chosen.items()},
                {name: final[column] for name, column in self._chosen.items() if column in final},
            )


class Following(EpisodeReader):
    """Takes the values after the last step from what follows each step in another reader: the columns
    ``next_<column>`` and ``next.<column>``, which are left out."""

    def __init__(self, reader: EpisodeReader) -> None:
        schema, given = reader.schema, dict[str, str]()
        for name in schema:
            for following in (f"next_{name}", f"next.{name}"):
                if not schema[name].trajectory and schema.get(following) == schema[name]:
                    given.setdefault(name, following)
        taken = {name: column for name, column in schema.items() if name not in given.values()}
        ragged = any(column.ragged is not None for column in taken.values())
        self._reader, self._following = reader, {} if ragged else given
        super().__init__(
            reader.source, reader.lengths, schema if ragged else taken, self._following, reader.payload
        )
        self.starts = reader.starts

    def __iter__(self) -> Iterator[Episode]:
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        for episode in self._reader.between(first, last):
            final = {name: episode[following][-1] for name, following in self._following.items()}
            yield Episode({name: episode[name] for name in self.schema}, final)


class Filtered(EpisodeReader):
    """The episodes of another reader for which a function returns True, at most so many; reads them all once."""

    def __init__(
        self,
        reader: EpisodeReader,
        keep: Callable[[Mapping[str, Any]], bool],
        most: int | None,
        progress: bool,
    ) -> None:
        kept: list[int] = []
        with progress_bar("Filtering", reader.num_steps, unit="steps", enabled=progress) as (advance, _):
            for number, episode in enumerate(reader):
                try:
                    answer = keep(episode)
                except Exception as error:
                    raise SourceError(
                        f"{reader.source}, episode {number}: filter= raised {type(error).__name__}: {error}."
                    ) from error
                if not isinstance(answer, (bool, np.bool_)):
                    raise SourceError(
                        f"{reader.source}, episode {number}: filter= returned {shown(answer)}; expected True or "
                        "False."
                    )
                if answer:
                    kept.append(number)
                if len(kept) == most:
                    break
                advance(int(reader.lengths[number]))
        if not kept:
            raise SourceError(f"{reader.source}: filter= takes none of {len(reader)} episodes; expected one.")
        super().__init__(reader.source, reader.lengths[kept], reader.schema, reader.finals)
        self._reader, self._kept = reader, np.array(kept)
        starts = np.searchsorted(self._kept, reader.starts)
        self.starts = np.unique(starts[starts < len(kept)])

    def __iter__(self) -> Iterator[Episode]:
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        kept = self._kept[first:last].tolist()
        if kept:
            wanted = frozenset(kept)
            for number, episode in enumerate(self._reader.between(kept[0], kept[-1] + 1), kept[0]):
                if number in wanted:
                    yield episode


class Part(EpisodeReader):
    """The episodes `first` to `last` - 1 of another reader."""

    def __init__(self, reader: EpisodeReader, first: int, last: int) -> None:
        super().__init__(reader.source, reader.lengths[first:last], reader.schema, reader.finals)
        self._reader, self._first = reader, first
        inner = reader.starts[(reader.starts > first) & (reader.starts < last)]
        self.starts = np.concatenate([[0], inner - first])

    def __iter__(self) -> Iterator[Episode]:
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        return self._reader.between(self._first + first, self._first + last)


class Labelled(EpisodeReader):
    """The episodes of another reader with two columns more: their numbers, and importance weights.

    Args:
        columns: names of both columns, the second one maybe missing, and what they are.
    """

    def __init__(self, reader: EpisodeReader, columns: Mapping[str, Column]) -> None:
        for name in columns:
            if name in reader.schema:
                raise SourceError(
                    f"{reader.source} has a column {name!r}, as Refresh(number=, weight=) would; expected another "
                    "name, or leave the column out by columns=."
                )
        schema = {**reader.schema, **columns}
        super().__init__(reader.source, reader.lengths, schema, reader.finals, reader.payload)
        self._reader, self._names, self.starts = reader, list(columns), reader.starts

    def __iter__(self) -> Iterator[Episode]:
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        return self.weighed(first, last, 1.0)

    def weighed(self, first: int, last: int, weight: float) -> Iterator[Episode]:
        """As `between`, with this weight."""
        for number, episode in enumerate(self._reader.between(first, last), first):
            values = (np.array(number, dtype=np.int64), np.array(weight, dtype=np.float32))
            # A copy is as lazy as the episode.
            labelled = copy.copy(episode) if isinstance(episode, Episode) else Episode(episode)
            labelled.update(zip(self._names, values, strict=False))
            yield labelled


class Decoded(EpisodeReader):
    """The episodes of another reader with images and frames of video decoded: columns uint8 ``[h, w, c]``."""

    def __init__(self, reader: EpisodeReader) -> None:
        schema, self._coded = dict(reader.schema), dict[str, Coded]()
        for name, column in reader.schema.items():
            coded = None if column.ragged is None else column.ragged.coded
            if coded is None or (coded.codec.name != "video" and coded.codec.name not in CHANNELS):
                continue
            if not coded.fixed:
                raise SourceError(
                    f"{reader.source}: decode=True was given, and the images of column {name!r} differ in size: "
                    f"{list(coded.shape)}. Expected one size; columns= leaves a column out."
                )
            self._coded[name] = coded
            schema[name] = Column(coded.dtype, coded.row_shape, per=column.per)
        payload = None if self._coded else reader.payload
        super().__init__(reader.source, reader.lengths, schema, reader.finals, payload)
        self._reader, self.starts = reader, reader.starts

    def __iter__(self) -> Iterator[Episode]:
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        for number, episode in enumerate(self._reader.between(first, last), first):
            yield _Lazy(episode, self._coded, f"{self.source}, episode {number}: column ")


class _Lazy(Episode):
    """An episode whose encoded values are decoded by ``episode[name]``, and not by what measures texts."""

    def __init__(self, episode: Mapping[str, Any], coded: Mapping[str, Coded], where: str) -> None:
        super().__init__(episode, final_of(episode))
        self._coded, self._where = coded, where

    def __getitem__(self, name: str) -> Any:
        values, coded = super().__getitem__(name), self._coded.get(name)
        if coded is None or isinstance(values, (np.ndarray, torch.Tensor)):
            return values
        where = f"{self._where}{name!r}"
        if isinstance(values, (bytes, memoryview)):  # once for the episode
            return _decoded(coded, [memoryview(values)], where)[0]
        return _decoded(coded, [memoryview(blob) for blob in values], where)


def _decoded(coded: Coded, blobs: list[memoryview], where: str) -> np.ndarray:
    """Decode the values of an episode: uint8 ``[T, h, w, c]``.

    Raises:
        SourceError: one is damaged.
    """
    name = lambda step: f"{where}, step {step}"  # noqa: E731
    shape = (len(blobs),)
    try:
        if coded.codec.name != "video":
            found: np.ndarray = decoded(coded, blobs, shape, name=name).numpy()
            return found
        keys = [step for step, blob in enumerate(blobs) if video_of(coded).distance(blob) == 0]
        if keys[:1] != [0]:
            raise SourceError(f"{where}, step 0 is no key frame of a video.")
        groups = [
            Group(blobs[first:end], {i: [first + i] for i in range(end - first)})
            for first, end in itertools.pairwise([*keys, len(blobs)])
        ]
        return decoded_frames(coded, groups, {}, len(blobs), shape, name=name)[1]
    except CodecError as error:
        raise SourceError(str(error)) from error
