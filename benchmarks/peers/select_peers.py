"""Selection by other libraries, run as a script in an interpreter that has them: `benchmarks.select` talks to it.

    python -I benchmarks/peers/select_peers.py VARIANT THREADS

With -I, because its folder holds a select.py that is not Python's. It imports nothing of this project. Each line of
standard input is a command as JSON, each line of standard output its answer; the first line says what was imported, or
why it could not be:

    {"do": "build", "items": N, "seed": S}                        -> {"seconds": ...}
    {"do": "draw", "batch": B, "times": K}                        -> {"items": [...], "leaves": [...] or null}
    {"do": "update", "items": [...], "priorities": [...]}         -> {}
    {"do": "measure", "operation": O, "batch": B, "batches": K}   -> {"seconds": ...}

Anything that goes wrong is answered by {"error": ...}. It ends with its input.

`Subject` and `measure` are what the variants of `benchmarks.select` are made of too: all are timed by the same loop.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["ALPHA", "BETA", "OPERATIONS", "PEERS", "Subject", "chunks", "measure", "priorities", "weighed"]

ALPHA, BETA = 0.6, 0.4
"""Of the variants that raise priorities to a power and weigh samples; the others take priorities as they are."""
OPERATIONS = ("draw", "update", "cycle")
_SEED = 12


def priorities(items: int, seed: int) -> np.ndarray:
    """The priorities that every variant starts with: float32, uniform in (0, 1]."""
    values = np.random.default_rng(seed).random(items, dtype=np.float32)
    return np.subtract(np.float32(1), values, out=values)


def chunks(items: int, size: int = 1 << 18) -> Iterator[slice]:
    """All items in parts."""
    for first in range(0, items, size):
        yield slice(first, min(items, first + size))


def weighed(values: np.ndarray, power: float) -> np.ndarray:
    """What priorities weigh, float64."""
    return values.astype(np.float64) ** power


class Subject:
    """A way of selecting by priority.

    Attributes:
        items: how many there are.
        power: what priorities are raised to.
        seconds_to_build: how long it took to make it and set all priorities.
    """

    power = 1.0
    items: int
    seconds_to_build = 0.0

    def draw(self, batch: int) -> Any:
        """Draw a batch with replacement; whatever it returns, `update` takes."""
        raise NotImplementedError

    def update(self, drawn: Any, values: Any) -> None:
        """Give the items drawn new priorities."""
        raise NotImplementedError

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """The items drawn, int64, and what they weigh, where `draw` tells."""
        raise NotImplementedError

    def values(self, values: np.ndarray) -> Any:
        """Priorities, float32, in the form that `update` is meant for."""
        return values

    def chosen(self, items: np.ndarray) -> Any:
        """Items, int64, in the form that `draw` returns."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until everything is done."""

    def close(self) -> None:
        """Give back what it holds."""


def measure(subject: Subject, operation: str, batch: int, batches: int, random: np.random.Generator) -> float:
    """Seconds that `batches` operations take, after one more that is not timed (unless it is for a single one).

    New priorities are prepared beforehand, and for updates alone the items: uniformly random ones.
    """
    warm = int(batches > 1)
    count = batches + warm
    values = [subject.values(row) for row in np.float32(1) - random.random((count, batch), dtype=np.float32)]
    drawn = []
    if operation == "update":
        drawn = [subject.chosen(row) for row in random.integers(subject.items, size=(count, batch))]
    work = {
        "draw": lambda i: subject.draw(batch),
        "update": lambda i: subject.update(drawn[i], values[i]),
        "cycle": lambda i: subject.update(subject.draw(batch), values[i]),
    }[operation]
    if warm:
        work(batches)
    subject.finish()
    begin = time.perf_counter()
    for i in range(batches):
        work(i)
    subject.finish()
    return time.perf_counter() - begin


# ---------------------------------------------------------------- peers


