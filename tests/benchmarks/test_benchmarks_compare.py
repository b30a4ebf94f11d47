"""Two runs side by side: what is matched, what is faster, what fails, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks_common import call
from report_common import GPU, Made, written

from benchmarks import compare

_PARAMETERS = {"batch": 32}


def run(name: str, ours: float, memcpy: float = 4e9, **context: Any) -> Made:
    made = Made(name, **context)
    speeds = {"memcpy": memcpy, "ours": ours, "peer": memcpy / 4}
    made.compare("collect", "W1", "W1, batch 32", speeds, "memcpy", _PARAMETERS)
    return made


def compared(folder: Path, before: Made, after: Made, *options: str) -> Any:
    files = (written(folder / "a.jsonl", before.rows), written(folder / "b.jsonl", after.rows))
    done = call("compare", *map(str, files), *options)
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def verdicts(before: Made, after: Made) -> dict[str, str]:
    return {pair.after["variant"]: pair.verdict for pair in compare.pairs(before.rows, after.rows)}


@pytest.mark.parametrize(
    ("ours", "memcpy", "verdict"),
    [
        (2e9, 4e9, "same within scatter"),
        (1.9e9, 4e9, "same within scatter"),
        (1.5e9, 4e9, "slower"),
        (3e9, 4e9, "faster"),
        (1e9, 2e9, "same within scatter"),  # the machine was slow that day
        (2e9, 2e9, "faster"),
        (2e9, 8e9, "slower"),
    ],
)
def test_verdicts_are_relative_to_the_yardstick(ours: float, memcpy: float, verdict: str) -> None:
    found = verdicts(run("a", 2e9), run("b", ours, memcpy))
    assert found["ours"] == verdict
    assert found["peer"] == "same within scatter"


def test_a_yardstick_that_is_ours_takes_nothing_out() -> None:
    made = []
    for name, speed in (("a", 2e6), ("b", 1e6)):
        made.append(Made(name))
        speeds = {"ours, tree": speed, "ours, dataset": speed / 4, "cpprb": 5e5}
        made[-1].compare("select", "cycle", "N", speeds, "ours, tree", {"items": 9}, "rows")
    assert verdicts(*made) == {
        "ours, tree": "slower",
        "ours, dataset": "slower",
        "cpprb": "same within scatter",
    }


def test_the_table_and_what_has_no_counterpart(tmp_path: Path) -> None:
    before, after = run("a", 2e9), run("b", 1e9)
    before.compare("collect", "W2", "W2", {"memcpy": 1e9}, "memcpy", {"batch": 1})
    code, shown = compared(tmp_path, before, after)
    assert code == 0
    assert "W1, batch 32 ours 2 GB/s 1 GB/s 0.50 0.50 slower" in shown
    assert "W1, batch 32 memcpy 4 GB/s 4 GB/s 1.00 same within scatter" in shown
    assert f"1 rows of {tmp_path / 'a.jsonl'} have no counterpart" in shown
    assert "b.jsonl have no counterpart" not in shown
    assert "machines differ" not in shown


def test_machines_that_differ_are_named_and_devices_are_not_mixed(tmp_path: Path) -> None:
    machine = {**Made("any").context["machine"], "cores": 64}
    code, shown = compared(tmp_path, run("a", 2e9), run("b", 2e9, machine=machine))
    assert code == 0
    assert "The machines differ: A on Made-up CPU, 2 cores; B on Made-up CPU, 64 cores." in shown
    code, shown = compared(tmp_path, run("a", 2e9), run("b", 2e9, device=GPU))
    assert code == 2
    assert "none of the 3 rows" in shown


def test_it_fails_above_a_ratio_for_ours_alone(tmp_path: Path) -> None:
    before, slower = run("a", 2e9), run("b", 1e9)
    assert compared(tmp_path, before, slower, "--fail-above", "2.1")[0] == 0
    code, shown = compared(tmp_path, before, slower, "--fail-above", "1.9")
    assert code == 1
    assert "more than 1.9 times as slow as before: W1, batch 32: ours (2.00)" in shown
    for row in (worse := run("c", 2e9)).rows:
        if row["variant"] == "peer":
            row["ratio"] = {name: value / 9 for name, value in row["ratio"].items()}
    assert compared(tmp_path, before, worse, "--fail-above", "1.1")[0] == 0


def test_runs_and_commits_are_found_by_their_first_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    rows = run("first-run", 2e9, commit="aaaa1111").rows + run("second-run", 1e9, commit="bbbb2222").rows
    file = written(tmp_path / "collect.jsonl", rows)
    for names in (
        ("firs", "second"),
        ("aaaa", "bbbb2"),
        (f"{file}@aaaa", f"{file}@second-run"),
        ("firs", str(file)),
    ):
        done = call("compare", *names)
        assert done.exit_code == 0, done.output
        assert "2 GB/s 1 GB/s 0.50 0.50 slower" in " ".join(done.output.split())
    for name, message in (
        ("nowhere", "nothing measured by a run or commit 'nowhere'"),
        ("fir", "too short for a run or a commit: 4 letters at least"),
        ("nowhere.jsonl@firs", "nowhere.jsonl is not there"),
        (f"{file}@cccc", "nothing measured by a run or commit 'cccc'"),
        (f"{file}@", "'' is no file, and too short for a run or a commit"),
    ):
        done = call("compare", name, "second")
        assert done.exit_code == 2
        assert "".join(message.split()) in "".join(done.stderr.replace("│", " ").split())
    file.write_text("{}\n")
    done = call("compare", str(file), str(file))
    assert done.exit_code == 2
    assert "line1:expected'experiment'" in "".join(done.stderr.replace("│", " ").split())
