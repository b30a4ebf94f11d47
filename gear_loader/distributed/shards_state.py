"""The state of a global selection: priorities by trajectory ids, independent of the assignment of shards to ranks."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.records import UPDATE
from gear_loader.errors import SchemaError
from gear_loader.selection.priorities import find
from gear_loader.selection.samplers import Sampler
from gear_loader.selection.state import BatchKey, BatchRows, PriorityState, parse_common
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

_NOTHING_PLACED: tuple[Array, ...] = (*[np.empty(0, dtype=np.int64)] * 3, np.empty(0, dtype=np.int32))
_PARTS = ("ids", "lengths", "leaves")
_UPDATES = ("ids", "steps", "priorities", "delays")
_PLACED = ("ids", "shards", "counts", "blocks")
"""If an item is a step, of trajectories in tables with a disk tier: ids, shards, and their blocks of leaves."""
LISTS = (*_PARTS, *(f"update_{name}" for name in _UPDATES), *(f"placed_{name}" for name in _PLACED))
"""What a state has of each trajectory, update or block: a tensor for each name."""
_DTYPES = {"leaves": np.float32, "update_priorities": np.float32, "placed_blocks": np.int32}


def share_state(exchange: SingleProcess, value: Any) -> list[Any]:
    """Share dicts and lists of numbers, texts and tensors with all ranks; the values of all ranks, in their order."""
    return [from_bytes(part) for part in exchange.share_array(to_bytes(value))]


def to_bytes(value: Any) -> Array:
    """Dicts and lists of numbers, texts and tensors, as uint8 [n]."""
    file = io.BytesIO()
    torch.save(value, file)
    return np.frombuffer(file.getbuffer(), dtype=np.uint8)


def from_bytes(data: Array) -> Any:
    """What `to_bytes` was given."""
    return torch.load(io.BytesIO(data.data), weights_only=True)


# ---------------------------------------------------------------- saving


def save_samplers(
    samplers: Mapping[int, Any],
    received: Sequence[Array],
    draws: int,
    recent: Sequence[tuple[BatchKey, tuple[int, Array, BatchRows]]],
) -> dict[str, Any]:
    """The state of this rank's shards.

    Args:
        samplers: shard -> shard sampler.
        received: updates that do not count yet, `UPDATE` [n] each.
        recent: the last batches: rows of all ranks, and the numbers and names of this rank's rows.
    """
    parts: dict[str, list[Array]] = {name: [np.empty(0, dtype=_DTYPES.get(name, np.int64))] for name in LISTS}
    maximum, stale = 1.0, 0
    for shard, shard_sampler in samplers.items():
        saved = shard_sampler.state_with_ids()
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
        state, generation, _ = shard_sampler.table._engine.reader().slot_states()
        slots = updates["slot"]
        inside = (slots >= 0) & (slots < len(state))
        slots = np.where(inside, slots, 0)
        known = inside & (state[slots] == READY)
        known &= (updates["generation"] < 0) | (generation[slots] == updates["generation"])
        updates, slots = updates[known], slots[known]
        for name, values in zip(
            _UPDATES,
            (shard_sampler.table.ids(slots), updates["step"], updates["priority"], updates["draw"] - draws),
            strict=True,
        ):
            parts[f"update_{name}"].append(values)
    tensors: dict[str, Any] = {
        name: torch.from_numpy(np.concatenate(values)) for name, values in parts.items()
    }
    mine = [
        {**rows.to_state(batch, "ids"), "rows": torch.from_numpy(own), "count": count}
        for batch, (count, own, rows) in recent
    ]
    return {**tensors, "maximum": maximum, "num_stale": stale, "recent": mine}


def join_batches(slices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whole batches from the slices of ranks, as `save_samplers` has them."""
    batches: dict[tuple[int, int, int], list[Any]] = {}
    for rows in slices:
        batches.setdefault((rows["epoch"], rows["step"], rows["count"]), []).append(rows)
    return [_joined(parts, count) for (_, _, count), parts in batches.items()]


