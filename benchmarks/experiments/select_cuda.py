"""``python -m benchmarks select --device cuda``: selection by priority where the training is.

=========================== ==================================================================================
ours, graph                 the yardstick: `priority.draw` and `priority.update` on a `SumTree`, captured many times
                            over in one CUDA graph, between CUDA events: what the GPU needs
ours, eager                 the same, launched one after another: what the host needs is in it
ours, dataset               `ReplayDataset.sample` and `update_priority` with everything that belongs to them
torch.multinomial           eager; refuses more than 2**24 items
cumsum, graph / eager       running sums over all items at each draw, and a search in them
=========================== ==================================================================================

The counter of the random numbers lies on the GPU and is counted up by an addition in place, within the graph too. The
eager ones are timed by the clock between two moments at which the GPU is idle, over hundreds of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.engine import CudaEngine, Engine, Launch
from benchmarks.experiments.select_subjects import (
    DATASET_MOST,
    MULTINOMIAL_MOST,
    CumsumTorch,
    DatasetSubject,
    Kind,
    Multinomial,
    Truth,
)
from benchmarks.harness import Incorrect
from benchmarks.peers.select import ALPHA, Subject, weighed
from gear_loader.kernels import priority
from gear_loader.kernels.sum_tree import BAD_POSITION, EMPTY_DRAWS, NOWHERE, SumTree

YARDSTICK = "ours, graph"
LIMITS = {1024: 40e-6}
"""Seconds of a cycle, by batch."""
_SEED = 17


def kinds(engine: Engine | None = None, launches: int = 64) -> list[Kind]:
    """The variants on a GPU."""
    engine = CudaEngine() if engine is None else engine
    device = engine.device

    def graph(made: Callable[[Truth], _Queued]) -> Callable[[Truth], Subject]:
        return lambda truth: Graph(engine, made(truth), launches)

    return [  # memory of the host: what they are built from
        Kind(YARDSTICK, graph(lambda truth: DeviceTree(truth, engine)), 8, ours=True, limit=LIMITS),
        Kind("ours, eager", lambda truth: DeviceTree(truth, engine), 8, ours=True, limit=LIMITS),
        Kind(
            "ours, dataset", lambda truth: DatasetSubject(truth, str(device)), 700, ours=True, **DATASET_MOST
        ),
        Kind("torch.multinomial", lambda truth: Multinomial(truth, device), 8, **MULTINOMIAL_MOST),
        Kind("cumsum, graph", graph(lambda truth: DeviceCumsum(truth, engine)), 8),
        Kind("cumsum, eager", lambda truth: DeviceCumsum(truth, engine), 8),
    ]


class _Queued(Subject):
    """A way of selecting that only queues work on the device, so that it can be captured."""

    engine: Engine

    def finish(self) -> None:
        self.engine.synchronize()

    def values(self, values: np.ndarray) -> Any:
        return torch.from_numpy(values).to(self.engine.device)

    def chosen(self, items: np.ndarray) -> Any:
        return torch.from_numpy(items).to(self.engine.device), None

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        self.finish()
        return drawn[0].cpu().numpy().copy(), drawn[1].cpu().numpy().copy()

    def leaves(self, items: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def verify(self) -> None:
        """Raise `Incorrect` if something went wrong on the device."""


class DeviceTree(_Queued):
    """`priority.draw` and `priority.update`, which raises to alpha, on a `SumTree`."""

    power = ALPHA

    def __init__(self, truth: Truth, engine: Engine) -> None:
        self.items, self.engine = truth.items, engine
        self._tree = SumTree(truth.items, engine.device)
        self._tree.leaves[: truth.items] = torch.from_numpy(truth.priorities).to(engine.device).pow(ALPHA)
        priority.build(self._tree)
        self._random = torch.tensor([_SEED, 0], device=engine.device)
        self._step = self._random[1:]
        self._drawn: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def draw(self, batch: int) -> Any:
        if batch not in self._drawn:
            device = self.engine.device
            self._drawn[batch] = (
                torch.empty(batch, dtype=torch.int64, device=device),
                torch.empty(batch, dtype=torch.float32, device=device),
            )
        self._step.add_(1)
        drawn = self._drawn[batch]
        priority.draw(self._tree, self._random, *drawn)
        return drawn

    def update(self, drawn: Any, values: Any) -> None:
        priority.update(self._tree, drawn[0], values, alpha=ALPHA)

    def leaves(self, items: torch.Tensor) -> torch.Tensor:
        return self._tree.leaves[items]

    def verify(self) -> None:
        status = self._tree.status.tolist()
        if status[BAD_POSITION] != NOWHERE or status[EMPTY_DRAWS]:
            raise Incorrect(f"the tree's status is {status}")


class DeviceCumsum(CumsumTorch, _Queued):
    """`CumsumTorch` on the device."""

    def __init__(self, truth: Truth, engine: Engine) -> None:
        self.engine = engine
        super().__init__(truth, engine.device)

    def finish(self) -> None:
        self.engine.synchronize()

    def leaves(self, items: torch.Tensor) -> torch.Tensor:
        return self._leaves[items]


class Graph(Subject):
    """Many operations of a subject as one graph; before each replay all get new priorities, and updates new items.

    Checks by frequency draw eagerly; those of the graph are made when it is captured, once for each operation and
    batch.
    """

    def __init__(self, engine: Engine, subject: _Queued, launches: int) -> None:
        self._engine, self._subject, self._launches = engine, subject, launches
        self.items, self.power = subject.items, subject.power
        for name in ("draw", "update", "found", "values", "chosen", "finish"):
            setattr(self, name, getattr(subject, name))
        self._random = np.random.default_rng(_SEED)
        # Only the last one: a graph keeps its memory.
        self._key: tuple[str, int] | None = None
        self._replay: Launch | None = None
        self._values = self._chosen = torch.empty(0)
        self._last: Any = None

    def measure(self, operation: str, batch: int, batches: int) -> float:
        """Seconds for so many operations, from replays of the graph between events."""
        if self._key != (operation, batch):
            self._capture(operation, batch)
            self._verify(operation, batch)
        assert self._replay is not None
        seconds, replays = 0.0, -(-batches // self._launches)
        for _ in range(replays):
            self._refresh()
            self._engine.synchronize()
            seconds += self._engine.timed(self._replay)
        return seconds / (replays * self._launches) * batches

    def _capture(self, operation: str, batch: int) -> None:
        self._key = self._replay = None
        device, shape = self._engine.device, (self._launches, batch)
        self._values = torch.empty(shape, dtype=torch.float32, device=device)
        self._chosen = torch.empty(shape, dtype=torch.int64, device=device)
        self._refresh()
        self._replay = self._engine.queue([self._launch(operation, batch, i) for i in range(self._launches)])
        self._key = (operation, batch)

    def _launch(self, operation: str, batch: int, i: int) -> Launch:
        values, chosen = self._values[i], self._chosen[i]

        def launch() -> None:
            self._last = (chosen, None) if operation == "update" else self._subject.draw(batch)
            if operation != "draw":
                self._subject.update(self._last, values)

        return launch

    def _refresh(self) -> None:
        self._values.uniform_().neg_().add_(1)  # in (0, 1]
        self._chosen.random_(0, self.items)

    def _verify(self, operation: str, batch: int) -> None:
        """Replay twice and see that the last operation did what it should, differently each time."""
        assert self._replay is not None
        drawn = []
        for _ in range(2):
            self._refresh()
            self._replay()
            self._engine.synchronize()
            self._subject.verify()
            items = self._last[0].cpu().numpy().copy()
            drawn.append(items)
            if ((items < 0) | (items >= self.items)).any():
                raise Incorrect(f"the graph of {operation} drew items that do not exist")
            leaves = self._subject.leaves(self._last[0]).cpu().numpy()
            if operation == "draw":
                if not np.array_equal(leaves, self._last[1].cpu().numpy()):
                    raise Incorrect("the graph drew weights that are not those of its items")
                continue
            values = weighed(self._values[-1].cpu().numpy(), self.power)
            # Where an item comes several times, any of its values may have won (ours promises the last one, which
            # the tests of the kernel look at).
            unique, counts = np.unique(items, return_counts=True)
            once = np.isin(items, unique[counts == 1])
            if not np.allclose(leaves[once], values[once], rtol=1e-5):
                raise Incorrect(f"after the graph of {operation} items do not weigh what they were given")
        if batch >= 8 and self.items > batch and np.array_equal(*drawn):
            raise Incorrect(f"the graph of {operation} draws the same items at each replay")
