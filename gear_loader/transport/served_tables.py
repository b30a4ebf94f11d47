"""The tables that a server serves: attached by name, read window by window, written to."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.errors import RegionError, SchemaError, StaleIndexError, TransportError
from gear_loader.kernels import reference
from gear_loader.kernels.plan import (
    BASE,
    BLOCKS,
    LENGTH,
    MASK,
    OFFSET,
    OUT,
    PAD,
    PAD_HEAD,
    PAD_KEEP,
    PAD_TAIL,
    STEP_BYTES,
    STRIDE,
    WIDTH,
    GatherColumn,
    GatherPlan,
)
from gear_loader.native import copying
from gear_loader.storage.counters import DIRTY
from gear_loader.storage.ids import check_ids
from gear_loader.storage.index import Index, Ticket
from gear_loader.storage.operations import READY, UNSET
from gear_loader.storage.region import Region
from gear_loader.storage.schema import NUMPY_DTYPES, Schema
from gear_loader.storage.shared_memory import Key, region_path
from gear_loader.storage.table import Table
from gear_loader.transport.spec import Piece, WindowSpec
from gear_loader.transport.wire import Store
from gear_loader.utils.arrays import Array, narrowed

__all__ = ["AttachedTable", "OpenQuery", "TableCache"]


_PADS = {"keep": PAD_KEEP, "head": PAD_HEAD, "tail": PAD_TAIL}
_MOST_ANCHOR = 1 << 40
_MOST_LAYOUTS = 16
_LOCK_TIMEOUT = 10.0  # seconds; a change takes far less than a millisecond


class _Reader(Index):
    """An index that is only read, and waits so many seconds for its lock."""

    def __init__(self, region: Region, timeout: float) -> None:
        super().__init__(region)
        self._lock = copy.copy(self._lock)  # the same lock, with another deadline
        self._lock.timeout = timeout


class AttachedTable:
    """An attached table. It stays mapped until the last reference to it has gone.

    Attributes:
        table: what is written to.
        is_dirty: whether the next change repairs the index first, which may take a while.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self._path = region_path(name)
        self.table, self._key = _attach(name, self._path, timeout)
        region = self.table.region
        self._patient, self._hasty = _Reader(region, _LOCK_TIMEOUT), _Reader(region, 0.0)
        self.block_steps = region.layout.block_steps
        self.extent, self.block_ids = self.table.index_arrays()
        self._state, self._generation, _ = self.table.slot_states()

    @property
    def schema(self) -> Schema:
        return self.table.schema

    @property
    def is_dirty(self) -> bool:
        return bool(self._patient.counters[DIRTY])

    @property
    def is_current(self) -> bool:
        """Whether the table still has its name."""
        return _key(self._path) == self._key

    @contextlib.contextmanager
    def reading(self, *, at_once: bool) -> Iterator[None]:
        """Nothing that is live now, or will be while this lasts, is overwritten meanwhile.

        Args:
            at_once: do not wait for the lock.

        Raises:
            LockTimeoutError: it could not be had.
        """
        index = self._hasty if at_once else self._patient
        ticket = Ticket()
        try:
            index.begin_read(ticket)
            yield
        finally:
            ticket.end()

    def live(self, slots: Array, generations: Array) -> Array:
        """Where there is a live trajectory of that generation at that slot; bool [n]. The caller is `reading`."""
        served: Array = slots.view(np.uint64) < len(self._state)
        # In this order: what is READY while somebody reads keeps its place and its generation until he has finished.
        served &= self._state.take(slots, mode="clip") == READY
        served &= self._generation.take(slots, mode="clip") == generations
        return served

    def check_schema(self, schema: Schema) -> None:
        """Check that the requester takes the table for what it is.

        Raises:
            HandshakeError: it does not; the message has both schemas.
        """
        if schema.to_json() != self.schema.to_json():
            raise SchemaError(
                f"Table {self.name!r} has the columns {_columns(self.schema)}; the requester expects "
                f"{_columns(schema)}. Create the tables of all nodes with the same schema."
            )

    def store(self, request: Store, data: Array) -> Array:
        """Add trajectories, all or none.

        Args:
            data: uint8, the bulk part of STORE.

        Returns:
            Their slots, int64 [n].

        Raises:
            As `Table.extend_as`. Nothing was changed.
        """
        self.check_schema(request.schema)
        priorities = _check_priorities(request.priorities)
        trajectories: list[dict[str, Any]] = [{} for _ in request.lengths]
        ends = np.cumsum(request.lengths).tolist()
        for (name, column), (at, size) in zip(self.schema.items(), request.columns, strict=True):
            part = data[at : at + size]
            values: Any
            if column.dtype in NUMPY_DTYPES:
                values = part.view(NUMPY_DTYPES[column.dtype]).reshape(-1, *column.shape)
            else:
                values = torch.from_numpy(part).view(column.dtype).reshape(-1, *column.shape)
            begin = 0
            for trajectory, end in zip(trajectories, ends, strict=True):
                trajectory[name] = values[begin:end]
                begin = end
        ids = request.ids
        unset = priorities == UNSET
        # `UNSET` beside numbers is what no user can give.
        if unset.any() and not unset.all():
            return self._store_mixed(trajectories, priorities, ids)
        priority = None if unset.all() else priorities
        if (ids >= 0).any():
            return self.table.extend_as(trajectories, priority=priority, ids=ids)
        return self.table.extend(trajectories, priority=priority)

    def _store_mixed(self, trajectories: list[dict[str, Any]], priorities: Array, ids: Array) -> Array:
        given = check_ids(ids, len(trajectories))
        return self.table.store(trajectories, priorities, given if (given >= 0).any() else None)