def _joined(parts: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """A batch of `count` rows from its slices."""
    weighs = parts[0]["weights"] is not None
    whole = {name: value for name, value in parts[0].items() if name not in ("rows", "count")}
    for name in ("ids", "steps", "weights") if weighs else ("ids", "steps"):
        whole[name] = torch.zeros(count, dtype=parts[0][name].dtype, device="cpu")
        for part in parts:
            whole[name][part["rows"]] = part[name]
    return whole


# ---------------------------------------------------------------- loading


@dataclasses.dataclass(frozen=True)
class ShardsState(PriorityState):
    """A checked state, whose names are ids, ascending.

    Attributes:
        steps: whether an item is a step; else it is a trajectory.
        updates: ids, steps, priorities and delays (draws until they count) of updates on their way.
        placed: ids, shards and number of blocks of the trajectories that have blocks of leaves of their own, int64 [m],
            and the blocks, int32, concatenated.
        parts, of, checksum: as `part_of_rank` says; parts is None for a whole state, all three for an older one.
        slices: of the last batches, as `save_samplers` has them; a whole state has all rows.
    """

    steps: bool = False
    updates: tuple[Array, ...] = ()
    placed: tuple[Array, ...] = ()
    parts: tuple[int, ...] | None = None
    of: int | None = None
    checksum: int | None = None
    slices: tuple[Mapping[str, Any], ...] = ()

    def part_of(self, shard_sampler: Any) -> PriorityState:
        """The state of a shard sampler's trajectories, by the sequence numbers of its table, ascending."""
        view = shard_sampler.known()
        places, found = find(self.names, shard_sampler.table.ids(view.slots))
        known = np.flatnonzero(found)
        known = known[np.argsort(view.sequences[known], kind="stable")]
        places = places[known]
        counts = self.lengths if self.steps else np.ones_like(self.lengths)
        leaves = self.leaves[ranges((np.cumsum(counts) - counts)[places], counts[places])]
        blocks = self._blocks_for(shard_sampler, self.names[places], self.lengths[places])
        names, lengths = view.sequences[known], self.lengths[places]
        return PriorityState(names, lengths, leaves, self.maximum, 0, {}, blocks)

    def _blocks_for(self, shard_sampler: Any, wanted: Array, lengths: Array) -> Array | None:
        """Blocks of leaves of a shard's trajectories (ids and steps, int64 [n]), -1 if unknown; None if it has none."""
        counts = shard_sampler.priorities.num_blocks(lengths)
        ids, shards, had, blocks = self.placed
        if counts is None or not (shards == shard_sampler.shard).any():
            return None
        here = np.flatnonzero(shards == shard_sampler.shard)
        here = here[np.argsort(ids[here], kind="stable")]
        at = here[np.minimum(np.searchsorted(ids[here], wanted), len(here) - 1)]
        known = (ids[at] == wanted) & (had[at] == counts)
        starts, ends = (np.cumsum(had) - had)[at], np.cumsum(counts)
        found: Array = np.full(int(counts.sum()), -1, dtype=np.int32)
        found[ranges((ends - counts)[known], counts[known])] = blocks[ranges(starts[known], counts[known])]
        return found

    def updates_for(self, shard_sampler: Any, shard: int, slots_of: Callable[[int, Array], Array]) -> Array:
        """Return the updates on their way to a shard's trajectories, `UPDATE` [m].

        Args:
            slots_of: returns the slots of ids in a shard; -1 for trajectories that are gone.
        """
        ids, steps, priorities, delays = self.updates
        slots = slots_of(shard, ids)
        known = slots >= 0
        updates: Array = np.zeros(int(known.sum()), dtype=UPDATE)
        updates["shard"], updates["slot"], updates["step"] = shard, slots[known], steps[known]
        updates["generation"] = shard_sampler.table._engine.reader().slot_states()[1][slots[known]]
        updates["priority"], updates["draw"] = priorities[known], delays[known]
        return updates


def parse_shards_state(state: Mapping[str, Any], sampler: Sampler) -> ShardsState:
    """Check a state of `save_samplers`, of one rank or joined, for a selection with this sampler.

    Raises:
        SchemaError: another kind of state, or a state for another sampler.
    """
    try:
        common = parse_common(state, sampler, "ids")
        updates = tuple(np.asarray(state[f"update_{name}"]) for name in _UPDATES)
        placed = tuple(
            np.asarray(state.get(f"placed_{name}", empty))  # not in states of earlier versions
            for name, empty in zip(_PLACED, _NOTHING_PLACED, strict=True)
        )
        fits = _valid_updates(updates) and _valid_placed(placed)
        parts = None if state.get("parts") is None else tuple(int(each) for each in state["parts"])
        of, checksum = (int(state["of"]), int(state["checksum"])) if "of" in state or parts else (None, None)
        slices = tuple(
            rows
            if parts is not None
            else {**rows, "rows": torch.arange(len(rows["ids"]), device="cpu"), "count": len(rows["ids"])}
            for rows in state["recent"]
        )
        fits = fits and all(_valid_slice(rows) for rows in slices)
        fits = fits and (of is None or parts is None or {*parts} <= {*range(of)})
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise SchemaError(
            "The state's priorities are damaged, or belong to another selection; expected the state_dict() of a "
            "ReplayDataset over Shards with the same sampler. Nothing was changed."
        )
    steps, order = sampler.unit == "step", np.argsort(common.names, kind="stable")
    counts = common.lengths if steps else np.ones_like(common.lengths)
    fields = {field.name: getattr(common, field.name) for field in dataclasses.fields(common)}
    fields |= {"names": common.names[order], "lengths": common.lengths[order]}
    fields["leaves"] = common.leaves[ranges((np.cumsum(counts) - counts)[order], counts[order])]
    return ShardsState(
        **fields,
        steps=steps,
        updates=updates,
        placed=placed,
        parts=parts,
        of=of,
        checksum=checksum,
        slices=slices,
    )


def _valid_slice(rows: Mapping[str, Any]) -> bool:
    """Validate the numbers of the rows of a slice of a batch."""
    numbers = np.asarray(rows["rows"])
    fits = numbers.dtype == np.int64 and numbers.shape == np.asarray(rows["ids"]).shape
    return fits and bool(((numbers >= 0) & (numbers < int(rows["count"]))).all())


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
