"""Saving a table into a checkpoint, incrementally: in rounds, or without ever holding up a writer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np

from gear_loader.checkpoint.changes import OnDisk, SavedChanges, take_changes
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.files import Arena, ColumnWriter, write_small
from gear_loader.checkpoint.housekeeping import (
    check_owned,
    check_unchanged,
    convert_errors,
    identity,
    is_unfinished_save,
    keep_previous,
    manifests_of,
    refuse_links,
    sweep,
    under_lock,
)
from gear_loader.checkpoint.index import IndexFile, read_records
from gear_loader.checkpoint.manifest import Manifest, read_manifest
from gear_loader.checkpoint.names import (
    MANIFEST_NAME,
    PART,
    SEGMENTS_NAME,
    column_file,
    column_of,
    numbered,
)
from gear_loader.checkpoint.opening import make_directory, place_of
from gear_loader.checkpoint.rows import TrajectoryRows
from gear_loader.checkpoint.segments import Segment, check_files, stored_columns, write_checksums
from gear_loader.checkpoint.shared_places import SharedPlaces, places_for
from gear_loader.checkpoint.trajectory_records import as_sharing, rows_of
from gear_loader.errors import CheckpointError
from gear_loader.storage.payload import used_bytes
from gear_loader.storage.readers import Ticket
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.notices import notice
from gear_loader.utils.progress import progress_bar

# A read ticket keeps blocks of evicted trajectories from being reused, so a writer of a full table waits for it. A save
# therefore works in rounds. Each round copies the unsaved trajectories piece by piece, with one ticket for each piece,
# and skips trajectories evicted in the meantime. The next round saves the trajectories added since. When few bytes are
# left, the last round holds one ticket throughout: the checkpoint shows the table at the moment this round begins.
HOLD_BYTES = 128 << 20
"""Most bytes of the last round, which is written under one ticket."""
MAX_ROUNDS = 6
"""Most rounds. With writers as fast as the disk the rest never becomes small; then the last round is larger."""
CHUNK_BYTES = 4 << 20
"""Bytes of a column's file with a checksum of their own."""
TIER_CHUNK_BYTES = 256 << 10
"""The same in a table with a disk tier: a reader of one trajectory reads the chunks that hold it and have not been
verified before."""
MAX_SEGMENTS = 16
"""With as many segments, the trajectories of the smallest are rewritten as one, so that half as many stay."""
MAX_SEGMENTS_BEHIND = 64
"""The same of tables that are written in the background, whose segments are small."""
REWRITE_BYTES = 64 << 20
"""Bytes of old trajectories that one write in the background rewrites, unless there are more new ones."""
SURE_BYTES = 1 << 20
"""Bytes of the newest trajectories that a save in the background must have: else it copies under a ticket."""
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
    table._engine.check_open()
    where = place_of(path)
    with convert_errors(where), make_directory(where) as directory:
        save_into(table, directory, progress=progress)


def save_into(table: Table, directory: Directory, *, progress: bool = False) -> None:
    """Bring the checkpoint in an open directory up to date with a table.

    Raises:
        CheckpointError, OSError: the checkpoint could not be written. The previous one is unchanged.
    """
    check_owned(directory, MANIFEST_NAME, is_unfinished_save, what="checkpoint")
    refuse_links(directory)

    def run() -> None:
        manifest, _ = manifests_of(directory, previous=False)
        Save(table, directory, manifest).run(progress)

    under_lock(directory, run)


# Saving ----------------------------------------------------------------------------------------------


