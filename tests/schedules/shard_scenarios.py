"""A run of a dataset over shards on the stand-in: rows of this node read by the GPU, those of others placed by it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import random
import tempfile
from typing import Any

import numpy as np
import oracle
import torch
from distributed_common import SCHEMA, filled, new_priorities, trajectory
from options_common import nested
from played_peer import PlayedPeer
from scenarios import Mismatch, Shrinkable, cloned, collected_on_request, on_host, spill_some
from streams.cuda import Cuda
from streams.machine import Policy

import gear_loader as gear
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.shards import Shards

BATCH = 12
COUNTS = [20, 15, 10]
WINDOWS = gear.Window(5, -2)
HALF = gear.Window(WINDOWS.length, WINDOWS.offset, column="obs", dtype=torch.bfloat16, scale=1 / 3)
PACKED = gear.Window(20, -10)
PACKED_HALF = gear.Window(PACKED.length, PACKED.offset, column="obs", dtype=torch.bfloat16, scale=1 / 3)
SAMPLERS = {"uniform": gear.Uniform, "prioritized": gear.Prioritized, "top": gear.TopK}
_names = itertools.count()


@dataclasses.dataclass(frozen=True)
class ShardScenario(Shrinkable):
    """What happens in a run.

    Attributes:
        sampler: key of `SELECTORS`.
        prefetch, copy: of the dataset.
        remote: shards of other nodes.
        pinned: whether the GPU reads this node's tables; else batches are put together on the host.
        side: whether the consumer works on a stream of its own.
        writes: whether another thread adds trajectories meanwhile; they evict others.
        drops: whether the dataset is dropped while the device still works.
        cache: bytes of the cache for rows of other nodes.
        tier: whether half of the trajectories lie on a disk only.
        converts: whether a window has another dtype.
        layout: of the batches; all but ``"padded"`` have a number of steps instead of rows if `budget`.
        budget: see `layout`.
    """

    sampler: str = "uniform"
    prefetch: int = 2
    copy: bool | None = None
    remote: tuple[int, ...] = ()
    pinned: bool = True
    side: bool = False
    writes: bool = False
    drops: bool = False
    cache: int | None = None
    tier: bool = False
    converts: bool = False
    layout: str = "padded"
    budget: bool = False

    @classmethod
    def flat(cls, seed: int) -> ShardScenario:
        """That of a seed with packed batches, in half of them of tables of which some trajectories lie on disk."""
        scenario, choose = cls.of(seed), random.Random(f"flat {seed}")
        return dataclasses.replace(
            scenario,
            layout="packed",
            budget=choose.random() < 0.5 and scenario.sampler == "uniform",
            tier=choose.random() < 0.5,
        )

    @classmethod
    def of(cls, seed: int) -> ShardScenario:
        """The scenario of a seed."""
        choose = random.Random(f"shards {seed}")
        return cls(
            choose.choice(list(SAMPLERS)),
            choose.choice([0, 2]),
            choose.choice([None, True, False]),
            choose.choice([(), (1,), (1, 2)]),
            choose.random() < 0.75,
            *(choose.random() < 0.5 for _ in range(3)),
            choose.choice([None, 4_000, 1 << 20]),
            converts=choose.random() < 0.5,
        )

    def play(self, seed: int, policy: Policy, *, ordered: bool = True) -> Cuda:
        """Batches without other writers are those of the CPU."""
        return _run(self, seed, policy, ordered=ordered)


def _tables(scenario: ShardScenario, folder: str = "") -> list[gear.Table]:
    number = next(_names)
    if scenario.tier:
        return [_with_tier(scenario, f"streams-{number}-{shard}", shard, folder) for shard in range(3)]
    options: dict[str, Any] = {"max_steps": 120, "on_full": "evict_oldest"} if scenario.writes else {}
    # Packed and not: a batch is gathered from both.
    return [
        filled(f"streams-{number}-{shard}", shard, COUNTS, packed=shard != 1, **options) for shard in range(3)
    ]


def _with_tier(scenario: ShardScenario, name: str, shard: int, folder: str) -> gear.Table:
    path = f"{folder}/{shard}"
    options: dict[str, Any] = {"max_steps": 120, "on_full": "evict_oldest"} if scenario.writes else {}
    disk = gear.Disk(path, sync_seconds=1e6, size="1GiB", keep="newest")
    table = filled(name, shard, COUNTS, packed=shard != 1, **options, max_blocks=400, disk=disk)
    spill_some(table, path)
    return table


def _batches(
    scenario: ShardScenario,
    device: str,
    tables: list[gear.Table],
    cuda: Cuda | None = None,
    owners: dict[tuple[int, int, int], int] | None = None,
) -> list[dict[str, Any]]:
    shards = Shards(tables, cache=scenario.cache)
    shards.remote = bool(scenario.remote)
    for shard in scenario.remote:
        peer: Any = PlayedPeer(tables[shard], set())
        shards._sources[shard] = RemoteShard(peer, "played", tables[0].schema)
    packs = scenario.layout != "padded"
    window, half = (PACKED, PACKED_HALF) if packs else (WINDOWS, HALF)
    windows: dict[str, Any] = {**dict.fromkeys(("obs", "act", "flag"), window), "task": None}
    sizes: dict[str, Any] = {"batch_size": BATCH}
    if scenario.budget:
        sizes = {"max_steps": 60, "lookahead": 2}
    data = gear.ReplayDataset(
        shards,
        **nested(
            {
                **sizes,
                "layout": scenario.layout,
                "windows": {**windows, "half": half} if scenario.converts else window,
                "sampler": SAMPLERS[scenario.sampler](),
                "device": device,
                "prefetch": scenario.prefetch,
                "copy": scenario.copy,
                "batches_per_epoch": 6,
            }
        ),
    )
    if cuda is not None and scenario.writes:
        cuda.threads.start(_write, (cuda, tables, owners), "writer")
    found = []
    stream = torch.cuda.Stream(device) if cuda is not None and scenario.side else None
    with torch.cuda.stream(stream):
        for number, batch in enumerate(data):
            found.append(cloned(dict(batch)))
            if scenario.sampler != "uniform":
                data.update_priority(batch, new_priorities(on_host(found[-1]), number).to(device))
    del batch
    if scenario.drops:
        del data
        gc.collect()
    if cuda is not None:
        torch.cuda.synchronize(device)
    return [on_host(each) for each in found]


def _owners(tables: list[gear.Table]) -> dict[tuple[int, int, int], int]:
    """Shard, index and generation of each trajectory -> its number."""
    found = {}
    for shard, table in enumerate(tables):
        snapshot = table._engine.reader().snapshot()
        for slot, generation in zip(snapshot.slots.tolist(), snapshot.generations.tolist(), strict=True):
            found[shard, slot, generation] = int(table[slot]["task"][0])
    return found


def number_of_steps(number: int) -> int:
    """Of the trajectory with this number, as `filled` adds it."""
    return number * 7 % 23 + 1


def _write(cuda: Cuda, tables: list[gear.Table], owners: dict[tuple[int, int, int], int]) -> None:
    for i in range(60):
        gathers = ("gather", "gather packed")
        cuda.threads.wait(lambda: sum(cuda.machine.counts[each] for each in gathers) > i // 5)  # noqa: B023
        table = i % 3
        number = 100 * table + 20 + i
        slot = tables[table].add(trajectory(number, number_of_steps(number)), priority=1.0)
        owners[table, slot, int(tables[table]._engine.reader().slot_states()[1][slot])] = number
        cuda.threads.switch()


def check_rows(scenario: ShardScenario, number: int, batch: dict[str, Any], numbers: list[int]) -> None:
    """Fail unless the rows of a batch are those of the trajectories with these numbers, by the oracle."""
    packs = scenario.layout != "padded"
    windows: dict[str, Any] = {
        **dict.fromkeys(("obs", "act", "flag"), PACKED if packs else WINDOWS),
        "task": None,
    }
    if scenario.converts:
        windows["half"] = PACKED_HALF if packs else HALF
    values = [trajectory(each, number_of_steps(each)) for each in numbers]
    rows = [oracle.Row(row, anchor) for row, anchor in enumerate(batch["anchor"].tolist())]
    expected = oracle.batch(SCHEMA, values, rows, windows, layout="packed" if packs else "padded")
    masks = expected.pop("masks", {})
    found = dict(batch)
    for name, mask in masks.items():  # by name if windows are a mapping
        expected[f"mask of {name}"] = mask
        found[f"mask of {name}"] = batch["mask"][name] if scenario.converts else batch["mask"]
    for name, right in expected.items():
        value = oracle.numpy_of(found[name]) if isinstance(found[name], torch.Tensor) else found[name]
        if not np.array_equal(value, right):
            raise Mismatch(f"batch {number} of {numbers}: {name} is {value}; expected {right}")


@functools.cache
def _expected(sampler: str, prefetch: int, layout: str, budget: bool) -> list[dict[str, Any]]:
    scenario = ShardScenario(sampler, prefetch, copy=True, layout=layout, budget=budget)
    tables = _tables(scenario)
    try:
        return _batches(scenario, "cpu", tables)
    finally:
        for table in tables:
            table.unlink()
            table.close()


def _run(scenario: ShardScenario, seed: int, policy: Policy, *, ordered: bool) -> Cuda:
    case = scenario.sampler, scenario.prefetch, scenario.layout, scenario.budget
    expected = None if scenario.writes else _expected(*case)
    cuda = Cuda(seed, policy)
    cuda.machine.checks_order = ordered
    cuda.refuse_pinning = not scenario.pinned
    with tempfile.TemporaryDirectory() as folder, collected_on_request(), cuda.installed():
        tables = _tables(scenario, folder)
        try:
            owners = _owners(tables)
            found = _batches(scenario, "cuda:1", tables, cuda, owners)
        finally:
            gc.collect()
            cuda.threads.finish()
            for table in tables:
                table.unlink()
                table.close()
    cuda.check()
    for number, batch in enumerate(found):
        names = zip(*(batch[key].tolist() for key in ("shard", "index", "generation")), strict=True)
        check_rows(scenario, number, batch, [owners[name] for name in names])
        for key, value in {} if expected is None else expected[number].items():
            # With converted windows, which are a mapping, masks come by name; they are alike.
            for each in batch[key].values() if isinstance(batch[key], dict) else (batch[key],):
                same = torch.equal(each, value) if isinstance(value, torch.Tensor) else each == value
                if not same:
                    raise Mismatch(f"batch {number}: {key} is {each}; expected {value}")
    return cuda
