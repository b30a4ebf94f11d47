"""The kernels as Triton compiled them for sm_90, executed, against their twins and by their own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
import aot_common
import numpy as np
import torch
from cases import mostly_long
from emulation import launch
from emulation.machine import Counts, Machine
from emulation.memory import InvalidAccessError, Memory, RaceError
from emulation.ptx import parse
from emulation.timing import NANOSECONDS, ROUND_TRIPS, Latencies
from gather_common import Outputs, Spec, Store, check_gather
from packed_common import PackedBatch
from records_common import CARTPOLE, HOPPER, Records

from benchmarks.experiments import predict
from gear_loader.kernels import cast, gather, items, place, split
from gear_loader.kernels.cast_plan import CAST_DTYPES, CastColumn, CastPlan
from gear_loader.kernels.packed_plan import PackedPlan
from gear_loader.kernels.plan import LINES, GatherPlan
from gear_loader.kernels.priority import DRAW
from gear_loader.kernels.priority_reference import draw, update
from gear_loader.kernels.split_plan import SplitPlan
from gear_loader.kernels.sum_tree import SumTree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
KERNELS = [
    "tests/kernels/test_gather.py",
    "tests/kernels/test_place.py",
    "tests/kernels/test_split.py",
    "tests/kernels/test_store.py",
    "tests/kernels/test_append.py",
    "tests/kernels/test_packed_kernel.py",
    "tests/kernels/test_priority_kernels.py",
    "tests/kernels/test_neighbors.py",
    "tests/kernels/test_uniform.py",
]
DEVICE = ["tests/selection/test_device_priorities.py"]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gathers of 16-byte words and places run on the emulator."""

    def find(name: str) -> Machine | None:
        if not name.startswith(aot_common.SAMPLE):
            return None
        return launch.machine(name, aot_common.INSTALLED, aot_common.SAMPLE)

    launch.LAUNCHES.clear()
    with monkeypatch.context() as patch:
        for module, name in ((gather, "gather_kernel"), (place, "place_kernel")):
            patch.setattr(module, name, launch.EmulatedKernel(name, getattr(module, name), find))
        patch.setattr(GatherPlan, "__init__", _remembering(GatherPlan.__init__))
        yield


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        launch.PLANS.add(self)

    return remember


@pytest.mark.parametrize("cases", mostly_long([[0, 5], [1, 2, 3, 4]], [0, 5]))
def test_gathers_are_those_of_the_naive_account(emulated: None, cases: list[int]) -> None:
    for case in cases:
        random = np.random.default_rng(case)
        sizes = (16 * random.integers(1, 12, 2)).tolist()
        block_steps = int(random.integers(1, 40)) if case < 3 else 16 * int(random.integers(1, 3))
        store = Store(sizes, random.integers(1, 80, 5).tolist(), block_steps, seed=case)
        specs = [
            Spec(size, int(random.integers(1, 24)), int(random.integers(-40, 40)), pad=case % 4)
            for size in sizes
        ]
        slots, anchors = store.draw(5, case)
        check_gather(gather.gather, store, specs, slots, anchors, compact=case % 2 == 0)
    assert launch.LAUNCHES["gather_16_128"] + launch.LAUNCHES["gather_16_256"] == len(cases)
    assert launch.LAUNCHES["gather_16_256"] >= 1


def test_a_gather_from_an_invalid_slot_is_found(emulated: None) -> None:
    store = Store([16], [20, 30], 8)
    plan = Outputs([Spec(16, 4)], 2).plan(store)
    slots = torch.tensor([1, 1 << 40])
    with pytest.raises(InvalidAccessError, match=r"(is|are) in no buffer"):
        gather.gather(plan, slots, torch.tensor([3, 3]), store.extent, store.block_ids)


