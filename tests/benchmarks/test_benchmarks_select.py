"""The benchmark of selection runs, finds what draws wrongly, and says what it left out; not how fast anything is."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import call, interpreter, needs_no_gpu, rows_of, run, session
from benchmarks_common import check_row as check_any_row
from benchmarks_rehearsal import Rehearsal

__all__ = ["interpreter"]  # a fixture

harness = importlib.import_module("benchmarks.harness")
peers = importlib.import_module("benchmarks.peers.select")
catalog = importlib.import_module("benchmarks.peers.catalog")
processes = importlib.import_module("benchmarks.peers.process")
select = importlib.import_module("benchmarks.experiments.select")
subjects = importlib.import_module("benchmarks.experiments.select_subjects")


def check_row(row: dict[str, Any]) -> None:
    """Every row says what was measured, how, with what result, and on what."""
    check_any_row(row, "select")
    assert row["workload"] == row["parameters"]["operation"]
    assert row["workload"] in peers.OPERATIONS
    assert row["rows"] == row["parameters"]["batch"] > 0
    assert row["parameters"]["items"] > 0
    assert row["yardstick"].startswith("ours")


# The command line ------------------------------------------------------------------------------------


@pytest.mark.long
def test_it_measures_names_what_is_left_out_and_can_be_plotted(tmp_path: Path) -> None:
    for package in ("jinja2", "matplotlib"):
        pytest.importorskip(package)
    out = tmp_path / "new" / "rows.jsonl"
    options = ["--device", "cpu", "--quick", "--repeats", "1", "--threads", "1"]
    options += ["--sizes", "500,3e3", "--batches", "8,64"]
    # An interpreter without the peers, and one that is not there.
    pythons = ("--peers", sys.executable, "--peers", str(tmp_path / "python"))
    done = run("select", *options, *pythons, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    for row in rows:
        check_row(row)
    assert {(row["parameters"]["items"], row["parameters"]["batch"]) for row in rows} == {
        (items, batch) for items in (500, 3000) for batch in (8, 64)
    }
    names = {
        "ours, tree",
        "ours, with extremes",
        "ours, dataset",
        "torch.multinomial",
        "cumsum, torch",
        "cumsum, numpy",
    }
    assert {row["variant"] for row in rows} - set(catalog.peers_of("select")) == names
    for name in set(catalog.peers_of("select")) - {row["variant"] for row in rows}:
        assert f"left out: {name}: {sys.executable}: " in done.stdout
        assert f"{tmp_path / 'python'}: No such file or directory" in done.stdout
    for shown in ("500 items, batch 64", "× ours, tree", "By items (× yardstick)", f"{len(rows)} rows"):
        assert shown in done.stdout

    report = call("report", str(out), "--out", str(tmp_path / "report"))
    assert report.exit_code == 0, report.output
    assert (tmp_path / "report" / "select-cpu.png").read_bytes().startswith(b"\x89PNG")

    late = call("select", *options, "--minutes", "0", "--out", str(out))
    assert late.exit_code == 0, late.output
    assert "left out for lack of time: 3,000 items" in late.stdout
    assert "left out: cpprb: no interpreter with peers is there (benchmarks/peers/make.sh)" in late.stdout
    assert rows_of(out) == rows


@pytest.mark.gpu
def test_quick_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run("select", "--device", "cuda", "--quick", "--batches", "64,1024", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    for row in rows:
        check_row(row)
    names = {
        "ours, graph",
        "ours, eager",
        "ours, dataset",
        "torch.multinomial",
        "cumsum, graph",
        "cumsum, eager",
    }
    assert {row["variant"] for row in rows} == names
    assert "at most" in done.stdout


# What is drawn ---------------------------------------------------------------------------------------


class Right(peers.Subject):  # type: ignore[misc, name-defined]
    """Draws as it should, unless told otherwise."""

    def __init__(self, truth: Any, power: float = 1.0, drawn_power: float = 1.0, fault: str = "") -> None:
        self.items, self.power, self._drawn_power, self._fault = truth.items, power, drawn_power, fault
        self._priorities = truth.priorities.copy()
        self._random = np.random.default_rng(5)
        self.log: list[Any] = []

    def draw(self, batch: int) -> Any:
        self.log.append("draw")
        leaves = self._priorities.astype(np.float64) ** self._drawn_power
        items = self._random.choice(self.items, batch, p=leaves / leaves.sum())
        if self._fault == "outside":
            items[0] = self.items
        elif self._fault == "pairs":
            items &= ~1
        return items, leaves[items % self.items] * (2 if self._fault == "leaves" else 1)

    def update(self, drawn: Any, values: Any) -> None:
        self.log.append("update")
        if self._fault != "updates":
            self._priorities[drawn[0]] = values

    def found(self, drawn: Any) -> Any:
        return drawn

    def chosen(self, items: np.ndarray) -> Any:
        return items, None


def look(subject: Any, truth: Any) -> None:
    sizes = select.Sizes((truth.items,), (32, 1000), draws=1 << 14)
    select._check(subject, truth, sizes)


@pytest.mark.parametrize("power", [1.0, peers.ALPHA])
def test_right_draws_pass_and_priorities_are_put_back(power: float) -> None:
    truth = subjects.Truth(3001, 1)
    subject = Right(truth, power, power)
    for _ in range(2):
        look(subject, truth)
    assert np.array_equal(subject._priorities, truth.priorities)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drawn_power": 0.8}, "weigh what their priorities say"),
        ({"fault": "leaves"}, "weigh what their priorities say"),
        ({"fault": "outside"}, "item 3001 was drawn, of 3001"),
        ({"fault": "pairs"}, "draws are not in proportion to the weights, by up to"),
        ({"fault": "updates"}, "items whose priorities were set: draws are not in proportion"),
    ],
)
def test_wrong_draws_are_found(options: dict[str, Any], message: str) -> None:
    truth = subjects.Truth(3001, 1)
    with pytest.raises(harness.Incorrect, match=message):
        look(Right(truth, **options), truth)


@pytest.mark.parametrize(("power", "least", "most"), [(0.0, 1.0, 99.0), (0.8, 0.1, 0.9)])
def test_draws_in_another_proportion_are_found_with_their_deviation(
    power: float, least: float, most: float
) -> None:
    truth = subjects.Truth(3001, 1)
    subject = Right(truth, drawn_power=power)
    subject.found = lambda drawn: (drawn[0], None)
    with pytest.raises(subjects.Biased, match=r"^priorities: draws are not in proportion") as caught:
        look(subject, truth)
    assert least < caught.value.deviation < most


@pytest.mark.parametrize("kind", select.cpu_kinds(), ids=lambda kind: kind.name)
def test_each_variant_on_the_cpu_draws_what_it_should(kind: Any) -> None:
    truth = subjects.Truth(777, 2)
    with contextlib.closing(kind.build(truth)) as subject:
        look(subject, truth)
        for operation in peers.OPERATIONS:
            for batches in (1, 3):
                assert peers.measure(subject, operation, 16, batches, np.random.default_rng(0)) > 0


def test_measuring_does_what_it_says() -> None:
    truth = subjects.Truth(100, 2)
    subject = Right(truth)
    random = np.random.default_rng(0)
    for operation, log in (
        ("draw", ["draw"] * 4),
        ("update", ["update"] * 4),
        ("cycle", ["draw", "update"] * 4),
    ):
        subject.log.clear()
        peers.measure(subject, operation, 8, 3, random)
        assert subject.log == log  # one more, that is not timed
    subject.log.clear()
    peers.measure(subject, "draw", 8, 1, random)
    assert subject.log == ["draw"]


def test_priorities_are_in_the_half_open_interval_and_always_the_same() -> None:
    values = peers.priorities(10_000, 3)
    assert values.dtype == np.float32
    assert 0 < values.min() < 0.01
    assert 0.99 < values.max() <= 1
    assert np.array_equal(values, peers.priorities(10_000, 3))


def test_variants_that_fail_are_left_out_but_ours_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(truth: Any) -> Any:
        return Right(truth, fault="pairs")

    def inexact(truth: Any) -> Any:
        subject = Right(truth, drawn_power=0.9)
        subject.found = lambda drawn: (drawn[0], None)
        return subject

    def broken(truth: Any) -> Any:
        raise ValueError("no")

    kinds = [
        subjects.Kind("ours", Right, 1, ours=True, limit={8: 9.0}),
        subjects.Kind("wrong", wrong, 1),
        subjects.Kind("broken", broken, 1),
        subjects.Kind("small", Right, 1, most=100, why="it is small"),
        subjects.Kind("huge", Right, 1e12),
        subjects.Kind("inexact", inexact, 1),
    ]
    sizes = select.Sizes((1000,), (8,), seconds=1e-4, draws=1 << 14)
    out = tmp_path / "rows.jsonl"
    made = session(out, 2, "select")
    select.measured(made, kinds, sizes, yardstick="ours")
    rows = rows_of(out)
    for row in rows:
        check_row(row)
    assert [(row["variant"], row["workload"], row.get("limit")) for row in rows] == [
        (variant, operation, 9.0 if (variant, operation) == ("ours", "cycle") else None)
        for operation in peers.OPERATIONS
        for variant in ("ours", "inexact")
    ]
    assert ["bias" in row["parameters"] for row in rows] == [False, True] * 3
    assert "inexact *" in capsys.readouterr().out
    reasons = "\n".join(made.reasons)
    for reason in (
        "inexact (*): inexact, 1,000 items: ",
        "left out: wrong, 1,000 items: priorities: draws are not in proportion",
        "broken, 1,000 items: ValueError: no",
        "small, 1,000 items: it is small",
        "huge, 1,000 items: it needs about 1000000 GB of memory",
    ):
        assert reason in reasons
    kinds[1] = subjects.Kind("wrong", wrong, 1, ours=True)
    with pytest.raises(harness.Incorrect, match="wrong, 1,000 items: priorities: draws"):
        select.measured(made, kinds, sizes, yardstick="ours")
    assert rows_of(out) == rows


# Peers -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_peer_draws_in_its_own_interpreter(interpreter: Path, tmp_path: Path) -> None:
    made = session(tmp_path / "rows.jsonl", pythons=[interpreter])
    with contextlib.ExitStack() as stack:
        (kind,) = select._peer_kinds(made, stack)
        assert kind.name == "cpprb"
        assert kind.parameters["peer"]["versions"]["cpprb"] == "11.0.0"
        assert len(made.reasons) == 3
        truth = subjects.Truth(300, 2)
        subject = kind.build(truth)
        look(subject, truth)
        assert subject.measure("cycle", 16, 3) > 0
        with pytest.raises(processes.PeerFailed, match="RuntimeError: thirteen"):
            subject.draw(13)


def test_interpreters_that_do_not_answer_are_named(tmp_path: Path) -> None:
    with pytest.raises(processes.PeerFailed, match="No such file or directory"):
        catalog.started([tmp_path / "none"], "select", "cpprb")
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\necho sleepy >&2\nexec sleep 20\n", encoding="utf-8")
    slow.chmod(0o755)
    with pytest.raises(processes.PeerFailed, match="took 0 s: sleepy"):
        catalog.started([slow], "select", "cpprb", patience=0.3)


# The GPU side, rehearsed -----------------------------------------------------------------------------


@pytest.mark.long
@needs_no_gpu
def test_the_gpu_side_measures_what_it_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    select_cuda = importlib.import_module("benchmarks.experiments.select_cuda")
    assert select_cuda.LIMITS == {1024: 40e-6}
    monkeypatch.setattr(select_cuda, "LIMITS", {32: 40e-6})
    kinds = select_cuda.kinds(Rehearsal(), launches=2)
    assert [kind.limit for kind in kinds[:3]] == [{32: 40e-6}, {32: 40e-6}, {}]
    sizes = select.Sizes((1500,), (32,), seconds=1e-9, draws=1 << 9)
    out = tmp_path / "rows.jsonl"
    made = session(out)
    select.measured(made, kinds, sizes, yardstick=select_cuda.YARDSTICK)
    assert made.reasons == []
    rows = rows_of(out)
    for row in rows:
        check_row(row)
    assert {row["variant"] for row in rows} == {kind.name for kind in kinds}
    limits = {(row["variant"], row["workload"], row["rows"]) for row in rows if "limit" in row}
    assert limits == {("ours, graph", "cycle", 32), ("ours, eager", "cycle", 32)}
    made.finish()
    assert "at most" in capsys.readouterr().out


@needs_no_gpu
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("draw", "draws the same items at each replay"),
        ("update", "items do not weigh what they were given"),
    ],
)
def test_a_graph_that_does_something_else_is_found(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    select_cuda = importlib.import_module("benchmarks.experiments.select_cuda")
    engine = Rehearsal()
    tree = select_cuda.DeviceTree(subjects.Truth(300, 1), engine)
    graph = select_cuda.Graph(engine, tree, 2)
    assert graph.measure("cycle", 8, 3) > 0
    if fault == "draw":
        tree._step = torch.zeros(1, dtype=torch.int64)  # another counter than the kernel's
    else:
        monkeypatch.setattr(select_cuda.priority, "update", lambda *arguments, **options: None)
    with pytest.raises(harness.Incorrect, match=message):
        graph.measure("draw" if fault == "draw" else "cycle", 16, 3)
