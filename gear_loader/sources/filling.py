"""Filling tables with the episodes of a reader."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError, SourceError
from gear_loader.sources._optional import release_arrow_memory
from gear_loader.sources.episodes import Episode, EpisodeReader
from gear_loader.sources.fitting import fitted_episodes
from gear_loader.storage.incoming import checked_priorities, with_final
from gear_loader.storage.ragged import Ragged, size_of
from gear_loader.storage.statistics import StatisticsOf
from gear_loader.storage.table import Table
from gear_loader.utils.progress import progress_bar
from gear_loader.utils.reading_ahead import read_ahead


@dataclasses.dataclass
class Filling:
    """Tables to be filled, to which episodes are dealt one after another.

    Attributes:
        tables, reader: of which `check_fit` has approved. lengths: of the reader's first episodes, which are added;
            None: all are, and how many they are is not known.
        priority: of each. progress: whether to show a bar. statistics: whether to gather them.
        first: episodes that each table has already; none of any by default.
        ahead: whether a thread of low priority reads a piece while the one before it is added.
        piece: bytes added at once; None: all. first_piece: bytes of the first one, of which later ones have up to twice
            as many each; None: as of all. added: episodes that the tables have by now.
    """

    tables: Sequence[Table]
    reader: EpisodeReader
    lengths: np.ndarray | None
    priority: float
    progress: bool
    statistics: bool
    first: Sequence[int] = ()
    piece: int | None = None
    first_piece: int | None = None
    ahead: bool = False
    added: int = 0

    def __post_init__(self) -> None:
        self.first = self.first or [0] * len(self.tables)
        self.added = sum(self.first)

    def resume(self) -> None:
        """Find out what the tables have already.

        Raises:
            SourceError: one holds other trajectories.
        """
        assert self.lengths is not None
        count = len(self.tables)
        self.first = [
            first_missing(table, self.reader.source, self.lengths[number::count])
            for number, table in enumerate(self.tables)
        ]
        self.added = sum(self.first)

    def all_or_none(self) -> None:
        """Add all episodes; if that fails, remove those that were added."""
        assert self.lengths is not None
        total = int(self.lengths.sum())
        evicts = any(table.on_full in ("evict_oldest", "evict_lowest_priority") for table in self.tables)
        if self.piece is not None and evicts and not self._is_one_piece(total):
            with progress_bar("Checking", total, unit="steps", enabled=self.progress) as (advance, _):
                for _episode in advancing(
                    fitted_episodes(self.reader, self.tables[0]), self.lengths, advance
                ):
                    pass
        added: list[list[np.ndarray]] = [[] for _ in self.tables]
        try:
            for number, slots in self.pieces():
                added[number].append(slots)
        except BaseException:
            for table, each in zip(self.tables, added, strict=True):
                if each:
                    # Skip trajectories that a later piece evicted. A reused index belongs to this load, too.
                    mine = np.unique(np.concatenate(each))
                    table.remove(mine[np.isin(mine, table.indices())])
            raise

    def pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        """Add the episodes piece by piece; yields the number of a table, and the indices of what it was given."""
        try:
            yield from self._pieces()
        finally:
            release_arrow_memory()

    def _pieces(self) -> Iterator[tuple[int, np.ndarray]]:
        tables, reader = self.tables, self.reader
        gathered = StatisticsOf(tables[0].schema.added) if self.statistics else None
        total = None if self.lengths is None else int(self.lengths.sum())
        # All tables have the episodes before this one.
        begin = min(first * len(tables) + number for number, first in enumerate(self.first))
        with (
            progress_bar("Loading", total, unit="steps", enabled=self.progress) as (advance, _),
            contextlib.ExitStack() as stack,
        ):
            episodes: Iterator[Episode] = fitted_episodes(reader, tables[0])
            if self.lengths is not None:
                episodes = advancing(episodes, self.lengths, advance)
            for piece in self._read(itertools.islice(episodes, begin), stack):
                if gathered is not None:
                    gathered.add(piece)
            for piece in self._read(episodes, stack):
                for number, table in enumerate(tables):
                    dealt = self._dealt(piece, begin, number)
                    if dealt:
                        with in_source(reader, begin):
                            slots = add(table, dealt, self.priority)
                        self.added += len(dealt)
                        yield number, slots
                begin += len(piece)
                if gathered is not None:
                    gathered.add(piece)
        if gathered is not None:
            for table in tables:
                table._engine.statistics = gathered.result()

    def _read(self, episodes: Iterator[Episode], stack: contextlib.ExitStack) -> Iterator[list[Episode]]:
        """Pieces; the stack ends their thread, if there is one."""
        pieces = self._cut(episodes)
        return stack.enter_context(contextlib.closing(read_ahead(pieces))) if self.ahead else pieces

    def _dealt(self, piece: list[Episode], begin: int, number: int) -> list[Episode]:
        """What the table of this number gets of the episodes from `begin` on."""
        count = len(self.tables)
        offset = (number - begin) % count
        missing = self.first[number] - (begin + offset) // count
        return piece[offset::count][max(0, missing) :]

    def _is_one_piece(self, steps: int) -> bool:
        """Whether so many steps are known to be added at once."""
        schema = self.tables[0].schema
        step_bytes = sum(column.step_bytes for column in schema.values())
        assert self.lengths is not None
        count, most_steps, blocks, _ = self._most()
        used = int((-(-(self.lengths + 1) // self._block_steps)).sum())
        fits = len(self.lengths) <= count and steps <= most_steps and used <= blocks
        return fits and not schema.ragged and steps * step_bytes <= (self.piece or 0)

    @property
    def _block_steps(self) -> int:
        return min(table._engine.region.layout.block_steps for table in self.tables)

    def _most(self) -> tuple[float, float, float, float]:
        """Trajectories, steps, blocks and bytes of values of any length of a piece: half of a table that makes room."""
        layouts = [table._engine.region.layout for table in self.tables if table.on_full != "error"]
        if self.piece is None or not layouts:
            return (math.inf,) * 4
        return (
            max(1, min(layout.max_trajectories for layout in layouts) // 2),
            min(layout.max_steps for layout in layouts) / 2,
            min(layout.writable_blocks for layout in layouts) / 2,
            min(layout.payload for layout in layouts) / 2,
        )

    def _cut(self, episodes: Iterable[Episode]) -> Iterator[list[Episode]]:
        """Episodes in pieces of at most `piece` bytes, but at least one episode."""
        most = self.piece if self.first_piece is None else self.first_piece
        ragged = list(self.tables[0].schema.ragged)
        piece: list[Episode] = []
        taken = 0
        limits, used = np.array(self._most()), np.zeros(4)
        block_steps = self._block_steps
        by_step = next(name for name, column in self.tables[0].schema.added.items() if not column.trajectory)
        for episode in episodes:
            sizes: dict[str, int] = {}
            if self.piece is not None:
                for table in self.tables:
                    refuse_long(table, self.reader.source, episode)
                sizes = {name: size_of(values) for name, values in episode.items()}
            size, steps = sum(sizes.values()), _steps(episode[by_step])
            blocks = -(-(steps + 1) // block_steps)
            own = np.array([1, steps, blocks, sum(sizes.get(name, 0) for name in ragged)])
            if piece and most is not None and (taken + size > most or (used + own > limits).any()):
                yield piece
                most = min(2 * most, self.piece or 0)
                piece, taken, used = [], 0, np.zeros(4)
            piece.append(episode)
            taken += size
            used += own
            del episode
        if piece:
            yield piece


def first_missing(
    table: Table,
    source: str,
    lengths: np.ndarray,
    numbers_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> int:
    """How many episodes of a source a table has been given, if it was given nothing else.

    Args:
        source: its name. lengths: of its first episodes. numbers_of: the episodes at some positions in the order in
            which they were given; None: they were given in their order, once.

    Raises:
        SourceError: it holds other trajectories.
    """
    slots = table.indices()
    given = table.stats().num_inserted
    numbers = table._engine.index.arrays.sequence[slots]
    numbers = numbers - numbers.max(initial=-1) + given - 1
    fits = len(numbers) == len(table) and bool((numbers >= 0).all())
    fits &= numbers_of is not None or given <= len(lengths)
    if fits and numbers_of is not None:
        numbers = numbers_of(numbers)
    if not fits or not np.array_equal(lengths[numbers], table.lengths()):
        order = "first" if numbers_of is None else "last in the order of refresh="
        raise SourceError(
            f"resume=True was given, and the table, to which {given:,} trajectories were added, holds others than the "
            f"{order} of {len(lengths):,} of {source}; expected a table that was loaded from it alone, with the same "
            "options."
        )
    return int(given)


def refuse_long(table: Table, source: str, episode: Episode) -> None:
    """Raise SourceError if a table cannot hold the text and encoded values of an episode, before they are copied."""
    most = table._engine.region.layout.payload
    size = sum(_text_size(episode[name]) for name in table.schema.ragged if name in episode)
    if size > most:
        raise SourceError(
            f"{source}: an episode has {size:,} bytes of values of any length; the table has {most:,} for those of "
            "all. Give it more: payload=, or Memory(payload=)."
        )


@contextlib.contextmanager
def in_source(reader: EpisodeReader, first: int) -> Iterator[None]:
    """Turn what a table refuses of the episodes from `first` on into a SourceError."""
    try:
        yield
    except SchemaError as error:
        raise SourceError(f"{reader.source}, counted from episode {first}: {error}") from error


def add(table: Table, episodes: list[Episode], priority: float | np.ndarray) -> np.ndarray:
    """`Table.extend`, with the final values of episodes that have them."""
    finals = np.array([bool(episode.final) for episode in episodes], dtype=np.int64)
    if not finals.any():
        return table.extend(list(map(dict, episodes)), priority=priority)
    schema = table.schema.added
    rows = [with_final(schema, each, each.final) if each.final else dict(each) for each in episodes]
    return table._engine.store(rows, checked_priorities(priority, len(rows)), finals=finals)


def _steps(values: Any) -> int:
    """Steps of the values of a column."""
    return len(values.offsets) - 1 if isinstance(values, Ragged) else len(values)


def _text_size(values: Any) -> int:
    """Bytes of text and of encoded values, at least: one object may be there many times."""
    if isinstance(values, (str, bytes)):
        return len(values)
    return sum(len(v) for v in values if isinstance(v, (str, bytes))) if isinstance(values, list) else 0


def advancing(episodes: Iterator[Any], lengths: np.ndarray, advance: Callable[[int], None]) -> Iterator[Any]:
    """As many episodes as there are lengths; `advance` is called with each."""
    for length, episode in zip(lengths.tolist(), episodes, strict=False):
        advance(length)
        yield episode
