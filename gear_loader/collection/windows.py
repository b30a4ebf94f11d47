"""The windows of a batch's columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from gear_loader.collection.conversions import converted_dtype
from gear_loader.collection.n_step import NStep, ReturnWindows
from gear_loader.errors import SchemaError
from gear_loader.storage.ragged import Values
from gear_loader.storage.schema import BATCH_KEYS, Schema, Window
from gear_loader.storage.selected_rows import Reach
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import one_of

_W = TypeVar("_W", bound="Window | NStep | Whole")

LAYOUTS = ("padded", "packed", "jagged", "tree")
"""Choices of a dataset's `layout`."""

PACKED_KEYS = ("cu_seqlens", "max_seqlen", "position")
"""Keys of packed batches, which no window of one may have as its name."""

ROW_KEYS = ("index", "anchor", "generation")
"""Keys of a batch that identify its rows."""

FINAL_KEY = "final"
"""Key of batches of whole trajectories with their final steps."""

_ONCE = Window(1, offset=1 - 2**31, pad="edge", squeeze=True)
"""The window of a column per trajectory: ends before the first step of any trajectory, and so shows its first value."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """All steps of a trajectory, from its first to its last; a value of a dataset's `windows`.

    Args:
        column, dtype, scale: as of a `Window`.
        final: whether a final step (see `Column.final`) is among them, after the last one; where it is given, columns
            without final steps are zeros there, and batches tell by ``final``, bool [B], which rows end with one. All
            columns of steps of a batch have the same. Of one `Table`, on the CPU.

    Raises:
        SchemaError: invalid options.
    """

    column: str | None = None
    dtype: torch.dtype | None = None
    scale: float | None = None
    final: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.final, bool):
            raise SchemaError(f"Whole final is {shown(self.final)}; expected True or False.")
        self.window()

    def __repr__(self) -> str:
        given = {"column": self.column, "dtype": self.dtype, "scale": self.scale, "final": self.final or None}
        return (
            f"Whole({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"
        )

    def window(self) -> Window:
        """The window of the longest trajectory that a table can hold, at anchor 0."""
        return Window(2**31 - 1, column=self.column, dtype=self.dtype, scale=self.scale)


def check_windows(windows: Any, columns: Sequence[str] | None) -> None:
    """Raise SchemaError for windows or columns that are invalid with any schema."""
    if isinstance(columns, str):
        raise SchemaError(
            f"columns is {columns!r}; expected a sequence of column names, for example [{columns!r}]."
        )
    if columns is not None and not (
        isinstance(columns, (Sequence, set, frozenset)) and all(isinstance(name, str) for name in columns)
    ):
        raise SchemaError(f"columns is {shown(columns)}; expected a sequence of column names.")
    if (isinstance(windows, Mapping) and not windows) or (columns is not None and not len(columns)):
        raise SchemaError("No columns were asked for; expected at least one in windows or columns.")
    if isinstance(windows, (Window, Whole)):
        if windows.column is not None:
            raise SchemaError(
                f"windows is {windows!r}; expected a mapping of names to Windows where a Window has column."
            )
        return
    if not isinstance(windows, Mapping):
        raise SchemaError(
            f"windows is {shown(windows)}; expected a Window or a mapping of column names to Windows, or in place of a "
            "Window gear_loader.Whole()."
        )
    if columns is not None and set(columns) != set(windows):
        raise SchemaError(
            f"columns {list(columns)} and the windows' columns {list(windows)} differ; give one."
        )
    for name, window in windows.items():
        if window is not None and not isinstance(window, (Window, NStep, Whole)):
            raise SchemaError(
                f"The window of column {name!r} is {shown(window)}; expected gear_loader.Window, gear_loader.NStep or "
                "gear_loader.Whole, or None for a column per trajectory."
            )
        if not isinstance(name, str) or not name or name in BATCH_KEYS:
            raise SchemaError(
                f"A window has the name {shown(name)}; expected a non-empty string other than {', '.join(BATCH_KEYS)}."
            )


def has_whole(windows: Any) -> bool:
    """Whether some of a dataset's windows are whole trajectories."""
    each = windows.values() if isinstance(windows, Mapping) else [windows]
    return any(isinstance(window, Whole) for window in each)


