"""TorchRL's remote replay buffer: `RemoteTensorDictReplayBuffer`, called through torch.distributed.rpc."""

from __future__ import annotations

import collections
import os
import socket
from typing import Any

import numpy as np

from benchmarks.peers import online, torchrl
from benchmarks.peers.torchrl import MODULES, PACKAGES, tensors

__all__ = ["KINDS", "MODULES", "PACKAGES", "load"]

_STORE = "store"


def load(task: str, threads: int) -> None:
    """Import it."""
    global torch, rpc, RemoteTensorDictReplayBuffer
    torchrl.load(task, threads)
    import torch
    import torch.distributed.rpc as rpc
    from torchrl.data import RemoteTensorDictReplayBuffer


_buffer: Any = None
"""The buffer of a process that makes one."""


def _extend(rows: Any) -> None:
    _buffer.extend(rows)


def _add(row: Any) -> None:
    _buffer.add(row)


def _count() -> int:
    return int(_buffer.write_count)


def _sample(rows: int) -> Any:
    return _buffer.sample(rows)


class Remote(online.Subject):
    """A process of its own has the buffer, over `LazyTensorStorage`; writers call its `add` and `extend`.

    Its carrier is TensorPipe over TCP, in a group that writers join one after another. Up to `in_flight` calls are not
    answered yet, `rpc_async`; in "batches" and "commits" each is waited for, `rpc_sync`. A row is a trajectory; single
    steps are stacked to their trajectory's TensorDict, and a row of the buffer is a step.
    """

    modes = ("whole", "batches", "steps")
    several = waits = True
    in_flight = 16

    def open(self) -> None:
        global _buffer
        single = self.mode == "steps"
        self._is_store = self.number == 0
        self.address = _join(self.spec.get("host", "127.0.0.1"), self.address, self.number)
        if self._is_store:
            rows = self.room * (self.steps if single else 1)
            storage = torchrl.data.LazyTensorStorage(rows)
            _buffer = RemoteTensorDictReplayBuffer(storage=storage, batch_size=32)
            return
        self._sent: collections.deque[Any] = collections.deque()
        self._groups = [tensors(part, len(part[self.source.mark])) for part in self.batches]
        self._rows = [tensors(one, *([self.steps] if single else [])) for one in self.each]
        self._split = [[rows[t] for t in range(self.steps)] for rows in self._rows] if single else []

    def work(self) -> int:
        if self.mode == "batches":
            group = self.next(self._groups)
            rpc.rpc_sync(_STORE, _extend, args=(group,))
            return len(group)
        if self.mode == "commits":
            rpc.rpc_sync(_STORE, _add, args=(self.next(self._rows),))
            return 1
        if self.mode == "steps":
            self._send(_extend, torch.stack(self.next(self._split)))
            return self.steps
        self._send(_add, self.next(self._rows))
        return 1

    def _send(self, call: Any, rows: Any) -> None:
        while len(self._sent) >= self.in_flight:
            self._sent.popleft().wait()
        self._sent.append(rpc.rpc_async(_STORE, call, args=(rows,)))

    def fill(self) -> None:
        if not self._is_store:
            return
        single = self.mode == "steps"
        parts = [_flat(part) if single else part for part in self.batches]
        while _buffer.write_count < self.room * (self.steps if single else 1):
            part = self.next(parts)
            _buffer.extend(tensors(part, len(part[self.source.mark])))

    def finish(self) -> None:
        while self._sent:
            self._sent.popleft().wait()

    def check(self) -> None:
        before = rpc.rpc_sync(_STORE, _count)
        rows = sum(self.work() for _ in range(5))
        self.finish()
        arrived = rpc.rpc_sync(_STORE, _count) - before
        if arrived != rows:
            raise ValueError(f"{arrived} rows arrived, of {rows}")
        sample = rpc.rpc_sync(_STORE, _sample, args=(32,))
        self.verify({name: np.asarray(sample[name]) for name in self.source.columns})

    def close(self) -> None:
        global _buffer
        if self._is_store:
            _buffer = None


def _flat(part: Any) -> Any:
    """Steps one after another, of trajectories as rows."""
    return {name: values.reshape(-1, *values.shape[2:]) for name, values in part.items()}


_joined: int | None = None
"""The port of the group that this process has joined, which it stays in for all measurements."""


def _join(host: str, port: int | None, number: int) -> int:
    global _joined
    if _joined is None:
        if port is None:
            with socket.create_server((host, 0)) as listener:
                port = int(listener.getsockname()[1])
        device = "lo" if host.startswith("127.") else "eth0"  # of a namespace
        os.environ["TP_SOCKET_IFNAME"] = device
        where = f"tcp://{host}:{port}"
        options = rpc.TensorPipeRpcBackendOptions(init_method=where, _transports=["uv"], _channels=["basic"])
        rpc.init_rpc(f"writer{number}" if number else _STORE, rank=number, rpc_backend_options=options)
        _joined = port
    return _joined


KINDS: dict[str, dict[str, Any]] = {"remote": {"TorchRL": Remote}}
