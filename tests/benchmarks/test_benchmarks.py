"""The benchmarks run, refuse to time a wrong result, and append complete rows; how fast anything is, is not tested."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import ROOT, call, check_row, needs_no_gpu, reasons_of, rows_of, run, session
from benchmarks_rehearsal import STREAM, Library, Rehearsal

harness = importlib.import_module("benchmarks.harness")
engine = importlib.import_module("benchmarks.engine")
workloads = importlib.import_module("benchmarks.workloads")


# The command line ------------------------------------------------------------------------------------


@pytest.mark.long
def test_quick_appends_rows_and_never_overwrites(tmp_path: Path) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    options = ("collect", "--quick", "--repeats", "2", "--trajectories", "130", "--out", str(out))
    first = call(*options)
    assert first.exit_code == 0, first.output
    before = out.read_text(encoding="utf-8")
    rows = rows_of(out)
    for row in rows:
        check_row(row, "collect")
    assert {(row["workload"], row["parameters"]["batch"]) for row in rows} == {
        (workload, batch) for workload in ("W1", "W2") for batch in (32, 128)
    }
    names = {row["variant"] for row in rows}
    assert {"memcpy", "collector, blocks 100", "collector, blocks 64", "index_select", "x[idx]"} <= names
    assert {row["ratio"]["p50"] for row in rows if row["variant"] == "memcpy"} == {1.0}
    assert len({row["run"] for row in rows}) == 1
    for shown in ("Targets", "x[idx]", f"{len(rows)} rows appended"):
        assert shown in first.stdout

    second = call(*options, "--minutes", "0")  # no time at all: says what it left out, and appends nothing
    assert second.exit_code == 0, second.output
    assert "left out for lack of time: W2, batch 128" in second.stdout
    assert out.read_text(encoding="utf-8") == before

    third = call(*options)
    assert third.exit_code == 0, third.output
    after = out.read_text(encoding="utf-8")
    assert after.startswith(before)
    assert len(rows_of(out)) == 2 * len(rows)
    assert len({row["run"] for row in rows_of(out)}) == 2


@pytest.mark.gpu
def test_quick_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run("collect", "--device", "cuda", "--quick", "--repeats", "2", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    for row in rows:
        check_row(row, "collect")
    assert {row["workload"] for row in rows} == {"W1", "W2", "rows"}
    assert {"kernel, default", "dataset, prefetch 2", "staged, index_select"} <= {
        row["variant"] for row in rows
    }


@needs_no_gpu
def test_gpu_check_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh")]
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("OUT", None)
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    done = subprocess.run([*script, "out"], env=environment, **options)
    assert done.returncode == 2, done.stderr
    assert "NO GPU" in done.stdout
    assert "NO GPU" in (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")
    assert f"torch {torch.__version__}" in (tmp_path / "out" / "machine.txt").read_text(encoding="utf-8")

    done = subprocess.run(script, env=environment, **options)
    assert done.returncode == 2
    assert "no output directory" in done.stderr


_INTERPRETER = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    *"import rich, typer"*) [[ -z $LACKS ]] || { echo "No module named '$LACKS'"; exit 1; } ;;
    *"benchmarks select"*) exit 3 ;;
    "-m pytest"*) cp "$OUT_DIR/summary.txt" "$OUT_DIR/before-$(wc -l <"$CALLS").txt" ;;
esac
"""
"""In place of Python: has a GPU, and `select` fails; notes what it is called with."""


