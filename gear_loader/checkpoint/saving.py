"""Saving a table into a checkpoint, incrementally and in rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gear_loader.checkpoint import manifest as manifest_module
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.files import Pipeline, Rows, check_size, write_small
from gear_loader.checkpoint.housekeeping import (
    check_owned,
    convert_errors,
    is_unfinished_save,
    locked,
    refuse_links,
    sweep,
)
from gear_loader.checkpoint.identity import identity
from gear_loader.checkpoint.index import Entries, read_entries
from gear_loader.checkpoint.json_file import FileRecord, check_cost
from gear_loader.checkpoint.manifest import Manifest, Segment, read_manifest
from gear_loader.checkpoint.names import (
    MANIFEST_NAME,
    PART,
    SEGMENTS_NAME,
    column_file,
    index_file,
    npy_header,
    segment_folder,
)
from gear_loader.errors import CheckpointError
from gear_loader.native.copying import copy_pieces
from gear_loader.storage.counters import FIRST_SEQUENCE, NEXT_SEQUENCE, NUM_SAMPLED
from gear_loader.storage.ids import origin_of
from gear_loader.storage.index import Index
from gear_loader.storage.operations import READY
from gear_loader.storage.readers import Ticket
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.notices import notice
from gear_loader.utils.progress import progress_bar

__all__ = ["save", "save_into"]

# A read ticket keeps blocks of evicted trajectories from being reused, so a writer of a full table waits for it. A save
# therefore works in rounds. Each round copies the unsaved trajectories piece by piece, with one ticket for each piece,
# and skips trajectories evicted in the meantime. The next round saves the trajectories added since. When few bytes are
# left, the last round holds one ticket throughout: the checkpoint shows the table at the moment this round begins.
HOLD_BYTES = 128 << 20
"""Most bytes of the last round, which is written under one ticket."""
MAX_ROUNDS = 6
"""Most rounds. With writers as fast as the disk the rest never becomes small; then the last round is larger."""

MAX_SEGMENTS = 16
"""With more segments, the trajectories of the smallest are rewritten as one, so that half as many stay."""


def save(table: Table, path: str | os.PathLike[str], *, progress: bool = False) -> None:
    """Bring the checkpoint in directory `path` up to date with a table. See `Table.save`."""
    table.check_open()
    where = os.path.abspath(os.fspath(path))
    with convert_errors(where), Directory.make(where) as directory:
        save_into(table, directory, progress=progress)


def save_into(table: Table, directory: Directory, *, progress: bool = False) -> None:
    """Bring the checkpoint in an open directory up to date with a table.

    Raises:
        CheckpointError, OSError: the checkpoint could not be written. The previous one is unchanged.
    """
    index = table.index
    check_owned(directory, MANIFEST_NAME, is_unfinished_save, what="checkpoint")
    refuse_links(directory)
    with locked(directory):
        old = _previous(directory)
        _Save(table, index, directory, old).run(progress)


def _previous(directory: Directory) -> Manifest | None:
    """Read the manifest of the previous save, if any, and remove files that it does not name."""
    manifest = read_manifest(directory) if directory.has(MANIFEST_NAME) else None
    directory.sync()  # its writer may have died before this; it must be durable before older files are removed
    sweep(directory, manifest)
    return manifest


# Saving ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """Live trajectories of a table at one moment, oldest first (arrays [n]), and the table's counters."""

    slots: Array
    sequences: Array
    lengths: Array
    priorities: Array
    times_sampled: Array
    ages: Array
    idents: Array
    finals: Array
    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int

    @property
    def rows(self) -> Array:
        """Steps and final steps of each trajectory, int64 [n]."""
        rows: Array = self.lengths + self.finals
        return rows

    def take(self, chosen: Array) -> _Snapshot:
        """Trajectories selected by a boolean mask or by integer positions."""
        arrays = ("slots", "sequences", "lengths", "priorities", "times_sampled", "ages", "idents", "finals")
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in arrays})


