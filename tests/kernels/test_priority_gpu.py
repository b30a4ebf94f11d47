"""On a real GPU: the compiled priority kernels against their twins, and prioritized datasets against the CPU's."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested

import gear_loader as gear
from gear_loader.errors import PriorityError
from gear_loader.kernels import items as item_kernels
from gear_loader.kernels import priority, priority_reference
from gear_loader.kernels.sum_tree import SumTree

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
PARTS = ("leaves", "sums", "mins", "maxs", "maximum", "status")


def trees(capacity: int) -> tuple[SumTree, SumTree]:
    return SumTree(capacity, DEVICE), SumTree(capacity)


def assert_equal(found: SumTree, expected: SumTree) -> None:
    for part in PARTS:
        assert torch.equal(getattr(found, part).cpu(), getattr(expected, part)), part


def spread(generator: torch.Generator, count: int) -> torch.Tensor:
    """Priorities over 12 orders of magnitude, some of them 0."""
    values = 10 ** (12 * torch.rand(count, generator=generator) - 6)
    return values.masked_fill(torch.rand(count, generator=generator) < 0.1, 0)


@pytest.mark.parametrize(
    ("capacity", "count"),
    [
        (1, 255),
        (31, 1),
        (33, 5000),
        (1000, 255),
        (1025, 1024),
        (33_000, 1),
        (33_000, 5000),
        (3_000_000, 1024),
    ],
)
def test_updates_and_draws_are_those_of_the_twin(capacity: int, count: int) -> None:
    generator = torch.Generator().manual_seed(capacity + count)
    device, host = trees(capacity)
    for turn in range(3):
        items = torch.randint(-1, capacity, (count,), generator=generator)
        values = spread(generator, count)
        values[0] = 1.0
        items[0] = int(items.max().clamp(min=0))
        priority.update(device, items.to(DEVICE), values.to(DEVICE), floor=2.0 * turn)
        priority_reference.update(host, items, values, floor=2.0 * turn)
        assert_equal(device, host)
        random = torch.tensor([-(2**63) + turn, 2**62 + turn])
        for draw, twin in (
            (priority.draw, priority_reference.draw),
            (priority.draw_distinct, priority_reference.draw_distinct),
        ):
            rows = min(count, 1500)
            found = torch.full((rows,), -9, device=DEVICE), torch.full((rows,), torch.nan, device=DEVICE)
            expected = torch.full((rows,), -9), torch.full((rows,), torch.nan)
            draw(device, random.to(DEVICE), *found)
            twin(host, random, *expected)
            assert torch.equal(found[0].cpu(), expected[0])
            assert torch.equal(found[1].cpu(), expected[1])
            assert_equal(device, host)
    sums = device.sums.clone()
    device.sums.zero_()
    priority.build(device)
    assert torch.equal(device.sums, sums)
    for largest in (True, False):
        best = min(50, capacity)
        items, leaves = device.top(best, largest=largest)
        expected_items, expected_leaves = host.top(best, largest=largest)
        assert torch.equal(items.cpu(), expected_items)
        assert torch.equal(leaves.cpu(), expected_leaves)


def test_an_exponent_differs_from_the_twins_by_rounding_only() -> None:
    generator = torch.Generator().manual_seed(0)
    device, host = trees(10_000)
    items, values = torch.arange(10_000), spread(generator, 10_000)
    priority.update(device, items.to(DEVICE), values.to(DEVICE), alpha=0.6, eps=1e-6)
    priority_reference.update(host, items, values, alpha=0.6, eps=1e-6)
    torch.testing.assert_close(device.leaves.cpu(), host.leaves, rtol=2.4e-7, atol=0)


def test_a_bad_value_changes_nothing() -> None:
    for bad in (torch.nan, torch.inf, -1.0):
        device, host = trees(5000)
        for count in (100, 6000):  # one program, and many
            items = torch.arange(count) % 5000
            values = torch.ones(count)
            values[77] = bad
            priority.update(device, items.to(DEVICE), values.to(DEVICE))
            assert device.status[0] == 77
            assert not device.leaves.any()
            device.status[0] = host.status[0]


def test_draw_gather_and_update_in_a_cuda_graph() -> None:
    """What stands between the draw and the next one, captured once and replayed: as if launched one by one."""

    beta = torch.tensor([0.4]).pin_memory()

    def step(tree: SumTree, random: Any, items: Any, leaves: Any, weights: Any) -> None:
        priority.draw(tree, random, items, leaves)
        item_kernels.weigh(tree, leaves, weights, beta=beta, table=True)
        priority.update(tree, items, leaves * 0.5)
        random[1] += 1

    capacity, batch = 100_000, 256
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(capacity, generator=generator).to(DEVICE)
    source = torch.arange(capacity, device=DEVICE)
    results = []
    for captured in (True, False):
        tree, random = SumTree(capacity, DEVICE), torch.tensor([7, 0], device=DEVICE)
        priority.update(tree, source, values)
        items = torch.empty(batch, dtype=torch.int64, device=DEVICE)
        state = (tree, random, items, *(torch.empty(batch, device=DEVICE) for _ in range(2)))
        run: Any = functools.partial(step, *state)
        if captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles, on what is thrown away
                step(SumTree(capacity, DEVICE), *(part.clone() for part in state[1:]))
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        rows: list[tuple[torch.Tensor, ...]] = []
        for _ in range(20):
            run()
            rows.append(tuple(part.clone() for part in state[2:]))
        results.append((rows, tree.sums.clone()))
    assert torch.equal(results[0][1], results[1][1])
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def table() -> Iterator[gear.Table]:
    schema = {"value": gear.Column(torch.float32, (6,)), "step": gear.Column(torch.int64)}
    with gear.Table.create(
        schema, max_steps=6000, max_trajectories=300, block_steps=16, on_full="evict_oldest"
    ) as made:
        random = np.random.default_rng(0)
        for number in range(250):
            add(made, random, number)
        yield made


def add(table: gear.Table, random: np.random.Generator, number: int) -> None:
    length = int(random.integers(1, 40))
    rows = {"value": np.full((length, 6), number, np.float32), "step": 1000 * number + np.arange(length)}
    table.add(rows, priority=None if number % 3 else float(number + 1))


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    """Steps by priority, on the GPU."""
    settings = {"batch_size": 64, "windows": gear.Window(1), "device": "cuda"}
    return gear.ReplayDataset(
        table, **nested({**settings, "sampler": gear.Prioritized(unit="step"), **options})
    )


SAMPLERS = {
    "trajectories": lambda: gear.Prioritized(1.0, eps=0.5),
    "steps": lambda: gear.Prioritized(1.0, unit="step", normalize="batch"),
    "distinct": lambda: gear.Prioritized(1.0, replacement=False, unit="step"),
    "top": lambda: gear.TopK(unit="step"),
}


def batches(
    table: gear.Table, name: str, device: Any, prefetch: int, *, sampled: bool
) -> list[dict[str, torch.Tensor]]:
    """Batches with an update after each."""
    options = {"windows": gear.Window(8, -4), "seed": 3, "prefetch": prefetch, "batches_per_epoch": 25}
    data = dataset(table, sampler=SAMPLERS[name](), device=device, **options)
    source: Any = (data.sample() for _ in range(25)) if sampled else data
    generator = torch.Generator().manual_seed(9)
    found = []
    for batch in source:
        found.append({key: value.cpu().clone() for key, value in batch.items()})
        priorities = torch.rand(64, generator=generator).to(batch["index"].device)
        anchor = batch["anchor"] if data.sampler.unit == "step" else None
        data.update_priority(batch["index"], priorities, generation=batch["generation"], anchor=anchor)
    assert data.num_stale == 0
    return found


@pytest.mark.parametrize(
    ("name", "prefetch", "sampled"),
    [(name, (i + i // 4) % 2 * 2, i >= 4) for i, name in enumerate([*SAMPLERS] * 2)],
)
def test_batches_are_those_of_the_cpu(table: gear.Table, name: str, prefetch: int, sampled: bool) -> None:
    expected = batches(table, name, "cpu", prefetch, sampled=sampled)
    found = batches(table, name, "cuda", prefetch, sampled=sampled)
    for one, other in zip(found, expected, strict=True):
        for key, values in other.items():
            if key == "priority_weight":
                torch.testing.assert_close(one[key], values, rtol=1e-6, atol=0)
            else:
                assert torch.equal(one[key], values), key


def test_while_trajectories_come_and_go(table: gear.Table) -> None:
    random, data = np.random.default_rng(5), dataset(table)
    for number in range(250, 500):
        add(table, random, number)
        batch = data.sample()
        steps = batch["step"][:, 0]
        assert torch.equal(steps % 1000, batch["anchor"])
        assert torch.equal((steps // 1000).float(), batch["value"][:, 0, 0])
        data.update_priority(batch, torch.rand(64, device="cuda"))
    table.check_valid()


@pytest.mark.parametrize("copy", [False, True])
def test_the_host_does_not_wait(table: gear.Table, copy: bool) -> None:
    data = dataset(table, windows=gear.Window(8), copy=copy)

    def turn() -> None:
        batch = data.sample()
        data.update_priority(batch, batch["value"][:, 0, 0].abs())

    for _ in range(4):  # compiles, and makes all buffers of the ring
        turn()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            turn()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_resumed_in_mid_stream(table: gear.Table) -> None:
    def train(
        data: gear.ReplayDataset, batch: dict[str, torch.Tensor], number: int
    ) -> dict[str, torch.Tensor]:
        data.update_priority(batch, torch.rand(64, generator=torch.Generator().manual_seed(number)).cuda())
        return {key: value.cpu().clone() for key, value in batch.items()}

    options: dict[str, Any] = {"windows": gear.Window(4), "batches_per_epoch": 20}
    data, seen, state = dataset(table, **options), [], None
    for number, batch in enumerate(data):
        seen.append(train(data, batch, number))
        if number == 9:
            state = data.state_dict()
    assert state is not None
    resumed = dataset(table, **options)
    resumed.load_state_dict(state)
    for number, batch in enumerate(resumed, start=10):
        copy = train(resumed, batch, number)
        assert all(torch.equal(copy[key], value) for key, value in seen[number].items())


def test_a_bad_priority_is_raised_by_a_later_call(table: gear.Table) -> None:
    data = dataset(table, sampler=gear.Prioritized())
    batch = data.sample()
    priorities = torch.ones(64, device="cuda")
    priorities[3] = torch.nan
    data.update_priority(batch["index"], priorities)
    torch.cuda.synchronize()
    with pytest.raises(PriorityError, match=r"priority\[3\] of an earlier update_priority"):
        data.sample()
    data.sample()
