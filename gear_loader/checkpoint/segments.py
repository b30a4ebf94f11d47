"""Segments: the files that hold the rows of trajectories, and the checksums beside them.

A segment's ``checksums.xxh3`` has the XXH3-64 of each chunk of each column's file, 8 bytes each (big-endian), in the
order of `stored_columns`. The manifest has the size of a chunk and the checksum of ``checksums.xxh3`` itself, so it
does not grow with the data. Manifests of versions 3 and 4 have all checksums themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import xxhash

from gear_loader.checkpoint.directory import REMEDY, Directory, readable
from gear_loader.checkpoint.files import write_small
from gear_loader.checkpoint.json_file import Fields, read_limited
from gear_loader.checkpoint.names import (
    ARCHIVED,
    CHECKSUMS_NAME,
    WRITABLE,
    column_file,
    npy_header,
    numbered,
    segment_folder,
    values_of,
)
from gear_loader.errors import CheckpointError
from gear_loader.storage.schema import Column, Schema

MOST_VALUES = 2**44
"""Limit of the rows of a ragged column's values in a segment."""
_LEAST_CHUNK = 1 << 12
_LEFT_OUT = ("trajectories", "values", "token", "archive")  # of a manifest, where they are empty


def stored_columns(schema: Schema) -> dict[str, Column]:
    """What segments have a file of: the columns, then the rows of the values of ragged ones (`values_of`)."""
    values = {values_of(name): Column(each.dtype, each.shape) for name, each in schema.ragged.items()}
    return {**schema, **values}


@dataclasses.dataclass(frozen=True)
class Segment:
    """Whole trajectories one after another.

    Attributes:
        number: of the segment. steps: of all its trajectories. trajectories: their number, 0 if no column is per
            trajectory.
        chunk_bytes: bytes of a column's file that have a checksum of their own.
        values: rows of the values of each ragged column, by `values_of`.
        xxh128: of the file of checksums. checksums: of each column's file, in a manifest of an earlier version, which
            has no such file.
        token: of the save that wrote it, part of its name in a bucket.
        archive: address of the prefix that has its columns' files; "" if they are in its directory, where the file of
            checksums always is.
    """

    number: int
    steps: int
    trajectories: int
    chunk_bytes: int
    xxh128: str = ""
    checksums: Mapping[str, bytes] | None = None
    values: Mapping[str, int] = dataclasses.field(default_factory=dict)
    token: str = ""
    archive: str = ""

    @property
    def name(self) -> str:
        """Of its directory."""
        return numbered(self.number, self.token)

    @property
    def folder(self) -> str:
        """Path of its directory, relative to the checkpoint."""
        return segment_folder(self.number, self.token)

    def rows(self, name: str, column: Column) -> int:
        """Rows of a file of `stored_columns`."""
        if name in self.values:
            return self.values[name]
        return self.trajectories if column.trajectory else self.steps

    def header(self, name: str, column: Column) -> bytes:
        """The header of such a file."""
        return npy_header(column.dtype_name, self.rows(name, column), column.shape)

    def bytes(self, name: str, column: Column) -> int:
        """Size of such a file."""
        return len(self.header(name, column)) + self.rows(name, column) * column.step_bytes

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        fields = {**vars(self), "values": list(self.values.values())}
        del fields["checksums"]
        return {key: value for key, value in fields.items() if key not in _LEFT_OUT or value}