def _take_snapshot(index: Index, ticket: Ticket) -> _Snapshot:
    """Begin `ticket` and take a snapshot, both at the same moment."""

    arrays = index.arrays

    def take() -> _Snapshot:
        now = time.monotonic_ns()  # before expiry, so that no remaining trajectory exceeds the maximum age
        index.admission.expire()
        slots = np.flatnonzero(arrays.state == READY)
        next_sequence = int(arrays.counters[NEXT_SEQUENCE])
        snapshot = _Snapshot(
            slots=slots,
            sequences=arrays.sequence[slots],
            lengths=arrays.extent[slots, 0],
            priorities=arrays.priority[slots],
            times_sampled=arrays.sampled[slots].astype(np.int64),
            ages=np.maximum(now - arrays.created[slots], 0),
            idents=arrays.ident[slots],
            finals=arrays.extent[slots, 2],
            origin=origin_of(arrays.view),
            next_sequence=next_sequence,
            num_inserted=next_sequence - int(arrays.counters[FIRST_SEQUENCE]),
            num_sampled=int(arrays.counters[NUM_SAMPLED]),
        )
        ticket.begin(index.readers)
        return snapshot

    snapshot = index.recovery.locked(take)
    return snapshot.take(np.argsort(snapshot.sequences, kind="stable"))


