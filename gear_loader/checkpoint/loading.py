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
from gear_loader.checkpoint.shared_places import Common, group_columns
from gear_loader.checkpoint.spilling import levels_of, note_places
from gear_loader.checkpoint.trajectory_records import SHARING, Counters, own_rows, rows_of, segments_of
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
    part = Part(folder, manifest, records, np.arange(len(records)))
    copied, all_of_them = int(bool(manifest.schema.per_trajectory)), np.ones(len(records), dtype=bool)
    common = Common.of(manifest.schema, [(records, part.places)], len(records))
    _, shared = common.parents(all_of_them, manifest.block_steps, copied)
    blocks = Table.required_blocks(rows_of(records), manifest.block_steps)
    blocks = max(manifest.num_blocks, blocks - int(np.maximum(shared - copied, 0).sum()))
    names = ("max_steps", "max_trajectories", "block_steps", "payload")
    sizes = {name: getattr(manifest, name) for name in names}
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
    shares = share.saved.prefixes and options.device is None
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
    elif given["max_blocks"] is None and not shares:  # each trajectory has separate blocks
        blocks = max(blocks, Table.required_blocks(rows_of(share.records), sizes["block_steps"]))
    lengths, rules = share.records["length"], share.saved.rules
    mean = float(lengths.mean()) if sizes["block_steps"] == "auto" and len(lengths) else None
    memory = Memory(options.memory, blocks, mean, options.packed, payload=payload, prefixes=shares)
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
            inside = levels_of(layout, share.records, "newest", share.common)
            if not inside.all():
                raise UnfitError(
                    f"{directory.path} holds {len(inside):,} trajectories, and {int((inside == 0).sum()):,} of them "
                    f"fit neither into {layout.writable_blocks:,} blocks on {layout.device} nor into "
                    f"{layout.host_blocks:,} of host memory (host). Load it with larger ones."
                )
        elif options.disk is not None and tier is not None:
            (part,) = share.parts
            # What lies in an archive stays there: a store that fails now does not keep a table from coming back.
            archived = [each.number for each in part.manifest.segments if each.archive]
            far = np.isin(segments_of(share.records), archived).any(axis=1)
            known = layout, share.records, options.disk.keep, share.common
            if table.schema.ragged:
                first = (levels_of(*known) > 0) & ~far
                values = np.zeros(len(first), dtype=np.int64), np.zeros(len(first), dtype=np.int64)
                values[0][first], values[1][first] = _value_bytes(table, directory, part, first)
            inside = levels_of(*known, values) * ~far
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

    @property
    def common(self) -> Common:
        """What the trajectories have in common."""
        parts = [(part.records, part.places) for part in self.parts]
        return Common.of(self.saved.schema, parts, len(self.records))


