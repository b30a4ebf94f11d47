"""On a real GPU: the compiled priority kernels against their twins, and prioritized datasets against the CPU's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import PriorityError
from gear_loader.kernels import items as item_kernels
from gear_loader.kernels import priority, priority_reference
from gear_loader.kernels.sum_tree import SumTree

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
CAPACITIES = (1, 31, 33, 1000, 1025, 33_000, 3_000_000)
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


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("count", [1, 255, 1024, 5000])
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


def test_draws_are_proportional() -> None:
    tree = SumTree(4, DEVICE)
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0])
    priority.update(tree, torch.arange(4, device=DEVICE), weights.to(DEVICE))
    items = torch.empty(800_000, dtype=torch.int64, device=DEVICE)
    priority.draw(tree, torch.tensor([5, 6], device=DEVICE), items, torch.empty(800_000, device=DEVICE))
    observed = items.bincount(minlength=4).cpu().double()
    assert observed[1] == 0
    expected = weights.double() / 8 * 800_000
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1)).sum()
    assert statistic < 20.0  # 3 values, 2 degrees of freedom: exceeded once in 22,000 runs


def test_draw_gather_and_update_in_a_cuda_graph() -> None:
    """What stands between the draw and the next one, captured once and replayed: as if launched one by one."""
    capacity, batch = 100_000, 256
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(capacity, generator=generator).to(DEVICE)
    source = torch.arange(capacity, device=DEVICE)
    results = []
    for captured in (True, False):
        tree = SumTree(capacity, DEVICE)
        priority.update(tree, source, values)
        random = torch.tensor([7, 0], device=DEVICE)
        items = torch.empty(batch, dtype=torch.int64, device=DEVICE)
        leaves, weights = torch.empty(batch, device=DEVICE), torch.empty(batch, device=DEVICE)
        rows: list[tuple[torch.Tensor, ...]] = []

        def step(
            tree: SumTree = tree,
            random: torch.Tensor = random,
            items: torch.Tensor = items,
            leaves: torch.Tensor = leaves,
            weights: torch.Tensor = weights,
        ) -> None:
            priority.draw(tree, random, items, leaves)
            item_kernels.weigh(tree, leaves, weights, beta=0.4, table=True)
            priority.update(tree, items, leaves * 0.5)
            random[1] += 1

        if captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles, on what is thrown away
                scratch = SumTree(capacity, DEVICE)
                step(scratch, random.clone(), items.clone(), leaves.clone(), weights.clone())
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        else:
            run = step
        for _ in range(20):
            run()
            rows.append((items.clone(), leaves.clone(), weights.clone()))
        results.append((rows, tree.sums.clone()))
    assert torch.equal(results[0][1], results[1][1])
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------- datasets


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
    table.add(
        {
            "value": np.full((length, 6), number, np.float32),
            "step": 1000 * number + np.arange(length),
        },
        priority=None if number % 3 else float(number + 1),
    )


SELECTORS = {
    "trajectories": lambda: gear.Prioritized(1.0, eps=0.5),
    "steps": lambda: gear.Prioritized(1.0, unit="step", normalize="batch"),
    "distinct": lambda: gear.Prioritized(1.0, replacement=False, unit="step"),
    "top": lambda: gear.TopK(unit="step"),
}


def batches(
    table: gear.Table, name: str, device: Any, prefetch: int, *, sampled: bool
) -> list[dict[str, torch.Tensor]]:
    """Batches with an update after each."""
    dataset = gear.ReplayDataset(
        table,
        batch_size=64,
        windows=gear.Window(8, -4),
        selector=SELECTORS[name](),
        seed=3,
        device=device,
        prefetch=prefetch,
        batches_per_epoch=25,
    )
    source: Any = (dataset.sample() for _ in range(25)) if sampled else dataset
    generator = torch.Generator().manual_seed(9)
    found = []
    for batch in source:
        found.append({key: value.cpu().clone() for key, value in batch.items()})
        priorities = torch.rand(64, generator=generator).to(batch["index"].device)
        anchor = batch["anchor"] if dataset.selector.unit == "step" else None
        dataset.update_priority(batch["index"], priorities, generation=batch["generation"], anchor=anchor)
    assert dataset.num_stale == 0
    return found


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("sampled", [False, True])
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
    random = np.random.default_rng(5)
    dataset = gear.ReplayDataset(
        table, batch_size=64, windows=gear.Window(1), selector=gear.Prioritized(unit="step"), device="cuda"
    )
    for number in range(250, 500):
        add(table, random, number)
        batch = dataset.sample()
        steps = batch["step"][:, 0]
        assert torch.equal(steps % 1000, batch["anchor"])
        assert torch.equal((steps // 1000).float(), batch["value"][:, 0, 0])
        dataset.update_priority(
            batch["index"],
            torch.rand(64, device="cuda"),
            generation=batch["generation"],
            anchor=batch["anchor"],
        )
    table.check_valid()


@pytest.mark.parametrize("copy", [False, True])
def test_the_host_does_not_wait(table: gear.Table, copy: bool) -> None:
    dataset = gear.ReplayDataset(
        table,
        batch_size=64,
        windows=gear.Window(8),
        selector=gear.Prioritized(unit="step"),
        device="cuda",
        copy=copy,
    )

    def turn() -> None:
        batch = dataset.sample()
        dataset.update_priority(
            batch["index"],
            batch["value"][:, 0, 0].abs(),
            generation=batch["generation"],
            anchor=batch["anchor"],
        )

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
    def make() -> gear.ReplayDataset:
        return gear.ReplayDataset(
            table,
            batch_size=32,
            windows=gear.Window(4),
            selector=gear.Prioritized(unit="step"),
            device="cuda",
            batches_per_epoch=20,
        )

    def train(
        dataset: gear.ReplayDataset, batch: dict[str, torch.Tensor], number: int
    ) -> dict[str, torch.Tensor]:
        priorities = torch.rand(32, generator=torch.Generator().manual_seed(number)).cuda()
        dataset.update_priority(
            batch["index"], priorities, generation=batch["generation"], anchor=batch["anchor"]
        )
        return {key: value.cpu().clone() for key, value in batch.items()}

    dataset, seen, state = make(), [], None
    for number, batch in enumerate(dataset):
        seen.append(train(dataset, batch, number))
        if number == 9:
            state = dataset.state_dict()
    assert state is not None
    resumed = make()
    resumed.load_state_dict(state)
    for number, batch in enumerate(resumed, start=10):
        copy = train(resumed, batch, number)
        assert all(torch.equal(copy[key], value) for key, value in seen[number].items())


def test_a_bad_priority_is_raised_by_a_later_call(table: gear.Table) -> None:
    dataset = gear.ReplayDataset(
        table, batch_size=32, windows=gear.Window(4), selector=gear.Prioritized(), device="cuda"
    )
    batch = dataset.sample()
    priorities = torch.ones(32, device="cuda")
    priorities[3] = torch.nan
    dataset.update_priority(batch["index"], priorities)
    torch.cuda.synchronize()
    with pytest.raises(PriorityError, match=r"priority\[3\] of an earlier update_priority"):
        dataset.sample()
    dataset.sample()


@pytest.mark.parametrize(
    "selector",
    [gear.Uniform(), gear.Prioritized(unit="step"), gear.Prioritized(replacement=False), gear.TopK()],
    ids=repr,
)
def test_sample_info_is_that_of_the_cpu(table: gear.Table, selector: gear.selectors.Selector) -> None:
    """Where it is asked for, the host draws and the GPU gathers."""
    info: dict[str, list[Any]] = {}
    for device in ("cpu", "cuda"):
        table.region.array("sampled")[:] = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* is drawn on the host")
            dataset = gear.ReplayDataset(
                table,
                batch_size=64,
                windows=gear.Window(8),
                selector=selector,
                device=device,
                sample_info=True,
                copy=True,
                batches_per_epoch=5,
            )
            info[device] = list(dataset)
    for one, other in zip(info["cuda"], info["cpu"], strict=True):
        for key, values in other["sample_info"].items():
            assert one["sample_info"][key].is_cuda
            if key != "age_seconds":
                assert torch.equal(one["sample_info"][key].cpu(), values), key
        assert torch.equal(one["index"].cpu(), other["index"])
        assert torch.equal(one["value"].cpu(), other["value"])


def test_trajectories_that_share_blocks(table: gear.Table) -> None:
    writer = table.writer(chunk_steps=48, overlap_steps=32)
    dataset = gear.ReplayDataset(
        table, batch_size=64, windows=gear.Window(1), selector=gear.Prioritized(unit="step"), device="cuda"
    )
    for number in range(1000, 1030):
        steps = np.arange(13)
        writer.append(
            {
                "value": np.full((13, *table.schema["value"].shape), number, np.float32),
                "step": (number * 1000 + steps).astype(np.int64),
            }
        )
        batch = dataset.sample()
        assert torch.equal((batch["step"][:, 0] // 1000).float(), batch["value"][:, 0].flatten(1)[:, 0])
        dataset.update_priority(batch, torch.rand(64, device="cuda"))
    table.check_valid()


def test_shared_steps_are_updated_whichever_trajectory_names_them(table: gear.Table) -> None:
    """The CPU's priorities and counts, while a writer goes on between the draw and the update."""
    writer = table.writer(chunk_steps=48, overlap_steps=32)
    datasets = [
        gear.ReplayDataset(
            table,
            batch_size=64,
            windows=gear.Window(1),
            selector=gear.Prioritized(1.0, unit="step"),
            device=device,
        )
        for device in ("cuda", "cpu")
    ]
    random = np.random.default_rng(3)

    def write(number: int) -> None:
        steps = int(random.integers(1, 20))
        writer.append({"value": np.full((steps, 6), number, np.float32), "step": np.arange(steps)})

    for number in range(30):
        write(number)
        for dataset in datasets:
            dataset.sample()
        slots, lengths = table.indices(), table.lengths()
        chosen = random.integers(len(slots) // 2, len(slots), 64)
        names = [
            torch.from_numpy(part)
            for part in (
                slots[chosen],
                table.reader().slot_states()[1][slots[chosen]],
                random.integers(0, lengths[chosen]),
            )
        ]
        write(number)
        priority = torch.from_numpy(random.random(64).astype(np.float32))
        for dataset in datasets:
            index, generation, anchor, values = (part.to(dataset.device) for part in (*names, priority))
            dataset.update_priority(index, values, generation=generation, anchor=anchor)
        assert datasets[0].num_stale == datasets[1].num_stale
        shares = [0.0, 0.25, 0.5, 1.0]
        assert datasets[0].priority_quantiles(shares) == datasets[1].priority_quantiles(shares)
    states = [dataset.state_dict()["priorities"] for dataset in datasets]
    assert torch.equal(states[0]["leaves"], states[1]["leaves"])
