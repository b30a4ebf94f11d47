"""Parts of a state reach the ranks that have the trajectories, whichever ranks saved them."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.shards_state import parse_shards_state
from gear_loader.distributed.state_parts import join, load_parts, part_of_rank
from gear_loader.storage.index_arrays import ranges

Array = np.ndarray[Any, Any]


class Threads(SingleProcess):
    """The exchange of a rank that is a thread."""

    def __init__(self, rank: int, size: int, board: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.ranks = rank, size, range(size)
        self._board, self._barrier, self._calls = board, barrier, 0

    def share_array(self, values: Array) -> list[Array]:
        self._calls += 1
        self._board[self._calls, self.rank] = values.copy()
        self._barrier.wait()
        return [self._board[self._calls, rank] for rank in range(self.size)]

    def share(self, data: Any) -> list[Any]:
        found = self.share_array(np.frombuffer(json.dumps(data).encode(), dtype=np.uint8))
        return [json.loads(each.tobytes()) for each in found]

    def all_to_all(self, data: Array, outs: Array, ins: Array, failure: BaseException | None = None) -> Array:
        mine = self.share_array(np.concatenate((np.cumsum(outs).view(np.uint8), data)))
        parts = []
        for each, count in zip(mine, ins, strict=True):
            end = each[: 8 * self.size].view(np.int64)[self.rank]
            parts.append(each[8 * self.size :][end - count : end])
        return np.concatenate(parts)


def on_threads(size: int, work: Any) -> list[Any]:
    board: dict[Any, Any] = {}
    barrier = threading.Barrier(size, timeout=30)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        found[rank] = work(Threads(rank, size, board, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def priorities_of(random: np.random.Generator, rank: int, size: int, *, steps: bool) -> dict[str, Any]:
    """The priorities of a rank with some trajectories, some of which have no leaf yet, but an update."""
    ids = (random.permutation(40)[: random.integers(0, 12)].astype(np.int64) << 16) + rank
    fresh = (np.arange(50, 53, dtype=np.int64) << 16) + rank
    lengths = random.integers(1, 5, len(ids))
    updated = random.choice(np.concatenate((ids, fresh)), 9)
    placed = ids[: len(ids) // 2] if steps else ids[:0]
    counts = random.integers(1, 4, len(placed))
    lists = {
        "ids": ids,
        "lengths": lengths,
        "leaves": random.random(lengths.sum() if steps else len(ids), dtype=np.float32),
        "update_ids": updated,
        "update_steps": random.integers(0, 9, 9),
        "update_priorities": random.random(9, dtype=np.float32),
        "update_delays": random.integers(0, 2, 9),
        "placed_ids": placed,
        "placed_shards": np.full(len(placed), rank),
        "placed_counts": counts,
        "placed_blocks": random.permutation(counts.sum()).astype(np.int32),
    }
    mine = np.arange(rank, 10, size)
    rows = {"ids": torch.from_numpy(mine * 3), "steps": torch.zeros(len(mine), dtype=torch.int64)}
    batch = {"epoch": 0, "step": 4, **rows, "weights": torch.rand(len(mine)), "rows": torch.from_numpy(mine)}
    tensors = {name: torch.from_numpy(values) for name, values in lists.items()}
    return {**tensors, "maximum": 1.0 + rank, "num_stale": 0, "recent": [{**batch, "count": 10}]}


def of_ids(state: Any, own: Array) -> dict[int, Any]:
    """What a state has of each of these trajectories."""
    found: dict[int, Any] = {}
    counts = state.lengths if state.steps else np.ones_like(state.lengths)
    starts = np.cumsum(counts) - counts
    blocks = np.cumsum(state.placed[2]) - state.placed[2]
    for one in own.tolist():
        (at,), update, (place,) = (
            np.flatnonzero(state.names == one)[:1].tolist() or [-1],
            np.flatnonzero(state.updates[0] == one),
            np.flatnonzero(state.placed[0] == one)[:1].tolist() or [-1],
        )
        leaves = state.leaves[ranges(starts[[at]], counts[[at]])].tolist() if at >= 0 else None
        here = (
            state.placed[3][ranges(blocks[[place]], state.placed[2][[place]])].tolist()
            if place >= 0
            else None
        )
        updates = [part[update].tolist() for part in state.updates]
        shard = int(state.placed[1][place]) if place >= 0 else None
        found[one] = (int(state.lengths[at]) if at >= 0 else None, leaves, updates, shard, here)
    return found


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize(("saved", "world"), [(3, 3), (5, 2), (2, 5), (4, 1), (1, 3)])
def test_every_rank_gets_what_its_trajectories_had(unit: Any, saved: int, world: int) -> None:
    sampler, random = gear.Prioritized(unit=unit), np.random.default_rng(saved + world)
    each = [priorities_of(random, rank, saved, steps=unit == "step") for rank in range(saved)]
    parts = on_threads(saved, lambda exchange: part_of_rank(exchange, each[exchange.rank]))
    assert len({part["checksum"] for part in parts}) == 1
    whole = parse_shards_state(join(parts), sampler)
    held = [parts[rank::world] or [parts[random.integers(saved)]] for rank in range(world)]
    everyone = np.unique(np.concatenate([whole.names, whole.updates[0], [7, 8 << 16]]))
    owners = random.integers(0, world, len(everyone))

    def load(exchange: Threads) -> Any:
        own = everyone[owners == exchange.rank]
        given = join(held[exchange.rank])
        return load_parts(exchange, sampler, lambda: parse_shards_state(given, sampler), lambda: own)

    for rank, state in enumerate(on_threads(world, load)):
        own = everyone[owners == rank]
        assert of_ids(state, own) == of_ids(whole, own)
        assert state.maximum == whole.maximum == saved
        assert repr(state.recent) == repr(whole.recent)
        assert (np.diff(state.names) > 0).all()
        given = sum(len(part["ids"]) for part in held[rank])
        assert len(state.names) <= given + len(own)