def test_draws_are_those_of_the_twin() -> None:
    tree = SumTree(1000)
    update(tree, torch.arange(1000), torch.rand(1000, generator=torch.Generator().manual_seed(0)))
    runner = launch.machine("priority_draw", aot_common.INSTALLED, aot_common.SAMPLE)
    for seed in range(4):
        random, rows = torch.tensor([seed - 2, 7]), 20
        found, expected = [(torch.full((rows,), -9), torch.full((rows,), torch.nan)) for _ in range(2)]
        inputs = (tree.leaves, tree.sums, tree.levels, tree.status)
        blocks = -(-rows // int(DRAW["ROWS"]))
        launch.launch(runner, "priority_draw", blocks, (random, *inputs, *found, rows, tree.depth))
        draw(tree, random, *expected)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("name", ["split", "split_rows", "split_counted"])
def test_records_are_split_as_by_the_twin(name: str) -> None:
    """The number of rows is an argument, or lies in memory."""
    chosen, counted = name == "split_rows", name == "split_counted"
    runner = launch.machine(name, aot_common.INSTALLED, aot_common.SAMPLE)

    def run(plan: SplitPlan, count: int, *, rows: Any = None, programs: int | None = None) -> None:
        memory = Memory()
        for column in plan.columns:
            memory.add_tensor(column.records, "records")
            memory.add_tensor(column.out, "an output")
        number = torch.tensor([count])
        given = (plan.device_table, plan.device_table if rows is None else rows, number)
        tiles = plan.tiles(count, split.LAUNCH["TILE"])
        count, tiles = (9999, 9999) if counted else (count, tiles)
        launch.launch(runner, name, 2, (*given, len(plan.columns), count, tiles), memory)

    Records(32, 7, CARTPOLE, 40, 33, chosen=chosen).run(run)
    Records(64, 20, HOPPER, 40, 33, chosen=chosen, shift=4).run(run)


def run_packed(plan: PackedPlan, work: torch.Tensor, *, programs: int | None = None) -> Counts:
    """A packed gather on the emulator."""
    memory = Memory()
    for column in plan.columns:
        assert column.source is not None
        memory.add_tensor(column.source, "a source", host=True)
        memory.add_tensor(column.out, "an output")
    runner = launch.machine("packed", aot_common.INSTALLED, aot_common.SAMPLE)
    return launch.launch(
        runner, "packed", programs or 2, (work, work.view(torch.int32), plan.position), memory
    )


@pytest.mark.long
def test_packed_batches_are_those_of_the_naive_account() -> None:
    """All words in one launch, columns per trajectory, rows of one step and of none, in one program and in several."""
    store = Store([4, 1, 48, 400], [63, 500, 1, 7, 129], 32)
    batch = PackedBatch(store, [1, 2, 0, 4, 3, 2, 1], once=[4, 16, 3])
    for programs in (1, 3):
        batch.run(run_packed, programs)
    PackedBatch(store, [0, 1, 3], anchors=[70, 5, 2], window=(-2, 9), shift=3).run(run_packed)


# Bytes of a step, lengths of rows; the least share of what is read that is wanted, and most instructions for 4 KiB.
@pytest.mark.parametrize(
    ("sizes", "block_steps", "least", "most"),
    [
        ([1024], 32, 0.99, 600),
        ([4], 128, 0.9, 1600),
        pytest.param([4] * 8, 128, 0.9, 1300, marks=pytest.mark.long),
        pytest.param([1], 128, 0.9, 6000, marks=pytest.mark.long),
        pytest.param([44], 32, 0.9, 1000, marks=pytest.mark.long),
        pytest.param([16], 128, 0.9, 900, marks=pytest.mark.long),
        pytest.param([128], 128, 0.99, 600, marks=pytest.mark.long),
    ],
    ids=lambda value: "+".join(map(str, value)) if isinstance(value, list) else None,
)
def test_what_a_packed_gather_reads_over_the_bus(
    sizes: list, block_steps: int, least: float, most: float
) -> None:
    """Whole lines; what is read beside the steps are the ends of rows, and of blocks that hold no whole line."""
    lengths = [600, 100, 900, 2000, 410] if sum(sizes) < 1000 else [60, 10, 90, 200, 41]
    if sizes == [1]:
        lengths = [10 * length for length in lengths]
    batch = PackedBatch(Store(sizes, lengths, block_steps, finals=False), range(5))
    counts = run_packed(batch.plan, batch.work, programs=1)
    useful = batch.total * sum(sizes)
    assert set(counts.host_requests) == {128}
    assert useful / counts.host_bytes >= least
    each = sum(counts.instructions.values()) / counts.host_bytes * 4096
    print(
        f"steps of {sizes}: {each:.0f} instructions of warps for 4 KiB, {useful / counts.host_bytes:.3f} useful"
    )
    assert each <= most


@pytest.mark.parametrize(
    "kind",
    [
        ("uint8", "bfloat16", "float32"),
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in (
                ("uint8", "float32", "float32"),
                ("float32", "bfloat16", ""),
                ("float32", "float16", ""),
                ("bfloat16", "float32", "bfloat16"),
                ("float64", "bfloat16", "float64"),
                ("int64", "float32", ""),
                ("int32", "bool", ""),
            )
        ),
    ],
    ids="-".join,
)
def test_casts_are_those_of_torch(kind: tuple[str, str, str]) -> None:
    """To the bit, but for NaN: random bits, a full tile and a part of one."""
    given, target, product = kind
    dtypes = {name: dtype for dtype, name in CAST_DTYPES.items()}
    bits = torch.from_numpy(np.random.default_rng(5).integers(0, 256, 3000 * 8, dtype=np.uint8))
    source = bits.view(dtypes[given])[:3000].clone()
    column = CastColumn(source, torch.zeros(3000, dtype=dtypes[target]), 1 / 255 if product else None)
    plan = CastPlan([column])
    memory = Memory()
    memory.add_tensor(column.source, "values")
    memory.add_tensor(column.out, "an output")
    name = f"cast_{given}_{target}{'_scaled' * bool(product)}"
    kernels = aot_common.SAMPLE if kind[:2] == ("uint8", "bfloat16") else ()
    ((_, table, device_table),) = plan.launches
    numbers = 1, 2990, plan.tiles(table, 2990, cast.LAUNCH["TILE"])
    runs = [(name, (device_table, device_table, *numbers))]
    if kernels:  # the number of rows lies in memory
        runs.append((f"{name}_counted", (device_table, torch.tensor([2990]), 1, 9999, 9999)))
    values = source[:2990] * column.scale if column.scale else source[:2990]
    expected = torch.zeros_like(column.out)
    expected[:2990] = values.to(column.out.dtype)
    for variant, arguments in runs:
        column.out.zero_()
        launch.launch(launch.machine(variant, aot_common.INSTALLED, kernels), variant, 2, arguments, memory)
        found, right = column.out, expected
        if right.dtype.is_floating_point:
            assert torch.equal(found.isnan(), right.isnan())
            right, found = right.nan_to_num(0.0), found.nan_to_num(0.0)
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8))