def _attach(name: str, path: str, timeout: float) -> tuple[Table, Key]:
    """The table, and which file it is."""
    while True:
        before = _key(path)
        table = Table.attach(name, timeout=timeout)
        if before is not None and _key(path) == before:
            return table, before
        table.close()


def _key(path: str) -> Key | None:
    try:
        info = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _columns(schema: Schema) -> str:
    listed = [f"{name} {column.dtype_name}{list(column.shape)}" for name, column in schema.items()]
    more = [f"and {len(listed) - 40} more"] if len(listed) > 40 else []
    return "{" + ", ".join(listed[:40] + more) + "}"


def _check_priorities(priorities: Array) -> Array:
    values = np.ascontiguousarray(priorities, dtype=np.float32)
    given = values[values != UNSET]
    _, bad = narrowed(given.astype(np.float64))
    if bad >= 0:
        raise SchemaError(
            f"priority {given[bad]} was received; expected finite numbers that are not negative. Nothing was changed."
        )
    return values


class TableCache:
    """The tables that may be served, attached when first asked for. Threads may use it at the same time.

    Args:
        tables: their names.
        timeout: seconds that storing waits for room.
    """

    def __init__(self, tables: Sequence[str], timeout: float) -> None:
        self._names = frozenset(tables)
        self._timeout = timeout
        self._held: dict[str, AttachedTable] = {}
        self._attempts: dict[str, Future[AttachedTable]] = {}  # to attach, under way
        self._guard = threading.Lock()  # around both; nothing waits for a table while it has it
        self._closed = False
        for name in tables:
            region_path(name)

    def check(self, name: str) -> None:
        """Raises RegionError if this table is none that is served."""
        if name not in self._names:
            raise RegionError(
                f"Table {name!r} is not served here; this server has {', '.join(sorted(self._names)) or 'none'}. "
                "Start it with that name too."
            )

    def get(self, name: str) -> AttachedTable:
        """The table, attached. May wait for its lock; threads that ask for it meanwhile share that wait.

        Raises:
            RegionError: it is not served, or there is none of that name. LockTimeoutError: its lock could not be had.
        """
        self.check(name)
        with self._guard:
            held = self._held.get(name)
            if held is not None and held.is_current:
                return held
            self._held.pop(name, None)
            held = None
            attempt = self._attempts.get(name)
            others = attempt is not None
            if attempt is None:
                attempt = self._attempts[name] = Future()
        return attempt.result() if others else self._attach(name, attempt)

    def _attach(self, name: str, attempt: Future[AttachedTable]) -> AttachedTable:
        try:
            held = AttachedTable(name, self._timeout)
        except BaseException as error:
            with self._guard:
                del self._attempts[name]
            attempt.set_exception(error)
            raise
        with self._guard:
            del self._attempts[name]
            if not self._closed:
                self._held[name] = held
        attempt.set_result(held)
        return held

    def sweep(self) -> list[str]:
        """Let go of tables that have lost their names, or their memory would not be freed; those names."""
        with self._guard:
            gone = [name for name, held in self._held.items() if not held.is_current]
            for name in gone:
                del self._held[name]
        return gone

    def close(self) -> None:
        """Let go of all."""
        with self._guard:
            self._closed = True
            self._held.clear()


