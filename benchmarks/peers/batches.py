"""Batches as a task: a store is filled, iterated over in its fastest setting, compared to the byte, and timed.

A batch is what a user of the library gets: numpy arrays of TensorFlow's, a tensordict, a dict of arrays.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from benchmarks.peers import source
from benchmarks.peers.source import Source

WARM_UP = 4
CHUNK = 500  # trajectories that are made at a time
_TRIES, _TRIED = 2, 8  # how often a setting is tried, with how many batches


class Subject(source.Subject):
    """A store that is filled: `batches()` begins to iterate, without end; `weights(batch)` are importance weights.

    host, namespace: where its server listens, if it has one, and the network namespace; of the spec. address: of that
    server, as writers of `peers.online` take it.
    """

    workload = "W1"  # whose batches it gives
    prioritized = True
    settings: tuple[dict[str, Any], ...] = ({},)  # to choose from
    batch = 0  # rows of a batch, set by `prepare`
    address: Any = None
    cost = 1  # how many times longer a batch takes about than ours: it is timed over fewer

    def __init__(self, source: Source) -> None:
        self.source, self.window = source, int(source.spec["window"])
        self.setting = self.settings[0]
        self.host = str(source.spec.get("host", "127.0.0.1"))
        self.namespace = source.spec.get("namespace")

    def prepare(self, batch: int) -> dict[str, Any]:
        """Get ready for batches of so many rows, in the setting that is found to be the fastest, and return it."""
        self.batch = batch
        seconds = [float("inf")] * len(self.settings)
        for _ in range(_TRIES if len(seconds) > 1 else 0):
            for i, setting in enumerate(self.settings):
                self.use(setting)
                seconds[i] = min(seconds[i], measure(self, _TRIED))
        self.use(self.settings[seconds.index(min(seconds))])
        return self.setting

    def use(self, setting: dict[str, Any]) -> None:
        """Iterate in this setting from now on."""
        self.setting = setting

    def rows(self, batch: Any) -> dict[str, np.ndarray]:
        """The columns of a batch: name -> ``[B, window, *shape]``."""
        return {name: np.asarray(batch[name]) for name in self.source.columns}


def measure(subject: Subject, batches: int, times: list[float] | None = None) -> float:
    """Seconds that so many batches take, after some that are not timed. times: gets the moment after each.

    As in a user's loop, a batch is let go when the next one has come.
    """
    iterator = subject.batches()
    for _ in range(WARM_UP):
        next(iterator)
    begin = time.perf_counter()
    for _held in itertools.islice(iterator, batches):
        if times is not None:
            times.append(time.perf_counter())
    return time.perf_counter() - begin


class Worker(source.Worker):
    """Batches of one variant."""

    def build(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.close()  # first gives back what the one before held
        self.held = self.kind(Source(spec))
        return {"address": self.subject.address}

    def prepare(self, batch: int) -> dict[str, Any]:
        return {"setting": self.subject.prepare(batch)}

    def check(self, times: int) -> dict[str, Any]:
        """Compare batches with what was stored; which step each row begins with, and what the rows weigh."""
        subject, steps, weights = self.subject, [], []
        iterator = subject.batches()
        for _ in range(times):
            batch = next(iterator)
            found = subject.source.verify(subject.rows(batch), subject.window)
            if len(found) != subject.batch:
                raise ValueError(f"a batch has {len(found)} rows; expected {subject.batch}")
            steps.append(found.tolist())
            if subject.prioritized:
                weights.append(np.asarray(subject.weights(batch), dtype=np.float64).ravel().tolist())
        return {"steps": steps, "weights": weights or None}

    def measure(self, batches: int) -> dict[str, Any]:
        """Seconds of so many batches, and of one: 50th and 99th percentile."""
        times: list[float] = []
        with source.undisturbed():
            seconds = measure(self.subject, batches, times)
        p50, p99 = np.quantile(np.diff(times), (0.5, 0.99)).tolist() if batches > 1 else (seconds, seconds)
        return {"seconds": seconds, "batch_p50": p50, "batch_p99": p99}