def gpu_check(tmp_path: Path, lacks: str) -> tuple[int, str, list[str]]:
    """Run the script with an interpreter that does nothing: its status, its summary, and all calls."""
    interpreter = tmp_path / "python"
    interpreter.write_text(_INTERPRETER, encoding="utf-8")
    interpreter.chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        **os.environ,
        "PYTHON": str(interpreter),
        "CALLS": str(calls),
        "LACKS": lacks,
        "OUT_DIR": str(tmp_path / "out"),
        "BENCH": "--repeats 2",
    }
    script = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), str(tmp_path / "out")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    summary = (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")
    assert summary in done.stdout
    return done.returncode, summary, calls.read_text(encoding="utf-8").splitlines()


def test_gpu_check_runs_the_most_important_first_within_nine_minutes(tmp_path: Path) -> None:
    status, summary, calls = gpu_check(tmp_path, lacks="")
    assert status == 1  # `select` failed, and those after it ran all the same
    names = ["single-server", "collect", "select", "overlap", "batch-size", "train"]
    stages = [f"{name} tests" for name in ("gather", "priority", "place", "shards")]
    assert [line[:14].strip() for line in summary.splitlines()] == [*stages, *names]
    assert [line[15:29].strip() for line in summary.splitlines()] == [
        "FAILED (3)" if name == "select" else "passed" for name in (*stages, *names)
    ]
    found = [line.split() for line in calls if line.startswith("-m benchmarks")]
    minutes = [float(told[told.index("--minutes") + 1]) for told in found]
    for name, told in zip(names, found, strict=True):
        out = str(tmp_path / "out" / f"{name}-cuda.jsonl")
        assert told[2:5] == [name, "--device", "cuda"]
        assert told[7:] == ["--out", out, "--repeats", "2"]
    assert minutes == sorted(minutes)  # what one leaves, the next may have
    assert 0.5 < minutes[0] < minutes[-1] < 8.5
    # What must be correct comes first, each kind in a stage of its own, without the benchmarks' tests.
    tests = [call for call in calls if call.startswith("-m pytest")]
    assert [call.split()[-1] for call in tests] == [
        *(f"tests/kernels/test_{name}.py" for name in ("gather_gpu", "priority_gpu", "place")),
        "tests/distributed/test_shards_gpu.py",
    ]
    for line, stage in zip(tests, stages, strict=True):
        assert " -m gpu -v " in line  # a line a test, as it ends
        name = stage.replace(" ", "-")
        assert f"--junitxml={tmp_path}/out/{name}.xml" in line
        assert (tmp_path / "out" / f"{name}.log").exists()
    assert calls.index(tests[-1]) < calls.index(" ".join(found[0]))
    # Each stage's line is there before the next begins.
    seen = sorted((tmp_path / "out").glob("before-*.txt"), key=lambda path: int(path.stem.split("-")[1]))
    assert [len(path.read_text(encoding="utf-8").splitlines()) for path in seen] == [0, 1, 2, 3]


def test_gpu_check_without_a_package_of_the_benchmarks_still_tests(tmp_path: Path) -> None:
    status, summary, calls = gpu_check(tmp_path, lacks="typer")
    assert status == 1
    assert "SKIPPED" in summary
    assert "No module named 'typer'" in summary
    assert any("pytest" in call for call in calls)
    assert not any(call.startswith("-m benchmarks") for call in calls)


# The harness -----------------------------------------------------------------------------------------


def variant(name: str, seconds: Sequence[float], log: list[str], wrong: bool = False, **options: Any) -> Any:
    """A variant of 2 batches of 1000 bytes that claims to have taken these seconds, one after another."""
    left = list(seconds)

    def check() -> None:
        log.append(f"check {name}")
        if wrong:
            raise harness.Incorrect("row 3 differs")

    def measure() -> float:
        log.append(name)
        return left.pop(0)

    return harness.Variant(name, measure, check, 1000, 2, **options)


def comparison(*variants: Any) -> Any:
    return harness.Comparison(
        "collect", "W1", "W1, batch 8", variants, yardstick="a", references=("b",), parameters={"batch": 8}
    )


def test_variants_are_checked_first_then_measured_in_turn(tmp_path: Path) -> None:
    log: list[str] = []
    a = variant("a", [2.0, 4.0, 20.0], log)
    b = variant("b", [4.0, 8.0, 20.0], log, targets={"a": 0.4}, extras=lambda: {"host_seconds": 7.0})
    results = session(tmp_path / "rows.jsonl", 3).run(comparison(a, b))
    assert log == ["check a", "check b", *["a", "b"] * 3]
    assert results[1].seconds.tolist() == [2.0, 4.0, 10.0]  # of one batch
    assert results[1].ratios["a"].tolist() == [0.5, 0.5, 1.0]  # of the same turn
    rows = rows_of(tmp_path / "rows.jsonl")
    for row in rows:
        check_row(row, "collect")
    assert [row["variant"] for row in rows] == ["a", "b"]
    assert rows[1]["seconds"] == pytest.approx({"p10": 2.4, "p50": 4.0, "p90": 8.8})
    assert rows[1]["ratio"]["p50"] == 0.5
    assert rows[0]["ratios"]["b"]["p50"] == 2.0
    assert rows[1]["targets"] == {"a": 0.4}
    assert rows[1]["extras"] == {"host_seconds": 7.0}
    with pytest.raises(AssertionError, match="over"):
        results[0].variant.measure()


def test_nothing_is_timed_or_stored_if_one_variant_is_wrong(tmp_path: Path) -> None:
    log: list[str] = []
    with pytest.raises(harness.Incorrect, match="b, W1, batch 8: row 3 differs"):
        session(tmp_path / "rows.jsonl", 3).run(
            comparison(variant("a", [1.0], log), variant("b", [1.0], log, wrong=True))
        )
    assert log == ["check a", "check b"]
    assert not (tmp_path / "rows.jsonl").exists()


def test_after_the_deadline_nothing_starts() -> None:
    late, early, never = harness.Deadline(0.0), harness.Deadline(5.0), harness.Deadline(None)
    time.sleep(0.01)
    assert late.passed("the rest")
    assert late.left_out == ["the rest"]
    assert not early.passed("the rest")
    assert not never.passed("the rest")
    assert early.left_out == []


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ([1.0, 1.1, 1.2], "met"),
        ([0.8, 0.9, 0.9], "missed"),
        ([0.95, 1.01, 1.05], "met"),
        ([0.95, 0.97, 1.05], "missed"),
        ([0.5, 1.5, 3.0], "noisy"),
        ([1.5, 3.0, 9.0], "met"),
    ],
)
def test_a_verdict_says_when_ratios_scatter_too_much(ratios: list[float], word: str) -> None:
    assert f"]{word}[" in harness.verdict(np.array(ratios), 1.0)


