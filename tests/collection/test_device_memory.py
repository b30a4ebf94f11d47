"""Tables whose blocks lie in the memory of a GPU, on the stand-in: conformance, random programs, bytes, refusals."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from batch_conformance import BatchConformance, Made
from cases import amounts, mostly_long
from dataset_common import on_host
from source_conformance import SCHEMA, TRAJECTORIES, SourceConformance
from streams.cuda import Cuda
from streams.machine import Policy
from test_batches_of_sources import SIZES, of_table
from tier_common import move, move_out, spill, tier_at
from tier_common import promote as move_back

import gear_loader as gear
from gear_loader.checkpoint import loading, spilling
from gear_loader.collection import packed_cuda, tier_rows
from gear_loader.collection.padded_cuda import PaddedCuda
from gear_loader.errors import PrivateTableError, RegionError, SchemaError, StaleIndexError, TableFullError
from gear_loader.graph.table_rows import TableRows
from gear_loader.storage import device_memory
from gear_loader.storage.schema import Schema

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
DEVICE = torch.device("cuda", 1)
POLICIES: tuple[Policy, ...] = ("random", "latest", "eager")
STEPS: Any = (("obs", (3,), np.float32), ("wide", (80,), np.int16), ("reward", (), np.float64))


@contextlib.contextmanager
def stand_in(policy: Policy = "random", seed: int = 0) -> Iterator[Cuda]:
    cuda = Cuda(seed, policy)
    with cuda.installed():
        yield cuda
    cuda.check()


def on_gpu(**options: Any) -> gear.Table:
    memory = gear.Memory(packed=options.pop("packed", "auto"), max_blocks=options.pop("max_blocks", None))
    return gear.Table.create(SCHEMA, **{**SIZES, "memory": memory, "device": DEVICE, **options})


class TestSource(SourceConformance):
    """What the host reads from it; three blocks at a time."""

    def make(self, trajectories: list[dict[str, Any]], stack: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(device_memory, "STAGING_BYTES", 12_000)
        stack.enter_context(stand_in())
        table = stack.enter_context(on_gpu())
        slots = table.extend(trajectories)
        source = table._engine.tier_reader()
        source.schema = Schema(SCHEMA)  # type: ignore[attr-defined]
        return source, slots


class TestSourceWithDisk(TestSource):
    """Half of it lies on disk."""

    def make(self, trajectories: list[dict[str, Any]], stack: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(device_memory, "STAGING_BYTES", 12_000)
        stack.enter_context(stand_in())
        table = stack.enter_context(on_gpu(max_blocks=100, **tier_at(self.path)))
        slots = table.extend(trajectories)
        table.save(self.path)
        assert spill(table, slots[::2]) == len(slots[::2])
        source, generation = table._engine.tier_reader(), table._engine.index.arrays.generation
        source.schema = Schema(SCHEMA)  # type: ignore[attr-defined]
        read = source.read
        patch.setattr(
            source, "read", lambda slots, _, *given, **more: read(slots, generation[slots], *given, **more)
        )
        return source, slots


class TestSourceWithHost(TestSource):
    """Half of it lies in host memory."""

    def make(self, trajectories: list[dict[str, Any]], stack: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(device_memory, "STAGING_BYTES", 12_000)
        stack.enter_context(stand_in())
        table = stack.enter_context(on_gpu(max_blocks=400, host="1MiB"))
        slots = table.extend(trajectories)
        assert move_out(table, slots[::2]) == len(slots[::2])
        source = table._engine.tier_reader()
        source.schema = Schema(SCHEMA)  # type: ignore[attr-defined]
        return source, slots


class TestTable(BatchConformance):
    @pytest.fixture(params=mostly_long(("gpu", "cpu", "staged"), "gpu", sample=2))
    def mover(self, request: Any) -> Iterator[str]:
        with stand_in("latest"):
            yield request.param

    @pytest.fixture
    def stack(self, mover: str) -> Iterator[contextlib.ExitStack]:
        with contextlib.ExitStack() as stack:  # closes the table on the stand-in
            yield stack

    def make(self, stack: contextlib.ExitStack, *, packed: bool) -> Made:
        return of_table(stack.enter_context(on_gpu(packed=packed)), stack)


class TestTableWithHost(TestTable):
    """Half of the rows lie in host memory."""

    def make(self, stack: contextlib.ExitStack, *, packed: bool) -> Made:
        table = stack.enter_context(on_gpu(packed=packed, max_blocks=400, host="1MiB"))
        made = of_table(table, stack)
        assert move_out(table, [0, 2, 4, 6]) == 4
        return made


# ---------------------------------------------------------------- random programs


def trajectory(number: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    length = int(random.choice([1, 2, 5, 16, 17, 40]))
    found = {name: value for name, value in TRAJECTORIES[4].items() if name == "task"}
    found["obs"] = random.random((length, 3), dtype=np.float32)
    found["wide"] = random.integers(-99, 99, (length, 80), dtype=np.int16)
    found["reward"] = np.full(length, number, dtype=np.float64)
    found["task"] = np.array([number, length], dtype=np.int32)
    return found


class Program:
    """Random calls of a table on a GPU, and what it must hold: slot and generation -> trajectory.

    Args:
        tiered: whether it has memory for a third of its steps, and the others are moved to a disk by its thread.
        hosted: whether others move to a part of host memory, for all of them or a part.
    """

    def __init__(self, seed: int, path: Path, *, tiered: bool = False, hosted: bool = False) -> None:
        self.choose, self.path, self.number, self.tiered = random.Random(seed), path, 0, tiered
        size, more = self.choose.choice([3, 4, 16]), dict[str, Any]()
        if tiered:
            keep: Any = self.choose.choice(["newest", "oldest", "priority"])
            disk = gear.Disk(path / "tier", sync_seconds=1e6, size="1GiB", keep=keep)
            more = {"disk": disk, "max_blocks": 3 * -(-40 // size) + 2}
        if hosted:
            host = self.choose.choice([30_000, 60_000, 500_000])
            more |= {"host": host, "max_blocks": 2 * -(-40 // size) + 2}
        self.table = on_gpu(
            block_steps=size,
            packed=self.choose.choice([True, False]),
            max_steps=400,
            on_full=self.choose.choice(["evict_oldest", "evict_lowest_priority", "error"]),
            **more,
        )
        self.known: dict[tuple[int, int], dict[str, Any]] = {}
        windows: dict[str, Any] = {
            "obs": gear.Window(3, -1),
            "wide": gear.Window(2, 0, pad="edge"),
            "task": None,
            "reward": gear.Window(1, squeeze=True),
        }
        packed = {"windows": gear.Whole(), "layout": "packed"}
        samplers = [gear.Uniform(), gear.Uniform(unit="step"), gear.Prioritized(0.7), gear.TopK()]
        if hosted:
            samplers.append(gear.Prioritized(0.7, unit="step"))
        self.data = [
            gear.ReplayDataset(self.table, batch_size=7, sampler=sampler, device=device, **options)
            for device in ("cpu", DEVICE)
            for sampler in samplers
            for options in ({"windows": windows}, packed)
            if "windows" not in options or sampler.unit == "trajectory" or options is not packed
        ]

    def generation(self, slot: int) -> int:
        return int(self.table._engine.index.arrays.generation[slot])

    def run(self, calls: int) -> None:
        actions = [self.add, self.add, self.extend, self.sample, self.sample, self.look, self.remove]
        for _ in range(calls):
            self.choose.choice(actions + [self.move] * self.tiered)()
        self.save()
        self.table.check_valid()
        stats = self.table.stats()
        self.moved, self.spilled = stats.host_part_bytes, stats.num_spilled
        found = [self.table[slot] for slot in self.table.indices().tolist()]
        self.table.close()
        if self.tiered:
            self.recover(found)

    def move(self) -> None:
        move(self.table, np.random.default_rng(self.choose.randrange(1 << 30)))

    def recover(self, expected: list[dict[str, torch.Tensor]]) -> None:
        with_host = {"host": "1MiB", "max_blocks": 40}
        kinds: list[tuple[Any, Any, dict[str, Any]]] = [
            (DEVICE, "1GiB", {}),
            (None, "1GiB", {}),
            (DEVICE, None, {}),
        ]
        kinds += [(DEVICE, "1GiB", {"host": 60_000}), (DEVICE, None, with_host)]
        for device, size, more in kinds:
            disk = gear.Disk(self.path / "tier", size=size)
            with gear.Table.recover(disk, device=device, **more) as table:
                assert table._engine.device == device
                assert len(table) == len(expected)
                for slot, values in zip(table.indices().tolist(), expected, strict=True):
                    assert all(torch.equal(values[name], found) for name, found in table[slot].items())
                table.check_valid()

    def add(self) -> None:
        self.number += 1
        with contextlib.suppress(TableFullError):
            slot = self.table.add(trajectory(self.number), priority=self.number % 5)
            self.known[slot, self.generation(slot)] = trajectory(self.number)

    def extend(self) -> None:
        numbers = range(self.number + 1, self.number + self.choose.choice([2, 5]))
        self.number = numbers[-1]
        with contextlib.suppress(TableFullError):
            for slot, number in zip(
                self.table.extend(map(trajectory, numbers)).tolist(), numbers, strict=True
            ):
                self.known[slot, self.generation(slot)] = trajectory(number)

    def remove(self) -> None:
        if len(self.table) > 3:
            self.table.remove(self.choose.choice(self.table.indices().tolist()))

    def look(self) -> None:
        for slot in self.table.indices().tolist():
            expected = self.known[slot, self.generation(slot)]
            for name, values in self.table[slot].items():
                assert np.array_equal(values.numpy(), expected[name]), name

    def sample(self) -> None:
        if not len(self.table):
            return
        data = self.choose.choice(self.data)
        batch = data.sample()
        if data.sampler.by_priority and self.choose.random() < 0.5:
            data.update_priority(batch, batch["index"].float() % 3 + 1)
        batch = on_host(batch)
        names = zip(batch["index"].tolist(), batch["generation"].tolist(), strict=True)
        held = [self.known[name] for name in names]
        rows = [oracle.Row(i, int(batch["anchor"][i])) for i in range(len(held))]
        packed = "cu_seqlens" in batch
        expected = oracle.batch(SCHEMA, held, rows, data.windows, layout="packed" if packed else "padded")
        for name, mask in expected.pop("masks", {}).items():
            assert np.array_equal(batch["mask"][name], mask), name
        for name, values in expected.items():
            assert np.array_equal(np.asarray(batch[name]), values), name

    def save(self) -> None:
        if not len(self.table):
            return
        self.table.save(self.path / "saved")
        self.remove()
        self.extend()
        self.table.save(self.path / "saved")  # a second round, of what is new
        with_host = {"host": "1MiB", "max_blocks": 12}
        for device, more in ((None, {}), (DEVICE, {}), (DEVICE, with_host)):
            with gear.Table.load(self.path / "saved", device=device, block_steps=5, **more) as loaded:
                assert loaded._engine.device == device
                assert len(loaded) == len(self.table)
                stats = loaded.stats()
                assert (stats.host_part_bytes > 0) == (bool(more) and stats.blocks_in_use > 12)
                for one, other in zip(loaded.indices().tolist(), self.table.indices().tolist(), strict=True):
                    for name, values in self.table[other].items():
                        assert torch.equal(loaded[one][name], values)
                loaded.check_valid()


@pytest.mark.parametrize("policy", mostly_long(POLICIES, "random"))
@pytest.mark.parametrize("seeds", amounts(range(1), range(1, 3), range(3, 12)))
def test_random_programs(
    seeds: range, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        monkeypatch.setattr(device_memory, "STAGING_BYTES", (20_000, 4_000)[seed % 2])
        monkeypatch.setattr(loading, "IMAGE_BYTES", 50_000)
        with stand_in(policy, seed):
            Program(seed, tmp_path / str(seed)).run(25)


def test_steps_that_are_shared_on_disk_are_apart_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "IMAGE_BYTES", 2_000)
    columns = {"token": gear.Column(torch.int64), "once": gear.Column(torch.int16, (2,), per="trajectory")}
    sizes: dict[str, Any] = {"max_steps": 500, "max_trajectories": 20, "block_steps": 4}
    with gear.Table.create(columns, memory=gear.Memory(max_blocks=60, prefixes=True), **sizes) as table:
        for group in range(3):
            steps = {"token": np.arange(30) + 100 * group, "once": np.full(2, group, np.int16)}
            first = table.add(steps)
            rest = {name: values[:3] for name, values in steps.items()}
            table.extend(
                [rest | {"once": np.full(2, i, np.int16)} for i in range(4)], prefix=first, prefix_steps=26
            )
        table.remove(table.indices()[0])
        table.save(tmp_path)
        with stand_in(), gear.Table.load(tmp_path, device=DEVICE) as loaded:
            assert loaded.stats().blocks_in_use > 60
            for one, other in zip(loaded.indices().tolist(), table.indices().tolist(), strict=True):
                for name, values in table[other].items():
                    assert torch.equal(loaded[one][name], values)
            loaded.check_valid()


@pytest.mark.parametrize("policy", mostly_long(POLICIES, "random"))
@pytest.mark.parametrize("seeds", amounts(range(1), range(1, 3), range(3, 12)))
def test_random_programs_with_host_memory_below(
    seeds: range, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        monkeypatch.setattr(device_memory, "STAGING_BYTES", (20_000, 4_000)[seed % 2])
        with stand_in(policy, seed):
            program = Program(seed, tmp_path / str(seed), hosted=True)
            program.run(40)
            assert program.moved > 0


@pytest.mark.parametrize("policy", mostly_long(POLICIES, "random"))
@pytest.mark.parametrize("seeds", amounts(range(1), range(1, 3), range(3, 12)))
def test_random_programs_with_a_disk_below(
    seeds: range, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        monkeypatch.setattr(device_memory, "STAGING_BYTES", (20_000, 4_000)[seed % 2])
        with stand_in(policy, seed) as cuda, cuda.disks_in_turn():
            Program(seed, tmp_path / str(seed), tiered=True).run(40)


def check_that_batches_follow(prefetch: int | None = None) -> None:
    """`prefetch`: of an iteration; None for `sample`."""
    with stand_in("latest") as cuda, on_gpu(on_full="evict_oldest", max_steps=60) as table:
        options: dict[str, Any] = {"windows": {"reward": gear.Window(1)}, "batch_size": 9, "device": DEVICE}
        data = gear.ReplayDataset(table, **options, prefetch=prefetch or 0, batches_per_epoch=12)
        table.add(trajectory(99))
        batches = iter(data)
        for number in range(12):
            slot = table.add(trajectory(number))
            batch = data.sample() if prefetch is None else next(batches)
            held = batch["index"].cpu() == slot
            assert (batch["reward"].cpu()[held] == number).all()
        assert cuda.machine.counts["event.synchronize"] < 100


def test_batches_follow_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nobody waits for; the check finds that they do not."""
    check_that_batches_follow()
    check_that_batches_follow(prefetch=0)
    monkeypatch.setattr(device_memory.DeviceMemory, "follow", lambda *_: None)
    with pytest.raises(AssertionError):
        check_that_batches_follow()


