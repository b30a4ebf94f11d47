"""Checkpoints of several tables, one per rank: a directory with a checkpoint of each, and a common manifest.

    shards.json                    version, schema, and for each rank: path of its checkpoint, size and checksum of the
                                   checkpoint's manifest, shard number and counters
    saves/<number>/<rank>/         a checkpoint of one rank, see `gear_loader.checkpoint`
    .gear-loader.lock              locked by rank 0 during a save

A save creates a new directory in ``saves`` and hard-links the files of the previous save that are still valid.
Replacing ``shards.json`` makes the new save valid; then the directory of the previous save is removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
from typing import Any

import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.checkpoint.files import write_small
from gear_loader.checkpoint.housekeeping import check_owned, refuse_links, remove_checkpoint
from gear_loader.checkpoint.index import read_records
from gear_loader.checkpoint.json_file import (
    Fields,
    FileRecord,
    manifest_bytes,
    read_fields,
    read_limited,
    schema_of,
)
from gear_loader.checkpoint.manifest import LARGEST_COUNT, Manifest, read_manifest
from gear_loader.checkpoint.names import (
    CHECKSUMS_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PART,
    SEGMENTS_NAME,
    SHARDS_NAME,
    column_file,
)
from gear_loader.checkpoint.opening import open_to_load
from gear_loader.checkpoint.segments import stored_columns
from gear_loader.errors import CheckpointError
from gear_loader.storage.ids import LARGEST_ORIGIN, following
from gear_loader.storage.schema import Schema

SAVES_NAME = "saves"
FORMAT = "gear-loader distributed checkpoint"
VERSION = 1
_SAVE_NAME = re.compile(r"[0-9]{6,12}")
_RANK_NAME = re.compile(r"[0-9]{5}")
_RANDOM_NUMBERS = 1 << 20
_MOST_RANKS = LARGEST_ORIGIN + 1


def shard_folder(number: int, rank: int) -> str:
    """Path of the checkpoint of one rank in save `number`, relative to the directory."""
    return f"{SAVES_NAME}/{number:06d}/{rank:05d}"


@dataclasses.dataclass(frozen=True)
class Shard:
    """The record of one rank's checkpoint in the common manifest.

    Attributes:
        save, table: as in the checkpoint's own manifest.
        bytes, xxh128: size and checksum of that manifest.
        origin: the table's shard number, or None.
        num_trajectories, num_steps: size of the saved table.
        next_sequence: sequence number above those of all trajectories and ids of the table.
    """

    save: str
    table: str
    bytes: int
    xxh128: str
    origin: int | None
    num_trajectories: int
    num_steps: int
    next_sequence: int


@dataclasses.dataclass(frozen=True)
class ShardsManifest:
    """Contents of `shards.json`.

    Attributes:
        schema: of all tables.
        save: random name of this save. number: its number, the name of its directory.
        shards: record of each rank's checkpoint.
    """

    schema: Schema
    save: str
    number: int
    shards: tuple[Shard, ...]

    def to_bytes(self) -> bytes:
        """Serialize the manifest."""
        shards = [
            {"path": shard_folder(self.number, rank), **dataclasses.asdict(shard)}
            for rank, shard in enumerate(self.shards)
        ]
        fields: dict[str, Any] = {
            "schema": self.schema.to_json(),
            "save": self.save,
            "number": self.number,
            "world_size": len(self.shards),
            "shards": shards,
        }
        return manifest_bytes(FORMAT, VERSION, fields)


def _no_shards(directory: str) -> str:
    return (
        f"{directory} is no checkpoint of several tables: it has no {SHARDS_NAME}. Give the directory that "
        "gear_loader.distributed.save() wrote; a first save that was killed leaves no manifest. Load a checkpoint of "
        "Table.save() with Table.load()."
    )


def open_shards(path: str) -> Directory:
    """Open the directory of a checkpoint of several tables for loading.

    Raises:
        CheckpointError: the directory does not exist or cannot be read.
    """
    return open_to_load(path, _no_shards(path))


def read_shards(directory: Directory) -> ShardsManifest:
    """Read and check `shards.json`.

    Raises:
        CheckpointError: the manifest is missing, damaged or of another version.
    """
    path = directory.at(SHARDS_NAME)
    fields = read_fields(directory, SHARDS_NAME, FORMAT, VERSION, missing=lambda: _no_shards(directory.path))
    schema = schema_of(fields)
    number = fields.integer("number", 1, 10**12 - 1)
    world_size = fields.integer("world_size", 1, _MOST_RANKS)
    rows = fields.items("shards")
    if len(rows) != world_size:
        raise fields.wrong("shards", f"a list of {len(rows)}", f"{world_size} items, one for each rank")
    shards = []
    for rank, row in enumerate(rows):
        inner = Fields(row, path, f"shards[{rank}]")
        inner.exactly("path", shard_folder(number, rank))
        shards.append(
            Shard(
                save=inner.hexadecimal("save", 16),
                table=inner.hexadecimal("table", 16),
                bytes=inner.integer("bytes", 1, LARGEST_COUNT),
                xxh128=inner.hexadecimal("xxh128", 32),
                origin=inner.origin("origin"),
                num_trajectories=inner.integer("num_trajectories", 0, 2**31 - 1),
                num_steps=inner.integer("num_steps", 0, LARGEST_COUNT),
                next_sequence=inner.integer("next_sequence", 0, LARGEST_COUNT),
            )
        )
    return ShardsManifest(schema, fields.hexadecimal("save", 16), number, tuple(shards))


def open_shard(directory: Directory, shards: ShardsManifest, rank: int) -> tuple[Directory, Manifest]:
    """The directory of one rank's checkpoint, which the caller closes, and its manifest.

    Raises:
        CheckpointError: it is not the one that `shards.json` names, or damaged.
    """
    folder = directory.child_to_load(shard_folder(shards.number, rank))
    try:
        return folder, _manifest(directory, folder, shards, rank)
    except BaseException:
        folder.__exit__()
        raise


def _manifest(directory: Directory, folder: Directory, shards: ShardsManifest, rank: int) -> Manifest:
    path, shard = folder.at(MANIFEST_NAME), shards.shards[rank]
    other = f"{path} is not the one that {directory.at(SHARDS_NAME)} names: it has"
    found = _record(folder, shard.bytes, other)
    if found.xxh128 != shard.xxh128:
        raise CheckpointError(
            f"{other} the checksum {found.xxh128}, expected {shard.xxh128}. It is damaged, or of another save. {REMEDY}"
        )
    manifest = read_manifest(folder)
    expected = (shard.save, shard.table, shard.origin, shard.num_trajectories, shard.num_steps)
    actual = (manifest.save, manifest.table, manifest.origin, manifest.num_trajectories, manifest.num_steps)
    if actual != expected or manifest.schema.to_json() != shards.schema.to_json():
        raise CheckpointError(
            f"{path} contradicts {directory.at(SHARDS_NAME)}: {actual} and {expected}. {REMEDY}"
        )
    return manifest


def shard_of(folder: Directory) -> Shard:
    """The record of a checkpoint that was just written."""
    record = _record(folder)
    manifest = read_manifest(folder)
    records = read_records(folder, manifest)
    return Shard(
        save=manifest.save,
        table=manifest.table,
        bytes=record.bytes,
        xxh128=record.xxh128,
        origin=manifest.origin,
        num_trajectories=manifest.num_trajectories,
        num_steps=manifest.num_steps,
        next_sequence=max(manifest.next_sequence, following(records["ident"])),
    )


def _record(folder: Directory, expected: int | None = None, other: str = "") -> FileRecord:
    """Size and checksum of a checkpoint's manifest.

    Args:
        expected: bytes that it must have. other: beginning of the error if it has not.
    """

    def check(size: int) -> None:
        if expected is not None and size != expected:
            raise CheckpointError(
                f"{other} {size:,} bytes, expected {expected:,}. It is damaged, or of another save. {REMEDY}"
            )

    try:
        data = read_limited(folder, MANIFEST_NAME, check)
    except FileNotFoundError as error:
        path = folder.at(MANIFEST_NAME)
        raise CheckpointError(f"{path} is missing or cannot be read: {error}. {REMEDY}") from error
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


# Writing ---------------------------------------------------------------------------------------------


def check_shards_directory(directory: Directory) -> None:
    """Check that a directory holds a checkpoint of several tables, an unfinished first save, or nothing.

    Raises:
        CheckpointError: it holds other files, or one of the checkpoint's directories or files is a symbolic link.
    """
    known = (LOCK_NAME, SAVES_NAME, SHARDS_NAME + PART)
    check_owned(directory, SHARDS_NAME, lambda name: name in known, what="checkpoint of several tables")
    directory.refuse_links(lambda name: name == SHARDS_NAME or name in known)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), directory.child(SAVES_NAME) as saves:
        saves.refuse_links(lambda name: _SAVE_NAME.fullmatch(name) is not None)
        for name in filter(_SAVE_NAME.fullmatch, saves.names()):
            with contextlib.suppress(NotADirectoryError), saves.child(name) as save:
                save.refuse_links(lambda name: _RANK_NAME.fullmatch(name) is not None)


def next_number(directory: Directory, old: ShardsManifest | None) -> int:
    """A number that no save in the directory has, finished or not."""
    number = old.number + 1 if old else 1
    if directory.token:  # a listing may be late
        return number + secrets.randbelow(_RANDOM_NUMBERS)
    with contextlib.suppress(FileNotFoundError), directory.child(SAVES_NAME) as saves:
        while saves.has(f"{number:06d}"):
            number += 1
    return number


def link_shard(directory: Directory, old: ShardsManifest, table: str, parent: str, folder: Directory) -> None:
    """Hard-link a table's files of the previous save into a new directory, so that they are not written again.

    Args:
        directory: of all checkpoints. old: manifest of the previous save.
        table, parent: names of the table, and of the save it was loaded from.
        folder: empty directory of the new checkpoint.

    Raises:
        CheckpointError: the previous checkpoint of the table is damaged.
    """
    rank = _rank_of(old, table, parent)
    if rank is None:
        return
    source, manifest = open_shard(directory, old, rank)
    with source, folder.open_or_make(SEGMENTS_NAME) as segments:
        for segment in manifest.segments:
            segments.mkdir(segment.name)
            with source.child_to_load(segment.folder) as before, segments.child(segment.name) as new:
                for column in stored_columns(manifest.schema):
                    _link(before, new, column_file(column))
                if segment.checksums is None:
                    _link(before, new, CHECKSUMS_NAME)
                new.sync()
        for name in (manifest.index_name, MANIFEST_NAME):
            _link(source, folder, name)


def check_shard_links(directory: Directory, old: ShardsManifest, table: str, parent: str) -> None:
    """Check that no file of a table in the previous save is a symbolic link.

    Raises:
        CheckpointError: one is a link; the message names it.
    """
    rank = _rank_of(old, table, parent)
    if rank is not None:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            directory.child(shard_folder(old.number, rank)) as folder,
        ):
            refuse_links(folder)


def _rank_of(old: ShardsManifest, table: str, parent: str) -> int | None:
    """The rank whose checkpoint in the previous save is of this table, or None."""
    ranks = [rank for rank, shard in enumerate(old.shards) if shard.table == table or shard.save == parent]
    return ranks[0] if ranks else None


def _link(source: Directory, target: Directory, name: str) -> None:
    try:
        source.link(name, name, target)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source.at(name)} is missing. {REMEDY}") from error


def write_shards(directory: Directory, shards: ShardsManifest) -> None:
    """Write the common manifest, which makes the save valid."""
    write_small(directory, SHARDS_NAME + PART, shards.to_bytes())
    with directory.child(SAVES_NAME) as saves:
        with saves.child(f"{shards.number:06d}") as save:
            save.sync()
        saves.sync()
    directory.sync()
    directory.rename(SHARDS_NAME + PART, SHARDS_NAME)
    directory.sync()
    directory.sync_parent()  # the directory itself may be new


def sweep_saves(
    directory: Directory, kept: ShardsManifest | None, replaced: ShardsManifest | None = None
) -> None:
    """Remove saves that the manifest does not name. The next save removes files that cannot be removed now.

    Args:
        replaced: as for `gear_loader.checkpoint.housekeeping.sweep`.
    """
    with contextlib.suppress(OSError):
        directory.remove_file(SHARDS_NAME + PART)
    with contextlib.suppress(OSError), directory.child(SAVES_NAME) as saves:
        for name in saves.names():
            if not _SAVE_NAME.fullmatch(name) or (kept is not None and int(name) == kept.number):
                continue
            if (replaced is not None and int(name) == replaced.number) or saves.is_abandoned(name):
                _remove_save(saves, name)


def _remove_save(saves: Directory, name: str) -> None:
    with contextlib.suppress(OSError):
        with saves.child(name) as save:
            for rank in filter(_RANK_NAME.fullmatch, save.names()):
                with contextlib.suppress(OSError):
                    remove_checkpoint(save, rank)
        saves.rmdir(name)


def remove_shard(directory: Directory, number: int, rank: int) -> None:
    """Remove the files of one rank of a failed save. The next save removes files that cannot be removed now."""
    folder, name = os.path.split(shard_folder(number, rank))
    with contextlib.suppress(OSError), directory.child(SAVES_NAME) as saves:
        with saves.child(os.path.basename(folder)) as save:
            remove_checkpoint(save, name)
        saves.rmdir(os.path.basename(folder))  # succeeds for the last rank
