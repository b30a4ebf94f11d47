"""Batches as TensorDicts of the package tensordict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gear_loader.collection.batches import Batch
from gear_loader.errors import SchemaError
from gear_loader.storage.schema import BATCH_KEYS

__all__ = ["as_jagged", "as_tensordict", "check_nesting", "check_output"]


def check_output(output: Any) -> None:
    """Raise SchemaError for an invalid `output`, ImportError if the package that it needs is not installed."""
    if output not in ("dict", "tensordict"):
        raise SchemaError(f"output is {output!r}; expected 'dict' or 'tensordict'.")
    if output == "tensordict":
        try:
            import tensordict  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"output='tensordict' needs the package tensordict, which cannot be imported ({error}). "
                "Install it: pip install '.[tensordict]' (in a clone of Gear Loader)",
                name="tensordict",
            ) from error


def check_nesting(names: Iterable[str]) -> None:
    """Raise SchemaError if windows of these names cannot be entries of one nested TensorDict."""
    given = set(names)
    for name in sorted(given):
        parts = name.split(".")
        parents = {".".join(parts[:end]) for end in range(1, len(parts))}
        taken = sorted(parents & given.union(BATCH_KEYS))
        if taken or "" in parts:
            raise SchemaError(
                f"With output='tensordict' the window {name!r} would be the entry {tuple(parts)}"
                f"{f', beneath {taken[0]!r}, which is an entry itself' if taken else ', with an empty name'}. Give "
                f"one of them another name: windows={{'other_name': Window(..., column={name!r})}}."
            )


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"next.reward": x}`` -> ``{"next": {"reward": x}}``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = _nested(value) if isinstance(value, dict) else value
    return found


def as_tensordict(batch: Mapping[str, Any]) -> Any:
    """A `tensordict.TensorDict` of a batch's tensors, without a copy; a dot in a name is a level of nesting."""
    from tensordict import TensorDict

    return TensorDict(_nested(batch), batch_size=[len(batch["index"])])


def as_jagged(batch: Batch, names: Iterable[str]) -> Batch:
    """A packed batch whose columns of steps are `torch.nested` tensors [n, (steps), *shape], without a copy.

    Args:
        batch: a packed batch. names: its columns of steps.
    """
    offsets, longest = batch["cu_seqlens"], batch["max_seqlen"]
    shown = Batch(batch)
    for name in (*names, "position"):
        shown[name] = torch.nested.nested_tensor_from_jagged(batch[name], offsets, max_seqlen=longest)
    return shown