def test_a_draw_on_the_gpu_follows_what_an_update_takes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the begin of a batch and its draw, in another thread."""
    with stand_in("latest") as cuda, on_gpu() as table:
        cuda.threads.frequency = 0.0
        data = gear.ReplayDataset(
            table,
            batch_size=9,
            device=DEVICE,
            windows={"reward": gear.Window(1)},
            sampler=gear.Prioritized(1.0),
        )
        table.add(trajectory(1))
        data.sample()
        torch.cuda.synchronize()
        begin = PaddedCuda.begin

        def begin_and_add(*given: Any) -> None:
            monkeypatch.undo()
            begin(*given)
            slot = table.add(trajectory(7), priority=1e12)
            generation = table._engine.index.arrays.generation[[slot]].copy()
            data.update_priority([slot], [1e12], generation=generation)

        monkeypatch.setattr(PaddedCuda, "begin", begin_and_add)
        assert (data.sample()["reward"] == 7).all()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_batches_follow_what_comes_back_from_the_disk(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the begin of a batch and the look-up of its rows, in another thread."""
    with stand_in("latest") as cuda, on_gpu(max_blocks=100, **tier_at(tmp_path)) as table:
        cuda.threads.frequency = 0.0
        window = gear.Window(1) if layout == "padded" else gear.Whole()
        options: dict[str, Any] = {"windows": {"reward": window}, "batch_size": 9, "layout": layout}
        data = gear.ReplayDataset(table, device=DEVICE, prefetch=0, **options)
        slot = table.add(trajectory(7))
        for _ in range(3):  # so that its work is recorded, and replayed
            data.sample()
        table.save(tmp_path)
        assert spill(table, [slot]) == 1
        torch.cuda.synchronize()
        read, come_back = tier_rows.split_rows, []

        def come_back_and_split(*given: Any, **options: Any) -> Any:
            come_back.append(table._engine.load_from_disk(np.array([slot])))
            return read(*given, **options)

        for module in (tier_rows, packed_cuda):
            monkeypatch.setattr(module, "split_rows", come_back_and_split)
        assert (data.sample()["reward"] == 7).all()
        assert come_back == [1]
        assert table.stats().num_spilled == 0


