"""``python -m benchmarks select --device cuda``: selection by priority where the training is.

The yardstick is `priority.draw` and `priority.update` on a `SumTree`, captured many times over in one CUDA graph,
between CUDA events: what the GPU needs. The eager ones launch them one after another, so what the host needs is in it:
they are timed by the clock between two moments at which the GPU is idle, over hundreds of operations. The counter of
the random numbers lies on the GPU and is counted up by an addition in place, within the graph too.
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
    OnDevice,
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

    def tree(truth: Truth) -> DeviceTree:
        return DeviceTree(truth, engine)

    def cumsum(truth: Truth) -> CumsumTorch:
        return CumsumTorch(truth, device)

    def graph(made: Callable[[Truth], Any]) -> Callable[[Truth], Subject]:
        return lambda truth: Graph(engine, made(truth), launches)

    mine: dict[str, Any] = {"ours": True, "limit": LIMITS}
    return [  # memory of the host: what they are built from
        Kind(YARDSTICK, graph(tree), 8, **mine),
        Kind("ours, eager", tree, 8, **mine),
        Kind(
            "ours, dataset", lambda truth: DatasetSubject(truth, str(device)), 700, ours=True, **DATASET_MOST
        ),
        Kind("torch.multinomial", lambda truth: Multinomial(truth, device), 8, **MULTINOMIAL_MOST),
        Kind("cumsum, graph", graph(cumsum), 8),
        Kind("cumsum, eager", cumsum, 8),
    ]


class DeviceTree(OnDevice):
    """`priority.draw` and `priority.update`, which raises to alpha, on a `SumTree`."""

    power = ALPHA

    def __init__(self, truth: Truth, engine: Engine) -> None:
        super().__init__(truth, engine.device)
        self._tree = SumTree(truth.items, self.device)
        self._tree.leaves[: truth.items] = self.values(truth.priorities).pow(ALPHA)
        priority.build(self._tree)
        self._random = torch.tensor([_SEED, 0], device=self.device)
        self._step = self._random[1:]
        self._drawn: dict[int, tuple[torch.Tensor, ...]] = {}

    def draw(self, batch: int) -> Any:
        if batch not in self._drawn:
            made = (torch.empty(batch, dtype=d, device=self.device) for d in (torch.int64, torch.float32))
            self._drawn[batch] = tuple(made)
        self._step.add_(1)
        drawn = self._drawn[batch]
        priority.draw(self._tree, self._random, *drawn)
        return drawn

    def update(self, drawn: Any, values: Any) -> None:
        priority.update(self._tree, drawn[0], values, alpha=ALPHA)

    def leaves(self, items: torch.Tensor) -> torch.Tensor:
        return self._tree.leaves[items]

    def verify(self) -> None:
        """Raise `Incorrect` if something went wrong on the device."""
        status = self._tree.status.tolist()
        if status[BAD_POSITION] != NOWHERE or status[EMPTY_DRAWS]:
            raise Incorrect(f"the tree's status is {status}")


class Graph(Subject):
    """Many operations of a subject as one graph; before each replay all get new priorities, and updates new items.

    Checks by frequency draw eagerly; those of the graph are made when it is captured, for each operation and batch.
    """

    def __init__(self, engine: Engine, subject: Any, launches: int) -> None:
        self._engine, self._subject, self._launches = engine, subject, launches
        self.items, self.power = subject.items, subject.power
        for name in ("draw", "update", "found", "values", "chosen", "finish"):
            setattr(self, name, getattr(subject, name))
        self._random = np.random.default_rng(_SEED)
        self._key: tuple[str, int] | None = None  # of the last graph alone: each keeps its memory

    def measure(self, operation: str, batch: int, batches: int) -> float:
        """Seconds for so many operations, from replays of the graph between events."""
        if self._key != (operation, batch):
            self._capture(operation, batch)
            self._verify(operation, batch)
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
        drawn = []
        for _ in range(2):
            self._refresh()
            self._replay()
            self._engine.synchronize()
            if isinstance(self._subject, DeviceTree):
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
