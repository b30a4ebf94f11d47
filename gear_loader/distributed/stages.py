"""The columns of the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Column, Schema

__all__ = ["all_columns", "check_stages"]


def all_columns(schemas: Sequence[Schema]) -> dict[str, Column]:
    """Return the columns of all stages.

    Raises:
        SchemaError: two stages have different columns of one name.
    """
    columns: dict[str, Column] = {}
    for stage, schema in enumerate(schemas):
        for name, column in schema.items():
            if columns.setdefault(name, column) != column:
                raise SchemaError(
                    f"Column {name!r} is {column} in the tables of stage {stage} and {columns[name]} in those of an "
                    "earlier stage; expected the same wherever a column is needed."
                )
    return columns


def check_stages(stages: Any, schemas: Sequence[Schema]) -> None:
    """Check that the tables of each stage have the columns that a mapping assigns to it.

    Args:
        stages: column -> stage, or several stages; -1 is the last.
        schemas: columns of the tables of each stage.

    Raises:
        SchemaError: a table has other columns, or `stages` is another kind of value.
    """
    if not isinstance(stages, Mapping):
        raise SchemaError(f"stages is {stages!r}; expected a mapping of column names to stages.")
    wanted: list[set[str]] = [set() for _ in schemas]
    for name, numbers in stages.items():
        several = [numbers] if isinstance(numbers, (int, np.integer)) else numbers
        if isinstance(several, str) or not isinstance(several, Sequence) or not several:
            raise SchemaError(f"stages[{name!r}] is {numbers!r}; expected a stage or a list of stages.")
        for number in several:
            whole = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
            if not whole or not -len(schemas) <= number < len(schemas):
                raise SchemaError(
                    f"stages[{name!r}] has {number!r}; expected stages from 0 to {len(schemas) - 1}, or -1 for the "
                    "last."
                )
            wanted[number].add(name)
    for stage, (schema, names) in enumerate(zip(schemas, wanted, strict=True)):
        if set(schema) != names:
            raise SchemaError(
                f"The tables of stage {stage} have the columns {sorted(schema)}; stages assigns {sorted(names)} to it. "
                "Create each stage's tables with the columns that it needs."
            )
