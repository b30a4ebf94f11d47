"""The trajectories that benchmarks store, which every process can make again from a seed; and the base of workers."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Steps = dict[str, np.ndarray]
T = TypeVar("T")
_NETWORK = 0x40000000  # CLONE_NEWNET


class Source:
    """Trajectories of random values, in which each step says which it is.

    spec: ``columns`` (name -> shape of a step, float32; the last one has one value a step: the number of the step among
    all), ``lengths`` of the trajectories, or ``trajectories`` and ``steps`` of each; ``seed``. mark: name of the last
    column. lengths, begins: steps and first step of each trajectory, int64. steps: of the longest one.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec, self.seed = spec, int(spec["seed"])
        self.columns = {name: tuple(shape) for name, shape in spec["columns"].items()}
        lengths = spec.get("lengths")
        self.lengths = (
            np.full(int(spec["trajectories"]), int(spec["steps"])) if lengths is None else np.array(lengths)
        )
        self.begins = np.cumsum(self.lengths) - self.lengths
        self.mark, self.steps = list(self.columns)[-1], int(self.lengths.max())
        if self.total > 1 << 24:
            raise ValueError(f"a float32 cannot number {self.total:,} steps; store fewer")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    @property
    def payload(self) -> int:
        return 4 * self.total * sum(int(np.prod(shape)) for shape in self.columns.values())

    @property
    def priorities(self) -> np.ndarray:
        """Of the trajectories: float32, uniform in (0, 1]."""
        return np.float32(1) - np.random.default_rng([self.seed, len(self)]).random(len(self), np.float32)

    def shapes(self, *steps: int | None) -> dict[str, tuple[int | None, ...]]:
        """name -> shape of so many steps."""
        return {name: (*steps, *shape) for name, shape in self.columns.items()}

    def trajectory(self, number: int) -> Steps:
        """name -> float32 ``[steps, *shape]``, arrays of their own."""
        random, count = np.random.default_rng([self.seed, 0, number]), int(self.lengths[number])
        found = {n: random.random((count, *s), np.float32) for n, s in self.columns.items()}
        found[self.mark] = np.arange(count, dtype=np.float32) + np.float32(self.begins[number])
        return found

    def parts(self, size: int, first: int = 0, last: int | None = None) -> Iterator[tuple[int, list[Steps]]]:
        """Trajectories in order, so many at a time: number of the first, and each."""
        last = len(self) if last is None else last
        for begin in range(first, last, size):
            yield begin, [self.trajectory(number) for number in range(begin, min(begin + size, last))]

    def stacked(self, size: int, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Steps]]:
        """The same of trajectories of even length: name -> float32 ``[n, steps, *shape]``."""
        for begin, each in self.parts(size, first, last):
            yield begin, {name: np.stack([one[name] for one in each]) for name in self.columns}

    def verify(self, rows: Mapping[str, Any], window: int | None = None) -> np.ndarray:
        """Compare rows with the trajectories that they are of, to the byte."""
        firsts = []
        for i, marks in enumerate(rows[self.mark]):
            first = float(np.ravel(marks)[0])
            if not (0 <= first < self.total and first == int(first)):
                raise ValueError(
                    f"row {i} begins with {first!r}, which is the number of no step of {self.total}"
                )
            number = int(np.searchsorted(self.begins, first, side="right")) - 1
            expected = self.trajectory(number)
            begin = int(first) - int(self.begins[number])
            count = len(expected[self.mark]) if window is None else window
            for name, values in expected.items():
                wanted = np.ascontiguousarray(values[begin : begin + count])
                found = np.ascontiguousarray(rows[name][i])
                shape = (count, *self.columns[name])
                if found.size != int(np.prod(shape)):
                    raise ValueError(f"{name} of row {i} has shape {found.shape}; expected {shape}")
                if found.dtype != wanted.dtype or found.tobytes() != wanted.tobytes():
                    raise ValueError(f"{name} of row {i} differs from what was stored")
            firsts.append(int(first))
        return np.array(firsts, dtype=np.int64)


class Subject:
    """A variant of a task: something with a store."""

    store: Any = None

    def close(self) -> None:
        """Give back what it holds."""
        self.store = None


class Worker:
    """What a process does with one variant at a time, of those that a library has: name -> class."""

    def __init__(self, kinds: Mapping[str, Any], variant: str) -> None:
        self.kind, self.held = kinds.get(variant), None

    @property
    def subject(self) -> Any:
        if self.held is None:
            raise RuntimeError("build comes first")
        return self.held

    def close(self) -> dict[str, Any]:
        if self.held is not None:
            self.held.close()
        self.held = None
        return {}


def give_back() -> None:
    """Give memory that is not in use back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def memory_of(field: str) -> int:
    """Bytes in a field of this process's smaps_rollup: "Anonymous" without files, "Pss" with its share of those."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))


def memory_with(folder: Path) -> int:
    """Bytes of this process, with its share of shared memory and of mapped files in a folder.

    Libraries are left out, whose pages the system takes back when memory is short.
    """
    mapped, ours = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            if (
                line[0] in "0123456789abcdef"
            ):  # a mapping: addresses, permissions, offset, device, inode, path
                ours = line.split(maxsplit=5)[-1].startswith(f"{folder}/")
            elif ours and line.startswith("Pss:"):
                mapped += int(line.split()[1]) * 1024
    return memory_of("Pss_Anon") + memory_of("Pss_Shmem") + mapped


def elsewhere(namespace: str | None, work: Callable[[], T]) -> T:
    """What `work` returns, called by a thread in a network namespace; None is this process's own.

    Sockets that it opens and processes that it starts are in that namespace.
    """
    if namespace is None:
        return work()

    def entered() -> T:
        with open(f"/run/netns/{namespace}", encoding="ascii") as place:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(place.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place.name)
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(entered).result()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without garbage collection, which has been done before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
