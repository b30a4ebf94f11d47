"""The benchmarks' command line: what there is, several experiments in one go, peers' processes, scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from benchmarks_common import HAS_GPU, ROOT, call, needs_no_gpu, rows_of

from benchmarks import experiments, harness, options, run
from benchmarks.peers import catalog
from benchmarks.peers import process as processes

PAPERS = ("single-server", "multi-server", "batch-size")
NAMES = (
    *PAPERS,
    "collect",
    "overhead",
    "select",
    "online",
    "remote-write",
    "remote-sample",
    "checkpoint",
    "exhaustion",
    "memory",
    "overlap",
    "transitions",
    "simulator",
    "device",
    "packed",
    "values",
    "data",
    "graph",
    "learn",
    "train",
)


def words(text: str) -> str:
    """Without the frames and the wrapping of rich's panels."""
    return " ".join(text.replace("│", " ").split())


def test_list_names_every_experiment_and_the_papers_three() -> None:
    assert tuple(experiment.name for experiment in experiments.EXPERIMENTS) == NAMES
    done = call("list")
    assert done.exit_code == 0, done.output
    for experiment in experiments.EXPERIMENTS:
        assert experiment.name in done.output
        assert experiment.summary.split(",")[0] in " ".join(done.output.split())
    assert all(f"the paper's experiment {number}" in done.output for number in "123")


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_command_with_the_shared_options(name: str) -> None:
    app, about = typer.Typer(), experiments.named(name)
    app.command()(about.command)
    found = {parameter.name for parameter in typer.main.get_command(app).params}
    assert {"quick", "repeats", "out", "minutes"} <= found
    assert ("peers" in found) == bool(about.peers)
    assert ("device" in found) == ("cuda" in about.devices)
    assert call(name, "--help").exit_code == 0
    if "cuda" in about.devices and not HAS_GPU:
        done = call(name, "--device", "cuda")
        assert done.exit_code == 2
        assert "--device cpu" in words(done.stderr)


def test_run_gives_each_experiment_the_options_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def made(name: str, names: str, failure: Exception | None = None, *devices: str) -> Any:
        """A made-up experiment whose command has these of the shared options."""

        def work(**given: Any) -> None:
            if failure is not None:
                raise failure
            seen[name] = tuple(given[option] for option in names.split())

        work.__signature__ = options.signature([], names.split())  # type: ignore[attr-defined]
        work.__annotations__ = {option: options.SHARED[option] for option in names.split()}
        about = experiments.Experiment(name, "made up", devices or ("cpu",))
        return type("Made", (), {**about.__dict__, "command": staticmethod(work)})()

    kinds = (
        made("rich", "quick peers out"),
        made("poor", "repeats"),
        made("broken", "quick", RuntimeError("it broke")),
        made("ended", "quick", typer.Exit(1)),
        made("gpu", "device", None, "cpu", "cuda"),
    )
    monkeypatch.setattr(run, "EXPERIMENTS", kinds)
    monkeypatch.setattr(run, "named", {kind.name: kind for kind in kinds}.__getitem__)
    out = tmp_path / "rows.jsonl"
    paths = ("--peers", str(tmp_path / "a"))
    done = call("run", "rich", "poor", "rich", "--quick", "--repeats", "3", "--out", str(out), *paths)
    assert done.exit_code == 0, done.output
    assert seen == {"rich": (True, tmp_path / "a", out), "poor": (3,)}
    assert "poor has no --quick" in done.output
    assert "rich has no --repeats" in done.output

    seen.clear()
    done = call("run", "all")  # those that fail do not keep the last ones away
    assert done.exit_code == 1
    assert seen == {"rich": (False, None, None), "poor": (None,), "gpu": (None,)}
    assert "it broke" in done.output
    assert "failed: broken, ended" in done.output

    seen.clear()
    done = call("run", "rich", "gpu", "--device", "cuda")
    assert done.exit_code == 0, done.output
    assert seen == {"gpu": (options.Device.cuda,)}
    assert "rich is not measured on cuda: left out" in done.output


