"""The layout of a region, computed from the schema and the sizes.

    offset 0        preamble   64 B: magic, format version, JSON bytes, region bytes, CRC-32 of these and the JSON
                    JSON       schema and sizes (everything needed to compute the rest again)
                    counters   int64 [64]
                    readers    int64 [256, 4]             read tickets: process id, start of the process, epoch
                                                          (0: free), number of the ticket
                    extent     int64 [T, 3]               slot -> length in steps, first entry in block_ids, number
                                                          of final steps after the last one (0 or 1)
                    generation int64 [T]                  number of allocations of the slot
                    sequence   int64 [T]                  number of the trajectory in order of commitment
                    ident      int64 [T]                  global id that it was added with, or -1
                    epoch      int64 [T]                  epoch of the retirement
                    owner      int64 [T, 2]               pid and start time of the slot's writer
                    stream     int32 [T]                  stream of steps that it was cut from, or 0
                    created    int64 [T]                  time of the commit, nanoseconds of the monotonic clock
                    revised    int64 [T]                  2 * entries written to `touched` when its priority was last
                                                          set, + 1 if that of all its steps was, too; 0 if it never was
                    filled     int64 [T, 2]               [0, 2] without late columns. Generation that the bits are of
                                                          (of others none is set); bit i: late column number i of the
                                                          trajectory is filled
                    prefix     int64 [T, 5]               [0, 5] of a table without prefixes. Generation that the others
                                                          are of; sequence number of the trajectory whose first steps
                                                          this one begins with, and how many; slot and generation that
                                                          the values per group were stored with
                    moved      uint32 [T]                 new place of the block table during a compaction
                    priority   float32 [T]                latest priority, or -1
                    sampled    int32 [T]                  number of draws, if counted
                    state      int32 [T]                  FREE, WRITING, READY, RETIRED
                    links      int32 [T, 2]               older and newer neighbour in order of commitment
                    block_ids  int32 [2, H]               block tables: a trajectory's blocks, one after another
                    free_slots, retired  int32 [T]        stack; ring in order of retirement
                    touched    int32 [T]                  ring of the slots committed, retired or revised last
                    free_blocks          int32 [N]        stack of those that writers get
                    uses                 int32 [N, 2]     trajectories that use a block: live ones, all
                    lowest               float32 [G]      lower bound of the priorities of each group of slots
                    parked               int32 [N]        blocks of trajectories that were moved, until nobody
                                                          reads them any more; [1] of a table of which nothing moves
                    stored               int64 [T, 11]    where a trajectory is on disk, see `disk_copies.py`; [T, 21]
                                                          of a table with prefixes, [1, ...] without a disk tier
                    tier_priority        int64 [T]        [0] where nothing moves. Lower half of the generation, and
                                                          latest priority that a dataset has given (float32)
                    versions             int64 [T]        version of the policy of a trajectory that lies on disk only;
                                                          [0] without a disk tier, or `version`
                    tier_counts          int64 [16]       of the tiers, see `tier_counts.py`; [0] where nothing moves
    next page       record     [N blocks, block_stride B] of a packed table: block_steps records, then padding to a
                                                          multiple of 128 B. A record is one step of all narrow columns
                    column 0   [N blocks, block_stride B] of each other column: block_steps steps, then such padding; of
                                                          a column per trajectory room for one value, which is in the
                                                          trajectory's first block
                    column 1   ...
                    payload    values of ragged columns, see `operations/extents.py`; [0] without them
                    tail       128 B, then up to a whole page
    region bytes    log        of values that are being overwritten, see `edit_log.py`; once there were any

T is `max_trajectories`, N the number of blocks, H = ceil(1.5 N), or with prefixes 1.5 times the entries that
`max_steps` steps have; G the number of groups of slots, about sqrt(T). Of a table on a GPU with a host part the first
`host_blocks` of the N blocks lie in the region, where N is their number, and the others in the GPU's memory. Every
array starts on a multiple of 128 B. A trajectory that lies on disk only has no entries in block_ids: its first entry is
`operations.view.ON_DISK`. Because a column's base and block stride are such multiples, a 128-byte line never
holds bytes of two blocks, and whole lines around a step lie inside the region: the GPU kernel reads only whole lines.

A record holds the columns of less than 128 bytes a step, those of the largest alignment first, so that each lies at a
multiple of its own; of float32 [4], int64, float32, and bool::

    byte   0               16      24  28 29  32
           | observation    | action |rew|t|  |    the next step's record follows
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import re
import reprlib
import struct
import zlib
from typing import Any

import numpy as np

from gear_loader.errors import RegionError, SchemaError
from gear_loader.storage.disk import Tier
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.shared_memory import MAGIC
from gear_loader.storage.table_rules import Rules
from gear_loader.storage.tier_counts import COPIES_WIDTH, COUNTS, SHARED_WIDTH

LINE = 128
"""Bytes of one line: the unit in which a GPU reads host memory, and the alignment of all arrays."""

FORMAT_VERSION = 16
_WORD = 16  # bytes that a GPU copies with fewest instructions; a record is padded to whole ones where that costs little
HEADER_LIMIT = 1 << 20
"""Largest size of preamble and JSON, in bytes."""
MAX_READERS = 256
LARGEST_SIZE = 2**37 - 1
"""Limit of `max_steps` and `block_steps`."""
MOST_PAYLOAD = 2**50
"""Limit of `payload`."""
LARGEST_COUNT = 2**31 - 1
"""Limit of `max_trajectories` and `num_blocks`: indices are 32 bits long."""
_PREAMBLE = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<I")


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def most_blocks(max_steps: int, max_trajectories: int, block_steps: int) -> int:
    """Number of blocks that trajectories of `max_steps` steps together take at most, without their final steps."""
    return (max_steps + min(max_steps, max_trajectories) * (block_steps - 1)) // block_steps


def block_unit(column: Column) -> int:
    """What the bytes of a block of a column are a multiple of: a line, or of a ragged one, whose records only the host
    gathers, a record."""
    return LINE if column.ragged is None else column.step_bytes


@dataclasses.dataclass(frozen=True)
class ColumnLayout:
    """Place of one column, in bytes.

    Attributes:
        offset: from the region's start to the column's first step.
        step_bytes: bytes of a step.
        block_stride: from block to block, a multiple of 128; of the records of a ragged column, which the host gathers,
            of 16.
        step_stride: from step to step in a block: `step_bytes`, or the bytes of a record.
        inside: offset inside the record; 0 of a column that lies by itself.
    """

    offset: int
    step_bytes: int
    block_stride: int
    step_stride: int
    inside: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether other columns lie between the steps."""
        return self.step_stride != self.step_bytes

    @property
    def base(self) -> int:
        """Offset of the first block, a multiple of 128; columns of one record have the same."""
        return self.offset - self.inside


