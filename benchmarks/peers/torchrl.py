"""TorchRL's replay buffers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import batches, checkpoint, episodes, memory, online, select, transitions
from benchmarks.peers.select import ALPHA, BETA
from benchmarks.peers.source import Steps

PACKAGES = ("torchrl", "tensordict", "torch")
MODULES = ("torch",)


def load(task: str, threads: int) -> None:
    """Import it; for selection its C++ extension alone, which loads only beside the torch that it was built for."""
    global torch, tensordict, data
    import torch

    if task == "select":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchrl._torchrl  # noqa: F401
    else:
        import tensordict
        from torchrl import data


def tensors(values: Mapping[Any, Any], *size: int) -> Any:
    return tensordict.TensorDict(
        {n: torch.from_numpy(np.asarray(v)) for n, v in values.items()}, batch_size=size
    )


def buffer(rows: int, batch: int, **options: Any) -> Any:
    """An empty `TensorDictReplayBuffer` over `LazyTensorStorage`."""
    return data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(rows), batch_size=batch, **options)


class Selection(select.Subject):
    """Items and priorities as tensors."""

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        return drawn[0].numpy(), None if isinstance(drawn[1], dict) else np.asarray(drawn[1])

    def values(self, values: np.ndarray) -> Any:
        return torch.from_numpy(values)

    def chosen(self, items: np.ndarray) -> Any:
        return self.values(items), {}


class Tree(Selection):
    """Its C++ trees: sums (32-bit) to draw from and minima beside them, as its sampler keeps them."""

    def __init__(self, items: int, priorities: np.ndarray) -> None:
        from torchrl._torchrl import MinSegmentTreeFp32, SumSegmentTreeFp32

        self.items = items
        self._sums, self._mins = SumSegmentTreeFp32(items), MinSegmentTreeFp32(items)
        self._random = np.random.default_rng(select.SEED)
        self.set_all(priorities)

    def draw(self, batch: int) -> Any:
        mass = self._random.uniform(0.0, self._sums.query(0, self.items), batch)
        index = torch.as_tensor(self._sums.scan_lower_bound(mass)).clamp_max_(self.items - 1)
        return index, self._sums[index]

    def update(self, drawn: Any, values: Any) -> None:
        self._sums[drawn[0]] = values
        self._mins[drawn[0]] = values


class _Length:
    """A storage of so many items and nothing in them: all that the sampler asks about."""

    ndim = 1
    device = None

    def __init__(self, items: int) -> None:
        self._items, self.shape = items, (items,)

    def __len__(self) -> int:
        return self._items


class Sampler(Selection):
    """`PrioritizedSampler.sample` and `update_priority`, with importance weights, without a buffer around it."""

    power = ALPHA

    def __init__(self, items: int, priorities: np.ndarray) -> None:
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        self.items, self._storage = items, _Length(items)
        self._sampler = PrioritizedSampler(items, alpha=ALPHA, beta=BETA, eps=0.0)
        self.set_all(priorities)

    def draw(self, batch: int) -> Any:
        return self._sampler.sample(self._storage, batch)

    def update(self, drawn: Any, values: Any) -> None:
        self._sampler.update_priority(drawn[0], values)


class Batches(batches.Subject):
    """`TensorDictPrioritizedReplayBuffer` over `LazyTensorStorage`, a trajectory a row: `sample`.

    Without prefetching or with 2 batches ahead, whichever is faster; on the CPU there is nothing to pin batches for.
    """

    cost = 4
    settings = ({"prefetch": 0}, {"prefetch": 2})
    steps = False

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._storage = data.LazyTensorStorage(self.source.total if self.steps else len(self.source))
        filled = self._make(None, 1)
        for _, columns in source.stacked(batches.CHUNK):
            if self.steps:
                columns = {name: values.reshape(-1, *values.shape[2:]) for name, values in columns.items()}
            filled.extend(tensors(columns, len(columns[source.mark])))

    def _make(self, prefetch: int | None, batch: int) -> Any:
        made = data.TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=self._storage, batch_size=batch, prefetch=prefetch
        )
        if len(self._storage) == len(self.source):
            made.update_priority(torch.arange(len(self._storage)), torch.from_numpy(self.source.priorities))
        return made

    def use(self, setting: dict[str, Any]) -> None:
        super().use(setting)
        self.store = self._make(setting["prefetch"] or None, self.batch)

    def batches(self) -> Iterator[Any]:
        while True:
            yield self.store.sample()

    def rows(self, batch: Any) -> dict[str, np.ndarray]:
        shapes = self.source.columns.items()
        return {n: batch[n].numpy().reshape(-1, self.window, *shape) for n, shape in shapes}

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["priority_weight"].numpy())


class Slices(Batches):
    """`SliceSampler` over `LazyTensorStorage` of single steps, with its ends given and cached.

    A window lies within its trajectory, so there is none that begins before it, and nothing is padded. The marks of
    where slices begin and end, which the sampler can add to a batch, are left out: it is faster without. A batch is
    flat: windows one after another.
    """

    cost = 8
    workload = "W2"
    prioritized = False
    steps = True

    def _make(self, prefetch: int | None, batch: int) -> Any:
        ends = torch.arange(1, self.source.total + 1) % self.source.steps == 0
        options = {"strict_length": True, "truncated_key": None, "init_key": None}
        sampler = data.SliceSampler(slice_len=self.window, ends=ends, cache_values=True, **options)
        size = batch * self.window
        return data.TensorDictReplayBuffer(
            storage=self._storage, sampler=sampler, batch_size=size, prefetch=prefetch
        )


class Checkpoint(checkpoint.Subject):
    """`dumps` and `loads` of a `TensorDictReplayBuffer` over `LazyTensorStorage`, a row a trajectory.

    It writes memory-mapped files and does not wait for the disk; a save into the same folder writes everything again.
    """

    def open(self) -> None:
        self.store = buffer(len(self.source), checkpoint.UNIT)

    def add(self, first: int, rows: Steps) -> None:
        self.store.extend(tensors(rows, checkpoint.UNIT))

    def save(self) -> None:
        self.store.dumps(self.path("buffer"))

    def restore(self) -> None:
        self.open()
        self.store.loads(self.path("buffer"))

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for first in range(0, len(self.store), checkpoint.UNIT):
            found = self.store[first : first + checkpoint.UNIT]
            yield first, {name: found[name].numpy() for name in self.source.columns}


class Memory(memory.Subject):
    """Its documented way to draw windows: single steps in a `LazyTensorStorage`, for a `SliceSampler`.

    Where a trajectory ends is told by ("next", "done"), as its collectors do; `TensorDictReplayBuffer` adds an index.
    """

    def open(self) -> None:
        sampler = data.SliceSampler(num_slices=8, end_key=("next", "done"), strict_length=False)
        self.store = buffer(self.source.total, 64, sampler=sampler)

    def fill(self) -> None:
        for one in self.each():
            steps = len(one[self.source.mark])
            done = np.zeros((steps, 1), dtype=np.bool_)
            done[-1] = True
            self.store.extend(tensors({**one, ("next", "done"): done}, steps))

    def read(self, i: int) -> Mapping[str, Any]:
        begin = int(self.source.begins[i])
        found = self.store[begin : begin + int(self.source.lengths[i])]
        done = found["next", "done"].reshape(-1)
        if int(done.sum()) != 1 or not bool(done[-1]):
            raise ValueError(f"trajectory {i} does not end where it should")
        return dict(found.items())


class MemoryPadded(Memory):
    """A row a trajectory, padded by `tensordict.pad` to the longest; a mask says what exists."""

    def open(self) -> None:
        self.store = buffer(len(self.source), 8)

    def fill(self) -> None:
        for one in self.each():
            steps = len(one[self.source.mark])
            mask = np.ones(steps, dtype=np.bool_)
            row = tensordict.pad(tensors({**one, "mask": mask}, steps), [0, self.source.steps - steps])
            row.batch_size = []
            self.store.add(row)

    def read(self, i: int) -> Mapping[str, Any]:
        found = self.store[i]
        return {name: found[name][found["mask"]] for name in self.source.columns}


class Writer(online.Rows):
    """`TensorDictReplayBuffer` over `LazyTensorStorage`: `add` and `extend`."""

    def make(self, size: int, single: bool) -> None:
        self.store = buffer(size, 32)
        self.add, self.extend = self.store.add, self.store.extend

    def packed(self, values: Steps, *size: int) -> Any:
        return tensors(values, *size)

    def split(self, steps: Any) -> list[Any]:
        return [steps[t] for t in range(len(steps))]


class Loader(episodes.Loader):
    """`TensorDictReplayBuffer` over `LazyTensorStorage`; `SliceSampler` with its boundaries cached.

    It draws a trajectory, then a window that lies in it as a whole: there is no padding. Ends are found by ``end_key``,
    which its documentation prefers.
    """

    def open(self) -> None:
        torch.manual_seed(self.seed)
        steps = int(self.data.lengths.sum())
        done = np.zeros((steps, 1), dtype=np.bool_)
        done[self.data.begins + self.data.lengths - 1] = True
        options = {"end_key": "done", "truncated_key": None, "init_key": None}
        sampler = data.SliceSampler(slice_len=episodes.WINDOW, cache_values=True, **options)
        self.store = buffer(steps, self.batch * episodes.WINDOW, sampler=sampler)
        self.store.extend(tensors({**self.data.columns, "done": done}, steps))
        self._mask = torch.ones(self.batch, episodes.WINDOW, dtype=torch.bool)

    def next(self) -> Mapping[str, Any]:
        sample = self.store.sample()
        batch = {name: sample[name].unflatten(0, (self.batch, episodes.WINDOW)) for name in episodes.COLUMNS}
        return {**batch, "mask": self._mask}


class Transitions(transitions.Subject):
    """`TensorDictReplayBuffer` and `TensorDictPrioritizedReplayBuffer` over `LazyTensorStorage`, without prefetching or
    with 2 batches ahead; or a plain `ReplayBuffer`, which adds no index to a batch. Names are flat, which is faster
    than ("next", "obs").
    """

    settings = ({"prefetch": 0}, {"prefetch": 2}, {"prefetch": 0, "kind": "ReplayBuffer"})

    def open(self) -> None:
        storage = data.LazyTensorStorage(self.data.steps)
        options: dict[str, Any] = {"storage": storage, "batch_size": self.batch}
        options["prefetch"] = self.setting["prefetch"] or None
        if self.prioritized:
            self.store = data.TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, eps=0.0, **options)
        else:
            self.store = getattr(data, self.setting.get("kind", "TensorDictReplayBuffer"))(**options)

    def fill(self) -> None:
        self.store.extend(tensors(self.data.columns(), self.data.steps))
        if self.prioritized:
            self.store.update_priority(
                torch.arange(self.data.steps), torch.from_numpy(self.data.priorities.copy())
            )

    def sample(self) -> Any:
        return self.store.sample()

    def values(self, values: np.ndarray) -> Any:
        return torch.from_numpy(values)

    def update(self, batch: Any, values: Any) -> None:
        self.store.update_priority(batch["index"], values)

    def found(self, batch: Any) -> Mapping[str, Any]:
        return {name: batch[name].numpy() for name in transitions.COLUMNS}

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["priority_weight"].numpy())

    def calls(self, steps: np.ndarray, ends: np.ndarray) -> Iterator[Any]:
        for row in steps:
            values = tensors(self.data.columns(row), self.envs)
            yield values if self.envs > 1 else values[0]

    def append(self, call: Any) -> None:
        if self.envs > 1:
            self.store.extend(call)
        else:
            self.store.add(call)


KINDS: dict[str, dict[str, Any]] = {
    "transitions": {"TorchRL": Transitions},
    "batches": {"TorchRL": Batches, "TorchRL, slices": Slices},
    "select": {"TorchRL tree": Tree, "TorchRL sampler": Sampler},
    "online": {"TorchRL": Writer},
    "checkpoint": {"TorchRL": Checkpoint},
    "memory": {"TorchRL": Memory, "TorchRL, padded": MemoryPadded},
    "train": {"TorchRL": Loader},
}
