"""Loading a checkpoint into a new table."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.checkpoint.directory import Directory, readable
from gear_loader.checkpoint.housekeeping import set_parent
from gear_loader.checkpoint.index import read_records
from gear_loader.checkpoint.manifest import Manifest, no_manifest, read_manifest
from gear_loader.checkpoint.names import CHECKSUMS_NAME, MANIFEST_NAME, values_of
from gear_loader.checkpoint.opening import open_to_load, place_of
from gear_loader.checkpoint.ragged_loading import load_values, value_bounds
from gear_loader.checkpoint.reading import ColumnRead, read_columns
from gear_loader.checkpoint.segments import Segment, check_files, read_checksums
from gear_loader.checkpoint.spilling import levels_of, note_places
from gear_loader.checkpoint.trajectory_records import Counters, rows_of
from gear_loader.errors import CheckpointError, SchemaError
from gear_loader.storage.allocation import Claim
from gear_loader.storage.device_memory import DeviceMemory
from gear_loader.storage.disk import Disk
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.operations.extents import GRAIN
from gear_loader.storage.operations.extents import HEADER as EXTENT_HEADER
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table import Table
from gear_loader.storage.table_rules import OnFull
from gear_loader.utils.arrays import Array, data_address

_ATTEMPTS = 10
IMAGE_BYTES = 256 << 20
"""Blocks that are read at a time for a table on a GPU, in bytes, or those of one trajectory."""


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Options of `Table.load`; see there.

    With a `disk` that has a size, trajectories beyond the memory stay in the directory.
    """

    schema: Mapping[str, Column] | None = None
    name: str | None = None
    max_steps: int | None = None
    max_trajectories: int | None = None
    block_steps: int | Literal["auto"] | None = None
    packed: bool | Literal["auto"] = "auto"
    max_blocks: int | None = None
    payload: int | str | None = None
    on_full: OnFull | None = None
    progress: bool = False
    memory: int | str | None = None
    disk: Disk | None = None
    device: str | torch.device | None = None
    host: int | str | None = None


class UnfitError(CheckpointError):
    """A sound checkpoint that does not fit what the caller asked for."""


def load(kind: type[Table], path: str | os.PathLike[str], options: LoadOptions) -> Table:
    """Create a table from the checkpoint in directory `path`. See `Table.load`."""
    where = place_of(path)

    def attempt() -> Table | None:
        with open_to_load(where, no_manifest(where)) as directory:
            manifest = read_manifest(directory)
            try:
                return load_version(kind, directory, manifest, options)
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


def load_version(kind: type[Table], directory: Directory, manifest: Manifest, options: LoadOptions) -> Table:
    """Create a table from one version of the manifest.

    Raises:
        CheckpointError: it is damaged; or it does not fit the options (`UnfitError`).
    """
    if options.schema is not None:
        expected = Schema(options.schema)
        if expected.to_json() != manifest.schema.to_json():
            raise UnfitError(
                f"{directory.at(MANIFEST_NAME)} is of a table with the schema {manifest.schema}; expected {expected}. "
                "Give the schema that was saved (or none), or load another checkpoint."
            )
    # Rows that stay on disk are checked when they are read: one damaged file does not lose the others.
    stays = options.disk is not None and options.disk.tier() is not None
    return load_share(kind, directory, whole_share(directory, manifest, checksums=not stays), options)


def whole_share(
    directory: Directory, manifest: Manifest, folder: str = "", *, checksums: bool = True
) -> Share:
    """All that the checkpoint in a directory holds; see `Share`.

    Args:
        folder: its path, relative to the loaded directory. checksums: whether their files are checked.

    Raises:
        CheckpointError: a file is missing, or the index is damaged.
    """
    records = read_records(directory, manifest)
    for segment in manifest.segments:
        check_files(directory, segment, manifest.schema, checksums=checksums)
    # Trajectories that shared blocks in the saved table get separate blocks.
    blocks = max(manifest.num_blocks, Table.required_blocks(rows_of(records), manifest.block_steps))
    names = ("max_steps", "max_trajectories", "block_steps", "payload")
    sizes = {name: getattr(manifest, name) for name in names}
    part = Part(folder, manifest, records, np.arange(len(records)))
    return Share([part], records, manifest.counters, {**sizes, "max_blocks": blocks}, manifest, manifest.save)


