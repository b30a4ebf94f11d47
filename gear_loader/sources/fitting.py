"""Values of episodes brought to the columns of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import Episode, EpisodeReader, converted, describe
from gear_loader.storage.dtypes import NUMPY_DTYPES, torch_dtypes
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown

Values = Any
"""Of a column of an episode: an array, or a tensor of bfloat16; of any length as `Table.add` takes them."""


def final_of(episode: Any) -> Mapping[str, Any]:
    """The values after the last step, of what may be an `Episode`."""
    return episode.final if isinstance(episode, Episode) else {}


def fitted(values: Values, column: Column, where: str, *, finite: bool) -> Values:
    """Convert one column of an episode to the shape and dtype of a table's column.

    Args:
        values: ``[T, *shape]``, or ``[*shape]`` of a column per trajectory; of any length as for `Table.add`.
        where: place in errors; its `{}` is replaced by the step. finite: whether NaN and infinity are refused.
    """
    if column.ragged is not None:
        return _of_any_length(values, column, where, finite)
    if column.trajectory:
        if tuple(values.shape) != column.shape:
            raise SourceError(
                f"{where.replace('{}', '')} has shape {list(values.shape)}; expected one value of shape "
                f"{list(column.shape)}, as the column is per trajectory."
            )
        by_step = dataclasses.replace(column, per="step")
        return fitted(values[None], by_step, where.replace("{}", ""), finite=finite).reshape(column.shape)
    if tuple(values.shape[1:]) != column.shape:
        expected = "".join(f", {extent}" for extent in column.shape)
        raise SourceError(
            f"{where.replace('{}', '')} has shape {list(values.shape)}; expected [T{expected}]."
        )
    return _cast(values, column.dtype, where, finite)


def _cast(values: Any, dtype: torch.dtype, where: str, finite: bool) -> Any:
    if isinstance(values, torch.Tensor):  # bfloat16, which numpy does not have
        if values.dtype == dtype and not finite:
            return values
        values = values.float().numpy()

    def place(step: int | None) -> str:
        return where.replace("{}", "" if step is None else f", step {step}")

    array = converted(values, dtype, place, finite=finite)
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype) if dtype == torch.bfloat16 else array


def _of_any_length(values: Values, column: Column, where: str, finite: bool) -> Values:
    """Values of any length, with the elements of arrays cast; the rest is checked where they are added."""
    assert column.ragged is not None
    if column.ragged.kind != "array":
        plain = isinstance(values, np.ndarray) and column.ragged.kind != "coded"
        return values.tolist() if plain else values
    dtype = torch_dtypes()[column.ragged.dtype_name]
    if isinstance(values, Ragged):
        if values.values.dtype == dtype and not finite:
            return values
        given = values.values if values.values.dtype == torch.bfloat16 else values.values.numpy()
        return Ragged(
            torch.as_tensor(_cast(given, dtype, where.replace("{}", ""), finite), device="cpu"),
            values.offsets,
            values.shape,
        )
    if column.trajectory:
        return _cast(np.asarray(values), dtype, where.replace("{}", ""), finite)
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise SourceError(
            f"{where.replace('{}', '')} is {describe(values)}; expected an array for each step, or a Ragged."
        )
    return [
        _cast(
            value if isinstance(value, torch.Tensor) else np.asarray(value),
            dtype,
            where.replace("{}", f", step {step}"),
            finite,
        )
        for step, value in enumerate(values)
    ]


def check_fit(reader: EpisodeReader, lengths: np.ndarray, table: Table) -> None:
    """Raise SourceError if the columns of a reader, or its longest episode, do not fit a table."""
    given = table.schema.added
    missing = [name for name in given if name not in reader.schema]
    extra = [name for name in reader.schema if name not in given]
    if missing or extra:
        raise SourceError(
            f"{reader.source} gives the columns {list(reader.schema)}; the table has {list(given)}. Name "
            "the table's columns: columns={name in the table: name in the source}."
        )
    for name, column in given.items():
        own = reader.schema[name]
        if own.trajectory != column.trajectory:
            one, other = ("once", "for each step") if column.trajectory else ("for each step", "once")
            raise SourceError(
                f"{reader.source}: column {name!r} has a value {other}; the table expects one {one}. Give the table a "
                f"column with per={own.per!r}."
            )
        if own.ragged is not None or column.ragged is not None:
            if not _fits(own, column):
                raise SourceError(
                    f"{reader.source}: column {name!r} has values of {shown(own)}; the table expects {shown(column)}."
                )
        elif own.shape != column.shape:
            raise SourceError(
                f"{reader.source}: column {name!r} has steps of shape {list(own.shape)}; the table "
                f"expects {list(column.shape)}."
            )
    longest = table._engine.longest
    number = int(lengths.argmax())
    if lengths[number] > longest:
        raise SourceError(
            f"{reader.source}, episode {number} has {lengths[number]} steps; the table holds at most {longest}. "
            "Create it with a larger max_steps, or let load() make one."
        )


def _fits(own: Column, column: Column) -> bool:
    """Whether a table's column may store values that another column describes, one of both being of any length."""
    given, wanted = own.ragged, column.ragged
    if wanted is not None and wanted.coded is not None:
        if given is not None and given.kind == "bytes":  # encoded, which is checked when they are added
            return True
        shape = own.shape if given is None else () if given.coded is None else given.coded.shape
        extents = zip(shape, wanted.coded.shape, strict=False)
        return len(shape) == len(wanted.coded.shape) and all(
            one == other or None in (one, other) for one, other in extents
        )
    if given is None:  # arrays that happen to have one length
        return (
            wanted is not None
            and wanted.kind == "array"
            and own.shape[1:] == wanted.shape
            and own.shape != ()
        )
    if wanted is None:
        return False
    same = given.kind == wanted.kind and given.shape == wanted.shape
    return same or (given.kind == "coded" and wanted.kind == "bytes")


def _same_type(column: Column) -> tuple[Any, np.dtype | None]:
    """Type and dtype of values per step that `fitted` returns as they are, if their shape is the column's; of short
    episodes the checks take longer than the rest."""
    values, dtype = column.ragged, NUMPY_DTYPES.get(column.dtype_name)
    if values is not None:
        return (None if column.trajectory or values.kind == "array" else list), None
    return (None if column.trajectory or dtype is None else np.ndarray), dtype


def fitted_episodes(
    reader: EpisodeReader, table: Table, episodes: Iterable[Episode] | None = None, first: int = 0
) -> Generator[Episode]:
    """The episodes of a reader, of which `check_fit` has approved, as a table stores them.

    Args:
        episodes: those of the reader from `first` on; None: all.
    """
    finals: Mapping[str, Column] = table.schema.finals or {}
    columns = [(name, column, _same_type(column)) for name, column in table.schema.added.items()]
    for number, episode in enumerate(reader if episodes is None else episodes, first):
        where = f"{reader.source}, episode {number}{{}}: column "
        values: dict[str, Any] = {}
        for name, column, same in columns:
            given = episode[name]
            fits = type(given) is same[0] and (
                same[1] is None or (given.dtype == same[1] and given.shape[1:] == column.shape)
            )
            values[name] = given if fits else fitted(given, column, f"{where}{name!r}", finite=False)
        final = final_of(episode)
        last: dict[str, Any] = {}
        if finals and all(name in final for name in finals):
            last = {
                name: fitted(final[name][None], column, f"{where}{name!r} after the last step", finite=False)[
                    0
                ]
                for name, column in finals.items()
            }
        yield Episode(values, last)