@dataclasses.dataclass(frozen=True)
class Record:
    """One step of several columns: offset of each in the record, and bytes of the record; see `block_unit`."""

    offsets: dict[str, int]
    bytes: int
    block_unit: int

    @classmethod
    def of(cls, schema: Schema) -> Record | None:
        """The record of a schema's narrow columns; None if it has less than two."""
        narrow = {
            name: column.step_bytes for name, column in schema.steps.items() if column.step_bytes < LINE
        }
        if len(narrow) < 2:
            return None
        alignment = {name: min(size & -size, _WORD) for name, size in narrow.items()}
        offsets, end = {}, 0
        for name in sorted(narrow, key=lambda name: -alignment[name]):
            offsets[name] = end
            end += narrow[name]
        least, words = round_up(end, 4), round_up(end, _WORD)
        unit = max(block_unit(schema[name]) for name in narrow)
        return cls(offsets, words if words * 16 <= least * 17 else least, unit)


class Layout:
    """Offsets of all arrays and columns of a table, and the header from which other processes compute them.

    Attributes:
        arrays: name -> (offset, dtype, shape) of the index.
        columns: name -> `ColumnLayout`.
        record: the `Record` of the narrow columns in a packed table; else None.
        group: slots of a group.
        rules: eviction, expiry and rate limits of the table.
        tier: where trajectories beyond the memory lie, or None.
        payload: bytes of the values of ragged columns, a multiple of 128. payload_offset: where they begin.
        prefixes: whether trajectories may share the blocks of their first steps, see `prefixes.py`.
        region_bytes: size of the whole region, a multiple of the page size.
        index_bytes: bytes before the first column.
        device: the GPU in whose memory the blocks lie, such as ``"cuda:0"``, or None. The region then holds the index,
            and the blocks of the host part.
        host_blocks: number of the blocks of the host part of a table on a GPU, the first ones; else 0.
        device_bytes: bytes of the blocks on the GPU; 0 of others. They lie there as in a region.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        max_steps: int,
        max_trajectories: int,
        block_steps: int,
        num_blocks: int,
        packed: bool = False,
        rules: Rules | None = None,
        tier: Tier | None = None,
        payload: int = 0,
        prefixes: bool = False,
        device: str | None = None,
        host_blocks: int = 0,
    ) -> None:
        self.schema = schema
        self.payload = payload
        self.prefixes = prefixes
        self.max_steps = max_steps
        self.max_trajectories = max_trajectories
        self.block_steps = block_steps
        self.num_blocks = num_blocks
        self.packed = packed
        self.record = Record.of(schema) if packed else None
        self.rules = Rules() if rules is None else rules
        self.tier = tier
        self.device, self.host_blocks = device, host_blocks
        self.group = 1 << ((max_trajectories - 1).bit_length() + 1) // 2
        entries, copy = num_blocks, SHARED_WIDTH if prefixes else COPIES_WIDTH
        if prefixes:  # those of all trajectories, each with a final step
            entries = most_blocks(max_steps, max_trajectories, block_steps) + max_trajectories
        self.half = entries + (entries + 1) // 2
        self.header = self._header()

        slots, blocks = max_trajectories, num_blocks
        sizes: list[tuple[str, Any, tuple[int, ...]]] = [
            ("counters", np.int64, (64,)),
            ("readers", np.int64, (MAX_READERS, 4)),
            ("extent", np.int64, (slots, 3)),
            ("generation", np.int64, (slots,)),
            ("sequence", np.int64, (slots,)),
            ("ident", np.int64, (slots,)),
            ("epoch", np.int64, (slots,)),
            ("owner", np.int64, (slots, 2)),
            ("stream", np.int32, (slots,)),
            ("created", np.int64, (slots,)),
            ("revised", np.int64, (slots,)),
            ("filled", np.int64, (slots if schema.late or schema.mutable else 0, 2)),
            ("prefix", np.int64, (slots if prefixes else 0, 5)),
            ("moved", np.uint32, (slots,)),
            ("priority", np.float32, (slots,)),
            ("sampled", np.int32, (slots,)),
            ("state", np.int32, (slots,)),
            ("links", np.int32, (slots, 2)),
            ("block_ids", np.int32, (2, self.half)),
            ("free_slots", np.int32, (slots,)),
            ("retired", np.int32, (slots,)),
            ("touched", np.int32, (slots,)),
            ("free_blocks", np.int32, (blocks,)),
            ("uses", np.int32, (blocks, 2)),
            ("lowest", np.float32, (-(-slots // self.group),)),
            ("parked", np.int32, (blocks if self.moves else 1,)),
            ("stored", np.int64, (1 if tier is None else slots, copy)),
            ("tier_priority", np.int64, (slots if self.moves else 0,)),
            ("versions", np.int64, (0 if tier is None or self.rules.version is None else slots,)),
            ("tier_counts", np.int64, (COUNTS if self.moves else 0,)),
        ]
        offset = round_up(len(self.header), LINE)
        self.arrays: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        for name, dtype, shape in sizes:
            self.arrays[name] = (offset, np.dtype(dtype), shape)
            offset = round_up(offset + int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize, LINE)
        offset = self.index_bytes = round_up(offset, mmap.PAGESIZE)
        self.columns: dict[str, ColumnLayout] = {}
        self.block_bytes = 0
        """Bytes of one block over all columns, padding included."""
        base = end = offset
        here = host_blocks or num_blocks  # blocks that lie one after another
        shared = 0  # bytes of a block of records
        if self.record is not None:
            shared = self.block_bytes = round_up(self.record.bytes * block_steps, self.record.block_unit)
            end = round_up(end + here * shared, LINE)
        for name, column in schema.items():
            size = column.step_bytes
            if self.record is not None and name in self.record.offsets:
                inside = self.record.offsets[name]
                self.columns[name] = ColumnLayout(base + inside, size, shared, self.record.bytes, inside)
                continue
            stride = round_up(size * (1 if column.trajectory else block_steps), block_unit(column))
            self.columns[name] = ColumnLayout(end, size, stride, size)
            self.block_bytes += stride
            end = round_up(end + here * stride, LINE)
        self.device_bytes = 0 if device is None else self.writable_blocks * self.block_bytes
        only_index = device is not None and not host_blocks
        self.payload_offset = end = base if only_index else end
        end += 0 if only_index else payload + LINE
        self.region_bytes = round_up(end, mmap.PAGESIZE)

    @property
    def writable_blocks(self) -> int:
        """Number of blocks that writers get, the last ones: all but those of the host part."""
        return self.num_blocks - self.host_blocks

    @property
    def moves(self) -> bool:
        """Whether trajectories move: to disk, or to the host part of a table on a GPU."""
        return self.tier is not None or self.host_blocks > 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the index that belong to one slot."""
        other = ["counters", "readers", "block_ids", "free_blocks", "uses", "lowest", "parked", "tier_counts"]
        other += ["stored"] if self.tier is None else []
        arrays = [array for name, array in self.arrays.items() if name not in other and array[2][0]]
        return sum(dtype.itemsize * int(np.prod(shape[1:])) for _, dtype, shape in arrays)

    def preamble(self) -> bytes:
        """The first 28 bytes of the region."""
        fields = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(self.header) - 64, self.region_bytes)
        return fields + _CHECKSUM.pack(zlib.crc32(fields + self.header[64:]))

    def _header(self) -> bytes:
        fields = {
            "schema": self.schema.to_json(),
            "max_steps": self.max_steps,
            "max_trajectories": self.max_trajectories,
            "block_steps": self.block_steps,
            "num_blocks": self.num_blocks,
            "packed": self.packed,
            "rules": self.rules.to_json(),
            "tier": None if self.tier is None else self.tier.to_json(),
            "payload": self.payload,
            "prefixes": self.prefixes,
            "device": self.device,
            "host_blocks": self.host_blocks,
        }
        header = bytes(64) + json.dumps(fields, separators=(",", ":")).encode()
        if len(header) > HEADER_LIMIT:
            raise SchemaError(
                f"{len(self.schema):,} columns with their names take {len(header):,} bytes; expected at most "
                f"{HEADER_LIMIT:,}. Join columns into one of a larger shape, or shorten their names."
            )
        return header

    @classmethod
    def read(cls, head: bytes, file_bytes: int, name: str) -> Layout:
        """The layout that a header describes.

        Args:
            head: the first bytes of the file, at least 64.
            file_bytes: the file's size.
            name: name of the file in errors.

        Raises:
            RegionError: not a table, of another format version, or damaged.
        """
        if len(head) < 64 or head[:8] != MAGIC:
            raise RegionError(
                f"{name} is not a Gear Loader table: it starts with {bytes(head[:8])!r}, expected {MAGIC!r}. "
                "Choose another name or remove the file."
            )
        _, version, json_bytes, region_bytes = _PREAMBLE.unpack(head[: _PREAMBLE.size])
        if version != FORMAT_VERSION:
            raise RegionError(
                f"{name} has table format {version}; this version of Gear Loader reads format {FORMAT_VERSION}. "
                "Use the version that wrote it, or create the table again."
            )
        body = head[64 : 64 + json_bytes]
        (expected,) = _CHECKSUM.unpack_from(head, _PREAMBLE.size)
        found = zlib.crc32(head[: _PREAMBLE.size] + body)
        if found != expected:
            raise RegionError(
                f"{name} has a damaged header: its checksum is {found:#010x}, expected {expected:#010x}. "
                "Remove it and create the table again."
            )
        try:
            layout = cls._of_header(json.loads(body))
        except Exception as error:
            raise RegionError(
                f"{name} has a damaged header ({error}). Remove it and create the table again."
            ) from error
        if layout.region_bytes != region_bytes or file_bytes < region_bytes:
            raise RegionError(
                f"{name} is damaged: it has {file_bytes} bytes, its header says {region_bytes}, its schema needs "
                f"{layout.region_bytes}. Remove it and create the table again."
            )
        return layout

    @classmethod
    def _of_header(cls, fields: Any) -> Layout:
        """The layout that a header's JSON describes.

        Raises:
            SchemaError: a field is missing, unknown, or of a type or size that `Table.create` never writes.
            Any error of `Rules.from_json`.
        """
        sizes = {
            "max_steps": LARGEST_SIZE,
            "max_trajectories": LARGEST_COUNT,
            "block_steps": LARGEST_SIZE,
            "num_blocks": LARGEST_COUNT,
        }
        expected = sorted(
            [*sizes, "packed", "payload", "prefixes", "schema", "rules", "tier", "device", "host_blocks"]
        )
        if not isinstance(fields, dict) or sorted(fields) != expected:
            raise SchemaError(f"{reprlib.repr(fields)} was found; expected a mapping with {expected}")
        for key, largest in sizes.items():
            value = fields[key]
            if type(value) is not int or not 1 <= value <= largest:
                raise SchemaError(
                    f"{key} is {reprlib.repr(value)}; expected an integer from 1 to {largest:,}"
                )
        payload = fields["payload"]
        if type(payload) is not int or not 0 <= payload <= MOST_PAYLOAD or payload % LINE:
            raise SchemaError(
                f"payload is {reprlib.repr(payload)}; expected a multiple of {LINE} from 0 to {MOST_PAYLOAD:,}"
            )
        flags = {key: fields[key] for key in ("packed", "prefixes")}
        for key, value in flags.items():
            if type(value) is not bool:
                raise SchemaError(f"{key} is {reprlib.repr(value)}; expected True or False")
        device = fields["device"]
        if device is not None and not (type(device) is str and re.fullmatch(r"cuda:\d{1,4}", device)):
            raise SchemaError(f"device is {reprlib.repr(device)}; expected None or a GPU such as 'cuda:0'")
        if device is not None and (payload or flags["prefixes"]):
            raise SchemaError(f"device is {device!r}, with payload or prefixes; expected neither")
        host_blocks = fields["host_blocks"]
        most = 0 if device is None else fields["num_blocks"] - 1
        if type(host_blocks) is not int or not 0 <= host_blocks <= most:
            raise SchemaError(
                f"host_blocks is {reprlib.repr(host_blocks)}; expected an integer from 0 to {most:,}"
            )
        if not isinstance(fields["rules"], dict):
            raise SchemaError(f"rules are {reprlib.repr(fields['rules'])}; expected a mapping")
        schema, rules = Schema.from_json(fields["schema"]), Rules.from_json(fields["rules"])
        tier = None if fields["tier"] is None else Tier.from_json(fields["tier"])
        counts = {key: fields[key] for key in (*sizes, "payload")}
        return cls(schema, rules=rules, tier=tier, device=device, host_blocks=host_blocks, **flags, **counts)


def read_counters(fd: int, size: int) -> tuple[Layout, tuple[int, ...]]:
    """The layout and the counters of a table's file, without attaching to it and without its lock.

    Args:
        fd: the open file. size: its bytes.

    Raises:
        RegionError: the file is no table that can be attached, or became shorter meanwhile. OSError: it cannot be read.
    """
    layout = Layout.read(os.pread(fd, HEADER_LIMIT, 0), size, "It")
    return layout, _numbers(fd, layout, "counters")


def read_tier(fd: int, layout: Layout) -> tuple[int, ...]:
    """The counts of the disk tier in a table's file; empty without one. Raises as `read_counters`."""
    return _numbers(fd, layout, "tier_counts")


def _numbers(fd: int, layout: Layout, name: str) -> tuple[int, ...]:
    offset, dtype, (count,) = layout.arrays[name]
    data = os.pread(fd, count * dtype.itemsize, offset)
    if len(data) < count * dtype.itemsize:
        raise RegionError("It was truncated while it was read.")
    return struct.unpack(f"={count}q", data)
