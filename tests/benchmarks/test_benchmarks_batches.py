"""Batches of single-server and batch-size are checked before they are timed, in all ways; not how fast anything is."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import call, check_row, interpreter, needs_no_gpu, reasons_of, rows_of, run, session
from benchmarks_rehearsal import Rehearsal

__all__ = ["interpreter"]  # a fixture

harness = importlib.import_module("benchmarks.harness")
workloads = importlib.import_module("benchmarks.workloads")
batches = importlib.import_module("benchmarks.experiments.batches")
sources = importlib.import_module("benchmarks.peers.source")
peers = importlib.import_module("benchmarks.peers.batches")

IN_PROCESS = {"memcpy", "ours", "ours, prefetch 2", "ours, sample", "plain torch"}
MAP_STYLE = {"DataLoader, map-style", "DataLoader, map-style, 2 workers"}
SPEC = {"columns": {"a": [2], "n": []}, "steps": 5, "trajectories": 40, "window": 5, "seed": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow where tests run beside tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The command line ------------------------------------------------------------------------------------


@pytest.mark.long
def test_single_server_measures_what_is_there_and_names_what_is_not(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "QUICK_DRAWS", 1024)
    out = tmp_path / "rows.jsonl"
    options = (
        "--quick",
        "--threads",
        "1",
        "--repeats",
        "1",
        "--trajectories",
        "256",
        "--peers",
        str(interpreter),
    )
    done = call("single-server", *options, "--parts", "W1,W2", "--out", str(out))
    assert done.exit_code == 0, done.output
    measured, left = rows_of(out), reasons_of(out)
    for row in measured:
        check_row(row, "single-server")
        assert row["parameters"]["batch"] == 256
    assert {row["variant"] for row in measured if row["workload"] == "W1"} == IN_PROCESS | MAP_STYLE | {
        "cpprb"
    }
    assert {row["variant"] for row in measured if row["workload"] == "W2"} == IN_PROCESS
    mine = {row["variant"]: row for row in measured if row["workload"] == "W1"}
    assert mine["ours"]["targets"] == {"cpprb": 1.7}
    assert set(mine["ours"]["ratios"]) == {"cpprb"}
    assert mine["ours"]["parameters"]["prefetch"] == 0
    assert mine["cpprb"]["parameters"]["peer"]["versions"]["cpprb"] == "11.0.0"
    assert mine["cpprb"]["parameters"]["peer"]["setting"] == {}
    assert mine["DataLoader, map-style"]["parameters"]["draws"] == "uniform"
    missing = {"Reverb, gRPC, W1", "Reverb, in process, W1", "TorchRL, W1", "TorchRL, slices, W2"}
    assert set(left) == missing | {"Reverb, W2", "cpprb, W2"}
    assert "No module named 'torchrl'" in left["TorchRL, W1"]
    assert f"left out: TorchRL, W1: {left['TorchRL, W1']}" in " ".join(done.stdout.split())


@pytest.mark.long
def test_batch_size_measures_each_size_and_a_peer_that_fails_is_left_out(
    interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "QUICK_DRAWS", 64)
    out = tmp_path / "rows.jsonl"
    options = (
        "--quick",
        "--threads",
        "1",
        "--repeats",
        "1",
        "--trajectories",
        "40",
        "--peers",
        str(interpreter),
    )
    done = call("batch-size", *options, "--batches", "8,13", "--out", str(out))
    assert done.exit_code == 0, done.output
    measured = rows_of(out)
    for row in measured:
        check_row(row, "batch-size")
    names = {
        batch: {r["variant"] for r in measured if r["parameters"]["batch"] == batch} for batch in (8, 13)
    }
    assert names == {8: IN_PROCESS | MAP_STYLE | {"cpprb"}, 13: IN_PROCESS | MAP_STYLE}
    assert reasons_of(out)["cpprb, W1, batch 13"] == "RuntimeError: thirteen"
    for row in measured:
        assert set(row["ratios"]) == ({"cpprb"} if row["parameters"]["batch"] == 8 else set())
    assert "By batch (× yardstick)" in done.stdout

    late = call("batch-size", *options, "--batches", "8", "--minutes", "0", "--out", str(out))
    assert late.exit_code == 0, late.output
    assert "left out for lack of time: W1, batch 8" in late.stdout


@pytest.mark.long
def test_adding_has_rows_of_this_experiment(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = call(
        "single-server", "--quick", "--threads", "1", "--repeats", "1", "--parts", "insert", "--out", str(out)
    )
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    found = {(row["workload"], row["parameters"]["mode"], row["variant"]) for row in rows}
    assert found == {
        ("insert", mode, name) for mode in ("whole", "batches") for name in ("memcpy", "torch", "ours")
    }
    assert {(row["experiment"], row["parameters"]["part"]) for row in rows} == {("single-server", "insert")}
    assert set(reasons_of(out)) >= {"Reverb, insert", "TorchRL, insert", "cpprb, insert"}


@pytest.mark.gpu
def test_quick_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run("single-server", "--device", "cuda", "--quick", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    assert {row["workload"] for row in rows} == {"W1", "W2"}
    assert {"cudaMemcpyAsync", "ours", "plain torch"} <= {row["variant"] for row in rows}


# What is checked -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        kinds = (workloads.W1.of(60), workloads.W2.of(60))
        yield {kind.name: stack.enter_context(contextlib.closing(batches.Store(kind))) for kind in kinds}


def ways(store: Any, batch: int) -> dict[str, Any]:
    return {way.name: way for way in batches.cpu_ways(store, batch) if "workers" not in way.name}


@pytest.mark.parametrize("name", ["W1", "W2"])
def test_ways_in_this_process_pass_and_are_timed(stores: dict[str, Any], name: str) -> None:
    for way in ways(stores[name], 32).values():
        variant = batches.variant(stores[name], way, 32, 2, 1 << 11)
        variant.check()
        assert variant.measure() > 0


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


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_batches_are_found(stores: dict[str, Any], fault: str) -> None:
    spoil, message = FAULTS[fault]
    store = stores["W1"]
    right = ways(store, 32)["plain torch"]

    def start() -> Iterator[Any]:
        for batch in right.start():
            found = {name: values.clone() for name, values in batch.items()}
            spoil(found)
            yield found

    with pytest.raises(harness.Incorrect, match=message):
        batches.variant(store, batches.Way("wrong", start), 32, 2, 64).check()


def test_a_batch_that_is_not_written_anew_is_found(stores: dict[str, Any]) -> None:
    store = stores["W1"]
    batch = next(ways(store, 32)["plain torch"].start())
    way = batches.Way("stale", lambda: iter(lambda: batch, None))
    with pytest.raises(harness.Incorrect, match="numbers no step"):
        batches.variant(store, way, 32, 2, 64).check()


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_draws_in_another_proportion_are_found(stores: dict[str, Any], power: float) -> None:
    store = stores["W1"]
    leaves = store.priorities.astype(np.float64) ** power
    random = np.random.default_rng(2)
    draws = random.choice(len(leaves), (64, 256), p=leaves / leaves.sum())
    weights = store.leaves[draws] ** -peers.BETA
    with pytest.raises(harness.Incorrect, match="draws of 16384 are in bin"):
        store.check_draws(draws, list(weights), prioritized=True)
    right = random.choice(len(leaves), (64, 256), p=store.leaves / store.leaves.sum())
    store.check_draws(right, list(store.leaves[right] ** -peers.BETA), prioritized=True)
    with pytest.raises(harness.Incorrect, match="there are no importance weights"):
        store.check_draws(right, None, prioritized=True)


def test_ratios_to_a_peer_that_fails_are_left_out(tmp_path: Path) -> None:
    def broken() -> None:
        raise harness.Incorrect("it is wrong")

    def variant(name: str, check: Callable[[], None] = lambda: None, **options: Any) -> Any:
        return harness.Variant(name, lambda: 1.0, check, 1000, 1, **options)

    targets = {"good": 1.0, "bad": 2.0}
    others = [variant("good"), variant("bad", broken, required=False)]
    variants = [variant("ours", targets=targets), *others]
    comparison = harness.Comparison("e", "W1", "W1", variants, "good", ("good", "bad"))
    made = session(tmp_path / "rows.jsonl")
    made.run(comparison)
    assert made.reasons == ["left out: bad, W1: it is wrong"]
    rows = rows_of(tmp_path / "rows.jsonl")
    assert [(row["variant"], row["targets"], set(row["ratios"])) for row in rows] == [
        ("ours", {"good": 1.0}, {"good"}),
        ("good", {}, {"good"}),
    ]


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
    """A peer that is none, in two settings, of which one is slow."""

    settings = ({"pause": 0.1}, {"pause": 0.0})
    fault = ""

    def batches(self) -> Iterator[Any]:
        while True:
            time.sleep(self.setting["pause"])
            each = [self.source.trajectory(number) for number in range(self.batch)]
            batch = {name: np.stack([one[name] for one in each]) for name in self.source.columns}
            if self.fault:
                batch[self.fault][1, -1] += 1
            yield batch

    def weights(self, batch: Any) -> np.ndarray:
        return np.ones(self.batch)


def test_a_worker_takes_the_fastest_setting_and_compares_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = peers.Worker({"memory": InMemory}, "memory")
    with pytest.raises(RuntimeError, match="build comes first"):
        worker.measure("memory", 2)
    worker.build("memory", SPEC)
    assert worker.prepare("memory", 7) == {"setting": {"pause": 0.0}}
    answer = worker.check("memory", 2)
    assert answer == {"steps": [list(range(0, 35, 5))] * 2, "weights": [[1.0] * 7] * 2}
    assert worker.measure("memory", 2)["seconds"] > 0
    for fault in ("a", "n"):
        monkeypatch.setattr(InMemory, "fault", fault)
        with pytest.raises(ValueError, match=f"{fault} of row 1 differs"):
            worker.check("memory", 1)
    worker.close()
    with pytest.raises(RuntimeError, match="build comes first"):
        worker.check("memory", 1)


# The GPU side, rehearsed -----------------------------------------------------------------------------


@needs_no_gpu
def test_the_gpu_side_measures_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "QUICK_DRAWS", 64)
    made = session(tmp_path / "rows.jsonl", experiment="single-server")
    kinds = [workloads.W1.of(40), workloads.W2.of(40)]
    batches.measured(made, kinds, (16, 8), engine=Rehearsal(), copy_bytes=8192, workers=(0, 1))
    rows = rows_of(tmp_path / "rows.jsonl")
    for row in rows:
        check_row(row, "single-server")
    names = {(row["workload"], row["parameters"]["batch"], row["variant"]) for row in rows}
    both = {"cudaMemcpyAsync", "ours", "ours, prefetch 0", "plain torch"}
    alone = {"plain torch, x[idx]", "DataLoader, map-style", "DataLoader, map-style, 1 workers"}
    assert names == {
        (kind, batch, name)
        for kind, found in (("W1", both | alone), ("W2", both))
        for batch in (16, 8)
        for name in found
    }
    assert {row["parameters"]["prefetch"] for row in rows if row["variant"] == "ours"} == {2}
    assert len(made.reasons) == len(batches.PEERS)
    assert "left out: TorchRL, W1: peers are measured on the CPU alone (--device cpu)" in made.reasons
