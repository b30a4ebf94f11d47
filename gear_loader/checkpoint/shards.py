"""Several tables on disk, one a rank: a directory with a checkpoint of each, and a manifest of them all.

    shards.json                    version, schema, and of each rank's table: where its checkpoint is, size and checksum
                                   of that one's manifest, shard number and counts
    saves/<number>/<rank>/         a checkpoint as `gear_loader.checkpoint` describes it, one a rank
    .gear-loader.lock              held by rank 0 while all save

A save makes a new directory in ``saves``, into which files of the save before that are still right come as hard links.
Replacing ``shards.json`` is what makes it the checkpoint; only then goes the directory of the save before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from typing import Any

import xxhash

from gear_loader.checkpoint.entries import read_entries
from gear_loader.checkpoint.files import sync_directory, write_small
from gear_loader.checkpoint.manifest import (
    LARGEST_COUNT,
    LOCK_NAME,
    MANIFEST_NAME,
    REMEDY,
    SEGMENTS_NAME,
    SHARDS_NAME,
    Fields,
    FileRecord,
    Manifest,
    column_file,
    index_file,
    manifest_bytes,
    read_fields,
    read_manifest,
    schema_of,
    segment_folder,
)
from gear_loader.checkpoint.writing import check_owned
from gear_loader.errors import CheckpointError
from gear_loader.ids import LARGEST_ORIGIN, following
from gear_loader.schema import Schema

__all__ = [
    "Shard",
    "ShardsManifest",
    "check_shards_directory",
    "link_shard",
    "next_number",
    "open_shard",
    "read_shards",
    "shard_folder",
    "shard_of",
    "sweep_saves",
    "write_shards",
]

SAVES_NAME = "saves"
FORMAT = "gear-loader distributed checkpoint"
VERSION = 1
_PART = ".part"
_SAVE_NAME = re.compile(r"[0-9]{6,12}")
_MOST_RANKS = LARGEST_ORIGIN + 1


def shard_folder(number: int, rank: int) -> str:
    """Where the checkpoint of a rank's table lies that belongs to save `number`, relative to the directory."""
    return f"{SAVES_NAME}/{number:06d}/{rank:05d}"


@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's checkpoint, as the manifest of all has it.

    Attributes:
        save, table: as in the checkpoint's own manifest.
        bytes, xxh128: size and checksum of that manifest.
        origin: the table's shard number, None if it had none.
        num_trajectories, num_steps: what there is.
        next_sequence: no trajectory there has had this number or a higher one, and no id has it.
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
    """Everything that `shards.json` says.

    Attributes:
        save: random name of this save. number: its number, after which its directory is called.
        shards: of each rank.
    """

    schema: Schema
    save: str
    number: int
    shards: tuple[Shard, ...]

    def to_bytes(self) -> bytes:
        """The file's contents."""
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


def read_shards(directory: str) -> ShardsManifest:
    """Read and check `shards.json`.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version.
    """
    path = os.path.join(directory, SHARDS_NAME)
    missing = (
        f"{directory} is no checkpoint of several tables: it has no {SHARDS_NAME}. Give the directory that "
        "gear_loader.distributed.save() wrote; a first save that was killed leaves none. What Table.save() wrote is "
        "loaded with Table.load()."
    )
    fields, _ = read_fields(path, FORMAT, (VERSION,), missing=missing)
    schema = schema_of(fields)
    number = fields.integer("number", 1, 10**12 - 1)
    world_size = fields.integer("world_size", 1, _MOST_RANKS)
    rows = fields.items("shards")
    if len(rows) != world_size:
        raise fields.wrong("shards", f"{len(rows)} of them", f"{world_size}, one a rank")
    shards = []
    for rank, row in enumerate(rows):
        inner = Fields(row, path, f"shards[{rank}]")
        inner.choice("path", shard_folder(number, rank))
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


def open_shard(directory: str, shards: ShardsManifest, rank: int) -> tuple[str, Manifest]:
    """The directory of one rank's checkpoint, and its manifest.

    Raises:
        CheckpointError: it is not the one that `shards.json` names, or damaged.
    """
    folder = os.path.join(directory, shard_folder(shards.number, rank))
    path, shard = os.path.join(folder, MANIFEST_NAME), shards.shards[rank]
    found = _record(path)
    if (found.bytes, found.xxh128) != (shard.bytes, shard.xxh128):
        raise CheckpointError(
            f"{path} is not the one that {os.path.join(directory, SHARDS_NAME)} names: it has {found.bytes:,} bytes "
            f"with the checksum {found.xxh128}, expected {shard.bytes:,} with {shard.xxh128}. It is damaged, or of "
            f"another save. {REMEDY}"
        )
    manifest = read_manifest(folder)
    said = (shard.save, shard.table, shard.origin, shard.num_trajectories, shard.num_steps)
    has = (manifest.save, manifest.table, manifest.origin, manifest.num_trajectories, manifest.num_steps)
    if has != said or manifest.schema.to_json() != shards.schema.to_json():
        raise CheckpointError(
            f"{path} contradicts {os.path.join(directory, SHARDS_NAME)}: {has} and {said}. {REMEDY}"
        )
    return folder, manifest


