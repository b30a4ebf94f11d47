"""Tables that cannot hold their data set at once: episodes are fetched in random order, and replace others."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import RateLimitError, SchemaError, SourceError, TableFullError
from gear_loader.sources.derived import Labelled
from gear_loader.sources.episodes import Episode, EpisodeReader
from gear_loader.sources.fetch_orders import EpisodeRange, Passes, PriorityOrder
from gear_loader.sources.fetched_episodes import FetchedEpisodes
from gear_loader.sources.filling import add, first_missing, refuse_long
from gear_loader.sources.fitting import fitted_episodes
from gear_loader.sources.priority_record import PriorityRecord
from gear_loader.sources.refresh_options import Refresh
from gear_loader.storage import counters as at
from gear_loader.storage.priority_updates import request
from gear_loader.storage.ragged import size_of
from gear_loader.storage.table import Table
from gear_loader.utils.background import lower_priority
from gear_loader.utils.progress import progress_bar

PAUSE = 0.002  # seconds between looks at the rows drawn
_PIECE_BYTES = 16 * 2**20  # added at once, and read at once by a thread
_READERS = 8  # threads
_EVICTING = ("evict_oldest", "evict_lowest_priority")


class _Fetched(NamedTuple):
    """An episode that has been read, and its number."""

    number: int
    episode: Episode


@dataclasses.dataclass
class Refreshing:
    """A table that is filled, and then refreshed.

    Attributes:
        table, reader: of which `check_fit` has approved. lengths: of the reader's first episodes, which are fetched.
        order: theirs. refresh: how. priority: of each, where they are not drawn by it. progress: whether to show a bar
            for each epoch. pause: seconds between looks at the rows drawn.
        when_full: called when the table has no more room, or has all episodes of the last epoch.
    """

    table: Table
    reader: EpisodeReader
    lengths: np.ndarray
    order: Passes | PriorityOrder
    refresh: Refresh
    priority: float
    progress: bool
    pause: float = PAUSE
    when_full: Callable[[], object] = bool

    def __post_init__(self) -> None:
        self._evicted = int(self._counters[at.NUM_EVICTED])
        self._full: tuple[int, int] | None = None  # episodes fetched and rows drawn when the table was full
        rows = self.refresh.samples_per_insert
        if rows is None and self.table.on_full in _EVICTING:
            rows = float(self.lengths.mean())
        self._rows = rows or 0.0
        self._held: FetchedEpisodes | None = None
        if isinstance(self.order, PriorityOrder):
            self._held = FetchedEpisodes(self.table, self.refresh.number, self.order.draws)

    def given(self) -> int:
        """How many episodes the table was given by a refresh that ended; takes in what it holds.

        Raises:
            SourceError: it holds other trajectories.
        """
        if isinstance(self.order, Passes):
            return first_missing(self.table, self.reader.source, self.lengths, self.order.numbers)
        assert self._held is not None
        self._held.resume(self.lengths, self.order.numbers, self.reader.source)
        return int(self.table.stats().num_inserted)

    @property
    def _counters(self) -> np.ndarray:
        return self.table._engine.index.arrays.counters

    def pieces(self, given: int) -> Generator[int]:
        """Fetch episodes, of which so many were `given` before; yields how many by now, also while it waits."""
        piece: list[_Fetched] = []
        size = 0
        for fetched in self._episodes(given):
            refuse_long(self.table, self.reader.source, fetched.episode)
            if piece and not self._has_room([*piece, fetched]):
                yield from self._add(piece, given)
                given, piece, size = given + len(piece), [], 0
            piece.append(fetched)
            size += sum(map(size_of, fetched.episode.values()))
            if len(piece) >= self._most(given) or size >= _PIECE_BYTES:
                yield from self._add(piece, given)
                given, piece, size = given + len(piece), [], 0
            del fetched
        if piece:
            yield from self._add(piece, given)
        self.when_full()

    def _most(self, given: int) -> float:
        """How many episodes may be added at once now, if so many were given; more than one if the fetch is behind."""
        most = max(1, int(self._counters[at.NUM_READY]) // 8)
        if self._full is None or not self._rows:
            return most
        drawn = int(self._counters[at.NUM_SAMPLED]) - self._full[1]
        return min(most, drawn / self._rows - (given - self._full[0]))

    def _add(self, piece: list[_Fetched], given: int) -> Iterator[int]:
        """Add episodes as soon as they may be."""
        while not self._may_add(piece, given):
            if isinstance(self.order, PriorityOrder):
                self.order.draws.apply()  # until the next draw the process may be killed
            time.sleep(self.pause)
            yield given
        while True:
            try:
                self._add_now(piece)
            except RateLimitError:
                yield given
            except TableFullError:
                if self.table.on_full != "wait":
                    raise
                yield given
            except SchemaError as error:
                numbers = [fetched.number for fetched in piece]
                raise SourceError(f"{self.reader.source}, of the episodes {numbers}: {error}") from error
            else:
                break
        yield given + len(piece)

    def _add_now(self, piece: list[_Fetched]) -> None:
        """Add episodes with their priorities, after those have been taken in that leave the table for them."""
        episodes = [fetched.episode for fetched in piece]
        if self._held is None:
            add(self.table, episodes, self.priority)
            return
        assert isinstance(self.order, PriorityOrder)
        self._held.follow(lambda: self._make_room(piece))
        numbers = np.array([fetched.number for fetched in piece], dtype=np.int64)
        priorities = self.order.draws.priority(numbers)
        self._held.added(add(self.table, episodes, priorities), numbers, priorities)

    def _make_room(self, piece: list[_Fetched]) -> None:
        """Evict what would be evicted when these episodes are added. The caller holds the lock of the table."""
        index, how = self.table._engine.index.arrays, self.table._engine.policy[0]
        while how and self._counters[at.NUM_READY] and not self._fits(piece):
            index.ops.evict(index.where, 1, how)

    def _episodes(self, given: int) -> Iterator[_Fetched]:
        """Episodes as they are fetched."""
        epoch, skip = divmod(given, len(self.order))
        while self.refresh.epochs is None or epoch < self.refresh.epochs:
            total = int(self.lengths.sum())
            bar = progress_bar(f"Epoch {epoch}", total, unit="steps", enabled=self.progress)
            read = contextlib.closing(self._read_ahead(self.order.pieces(epoch, skip)))
            with bar as (advance, _), read as episodes:
                for fetched in episodes:
                    yield fetched
                    advance(int(self.lengths[fetched.number]))
            epoch, skip = epoch + 1, 0

    def _read_ahead(self, pieces: Iterator[EpisodeRange]) -> Generator[_Fetched]:
        """Episodes; small pieces are read by several threads, ahead of what is asked for."""
        step_bytes = self.table.schema.step_bytes + (self.reader.payload or 0) / max(self.reader.num_steps, 1)
        ahead: deque[Future[list[_Fetched]]] = deque()
        threads = _READERS if len(self.reader.starts) > 1 else 1  # as `EpisodeReader.between` says
        with ThreadPoolExecutor(threads, "gear-loader-reading", initializer=lower_priority) as pool:
            try:
                for piece in pieces:
                    steps = self.lengths[piece.first : piece.last].sum()
                    small = steps * step_bytes <= _PIECE_BYTES
                    if small:
                        ahead.append(pool.submit(lambda each: list(self._read(each)), piece))
                    while ahead and (len(ahead) > _READERS or not small):
                        yield from ahead.popleft().result()
                    if not small:
                        yield from self._read(piece)
                while ahead:
                    yield from ahead.popleft().result()
            finally:
                for read in ahead:
                    read.cancel()

    def _read(self, piece: EpisodeRange) -> Iterator[_Fetched]:
        first, reader = piece.first, self.reader
        if isinstance(reader, Labelled):
            episodes = reader.weighed(first, piece.last, piece.weight)
        else:
            episodes = reader.between(first, piece.last)
        for number, episode in enumerate(fitted_episodes(reader, self.table, episodes, first), first):
            yield _Fetched(number, episode)

    def _may_add(self, piece: list[_Fetched], given: int) -> bool:
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

    def _has_room(self, piece: list[_Fetched]) -> bool:
        """Whether episodes fit without eviction, as far as their steps tell; any do once the table evicts."""
        full = self._full is not None and self.table.on_full != "wait"
        # The first addition initializes the table.
        return full or not self._counters[at.INITIALIZED] or self._fits(piece)

    def _fits(self, piece: list[_Fetched]) -> bool:
        counters, layout = self._counters, self.table._engine.region.layout
        lengths = self.lengths[[fetched.number for fetched in piece]]
        blocks = -(-(lengths + bool(self.table.schema.finals)) // layout.block_steps)
        slots = counters[at.NUM_FREE_SLOTS] + counters[at.NUM_RETIRED]
        free = counters[at.NUM_FREE_BLOCKS] + counters[at.RETIRED_BLOCKS]
        steps = layout.max_steps - counters[at.NUM_STEPS] - counters[at.WRITING_STEPS]
        enough = slots >= len(piece) and steps >= lengths.sum()
        return bool(enough and (counters[at.TIERED] or free >= blocks.sum()))


def together(refreshing: list[Refreshing], given: list[int], record: PriorityRecord | None) -> Generator[int]:
    """Fetch for several tables in turn; yields how many episodes all were given by now.

    Args:
        given: before, to each. record: of the orders, which is closed at the end.
    """
    with contextlib.ExitStack() as stack:
        if record is not None:
            stack.callback(record.close)
        for each in refreshing:
            if isinstance(each.order, PriorityOrder):
                stack.callback(each.order.draws.end)
        fetches = [each.pieces(before) for each, before in zip(refreshing, given, strict=True)]
        left = {number: stack.enter_context(contextlib.closing(each)) for number, each in enumerate(fetches)}
        while left:
            for number, fetch in list(left.items()):
                count = next(fetch, None)
                if count is None:
                    del left[number]
                else:
                    given[number] = count
            yield sum(given)


def update_of(refreshing: list[Refreshing]) -> Callable[[Any, Any], int]:
    """What sets priorities of episodes that are fetched by priority; see `Loading.update_priority`."""
    count = len(refreshing[0].lengths)
    draws = [each.order.draws for each in refreshing if isinstance(each.order, PriorityOrder)]

    def update(index: Any, priority: Any) -> int:
        updates = request(index, priority, generation=None, anchor=None, unit="trajectory")
        numbers = updates.slots
        wrong = np.flatnonzero((numbers < 0) | (numbers >= count))
        if len(wrong):
            raise SourceError(
                f"index[{wrong[0]}] is {numbers[wrong[0]]}; expected a number of the {count:,} episodes. Nothing was "
                "changed."
            )
        known = np.zeros(len(numbers), dtype=bool)
        for each in draws:
            known |= each.update_later(numbers, updates.priorities)
        return int((~known).sum())

    return update


def holds_all(table: Table, lengths: np.ndarray, payload: int | None) -> bool:
    """Whether a table that evicts has room for all episodes of these lengths, as far as it is known."""
    if table.on_full not in _EVICTING:  # what was drawn often may leave it
        return False
    layout = table._engine.region.layout
    blocks = Table.required_blocks(lengths + bool(table.schema.finals), layout.block_steps)
    fits = len(lengths) <= layout.max_trajectories and int(lengths.sum()) <= layout.max_steps
    tiered = layout.tier is not None
    values = not table.schema.ragged or (payload is not None and payload <= layout.payload)
    return fits and values and (tiered or blocks <= layout.num_blocks)
