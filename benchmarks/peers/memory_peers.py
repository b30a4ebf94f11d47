"""What trajectories of uneven length take in memory in other libraries: a script for an interpreter that has them.

    python -I benchmarks/peers/memory_peers.py VARIANT THREADS

It imports nothing of this project. `benchmarks.memory` starts one process for each measurement, in which nothing else
has happened before, and sends it one command as JSON:

    {"do": "measure", "columns": {name: [*shape]}, "lengths": [...], "seed": S, "options": {...}}
        -> {"bytes": ..., "payload": ..., "extras": {...}}

First a few trajectories are stored and forgotten, so that what is loaded on first use does not count. Then all are
stored, some are read back and compared, what was needed for a moment only is given back to the system, and the growth
of the process's own resident memory (anonymous, as nothing is stored in files) is the answer. Anything that goes wrong
is answered by {"error": ...}. `benchmarks.memory_workers` serves Gear Loader and plain torch with the same loop.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["BATCH", "PEERS", "Source", "Subject", "Worker"]

BATCH = 64
"""Trajectories that are handed over at a time, where that can be."""


class Source:
    """Trajectories of random values, each made when it is asked for; nothing can be gained by compressing them.

    Args:
        columns: name -> shape of a step, float32. The last column's first value is the trajectory's number.
        lengths: steps of each trajectory.
    """

    def __init__(self, columns: Mapping[str, Any], lengths: Any, seed: int) -> None:
        self.columns = {name: tuple(shape) for name, shape in columns.items()}
        self.lengths = [int(length) for length in lengths]
        self.mark = list(self.columns)[-1]
        self._seed = seed

    @property
    def payload(self) -> int:
        """Bytes of all steps."""
        return 4 * sum(self.lengths) * sum(int(np.prod(shape)) for shape in self.columns.values())

    def trajectory(self, i: int) -> dict[str, np.ndarray]:
        """name -> float32 ``[T, *shape]``, arrays of their own."""
        random = np.random.default_rng([self._seed, i])
        found = {n: random.random((self.lengths[i], *s), np.float32) for n, s in self.columns.items()}
        found[self.mark].reshape(-1)[0] = i
        return found

    def batches(self) -> Iterator[list[dict[str, np.ndarray]]]:
        """All of them, some at a time."""
        count = len(self.lengths)
        for first in range(0, count, BATCH):
            yield [self.trajectory(i) for i in range(first, min(first + BATCH, count))]

    def samples(self) -> list[int]:
        """Some to look at: the first, the last, the longest, the shortest, others."""
        others = np.random.default_rng(self._seed).integers(len(self.lengths), size=16).tolist()
        ends = [0, len(self.lengths) - 1, int(np.argmax(self.lengths)), int(np.argmin(self.lengths))]
        return sorted({*ends, *others})

    def verify(self, rows: Mapping[str, Any], i: int | None = None) -> None:
        """Compare one trajectory, name -> ``[T, *shape]``; by default the one whose number it has.

        Raises:
            ValueError: it differs.
        """
        found = {name: np.asarray(rows[name], dtype=np.float32) for name in self.columns}
        i = int(found[self.mark].reshape(-1)[0]) if i is None else i
        if not 0 <= i < len(self.lengths):
            raise ValueError(f"a trajectory has the number {i}; expected one of {len(self.lengths)}")
        for name, values in self.trajectory(i).items():
            if found[name].size != values.size or not np.array_equal(
                found[name].reshape(values.shape), values
            ):
                raise ValueError(f"{name} of trajectory {i} differs from what was stored")


class Subject:
    """A store of trajectories.

    Attributes:
        packages: whose versions are told.
    """

    packages: tuple[str, ...] = ()

    def __init__(self, source: Source, **options: Any) -> None:
        self.source, self.options = source, options
        self.open()

    @staticmethod
    def load() -> str | None:
        """Import what it needs; a note or None."""
        return None

    def open(self) -> None:
        """Make the store, with room for all trajectories of the source and no more."""
        raise NotImplementedError

    def fill(self) -> None:
        """Store them all."""
        raise NotImplementedError

    def read(self, i: int) -> Mapping[str, Any]:
        """A trajectory as it is in the store."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `ValueError` unless some that are looked at are what was stored."""
        for i in self.source.samples():
            self.source.verify(self.read(i), i)

    def beside(self) -> int:
        """Bytes that it holds outside of this process's own memory."""
        return 0

    def extras(self) -> dict[str, float]:
        """Further figures."""
        return {}

    def close(self) -> None:
        """Give back what it holds."""