# The last is what 44, 12, 4 and 4 bytes take in a packed table.
@pytest.mark.parametrize(("step_bytes", "length", "least"), [(128, 20, 0.95), (16, 24, 0.7), (64, 20, 0.9)])
def test_what_a_gather_reads_over_the_bus(step_bytes: int, length: int, least: float) -> None:
    """Whole lines are read, by requests of 128 bytes, and most of what is read is wanted."""
    counts, useful, _ = measure(step_bytes, length)
    assert set(counts.host_requests) == {128}
    assert useful / counts.host_bytes >= least


EVERY = [
    pytest.param(16, aot_common.INSTALLED, aot_common.SAMPLE, id="sample"),
    *(
        pytest.param(word, version, (), id=f"{word}-{version}", marks=pytest.mark.long)
        for word in (16, 4, 1)
        for version in aot_common.VERSIONS
    ),
]


@pytest.mark.parametrize(("word", "version", "kernels"), EVERY)
def test_lines_of_the_next_tile_are_requested_before_a_tile_is_stored(
    word: int, version: str, kernels: tuple[str, ...]
) -> None:
    step_bytes, batch = ({16: 128, 4: 132, 1: 129}[word], 320)
    counts, _, tiles = measure(step_bytes, 20, batch, word=word, version=version, kernels=kernels)
    requested = counts.host_bytes_at_stores
    assert min(requested) > RING - (
        RING >> 3
    )  # the whole ring before the first store, but for lines outside windows
    # It grows from tile to tile, and all has been requested before the last tile but one is stored.
    assert tiles // 2 < len(set(requested)) < tiles


RING = 128 << 10
"""Bytes that a program has in flight."""