class TorchRLTree(Subject):
    """TorchRL's C++ trees: sums (32-bit) to draw from and minima beside them, as its sampler keeps them."""

    packages = ("torchrl", "torch")
    environment = "torchrl"
    item_bytes = 24

    @staticmethod
    def load() -> str | None:
        return _load_torchrl()

    def __init__(self, items: int, seed: int) -> None:
        import torch
        from torchrl._torchrl import MinSegmentTreeFp32, SumSegmentTreeFp32

        self.items, self._torch = items, torch
        self._sums, self._mins = SumSegmentTreeFp32(items), MinSegmentTreeFp32(items)
        self._random = np.random.default_rng(_SEED)
        start = priorities(items, seed)
        for part in chunks(items):
            self.update(
                (torch.arange(part.start, part.stop), None),
                torch.from_numpy(start[part]),
            )

    def draw(self, batch: int) -> Any:
        mass = self._random.uniform(0.0, self._sums.query(0, self.items), batch)
        index = self._torch.as_tensor(self._sums.scan_lower_bound(mass)).clamp_max_(self.items - 1)
        return index, self._sums[index]

    def update(self, drawn: Any, values: Any) -> None:
        self._sums[drawn[0]] = values
        self._mins[drawn[0]] = values

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        return drawn[0].numpy(), np.asarray(drawn[1])

    def values(self, values: np.ndarray) -> Any:
        return self._torch.from_numpy(values)

    def chosen(self, items: np.ndarray) -> Any:
        return self._torch.from_numpy(items), None


class _Length:
    """A storage of so many items and nothing in them: all that the sampler asks about."""

    ndim = 1
    device = None

    def __init__(self, items: int) -> None:
        self._items = items
        self.shape = (items,)

    def __len__(self) -> int:
        return self._items


class TorchRLSampler(Subject):
    """`PrioritizedSampler.sample` and `update_priority`, with importance weights, without a buffer around it."""

    packages = ("torchrl", "torch")
    environment = "torchrl"
    item_bytes = 24
    power = ALPHA

    @staticmethod
    def load() -> str | None:
        return _load_torchrl()

    def __init__(self, items: int, seed: int) -> None:
        import torch
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        self.items, self._torch = items, torch
        self._sampler = PrioritizedSampler(items, alpha=ALPHA, beta=BETA, eps=0.0)
        self._storage = _Length(items)
        start = priorities(items, seed)
        for part in chunks(items):
            self.update(
                (torch.arange(part.start, part.stop), {}),
                torch.from_numpy(start[part]),
            )

    def draw(self, batch: int) -> Any:
        return self._sampler.sample(self._storage, batch)

    def update(self, drawn: Any, values: Any) -> None:
        self._sampler.update_priority(drawn[0], values)

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        return drawn[0].numpy(), None

    def values(self, values: np.ndarray) -> Any:
        return self._torch.from_numpy(values)

    def chosen(self, items: np.ndarray) -> Any:
        return self._torch.from_numpy(items), {}


class Cpprb(Subject):
    """cpprb's `PrioritizedReplayBuffer` with one int32 column, so `sample` also gathers 4 bytes a row, and weights."""

    packages = ("cpprb", "numpy")
    environment = "cpprb"
    item_bytes = 40
    power = ALPHA

    @staticmethod
    def load() -> str | None:
        import cpprb  # noqa: F401

        return None

    def __init__(self, items: int, seed: int) -> None:
        from cpprb import PrioritizedReplayBuffer

        self.items = items
        self._buffer = PrioritizedReplayBuffer(items, {"x": {"dtype": np.int32}}, alpha=ALPHA, eps=0.0)
        start = priorities(items, seed)
        for part in chunks(items):
            self._buffer.add(x=np.arange(part.start, part.stop, dtype=np.int32), priorities=start[part])

    def draw(self, batch: int) -> Any:
        return self._buffer.sample(batch, beta=BETA)

    def update(self, drawn: Any, values: Any) -> None:
        self._buffer.update_priorities(drawn["indexes"], values)

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        items = drawn["indexes"].astype(np.int64)
        if not np.array_equal(drawn["x"][:, 0], items):
            raise ValueError("the rows are not those of the items drawn")
        return items, None

    def chosen(self, items: np.ndarray) -> Any:
        return {"indexes": items.astype(np.uint64)}