@pytest.mark.parametrize(
    ("count", "text"), [(64, "64 B"), (4096, "4 KiB"), (3 << 19, "1.5 MiB"), (1 << 40, "1024 GiB")]
)
def test_sizes_read_well(count: int, text: str) -> None:
    assert harness.size(count) == text


# The workloads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["zero row", "masked", "strided"])
def test_plain_windows_are_what_the_table_holds(way: str) -> None:
    data = workloads.Data(workloads.W2.of(7))
    with data.table(block_steps=33) as table:
        rows = workloads.Rows(torch.tensor([0, 6, 3, 0]), torch.tensor([0, 99, 18, 5]))
        plain = workloads.PlainWindows(data, 4, way)
        workloads.poison(plain.batch)
        plain.gather(rows)
        workloads.expect(plain.batch, data.expected(rows))
        for b, (position, anchor) in enumerate([(0, 0), (6, 99), (3, 18), (0, 5)]):
            steps = table[int(table.indices()[position])]["observation"][max(0, anchor - 19) : anchor + 1]
            found, absent = plain.batch["observation"][b], 20 - len(steps)
            assert torch.equal(found[absent:], steps)
            assert not found[:absent].any()
            assert plain.batch["mask"][b].tolist() == [False] * absent + [True] * len(steps)


def test_expect_names_what_differs() -> None:
    good = {"reward": torch.arange(4.0)}
    workloads.expect(good, {"reward": torch.arange(4.0)})
    with pytest.raises(harness.Incorrect, match="reward differs from the expected values in 1 of 4 rows"):
        workloads.expect(good, {"reward": torch.tensor([0.0, 1.0, 2.0, torch.nan])})
    with pytest.raises(harness.Incorrect, match=r"reward has shape \[4\]; expected \[3\]"):
        workloads.expect(good, {"reward": torch.arange(3.0)})


def test_the_workloads_are_those_of_the_published_figures() -> None:
    assert workloads.W1.row_bytes == 42_000
    assert workloads.W1.table_bytes == 840_000_000
    assert workloads.W2.row_bytes == 1_920
    assert workloads.W2.trajectories * workloads.W2.steps == 2_000_000


# The GPU side, rehearsed -----------------------------------------------------------------------------