@pytest.mark.parametrize("defect", ["cp.async.wait_group", "barrier"])
def test_a_wait_that_is_missing_is_found(defect: str) -> None:
    """Copies land as late as the waits allow, so a tile that is stored without them, or by others' waits, is found."""
    name = "gather_16_256"
    report = aot_common.reports((aot_common.INSTALLED, launch.ARCH, aot_common.SAMPLE))[name]
    measure(128, 20, 16, runner=Machine(parse(report["ptx"]), report["shared"]))
    waits = list(re.finditer(r"cp\.async\.wait_group\s+(\d+);", report["ptx"]))
    assert waits
    first = next(wait for wait in waits if int(wait[1]) > 0)
    if defect == "barrier":  # between the wait and what reads the tile
        at = report["ptx"].index("bar.sync", first.end())
        broken = report["ptx"][:at] + "// " + report["ptx"][at:]
    else:
        left = f"cp.async.wait_group {int(first[1]) + 2};"
        broken = report["ptx"][: first.start()] + left + report["ptx"][first.end() :]
    with pytest.raises(RaceError):
        measure(128, 20, 16, runner=Machine(parse(broken), report["shared"]))


@pytest.mark.long
def test_a_tile_waits_for_memory_once_at_most() -> None:
    """The loads that lead to a tile's lines are issued while tiles before it are on their way."""
    assert a_tile(ROUND_TRIPS) <= 1


@pytest.mark.long
def test_the_time_of_a_tile_is_that_of_the_model() -> None:
    """What `benchmarks predict` takes a tile to cost."""
    expected = predict.a_tile(predict.BUSES["Gen5"], 16, 256, walk=0.0)
    assert a_tile(NANOSECONDS) / 1e9 == pytest.approx(expected, rel=0.1)


def a_tile(latencies: Latencies) -> float:
    """Time from tile to tile of one program."""
    (few, _, tiles), (many, _, more) = (measure(128, 20, batch, latencies=latencies) for batch in (256, 640))
    return (many.time - few.time) / (more - tiles)


