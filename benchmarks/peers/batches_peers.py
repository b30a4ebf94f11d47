"""Batches out of other libraries: a script for an interpreter that has them, which `benchmarks.batches` talks to.

    python -I benchmarks/peers/batches_peers.py ENVIRONMENT THREADS

It imports nothing of this project. Each line of standard input is a command as JSON, each line of standard output its
answer; the first line says what was imported, or why it could not be:

    {"do": "build", "name": N, "spec": {...}}       -> {}
    {"do": "prepare", "name": N, "batch": B}        -> {"setting": {...}}
    {"do": "check", "name": N, "times": K}          -> {"steps": [[...], ...], "weights": [[...], ...] or null}
    {"do": "measure", "name": N, "batches": K}      -> {"seconds": ...}
    {"do": "close"}                                 -> {}

`build` fills a store; `prepare` says how many rows a batch has from now on, tries the library's settings and answers
which was the fastest: the one that is measured. `check` compares batches with what was stored, to the byte, and answers
which step each row begins with, and what the rows weigh. `measure` begins to iterate anew, takes some batches untimed
and times the others together. `close` gives back all stores. Anything that goes wrong is answered by {"error": ...}. It
ends with its input.

A batch is what a user of the library gets: numpy arrays of TensorFlow's, a tensordict, a dict of arrays.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["ALPHA", "BETA", "PEERS", "WARM_UP", "Source", "Subject", "Worker", "measure"]

ALPHA, BETA = 0.6, 0.4
WARM_UP = 4
_CHUNK = 500  # trajectories that are made at a time
_TRIES, _TRIED = 2, 8  # how often a setting is tried, with how many batches


class Source:
    """The trajectories of a store, which every process can make again; each step says which it is.

    Args:
        spec: ``columns`` (name -> shape of a step, float32), ``steps`` of a trajectory, ``trajectories``, ``window``:
            steps of a row of a batch, ``seed``. The last column has one value a step: the number of the step among all.

    Attributes:
        mark: name of the last column.
        priorities: float32 [trajectories], uniform in (0, 1].
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.columns = {name: tuple(shape) for name, shape in spec["columns"].items()}
        self.trajectories, self.steps = int(spec["trajectories"]), int(spec["steps"])
        self.window, self.seed = int(spec["window"]), int(spec["seed"])
        if self.trajectories * self.steps > 1 << 24:
            raise ValueError("a float32 cannot number so many steps")
        self.mark = list(self.columns)[-1]
        random = np.random.default_rng([self.seed, self.trajectories])
        self.priorities = np.float32(1) - random.random(self.trajectories, dtype=np.float32)

    def trajectory(self, number: int) -> dict[str, np.ndarray]:
        """name -> float32 ``[steps, *shape]``."""
        random = np.random.default_rng([self.seed, self.trajectories, number])
        found = {
            name: random.random((self.steps, *shape), dtype=np.float32)
            for name, shape in self.columns.items()
            if name != self.mark
        }
        found[self.mark] = np.arange(number * self.steps, (number + 1) * self.steps, dtype=np.float32)
        return found

    def chunks(self) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
        """All of them in parts: which, and name -> float32 ``[n, steps, *shape]``."""
        for first in range(0, self.trajectories, _CHUNK):
            part = slice(first, min(first + _CHUNK, self.trajectories))
            each = [self.trajectory(number) for number in range(part.start, part.stop)]
            yield part, {name: np.stack([one[name] for one in each]) for name in self.columns}

    def verify(self, rows: Mapping[str, np.ndarray], batch: int) -> np.ndarray:
        """Compare rows of a batch, name -> ``[batch, window, *shape]``; int64 [batch]: the step that each begins with.

        Raises:
            ValueError: they are no windows of what is stored.
        """
        for name, shape in self.columns.items():
            if rows[name].shape != (batch, self.window, *shape):
                raise ValueError(
                    f"{name} has shape {rows[name].shape}; expected {(batch, self.window, *shape)}"
                )
        marks = rows[self.mark][:, 0]
        most = self.trajectories * self.steps
        for i, mark in enumerate(marks.tolist()):
            if not (0 <= mark < most and mark == int(mark)):
                raise ValueError(f"row {i} begins with {mark!r}, which numbers no step of {most}")
            number, first = divmod(int(mark), self.steps)
            expected = self.trajectory(number)
            for name in self.columns:
                if not np.array_equal(rows[name][i], expected[name][first : first + self.window]):
                    raise ValueError(f"{name} of row {i} differs from what was stored")
        return marks.astype(np.int64)


