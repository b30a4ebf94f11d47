"""Adding to stores of other libraries: a script for an interpreter that has them, which `benchmarks.online` talks to.

    python -I benchmarks/peers/online_peers.py VARIANT THREADS

It imports nothing of this project. Each line of standard input is a command as JSON, each line of standard output its
answer; the first line says what was imported, or why it could not be:

    {"do": "build", "spec": {...}, "mode": M, "number": I, "of": W, "address": A}  -> {"address": ...}
    {"do": "fill"}                                                                 -> {}
    {"do": "run", "begin": T, "seconds": S}                                        -> {"items": ..., "seconds": ...}
    {"do": "check"}                                                                -> {}

`build` makes writer number I of W; the first one makes the store and returns where the others find it. `run` adds from
the time T of the monotonic clock on, for S seconds. Anything that goes wrong is answered by {"error": ...}. It ends
with its input. `benchmarks.online_workers` serves Gear Loader itself, and the yardsticks, with the same loop.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["MODES", "PEERS", "Source", "Subject", "Worker", "item_of", "pieces", "spin"]

MODES = ("whole", "batches", "steps", "chunks 10", "chunks 50")
"""Whole trajectories one by one, or in batches; single steps, or so many at a time, made a trajectory when complete."""


def item_of(mode: str) -> str:
    """What a mode's rate counts."""
    return "trajectory" if mode in ("whole", "batches") else "step"


def pieces(mode: str, steps: int) -> list[slice]:
    """The parts of a trajectory that are appended at a time."""
    count = int(mode.split()[1]) if mode.startswith("chunks") else 1
    return [slice(first, min(first + count, steps)) for first in range(0, steps, count)]


class Source:
    """The trajectories that a writer adds over and over; each says whose it is and which.

    Args:
        spec: ``columns`` (name -> shape of a step, float32; the last one is marked), ``steps`` of a trajectory,
            ``trajectories`` that the store has room for, ``sources``, ``batch``, ``seed``.
        number: of the writer.

    Attributes:
        stacked: name -> float32 ``[sources, steps, *shape]``.
        each: for every trajectory name -> ``[steps, *shape]``, views.
    """

    def __init__(self, spec: Mapping[str, Any], number: int) -> None:
        random = np.random.default_rng([spec["seed"], number])
        self.spec, self.count, self.steps = spec, int(spec["sources"]), int(spec["steps"])
        self.stacked = {
            name: random.random((self.count, self.steps, *shape), dtype=np.float32)
            for name, shape in spec["columns"].items()
        }
        self.mark = list(self.stacked)[-1]
        marks = self.stacked[self.mark].reshape(self.count, self.steps, -1)
        marks[:, 0, 0] = number * self.count + np.arange(self.count)
        self.each = [{name: values[i] for name, values in self.stacked.items()} for i in range(self.count)]
        self._others = {number: self}

    @property
    def batches(self) -> list[dict[str, np.ndarray]]:
        """The same in batches."""
        batch = min(int(self.spec["batch"]), self.count)
        firsts = range(0, self.count - batch + 1, batch)
        return [{n: values[first : first + batch] for n, values in self.stacked.items()} for first in firsts]

    def verify(self, rows: Mapping[str, np.ndarray]) -> None:
        """Compare whole trajectories, of any writer, name -> ``[n, steps, *shape]``.

        Raises:
            ValueError: one is none that a writer adds.
        """
        marks = rows[self.mark].reshape(len(rows[self.mark]), -1)[:, 0]
        for i, mark in enumerate(marks.tolist()):
            number, which = divmod(int(mark), self.count) if 0 <= mark < 2**24 else (-1, 0)
            if mark != int(mark) or number < 0:
                raise ValueError(f"row {i} begins with {mark!r}, which marks no trajectory")
            if number not in self._others:
                self._others[number] = Source(self.spec, number)
            self._equal(rows, i, self._others[number].each[which])

    def verify_steps(self, rows: Mapping[str, np.ndarray]) -> None:
        """Compare single steps of this writer, name -> ``[n, *shape]``.

        Raises:
            ValueError: one is none that it adds.
        """
        flat = {n: values.reshape(-1, *values.shape[2:]) for n, values in self.stacked.items()}
        first = next(iter(flat))
        for i, row in enumerate(rows[first]):
            found = np.flatnonzero((flat[first] == row).reshape(len(flat[first]), -1).all(1))
            if not len(found):
                raise ValueError(f"{first} of step {i} is none that was added")
            self._equal(rows, i, {name: values[found[0]] for name, values in flat.items()})

    @staticmethod
    def _equal(rows: Mapping[str, np.ndarray], i: int, expected: Mapping[str, np.ndarray]) -> None:
        for name, values in expected.items():
            if not np.array_equal(rows[name][i].reshape(values.shape), values):
                raise ValueError(f"{name} of row {i} differs from what was added")


