"""Whatever bytes come: a message is read, or an error of the transport is raised. For atheris:

pip install atheris
python tests/fuzz/fuzz_wire.py -max_total_time=300
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gear_loader.errors import GearError, TransportError

_watched: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
if __name__ == "__main__":
    import atheris

    _watched = atheris.instrument_imports(include=["gear_loader.transport"])

with _watched:
    from gear_loader.transport.change_messages import (
        Advance,
        Advanced,
        Fill,
        Overwrite,
        Part,
        Unfilled,
        Update,
    )
    from gear_loader.transport.channel import Address
    from gear_loader.transport.spec import WindowSpec, read_spec
    from gear_loader.transport.store_message import Store
    from gear_loader.transport.wire import HEADER, Fields, Header, Limits, read_error

LIMITS = Limits(rows=1000, store_bytes=1 << 20)


def parse_header(data: bytes) -> None:
    """A header is 64 bytes."""
    header = Header.parse(memoryview(data[:HEADER].ljust(HEADER, b"\0")))
    assert header.pack() == data[:HEADER]


def parse_store(data: bytes) -> None:
    """A store that is read fits its bulk part."""
    bulk = int.from_bytes(data[:3], "little")
    store = Store.parse(data[3:], bulk, LIMITS)
    assert sum(size for _, size in store.columns) <= bulk
    assert all(at + size <= bulk for at, size in store.columns)


def parse_update(data: bytes) -> None:
    """An update that is read is written the same."""
    update = Update.parse(data, limits=LIMITS)
    again = Update.parse(update.pack(), limits=LIMITS)
    assert again.slots.tolist() == update.slots.tolist()
    assert (again.table, again.strict) == (update.table, update.strict)


def parse_part(data: bytes) -> None:
    """A part that is read is written the same."""
    part = Part.parse(data[3:], int.from_bytes(data[:3], "little"))
    assert part.pack() == data[3:]


def parse_fill(data: bytes) -> None:
    """A fill that is read is written the same, and describes its bulk part."""
    bulk = int.from_bytes(data[:3], "little")
    fill = Fill.parse(data[3:], bulk, LIMITS)
    again = Fill.parse(fill.pack(), bulk, LIMITS)
    assert again.slots.tolist() == fill.slots.tolist()
    assert (again.table, again.names, again.identity) == (fill.table, fill.names, fill.identity)
    assert set(fill.values(np.zeros(bulk, dtype=np.uint8))) == set(fill.names)


def parse_overwrite(data: bytes) -> None:
    """A request that is read is written the same, and describes its bulk part."""
    bulk = int.from_bytes(data[:3], "little")
    change = Overwrite.parse(data[3:], bulk, LIMITS)
    again = Overwrite.parse(change.pack(), bulk, LIMITS)
    assert again.lengths.tolist() == change.lengths.tolist()
    mask, values = change.values(np.zeros(bulk, dtype=np.uint8))
    assert set(values) == set(change.names)
    assert (mask is not None) == change.masked


def parse_unfilled(data: bytes) -> None:
    """A question that is read is written the same."""
    assert Unfilled.parse(data).pack() == data


def parse_advance(data: bytes) -> None:
    """A request that is read is written the same."""
    assert Advance.parse(data).pack() == data


def parse_advanced(data: bytes) -> None:
    """An answer that is read is written the same."""
    assert Advanced.parse(data).pack() == data


def parse_spec(data: bytes) -> None:
    """A spec that is read is written the same, and can be laid out."""
    spec = read_spec(data)
    assert read_spec(spec.to_bytes()).to_bytes() == spec.to_bytes()
    assert spec.reply_bytes(3) > 0 if isinstance(spec, WindowSpec) else spec.reply_bytes(3, 9) > 0


def parse_error(data: bytes) -> None:
    """What a server says becomes one of our errors."""
    assert isinstance(read_error(data), GearError)


def parse_fields(data: bytes) -> None:
    """Fields never reach beyond their message."""
    fields = Fields(data, "TEST")
    while True:
        size = fields.number(1, "size")
        if size % 3 == 0:
            assert len(fields.text("text", size).encode()) <= size
        elif size % 3 == 1:
            assert len(fields.array(size, "<i8", "array")) == size
        else:
            assert len(fields.raw(size, "raw")) == size


def parse_address(data: bytes) -> None:
    """An address that is read is written the same."""
    address = Address.parse(data.decode("utf-8", "replace"))
    assert Address.parse(str(address)) == address


TARGETS: tuple[Callable[[bytes], None], ...] = (
    parse_header,
    parse_spec,
    parse_store,
    parse_update,
    parse_part,
    parse_fill,
    parse_unfilled,
    parse_advance,
    parse_advanced,
    parse_error,
    parse_fields,
    parse_address,
    parse_overwrite,
)


def one_input(data: bytes) -> None:
    """Run the target that the first byte chooses."""
    if data:
        try:
            TARGETS[data[0] % len(TARGETS)](data[1:])
        except TransportError:
            return


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
