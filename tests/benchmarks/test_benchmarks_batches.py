"""Batches of single-server and batch-size are checked before they are timed, in all ways; not how fast anything is."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import call, needs_no_gpu, reasons_of, rows_of, run

harness = importlib.import_module("benchmarks.harness")
workloads = importlib.import_module("benchmarks.workloads")
batches = importlib.import_module("benchmarks.batches")
stored = importlib.import_module("benchmarks.batches_store")
peers = importlib.import_module("benchmarks.peers.batches_peers")
parts = importlib.import_module("benchmarks.online_parts")
single = importlib.import_module("benchmarks.single_server")

IN_PROCESS = {"memcpy", "ours", "ours, prefetch 2", "ours, sample", "plain torch"}
MAP_STYLE = {"DataLoader, map-style", "DataLoader, map-style, 2 workers"}
SPEC = {"columns": {"a": [2], "n": []}, "steps": 5, "trajectories": 40, "window": 5, "seed": 1}


def check_row(row: dict[str, Any], experiment: str, yardstick: str = "memcpy") -> None:
    """Every row says what was measured, how, with what result, and on what."""
    assert row["experiment"] == experiment
    assert row["workload"] in ("W1", "W2")
    assert row["parameters"]["part"] == "batches"
    assert row["parameters"]["batch"] > 0
    assert row["repeats"] > 0
    assert row["batches_per_repeat"] > 0
    assert row["bytes"] > 0
    for name in ("seconds", "gb_per_s", "ratio"):
        assert 0 < row[name]["p10"] <= row[name]["p50"] <= row[name]["p90"]
    assert row["yardstick"] == yardstick
    assert set(row["targets"]) <= set(row["ratios"])
    assert {"machine", "versions", "commit", "date", "run", "device"} <= set(row)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow where tests run beside tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def session(path: Path, repeats: int = 1) -> Any:
    return harness.Session(path, configuration={"quick": True}, device="cpu", repeats=repeats)


# The command line ------------------------------------------------------------------------------------

_CPPRB = """
    import numpy as np
    class PrioritizedReplayBuffer:
        def __init__(self, size, columns, alpha, eps):
            assert eps == 0.0
            self.rows = {name: np.zeros((size, *c["shape"]), c["dtype"]) for name, c in columns.items()}
            self.leaves, self.alpha, self.n = np.zeros(size), alpha, 0
            self.random = np.random.default_rng(0)
        def add(self, priorities, **columns):
            part = slice(self.n, self.n + len(priorities))
            self.leaves[part] = priorities.astype(float) ** self.alpha
            for name, values in columns.items():
                self.rows[name][part] = values
            self.n = part.stop
        def sample(self, batch, beta):
            if batch == 13:
                raise RuntimeError("thirteen")
            i = self.random.choice(self.n, batch, p=self.leaves / self.leaves.sum())
            rows = {name: values[i] for name, values in self.rows.items()}
            return {**rows, "indexes": i, "weights": (self.leaves[i] / self.leaves.min()) ** -beta}
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A python that has a stand-in of cpprb: isolated, as the benchmark starts it, it sees no PYTHONPATH."""
    site = tmp_path / "site"
    about = site / "cpprb-11.0.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpprb\nVersion: 11.0.0\n", encoding="utf-8")
    (site / "cpprb.py").write_text(textwrap.dedent(_CPPRB), encoding="utf-8")
    script = tmp_path / "cpprb" / "bin" / "python"
    script.parent.mkdir(parents=True)
    start = f"import runpy, sys; sys.path.insert(0, {str(site)!r}); sys.argv = sys.argv[1:]; " + (
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" -I -c "{start}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script


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
    assert "GB/s by rows of a batch" in done.stdout

    late = call("batch-size", *options, "--batches", "8", "--minutes", "0", "--out", str(out))
    assert late.exit_code == 0, late.output
    assert "left out for lack of time: W1, batch 8" in late.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("single-server", "--parts", "W1,W3"), "expected some of W1,W2,insert"),
        (("single-server", "--trajectories", "200"), "200 is less than a batch, 256"),
        (("batch-size", "--trajectories", "200"), "200 is less than the largest batch, 1024"),
        (("batch-size", "--batches", "32,many"), "expected numbers from 1"),
    ],
)
def test_bad_options_are_errors_that_name_the_remedy(arguments: tuple[str, ...], message: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


@needs_no_gpu
@pytest.mark.parametrize("name", ["single-server", "batch-size"])
def test_cuda_without_a_gpu_is_an_error_that_names_the_remedy(name: str) -> None:
    done = call(name, "--device", "cuda")
    assert done.exit_code == 2
    assert "--device cpu" in " ".join(done.stderr.replace("│", " ").split())


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
        yield {kind.name: stack.enter_context(contextlib.closing(stored.Store(kind))) for kind in kinds}


def ways(store: Any, batch: int) -> list[Any]:
    found = [batches.loader(store, f"ours, {n}", batch, n) for n in (0, 2)]
    return [*found, batches._sample(store, batch), batches.plain(store, batch)]


@pytest.mark.parametrize("name", ["W1", "W2"])
def test_ways_in_this_process_pass_and_are_timed(stores: dict[str, Any], name: str) -> None:
    for way in ways(stores[name], 32):
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
    right = batches.plain(store, 32)

    def start() -> Iterator[Any]:
        for batch in right.start():
            found = {name: values.clone() for name, values in batch.items()}
            spoil(found)
            yield found

    with pytest.raises(harness.Incorrect, match=message):
        batches.variant(store, batches.Way("wrong", start), 32, 2, 64).check()


def test_a_batch_that_is_not_written_anew_is_found(stores: dict[str, Any]) -> None:
    store = stores["W1"]
    batch = next(batches.plain(store, 32).start())
    way = batches.Way("stale", lambda: iter(lambda: batch, None))
    with pytest.raises(harness.Incorrect, match="numbers no step"):
        batches.variant(store, way, 32, 2, 64).check()


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_draws_in_another_proportion_are_found(stores: dict[str, Any], power: float) -> None:
    store = stores["W1"]
    leaves = store.source.priorities.astype(np.float64) ** power
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
    variants = [variant("ours", targets=targets), variant("good"), variant("bad", broken)]
    comparison = harness.Comparison("e", "W1", "W1", variants, "good", ("good", "bad"))
    made = session(tmp_path / "rows.jsonl")
    left = harness.Left(made)
    parts.measured(made, left.add, comparison, {"ours"})
    assert left.reasons == ["left out: bad, W1: it is wrong"]
    rows = rows_of(tmp_path / "rows.jsonl")
    assert [(row["variant"], row["targets"], set(row["ratios"])) for row in rows] == [
        ("ours", {"good": 1.0}, {"good"}),
        ("good", {}, {"good"}),
    ]


# Peers -----------------------------------------------------------------------------------------------


def test_every_process_makes_the_same_trajectories_each_of_which_says_which_it_is() -> None:
    first, second = peers.Source(SPEC), peers.Source(SPEC)
    chunks = list(first.chunks())
    assert [part for part, _ in chunks] == [slice(0, 40)]
    for number in (0, 39):
        expected = second.trajectory(number)
        assert expected["n"].tolist() == list(range(5 * number, 5 * number + 5))
        for name, values in expected.items():
            assert np.array_equal(chunks[0][1][name][number], values)
    assert not np.array_equal(first.trajectory(1)["a"], first.trajectory(2)["a"])
    assert 0 < first.priorities.min() < first.priorities.max() <= 1
    with pytest.raises(ValueError, match="cannot number so many"):
        peers.Source({**SPEC, "trajectories": 1 << 23})


class InMemory(peers.Subject):  # type: ignore[misc, name-defined]
    """A peer that is none, in two settings, of which one is slow."""

    environment = "memory"
    settings = ({"pause": 0.01}, {"pause": 0.0})
    fault = ""

    def batches(self) -> Iterator[Any]:
        numbers = np.arange(self.batch)
        while True:
            time.sleep(self.setting["pause"])
            each = [self.source.trajectory(int(number)) for number in numbers]
            batch = {name: np.stack([one[name] for one in each]) for name in self.source.columns}
            if self.fault:
                batch[self.fault][1, -1] += 1
            yield batch

    def weights(self, batch: Any) -> np.ndarray:
        return np.ones(self.batch)


def test_a_worker_takes_the_fastest_setting_and_compares_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "memory", InMemory)
    worker = peers.Worker(InMemory)
    with pytest.raises(RuntimeError, match="build comes first"):
        worker.measure("memory", 2)
    with pytest.raises(ValueError, match="cpprb is of another environment, cpprb"):
        worker.build("cpprb", SPEC)
    worker.build("memory", SPEC)
    assert worker.prepare("memory", 7) == {"setting": {"pause": 0.0}}
    answer = worker.check("memory", 2)
    assert answer == {"steps": [list(range(0, 35, 5))] * 2, "weights": [[1.0] * 7] * 2}
    assert worker.measure("memory", 2)["seconds"] > 0
    for fault, message in (("a", "a of row 1 differs"), ("n", "n of row 1 differs")):
        monkeypatch.setattr(InMemory, "fault", fault)
        with pytest.raises(ValueError, match=message):
            worker.check("memory", 1)
    with pytest.raises(ValueError, match=r"a has shape \(7, 5, 2\); expected \(8, 5, 2\)"):
        peers.Source(SPEC).verify(next(worker._subjects["memory"].batches()), 8)
    worker.close()
    with pytest.raises(RuntimeError, match="build comes first"):
        worker.check("memory", 1)


def test_windows_are_rows_too_and_rows_of_nowhere_are_found() -> None:
    source = peers.Source({**SPEC, "window": 3})
    rows = {name: values[None, 1:4] for name, values in source.trajectory(6).items()}
    assert source.verify(rows, 1).tolist() == [31]
    across = {name: values[None, 3:6] for name, values in source.trajectory(6).items()}
    with pytest.raises(ValueError, match="a has shape"):
        source.verify(across, 1)
    for wrong in (-1.0, 0.5, 200.0, float("nan")):
        rows["n"][0, 0] = wrong
        with pytest.raises(ValueError, match="numbers no step of 200"):
            source.verify(rows, 1)


def test_the_worker_imports_nothing_of_this_project() -> None:
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]); "
        "print([n for n in sys.modules if n.split('.')[0] in ('gear_loader', 'benchmarks', 'torch')])"
    )
    command = [sys.executable, "-I", "-c", code, peers.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# The GPU side, rehearsed -----------------------------------------------------------------------------


class Rehearsal:
    """An engine that is no GPU."""

    device = torch.device("cpu")

    def timed(self, work: Callable[[], None]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def event(self) -> Any:
        class Event:
            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                pass

        return Event()

    def synchronize(self) -> None:
        pass


@needs_no_gpu
def test_the_gpu_side_measures_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = importlib.import_module("benchmarks.batches_gpu")
    monkeypatch.setattr(gpu, "QUICK_DRAWS", 64)
    made = session(tmp_path / "rows.jsonl")
    left = harness.Left(made)
    kinds = [workloads.W1.of(40), workloads.W2.of(40)]
    options = {"experiment": "single-server", "quick": True, "copy_bytes": 8192, "workers": (0, 1)}
    gpu.cuda(made, left, kinds, (16, 8), engine=Rehearsal(), **options)
    rows = rows_of(tmp_path / "rows.jsonl")
    for row in rows:
        check_row(row, "single-server", "cudaMemcpyAsync")
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
    assert len(left.reasons) == len(peers.PEERS)
    assert "left out: TorchRL, W1: peers are measured on the CPU alone (--device cpu)" in left.reasons