class Subject:
    """A writer of a store.

    Attributes:
        packages: whose versions are told. modes: what it can do. several: whether more processes may write.
        address: where others find the store.
    """

    packages: tuple[str, ...] = ()
    modes: tuple[str, ...] = MODES
    several = False
    address: Any = None

    def __init__(
        self, spec: Mapping[str, Any], mode: str, number: int = 0, of: int = 1, address: Any = None
    ) -> None:
        self.spec, self.mode, self.number, self.of, self.address = spec, mode, number, of, address
        self.source = Source(spec, number)
        self.turn = 0
        self.open()

    @staticmethod
    def load() -> str | None:
        """Import what it needs; a note or None."""
        return None

    def open(self) -> None:
        """Make the store or attach to it, and what is needed to write."""
        raise NotImplementedError

    def work(self) -> int:
        """Add a trajectory or a batch of them; returns how many items that were."""
        raise NotImplementedError

    def fill(self) -> None:
        """Make the store full."""
        if self.number == 0:
            done, units = (
                0,
                self.spec["trajectories"] * (1 if item_of(self.mode) == "trajectory" else self.spec["steps"]),
            )
            while done < units:
                done += self.work()
            self.finish()

    def finish(self) -> None:
        """Wait until everything is stored."""

    def check(self) -> None:
        """Raise `ValueError` unless what was added is there."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""

    def next(self, things: list[Any]) -> Any:
        """The next thing to add."""
        self.turn += 1
        return things[(self.turn - 1) % len(things)]


def spin(subject: Subject, begin: float, seconds: float) -> dict[str, Any]:
    """Add for so many seconds from a point of the monotonic clock on."""
    gc.disable()  # it was collected when the writer was made, which takes longer than a start may be late
    try:
        time.sleep(max(0.0, begin - time.monotonic()))
        start = now = time.monotonic()
        items = 0
        while now - start < seconds:
            items += subject.work()
            now = time.monotonic()
        subject.finish()
        return {"items": items, "seconds": time.monotonic() - start}
    finally:
        gc.enable()


# ---------------------------------------------------------------- peers


class Reverb(Subject):
    """Reverb's `TrajectoryWriter`: a server in this process, for further writers over loopback.

    A whole trajectory is one append of which an item is made, single steps make an item of chunks of its length.
    """

    packages = ("dm-reverb", "tensorflow-cpu", "numpy")
    environment = "reverb"
    modes = ("whole", "steps")
    several = True
    signed = True
    in_flight = 64

    @staticmethod
    def load() -> str | None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import reverb  # noqa: F401
        import tensorflow  # noqa: F401

        return None

    def open(self) -> None:
        import reverb
        import tensorflow as tf

        self._reverb, self._server = reverb, None
        steps = self.source.steps
        if self.address is None:
            columns = self.spec["columns"].items()
            table = reverb.Table(
                "replay",
                sampler=reverb.selectors.Uniform(),
                remover=reverb.selectors.Fifo(),
                max_size=self.spec["trajectories"],
                rate_limiter=reverb.rate_limiters.MinSize(1),
                signature={n: tf.TensorSpec((steps, *s), tf.float32) for n, s in columns}
                if self.signed
                else None,
            )
            self._server = reverb.Server([table])
            self.address = self._server.port
        self._client = reverb.Client(f"localhost:{self.address}")
        self._steps = 1 if self.mode == "whole" else steps
        self._rows = [[{n: v[t] for n, v in one.items()} for t in range(steps)] for one in self.source.each]
        self._make_writer()

    def _make_writer(self) -> None:
        self._writer = self._client.trajectory_writer(num_keep_alive_refs=self._steps)
        for name in self.spec["columns"]:
            self._writer.configure((name,), num_keep_alive_refs=self._steps, max_chunk_length=self._steps)

    def work(self) -> int:
        writer = self._writer
        if self.mode == "whole":
            writer.append(self.next(self.source.each))
            history = writer.history
            item = {name: history[name][-1] for name in history}
        else:
            for row in self.next(self._rows):
                writer.append(row)
            history = writer.history
            item = {name: history[name][-self._steps :] for name in history}
        writer.create_item("replay", 1.0, item)
        writer.flush(block_until_num_items=self.in_flight // self._steps)
        return self._steps

    def finish(self) -> None:
        self._writer.flush()

    def check(self) -> None:
        before = self._inserted()
        items = sum(self.work() for _ in range(5))
        self.finish()
        if self._inserted() - before != items // self._steps:
            raise ValueError(f"{self._inserted() - before} items arrived, of {items // self._steps}")
        found: dict[str, list[np.ndarray]] = {name: [] for name in self.spec["columns"]}
        for sample in self._client.sample("replay", num_samples=32, emit_timesteps=False):
            data = sample.data
            if not isinstance(
                data, dict
            ):  # columns in the order of their names, where the table has no signature
                data = dict(zip(sorted(found), data, strict=True))
            for name, values in found.items():
                values.append(np.asarray(data[name]).reshape(self.source.each[0][name].shape))
        self.source.verify({name: np.stack(values) for name, values in found.items()})

    def _inserted(self) -> int:
        info = self._client.server_info()["replay"]
        return int(info.rate_limiter_info.insert_stats.completed)

    def close(self) -> None:
        self._writer.close()
        if self._server is not None:
            self._server.stop()


class ReverbWriter(Reverb):
    """The same with Reverb's older `Writer`, which knows no columns and is faster."""

    signed = False

    def _make_writer(self) -> None:
        self._writer = self._client.writer(
            max_sequence_length=self._steps,
            chunk_length=self._steps,
            max_in_flight_items=max(8, self.in_flight // self._steps),
        )

    def work(self) -> int:
        writer = self._writer
        for row in [self.next(self.source.each)] if self.mode == "whole" else self.next(self._rows):
            writer.append(row)
        writer.create_item("replay", self._steps, 1.0)
        return self._steps

    def finish(self) -> None:
        self._writer.flush()


class TorchRL(Subject):
    """TorchRL's `TensorDictReplayBuffer` over `LazyTensorStorage`: `add` and `extend`."""

    packages = ("torchrl", "tensordict", "torch")
    environment = "torchrl"
    modes = ("whole", "batches", "steps")

    @staticmethod
    def load() -> str | None:
        import torchrl.data  # noqa: F401

        return None

    def open(self) -> None:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        rows = self.spec["trajectories"] * (self.source.steps if self.mode == "steps" else 1)
        self._buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=32)

        def tensors(values: Mapping[str, np.ndarray], *size: int) -> Any:
            return TensorDict(
                {n: torch.from_numpy(np.asarray(v)) for n, v in values.items()}, batch_size=size
            )

        self._batches = [tensors(part, len(part[self.source.mark])) for part in self.source.batches]
        if self.mode == "steps":
            self._batches = [tensors(one, self.source.steps) for one in self.source.each]
        each = self.source.each
        self._each = [tensors(one) for one in each] if self.mode == "whole" else []
        self._rows = (
            [[part[t] for t in range(len(part))] for part in self._batches] if self.mode == "steps" else []
        )

    def work(self) -> int:
        if self.mode == "whole":
            self._buffer.add(self.next(self._each))
            return 1
        if self.mode == "batches":
            return self._extend()
        rows = self.next(self._rows)
        for row in rows:
            self._buffer.add(row)
        return len(rows)

    def _extend(self) -> int:
        batch = self.next(self._batches)
        self._buffer.extend(batch)
        return len(batch)

    def fill(self) -> None:
        while len(self._buffer) < self._buffer._storage.max_size:
            self._extend()

    def check(self) -> None:
        self.work()
        rows = {
            name: values.numpy()
            for name, values in self._buffer.sample().items()
            if name in self.spec["columns"]
        }
        (self.source.verify_steps if self.mode == "steps" else self.source.verify)(rows)