def test_rows_of_a_disk_below_are_counted(tmp_path: Path) -> None:
    """As of a table in host memory."""
    with stand_in("eager"):
        counts = []
        for device in (None, DEVICE):
            path = tmp_path / str(device)
            with on_gpu(max_blocks=100, device=device, **tier_at(path)) as table:
                slots = [table.add(trajectory(number)) for number in range(1, 7)]
                table.save(path)
                spill(table, slots[::2])
                for layout in ("padded", "packed"):
                    for on in ("cpu", DEVICE):
                        windows = {"reward": gear.Window(2), "task": None}
                        given: dict[str, Any] = {"windows": windows, "layout": layout, "prefetch": 0}
                        data = gear.ReplayDataset(table, batch_size=20, device=on, seed=4, **given)
                        on_host(data.sample())
                stats = table.stats()
                counts.append((stats.num_hits, stats.num_misses, stats.miss_bytes))
        assert counts[0] == counts[1]
        assert counts[0][0] + counts[0][1] == 80


def test_without_memory_for_copies_a_table_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trajectories stay where they are, and nothing else changes."""

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with stand_in() as cuda, cuda.disks_in_turn(), on_gpu(max_blocks=100, **tier_at(tmp_path)) as table:
        slot = table.add(trajectory(7))
        table.save(tmp_path)
        spill(table, [slot])
        memory = table._engine.region.device_memory
        assert memory is not None
        memory._spare.clear()
        with monkeypatch.context() as patch:
            patch.setattr(device_memory, "_StagedBlocks", no_memory)
            message = r"Values are copied to and from cuda:1 through .* there, and it has .* free"
            for call in (lambda: table.add(trajectory(8)), lambda: move_back(table, slot)):
                with pytest.raises(RegionError, match=message):
                    call()
        table.check_valid()
        assert len(table) == table.stats().num_spilled == 1
        move_back(table, slot)
        assert (table[slot]["reward"] == 7).all()
        assert table.stats().num_spilled == 0


def test_an_error_of_the_gpu_does_not_end_the_thread_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    with stand_in() as cuda, cuda.disks_in_turn(), on_gpu(max_blocks=100, **tier_at(tmp_path)) as table:

        def error() -> str | None:
            for _ in range(5):
                cuda.threads.switch()
            stats = table.stats().disk
            assert stats is not None
            return stats.error

        with monkeypatch.context() as patch:
            patch.setattr(spilling.Spiller, "is_due", lambda self: True)
            patch.setattr(spilling.Spiller, "move", fail)
            assert "stay where they are: CUDA error" in str(error())
        assert error() is None


def test_batches_by_priority_for_another_gpu_are_drawn_by_the_host() -> None:
    with stand_in("latest"), on_gpu() as table:
        for number in range(3):
            table.add(trajectory(number))
        assert table.pin(DEVICE)
        assert not table.pin("cuda:0")
        windows = {"reward": gear.Window(1), "task": None}
        data = gear.ReplayDataset(
            table, batch_size=9, device="cuda:0", windows=windows, sampler=gear.Prioritized(1.0)
        )
        batch = data.sample()
        assert batch["reward"].device == torch.device("cuda", 0)
        assert torch.equal(batch["reward"].cpu().flatten(), batch["task"][:, 0].cpu().double())


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_groups_are_formed_of_what_lies_there(device: Any) -> None:
    schema = {"value": gear.Column(torch.int64), "prompt": gear.Column(torch.int64, per="trajectory")}
    with stand_in(), gear.Table.create(schema, **SIZES, device=DEVICE) as table:
        for number in range(12):
            table.add({"value": np.full(3, number), "prompt": number // 2})
        options: dict[str, Any] = {"groups": gear.Groups("prompt", 2), "device": device}
        windows = {"value": gear.Window(1, squeeze=True), "prompt": None}
        batch = gear.ReplayDataset(table, batch_size=6, windows=windows, **options).sample()
        assert batch["prompt"].tolist() == (batch["value"] // 2).tolist()
        assert (batch["prompt"].view(3, 2) == batch["prompt"].view(3, 2)[:, :1]).all()
        assert all(len(set(pair)) == 2 for pair in batch["value"].view(3, 2).tolist())


# ---------------------------------------------------------------- bytes, and what is refused


def test_nothing_is_stored_twice() -> None:
    """All bytes of the device are blocks and two pieces of staging memory; the host has the index alone."""
    with stand_in(), on_gpu(max_steps=20_000, max_blocks=20_000 // 16) as table:
        layout, memory = table._engine.region.layout, table._engine.region.device_memory
        assert memory is not None
        step = 384 + 16 * 160 + 128  # 16 records of 12 + 8 bytes, the wide column, and that of the trajectory
        assert layout.block_bytes == step
        assert memory.num_bytes == 1250 * step
        assert memory._memory.nbytes == memory.num_bytes
        region = table._engine.region.bytes
        assert region is not None
        assert len(region) == layout.index_bytes < 0.05 * memory.num_bytes
        for each in TRAJECTORIES:
            table.add(each)
        assert [len(each.host) for each in memory._spare] == [memory.staging_bytes] * 2
        stats = table.stats()
        assert stats.reserved_bytes == layout.index_bytes + memory.num_bytes
    sizes = {"max_steps": 10**6, "max_trajectories": 1000, "block_steps": 16, "device": DEVICE}
    with stand_in(), gear.Table.create(SCHEMA, **sizes, memory="1MiB") as table:
        assert 2**20 - step < table._engine.region.layout.device_bytes <= 2**20


def test_a_column_of_a_record_crosses_the_bus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint reads column by column."""
    select, moved = torch.index_select, list[int]()

    def counted(*given: Any, out: torch.Tensor) -> Any:
        moved.append(out.numel())
        return select(*given, out=out)

    with stand_in(), on_gpu(packed=True) as table:
        slot = table.add(
            {**TRAJECTORIES[0], **{name: np.zeros((16, *shape), dtype) for name, shape, dtype in STEPS}}
        )
        monkeypatch.setattr(torch, "index_select", counted)
        source, one = table._engine.tier_reader(), np.ones(1, dtype=np.int64)
        for name, each in (("obs", 12), ("reward", 8), ("wide", 160)):
            given = np.array([slot]), one, 0 * one, 16 * one, {name: (np.empty(4096, np.uint8), 0 * one)}
            source.read(*given)
            assert moved.pop() == 16 * each
        source.read(np.array([slot]), one, 0 * one, one, {"task": (np.empty(8, np.uint8), 0 * one)})
        assert moved == [8]


