"""Training a small decision transformer on batches of different loaders: a script that `benchmarks.train` talks to.

    python -I benchmarks/peers/train_peers.py LOADER THREADS

It imports nothing of this project. Each line of standard input is a command as JSON, each line of standard output its
answer; the first line says what was imported, or why it could not be:

    {"do": "build", "data": PATH, "batch": B, "seed": S, "device": D}  -> {"seconds": ...}
    {"do": "check"}                                                    -> {"windows": ...}
    {"do": "reset", "weights": PATH}                                   -> {"loss": ...}
    {"do": "run", "steps": N, "ready": bool}                           -> {"seconds", "waiting", "loss"}
    {"do": "weights", "path": PATH}                                    -> {}

`build` makes the loader, `check` compares what it delivers with the data, `reset` starts training anew from weights
and tells their loss on the first windows of the data. `run` trains; ``ready``: on one batch, which is there already.
Anything that goes wrong is answered by {"error": ...}. It ends with its input. `benchmarks.train_worker` serves Gear
Loader with the same classes: model, optimizer, checks and the loop that is timed are here, once for all.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

__all__ = [
    "COLUMNS",
    "LOADERS",
    "WINDOW",
    "Data",
    "Learner",
    "Loader",
    "Policy",
    "Worker",
    "load",
    "save",
    "verify",
]

Batch = Mapping[str, torch.Tensor]
WINDOW = 20
"""Steps that the model looks back on."""
COLUMNS = ("observation", "action", "return_to_go", "step")
SERVER = "server"


class Data:
    """Episodes one after another, from a file.

    Attributes:
        path: the file.
        columns: name -> float32 ``[steps, ...]``; ``step`` is a step's number in its episode.
        lengths: int64, of the episodes.
        horizon: steps that an episode has at most. scale: what returns are divided by.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with np.load(path) as file:
            self.columns = {name: file[name] for name in COLUMNS}
            self.lengths = file["lengths"]
            self.horizon, self.scale = float(file["horizon"]), float(file["scale"])
        self.begins = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])

    @property
    def first(self) -> dict[str, torch.Tensor]:
        """The first windows of some episodes, as a batch."""
        rows = self.begins[:8, None] + np.arange(min(WINDOW, int(self.lengths.min())))
        batch = {name: torch.from_numpy(values[rows]) for name, values in self.columns.items()}
        return {**batch, "mask": torch.ones(rows.shape, dtype=torch.bool)}


# ---------------------------------------------------------------- the model and how it learns


class Block(nn.Module):
    """One layer of a transformer: attention to what came before, then a small network for each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, tokens, width] -> the same
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, tokens, width / heads]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.network(self.network_norm(x))


class Policy(nn.Module):
    """(return to go, observation, action) of the last steps -> the action at each of them.

    A step is one token: its return to go and observation, and the action before. Where that is not in the window,
    it is zeros.

    Args:
        data: whose mean and deviation observations are normalized with.
    """

    mean: torch.Tensor
    std: torch.Tensor
    scales: torch.Tensor

    def __init__(self, data: Data, *, width: int = 48, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        observations = torch.from_numpy(data.columns["observation"])
        actions = data.columns["action"].shape[1]
        self.register_buffer("mean", observations.mean(0))
        self.register_buffer("std", observations.std(0) + 1e-3)
        self.register_buffer("scales", torch.tensor([data.horizon, data.scale]))
        self.embed = nn.Linear(2 + observations.shape[1] + actions, width)
        self.place = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.act = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, actions), nn.Tanh())

    def forward(self, batch: Batch) -> torch.Tensor:  # [B, L, ...] -> [B, L, actions]
        horizon, scale = self.scales
        # What is to come, altogether and for each step that is left.
        total = batch["return_to_go"] / scale
        to_come = torch.stack((total, total * horizon / (horizon - batch["step"])), dim=-1)
        before = F.pad(batch["action"][:, :-1], (0, 0, 1, 0))
        seen = (batch["observation"] - self.mean) / self.std
        tokens = self.embed(torch.cat((to_come, seen, before), dim=-1))
        return self.act(self.blocks(tokens + self.place[: tokens.shape[1]]))  # type: ignore[no-any-return]

    def loss(self, batch: Batch) -> torch.Tensor:
        """Of the actions of steps that exist."""
        mask = batch["mask"].unsqueeze(-1)
        wrong = (self(batch) - batch["action"]).square() * mask
        return wrong.sum() / (mask.sum() * wrong.shape[-1])


class Learner:
    """A policy that learns: AdamW with a warm-up, gradients clipped.

    Args:
        data, weights, device: the policy's; see `load`.
    """

    def __init__(self, data: Data, weights: str, device: torch.device) -> None:
        self.policy = load(Policy(data), weights).to(device)
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), lr=2e-4, weight_decay=1e-2)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda i: min(1.0, (i + 1) / 100))

    def step(self, batch: Batch) -> torch.Tensor:
        """One training step; returns the loss before it."""
        loss = self.policy.loss(batch)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return loss.detach()


def save(policy: Policy, path: str) -> None:
    """Write a policy's weights."""
    np.savez(path, **{name: value.cpu().numpy() for name, value in policy.state_dict().items()})


