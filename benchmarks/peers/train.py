"""Training on batches of a loader as a task, and the loop that is timed."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import torch

from benchmarks.peers import policy, source
from benchmarks.peers.episodes import Data, verify


class Worker(source.Worker):
    """A loader, and a learner that is fed by it."""

    learner: Any = None
    ready: Any = None

    def build(self, data: str, batch: int, seed: int, device: str) -> None:
        self.close()  # first gives back what the one before held
        self.held = self.kind(Data(data), batch, seed, torch.device(device))

    def check(self) -> None:
        """Compare what it delivers with the data."""
        loader = self.subject
        firsts = [verify(loader.next(), loader.data) for _ in range(3)]
        alike = len(np.unique(np.concatenate(firsts)))
        if loader.varied and alike <= loader.batch:
            raise ValueError(f"3 batches of {loader.batch} hold only {alike} different windows")

    def reset(self, weights: str) -> dict[str, Any]:
        """Start training again from weights, and tell their loss on the first windows of the data."""
        loader = self.subject
        self.learner = policy.Learner(loader.data, weights, loader.device)
        first = policy.first_windows(loader.data)
        batch = {name: values.to(loader.device) for name, values in first.items()}
        with torch.no_grad():
            return {"loss": float(self.learner.policy.loss(batch))}

    def run(self, steps: int, ready: bool = False) -> dict[str, Any]:
        """Train; `ready`: on one batch, which is there already."""
        loader, learner = self.subject, self._learning
        for _ in range(loader.ahead + 1):  # what was made while others were measured does not count
            batch = loader.next()
            self.ready = self.ready or {name: values.clone() for name, values in batch.items()}
        take = itertools.repeat(self.ready).__next__ if ready else loader.next
        waiting, clock = 0.0, time.perf_counter
        with source.undisturbed():
            begin = clock()
            for _ in range(steps):
                before = clock()
                batch = take()
                waiting += clock() - before
                loss = learner.step(batch)
            value = float(loss)  # waits for the device
            return {"seconds": clock() - begin, "waiting": waiting, "loss": value}

    def weights(self, path: str) -> None:
        policy.save(self._learning.policy, path)

    def close(self) -> dict[str, Any]:
        self.ready = self.learner = None
        return super().close()

    @property
    def _learning(self) -> Any:
        if self.learner is None:
            raise RuntimeError("reset comes first")
        return self.learner