def test_what_a_table_on_a_gpu_refuses() -> None:
    with pytest.raises(
        SchemaError, match="device is 'cuda', but torch sees no CUDA device; use device='cpu'"
    ):
        gear.Table.create(SCHEMA, **SIZES, device="cuda")
    with gear.Table.create(SCHEMA, **SIZES, device="cpu") as table:
        assert table._engine.device is None
    late = {**SCHEMA, "late": gear.Column(torch.float32, late=True)}
    mutable = {**SCHEMA, "state": gear.Column(torch.float32, mutable=True)}
    version = {**SCHEMA, "version": gear.Column(torch.int64, per="trajectory")}
    with stand_in():
        for schema, options, expected in (
            (late, {}, r"late columns: \['late'\]"),
            (
                {"text": gear.Column(str)},
                {"memory": gear.Memory(payload="1MiB")},
                r"ragged columns: \['text'\]",
            ),
            (mutable, {}, r"mutable columns: \['state'\]"),
            (version, {"limits": gear.Limits(version="version")}, r"Limits\(version=\): 'version'"),
        ):
            with pytest.raises(SchemaError, match=expected):
                gear.Table.create(schema, **SIZES, **options, device=DEVICE)
        with on_gpu() as table:
            for call, expected in (
                (
                    lambda: table.writer(),
                    r"writer\(\) was called .*memory of cuda:1; expected writers\(n, device='cuda:1'",
                ),
                (lambda: table.writers(2), r"writers\(device=None\) was called"),
                (lambda: table.writers(2, device="cuda:0"), r"writers\(device='cuda:0'\) was called"),
            ):
                with pytest.raises(SchemaError, match=expected):
                    call()
            with pytest.raises(PrivateTableError):
                table.serve()
            with pytest.raises(SchemaError, match="expected a table in host memory, of which other nodes"):
                gear.distributed.Shards([table])
            with pytest.raises(SchemaError, match="expected a table in host memory, which a GPU reads too"):
                TableRows(table, ["obs"])
            with pytest.raises(StaleIndexError):
                table[0]
            assert "of cuda:1" in repr(table)
        full = pytest.raises(RegionError, match=r"The blocks of the table take .* and cuda:1 has .* free")
        with pytest.MonkeyPatch.context() as patch, full:
            patch.setattr(torch, "zeros", _no_memory)
            on_gpu()


def _no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