class _Save:
    """One save.

    Attributes:
        stored: entries of trajectories on disk, of the previous save and of this one, by ascending sequence number.
        segments: segments that the new manifest may name, by number.
        name: random name of the table.
    """

    def __init__(self, table: Table, index: Index, directory: Directory, old: Manifest | None) -> None:
        self.index, self.directory, self.old = index, directory, old
        self.schema, self.layout = table.schema, table.region.layout
        self.rules = table.rules
        # These references keep the memory mapped if the table is closed during the save.
        self.columns = {name: table.region.column(name) for name in table.schema}
        self.name, parent = identity(table, index)
        self.stored = _no_entries()
        self.segments: dict[int, Segment] = {}
        self.next_segment = old.next_segment if old else 1
        if old is None:
            return
        if old.schema.to_json() != table.schema.to_json():
            raise CheckpointError(
                f"{directory.at(MANIFEST_NAME)} is of a table with the schema {old.schema}; this table has "
                f"{table.schema}. Nothing was written. Choose another directory, or remove that checkpoint."
            )
        if old.table != self.name and old.save != parent:
            notice(
                f"checkpoint {directory.path} of {old.table}",
                f"The checkpoint in {directory.path} is of another table; saving replaces it.",
            )
            return
        self._reuse(old)

    def _reuse(self, old: Manifest) -> None:
        """Reuse the segments of the previous save, except those with files that are missing or have another size."""
        try:
            self.stored = read_entries(self.directory, old)
        except CheckpointError as error:
            notice(f"checkpoint {error}", f"{error} The whole table is saved again.")
            return
        for segment in old.segments:
            try:
                with self.directory.child_to_load(segment_folder(segment.number)) as folder:
                    for name, record in segment.files.items():
                        check_size(folder, column_file(name), record.bytes)
            except CheckpointError as error:
                notice(f"checkpoint {error}", f"{error} Its trajectories are saved again.")
            else:
                self.segments[segment.number] = segment
        self._drop_unused_entries()

    def _drop_unused_entries(self) -> None:
        """Drop the entries whose segment is not reused; their trajectories are written again."""
        self.stored = self.stored.take(np.isin(self.stored.segment, list(self.segments)))

    def run(self, progress: bool) -> None:
        """Save the table. After a failure the previous checkpoint is unchanged."""
        committing = False
        ticket = Ticket()
        with contextlib.ExitStack() as stack:
            try:
                snapshot = _take_snapshot(self.index, ticket)
                self._choose_segments(snapshot)
                unsaved = snapshot.take(~self._is_stored(snapshot))
                advance, extend = stack.enter_context(
                    progress_bar("Saving", self._bytes(unsaved), enabled=progress)
                )
                largest = max(column.step_bytes for column in self.schema.values())
                pipeline = stack.enter_context(Pipeline(largest, advance))
                segments = stack.enter_context(self.directory.open_or_make(SEGMENTS_NAME))
                for turn in range(MAX_ROUNDS):
                    if self._bytes(unsaved) <= HOLD_BYTES or turn == MAX_ROUNDS - 1:
                        self._write_segment(segments, pipeline, unsaved, under_ticket=True)
                        break
                    ticket.end()
                    self._write_segment(segments, pipeline, unsaved, under_ticket=False)
                    ticket = Ticket()
                    snapshot = _take_snapshot(self.index, ticket)
                    unsaved = snapshot.take(~self._is_stored(snapshot))
                    extend(self._bytes(unsaved))
                ticket.end()
                data = self._finish(snapshot)
                committing = True
                self._commit(segments, data)
            except BaseException:
                ticket.end()
                if not committing:  # otherwise either manifest may be in place
                    with contextlib.suppress(OSError):
                        sweep(self.directory, self.old)
                raise
        with contextlib.suppress(CheckpointError, OSError):
            sweep(self.directory, read_manifest(self.directory))

    def _bytes(self, snapshot: _Snapshot) -> int:
        once = len(snapshot.slots) * self.schema.trajectory_bytes
        return int(snapshot.rows.sum()) * self.schema.step_bytes + once

    # ---------------------------------------------------------------- stored trajectories

    def _positions(self, snapshot: _Snapshot) -> Array:
        """Position of each trajectory in `stored`, or -1; int64 [n]."""
        place = np.searchsorted(self.stored.sequence, snapshot.sequences)
        place[place == len(self.stored.sequence)] = 0
        if not len(self.stored.sequence):
            return np.full(len(snapshot.sequences), -1)
        found = self.stored.sequence[place] == snapshot.sequences
        found &= (self.stored.length[place] == snapshot.lengths) & (
            self.stored.final[place] == snapshot.finals
        )
        return np.where(found, place, -1)

    def _is_stored(self, snapshot: _Snapshot) -> Array:
        found: Array = self._positions(snapshot) >= 0
        return found

    def _live_steps(self, snapshot: _Snapshot) -> dict[int, int]:
        """Steps of live trajectories by segment number."""
        places = self._positions(snapshot)
        places = places[places >= 0]
        live = dict.fromkeys(self.segments, 0)
        numbers, inverse = np.unique(self.stored.segment[places], return_inverse=True)
        steps = np.zeros(len(numbers), dtype=np.int64)
        np.add.at(steps, inverse, self.stored.rows[places])
        live.update(zip(numbers.tolist(), steps.tolist(), strict=True))
        return live

    def _choose_segments(self, snapshot: _Snapshot) -> None:
        """Choose the segments to reuse: at least half of the steps are live, and fewer than `MAX_SEGMENTS` segments."""
        live = self._live_steps(snapshot)
        self.segments = {
            number: segment for number, segment in self.segments.items() if 2 * live[number] >= segment.steps
        }
        if len(self.segments) >= MAX_SEGMENTS:
            by_size = sorted(self.segments, key=lambda number: self.segments[number].steps, reverse=True)
            self.segments = {number: self.segments[number] for number in sorted(by_size[: MAX_SEGMENTS // 2])}
        self._drop_unused_entries()

    # ---------------------------------------------------------------- segments

    def _write_segment(
        self, segments: Directory, pipeline: Pipeline, unsaved: _Snapshot, *, under_ticket: bool
    ) -> None:
        """Write trajectories as a new segment.

        Args:
            segments: directory of the segments.
            unsaved: the trajectories.
            under_ticket: whether the caller holds the snapshot's ticket. Otherwise trajectories may be evicted before
                they are copied; zeros are written in their place, and the index never refers to them.
        """
        if not len(unsaved.slots):
            return
        number = self._free_number(segments)
        name = f"{number:06d}"
        ends = np.cumsum(unsaved.rows)
        first, steps, count = ends - unsaved.rows, int(ends[-1]), len(unsaved.slots)
        rows = Rows(first, unsaved.rows, self.layout.block_steps)
        place = np.arange(count)
        once = Rows(place, np.ones(count, dtype=np.int64), self.layout.block_steps)
        number_of = count if self.schema.per_trajectory else 0
        segments.mkdir(name + PART)
        files = {}
        with segments.child(name + PART) as folder:
            for key, column in self.schema.items():
                total = count if column.trajectory else steps
                files[key] = pipeline.write(
                    folder,
                    column_file(key),
                    npy_header(column.dtype_name, total, column.shape),
                    total,
                    column.step_bytes,
                    self._filler(key, unsaved, once if column.trajectory else rows, under_ticket),
                    chunk_bytes=manifest_module.CHUNK_BYTES,
                )
            folder.sync()
        segments.rename(name + PART, name)
        self.next_segment = number + 1
        self.segments[number] = Segment(number, steps, files, manifest_module.CHUNK_BYTES, number_of)
        written = Entries(
            sequence=unsaved.sequences,
            length=unsaved.lengths,
            priority=unsaved.priorities,
            times_sampled=unsaved.times_sampled,
            age=unsaved.ages,
            ident=unsaved.idents,
            segment=np.full(count, number, dtype=np.int64),
            first=first,
            final=unsaved.finals,
            place=place,
        )
        everything = zip(self.stored.arrays().values(), written.arrays().values(), strict=True)
        joined = Entries(*(np.concatenate(pair) for pair in everything))
        self.stored = joined.take(np.argsort(joined.sequence, kind="stable"))

    def _free_number(self, segments: Directory) -> int:
        """Number of the next segment. Numbers of leftover segments are skipped."""
        number = self.next_segment
        while segments.has(f"{number:06d}") or segments.has(f"{number:06d}{PART}"):
            number += 1
        return number

    def _filler(
        self, name: str, unsaved: _Snapshot, rows: Rows, under_ticket: bool
    ) -> Callable[[Array, int, int], None]:
        """Return a function that copies rows of the segment out of the blocks of one column."""
        reader, data = self.index.reader, self.columns[name]
        arrays = reader.arrays
        column = self.layout.columns[name]
        size = column.step_bytes

        def fill(buffer: Array, begin: int, end: int) -> None:
            which, block, inside, steps, row = rows.pieces(begin, end)
            ticket = Ticket()
            try:
                if not under_ticket:
                    reader.begin_read(ticket)
                    here = np.arange(which[0], which[-1] + 1)
                    slots = unsaved.slots[here]
                    stale = arrays.state[slots] != READY
                    stale |= arrays.sequence[slots] != unsaved.sequences[here]
                    if stale.any():
                        buffer[:] = 0
                        kept = ~stale[which - which[0]]
                        which, block, inside, steps, row = (
                            array[kept] for array in (which, block, inside, steps, row)
                        )
                place = arrays.extent[unsaved.slots[which], 1] + block
                ids = arrays.ids_at(place).astype(np.int64)
                sources = data.ctypes.data + ids * column.block_stride + inside * column.step_stride
                targets = buffer.ctypes.data + row * size
                copy_pieces(targets, sources, steps, size, column.step_stride, size)
                ticket.end()
            finally:
                ticket.end()  # idempotent; a signal handler may raise between `begin_read` and the call above

        return fill

    # ---------------------------------------------------------------- index and manifest

    def _finish(self, snapshot: _Snapshot) -> bytes:
        """Write the index and return the manifest, serialized."""
        import safetensors.numpy

        entries = self.stored.take(self._positions(snapshot))
        # The values that change after a trajectory was committed.
        entries = dataclasses.replace(
            entries,
            priority=snapshot.priorities,
            times_sampled=snapshot.times_sampled,
            age=snapshot.ages,
            ident=snapshot.idents,
        )
        used = np.unique(entries.segment).tolist()
        saves = self.old.saves + 1 if self.old else 1
        name = index_file(saves)
        arrays = {key: np.ascontiguousarray(array) for key, array in entries.arrays().items()}
        if not arrays["final"].any():
            del arrays["final"]
        if not self.schema.per_trajectory:
            del arrays["place"]
        record: FileRecord = write_small(self.directory, name + PART, safetensors.numpy.save(arrays))
        self.directory.rename(name + PART, name)
        manifest = Manifest(
            schema=self.schema,
            save=f"{1 + secrets.randbelow(2**63 - 1):016x}",
            table=self.name,
            saves=saves,
            next_segment=self.next_segment,
            block_steps=self.layout.block_steps,
            max_steps=self.layout.max_steps,
            max_trajectories=self.layout.max_trajectories,
            num_blocks=self.layout.num_blocks,
            rules=self.rules,
            origin=snapshot.origin,
            next_sequence=snapshot.next_sequence,
            num_inserted=snapshot.num_inserted,
            num_sampled=snapshot.num_sampled,
            num_trajectories=len(entries.sequence),
            num_steps=int(entries.length.sum()),
            index=record,
            segments=tuple(self.segments[number] for number in used),
        )
        return manifest.to_bytes()

    def _commit(self, segments: Directory, data: bytes) -> None:
        """Sync all files, then put the manifest in place."""
        check_cost(self.directory, MANIFEST_NAME, data)  # a later read must accept its size
        write_small(self.directory, MANIFEST_NAME + PART, data)
        segments.sync()
        self.directory.sync()
        self.directory.replace(MANIFEST_NAME + PART, MANIFEST_NAME)
        self.directory.sync()
        self.directory.sync_parent()  # the directory itself may be new


def _no_entries() -> Entries:
    empty: Any = np.empty(0, dtype=np.int64)
    return Entries(empty, empty, np.empty(0, dtype=np.float32), *(empty,) * 7)
