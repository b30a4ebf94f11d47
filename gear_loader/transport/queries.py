"""Queries that a requester has opened: each gathers the rows of a spec into replies."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gear_loader.collection.n_step import mark_returns
from gear_loader.collection.plans import locate_columns, window_columns
from gear_loader.collection.sources import Place, read_packed
from gear_loader.collection.windows import reach_of, steps_of
from gear_loader.errors import LockTimeoutError, StaleIndexError, TransportError
from gear_loader.kernels.plan import MASK, OUT, WIDTH
from gear_loader.native.packed import gather_packed
from gear_loader.native.serving import serve
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.disk_records import MovedRowsError, by_step, rows_of, steps_in
from gear_loader.storage.states import READY
from gear_loader.transport.spec import AnySpec, PackedSpec, Span, ValueSpec, WindowSpec, check_spans
from gear_loader.transport.table_cache import AttachedTable, TableCache
from gear_loader.utils.arrays import Array, data_address

_MOST_ANCHOR = 1 << 40
_MOST_LAYOUTS = 16


class Query(abc.ABC):
    """Gathers the rows of one spec, and holds its table.

    Raises:
        GearError: as `TableCache.open` and `AttachedTable.check_schema`.
    """

    def __init__(self, spec: Any, tables: TableCache) -> None:
        self.spec = spec
        self._tables = tables
        self._attached: AttachedTable | None = self._attach()

    def _attach(self) -> AttachedTable:
        attached = self._tables.open(self.spec.table)
        attached.check_schema(self.spec.schema)
        self._prepare(attached)
        return attached

    @abc.abstractmethod
    def _prepare(self, attached: AttachedTable) -> None:
        """Prepare to read a table."""

    @abc.abstractmethod
    def reply_bytes(self, rows: Array) -> int:
        """Bytes of the reply to a request, int64 [FIELDS, n].

        Raises:
            TransportError: a number out of bounds, where that has to be checked before.
        """

    @abc.abstractmethod
    def read(self, attached: AttachedTable, rows: Array, out: Array, *, at_once: bool) -> None:
        """Fill the data and status of a reply.

        Args:
            rows: int64 [FIELDS, n], contiguous; `reply_bytes` has checked them as far as its size needs it.
            out: uint8 [reply_bytes(rows)], aligned to 128 bytes; fully overwritten.
            at_once: do not wait for the table's lock, or its disk.

        Raises:
            TransportError: a number out of bounds. LockTimeoutError: the lock is held, or rows lie on disk only.
        """

    @property
    def attached(self) -> AttachedTable | None:
        """The attached table if `table` returns it without a wait; else None."""
        found = self._attached
        return found if found is not None and found.is_current else None

    def release(self) -> None:
        """Detach the table if its name was removed or replaced; the next request attaches again."""
        self._attached = self.attached

    def table(self) -> AttachedTable:
        """Return the attached table; attach it if necessary, which may wait for its lock (see `attached`).

        Raises:
            StaleIndexError: the table was removed or replaced. The next call attaches the table of that name.
        """
        attached = self._attached
        if attached is None:
            attached = self._attached = self._attach()
        elif not attached.is_current:
            self._attached = None
            raise StaleIndexError(
                f"Table {self.spec.table!r} has been removed since the first request; slots and generations drawn "
                "before are invalid. Draw again: the next request attaches to the table that has the name then."
            )
        return attached

    @staticmethod
    def _read_live(
        attached: AttachedTable,
        slots: Array,
        out: Array,
        served: Array,
        status: int,
        read: Callable[[Array], None],
    ) -> None:
        """Read the rows that are live, less those that cannot be read from disk, and write the status.

        Args:
            served: bool [n], live rows; those that cannot be read are taken out. status: its offset in `out`.
            read: takes the numbers of the rows, int64 [m]. The bytes of the others are zeros.
        """
        n = len(slots)
        while True:
            which = np.flatnonzero(served)
            if len(which) < n:
                out[:status] = 0
            try:
                read(which)
                break
            except LostRowsError as error:
                attached.engine.remove_lost(error)
                served &= ~np.isin(slots, error.slots)
        np.logical_not(served, out=out[status : status + n].view(np.bool_))


class _Layout(NamedTuple):
    """Layout of a reply with n rows in one buffer.

    Attributes:
        table: the column table of the gather, with addresses of the buffer.
        status: offset of the status.
        gaps: int64 [G, 2], begin and end of unused ranges between and after the pieces.
    """

    table: Array
    status: int
    gaps: Array


class WindowQuery(Query):
    """Gathers the windows of a `WindowSpec`. Rows: slots, anchors and generations, not validated."""

    spec: WindowSpec

    def _prepare(self, attached: AttachedTable) -> None:
        schema, sources = attached.table.schema, list(self.spec.sources.values())
        self._layouts: dict[tuple[int, int], _Layout] = {}
        columns = window_columns(schema, sources, self.spec.windows.values())
        names = list(self.spec.windows)
        for number, each in enumerate(self.spec.returns):
            which = [names.index(name) for name in each.names]
            marked, dtypes = columns[which], [schema[sources[i]].dtype for i in which]
            mark_returns(self.spec.windows[each.reward].length, each.gamma, number, marked, dtypes)
            columns[which] = marked
        self._columns = locate_columns(columns, sources, attached.engine.region)
        self._tier: Any = None
        # Of windows whose records name steps the number, and the window where there is a choice of steps.
        self._named = [
            (i, None if schema[source].trajectory else self.spec.windows[names[i]])
            for i, source in enumerate(sources)
            if source in (schema.ragged if attached.engine.has_tier else schema.videos)
        ]
        if attached.engine.has_tier or attached.engine.device is not None or self._named:
            from gear_loader.collection.tier_rows import TierRows

            reach = reach_of(schema, self.spec.windows)
            if self.spec.returns:  # up to the bootstrap step, which follows the rewards
                reach = reach._replace(
                    last=max(
                        reach.last, *(self.spec.windows[each.reward].length for each in self.spec.returns)
                    )
                )
            self._tier = TierRows(attached.table, reach, self.spec.row_bytes)
        self._masked = [names.index(piece.name) for piece in self.spec.pieces(1) if piece.kind == "mask"]

    def reply_bytes(self, rows: Array) -> int:
        return self.spec.reply_bytes(rows.shape[1])

    def read(self, attached: AttachedTable, rows: Array, out: Array, *, at_once: bool) -> None:
        layout = self._layout(rows.shape[1], out)
        if self._tier is not None:
            self._read_tiers(attached, rows, out, layout, at_once=at_once)
            return
        bad = attached.serve(
            layout.table, rows, _MOST_ANCHOR, out, layout.status, layout.gaps, at_once=at_once
        )
        if bad < 0:
            raise _invalid_anchor(-1 - bad, rows[1, -1 - bad])
        attached.engine.reader().check_gathered(bad)

    def _read_tiers(
        self, attached: AttachedTable, rows: Array, out: Array, layout: _Layout, *, at_once: bool
    ) -> None:
        """`read` of a table of which some trajectories lie on disk only, or of windows whose records name steps."""
        slots, anchors, generations = rows
        if len(wrong := np.flatnonzero((anchors < -_MOST_ANCHOR) | (anchors > _MOST_ANCHOR))):
            raise _invalid_anchor(int(wrong[0]), anchors[wrong[0]])

        def read(which: Array) -> None:
            if at_once and self._tier.outside(slots[which]).any():
                raise LockTimeoutError("Rows lie on disk only, so that this takes a while.")
            while len(which):
                chosen = [part[which] for part in rows]
                lengths = attached.extent[chosen[0], 0]
                given = layout.table, list(self.spec.sources.values()), *chosen, which
                attached.reader(at_once).read_whole(chosen[0], functools.partial(self._tier.gather, *given))
                if not self._named:
                    return
                self._name_steps(rows, which, lengths, out)
                which = which[attached.extent[chosen[0], 0] != lengths]  # grown meanwhile: gathered again

        for begin, end in layout.gaps:  # do not send old contents of the buffer
            out[begin:end] = 0
        with attached.reading(at_once=at_once):
            self._read_live(attached, slots, out, attached.live(slots, generations), layout.status, read)

    def _name_steps(self, rows: Array, which: Array, lengths: Array, out: Array) -> None:
        """Let records of ragged values in a reply name steps.

        Args:
            which: rows of the request, int64 [m]. lengths: int64 [m], of their trajectories when they were gathered.
        """
        n, anchors = rows.shape[1], rows[1, which]
        pieces = self.spec.pieces(n)
        for i, window in self._named:
            piece = pieces[i]
            records = out[piece.offset : piece.offset + n * piece.row_bytes].view(np.int64).reshape(n, -1, 2)
            shown = steps_of(window, anchors, lengths) if window else np.zeros_like(anchors)
            named = by_step(records[which].reshape(-1, 2), shown.reshape(-1))
            records[which] = named.reshape(len(which), -1, 2)

    def _layout(self, n: int, out: Array) -> _Layout:
        """Layout of a reply with n rows in `out`, cached."""
        base = data_address(out)
        layout = self._layouts.get((n, base))
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[n, base] = self._new_layout(n, base)
        return layout

    def _new_layout(self, n: int, base: int) -> _Layout:
        pieces, status, count = self.spec.pieces(n), self.spec.data_bytes(n), len(self._columns)
        table = self._columns.copy()
        table[:, OUT] = [base + piece.offset for piece in pieces[:count]]
        for row, piece in zip(self._masked, pieces[count:], strict=True):
            table[row, MASK] = base + piece.offset
        begins = [piece.offset + n * piece.row_bytes for piece in pieces] + [status + n]
        ends = [piece.offset for piece in pieces[1:]] + [status, self.spec.reply_bytes(n)]
        gaps = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
        return _Layout(table, status, np.array(gaps, dtype=np.int64).reshape(-1, 2))


def _invalid_anchor(row: int, anchor: int) -> TransportError:
    return TransportError(f"anchors[{row}] is {anchor}; expected a step, at most 2**40 from 0.")


class SpanQuery(Query):
    """Gathers the spans of a `PackedSpec`. Rows: slots, first steps, generations and numbers of steps."""

    spec: PackedSpec

    def _prepare(self, attached: AttachedTable) -> None:
        sources = list(self.spec.columns.values())
        columns: Array = np.zeros((len(sources), WIDTH), dtype=np.int64)
        self._columns = locate_columns(columns, sources, attached.engine.region)

    def reply_bytes(self, rows: Array) -> int:
        _, firsts, _, counts = rows
        return self.spec.reply_bytes(len(firsts), check_spans(firsts, counts))

    def read(self, attached: AttachedTable, rows: Array, out: Array, *, at_once: bool) -> None:
        slots, firsts, generations, counts = rows
        n, total = len(slots), int(counts.sum())
        columns = self._columns.copy()
        spans, status = self.spec.spans(n, total), self.spec.data_bytes(n, total)
        base, end = out.ctypes.data, 0
        for row, span in zip(columns, spans, strict=True):
            row[OUT] = base + span.offset
            out[end : span.offset] = 0  # do not send old contents of the buffer
            end = span.offset + (n if span.once else total) * span.step_bytes
        out[end:status], out[status + n :] = 0, 0
        once = np.array([span.once for span in spans])
        tables = np.ascontiguousarray(columns[~once]), np.ascontiguousarray(columns[once])
        starts = np.cumsum(counts) - counts

        def read(which: Array) -> None:
            def gather() -> Array:
                return self._gather(attached, tables, rows, starts, which, at_once=at_once)

            inside = attached.reader(at_once).read_whole(slots[which], gather)
            outside = np.setdiff1d(which, inside)
            if len(outside):
                self._read_disk(attached, rows, starts, outside, spans, out)

        with attached.reading(at_once=at_once):
            served = attached.live(slots, generations)
            served &= firsts + counts <= attached.extent[:, 0].take(slots, mode="clip")
            self._read_live(attached, slots, out, served, status, read)
        for span in spans if attached.engine.has_tier else ():
            if self.spec.columns[span.name] in self.spec.schema.ragged:
                steps = np.repeat(firsts - starts, counts) + np.arange(total)
                steps = np.zeros(n, dtype=np.int64) if span.once else steps
                records = out[span.offset : span.offset + 16 * len(steps)].view(np.int64).reshape(-1, 2)
                records[:] = by_step(records, steps)

    @staticmethod
    def _gather(
        attached: AttachedTable,
        tables: tuple[Array, Array],
        rows: Array,
        starts: Array,
        which: Array,
        *,
        at_once: bool,
    ) -> Array:
        """Copy the rows `which` (int64 [m]) that lie in memory, and return these.

        Args:
            tables: of the columns of steps, and of those per trajectory. rows: as for `read`.
            starts: int64 [n], place of the first step of each row.
        """
        slots, firsts, _, counts = rows
        spans, position = np.stack((firsts, counts)), np.empty(int(counts.sum()), dtype=np.int32)
        index = attached.extent, attached.block_ids, attached.block_steps
        while True:
            inside, places = which, attached.extent[slots[which], 1]
            if attached.engine.has_tier or attached.engine.device is not None:
                inside = which[(places >= 0) & (attached.engine.device is None)]
                if at_once and len(inside) < len(which):
                    raise LockTimeoutError("Rows lie on disk only, so that this takes a while.")
            bad = gather_packed(
                *tables,
                np.ascontiguousarray(slots),
                spans,
                starts.astype(np.int32),
                *index,
                position,
                False,
                inside,
            )
            if not bad or (attached.extent[slots[which], 1] == places).all():
                break  # else some were moved to disk meanwhile, and may be back
        attached.engine.reader().check_gathered(bad)
        if attached.engine.has_tier and attached.engine.device is None:
            attached.engine.tier_reader().count_hits(len(inside))
        return inside

    def _read_disk(
        self, attached: AttachedTable, rows: Array, starts: Array, which: Array, spans: list[Span], out: Array
    ) -> None:
        """Read rows that lie on disk only, `which` (int64 [m]), into the reply.

        Raises:
            LostRowsError: trajectories cannot be read.
        """
        slots, firsts, generations, counts = (part[which] for part in rows)
        places = [
            Place(column, out, span.offset, span.step_bytes, span.once)
            for column, span in zip(self.spec.columns.values(), spans, strict=True)
        ]
        read_packed(
            attached.engine.tier_reader(),
            places,
            slots,
            generations,
            np.stack((firsts, counts)),
            starts[which],
            which,
            drawn=np.ones_like(which),
        )


class ValueQuery(Query):
    """Copies the values of a `ValueSpec`. Rows: slots, first rows, generations, numbers of rows, and records."""

    spec: ValueSpec

    def _prepare(self, attached: AttachedTable) -> None:
        self._values = attached.table.schema.ragged[self.spec.column]

    def reply_bytes(self, rows: Array) -> int:
        return self.spec.reply_bytes(rows.shape[1], check_spans(rows[1], rows[3]))

    def read(self, attached: AttachedTable, rows: Array, out: Array, *, at_once: bool) -> None:
        slots, firsts, generations, counts, _, sizes = rows
        given, reader, values = np.ascontiguousarray(rows[4:].T), attached.engine.payload, self._values
        moves, most = attached.engine.has_tier, np.abs(sizes)
        names = moves or (given[:, 0] < 0).any()  # records name steps
        apart = (firsts[1:] != 0).any() or (firsts + counts != most)[:-1].any()
        wrong = not names and reader.count_invalid(values, given)
        if apart or (firsts + counts > most).any() or wrong:
            raise TransportError(
                "A request for ragged values has a record that names none of them, or parts of values that are neither "
                "its first nor its last; expected records that windows of the table have brought."
            )
        n, row_bytes = len(slots), values.row_bytes
        size, status = int(counts.sum()) * row_bytes, self.spec.data_bytes(n, int(counts.sum()))
        ends = np.cumsum(counts)
        begins = ends - counts
        out[size:status], out[status + n :] = 0, 0  # do not send old contents of the buffer

        def copy(which: Array) -> None:
            records = given
            if names:
                records = given.copy()
                records[which] = reader.records(values, slots[which], steps_in(given[which]))
                if (rows_of(records[which]) != sizes[which]).any():
                    raise TransportError(
                        "A record of a request for ragged values names a step that has none of so many rows."
                    )
            gaps = np.flatnonzero(which[1:] - which[:-1] != 1) if len(which) < n else which[:0]
            runs = which[[0, *(gaps + 1)]].tolist(), which[[*gaps, -1]].tolist()
            for first, last in zip(*runs, strict=True):
                begin, end = int(begins[first]), int(ends[last])
                part = int(firsts[first]), end - begin, out[begin * row_bytes : end * row_bytes]
                if reader.copy(values, records[first : last + 1], *part):
                    raise TransportError("A record of a request for ragged values names none of the table.")

        def read(which: Array) -> None:
            if moves and at_once and (attached.extent[slots[which], 1] < 0).any():
                raise LockTimeoutError("Rows lie on disk only, so that this takes a while.")
            while len(which):
                with contextlib.suppress(MovedRowsError):  # after they were looked up
                    return copy(which)

        with attached.reading(at_once=at_once):
            self._read_live(attached, slots, out, attached.live(slots, generations), status, read)


def open_query(spec: AnySpec, tables: TableCache) -> Query:
    """The query of a spec; may wait for the table's lock. Raises as `Query`."""
    if isinstance(spec, ValueSpec):
        return ValueQuery(spec, tables)
    return (SpanQuery if isinstance(spec, PackedSpec) else WindowQuery)(spec, tables)


def warm_up() -> None:
    """Load the compiled loops, which may take seconds the first time on a machine."""
    columns, none = np.zeros((1, WIDTH), dtype=np.int64), np.empty(0, dtype=np.int64)
    places, extent = np.empty(0, dtype=np.int32), np.zeros((1, 3), dtype=np.int64)
    state, generation, ids = (np.zeros(1, dtype=each) for each in (np.int32, np.int64, np.int32))
    names, gaps = np.empty((3, 0), dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    out = np.zeros(0, dtype=np.uint8)
    serve(columns, names, 0, state, READY, generation, extent, ids, 1, out, 0, gaps)
    gather_packed(columns, columns, none, names[:2], places, extent, ids, 1, places, False, none)
