"""Batches for a GPU under adversarial schedules: those of a CPU selection, whatever runs when; and known defects."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from cases import mostly_long
from defects import DEFECTS, put_back
from options_common import nested
from scenarios import Scenario, Shrinkable, cloned, compare, made_table, on_host
from shard_scenarios import ShardScenario
from streams.cuda import Cuda
from streams.graphs import building
from streams.machine import Policy

import gear_loader as gear
from gear_loader.collection import prefetch, ticket_releaser
from gear_loader.collection.packed_cuda import PackedCuda
from gear_loader.collection.padded_cuda import PaddedCuda
from gear_loader.dataset import replay_dataset
from gear_loader.errors import GpuError, TableClosedError
from gear_loader.selection import prioritized_cuda
from gear_loader.selection.prioritized_cuda import CudaPrioritizedSelection
from gear_loader.storage.operations.view import READING

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
POLICIES: tuple[Policy, ...] = ("random", "latest", "eager")
LAZY = POLICIES[:2]
"""Of the short tests: work that is done at once is in order, so that the others find what it finds."""
MODES = ("inference", "default device", "device", "capture", "captures elsewhere", "launches elsewhere")
FIRST = int(os.environ.get("GEAR_LOADER_FIRST_SEED", "0"))
"""The first seed of the tests below."""


def play(scenario: Shrinkable, seed: int, policy: Policy) -> BaseException | None:
    """The error of a run, or None."""
    try:
        scenario.play(seed, policy)
    except Exception as error:
        return error
    return None


def shrunk(scenario: Shrinkable, fails: Callable[[Shrinkable], bool]) -> Shrinkable:
    """The simplest scenario that still fails."""
    while True:
        simpler = next((each for each in scenario.simpler() if fails(each)), None)
        if simpler is None:
            return scenario
        scenario = simpler


def check_all(
    seeds: range, of: Callable[[int], Shrinkable], policies: tuple[Policy, ...] = POLICIES
) -> collections.Counter[str]:
    """Play the scenario of each seed by each policy; return the stand-in's counts."""
    counts = collections.Counter[str]()
    for seed, policy in itertools.product(seeds, policies):
        scenario = of(seed)
        try:
            counts += scenario.play(seed, policy).machine.counts
        except Exception as error:
            small = shrunk(scenario, lambda each: play(each, seed, policy) is not None)  # noqa: B023
            raise AssertionError(
                f"{small}, seed {seed}, policy {policy}: {play(small, seed, policy)}"
            ) from error
    return counts


class Case(NamedTuple):
    """Scenarios of one kind.

    Attributes:
        of: the scenario of a seed.
        short, long, most: numbers of seeds of the tests below.
        seen: what the scenarios are about, of the counts of the stand-in. least: how often, a seed.
    """

    of: Callable[[int], Shrinkable]
    short: int
    long: int
    most: int = 0
    seen: str = "launch"
    least: float = 0


def pinned_meanwhile(of: Callable[[int], Scenario]) -> Callable[[int], Scenario]:
    """Batches are gathered on the host, and read by the device afterwards, in the same iteration."""
    return lambda seed: dataclasses.replace(of(seed), pinning=True, pinned=True)