def test_a_wrong_result_ends_the_program_with_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (harness.Incorrect("rows differ"), processes.PeerFailed("it has ended")):

        @options.experiment("memory", repeats=(1, 1), threads=1)
        def wrong(session: Any, error: Exception = error) -> None:
            raise error

        with pytest.raises(typer.Exit) as ended:
            wrong(quick=True, out=tmp_path / "x")
        assert ended.value.exit_code == 1
        assert str(error) in capsys.readouterr().out
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run", "EXPERIMENT"),
        ("run collect speed", "speed; expected some of single-server"),
        ("collect --quick --trajectories 100", "100 is less than the largest batch, 128"),
        ("collect --quick --before nowhere", "'nowhere' is no commit here"),
        ("checkpoint --folder nowhere", "'nowhere' does not exist"),
        ("single-server --parts W1,W3", "expected some of W1,W2,insert"),
        ("single-server --trajectories 200", "200 is less than a batch, 256"),
        ("batch-size --trajectories 200", "200 is less than the largest batch, 1024"),
        ("batch-size --batches 32,many", "expected numbers from 1"),
        ("select --sizes 1e4,many", "expected numbers from 64"),
        ("select --batches 0", "expected numbers from 1"),
        ("online --writers 0", "expected numbers from 1"),
        ("online --items many", "expected numbers from 2,048"),
        ("online --parts insert,delete", "expected some of insert,priorities,read,loop"),
        ("online --trajectories 5", "--trajectories"),
        ("train --batches 0", "expected numbers from 1"),
        ("multi-server --nodes 0", "expected numbers from 1 to 16"),
        ("multi-server --local 2", "expected numbers from 0 to 1"),
        ("multi-server --parts collect,all", "expected some of collect,batches,transport,select"),
        ("multi-server --carriers pigeon", "expected some of socket,ucx,nixl"),
        ("multi-server --bandwidth 10", "use --network namespaces"),
        ("scaling nowhere.jsonl", "nowhere.jsonl is not there"),
        ("scaling --worlds 1", "expected numbers from 2"),
    ],
)
def test_bad_options_are_errors_that_name_the_remedy(arguments: str, message: str) -> None:
    done = call(*arguments.split())
    assert done.exit_code == 2
    assert message in words(done.stderr)


def test_numbers_are_read_and_bad_ones_refused() -> None:
    assert options.numbers(None, "--n", 1, 10) == ()
    assert options.numbers("1e1,3,3", "--n", 1, 10) == (3, 10)
    for text in ("0", "11", "x", "", "1,inf", "nan"):
        with pytest.raises(typer.BadParameter, match="expected numbers from 1 to 10"):
            options.numbers(text, "--n", 1, 10)


# Peers -----------------------------------------------------------------------------------------------


def test_environments_are_named_in_the_variable_or_are_where_make_sh_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEAR_LOADER_PEERS", "elsewhere")
    assert processes.environments(tmp_path) == tmp_path
    assert processes.environments(None) == Path("elsewhere")
    monkeypatch.setenv("GEAR_LOADER_PEERS", "")
    assert processes.environments(None) is None
    monkeypatch.delenv("GEAR_LOADER_PEERS")
    assert processes.environments(None) == processes.FOLDER


