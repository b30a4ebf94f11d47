"""`Table.export`: a data set of a table, by the name of its format."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gear_loader.errors import SchemaError
from gear_loader.sources.episodes import Columns
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.registry import Registry, option_names

_HERE = "gear_loader.exports"
registry = Registry(
    "gear_loader.exports",
    "writer",
    SchemaError,
    {
        "hf": f"{_HERE}.parquet:write_hugging_face",
        "lerobot": f"{_HERE}.lerobot_writer:write_lerobot",
        "minari": "gear_loader.integrations.minari_export:to_minari",
        "npz": f"{_HERE}.npz_writer:write_npz",
        "parquet": f"{_HERE}.parquet:write_parquet",
    },
    {".parquet": "parquet"},
)


def register(kind: str, writer: Callable[..., Any]) -> None:
    """Make addresses ``kind:...`` known to `Table.export`, in this process.

    A package makes its formats known to every process by entry points of the group ``gear_loader.exports``, whose names
    are the kinds, and which name the writers.

    Args:
        kind: lower-case letters, digits, ``-`` and ``_``, at least two.
        writer: called as ``writer(table, place, columns=..., **options)`` with what follows the colon. What it returns,
            `Table.export` returns.

    Raises:
        SchemaError: an invalid kind, or one that is known already.
    """
    registry.register(kind, writer)


def export(table: Table, address: str | os.PathLike[str], *, columns: Columns = None, **options: Any) -> Any:
    """See `Table.export`."""
    text = os.fspath(address) if isinstance(address, (str, os.PathLike)) else ""
    kind, place = registry.split(str(text))
    kind = kind or registry.by_suffix(place)
    writer = registry.function(kind)
    if writer is None or not place:
        raise SchemaError(
            f"{shown(address)} was received; expected one of {[f'{each}:...' for each in registry.kinds()]}, or a file "
            f"that ends in {', '.join(registry.suffixes)}."
        )
    own, any_other = option_names(writer, 2)
    unknown = [option for option in options if option not in own]
    if unknown and not any_other:
        raise SchemaError(f"'{kind}:' does not know the option {unknown[0]!r}; it has {own}.")
    return writer(table, place, columns=columns, **options)