def load(policy: Policy, path: str) -> Policy:
    """The policy with the weights of a file."""
    with np.load(path) as file:
        policy.load_state_dict({name: torch.from_numpy(file[name]) for name in file.files})
    return policy


# ---------------------------------------------------------------- what loaders deliver


def verify(batch: Batch, data: Data) -> np.ndarray:
    """Compare a batch with the data, byte for byte.

    A row holds successive steps of one episode, then padding: zeros where the mask is False. It is shorter than the
    window only at the begin of an episode.

    Returns:
        The first step of each row, int64 [B], counted over all episodes.

    Raises:
        ValueError: it holds something else.
    """
    found = {name: batch[name].cpu().numpy() for name in COLUMNS}
    mask = batch["mask"].cpu().numpy()
    lengths = mask.sum(1)
    if mask.shape[1] != WINDOW or not np.array_equal(mask, np.arange(WINDOW) < lengths[:, None]):
        raise ValueError("steps that exist are not the first ones of the rows")
    places = {row.tobytes(): i for i, row in enumerate(data.columns["observation"])}
    firsts = np.array([places.get(row[0].tobytes(), -1) for row in found["observation"]])
    if (firsts < 0).any():
        raise ValueError(f"row {int(firsts.argmin())} begins with a step that is not in the data")
    steps = firsts[:, None] + np.arange(WINDOW)
    episode = np.searchsorted(data.begins, firsts, side="right") - 1
    ends = data.begins[episode] + data.lengths[episode]
    if (firsts + lengths > ends).any():
        raise ValueError("a row goes on beyond the end of its episode")
    if ((lengths < WINDOW) & (firsts != data.begins[episode])).any():
        raise ValueError("a row is short although its episode began earlier")
    for name, values in data.columns.items():
        expected = values[np.minimum(steps, len(values) - 1)]
        expected[~mask] = 0
        if found[name].dtype != expected.dtype or found[name].tobytes() != expected.tobytes():
            raise ValueError(f"{name} differs from the data")
    return firsts


class Loader:
    """What delivers batches: name -> ``[batch, WINDOW, ...]`` of `COLUMNS`, and their mask.

    Attributes:
        packages: whose versions are told. environment: the one of `make.sh` that has them.
        ahead: batches that it may have ready before they are asked for.
    """

    packages: tuple[str, ...] = ("torch", "numpy")
    environment: str | None = None
    ahead = 0

    @staticmethod
    def load() -> str | None:
        """Import what it needs; a note or None."""
        return None

    def __init__(self, data: Data, batch: int, seed: int, device: torch.device) -> None:
        self.data, self.batch, self.seed, self.device = data, batch, seed, device
        self.open()

    def open(self) -> None:
        """Take over the data."""
        raise NotImplementedError

    def next(self) -> Batch:
        """The next batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A map-style data set: the window that ends at each step, with padding where the episode had not begun."""

    def __init__(self, data: Data) -> None:
        self._columns = {name: torch.from_numpy(values) for name, values in data.columns.items()}
        self._begins = np.repeat(data.begins, data.lengths).tolist()

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, last: int) -> dict[str, torch.Tensor]:
        first = max(self._begins[last], last - WINDOW + 1)
        count = last + 1 - first
        row = {"mask": torch.arange(WINDOW) < count}
        for name, values in self._columns.items():
            row[name] = values[first : last + 1]
            if count < WINDOW:
                row[name] = F.pad(row[name], (0, 0) * (values.ndim - 1) + (0, WINDOW - count))
        return row


class MapStyle(Loader):
    """`DataLoader` over a map-style data set, windows drawn uniformly over steps with replacement.

    With CUDA, batches are pinned and copied without waiting.
    """

    workers = 0

    def open(self) -> None:
        torch.manual_seed(self.seed)
        windows = Windows(self.data)
        cuda = self.device.type == "cuda"
        order = torch.utils.data.RandomSampler(windows, replacement=True, num_samples=2**50)
        self._iterator = iter(
            torch.utils.data.DataLoader(
                windows, batch_size=self.batch, sampler=order, num_workers=self.workers, pin_memory=cuda
            )
        )

    def next(self) -> Batch:
        batch = next(self._iterator)
        return {name: values.to(self.device, non_blocking=True) for name, values in batch.items()}

    def close(self) -> None:
        del self._iterator  # ends its workers


