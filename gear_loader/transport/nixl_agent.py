"""NIXL agents, and the description of a table's memory that its owner sends to readers.

Layout of a description, little endian; texts and bytes are preceded by their length:

    magic        8 B     b"GEARNIXL"
    version      u16
    agent        u16, name of the owner's agent, unique for each process start
    connection   u32, NIXL's metadata of the agent
    schema       u32, JSON as `Schema.to_json`
    numbers      14 x u64, see `_NUMBERS`
    columns      u64 x 5 a column: offset in the region, bytes from block to block, of a step, and from step to step;
                 offset inside the record, if it lies in one

NIXL's own serialization of descriptors is pickle and is not used; NIXL validates `connection`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import logging
import os
import struct
from typing import Any

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.storage.layout import LINE, ColumnLayout
from gear_loader.storage.schema import Schema
from gear_loader.transport.message_schema import read_schema
from gear_loader.transport.ucx_library import before_another_ucx, quiet_environment

__all__ = ["Description", "installed", "new_agent", "register", "version"]

_MAGIC, _VERSION = b"GEARNIXL", 3
_NUMBERS = (
    "base",  # address of the region in the owner
    "region_bytes",
    "block_steps",
    "num_blocks",
    "num_slots",
    "max_steps",
    "generation",  # offset of the array in the region
    "state",
    "extent",
    "block_ids",
    "half",  # entries of one half of `block_ids`
    "runs",  # offset of the number of compactions of the block tables
    "word",  # address of 8 bytes that hold `value` while this is the table of that name
    "value",
)
_MAX_CONNECTION, _MAX_SCHEMA, _MAX_NAME = 1 << 20, 1 << 20, 256
_LARGEST = 1 << 56
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


def installed() -> str | None:
    """Name of the installed package of NIXL, or None."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)


def version() -> str | None:
    """Name and version of the installed package of NIXL, or None."""
    import importlib.metadata

    package = installed()
    if package is None:
        return None
    try:
        return f"{package.replace('_', '-')} {importlib.metadata.version(package.replace('_', '-'))}"
    except importlib.metadata.PackageNotFoundError:
        return package


def new_agent(name: str, *, loopback: bool) -> Any:
    """Create an agent with the UCX backend and without a progress thread, which would occupy a core.

    Args:
        name: of the agent.
        loopback: restrict its sockets to the loopback device, unless the user has set UCX_NET_DEVICES.

    Raises:
        TransportError: NIXL is not installed or does not start.
    """
    package = installed()
    if package is None:
        raise TransportError(
            "NIXL is not installed: pip install '.[nixl]' (in a clone of Gear Loader). "
            "`gear-loader doctor` shows the alternatives."
        )
    try:
        api = importlib.import_module(f"{package}._api")
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(
                logging.WARNING
            )  # NIXL logs the start of each agent to standard output
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        before_another_ucx()
        # NIXL passes no options to UCX, which reads its environment when the backend is created.
        with quiet_environment(**({"UCX_NET_DEVICES": "lo"} if loopback else {})):
            agent = api.nixl_agent(name, config)
            agent.create_backend("UCX")
    except TransportError:
        raise
    except Exception as error:
        raise TransportError(
            f"NIXL cannot start: {error or type(error).__name__}. `gear-loader doctor` shows what it finds; UCX_TLS "
            "and UCX_NET_DEVICES may name what is not there."
        ) from error
    return agent


def register(agent: Any, address: int, count: int) -> Any:
    """Register memory; returns the handle for `deregister_memory`.

    Raises:
        TransportError: NIXL refuses it.
    """
    try:
        return agent.register_memory(np.array([[address, count, 0]], dtype=np.uint64), "DRAM")
    except Exception as error:
        raise TransportError(
            f"NIXL cannot register {count:,} bytes ({error or type(error).__name__}). Over InfiniBand all of it is "
            "locked: raise the limit (ulimit -l unlimited)."
        ) from error


