"""Which columns of a table become which field of another library's episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gear_loader.errors import SchemaError, SourceError
from gear_loader.sources.episodes import Columns, requested, select
from gear_loader.storage.ragged import check_fixed
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

_IN_BUFFERS = {"observation": "obs", "next_observation": "next_obs"}  # names of `gear_loader.ReplayBuffer`


def exported_columns(
    table: Table, columns: Columns, required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, str]:
    """The columns of steps to be exported: {name there: name in the table}, nested ones by their leaves.

    Args:
        columns: as the caller gave them; None takes `required`, and of `optional` those that the table has.

    Raises:
        SchemaError: one of `columns` or of `required` is missing.
    """
    stored = [name for name, column in table.schema.items() if not column.trajectory]
    roots = {name.partition(".")[0] for name in stored}
    if columns is None:
        there = {
            role: role if role in roots else _IN_BUFFERS.get(role, role) for role in (*required, *optional)
        }
        columns = {role: name for role, name in there.items() if name in roots}
    wanted = requested(columns, ())
    if missing := [name for name in required if name not in {each.partition(".")[0] for each in wanted}]:
        raise SchemaError(
            f"The table has the columns {list(table.schema)}; missing: {missing}. Name them by columns={{name: name in "
            "the table}."
        )
    try:
        chosen = select(wanted, stored, "The table")
        check_fixed({name: table.schema[name] for name in chosen.values()}, "exports have")
        return chosen
    except SourceError as error:
        raise SchemaError(str(error)) from None


def numbers(values: Mapping[str, torch.Tensor], chosen: Mapping[str, str]) -> dict[str, Array]:
    """The values of chosen columns, bfloat16 as float32."""
    return {
        role: np.asarray(values[name].float() if values[name].dtype == torch.bfloat16 else values[name])
        for role, name in chosen.items()
        if name in values
    }
