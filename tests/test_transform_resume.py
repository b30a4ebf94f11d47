"""Random transforms with a state, resumed at each point of a short run: the rest is the same, byte for byte.

What delivers the batches is the parameter: a dataset, `sample`, workers of a loader, a mixture, ranks over Shards,
buffers of transitions and sequences, the stand-in for a GPU, and the data module for Lightning.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import on_host
from distributed_common import run_ranks
from streams.cuda import Cuda
from table_common import fresh_name
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader import transforms
from gear_loader.distributed import Shards

COUNT = 7  # batches of a run, of two epochs where there are epochs
EPOCH = 4
SCHEMA = {"image": gear.Column(torch.uint8, (1, 5, 6)), "speed": gear.Column(torch.float32, (2,))}


class Noise:
    """Adds a random number to a column, and counts its calls, also in evaluation."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        self.calls += 1
        batch["noise"] = self.calls + torch.rand(3, generator=generator)
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def noise(batch: Any, generator: torch.Generator) -> Any:
    """Without a state, so for workers too."""
    batch["noise"] = torch.rand(3, generator=generator)
    return batch


def moving(image: str = "image", speed: str = "speed") -> list[Any]:
    return [transforms.RandomShift(image, pad=2), transforms.Normalize(speed), Noise()]


def fill(table: gear.Table, lengths: range = range(3, 9)) -> gear.Table:
    random = np.random.default_rng(len(lengths))
    for length in lengths:
        image = random.integers(0, 256, (length, 1, 5, 6), dtype=np.uint8)
        table.add({"image": image, "speed": random.normal(5, 3, (length, 2)).astype(np.float32)})
    return table


def plain(name: str | None = None, **options: Any) -> gear.Table:
    return fill(gear.Table.create(SCHEMA, max_steps=200, max_trajectories=20, name=name), **options)


def dataset(table: Any, transform: Any = None, **options: Any) -> gear.ReplayDataset:
    transform = moving() if transform is None else transform
    options = {
        "batch_size": 4,
        "windows": gear.Window(2),
        "device": "cpu",
        "batches_per_epoch": EPOCH,
    } | options
    return gear.ReplayDataset(table, transform=transform, **options)


def epochs(of: Any) -> Iterator[Any]:
    for _ in range(3):  # the first may be the end of an epoch, with no batch left
        yield from of


def samples(of: Any) -> Iterator[Any]:
    while True:
        yield of.sample()


def turns(of: Any) -> Iterator[Any]:
    """Samples between the batches of an iteration."""
    batches = epochs(of)
    while True:
        yield of.sample()
        yield next(batches)


def of_dataset(table: gear.Table, **options: Any) -> Callable[[], Any]:
    return lambda: dataset(table, **options)


def of_mixture(table: gear.Table, prefetch: int = 2) -> Callable[[], Any]:
    def make() -> gear.Mixture:
        sources = {
            "even": (dataset(table, prefetch=prefetch, seed=1), 0.6),
            "old": (dataset(table, prefetch=0, sampler=gear.Prioritized(unit="step")), 0.4),
        }
        return gear.Mixture(sources, batch_size=5, batches_per_epoch=EPOCH, shares="expected")

    return make


def buffer(kind: type[gear.ReplayBuffer], device: Any = "cpu", **options: Any) -> gear.ReplayBuffer:
    """A buffer with the same steps every time."""
    names = [transforms.RandomShift("obs.image", pad=2), transforms.Normalize("obs.speed"), Noise()]
    made = kind(200, batch_size=4, device=device, transform=names, **options)
    random = np.random.default_rng(3)
    for step in range(60):
        image = random.integers(0, 256, (1, 5, 6), dtype=np.uint8)
        obs = {"image": image, "speed": random.normal(5, 3, 2).astype(np.float32)}
        made.add(obs, 0, 1.0, obs, step % 20 == 19, False)
    return made


