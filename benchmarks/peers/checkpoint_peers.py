"""Saving and loading stores of other libraries: a script for an interpreter that has them.

    python -I benchmarks/peers/checkpoint_peers.py VARIANT THREADS

It imports nothing of this project. `benchmarks.checkpoint` starts one process for each turn and sends one command:

    {"do": "journey", "spec": {...}, "folder": F}
        -> {"save": s, "save again": s, "load, cold": s, "load": s, "synced": ..., "extras": {"save": {...}, ...}}

A store is filled and saved; a few trajectories are added, and it is saved again into the same folder; it is given
back, what was saved is dropped from the page cache and loaded; then it is read once, so that the page cache has it,
and loaded again. Everything that was loaded last is compared with what was stored. A save takes until everything is on
the disk, whether the library waits for that or not; when it returned is told in "extras". Anything that goes wrong is
answered by {"error": ...}. `benchmarks.checkpoint_workers` serves Gear Loader, plain torch and the
yardsticks with the same loop.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["PEERS", "UNIT", "Source", "Subject", "Worker"]

UNIT = 20
"""Trajectories that are made, stored and compared at a time."""

Rows = dict[str, np.ndarray]


class Source:
    """Trajectories of random values, made when they are asked for.

    Args:
        spec: ``columns`` (name -> shape of a step, float32), ``steps`` of a trajectory, ``trajectories``, ``more``
            that are added after the first save (multiples of `UNIT` both), ``seed``.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.columns = {name: tuple(shape) for name, shape in spec["columns"].items()}
        self.steps, self._seed = int(spec["steps"]), int(spec["seed"])
        self.first, self.total = int(spec["trajectories"]), int(spec["trajectories"]) + int(spec["more"])

    @property
    def payload(self) -> int:
        """Bytes of all steps, of what is added later too."""
        return 4 * self.total * self.steps * sum(int(np.prod(shape)) for shape in self.columns.values())

    def unit(self, first: int) -> Rows:
        """`UNIT` trajectories from that one on: name -> float32 ``[UNIT, steps, *shape]``."""
        random = np.random.default_rng([self._seed, first])
        columns = self.columns.items()
        return {name: random.random((UNIT, self.steps, *shape), np.float32) for name, shape in columns}

    def units(self, begin: int, end: int) -> Iterator[tuple[int, Rows]]:
        """(number of the first, the trajectories), of a range."""
        for first in range(begin, end, UNIT):
            yield first, self.unit(first)


class Subject:
    """A store that can be saved and loaded.

    Attributes:
        packages: whose versions are told.
        synced: whether its save waits until everything is on the disk.
    """

    packages: tuple[str, ...] = ()
    synced = False

    def __init__(self, source: Source, folder: str) -> None:
        self.source, self.folder = source, folder

    @staticmethod
    def load() -> str | None:
        """Import what it needs; a note or None."""
        return None

    def open(self) -> None:
        """Make an empty store with room for all trajectories."""

    def add(self, first: int, rows: Rows) -> None:
        """Store `UNIT` trajectories."""

    def save(self) -> None:
        """Save the store into the folder."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make a store of what was saved."""
        raise NotImplementedError

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """What the store has, `UNIT` trajectories at a time, in order: (number of the first, name -> values)."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `ValueError` unless the store has what was added."""
        place = 0
        for first, rows in self.everything():
            if first != place:
                raise ValueError(f"trajectory {first} comes after {place}")
            for name, values in self.source.unit(first).items():
                found = np.ascontiguousarray(rows[name])
                if found.dtype != values.dtype or found.tobytes() != values.tobytes():
                    raise ValueError(f"{name} of trajectories {first} to {first + UNIT - 1} differs")
            place += UNIT
        if place != self.source.total:
            raise ValueError(f"{place} trajectories were loaded; expected {self.source.total}")

    def close(self) -> None:
        """Forget the store."""


# ---------------------------------------------------------------- peers


class TorchRL(Subject):
    """TorchRL: `dumps` and `loads` of a `TensorDictReplayBuffer` over `LazyTensorStorage`, a row a trajectory.

    It writes memory-mapped files and does not wait for the disk; a save into the same folder writes everything again.
    """

    packages = ("torchrl", "tensordict", "torch")
    environment = "torchrl"

    @staticmethod
    def load() -> str | None:
        import torchrl.data  # noqa: F401

        return None

    def open(self) -> None:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        storage = LazyTensorStorage(self.source.total)
        self._buffer = TensorDictReplayBuffer(storage=storage, batch_size=UNIT)

    def add(self, first: int, rows: Rows) -> None:
        import torch
        from tensordict import TensorDict

        columns = {name: torch.from_numpy(values) for name, values in rows.items()}
        self._buffer.extend(TensorDict(columns, batch_size=[UNIT]))

    def save(self) -> None:
        self._buffer.dumps(os.path.join(self.folder, "buffer"))

    def restore(self) -> None:
        self.open()
        self._buffer.loads(os.path.join(self.folder, "buffer"))

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for first in range(0, len(self._buffer), UNIT):
            found = self._buffer[first : first + UNIT]
            yield first, {name: found[name].numpy() for name in self.source.columns}

    def close(self) -> None:
        self._buffer = None


