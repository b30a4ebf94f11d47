"""Selection by priority on the CPU: the tree, what follows the table, updates, and their state."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from gear_loader import native, native_tree
from gear_loader.collector import Buffers, Collector
from gear_loader.errors import PriorityError, SchemaError, StaleIndexError
from gear_loader.index import Changes, Snapshot
from gear_loader.item_map import ItemMap
from gear_loader.kernels import priority_reference as reference
from gear_loader.kernels.sum_tree import GONE
from gear_loader.priority_tree import HostTree
from gear_loader.random import key
from gear_loader.selection import Job, Selection
from gear_loader.selectors import Draw, Prioritized, Selector, TopK, anchors
from gear_loader.slots import READY, UNSET, Array

__all__ = ["PrioritySelection", "Request", "needs_priorities", "request"]

_LEAVES = 3  # stream of random numbers, beside those of `gear_loader.selectors`
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Request:
    """New priorities, checked: of some steps of some trajectories.

    Attributes:
        slots, steps: int64 [n]. generations: int64 [n] or None. priorities: float32 [n].
    """

    slots: Array
    steps: Array
    generations: Array | None
    priorities: Array


@dataclasses.dataclass(frozen=True)
class _Rows:
    """One batch as it was drawn; all arrays [n], `weights` None without."""

    sequences: Array
    slots: Array
    steps: Array
    generations: Array
    weights: Array | None


class PrioritySelection(Selection):
    """`Prioritized` or `TopK` at work on the CPU.

    Args:
        job: of such a selector.
        history: batches whose rows are remembered, so that a state can be taken that resumes before them.

    Attributes:
        num_stale: rows of updates that were ignored because their trajectory was gone.
    """

    def __init__(self, job: Job, *, history: int) -> None:
        super().__init__(job)
        layout = job.table.region.layout
        self._map = ItemMap(
            steps=job.selector.unit == "step",
            num_slots=layout.max_trajectories,
            num_blocks=layout.num_blocks,
            block_steps=layout.block_steps,
        )
        if self._map.capacity >= 2**31:
            raise SchemaError(
                f"{job.selector!r} would need {self._map.capacity:,} priorities, one for each place of a step; "
                "expected less than 2**31. Use unit='trajectory', or a table with fewer blocks."
            )
        self._tree = HostTree(self._map.capacity)
        self._maximum = 1.0
        self.num_stale = 0
        self._history: collections.deque[tuple[tuple[int, int], _Rows]] = collections.deque(maxlen=history)
        self._pending: dict[tuple[int, int], _Rows] = {}
        self._mutex = threading.Lock()

    # ---------------------------------------------------------------- drawing

    def fill(
        self, collector: Collector, buffers: Buffers, draw: Draw, frozen: Snapshot | None
    ) -> tuple[int, int]:
        """See `Selection.fill`."""
        with self._mutex:
            ticket = self._follow()
            try:
                rows = self._restored(draw)
                if rows is None:
                    rows = self._draw(draw)
                self._history.append(((draw.epoch, draw.step), rows))
            except BaseException:
                self.job.table.end_read(ticket)
                raise
        try:
            collector.collect(buffers, rows.slots, rows.steps, rows.generations, weights=rows.weights)
        except BaseException:
            self.job.table.end_read(ticket)
            raise
        return ticket, len(rows.slots)

    def _follow(self) -> int:
        """Take in what has changed in the table, and return the ticket under which it stays."""
        table = self.job.table
        ticket, changes = table.begin_changes(self._map.position)
        try:
            if len(changes.slots):
                self._take_in(changes)
            else:
                self._map.position, self._map.next_sequence = changes.position, changes.next_sequence
        except BaseException:
            table.end_read(ticket)
            raise
        return ticket

    def _take_in(self, changes: Changes) -> None:
        chosen = self.job.chosen(changes.sequences) if self.job.subset is not None else changes.ready
        leaves = self._map.follow(changes, chosen, *self.job.table.index_arrays())
        self._maximum = max(self._maximum, float(leaves.priorities.max(initial=0)))
        priorities = np.where(leaves.priorities == UNSET, np.float32(self._maximum), leaves.priorities)
        gone = leaves.priorities == GONE
        priorities[gone] = 0
        weighed = np.minimum(self._weigh(priorities), _LARGEST).astype(np.float32)
        weighed[gone] = 0
        if len(leaves.items) > self._map.capacity // 8:
            self._tree.leaves[leaves.items] = weighed
            self._tree.build()
        else:
            self._tree.update(leaves.items, weighed)

    def _weigh(self, priorities: Array) -> Array:
        """What priorities (float32 [n]) weigh, float64 [n]."""
        selector = self.job.selector
        alpha, eps = (selector.alpha, selector.eps) if isinstance(selector, Prioritized) else (1.0, 0.0)
        weighed: Array = reference.weigh(torch.from_numpy(priorities), alpha, eps).numpy()
        return weighed

    def _draw(self, draw: Draw) -> _Rows:
        selector, table = self.job.selector, self.job.table
        weights = None
        try:
            if isinstance(selector, TopK):
                items = self._top(selector, draw.count)
            else:
                assert isinstance(selector, Prioritized)
                items, leaves = self._tree.draw(
                    draw.count,
                    key=key(seed=draw.seed, stream=_LEAVES, epoch=draw.epoch),
                    step=draw.step,
                    distinct=not selector.replacement,
                )
                least = self._tree.minimum if selector.normalize == "table" else leaves.min()
                ratio = np.float64(least) / leaves
                weights = (ratio ** selector.beta_at(draw.number)).astype(np.float32)
        except PriorityError:
            if len(self.view()) == 0:
                raise self.job.empty() from None
            raise
        slots, steps = self._map.locate(items)
        if selector.unit == "trajectory":
            steps = anchors(self.job.anchor, table.index_arrays()[0][slots, 0], draw)
        _, generation, sequence = table.slot_states()
        return _Rows(sequence[slots], slots, steps, generation[slots], weights)

    def _top(self, selector: TopK, count: int) -> Array:
        items, _ = self._tree.top(min(count, self._tree.capacity), largest=selector.largest)
        items = items[items >= 0]
        if len(items) == 0:
            raise PriorityError(
                "Every priority is zero: there is nothing to draw. Set some with update_priority, or add trajectories "
                "with a positive priority."
            )
        return items[np.arange(count) % len(items)]

    # ---------------------------------------------------------------- updating

    def check(self, request: Request) -> None:
        """Raise StaleIndexError if a row names a trajectory that is gone, or a step that it does not have."""
        with self._mutex:
            stale = np.flatnonzero(self._items(request) < 0)
        if len(stale):
            row = int(stale[0])
            raise StaleIndexError(
                f"{len(stale)} of {len(request.slots)} priorities are for trajectories that are gone; the first is "
                f"row {row}, index {request.slots[row]}. Nothing was changed; stale='ignore' skips them."
            )

    def update(self, request: Request) -> None:
        """Set priorities; rows whose trajectory is gone are counted and left out."""
        with self._mutex:
            items = self._items(request)
            known = items >= 0
            self.num_stale += int(len(items) - known.sum())
            priorities = request.priorities[known]
            self._maximum = max(self._maximum, float(priorities.max(initial=0)))
            self._tree.update(items[known], self._weigh(priorities).astype(np.float32))

    def _items(self, request: Request) -> Array:
        """Items of a request, -1 for those that are gone."""
        table, slots = self.job.table, request.slots
        state, generation, sequence = table.slot_states()
        inside = (slots >= 0) & (slots < len(state))
        slots = np.where(inside, slots, 0)
        known = inside & (state[slots] == READY) & (sequence[slots] < self._map.next_sequence)
        if request.generations is not None:
            known &= generation[slots] == request.generations
        if self.job.subset is not None:
            known &= self.job.chosen(sequence[slots])
        items = self._map.items(slots, request.steps, *table.index_arrays())
        return np.where(known, items, -1)

    def check_weight(self, priorities: Array) -> None:
        """Raise PriorityError if a priority (float32 [n]) weighs more than float32 holds."""
        bad = np.flatnonzero(self._weigh(priorities) > _LARGEST)
        if len(bad):
            raise PriorityError(
                f"priority[{bad[0]}] is {priorities[bad[0]]}, which {self.job.selector!r} raises beyond float32's "
                "range; expected a smaller one, or use a smaller alpha. Nothing was changed."
            )

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Priorities of all trajectories by sequence number, counters, and the rows of the last batches."""
        with self._mutex:
            self.job.table.end_read(self._follow())
            view = self._known()
            leaves = self._tree.leaves[self._map.all_items(view.slots, *self.job.table.index_arrays())]
            return {
                "sequences": torch.from_numpy(view.sequences.copy()),
                "lengths": torch.from_numpy(view.lengths.copy()),
                "leaves": torch.from_numpy(leaves),
                "maximum": self._maximum,
                "num_stale": self.num_stale,
                "recent": [
                    {"epoch": epoch, "step": step, **_tensors(rows)} for (epoch, step), rows in self._history
                ],
            }

    def _known(self) -> Snapshot:
        view = self.view()
        return view.take(view.sequences < self._map.next_sequence)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, for the trajectories that are still there.

        Raises:
            SchemaError: it is no such state; nothing was changed.
        """
        sequences, lengths, leaves = _checked(state)
        with self._mutex:
            self.job.table.end_read(self._follow())
            view = self._known()
            extent, block_ids = self.job.table.index_arrays()
            # The trajectories that are in both, as places in the state.
            places = np.searchsorted(sequences, view.sequences)
            places[places == len(sequences)] = 0
            both = (
                (len(sequences) > 0) & (sequences[places] == view.sequences)
                if len(sequences)
                else np.zeros(len(view), bool)
            )
            both &= lengths[places] == view.lengths if len(sequences) else False
            steps = self.job.selector.unit == "step"
            counts = lengths if steps else np.ones_like(lengths)
            ends = np.cumsum(counts)
            places = places[both]
            which = np.repeat(np.arange(len(places)), counts[places])
            inside = np.arange(len(which)) - (np.cumsum(counts[places]) - counts[places])[which]
            source = (ends - counts)[places][which] + inside
            items = self._map.all_items(view.slots[both], extent, block_ids)
            self._tree.leaves[items] = leaves[source]
            self._tree.build()
            self._maximum = float(state["maximum"])
            self.num_stale = int(state["num_stale"])
            self._history.clear()
            self._pending = {(int(r["epoch"]), int(r["step"])): _rows(r) for r in state["recent"]}

    def forget_pending(self) -> None:
        """Draw anew what a loaded state would have repeated."""
        self._pending.clear()

    def _restored(self, draw: Draw) -> _Rows | None:
        """The rows of a batch that had been drawn before the state was taken, if all of them are still there."""
        rows = self._pending.pop((draw.epoch, draw.step), None)
        if rows is None:
            return None
        view = self.view()
        places = np.searchsorted(view.sequences, rows.sequences)
        places[places == len(view)] = 0
        if len(view) == 0 or (view.sequences[places] != rows.sequences).any():
            return None
        return dataclasses.replace(rows, slots=view.slots[places], generations=view.generations[places])


def _tensors(rows: _Rows) -> dict[str, Any]:
    return {
        "sequences": torch.from_numpy(rows.sequences.copy()),
        "steps": torch.from_numpy(rows.steps.copy()),
        "weights": None if rows.weights is None else torch.from_numpy(rows.weights.copy()),
    }


def _rows(state: Mapping[str, Any]) -> _Rows:
    sequences, steps = np.asarray(state["sequences"]), np.asarray(state["steps"])
    weights = None if state["weights"] is None else np.asarray(state["weights"])
    return _Rows(sequences, np.empty_like(sequences), steps, np.empty_like(sequences), weights)


def _checked(state: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    try:
        sequences, lengths, leaves = (np.asarray(state[name]) for name in ("sequences", "lengths", "leaves"))
        fits = sequences.dtype == lengths.dtype == np.int64 and leaves.dtype == np.float32
        fits &= sequences.shape == lengths.shape and leaves.ndim == sequences.ndim == 1
        fits &= len(leaves) in (len(sequences), int(lengths.sum()))
        fits &= bool((np.diff(sequences) > 0).all() and np.isfinite(leaves).all() and (leaves >= 0).all())
        fits &= np.isfinite(float(state["maximum"])) and int(state["num_stale"]) >= 0
        for rows in state["recent"]:
            _rows(rows)
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise SchemaError(
            "The state's priorities are damaged or of something else; expected what state_dict() of a ReplayDataset "
            "with the same selector returned. Nothing was changed."
        )
    return sequences, lengths, leaves


def request(
    index: Any, priority: Any, *, generation: Any, anchor: Any, unit: Literal["trajectory", "step"]
) -> Request:
    """Check what a user gave as new priorities.

    Args:
        index: [n] integers; generation, anchor: as many, or None. priority: [n] numbers. Tensors or arrays.

    Raises:
        PriorityError: a priority that is NaN, infinite (as float32) or negative; the first such position is named.
        SchemaError: another shape or dtype, or no anchors where the unit is a step.
    """
    slots = _array("index", index, "iu")
    count = len(slots)
    values = _array("priority", priority, "fiub", count).astype(np.float64)
    generations = (
        None if generation is None else _array("generation", generation, "iu", count).astype(np.int64)
    )
    if unit == "step" and anchor is None:
        raise SchemaError(
            "No anchor was received; with unit='step' a step is named by index and anchor: pass anchor=batch['anchor']."
        )
    if unit == "trajectory" and anchor is not None:
        raise SchemaError(
            "anchor was received; with unit='trajectory' a priority is that of the whole trajectory: leave it out, or "
            "use a selector with unit='step'."
        )
    steps = np.zeros(count, dtype=np.int64) if anchor is None else _array("anchor", anchor, "iu", count)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bad = first_bad(narrow.astype(np.float64))
    if bad >= 0:
        raise PriorityError(
            f"priority[{bad}] is {values[bad]}; expected a finite number (as float32) that is not negative. "
            "Nothing was changed."
        )
    narrow = np.where((narrow == 0) & (values > 0), np.finfo(np.float32).tiny, narrow)
    return Request(slots.astype(np.int64), steps.astype(np.int64), generations, narrow)


def first_bad(values: Array) -> int:
    """Position of the first of `values` (float64 [n]) that is not finite or negative; -1 if there is none."""
    if native.AVAILABLE:
        return int(native_tree.check_values(values))
    bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))
    return int(bad[0]) if len(bad) else -1


def _array(name: str, value: Any, kinds: str, count: int | None = None) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.atleast_1d(np.asarray(value))
        fits = array.dtype.kind in kinds or array.size == 0
    except (TypeError, ValueError):
        fits = False
    if not fits or array.ndim != 1 or (count is not None and len(array) != count):
        shape = f"{array.dtype} {list(array.shape)}" if fits else repr(value)
        kind = "numbers" if "f" in kinds else "integers"
        raise SchemaError(
            f"{name} is {shape}; expected {kind} [{'n' if count is None else count}]"
            f"{'' if count is None else ', as many as index has'}. Nothing was changed."
        )
    return array


def needs_priorities(selector: Selector) -> bool:
    """Whether a selector goes by priorities."""
    return isinstance(selector, (Prioritized, TopK))