@dataclasses.dataclass(frozen=True)
class _LoadedBlocks:
    """The blocks of trajectories that are loaded, int64 [n] each.

    Attributes:
        first_ids: where those of each begin in a list. shared: those up to this one, without `copied` first ones, are
            filled by others. steps: of a block.
    """

    first_ids: Array
    shared: Array
    steps: int = 1
    copied: int = 0

    @classmethod
    def alone(cls, first_ids: Array) -> _LoadedBlocks:
        """Blocks of which each belongs to one trajectory."""
        return cls(first_ids, np.zeros_like(first_ids))


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
    layout, arrays, common = table._engine.region.layout, index.arrays, share.common
    levels = np.ones(len(records), dtype=np.int8) if inside is None else inside
    blocks = np.where(levels > 0, arrays.blocks_of(rows_of(records)), 0)
    parents, shared = common.parents((levels > 0) & layout.prefixes, layout.block_steps, arrays.copied_blocks)
    new = blocks - np.maximum(shared - arrays.copied_blocks, 0)
    _check_sizes(table, where, lengths, int(new.sum()))
    claim = Claim(len(records))

    def note() -> None:
        if layout.prefixes:
            common.note(arrays, claim.slots, records["sequence"])

    try:
        if inside is None and not layout.prefixes:
            slots, ids = index.begin(lengths, finals=finals, claim=claim)
        else:
            ids = index.begin_stored(lengths, finals, levels, claim, parents, shared, note)
            slots = claim.slots
        if inside is not None and arrays.tier is not None:
            (part,) = parts
            note_places(index, slots, part.records)
            _keep_versions(table, directory, part, slots)
            parts = _some(parts, inside > 0)
        first_ids = np.cumsum(blocks) - blocks
        memory = table._engine.region.device_memory
        if memory is None:
            places = _LoadedBlocks(first_ids, shared, layout.block_steps, arrays.copied_blocks)
            reads = _all_reads(table, directory, parts, places)
            read_columns(directory, reads, ids, progress=progress)
            if table.schema.ragged:
                assert claim.generations is not None
                owned = slots, claim.generations, common.leaders, first_ids, ids
                _check_payload(table, where, load_values(table, directory, reads, *owned, progress=progress))
        else:
            own, here = np.where(levels == 1, blocks, 0), np.repeat(levels == 1, blocks)
            given = _some(parts, levels == 1), np.cumsum(own) - own, ids[here]
            _fill_device(table, memory, directory, *given, progress=progress)
            reads = _all_reads(table, directory, _some(parts, levels == 2), _LoadedBlocks.alone(first_ids))
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
            for read in _all_reads(table, directory, some, _LoadedBlocks.alone(first_ids - begin))
        ]
        blocks = ids[begin : int(ends[high - 1])]
        read_columns(directory, reads, np.arange(len(blocks), dtype=np.int32), progress=progress)
        memory.write_image(blocks, image)
        low = high


def _all_reads(
    table: Table, directory: Directory, parts: list[Part], blocks: _LoadedBlocks
) -> list[ColumnRead]:
    """`_reads` of all segments of some checkpoints."""
    return [
        read
        for part in parts
        for segment in part.manifest.segments
        for read in _reads(table, directory, part, segment, blocks)
    ]


def _reads(
    table: Table, directory: Directory, part: Part, segment: Segment, blocks: _LoadedBlocks
) -> list[ColumnRead]:
    """What to read of one segment.

    Args:
        table: the new table. directory: the loaded one. part: a checkpoint, and its trajectories to load.
        blocks: of all trajectories of the new table.
    """
    records, schema, groups = part.records, table.schema, group_columns(table.schema)
    once = _spans(records, segment, "place", blocks.first_ids[part.places])
    shared = _spans(records, segment, "group_place", blocks.first_ids[part.places]) if groups else []
    steps = _spans(records, segment, "first", blocks.first_ids[part.places])
    begins = _begin_spans(part, segment, blocks)
    if not (once or shared or steps or begins):
        return []
    with directory.child_to_load(part.segment(segment)) as folder, readable(folder.at(CHECKSUMS_NAME)):
        checksums = read_checksums(folder, segment, table.schema)
    return [
        ColumnRead(
            folder=segment.archive or part.segment(segment),
            segment=segment,
            name=name,
            column=column,
            checksums=checksums[name],
            first=first,
            ends=ends,
            places=places,
            place=table._engine.region.column_place(name),
            more=checksums.get(values_of(name), b""),
            before=before,
            begins=is_begin,
        )
        for name, column in schema.items()
        for spans, is_begin in (
            (shared if name in groups else once if column.trajectory else steps, False),
            ([] if column.trajectory else begins, True),
        )
        for first, ends, places, before in spans
    ]


_Span = tuple[Array, Array, Array, Array | None]
"""Of some trajectories, as of `ColumnRead`: first row, the row after the last, place of the blocks, steps before."""


