"""The router on samplers whose time is computed: thresholds, choices, drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gear_loader.errors import SchemaError, UnknownNodeError
from gear_loader.graph import Router
from gear_loader.utils.arrays import Array


class Machine:
    """Two samplers on a clock of their own: seconds = fixed + per node."""

    def __init__(self, sizes: Array, low: tuple[float, float], batched: tuple[float, float]) -> None:
        self.now, self.sizes, self.costs = 0.0, sizes, {"low-latency": low, "batched": batched}

    def clock(self) -> float:
        return self.now

    def sampler(self, name: str) -> Any:
        def sample(seeds: Array) -> tuple[str, int]:
            fixed, each = self.costs[name]
            self.now += fixed + each * float(self.sizes[seeds].sum())
            return name, len(seeds)

        return sample

    def router(self, **options: Any) -> Router[tuple[str, int]]:
        return Router(
            self.sampler("low-latency"), self.sampler("batched"), self.sizes, clock=self.clock, **options
        )


SIZES = np.full(4000, 10.0)


def test_the_threshold_is_where_the_lines_cross() -> None:
    # 1 + 0.002 s = 3 + 0.001 s, from s = 2,000 on.
    router = Machine(SIZES, (1.0, 0.002), (3.0, 0.001)).router()
    assert router.threshold == pytest.approx(2000)
    assert router.choose(np.arange(199)) == "low-latency"
    assert router.choose(np.arange(201)) == "batched"
    assert router(np.arange(10)) == ("low-latency", 10)
    assert router(np.arange(1000)) == ("batched", 1000)
    assert router.routed == {"low-latency": 1, "batched": 1}
    assert router.calibrations == 1
    one, other = router.predicted(640)
    assert (one, other) == pytest.approx((1 + 1.28, 3 + 0.64))
    assert [each.seeds for each in router.measurements] == [1, 4, 16, 64, 256, 1024]


@pytest.mark.parametrize(
    ("low", "batched", "threshold"),
    [((1.0, 0.001), (2.0, 0.002), float("inf")), ((2.0, 0.002), (1.0, 0.001), 0.0)],
)
def test_one_sampler_is_always_faster(
    low: tuple[float, float], batched: tuple[float, float], threshold: float
) -> None:
    assert Machine(SIZES, low, batched).router().threshold == threshold


def test_it_measures_again_when_latencies_drift() -> None:
    machine = Machine(SIZES, (1.0, 0.002), (3.0, 0.001))
    router = machine.router(window=8)
    machine.costs["low-latency"] = 1.0, 0.02  # crosses at about 105
    for _ in range(7):
        router(np.arange(100))
    assert router.calibrations == 1
    router(np.arange(100))
    assert router.calibrations == 2
    assert router.threshold < 200
    assert router(np.arange(100)) == ("batched", 100)
    for _ in range(20):
        router(np.arange(100))
    assert router.calibrations == 2


def test_a_few_slow_requests_are_no_drift() -> None:
    machine = Machine(SIZES, (1.0, 0.002), (3.0, 0.001))
    router = machine.router(window=9)
    for i in range(60):
        machine.costs["low-latency"] = (50.0, 0.002) if i % 3 == 0 else (1.0, 0.002)
        router(np.arange(5))
    assert router.calibrations == 1


def test_measured_requests_have_distinct_nodes_by_their_weights() -> None:
    seen: list[Array] = []

    def sample(seeds: Array) -> None:
        seen.append(seeds)

    weights = np.zeros(50)
    weights[[3, 7]] = 1, 2
    Router(sample, sample, np.ones(50), seeds=(1, 200), repeats=2, requests=weights)
    assert all(len(np.unique(seeds)) == len(seeds) for seeds in seen)
    assert set(np.concatenate(seen).tolist()) == {3, 7}


def test_unknown_nodes_and_options() -> None:
    machine = Machine(SIZES, (1.0, 0.002), (3.0, 0.001))
    router = machine.router()
    with pytest.raises(UnknownNodeError, match=r"^seeds has node 4000"):
        router([4000])
    for options, message in (
        ({"seeds": ()}, "^seeds is empty"),
        ({"drift": 1.0}, "^drift is 1.0; expected a number above 1"),
        ({"requests": np.ones(3)}, r"^requests is \[3\]; expected \[4000\]"),
    ):
        with pytest.raises(SchemaError, match=message):
            machine.router(**options)
    with pytest.raises(SchemaError, match=r"^sizes is \[0\]"):
        Machine(np.empty(0), (1, 1), (1, 1)).router()


def test_it_says_what_it_chose() -> None:
    crossing = str(Machine(SIZES, (1.0, 0.002), (3.0, 0.001)).router())
    assert crossing.startswith(
        "Requests of 2,000 expected nodes or more go to the batched sampler, smaller ones to"
    )
    measured = "(measured 1 times, up to 10,240 expected nodes)."
    low = str(Machine(SIZES, (1.0, 0.001), (2.0, 0.002)).router())
    assert low == f"All requests go to the low-latency sampler: the batched one was not faster {measured}"
    batched = str(Machine(SIZES, (2.0, 0.002), (1.0, 0.001)).router())
    assert batched == f"All requests go to the batched sampler: the low-latency one was not faster {measured}"