class Subject:
    """A store that is filled.

    Attributes:
        packages: whose versions are told. workload: whose batches it gives. prioritized: whether it draws by priority.
        settings: to choose from. setting: the one in use.
        batch: rows of a batch, set by `prepare`.
        cost: how many times longer a batch takes about than ours: it is timed over fewer.
    """

    packages: tuple[str, ...] = ()
    environment = ""
    workload = "W1"
    prioritized = True
    settings: tuple[dict[str, Any], ...] = ({},)
    batch = 0
    cost = 1

    def __init__(self, source: Source) -> None:
        self.source = source
        self.setting = self.settings[0]

    @staticmethod
    def load() -> str | None:
        """Import what it needs; a note or None."""
        return None

    def prepare(self, batch: int) -> dict[str, Any]:
        """Get ready for batches of so many rows, in the setting that is found to be the fastest, and return it."""
        self.batch = batch
        seconds = [float("inf")] * len(self.settings)
        if len(seconds) > 1:
            for _ in range(_TRIES):
                for i, setting in enumerate(self.settings):
                    self.use(setting)
                    seconds[i] = min(seconds[i], measure(self, _TRIED))
        self.use(self.settings[seconds.index(min(seconds))])
        return self.setting

    def use(self, setting: dict[str, Any]) -> None:
        """Iterate in this setting from now on."""
        self.setting = setting

    def batches(self) -> Iterator[Any]:
        """Begin to iterate; without end."""
        raise NotImplementedError

    def rows(self, batch: Any) -> dict[str, np.ndarray]:
        """The columns of a batch: name -> ``[B, window, *shape]``."""
        return {name: np.asarray(batch[name]) for name in self.source.columns}

    def weights(self, batch: Any) -> np.ndarray:
        """Importance weights of a batch drawn by priority."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


def measure(subject: Subject, batches: int) -> float:
    """Seconds that so many batches take, after some that are not timed.

    As in a user's loop, a batch is let go when the next one has come.
    """
    iterator = subject.batches()
    for _ in range(WARM_UP):
        next(iterator)
    begin = time.perf_counter()
    for _held in itertools.islice(iterator, batches):
        pass
    return time.perf_counter() - begin


# ---------------------------------------------------------------- peers


class ReverbInProcess(Subject):
    """Reverb's `TrajectoryDataset` in the server's own process, which hands trajectories over without gRPC.

    As documented: 3 x batch in flight, 4 or 2 workers an iterator, and tf.data makes batches, one ahead, with one
    thread or with all: `prepare` takes the fastest. They come as numpy arrays, without a copy. A trajectory is one step
    of a writer, and so one chunk a column. The importance weights come from the probabilities, as Acme computes them.
    """

    cost = 8
    packages = ("dm-reverb", "tensorflow-cpu", "numpy")
    environment = "reverb"
    settings = (
        {"workers": 4, "parallel": False},
        {"workers": 4, "parallel": True},
        {"workers": 2, "parallel": False},
        {"workers": 2, "parallel": True},
    )

    @staticmethod
    def load() -> str | None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import reverb  # noqa: F401
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(_threads())
        tf.config.threading.set_inter_op_parallelism_threads(_threads())
        return None

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._server: Any = None
        self.address = f"localhost:{self._serve()}"

    def _serve(self) -> int:
        import reverb
        import tensorflow as tf

        source = self.source
        table = reverb.Table(
            "replay",
            sampler=reverb.selectors.Prioritized(ALPHA),
            remover=reverb.selectors.Fifo(),
            max_size=source.trajectories,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature={n: tf.TensorSpec((source.steps, *s), tf.float32) for n, s in source.columns.items()},
        )
        self._server = reverb.Server([table])
        with reverb.Client(f"localhost:{self._server.port}").trajectory_writer(
            num_keep_alive_refs=1
        ) as writer:
            for number, priority in enumerate(source.priorities.tolist()):
                writer.append(source.trajectory(number))
                item = {name: writer.history[name][-1] for name in source.columns}
                writer.create_item("replay", priority, item)
                writer.flush(block_until_num_items=64)
            writer.flush()
        return int(self._server.port)

    def batches(self) -> Iterator[Any]:
        import reverb

        samples = reverb.TrajectoryDataset.from_table_signature(
            self.address,
            "replay",
            max_in_flight_samples_per_worker=3 * self.batch,
            num_workers_per_iterator=self.setting["workers"],
        )
        parallel = _threads() if self.setting["parallel"] else None
        ready = samples.batch(self.batch, drop_remainder=True, num_parallel_calls=parallel).prefetch(1)
        for sample in ready.as_numpy_iterator():
            weights = (1.0 / (sample.info.probability * len(self.source.priorities))) ** BETA
            yield sample.data, weights / weights.max()

    def rows(self, batch: Any) -> dict[str, np.ndarray]:
        return super().rows(batch[0])

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()


class ReverbRemote(ReverbInProcess):
    """The same, with the server in a process of its own on the same machine, reached over gRPC."""

    cost = 16

    def _serve(self) -> int:
        source = self.source
        spec = {
            "columns": source.columns,
            "trajectories": source.trajectories,
            "steps": source.steps,
            "window": source.window,
            "seed": source.seed,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), "serve", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server has ended before it was filled")
        return int(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class TorchRL(Subject):
    """TorchRL's `TensorDictPrioritizedReplayBuffer` over `LazyTensorStorage`, a trajectory a row: `sample`.

    Without prefetching or with 2 batches ahead, whichever is faster; on the CPU there is nothing to pin batches for.
    """

    cost = 4
    packages = ("torchrl", "tensordict", "torch", "numpy")
    environment = "torchrl"
    settings = ({"prefetch": 0}, {"prefetch": 2})

    @staticmethod
    def load() -> str | None:
        import torchrl.data  # noqa: F401

        return None

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage

        self._storage = LazyTensorStorage(self._room())
        buffer = self._make(None, 1)
        for _, columns in source.chunks():
            values = {name: torch.from_numpy(self._flat(column)) for name, column in columns.items()}
            buffer.extend(TensorDict(values, batch_size=[len(values[source.mark])]))
        self._buffer: Any = None

    def _room(self) -> int:
        return self.source.trajectories

    def _flat(self, column: np.ndarray) -> np.ndarray:
        return column

    def _make(self, prefetch: int | None, batch: int) -> Any:
        import torch
        from torchrl.data import TensorDictPrioritizedReplayBuffer

        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=self._storage, batch_size=batch, prefetch=prefetch
        )
        if len(self._storage) == self.source.trajectories:
            buffer.update_priority(torch.arange(len(self._storage)), torch.from_numpy(self.source.priorities))
        return buffer

    def use(self, setting: dict[str, Any]) -> None:
        super().use(setting)
        self._buffer = self._make(setting["prefetch"] or None, self.batch)

    def batches(self) -> Iterator[Any]:
        while True:
            yield self._buffer.sample()

    def rows(self, batch: Any) -> dict[str, np.ndarray]:
        return {name: batch[name].numpy() for name in self.source.columns}

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["priority_weight"].numpy())


class TorchRLSlices(TorchRL):
    """TorchRL's `SliceSampler` over `LazyTensorStorage` of single steps, with its ends given and cached.

    A window lies within its trajectory, so there is none that begins before it, and nothing is padded. The marks of
    where slices begin and end, which the sampler can add to a batch, are left out: it is faster without. A batch is
    flat: windows one after another.
    """

    cost = 8
    workload = "W2"
    prioritized = False

    def _room(self) -> int:
        return self.source.trajectories * self.source.steps

    def _flat(self, column: np.ndarray) -> np.ndarray:
        return column.reshape(-1, *column.shape[2:])

    def _make(self, prefetch: int | None, batch: int) -> Any:
        import torch
        from torchrl.data import SliceSampler, TensorDictReplayBuffer

        ends = torch.arange(1, self._room() + 1) % self.source.steps == 0
        sampler = SliceSampler(
            slice_len=self.source.window,
            ends=ends,
            cache_values=True,
            strict_length=True,
            truncated_key=None,
            init_key=None,
        )
        size = batch * self.source.window
        return TensorDictReplayBuffer(
            storage=self._storage, sampler=sampler, batch_size=size, prefetch=prefetch
        )

    def rows(self, batch: Any) -> dict[str, np.ndarray]:
        length = self.source.window
        return {
            name: batch[name].numpy().reshape(-1, length, *shape)
            for name, shape in self.source.columns.items()
        }


class Cpprb(Subject):
    """cpprb's `PrioritizedReplayBuffer`, a trajectory a row: `sample`."""

    cost = 2
    packages = ("cpprb", "numpy")
    environment = "cpprb"

    @staticmethod
    def load() -> str | None:
        import cpprb  # noqa: F401

        return None

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        from cpprb import PrioritizedReplayBuffer

        columns = {
            name: {"shape": (source.steps, *shape), "dtype": np.float32}
            for name, shape in source.columns.items()
        }
        self._buffer = PrioritizedReplayBuffer(source.trajectories, columns, alpha=ALPHA, eps=0.0)
        for part, values in source.chunks():
            self._buffer.add(**values, priorities=source.priorities[part])

    def batches(self) -> Iterator[Any]:
        while True:
            yield self._buffer.sample(self.batch, beta=BETA)

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["weights"])