def same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            same(one[name], other[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def taken(batches: Iterator[Any], count: int) -> list[Any]:
    """Copies on the host of the next batches."""
    return [on_host(batch) for batch in itertools.islice(batches, count)]


def check_resumes(make: Callable[[], Any], run: Callable[[Any], Iterator[Any]]) -> None:
    """Stop after each number of batches, and compare the rest with that of a run that went on."""
    expected = taken(run(make()), COUNT)
    assert len(expected) == COUNT
    for stop in range(COUNT):
        first = make()
        batches = run(first)
        taken(batches, stop)
        state = first.state_dict()
        del batches, first
        again = make()
        again.load_state_dict(state)
        for one, other in zip(taken(run(again), COUNT - stop), expected[stop:], strict=True):
            same(one, other)


KINDS: dict[str, tuple[Callable[[gear.Table], Callable[[], Any]], Callable[[Any], Iterator[Any]]]] = {
    "dataset": (of_dataset, epochs),
    "without prefetching": (lambda table: of_dataset(table, prefetch=0), epochs),
    "samples": (of_dataset, samples),
    "priorities": (lambda table: of_dataset(table, sampler=gear.Prioritized(unit="step")), epochs),
    "packed": (lambda table: lambda: dataset(table, [noise, Noise()], layout="packed"), epochs),
    "mixture": (of_mixture, epochs),
    "samples of a mixture": (of_mixture, samples),
    "transitions": (lambda table: lambda: buffer(gear.ReplayBuffer, n_step=3), samples),
    "sequences": (lambda table: lambda: buffer(gear.SequenceBuffer, length=5, burn_in=2), samples),
    "iterated sequences": (lambda table: lambda: buffer(gear.SequenceBuffer, length=5), epochs),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_the_same(kind: str) -> None:
    make, run = KINDS[kind]
    check_resumes(make(plain()), run)


@pytest.mark.parametrize("kind", ["dataset", "mixture"])
def test_samples_between_the_batches_of_an_iteration(kind: str) -> None:
    """The state of each transform is that after the last batch, of either."""
    table = plain()
    make = KINDS[kind][0](table)
    expected = taken(turns(make()), COUNT)
    for stop in range(0, COUNT, 2):
        first = make()
        batches = turns(first)
        taken(batches, stop)
        state = first.state_dict()
        again = make()
        again.load_state_dict(state)
        for one, other in zip(taken(turns(again), COUNT - stop), expected[stop:], strict=True):
            same(one, other)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_go_on_where_a_dataset_stopped(workers: int) -> None:
    """Transforms without a state that moves; batches of a resumed loader with workers, and those of its `Mixture`."""
    table = plain(fresh_name())
    still = [transforms.RandomShift("image", pad=2), noise]
    try:

        def data() -> gear.ReplayDataset:
            return dataset(table, still)

        def mixture() -> gear.Mixture:
            sources = {"a": (data(), 1.0), "b": (dataset(table, still, seed=2), 1.0)}
            return gear.Mixture(sources, batch_size=4, batches_per_epoch=EPOCH)

        for make in (data, mixture):
            expected = taken(epochs(make()), COUNT)
            for stop in (1, EPOCH - 1):
                first = make()
                batches = epochs(first)
                taken(batches, stop)
                again = make()
                again.load_state_dict(first.state_dict())
                loader: Any = DataLoader(again, batch_size=None, num_workers=workers)  # type: ignore[arg-type]
                found = taken(iter(loader), COUNT)
                for one, other in zip(found, expected[stop:EPOCH], strict=True):
                    same(one, other)
                del batches
    finally:
        table.unlink()


def of_rank(rank: int, world: int) -> list[list[Any]]:
    """Batches of this rank in a run, and in those that were resumed after each number of batches."""
    found = []
    table = plain(f"gear-resume-{os.getppid()}-{rank}", lengths=range(3, 9 - rank))
    with contextlib.closing(Shards(table, timeout=30)) as shards:
        table.unlink()  # those who have attached go on
        for stop in (None, *range(COUNT)):
            data = dataset(shards, prefetch=1)
            if stop is not None:
                batches = epochs(data)
                taken(batches, stop)
                state = data.state_dict()
                del batches
                data.close()
                data = dataset(shards, prefetch=1)
                data.load_state_dict(state)
            found.append(taken(epochs(data), COUNT - (stop or 0)))
            data.close()
    return found


@pytest.mark.long
def test_ranks_go_on() -> None:
    ranks = run_ranks(2, of_rank)
    assert not torch.equal(ranks[0][0][0]["noise"], ranks[1][0][0]["noise"])
    for whole, *resumed in ranks:
        for stop, rest in enumerate(resumed):
            for one, other in zip(rest, whole[stop:], strict=True):
                same(one, other)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
@pytest.mark.parametrize("kind", ["dataset", "transitions"])
def test_batches_of_a_gpu_go_on(kind: str) -> None:
    device = torch.device("cuda", 1)
    expected = taken(epochs(dataset(plain())), COUNT) if kind == "dataset" else []
    for stop in range(0, COUNT, 3):
        cuda = Cuda(stop, "random")
        with cuda.installed(), contextlib.ExitStack() as end:
            made = []
            for _ in range(2):
                if kind == "dataset":
                    table = plain()
                    end.callback(table.close)
                    made.append(dataset(table, device=device))
                else:
                    made.append(buffer(gear.ReplayBuffer, device))
                    end.callback(made[-1].table.close)
            first, again = made
            run = epochs if kind == "dataset" else samples
            batches = run(first)
            found = taken(batches, stop)
            again.load_state_dict(first.state_dict())
            rest = taken(batches, COUNT - stop)
            resumed = taken(run(again), COUNT - stop)
            for one, other in zip(resumed, rest, strict=True):
                same(one, other)
            for one, other in zip([*found, *rest], expected, strict=False):
                assert torch.equal(one["image"], other["image"])
                assert torch.equal(one["noise"], other["noise"])
            del first, again, made, batches
            gc.collect()
            cuda.threads.finish()
        cuda.check()


def test_the_data_module_goes_on() -> None:
    pytest.importorskip("lightning")
    table = plain()

    class Module:
        """What `check_resumes` calls, of a data module."""

        def __init__(self) -> None:
            self.module = gear.ReplayDataModule(
                table,
                batch_size=4,
                windows=gear.Window(2),
                device="cpu",
                batches_per_epoch=EPOCH,
                transform=moving(),
            )
            self.state_dict, self.load_state_dict = self.module.state_dict, self.module.load_state_dict

    def run(of: Module) -> Iterator[Any]:
        of.module.setup("fit")
        yield from epochs(of.module.train_dataloader())

    check_resumes(Module, run)