class TianshouTree(Subject):
    """Tianshou's numba `SegmentTree`: sums only (64-bit), no minima."""

    packages = ("tianshou", "numba", "numpy")
    environment = "tianshou"
    item_bytes = 24

    @staticmethod
    def load() -> str | None:
        from tianshou.data import SegmentTree  # noqa: F401

        return None

    def __init__(self, items: int, seed: int) -> None:
        from tianshou.data import SegmentTree

        self.items = items
        self._tree = SegmentTree(items)
        self._random = np.random.default_rng(_SEED)
        start = priorities(items, seed)
        for part in chunks(items):
            self._tree[np.arange(part.start, part.stop)] = start[part]

    def draw(self, batch: int) -> Any:
        index = self._tree.get_prefix_sum_idx(self._random.random(batch) * self._tree.reduce())
        return index, self._tree[index]

    def update(self, drawn: Any, values: Any) -> None:
        self._tree[drawn[0]] = values

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        return drawn

    def chosen(self, items: np.ndarray) -> Any:
        return items, None


PEERS: dict[str, Any] = {
    "TorchRL tree": TorchRLTree,
    "TorchRL sampler": TorchRLSampler,
    "cpprb": Cpprb,
    "Tianshou tree": TianshouTree,
}


def _load_torchrl() -> str | None:
    """Import TorchRL's C++ extension, even if it was built for another torch; a note if it was."""
    import torch  # noqa: F401

    note = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchrl._torchrl
        except ImportError as error:
            if "undefined symbol" not in str(error):
                raise
            # What is missing belongs to other parts of it: left unresolved until somebody calls it, the trees work.
            flags = sys.getdlopenflags()
            sys.setdlopenflags(os.RTLD_LAZY)
            try:
                import torchrl._torchrl  # noqa: F401
            finally:
                sys.setdlopenflags(flags)
            note = "TorchRL's extension was built for another torch; loaded with lazy binding"
    return note


# ---------------------------------------------------------------- the script


class _Worker:
    """Does what it is told to."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._subject: Subject | None = None
        self._random = np.random.default_rng(_SEED)

    def build(self, items: int, seed: int) -> dict[str, Any]:
        self._subject = None  # first gives back what the one before held
        begin = time.perf_counter()
        self._subject = self._kind(items, seed)
        seconds = time.perf_counter() - begin
        gc.collect()
        gc.freeze()  # what was imported and built is not looked through at each measurement
        return {"seconds": seconds}

    def draw(self, batch: int, times: int) -> dict[str, Any]:
        subject = self._built()
        found = [subject.found(subject.draw(batch)) for _ in range(times)]
        leaves = None
        if found[0][1] is not None:
            leaves = np.concatenate([part[1] for part in found]).tolist()  # type: ignore[misc]
        return {"items": np.concatenate([part[0] for part in found]).tolist(), "leaves": leaves}

    def update(self, items: list[int], priorities: list[float]) -> dict[str, Any]:
        subject = self._built()
        chosen = subject.chosen(np.array(items, dtype=np.int64))
        subject.update(chosen, subject.values(np.array(priorities, dtype=np.float32)))
        return {}

    def measure(self, operation: str, batch: int, batches: int) -> dict[str, Any]:
        gc.collect()
        gc.disable()
        try:
            return {"seconds": measure(self._built(), operation, batch, batches, self._random)}
        finally:
            gc.enable()

    def _built(self) -> Subject:
        if self._subject is None:
            raise RuntimeError("build comes first")
        return self._subject


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from answering import serve

    serve(PEERS[sys.argv[1]], int(sys.argv[2]), _Worker)
