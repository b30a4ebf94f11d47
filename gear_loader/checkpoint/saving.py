"""Saving a table into a checkpoint, incrementally: in rounds, or without ever holding up a writer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator

import numpy as np

from gear_loader.checkpoint import manifest as manifest_module
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.files import Arena, Pipeline, check_size, write_small
from gear_loader.checkpoint.housekeeping import (
    check_owned,
    convert_errors,
    is_unfinished_save,
    keep_previous,
    refuse_links,
    sweep,
    under_lock,
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
from gear_loader.checkpoint.places import column_places
from gear_loader.checkpoint.rows import TrajectoryRows
from gear_loader.checkpoint.snapshot import Snapshot, take_snapshot
from gear_loader.checkpoint.stored import Stored, no_entries
from gear_loader.errors import CheckpointError
from gear_loader.storage.readers import Ticket
from gear_loader.storage.table import Table
from gear_loader.utils.notices import notice
from gear_loader.utils.progress import progress_bar

__all__ = ["DiskFullError", "Save", "save", "save_into"]

# A read ticket keeps blocks of evicted trajectories from being reused, so a writer of a full table waits for it. A save
# therefore works in rounds. Each round copies the unsaved trajectories piece by piece, with one ticket for each piece,
# and skips trajectories evicted in the meantime. The next round saves the trajectories added since. When few bytes are
# left, the last round holds one ticket throughout: the checkpoint shows the table at the moment this round begins.
HOLD_BYTES = 128 << 20
"""Most bytes of the last round, which is written under one ticket."""
MAX_ROUNDS = 6
"""Most rounds. With writers as fast as the disk the rest never becomes small; then the last round is larger."""
TIER_CHUNK_BYTES = 256 << 10
"""Bytes of a column's file with a checksum of their own, in a table with a disk tier: a reader of one trajectory reads
the chunks that hold it and have not been verified before."""
STAGE_BYTES = 64 << 20
"""Bytes of the newest trajectories that a save in the background copies to memory at once. Older new ones are copied
piece by piece, as the disk takes them; they are left out if they have been evicted by then."""


class DiskFullError(CheckpointError):
    """The files of a table would become larger than `Disk.size`.

    Attributes:
        steps: steps that are too many.
    """

    def __init__(self, message: str, steps: int) -> None:
        super().__init__(message)
        self.steps = steps


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
    check_owned(directory, MANIFEST_NAME, is_unfinished_save, what="checkpoint")
    refuse_links(directory)
    under_lock(directory, lambda: Save(table, directory, _previous(directory)).run(progress))


def _previous(directory: Directory) -> Manifest | None:
    """Read the manifest of the previous save, if any, and remove files that it does not name."""
    manifest = read_manifest(directory) if directory.has(MANIFEST_NAME) else None
    directory.sync()  # its writer may have died before this; it must be durable before older files are removed
    sweep(directory, manifest)
    return manifest


# Saving ----------------------------------------------------------------------------------------------


class Save:
    """One save.

    Args:
        table: the table. directory: of the checkpoint, locked by the caller.
        old: manifest of the previous save.
        entries: its trajectories, if the caller knows them; else they are read.

    Attributes:
        manifest, entries, snapshot: of this save, when it is complete; `entries` are those of `snapshot`.
        bytes_written: bytes of all files written so far.
    """

    def __init__(
        self, table: Table, directory: Directory, old: Manifest | None, entries: Entries | None = None
    ) -> None:
        self.index, self.directory, self.old = table.index, directory, old
        self.schema, self.layout = table.schema, table.region.layout
        self.rules = table.rules
        # These references keep the memory mapped if the table is closed during the save.
        self._columns = {name: table.region.column(name) for name in table.schema}
        self._places = {name: column_places(table, name) for name in table.schema}
        self.name, parent = identity(table, table.index)
        self.manifest: Manifest | None = None
        self.entries: Entries | None = None
        self.snapshot: Snapshot | None = None
        self.bytes_written = 0
        self._reader = table.tier_reader() if table.has_tier else None
        self._stored = Stored(no_entries(), {})
        self._next_segment = old.next_segment if old else 1
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
        self._reuse(old, entries)

    def _reuse(self, old: Manifest, entries: Entries | None) -> None:
        """Reuse the segments of the previous save, except those with files that are missing or have another size."""
        if entries is None:
            try:
                entries = read_entries(self.directory, old)
            except CheckpointError as error:
                notice(f"checkpoint {error}", f"{error} The whole table is saved again.")
                return
        segments = {}
        for segment in old.segments:
            try:
                with self.directory.child_to_load(segment_folder(segment.number)) as folder:
                    for name, record in segment.files.items():
                        check_size(folder, column_file(name), record.bytes)
            except CheckpointError as error:
                notice(f"checkpoint {error}", f"{error} Its trajectories are saved again.")
            else:
                segments[segment.number] = segment
        self._stored = Stored(entries, segments)

    def run(self, progress: bool) -> None:
        """Save the table as it is at one moment. After a failure the previous checkpoint is unchanged."""
        ticket = Ticket()  # of a round; what is interrupted drops it, which ends it
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: ticket.end())
            stack.enter_context(self._swept(None))
            snapshot = take_snapshot(self.index, ticket)
            self._stored.keep_dense(snapshot)
            unsaved = snapshot.take(~self._stored.contains(snapshot))
            advance, extend = stack.enter_context(
                progress_bar("Saving", self._bytes(unsaved), enabled=progress)
            )
            pipeline, segments = self._open(stack, advance)
            for turn in range(MAX_ROUNDS):
                if self._bytes(unsaved) <= HOLD_BYTES or turn == MAX_ROUNDS - 1:
                    self._write_segment(segments, pipeline, self._rows(unsaved, under_ticket=True))
                    break
                ticket.end()
                self._write_segment(segments, pipeline, self._rows(unsaved, under_ticket=False))
                ticket = Ticket()
                snapshot = take_snapshot(self.index, ticket)
                unsaved = snapshot.take(~self._stored.contains(snapshot))
                extend(self._bytes(unsaved))
            ticket.end()
            if self._reader is not None:  # those that could not be read from disk are left out
                snapshot = snapshot.take(self._stored.contains(snapshot))
            self._commit(segments, self._finish(snapshot), previous=False)
        with contextlib.suppress(CheckpointError, OSError):
            sweep(self.directory, read_manifest(self.directory))

    def run_behind(
        self, previous: Manifest | None, arena: Arena, note: Callable[[Save], None] = lambda save: None
    ) -> None:
        """Save the table as it is at one moment, but for trajectories that are evicted before they are copied.

        No ticket is held while the disk is written, so no writer waits for it: the newest trajectories are copied to
        memory first (`STAGE_BYTES`). The previous checkpoint stays beside the new one.

        Args:
            previous: manifest of the checkpoint before the previous one, if it is there.
            arena: memory of the copies.
            note: called when the new checkpoint is in place, before files that it has no use for are removed.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._swept(previous))
            ticket = Ticket()
            try:
                snapshot = take_snapshot(self.index, ticket)
                self._stored.keep_most(snapshot, self.schema.step_bytes, self._most_steps())
                self._check_room(snapshot)
                rows = self._rows(snapshot.take(~self._stored.contains(snapshot)), under_ticket=False)
                rows.stage(STAGE_BYTES, arena)
            finally:
                ticket.end()
            pipeline, segments = self._open(stack, lambda _: None)
            self._write_segment(segments, pipeline, rows)
            snapshot = snapshot.take(self._stored.contains(snapshot))
            self._commit(segments, self._finish(snapshot), previous=True)
        note(self)
        sweep(self.directory, self.manifest, self.old)

    @contextlib.contextmanager
    def _swept(self, previous: Manifest | None) -> Iterator[None]:
        """Remove the new files if the block fails before the manifest is put in place."""
        try:
            yield
        except BaseException:
            if self.manifest is None:  # otherwise either manifest may be in place
                with contextlib.suppress(OSError):
                    sweep(self.directory, self.old, previous)
            raise

    def _open(
        self, stack: contextlib.ExitStack, advance: Callable[[int], None]
    ) -> tuple[Pipeline, Directory]:
        largest = max(column.step_bytes for column in self.schema.values())
        pipeline = stack.enter_context(Pipeline(largest, advance))
        return pipeline, stack.enter_context(self.directory.open_or_make(SEGMENTS_NAME))

    def _most_steps(self) -> int | None:
        """Steps that all segments together may have, by `Disk.size`; None without a disk tier."""
        tier = self.layout.tier
        if tier is None:
            return None
        # The index of a save, and the header of each column's file, are small beside the steps.
        once = self.schema.trajectory_bytes / max(1.0, self.layout.max_steps / self.layout.max_trajectories)
        return int(tier.size / (self.schema.step_bytes + once))

    def _check_room(self, snapshot: Snapshot) -> None:
        """Check, before anything is written, that the segments stay within `Disk.size`.

        Raises:
            DiskFullError: they would not.
        """
        most, tier = self._most_steps(), self.layout.tier
        if most is None or tier is None:
            return
        live = int(snapshot.rows.sum())
        new = int(snapshot.take(~self._stored.contains(snapshot)).rows.sum())
        needed = max(live, sum(segment.steps for segment in self._stored.segments.values()) + new)
        if needed > most:
            raise DiskFullError(
                f"{self.directory.path} would hold {needed * self.schema.step_bytes:,} bytes of steps; expected at "
                f"most {tier.size:,} (Disk.size). Raise size, or remove trajectories.",
                max(1, live - most + most // 32),  # a little more, so that this is rare
            )

    def _bytes(self, snapshot: Snapshot) -> int:
        once = len(snapshot.slots) * self.schema.trajectory_bytes
        return int(snapshot.rows.sum()) * self.schema.step_bytes + once

    # ---------------------------------------------------------------- segments

    def _rows(self, unsaved: Snapshot, *, under_ticket: bool) -> TrajectoryRows:
        return TrajectoryRows(
            self.index, self.schema, self._places, unsaved, under_ticket=under_ticket, reader=self._reader
        )

    def _write_segment(self, segments: Directory, pipeline: Pipeline, rows: TrajectoryRows) -> None:
        """Write trajectories as a new segment; the index never refers to those that are lost.

        Args:
            segments: directory of the segments.
            rows: of the trajectories.
        """
        unsaved = rows.trajectories
        if not len(unsaved.slots):
            return
        number = self._free_number(segments)
        name = f"{number:06d}"
        steps, count = int(rows.ends[-1]), len(unsaved.slots)
        segments.mkdir(name + PART)
        files = {}
        chunk_bytes = manifest_module.CHUNK_BYTES if self.layout.tier is None else TIER_CHUNK_BYTES
        with segments.child(name + PART) as folder:
            for key, column in self.schema.items():
                total = count if column.trajectory else steps
                files[key] = pipeline.write(
                    folder,
                    column_file(key),
                    npy_header(column.dtype_name, total, column.shape),
                    total,
                    column.step_bytes,
                    rows.filler(key),
                    chunk_bytes=chunk_bytes,
                    ready=rows.ready(key),
                )
            folder.sync()
        segments.rename(name + PART, name)
        self._next_segment = number + 1
        self.bytes_written += sum(record.bytes for record in files.values())
        number_of = count if self.schema.per_trajectory else 0
        written = Entries(
            sequence=unsaved.sequences,
            length=unsaved.lengths,
            priority=unsaved.priorities,
            times_sampled=unsaved.times_sampled,
            age=unsaved.ages,
            ident=unsaved.idents,
            segment=np.full(count, number, dtype=np.int64),
            first=rows.first,
            final=unsaved.finals,
            place=np.arange(count),
            filled=unsaved.filled,
        ).take(~rows.lost)
        self._stored.add(Segment(number, steps, files, chunk_bytes, number_of), written)

    def _free_number(self, segments: Directory) -> int:
        """Number of the next segment. Numbers of leftover segments are skipped."""
        number = self._next_segment
        while segments.has(f"{number:06d}") or segments.has(f"{number:06d}{PART}"):
            number += 1
        return number

    # ---------------------------------------------------------------- index and manifest

    def _finish(self, snapshot: Snapshot) -> Manifest:
        """Write the index and return the manifest."""
        import safetensors.numpy

        entries = self._stored.entries.take(self._stored.positions(snapshot))
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
        for key in ("final", "filled"):
            if not arrays[key].any():
                del arrays[key]
        if not self.schema.per_trajectory:
            del arrays["place"]
        record: FileRecord = write_small(self.directory, name + PART, safetensors.numpy.save(arrays))
        self.directory.rename(name + PART, name)
        self.entries, self.snapshot = entries, snapshot
        self.bytes_written += record.bytes
        return Manifest(
            schema=self.schema,
            save=f"{1 + secrets.randbelow(2**63 - 1):016x}",
            table=self.name,
            saves=saves,
            next_segment=self._next_segment,
            block_steps=self.layout.block_steps,
            max_steps=self.layout.max_steps,
            max_trajectories=self.layout.max_trajectories,
            num_blocks=self.layout.num_blocks,
            rules=self.rules,
            origin=snapshot.origin,
            next_sequence=snapshot.next_sequence,
            num_inserted=snapshot.num_inserted,
            num_sampled=snapshot.num_sampled,
            policy_version=snapshot.policy_version,
            num_trajectories=len(entries.sequence),
            num_steps=int(entries.length.sum()),
            index=record,
            segments=tuple(self._stored.segments[number] for number in used),
        )

    def _commit(self, segments: Directory, manifest: Manifest, *, previous: bool) -> None:
        """Sync all files, then put the manifest in place.

        Args:
            previous: whether the previous manifest is kept beside it.
        """
        data = manifest.to_bytes()
        check_cost(self.directory, MANIFEST_NAME, data)  # a later read must accept its size
        write_small(self.directory, MANIFEST_NAME + PART, data)
        if previous:
            keep_previous(self.directory)
        segments.sync()
        self.directory.sync()
        self.manifest = manifest
        self.bytes_written += len(data)
        self.directory.replace(MANIFEST_NAME + PART, MANIFEST_NAME)
        self.directory.sync()
        self.directory.sync_parent()  # the directory itself may be new