@pytest.mark.long
@needs_no_gpu
def test_the_gpu_side_measures_what_it_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collect_cuda = importlib.import_module("benchmarks.experiments.collect_cuda")
    sizes = collect_cuda.Sizes(
        rows=(64, 512, 4096),
        batches=(2,),
        uneven_batches=(2,),
        programs=(1, 3),
        steps=64,
        trajectories=3,
        queue_launches=2,
        copy_bytes=8192,
    )
    library = Library()
    collect_cuda.measured(
        session(tmp_path / "rows.jsonl", 1),
        trajectories=3,
        engine=Rehearsal(),
        library=library,
        sizes=sizes,
    )
    rows = rows_of(tmp_path / "rows.jsonl")
    for row in rows:
        check_row(row, "collect")
    assert {call[-1] for call in library.calls} == {STREAM}
    copied = {
        (row["workload"], row["parameters"].get("step_bytes"), row["parameters"].get("block_steps"))
        for row in rows
        if row["variant"] == "cuMemcpyBatchAsync"
    }
    assert copied == {("W1", None, 100), ("rows", 64, None), ("rows", 128, None)}
    against = [row for row in rows if row["variant"].startswith("kernel") and row["ratios"]]
    assert {row["workload"] for row in against} == {"W1", "rows"}
    sweep = [row for row in rows if row["workload"] == "rows" and row["variant"].startswith("kernel")]
    found = {tuple(row["parameters"][key] for key in ("step_bytes", "row_bytes", "batch")) for row in sweep}
    even = {(64, 64), (128, 512), (128, 4096)}
    uneven = {(44, 44), (44, 12 * 44), (44, 64 * 44)}
    assert found == {(*kind, 2) for kind in even | uneven}
    assert {row["parameters"]["programs"] for row in sweep} == {1, 3}
    goals = {(row["parameters"]["row_bytes"], row["targets"].get(engine.YARDSTICK)) for row in sweep}
    assert goals == {(64, None), (512, 0.8), (4096, 0.95)} | {(count, None) for _, count in uneven}
    names = {row["variant"] for row in rows if row["workload"] == "W2"}
    assert {"kernel, default", "dataset, prefetch 0", "dataset, prefetch 2", "staged, index_select"} <= names
    hosts = [row["extras"]["host_seconds"] for row in rows if row["variant"].startswith("dataset")]
    assert hosts
    assert np.all(np.array(hosts) >= 0)
    shown = capsys.readouterr().out
    for text in ("W1, batch 2, blocks 100", "Targets", "By row_bytes (× yardstick)", "launch seconds"):
        assert text in shown


@needs_no_gpu
def test_the_gpu_side_finds_a_kernel_that_writes_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect_cuda = importlib.import_module("benchmarks.experiments.collect_cuda")
    kernel = importlib.import_module("benchmarks.gather_rows").kernel
    right = kernel.gather

    def wrong(plan: Any, slots: torch.Tensor, *arguments: Any, **options: Any) -> None:
        right(plan, slots.flip(0), *arguments, **options)

    monkeypatch.setattr(kernel, "gather", wrong)
    sizes = collect_cuda.Sizes(
        rows=(512,), batches=(3,), steps=64, trajectories=3, queue_launches=2, copy_bytes=8192
    )
    with pytest.raises(harness.Incorrect, match="kernel, 1 programs, W1, batch 3, blocks 100"):
        collect_cuda.measured(
            session(tmp_path / "rows.jsonl"),
            trajectories=3,
            engine=Rehearsal(),
            library=Library(),
            sizes=sizes,
        )
    assert not (tmp_path / "rows.jsonl").exists()


# Copies of the driver ---------------------------------------------------------------------------------


def swept(batch: int = 3) -> tuple[Any, Any]:
    """A table of two trajectories of 64 steps, and rows of 5 steps of it for two batches."""
    gather_rows = importlib.import_module("benchmarks.gather_rows")
    table = gather_rows.sweep_table(64, 2)
    kind = gather_rows.RowKind("step64", 5, 2, 64)
    rows = gather_rows.SweepRows(Rehearsal(), table, kind, batch, 2, steps=64, trajectories=2)
    rows.refresh()
    return table, rows


@pytest.mark.parametrize("version", [12.8, 13.0])
def test_copies_of_the_driver_give_the_kernels_batch(version: float, tmp_path: Path) -> None:
    copies = importlib.import_module("benchmarks.copies")
    assert ctypes.sizeof(copies.Attributes) == 24
    library = Library(version)
    table, rows = swept()
    with table:
        left = session(tmp_path / "rows.jsonl")
        found = copies.copy_variants(Rehearsal(), copies.Driver(library), rows, left)
        assert [variant.name for variant in found] == [copies.BATCHED, copies.SINGLE]
        assert left.reasons == []
        assert all(variant.measure() > 0 for variant in found)
        targets, sources, sizes = copies.row_copies(rows, 1)
        column, out = table.region.column("step64"), rows.buffers[1].batch["step64"]
        assert targets.tolist() == [out.data_ptr() + 320 * i for i in range(3)]
        assert sizes.tolist() == [320] * 3
        assert np.all(sources >= column.ctypes.data)
        assert np.all(sources + sizes <= column.ctypes.data + column.nbytes)
    assert [call for call in library.calls if call[0] == "batched"] == [
        ("batched", 3, copies.ORDER_ANY, 0, [0, 0, 0, 0], STREAM)
    ] * 4
    assert len([call for call in library.calls if call[0] == "single"]) == 4 * 3


