"""The model of the gather's bandwidth: what it has to reproduce, and how it answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks_common import call

from benchmarks.experiments import predict

GEN5 = predict.BUSES["Gen5"]


@pytest.mark.parametrize("published", predict.PUBLISHED, ids=lambda each: each.what)
def test_figures_of_others_are_reproduced_within_a_fifth(published: predict.Published) -> None:
    assert 0.8 <= published.ratio <= 1.2


def test_more_of_anything_is_never_slower_and_never_faster_than_the_bus() -> None:
    ceiling = GEN5.reads()
    for rows in (128, 2048, 42_000):
        for batch in (32, 1024):
            speeds = [predict.predicted(GEN5, rows, batch, count) for count in (1, 2, 8, 32, 132)]
            assert speeds == sorted(speeds)
            assert 0 < speeds[0] <= speeds[-1] < ceiling
        assert predict.predicted(GEN5, rows, 32, 132) < predict.predicted(GEN5, rows, 4096, 132)
    assert GEN5.reads(32) < GEN5.reads(64) < ceiling
    assert predict.predicted(GEN5, 2000, 256, 4, step_bytes=100) < predict.predicted(GEN5, 2000, 256, 4)


def test_the_tables_say_that_they_are_predicted(tmp_path: Path) -> None:
    done = call("predict", "--bus", "Gen4")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("Predicted, not measured: GB/s on Gen4") == 4
    model = predict.predicted(GEN5, 8192, 256, 8) / 1e9
    told = {"row_bytes": 8192, "batch": 256, "programs": 8, "step_bytes": 128}
    row = {
        "variant": "kernel, 8 programs", "label": "rows of 8192, batch 256", "parameters": told,
        "gb_per_s": {"p50": 0.5 * model},
    }  # fmt: skip
    other = {"variant": "memcpy", "label": "x", "parameters": {}, "gb_per_s": {"p50": 1.0}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    done = call("predict", "--beside", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stdout.splitlines() if "rows of 8192" in line)
    assert line.split()[-3:] == [f"{0.5 * model:.2f}", f"{model:.2f}", "0.50"]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--bus", "Gen9"], "expected one of Gen4"), (["--beside", "x"], "x is not there")],
)
def test_bad_options(options: list[str], message: str) -> None:
    done = call("predict", *options)
    assert done.exit_code == 2
    assert message in done.stderr
