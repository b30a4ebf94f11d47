"""Batches of single-server and batch-size are checked before they are timed, in all ways; what peers are told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks import batches, harness, workloads
from benchmarks.peers import batches as peers
from benchmarks.peers import source as sources

SPEC = {"columns": {"a": [2], "n": []}, "steps": 5, "trajectories": 40, "window": 5, "seed": 1}


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        kinds = (workloads.W1.of(60), workloads.W2.of(60))
        yield {kind.name: stack.enter_context(contextlib.closing(batches.Store(kind))) for kind in kinds}


def ways(store: Any, batch: int) -> dict[str, Any]:
    return {way.name: way for way in batches.cpu_ways(store, batch) if "workers" not in way.name}


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a wrong value": (lambda batch: batch["action"][3, 7].add_(1), "action differs .* in 1 of 32 rows"),
    "rows that are swapped in one column": (
        lambda batch: batch.update(observation=batch["observation"].flip(0)),
        "observation differs from the expected values in 3. of 32 rows",
    ),
    "no step": (lambda batch: batch["reward"][2, -1].fill_(float("nan")), "numbers no step"),
    "too few rows": (
        lambda batch: batch.update({key: values[:31] for key, values in batch.items()}),
        r"reward has shape \[31, .*\]; 32 rows were expected",
    ),
    "weights that do not match": (
        lambda batch: batch["priority_weight"][1].mul_(1.1),
        "the importance weights differ",
    ),
}


@pytest.mark.parametrize("fault", [*FAULTS, "the same batch again"])
def test_wrong_batches_are_found(stores: dict[str, Any], fault: str) -> None:
    spoil, message = FAULTS.get(fault, (lambda batch: None, "numbers no step"))
    store = stores["W1"]
    right = ways(store, 32)["plain torch"]

    def start() -> Iterator[Any]:
        found: dict[str, Any] = {}
        for batch in right.start():
            if not found or fault in FAULTS:
                found = {name: values.clone() for name, values in batch.items()}
            spoil(found)
            yield found

    with pytest.raises(harness.Incorrect, match=message):
        batches.variant(store, batches.Way("wrong", start), 32, 2, 64).check()


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_draws_in_another_proportion_are_found(stores: dict[str, Any], power: float) -> None:
    store = stores["W1"]
    leaves = store.priorities.astype(np.float64) ** power
    random = np.random.default_rng(2)
    draws = random.choice(len(leaves), (64, 256), p=leaves / leaves.sum())
    weights = store.leaves[draws] ** -batches.BETA
    with pytest.raises(harness.Incorrect, match="draws of 16384 are in bin"):
        store.check_draws(draws, list(weights), prioritized=True)
    right = random.choice(len(leaves), (64, 256), p=store.leaves / store.leaves.sum())
    store.check_draws(right, list(store.leaves[right] ** -batches.BETA), prioritized=True)
    with pytest.raises(harness.Incorrect, match="there are no importance weights"):
        store.check_draws(right, None, prioritized=True)


# Peers -----------------------------------------------------------------------------------------------


def test_every_process_makes_the_same_trajectories_each_of_which_says_which_it_is() -> None:
    first, second = sources.Source(SPEC), sources.Source(SPEC)
    ((begin, chunk),) = first.stacked(100)
    assert begin == 0
    for number in (0, 39):
        expected = second.trajectory(number)
        assert expected["n"].tolist() == list(range(5 * number, 5 * number + 5))
        for name, values in expected.items():
            assert np.array_equal(chunk[name][number], values)
    assert not np.array_equal(first.trajectory(1)["a"], first.trajectory(2)["a"])
    assert 0 < first.priorities.min() < first.priorities.max() <= 1
    assert first.payload == 40 * 5 * 3 * 4
    with pytest.raises(ValueError, match="cannot number"):
        sources.Source({**SPEC, "trajectories": 1 << 23})


@pytest.mark.parametrize("window", [None, 3])
def test_rows_are_compared_with_the_trajectories_that_they_are_of(window: int | None) -> None:
    lengths = [5, 2, 7, 5]
    source = sources.Source({"columns": {"a": [2], "n": []}, "lengths": lengths, "seed": 4})
    begin = 0 if window is None else 1
    rows = {n: values[None, begin : begin + (window or 7)] for n, values in source.trajectory(2).items()}
    assert source.verify(rows, window).tolist() == [7 + begin]
    wrong = {**rows, "a": rows["a"] + 1}
    with pytest.raises(ValueError, match="a of row 0 differs from what was stored"):
        source.verify(wrong, window)
    short = {name: values[:, :-1] for name, values in rows.items()}
    with pytest.raises(ValueError, match="a of row 0 has shape"):
        source.verify(short, window)
    for value in (-1.0, 0.5, 19.0, float("nan")):
        with pytest.raises(ValueError, match="which is the number of no step of 19"):
            source.verify({**rows, "n": np.full_like(rows["n"], value)}, window)


class InMemory(peers.Subject):  # type: ignore[misc, name-defined]
    """Stands in for a peer, in two settings, of which the first one fails to be fast."""

    settings = ({"slow": True}, {"slow": False})
    fault = ""

    def batches(self) -> Iterator[Any]:
        while True:
            each = [self.source.trajectory(number) for number in range(self.batch)]
            batch = {name: np.stack([one[name] for one in each]) for name in self.source.columns}
            if self.fault:
                batch[self.fault][1, -1] += 1
            yield batch

    def weights(self, batch: Any) -> np.ndarray:
        return np.ones(self.batch)


def test_a_worker_takes_the_fastest_setting_and_compares_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, measure = peers.Worker({"memory": InMemory}, "memory"), peers.measure
    with pytest.raises(RuntimeError, match="build comes first"):
        worker.measure(2)
    worker.build(SPEC)
    monkeypatch.setattr(peers, "measure", lambda subject, batches: 2.0 if subject.setting["slow"] else 1.0)
    assert worker.prepare(7) == {"setting": {"slow": False}}
    monkeypatch.setattr(peers, "measure", measure)
    answer = worker.check(2)
    assert answer == {"steps": [list(range(0, 35, 5))] * 2, "weights": [[1.0] * 7] * 2}
    assert worker.measure(2)["seconds"] > 0
    for fault in ("a", "n"):
        monkeypatch.setattr(InMemory, "fault", fault)
        with pytest.raises(ValueError, match=f"{fault} of row 1 differs"):
            worker.check(1)
    worker.close()
    with pytest.raises(RuntimeError, match="build comes first"):
        worker.check(1)
