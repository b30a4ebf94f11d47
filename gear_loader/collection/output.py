"""Batches as TensorDicts of the package tensordict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.windows import PACKED_KEYS
from gear_loader.errors import SchemaError
from gear_loader.native.packed import place_packed
from gear_loader.storage.schema import BATCH_KEYS
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import one_of


def check_output(output: Any) -> None:
    """Raise SchemaError for an invalid `output`, ImportError if the package that it needs is not installed."""
    one_of("output", output, ("dict", "nested", "tensordict"))
    if output == "tensordict":
        try:
            import tensordict  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"output='tensordict' needs the package tensordict, which cannot be imported ({error}). "
                "Install it: pip install '.[tensordict]' (in a clone of Gear Loader)",
                name="tensordict",
            ) from error


def check_nesting(names: Iterable[str], output: str) -> None:
    """Raise SchemaError if windows of these names cannot be entries of one nested dict or TensorDict."""
    given = set(names)
    for name in sorted(given):
        parts = name.split(".")
        parents = {".".join(parts[:end]) for end in range(1, len(parts))}
        taken = sorted(parents & given.union(BATCH_KEYS))
        if taken or "" in parts:
            raise SchemaError(
                f"With output={output!r} the window {name!r} would be the entry {tuple(parts)}"
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


def as_nested(batch: Mapping[str, Any]) -> Batch:
    """A batch in which a dot in a name is a level of nesting."""
    return Batch(_nested(batch))


def as_tensordict(batch: Mapping[str, Any]) -> Any:
    """A `tensordict.TensorDict` of a batch's tensors, without a copy; a dot in a name is a level of nesting."""
    from tensordict import TensorDict

    return TensorDict(_nested(batch), batch_size=[len(batch["index"])])


def as_padded(batch: Batch, names: Sequence[str]) -> Batch:
    """A packed batch as rows of the length of the longest one, zeros after the others, in new memory.

    Args:
        batch: a packed batch. names: its columns of steps.

    Returns:
        Columns of steps as ``[B, L, *shape]`` and ``mask``, bool ``[B, L]``, in place of the keys of packed batches.
    """
    starts, longest = batch["cu_seqlens"], batch["max_seqlen"]
    count, counts = len(starts) - 1, starts.diff()
    shown = Batch({key: value for key, value in batch.items() if key not in PACKED_KEYS})
    if starts.is_cuda:
        _place(batch, names, counts, shown)
    else:
        begins = starts[:-1].numpy().astype(np.int64)
        pieces: Array = np.zeros((len(names), 3), dtype=np.int64)
        for piece, name in zip(pieces, names, strict=True):
            values = batch[name]
            shown[name] = values.new_zeros(count, longest, *values.shape[1:])
            step_bytes = values.element_size() * values.shape[1:].numel()
            piece[:] = values.data_ptr(), shown[name].data_ptr(), step_bytes
        place_packed(pieces, begins, np.arange(count) * longest, counts.numpy().astype(np.int64))
    shown["mask"] = torch.arange(longest, device=starts.device) < counts[:, None]
    return shown


def _place(batch: Batch, names: Sequence[str], counts: torch.Tensor, shown: Batch) -> None:
    """Copy columns of steps into padded ones by torch, on their device, for which the host does not wait."""
    starts, longest, total = batch["cu_seqlens"], batch["max_seqlen"], len(batch["position"])
    numbers = torch.arange(len(counts), device=starts.device)
    rows = numbers.repeat_interleave(counts, output_size=total)
    places = rows * longest + torch.arange(total, device=starts.device) - starts[rows]
    for name in names:
        values = batch[name]
        flat = values.new_zeros(len(counts) * longest, *values.shape[1:])
        shown[name] = flat.index_copy_(0, places, values).view(len(counts), longest, *values.shape[1:])


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