def test_environments_that_do_not_answer_are_named(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(processes.PeerFailed, match=r"no environment cpprb: .* \(.*make\.sh\)"):
            catalog.started(folder, "select", "cpprb")
    bad = tmp_path / "tianshou" / "failed.txt"
    bad.parent.mkdir()
    bad.write_text("tianshou could not be installed: no wheel\n", encoding="utf-8")
    with pytest.raises(processes.PeerFailed, match=r"tianshou could not be installed: no wheel$"):
        catalog.started(tmp_path, "select", "Tianshou tree")
    slow = tmp_path / "cpprb" / "bin" / "python"
    slow.parent.mkdir(parents=True)
    script(slow, "#!/bin/sh\necho sleepy >&2\nexec sleep 20\n")
    with pytest.raises(processes.PeerFailed, match="took 0 s: sleepy"):
        catalog.started(tmp_path, "select", "cpprb", patience=0.3)


# Scripts ---------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def bash(name: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "benchmarks" / name), *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_what_cannot_be_installed_is_noted_with_the_reason(tmp_path: Path) -> None:
    pip = f"""#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi
case "$*" in
    *tianshou*) echo "ERROR: No matching distribution found for tianshou" >&2; exit 1 ;;
    *) exit 0 ;;
esac
exec {sys.executable} "$@"
"""
    variables = {"PYTHON": str(script(tmp_path / "python", pip)), "TMPDIR": str(tmp_path)}
    folder = tmp_path / "peers"
    done = bash("peers/make.sh", folder, "tianshou", "cpprb", **variables)
    assert done.returncode == 1, done.stdout + done.stderr
    note = "tianshou could not be installed: ERROR: No matching distribution found for tianshou"
    assert (folder / "tianshou" / "failed.txt").read_text(encoding="utf-8").strip() == note
    assert note in done.stderr
    assert (folder / "cpprb" / "ready").exists()
    with pytest.raises(processes.PeerFailed, match=note):
        catalog.started(folder, "select", "Tianshou tree")

    again = bash("peers/make.sh", folder, "cpprb", **variables)  # what is there is kept
    assert (again.returncode, again.stdout) == (0, "cpprb is there\n")
    wrong = bash("peers/make.sh", folder, "speed", **variables)
    assert wrong.returncode == 2
    assert "expected some of: reverb torchrl cpprb tianshou" in wrong.stderr


@pytest.mark.long
@needs_no_gpu
def test_gpu_check_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    done = bash("gpu_check.sh", tmp_path / "out", PYTHON=sys.executable)
    assert done.returncode == 2, done.stderr
    assert "NO GPU" in done.stdout
    assert "NO GPU" in (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")
    assert f"torch {torch.__version__}" in (tmp_path / "out" / "machine.txt").read_text(encoding="utf-8")


_INTERPRETER = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    *"import rich, typer"*) [[ $LACKS != typer ]] || { echo "No module named '$LACKS'"; exit 1; } ;;
    *"benchmarks collect"*) exit 3 ;;
    *"benchmarks simulator"*) cp "$OUT_DIR/summary.txt" "$OUT_DIR/before.txt" ;;