def load_share(kind: type[Table], directory: Directory, share: Share, options: LoadOptions) -> Table:
    """Create a table, and read trajectories into it.

    Args:
        directory: the loaded directory. options: their schema has been compared.

    Raises:
        CheckpointError: a file is damaged; or the trajectories do not fit (`UnfitError`). No table is left.
    """
    given = {name: getattr(options, name) for name in share.sizes}
    sizes: dict[str, Any] = share.sizes | {name: size for name, size in given.items() if size is not None}
    tier = None if options.disk is None else options.disk.tier()
    blocks, payload = sizes.pop("max_blocks"), sizes.pop("payload") or None
    if options.host is not None and tier is None and options.memory is None and given["max_blocks"] is None:
        raise SchemaError(
            f"host is {options.host!r} without max_blocks; expected both: max_blocks is how many blocks the GPU's "
            f"memory has, and all trajectories take {blocks:,}."
        )
    if options.memory is not None:
        blocks = None
    elif given["max_blocks"] is None and tier is not None:
        blocks = share.saved.num_blocks
    elif given["max_blocks"] is None and any(
        size is not None for name, size in given.items() if name != "payload"
    ):
        blocks = None
    lengths, rules = share.records["length"], share.saved.rules
    mean = float(lengths.mean()) if sizes["block_steps"] == "auto" and len(lengths) else None
    goes_on = options.disk is not None and share.saved.prefixes
    memory = Memory(options.memory, blocks, mean, options.packed, payload=payload, prefixes=goes_on)
    table = kind.create(
        share.saved.schema,
        **sizes,
        disk=tier,
        memory=memory,
        name=options.name,
        on_full=rules.on_full if options.on_full is None else options.on_full,
        rate_limiter=rules.rate_limiter,
        limits=rules.limits,
        device=options.device,
        host=options.host,
    )
    table._engine.statistics = share.saved.statistics if len(share.parts) == 1 else None
    try:
        inside, layout, values = None, table._engine.region.layout, None
        if layout.host_blocks and tier is None:
            inside = levels_of(layout, share.records, "newest")
            if not inside.all():
                raise UnfitError(
                    f"{directory.path} holds {len(inside):,} trajectories, and {int((inside == 0).sum()):,} of them "
                    f"fit neither into {layout.writable_blocks:,} blocks on {layout.device} nor into "
                    f"{layout.host_blocks:,} of host memory (host). Load it with larger ones."
                )
        elif options.disk is not None and tier is not None:
            (part,) = share.parts
            # What lies in an archive stays there: a store that fails now does not keep a table from coming back.
            far = np.isin(
                share.records["segment"], [each.number for each in part.manifest.segments if each.archive]
            )
            if table.schema.ragged:
                first = (levels_of(layout, share.records, options.disk.keep) > 0) & ~far
                values = np.zeros(len(first), dtype=np.int64)
                values[first] = _value_bytes(table, directory, part, first)
            inside = levels_of(layout, share.records, options.disk.keep, values) * ~far
        _fill(table, directory, share, inside=inside, progress=options.progress)
        set_parent(table, table._engine.index, share.parent)
    except BaseException:
        discard(table)
        raise
    return table


def discard(table: Table) -> None:
    """Close a table, and remove its shared memory."""
    table.close()
    if table.name is not None:
        table.unlink()


@dataclasses.dataclass(frozen=True)
class Part:
    """Trajectories of one checkpoint to be loaded into a table.

    Attributes:
        folder: path of the checkpoint, relative to the loaded directory; "" for that directory itself.
        manifest: of the checkpoint.
        records: of the trajectories to load, [n].
        places: int64 [n]: position of each in the new table, oldest first.
    """

    folder: str
    manifest: Manifest
    records: Array
    places: Array

    def segment(self, segment: Segment) -> str:
        """Path of a segment, relative to the loaded directory."""
        return os.path.join(self.folder, segment.folder)


@dataclasses.dataclass(frozen=True)
class Share:
    """What is loaded into one table.

    Attributes:
        parts: together they hold every trajectory of `records` once.
        records: [n], of the table's trajectories, oldest first. counters: of the table.
        sizes: `max_steps`, `max_trajectories`, `block_steps`, `max_blocks` and `payload` (0 without ragged columns) of
            a table that holds it.
        saved: manifest of the table whose schema and rules it has.
        parent: name of the save whose files the next save of the table can reuse, or "0".
    """

    parts: list[Part]
    records: Array
    counters: Counters
    sizes: dict[str, int]
    saved: Manifest
    parent: str