CASES = {
    "padded": Case(Scenario.of, 1, 32, 1000),
    # Rows of different lengths, budgets of steps, other dtypes; buffers that grow while batches are held.
    "packed": Case(Scenario.flat, 2, 32),
    "queued in one call": Case(Scenario.queued, 1, 24, seen="queued", least=3),
    "several queued in one call": Case(Scenario.queued_ahead, 1, 16, seen="ahead", least=8),
    "uniform rows that the device draws": Case(Scenario.drawn, 1, 24, seen="draw uniform", least=30),
    "packed, queued in one call": Case(Scenario.queued_packed, 1, 24, seen="queued", least=5),
    "draws by priority that are queued in one call": Case(
        Scenario.queued_draws, 1, 24, seen="queued", least=3
    ),
    "updates that are launched with the next draw": Case(Scenario.queued_draws, 0, 8, seen="joined", least=3),
    "groups": Case(Scenario.groups, 1, 8),
    "device memory": Case(Scenario.in_device_memory, 1, 32, seen="store", least=20),
    "device memory of another process": Case(Scenario.attached_to_device, 2, 24, seen="store", least=20),
    "device memory, disk tier": Case(Scenario.on_disk_below_device, 2, 32, seen="place", least=2),
    # Rows on disk are read into pinned memory, and placed, or gathered out of it; late columns are filled meanwhile.
    "disk tier": Case(Scenario.on_disk, 1, 24, seen="place", least=2),
    "steps of a disk tier": Case(
        lambda seed: dataclasses.replace(Scenario.on_disk(seed), sampler="prioritized steps"),
        1,
        8,
        0,
        "place",
    ),
    "packed, disk tier": Case(Scenario.flat_tier, 2, 32, seen="staged", least=5),
    # Rows of this node are read by the device, in memory and on disk, and those of others where they arrive.
    "shards": Case(ShardScenario.of, 1, 16, 400),
    "shards, disk tier": Case(
        lambda seed: dataclasses.replace(ShardScenario.of(seed), tier=True), 1, 24, seen="place", least=5
    ),
    "shards, packed": Case(ShardScenario.flat, 1, 32),
    "pinned meanwhile": Case(pinned_meanwhile(Scenario.of), 3, 16, 0, "both kinds", 0.5),
    "packed, pinned meanwhile": Case(pinned_meanwhile(Scenario.flat), 0, 16, 0, "both kinds", 0.5),
}


def check_case(name: str, seeds: range, policies: tuple[Policy, ...] = POLICIES) -> None:
    case = CASES[name]
    counts = check_all(seeds, case.of, policies)
    assert counts[case.seen] > case.least * len(seeds), f"{case.seen} only {counts[case.seen]} times"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.short])
def test_batches_are_those_of_the_cpu_in_any_order_of_work(name: str) -> None:
    check_case(name, range(FIRST, FIRST + CASES[name].short), LAZY)


def parts(name: str) -> list[Any]:
    """The seeds of the long tests of a case: those of the short test, or two, in CI, and eight at a time."""
    few = max(2, CASES[name].short)
    first = pytest.param(name, 0, few, marks=pytest.mark.long)
    marks = [pytest.mark.long, pytest.mark.exhaustive]
    return [first, *(pytest.param(name, at, 8, marks=marks) for at in range(few, CASES[name].long, 8))]


@pytest.mark.parametrize(("name", "at", "count"), [part for name in CASES for part in parts(name)])
def test_batches_are_those_of_the_cpu_in_hundreds_of_schedules(name: str, at: int, count: int) -> None:
    check_case(name, range(FIRST + at, FIRST + at + count))


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, case in CASES.items() for part in range(case.most // 50)]
)
def test_batches_are_those_of_the_cpu_in_thousands_of_schedules(name: str, part: int) -> None:
    check_case(name, range(FIRST + 1000 + 50 * part, FIRST + 1050 + 50 * part))


@pytest.mark.parametrize("mode", mostly_long(MODES, "capture", "device"))
def test_modes_of_torch_change_nothing(mode: str) -> None:
    check_all(range(FIRST, FIRST + 1), lambda seed: Scenario.of(seed, mode), LAZY)


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", range(3))
def test_modes_of_torch_change_nothing_in_dozens_of_schedules(mode: str, part: int) -> None:
    check_all(range(FIRST + 1000 + 15 * part, FIRST + 1015 + 15 * part), lambda seed: Scenario.of(seed, mode))


