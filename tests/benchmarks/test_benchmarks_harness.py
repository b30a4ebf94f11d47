"""The harness checks before it times, takes variants in turn and appends complete rows; the workloads' data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks_common import all_rows, check_row, reasons_of, rows_of, session

from benchmarks import harness, training, workloads
from benchmarks.experiments import overlap
from benchmarks.reporting import findings


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
    names = {"yardstick": "a", "references": ("b",), "parameters": {"batch": 8}}
    return harness.Comparison("collect", "W1", "W1, batch 8", variants, **names)


def test_variants_are_checked_first_then_measured_in_turn(tmp_path: Path) -> None:
    log: list[str] = []
    a = variant("a", [2.0, 4.0, 20.0], log)
    b = variant("b", [4.0, 8.0, 20.0], log, targets={"a": 0.4}, extras=lambda: {"host_seconds": 7.0})
    out = tmp_path / "new" / "rows.jsonl"
    results = session(out, 3).run(comparison(a, b))
    assert log == ["check a", "check b", *["a", "b"] * 3]
    assert results[1].seconds.tolist() == [2.0, 4.0, 10.0]  # of one batch
    assert results[1].ratios["a"].tolist() == [0.5, 0.5, 1.0]  # of the same turn
    rows = rows_of(out)
    for row in rows:
        check_row(row, "collect")
    assert [row["variant"] for row in rows] == ["a", "b"]
    assert rows[1]["seconds"] == pytest.approx({"p10": 2.4, "p50": 4.0, "p90": 8.8})
    assert (rows[1]["ratio"]["p50"], rows[0]["ratios"]["b"]["p50"]) == (0.5, 2.0)
    assert (rows[1]["targets"], rows[1]["extras"]) == ({"a": 0.4}, {"host_seconds": 7.0})
    with pytest.raises(AssertionError, match="over"):
        results[0].variant.measure()
    # A second run appends its rows, under another name.
    before = out.read_text(encoding="utf-8")
    session(out).run(comparison(variant("a", [1.0], log), variant("b", [1.0], log)))
    assert out.read_text(encoding="utf-8").startswith(before)
    assert len({row["run"] for row in rows_of(out)}) == 2
    assert len(rows_of(out)) == 4


def test_a_wrong_variant_ends_the_run_before_anything_is_timed_unless_it_is_a_peer(tmp_path: Path) -> None:
    log: list[str] = []
    out = tmp_path / "rows.jsonl"
    right, wrong = variant("a", [1.0], log), variant("b", [1.0], log, wrong=True)
    with pytest.raises(harness.Incorrect, match="b, W1, batch 8: row 3 differs"):
        session(out, 3).run(comparison(right, wrong))
    assert log == ["check a", "check b"]
    assert not out.exists()
    made = session(out)
    peer = variant("b", [1.0], log, wrong=True, required=False)
    made.run(comparison(variant("a", [1.0], log, targets={"a": 1.0, "b": 2.0}), peer))
    assert made.reasons == ["left out: b, W1, batch 8: row 3 differs"]
    (row,) = rows_of(out)  # targets of and ratios to what is left out go with it
    assert (row["variant"], row["targets"], row["ratios"]) == ("a", {"a": 1.0}, {})


def test_a_peer_that_fails_while_it_is_timed_is_left_out_and_the_others_start_again(tmp_path: Path) -> None:
    log: list[str] = []
    made = session(tmp_path / "rows.jsonl", 2)
    peer = variant("b", [1.0], log, required=False)  # the second time it fails
    (result,) = made.run(comparison(variant("a", [1.0, 1.0, 4.0, 4.0], log), peer))
    assert result.seconds.tolist() == [2.0, 2.0]
    assert made.reasons == ["left out: b, W1, batch 8: IndexError: pop from empty list"]
    with pytest.raises(IndexError):
        made.run(comparison(variant("a", [1.0], log), variant("b", [1.0], log)))


def test_what_cannot_be_timed_here_is_left_out_although_it_is_required(tmp_path: Path) -> None:
    def check() -> None:
        raise harness.Unmeasured("it waits for the other")

    made, log = session(tmp_path / "rows.jsonl"), []
    made.run(comparison(variant("a", [1.0], log), dataclasses.replace(variant("b", [1.0], log), check=check)))
    assert made.reasons == ["left out: b, W1, batch 8: it waits for the other"]
    assert [row["variant"] for row in rows_of(tmp_path / "rows.jsonl")] == ["a"]


def test_what_is_left_out_and_what_is_no_time_are_rows_too(tmp_path: Path) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    made = session(out, 2, "memory")
    made.leave("Reverb", "no wheel for this Python")
    names = ("memory", "even", "even lengths", "ours")
    told = {"parameters": {"block_steps": 32}, "at_most": 1.05, "extras": {"bytes": 3.0}}
    made.record(harness.Amount(*names, [1.0, 1.5, 2.0], "bytes / byte", **told))
    assert reasons_of(out) == {"Reverb": "no wheel for this Python"}
    (row,) = rows_of(out)
    assert row["amount"] == {"p10": pytest.approx(1.1), "p50": 1.5, "p90": pytest.approx(1.9)}
    assert (row["unit"], row["repeats"], row["at_most"]) == ("bytes / byte", 3, 1.05)
    assert "at_least" not in row
    check_row(row, "memory")
    assert {row["experiment"] for row in all_rows(out)} == {"memory"}


def test_verdicts_sizes_deadlines_and_slowdowns(tmp_path: Path) -> None:
    for ratios, word in (
        ([1.0, 1.1, 1.2], "met"),
        ([0.8, 0.9, 0.9], "missed"),
        ([0.95, 1.01, 1.05], "met"),
        ([0.95, 0.97, 1.05], "missed"),
        ([0.5, 1.5, 3.0], "noisy"),
        ([1.5, 3.0, 9.0], "met"),
    ):
        assert findings.verdict(ratios) == word
    counts = (64, 4096, 3 << 19, 1 << 40)
    assert [harness.size(count) for count in counts] == ["64 B", "4 KiB", "1.5 MiB", "1024 GiB"]
    late, *others = (session(tmp_path / "rows.jsonl", minutes=minutes) for minutes in (0.0, 5.0, None))
    time.sleep(0.01)
    assert [list(each.each("some", [3, 4], str)) for each in (late, *others)] == [[], [3, 4], [3, 4]]
    assert [each._late for each in (late, *others)] == [["3", "4"], [], []]
    clock = training.Clock()
    for alone, beside in ((1.0, 2.0), (10.0, 20.0), (3.0, 9.0)):
        clock.note("alone", alone, 0.0)
        clock.note("ours", beside, beside / 4)
    assert clock.extras("ours") == {"slowdown": 2.0, "waiting": 0.25}


# The workloads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["zero row", "strided"])
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
    # The published figures are of these.
    assert (workloads.W1.row_bytes, workloads.W1.table_bytes) == (42_000, 840_000_000)
    assert (workloads.W2.row_bytes, workloads.W2.trajectories * workloads.W2.steps) == (1_920, 2_000_000)


def test_expect_names_what_differs() -> None:
    good = {"reward": torch.arange(4.0)}
    workloads.expect(good, {"reward": torch.arange(4.0)})
    with pytest.raises(harness.Incorrect, match="reward differs from the expected values in 1 of 4 rows"):
        workloads.expect(good, {"reward": torch.tensor([0.0, 1.0, 2.0, torch.nan])})
    with pytest.raises(harness.Incorrect, match=r"reward has shape \[4\]; expected \[3\]"):
        workloads.expect(good, {"reward": torch.arange(3.0)})


# Training steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_a_step_trains_and_sees_no_later_step(name: str) -> None:
    data = workloads.Data(overlap.workload(20))
    batch = data.expected(data.draw(8))
    trainer = training.Training(training.MODELS[name]())
    losses = [float(trainer.step(batch)) for _ in range(20)]
    assert losses[-1] < losses[0]
    if name == "transformer":
        model = training.Transformer(16, 1, 2).eval()
        steps = torch.randn(2, 6, 97)
        changed = steps.clone()
        changed[:, 4:] += 1
        torch.testing.assert_close(model(steps)[:, :4], model(changed)[:, :4])
        assert not torch.allclose(model(steps)[:, 4:], model(changed)[:, 4:])