class Save:
    """One save.

    Args:
        table: the table. directory: of the checkpoint, locked by the caller.
        old: manifest of the previous save.
        on_disk: what its files hold of the table, and its index, if the caller knows them from that save; else they
            are read.

    Attributes:
        manifest, on_disk: of this save, when it is complete.
        index_file: the index that it has written.
        written: int64 [n], slots of the trajectories whose place on disk is another one than before.
        bytes_written: bytes of all files written so far.
        has_changed: whether `on_disk` is no longer that of the previous save.
    """

    def __init__(
        self,
        table: Table,
        directory: Directory,
        old: Manifest | None,
        on_disk: tuple[OnDisk, IndexFile] | None = None,
    ) -> None:
        self.index, self.directory, self.old = table._engine.index, directory, old
        self.schema, self.layout = table.schema, table._engine.region.layout
        self.rules, self.statistics = table.rules, table.statistics
        self._quiet = table._engine.region.fill_lock
        # These references keep the memory mapped if the table is closed during the save.
        region = table._engine.region
        self._memory, self._region = region.device_memory or region.bytes, region
        self._places = {name: table._engine.region.column_place(name) for name in table.schema}
        self.name, parent = identity(table, table._engine.index)
        self.manifest: Manifest | None = None
        self.written: Array = np.empty(0, dtype=np.int64)
        self.bytes_written = 0
        self.has_changed = False
        self._on_device = table._engine.device is not None
        self._payload = table._engine.payload if table.schema.ragged else None
        reads = table._engine.has_tier or self._on_device
        self._reader = table._engine.tier_reader() if reads else None
        self._next_segment = old.next_segment if old else 1
        self._saves = old.saves + 1 if old else 1
        self.index_file: IndexFile | None = None
        self._dropped = frozenset[int]()
        # Of changes, while segments are dropped: their shared rows.
        self._counted: tuple[SavedChanges | None, frozenset[int], int] = None, self._dropped, 0
        if on_disk is not None:
            self.on_disk, self.index_file = on_disk
            return
        self.on_disk = OnDisk(self.layout.max_trajectories, shares=self.layout.prefixes)
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
        if old.shares and not self.layout.prefixes:
            return  # trajectories of this table have all their rows for themselves
        try:
            records = read_records(self.directory, old)
        except CheckpointError as error:
            notice(f"checkpoint {error}", f"{error} The whole table is saved again.")
            return
        segments = []
        for segment in old.segments:
            try:
                check_files(self.directory, segment, self.schema)
            except CheckpointError as error:
                notice(f"checkpoint {error}", f"{error} Its trajectories are saved again.")
                continue
            if segment.checksums is not None:  # of an earlier version
                with self.directory.child(segment.folder) as folder:
                    xxh128 = write_checksums(folder, segment.checksums)
                    folder.sync()
                segment = dataclasses.replace(segment, xxh128=xxh128, checksums=None)
            segments.append(segment)
        records = as_sharing(records) if self.layout.prefixes else records
        self.on_disk = OnDisk.of(self.index, records, segments)

    def run(self, progress: bool) -> None:
        """Save the table as it is at one moment. After a failure the previous checkpoint is unchanged."""
        ticket = Ticket()  # of a round; what is interrupted drops it, which ends it
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: ticket.end())
            stack.enter_context(self._swept(None))
            changes = take_changes(self.index, self.on_disk, ticket)
            new = self._new_rows(changes)
            dropped: Collection[int] = self.on_disk.sparsest(changes, new, math.inf, MAX_SEGMENTS)
            self._dropped = frozenset(dropped)
            changes = self.on_disk.rewriting(changes, dropped)
            advance, extend = stack.enter_context(
                progress_bar("Saving", self._bytes(changes), enabled=progress)
            )
            writer, segments = self._open(stack, advance, ahead=True)
            for turn in range(MAX_ROUNDS):
                last = self._bytes(changes) <= HOLD_BYTES or turn == MAX_ROUNDS - 1
                if not last:
                    ticket.end()
                if last and self.schema.mutable:
                    # What is on disk is of one moment: nobody overwrites values during the round.
                    ticket.end()
                    ticket = Ticket()
                    round_of = functools.partial(self._last_round, segments, writer, dropped, ticket)
                    changes = self._quiet.run(round_of)
                    break
                rows = self._rows(changes.unwritten(), under_ticket=last)
                self._write_changes(segments, writer, changes, dropped, [rows], under_ticket=last)
                if last:
                    break
                ticket, dropped = Ticket(), ()
                changes = take_changes(self.index, self.on_disk, ticket)
                extend(self._bytes(changes))
            ticket.end()
            self._write_index()
            self._commit(segments, self._manifest(changes), previous=False)
        with contextlib.suppress(CheckpointError, OSError):
            sweep(self.directory, read_manifest(self.directory), replaced=self.old)

    def _last_round(
        self, segments: Directory, writer: ColumnWriter, dropped: Collection[int], ticket: Ticket
    ) -> SavedChanges:
        """Write what has changed up to now, under a ticket; return it."""
        changes = take_changes(self.index, self.on_disk, ticket)
        changes = self.on_disk.rewriting(changes, dropped)
        rows = self._rows(changes.unwritten(), under_ticket=True)
        self._write_changes(segments, writer, changes, dropped, [rows], under_ticket=True)
        return changes

    def run_behind(
        self,
        previous: Manifest | None,
        arena: Arena,
        note: Callable[[Save], None] = lambda save: None,
        *,
        from_archive: bool = False,
    ) -> None:
        """Save the table as it is at one moment, but for trajectories that are evicted before they are copied.

        No writer waits for it: the newest trajectories are copied to memory first (`STAGE_BYTES`). Only where others
        replace even the newest meanwhile, of a small table, they wait for that. The previous checkpoint stays beside
        the new one.

        Args:
            previous: manifest of the checkpoint before the previous one, if it is there.
            arena: memory of the copies.
            note: called when the new checkpoint is in place, before files that it has no use for are removed.
            from_archive: whether to bring back what is live of sparse segments in the archive. Where the store fails,
                so does the save.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._swept(previous))
            for ticket in (None, Ticket()):
                changes = take_changes(self.index, self.on_disk, ticket, brief=True)
                try:
                    self._dropped, budget = frozenset(), REWRITE_BYTES // max(1, self.schema.step_bytes)
                    given = changes, self._new_rows(changes)
                    most = self._most_steps(changes)
                    dropped = self.on_disk.sparsest(*given, budget, MAX_SEGMENTS_BEHIND, most)
                    if from_archive:
                        dropped |= self.on_disk.sparse_in_archive(
                            *given, dropped, self._segment_bytes, REWRITE_BYTES, most
                        )
                    self._dropped = frozenset(dropped)
                    changes = self.on_disk.rewriting(changes, dropped)
                    self._check_room(changes, dropped)
                    newest, *older = self._groups(changes)
                    rows = self._rows(newest, under_ticket=False)
                    rows.stage(STAGE_BYTES, arena, held=ticket is not None)
                finally:
                    if ticket is not None:
                        ticket.end()
                if not rows.has_lost(SURE_BYTES):
                    break
            writer, segments = self._open(stack, lambda _: None, ahead=False)
            groups = itertools.chain([rows], self._staged(older, arena))
            written = self._write_changes(segments, writer, changes, dropped, groups, under_ticket=False)
            self._write_index(written)
            self._commit(segments, self._manifest(changes), previous=True)
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
        self, stack: contextlib.ExitStack, advance: Callable[[int], None], *, ahead: bool
    ) -> tuple[ColumnWriter, Directory]:
        """The writer of columns, and the directory of the segments."""
        largest = max(column.step_bytes for column in stored_columns(self.schema).values())
        writer = stack.enter_context(ColumnWriter(largest, advance, ahead=ahead))
        return writer, stack.enter_context(self.directory.open_or_make(SEGMENTS_NAME))

    def _most_steps(self, changes: SavedChanges) -> int | None:
        """Steps that all segments together may have, by `Disk.size`; None without a disk tier.

        A step counts with the ragged values that one has on average, in the segments and in what is written.
        """
        tier = self.layout.tier
        if tier is None:
            return None
        # The index of a save, and the header of each column's file, are small beside the steps.
        once = self.schema.trajectory_bytes / max(1.0, self.layout.max_steps / self.layout.max_trajectories)
        if self.schema.ragged:
            slots, _ = changes.unwritten()
            segments, columns = self.on_disk.segments.values(), stored_columns(self.schema)
            size = int(used_bytes(self._region, self.index)[slots].sum())
            size += sum(
                segment.values[name] * columns[name].step_bytes
                for segment in segments
                for name in segment.values
            )
            once += size / max(1, self._new_rows(changes) + sum(segment.steps for segment in segments))
        return int(tier.size / (self.schema.step_bytes + once))

    def _check_room(self, changes: SavedChanges, dropped: Collection[int]) -> None:
        """Check, before anything is written, that the segments stay within `Disk.size`.

        Raises:
            DiskFullError: they would not.
        """
        most, tier = self._most_steps(changes), self.layout.tier
        if most is None or tier is None:
            return
        new, kept = self._new_rows(changes), self.on_disk.live_after(changes)
        segments = {
            number: each for number, each in self.on_disk.segments.items() if not each.archive
        }  # on the disk
        live = sum(kept[number] for number in segments) + new
        needed = max(live, sum(segments[number].steps for number in segments if number not in dropped) + new)
        if needed > most:
            raise DiskFullError(
                f"{self.directory.path} would hold {needed * self.schema.step_bytes:,} bytes of steps; expected at "
                f"most {tier.size:,} (Disk.size). Raise size, or remove trajectories.",
                max(1, live - most + most // 32),  # a little more, so that this is rare
            )

    def _shared(self, trajectories: tuple[Array, Array]) -> SharedPlaces | None:
        """What some trajectories that are to be written share; None of a table that shares nothing."""
        if not self.layout.prefixes:
            return None
        given = self.index.arrays, self.schema, trajectories, self.on_disk.records
        return places_for(*given, self._dropped)

    def _new_rows(self, changes: SavedChanges) -> int:
        """Rows that have to be written."""
        trajectories = changes.unwritten()
        rows = int(rows_of(trajectories[1]).sum())
        known, dropped, _ = self._counted
        if self.layout.prefixes and not (known is changes and dropped is self._dropped):
            shared = self._shared(trajectories)
            assert shared is not None
            self._counted = changes, self._dropped, int(shared.begin_rows.sum())
        return rows - self._counted[2]

    def _segment_bytes(self, segment: Segment) -> int:
        return sum(segment.bytes(name, column) for name, column in stored_columns(self.schema).items())

    def _bytes(self, changes: SavedChanges) -> int:
        slots, records = changes.unwritten()
        values = int(used_bytes(self._region, self.index)[slots].sum()) if self.schema.ragged else 0
        steps = self._new_rows(changes) * self.schema.step_bytes
        return steps + len(records) * self.schema.trajectory_bytes + values

    # ---------------------------------------------------------------- segments

    def _groups(self, changes: SavedChanges) -> list[tuple[Array, Array]]:
        """What has to be written, newest first, in groups of which mutable columns have about `STAGE_BYTES`."""
        slots, records = changes.unwritten()
        size = sum(self.schema[name].step_bytes for name in self.schema.mutable)
        groups = (np.cumsum(rows_of(records[::-1])) * size)[::-1] // max(1, STAGE_BYTES)
        cuts = np.flatnonzero(np.diff(groups)) + 1
        return list(zip(np.split(slots, cuts), np.split(records, cuts), strict=True))[::-1]

    def _staged(self, groups: Iterable[tuple[Array, Array]], arena: Arena) -> Iterator[TrajectoryRows]:
        """Rows of groups of trajectories, whose mutable columns are staged when a group's turn has come."""
        for group in groups:
            rows = self._rows(group, under_ticket=False)
            rows.stage(0, arena, held=False)
            yield rows

    def _rows(self, trajectories: tuple[Array, Array], *, under_ticket: bool) -> TrajectoryRows:
        """Rows of trajectories: slots, int64 [n], and records, [n]."""
        options: dict[str, Any] = {
            "under_ticket": under_ticket,
            "payload": self._payload,
            "reader": self._reader,
            "on_device": self._on_device,
            "shared": self._shared(trajectories),
        }
        return TrajectoryRows(self.index, self.schema, self._places, *trajectories, **options)

    def _write_changes(
        self,
        segments: Directory,
        writer: ColumnWriter,
        changes: SavedChanges,
        dropped: Collection[int],
        groups: Iterable[TrajectoryRows],
        *,
        under_ticket: bool,
    ) -> Array:
        """Write new rows, each group as a segment; the index never refers to those that are lost.

        Those that were to have something of one that is lost are written once more, without it.

        Args:
            segments: directory of the segments.
            dropped: numbers of the segments that the new checkpoint does not use.
            groups: of the trajectories that have to be written. under_ticket: whether the caller holds theirs.

        Returns:
            Records of what has changed, [m].
        """
        written: list[Segment] = []
        slots = [self.written[:0]]
        order = np.argsort(changes.slots, kind="stable")
        again = list[TrajectoryRows]()
        for rows in itertools.chain(groups, _taken(again)):
            if not len(rows.slots):
                continue
            segment = self._write_segment(segments, writer, rows)
            at = order[np.searchsorted(changes.slots, rows.slots, sorter=order)]
            lacking = np.zeros_like(rows.lost)
            if rows.shared is not None and (lacking := rows.shared.without(rows.lost, segment.number)).any():
                left = rows.slots[lacking], changes.records[at[lacking]]
                again.append(self._rows(left, under_ticket=under_ticket))
            place = np.flatnonzero(~rows.lost & ~lacking)
            changes.records["segment"][at[place]] = segment.number
            changes.records["first"][at[place]] = rows.first[place]
            changes.records["place"][at[place]] = place
            changes.records["filled"][at[place]] = rows.filled[place]
            if rows.shared is not None:
                rows.shared.write(changes.records, at[place], place, segment.number, rows.first)
            written.append(segment)
            slots.append(rows.slots)
        self.has_changed = True
        self.written = np.concatenate(slots)
        return self.on_disk.apply(changes, dropped, written)

    def _write_segment(self, segments: Directory, writer: ColumnWriter, rows: TrajectoryRows) -> Segment:
        number = self._free_number(segments)
        token = self.directory.token
        name = numbered(number, token)
        steps, count = int(rows.ends[-1]), len(rows.slots)
        segments.mkdir(name + PART)
        chunk_bytes = CHUNK_BYTES if self.layout.tier is None else TIER_CHUNK_BYTES
        segment = Segment(number, steps, count if self.schema.per_trajectory else 0, chunk_bytes, token=token)
        checksums = {}
        with segments.child(name + PART) as folder:
            for key, column in stored_columns(self.schema).items():
                piece = functools.partial(rows.piece, key)
                if key not in self.schema:
                    piece = functools.partial(rows.piece_of_values, column_of(key))
                    values = {**segment.values, key: rows.value_rows(column_of(key))}
                    segment = dataclasses.replace(segment, values=values)
                checksums[key] = writer.write(
                    folder,
                    column_file(key),
                    segment.header(key, column),
                    segment.rows(key, column),
                    column.step_bytes,
                    piece,
                    chunk_bytes,
                )
                self.bytes_written += segment.bytes(key, column)
            xxh128 = write_checksums(folder, checksums)
            folder.sync()
        segments.rename(name + PART, name)
        self._next_segment = number + 1
        return dataclasses.replace(segment, xxh128=xxh128)

    def _free_number(self, segments: Directory) -> int:
        """Number of the next segment. Numbers of leftover segments are skipped."""
        number = self._next_segment
        while not segments.token and any(segments.has(f"{number:06d}{end}") for end in ("", PART)):
            number += 1
        return number

    # ---------------------------------------------------------------- index and manifest

    def _write_index(self, changed: Array | None = None) -> None:
        """Append what has changed to the index; or write it anew, also where most of it is out of date."""
        known = self.index_file
        live = self.on_disk.num_trajectories
        if known is not None and changed is not None and known.has_room(len(changed), live):
            self.index_file = known.append(self.directory, changed)
            self.bytes_written += self.index_file.record.bytes - known.record.bytes
            return
        self.index_file = IndexFile.write(self.directory, self._saves, self.on_disk.all_records())
        self.written = np.flatnonzero(self.on_disk.records["sequence"] >= 0)
        self.bytes_written += self.index_file.record.bytes

    def _found(self) -> str:
        """Name of the save that is in the directory now."""
        return read_manifest(self.directory).save if self.directory.has(MANIFEST_NAME) else ""

    def _manifest(self, changes: SavedChanges) -> Manifest:
        on_disk, index = self.on_disk, self.index_file
        assert index is not None
        used = sorted(number for number, rows in on_disk.live.items() if rows)
        return Manifest(
            schema=self.schema,
            save=f"{1 + secrets.randbelow(2**63 - 1):016x}",
            table=self.name,
            saves=self._saves,
            next_segment=self._next_segment,
            block_steps=self.layout.block_steps,
            max_steps=self.layout.max_steps,
            max_trajectories=self.layout.max_trajectories,
            num_blocks=self.layout.writable_blocks,
            rules=self.rules,
            **vars(changes.counters),
            clock=changes.clock,
            num_trajectories=on_disk.num_trajectories,
            num_steps=on_disk.num_steps,
            payload=self.layout.payload,
            index=index.record,
            index_name=index.name,
            segments=tuple(on_disk.segments[number] for number in used),
            statistics=self.statistics,
            prefixes=self.layout.prefixes,
            shares=self.layout.prefixes,
        )

    def _commit(self, segments: Directory, manifest: Manifest, *, previous: bool) -> None:
        """Sync all files, then put the manifest in place.

        Args:
            previous: whether the previous manifest is kept beside it.
        """
        data = manifest.to_bytes()
        write_small(self.directory, MANIFEST_NAME + PART, data)
        check_unchanged(self.directory, self._found, self.old.save if self.old else "")
        if previous:
            keep_previous(self.directory)
        segments.sync()
        self.directory.sync()
        self.manifest = manifest
        self.bytes_written += len(data)
        self.directory.rename(MANIFEST_NAME + PART, MANIFEST_NAME)
        self.directory.sync()
        self.directory.sync_parent()  # the directory itself may be new


def _taken(pending: list[TrajectoryRows]) -> Iterator[TrajectoryRows]:
    """What is in a list, and what is appended to it meanwhile."""
    while pending:
        yield pending.pop()