def in_child(*calls: Callable[[], object]) -> list[str]:
    """The errors of calls in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found = []
        for call in calls:
            try:
                found.append(f"no error: {call()}")
            except BaseException as error:
                found.append(f"{type(error).__name__}: {error}")
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        made: list[str] = json.load(pipe)
    os.waitpid(child, 0)
    return made


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_fork_between_two_batches(prefetch: int) -> None:
    """The child gets an error that says what to do, and touches no stream; the parent's batches go on."""
    cuda = Cuda(0, "latest")
    with cuda.installed(), made_table() as table:
        data = gear.ReplayDataset(
            table,
            batch_size=4,
            windows=gear.Window(2),
            device="cuda:1",
            prefetch=prefetch,
            batches_per_epoch=4,
        )
        batches = iter(data)
        kept = [cloned(dict(next(batches))), cloned(dict(next(batches)))]
        queued = sum(len(stream.queue) for stream in cuda.machine.streams)
        errors = in_child(batches.__next__, data.sample, lambda: table[0])
        assert "An iterator of process" in errors[0]
        assert all("fork" in error for error in errors)
        assert sum(len(stream.queue) for stream in cuda.machine.streams) == queued
        kept += [cloned(dict(batch)) for batch in batches]
        torch.cuda.synchronize("cuda:1")
        expected = gear.ReplayDataset(
            table,
            batch_size=4,
            windows=gear.Window(2),
            device="cpu",
            prefetch=gear.Prefetch(copy=True),
            batches_per_epoch=4,
        )
        for number, (batch, other) in enumerate(zip(kept, expected, strict=True)):
            compare(number, {name: on_host(value) for name, value in batch.items()}, other)
        del batches, data
        gc.collect()
    cuda.check()


@pytest.mark.parametrize("sampler", [gear.Uniform(), gear.Prioritized()])
def test_a_call_into_the_capture_of_its_own_stream_is_refused(sampler: Any) -> None:
    """Before anything is touched: the next one goes on, and no read ticket is left."""
    cuda = Cuda(0, "latest")
    options: dict[str, Any] = {"windows": gear.Window(2), "sampler": sampler, "batches_per_epoch": 9}

    def run(table: gear.Table) -> None:
        data = gear.ReplayDataset(table, **nested({"batch_size": 4, "device": "cuda:1", **options}))
        calls: list[Callable[[], object]] = [lambda: next(iter(data)), data.sample]
        for turn in range(2):
            stream: Any = torch.cuda.current_stream("cuda:1")
            with cuda.capturing(stream):
                for call in calls:
                    with pytest.raises(
                        GpuError, match=r"of cuda:1 is capturing a CUDA graph.* Call it before"
                    ):
                        call()
                assert not stream.captured
            batch = data.sample()
            if isinstance(sampler, gear.Prioritized) and turn == 0:
                calls += [functools.partial(data.update_priority, batch, torch.ones(4)), data.state_dict]
        assert len(list(data)) == 9

    with cuda.installed(), made_table() as table:
        run(table)
        gc.collect()
        torch.cuda.synchronize("cuda:1")
        cuda.threads.finish()
        assert not (table._engine.region.array("readers")[:, READING] > 0).any()
    cuda.check()


