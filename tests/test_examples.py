"""The examples run: the short forms that they offer for it."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting_common import wait_until

import gear_loader as gear

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(*command: object, cwd: Path, **variables: str) -> str:
    told: dict[str, object] = {"env": {**os.environ, **variables}, "cwd": cwd, "timeout": 240}
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, **told)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.parametrize(
    "path",
    [each for each in sorted(EXAMPLES.glob("*.py")) if "pip install" in each.read_text("utf-8")],
    ids=lambda path: path.stem,
)
def test_an_example_says_what_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("MUJOCO_GL", "egl")):  # which some of them set
        monkeypatch.setenv(name, value)
    for package in ("gymnasium", "lightning", "sklearn"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path))
    (extras,) = re.findall(r"needs (pip install '\.\[.*), in a clone", str(end.value))
    assert extras in (path.read_text("utf-8").partition("import")[0])
    (row,) = [
        line
        for line in (EXAMPLES.parent / "README.md").read_text("utf-8").splitlines()
        if f"examples/{path.name}" in line and "| `" in line[2:]
    ]
    assert re.findall(r"\[.*?\]", extras)[0] in row


@pytest.mark.long
def test_prioritized_dqn_and_plain_pytorch(tmp_path: Path) -> None:
    run(EXAMPLES / "plain_pytorch.py", cwd=tmp_path)
    run(EXAMPLES / "prioritized_dqn.py", "--quick", "--out", tmp_path, cwd=tmp_path)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert set(json.loads((tmp_path / "summary.json").read_text())["runs"]) == {"prioritized", "uniform"}


@pytest.mark.long
def test_gpu_simulator(tmp_path: Path) -> None:
    shown = run(
        EXAMPLES / "gpu_simulator.py", "--device", "cpu", "--steps", 1000, cwd=tmp_path, OMP_NUM_THREADS="1"
    )
    first, last = (int(number) for number in re.findall(r"(\d+) steps to a target", shown))
    assert last < 20 < first


@pytest.mark.long
def test_graph_serving(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    shown = run(
        EXAMPLES / "graph_serving", "--quick", "--out", tmp_path, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path)
    )
    assert "Checked: the served scores of 100 nodes are those computed offline" in shown
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["rate"] for row in rows] == [50, 100]
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_grpo(tmp_path: Path) -> None:
    shown = run(EXAMPLES / "grpo.py", "--quick", "--out", tmp_path, cwd=tmp_path)
    assert "takes its place" in shown
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["completions"] > 0
    assert summary["outdated"] > 0


@pytest.mark.long
def test_vlm_grpo(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    assert "times fewer tokens than without the tree" in run(
        EXAMPLES / "vlm_grpo.py", "--quick", cwd=tmp_path
    )


@pytest.mark.long
def test_robot_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    pytest.importorskip("mujoco")
    look = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8)"
    variables = {"MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}
    if subprocess.run(
        [sys.executable, "-c", look], env={**os.environ, **variables}, capture_output=True
    ).returncode:
        pytest.skip("MuJoCo cannot draw here")
    shown = run(EXAMPLES / "robot_video.py", "--quick", cwd=tmp_path)
    assert "MB of video, once for 2 ranks" in shown
    assert "New targets" in shown


@pytest.mark.long
def test_online_actors(tmp_path: Path) -> None:
    shown = run(EXAMPLES / "online_actors.py", "--quick", "--out", tmp_path, cwd=tmp_path)
    assert "takes its place" in shown
    events = b"".join(path.read_bytes() for path in tmp_path.glob("version_0/events*"))
    for name in ("fill_steps", "insert_rate", "sample_rate", "sample_wait", "age_mean", "priority_q50"):
        assert f"replay/{name}".encode() in events
    assert (tmp_path / "version_0" / "weights.safetensors").is_file()


@pytest.mark.long
def test_multi_node(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "4", EXAMPLES / "multi_node.py")
    options = "--simulate-nodes 2 --transport socket --batches 40 --episodes 4 --check"
    shown = run(*launch, *options.split(), cwd=tmp_path, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    assert "4 ranks on 2 nodes, 16 trajectories, rows of other nodes by socket" in shown
    assert "Checked: the loss curve is that of one process." in shown


@pytest.mark.long
def test_preemptible(tmp_path: Path) -> None:
    """A rank is killed, then the job is told to end, and then it goes on with fewer ranks."""
    log, torchrun = tmp_path / "log", [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    job = [str(EXAMPLES / "preemptible.py"), "--folder", str(tmp_path / "run"), "--batches"]

    def said(text: str) -> Any:
        return lambda: log.read_text("utf-8").count(text) == 3

    with open(log, "w") as out:
        command = [*torchrun, "--nproc-per-node", "3", "--max-restarts", "1", *job, "1000", "--pause", "0.2"]
        running = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
        try:
            wait_until(said("saved batch 20,"), patience=120)
            children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            ranks = [pid for pid in children if "preemptible" in Path(f"/proc/{pid}/cmdline").read_text()]
            os.kill(int(ranks[1]), signal.SIGKILL)
            wait_until(said("attached to 50 trajectories, batch 20"), patience=120)
            running.terminate()
            running.wait(60)
        finally:
            running.kill()
            running.wait()
    (batch,) = set(re.findall(r"saved batch (\d+),", log.read_text("utf-8"))) - {"20"}
    shown = run(*torchrun[1:], "--nproc-per-node", "2", *job, int(batch) + 3, cwd=tmp_path)
    assert shown.count(f"loaded 75 trajectories, batch {batch}") == 2
    assert shown.count(f"saved batch {int(batch) + 3},") == 2


@pytest.mark.long
def test_actors_anywhere(tmp_path: Path) -> None:
    shown = run(EXAMPLES / "actors_anywhere.py", "--episodes", "300", cwd=tmp_path)
    assert "An actor is killed" in shown
    assert "The link is cut" in shown
    assert "Every episode is there once, as it was played: 900 of 3 actors." in shown


@pytest.mark.long
def test_remote_learner(tmp_path: Path) -> None:
    shown = run(EXAMPLES / "remote_learner.py", "--batches", "80", cwd=tmp_path)
    assert "Its batches are those of a learner that nothing happened to." in shown


def _children(pid: int) -> set[int]:
    """Process ids of what `pid` has started and is still running."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # gone in the meantime
            continue
        if int(parent) == pid and state != "Z":
            found.add(int(path.parent.name))
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_online_actors_end_with_their_trainer(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, EXAMPLES / "online_actors.py", "--updates", "1200", "--out", tmp_path]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as trainer:
        try:
            assert trainer.stdout is not None
            assert "updates, " in trainer.stdout.readline()
            actors = _children(trainer.pid)
            assert len(actors) >= 2
            if how == signal.SIGINT:
                os.killpg(trainer.pid, how)  # Ctrl-C reaches the actors too
            else:
                trainer.send_signal(how)
            assert trainer.wait(timeout=60) == (1 if how == signal.SIGINT else -how)
        finally:
            trainer.kill()
    wait_until(lambda: not any(map(_runs, actors)), "the actors' end")
    name = f"online-actors-{trainer.pid}"
    if how == signal.SIGINT:
        with pytest.raises(gear.errors.RegionError):
            gear.Table.attach(name)
    else:  # a new trainer finds all that was added
        with gear.Table.attach(name) as table:
            table.check_valid()
            assert len(table) > 0
            table.unlink()
