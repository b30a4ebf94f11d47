"""Batches for a GPU, and updates of priorities, that one compiled call queues; see `queue_loops`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.storage import queue_loops as loops
from gear_loader.storage.selected_rows import Reach, UniformPlaces
from gear_loader.utils import driver
from gear_loader.utils.arrays import Array
from gear_loader.utils.captures import RelaxedMode
from gear_loader.utils.launch_graph import LaunchGraph, build, join

_MOST_JOINED = 8
"""Graphs of a batch and an update, for each set of buffers."""

_UNKNOWN = 1 << 62
"""Number of a launch of which nobody hears when it is complete."""

__all__ = ["QueuedBatch", "QueuedDraw", "QueuedPacked", "QueuedPadded", "QueuedSeveral", "QueuedUpdate"]


class _Queued:
    """A graph that a compiled call launches.

    Args:
        graph: the graph, which is kept. stream: handle of the one that it is launched on.

    Attributes:
        graph, stream: as given. words: int64, for the loops. view: the same, in which Python reads and writes a number
            in half of numpy's time. members: int64 [2], for those that take several.
    """

    __slots__ = ("graph", "members", "stream", "view", "words")

    def __init__(self, graph: LaunchGraph, stream: int) -> None:
        self.graph, self.stream = graph, stream
        memory: Array = np.zeros(loops.WORDS + 2, dtype=np.int64)
        self.words = memory[: loops.WORDS]
        self.view = self.words.data
        self.members = memory[loops.WORDS :]
        self.members[0], self.members[1] = 1, self.words.ctypes.data
        self.words[[loops.SELF, loops.STREAM, loops.GRAPH]] = self.words.ctypes.data, stream, graph.handle
        for name, place in loops.FUNCTIONS.items():
            self.words[place] = driver.address_of(name)

    @property
    def code(self) -> int:
        """What the driver has returned last."""
        return self.view[loops.CODE]


class QueuedBatch(_Queued):
    """Where the rows of a batch go, in pinned memory, and the graph that gathers them.

    Args:
        graph, stream: as for `_Queued`. key: of the work that the graph does.
        count: rows of the batch, B. names: int64 [K, at least B], whose first rows get slots, anchors and generations.
        weights: float32 [at least B], of rows that the host draws by priority; or None.
        filled: event that is recorded after the work. wait: waits for that, as the GPU last did.

    Attributes:
        key, count: as given.
    """

    __slots__ = ("_arrays", "_wait", "count", "key")

    def __init__(
        self,
        graph: LaunchGraph,
        stream: int,
        *,
        key: Hashable,
        count: int,
        names: Array,
        weights: Array | None,
        filled: int,
        wait: Callable[[], object],
    ) -> None:
        super().__init__(graph, stream)
        self.key, self.count, self._wait = key, count, wait
        self._arrays: list[Any] = []
        self._tell(loops.NAMES, names)
        if weights is not None:
            self._tell(loops.WEIGHTS, weights)
        self.words[[loops.CAPACITY, loops.COUNT, loops.FILLED]] = names.shape[1], count, filled

    def _tell(self, place: int, array: Array) -> None:
        """Write the address of an array, which is kept, into a word."""
        assert array.flags.c_contiguous
        self._arrays.append(array)
        self.words[place] = array.ctypes.data

    def after(self, released: int) -> None:
        """Let the work come after an event; 0: after none."""
        self.view[loops.RELEASED] = released

    def wait(self) -> None:
        """Wait until the GPU has read what was written for the last batch."""
        with RelaxedMode():
            self._wait()

    def ask(self, events: Sequence[int], *, own: bool) -> None:
        """Let the call ask for these events of earlier batches, at most `MOST_ASKED`; see `num_read`.

        Args:
            own: whether the GPU may still read what was written for the last batch.
        """
        view = self.view
        view[loops.ASKED], view[loops.OWN] = len(events), own
        for place, event in enumerate(events, loops.EARLIER):
            view[place] = event

    @property
    def num_read(self) -> int:
        """How many of them have happened, from the first on."""
        return self.view[loops.READ]


class QueuedPadded(QueuedBatch):
    """A padded batch.

    Args:
        rows: int64 [6, B], ids: int32 [B, K], as a GPU's buffers have them. reach: of the windows. places: where the
            GPU puts uniform rows if it draws them; None if it does not. The others: as for `QueuedBatch`.

    Attributes:
        places: as given. drawn: a graph that also draws, see `draws_by`.
    """

    __slots__ = ("_drawn_by", "drawn", "places")

    def __init__(
        self, rows: Array, ids: Array, reach: Reach, *, places: UniformPlaces | None = None, **options: Any
    ) -> None:
        super().__init__(names=rows, **options)
        self.places, self.drawn, self._drawn_by = places, self.graph, 0
        self._tell(loops.EXTENT, rows[3:])
        self._tell(loops.IDS, ids)
        if places is not None:
            self._tell(loops.RANDOM, places.random.numpy())
        self.words[[loops.WIDTH, loops.FIRST, loops.LAST, loops.ONCE]] = ids.shape[1], *reach

    def draws_by(self, number: int, launch: Callable[[UniformPlaces], object]) -> bool:
        """Whether there is a graph that draws uniform rows; it is made if there is none.

        Args:
            number: not 0, tells one way to draw from another. launch: launches the draw.
        """
        places = self.places
        if places is None:
            return False
        if self._drawn_by == number:
            return True

        def queue() -> None:
            launch(places)
            places.gather()

        with RelaxedMode():
            graph = build(queue)
        if graph is None:
            self.places = None
            return False
        self.drawn, self.words[loops.DRAWN], self._drawn_by = graph, graph.handle, number
        return True

    @property
    def was_drawn(self) -> bool:
        """Whether the GPU has drawn the rows of the batch that was queued last."""
        return bool(self.view[loops.DRAWS])

    @was_drawn.setter
    def was_drawn(self, value: bool) -> None:
        self.words[loops.DRAWS] = value


class QueuedSeveral:
    """Padded batches of uniform rows that one compiled call queues, several by one launch if a graph can be made of
    theirs.

    Args:
        batches: at least one, with as many rows each, on one stream. together: of how many to make such a graph.

    Attributes:
        batches: as given. count: rows of each. members: for the loop. drawn: the same, if the GPU draws.
    """

    __slots__ = ("_drawn_by", "_graphs", "_together", "batches", "count", "drawn", "members")

    def __init__(self, batches: Sequence[QueuedPadded], *, together: int) -> None:
        self.batches, self.count, self._together = tuple(batches), batches[0].count, together
        self._graphs: dict[bool, list[LaunchGraph]] = {}
        self.members = self.drawn = self._joined(drawn=False)
        self._drawn_by = 0

    def _joined(self, *, drawn: bool) -> Array:
        """`members`, or `drawn`."""
        parts = [each.drawn if drawn else each.graph for each in self.batches]
        places, together = [each.words.ctypes.data for each in self.batches], self._together
        graphs: list[LaunchGraph | None] = []
        if together > 1:
            with RelaxedMode():
                graphs = [join(*parts[i : i + together]) for i in range(0, len(parts), together)]
        made = self._graphs[drawn] = [each for each in graphs if each is not None]
        if len(made) < len(graphs) or not made:
            return np.array([1, *places], dtype=np.int64)
        return np.array([together, *places, *(each.handle for each in made)], dtype=np.int64)

    def draws_by(self, number: int, launch: Callable[[UniformPlaces], object]) -> bool:
        """See `QueuedPadded.draws_by`."""
        if self._drawn_by != number or self.batches[0].places is None:
            if not all(each.draws_by(number, launch) for each in self.batches):
                return False
            self.drawn, self._drawn_by = self._joined(drawn=True), number
        return True

    def wait(self) -> None:
        """Wait until the GPU has read what was written for the last batches."""
        for each in self.batches:
            each.wait()

    def ask(self, events: Sequence[int], *, own: bool) -> None:
        """As `QueuedBatch.ask`."""
        self.batches[0].ask(events, own=own)

    @property
    def num_read(self) -> int:
        """As `QueuedBatch.num_read`."""
        return self.batches[0].num_read

    @property
    def code(self) -> int:
        """What the driver has returned last."""
        return next((each.code for each in self.batches if each.code), 0)


class QueuedDraw(QueuedPadded):
    """A padded batch that the GPU draws by priority.

    Args:
        draw: pinned int64 [3] and float32 [1], which the draw reads, see `DrawPlaces`.
        memory: uint8 tensor on the GPU, in which it puts the rows. begin: the byte of it where their weights begin, or
            None. The others: as for `QueuedPadded`.

    Attributes:
        memory, begin: as given.
    """

    __slots__ = ("_joined", "begin", "memory")

    def __init__(
        self, *given: Any, draw: tuple[Array, Array], memory: torch.Tensor, begin: int | None, **options: Any
    ) -> None:
        super().__init__(*given, **options)
        self.memory, self.begin = memory, begin
        self._joined: dict[LaunchGraph, LaunchGraph | None] = {}
        self._tell(loops.RANDOM, draw[0])
        self._tell(loops.BETA, draw[1])
        self.words[[loops.MEMORY, loops.BYTES]] = memory.data_ptr(), memory.numel()

    def joined(self, update: QueuedUpdate) -> int:
        """Handle of a graph of an update and this batch; 0 if there is none."""
        graph, made = update.graph, self._joined
        found = made.get(graph)
        if found is None and graph not in made and len(made) < _MOST_JOINED:
            with RelaxedMode():
                found = made[graph] = join(graph, self.graph)
        return 0 if found is None else found.handle


class QueuedPacked(QueuedBatch):
    """A packed batch of one table.

    Args:
        window, columns, starts, pieces, lists, planned: arguments of `plan_rows`, of which `lists` is its memory;
            header, adjoin: too. most_steps: that the batch's memory holds. The others: as for `QueuedBatch`.

    Attributes:
        spans: int64 [2, B], planned: of the batch that was planned last. pieces: as given.
    """

    __slots__ = ("pieces", "planned", "spans")

    def __init__(
        self,
        *,
        window: Array,
        columns: Array,
        starts: Array,
        pieces: Array,
        lists: Array,
        planned: Array,
        header: int,
        adjoin: bool,
        most_steps: int,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pieces, self.planned = pieces, planned
        self.spans: Array = np.empty((2, self.count), dtype=np.int64)
        told = {
            loops.WINDOW: window,
            loops.COLUMNS: columns,
            loops.STARTS: starts,
            loops.PIECES: pieces,
            loops.LISTS: lists,
            loops.SPANS: self.spans,
            loops.PLANNED: planned,
        }
        for place, array in told.items():
            self._tell(place, array)
        self.words[[loops.PACKED, loops.NUM_COLUMNS, loops.NUM_PIECES]] = 1, len(columns), len(pieces)
        self.words[[loops.NUM_WORDS, loops.HEADER]] = len(lists), header
        self.words[[loops.ADJOIN, loops.MOST_STEPS]] = adjoin, most_steps


class QueuedUpdate(_Queued):
    """An update of priorities: its tensors are copied by one compiled call, and its graph is launched by the next draw.

    Args:
        graph, stream: as for `_Queued`.
        given, done: events that are recorded when the tensors are copied, and after the update.
    """

    __slots__ = ()

    def __init__(self, graph: LaunchGraph, stream: int, *, given: int, done: int) -> None:
        super().__init__(graph, stream)
        self.words[[loops.GIVEN, loops.DONE, loops.LAUNCHED]] = given, done, _UNKNOWN

    @property
    def waits(self) -> bool:
        """Whether its tensors are copied, and it is not launched yet."""
        return bool(self.view[loops.WAITS])

    def record(self) -> None:
        """Record the event after the update, unless it is."""
        view = self.view
        if view[loops.UNRECORDED]:
            driver.library().cuEventRecord(view[loops.DONE], self.stream)
            view[loops.UNRECORDED] = 0

    def was_done(self) -> None:
        """Tell that the event has been recorded after other work that uses the tensors."""
        self.words[[loops.UNRECORDED, loops.LAUNCHED]] = 0, _UNKNOWN
