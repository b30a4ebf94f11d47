"""Where everything lies in a region: no overlap, no rounding beyond lines and pages, a header that shows damage."""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import struct
import zlib
from typing import Any

import pytest
import torch
from options_common import nested_table
from table_common import COLUMNS, DTYPES, fresh_name, named

import gear_loader as gear
from gear_loader.errors import RegionError, SchemaError
from gear_loader.storage.layout import FORMAT_VERSION, HEADER_LIMIT, LINE, Layout, round_up
from gear_loader.storage.schema import Schema
from gear_loader.storage.shared_memory import region_path

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

PAGE = mmap.PAGESIZE


def layout_of(**options: int) -> Layout:
    sizes = {"max_steps": 200, "max_trajectories": 16, "block_steps": 4, "num_blocks": 62, **options}
    return Layout(Schema(COLUMNS), **sizes)


def file_of(layout: Layout) -> bytes:
    """The header as it stands in a file."""
    return layout.preamble().ljust(64, b"\0") + layout.header[64:]


shapes = st.lists(st.integers(1, 40), max_size=2).map(tuple)
columns = st.builds(gear.Column, st.sampled_from(DTYPES), shapes | shapes.map(lambda shape: (None, *shape)))
layouts = st.builds(
    Layout,
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=8).filter(
            lambda s: s not in gear.storage.schema.BATCH_KEYS
        ),
        columns,
        min_size=1,
        max_size=5,
    ).map(Schema),
    max_steps=st.integers(1, 10**9),
    max_trajectories=st.integers(1, 5000),
    block_steps=st.integers(1, 300),
    num_blocks=st.integers(1, 5000),
    packed=st.booleans(),
)


@hypothesis.given(layouts)
def test_nothing_overlaps_and_everything_is_aligned(layout: Layout) -> None:
    end = len(layout.header)
    for name, (offset, dtype, shape) in layout.arrays.items():
        assert offset % LINE == 0, name
        assert end <= offset < end + LINE, f"{name} overlaps what is before it, or wastes a line"
        end = offset + dtype.itemsize * math.prod(shape)
    assert end <= layout.index_bytes < end + PAGE + LINE
    assert layout.index_bytes % PAGE == 0
    end = layout.index_bytes
    strides = []
    for column in sorted(layout.columns.values(), key=lambda column: column.base):
        if column.base < end and column.is_packed:
            assert column.base == layout.index_bytes, "the record comes first"
            continue
        used = layout.block_steps * column.step_stride
        assert column.base == round_up(end, LINE)
        inside = [name for name, each in layout.columns.items() if each.base == column.base]
        unit = 16 if all(layout.schema[name].ragged for name in inside) else LINE
        assert column.block_stride % unit == 0
        assert used <= column.block_stride < used + unit
        end = column.base + layout.num_blocks * column.block_stride
        strides.append(column.block_stride)
    assert layout.region_bytes % PAGE == 0
    end = round_up(end, LINE)
    assert end + LINE <= layout.region_bytes < end + LINE + PAGE, "a tail of one line, then a page's end"
    assert layout.block_bytes == sum(strides)


@hypothesis.given(layouts)
def test_records_hold_narrow_columns_and_little_else(layout: Layout) -> None:
    assert all(column.step_bytes == layout.schema[name].step_bytes for name, column in layout.columns.items())
    narrow = {name for name, column in layout.columns.items() if column.step_bytes < LINE}
    packed = {name: column for name, column in layout.columns.items() if column.is_packed}
    assert set(packed) == (narrow if layout.packed and len(narrow) > 1 else set())
    end = 0
    for column in sorted(packed.values(), key=lambda column: column.inside):
        assert column.inside == end
        assert column.inside % min(16, column.step_bytes & -column.step_bytes) == 0
        end += column.step_bytes
        assert column.step_stride % 4 == 0
    if packed:
        record = layout.record.bytes
        assert {column.step_stride for column in packed.values()} == {record}
        assert end <= record < end + 4 or (record % 16 == 0 and record * 16 <= round_up(end, 4) * 17)


@hypothesis.given(layouts)
def test_the_header_gives_the_layout_back(layout: Layout) -> None:
    head = file_of(layout)
    found = Layout.read(head + bytes(100), layout.region_bytes, "it")
    assert found.schema == layout.schema
    assert list(found.schema) == list(layout.schema)
    assert found.arrays == layout.arrays
    assert found.columns == layout.columns
    assert found.region_bytes == layout.region_bytes
    for name in ("max_steps", "max_trajectories", "block_steps", "num_blocks", "half", "packed"):
        assert getattr(found, name) == getattr(layout, name)