def resident() -> int:
    """Bytes of this process's own memory: without files, which it may share with others, and with memory files."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))


def settle() -> None:
    """Give back to the system what is not in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


# ---------------------------------------------------------------- peers


class TorchRL(Subject):
    """TorchRL's documented way to draw windows: single steps in a `LazyTensorStorage`, for a `SliceSampler`.

    Where a trajectory ends is told by ("next", "done"), as its collectors do; `TensorDictReplayBuffer` adds an index.
    """

    packages = ("torchrl", "tensordict", "torch")
    environment = "torchrl"

    @staticmethod
    def load() -> str | None:
        import torchrl.data  # noqa: F401

        return None

    def open(self) -> None:
        from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

        lengths = self.source.lengths
        self._first = np.cumsum([0, *lengths])
        sampler = SliceSampler(num_slices=8, end_key=("next", "done"), strict_length=False)
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(sum(lengths)), sampler=sampler, batch_size=64
        )

    def fill(self) -> None:
        import torch
        from tensordict import TensorDict

        for batch in self.source.batches():
            for one in batch:
                steps = len(one[self.source.mark])
                done = torch.zeros(steps, 1, dtype=torch.bool)
                done[-1] = True
                columns = {name: torch.from_numpy(values) for name, values in one.items()}
                self._buffer.extend(TensorDict({**columns, ("next", "done"): done}, batch_size=[steps]))

    def read(self, i: int) -> Mapping[str, Any]:
        found = self._buffer[int(self._first[i]) : int(self._first[i + 1])]
        done = found["next", "done"].reshape(-1)
        if int(done.sum()) != 1 or not bool(done[-1]):
            raise ValueError(f"trajectory {i} does not end where it should")
        return dict(found.items())

    def close(self) -> None:
        del self._buffer


class TorchRLPadded(TorchRL):
    """TorchRL with a row a trajectory, padded by `tensordict.pad` to the longest; a mask says what exists."""

    def open(self) -> None:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        storage = LazyTensorStorage(len(self.source.lengths))
        self._buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
        self._longest = max(self.source.lengths)

    def fill(self) -> None:
        import torch
        from tensordict import TensorDict, pad

        for batch in self.source.batches():
            for one in batch:
                steps = len(one[self.source.mark])
                columns = {name: torch.from_numpy(values) for name, values in one.items()}
                columns["mask"] = torch.ones(steps, dtype=torch.bool)
                row = pad(TensorDict(columns, batch_size=[steps]), [0, self._longest - steps])
                row.batch_size = []
                self._buffer.add(row)

    def read(self, i: int) -> Mapping[str, Any]:
        found = self._buffer[i]
        return {name: found[name][found["mask"]] for name in self.source.columns}


class Cpprb(Subject):
    """cpprb's `ReplayBuffer` of single steps; ``done`` tells where a trajectory ends."""

    packages = ("cpprb", "numpy")
    environment = "cpprb"

    @staticmethod
    def load() -> str | None:
        import cpprb  # noqa: F401

        return None

    def open(self) -> None:
        from cpprb import ReplayBuffer

        columns = {n: {"shape": shape or 1, "dtype": np.float32} for n, shape in self.source.columns.items()}
        columns["done"] = {"shape": 1, "dtype": np.bool_}
        self._first = np.cumsum([0, *self.source.lengths])
        self._buffer = ReplayBuffer(sum(self.source.lengths), columns)

    def fill(self) -> None:
        for batch in self.source.batches():
            for one in batch:
                done = np.zeros(len(one[self.source.mark]), dtype=np.bool_)
                done[-1] = True
                self._buffer.add(**one, done=done)
                self._buffer.on_episode_end()

    def check(self) -> None:
        everything = self._buffer.get_all_transitions()
        for i in self.source.samples():
            part = slice(self._first[i], self._first[i + 1])
            self.source.verify({name: everything[name][part] for name in self.source.columns}, i)

    def close(self) -> None:
        del self._buffer


