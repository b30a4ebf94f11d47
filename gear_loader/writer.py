"""The writer: adds a trajectory step by step, straight into its blocks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gear_loader import native
from gear_loader.errors import GearError, LockTimeoutError, SchemaError
from gear_loader.index_ops import UNSET, Array
from gear_loader.numbers import as_array, narrowed
from gear_loader.options import at_least
from gear_loader.schema import NUMPY_DTYPES, Column

if TYPE_CHECKING:
    from gear_loader.index import Index
    from gear_loader.table import Table

__all__ = ["Writer"]

_GENEROUS = 8
"""A trajectory gets room ahead of its steps while that leaves seven eighths of what is free to others."""


class Writer:
    """Adds trajectories to a table while they are being made: `append` steps, then `commit`.

    Made by `Table.writer`. Steps are written straight into the table's blocks, where nobody sees them before `commit`.
    A writer is for one thread; a table may have any number of them, in any number of processes. If the process dies,
    what it had not committed is given back by whoever needs room next.

    As a context manager it commits at the end what has been appended since the last `commit`, and discards it if the
    block raised an exception::

        with table.writer() as writer:
            while not done:
                ...
                writer.append(observation=observation, action=action, reward=reward)
            writer.commit(priority=1.0)

    **Chunks.** With `chunk_steps` what is appended is one stream, of which every `chunk_steps` steps become a
    trajectory as soon as they are there, each beginning `overlap_steps` before the end of the last one, as R2D2 stores its
    sequences with their burn-in (Kapturowski et al., 2019). `commit` ends the stream: the steps that are in no chunk
    yet become a last, shorter one, beginning `overlap_steps` earlier too. If ``chunk_steps - overlap_steps`` is a
    multiple of the table's `block_steps`, the steps that two chunks have in common are stored once; else they are
    copied.

    Attributes:
        priority: what a chunk begins with that is cut while appending; None for the table's running maximum.
    """

    def __init__(self, table: Table, *, chunk_steps: int | None = None, overlap_steps: int = 0) -> None:
        self._table = table
        self._index = table._live()
        self._block_steps = table.region.layout.block_steps
        self._chunk = table.longest if chunk_steps is None else at_least("chunk_steps", chunk_steps)
        self._overlap = at_least("overlap_steps", overlap_steps, least=0)
        if chunk_steps is None and self._overlap:
            raise SchemaError(f"overlap_steps is {overlap_steps} without chunk_steps; give both.")
        if self._chunk > table.longest or self._overlap >= self._chunk:
            raise SchemaError(
                f"chunk_steps is {self._chunk:,} and overlap_steps {self._overlap:,}; expected "
                f"overlap_steps < chunk_steps <= {table.longest:,}, the longest trajectory that the table holds."
            )
        self._cuts = chunk_steps is not None
        self.priority: float | None = None
        layout = table.region.layout
        self._columns = [
            _StepColumn(name, column, table.region.column(name), layout.columns[name].step_bytes)
            for name, column in table.schema.items()
        ]
        self._pid = os.getpid()
        self._open: list[int] = []  # the slot that is being written, for the finalizer
        self._give_up = weakref.finalize(self, _give_up, self._index, self._open, self._pid)
        self._give_up.atexit = False
        self._ids: list[int] = []  # its blocks
        self._run = np.zeros(2, dtype=np.int64)
        self._held = 0  # steps that it has room for
        self._steps = 0
        self._fresh = 0  # steps of it that no committed chunk has
        self._here = -1  # the block that the columns' views show

    # ---------------------------------------------------------------- appending

    @property
    def num_steps(self) -> int:
        """Steps appended since the last `commit` (with chunks: of the chunk that is being written)."""
        return self._steps

    def append(self, steps: Mapping[str, Any] | None = None, /, **columns: Any) -> tuple[int, ...]:
        """Append one step, or several.

        Args:
            steps, columns: for every column its value: for one step ``[*shape]``, a numpy array or torch tensor of
                exactly the column's dtype, or for a column of shape ``()`` a Python or numpy number; for k steps
                ``[k, *shape]`` in all columns. Given as keywords, or as one mapping.

        Returns:
            Indices of the chunks that were completed by it; () without chunks.

        Raises:
            SchemaError: a value does not fit, or the trajectory would become longer than the table can hold.
            TableFullError, RateLimitError, LockTimeoutError: as `Table.add`.
            In each case nothing was appended, but of several steps with chunks those in the chunks before.
        """
        rows = columns if steps is None else {**steps, **columns}
        if len(rows) != len(self._columns):
            self._table.schema.validate_names(rows, what="the step")
        self._check_process()
        place = self._steps
        if place >= self._held or place // self._block_steps != self._here:
            if self._is_single(rows):
                self._make_room(1)
                self._look_at(self._steps // self._block_steps)
            else:
                return self._append_many(rows)
        inside = self._steps - self._here * self._block_steps
        for column in self._columns:
            try:
                value = rows[column.name]
            except KeyError:
                self._table.schema.validate_names(rows, what="the step")
                raise
            if not column.put(inside, value):
                if not self._is_single(rows):
                    return self._append_many(rows)
                raise column.misfit(value)
        self._steps += 1
        self._fresh += 1
        return self._cut() if self._steps == self._chunk and self._cuts else ()

    def _is_single(self, rows: Mapping[str, Any]) -> bool:
        """Whether this is one step; several steps have one dimension more in every column."""
        for column in self._columns:
            if column.name not in rows:
                self._table.schema.validate_names(rows, what="the step")
            value = rows[column.name]
            if getattr(value, "ndim", 0) != len(column.shape) + 1:
                return True
        return False

    def _append_many(self, rows: Mapping[str, Any]) -> tuple[int, ...]:
        length, addresses, hold = self._table.schema.locate(dict(rows), what="the steps")
        if not self._cuts and self._steps + length > self._chunk:
            raise self._too_long(self._steps + length)
        indices: tuple[int, ...] = ()
        done = 0
        step_bytes = [column.step_bytes for column in self._columns]
        while done < length:
            count = min(length - done, self._chunk - self._steps)
            self._make_room(count)
            places = [address + done * size for address, size in zip(addresses, step_bytes, strict=True)]
            self._copy_in(places, count)
            self._steps += count
            self._fresh += count
            done += count
            if self._steps == self._chunk and self._cuts:
                indices += self._cut()
        del hold
        return indices

    def _copy_in(self, addresses: list[int], count: int) -> None:
        """Copy steps, contiguous in each column, behind those that are there."""
        columns = self._table.column_addresses()
        if native.require():
            ids = np.array(self._ids, dtype=np.int32)
            native.append(
                columns, self._block_steps, ids, self._steps, np.array(addresses, dtype=np.int64), count
            )
            return
        for (base, stride, size), address in zip(columns.tolist(), addresses, strict=True):
            done = 0
            while done < count:
                block, inside = divmod(self._steps + done, self._block_steps)
                take = min(self._block_steps - inside, count - done)
                target = base + self._ids[block] * stride + inside * size
                ctypes.memmove(target, address + done * size, take * size)
                done += take

    # ---------------------------------------------------------------- room

    def _make_room(self, count: int) -> None:
        """Room for `count` more steps."""
        needed = self._steps + count
        if needed > self._chunk:
            raise self._too_long(needed)
        if needed <= self._held:
            return
        evict, wait = self._table.policy
        if not self._open:
            first = min(max(needed, self._block_steps), self._chunk)
            try:
                slots, ids = self._index.begin(np.array([first]), evict=evict)
            except (GearError, TimeoutError):
                if first == needed and not wait:
                    raise
                first = needed
                slots, ids = self._index.begin(np.array([first]), evict=evict, wait=wait)
            self._open.append(int(slots[0]))
            self._ids, self._held = ids.tolist(), first
            return
        free = self._table.free_steps() // _GENEROUS
        most = min(max(2 * self._held, needed), self._held + free, self._chunk)
        held, more = self._index.grow(
            self._open[0], needed, self._run, most=max(most, needed), evict=evict, wait=wait
        )
        self._ids += more.tolist()
        self._held = held

    def _look_at(self, block: int) -> None:
        for column in self._columns:
            column.look_at(self._ids[block], self._block_steps)
        self._here = block

    def _too_long(self, steps: int) -> SchemaError:
        return SchemaError(
            f"The trajectory would have {steps:,} steps; this table holds at most {self._table.longest:,}. Commit "
            "earlier, cut it into chunks with table.writer(chunk_steps=...), or create the table larger."
        )

    # ---------------------------------------------------------------- committing

    def commit(self, priority: float | None = None) -> int:
        """Make what has been appended a trajectory of the table; the next step begins another one.

        Args:
            priority: as for `Table.add`.

        Returns:
            Its index; with chunks that of the last one, which may have been there already.

        Raises:
            SchemaError: nothing has been appended, or the priority does not fit.
            RateLimitError, LockTimeoutError: waited for too long. What was appended is still there: try again, or
                discard it.
        """
        self._check_process()
        if not self._fresh:
            if self._last_chunk is not None:
                index = self._last_chunk
                self.discard()
                return index
            raise SchemaError("Nothing has been appended since the last commit; append at least one step.")
        slot = self._open[0]
        self._index.finish(slot, self._steps, self._checked(priority))
        self._forget()
        return slot

    def _cut(self) -> tuple[int, ...]:
        """Commit a chunk, and begin the next one with the steps that they have in common."""
        slot, evict, wait = self._open[0], *self._table.policy
        priority = self._checked(self.priority)
        stride = self._chunk - self._overlap
        if self._overlap and stride % self._block_steps == 0:
            shared = stride // self._block_steps
            following = self._index.roll(slot, self._steps, shared, priority, evict=evict, wait=wait)
            self._open[0] = following
            self._run[0] = max(0, self._run[0] - shared)
            self._ids = self._ids[shared:]
            self._held -= stride
            self._steps, self._fresh, self._here = self._overlap, 0, -1
        else:
            rows = self._copy_out(stride, self._overlap)
            self._index.finish(slot, self._steps, priority)
            self._forget()
            if self._overlap:
                self._make_room(self._overlap)
                self._copy_in([array.ctypes.data for array in rows], self._overlap)
                self._steps = self._overlap
        self._last_chunk = slot
        return (slot,)

    _last_chunk: int | None = None

    def _copy_out(self, first: int, count: int) -> list[Array]:
        """Steps of the trajectory that is being written, uint8 [count * step_bytes] a column."""
        blocks = np.arange(first, first + count) // self._block_steps
        inside = np.arange(first, first + count) % self._block_steps
        ids = np.array(self._ids, dtype=np.int64)[blocks]
        rows = []
        for column in self._columns:
            size = column.step_bytes
            data = column.data[ids[:, None], inside[:, None] * size + np.arange(size)]
            rows.append(np.ascontiguousarray(data))
        return rows

    def _checked(self, priority: float | None) -> float:
        if priority is None:
            return UNSET
        values = np.asarray(as_array(priority))
        if values.shape != () or values.dtype.kind not in "biuf":
            raise SchemaError(f"priority is {priority!r}; expected a number.")
        narrow, bad = narrowed(values.astype(np.float64).reshape(1))
        if bad >= 0:
            raise SchemaError(
                f"priority is {priority!r}; expected a finite number (as float32) that is not negative."
            )
        return float(narrow[0])

    def discard(self) -> None:
        """Drop what has been appended since the last commit; chunks that were completed stay."""
        self._check_process()
        if self._open:
            self._index.abort(np.array(self._open, dtype=np.int64))
        self._forget()

    def close(self) -> None:
        """As `discard`; idempotent."""
        if os.getpid() == self._pid:
            self.discard()

    def _forget(self) -> None:
        self._open.clear()
        self._ids, self._held, self._steps, self._fresh, self._here = [], 0, 0, 0, -1
        self._run[:] = 0
        self._last_chunk = None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise GearError(
                f"A writer of process {self._pid} was used in process {os.getpid()}; make one with table.writer() "
                "in each process."
            )

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._fresh:
            self.commit(self.priority)
        else:
            self.close()


class _StepColumn:
    """How single steps get into one column: through a view of the current block."""

    def __init__(self, name: str, column: Column, data: Array, step_bytes: int) -> None:
        self.name = name
        self.shape = column.shape
        self.step_bytes = step_bytes
        self.data = data
        self._column = column
        self._dtype = NUMPY_DTYPES.get(column.dtype)
        self._kind = "" if self._dtype is None else self._dtype.kind
        self._view: Array = np.empty(0)

    def look_at(self, block: int, block_steps: int) -> None:
        rows = self.data[block, : block_steps * self.step_bytes]
        dtype = np.dtype(np.int16) if self._dtype is None else self._dtype
        self._view = rows.view(dtype).reshape(block_steps, *self.shape)

    def put(self, place: int, value: Any) -> bool:
        """Write a step's value; False, having written nothing, if it does not fit."""
        if type(value) is np.ndarray:
            if value.dtype == self._dtype and value.shape == self.shape and self._dtype is not None:
                self._view[place] = value
                return True
            return False
        if isinstance(value, torch.Tensor):
            return self._put_tensor(place, value)
        return not self.shape and self._put_number(place, value)

    def _put_tensor(self, place: int, value: torch.Tensor) -> bool:
        if value.dtype is not self._column.dtype or tuple(value.shape) != self.shape:
            return False
        if value.layout is not torch.strided or value.is_meta or value.is_nested:
            return False
        value = value.detach().resolve_neg().cpu()
        self._view[place] = (value.view(torch.int16) if self._dtype is None else value).numpy()
        return True

    def _put_number(self, place: int, value: Any) -> bool:
        if self._dtype is None:
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                return False
            self._view[place] = torch.tensor(value, dtype=self._column.dtype).view(torch.int16).item()
            return True
        kind = self._kind
        if isinstance(value, (bool, np.bool_)):
            fits = kind == "b"
        elif isinstance(value, (int, np.integer)):
            fits = kind == "f" or (kind in "iu" and self._in_range(int(value)))
        else:
            fits = kind == "f" and isinstance(value, (float, np.floating))
        if fits:
            self._view[place] = value
        return fits

    def _in_range(self, value: int) -> bool:
        assert self._dtype is not None
        limits = np.iinfo(self._dtype)
        return int(limits.min) <= value <= int(limits.max)

    def misfit(self, value: Any) -> SchemaError:
        """The error for a value that does not fit."""
        shape = list(self.shape)
        expected = f"{self._column.dtype} and shape {shape} (or [k, ...] of k steps in every column)"
        if isinstance(value, (np.ndarray, torch.Tensor)):
            what = f"has dtype {value.dtype} and shape {list(value.shape)}"
        else:
            what = f"is {value!r}, of type {type(value).__name__}"
        return SchemaError(
            f"Column {self.name!r} of the step {what}; expected an array or a tensor of {expected}"
            f"{', or a number' if not shape else ''}. Nothing was appended."
        )


def _give_up(index: Index, slots: list[int], pid: int) -> None:
    # The writer was dropped without a word: whoever needs room next takes its slot back.
    if slots and os.getpid() == pid:
        with contextlib.suppress(LockTimeoutError):
            index.abort(np.array(slots, dtype=np.int64), wait=False)
