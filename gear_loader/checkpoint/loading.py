"""Reading a checkpoint into a new table."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.files import Pipeline, Rows, check_size, copy_pieces
from gear_loader.checkpoint.index import Entries, read_entries
from gear_loader.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    Segment,
    column_file,
    npy_header,
    open_checkpoint,
    read_manifest,
    segment_folder,
)
from gear_loader.checkpoint.runs import read_runs
from gear_loader.checkpoint.saving import descended
from gear_loader.errors import CheckpointError
from gear_loader.storage.index import Claim
from gear_loader.storage.layout import ColumnLayout
from gear_loader.storage.rules import OnFull
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.progress import progress_bar

__all__ = ["Contents", "Part", "check_files", "contents_of", "fill", "load"]

_ATTEMPTS = 10
_WHOLE = 2
"""A file of which less than one part in so many is wanted is read in chunks."""


def load(
    kind: type[Table],
    path: str | os.PathLike[str],
    *,
    schema: Mapping[str, Column] | None,
    name: str | None,
    max_steps: int | None,
    max_trajectories: int | None,
    block_steps: int | None,
    max_blocks: int | None,
    on_full: OnFull | None,
    progress: bool,
) -> Table:
    """A table with the contents of the checkpoint in directory `path`. See `Table.load`."""
    where = os.path.abspath(os.fspath(path))
    expected = None if schema is None else Schema(schema)
    sizes = {
        "max_steps": max_steps,
        "max_trajectories": max_trajectories,
        "block_steps": block_steps,
        "max_blocks": max_blocks,
    }
    for attempt in range(_ATTEMPTS):
        with open_checkpoint(where) as directory:
            manifest = read_manifest(directory)
            if expected is not None and expected.to_json() != manifest.schema.to_json():
                raise CheckpointError(
                    f"{directory.at(MANIFEST_NAME)} is of a table with the schema {manifest.schema}; expected "
                    f"{expected}. Give the schema that was saved (or none), or load another checkpoint."
                )
            try:
                return _load(kind, directory, manifest, sizes, name, on_full, progress)
            except CheckpointError:
                # Somebody may have saved into the directory meanwhile, and removed what this manifest names.
                if attempt == _ATTEMPTS - 1 or not _replaced(directory, manifest):
                    raise
    raise AssertionError("unreachable")


def _load(
    kind: type[Table],
    directory: Directory,
    manifest: Manifest,
    given: Mapping[str, int | None],
    name: str | None,
    on_full: OnFull | None,
    progress: bool,
) -> Table:
    """A table with what one manifest names."""
    as_saved = all(size is None for size in given.values())
    sizes: dict[str, Any] = dict(given)
    for key in ("max_steps", "max_trajectories", "block_steps"):
        if sizes[key] is None:
            sizes[key] = getattr(manifest, key)
    entries = read_entries(directory, manifest)
    check_files(directory, manifest)
    if as_saved:
        # What shared blocks in the table that was saved has blocks of its own now.
        needed = kind.required_blocks(entries.length, manifest.block_steps)
        sizes["max_blocks"] = max(manifest.num_blocks, needed)
    table = kind.create(
        manifest.schema,
        **sizes,
        name=name,
        on_full=manifest.rules.on_full if on_full is None else on_full,
        rate_limiter=manifest.rules.rate_limiter,
        max_times_sampled=manifest.rules.max_times_sampled,
        max_age=manifest.rules.max_age,
    )
    try:
        part = Part("", manifest, entries, np.arange(len(entries.length)))
        fill(table, directory, [part], contents_of(manifest, entries), progress=progress)
        descended(table, table._live(), manifest.save)
    except BaseException:
        table.close()
        if name is not None:
            table.unlink()
        raise
    return table


def _replaced(directory: Directory, manifest: Manifest) -> bool:
    try:
        return read_manifest(directory).save != manifest.save
    except CheckpointError:
        return False


def check_files(directory: Directory, manifest: Manifest) -> None:
    """Check that every file of the segments is there, and as long as it should be.

    Raises:
        CheckpointError: one is not.
    """
    for segment in manifest.segments:
        with directory.child_to_load(segment_folder(segment.number)) as folder:
            for column, record in segment.files.items():
                check_size(folder, column_file(column), record.bytes)


@dataclasses.dataclass(frozen=True)
class Part:
    """Trajectories of a checkpoint that go into a table.

    Attributes:
        folder: of the checkpoint, relative to the directory that is loaded; "" if it is that directory itself.
        entries: those of them that are wanted, [n].
        places: int64 [n]: which of the new table's trajectories each of them is, counted from the oldest.
    """

    folder: str
    manifest: Manifest
    entries: Entries
    places: Array

    def segment(self, segment: Segment) -> str:
        """Where a segment lies, relative to the directory that is loaded."""
        return os.path.join(self.folder, segment_folder(segment.number))


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a new table is to hold, oldest first; all arrays [n]. See `Entries` and `Manifest`."""

    sequence: Array
    length: Array
    priority: Array
    times_sampled: Array
    age: Array
    ident: Array
    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int