def _fill(table: Table, directory: Directory, share: Share, *, inside: Array | None, progress: bool) -> None:
    """Read trajectories into the blocks of an empty table and commit them when all checksums are verified.

    Args:
        table: the empty table.
        directory: the loaded directory.
        inside: int8 [n], where each is read to, see `IndexArrays.levels`; those of level 0 stay in the directory of the
            single part, which is the table's disk tier. None: all of level 1.
        progress: show a progress bar.

    Raises:
        CheckpointError: a file is damaged, or another process added to the table during the load.
    """
    index, where = table._engine.index, directory.path
    records, parts = share.records, share.parts
    lengths, finals = records["length"].copy(), records["final"].astype(np.int64)
    blocks = index.arrays.blocks_of(rows_of(records))
    blocks = blocks if inside is None else np.where(inside > 0, blocks, 0)
    _check_sizes(table, where, lengths, int(blocks.sum()))
    claim = Claim(len(records))
    try:
        if inside is None:
            slots, ids = index.begin(lengths, finals=finals, claim=claim)
        else:
            slots, ids = claim.slots, index.begin_stored(lengths, finals, inside, claim)
            if index.arrays.tier is not None:
                (part,) = parts
                note_places(index, slots, part.records)
                _keep_versions(table, directory, part, slots)
                parts = _some(parts, inside > 0)
        first_ids = np.cumsum(blocks) - blocks
        memory = table._engine.region.device_memory
        if memory is None:
            reads = _all_reads(table, directory, parts, first_ids)
            read_columns(directory, reads, ids, progress=progress)
            if table.schema.ragged:
                assert claim.generations is not None
                places = slots, claim.generations, first_ids, ids
                _check_payload(table, where, load_values(table, directory, reads, *places, progress=progress))
        else:
            levels = np.ones(len(records)) if inside is None else inside
            own, here = np.where(levels == 1, blocks, 0), np.repeat(levels == 1, blocks)
            given = _some(parts, levels == 1), np.cumsum(own) - own, ids[here]
            _fill_device(table, memory, directory, *given, progress=progress)
            reads = _all_reads(table, directory, _some(parts, levels == 2), first_ids)
            read_columns(directory, reads, ids, progress=progress)
        loaded = index.commit_as(
            slots,
            records["priority"].copy(),
            records["sequence"].copy(),
            ages=-records["created"],
            times_sampled=records["times_sampled"].astype(np.int64),
            ids=records["ident"].copy(),
            filled=records["filled"].copy(),
            **vars(share.counters),
        )
        if not loaded:
            raise CheckpointError(
                f"Another process added trajectories to the table {table.name!r} while {where} was loaded into it; "
                "nothing was loaded. Attach other processes after the load has returned."
            )
    except BaseException:
        index.abort(claim.slots, generations=claim.generations)
        raise


def _some(parts: list[Part], which: Array) -> list[Part]:
    """The trajectories of parts for which `which` holds, bool [trajectories of the new table]."""
    chosen = [which[part.places] for part in parts]
    return [
        dataclasses.replace(part, records=part.records[some], places=part.places[some])
        for part, some in zip(parts, chosen, strict=True)
    ]


