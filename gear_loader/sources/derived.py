"""Readers of some columns, or of some episodes, of another reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import Episode, EpisodeReader
from gear_loader.sources.fitting import final_of
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
                        f"{reader.source}, episode {number}: filter= returned {answer!r}; expected True or False."
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