class Cpprb(Subject):
    """cpprb: `save_transitions` and `load_transitions` of a `ReplayBuffer` with a row a trajectory.

    It writes one numpy archive, and does not wait for the disk.
    """

    packages = ("cpprb", "numpy")
    environment = "cpprb"

    @staticmethod
    def load() -> str | None:
        import cpprb  # noqa: F401

        return None

    def open(self) -> None:
        from cpprb import ReplayBuffer

        steps = self.source.steps
        columns = {
            n: {"shape": (steps, *shape), "dtype": np.float32} for n, shape in self.source.columns.items()
        }
        self._buffer = ReplayBuffer(self.source.total, columns)

    def add(self, first: int, rows: Rows) -> None:
        self._buffer.add(**rows)

    def save(self) -> None:
        self._buffer.save_transitions(os.path.join(self.folder, "buffer.npz"))

    def restore(self) -> None:
        self.open()
        self._buffer.load_transitions(os.path.join(self.folder, "buffer.npz"))

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        rows = self._buffer.get_all_transitions()
        for first in range(0, self._buffer.get_stored_size(), UNIT):
            yield first, {name: rows[name][first : first + UNIT] for name in self.source.columns}

    def close(self) -> None:
        self._buffer = None


class Reverb(Subject):
    """Reverb: `Client.checkpoint` with its default checkpointer, and a server that is started on what it wrote.

    A server in this process; an item is a trajectory, appended as one step. Each save writes everything anew, and does
    not wait for the disk.
    """

    packages = ("dm-reverb", "tensorflow-cpu", "numpy")
    environment = "reverb"
    _server: Any = None

    @staticmethod
    def load() -> str | None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import reverb  # noqa: F401
        import tensorflow  # noqa: F401

        return None

    def open(self) -> None:
        import reverb
        import tensorflow as tf
        from reverb.platform.default import checkpointers

        steps, columns = self.source.steps, self.source.columns.items()
        table = reverb.Table(
            "replay",
            sampler=reverb.selectors.Fifo(),
            remover=reverb.selectors.Fifo(),
            max_size=self.source.total,
            max_times_sampled=1,  # so that `everything` meets each once
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature={name: tf.TensorSpec((steps, *shape), tf.float32) for name, shape in columns},
        )
        checkpointer = checkpointers.DefaultCheckpointer(self.folder)
        self._server = reverb.Server([table], checkpointer=checkpointer)
        self._client = reverb.Client(f"localhost:{self._server.port}")

    def add(self, first: int, rows: Rows) -> None:
        with self._client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for name in rows:
                writer.configure((name,), num_keep_alive_refs=1, max_chunk_length=1)
            for i in range(UNIT):
                writer.append({name: values[i] for name, values in rows.items()})
                writer.create_item("replay", 1.0, {name: writer.history[name][-1] for name in rows})
            writer.flush()

    def save(self) -> None:
        self._client.checkpoint()

    def restore(self) -> None:
        self.open()

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        info = self._client.server_info()["replay"]
        samples = self._client.sample("replay", info.current_size, emit_timesteps=False)
        kept: dict[str, list[np.ndarray]] = {name: [] for name in self.source.columns}
        for i, sample in enumerate(samples):
            data = sample.data
            if not isinstance(data, dict):
                data = dict(zip(sorted(kept), data, strict=True))
            for name, values in kept.items():
                values.append(np.asarray(data[name]))
            if i % UNIT == UNIT - 1:
                yield i - UNIT + 1, {name: np.stack(values) for name, values in kept.items()}
                kept = {name: [] for name in kept}

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


PEERS: dict[str, Any] = {"TorchRL": TorchRL, "Reverb": Reverb, "cpprb": Cpprb}


# ---------------------------------------------------------------- the script


def timed(work: Any) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def files(folder: str) -> list[str]:
    """All files below it."""
    return [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]


def to_disk(folder: str) -> None:
    """Wait until all files are on the disk."""
    for path in files(folder):
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)


def drop(folder: str) -> None:
    """Drop the files from the page cache."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def take_in(folder: str) -> None:
    """Bring the files into the page cache."""
    buffer = memoryview(bytearray(1 << 22))
    for path in files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def peak_beyond(work: Any) -> tuple[float, dict[str, float]]:
    """Seconds that it takes; the most bytes of memory that this process had beyond what it began with, if known."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak begins anew
    except OSError:
        return timed(work), {}
    before = _status("VmRSS")
    return timed(work), {"peak bytes": _status("VmHWM") - before}


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


class Worker:
    """Does what it is told to."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def journey(self, spec: Mapping[str, Any], folder: str) -> dict[str, Any]:
        source = Source(spec)
        subject = self._kind(source, folder)
        gc.collect()
        try:
            return self._journey(subject, source, folder)
        finally:
            subject.close()

    def _journey(self, subject: Subject, source: Source, folder: str) -> dict[str, Any]:
        found: dict[str, Any] = {"synced": subject.synced, "extras": {}}
        subject.open()
        for name, begin, end in (("save", 0, source.first), ("save again", source.first, source.total)):
            for first, rows in source.units(begin, end):
                subject.add(first, rows)
            returned, extras = peak_beyond(subject.save)
            found[name] = returned + timed(lambda: to_disk(folder))
            extras["seconds until it returns"] = returned
            found["extras"][name] = extras
        subject.close()
        found["extras"]["save again"]["bytes on disk"] = sum(os.path.getsize(path) for path in files(folder))
        drop(folder)
        found["load, cold"] = timed(subject.restore)
        subject.close()
        take_in(folder)
        found["load"] = timed(subject.restore)
        subject.check()
        return found

    def close(self) -> None:
        """Nothing is kept."""


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from answering import serve

    serve(PEERS[sys.argv[1]], int(sys.argv[2]), Worker)