class Cpprb(Subject):
    """cpprb's `ReplayBuffer.add`, of one row or of several."""

    packages = ("cpprb", "numpy")
    environment = "cpprb"
    modes = ("whole", "batches", "steps")

    @staticmethod
    def load() -> str | None:
        import cpprb  # noqa: F401

        return None

    def open(self) -> None:
        from cpprb import ReplayBuffer

        single, steps = self.mode == "steps", self.source.steps
        self._size = self.spec["trajectories"] * (steps if single else 1)
        columns = {
            name: {"shape": shape or 1 if single else (steps, *shape), "dtype": np.float32}
            for name, shape in ((name, tuple(shape)) for name, shape in self.spec["columns"].items())
        }
        self._buffer = ReplayBuffer(self._size, columns)
        self._batches = self.source.each if single else self.source.batches
        self._rows = [[{n: v[t] for n, v in one.items()} for t in range(steps)] for one in self.source.each]

    def work(self) -> int:
        if self.mode == "whole":
            self._buffer.add(**self.next(self.source.each))
            return 1
        if self.mode == "batches":
            return self._extend()
        rows = self.next(self._rows)
        for row in rows:
            self._buffer.add(**row)
        return len(rows)

    def _extend(self) -> int:
        batch = self.next(self._batches)
        self._buffer.add(**batch)
        return len(batch[self.source.mark])

    def fill(self) -> None:
        while self._buffer.get_stored_size() < self._size:
            self._extend()

    def check(self) -> None:
        self.work()
        rows = self._buffer.sample(32)
        (self.source.verify_steps if self.mode == "steps" else self.source.verify)(rows)


PEERS: dict[str, Any] = {
    "Reverb": Reverb,
    "Reverb, Writer": ReverbWriter,
    "TorchRL": TorchRL,
    "cpprb": Cpprb,
}


# ---------------------------------------------------------------- the script


class Worker:
    """Does what it is told to."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._subject: Subject | None = None

    def build(self, **arguments: Any) -> dict[str, Any]:
        self.close()  # first gives back what the one before held
        self._subject = self._kind(**arguments)
        gc.collect()
        return {"address": self._built().address}

    def fill(self) -> dict[str, Any]:
        self._built().fill()
        return {}

    def run(self, begin: float, seconds: float) -> dict[str, Any]:
        return spin(self._built(), begin, seconds)

    def check(self) -> dict[str, Any]:
        self._built().check()
        return {}

    def close(self) -> dict[str, Any]:
        if self._subject is not None:
            subject, self._subject = self._subject, None
            subject.close()
        return {}

    def _built(self) -> Subject:
        if self._subject is None:
            raise RuntimeError("build comes first")
        return self._subject


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from answering import serve

    serve(PEERS[sys.argv[1]], int(sys.argv[2]), Worker)
