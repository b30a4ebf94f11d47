"""Loading a checkpoint into a new table."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.files import Pipeline, Rows, check_size
from gear_loader.checkpoint.identity import set_parent
from gear_loader.checkpoint.index import Entries, read_entries
from gear_loader.checkpoint.manifest import Manifest, Segment, open_checkpoint, read_manifest
from gear_loader.checkpoint.names import MANIFEST_NAME, column_file, npy_header, segment_folder
from gear_loader.checkpoint.partial_reads import read_ranges
from gear_loader.errors import CheckpointError
from gear_loader.native.copying import copy_pieces
from gear_loader.storage.allocation import Claim
from gear_loader.storage.layout import ColumnLayout
from gear_loader.storage.rules import OnFull
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.progress import progress_bar

__all__ = [
    "Contents",
    "Part",
    "check_files",
    "contents_of",
    "fill",
    "load",
    "retry_if_replaced",
    "was_replaced",
]

_ATTEMPTS = 10
_WHOLE = 2
"""A file is read as a whole if at least the fraction 1 / _WHOLE of its steps is needed, else in chunks."""


def load(
    kind: type[Table],
    path: str | os.PathLike[str],
    *,
    schema: Mapping[str, Column] | None,
    name: str | None,
    max_steps: int | None,
    max_trajectories: int | None,
    block_steps: int | str | None,
    packed: bool | Literal["auto"],
    max_blocks: int | None,
    on_full: OnFull | None,
    progress: bool,
) -> Table:
    """Create a table from the checkpoint in directory `path`. See `Table.load`."""
    where = os.path.abspath(os.fspath(path))
    expected = None if schema is None else Schema(schema)
    sizes = {
        "max_steps": max_steps,
        "max_trajectories": max_trajectories,
        "block_steps": block_steps,
        "max_blocks": max_blocks,
    }

    def attempt() -> Table | None:
        with open_checkpoint(where) as directory:
            manifest = read_manifest(directory)
            if expected is not None and expected.to_json() != manifest.schema.to_json():
                raise CheckpointError(
                    f"{directory.at(MANIFEST_NAME)} is of a table with the schema {manifest.schema}; expected "
                    f"{expected}. Give the schema that was saved (or none), or load another checkpoint."
                )
            try:
                return _load(kind, directory, manifest, sizes, packed, name, on_full, progress)
            except CheckpointError:
                if was_replaced(lambda: read_manifest(directory).save, manifest.save):
                    return None
                raise

    return retry_if_replaced(attempt, where)


def retry_if_replaced(attempt: Callable[[], Table | None], where: str) -> Table:
    """Repeat a load as long as other saves replace the checkpoint and remove its files during the load.

    Args:
        attempt: loads a table; returns None if another save replaced the checkpoint.
        where: path of the checkpoint, for the error.

    Raises:
        CheckpointError: every attempt returned None.
    """
    for _ in range(_ATTEMPTS):
        table = attempt()
        if table is not None:
            return table
    raise CheckpointError(
        f"{where} was replaced by another save during each of {_ATTEMPTS} attempts to load it. Load it while no save "
        "is running."
    )


def was_replaced(read_save: Callable[[], str], save: str) -> bool:
    """Whether a checkpoint is another one now.

    Args:
        read_save: reads the name of the save from the manifest. save: its name before.
    """
    try:
        return read_save() != save
    except CheckpointError:
        return False


def _load(
    kind: type[Table],
    directory: Directory,
    manifest: Manifest,
    given: Mapping[str, int | str | None],
    packed: bool | Literal["auto"],
    name: str | None,
    on_full: OnFull | None,
    progress: bool,
) -> Table:
    """Create a table from one version of the manifest."""
    as_saved = all(size is None for size in given.values())
    sizes: dict[str, Any] = dict(given)
    for key in ("max_steps", "max_trajectories", "block_steps"):
        if sizes[key] is None:
            sizes[key] = getattr(manifest, key)
    entries = read_entries(directory, manifest)
    check_files(directory, manifest)
    if as_saved:
        # Trajectories that shared blocks in the saved table get separate blocks.
        needed = kind.required_blocks(entries.rows, manifest.block_steps)
        sizes["max_blocks"] = max(manifest.num_blocks, needed)
    if sizes["block_steps"] == "auto" and len(entries.length):
        sizes["mean_length"] = float(entries.length.mean())
    table = kind.create(
        manifest.schema,
        **sizes,
        packed=packed,
        name=name,
        on_full=manifest.rules.on_full if on_full is None else on_full,
        rate_limiter=manifest.rules.rate_limiter,
        max_times_sampled=manifest.rules.max_times_sampled,
        max_age=manifest.rules.max_age,
    )
    try:
        part = Part("", manifest, entries, np.arange(len(entries.length)))
        fill(table, directory, [part], contents_of(manifest, entries), progress=progress)
        set_parent(table, table.index, manifest.save)
    except BaseException:
        table.close()
        if name is not None:
            table.unlink()
        raise
    return table


def check_files(directory: Directory, manifest: Manifest) -> None:
    """Check that every file of the segments exists and has the right size.

    Raises:
        CheckpointError: a file is missing or has another size.
    """
    for segment in manifest.segments:
        with directory.child_to_load(segment_folder(segment.number)) as folder:
            for column, record in segment.files.items():
                check_size(folder, column_file(column), record.bytes)


@dataclasses.dataclass(frozen=True)
class Part:
    """Trajectories of one checkpoint to be loaded into a table.

    Attributes:
        folder: path of the checkpoint, relative to the loaded directory; "" for that directory itself.
        manifest: of the checkpoint.
        entries: the trajectories to load, [n].
        places: int64 [n]: position of each in the new table, oldest first.
    """

    folder: str
    manifest: Manifest
    entries: Entries
    places: Array

    def segment(self, segment: Segment) -> str:
        """Path of a segment, relative to the loaded directory."""
        return os.path.join(self.folder, segment_folder(segment.number))


@dataclasses.dataclass(frozen=True)
class Contents:
    """Trajectories of a new table, oldest first (arrays [n]), and its counters. See `Entries` and `Manifest`."""

    sequence: Array
    length: Array
    priority: Array
    times_sampled: Array
    age: Array
    ident: Array
    final: Array
    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int


def contents_of(manifest: Manifest, entries: Entries) -> Contents:
    """The contents of the saved table."""
    names = ("sequence", "length", "priority", "times_sampled", "age", "ident", "final")
    counts = ("origin", "next_sequence", "num_inserted", "num_sampled")
    return Contents(
        **{name: getattr(entries, name) for name in names},
        **{name: getattr(manifest, name) for name in counts},
    )


def fill(
    table: Table, directory: Directory, parts: Sequence[Part], contents: Contents, *, progress: bool
) -> None:
    """Read trajectories into the blocks of an empty table and commit them when all checksums are verified.

    Args:
        table: the empty table.
        directory: the loaded directory.
        parts: together they hold every trajectory of `contents` once.
        contents: trajectories and counters of the table.
        progress: show a progress bar.

    Raises:
        CheckpointError: a file is damaged, or another process added to the table during the load.
    """
    index, where = table.index, directory.path
    blocks = index.arrays.blocks_of(contents.length + contents.final)
    _check_sizes(table, where, contents.length, int(blocks.sum()))
    claim = Claim(len(contents.length))
    try:
        slots, ids = index.begin(contents.length, finals=contents.final, claim=claim)
        first_ids = np.cumsum(blocks) - blocks
        largest = max(column.step_bytes for column in table.schema.values())
        wanted = [_SegmentRead.of(part, segment) for part in parts for segment in part.manifest.segments]
        total = sum(one.steps * table.schema.step_bytes for one in wanted)
        total += sum(one.trajectories * table.schema.trajectory_bytes for one in wanted)
        with contextlib.ExitStack() as stack:
            advance, _ = stack.enter_context(progress_bar("Loading", total, enabled=progress))
            pipeline = stack.enter_context(Pipeline(largest, advance))
            for one in wanted:
                one.read(directory, table, pipeline, first_ids, ids, advance)
        loaded = index.commit_as(
            slots,
            contents.priority,
            contents.sequence,
            ages=contents.age,
            times_sampled=contents.times_sampled,
            ids=contents.ident,
            origin=contents.origin,
            next_sequence=contents.next_sequence,
            num_inserted=contents.num_inserted,
            num_sampled=contents.num_sampled,
        )
        if not loaded:
            raise CheckpointError(
                f"Another process added trajectories to the table {table.name!r} while {where} was loaded into it; "
                "nothing was loaded. Attach other processes after the load has returned."
            )
    except BaseException:
        index.abort(claim.slots, generations=claim.generations)
        raise


@dataclasses.dataclass(frozen=True)
class _SegmentRead:
    """The rows to read from one segment.

    Attributes:
        part, segment: the checkpoint and the segment.
        which: int64 [n], positions in `part.entries` of the trajectories in the segment, in the order of their rows.
        ranges: int64 [ranges, 2], their rows, consecutive trajectories merged.
        whole: whether whole files are read, because most of their rows are needed.
        steps: number of steps to read. trajectories: the same of columns per trajectory.
    """

    part: Part
    segment: Segment
    which: Array
    ranges: Array
    whole: bool
    steps: int
    trajectories: int

    @staticmethod
    def of(part: Part, segment: Segment) -> _SegmentRead:
        which = np.flatnonzero(part.entries.segment == segment.number)
        which = which[np.argsort(part.entries.first[which], kind="stable")]
        ranges = _row_ranges(part.entries.first[which], part.entries.rows[which])
        steps = int((ranges[:, 1] - ranges[:, 0]).sum())
        whole = steps > 0 and _WHOLE * steps >= segment.steps
        read = (segment.steps, segment.trajectories) if whole else (steps, len(which))
        return _SegmentRead(part, segment, which, ranges, whole, *read)

    def read(
        self,
        directory: Directory,
        table: Table,
        pipeline: Pipeline,
        first_ids: Array,
        ids: Array,
        advance: Callable[[int], None],
    ) -> None:
        """Read the rows of every column into the table's blocks.

        Args:
            directory: the loaded directory. table: the new table.
            pipeline: reads whole files. advance: reports bytes to the progress bar.
            first_ids: int64 [trajectories], where the blocks of each trajectory of the new table begin in `ids`.
            ids: int32, block ids.
        """
        if self.steps == 0:
            return
        segment, entries, layout = self.segment, self.part.entries, table.region.layout
        rows = Rows(entries.first[self.which], entries.rows[self.which], layout.block_steps)
        place, ones = entries.place[self.which], np.ones(len(self.which), dtype=np.int64)
        once = Rows(place, ones, layout.block_steps)
        places = first_ids[self.part.places[self.which]]
        with directory.child_to_load(self.part.segment(segment)) as folder:
            for name, column in table.schema.items():
                header = npy_header(column.dtype_name, segment.rows(column), column.shape)
                these, ranges, count = (
                    (once, _row_ranges(place, ones), self.trajectories)
                    if column.trajectory
                    else (rows, self.ranges, self.steps)
                )
                take = _taker(table.region.column(name), layout.columns[name], these, places, ids)
                file, record, size = column_file(name), segment.files[name], column.step_bytes
                if self.whole:
                    pipeline.read(folder, file, record, header, size, take)
                    continue
                read_ranges(folder, file, record, segment.chunk_bytes, len(header), size, ranges, take)
                advance(count * size)


def _row_ranges(first: Array, lengths: Array) -> Array:
    """Row ranges of trajectories, int64 [ranges, 2]; consecutive trajectories are merged."""
    if not len(first):
        return np.empty((0, 2), dtype=np.int64)
    ends = first + lengths
    heads = np.flatnonzero(np.append(True, first[1:] != ends[:-1]))
    tails = np.append(heads[1:], len(first)) - 1
    return np.stack((first[heads], ends[tails]), axis=1)


def _check_sizes(table: Table, where: str, lengths: Array, blocks: int) -> None:
    layout = table.region.layout
    needed = {
        "max_trajectories": (len(lengths), layout.max_trajectories),
        "max_steps": (int(lengths.sum()), layout.max_steps),
        "max_blocks": (blocks, layout.num_blocks),
    }
    for key, (count, limit) in needed.items():
        if count > limit:
            raise CheckpointError(
                f"{where} needs {key}={count:,} (with blocks of {layout.block_steps} steps); {limit:,} was given. "
                "Load it with larger sizes, or with the saved ones."
            )


def _taker(
    data: Array, column: ColumnLayout, rows: Rows, places: Array, ids: Array
) -> Callable[[Array, int, int], None]:
    """Return a function that copies rows of a segment into the blocks of one column.

    Args:
        data: uint8 [blocks, block_steps, step_bytes], the column. column: its layout.
        rows: rows of the trajectories in the segment.
        places: int64 [n], where each trajectory's blocks begin in `ids`. ids: block ids.
    """

    size = column.step_bytes

    def take(buffer: Array, begin: int, end: int) -> None:
        which, block, inside, steps, row = rows.pieces(begin, end)
        block_ids = ids[places[which] + block].astype(np.int64)
        targets = data.ctypes.data + block_ids * column.block_stride + inside * column.step_stride
        sources = buffer.ctypes.data + row * size
        copy_pieces(targets, sources, steps, column.step_stride, size, size)

    return take