esac
"""
"""In place of Python: has a GPU, and `collect` fails; notes what it is called with."""
_GROUPS = ("users", "gather", "priority", "writers", "place", "packed", "shards")
_STAGES = ("device", "collect", "overlap", "simulator", "packed", "graph")


def gpu_check(tmp_path: Path, lacks: str = "", **more: str) -> tuple[int, str, list[str]]:
    """Run the script with an interpreter that does nothing: its status, its summary, and all calls."""
    python, calls, out = script(tmp_path / "python", _INTERPRETER), tmp_path / "calls", tmp_path / "out"
    told = {"PYTHON": str(python), "CALLS": str(calls), "LACKS": lacks, "OUT_DIR": str(out)}
    done = bash("gpu_check.sh", out, **told, BENCH="--repeats 2", **more)
    summary = (out / "summary.txt").read_text(encoding="utf-8")
    assert summary in done.stdout
    return done.returncode, summary, calls.read_text(encoding="utf-8").splitlines()


def verdicts(summary: str) -> dict[str, str]:
    return {line[:14].strip(): line[15:29].strip() for line in summary.splitlines()}


def test_gpu_check_runs_the_most_important_first_within_nine_minutes(tmp_path: Path) -> None:
    status, summary, calls = gpu_check(tmp_path)
    assert status == 1  # `collect` failed, and those after it ran all the same
    found = verdicts(summary)
    assert list(found) == [
        "loops", *(f"{name} tests" for name in _GROUPS), "sanitizer", *_STAGES
    ]  # fmt: skip
    for name, verdict in found.items():
        expected = {"collect": "FAILED (3)", "sanitizer": "LEFT OUT"}.get(name, "passed")
        assert verdict == expected or (name, verdict) == ("sanitizer", "passed")  # where it is installed
    measured = [line.split() for line in calls if line.startswith("-m benchmarks ")]
    for name, told in zip(_STAGES, measured, strict=True):
        assert told[2:5] == [name, "--device", "cuda"]
        assert told[7:] == ["--out", str(tmp_path / "out" / "rows.jsonl"), "--repeats", "2"]
    minutes = [float(told[told.index("--minutes") + 1]) for told in measured]
    assert minutes == sorted(minutes)  # what one leaves, the next may have
    assert 0.5 < minutes[0] < minutes[-1] < 9
    # What must be correct comes first, without the benchmarks' tests.
    tests = [call for call in calls if call.startswith("-m pytest")]
    assert len(tests) == len(_GROUPS)
    for line in tests:
        assert line.startswith("-m pytest -m gpu -v ")  # a line a test, as it ends
        files = line.split()[8:]
        assert files
        assert all((ROOT / file).is_file() for file in files)
        assert calls.index(line) < calls.index(" ".join(measured[0]))
    # Each stage's line is there before the next begins, and few files are left.
    before = (tmp_path / "out" / "before.txt").read_text(encoding="utf-8")
    assert list(verdicts(before)) == list(found)[: list(found).index("simulator")]
    left = {"machine.txt", "summary.txt", "tests.log", "log.txt", "before.txt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == left


def test_gpu_check_runs_the_stages_that_are_named(tmp_path: Path) -> None:
    _, summary, calls = gpu_check(tmp_path, STAGES="simulator packed")
    assert [name for name, verdict in verdicts(summary).items() if verdict != "LEFT OUT"] == [
        "simulator",
        "packed",
    ]
    assert not any(call.startswith("-m pytest") for call in calls)


def test_gpu_check_wants_a_folder_and_tests_without_a_package_of_the_benchmarks(tmp_path: Path) -> None:
    done = bash("gpu_check.sh", PYTHON=sys.executable)
    assert done.returncode == 2
    assert "no output directory" in done.stderr
    status, summary, calls = gpu_check(tmp_path, lacks="typer")
    assert status == 1
    assert "SKIPPED" in summary
    assert "No module named 'typer'" in summary
    assert any("pytest" in call for call in calls)
    assert not any(call.startswith("-m benchmarks") for call in calls)


@pytest.mark.long
@pytest.mark.timeout(1800)
@needs_no_gpu
def test_gpu_check_passes_on_the_stand_in_from_end_to_end(tmp_path: Path) -> None:
    """With small sizes; of the tests those of users' calls that replay, as kernels are not executed there, and those of
    tables in the GPU's memory with others below; those with names need a thread that takes turns with the test.

    Without `overlap`: there nothing takes place beside anything.
    """
    stand_in = ROOT / "tests" / "tools" / "streams" / "instead.py"
    python = script(
        tmp_path / "python",
        f"""#!/bin/bash
if [[ "$*" != "-m pytest"* ]]; then exec {sys.executable} {stand_in} "$@"; fi
[[ "$*" == *test_on_gpu.py* ]] || {{ echo "kernels are not executed on the stand-in"; exit 0; }}
exec {sys.executable} {stand_in} "$@" -k "(replays or others_below) and (uniform or annealed or packed)"
""",
    )
    out, environment = tmp_path / "out", {**os.environ, "PYTHON": str(python), "BENCH": "--quick --repeats 1"}
    environment["SLOWER"] = "20"  # than a GPU
    environment["STAGES"] = "loops tests sanitizer device collect simulator packed graph"
    command = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
    found = verdicts((out / "summary.txt").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert set(found.values()) <= {"passed", "LEFT OUT"}
    tests = (out / "tests.log").read_text(encoding="utf-8")
    assert re.search(r"\b[1-9][0-9]* passed", tests), tests
    rows = rows_of(out / "rows.jsonl")
    assert {row["experiment"] for row in rows} == set(_STAGES) - {"overlap"}
    assert len(list(out.iterdir())) <= 8
    measured = {row["workload"] for row in rows if row["experiment"] == "device"}
    assert {"marks", "calls", "batch", "functions"} <= measured