def test_the_header_is_readable_without_a_library() -> None:
    layout = layout_of()
    for num_blocks in (1, 2, 3, 1001):
        assert layout_of(num_blocks=num_blocks).half == math.ceil(1.5 * num_blocks)
    assert [round_up(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
    fields = json.loads(layout.header[64:])  # needs no library to read it
    assert fields.pop("schema")[3] == ["value", "float32", [3]]
    rules = {"on_full": "error", "rate_limiter": None, "max_times_sampled": None, "max_age": None}
    sizes = {"max_steps": 200, "max_trajectories": 16, "block_steps": 4, "num_blocks": 62}
    none = {"tier": None, "payload": 0, "prefixes": False, "device": None, "host_blocks": 0}
    assert fields == {**sizes, "packed": False, "rules": rules, **none}


def with_text(body: bytes, size: int) -> bytes:
    """A header with this text, and the right checksum."""
    fields = struct.pack("<8sIIQ", b"GEARLDR\0", FORMAT_VERSION, len(body), size)
    return (fields + struct.pack("<I", zlib.crc32(fields + body))).ljust(64, b"\0") + body


def test_cut_headers_and_files() -> None:
    layout = layout_of()
    head, size = file_of(layout), layout.region_bytes
    version = head[:8] + struct.pack("<I", FORMAT_VERSION + 41) + head[12:]
    damaged = "it is damaged: it has {} bytes, its header says {}, its schema needs {}. Remove it and create the tab"
    for data, length, message in [
        *(
            (head[:n], n, f"it is not a Gear Loader table: it starts with {head[: min(n, 8)]!r},")
            for n in (0, 1, 63)
        ),
        *((head[:n], size, "it has a damaged header: its checksum is 0x") for n in (64, 65, 200)),
        (head, size - 1, damaged.format(size - 1, size, size)),
        (with_text(layout.header[64:], size - PAGE), size, damaged.format(size, size - PAGE, size)),
        (version, size, f"it has table format {FORMAT_VERSION + 41}; this version of Gear Loader reads fo"),
    ]:
        with pytest.raises(RegionError) as caught:
            Layout.read(data, length, "it")
        assert str(caught.value).startswith(message)


def test_headers_whose_text_makes_no_sense() -> None:
    layout = layout_of()
    good, size = json.loads(layout.header[64:]), layout.region_bytes
    Layout.read(with_text(json.dumps(good).encode(), size), size, "it")
    texts = {
        "": "",
        "{": "",
        "[]": "expected a mapping with",
        "null": "expected a mapping with",
        '{"schema":[]}': "",
    }
    for name, value, said in (
        *(("schema", [["x", *each]], "") for each in (["float12", []], ["float32", [-1]])),
        ("more", 1, "expected a mapping with"),
        *(("num_blocks", value, "num_blocks is") for value in (0, 1.0, True, None, 1 << 62)),
        *(("payload", value, "payload is") for value in (-128, 1, 129, "0", 128.0, 1 << 62)),
        *((name, 0, f"{name} is 0; expected True or False") for name in ("packed", "prefixes")),
        ("rules", [], "rules are"),
        ("tier", 1, ""),
    ):
        texts[json.dumps({**good, name: value})] = said
    texts[json.dumps({name: value for name, value in good.items() if name != "num_blocks"})] = "with"
    for text, said in texts.items():
        message = rf"^it has a damaged header \(.*{said}.*\). Remove it and create the"
        with pytest.raises(RegionError, match=message):
            Layout.read(with_text(text.encode(), size), size, "it")


def test_large_headers() -> None:
    schema = {f"{i}{'x' * 1000}": gear.Column(torch.bool) for i in range(1100)}
    with pytest.raises(SchemaError, match=r"^1,100 columns with their names take 1,1\d\d,\d\d\d bytes; ex"):
        gear.Table.create(schema, max_steps=1, max_trajectories=1)
    schema = dict(itertools.islice(schema.items(), 1000))
    sizes: dict[str, Any] = {"max_steps": 1, "max_trajectories": 1, "block_steps": 1, "name": fresh_name()}
    with gear.Table.create(schema, **nested_table(sizes)) as table:
        assert 900_000 < len(table._engine.region.layout.header) < HEADER_LIMIT
        with gear.Table.attach(str(table.name)) as other:
            assert other.schema == schema
        table.unlink()


def test_every_flipped_bit_of_the_header_shows() -> None:
    layout = layout_of()
    head = file_of(layout)
    preamble = len(layout.preamble())
    assert preamble == 28
    for place in itertools.chain(range(preamble), range(64, len(head))):
        for bit in range(8):
            damaged = bytearray(head)
            damaged[place] ^= 1 << bit
            with pytest.raises(
                RegionError, match=r"^it (is not a Gear Loader table|has table format|has a damaged)"
            ):
                Layout.read(bytes(damaged), layout.region_bytes, "it")


def test_a_named_region_takes_exactly_its_bytes() -> None:
    with named() as table:
        layout = table._engine.region.layout
        assert not table._engine.region.bytes[len(layout.header) :].any()  # type: ignore[index]
        info = os.stat(region_path(str(table.name)))
        assert info.st_size == layout.region_bytes == table.stats().reserved_bytes
        assert info.st_blocks * 512 == layout.region_bytes, "the memory is reserved at once"
        assert info.st_mode & 0o777 == 0o600
        assert table._engine.region.bytes is not None
        assert table._engine.region.bytes.nbytes == layout.region_bytes


@pytest.mark.parametrize("max_steps", [1025 * 64, 100_000])
def test_sizes_are_not_rounded_to_a_power_of_two(max_steps: int) -> None:
    """2.25 GiB must not become 4: what is reserved is the payload and little more."""
    column = gear.Column(torch.float32, (64,))
    with gear.Table.create({"x": column}, max_steps=max_steps, max_trajectories=1, block_steps=64) as table:
        payload = max_steps * column.step_bytes
        assert table.stats().reserved_bytes < payload * 1.01 + 64 * column.step_bytes + 16 * PAGE
