"""The state of a global selection: priorities by trajectory ids, independent of the assignment of shards to ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.records import UPDATE
from gear_loader.errors import SchemaError
from gear_loader.selection.history import BatchKey, BatchRows, batches_of
from gear_loader.selection.priority_state import PriorityState, fits_leaves
from gear_loader.selection.selectors import Selector
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

__all__ = ["RestoredState", "join_states", "parse_state", "save_samplers", "share_bundle"]

_NOTHING_PLACED: tuple[Array, ...] = (*[np.empty(0, dtype=np.int64)] * 3, np.empty(0, dtype=np.int32))
_PARTS = ("ids", "lengths", "leaves")
_UPDATES = ("ids", "steps", "priorities", "delays")
_PLACED = ("ids", "shards", "counts", "blocks")
"""If an item is a step, of trajectories in tables with a disk tier: ids, shards, and their blocks of leaves."""
_ALL_PARTS = (*_PARTS, *(f"update_{name}" for name in _UPDATES), *(f"placed_{name}" for name in _PLACED))


def share_bundle(exchange: SingleProcess, arrays: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Share named arrays of any shapes with all ranks; return the arrays of each rank."""
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


# ---------------------------------------------------------------- saving


def save_samplers(samplers: Mapping[int, Any], received: Sequence[Array], draws: int) -> dict[str, Array]:
    """Return the state of this rank's shards as arrays.

    Args:
        samplers: shard -> shard sampler.
        received: updates that do not count yet, `UPDATE` [n] each.
        draws: number of draws so far.
    """
    parts: dict[str, list[Array]] = {name: [] for name in _ALL_PARTS}
    maximum, stale = 1.0, 0
    for shard, sampler in samplers.items():
        saved = sampler.state_with_ids()
        for name in _PARTS:
            parts[name].append(saved[name])
        placed = _NOTHING_PLACED
        if saved["blocks"] is not None:
            placed = saved["ids"], np.full_like(saved["ids"], shard), saved["counts"], saved["blocks"]
        for name, values in zip(_PLACED, placed, strict=True):
            parts[f"placed_{name}"].append(values)
        maximum, stale = max(maximum, saved["maximum"]), stale + saved["num_stale"]
        updates = np.concatenate([np.empty(0, dtype=UPDATE), *received])
        updates = updates[updates["shard"] == shard]
        updates = updates[np.argsort(updates["order"], kind="stable")]
        state, generation, _ = sampler.table._engine.reader().slot_states()
        slots = updates["slot"]
        inside = (slots >= 0) & (slots < len(state))
        slots = np.where(inside, slots, 0)
        known = inside & (state[slots] == READY)
        known &= (updates["generation"] < 0) | (generation[slots] == updates["generation"])
        updates, slots = updates[known], slots[known]
        for name, values in zip(
            _UPDATES,
            (sampler.table.ids(slots), updates["step"], updates["priority"], updates["draw"] - draws),
            strict=True,
        ):
            parts[f"update_{name}"].append(values)
    bundle = {name: np.concatenate(values) for name, values in parts.items() if values}
    return {**bundle, "counters": np.array([maximum, stale], dtype=np.float64)}


def join_states(
    exchange: SingleProcess, saved: dict[str, Array], recent: Sequence[tuple[BatchKey, tuple[int, BatchRows]]]
) -> dict[str, Any]:
    """Return the state of all ranks' shards, the same on every rank.

    Args:
        exchange: collective channel of the selection.
        saved: this rank's state, from `save_samplers`.
        recent: the last batches: rows of all ranks, and names of this rank's, in the order of slices over the ranks.
    """
    for i, (batch, (count, rows)) in enumerate(recent):
        saved[f"recent_{i}"] = np.array([*batch, count], dtype=np.int64)
        saved[f"rows_{i}"] = np.stack((rows.names, rows.steps))
        if rows.weights is not None:
            saved[f"weights_{i}"] = rows.weights
    bundles = share_bundle(exchange, saved)
    state: dict[str, Any] = {
        name: torch.from_numpy(np.concatenate([bundle[name] for bundle in bundles if name in bundle]))
        for name in _ALL_PARTS
    }
    counters = np.stack([bundle["counters"] for bundle in bundles])
    state["maximum"], state["num_stale"] = float(counters[:, 0].max()), int(counters[:, 1].sum())
    state["recent"] = _batches(bundles)
    return state


def _batches(bundles: Sequence[Mapping[str, Array]]) -> list[dict[str, Any]]:
    """Join the slices of the last batches."""
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
        weights = [part for _, part in parts if part is not None]
        given = np.concatenate(weights)[:count] if weights else None
        batches.append(BatchRows(rows[0], rows[1], given).to_state((epoch, step), "ids"))
    return batches


# ---------------------------------------------------------------- loading