@dataclasses.dataclass(frozen=True)
class Description:
    """Description of one table in the memory of its owner.

    Attributes:
        agent: name of the owner's agent. connection: NIXL's metadata of the agent.
        schema: the columns. columns: the `ColumnLayout` of each.
        numbers: the values listed in `_NUMBERS`, by name.
    """

    agent: str
    connection: bytes
    schema: Schema
    columns: tuple[ColumnLayout, ...]
    numbers: dict[str, int]

    def to_bytes(self) -> bytes:
        """Serialize."""
        agent, schema = self.agent.encode(), json.dumps(self.schema.to_json(), separators=(",", ":")).encode()
        return b"".join(
            (
                _MAGIC,
                struct.pack("<HH", _VERSION, len(agent)),
                agent,
                struct.pack("<I", len(self.connection)),
                self.connection,
                struct.pack("<I", len(schema)),
                schema,
                struct.pack(f"<{len(_NUMBERS)}Q", *(self.numbers[name] for name in _NUMBERS)),
                *(struct.pack("<5Q", *_fields(column)) for column in self.columns),
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Description:
        """Parse and validate a description.

        Raises:
            TransportError: invalid, inconsistent, or of another version.
        """
        try:
            return cls._read(bytes(data))
        except (struct.error, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise _damaged(str(error)) from None

    @classmethod
    def _read(cls, data: bytes) -> Description:
        place = 0

        def take(count: int, most: int = _LARGEST) -> bytes:
            nonlocal place
            if count > most or place + count > len(data):
                raise _damaged(f"a field of {count:,} bytes at byte {place:,}")
            place += count
            return data[place - count : place]

        def number(form: str) -> int:
            return int(struct.unpack(form, take(struct.calcsize(form)))[0])

        if take(8) != _MAGIC:
            raise _damaged(f"it begins with {data[:8]!r}")
        found = number("<H")
        if found != _VERSION:
            raise TransportError(
                f"The owner describes its memory in version {found}; expected {_VERSION}. Use the same version of "
                "Gear Loader on both sides."
            )
        agent = take(number("<H"), _MAX_NAME).decode()
        connection = take(number("<I"), _MAX_CONNECTION)
        schema = read_schema(json.loads(take(number("<I"), _MAX_SCHEMA)))
        numbers = {name: number("<Q") for name in _NUMBERS}
        columns = tuple(_column(*struct.unpack("<5Q", take(40))) for _ in schema)
        if place != len(data):
            raise _damaged(f"{len(data) - place:,} bytes too many")
        described = cls(agent, connection, schema, columns, numbers)
        described._check()
        return described

    def _check(self) -> None:
        """Check that every column and array is inside the region."""
        numbers = self.numbers
        slots, blocks, steps = numbers["num_slots"], numbers["num_blocks"], numbers["block_steps"]
        limit = numbers["region_bytes"]
        ends = [
            numbers["generation"] + 8 * slots,
            numbers["state"] + 4 * slots,
            numbers["extent"] + 24 * slots,
        ]
        ends += [numbers["block_ids"] + 8 * numbers["half"], numbers["runs"] + 8]
        widest = (
            self.schema.step_bytes + self.schema.trajectory_bytes + LINE
        )  # a record is not padded by more
        for column, place in zip(self.schema.values(), self.columns, strict=True):
            fits = place.step_bytes == column.step_bytes and place.inside <= place.offset
            fits = fits and place.inside + place.step_bytes <= place.step_stride <= widest
            if not fits or place.step_stride * (1 if column.trajectory else steps) > place.block_stride:
                raise _damaged(f"blocks of {place.block_stride:,} bytes, steps of {place.step_bytes:,}")
            ends.append(place.base + place.block_stride * blocks)
        sizes = [slots, blocks, steps]
        sizes += [numbers[name] for name in ("max_steps", "half", "base", "word")]
        if max(ends) > limit or numbers["base"] + limit > 1 << 63 or min(sizes) < 1 or max(sizes) > 1 << 62:
            raise _damaged(f"a region of {limit:,} bytes that holds {max(ends):,}")


def _fields(column: ColumnLayout) -> tuple[int, ...]:
    return column.offset, column.block_stride, column.step_bytes, column.step_stride, column.inside


def _column(offset: int, block_stride: int, step_bytes: int, step_stride: int, inside: int) -> ColumnLayout:
    return ColumnLayout(offset, step_bytes, block_stride, step_stride, inside)


def _damaged(what: str) -> TransportError:
    return TransportError(
        f"The owner's description of its memory is invalid: {what}. Use the same version of Gear Loader on both sides."
    )
