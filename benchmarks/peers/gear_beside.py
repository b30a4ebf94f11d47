"""Learners that behave badly, in a process of their own, beside one that is measured: `remote-sample --beside`."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import gear_loader as gear
from benchmarks.peers import source
from benchmarks.peers.select import ALPHA, BETA
from gear_loader.errors import GearError

PACKAGES = MODULES = ("torch", "numpy")
LIES = 100
"""A second, of a learner that lies."""
IDLE = 200
"""Learners that have taken a batch, and take no more."""
_PAUSE = 0.2  # seconds between two batches of a slow learner


class _Learner:
    """Datasets of a served table. `act` is called again and again, `pause` seconds apart, while it is measured.

    spec: of the store. address: of its server. rows: of a batch.
    """

    count = 1
    ahead = 2
    pause = 1.0

    def __init__(self, spec: dict[str, Any], address: Any, rows: int) -> None:
        self.url, secret = address
        self._remote = gear.connect(self.url, secret=secret.encode())
        options: dict[str, Any] = {
            "batch_size": rows,
            "windows": gear.Window(int(spec["window"])),
            "sampler": gear.Prioritized(alpha=ALPHA, beta=BETA),
            "draws": gear.Draws(anchor="first"),
            "prefetch": self.ahead,
            "batches_per_epoch": math.inf,
            "device": "cpu",
        }
        self.datasets = [gear.ReplayDataset(self._remote, **options) for _ in range(self.count)]
        self.iterators = [iter(dataset) for dataset in self.datasets]
        for each in self.iterators:
            next(each)

    def act(self) -> None:
        """Nothing."""

    def close(self) -> None:
        for dataset in self.datasets:
            dataset.close()
        self._remote.close()


class Slow(_Learner):
    """Asks for 16 batches ahead, and takes one every 0.2 s."""

    ahead = 16
    pause = _PAUSE

    def act(self) -> None:
        next(self.iterators[0])


class Idle(_Learner):
    """Many that take no batch."""

    count = IDLE


class Lying(_Learner):
    """An index that is a text, priorities that are none, and bytes that are no message, in turn.

    The server answers the first two by errors, and closes the third's connection. It takes 0.1 ms of its processor for
    each, and the learner 0.07 (EPYC, loaded).
    """

    pause = 1 / LIES

    def __init__(self, spec: dict[str, Any], address: Any, rows: int) -> None:
        super().__init__(spec, address, rows)
        self._lies = itertools.cycle((self._call, self._update, self._bytes))

    def act(self) -> None:
        with contextlib.suppress(GearError, OSError):
            next(self._lies)()
            raise AssertionError("the server believed a lie")

    def _call(self) -> None:
        self.datasets[0]._link.call("item", {"index": "x"})

    def _update(self) -> None:
        self.datasets[0]._link.call("update", {"stale": "error"}, {"index": [0], "priority": [math.nan]})

    def _bytes(self) -> None:
        place = urlsplit(self.url)
        with socket.create_connection((str(place.hostname), int(place.port or 0)), timeout=5) as raw:
            raw.sendall(os.urandom(4096))
            while raw.recv(1 << 16):
                pass
        raise ConnectionResetError


class Worker(source.Worker):
    """Learners of one kind, which are there, and act, between `begin` and `end`."""

    def __init__(self, kinds: Any, variant: str) -> None:
        super().__init__(kinds, variant)
        self._stop, self._thread = threading.Event(), threading.Thread()
        self._acts, self._failure = 0, ""
        self._given: tuple[Any, ...] = ()

    def build(self, spec: dict[str, Any], address: Any, rows: int) -> None:
        self._given = spec, address, rows

    def begin(self) -> None:
        self.held = self.kind(*self._given)
        self._stop.clear()
        self._acts, self._failure = 0, ""
        self._thread = threading.Thread(
            target=self._act, args=(self.subject.act, self.subject.pause), daemon=True
        )
        self._thread.start()

    def end(self) -> dict[str, Any]:
        """How often they have acted."""
        self._stop.set()
        self._thread.join()
        self.close()
        if self._failure:
            raise RuntimeError(self._failure)
        return {"acts": self._acts}

    def _act(self, act: Callable[[], None], pause: float) -> None:
        try:
            while not self._stop.wait(pause):
                act()
                self._acts += 1
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"


KINDS: dict[str, dict[str, Any]] = {"gear_beside": {"slow": Slow, "lying": Lying, "idle": Idle}}
