"""What the benchmark `overlap` measures, on the CPU and rehearsed for a GPU; how fast anything is, is not tested."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks_common import call, needs_no_gpu, rows_of, run, session
from benchmarks_common import check_row as check_any_row
from benchmarks_rehearsal import Rehearsal

import gear_loader as gear

harness = importlib.import_module("benchmarks.harness")
overlap = importlib.import_module("benchmarks.experiments.overlap")
overlap_cuda = importlib.import_module("benchmarks.experiments.overlap_cuda")
workloads = importlib.import_module("benchmarks.workloads")
training = importlib.import_module("benchmarks.training")

SIZES = overlap_cuda.Sizes(
    programs=(1, 3),
    batch=2,
    load_bytes=8_000,
    matrix=32,
    products=2,
    width=16,
    layers=1,
    heads=2,
    steps=1,
)

SHORT = dataclasses.replace(workloads.W1, steps=6, window=gear.Window(6))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_row(row: dict[str, Any]) -> None:
    check_any_row(row, "overlap")
    assert (row["experiment"], row["workload"], row["yardstick"]) == ("overlap", "step", "alone")
    assert row["parameters"]["batch"] > 0
    assert row["rows"] > 0
    assert row["extras"]["slowdown"] > 0
    if row["variant"] == "alone":
        assert row["extras"]["slowdown"] == 1.0


def test_quick_appends_a_row_for_every_feed(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = ("--quick", "--batches", "8", "--trajectories", "50", "--repeats", "1", "--threads", "1")
    done = call("overlap", *options, "--out", str(out))
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    names = {
        "alone",
        "ours, prefetch 0",
        "ours, prefetch 2",
        "ours, prefetch 2, DataLoader",
        "DataLoader, map-style, 0 workers",
        "DataLoader, map-style, 2 workers",
        "plain torch",
    }
    found = {(row["parameters"]["model"], row["variant"]) for row in rows}
    assert found == {(model, name) for model in ("mlp", "transformer") for name in names}
    for row in rows:
        check_row(row)
        assert 0 <= row["extras"]["waiting"] <= 1
    assert "slowdown" in done.stdout


def test_a_feed_of_wrong_batches_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = workloads.PlainTrajectories.gather
    turned = lambda self, rows: gather(self, workloads.Rows(rows.positions.flip(0), rows.anchors))  # noqa: E731
    monkeypatch.setattr(workloads.PlainTrajectories, "gather", turned)
    feeds = overlap._feeds
    monkeypatch.setattr(overlap, "_feeds", lambda *told: [feeds(*told)[0], feeds(*told)[-1]])
    options = ("--quick", "--batches", "8", "--trajectories", "50", "--threads", "1")
    done = call("overlap", *options, "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 1
    assert "plain torch, mlp, batch 8: observation differs" in done.output
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_a_step_trains(name: str) -> None:
    data = workloads.Data(overlap.workload(20))
    batch = data.expected(data.draw(8))
    trainer = training.Training(training.MODELS[name]())
    losses = [float(trainer.step(batch)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_the_transformer_sees_no_later_step() -> None:
    model = training.Transformer(16, 1, 2).eval()
    steps = torch.randn(2, 6, 97)
    changed = steps.clone()
    changed[:, 4:] += 1
    torch.testing.assert_close(model(steps)[:, :4], model(changed)[:, :4])
    assert not torch.allclose(model(steps)[:, 4:], model(changed)[:, 4:])


def test_slowdown_is_relative_to_the_same_turn() -> None:
    clock = training.Clock()
    for alone, beside in ((1.0, 2.0), (10.0, 20.0), (3.0, 9.0)):
        clock.note("alone", alone, 0.0)
        clock.note("ours", beside, beside / 4)
    assert clock.extras("ours") == {"slowdown": 2.0, "waiting": 0.25}


# The GPU side ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "seconds", "loads"),
    [
        ([0.0, 1.0, 2.0, 3.0], 2.0, 2.0),
        ([-1.0, 1.0, 3.0, 5.0], 4.0, 2.0),  # half of the second, the third, half of the fourth
        ([-0.5, 9.5, 19.5], 1.0, 0.1),
    ],
)
def test_loads_are_counted_in_parts(ends: list[float], seconds: float, loads: float) -> None:
    assert overlap_cuda.moved(ends, seconds) == pytest.approx(loads)


@pytest.mark.long
@needs_no_gpu
def test_the_gpu_side_measures_work_beside_every_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearsal = Rehearsal()
    overlap_cuda.measured(
        session(tmp_path / "rows.jsonl", 2), trajectories=5, engine=rehearsal, sizes=SIZES, workload=SHORT
    )
    rows = rows_of(tmp_path / "rows.jsonl")
    for row in rows:
        check_row(row)
    loads = {"ours, kernel, 1 programs", "ours, kernel, 3 programs", "cudaMemcpyAsync"}
    fed = {"ours, prefetch 0", "ours, prefetch 2", "ours, prefetch 2, 1 programs", "staged, index_select"}
    by_work: dict[str, set[str]] = {}
    for row in rows:
        by_work.setdefault(row["parameters"]["work"], set()).add(row["variant"])
    assert by_work["bf16 products"] == by_work["transformer steps"] == {"alone", *loads}
    assert {"alone", *fed} <= by_work["fed transformer steps"]
    for row in rows:
        if row["variant"] in loads:
            assert row["extras"]["gb_per_s"] > 0
            assert row["extras"]["gb_per_s_alone"] > 0
        if row["variant"].startswith("ours, kernel"):
            assert row["parameters"]["programs"] in (1, 3)
    # Four loads end before the work does: more are queued until they last, and then as many at once.
    assert rehearsal.counts == ([4, 10] * 3 + [10] * 6) * 2
    shown = capsys.readouterr().out
    for text in ("bf16 products", "gb per s alone", "fed transformer steps"):
        assert text in shown


@needs_no_gpu
def test_the_rate_beside_the_work_is_what_was_moved_meanwhile() -> None:
    class Work:
        def launch(self) -> None: ...

        def check(self) -> None: ...

    class Load(Work):
        bytes = 600

        def refresh(self) -> None: ...

    class Timed(Rehearsal):
        def beside(self, work: Any, load: Any, count: int) -> tuple[float, list[float]]:
            return 3.0, [i * 0.5 for i in range(count)]

    pair = overlap_cuda._Pair(Timed(), Work(), Load())
    assert pair.measure() == 3.0
    assert pair.rates == [1200.0]

    class Ends(Rehearsal):
        def beside(self, work: Any, load: Any, count: int) -> tuple[float, list[float]]:
            return 3.0, [0.0] * count

    with pytest.raises(harness.Incorrect, match="4096 loads end before the work does"):
        overlap_cuda._Pair(Ends(), Work(), Load()).measure()


class Line:
    """A stream that is none: how many seconds of work have been queued on it."""

    now: Line
    cuda_stream = 7

    def __init__(self) -> None:
        self.time = 0.0

    def wait_stream(self, other: Line) -> None:
        self.time = max(self.time, other.time)

    def wait_event(self, event: Mark) -> None:
        self.time = max(self.time, event.time)


class Mark:
    def __init__(self, enable_timing: bool = False) -> None:
        self.time = float("nan")

    def record(self) -> None:
        self.time = Line.now.time

    def elapsed_time(self, other: Mark) -> float:
        assert other.time >= self.time  # CUDA says nothing of what comes out otherwise
        return (other.time - self.time) * 1e3


def queued(seconds: float) -> None:
    Line.now.time += seconds


@needs_no_gpu
def test_a_gpu_starts_the_work_when_the_first_load_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = importlib.import_module("benchmarks.engine")
    main, side = Line(), Line()

    @contextlib.contextmanager
    def on(line: Line) -> Iterator[None]:
        before, Line.now = Line.now, line
        yield
        Line.now = before

    monkeypatch.setattr(Line, "now", main, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Line.now)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    gpu = object.__new__(engine.CudaEngine)
    gpu._side, gpu._begin, gpu._end = side, Mark(), Mark()
    gpu._filler = types.SimpleNamespace(zero_=lambda: queued(0.1))
    seconds, ends = gpu.beside(lambda: queued(3.0), lambda: queued(2.0), 4)
    assert seconds == pytest.approx(3.0)
    assert ends == pytest.approx([0.0, 2.0, 4.0, 6.0])
    with gpu.aside() as handle:
        assert Line.now is side
        assert handle == 7
    assert Line.now is main


@needs_no_gpu
@pytest.mark.parametrize("what", ["kernel", "product"])
def test_nothing_wrong_is_timed_beside_the_other(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = importlib.import_module("benchmarks.gather_rows")
    if what == "kernel":
        right = rows.kernel.gather
        monkeypatch.setattr(
            rows.kernel,
            "gather",
            lambda plan, slots, *others, **options: right(plan, slots.flip(0), *others, **options),
        )
        message = "ours, kernel, 1 programs, bf16 products, batch 2"
    else:
        monkeypatch.setattr(overlap_cuda._Products, "_multiply", lambda self: self._out.zero_())
        message = "alone, bf16 products, batch 2: a product is off by 1"
    with pytest.raises(harness.Incorrect, match=message):
        overlap_cuda.measured(
            session(tmp_path / "rows.jsonl", 2),
            trajectories=50,
            engine=Rehearsal(),
            sizes=SIZES,
            workload=SHORT,
        )


@pytest.mark.gpu
def test_quick_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run("overlap", "--device", "cuda", "--quick", "--repeats", "2", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    for row in rows:
        check_row(row)
    assert {"alone", "cudaMemcpyAsync", "ours, kernel, 132 programs", "ours, prefetch 2"} <= {
        row["variant"] for row in rows
    }
