"""The state of a selection over all shards: by ids, so that it holds whoever has which trajectory later on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.exchange import SingleProcess
from gear_loader.distributed.records import UPDATE
from gear_loader.errors import SchemaError
from gear_loader.native.sum_tree import READY
from gear_loader.selection.selectors import Selector
from gear_loader.storage.recovery import ranges
from gear_loader.utils.arrays import Array

__all__ = ["Checked", "Remembered", "checked", "joined", "of_engines", "share_bundle"]

_ROW = np.dtype([("id", "<i8"), ("step", "<i8")])
_LARGEST = float(np.finfo(np.float32).max)
_PARTS = ("ids", "lengths", "leaves")
_UPDATES = ("ids", "steps", "priorities", "delays")


@dataclasses.dataclass(frozen=True)
class Remembered:
    """A batch that may have been drawn ahead when a state is taken.

    Attributes:
        count: rows of all slices.
        rows: "id" and "step" of this rank's rows, or of all after a restart.
        weights: float32, of the same rows; None if they carry none.
    """

    count: int
    rows: Array
    weights: Array | None


def share_bundle(exchange: SingleProcess, arrays: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Tell all ranks some arrays of any shapes; what each has told."""
    described = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    heads = exchange.share(described)
    data = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
    bodies = exchange.share_array(np.concatenate(data) if data else np.empty(0, dtype=np.uint8))
    bundles = []
    for head, body in zip(heads, bodies, strict=True):
        bundle, at = {}, 0
        for name, (dtype, shape) in head.items():
            size = np.dtype(dtype).itemsize * int(np.prod(shape))
            bundle[name] = body[at : at + size].copy().view(dtype).reshape(shape)
            at += size
        bundles.append(bundle)
    return bundles


# ---------------------------------------------------------------- taking it


def of_engines(engines: Mapping[int, Any], received: Sequence[Array], clock: int) -> dict[str, Array]:
    """What this rank's shards have to keep.

    Args:
        received: updates that do not count yet. clock: draws so far.
    """
    parts: dict[str, list[Array]] = {name: [] for name in (*_PARTS, *(f"update_{name}" for name in _UPDATES))}
    maximum, stale = 1.0, 0
    for shard, engine in engines.items():
        kept = engine.state_with_ids()
        for name in _PARTS:
            parts[name].append(kept[name])
        maximum, stale = max(maximum, kept["maximum"]), stale + kept["num_stale"]
        updates = np.concatenate([np.empty(0, dtype=UPDATE), *received])
        updates = updates[updates["shard"] == shard]
        updates = updates[np.argsort(updates["turn"], kind="stable")]
        state, generation, _ = engine.job.table.slot_states()
        slots = updates["slot"]
        inside = (slots >= 0) & (slots < len(state))
        slots = np.where(inside, slots, 0)
        known = inside & (state[slots] == READY)
        known &= (updates["generation"] < 0) | (generation[slots] == updates["generation"])
        updates, slots = updates[known], slots[known]
        for name, values in zip(
            _UPDATES,
            (engine.job.table.ids(slots), updates["step"], updates["priority"], updates["when"] - clock),
            strict=True,
        ):
            parts[f"update_{name}"].append(values)
    bundle = {name: np.concatenate(values) for name, values in parts.items() if values}
    return {**bundle, "counters": np.array([maximum, stale], dtype=np.float64)}


def joined(
    exchange: SingleProcess, kept: dict[str, Array], recent: Sequence[tuple[int, int, Remembered]]
) -> dict[str, Any]:
    """The state of all ranks' shards, the same on every rank.

    Args:
        kept: of `of_engines`.
        recent: epoch, step and rows of the last batches: of this rank's slice, in the order of slices over the ranks.
    """
    for i, (epoch, step, some) in enumerate(recent):
        kept[f"recent_{i}"] = np.array([epoch, step, some.count], dtype=np.int64)
        kept[f"rows_{i}"] = np.stack((some.rows["id"], some.rows["step"]))
        if some.weights is not None:
            kept[f"weights_{i}"] = some.weights
    bundles = share_bundle(exchange, kept)
    state: dict[str, Any] = {
        name: torch.from_numpy(np.concatenate([bundle[name] for bundle in bundles if name in bundle]))
        for name in (*_PARTS, *(f"update_{name}" for name in _UPDATES))
    }
    counters = np.stack([bundle["counters"] for bundle in bundles])
    state["maximum"], state["num_stale"] = float(counters[:, 0].max()), int(counters[:, 1].sum())
    state["recent"] = _batches(bundles)
    return state


def _batches(bundles: Sequence[Mapping[str, Array]]) -> list[dict[str, Any]]:
    slices: dict[tuple[int, int, int], list[tuple[Array, Array | None]]] = {}
    for bundle in bundles:
        for name, head in bundle.items():
            if name.startswith("recent_"):
                number = name.removeprefix("recent_")
                key = (int(head[0]), int(head[1]), int(head[2]))
                slices.setdefault(key, []).append((bundle[f"rows_{number}"], bundle.get(f"weights_{number}")))
    batches = []
    for (epoch, step, count), parts in slices.items():
        rows = np.concatenate([rows for rows, _ in parts], axis=1)[:, :count]
        weights = [some for _, some in parts if some is not None]
        batches.append(
            {
                "epoch": epoch,
                "step": step,
                "ids": torch.from_numpy(rows[0].copy()),
                "steps": torch.from_numpy(rows[1].copy()),
                "weights": torch.from_numpy(np.concatenate(weights)[:count]) if weights else None,
            }
        )
    return batches


