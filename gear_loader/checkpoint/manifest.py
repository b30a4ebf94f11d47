"""The manifest of a checkpoint of one table: its contents, and reading it from a file that is not trusted."""

from __future__ import annotations

import dataclasses
from typing import Any

from gear_loader.checkpoint.directory import Directory, open_to_load
from gear_loader.checkpoint.json_file import (
    LEAST_CHUNK,
    Fields,
    FileRecord,
    count_column_files,
    manifest_bytes,
    read_fields,
    schema_of,
    shortened,
)
from gear_loader.checkpoint.names import (
    MANIFEST_NAME,
    SHARDS_NAME,
    column_file,
    index_file,
    npy_header,
    segment_folder,
)
from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table_rules import Rules

__all__ = [
    "CHUNK_BYTES",
    "LARGEST_COUNT",
    "Manifest",
    "Segment",
    "no_manifest",
    "open_checkpoint",
    "read_manifest",
]

VERSION = 3
FORMAT = "gear-loader checkpoint"
CHUNK_BYTES = 4 << 20
"""Bytes of a column's file that have a checksum of their own."""
LARGEST_COUNT = 2**62
"""Largest value of a counter."""
_LIMIT = 2**37  # of the sizes, as in `Table.create`


@dataclasses.dataclass(frozen=True)
class Segment:
    """Whole trajectories one after another.

    Attributes:
        number: of the segment. steps: of all its trajectories. trajectories: their number, 0 if no column is per
            trajectory.
        files: record of each column's file. chunk_bytes: bytes of the files that have a checksum of their own.
    """

    number: int
    steps: int
    files: dict[str, FileRecord]
    chunk_bytes: int
    trajectories: int = 0

    def rows(self, column: Column) -> int:
        """Rows of a column's file."""
        return self.trajectories if column.trajectory else self.steps


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`.

    Attributes:
        save: random name of this save. table: random name of the saved table.
        saves: number of saves into the directory, part of the index's file name.
        next_segment: number above all segments ever written.
        rules: eviction, expiry and rate limits of the table.
        origin: the table's shard number, or None.
        next_sequence: sequence number above all trajectories ever committed.
        num_inserted, num_sampled: trajectories added and rows drawn so far, as rate limiters count them.
        policy_version: version of the policy, 0 in a table without versions, whose file has no such field.
        num_trajectories, num_steps: size of the saved table.
        index: record of the index file. segments: those that the index refers to.
    """

    schema: Schema
    save: str
    table: str
    saves: int
    next_segment: int
    block_steps: int
    max_steps: int
    max_trajectories: int
    num_blocks: int
    rules: Rules
    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int
    policy_version: int
    num_trajectories: int
    num_steps: int
    index: FileRecord
    segments: tuple[Segment, ...]

    def to_bytes(self) -> bytes:
        """Serialize the manifest."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["schema"] = self.schema.to_json()
        fields["rules"] = self.rules.to_json()
        if self.rules.version is None:
            del fields["policy_version"]
        index = {"bytes": self.index.bytes, "xxh128": self.index.xxh128}
        fields["index"] = {"path": index_file(self.saves), **index}
        fields["segments"] = [
            {
                "number": segment.number,
                "steps": segment.steps,
                **({"trajectories": segment.trajectories} if self.schema.per_trajectory else {}),
                "chunk_bytes": segment.chunk_bytes,
                "files": {
                    name: {
                        "path": f"{segment_folder(segment.number)}/{column_file(name)}",
                        **vars(record),
                    }
                    for name, record in segment.files.items()
                },
            }
            for segment in self.segments
        ]
        return manifest_bytes(FORMAT, VERSION, fields)


def no_manifest(directory: str, *, several: bool = False) -> str:
    """Error text for a directory without a manifest.

    Args:
        several: whether it is a checkpoint of several tables.
    """
    if several:
        return (
            f"{directory} is a checkpoint of several tables: it has {SHARDS_NAME} and no {MANIFEST_NAME}. Load it with "
            "gear_loader.distributed.load()."
        )
    return (
        f"{directory} is no checkpoint: it has no {MANIFEST_NAME}. Give the directory that Table.save() wrote; "
        "a first save that was killed leaves no manifest."
    )


def open_checkpoint(path: str) -> Directory:
    """Open the directory of a checkpoint of one table for loading.

    Raises:
        CheckpointError: the directory does not exist or cannot be read.
    """
    return open_to_load(path, no_manifest(path))


def read_manifest(directory: Directory, name: str = MANIFEST_NAME) -> Manifest:
    """Read and check `manifest.json`, or the previous one.

    Raises:
        CheckpointError: the manifest is missing, damaged or of another version.
    """
    missing = no_manifest(directory.path, several=directory.has(SHARDS_NAME))
    fields = read_fields(directory, name, FORMAT, VERSION, missing=missing, count=count_column_files)
    return _parse(fields)


def _parse(fields: Fields) -> Manifest:
    schema = schema_of(fields)
    saves = fields.integer("saves", 1, 10**12 - 1)
    next_segment = fields.integer("next_segment", 1, 10**12 - 1)
    segments: list[Segment] = []
    numbers: set[int] = set()
    for i, value in enumerate(fields.items("segments")):
        inner = Fields(value, fields.path, f"segments[{i}]")
        number = inner.integer("number", 1, next_segment - 1)
        if number in numbers:
            raise inner.wrong("number", number, "a number that no other segment has")
        numbers.add(number)
        steps = inner.integer("steps", 1, 2**48)
        count = inner.integer("trajectories", 1, steps) if schema.per_trajectory else 0
        chunk_bytes = inner.integer("chunk_bytes", LEAST_CHUNK, 2**40)
        files = Fields(inner.get("files"), fields.path, f"segments[{i}].files")
        if list(files.value) != list(schema):
            raise files.wrong("", list(files.value), f"the columns {list(schema)}")
        records = {}
        for name, column in schema.items():
            path = f"{segment_folder(number)}/{column_file(name)}"
            records[name] = files.record(name, path, chunk_bytes)
            rows = count if column.trajectory else steps
            size = len(npy_header(column.dtype_name, rows, column.shape)) + rows * column.step_bytes
            if records[name].bytes != size:
                unit = "trajectories" if column.trajectory else "steps"
                raise files.wrong(name, records[name].bytes, f"{size} bytes for {rows:,} {unit}")
        segments.append(Segment(number, steps, records, chunk_bytes, count))
    max_steps = fields.integer("max_steps", 1, _LIMIT - 1)
    max_trajectories = fields.integer("max_trajectories", 1, 2**31 - 1)
    num_trajectories = fields.integer("num_trajectories", 0, max_trajectories)
    next_sequence = fields.integer("next_sequence", num_trajectories, LARGEST_COUNT)
    rules = _rules(fields, schema, max_trajectories)
    return Manifest(
        schema=schema,
        save=fields.hexadecimal("save", 16),
        table=fields.hexadecimal("table", 16),
        saves=saves,
        next_segment=next_segment,
        block_steps=fields.integer("block_steps", 1, _LIMIT - 1),
        max_steps=max_steps,
        max_trajectories=max_trajectories,
        num_blocks=fields.integer("num_blocks", 1, 2**31 - 1),
        rules=rules,
        origin=fields.origin("origin"),
        next_sequence=next_sequence,
        num_inserted=fields.integer("num_inserted", num_trajectories, next_sequence),
        num_sampled=fields.integer("num_sampled", 0, LARGEST_COUNT),
        policy_version=0 if rules.version is None else fields.integer("policy_version", 0, LARGEST_COUNT),
        num_trajectories=num_trajectories,
        num_steps=fields.integer("num_steps", num_trajectories, max_steps),
        index=fields.record("index", index_file(saves)),
        segments=tuple(segments),
    )


def _rules(fields: Fields, schema: Schema, max_trajectories: int) -> Rules:
    inner = Fields(fields.get("rules"), fields.path, "rules")
    known = list(Rules().to_json())
    if "version" in inner.value:
        known += ["version", "max_lag"]
    for key in known:
        value = inner.get(key)
        try:
            given = {key: value} if key != "max_lag" else {key: value, "version": inner.get("version")}
            rules = Rules.from_json(given)
            rules.check_columns(schema)
        except (SchemaError, ArithmeticError, LookupError, TypeError) as error:
            raise inner.wrong(key, value, f"a rule of a table ({shortened(str(error))})") from error
        if rules.rate_limiter is not None and rules.rate_limiter.min_size > max_trajectories:
            expected = f"a min_size of at most max_trajectories={max_trajectories:,}"
            raise inner.wrong(key, value, expected)
    if len(inner.value) != len(known):
        raise inner.wrong("", sorted(inner.value), f"the fields {known}")
    return Rules.from_json(inner.value)
