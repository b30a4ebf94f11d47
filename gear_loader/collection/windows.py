"""The windows of a batch's columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from gear_loader.collection.n_step import NStep
from gear_loader.errors import SchemaError
from gear_loader.storage.rows import Reach
from gear_loader.storage.schema import BATCH_KEYS, Schema, Window

__all__ = [
    "check_windows",
    "expand",
    "in_schema_order",
    "mask_of",
    "reach_of",
    "source_of",
    "steps_only",
    "windows_of",
]

_W = TypeVar("_W", bound="Window | NStep")

_ONCE = Window(1, offset=1 - 2**31, pad="edge", squeeze=True)
"""The window of a column per trajectory: ends before the first step of any trajectory, and so shows its first value."""


def check_windows(windows: Any, columns: Sequence[str] | None) -> None:
    """Raise SchemaError for windows or columns that are invalid with any schema."""
    if isinstance(columns, str):
        raise SchemaError(
            f"columns is {columns!r}; expected a sequence of column names, for example [{columns!r}]."
        )
    if windows == {} or (columns is not None and not len(columns)):
        raise SchemaError("No columns were asked for; expected at least one in windows or columns.")
    if isinstance(windows, Window):
        if windows.column is not None:
            raise SchemaError(
                f"windows is {windows!r}; expected a mapping of names to Windows where a Window has column."
            )
        return
    if not isinstance(windows, Mapping):
        raise SchemaError(
            f"windows is {windows!r}; expected a Window or a mapping of column names to Windows."
        )
    if columns is not None and set(columns) != set(windows):
        raise SchemaError(
            f"columns {list(columns)} and the windows' columns {list(windows)} differ; give one."
        )
    for name, window in windows.items():
        if window is not None and not isinstance(window, (Window, NStep)):
            raise SchemaError(
                f"The window of column {name!r} is {window!r}; expected gear_loader.Window or gear_loader.NStep, or "
                "None for a column per trajectory."
            )
        if not isinstance(name, str) or not name or name in BATCH_KEYS:
            raise SchemaError(
                f"A window has the name {name!r}; expected a non-empty string other than {', '.join(BATCH_KEYS)}."
            )


def expand(
    schema: Schema, windows: Mapping[str, Window | NStep]
) -> tuple[dict[str, Window], dict[str, dict[str, str]]]:
    """The windows that are gathered for those of a dataset.

    Returns:
        Name -> window; and for each `NStep` the names of its windows among them, by those of `NStep.windows`.
    """
    plain: dict[str, Window] = {}
    hidden: dict[str, dict[str, str]] = {}
    for name, window in windows.items():
        if isinstance(window, Window):
            plain[name] = window
            continue
        needed = window.windows(schema)
        hidden[name] = {part: f"{name}:{part}" for part in needed}
        plain.update({f"{name}:{part}": each for part, each in needed.items()})
    return plain, hidden


def source_of(name: str, window: Window | NStep) -> str:
    """The column that the window of this name reads."""
    return name if window.column is None else window.column


def mask_of(schema: Schema, name: str, window: Window) -> tuple[int, int, str, bool]:
    """Key of a window's mask: windows with the same key exist at the same steps."""
    return *window.span, schema[source_of(name, window)].final


def in_schema_order(schema: Schema, windows: Mapping[str, _W]) -> dict[str, _W]:
    """Name -> window, in the order of the columns that they read, all of which the schema has."""
    order = {column: place for place, column in enumerate(schema)}
    return dict(sorted(windows.items(), key=lambda item: order[source_of(*item)]))


def windows_of(schema: Schema, windows: Any, columns: Sequence[str] | None) -> dict[str, Window | NStep]:
    """Name -> window, in the order of the columns that they read; raises SchemaError if they do not fit the schema."""
    check_windows(windows, columns)
    if isinstance(windows, Window):
        chosen: dict[str, Any] = dict.fromkeys(list(schema) if columns is None else list(columns), windows)
        chosen.update({name: None for name in chosen if name in schema.per_trajectory})
    else:
        chosen = dict(windows)
    sources = {name: name if window is None else source_of(name, window) for name, window in chosen.items()}
    unknown = [name for name in sources.values() if name not in schema]
    if unknown:
        raise SchemaError(
            f"Columns {list(sources.values())} were asked for; the table has {list(schema)}. Unknown: {unknown}. "
            "A window whose name is not that of its column says which it reads: Window(..., column=...)."
        )
    for name, window in chosen.items():
        if isinstance(window, NStep):
            window.windows(schema)
        elif schema[sources[name]].trajectory:
            chosen[name] = _once(name, window)
        elif window is None:
            raise SchemaError(
                f"The window of column {name!r} is None, as for a column per trajectory; this one has steps, so give "
                "it a gear_loader.Window."
            )
    if all(column in schema.per_trajectory for column in sources.values()):
        raise SchemaError(
            f"Only columns per trajectory were asked for: {list(sources.values())}; expected at least one with steps."
        )
    return in_schema_order(schema, chosen)


def _once(name: str, window: Window | None) -> Window:
    """The window of a column per trajectory."""
    if window is not None and (window.length, window.offset) not in ((1, 0), (_ONCE.length, _ONCE.offset)):
        raise SchemaError(
            f"The window of {name!r} is {window!r}, but its column has one value per trajectory; expected None, or "
            "Window(1, column=...)."
        )
    return _ONCE if window is None else dataclasses.replace(_ONCE, column=window.column)


def steps_only(schema: Schema, windows: Mapping[str, _W]) -> dict[str, _W]:
    """The windows that read steps: not those of columns per trajectory."""
    return {
        name: window for name, window in windows.items() if not schema[source_of(name, window)].trajectory
    }


def reach_of(schema: Schema, windows: Mapping[str, Window]) -> Reach:
    """What the windows read, relative to the anchor."""
    steps = steps_only(schema, windows).values()
    first = min(window.offset for window in steps)
    last = max(window.offset + window.length - 1 for window in steps)
    return Reach(first, last, len(steps) < len(windows))