def _spans(records: Array, segment: Segment, kind: str, first_ids: Array) -> list[_Span]:
    """Rows of trajectories in a segment; none, or one entry.

    Args:
        kind: ``"place"``, ``"group_place"``, of columns per trajectory and per group; ``"first"``, of steps.
        first_ids: int64 [n], where the blocks of each begin.
    """
    shares = records.dtype == SHARING
    of = "group_segment" if kind == "group_place" and shares else "segment"
    kind = kind if shares or kind != "group_place" else "place"
    which = np.flatnonzero(records[of] == segment.number)
    if not len(which):
        return []
    which = which[np.argsort(records[kind][which], kind="stable")]
    first, before = records[kind][which].astype(np.int64), None
    rows = own_rows(records[which]) if kind == "first" else 1
    if kind == "first" and shares and records["begin_rows"][which].any():
        before = records["begin_rows"][which]
    return [(first, first + rows, first_ids[which], before)]


def _begin_spans(part: Part, segment: Segment, blocks: _LoadedBlocks) -> list[_Span]:
    """Rows of a segment that trajectories begin with, whose other steps are elsewhere."""
    records, found = part.records, list[_Span]()
    if records.dtype != SHARING:
        return found
    taken = records["begin_rows"]
    which = np.flatnonzero((records["begin_segment"] == segment.number) & (taken > 0))
    zero, size, common = np.zeros_like(which), blocks.steps, blocks.shared[part.places[which]]
    # Each entry has rows that begin and end in one order: whole ones; the first blocks of others; what follows the
    # blocks that these have of others.
    for chosen, low, high in (
        (common == 0, zero, taken[which]),
        (common > 0, zero, zero + blocks.copied * size),
        (common > 0, common * size, taken[which]),
    ):
        some = np.flatnonzero(chosen & (high > low))
        first = records["begin_first"][which[some]]
        begins, ends = first + low[some], first + high[some]
        order = np.lexsort((ends, begins))
        places = blocks.first_ids[part.places[which[some]]]
        if len(some):
            found.append((begins[order], ends[order], places[order], low[some][order]))
    return found


def _value_bytes(table: Table, directory: Directory, part: Part, which: Array) -> tuple[Array, Array]:
    """Bytes of the memory of ragged values that trajectories take, and of those that others have too, int64 [n] each.

    Args:
        part: all trajectories. which: bool, the n among them.

    Raises:
        CheckpointError: a file is damaged.
    """
    part = dataclasses.replace(part, records=part.records[which], places=np.arange(int(which.sum())))
    total: Array = np.full(len(part.places), EXTENT_HEADER, dtype=np.int64)
    shared, groups = np.zeros_like(total), group_columns(table.schema)
    ends = np.cumsum(rows_of(part.records))
    records: Array = np.empty((int(ends[-1]) if len(ends) else 0, 2), dtype=np.int64)
    # One after another: blocks of one step.
    place = np.array([data_address(records), 16, 16, 16, 1], dtype=np.int64)
    first, ids = ends - rows_of(part.records), np.arange(len(records), dtype=np.int32)
    reads = [
        dataclasses.replace(read, place=place)
        for segment in part.manifest.segments
        for read in _reads(table, directory, part, segment, _LoadedBlocks.alone(first))
    ]
    for name, values in table.schema.ragged.items():
        some = [read for read in reads if read.name == name]
        read_columns(directory, some, ids)
        for read in some:
            found = value_bounds(table.schema, directory, read, ids)
            owner = np.searchsorted(first, read.places, side="right") - 1
            size = (found[:, 1] - found[:, 0]) * values.row_bytes
            (shared if name in groups else total)[owner] += -(-size // GRAIN) * GRAIN
    return total, shared


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
        for read in _reads(table, directory, part, segment, _LoadedBlocks.alone(np.arange(len(slots))))
        if read.name == name
    ]
    read_columns(directory, reads, np.arange(len(slots), dtype=np.int32))
    kept[slots] = values.view(np.dtype(table.schema[name].dtype_name)).reshape(-1)


def _check_payload(table: Table, where: str, needed: int) -> None:
    if needed:
        raise UnfitError(
            f"{where} needs payload={needed:,}; the table has {table._engine.region.layout.payload:,}. Load it with as "
            "many."
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