def parse_segment(fields: Fields, schema: Schema, next_segment: int) -> Segment:
    """The segment of a part of a manifest; it names the checksums' file, or has the checksums of an earlier version."""
    number = fields.integer("number", 1, next_segment - 1)
    steps = fields.integer("steps", 1, 2**48)
    count = fields.integer("trajectories", 1, steps) if schema.per_trajectory else 0
    values = _values(fields, schema) if schema.ragged else {}
    chunk_bytes = fields.integer("chunk_bytes", _LEAST_CHUNK, 2**40)
    token = fields.hexadecimal("token", 16) if "token" in fields.value else ""
    archive = _archive(fields, number) if "archive" in fields.value else ""
    segment = Segment(number, steps, count, chunk_bytes, values=values, token=token, archive=archive)
    if "files" not in fields.value:
        return dataclasses.replace(segment, xxh128=fields.hexadecimal("xxh128", 32))
    files = fields.inner("files")
    if list(files.value) != list(schema):
        raise files.wrong("", list(files.value), f"the columns {list(schema)}")
    checksums = {}
    for name, column in schema.items():
        record = files.record(name, f"{segment.folder}/{column_file(name)}")
        if record.bytes != segment.bytes(name, column):
            raise files.wrong(name, record.bytes, f"{segment.bytes(name, column)} bytes for {steps:,} steps")
        digits = 16 * -(-record.bytes // segment.chunk_bytes)
        checksums[name] = bytes.fromhex(files.inner(name).hexadecimal("chunks", digits))
    return dataclasses.replace(segment, checksums=checksums)


def _archive(fields: Fields, number: int) -> str:
    """The address of a segment in an archive."""
    address = fields.get("archive")
    parts = ARCHIVED.fullmatch(address) if isinstance(address, str) else None
    if parts is None or parts[1] not in WRITABLE or int(parts[2]) != number:
        raise fields.wrong("archive", address, f"the address of segment {number} in an object store")
    return str(address)


def _values(fields: Fields, schema: Schema) -> dict[str, int]:
    """Rows of the values of ragged columns in a segment."""
    counts, names = fields.items("values"), [values_of(name) for name in schema.ragged]
    if len(counts) != len(names) or not all(type(n) is int and 0 <= n <= MOST_VALUES for n in counts):
        raise fields.wrong("values", counts, f"rows of the values of {list(schema.ragged)}")
    return dict(zip(names, counts, strict=True))


def read_checksums(folder: Directory, segment: Segment, schema: Schema) -> Mapping[str, bytes]:
    """The checksums of a segment's chunks by column, 8 bytes each.

    Args:
        folder: of the segment.

    Raises:
        FileNotFoundError: there is no such file. CheckpointError: it is damaged, or cannot be read.
    """
    if segment.checksums is not None:
        return segment.checksums
    files = {name: segment.bytes(name, column) for name, column in stored_columns(schema).items()}
    sizes = {name: 8 * -(-size // segment.chunk_bytes) for name, size in files.items()}
    path, expected = folder.at(CHECKSUMS_NAME), sum(sizes.values())

    def check(size: int) -> None:
        if size != expected:
            raise CheckpointError(f"{path} has {size:,} bytes; expected {expected:,}. {REMEDY}")

    data = read_limited(folder, CHECKSUMS_NAME, check)
    found = xxhash.xxh3_128_hexdigest(data)
    if found != segment.xxh128:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {found}, expected {segment.xxh128}. {REMEDY}"
        )
    checksums, at = {}, 0
    for name, size in sizes.items():
        checksums[name], at = data[at : at + size], at + size
    return checksums


def write_checksums(folder: Directory, checksums: Mapping[str, bytes]) -> str:
    """Write the file of a segment's checksums, in the order of `stored_columns`, and sync it; return its XXH128."""
    with contextlib.suppress(FileNotFoundError):
        if not folder.token:
            folder.remove_file(
                CHECKSUMS_NAME
            )  # of a save that was killed, in a segment of an earlier version
    return write_small(folder, CHECKSUMS_NAME, b"".join(checksums.values())).xxh128


def check_files(directory: Directory, segment: Segment, schema: Schema, *, checksums: bool = True) -> None:
    """Check that the files of a segment, or links to them, exist, and their sizes and checksums' file.

    Of a segment in an archive it checks the file of checksums alone: the sizes of objects were confirmed when they were
    written, and what is read of them is compared.

    Args:
        directory: of the checkpoint. checksums: whether their file is read.

    Raises:
        CheckpointError: a file is missing or has another size, or the file of checksums is damaged.
    """
    with directory.child_to_load(segment.folder) as folder:
        columns = {} if segment.archive else stored_columns(schema)
        sizes = folder.sizes([column_file(name) for name in columns])
        for (name, column), size in zip(columns.items(), sizes, strict=True):
            path, expected = folder.at(column_file(name)), segment.bytes(name, column)
            if size != expected:
                raise CheckpointError(
                    f"{path} has {max(0, size):,} bytes; expected a file of {expected:,}: it was cut or changed. "
                    f"{REMEDY}"
                )
        if checksums:
            with readable(folder.at(CHECKSUMS_NAME)):
                read_checksums(folder, segment, schema)