class _Layout(NamedTuple):
    """How the reply with n rows lies in a buffer. gaps: begin and end of what is in between, and behind."""

    table: Array
    pieces: tuple[Piece, ...]
    status: int
    gaps: list[tuple[int, int]]


class OpenQuery:
    """A spec that a requester has opened: what is needed to gather its windows.

    Raises:
        As `TableCache.get` and `AttachedTable.check_schema`.
    """

    def __init__(self, spec: WindowSpec, shelf: TableCache) -> None:
        self.spec = spec
        self._shelf = shelf
        self._layouts: dict[tuple[int, int], _Layout] = {}
        self._held: AttachedTable | None = self._attach()

    def _attach(self) -> AttachedTable:
        held = self._shelf.get(self.spec.table)
        held.check_schema(self.spec.schema)
        region = held.table.region
        layout = region.layout
        base = held.table.column_addresses()
        order = {name: i for i, name in enumerate(layout.schema)}
        self._layouts = {}
        self._table = np.zeros((len(self.spec.windows), WIDTH), dtype=np.int64)
        for row, (name, window) in zip(self._table, self.spec.windows.items(), strict=True):
            row[[BASE, STRIDE, STEP_BYTES]] = base[order[name]]
            row[BLOCKS] = layout.num_blocks
            row[LENGTH], row[OFFSET], row[PAD] = window.length, window.offset, _PADS[window.pad]
        names = list(self.spec.windows)
        self._masked = [names.index(piece.name) for piece in self.spec.pieces(1) if piece.kind == "mask"]
        return held

    @property
    def is_attached(self) -> bool:
        """Whether `held` need not attach the table, for which it may wait."""
        return self._held is not None

    def release(self) -> None:
        """Let go of the table, if it has lost its name: asked again, it is attached anew."""
        if self._held is not None and not self._held.is_current:
            self._held = None

    def held(self) -> AttachedTable:
        """The table. Waits for its lock if it has to be attached; see `is_attached`.

        Raises:
            TransportError: it has been removed, or another one has its name by now. The next call attaches that.
        """
        held = self._held
        if held is None:
            held = self._held = self._attach()
        elif not held.is_current:
            self._held = None
            raise StaleIndexError(
                f"Table {self.spec.table!r} has been removed since it was first asked for; slots and generations that "
                "were drawn before mean nothing any more. Draw anew: the next request attaches to the table that has "
                "the name by then."
            )
        return held

    def read(
        self,
        held: AttachedTable,
        slots: Array,
        anchors: Array,
        generations: Array,
        out: Array,
        *,
        at_once: bool,
    ) -> None:
        """Fill the data and status of a reply.

        Args:
            held: what `held` has just returned.
            slots, anchors, generations: int64 [n], contiguous, whatever is in them.
            out: uint8 [reply_bytes(n)], aligned to 128 bytes; all of it is written.
            at_once: do not wait for the table's lock.

        Raises:
            TransportError: an anchor that is out of all bounds. LockTimeoutError: the lock could not be had.
        """
        n = len(slots)
        if n and (anchors.min() < -_MOST_ANCHOR or anchors.max() > _MOST_ANCHOR):
            bad = int(np.flatnonzero((anchors < -_MOST_ANCHOR) | (anchors > _MOST_ANCHOR))[0])
            raise TransportError(f"anchors[{bad}] is {anchors[bad]}; expected a step, at most 2**40 from 0.")
        layout = self._layout(n, out)
        with held.reading(at_once=at_once):
            served = held.live(slots, generations)
            rows = None if served.all() else np.flatnonzero(served)
            if rows is not None:
                out[:] = 0
                slots, anchors = slots[rows], anchors[rows]
            if len(slots):
                self._gather(held, slots, anchors, rows, layout, out)
        status = layout.status
        np.logical_not(served, out=out[status : status + n].view(np.bool_))
        if rows is None:  # what was there before is nobody's business
            for begin, end in layout.gaps:
                out[begin:end] = 0

    def _layout(self, n: int, out: Array) -> _Layout:
        """How a reply lies; that of the same buffer and size is kept."""
        base = out.ctypes.data
        layout = self._layouts.get((n, base))
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[n, base] = self._new_layout(n, base)
        return layout

    def _new_layout(self, n: int, base: int) -> _Layout:
        pieces, status, count = self.spec.pieces(n), self.spec.data_bytes(n), len(self._table)
        table = self._table.copy()
        table[:, OUT] = [base + piece.offset for piece in pieces[:count]]
        for row, piece in zip(self._masked, pieces[count:], strict=True):
            table[row, MASK] = base + piece.offset
        begins = [piece.offset + n * piece.row_bytes for piece in pieces] + [status + n]
        ends = [piece.offset for piece in pieces[1:]] + [status, self.spec.reply_bytes(n)]
        gaps = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
        return _Layout(table, pieces, status, gaps)

    def _gather(
        self,
        held: AttachedTable,
        slots: Array,
        anchors: Array,
        rows: Array | None,
        layout: _Layout,
        out: Array,
    ) -> None:
        if not copying.require():
            self._gather_in_torch(held, slots, anchors, rows, layout.pieces, out)
            return
        bad = copying.gather(
            layout.table,
            slots,
            anchors,
            held.extent,
            held.block_ids,
            held.block_steps,
            0,
            len(slots),
            rows,
        )
        held.table.check_gathered(bad)

    def _gather_in_torch(
        self,
        held: AttachedTable,
        slots: Array,
        anchors: Array,
        rows: Array | None,
        pieces: Sequence[Piece],
        out: Array,
    ) -> None:
        n, count = len(slots), len(self._table)
        parts = [torch.empty(n, piece.row_bytes, dtype=torch.uint8, device="cpu") for piece in pieces]
        masks = dict(zip(self._masked, parts[count:], strict=True))
        columns = [
            GatherColumn(
                source=torch.from_numpy(held.table.region.column(name)),
                out=part.view(n, window.length, -1),
                offset=window.offset,
                pad=_PADS[window.pad],
                mask=masks[i].view(torch.bool) if i in masks else None,
            )
            for i, ((name, window), part) in enumerate(zip(self.spec.windows.items(), parts, strict=False))
        ]
        reference.gather(
            GatherPlan(columns, held.block_steps),
            torch.from_numpy(slots),
            torch.from_numpy(anchors),
            torch.from_numpy(held.extent),
            torch.from_numpy(held.block_ids),
        )
        chosen = np.arange(n) if rows is None else rows
        for piece, part in zip(pieces, parts, strict=True):
            stride = piece.row_bytes
            total = (len(out) - piece.offset) // stride * stride
            out[piece.offset : piece.offset + total].reshape(-1, stride)[chosen] = part.numpy()


def warm_up() -> None:
    """Load the compiled loop, which may take seconds the first time on a machine."""
    if copying.require():
        none = np.empty(0, dtype=np.int64)
        table, extent = np.zeros((1, WIDTH), dtype=np.int64), np.zeros((1, 2), dtype=np.int64)
        for rows in (None, none):
            copying.gather(table, none, none, extent, np.zeros(1, dtype=np.int32), 1, 0, 0, rows)
