"""The benchmarks' command line: what there is, several experiments in one go, the peers' processes."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks_common import ROOT, all_rows, call, check_row, needs_no_gpu, reasons_of, rows_of, session

experiments = importlib.import_module("benchmarks.experiments")
harness = importlib.import_module("benchmarks.harness")
options = importlib.import_module("benchmarks.options")
processes = importlib.import_module("benchmarks.peers.process")
run = importlib.import_module("benchmarks.run")

NAMES = (
    "single-server",
    "multi-server",
    "batch-size",
    "collect",
    "select",
    "online",
    "checkpoint",
    "memory",
    "overlap",
    "train",
)


# Experiments -----------------------------------------------------------------------------------------


def test_list_names_every_experiment_and_the_papers_three() -> None:
    assert tuple(experiment.name for experiment in experiments.EXPERIMENTS) == NAMES
    done = call("list")
    assert done.exit_code == 0, done.output
    for experiment in experiments.EXPERIMENTS:
        assert experiment.name in done.output
        assert experiment.summary.split(",")[0] in " ".join(done.output.split())
    for number in "123":
        assert f"the paper's experiment {number}" in done.output


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_command_with_the_shared_options(name: str) -> None:
    app = typer.Typer()
    app.command()(experiments.named(name).command)
    found = {parameter.name for parameter in typer.main.get_command(app).params}
    assert {"quick", "repeats", "out", "minutes"} <= found
    assert ("peers" in found) == bool(experiments.named(name).peers)
    if "cuda" in experiments.named(name).devices:
        assert "device" in found
    assert call(name, "--help").exit_code == 0


def test_an_unknown_experiment_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(KeyError):
        experiments.named("speed")
    done = call("run", "collect", "speed")
    assert done.exit_code == 2
    text = " ".join(done.output.replace("│", " ").split())
    assert "speed; expected some of single-server" in text
    assert call("run").exit_code == 2


def made(name: str, command: Any, devices: tuple[str, ...] = ("cpu",)) -> Any:
    experiment = experiments.Experiment(name, "made up", devices)
    return type("Made", (), {**experiment.__dict__, "command": staticmethod(command)})()


def test_run_gives_each_experiment_the_options_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def shared(*names: str) -> Any:
        """Gives a command these of the shared options."""

        def with_them(work: Any) -> Any:
            work.__signature__ = inspect.Signature(options.parameters(names))
            work.__annotations__ = {name: options.SHARED[name] for name in names}
            return work

        return with_them

    @shared("quick", "peers", "out")
    def rich(quick: Any, peers: Any, out: Any) -> None:
        seen["rich"] = quick, peers, out

    @shared("repeats")
    def poor(repeats: Any) -> None:
        seen["poor"] = repeats

    @shared("quick")
    def broken(quick: Any) -> None:
        raise RuntimeError("it broke")

    @shared("quick")
    def ended(quick: Any) -> None:
        raise typer.Exit(1)

    @shared("device")
    def gpu(device: Any) -> None:
        seen["gpu"] = device

    kinds = (
        made("rich", rich),
        made("poor", poor),
        made("broken", broken),
        made("ended", ended),
        made("gpu", gpu, ("cpu", "cuda")),
    )
    monkeypatch.setattr(run, "EXPERIMENTS", kinds)
    monkeypatch.setattr(run, "named", {kind.name: kind for kind in kinds}.__getitem__)
    out = tmp_path / "rows.jsonl"
    paths = ("--peers", str(tmp_path / "a"), "--peers", str(tmp_path / "b"))
    done = call("run", "rich", "poor", "rich", "--quick", "--repeats", "3", "--out", str(out), *paths)
    assert done.exit_code == 0, done.output
    assert seen == {"rich": (True, [tmp_path / "a", tmp_path / "b"], out), "poor": 3}
    assert "poor has no --quick" in done.output
    assert "rich has no --repeats" in done.output

    seen.clear()
    done = call("run", "all")  # those that fail do not keep the last ones away
    assert done.exit_code == 1
    assert seen == {"rich": (False, None, None), "poor": None, "gpu": None}
    assert "it broke" in done.output
    assert "failed: broken, ended" in done.output

    seen.clear()
    done = call("run", "rich", "gpu", "--device", "cuda")
    assert done.exit_code == 0, done.output
    assert seen == {"gpu": options.Device.cuda}
    assert "rich is not measured on cuda: left out" in done.output


# Sessions --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("error", [harness.Incorrect("rows differ"), processes.PeerFailed("it has ended")])
def test_a_wrong_result_ends_the_program_with_status_one(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @options.command("memory", repeats=(1, 1), threads=1)
    def wrong(session: Any) -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        wrong(quick=True, out=tmp_path / "x")
    assert ended.value.exit_code == 1
    assert str(error) in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


@needs_no_gpu
@pytest.mark.parametrize("name", ["collect", "single-server", "batch-size", "select", "overlap", "train"])
def test_cuda_without_a_gpu_is_an_error_that_names_the_remedy(name: str) -> None:
    done = call(name, "--device", "cuda")
    assert done.exit_code == 2
    assert "--device cpu" in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("collect --quick --trajectories 100", "100 is less than the largest batch, 128"),
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
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_numbers_are_read_and_bad_ones_refused() -> None:
    assert options.numbers(None, "--n", 1, 10) == ()
    assert options.numbers("1e1,3,3", "--n", 1, 10) == (3, 10)
    for text in ("0", "11", "x", "", "1,inf", "nan"):
        with pytest.raises(typer.BadParameter, match="expected numbers from 1 to 10"):
            options.numbers(text, "--n", 1, 10)


# Peers -----------------------------------------------------------------------------------------------


def environment(folder: Path, name: str, *, failed: str = "") -> Path:
    """A made-up environment; where it failed it has no interpreter."""
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    if failed:
        (folder / name / "failed.txt").write_text(failed + "\n", encoding="utf-8")
    else:
        python.touch()
    return python


def test_interpreters_are_found_in_folders_in_the_variable_and_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = environment(tmp_path, "one"), environment(tmp_path, "two")
    bad = environment(tmp_path, "bad", failed="no")
    assert processes.interpreters([tmp_path]) == [one, two, bad]
    assert processes.interpreters([two, tmp_path / "one"]) == [two, one]
    assert processes.interpreters([tmp_path / "none"]) == [tmp_path / "none"]
    monkeypatch.setenv("GEAR_LOADER_PEERS", f"{two}:{one}")
    assert processes.interpreters(None) == [two, one]
    monkeypatch.setattr(processes, "FOLDER", tmp_path)
    monkeypatch.setenv("GEAR_LOADER_PEERS", "")
    assert processes.interpreters([]) == []
    monkeypatch.delenv("GEAR_LOADER_PEERS")
    assert processes.interpreters(None) == [one, two, bad]


def test_the_first_interpreter_that_has_a_peer_is_taken_its_own_environment_before_others(
    tmp_path: Path,
) -> None:
    one, two = environment(tmp_path, "one"), environment(tmp_path, "two")
    bad = environment(tmp_path, "bad", failed="bad could not be installed: no wheel")
    tried: list[Path] = []

    def make(python: Path) -> str:
        tried.append(python)
        if python == one:
            raise processes.PeerFailed("ModuleNotFoundError: nothing")
        return python.parent.parent.name

    assert processes.first([one, bad, two], make) == "two"
    assert tried == [one, two]
    assert processes.first([one, two], make, environment="two") == "two"
    assert tried == [one, two, two]
    for wanted, message in (
        ("bad", "bad could not be installed: no wheel$"),
        ("one", r"one/bin/python: ModuleNotFoundError: nothing$"),
    ):
        with pytest.raises(processes.PeerFailed, match=message):
            processes.first([one, bad], make, environment=wanted)
    with pytest.raises(processes.PeerFailed, match=r"no interpreter with peers is there .*make\.sh"):
        processes.first([], make)


def test_what_cannot_be_installed_is_noted_with_the_reason(tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "benchmarks" / "peers" / "make.sh")]
    pip = tmp_path / "python"  # an interpreter whose pip finds nothing
    pip.write_text(
        f"""#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi
case "$*" in
    *tianshou*) echo "ERROR: No matching distribution found for tianshou" >&2; exit 1 ;;
    *) exit 0 ;;
esac
exec {sys.executable} "$@"
""",
        encoding="utf-8",
    )
    pip.chmod(0o755)
    folder = tmp_path / "peers"
    variables = {**os.environ, "PYTHON": str(pip), "TMPDIR": str(tmp_path)}
    arguments: dict[str, Any] = {"env": variables, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([*script, str(folder), "tianshou", "cpprb"], **arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    note = "tianshou could not be installed: ERROR: No matching distribution found for tianshou"
    assert (folder / "tianshou" / "failed.txt").read_text(encoding="utf-8").strip() == note
    assert note in done.stderr
    assert (folder / "cpprb" / "ready").exists()
    with pytest.raises(processes.PeerFailed, match=note):
        processes.start(processes.interpreters([folder]), "select", "tianshou", "Tianshou tree")

    again = subprocess.run([*script, str(folder), "cpprb"], **arguments)  # what is there is kept
    assert (again.returncode, again.stdout) == (0, "cpprb is there\n")
    wrong = subprocess.run([*script, str(folder), "speed"], **arguments)
    assert wrong.returncode == 2
    assert "expected some of: reverb torchrl cpprb tianshou" in wrong.stderr
