"""Batches of requests with a deadline, and a bound on those that wait."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gear_loader.errors import GearError, OverloadError, SchemaError
from gear_loader.graph.csr import checked_nodes
from gear_loader.utils.arrays import Array
from gear_loader.utils.background import background_thread
from gear_loader.utils.checks import at_least
from gear_loader.utils.mutex import Condition, Future

_LOOK = 1.0  # most seconds between two looks for requests: an interrupt may have ended a notification


@dataclasses.dataclass
class RequestStats:
    """What a `RequestBatcher` has done.

    Attributes:
        accepted, refused, served, failed, cancelled: requests; one that waits is accepted, but none of the last three.
        batches: calls of `serve`. nodes: distinct nodes of these calls.
    """

    accepted: int = 0
    refused: int = 0
    served: int = 0
    failed: int = 0
    cancelled: int = 0
    batches: int = 0
    nodes: int = 0


@dataclasses.dataclass
class _QueuedRequest:
    nodes: Array
    deadline: float
    future: Future[torch.Tensor]


class RequestBatcher:
    """Serves requests of several clients together.

    A thread takes the requests that wait, up to `max_batch` nodes, as soon as it is idle and there are so many, or the
    oldest has waited for `max_wait`; it calls `serve` once with their distinct nodes. A request whose future was
    cancelled before is left out. Up to `max_waiting` requests wait; more are refused, and lose nothing by it.

    Args:
        serve: called with distinct nodes, int64 [n]; returns a tensor whose row i belongs to node i.
        num_nodes: of the graph; requests for others are refused before they wait.
        max_batch: most nodes of a call, and of a request.
        max_wait: seconds that a request waits for others at most while the thread is idle; 0 for not at all.
        max_waiting: most requests that wait.

    Raises:
        SchemaError: invalid options.
    """

    def __init__(
        self,
        serve: Callable[[Array], torch.Tensor],
        num_nodes: int,
        *,
        max_batch: int = 256,
        max_wait: float = 0.002,
        max_waiting: int = 1024,
    ) -> None:
        if not 0 <= max_wait < float("inf"):
            raise SchemaError(f"max_wait is {max_wait!r}; expected seconds, at least 0.")
        self._serve, self.num_nodes = serve, at_least("num_nodes", num_nodes, 0)
        self.max_batch, self.max_waiting = (
            at_least("max_batch", max_batch),
            at_least("max_waiting", max_waiting),
        )
        self.max_wait = max_wait
        self.stats = RequestStats()
        self._waiting: collections.deque[_QueuedRequest] = collections.deque()
        self._nodes_waiting = 0
        self._seconds_a_request = 1e-3  # moving average
        self._closed = False
        self._changed = Condition()
        self._thread = background_thread(self._run, "gear-loader-requests", stop=self._ask_to_end)
        self._thread.start()

    def submit(self, nodes: Any) -> Future[torch.Tensor]:
        """Accept a request for the rows of `nodes`, integers [n], of which some may be equal.

        Returns:
            Future of a tensor [n, ...], or of the error of `serve`. Cancel it if the client is gone.

        Raises:
            UnknownNodeError: a node that the graph does not have. OverloadError: too many requests wait. SchemaError:
                no nodes, or more than `max_batch`. GearError: closed.
        """
        values = checked_nodes("nodes", nodes, self.num_nodes)
        if not 1 <= len(values) <= self.max_batch:
            raise SchemaError(f"A request has {len(values):,} nodes; expected 1 to {self.max_batch:,}.")
        request = _QueuedRequest(values, time.monotonic() + self.max_wait, Future())
        with self._changed:
            if self._closed:
                raise GearError("A request came after RequestBatcher.close(); send it elsewhere.")
            if len(self._waiting) >= self.max_waiting:
                self.stats.refused += 1
                seconds = len(self._waiting) * self._seconds_a_request
                raise OverloadError(
                    f"{len(self._waiting):,} requests wait, which is the limit (max_waiting). Try again after about "
                    f"{seconds:.3g} s.",
                    seconds,
                )
            self.stats.accepted += 1
            self._waiting.append(request)
            self._nodes_waiting += len(values)
            if len(self._waiting) == 1 or self._nodes_waiting >= self.max_batch:  # others change nothing yet
                self._changed.notify_all()
        return request.future

    def close(self) -> None:
        """Serve what waits, then end the thread; idempotent."""
        self._ask_to_end()
        self._thread.join()

    def _ask_to_end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> RequestBatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while requests := self._take():
            began = time.monotonic()
            self._answer(requests)
            each = (time.monotonic() - began) / len(requests)
            self._seconds_a_request += (each - self._seconds_a_request) / 8

    def _take(self) -> list[_QueuedRequest]:
        """The requests of the next batch; none after `close`."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait(_LOOK)
            while not self._closed and self._nodes_waiting < self.max_batch:
                left = self._waiting[0].deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            taken: list[_QueuedRequest] = []
            room = self.max_batch
            while self._waiting and len(self._waiting[0].nodes) <= room:
                request = self._waiting.popleft()
                room -= len(request.nodes)
                self._nodes_waiting -= len(request.nodes)
                taken.append(request)
            return taken

    def _answer(self, requests: list[_QueuedRequest]) -> None:
        alive = [request for request in requests if request.future.set_running_or_notify_cancel()]
        self.stats.cancelled += len(requests) - len(alive)
        if not alive:
            return
        try:
            nodes, places = np.unique(
                np.concatenate([request.nodes for request in alive]), return_inverse=True
            )
            rows = self._serve(nodes)
            if len(rows) != len(nodes):
                raise SchemaError(
                    f"serve returned {len(rows)} rows for {len(nodes)} nodes; expected as many."
                )
            parts = rows[torch.from_numpy(places)].split([len(request.nodes) for request in alive])
        except Exception as error:
            for request in alive:
                request.future.set_exception(error)
            self.stats.failed += len(alive)
            return
        self.stats.batches += 1
        self.stats.nodes += len(nodes)
        self.stats.served += len(alive)
        for request, part in zip(alive, parts, strict=True):
            request.future.set_result(part)
