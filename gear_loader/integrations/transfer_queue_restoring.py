"""What a new controller of TransferQueue is told of samples that are in the table already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gear_loader.integrations.transfer_queue_fields import (
    OBJECT,
    ROWS,
    SCALAR,
    SampleField,
    dtype_of,
    unpacked,
)
from gear_loader.integrations.transfer_queue_rows import Samples
from gear_loader.utils.arrays import Array


def restore(controller: Any, found: Sequence[Samples]) -> int:
    """Add samples to a controller that has none: global indexes, partitions, keys, tags and fields.

    Args:
        controller: a `TransferQueueController`, of whose process this is called. found: oldest first.

    Returns:
        Number of samples.
    """
    names = [[unpacked(name) if name else None for name in each.names] for each in found]
    partitions: dict[str, set[int]] = {}
    for each, given in zip(found, names, strict=True):
        for row, name in zip(each.rows.tolist(), given, strict=True):
            if name is not None:
                partitions.setdefault(name[0], set()).add(row)
    _take_indexes(controller.index_manager, partitions)
    for partition in partitions:
        controller.create_partition(partition)
    for each, given in zip(found, names, strict=True):
        for partition in dict.fromkeys(name[0] for name in given if name is not None):
            at = [i for i, name in enumerate(given) if name is not None and name[0] == partition]
            _add(controller, partition, each, at, given)
    return sum(map(len, partitions.values()))


def _take_indexes(manager: Any, partitions: dict[str, set[int]]) -> None:
    taken = set[int]().union(*partitions.values())
    end = max(taken, default=-1) + 1
    manager.global_index_counter = max(manager.global_index_counter, end)
    manager.allocated_indexes.update(taken)
    manager.reusable_indexes.extend(sorted(set(range(end)) - taken))
    for partition, rows in partitions.items():
        manager.partition_to_indexes[partition].update(rows)


def _add(controller: Any, partition: str, samples: Samples, at: list[int], names: list[Any]) -> None:
    status = controller.partitions[partition]
    rows = samples.rows[at].tolist()
    schema = {
        field.name: _schema_of(field, samples.sizes[at, i], rows) for i, field in enumerate(samples.fields)
    }
    controller.update_production_status(partition, rows, schema)
    for row, i in zip(rows, at, strict=True):
        _, key, tag = names[i]
        if key is not None:
            status.keys_mapping[key] = row
            status.revert_keys_mapping[row] = key
        if tag:
            status.custom_meta[row] = tag


def _schema_of(field: SampleField, sizes: Array, rows: list[int]) -> dict[str, Any]:
    """As `transfer_queue.metadata.extract_field_schema` describes a field."""
    if field.kind == OBJECT:
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    known: dict[str, Any] = {"dtype": dtype_of(field.dtype), "is_nested": False, "is_non_tensor": False}
    if field.kind == SCALAR:
        return {**known, "shape": torch.Size([1])}
    if field.kind == ROWS:
        size = torch.Size(field.rest).numel() * field.item
        shapes = {
            row: (count, *field.rest) for row, count in zip(rows, (sizes // size).tolist(), strict=True)
        }
        if len(set(shapes.values())) == 1:
            return {**known, "shape": torch.Size(shapes[rows[0]])}
        return {**known, "shape": None, "is_nested": True, "per_sample_shapes": shapes}
    return {**known, "shape": None, "is_nested": True, "per_sample_shapes": {}}
