"""The choice between two samplers by the predicted size of a request, with a threshold that is measured."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.graph.csr import checked_nodes
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import at_least

_T = TypeVar("_T")
Sample = Callable[[Array], _T]
WAYS = ("low-latency", "batched")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Latencies of both samplers for the same requests.

    Attributes:
        size: sum of the seeds' predicted sizes. seeds: number of seeds.
        seconds: median latency of the low-latency and of the batched sampler.
    """

    size: float
    seeds: int
    seconds: tuple[float, float]


class Router(Generic[_T]):
    """Sends small requests to a sampler with a low latency, and large ones to one that works in parallel.

    The size of a request is the sum of its seeds' `sampled_size`. At the start, and again when latencies have drifted,
    both samplers are measured with random requests of growing size on this machine; the threshold is the size from
    which on the batched one is faster.

    Args:
        low_latency, batched: called with distinct seeds, int64 [n].
        sizes: float64 [N], `sampled_size` of each node.
        seeds: numbers of seeds of the measured requests, ascending.
        repeats: measurements of each, of which the median counts.
        requests: float64 [N], in proportion to which measured seeds are drawn; uniform by default.
        drift: measure again if the median of the last `window` latencies of one sampler, divided by those of the
            measurement, is above this or below its inverse.
        window: see `drift`.
        clock: seconds; for tests.

    Attributes:
        threshold: smallest size that goes to `batched`; infinity if that was never faster.
        measurements: of the last calibration. calibrations: their number so far.
        routed: number of requests that each sampler has had.

    Raises:
        SchemaError: invalid options.
    """

    def __init__(
        self,
        low_latency: Sample[_T],
        batched: Sample[_T],
        sizes: Array,
        *,
        seeds: Sequence[int] = (1, 4, 16, 64, 256, 1024),
        repeats: int = 7,
        requests: Array | None = None,
        drift: float = 2.0,
        window: int = 64,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._samplers = low_latency, batched
        self.sizes = np.ascontiguousarray(sizes, dtype=np.float64)
        if self.sizes.ndim != 1 or not len(self.sizes) or not np.isfinite(self.sizes).all():
            raise SchemaError(f"sizes is {list(self.sizes.shape)}; expected finite float64 [N], N > 0.")
        counts = sorted({min(at_least("seeds", count), len(self.sizes)) for count in seeds})
        if not counts:
            raise SchemaError("seeds is empty; expected at least one number of seeds to measure.")
        if requests is not None and np.shape(requests) != self.sizes.shape:
            raise SchemaError(
                f"requests is {list(np.shape(requests))}; expected {list(self.sizes.shape)}, as sizes."
            )
        if not drift > 1:
            raise SchemaError(f"drift is {drift!r}; expected a number above 1.")
        self._counts, self._repeats = counts, at_least("repeats", repeats)
        self._weights = None if requests is None else np.asarray(requests) / np.sum(requests)
        self._drift, self._clock = drift, clock
        self._ratios = [collections.deque[float](maxlen=at_least("window", window)) for _ in WAYS]
        self._mutex = threading.Lock()
        self.threshold = float("inf")
        self.measurements: list[Measurement] = []
        self.calibrations = 0
        self.routed = dict.fromkeys(WAYS, 0)
        self.calibrate()

    def calibrate(self) -> None:
        """Measure both samplers now, and set the threshold."""
        random = np.random.default_rng(self.calibrations)
        found = []
        for count in self._counts:
            requests = [self._request(random, count) for _ in range(self._repeats + 1)]
            seconds: list[list[float]] = [[], []]
            for request in requests:
                for way, sampler in enumerate(self._samplers):
                    began = self._clock()
                    sampler(request)
                    seconds[way].append(self._clock() - began)
            # The first request of a size is not counted: it allocates.
            one, other = (statistics.median(each[1:]) for each in seconds)
            size = float(np.mean([self.sizes[request].sum() for request in requests]))
            found.append(Measurement(size, count, (one, other)))
        self.measurements = found
        self.threshold = _crossing(found)
        self.calibrations += 1
        for ratios in self._ratios:
            ratios.clear()

    def _request(self, random: np.random.Generator, count: int) -> Array:
        """Distinct seeds, int64 [at most count]."""
        drawn = random.choice(len(self.sizes), size=count, replace=self._weights is not None, p=self._weights)
        return np.unique(drawn).astype(np.int64)

    def choose(self, seeds: Any) -> str:
        """``"low-latency"`` or ``"batched"`` for a request of seeds, integers [n].

        Raises:
            UnknownNodeError: a seed is not a node.
        """
        nodes = checked_nodes("seeds", seeds, len(self.sizes))
        return WAYS[self._way(float(self.sizes[nodes].sum()))]

    def _way(self, size: float) -> int:
        return int(size >= self.threshold)

    def __call__(self, seeds: Any) -> _T:
        """Sample by the sampler that `choose` names; measures both again afterwards if latencies have drifted.

        Args:
            seeds: distinct node ids, integers [n].

        Raises:
            UnknownNodeError: a seed is not a node.
        """
        nodes = checked_nodes("seeds", seeds, len(self.sizes))
        size = float(self.sizes[nodes].sum())
        way = self._way(size)
        began = self._clock()
        result = self._samplers[way](nodes)
        seconds = self._clock() - began
        with self._mutex:
            self.routed[WAYS[way]] += 1
            self._ratios[way].append(seconds / max(self.predicted(size)[way], 1e-9))
            if self._has_drifted(way):
                self.calibrate()
        return result

    def predicted(self, size: float) -> tuple[float, float]:
        """Seconds that each sampler is expected to take for a size, by linear interpolation of the measurements."""
        known = [each.size for each in self.measurements]
        one, other = (
            float(np.interp(size, known, [each.seconds[way] for each in self.measurements]))
            for way in range(2)
        )
        return one, other

    def _has_drifted(self, way: int) -> bool:
        ratios = self._ratios[way]
        if len(ratios) < (ratios.maxlen or 0):
            return False
        ratio = statistics.median(ratios)
        return ratio > self._drift or ratio < 1 / self._drift

    def __str__(self) -> str:
        """What goes where, and by which measurements."""
        last = self.measurements[-1]
        measured = f"measured {self.calibrations} times, up to {last.size:,.0f} expected nodes"
        if self.threshold == float("inf"):
            return f"All requests go to the low-latency sampler: the batched one was not faster ({measured})."
        if self.threshold == 0:
            return f"All requests go to the batched sampler: the low-latency one was not faster ({measured})."
        return (
            f"Requests of {self.threshold:,.0f} expected nodes or more go to the batched sampler, smaller ones to the "
            f"low-latency one ({measured})."
        )

    def __repr__(self) -> str:
        return (
            f"Router(threshold={self.threshold:.6g} nodes, {self.calibrations} calibrations, {self.routed})"
        )


def _crossing(measurements: Sequence[Measurement]) -> float:
    """Size from which on the batched sampler is faster, up to the largest that was measured; infinity if it is not."""
    threshold = float("inf")
    above: Measurement | None = None
    for each in reversed(measurements):
        gain = each.seconds[0] - each.seconds[1]
        if gain <= 0:
            if above is not None:  # where the line between the gains crosses 0
                more = above.seconds[0] - above.seconds[1]
                threshold = each.size + (above.size - each.size) * -gain / (more - gain)
            break
        above, threshold = each, 0.0
    return threshold
