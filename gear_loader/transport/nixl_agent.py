"""NIXL agents, and the description of a table's memory that its owner sends to readers.

A description is ``b"GEARNIXL"``, its version (u16, little endian), and JSON: the attributes of `Description`, of each
column the fields of its `ColumnLayout`, and `connection` in hexadecimal. NIXL's own serialization of descriptors is
pickle and is not used; NIXL validates `connection`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import logging
import os
from typing import Any

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.storage.layout import LINE, ColumnLayout
from gear_loader.storage.schema import Schema
from gear_loader.transport.message_schema import read_schema
from gear_loader.transport.ucx_library import before_another_ucx, quiet_environment

_MAGIC, _VERSION = b"GEARNIXL", 4
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
_MAX_BYTES, _MAX_NAME = 4 << 20, 256
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
            # NIXL logs the start of each agent to standard output.
            logging.getLogger("nixl").setLevel(logging.WARNING)
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
        fields = {
            "agent": self.agent,
            "connection": self.connection.hex(),
            "schema": self.schema.to_json(),
            "columns": [dataclasses.astuple(column) for column in self.columns],
            "numbers": self.numbers,
        }
        return _MAGIC + _VERSION.to_bytes(2, "little") + json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Description:
        """Parse and validate a description.

        Raises:
            TransportError: invalid, inconsistent, or of another version.
        """
        begin = len(_MAGIC) + 2
        if data[: len(_MAGIC)] != _MAGIC or not begin < len(data) <= _MAX_BYTES:
            raise _damaged(f"it has {len(data):,} bytes and begins with {data[:8]!r}")
        found = int.from_bytes(data[len(_MAGIC) : begin], "little")
        if found != _VERSION:
            raise TransportError(
                f"The owner describes its memory in version {found}; expected {_VERSION}. Use the same version of "
                "Gear Loader on both sides."
            )
        try:
            fields = json.loads(data[begin:])
            agent, schema = str(fields["agent"]), read_schema(fields["schema"])
            numbers = {name: fields["numbers"][name] for name in _NUMBERS}
            columns = tuple(ColumnLayout(*column) for column in fields["columns"])
            described = cls(agent, bytes.fromhex(fields["connection"]), schema, columns, numbers)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise _damaged(f"{type(error).__name__}: {error}") from None
        values = [*numbers.values(), *(each for column in columns for each in dataclasses.astuple(column))]
        if any(type(each) is not int or not 0 <= each < 1 << 64 for each in values):
            raise _damaged("a size or an address is not a number of 64 bits")
        if len(columns) != len(schema) or len(agent) > _MAX_NAME:
            raise _damaged(f"{len(columns)} columns of {len(schema)}, and a name of {len(agent)} characters")
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
        # A record is not padded by more.
        widest = self.schema.step_bytes + self.schema.trajectory_bytes + LINE
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


def _damaged(what: str) -> TransportError:
    return TransportError(
        f"The owner's description of its memory is invalid: {what}. Use the same version of Gear Loader on both sides."
    )
