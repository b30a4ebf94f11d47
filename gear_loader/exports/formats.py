"""`Table.export`: a data set of a table, by the name of its format."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

from gear_loader.errors import SchemaError
from gear_loader.exports.lerobot_writer import write_lerobot
from gear_loader.exports.npz_writer import write_npz
from gear_loader.exports.parquet import write_hugging_face, write_parquet
from gear_loader.sources.episodes import Columns
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown

GROUP = "gear_loader.exports"
"""The entry points by which a package adds formats."""

_KIND = re.compile(r"[a-z][a-z0-9_-]+")
_SUFFIXES = {".parquet": "parquet"}


def _write_minari(table: Table, place: str, *, columns: Columns = None, **options: Any) -> Any:
    from gear_loader.integrations.minari_export import to_minari  # needs Minari

    return to_minari(table, place, columns=columns, **options)


_WRITERS: dict[str, Callable[..., Any]] = {
    "parquet": write_parquet,
    "hf": write_hugging_face,
    "npz": write_npz,
    "lerobot": write_lerobot,
    "minari": _write_minari,
}


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
    if not isinstance(kind, str) or not _KIND.fullmatch(kind) or not callable(writer):
        raise SchemaError(
            f"kind {shown(kind)} and writer {shown(writer)} were received; expected a name such as 'mine', and a "
            "function."
        )
    if kind in _WRITERS:
        raise SchemaError(
            f"The kind {kind!r} is known already; expected a new one, other than {list(_WRITERS)}."
        )
    _WRITERS[kind] = writer


def export(table: Table, address: str | os.PathLike[str], *, columns: Columns = None, **options: Any) -> Any:
    """See `Table.export`."""
    text = os.fspath(address) if isinstance(address, (str, os.PathLike)) else ""
    kind, colon, place = text.partition(":")
    suffix = _SUFFIXES.get(os.path.splitext(text)[1].lower())
    if not colon or not _KIND.fullmatch(kind) or place.startswith("//"):
        kind, place = suffix or "", text
    writer = _writer(kind)
    if writer is None or not place:
        raise SchemaError(
            f"{shown(address)} was received; expected one of {[f'{each}:...' for each in kinds()]}, or a file that "
            f"ends in {', '.join(_SUFFIXES)}."
        )
    parameters = inspect.signature(writer).parameters.values()
    own = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    unknown = [option for option in options if option not in own]
    if unknown and not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        raise SchemaError(f"'{kind}:' does not know the option {unknown[0]!r}; it has {own}.")
    return writer(table, place, columns=columns, **options)


def kinds() -> list[str]:
    """The formats that are known, those of installed packages too."""
    return sorted({*_WRITERS, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def _writer(kind: str) -> Callable[..., Any] | None:
    """What writes data sets of a kind; None if it is not known."""
    found = _WRITERS.get(kind)
    if found is None and kind:
        for point in importlib.metadata.entry_points(group=GROUP, name=kind):
            found = point.load()
    return found
