"""Windows whose steps are known when others have been read: of times (`Window.timestamps`), the steps nearest to them;
and windows, or values of any length, of `NStep.next`, at the bootstrap steps. Both are gathered at other anchors.

Movers know nothing of this. `TimedSource` reads a batch in turns, each by a mover of its own: the other windows, with
the anchors' times in place of windows of times; the times around the anchors, as far as they are needed; for each set
of times as many rows as a row has of them, of which each has another anchor; and the bootstrap steps.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.movers import GoneRowsError, HostMover, RowMover
from gear_loader.collection.n_step import NStep
from gear_loader.collection.padded import PaddedHost, PaddedLayout
from gear_loader.collection.references import can_count
from gear_loader.collection.windows import next_of, source_of, steps_only, timed_of
from gear_loader.errors import SchemaError
from gear_loader.native.nearest import EARLIER, INVALID, LATER, RESOLVED, nearest_steps
from gear_loader.storage.ragged import Ragged, arranged
from gear_loader.storage.schema import Schema, Window
from gear_loader.utils.arrays import Array

_FIRST, _GROWTH = 16, 4
"""Steps that are read before and after an anchor, and how many times as many if they are too few."""
_MOST_TIMES = 1 << 21
"""Times that are read at once, so that memory is bounded however far from the anchors steps are looked for."""


@dataclasses.dataclass(frozen=True)
class _Times:
    """What the steps of a window of times depend on."""

    column: str
    at: tuple[float, ...]
    tolerance: float
    edge: bool

    @staticmethod
    def of(window: Window) -> _Times:
        at = tuple(float(each) for each in window.at or ())
        return _Times(window.timestamps or "", at, window.tolerance or 0.0, window.pad == "edge")


class _Reusable:
    """Buffers of a mover, each used by one batch at a time, and again when nothing refers to what it has lent."""

    def __init__(self, mover: HostMover) -> None:
        self.mover = mover
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def take(self) -> Any:
        with self._lock:
            for i, each in enumerate(self._free):
                if each.references is None or not each.references.held:
                    return self._free.pop(i)
        return self.mover.buffers()

    def give(self, buffers: Any) -> None:
        if buffers.references is None or can_count():
            with self._lock:
                self._free.append(buffers)


class TimedSource:
    """A source of rows, whose batches have windows of times, or next values of any length: a `RowSource`.

    Args:
        source: has the rows. schema: of them. windows: of a batch. batch_size: most rows of a batch.
        options: of the movers, see `HostMover`.
    """

    def __init__(
        self,
        source: Any,
        schema: Schema,
        windows: Mapping[str, Any],
        batch_size: int,
        **options: Any,
    ) -> None:
        self._source, self._schema, self._batch_size, self._options = source, schema, batch_size, options
        self._timed = timed_of(windows)
        self._masked = [
            name for name, window in steps_only(schema, windows).items() if not isinstance(window, NStep)
        ]
        self._sets: dict[_Times, list[str]] = {}
        for name, window in self._timed.items():
            self._sets.setdefault(_Times.of(window), []).append(name)
        self._parts = {
            times: self._reader(self._single(names), batch_size * len(times.at))
            for times, names in self._sets.items()
        }
        self._next = {
            name: (spec, self._reader(spec.following, batch_size))
            for name, spec in next_of(schema, windows).items()
        }
        self._lines: dict[tuple[str, int, int], tuple[Any, _Reusable]] = {}
        self._reach = dict.fromkeys((times.column for times in self._sets), (_FIRST, _FIRST))

    def _reader(self, windows: Mapping[str, Window], count: int) -> tuple[Any, _Reusable]:
        """What reads so many rows of windows of steps: a source, and the mover and its buffers."""
        layout = PaddedLayout(self._schema, windows, batch_size=count, keys=self._source.keys)
        return self._source.another(), _Reusable(PaddedHost(layout, **self._options))

    def _single(self, names: Sequence[str]) -> dict[str, Window]:
        """The windows of one step of some windows of times."""
        found = {}
        for name in names:
            window = self._timed[name]
            more: dict[str, Any] = {
                "column": source_of(name, window),
                "dtype": window.dtype,
                "scale": window.scale,
            }
            found[name] = Window(1, pad=window.pad, squeeze=True, **more)
        return found

    # ---------------------------------------------------------------- the source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def _others(self) -> list[Any]:
        readers = *self._parts.values(), *self._lines.values(), *(each for _, each in self._next.values())
        return [source for source, _ in readers]

    @property
    def num_gone(self) -> int:
        """See `ShardSource`."""
        return sum(getattr(each, "num_gone", 0) for each in (self._source, *self._others))

    @property
    def num_lost(self) -> int:
        """See `ShardSource`."""
        return sum(getattr(each, "num_lost", 0) for each in (self._source, *self._others))

    def read(self, mover: RowMover, buffers: Any, rows: Any) -> None:
        """Fill buffers with rows, and their `ragged` with the windows of times; see `RowSource.read`.

        Raises:
            SchemaError: the times of a trajectory are not ascending.
        """
        while True:
            self._source.read(mover, buffers, rows)
            try:
                found = self.read_late(rows, buffers.rows(len(rows)))
            except GoneRowsError as error:  # those of other nodes may leave between two requests
                rows.without(error.rows, self._source)
                continue
            buffers.ragged = {**buffers.ragged, **found}
            return

    def read_late(self, rows: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What a batch has in place of what it shows: the windows of times and its mask, and returns with `next`.

        Args:
            rows: of the source. batch: of the other windows.
        """
        found = self._read_times(rows, batch.get("mask")) if self._timed else {}
        for name, (spec, (source, pool)) in self._next.items():
            returns = {key: value.clone() for key, value in batch[name].items()}
            read = self._read_steps(source, pool, rows, np.arange(len(rows)), returns["bootstrap"].numpy())
            following = {each: read[each] for each in spec.following}
            alone = next(iter(following.values()))
            found[name] = {**returns, "next": following if isinstance(spec.next, tuple) else alone}
        return found

    @staticmethod
    def _read_steps(source: Any, pool: _Reusable, rows: Any, which: Array, steps: Array) -> dict[str, Any]:
        """Windows of some rows, at other anchors."""
        buffers = pool.take()
        try:
            source.read(pool.mover, buffers, rows.moved(which, steps))
            ragged, buffers.ragged = buffers.ragged, {}
            return {**buffers.lend(len(which)), **ragged}
        finally:
            pool.give(buffers)

    def _read_times(self, rows: Any, mask: Any) -> dict[str, Any]:
        """The windows of times of a batch, and its mask; mask: of the other windows."""
        steps, found, masks = self._resolve(rows), dict[str, Any](), dict[str, torch.Tensor]()
        for times, names in self._sets.items():
            chosen, fits = steps[times]
            source, pool = self._parts[times]
            which = np.repeat(np.arange(len(rows)), len(times.at))
            batch = self._read_steps(source, pool, rows, which, chosen.reshape(-1))
            for name in names:
                shape = (len(rows), *chosen.shape[1:]) if not self._timed[name].squeeze else (len(rows),)
                found[name] = _arranged(batch[name], shape)
                there = batch["mask"][name] if isinstance(batch["mask"], dict) else batch["mask"]
                masks[name] = there.view(chosen.shape) & torch.from_numpy(fits)
                masks[name] = masks[name].view(shape)
        found["mask"] = self._joined(masks, mask)
        return found

    def _joined(self, masks: Mapping[str, torch.Tensor], mask: Any) -> Any:
        """The mask of a batch: one, if all windows have the same, else by their names."""
        kinds = {
            (_Times.of(window), window.squeeze, self._schema[source_of(name, window)].final)
            for name, window in self._timed.items()
        }
        if len(kinds) == 1 and len(masks) == len(self._masked):
            return next(iter(masks.values()))
        others = {
            name: mask[name] if isinstance(mask, dict) else mask for name in self._masked if name not in masks
        }
        return {name: masks[name] if name in masks else others[name].clone() for name in self._masked}

    # ---------------------------------------------------------------- times

    def _resolve(self, rows: Any) -> dict[_Times, tuple[Array, Array]]:
        """The steps of each set of times, int64 [n, K], -1 for none; and which are near enough, bool [n, K]."""
        count, anchors = len(rows), rows.anchors
        found = {
            times: (np.empty((count, len(times.at)), np.int64), np.zeros((count, len(times.at)), bool))
            for times in self._sets
        }
        for column, reach in self._reach.items():
            sets = [times for times in self._sets if times.column == column]
            left, (before, after), first = np.arange(count), reach, True
            while len(left):
                left, rest = np.split(left, [_rows_at_once(before, after)])
                line, there = self._line(column, rows, left, before, after)
                states = np.zeros(len(left), dtype=np.uint8)
                for times in sets:
                    steps, fits = (np.empty((len(left), len(times.at)), each.dtype) for each in found[times])
                    state = np.empty(len(left), dtype=np.uint8)
                    given = (
                        line,
                        there,
                        anchors[left] - before,
                        np.array(times.at),
                        times.tolerance,
                        times.edge,
                    )
                    nearest_steps(*given, steps, fits, state)
                    states |= state
                    found[times][0][left], found[times][1][left] = steps, fits
                if len(bad := np.flatnonzero(states & INVALID)):
                    raise self._not_ascending(
                        column, rows, int(left[bad[0]]), line[bad[0]], there[bad[0]], before
                    )
                before *= _GROWTH if (states & EARLIER).any() else 1
                after *= _GROWTH if (states & LATER).any() else 1
                left = left[states != RESOLVED]
                if first and len(left) > count // 8:
                    self._reach[column] = before, after
                left, first = np.concatenate((left, rest)), False
        return found

    def _line(self, column: str, rows: Any, which: Array, before: int, after: int) -> tuple[Array, Array]:
        """Times of steps around the anchors of some rows, relative to the anchors', float64 [m, W]; and which exist."""
        key = column, before, after
        if key not in self._lines:
            window = Window(before + 1 + after, -before, column=column)
            count = min(self._batch_size, _rows_at_once(before, after))
            self._lines[key] = self._reader({column: window}, count)
        source, pool = self._lines[key]
        buffers = pool.take()
        try:
            source.read(pool.mover, buffers, rows.moved(which, rows.anchors[which]))
            batch = buffers.rows(len(which))
            times = batch[column].reshape(len(which), -1)
            times = times.double() if times.is_floating_point() else times.long()
            relative = (times - times[:, before : before + 1]).double().numpy()
            return relative, batch["mask"].numpy().copy()
        finally:
            pool.give(buffers)

    def _not_ascending(
        self, column: str, rows: Any, row: int, times: Array, there: Array, before: int
    ) -> SchemaError:
        steps = np.flatnonzero(there)
        falls = np.flatnonzero(~(np.diff(times[steps]) >= 0))
        step = int(rows.anchors[row]) - before + int(steps[falls[0]] if len(falls) else before)
        return SchemaError(
            f"Column {column!r} of trajectory {int(rows.slots[row])} falls after step {step}, or is no finite number; "
            "expected ascending times, which windows with timestamps look for."
        )


def _rows_at_once(before: int, after: int) -> int:
    return max(1, _MOST_TIMES // (before + 1 + after))


def _arranged(value: Any, shape: tuple[int, ...]) -> Any:
    """Values of one step each, as rows of a batch."""
    if isinstance(value, Ragged):
        return Ragged._of(value.values, value.offsets, shape)
    if isinstance(value, torch.Tensor):
        return value.view(*shape, *value.shape[1:])
    return arranged(value, shape)