@pytest.mark.parametrize(
    ("sampler", "kind", "name"),
    [
        (gear.Uniform(), PaddedCuda, "_launch"),
        (gear.Uniform(), PackedCuda, "_queue"),
        (gear.Prioritized(), CudaPrioritizedSelection, "_launch_draw"),
        (gear.Prioritized(), CudaPrioritizedSelection, "_launch_update"),
    ],
    ids=["gather", "packed gather", "draw", "update"],
)
def test_a_table_closed_between_a_draw_and_its_launch_stays_until_it_is_read(
    sampler: Any, kind: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, launch = Cuda(0, "latest"), getattr(kind, name)

    def run(table: gear.Table) -> None:
        layout: Any = "packed" if kind is PackedCuda else "padded"
        data = gear.ReplayDataset(
            table,
            batch_size=4,
            windows=gear.Window(2),
            layout=layout,
            device="cuda:1",
            sampler=sampler,
            prefetch=0,
        )
        batch = data.sample()
        monkeypatch.setattr(kind, name, lambda *args, **options: (table.close(), launch(*args, **options)))
        if name == "_launch_update":
            data.update_priority(batch, torch.ones(4, device="cuda:1"))
        else:
            data.sample()
        monkeypatch.undo()
        assert not cuda.memory.registered  # and no longer than that
        with pytest.raises(TableClosedError):
            data.sample()

    with cuda.installed(), made_table() as table:
        run(table)
        gc.collect()
    cuda.check()


def test_an_interrupt_while_a_graph_is_built_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batches are gathered."""
    cuda, launch = Cuda(0, "latest"), PaddedCuda._launch

    def interrupted(self: PaddedCuda, *args: Any) -> None:
        if building():
            monkeypatch.setattr(PaddedCuda, "_launch", launch)
            raise KeyboardInterrupt
        launch(self, *args)

    with cuda.installed(), made_table() as table:
        options: dict[str, Any] = {"batch_size": 4, "windows": gear.Window(2), "anchor": "first"}
        options["sampler"] = gear.Lifo()
        data = gear.ReplayDataset(table, **nested({"device": "cuda:1", **options}))
        expected = gear.ReplayDataset(table, **nested({"device": "cpu", **options})).sample()
        monkeypatch.setattr(PaddedCuda, "_launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collections.deque((data.sample() for _ in range(10)), maxlen=0)
        for number in range(10):
            batch = {name: on_host(value) for name, value in data.sample().items()}
            compare(number, batch, expected)
        del data
        gc.collect()
    cuda.check()


# ---------------------------------------------------------------- what the stand-in finds


def first_found(
    name: str, of: Callable[[int], Shrinkable], policy: Policy, seeds: Iterable[int]
) -> int | None:
    """The first of these seeds whose run fails with a defect put back."""
    with put_back(name):
        return next((seed for seed in seeds if play(of(seed), seed, policy) is not None), None)


@pytest.mark.long
@pytest.mark.timeout(900)  # what fails is made simpler, which takes minutes on a busy machine
@pytest.mark.parametrize("name", mostly_long(DEFECTS, sample=4))
def test_a_defect_put_back_is_found(name: str) -> None:
    _, of, first = DEFECTS[name]
    assert first_found(name, of, "random", (*range(first, 100), *range(first))) is not None


@pytest.mark.long
def test_rows_of_a_disk_tier_read_too_early_are_found() -> None:
    """Pinned memory that the device still places rows out of is written by the host."""
    name = "the host writes pinned buffers that a copy still reads"

    def of(seed: int) -> Scenario:
        return dataclasses.replace(Scenario.on_disk(seed), pinned=True, batches=8)

    assert first_found(name, of, "latest", range(30)) is not None


@pytest.mark.parametrize(
    ("mode", "call"), [("capture", "allow_captures"), ("captures elsewhere", "beside_captures")]
)
def test_threads_that_may_disturb_a_capture_are_found(
    mode: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prefetch, ticket_releaser, prioritized_cuda, replay_dataset):
        monkeypatch.setattr(module, call, lambda *_: contextlib.nullcontext(), raising=False)
    errors = (play(Scenario.of(seed, mode), seed, "random") for seed in range(10))
    assert any("ended the capture of a graph" in str(error) for error in errors)


@pytest.mark.long
def test_a_failure_is_shrunk() -> None:
    name = "a batch is delivered without waiting for the stream that fills it"

    def fails(scenario: Shrinkable) -> bool:
        with put_back(name):
            return play(scenario, 0, "random") is not None

    scenario = Scenario("prioritized", prefetch=3, side=True, writes=20, batches=8, hold=1, updates="device")
    assert fails(scenario)
    small = shrunk(scenario, fails)
    assert fails(small)
    assert isinstance(small, Scenario)
    assert small.size < scenario.size
    assert small.batches == 1
    assert not small.writes
