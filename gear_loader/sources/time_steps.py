"""Sources whose rows are time steps: telling them from episodes, and how to give them as such."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import listing
from gear_loader.utils.arrays import unreadable


def is_frame(source: Any) -> bool:
    """Whether it is a DataFrame or an Arrow table, or a Hugging Face data set."""
    return (
        not isinstance(source, torch.Tensor)
        and hasattr(source, "shape")
        and (hasattr(source, "columns") or hasattr(source, "schema"))
    )


def is_hugging_face(source: Any) -> bool:
    return all(hasattr(source, name) for name in ("features", "column_names", "with_format"))


def how_to_cut(source: Any) -> str:
    """How to give rows of time steps as episodes, for error messages."""
    if is_hugging_face(source):
        return (
            "Cut them at the episodes: load(read_rows(dataset, episode='a column')); or rows='episodes', if each row "
            "is a whole episode."
        )
    if is_frame(source):
        return "Cut them at the episodes: load(gear_loader.sources.read_rows(frame, episode='a column'))."
    return (
        "Rows that are time steps are stacked first: one mapping {column: array [T, ...]} for each episode."
    )


def refuse_steps(
    source: Any,
    item: Any,
    episode: Mapping[str, Any],
    chosen: Mapping[str, str],
    once: Collection[str],
    where: str,
) -> None:
    """Raise SourceError if an item looks like one time step, whose vectors would become scalars of many steps.

    Args:
        source: the iterable. item: its first item. episode: the same as a mapping. chosen: {name in the table: name in
            the source} of the columns to be taken. once: those of them that an episode has once, as the caller says.
        where: the item in errors.
    """
    alone = {role for name, role in chosen.items() if name in once}
    numbers = [name for name, values in episode.items() if name not in alone and _is_number(values)]
    taken = [episode[role] for role in chosen.values() if role not in alone]
    flat = all(np.ndim(values[0]) == 0 for values in taken if _is_filled(values))
    if numbers and (flat or is_hugging_face(source)):
        found = f"{listing(numbers, 4)} {'is a single number' if len(numbers) == 1 else 'are single numbers'}"
    elif flat and not once and hasattr(item, "batch_size") and not tuple(item.batch_size):
        found = (
            "its batch_size is [] and no column has more than one dimension; an episode has batch_size=[T]"
        )
    else:
        return
    kept = [name for name, role in chosen.items() if role in numbers]
    whole = f" If it is an episode that has them once: per_trajectory={kept!r}." if kept else ""
    raise SourceError(
        f"{where} looks like one time step, not like an episode: {found}. {how_to_cut(source)}{whole}"
    )


def _is_number(values: Any) -> bool:
    if isinstance(values, (bool, int, float, np.generic)):
        return not isinstance(values, (np.str_, np.bytes_))
    return isinstance(values, (np.ndarray, torch.Tensor)) and values.ndim == 0


def _is_filled(values: Any) -> bool:
    """Whether it is an array or a list with at least one row, which can be read."""
    if isinstance(values, torch.Tensor) and unreadable(values) is not None:
        return False
    if isinstance(values, (np.ndarray, torch.Tensor)):
        return values.ndim > 0 and len(values) > 0
    return isinstance(values, (list, tuple)) and len(values) > 0
