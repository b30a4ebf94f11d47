"""Tables that cannot hold their data set at once: episodes are fetched in random order, and replace others."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from gear_loader.errors import RateLimitError, SchemaError, SourceError, TableFullError
from gear_loader.sources.episodes import Episode, EpisodeReader, check_count
from gear_loader.sources.filling import add, refuse_long, size_of
from gear_loader.sources.fitting import fitted_episodes
from gear_loader.storage import counters as at
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.background import lower_priority
from gear_loader.utils.checks import at_least
from gear_loader.utils.progress import progress_bar

_PAUSE = 0.002  # seconds between looks at the rows drawn
_PIECE_BYTES = 16 * 2**20  # added at once, and read at once by a thread
_READERS = 8  # threads
_EVICTING = ("evict_oldest", "evict_lowest_priority")


@dataclasses.dataclass(frozen=True)
class Refresh:
    """How `load` goes on fetching what a table cannot hold at once: ``refresh=gear.sources.Refresh(epochs=10)``.

    The table is a shuffle buffer. In each epoch, a pass over the source, every episode is fetched once, in an order of
    its own; it takes the place of the oldest one in a table that evicts the oldest, so that each is in the table for as
    many fetches. Where the format gives access to each episode the order is random; in formats of files and row groups
    these are in random order, and what is in one is read in its order.

    Attributes:
        epochs: passes over the source; None: until the table is closed, or `Table.loading` cancelled.
        samples_per_insert: rows drawn from the table, by all its readers, for each episode that is fetched once the
            table is full; the fetch waits for them, while draws do not wait for the fetch (the table's rate limiter
            can make them). None: the mean number of steps of an episode, so that an epoch takes as many rows as the
            source has steps; a table that waits for room (``on_full="wait"``, with `Limits`) fetches as there is some.
        seed: of the orders; the same for all ranks.

    Raises:
        SourceError: an invalid value.
    """

    epochs: int | None = None
    samples_per_insert: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        rows = self.samples_per_insert
        plain = isinstance(rows, (int, float, np.number)) and not isinstance(rows, bool)
        if rows is not None and not (plain and 0 < rows < math.inf):
            raise SourceError(
                f"samples_per_insert is {shown(rows)}; expected the rows to be drawn for each episode that is fetched, "
                "a finite number above 0, or None."
            )
        at_least("seed", self.seed, least=0, error=SourceError)


@dataclasses.dataclass(frozen=True)
class Passes:
    """The order of the episodes of a source in each epoch, of all of them or of a shard's.

    Attributes:
        starts: as of `EpisodeReader`. count: episodes of the source. seed: of the orders.
        shard, num_shards: which part of each order.
    """

    starts: np.ndarray
    count: int
    seed: int
    shard: int = 0
    num_shards: int = 1

    def _bounds(self) -> tuple[int, int]:
        return part_of(self.count, self.shard, self.num_shards)

    def __len__(self) -> int:
        """Episodes of an epoch."""
        first, last = self._bounds()
        return last - first

    def pieces(self, epoch: int, skip: int = 0) -> Iterator[tuple[int, int]]:
        """Ranges of episodes, first and last + 1, to be read one after another in an epoch, without the first ones."""
        starts = self.starts[self.starts < self.count]
        begins = np.random.default_rng([self.seed, epoch]).permutation(len(starts))
        ends = np.append(starts[1:], self.count)[begins]
        begins = starts[begins]
        first, last = self._bounds()
        first += skip
        place = 0
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            low, high = max(first - place, 0), min(last - place, end - begin)
            if low < high:
                yield begin + low, begin + high
            place += end - begin

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """The episodes fetched at these positions, counted from the beginning of the first epoch on, int64 [n]."""
        found = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(positions // len(self)).tolist():
            order = np.concatenate([np.arange(*piece) for piece in self.pieces(epoch)])
            here = positions // len(self) == epoch
            found[here] = order[positions[here] % len(self)]
        return found


def part_of(count: int, shard: int, num_shards: int) -> tuple[int, int]:
    """First and last + 1 of the items that a shard takes."""
    return shard * count // num_shards, (shard + 1) * count // num_shards


@dataclasses.dataclass
class Refreshing:
    """A table that is filled, and then refreshed.

    Attributes:
        table, reader: of which `check_fit` has approved. lengths: of the reader's first episodes, which are fetched.
        passes: their order. refresh: how. priority: of each. progress: whether to show a bar for each epoch.
        when_full: called when the table has no more room.
    """

    table: Table
    reader: EpisodeReader
    lengths: np.ndarray
    passes: Passes
    refresh: Refresh
    priority: float
    progress: bool
    when_full: Callable[[], object] = bool

    def __post_init__(self) -> None:
        self._evicted = int(self._counters[at.NUM_EVICTED])
        self._full: tuple[int, int] | None = None  # episodes fetched and rows drawn when the table was full
        rows = self.refresh.samples_per_insert
        if rows is None and self.table.on_full in _EVICTING:
            rows = float(self.lengths.mean())
        self._rows = rows or 0.0

    @property
    def _counters(self) -> np.ndarray:
        return self.table._engine.index.arrays.counters

    def pieces(self, given: int) -> Generator[int]:
        """Fetch episodes, of which so many were `given` before; yields how many by now, also while it waits."""
        piece: list[tuple[int, Episode]] = []
        size = 0
        for number, episode in self._episodes(given):
            refuse_long(self.table, self.reader.source, episode)
            if piece and not self._has_room([*piece, (number, episode)]):
                yield from self._add(piece, given)
                given, piece, size = given + len(piece), [], 0
            piece.append((number, episode))
            size += sum(map(size_of, episode.values()))
            if len(piece) >= self._most(given) or size >= _PIECE_BYTES:
                yield from self._add(piece, given)
                given, piece, size = given + len(piece), [], 0
            del episode
        if piece:
            yield from self._add(piece, given)

    def _most(self, given: int) -> float:
        """How many episodes may be added at once now, if so many were given; more than one if the fetch is behind."""
        most = max(1, int(self._counters[at.NUM_READY]) // 8)
        if self._full is None or not self._rows:
            return most
        drawn = int(self._counters[at.NUM_SAMPLED]) - self._full[1]
        return min(most, drawn / self._rows - (given - self._full[0]))

    def _add(self, piece: list[tuple[int, Episode]], given: int) -> Iterator[int]:
        """Add episodes as soon as they may be."""
        while not self._may_add(piece, given):
            time.sleep(_PAUSE)
            yield given
        while True:
            try:
                add(self.table, [episode for _, episode in piece], self.priority)
            except RateLimitError:
                yield given
            except TableFullError:
                if self.table.on_full != "wait":
                    raise
                yield given
            except SchemaError as error:
                raise SourceError(
                    f"{self.reader.source}, of the episodes {[n for n, _ in piece]}: {error}"
                ) from error
            else:
                break
        yield given + len(piece)

    def _episodes(self, given: int) -> Iterator[tuple[int, Episode]]:
        """Episodes and their numbers."""
        epoch, skip = divmod(given, len(self.passes))
        while self.refresh.epochs is None or epoch < self.refresh.epochs:
            total = int(self.lengths.sum())
            bar = progress_bar(f"Epoch {epoch}", total, unit="steps", enabled=self.progress)
            read = contextlib.closing(self._read_ahead(self.passes.pieces(epoch, skip)))
            with bar as (advance, _), read as episodes:
                for number, episode in episodes:
                    yield number, episode
                    advance(int(self.lengths[number]))
            epoch, skip = epoch + 1, 0

    def _read_ahead(self, pieces: Iterator[tuple[int, int]]) -> Generator[tuple[int, Episode]]:
        """Episodes and their numbers; small pieces are read by several threads, ahead of what is asked for."""
        step_bytes = self.table.schema.step_bytes + (self.reader.payload or 0) / max(self.reader.num_steps, 1)
        ahead: deque[tuple[int, Future[list[Episode]]]] = deque()
        with ThreadPoolExecutor(_READERS, "gear-loader-reading", initializer=lower_priority) as pool:
            try:
                for first, last in pieces:
                    small = self.lengths[first:last].sum() * step_bytes <= _PIECE_BYTES
                    if small:
                        ahead.append(
                            (first, pool.submit(lambda *piece: list(self._read(*piece)), first, last))
                        )
                    while ahead and (len(ahead) > _READERS or not small):
                        yield from _numbered(*ahead.popleft())
                    if not small:
                        yield from enumerate(self._read(first, last), first)
                while ahead:
                    yield from _numbered(*ahead.popleft())
            finally:
                for _, read in ahead:
                    read.cancel()

    def _read(self, first: int, last: int) -> Iterator[Episode]:
        return fitted_episodes(self.reader, self.table, self.reader.between(first, last), first)

    def _may_add(self, piece: list[tuple[int, Episode]], given: int) -> bool:
        """Whether these episodes may be added, if so many were given."""
        counters, may_insert = self._counters, self.table._engine.index.admission.may_insert
        room = self._has_room(piece)
        if self._full is None:
            if room and counters[at.NUM_EVICTED] == self._evicted:
                return may_insert(len(piece))
            self._full = given, int(counters[at.NUM_SAMPLED])
            self.when_full()
        if self.table.on_full == "wait" and not room:
            return False
        drawn, fetched = int(counters[at.NUM_SAMPLED]) - self._full[1], given - self._full[0]
        return drawn >= self._rows * (fetched + len(piece)) and may_insert(len(piece))

    def _has_room(self, piece: list[tuple[int, Episode]]) -> bool:
        """Whether episodes fit without eviction, as far as their steps tell; any do once the table evicts."""
        counters, layout = self._counters, self.table._engine.region.layout
        full = self._full is not None and self.table.on_full != "wait"
        if full or not counters[at.INITIALIZED]:  # the first addition does that
            return True
        lengths = self.lengths[[number for number, _ in piece]]
        blocks = -(-(lengths + bool(self.table.schema.finals)) // layout.block_steps)
        slots = counters[at.NUM_FREE_SLOTS] + counters[at.NUM_RETIRED]
        free = counters[at.NUM_FREE_BLOCKS] + counters[at.RETIRED_BLOCKS]
        steps = layout.max_steps - counters[at.NUM_STEPS] - counters[at.WRITING_STEPS]
        enough = slots >= len(piece) and steps >= lengths.sum()
        return bool(enough and (counters[at.TIERED] or free >= blocks.sum()))


def _numbered(first: int, read: Future[list[Episode]]) -> Iterator[tuple[int, Episode]]:
    return enumerate(read.result(), first)


def holds_all(table: Table, lengths: np.ndarray, payload: int | None) -> bool:
    """Whether a table that evicts has room for all episodes of these lengths, as far as it is known."""
    if table.on_full not in _EVICTING:  # what was drawn often may leave it
        return False
    layout = table._engine.region.layout
    blocks = Table.required_blocks(lengths + bool(table.schema.finals), layout.block_steps)
    fits = len(lengths) <= layout.max_trajectories and int(lengths.sum()) <= layout.max_steps
    tiered = bool(table._engine.index.arrays.counters[at.TIERED])
    values = not table.schema.ragged or (payload is not None and payload <= layout.payload)
    return fits and values and (tiered or blocks <= layout.num_blocks)