class Reverb(Subject):
    """Reverb: a server in this process, filled by a writer in another one; an item is a whole trajectory.

    `TrajectoryWriter`, one append a step, as the steps come from an environment, and `end_episode` after each
    trajectory, of which each column is one chunk: the fewest there can be. Chunks are compressed, which random values
    leave as large as they are.
    """

    packages = ("dm-reverb", "tensorflow-cpu", "numpy")
    environment = "reverb"
    automatic = False

    @staticmethod
    def load() -> str | None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import reverb  # noqa: F401
        import tensorflow  # noqa: F401

        return None

    def open(self) -> None:
        import reverb
        import tensorflow as tf

        columns = self.source.columns.items()
        table = reverb.Table(
            "replay",
            sampler=reverb.selectors.Uniform(),
            remover=reverb.selectors.Fifo(),
            max_size=len(self.source.lengths),
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature={name: tf.TensorSpec((None, *shape), tf.float32) for name, shape in columns},
        )
        self._server = reverb.Server([table])

    def fill(self) -> None:
        source = self.source
        told = {
            "columns": source.columns,
            "lengths": source.lengths,
            "seed": source._seed,
            "port": self._server.port,
            "automatic": self.automatic,
        }
        subprocess.run(
            [sys.executable, "-I", os.path.abspath(__file__), "Reverb, writer"],
            input=json.dumps(told),
            encoding="utf-8",
            check=True,
        )

    @staticmethod
    def write(source: Source, port: int, automatic: bool) -> None:
        """What the writer's process does."""
        import reverb

        longest = max(source.lengths)
        with reverb.Client(f"localhost:{port}").trajectory_writer(num_keep_alive_refs=longest) as writer:
            for name in () if automatic else source.columns:
                writer.configure((name,), num_keep_alive_refs=longest, max_chunk_length=longest)
            for batch in source.batches():
                for one in batch:
                    for t in range(len(one[source.mark])):
                        writer.append({name: values[t] for name, values in one.items()})
                    writer.create_item("replay", 1.0, {name: writer.history[name][:] for name in one})
                    writer.end_episode()

    def check(self) -> None:
        import reverb

        client = reverb.Client(f"localhost:{self._server.port}")
        if client.server_info()["replay"].current_size != len(self.source.lengths):
            raise ValueError(f"the table does not have {len(self.source.lengths)} items")
        for sample in client.sample("replay", 16, emit_timesteps=False, unpack_as_table_signature=True):
            self.source.verify(sample.data)

    def close(self) -> None:
        self._server.stop()
        del self._server


class ReverbAutomatic(Reverb):
    """The same with chunks as long as Reverb chooses, which is what it does by itself."""

    automatic = True


PEERS: dict[str, Any] = {
    "TorchRL": TorchRL,
    "TorchRL, padded": TorchRLPadded,
    "Reverb": Reverb,
    "Reverb, automatic chunks": ReverbAutomatic,
    "cpprb": Cpprb,
}


# ---------------------------------------------------------------- the script


class Worker:
    """Does what it is told to."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def measure(
        self, columns: Mapping[str, Any], lengths: list[int], seed: int, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        source = Source(columns, lengths, seed)
        few = lengths[
            -(BATCH + len(lengths) % BATCH) :
        ]  # a whole batch, and the last one, which may be smaller
        small = self._kind(Source(columns, few, seed), **options)
        small.fill()
        small.check()
        small.close()
        del small
        settle()
        before = resident()
        subject = self._kind(source, **options)
        try:
            subject.fill()
            subject.check()
            settle()
            held = resident() - before + subject.beside()
            return {"bytes": held, "payload": source.payload, "extras": subject.extras()}
        finally:
            subject.close()

    def close(self) -> None:
        """Nothing is kept."""


if __name__ == "__main__":
    if sys.argv[1] == "Reverb, writer":
        Reverb.load()
        told = json.load(sys.stdin)
        Reverb.write(Source(told["columns"], told["lengths"], told["seed"]), told["port"], told["automatic"])
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        from answering import serve

        serve(PEERS[sys.argv[1]], int(sys.argv[2]), Worker)
