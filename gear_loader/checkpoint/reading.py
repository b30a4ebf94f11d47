"""Reading a checkpoint into a new table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gear_loader.checkpoint.files import Pipeline, Rows, check_size, copy_pieces
from gear_loader.checkpoint.manifest import (
    MANIFEST_NAME,
    Entries,
    Manifest,
    column_file,
    npy_header,
    read_entries,
    read_manifest,
    segment_folder,
)
from gear_loader.checkpoint.progress import progress_bar
from gear_loader.checkpoint.writing import descended
from gear_loader.errors import CheckpointError
from gear_loader.index_ops import Array
from gear_loader.layout import ColumnLayout
from gear_loader.rules import OnFull
from gear_loader.schema import Column, Schema
from gear_loader.table import Table

__all__ = ["load"]

_ATTEMPTS = 10


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
    directory = os.path.abspath(os.fspath(path))
    expected = None if schema is None else Schema(schema)
    for attempt in range(_ATTEMPTS):
        manifest = read_manifest(directory)
        manifest_path = os.path.join(directory, MANIFEST_NAME)
        if expected is not None and expected.to_json() != manifest.schema.to_json():
            raise CheckpointError(
                f"{manifest_path} is of a table with the schema {manifest.schema}; expected {expected}. Give the "
                "schema that was saved (or none), or load another checkpoint."
            )
        sizes: dict[str, Any] = {
            "max_steps": max_steps,
            "max_trajectories": max_trajectories,
            "block_steps": block_steps,
            "max_blocks": max_blocks,
        }
        as_saved = all(size is None for size in sizes.values())
        for key in ("max_steps", "max_trajectories", "block_steps"):
            if sizes[key] is None:
                sizes[key] = getattr(manifest, key)
        try:
            entries = read_entries(directory, manifest)
            for segment in manifest.segments:
                for column, record in segment.files.items():
                    check_size(_file(directory, segment.number, column), record.bytes)
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
                _fill(table, directory, manifest, entries, progress)
            except BaseException:
                table.close()
                if name is not None:
                    table.unlink()
                raise
            return table
        except CheckpointError:
            # Somebody may have saved into the directory meanwhile, and removed what this manifest names.
            if attempt == _ATTEMPTS - 1 or not _replaced(directory, manifest):
                raise
    raise AssertionError("unreachable")


def _replaced(directory: str, manifest: Manifest) -> bool:
    try:
        return read_manifest(directory).save != manifest.save
    except CheckpointError:
        return False


def _file(directory: str, segment: int, column: str) -> str:
    return os.path.join(directory, segment_folder(segment), column_file(column))


def _fill(table: Table, directory: str, manifest: Manifest, entries: Entries, progress: bool) -> None:
    """Read everything into the blocks of an empty table; it becomes visible when all of it has proved sound."""
    index, layout = table._live(), table.region.layout
    blocks = index.blocks_of(entries.length)
    _check_room(table, directory, entries, int(blocks.sum()))
    slots, ids = index.begin(entries.length)
    try:
        rows_of_ids = np.cumsum(blocks) - blocks
        largest = max(column.step_bytes for column in table.schema.values())
        total = sum(segment.steps for segment in manifest.segments) * table.schema.step_bytes
        with contextlib.ExitStack() as stack:
            advance, _ = stack.enter_context(progress_bar("Loading", total, enabled=progress))
            pipeline = stack.enter_context(Pipeline(largest, advance))
            for segment in manifest.segments:
                here = np.flatnonzero(entries.segment == segment.number)
                here = here[np.argsort(entries.first[here], kind="stable")]
                rows = Rows(entries.first[here], entries.length[here], layout.block_steps)
                for name, column in table.schema.items():
                    header = npy_header(column.dtype_name, segment.steps, column.shape)
                    take = _taker(
                        table.region.column(name), layout.columns[name], rows, rows_of_ids[here], ids
                    )
                    path = _file(directory, segment.number, name)
                    pipeline.read(path, segment.files[name], header, column.step_bytes, take)
        loaded = index.commit_as(
            slots,
            entries.priority,
            entries.sequence,
            ages=entries.age,
            times_sampled=entries.times_sampled,
            next_sequence=manifest.next_sequence,
            num_inserted=manifest.num_inserted,
            num_sampled=manifest.num_sampled,
        )
        if not loaded:
            raise CheckpointError(
                f"Somebody has added to the table {table.name!r} while {directory} was loaded into it; nothing was "
                "loaded. Let others attach when Table.load() has returned."
            )
    except BaseException:
        index.abort(slots)
        raise
    descended(table, index, manifest.save)


def _check_room(table: Table, directory: str, entries: Entries, blocks: int) -> None:
    layout = table.region.layout
    needed = {
        "max_trajectories": (len(entries.length), layout.max_trajectories),
        "max_steps": (int(entries.length.sum()), layout.max_steps),
        "max_blocks": (blocks, layout.num_blocks),
    }
    for key, (count, room) in needed.items():
        if count > room:
            raise CheckpointError(
                f"{directory} needs {key}={count:,} (with blocks of {layout.block_steps} steps); {room:,} was given. "
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