def contents_of(manifest: Manifest, entries: Entries) -> Contents:
    """What the table held that was saved."""
    names = ("sequence", "length", "priority", "times_sampled", "age", "ident")
    counts = ("origin", "next_sequence", "num_inserted", "num_sampled")
    return Contents(
        **{name: getattr(entries, name) for name in names},
        **{name: getattr(manifest, name) for name in counts},
    )


def fill(
    table: Table, directory: Directory, parts: Sequence[Part], contents: Contents, *, progress: bool
) -> None:
    """Read everything into the blocks of an empty table; it becomes visible when all of it has proved sound.

    Args:
        directory: what is loaded.
        parts: together they have every trajectory of `contents` once.

    Raises:
        CheckpointError: a file is damaged, or somebody has added to the table meanwhile.
    """
    index, where = table._live(), directory.path
    blocks = index.blocks_of(contents.length)
    _check_room(table, where, contents.length, int(blocks.sum()))
    claim = Claim(len(contents.length))
    try:
        slots, ids = index.begin(contents.length, claim=claim)
        first_ids = np.cumsum(blocks) - blocks
        largest = max(column.step_bytes for column in table.schema.values())
        wanted = [_Wanted.of(part, segment) for part in parts for segment in part.manifest.segments]
        total = sum(one.steps for one in wanted) * table.schema.step_bytes
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
                f"Somebody has added to the table {table.name!r} while {where} was loaded into it; nothing was "
                "loaded. Let others attach when the load has returned."
            )
    except BaseException:
        index.abort(claim.slots, generations=claim.generations)
        raise


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What is wanted of one segment.

    Attributes:
        which: int64 [n], the entries of the part that lie there, in the order of their rows.
        runs: int64 [runs, 2], their rows.
        whole: whether whole files are read, because most of them is wanted.
        steps: those that are read.
    """

    part: Part
    segment: Segment
    which: Array
    runs: Array
    whole: bool
    steps: int

    @staticmethod
    def of(part: Part, segment: Segment) -> _Wanted:
        which = np.flatnonzero(part.entries.segment == segment.number)
        which = which[np.argsort(part.entries.first[which], kind="stable")]
        runs = _runs(part.entries.first[which], part.entries.length[which])
        steps = int((runs[:, 1] - runs[:, 0]).sum())
        whole = steps > 0 and (not segment.chunk_bytes or _WHOLE * steps >= segment.steps)
        return _Wanted(part, segment, which, runs, whole, segment.steps if whole else steps)

    def read(
        self,
        directory: Directory,
        table: Table,
        pipeline: Pipeline,
        first_ids: Array,
        ids: Array,
        advance: Callable[[int], None],
    ) -> None:
        """Read the files, or the chunks of them in which it lies.

        Args:
            first_ids: int64 [trajectories], where the blocks of each of the new table's begin in `ids`.
        """
        if self.steps == 0:
            return
        segment, entries, layout = self.segment, self.part.entries, table.region.layout
        rows = Rows(entries.first[self.which], entries.length[self.which], layout.block_steps)
        places = first_ids[self.part.places[self.which]]
        with directory.child_to_load(self.part.segment(segment)) as folder:
            for name, column in table.schema.items():
                header = npy_header(column.dtype_name, segment.steps, column.shape)
                take = _taker(table.region.column(name), layout.columns[name], rows, places, ids)
                file, record, size = column_file(name), segment.files[name], column.step_bytes
                if self.whole:
                    pipeline.read(folder, file, record, header, size, take)
                    continue
                read_runs(folder, file, record, segment.chunk_bytes, len(header), size, self.runs, take)
                advance(self.steps * size)


def _runs(first: Array, lengths: Array) -> Array:
    """The rows of trajectories, int64 [runs, 2]: those that lie one behind another as one run."""
    if not len(first):
        return np.empty((0, 2), dtype=np.int64)
    ends = first + lengths
    heads = np.flatnonzero(np.append(True, first[1:] != ends[:-1]))
    tails = np.append(heads[1:], len(first)) - 1
    return np.stack((first[heads], ends[tails]), axis=1)


def _check_room(table: Table, where: str, lengths: Array, blocks: int) -> None:
    layout = table.region.layout
    needed = {
        "max_trajectories": (len(lengths), layout.max_trajectories),
        "max_steps": (int(lengths.sum()), layout.max_steps),
        "max_blocks": (blocks, layout.num_blocks),
    }
    for key, (count, room) in needed.items():
        if count > room:
            raise CheckpointError(
                f"{where} needs {key}={count:,} (with blocks of {layout.block_steps} steps); {room:,} was given. "
                "Load it with larger sizes, or with those that were saved."
            )


def _taker(
    data: Array, column: ColumnLayout, rows: Rows, places: Array, ids: Array
) -> Callable[[Array, int, int], None]:
    """A function that copies rows of a segment into the blocks of one column.

    Args:
        data: uint8 [blocks, block_stride]. places: int64 [n], where each trajectory's blocks begin in `ids`.
    """

    def take(buffer: Array, begin: int, end: int) -> None:
        which, block, inside, steps, row = rows.pieces(begin, end)
        block_ids = ids[places[which] + block].astype(np.int64)
        targets = data.ctypes.data + block_ids * column.block_stride + inside * column.step_bytes
        sources = buffer.ctypes.data + row * column.step_bytes
        copy_pieces(targets, sources, steps * column.step_bytes)

    return take