def check_layout(layout: Any, windows: Any) -> None:
    """Raise SchemaError for a layout that is invalid, or that these windows, which are valid, cannot have."""
    one_of("layout", layout, LAYOUTS)
    each = windows.values() if isinstance(windows, Mapping) else [windows]
    if layout == "padded" and not has_whole(windows):
        return
    for window in each:
        padded = isinstance(window, Window) and (window.pad != "keep" or window.squeeze)
        apart = isinstance(window, Window) and (window.chosen or window.timestamps is not None)
        if isinstance(window, NStep) or padded or apart:
            raise SchemaError(
                f"layout={layout!r} was given with {window!r}; expected gear_loader.Whole(), or a gear_loader.Window "
                "without pad, squeeze, every and at: rows that are packed have no padding."
            )


def packed_span(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> tuple[int, int]:
    """First step relative to the anchor, and length, of the windows of a packed batch, which are all the same.

    Raises:
        SchemaError: they differ, or one has the name of a key of packed batches.
    """
    taken = sorted(set(windows) & set(PACKED_KEYS))
    if taken:
        raise SchemaError(
            f"A window has the name {taken[0]!r}, which is a key of packed batches. Give it another one: "
            f"windows={{'other_name': Whole(column={taken[0]!r})}}."
        )
    if reads_final(windows):
        _check_final(schema, windows)
    plain = steps_only(schema, expand(schema, windows)[0])
    spans = {(window.offset, window.length) for window in plain.values()}
    if len(spans) > 1:
        raise SchemaError(
            f"The windows {dict(windows)!r} of a packed batch differ; expected the same for all columns of steps, "
            "which share cu_seqlens."
        )
    (span,) = spans
    return span


def reads_final(windows: Mapping[str, Window | NStep | Whole]) -> bool:
    """Whether final steps are among those of whole trajectories."""
    return any(isinstance(window, Whole) and window.final for window in windows.values())


def _check_final(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> None:
    """Raise SchemaError if a batch with final steps cannot have these windows."""
    if FINAL_KEY in windows:
        raise SchemaError(
            f"A window has the name {FINAL_KEY!r}, which is a key of batches with final steps. Give it another one: "
            f"windows={{'other_name': Whole(column={FINAL_KEY!r}, final=True)}}."
        )
    steps = steps_only(schema, windows)
    if not all(isinstance(window, Whole) and window.final for window in steps.values()):
        raise SchemaError(
            f"The windows {dict(windows)!r} of a packed batch differ in final; expected Whole(final=True) for all "
            "columns of steps, which share cu_seqlens."
        )
    if not any(schema[source_of(name, window)].final for name, window in steps.items()):
        raise SchemaError(
            f"The windows {dict(windows)!r} have final=True, and read no column with final steps "
            f"({list(schema.finals or ())}). Read one of them, or leave final out."
        )


def expand(
    schema: Schema, windows: Mapping[str, Window | NStep | Whole]
) -> tuple[dict[str, Window], dict[str, dict[str, str]]]:
    """The windows that are gathered for those of a dataset.

    Returns:
        Name -> window; and for each `NStep` the names of its windows among them, by those of `NStep.windows`. A window
        with `Window.chosen` steps becomes one for each; see `chosen_parts`. In place of one with `Window.timestamps` it
        is that of the anchor's time; see `gear_loader.collection.timed`.
    """
    plain: dict[str, Window] = {}
    hidden: dict[str, dict[str, str]] = {}
    for name, window in windows.items():
        if isinstance(window, Window) and window.timestamps is not None:
            plain[name] = Window(1, column=window.timestamps)
            continue
        if isinstance(window, Window) and (window.every > 1 or window.at is not None):
            steps = window.chosen
            one = dataclasses.replace(window, every=1, at=None, length=1, column=source_of(name, window))
            if steps is None:
                plain[name] = dataclasses.replace(one, length=window.length, offset=window.reach[0])
                continue
            parts = chosen_parts({name: window})[name]
            plain |= {
                part: dataclasses.replace(one, offset=step) for part, step in zip(parts, steps, strict=True)
            }
            continue
        if not isinstance(window, NStep):
            plain[name] = window.window() if isinstance(window, Whole) else window
            continue
        needed = window.windows(schema)
        hidden[name] = {part: f"{name}:{part}" for part in needed}
        plain.update({f"{name}:{part}": each for part, each in needed.items()})
    return plain, hidden


def chosen_parts(windows: Mapping[str, Window | NStep | Whole]) -> dict[str, list[str]]:
    """The windows with `Window.chosen` steps, and the names of the windows of one step that are gathered for them."""
    return {
        name: [f"{name}:{number}" for number in range(window.length)]
        for name, window in windows.items()
        if isinstance(window, Window) and window.chosen
    }


def timed_of(windows: Mapping[str, Window | NStep | Whole]) -> dict[str, Window]:
    """The windows with `Window.timestamps`."""
    return {
        name: window
        for name, window in windows.items()
        if isinstance(window, Window) and window.timestamps is not None
    }


def next_of(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> dict[str, NStep]:
    """The returns whose `NStep.next` has windows, or values of any length: read when the bootstrap steps are known."""
    return {
        name: window
        for name, window in windows.items()
        if isinstance(window, NStep)
        and (window.has_windows or not schema.ragged.keys().isdisjoint(window.delivered))
    }


def without_late(
    schema: Schema, windows: Mapping[str, Window | NStep | Whole]
) -> dict[str, Window | NStep | Whole]:
    """The windows without what `gear_loader.collection.timed` reads after them, apart from windows of times."""
    late = {name: dataclasses.replace(each, next=None) for name, each in next_of(schema, windows).items()}
    return {**windows, **late}


def is_late(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> bool:
    """Whether some windows are read after the others."""
    return bool(timed_of(windows) or next_of(schema, windows))


def reads(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> list[tuple[str, Window]]:
    """The columns that windows read, those of times among them, and the windows of steps of each."""
    timed = timed_of(windows)
    found = [(source_of(name, window), window) for name, window in expand(schema, windows)[0].items()]
    for name, window in timed.items():
        one: dict[str, Any] = {"column": window.column, "dtype": window.dtype, "scale": window.scale}
        found.append((source_of(name, window), Window(window.length, pad=window.pad, **one)))
    return found


def source_of(name: str, window: Window | NStep | Whole) -> str:
    """The column that the window of this name reads."""
    return name if window.column is None else window.column


def reads_mutable(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> bool:
    """Whether windows read a column whose values may be overwritten."""
    return bool(schema.mutable) and any(source in schema.mutable for source, _ in reads(schema, windows))


def ragged_of(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> dict[str, Values]:
    """The windows that read ragged columns, and what the values of these are."""
    sources = {name: source_of(name, window) for name, window in windows.items()} if schema.ragged else {}
    return {name: schema.ragged[source] for name, source in sources.items() if source in schema.ragged}


def _check_ragged(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> None:
    """Raise SchemaError if windows ask more of ragged columns than a copy."""
    named = {part: name for name, parts in chosen_parts(windows).items() for part in parts}
    for name in ragged_of(schema, {**expand(schema, windows)[0], **timed_of(windows)}):
        window = windows.get(named.get(name, name))  # None of what `NStep.next` delivers
        if isinstance(window, (Window, Whole)) and not (window.dtype is None and window.scale is None):
            raise SchemaError(
                f"The window {name!r} reads a ragged column with dtype or scale; expected a gear_loader.Window or "
                "gear_loader.Whole without."
            )


def only_host_gathers(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> bool:
    """Whether a GPU gets copies of what the host gathers: of values that change meanwhile, or of any length, or
    that are known when others have been read."""
    ragged = any(source in schema.ragged for source, _ in reads(schema, windows))
    return ragged or reads_mutable(schema, windows) or is_late(schema, windows)


def mask_of(schema: Schema, name: str, window: Window) -> tuple[int, int, str, bool]:
    """Key of a window's mask: windows with the same key exist at the same steps."""
    return *window.span, schema[source_of(name, window)].final


def piece_rows(
    schema: Schema, windows: Mapping[str, Window], returns: Sequence[ReturnWindows] = ()
) -> list[tuple[str, Literal["column", "mask"], int]]:
    """Pieces of rows on their way into a padded batch: columns, then masks.

    Args:
        windows: name -> window, in the order of the schema.
        returns: those that are computed where the rows are.

    Returns:
        Of each piece the name of a window, for a mask of the first with its span; and bytes of a row.
    """
    values = {name: size for each in returns for name, size in each.row_bytes().items()}
    hidden = {name for each in returns for name in each.names}
    columns = {
        name: values.get(name, schema[source_of(name, window)].step_bytes * window.length)
        for name, window in windows.items()
    }
    masks: dict[tuple[int, int, str, bool], str] = {}
    for name, window in steps_only(schema, windows).items():
        if name not in hidden:
            masks.setdefault(mask_of(schema, name, window), name)
    kinds: list[tuple[str, Literal["column", "mask"], int]] = [
        (name, "column", size) for name, size in columns.items()
    ]
    kinds += [(name, "mask", length) for (length, *_), name in masks.items()]
    kinds += [(name, "mask", size) for each in returns for name, size in each.mask_bytes().items()]
    return kinds


def in_schema_order(schema: Schema, windows: Mapping[str, _W]) -> dict[str, _W]:
    """Name -> window, in the order of the columns that they read, all of which the schema has."""
    order = {column: place for place, column in enumerate(schema)}
    return dict(sorted(windows.items(), key=lambda item: order[source_of(*item)]))


def windows_of(
    schema: Schema, windows: Any, columns: Sequence[str] | None
) -> dict[str, Window | NStep | Whole]:
    """Name -> window, in the order of the columns that they read; raises SchemaError if they do not fit the schema."""
    check_windows(windows, columns)
    if isinstance(windows, (Window, Whole)):
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
                "it a gear_loader.Window or gear_loader.Whole."
            )
    parts = {part for names in chosen_parts(chosen).values() for part in names}
    if taken := sorted(parts.intersection(chosen)):
        raise SchemaError(
            f"A window has the name {taken[0]!r}, which a step of another one, with every or at, has. Give it another: "
            f"windows={{'other_name': Window(..., column=...)}}."
        )
    _check_ragged(schema, chosen)
    for name, window in timed_of(chosen).items():
        _check_times(schema, name, window)
    for source, each in reads(schema, chosen):
        converted_dtype(source, each, schema[source])
    if all(column in schema.per_trajectory for column in sources.values()):
        raise SchemaError(
            f"Only columns per trajectory were asked for: {list(sources.values())}; expected at least one with steps."
        )
    return in_schema_order(schema, chosen)


def _check_times(schema: Schema, name: str, window: Window) -> None:
    """Raise SchemaError unless the column of a window's times has them."""
    column = schema.get(window.timestamps or "")
    fits = column is not None and not column.trajectory and column.ragged is None
    if not fits or column is None or column.shape not in ((), (1,)) or column.dtype == torch.bool:
        raise SchemaError(
            f"The window {name!r} has timestamps={window.timestamps!r}, which is {column}; expected a column of "
            "numbers with one for each step, such as Column(torch.float64)."
        )


def _once(name: str, window: Window | Whole | None) -> Window:
    """The window of a column per trajectory."""
    spans = (1, 0), (_ONCE.length, _ONCE.offset)
    if isinstance(window, Whole) or (
        window is not None and (window.at is not None or (window.length, window.offset) not in spans)
    ):
        raise SchemaError(
            f"The window of {name!r} is {window!r}, but its column has one value per trajectory; expected None, or "
            "Window(1, column=...)."
        )
    if window is None:
        return _ONCE
    return dataclasses.replace(_ONCE, column=window.column, dtype=window.dtype, scale=window.scale)


def steps_only(schema: Schema, windows: Mapping[str, _W]) -> dict[str, _W]:
    """The windows that read steps: not those of columns per trajectory."""
    return {
        name: window for name, window in windows.items() if not schema[source_of(name, window)].trajectory
    }


def single_steps(schema: Schema, windows: Mapping[str, Window | NStep | Whole]) -> bool:
    """Whether every window of steps has one step."""
    return all(window.length == 1 for window in steps_only(schema, expand(schema, windows)[0]).values())


def reach_of(schema: Schema, windows: Mapping[str, Window]) -> Reach:
    """What the windows read, relative to the anchor."""
    steps = steps_only(schema, windows).values()
    first = min(window.offset for window in steps)
    last = max(window.offset + window.length - 1 for window in steps)
    return Reach(first, last, len(steps) < len(windows))


def steps_of(window: Window, anchors: Array, lengths: Array) -> Array:
    """The steps that a window shows, int64 [n, L]; -1 of padding.

    Args:
        anchors, lengths: int64 [n], of the rows, and of their trajectories in steps.
    """
    first, last = window.reach
    chosen = window.chosen or tuple(range(first, last + 1))
    wanted = anchors[:, None] + np.array(chosen, dtype=np.int64)
    if window.pad == "edge":
        clipped: Array = np.clip(wanted, 0, lengths[:, None] - 1)
        return clipped
    steps: Array = np.where((wanted >= 0) & (wanted < lengths[:, None]), wanted, -1)
    if window.pad in ("head", "tail"):
        order = np.argsort(steps >= 0 if window.pad == "head" else steps < 0, axis=1, kind="stable")
        steps = np.take_along_axis(steps, order, axis=1)
    return steps