def shard_of(folder: str) -> Shard:
    """What the manifest of all says of a checkpoint that has just been written."""
    record = _record(os.path.join(folder, MANIFEST_NAME))
    manifest = read_manifest(folder)
    entries = read_entries(folder, manifest)
    return Shard(
        save=manifest.save,
        table=manifest.table,
        bytes=record.bytes,
        xxh128=record.xxh128,
        origin=manifest.origin,
        num_trajectories=manifest.num_trajectories,
        num_steps=manifest.num_steps,
        next_sequence=max(manifest.next_sequence, following(entries.ident)),
    )


def _record(path: str) -> FileRecord:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise CheckpointError(f"{path} is missing or cannot be read: {error}. {REMEDY}") from error
    return FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))


# Writing ---------------------------------------------------------------------------------------------


def check_shards_directory(directory: str) -> None:
    """Refuse to write into a directory that holds anything but such a checkpoint, or the rest of a first save."""
    known = (LOCK_NAME, SAVES_NAME, SHARDS_NAME + _PART)
    check_owned(directory, SHARDS_NAME, lambda name: name in known, what="checkpoint of several tables")


def next_number(directory: str, old: ShardsManifest | None) -> int:
    """A number that no save there has, finished or not."""
    numbers = [old.number] if old else []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(os.path.join(directory, SAVES_NAME)):
            if _SAVE_NAME.fullmatch(name):
                numbers.append(int(name))
    return max(numbers, default=0) + 1


def link_shard(directory: str, old: ShardsManifest, table: str, parent: str, folder: str) -> None:
    """Fill a new directory with what the save before has of a table, so that what is still right is not written again.

    Args:
        table, parent: names of the table, and of the save that it was loaded from.
        folder: of the new checkpoint; it is empty.

    Raises:
        CheckpointError: what there is of it is damaged.
    """
    ranks = [rank for rank, shard in enumerate(old.shards) if shard.table == table or shard.save == parent]
    if not ranks:
        return
    source, manifest = open_shard(directory, old, ranks[0])
    files = {segment_folder(segment.number): list(segment.files) for segment in manifest.segments}
    os.makedirs(os.path.join(folder, SEGMENTS_NAME), exist_ok=True)
    for segment, columns in files.items():
        os.mkdir(os.path.join(folder, segment))
        for column in columns:
            _link(
                os.path.join(source, segment, column_file(column)),
                os.path.join(folder, segment, column_file(column)),
            )
        sync_directory(os.path.join(folder, segment))
    for name in (index_file(manifest.saves), MANIFEST_NAME):
        _link(os.path.join(source, name), os.path.join(folder, name))


def _link(source: str, target: str) -> None:
    """A second name for a file, or a copy where the file system has none."""
    try:
        os.link(source, target)
        return
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} is missing. {REMEDY}") from error
    except OSError:
        pass
    with open(source, "rb") as file, open(target, "xb") as copy:
        shutil.copyfileobj(file, copy, 8 << 20)
        copy.flush()
        os.fsync(copy.fileno())


def write_shards(directory: str, shards: ShardsManifest) -> None:
    """Make what all ranks have written the checkpoint."""
    path = os.path.join(directory, SHARDS_NAME)
    write_small(path + _PART, shards.to_bytes())
    for folder in (f"{SAVES_NAME}/{shards.number:06d}", SAVES_NAME, "."):
        sync_directory(os.path.join(directory, folder))
    os.replace(path + _PART, path)
    sync_directory(directory)
    with contextlib.suppress(OSError):  # the directory's own name, if it is new
        sync_directory(os.path.dirname(directory))


def sweep_saves(directory: str, kept: ShardsManifest | None) -> None:
    """Remove what the checkpoint does not name. What cannot be removed is left to the next save."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(directory, SHARDS_NAME + _PART))
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.join(directory, SAVES_NAME)):
            if _SAVE_NAME.fullmatch(name) and (kept is None or int(name) != kept.number):
                shutil.rmtree(os.path.join(directory, SAVES_NAME, name), ignore_errors=True)