PEERS: dict[str, Any] = {
    "Reverb, gRPC": ReverbRemote,
    "Reverb, in process": ReverbInProcess,
    "TorchRL": TorchRL,
    "cpprb": Cpprb,
    "TorchRL, slices": TorchRLSlices,
}


def _threads() -> int:
    """How many a library may use: `answering` says so."""
    return int(os.environ.get("OMP_NUM_THREADS", "2"))


# ---------------------------------------------------------------- the script


class Worker:
    """Does what it is told to, with the peers of its environment."""

    def __init__(self, kind: Any) -> None:
        self._environment = kind.environment
        self._subjects: dict[str, Subject] = {}

    def build(self, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        peer = PEERS[name]
        if peer.environment != self._environment:
            raise ValueError(f"{name} is of another environment, {peer.environment}")
        self._subjects[name] = peer(Source(spec))
        return {}

    def prepare(self, name: str, batch: int) -> dict[str, Any]:
        return {"setting": self._built(name).prepare(batch)}

    def check(self, name: str, times: int) -> dict[str, Any]:
        subject = self._built(name)
        iterator = subject.batches()
        steps, weights = [], []
        for _ in range(times):
            batch = next(iterator)
            steps.append(subject.source.verify(subject.rows(batch), subject.batch).tolist())
            if subject.prioritized:
                weights.append(np.asarray(subject.weights(batch), dtype=np.float64).ravel().tolist())
        return {"steps": steps, "weights": weights or None}

    def measure(self, name: str, batches: int) -> dict[str, Any]:
        gc.collect()
        gc.disable()
        try:
            return {"seconds": measure(self._built(name), batches)}
        finally:
            gc.enable()

    def close(self) -> dict[str, Any]:
        while self._subjects:
            self._subjects.popitem()[1].close()
        return {}

    def _built(self, name: str) -> Subject:
        if name not in self._subjects:
            raise RuntimeError("build comes first")
        return self._subjects[name]


def _serve_reverb(spec: str) -> None:
    """A filled Reverb server: says its port on standard output, and ends with its input."""
    port = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come before it
    ReverbInProcess.load()
    subject = ReverbInProcess(Source(json.loads(spec)))
    print(subject.address.rpartition(":")[2], file=port, flush=True)
    sys.stdin.read()
    subject.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve_reverb(sys.argv[2])
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        from answering import serve

        one = next(peer for peer in PEERS.values() if peer.environment == sys.argv[1])
        serve(one, int(sys.argv[2]), Worker)