class Registered(Library):
    """A driver that copies from memory that was registered in pieces: not across two of them."""

    bound = 0

    def _move(self, target: int, source: int, count: int) -> None:
        assert not source < self.bound < source + count
        super()._move(target, source, count)


@pytest.mark.parametrize("inside", [0, 100])
def test_copies_of_the_driver_stop_where_a_registration_does(
    inside: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = importlib.import_module("benchmarks.copies")
    library = Registered(13.0)
    table, rows = swept()
    with table:
        whole = copies.row_copies(rows, 0)
        _, sources, sizes = whole
        library.bound = bound = int(sources[1]) + inside
        spanning = sum(a < bound < a + b for a, b in zip(sources.tolist(), sizes.tolist(), strict=True))
        assert spanning >= (inside > 0)
        base = table.region.array("counters").ctypes.data
        monkeypatch.setattr(table.region._mapping, "registered", [base, library.bound])
        assert table.region.pinned_bounds == [library.bound]
        left = session(tmp_path / "rows.jsonl")
        found = copies.copy_variants(Rehearsal(), copies.Driver(library), rows, left)
        assert left.reasons == []
        assert len(found) == 2
        parts = copies.split(whole, [bound])
        assert {len(part) for part in parts} == {3 + spanning}
        assert parts[2].sum() == sizes.sum()
        assert all(variant.measure() > 0 for variant in found)


def test_the_yardstick_s_copies_stop_there_too() -> None:
    engine = importlib.import_module("benchmarks.engine")
    source = torch.arange(4096)
    first = source.data_ptr()
    bounds = [first + 8 * word for word in (512, 1000, 3000)]
    spans: list[tuple[int, int]] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") == "copy_":
                spans.append((args[1].data_ptr(), args[1].data_ptr() + args[1].nbytes))
            return function(*args, **(kwargs or {}))

    copies = engine.Copies(Rehearsal(), source, 8 * 2048, bounds=bounds)
    for _ in range(20):
        with Watch():
            copies.copy()
        copies.compare()
    assert len(spans) > 20
    assert not any(begin < bound < end for begin, end in spans for bound in bounds)


@pytest.mark.parametrize(
    ("library", "reasons"),
    [
        (Library(12.4), {"cuMemcpyBatchAsync": "CUDA 12.8 and later"}),
        (
            Library(12.8, code=801),
            {"cuMemcpyBatchAsync": "returned 801 at copy 7", "cuMemcpyHtoDAsync": "returned 801"},
        ),
        (Library(wrong=True), {"cuMemcpyBatchAsync": "differ", "cuMemcpyHtoDAsync": "differ"}),
    ],
)
def test_copies_that_do_not_work_are_left_out_with_their_reason(
    library: Any, reasons: dict[str, str], tmp_path: Path
) -> None:
    copies = importlib.import_module("benchmarks.copies")
    table, rows = swept()
    with table:
        left = session(tmp_path / "rows.jsonl")
        found = copies.copy_variants(Rehearsal(), copies.Driver(library), rows, left)
    assert len(found) + len(reasons) == 2
    noted = {what.split(",")[0]: why for what, why in reasons_of(tmp_path / "rows.jsonl").items()}
    assert set(noted) == set(reasons)
    for name, why in reasons.items():
        assert why in noted[name]


@needs_no_gpu
def test_without_a_driver_there_are_no_copies(tmp_path: Path) -> None:
    copies = importlib.import_module("benchmarks.copies")
    with pytest.raises(copies.Unavailable):
        copies.Driver(object())
    table, rows = swept()
    with table:
        left = session(tmp_path / "rows.jsonl")
        assert copies.copy_variants(Rehearsal(), None, rows, left) == []
