"""Reverb's servers and writers."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import batches, checkpoint, episodes, memory, online
from benchmarks.peers.select import ALPHA, BETA
from benchmarks.peers.source import Source, Steps, elsewhere

PACKAGES = ("dm-reverb", "tensorflow-cpu", "numpy")
MODULES = ()


def load(task: str, threads: int) -> None:
    """Import it, and TensorFlow with so many threads."""
    global reverb, tf, checkpointers
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import reverb
    import tensorflow as tf
    from reverb.platform.default import checkpointers

    if task == "batches":
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)


def server_of(
    size: int,
    columns: Mapping[str, tuple[Any, ...]] | None,
    sampler: Callable[[Any], Any] = lambda selectors: selectors.Uniform(),
    folder: str | None = None,
    **options: Any,
) -> Any:
    """A server with a table of so many items, the oldest of which are removed."""
    signature = None
    if columns is not None:
        signature = {name: tf.TensorSpec(shape, tf.float32, name) for name, shape in columns.items()}
    table = reverb.Table(
        "replay",
        sampler=sampler(reverb.selectors),
        remover=reverb.selectors.Fifo(),
        max_size=size,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature=signature,
        **options,
    )
    saved = {} if folder is None else {"checkpointer": checkpointers.DefaultCheckpointer(folder)}
    return reverb.Server([table], **saved)


def client_of(port: int, host: str = "localhost") -> Any:
    """A client of a server."""
    return reverb.Client(f"{host}:{port}")


def samples_of(port: int, in_flight: int, workers: int, host: str = "localhost") -> Any:
    """A `TrajectoryDataset` on a server."""
    options = {"max_in_flight_samples_per_worker": in_flight, "num_workers_per_iterator": workers}
    return reverb.TrajectoryDataset.from_table_signature(f"{host}:{port}", "replay", **options)


def writer_of(port: int, columns: Any, length: int, host: str = "localhost") -> Any:
    """A `TrajectoryWriter` that makes chunks of so many steps of these columns."""
    writer = client_of(port, host).trajectory_writer(num_keep_alive_refs=length)
    for name in columns:
        writer.configure((name,), num_keep_alive_refs=length, max_chunk_length=length)
    return writer


def columns_of(sample: Any, names: Any) -> dict[str, np.ndarray]:
    """The columns of a sample; without a signature they come in the order of their names."""
    data = sample.data
    if not isinstance(data, dict):
        data = dict(zip(sorted(names), data, strict=True))
    return {name: np.asarray(data[name]) for name in names}


class Served:
    """A process of its own that does some work, whose result is a server, or None; it ends with this one's object.

    port: of the server.
    """

    def __init__(self, work: Callable[[Any], Any], told: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other, work, told), daemon=True)
        self._process.start()
        other.close()
        try:
            self.port = self._pipe.recv()
        except EOFError:
            raise RuntimeError("its process has ended") from None

    def stop(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Any, work: Callable[[Any], Any], told: Any) -> None:
    load("batches" if work is serve_trajectories else "", 2)
    server = work(told)
    pipe.send(None if server is None else server.port)
    with contextlib.suppress(EOFError):
        pipe.recv()
    if server is not None:
        server.stop()


class Batches(batches.Subject):
    """`TrajectoryDataset` in the server's own process, which hands trajectories over without gRPC.

    As documented: 3 x batch in flight, 4 or 2 workers an iterator, and tf.data makes batches, one ahead, with one
    thread or with all: `prepare` takes the fastest. They come as numpy arrays, without a copy. A trajectory is one step
    of a writer, and so one chunk a column. The importance weights come from the probabilities, as Acme computes them.
    """

    cost = 8
    settings = tuple({"workers": n, "parallel": p} for n in (4, 2) for p in (False, True))

    def __init__(self, source: Source, serve: Callable[[Source], Any] | None = None) -> None:
        super().__init__(source)
        self._server = elsewhere(self.namespace, lambda: (serve or serve_trajectories)(source))
        self.address = self._server.port

    def batches(self) -> Iterator[Any]:
        samples = samples_of(self.address, 3 * self.batch, self.setting["workers"], self.host)
        parallel = int(os.environ["OMP_NUM_THREADS"]) if self.setting["parallel"] else None
        ready = samples.batch(self.batch, drop_remainder=True, num_parallel_calls=parallel).prefetch(1)
        for sample in ready.as_numpy_iterator():
            weights = (1.0 / (sample.info.probability * len(self.source))) ** BETA
            yield sample.data, weights / weights.max()

    def rows(self, batch: Any) -> dict[str, np.ndarray]:
        return super().rows(batch[0])

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch[1])

    def close(self) -> None:
        self._server.stop()


class BatchesRemote(Batches):
    """The same, with the server in a process of its own on the same machine, reached over gRPC."""

    cost = 16

    def __init__(self, source: Source) -> None:
        super().__init__(source, functools.partial(Served, serve_trajectories))


def serve_trajectories(source: Source) -> Any:
    """A server with all trajectories, as items with their priorities."""
    sampler = lambda selectors: selectors.Prioritized(ALPHA)  # noqa: E731
    server = server_of(len(source), source.shapes(source.steps), sampler)
    with client_of(server.port).trajectory_writer(num_keep_alive_refs=1) as writer:
        for number, priority in enumerate(source.priorities.tolist()):
            writer.append(source.trajectory(number))
            item = {name: writer.history[name][-1] for name in source.columns}
            writer.create_item("replay", priority, item)
            writer.flush(block_until_num_items=64)
        writer.flush()
    return server


class Checkpoint(checkpoint.Subject):
    """`Client.checkpoint` with its default checkpointer, and a server that is started on what it wrote.

    A server in this process; an item is a trajectory, appended as one step. Each save writes everything again, and does
    not wait for the disk.
    """

    _server: Any = None

    def open(self) -> None:
        shapes = self.source.shapes(self.source.steps)
        fifo: Any = lambda selectors: selectors.Fifo()  # noqa: E731 - with one sample each: meets each item once
        self._server = server_of(len(self.source), shapes, fifo, self.folder, max_times_sampled=1)
        self._client = client_of(self._server.port)

    def add(self, first: int, rows: Steps) -> None:
        with writer_of(self._server.port, rows, 1) as writer:
            for i in range(checkpoint.UNIT):
                writer.append({name: values[i] for name, values in rows.items()})
                writer.create_item("replay", 1.0, {name: writer.history[name][-1] for name in rows})
            writer.flush()

    def save(self) -> None:
        self._client.checkpoint()

    def restore(self) -> None:
        self.open()

    def everything(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        count, unit = self._client.server_info()["replay"].current_size, checkpoint.UNIT
        samples = self._client.sample("replay", count, emit_timesteps=False)
        kept: list[dict[str, np.ndarray]] = []
        for i, sample in enumerate(samples):
            kept.append(columns_of(sample, self.source.columns))
            if len(kept) == unit:
                yield i - unit + 1, {name: np.stack([one[name] for one in kept]) for name in kept[0]}
                kept = []

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


class Memory(memory.Subject):
    """A server in this process, filled by a writer in another one; an item is a whole trajectory.

    `TrajectoryWriter`, one append a step, as the steps come from an environment, and `end_episode` after each
    trajectory, of which each column is one chunk: the fewest there can be. Chunks are compressed, which random values
    leave as large as they are.
    """

    automatic = False

    def open(self) -> None:
        self._server = server_of(len(self.source), self.source.shapes(None))

    def fill(self) -> None:
        columns = () if self.automatic else self.source.columns
        Served(write, (self.source, self._server.port, columns)).stop()  # after it has written everything

    def check(self) -> None:
        client = client_of(self._server.port)
        if client.server_info()["replay"].current_size != len(self.source):
            raise ValueError(f"the table does not have {len(self.source)} items")
        for sample in client.sample("replay", 16, emit_timesteps=False, unpack_as_table_signature=True):
            self.verify(columns_of(sample, self.source.columns))

    def close(self) -> None:
        self._server.stop()
        del self._server


class MemoryAutomatic(Memory):
    """The same with chunks as long as Reverb chooses, which is what it does by itself."""

    automatic = True


def write(told: tuple[Source, int, Any]) -> None:
    """What the process of `Memory` that writes does."""
    source, port, columns = told
    with writer_of(port, columns, source.steps) as writer:
        for _, batch in source.parts(memory.BATCH):
            for one in batch:
                for t in range(len(one[source.mark])):
                    writer.append({name: values[t] for name, values in one.items()})
                writer.create_item("replay", 1.0, {name: writer.history[name][:] for name in one})
                writer.end_episode()


class Writer(online.Subject):
    """`TrajectoryWriter`: a server in this process, for further writers over loopback.

    A whole trajectory is one append of which an item is made, single steps make an item of chunks of its length.
    """

    modes = ("whole", "steps")
    several = waits = True
    signed = True
    in_flight = 64

    def open(self) -> None:
        self._server = None
        if self.address is None:
            self._server = server_of(self.room, self.source.shapes(self.steps) if self.signed else None)
            self.address = self._server.port
        self._host = self.spec.get("host", "localhost")
        self._client = client_of(self.address, self._host)
        self._whole = self.mode in ("whole", "commits")
        self._length = 1 if self._whole else self.steps
        self._items = [[one] for one in self.each] if self._whole else self.rows()
        self._make_writer()

    def _make_writer(self) -> None:
        self._writer = writer_of(self.address, self.source.columns, self._length, self._host)

    def work(self) -> int:
        writer = self._writer
        for row in self.next(self._items):
            writer.append(row)
        self._create(writer)
        return self._length

    def _create(self, writer: Any) -> None:
        history, last = writer.history, -1 if self._whole else slice(-self._length, None)
        writer.create_item("replay", 1.0, {name: history[name][last] for name in history})
        writer.flush(block_until_num_items=0 if self.mode == "commits" else self.in_flight // self._length)

    def finish(self) -> None:
        self._writer.flush()

    def check(self) -> None:
        before = self._inserted()
        items = sum(self.work() for _ in range(5)) // self._length
        self.finish()
        if self._inserted() - before != items:
            raise ValueError(f"{self._inserted() - before} items arrived, of {items}")
        for sample in self._client.sample("replay", num_samples=32, emit_timesteps=False):
            rows, shapes = columns_of(sample, self.source.columns), self.source.shapes(1, self.steps)
            self.source.verify({name: values.reshape(shapes[name]) for name, values in rows.items()})

    def _inserted(self) -> int:
        info = self._client.server_info()["replay"]
        return int(info.rate_limiter_info.insert_stats.completed)

    def close(self) -> None:
        self._writer.close()
        if self._server is not None:
            self._server.stop()


class OlderWriter(Writer):
    """The same with Reverb's older `Writer`, which knows no columns and is faster."""

    waits = False
    signed = False

    def _make_writer(self) -> None:
        self._writer = self._client.writer(
            max_sequence_length=self._length,
            chunk_length=self._length,
            max_in_flight_items=max(8, self.in_flight // self._length),
        )

    def _create(self, writer: Any) -> None:
        writer.create_item("replay", self._length, 1.0)


class Loader(episodes.Loader):
    """A server in a process of its own that is asked over loopback; an item is a window, overlapping the one before.

    Batches come from `TrajectoryDataset` with 4 workers and 3 batches in flight for each, and turn into torch's tensors
    by way of numpy. Windows that begin before their episode are not stored: there is no padding.
    """

    workers = 4
    in_flight = 3
    ahead = workers * in_flight + 1

    def open(self) -> None:
        import torch

        self._server = Served(serve_windows, self.data.path)
        dataset = samples_of(self._server.port, self.in_flight * self.batch, self.workers)
        self._iterator = dataset.batch(self.batch, drop_remainder=True).prefetch(1).as_numpy_iterator()
        self._mask = torch.ones(self.batch, episodes.WINDOW, dtype=torch.bool)

    def next(self) -> Mapping[str, Any]:
        import torch

        data = next(self._iterator).data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the arrays must not be written to, and are not
            batch = {name: torch.from_numpy(data[name]) for name in episodes.COLUMNS}
        return {**batch, "mask": self._mask}

    def close(self) -> None:
        del self._iterator
        self._server.stop()


def serve_windows(path: str) -> Any:
    """A server with all windows of the data that lie in an episode."""
    data, window = episodes.Data(path), episodes.WINDOW
    columns, lengths = data.columns, data.lengths
    shapes = {name: (window, *values.shape[1:]) for name, values in columns.items()}
    server = server_of(int((lengths - window + 1).clip(0).sum()), shapes)
    with writer_of(server.port, columns, window) as writer:
        for begin, length in zip(data.begins.tolist(), lengths.tolist(), strict=True):
            for t in range(begin, begin + length):
                writer.append({name: values[t] for name, values in columns.items()})
                if t - begin >= window - 1:
                    item = {name: writer.history[name][-window:] for name in columns}
                    writer.create_item("replay", 1.0, item)
                    writer.flush(block_until_num_items=32)
            writer.end_episode()
    return server


KINDS: dict[str, dict[str, Any]] = {
    "batches": {"Reverb, gRPC": BatchesRemote, "Reverb, in process": Batches},
    "online": {"Reverb": Writer, "Reverb, Writer": OlderWriter},
    "checkpoint": {"Reverb": Checkpoint},
    "memory": {"Reverb": Memory, "Reverb, automatic chunks": MemoryAutomatic},
    "train": {"Reverb, gRPC": Loader},
}
