"""The layout of a new table, from the options of `Table.create`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.storage.block_sizes import (
    blocks_within,
    resolved_block_steps,
    resolved_packing,
)
from gear_loader.storage.disk import Tier
from gear_loader.storage.layout import LINE, MOST_PAYLOAD, Layout, most_blocks, round_up
from gear_loader.storage.limiters import RateLimiter
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table_rules import Limits, OnFull, Rules
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import byte_count


def table_layout(
    schema: Mapping[str, Column],
    *,
    max_steps: Any,
    max_trajectories: Any,
    block_steps: Any,
    memory: Memory,
    on_full: OnFull,
    rate_limiter: RateLimiter | None,
    limits: Limits | None,
    tier: Tier | None,
    device: torch.device | None = None,
    host: Any = None,
) -> Layout:
    """The layout of a table with these options of `Table.create`, which has its rules too.

    `device`: the GPU in whose memory its blocks lie, with its index; or None. `host`: bytes of its part of host memory.

    Raises:
        SchemaError: invalid sizes, columns or rules.
    """
    schema = Schema(schema)
    packed = resolved_packing(schema, memory.packed)
    block_steps = resolved_block_steps(
        schema,
        block_steps,
        memory.mean_length,
        max_steps=max_steps,
        max_trajectories=max_trajectories,
        packed=packed,
    )
    if tier is not None and memory.size is None and memory.max_blocks is None:
        raise SchemaError(
            "disk has a size, and memory was not given: then everything is in memory, and nothing is moved to disk. "
            "Give memory, such as '20GiB'."
        )
    if host is not None:
        byte_count("host", host)
        if device is None:
            raise SchemaError(
                f"host is {shown(host)}, and the blocks are not in the memory of a GPU: then all of them are in host "
                "memory. Give device, such as 'cuda', or leave host out."
            )
        if memory.size is None and memory.max_blocks is None:
            raise SchemaError(
                f"host is {shown(host)}, and memory was not given: then everything is in the GPU's memory, and nothing "
                "moves out of it. Give memory, such as '60GiB'."
            )
    sizes = {"max_steps": max_steps, "max_trajectories": max_trajectories, "block_steps": block_steps}
    if memory.max_blocks is not None:
        sizes["max_blocks"] = memory.max_blocks
    for key, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 2**37:
            raise SchemaError(f"{key} is {shown(value)}; expected an integer from 1 to {2**37 - 1:,}.")
    if limits is not None and not isinstance(limits, Limits):
        raise SchemaError(f"limits is {shown(limits)}; expected None or gear_loader.Limits(...).")
    removal = {} if limits is None else dataclasses.asdict(limits)
    rules = Rules(**removal, on_full=on_full, rate_limiter=rate_limiter)
    rules.check_columns(schema)
    if rate_limiter is not None and rate_limiter.min_size > max_trajectories:
        raise SchemaError(
            f"{rate_limiter!r} waits for more trajectories than the table can hold, max_trajectories="
            f"{max_trajectories:,}. Make one of them smaller or the other larger."
        )
    options: dict[str, Any] = {name: int(value) for name, value in sizes.items()}
    most = most_blocks(**{name: options[name] for name in ("max_steps", "max_trajectories", "block_steps")})
    max_blocks = options.pop("max_blocks", None) or most
    options.update(
        packed=packed, rules=rules, tier=tier, device=device and str(device), payload=_payload(schema, memory)
    )
    if memory.prefixes:
        _check_prefixes(schema, "device" if device else None)
        options["prefixes"] = True
    if memory.size is not None:
        max_blocks = blocks_within(memory.size, max_blocks, schema, **options)
    if host is not None:
        options["host_blocks"] = host_blocks = _host_blocks(schema, host, most + max_trajectories, options)
        max_blocks += host_blocks
    if max(max_blocks, max_trajectories) >= 2**31:
        raise SchemaError(
            f"{max_blocks:,} blocks and {max_trajectories:,} trajectories were asked for; expected less than "
            "2**31 of each. Raise block_steps or split the table."
        )
    return Layout(schema, num_blocks=max_blocks, **options)


def _host_blocks(schema: Schema, host: Any, most: int, options: dict[str, Any]) -> int:
    """Number of blocks of a table's part of host memory, at most `most`; raises SchemaError if not one fits."""
    count = byte_count("host", host)
    size = Layout(schema, num_blocks=1, **options).block_bytes
    if count < size:
        raise SchemaError(
            f"host is {shown(host)}, {count:,} bytes, and one block of {options['block_steps']} steps takes {size:,}. "
            "Raise it, or leave it out."
        )
    return min(count // size, most)


def _check_prefixes(schema: Schema, other: str | None) -> None:
    """Raise SchemaError if trajectories cannot share blocks of steps; `other`: an option that does not go with it."""
    steps = schema.steps
    for columns, what in ((steps.late, "late"), (steps.mutable, "mutable")):
        if columns:
            raise SchemaError(
                f"Memory prefixes is True, and the columns {list(columns)} are {what} with a value for each step; "
                "expected none, as steps that trajectories share belong to all of them. Leave prefixes out, or give "
                "these columns per='trajectory'."
            )
    if other is not None:
        raise SchemaError(f"Memory prefixes is True, and {other} is given; expected one of them.")


def _payload(schema: Schema, memory: Memory) -> int:
    """Bytes of the values of ragged columns.

    Raises:
        SchemaError: they are not given with such columns, or given without.
    """
    if bool(schema.ragged) != (memory.payload is not None):
        raise SchemaError(
            f"The columns {list(schema.ragged)} are ragged, and Memory payload is {shown(memory.payload)}; expected "
            "the bytes that their values take, memory=gear_loader.Memory(payload='2GiB')."
            if schema.ragged
            else f"Memory payload is {shown(memory.payload)}, and no column is ragged; leave it out."
        )
    if memory.payload is None:
        return 0
    count = round_up(byte_count("payload", memory.payload), LINE)
    if count > MOST_PAYLOAD:
        raise SchemaError(f"payload is {shown(memory.payload)}; expected at most {MOST_PAYLOAD:,} bytes.")
    return count