def _fill_device(
    table: Table,
    memory: DeviceMemory,
    directory: Directory,
    parts: list[Part],
    first_ids: Array,
    ids: Array,
    *,
    progress: bool,
) -> None:
    """Read trajectories into images of some blocks on the host, one after another, and these into the GPU's memory.

    Args:
        first_ids: as for `_reads`. ids: int32, the blocks of all trajectories.
    """
    size = table._engine.region.layout.block_bytes
    ends, low = np.append(first_ids[1:], len(ids)), 0
    while low < len(ends):
        begin = int(first_ids[low])
        high = max(low + 1, int(np.searchsorted(ends, begin + IMAGE_BYTES // size, "right")))
        image: Array = np.zeros((int(ends[high - 1]) - begin) * size, dtype=np.uint8)
        numbers = np.arange(len(ends))
        some = _some(parts, (numbers >= low) & (numbers < high))
        reads = [
            dataclasses.replace(read, place=memory.place_in(image, read.name))
            for read in _all_reads(table, directory, some, first_ids - begin)
        ]
        blocks = ids[begin : int(ends[high - 1])]
        read_columns(directory, reads, np.arange(len(blocks), dtype=np.int32), progress=progress)
        memory.write_image(blocks, image)
        low = high


def _all_reads(table: Table, directory: Directory, parts: list[Part], first_ids: Array) -> list[ColumnRead]:
    """`_reads` of all segments of some checkpoints."""
    return [
        read
        for part in parts
        for segment in part.manifest.segments
        for read in _reads(table, directory, part, segment, first_ids)
    ]


def _reads(
    table: Table, directory: Directory, part: Part, segment: Segment, first_ids: Array
) -> list[ColumnRead]:
    """What to read of one segment.

    Args:
        table: the new table. directory: the loaded one. part: a checkpoint, and its trajectories to load.
        first_ids: int64 [trajectories], where the blocks of each trajectory of the new table begin.
    """
    records = part.records
    which = np.flatnonzero(records["segment"] == segment.number)
    if not len(which):
        return []
    which = which[np.argsort(records["first"][which], kind="stable")]
    first, rows = records["first"][which], records["length"][which] + records["final"][which]
    place = records["place"][which].astype(np.int64)
    places = first_ids[part.places[which]]
    with directory.child_to_load(part.segment(segment)) as folder, readable(folder.at(CHECKSUMS_NAME)):
        checksums = read_checksums(folder, segment, table.schema)
    return [
        ColumnRead(
            folder=segment.archive or part.segment(segment),
            segment=segment,
            name=name,
            column=column,
            checksums=checksums[name],
            first=place if column.trajectory else first,
            ends=place + 1 if column.trajectory else first + rows,
            places=places,
            place=table._engine.region.column_place(name),
            more=checksums.get(values_of(name), b""),
        )
        for name, column in table.schema.items()
    ]


def _value_bytes(table: Table, directory: Directory, part: Part, which: Array) -> Array:
    """Bytes of the memory of ragged values that trajectories take, int64 [n].

    Args:
        part: all trajectories. which: bool, the n among them.

    Raises:
        CheckpointError: a file is damaged.
    """
    part = dataclasses.replace(part, records=part.records[which], places=np.arange(int(which.sum())))
    total: Array = np.full(len(part.places), EXTENT_HEADER, dtype=np.int64)
    ends = np.cumsum(rows_of(part.records))
    records: Array = np.empty((int(ends[-1]) if len(ends) else 0, 2), dtype=np.int64)
    # One after another: blocks of one step.
    place = np.array([data_address(records), 16, 16, 16, 1], dtype=np.int64)
    first, ids = ends - rows_of(part.records), np.arange(len(records), dtype=np.int32)
    reads = [
        dataclasses.replace(read, place=place)
        for segment in part.manifest.segments
        for read in _reads(table, directory, part, segment, first)
    ]
    for name, values in table.schema.ragged.items():
        some = [read for read in reads if read.name == name]
        read_columns(directory, some, ids)
        for read in some:
            found = value_bounds(directory, read, ids)
            owner = np.searchsorted(first, read.places, side="right") - 1
            size = (found[:, 1] - found[:, 0]) * values.row_bytes
            total[owner] += -(-size // GRAIN) * GRAIN
    return total


def _keep_versions(table: Table, directory: Directory, part: Part, slots: Array) -> None:
    """Read the versions of trajectories that stay on disk, of a table that has versions of a policy.

    Args:
        slots: int64 [n], of the trajectories of `part`.

    Raises:
        CheckpointError: a file is damaged.
    """
    name, kept = table.rules.version, table._engine.index.arrays.kept_versions
    if name is None:
        return
    size = table.schema[name].step_bytes
    values: Array = np.empty((len(slots), size), dtype=np.uint8)
    # One after another: blocks of one step, of which each trajectory has the one with its number.
    place = np.array([data_address(values), size, size, size, 1], dtype=np.int64)
    reads = [
        dataclasses.replace(read, place=place)
        for segment in part.manifest.segments
        for read in _reads(table, directory, part, segment, np.arange(len(slots)))
        if read.name == name
    ]
    read_columns(directory, reads, np.arange(len(slots), dtype=np.int32))
    kept[slots] = values.view(np.dtype(table.schema[name].dtype_name)).reshape(-1)


def _check_payload(table: Table, where: str, needed: int) -> None:
    if needed:
        raise UnfitError(
            f"{where} needs payload={needed:,} (each trajectory has its own copy of values that several shared); the "
            f"table has {table._engine.region.layout.payload:,}. Load it with as many."
        )


def _check_sizes(table: Table, where: str, lengths: Array, blocks: int) -> None:
    layout = table._engine.region.layout
    needed = {
        "max_trajectories": (len(lengths), layout.max_trajectories),
        "max_steps": (int(lengths.sum()), layout.max_steps),
        "max_blocks": (blocks, layout.num_blocks),
    }
    for key, (count, limit) in needed.items():
        if count > limit:
            raise UnfitError(
                f"{where} needs {key}={count:,} (with blocks of {layout.block_steps} steps); {limit:,} was given. "
                "Load it with larger sizes, or with the saved ones."
            )