@dataclasses.dataclass(frozen=True)
class RestoredState:
    """A validated state.

    Attributes:
        ids: ids of the trajectories, int64 [n], ascending.
        lengths: int64 [n].
        leaves: leaves of all items, float32, concatenated.
        steps: whether an item is a step; else it is a trajectory.
        updates: ids, steps, priorities and delays (draws until they count) of updates on their way.
        placed: ids, shards and number of blocks of the trajectories that have blocks of leaves of their own, int64 [m],
            and the blocks, int32, concatenated.
        recent: rows of the last batches.
        maximum: largest priority so far.
        num_stale: number of updates whose trajectories were gone.
    """

    ids: Array
    lengths: Array
    leaves: Array
    steps: bool
    updates: tuple[Array, ...]
    placed: tuple[Array, ...]
    recent: dict[BatchKey, BatchRows]
    maximum: float
    num_stale: int

    def part_of(self, sampler: Any) -> PriorityState:
        """Return the state of a shard sampler's trajectories, by the sequence numbers of its table."""
        view = sampler.known()
        ids = sampler.table.ids(view.slots)
        order = np.argsort(ids, kind="stable")
        places = np.searchsorted(self.ids, ids[order])
        places[places == len(self.ids)] = 0
        found = self.ids[places] == ids[order] if len(self.ids) else np.zeros(len(ids), dtype=bool)
        known, places = order[found], places[found]
        by_sequence = np.argsort(view.sequences[known], kind="stable")
        known, places = known[by_sequence], places[by_sequence]
        counts = self.lengths if self.steps else np.ones_like(self.lengths)
        starts = np.cumsum(counts) - counts
        leaves = self.leaves[ranges(starts[places], counts[places])]
        blocks = self._blocks_for(sampler, self.ids[places], self.lengths[places])
        return PriorityState(
            view.sequences[known], self.lengths[places], leaves, blocks, self.maximum, 0, None, {}
        )

    def _blocks_for(self, sampler: Any, wanted: Array, lengths: Array) -> Array | None:
        """Blocks of leaves of a shard's trajectories (ids and steps, int64 [n]), -1 if unknown; None if it has none."""
        counts = sampler.priorities.num_blocks(lengths)
        ids, shards, had, blocks = self.placed
        if counts is None or not (shards == sampler.shard).any():
            return None
        here = np.flatnonzero(shards == sampler.shard)
        here = here[np.argsort(ids[here], kind="stable")]
        at = here[np.minimum(np.searchsorted(ids[here], wanted), len(here) - 1)]
        known = (ids[at] == wanted) & (had[at] == counts)
        starts, ends = (np.cumsum(had) - had)[at], np.cumsum(counts)
        found: Array = np.full(int(counts.sum()), -1, dtype=np.int32)
        found[ranges((ends - counts)[known], counts[known])] = blocks[ranges(starts[known], counts[known])]
        return found

    def updates_for(self, sampler: Any, shard: int, slots_of: Callable[[int, Array], Array]) -> Array:
        """Return the updates on their way to a shard's trajectories, `UPDATE` [m].

        Args:
            sampler: shard sampler.
            shard: number of the shard.
            slots_of: returns the slots of ids in a shard; -1 for trajectories that are gone.
        """
        ids, steps, priorities, delays = self.updates
        slots = slots_of(shard, ids)
        known = slots >= 0
        updates: Array = np.zeros(int(known.sum()), dtype=UPDATE)
        updates["shard"], updates["slot"], updates["step"] = shard, slots[known], steps[known]
        updates["generation"] = sampler.table._engine.reader().slot_states()[1][slots[known]]
        updates["priority"], updates["draw"] = priorities[known], delays[known]
        return updates


def parse_state(state: Mapping[str, Any], selector: Selector) -> RestoredState:
    """Validate a state.

    Args:
        state: result of `join_states`.
        selector: selector of the selection that loads it.

    Raises:
        SchemaError: another kind of state, or a state for another selector.
    """
    try:
        found = _parse(state, selector)
    except (KeyError, TypeError, ValueError):
        found = None
    if found is None:
        raise SchemaError(
            "The state's priorities are damaged, or belong to another selection; expected the state_dict() of a "
            "ReplayDataset over Shards with the same selector. Nothing was changed."
        )
    return found


def _parse(state: Mapping[str, Any], selector: Selector) -> RestoredState | None:
    """Return the validated state, or None."""
    ids, lengths, leaves = (np.asarray(state[name]) for name in _PARTS)
    updates = tuple(np.asarray(state[f"update_{name}"]) for name in _UPDATES)
    placed = tuple(
        np.asarray(state.get(f"placed_{name}", empty))  # not in states of earlier versions
        for name, empty in zip(_PLACED, _NOTHING_PLACED, strict=True)
    )
    steps = selector.unit == "step"
    counts = lengths if steps else np.ones_like(lengths)
    maximum, num_stale = float(state["maximum"]), int(state["num_stale"])
    if not fits_leaves(ids, lengths, leaves, counts, maximum) or len(np.unique(ids)) != len(ids):
        return None
    if num_stale < 0 or not (_valid_updates(updates) and _valid_placed(placed)):
        return None
    recent = batches_of(state["recent"], "ids", weighs=selector.weighs)
    order = np.argsort(ids, kind="stable")
    starts = np.cumsum(counts) - counts
    return RestoredState(
        ids[order],
        lengths[order],
        leaves[ranges(starts[order], counts[order])],
        steps,
        updates,
        placed,
        recent,
        maximum,
        num_stale,
    )


def _valid_updates(updates: tuple[Array, ...]) -> bool:
    """Validate the ids, steps, priorities and delays of a state's updates."""
    if len({part.shape for part in updates}) != 1 or updates[2].dtype != np.float32:
        return False
    return all(updates[i].dtype == np.int64 for i in (0, 1, 3)) and bool((updates[2] >= 0).all())


def _valid_placed(placed: tuple[Array, ...]) -> bool:
    """Validate the blocks of leaves of a state; see `RestoredState.placed`."""
    ids, shards, counts, blocks = placed
    if not ids.dtype == shards.dtype == counts.dtype == np.int64 or blocks.dtype != np.int32:
        return False
    if not ids.shape == shards.shape == counts.shape or ids.ndim != 1 or blocks.ndim != 1:
        return False
    if not bool((counts > 0).all()) or counts.sum() != len(blocks) or not bool((blocks >= -1).all()):
        return False
    pairs = np.stack((np.repeat(shards, counts), blocks), axis=1)[blocks >= 0]
    return len(np.unique(pairs, axis=0)) == len(pairs)
