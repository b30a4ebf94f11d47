"""Batches from a table that a process of its own serves, and the bare carrier: a socket that gets as many bytes."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.peers import batches
from benchmarks.peers.gear import table_of
from benchmarks.peers.select import ALPHA, BETA
from benchmarks.peers.source import Source, elsewhere
from gear_loader.errors import RegionError

PACKAGES = MODULES = ("torch", "numpy")
_MADE = 8  # batches that the carrier sends in turn
_AHEAD = 2


class Served(batches.Subject):
    """`ReplayDataset` over `gear_loader.connect`: batches are drawn and gathered by the server, here 2 or 8 ahead."""

    settings = ({"prefetch": 2}, {"prefetch": 8})

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        name = f"bench-served-{os.getpid()}-{secrets.token_hex(4)}"
        more = max(len(source) // 10, 1024)  # so that readers may keep what is evicted
        lengths = np.resize(source.lengths, len(source) + more)
        self._table = table_of(source.columns, lengths, name=name, on_full="evict_oldest")
        for first, stacked in source.stacked(batches.CHUNK):
            count = len(stacked[source.mark])
            given = {"priority": source.priorities[first : first + count]}
            self._table.extend(stacked, lengths=np.full(count, source.steps), **given)
        self._server = elsewhere(self.namespace, lambda: self._table.serve(allow="all", host=self.host))
        self.address = self._server.url, self._server.secret.decode()
        self._remote = gear.connect(self._server.url, secret=self._server.secret)

    def batches(self) -> Iterator[Any]:
        dataset = gear.ReplayDataset(
            self._remote,
            batch_size=self.batch,
            windows=gear.Window(self.window),
            sampler=gear.Prioritized(alpha=ALPHA, beta=BETA),
            draws=gear.Draws(anchor="first"),
            prefetch=self.setting["prefetch"],
            batches_per_epoch=math.inf,
            device="cpu",
        )
        try:
            yield from dataset
        finally:
            dataset.close()

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["priority_weight"])

    def close(self) -> None:
        self._remote.close()
        self._server.stop()
        with contextlib.suppress(RegionError):
            self._table.unlink()
        self._table.close()


class Carrier(batches.Subject):
    """A socket from which ready batches are received in one piece, 2 of them asked for ahead, each by one byte."""

    prioritized = False

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._sender: Any = None

    def use(self, setting: dict[str, Any]) -> None:
        super().use(setting)
        self._end()
        random = np.random.default_rng(self.source.seed)
        made = []
        for _ in range(_MADE):
            each = [self.source.trajectory(i) for i in random.integers(len(self.source), size=self.batch)]
            made.append({name: np.stack([one[name] for one in each]) for name in self.source.columns})
        self._shapes = {name: values.shape for name, values in made[0].items()}
        ready = [b"".join(values.tobytes() for values in batch.values()) for batch in made]
        self._size = len(ready[0])
        listener = elsewhere(self.namespace, lambda: socket.create_server((self.host, 0)))
        fork = multiprocessing.get_context("fork")
        self._sender = fork.Process(target=_send_all, args=(listener, ready), daemon=True)
        self._sender.start()
        self._socket = socket.create_connection(listener.getsockname())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()
        self._socket.sendall(bytes(_AHEAD))
        self._memory = [torch.empty(self._size, dtype=torch.uint8).numpy() for _ in range(_AHEAD + 1)]

    def batches(self) -> Iterator[Any]:
        while True:
            memory = self._memory[0]
            self._memory.append(self._memory.pop(0))
            self._socket.sendall(b"\0")
            view, done = memory.data, 0
            while done < self._size:
                done += self._socket.recv_into(view[done:])
            yield memory

    def rows(self, batch: Any) -> dict[str, np.ndarray]:
        found, at = {}, 0
        for name, shape in self._shapes.items():
            size = 4 * math.prod(shape)
            found[name] = batch[at : at + size].view(np.float32).reshape(shape)
            at += size
        return found

    def _end(self) -> None:
        if self._sender is not None:
            self._socket.close()
            self._sender.terminate()
            self._sender.join()
            self._sender = None

    def close(self) -> None:
        self._end()


def _send_all(listener: socket.socket, ready: list[bytes]) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    number = 0
    while asked := connection.recv(1):
        for _ in asked:
            connection.sendall(ready[number % len(ready)])
            number += 1


KINDS: dict[str, dict[str, Any]] = {"batches": {"ours": Served, "carrier": Carrier}}