# ---------------------------------------------------------------- taking it over


@dataclasses.dataclass(frozen=True)
class Checked:
    """A state that has been looked through; ids ascend.

    Attributes:
        ids, lengths: int64 [n]. leaves: float32, of one after another. steps: whether an item is a step.
        updates: ids, steps, priorities and delays of updates that are on their way.
        recent: (epoch, step) -> batch.
    """

    ids: Array
    lengths: Array
    leaves: Array
    steps: bool
    updates: tuple[Array, ...]
    recent: dict[tuple[int, int], Remembered]
    maximum: float
    num_stale: int

    def part_of(self, engine: Any) -> dict[str, Any]:
        """What an engine takes over: of the trajectories that it has, by its table's sequence numbers."""
        view = engine.known()
        ids = engine.job.table.ids(view.slots)
        order = np.argsort(ids, kind="stable")
        places = np.searchsorted(self.ids, ids[order])
        places[places == len(self.ids)] = 0
        found = self.ids[places] == ids[order] if len(self.ids) else np.zeros(len(ids), dtype=bool)
        mine, places = order[found], places[found]
        back = np.argsort(view.sequences[mine], kind="stable")
        mine, places = mine[back], places[back]
        counts = self.lengths if self.steps else np.ones_like(self.lengths)
        starts = np.cumsum(counts) - counts
        return {
            "sequences": view.sequences[mine],
            "lengths": self.lengths[places],
            "leaves": self.leaves[ranges(starts[places], counts[places])],
            "maximum": self.maximum,
            "num_stale": 0,
            "recent": [],
        }

    def updates_for(self, engine: Any, shard: int, slots_of: Callable[[int, Array], Array]) -> Array:
        """The updates that are on their way to an engine's trajectories."""
        ids, steps, priorities, delays = self.updates
        slots = slots_of(shard, ids)
        known = slots >= 0
        updates: Array = np.zeros(int(known.sum()), dtype=UPDATE)
        updates["shard"], updates["slot"], updates["step"] = shard, slots[known], steps[known]
        updates["generation"] = engine.job.table.slot_states()[1][slots[known]]
        updates["priority"], updates["when"] = priorities[known], delays[known]
        return updates


def checked(state: Mapping[str, Any], selector: Selector) -> Checked:
    """Look a state through.

    Raises:
        SchemaError: it is none of `joined` for this selector.
    """
    try:
        found = _checked(state, selector)
    except (KeyError, TypeError, ValueError):
        found = None
    if found is None:
        raise SchemaError(
            "The state's priorities are damaged or of something else; expected what state_dict() of a ReplayDataset "
            "over Shards with the same selector returned. Nothing was changed."
        )
    return found


def _checked(state: Mapping[str, Any], selector: Selector) -> Checked | None:
    ids, lengths, leaves = (np.asarray(state[name]) for name in _PARTS)
    updates = tuple(np.asarray(state[f"update_{name}"]) for name in _UPDATES)
    steps = selector.unit == "step"
    counts = lengths if steps else np.ones_like(lengths)
    fits = (
        ids.dtype == lengths.dtype == np.int64 and leaves.dtype == np.float32 and ids.shape == lengths.shape
    )
    fits = fits and ids.ndim == leaves.ndim == 1 and bool((lengths > 0).all()) and len(leaves) == counts.sum()
    fits = (
        fits and bool(np.isfinite(leaves).all() and (leaves >= 0).all()) and len(np.unique(ids)) == len(ids)
    )
    fits = fits and len({part.shape for part in updates}) == 1 and updates[2].dtype == np.float32
    fits = fits and all(updates[i].dtype == np.int64 for i in (0, 1, 3)) and bool((updates[2] >= 0).all())
    fits = fits and 0 <= float(state["maximum"]) <= _LARGEST and int(state["num_stale"]) >= 0
    if not fits:
        return None
    recent = {}
    for part in state["recent"]:
        names, at = np.asarray(part["ids"]), np.asarray(part["steps"])
        weights = np.asarray(part["weights"]) if selector.weighs else None
        if names.dtype != np.int64 or at.dtype != np.int64 or names.shape != at.shape or (at < 0).any():
            return None
        if weights is not None and (weights.dtype != np.float32 or weights.shape != names.shape):
            return None
        rows: Array = np.zeros(len(names), dtype=_ROW)
        rows["id"], rows["step"] = names, at
        recent[int(part["epoch"]), int(part["step"])] = Remembered(len(rows), rows, weights)
    order = np.argsort(ids, kind="stable")
    starts = np.cumsum(counts) - counts
    return Checked(
        ids[order],
        lengths[order],
        leaves[ranges(starts[order], counts[order])],
        steps,
        updates,
        recent,
        float(state["maximum"]),
        int(state["num_stale"]),
    )