class MapStyleWorkers(MapStyle):
    """The same with two worker processes, each two batches ahead."""

    workers = 2
    ahead = 4


class PlainTorch(Loader):
    """Plain indexing of whole tensors by the numbers of all steps of a batch, as one writes it for such windows."""

    def open(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        self._columns = {name: torch.from_numpy(values) for name, values in self.data.columns.items()}
        self._begins = torch.from_numpy(np.repeat(self.data.begins, self.data.lengths))

    def next(self) -> Batch:
        last = torch.randint(len(self._begins), (self.batch,), generator=self._random)
        first = torch.maximum(self._begins[last], last - WINDOW + 1)
        steps = first[:, None] + torch.arange(WINDOW)
        mask = steps <= last[:, None]
        steps = torch.where(mask, steps, 0)
        batch = {"mask": mask}
        for name, values in self._columns.items():
            rows = values[steps]
            batch[name] = rows.masked_fill_(~mask.view(*mask.shape, *(1,) * (rows.ndim - 2)), 0)
        return {name: values.to(self.device) for name, values in batch.items()}


class Ready(Loader):
    """The yardstick: one batch, which is there already."""

    def open(self) -> None:
        loader = PlainTorch(self.data, self.batch, self.seed, self.device)
        self._batch = loader.next()

    def next(self) -> Batch:
        return self._batch


class TorchRL(Loader):
    """`TensorDictReplayBuffer` over `LazyTensorStorage`; `SliceSampler` with its boundaries cached.

    It draws a trajectory, then a window that lies in it as a whole: there is no padding. Ends are found by ``end_key``,
    which its documentation prefers.
    """

    packages = ("torchrl", "tensordict", "torch")
    environment = "torchrl"

    @staticmethod
    def load() -> str | None:
        import torchrl.data  # noqa: F401

        return None

    def open(self) -> None:
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

        torch.manual_seed(self.seed)
        steps = int(self.data.lengths.sum())
        done = torch.zeros(steps, 1, dtype=torch.bool)
        done[self.data.begins + self.data.lengths - 1] = True
        columns: dict[Any, Any] = {
            name: torch.from_numpy(values) for name, values in self.data.columns.items()
        }
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(steps),
            sampler=SliceSampler(
                slice_len=WINDOW, end_key="done", truncated_key=None, init_key=None, cache_values=True
            ),
            batch_size=self.batch * WINDOW,
        )
        self._buffer.extend(TensorDict({**columns, "done": done}, batch_size=[steps]))
        self._mask = torch.ones(self.batch, WINDOW, dtype=torch.bool)

    def next(self) -> Batch:
        sample = self._buffer.sample()
        batch = {name: sample[name].unflatten(0, (self.batch, WINDOW)) for name in COLUMNS}
        return {**batch, "mask": self._mask}


class Reverb(Loader):
    """A server in a process of its own that is asked over loopback; an item is a window, overlapping the one before.

    Batches come from `TrajectoryDataset` with 4 workers and 3 batches in flight for each, and turn into torch's tensors
    by way of numpy. Windows that begin before their episode are not stored: there is no padding.
    """

    packages = ("dm-reverb", "tensorflow-cpu", "torch", "numpy")
    environment = "reverb"
    workers = 4
    in_flight = 3
    ahead = workers * in_flight + 1

    @staticmethod
    def load() -> str | None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import reverb  # noqa: F401
        import tensorflow  # noqa: F401

        return None

    def open(self) -> None:
        import reverb

        dataset = reverb.TrajectoryDataset.from_table_signature(
            f"localhost:{self._serve()}",
            "replay",
            max_in_flight_samples_per_worker=self.in_flight * self.batch,
            num_workers_per_iterator=self.workers,
        )
        self._iterator = dataset.batch(self.batch, drop_remainder=True).prefetch(1).as_numpy_iterator()
        self._mask = torch.ones(self.batch, WINDOW, dtype=torch.bool)

    def _serve(self) -> int:
        command = [sys.executable, "-I", __file__, SERVER, self.data.path]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )
        line = self._server.stdout.readline()  # type: ignore[union-attr]
        if not line.strip():
            raise RuntimeError("its server has ended")
        return int(line)

    def next(self) -> Batch:
        data = next(self._iterator).data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the arrays must not be written to, and are not
            batch = {name: torch.from_numpy(data[name]) for name in COLUMNS}
        return {**batch, "mask": self._mask}

    def close(self) -> None:
        del self._iterator
        self._server.stdin.close()  # type: ignore[union-attr]
        self._server.wait()


