"""Validation of new trajectories, given one by one or stacked, and of their priorities.

The table is not changed. Valid steps are described by their addresses, without a copy where possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.kernels.special_priorities import UNSET
from gear_loader.storage.ragged_input import Common, Payload, copied_ragged, with_records
from gear_loader.storage.schema import Column, Schema, as_mapping, keeps, settled
from gear_loader.utils.arrays import Array, narrowed, numbers, on_host, shown, unreadable
from gear_loader.utils.lazy_torch import is_tensor

_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Steps(NamedTuple):
    """Steps to store.

    Attributes:
        addresses: int64 [n, C], address of each trajectory's contiguous steps in each column.
        lengths: int64 [n], in steps.
        hold: owner of that memory.
        payload: of ragged columns, whose addresses are those of records to be completed; else None.
    """

    addresses: Array
    lengths: Array
    hold: object
    payload: Payload | None = None


def listed(schema: Schema, trajectories: Any, common: Common | None = None) -> Steps:
    """Check an iterable of trajectories.

    Args:
        schema: the table's columns.
        trajectories: mappings as for `Table.add`. Items of a list or a tuple are read in place; an item of any other
            iterable is copied before the next one is requested.
        common: as for `with_records`.

    Raises:
        SchemaError: a trajectory does not fit; the message names the first one.
    """
    if isinstance(as_mapping(trajectories), Mapping):
        raise SchemaError(
            "One mapping was received without lengths; expected an iterable of trajectories, or stacked arrays "
            "[n, T, ...] with lengths=[n]. For a single trajectory use add()."
        )
    try:
        each = iter(trajectories)
    except TypeError:
        raise SchemaError(
            f"A {type(trajectories).__name__} was received; expected an iterable of trajectories."
        ) from None
    kept, payload = keeps(trajectories), None
    if schema.ragged:
        if not kept:
            each = (
                {name: copied_ragged(value) for name, value in rows.items()}
                if isinstance(rows, Mapping)
                else rows
                for rows in (as_mapping(rows, schema.objects) for rows in each)
            )
        trajectories, payload = with_records(schema, list(each), common)
        kept, each = True, iter(trajectories)
    if kept and (found := schema.locate_list(trajectories)) is not None:
        return Steps(*found, payload)
    if kept and all(isinstance(as_mapping(trajectory), dict) for trajectory in trajectories):
        each = iter(on_host(*map(as_mapping, trajectories)))  # one wait for all that a GPU has
    lengths, addresses, holds = [], [], []
    for i, trajectory in enumerate(each):
        what = f"trajectory {i}"
        if kept:
            length, places, hold = schema.locate(trajectory, what=what)
        else:
            length, arrays = schema.validate(trajectory, what=what)
            hold = [array.copy() for array in arrays.values()]
            places = [array.ctypes.data for array in hold]
        lengths.append(length)
        addresses.append(places)
        holds.append(hold)
    return Steps(np.array(addresses, dtype=np.int64), np.array(lengths, dtype=np.int64), holds, payload)


def checked_final(schema: Schema, final: Any) -> dict[str, Array]:
    """Check the values after the last step.

    Args:
        schema: the table's columns.
        final: column name -> array, tensor or number ``[*shape]``, for all columns with ``Column(final=True)``.

    Returns:
        Bytes of a step of every column that has steps, uint8 [1, step_bytes], for reading: zeros for the others. They
        may be the memory of `final`.

    Raises:
        SchemaError: a column is missing, or has no final values, or a value does not fit.
    """
    return {**schema.zero_step, **schema.validate_final(final, what="final")}


def with_final(schema: Schema, trajectory: Any, final: Any) -> dict[str, Any]:
    """One trajectory with its final step as the last row, zeros in the columns without one.

    Raises:
        SchemaError: as `Schema.validate` and `checked_final`.
    """
    more = checked_final(schema, final)
    _, arrays = schema.validate(trajectory)
    rows = {
        name: column.values_of(np.concatenate((arrays[name], more[name])))
        for name, column in schema.steps.items()
    }
    rows.update({name: column.values_of(arrays[name])[0] for name, column in schema.per_trajectory.items()})
    return rows


def rectangular(trajectories: Any) -> Array | None:
    """The lengths, int64 [n], of the trajectories in a TensorDict of batch size [n, T]; None for anything else."""
    if type(trajectories) in (list, tuple, dict) or as_mapping(trajectories) is trajectories:
        return None
    size = tuple(trajectories.batch_size)
    return np.full(size[0], size[1], dtype=np.int64) if len(size) >= 2 else None


def stacked(schema: Schema, columns: Any, lengths: Any, common: Common | None = None) -> Steps:
    """Check stacked trajectories.

    Args:
        schema: the table's columns.
        columns: column name -> ``[n, T, *shape]``, or ``[n, *shape]`` of columns per trajectory; trajectory i is the
            first ``lengths[i]`` steps of row i.
        lengths: int [n].
        common: as for `with_records`.

    Raises:
        SchemaError: the columns or the lengths do not fit.
    """
    columns, counts = _columns_and_counts(columns, lengths)
    if len(counts) == 0:
        _check_empty(schema, columns)
        return Steps(np.empty((0, len(schema)), dtype=np.int64), np.empty(0, dtype=np.int64), None)
    if schema.ragged:
        return listed(schema, _rows_of(schema, columns, counts, common), common)
    located = schema.locate_stacked(columns, len(counts))
    padded, places, apart, hold = (
        (*located, tuple(columns.values())) if located else _locate_any(schema, columns, len(counts))
    )
    _check_counts(counts, padded)
    addresses = np.array(places, dtype=np.int64) + np.arange(len(counts))[:, None] * np.array(apart)
    return Steps(addresses, counts.astype(np.int64), hold)


def _rows_of(
    schema: Schema, columns: Mapping[str, Any], counts: Array, common: Common | None
) -> list[dict[str, Any]]:
    """The trajectories of stacked columns of which some are ragged: n values, or n lists of them."""
    in_common = () if common is None else schema.per_group  # these may be left out
    schema.validate_names({**dict.fromkeys(in_common), **columns}, what="the stacked trajectories")
    for name, value in columns.items():
        short = (
            not hasattr(value, "__getitem__") or not hasattr(value, "__len__") or len(value) != len(counts)
        )
        few = None
        if not short and not schema[name].trajectory:
            few = next((i for i, count in enumerate(counts.tolist()) if not 0 < count <= len(value[i])), None)
        if short or few is not None:
            found = f"{len(value[few])} steps in row {few}" if few is not None else shown(value)
            raise SchemaError(
                f"Column {name!r} of the stacked trajectories has {found}; expected {len(counts)} rows"
                f"{'' if few is None else f', of which that has 1 to as many steps as lengths says, {counts[few]}'}."
            )
    return [
        {name: value[i] if schema[name].trajectory else value[i][:count] for name, value in columns.items()}
        for i, count in enumerate(counts.tolist())
    ]


def stacked_bytes(schema: Schema, columns: Any, lengths: Any) -> tuple[Array, dict[str, Array]]:
    """Check stacked trajectories, as `stacked`, and return their lengths and bytes.

    Returns:
        int64 [n]; column name -> uint8 ``[n, T, step_bytes]``, or ``[n, 1, step_bytes]`` of columns per trajectory.
    """
    columns, counts = _columns_and_counts(columns, lengths)
    if len(counts) == 0:
        _check_empty(schema, columns)
        return np.empty(0, dtype=np.int64), {}
    padded, arrays = _bytes_of(schema, columns, len(counts))
    _check_counts(counts, padded)
    return counts.astype(np.int64), {
        name: array.reshape(len(counts), -1, array.shape[1]) for name, array in arrays.items()
    }


def stacked_rows(schema: Schema, columns: Any, lengths: Any) -> list[dict[str, Any]]:
    """Stacked trajectories of which some columns are ragged, as `stacked`, one by one."""
    columns, counts = _columns_and_counts(columns, lengths)
    if len(counts) == 0:
        _check_empty(schema, columns)
        return []
    return _rows_of(schema, columns, counts, None)


def _columns_and_counts(columns: Any, lengths: Any) -> tuple[Mapping[str, Any], Array]:
    columns = as_mapping(columns)
    if not isinstance(columns, Mapping):
        raise SchemaError(
            f"With lengths a {type(columns).__name__} was received; expected one mapping of stacked arrays "
            "[n, T, ...]."
        )
    counts = numbers(lengths, "lengths", "iu", "integers [n]")
    if counts.ndim != 1:
        raise SchemaError(
            f"lengths has dtype {counts.dtype} and shape {list(counts.shape)}; expected integers [n]."
        )
    return columns, counts


def _check_empty(schema: Schema, columns: Mapping[str, Any]) -> None:
    """Raise SchemaError unless stacked arrays have no trajectories, as `lengths` has."""
    schema.validate_names(columns, what="the stacked trajectories")
    for name, value in columns.items():
        count = value.shape[0] if isinstance(value, np.ndarray) and value.ndim else 0
        count = len(value) if not count and isinstance(value, (list, tuple)) else count
        if is_tensor(value) and unreadable(value) is None and value.ndim:
            count = value.shape[0]
        if count:
            raise SchemaError(
                f"lengths has no entries, and column {name!r} of the stacked trajectories {count}; expected one length "
                "for each trajectory."
            )


def _check_counts(counts: Array, padded: int) -> None:
    if counts.min() < 1 or counts.max() > padded:
        bad = int(np.flatnonzero((counts < 1) | (counts > padded))[0])
        raise SchemaError(f"lengths[{bad}] is {counts[bad]}; expected 1 to {padded}, the stacked arrays' T.")


def _locate_any(
    schema: Schema, stacked: Mapping[str, Any], count: int
) -> tuple[int, list[int], list[int], object]:
    """As `Schema.locate_stacked`, for any valid input; also returns the owner of the memory.

    Raises:
        SchemaError: the columns do not fit.
    """
    padded, arrays = _bytes_of(schema, stacked, count)
    apart = {name: array.nbytes // count for name, array in arrays.items()}
    return padded, [arrays[name].ctypes.data for name in schema], [apart[name] for name in schema], arrays


def _bytes_of(schema: Schema, stacked: Mapping[str, Any], count: int) -> tuple[int, dict[str, Array]]:
    """T, and the columns of stacked trajectories as uint8 ``[n * T, step_bytes]``, or ``[n, step_bytes]``."""
    flat: dict[str, Any] = {}
    once: dict[str, Array] = {}
    padded = None
    for name, value in schema.cast(settled(stacked), what="the stacked trajectories").items():
        kind = unreadable(value) if is_tensor(value) else None
        if not (isinstance(value, np.ndarray) or is_tensor(value)) or kind is not None:
            raise SchemaError(
                f"Column {name!r} of the stacked trajectories is a {kind or type(value).__name__}; expected a "
                "numpy array or a strided torch tensor [n, T, ...] with its data."
            )
        shape = list(value.shape)
        if name in schema.per_trajectory:
            once[name] = _stacked_once(schema.per_trajectory[name], name, value, count)
            continue
        if len(shape) < 2 or shape[0] != count or shape[1] != (padded := padded or shape[1]):
            raise SchemaError(
                f"Column {name!r} of the stacked trajectories has shape {shape}; expected [{count}, "
                f"{padded or 'T'}, ...] as lengths has {count} entries."
            )
        flat[name] = value.reshape(shape[0] * shape[1], *shape[2:])
    schema.validate_names({**flat, **once}, what="the stacked trajectories")
    _, arrays = schema.steps.validate(flat, what="the stacked trajectories")
    assert padded is not None
    return padded, {**arrays, **once}


def _stacked_once(column: Column, name: str, value: Any, count: int) -> Array:
    """The values of `count` trajectories in a column per trajectory, uint8 [count, step_bytes]."""
    if list(value.shape) != [count, *column.shape]:
        raise SchemaError(
            f"Column {name!r} of the stacked trajectories has shape {list(value.shape)}; expected "
            f"{[count, *column.shape]}, as the column is per trajectory and lengths has {count} entries."
        )
    return Schema({name: column.by_step()}).validate({name: value}, what="the stacked trajectories")[1][name]


def checked_priority(priority: Any) -> float:
    """The priority of one trajectory, rounded to float32; `UNSET` for None.

    Raises:
        SchemaError: `priority` is not a finite number of at least 0.
    """
    if priority is None:
        return float(UNSET)
    if type(priority) is float and _TINY <= priority <= _LARGEST:
        return priority
    return float(checked_priorities(priority, 1)[0])


def single_priority(priority: Any) -> float:
    """As `checked_priority`, for a scalar only: an array [1] is refused."""
    scalar = priority is None or type(priority) is float
    if not scalar and numbers(priority, "priority", "biuf", "a number").shape != ():
        raise SchemaError(f"priority is {shown(priority)}; expected a number.")
    return checked_priority(priority)


def checked_priorities(priority: Any, count: int) -> Array:
    """Priorities of `count` trajectories, float32 [count].

    Args:
        priority: a number, [count] or [count, 1] numbers, or None for `UNSET`.

    Raises:
        SchemaError: a value that is not a finite number of at least 0.
    """
    if priority is None:
        return np.full(count, UNSET, dtype=np.float32)
    values = numbers(priority, "priority", "biuf", f"a number or {count} of them").astype(np.float64)
    if values.shape == (count, 1):  # TD errors
        values = values[:, 0]
    if values.ndim and values.shape != (count,):
        raise SchemaError(f"priority has shape {list(values.shape)}; expected one number or [{count}].")
    values = np.broadcast_to(values, (count,))
    narrow, bad = narrowed(values)
    if bad >= 0:
        which = f" of trajectory {bad}" if count > 1 else ""
        raise SchemaError(
            f"priority{which} is {values[bad]}; expected a finite number (as float32) that is not negative."
        )
    return narrow


def prefix_missing(steps: Any, generation: Any) -> SchemaError:
    """The error for these, given without a prefix."""
    return SchemaError(
        f"prefix_steps is {shown(steps)} and prefix_generation {shown(generation)} without prefix; give it, or none of "
        "them."
    )


def prefix_numbers(name: str, value: Any, count: int) -> Array:
    """What `Table.extend` takes of `count` trajectories' prefixes, int64 [count]; SchemaError for anything else."""
    values = numbers(value, name, "iu", f"an integer, or {count} of them")
    if values.shape not in ((), (count,)):
        raise SchemaError(f"{name} is {shown(value)}; expected an integer, or [{count}] of them.")
    return np.broadcast_to(values, (count,)).astype(np.int64)
