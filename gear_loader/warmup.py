"""Compiles the loops in advance, by using each of them once on small tables; those of a GPU by their arguments."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import types

from gear_loader.checkpoint.spilling import promote
from gear_loader.collection.n_step import NStep
from gear_loader.collection.windows import Whole
from gear_loader.dataset import ReplayDataset
from gear_loader.dataset.options import Draws
from gear_loader.distributed.row_cache import CacheBudget, RowCache
from gear_loader.distributed.shards import Shards
from gear_loader.graph.csr import Graph
from gear_loader.graph.features import Features
from gear_loader.graph.sampler import NeighborSampler
from gear_loader.graph.workload import access_probability, sampled_size
from gear_loader.native import compile as native
from gear_loader.native import gathering, packed_lines, ragged_copies
from gear_loader.native.row_cache import KEY
from gear_loader.replay.buffer import ReplayBuffer
from gear_loader.selection.samplers import Fifo, Lifo, Prioritized, Sampler, TopK, Uniform
from gear_loader.selection.step_budget import Steps
from gear_loader.storage import queue_loops
from gear_loader.storage.disk import Disk
from gear_loader.storage.limiters import MinSize
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.operations.view import EVICT_OLDEST
from gear_loader.storage.schema import Column, Window
from gear_loader.storage.table import Table
from gear_loader.storage.table_rules import Limits
from gear_loader.transport import queries

__all__ = ["warm_up"]

_SCHEMA = {"observation": Column(torch.float32, (3,)), "reward": Column(torch.float64)}
_TARGET = NStep("reward", n=2, gamma=0.9, done="reward")
_RETURNS = tuple(
    {"observation": window, "target": _TARGET} for window in (Window(1, squeeze=True), Window(3, -1))
)
_LARGE = 30_000  # steps of a trajectory that is not copied under the lock


def warm_up(progress: Callable[[str], None] = lambda _: None) -> dict[str, float]:
    """Compile every loop that numba's cache does not hold yet, also those that draw and queue batches for a GPU.

    Args:
        progress: called with the name of each stage before it begins.

    Returns:
        Name of each loop that was compiled now -> seconds.
    """
    before = dict(native.timings)
    for name, stage in (
        ("adding and evicting", _adding),
        ("writers", _writing),
        ("drawing", _drawing),
        ("packed batches", _packing),
        ("values of any length", _ragged),
        ("steps of others", _prefixes),
        ("drawing by priority", _prioritizing),
        ("several shards", _sharding),
        ("checkpoints", _saving),
        ("graphs", _sampling),
        ("a disk below memory", _spilling),
        ("batches for a GPU", _queueing),
    ):
        progress(name)
        stage()
    return {name: seconds for name, seconds in native.timings.items() if name not in before}


def _table(**options: Any) -> Table:
    sizes = {"max_steps": 64, "max_trajectories": 8, "block_steps": 4}
    return Table.create(_SCHEMA, **{**sizes, **options})


def _steps(length: int) -> dict[str, Any]:
    return {"observation": np.zeros((length, 3), dtype=np.float32), "reward": np.zeros(length)}


def _filled(count: int = 6) -> Table:
    table = _table(on_full="evict_oldest")
    table.extend([_steps(10) for _ in range(count)], priority=1.0)
    return table


def _adding() -> None:
    for policy in ("evict_oldest", "evict_lowest_priority"):
        with _table(on_full=policy) as table:
            for _ in range(9):
                table.add(_steps(10), priority=1.0)
            table.extend_as([_steps(3)] * 2, ids=[-1, 2**40])
            table.extend([{name: torch.from_numpy(value) for name, value in _steps(3).items()}])
            table.remove(int(table.indices()[0]))
            table.clear()
    large = {"max_steps": 2 * _LARGE, "max_trajectories": 4, "block_steps": 64}
    with _table(**large, on_full="evict_oldest") as table:
        for _ in range(3):
            table.add(_steps(_LARGE))
    with _table(limits=Limits(max_age=1e-9)) as table:
        for _ in range(3):
            table.add(_steps(3))
    versions = {**_SCHEMA, "policy": Column(torch.int64, per="trajectory")}
    with Table.create(
        versions, max_steps=8, max_trajectories=2, limits=Limits(version="policy", max_lag=0)
    ) as table:
        table.add({**_steps(3), "policy": 0})
        table.advance_version()
    changing = {**_SCHEMA, "state": Column(torch.float32, mutable=True)}
    with Table.create(changing, max_steps=8, max_trajectories=2) as table:
        table.set(table.add({**_steps(3), "state": np.zeros(3, dtype=np.float32)}), 0, state=np.float32(1))


def _writing() -> None:
    with _filled() as table:
        each: list[dict[str, Any]] = [{}, {"chunk_steps": 8, "overlap_steps": 4}]
        each += [{"chunk_steps": 8, "overlap_steps": 3}, {"commit_every_step": True}]
        for options in each:
            with table.writer(**options) as writer:
                for _ in range(3):
                    writer.append(_steps(9))
                writer.append(observation=np.zeros(3, dtype=np.float32), reward=0.0)
                writer.commit()
                writer.append(_steps(2))
                writer.discard()
        for every in (False, True):
            with table.writers(2, commit_every_step=every) as writers:
                for done in (False, False, True):
                    writers.append(_steps(2), done=[done, done])
    with Table.create(
        {"x": Column(torch.float32, (3,), final=True)},
        max_steps=16,
        max_trajectories=4,
        on_full="evict_oldest",
    ) as table:
        writers, row = table.writers(2, commit_every_step=True), {"x": np.zeros((2, 3), dtype=np.float32)}
        for ends in ([False, False], [True, True]) * 4:
            writers.append(row, next=row, done=ends)
    buffer, obs = ReplayBuffer(16, device="cpu"), np.zeros(3, dtype=np.float32)
    for _ in range(2):
        buffer.add(obs, 0, 0.0, obs, False, False)
    with _filled() as table:
        slots, _ = table._engine.index.begin(np.array([1]), evict=EVICT_OLDEST)
        table._engine.index.abort(slots)
    # With a rate limiter, writers take their room one by one.
    with _table(on_full="evict_oldest", rate_limiter=MinSize(1)) as table:
        for _ in range(3):
            with table.writer() as writer:
                for _ in range(30):
                    writer.append(observation=np.zeros(3, dtype=np.float32), reward=0.0)


def _draw(table: Table | Shards, sampler: Sampler, **options: Any) -> None:
    dataset = ReplayDataset(
        table,
        **{"batch_size": 4, "windows": Window(3, -1), "device": "cpu", "prefetch": 0, **options},
        sampler=sampler,
    )
    for _, batch in zip(range(2), dataset, strict=False):
        if isinstance(sampler, (Prioritized, TopK)):
            dataset.update_priority(batch, torch.ones(len(batch["index"]), device="cpu"))
    dataset.sample()


def _drawing() -> None:
    for kind in (Uniform, Fifo, Lifo):
        for unit in ("trajectory", "step"):
            for replacement in (True, False):
                with _filled() as table:
                    _draw(table, kind(replacement=replacement, unit=unit))
    with _filled() as table:
        _draw(table, Uniform(unit="step"), windows=Window(1, squeeze=True))
        _draw(table, Uniform(), windows={"observation": Window(at=[0.0], timestamps="reward")})
    with _filled() as table:
        for windows in _RETURNS:
            _draw(table, Uniform(unit="step"), windows=windows, draws=Draws(complete=True))
    with _table(limits=Limits(max_times_sampled=100)) as table:
        table.extend([_steps(10) for _ in range(4)])
        _draw(table, Uniform(), draws=Draws(sample_info=True))
    with _table(max_steps=2 * _LARGE, block_steps=64) as table:  # batches that threads share
        table.extend([_steps(_LARGE)])
        _draw(table, Uniform(), windows=Window(20_000), batch_size=16)
    with _table(max_steps=4 * _LARGE, block_steps=64) as table:  # a permutation that is computed item by item
        table.extend([_steps(_LARGE)] * 3)
        _draw(table, Uniform(replacement=False, unit="step"))


def _packing() -> None:
    packed: dict[str, Any] = {"windows": Whole(), "layout": "packed"}
    with _filled() as table:
        _draw(table, Uniform(), **packed)
        _draw(table, Uniform(), windows=Whole())
        next(iter(ReplayDataset(table, batch_size=Steps(20), device="cpu", prefetch=0, **packed)))


def _ragged() -> None:
    schema = {"tokens": Column(torch.int64, (None,)), "text": Column(str)}
    sizes: dict[str, Any] = {"max_steps": 16, "max_trajectories": 4, "block_steps": 4}
    with Table.create(schema, **sizes, memory=Memory(payload=4096), on_full="evict_oldest") as table:
        for _ in range(6):
            table.add({"tokens": [np.arange(3), np.arange(2)], "text": ["a", "bc"]})
        _draw(table, Uniform(), windows=Window(1))
        _draw(table, Uniform(), windows=Whole(), layout="packed")
        table.stats()
        _saved(table)
        with table.writer() as writer:
            for _ in range(3):
                writer.append(tokens=np.arange(9), text="a")
            writer.commit()


def _prefixes() -> None:
    sizes: dict[str, Any] = {"max_steps": 16, "max_trajectories": 4, "block_steps": 4}
    with Table.create(_SCHEMA, **sizes, memory=Memory(prefixes=True)) as table:
        table.add(_steps(2), prefix=table.add(_steps(5)))


def _prioritizing() -> None:
    for unit in ("trajectory", "step"):
        for sampler in (Prioritized(unit=unit), Prioritized(replacement=False, unit=unit), TopK(unit=unit)):
            with _filled() as table:
                _draw(table, sampler, windows=Window(1, squeeze=True))
                _draw(table, sampler)
                table.add(_steps(10))
                _draw(table, sampler)
    for windows in _RETURNS:
        with _filled() as table:
            _draw(table, Prioritized(unit="step"), windows=windows)
    with _table(on_full="evict_lowest_priority") as table:
        table.extend([_steps(10) for _ in range(4)])
        _draw(table, Prioritized())


def _sharding() -> None:
    for sampler in (Uniform(), Uniform(replacement=False), Prioritized(), Prioritized(unit="step")):
        with _filled() as one, _filled() as two, Shards([one, two]) as shards:
            _draw(shards, sampler)
    gathering.place(np.empty((0, 3), dtype=np.int64), np.empty(0, dtype=np.int64))  # for rows of other nodes
    _caching()
    queries.warm_up()


def _caching() -> None:
    source, rows = np.zeros((4, 16), dtype=np.uint8), np.arange(4)
    cache, keys = RowCache(CacheBudget(200), (16,)), np.zeros((4, KEY), dtype=np.int64)
    keys[:, 0] = rows
    place = np.array([source.ctypes.data])
    cache.keep(keys, None, place, rows)
    found = cache.find(keys, None)
    cache.load(found[found >= 0], place, rows[found >= 0])


def _saving() -> None:
    with _filled() as table:
        _saved(table)


def _saved(table: Table) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table.save(Path(folder) / "table")
        Table.load(Path(folder) / "table").close()


def _sampling() -> None:
    graph = Graph.from_edge_index(np.arange(20).reshape(2, 10) % 7)
    with _filled() as table:
        features = Features(table)
        for threads in (1, 2):
            features[NeighborSampler(graph, [1, -1], threads=threads).sample([1, 2]).n_id]
        features.place(np.ones(features.num_nodes), device_bytes=1 << 10)
        features[[1, 2]]
    sampled_size(graph, [1])
    access_probability(graph, [1])


def _spilling() -> None:
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(folder, sync_seconds=1e6, size="1MiB")
        with _table(disk=disk, memory=Memory(max_blocks=6)) as table:
            for _ in range(4):
                table.add(_steps(10))
            _draw(table, Uniform())
            table.save(folder)
        with Table.recover(disk) as table:
            table.remove(table.indices()[-1])
            promote(table._engine, table.indices())
            table._engine.index.evict(1, EVICT_OLDEST)
    with tempfile.TemporaryDirectory() as folder:
        disk, memory = Disk(folder, sync_seconds=1e6, size="1MiB"), Memory(max_blocks=40, payload=4096)
        sizes: dict[str, Any] = {"max_steps": 100, "max_trajectories": 20, "block_steps": 4}
        with Table.create({"text": Column(str)}, **sizes, memory=memory, disk=disk) as table:
            for _ in range(3):
                table.add({"text": ["a" * 500, "b" * 1000]})
            promote(table._engine, table.indices())


def _queueing() -> None:
    """The loops whose results only a GPU reads: nothing is called, as they would call its driver."""
    n, real, flag = types.int64, types.float64, types.boolean
    row, rows, short, shorts = n[::1], n[:, ::1], types.int32[::1], types.int32[:, ::1]
    index = rows, short, n
    for loop, *kinds in (
        (queue_loops.queue_uniform, rows, row, rows, n, n, flag, n, n, n, n, row, n, row),
        (queue_loops.list_drawn, rows, rows, row),
        (queue_loops.queue_prioritized, rows, row, rows, *[n] * 8, *[real] * 3, rows),
        (queue_loops.queue_drawn, rows, row, n, n, row, n, n, n, real, n, row, n),
        (queue_loops.copy_update, row, n, rows, n, n, row),
        (queue_loops.launch_update, row, n, row),
        (gathering.resolve, row, row, *index, n, n, rows, shorts, n, flag),
        (packed_lines.list_pieces, row, rows, short, *index, n, flag, flag, shorts),
        (packed_lines.list_work, shorts, rows, rows, n, n, row, n, n),
        (
            packed_lines.plan_rows,
            row,
            row,
            flag,
            row,
            *index,
            n,
            flag,
            rows,
            rows,
            short,
            shorts,
            row,
            n,
            row,
        ),
        (ragged_copies.list_values, n, n, rows, n, n, n, shorts, row),
    ):
        loop.compile(tuple(kinds))