def measure(
    step_bytes: int,
    length: int,
    batch: int = 64,
    *,
    word: int = 16,
    version: str = aot_common.INSTALLED,
    kernels: tuple[str, ...] = aot_common.SAMPLE,
    latencies: Latencies | None = None,
    runner: Machine | None = None,
) -> tuple[Counts, int, int]:
    """What a gather of one column counts, in one program, the bytes it delivers, and its tiles."""
    store = Store([step_bytes], [100] * max(8, batch // 4), 32, finals=False)
    slots, anchors = store.draw(batch)
    anchors = anchors.clamp(min=length)
    outputs = Outputs([Spec(step_bytes, length, 1 - length, mask=False)], batch)
    plan, memory = outputs.plan(store), Memory()
    for column in plan.columns:
        memory.add_tensor(column.source, "a source", host=True)
        memory.add_tensor(column.out, "an output")
    ((found, table, device_table),) = plan.launches
    assert found == word
    options = gather.launch_options(word, plan.unit_of(word))
    _, _, tiles, _ = plan.tiles(table, batch, options["TILE"], gather.ENTRIES)
    name = f"gather_{word}_{plan.unit_of(word)}"
    runner = launch.machine(name, version, kernels) if runner is None else runner
    inputs = (device_table, slots, anchors, store.extent, store.block_ids, slots)
    numbers = (1, 0, int(table[0, LINES]), batch, tiles, store.block_steps)
    arguments = (*inputs, *numbers, *gather.reciprocal(store.block_steps))
    counts = launch.launch(runner, name, 1, arguments, memory, latencies)
    return counts, batch * length * step_bytes, tiles


class Launches:
    """Stands for a kernel: runs it in the interpreter, then as compiled, and compares an output."""

    def __init__(self, kernel: Any, name: str, version: str, output: int, memory: Memory) -> None:
        self.kernel, self.name, self.version, self.output, self.memory = kernel, name, version, output, memory

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **constants: Any) -> None:
            self.kernel[grid](*arguments, **constants)
            output = arguments[self.output]
            expected = output.clone()
            output.fill_(-9)
            launch.launch(launch.machine(self.name, self.version), self.name, grid[0], arguments, self.memory)
            assert torch.equal(output, expected)

        return run


@pytest.mark.long
@pytest.mark.parametrize("version", aot_common.VERSIONS)
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("checked", [False, True])
def test_items_of_rows(steps: bool, checked: bool, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All variants of `locate`, with slots, steps and generations that are valid and that are not."""
    store = Store([4], [20, 33, 7, 50], 8, finals=False)
    slots, anchors = store.draw(90)
    slots[::7], slots[3::11], anchors[5::13] = -1, 4, 1000
    memory, generations = Memory(), torch.tensor([3, 5, 1 << 33, 9])
    for tensor in (generations, store.extent, store.block_ids):
        memory.add_tensor(tensor, "the index", host=True)
    number = torch.full((store.num_blocks,), 0, dtype=torch.int32)
    owner, position = torch.full_like(number, -1), torch.full((store.num_blocks,), -1)
    first = torch.arange(4) * 100
    for slot, (length, begin, _) in enumerate(store.extent.tolist()):
        for i in range(-(-length // 8)):
            block = int(store.block_ids[begin + i])
            owner[block], number[block], position[block] = slot, i, first[slot] + i
    lengths = store.extent[:, 0].to(torch.int32)
    index = items.IndexAddresses(
        torch.tensor([each.data_ptr() for each in (generations, store.extent, store.block_ids)]),
        len(store.block_ids),
        8,
        generations.to(torch.int32) + torch.tensor([0, 0, 1, 0], dtype=torch.int32),
        items.Blocks(owner, number, position, first, lengths) if steps else None,
    )
    name = f"items_locate{'_steps' * steps}{'_generations' * checked}"
    kernel = Launches(items.locate_kernel, name, version, 11, memory)
    monkeypatch.setattr(items, "locate_kernel", kernel)
    found = torch.full((90,), -9)
    chosen = generations[slots.clamp(0, 3)] if checked else None
    items.locate(SumTree(1000), index, slots, found, anchor=anchors if steps else None, generation=chosen)
    assert 0 < (found >= 0).sum() < 90


@pytest.mark.long
@pytest.mark.parametrize("version", aot_common.VERSIONS)
def test_weights_by_the_table(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, weights = SumTree(3000), torch.full((1100,), torch.nan)
    update(tree, torch.arange(3000), 0.1 + torch.rand(3000, generator=torch.Generator().manual_seed(1)))
    runner = launch.machine("items_weigh_table", version)

    class Emulated:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **_: launch.launch(runner, "items_weigh_table", grid[0], arguments)

    monkeypatch.setattr(items, "weigh_kernel", Emulated())
    items.weigh(tree, tree.leaves[:1100], weights, beta=torch.tensor([0.4]), table=True)
    least = float(tree.leaves[:3000].min())
    expected = (least / tree.leaves[:1100].double()) ** float(np.float32(0.4))
    assert torch.allclose(weights.double(), expected, rtol=2.4e-7, atol=0)


NOT_BY_TESTS = ("items_locate", "items_weigh_table", "gather_16_256", "split_counted")
"""Variants that have tests of their own above."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("tests", "version"),
    [
        pytest.param(
            tests,
            version,
            id=f"{name}-{version}",
            # In CI each of them with one version.
            marks=() if (version == aot_common.INSTALLED) == (tests is KERNELS) else pytest.mark.exhaustive,
        )
        for name, tests in (("kernels", KERNELS), ("selection", DEVICE))
        for version in aot_common.VERSIONS
    ],
)
def test_the_tests_of_the_kernels_pass_on_compiled_code(tests: list[str], version: str) -> None:
    # The short tests of selection draw with some of the variants; the long ones, a second each, with the others.
    marks = "not exhaustive" if tests == DEVICE else "not long"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", marks, "--timeout=900"]
    done = subprocess.run(
        [*command, "--emulated", version, *tests],
        cwd=ROOT,
        env={**os.environ, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    if "could not be fetched" in done.stdout:
        pytest.skip(f"Triton {version} could not be fetched")
    assert done.returncode == 0, done.stdout[-4000:]
    ran = set(re.findall(r"(\w+) \d+(?:,|$)", done.stdout.split("Emulated launches: ")[1].splitlines()[0]))
    prefix = (
        "items" if tests == DEVICE else ("gather", "packed", "place", "priority", "split", "store", "uniform")
    )
    names = {name for name in aot_common.reports((version, launch.ARCH, ())) if name.startswith(prefix)}
    assert {name for name in names - ran if not name.startswith(NOT_BY_TESTS)} == set(), (
        "code that no test ran"
    )