def reverb_server(data: Data) -> Any:
    """A server of Reverb's with all windows of the data that lie in an episode."""
    import reverb
    import tensorflow as tf

    columns, lengths = data.columns, data.lengths
    table = reverb.Table(
        "replay",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=int((lengths - WINDOW + 1).clip(0).sum()),
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature={n: tf.TensorSpec((WINDOW, *v.shape[1:]), tf.float32, n) for n, v in columns.items()},
    )
    server = reverb.Server([table])
    with reverb.Client(f"localhost:{server.port}").trajectory_writer(num_keep_alive_refs=WINDOW) as writer:
        for name in columns:
            writer.configure((name,), num_keep_alive_refs=WINDOW, max_chunk_length=WINDOW)
        for begin, length in zip(data.begins.tolist(), lengths.tolist(), strict=True):
            for t in range(begin, begin + length):
                writer.append({name: values[t] for name, values in columns.items()})
                if t - begin >= WINDOW - 1:
                    writer.create_item(
                        "replay", 1.0, {name: writer.history[name][-WINDOW:] for name in columns}
                    )
                    writer.flush(block_until_num_items=32)
            writer.end_episode()
    return server


def _serve_reverb(path: str) -> None:
    """Serve until the input ends; the port is the only line of standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come before it
    Reverb.load()
    server = reverb_server(Data(path))
    print(server.port, file=answers, flush=True)
    sys.stdin.read()
    server.stop()


LOADERS: dict[str, Any] = {
    "batch ready": Ready,
    "plain torch": PlainTorch,
    "DataLoader, map-style": MapStyle,
    "DataLoader, map-style, 2 workers": MapStyleWorkers,
    "TorchRL": TorchRL,
    "Reverb, gRPC": Reverb,
}


# ---------------------------------------------------------------- the script


class Worker:
    """Does what it is told to: a loader, and a learner that is fed by it."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._loader: Loader | None = None
        self._learner: Learner | None = None
        self._ready: Batch | None = None

    def build(self, data: str, batch: int, seed: int, device: str) -> dict[str, Any]:
        self.close()  # first gives back what the one before held
        begin = time.perf_counter()
        self._loader = self._kind(Data(data), batch, seed, torch.device(device))
        return {"seconds": time.perf_counter() - begin}

    def check(self) -> dict[str, Any]:
        loader = self._built()
        firsts = [verify(loader.next(), loader.data) for _ in range(3)]
        alike = len(np.unique(np.concatenate(firsts)))
        if not isinstance(loader, Ready) and alike <= loader.batch:
            raise ValueError(f"3 batches of {loader.batch} hold only {alike} different windows")
        return {"windows": sum(map(len, firsts))}

    def reset(self, weights: str) -> dict[str, Any]:
        loader = self._built()
        self._learner = Learner(loader.data, weights, loader.device)
        batch = {name: values.to(loader.device) for name, values in loader.data.first.items()}
        with torch.no_grad():
            return {"loss": float(self._learner.policy.loss(batch))}

    def run(self, steps: int, ready: bool = False) -> dict[str, Any]:
        loader, learner = self._built(), self._learner
        if learner is None:
            raise RuntimeError("reset comes first")
        for batch in self._settled(loader):  # what was made while others were measured does not count
            self._ready = self._ready or {name: values.clone() for name, values in batch.items()}
        gc.collect()
        gc.disable()
        try:
            return self._timed(itertools.repeat(self._ready) if ready else None, loader, learner, steps)
        finally:
            gc.enable()

    @staticmethod
    def _settled(loader: Loader) -> Iterator[Batch]:
        return (loader.next() for _ in range(loader.ahead + 1))

    @staticmethod
    def _timed(ready: Iterator[Any] | None, loader: Loader, learner: Learner, steps: int) -> dict[str, Any]:
        waiting, clock = 0.0, time.perf_counter
        take = loader.next if ready is None else ready.__next__
        loss = torch.zeros(())
        begin = clock()
        for _ in range(steps):
            before = clock()
            batch = take()
            waiting += clock() - before
            loss = learner.step(batch)
        value = float(loss)  # waits for the device
        return {"seconds": clock() - begin, "waiting": waiting, "loss": value}

    def weights(self, path: str) -> dict[str, Any]:
        if self._learner is None:
            raise RuntimeError("reset comes first")
        save(self._learner.policy, path)
        return {}

    def close(self) -> dict[str, Any]:
        self._ready = self._learner = None
        if self._loader is not None:
            loader, self._loader = self._loader, None
            loader.close()
        return {}

    def _built(self) -> Loader:
        if self._loader is None:
            raise RuntimeError("build comes first")
        return self._loader


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if sys.argv[1] == SERVER:
        _serve_reverb(sys.argv[2])
        sys.exit()
    from answering import serve

    serve(LOADERS[sys.argv[1]], int(sys.argv[2]), Worker)
