"""A small run of every experiment: rows, what is left out, what is shown; how fast anything is, is not tested."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from benchmarks_common import call, check_row, reasons_of, rows_of

from benchmarks.experiments import remote_sample, scaling, train
from gear_loader.storage import shared_memory

IN_PROCESS = {"memcpy", "ours", "ours, prefetch 2", "ours, sample", "plain torch"}
MAP_STYLE = {"DataLoader, map-style", "DataLoader, map-style, 2 workers"}
COLLECTED = {f"{who}{way}" for who in ("ours", "ours, named", "plain torch") for way in ("", ", DataLoader")}
COLLECTED = {"memcpy, rows", "cpprb"} | COLLECTED | {f"{name}, 2 threads" for name in COLLECTED}
SELECTED = {"ours, tree", "ours, with extremes", "ours, dataset", "torch.multinomial", "cumsum, torch"}
ADDED, READ = {"memcpy", "ours", "torch"}, {"0 writers", "2 writers"}
FED = {"alone", "ours, prefetch 0", "ours, prefetch 2", "ours, prefetch 2, DataLoader", "plain torch"}
LOADED = {"read", "read, kept", "ours", "torch.load", "cpprb"}
BESIDE = {f"ours, beside {remote_sample.BESIDE[name]}" for name in ("slow", "lying")}
RATIOS = {"no limit", *(f"{n} trajectory" for n in ("1 row a", "8 rows a", "64 rows a"))}

TRANSITIONS = {
    key: {"plain torch", "ours", "ours, copy=False", "ours, ReplayBuffer"}
    for key in ("uniform", "prioritized")
}
APPENDED = {"plain torch", "ours, ReplayBuffer", "ours, every step", "ours, per episode"}

RUNS: dict[str, tuple[str, dict[str, set[str]], str]] = {
    "collect": (
        "--threads 1 --trajectories 130 --peers PEERS --before HEAD",
        {
            "W1": COLLECTED | {"before"},
            **dict.fromkeys(("W2", "single steps"), COLLECTED - {"cpprb"} | {"before"}),
        },
        "| ÷ memcpy |",
    ),
    "single-server": (
        "--threads 1 --trajectories 256 --peers PEERS",
        {"W1": IN_PROCESS | MAP_STYLE | {"cpprb"}, "W2": IN_PROCESS, "insert": {*ADDED, "cpprb"}},
        "left out: TorchRL, W1: ",
    ),
    "batch-size": (
        "--threads 1 --trajectories 40 --batches 8,13 --peers PEERS",
        {"W1": IN_PROCESS | MAP_STYLE | {"cpprb"}},
        "cpprb",
    ),
    "overhead": (
        "--threads 1 --busy 1",
        {
            "step": {"plain torch", "uniform", "prioritized, steps", "uniform, copy=False"},
            "add": {"memcpy", "plain torch", "ours", "ours, arrays", "ours, stacked", "ours, list"},
            "disk": {"ours", "ours, disk"},
            "transitions": {"plain", "3 steps", "two sources", "mixture"},
        },
        "at most 13 µs",
    ),
    "select": (
        "--device cpu --threads 1 --sizes 500,3e3 --batches 8,64 --peers PEERS",
        {key: {*SELECTED, "cpprb"} for key in ("draw", "update", "cycle")},
        "cycle, 3,000 items, batch 64",
    ),
    "online": (
        "--threads 1 --seconds 0.02 --trajectories 512 --writers 1 --peers PEERS",
        {
            **{key: {*ADDED, "cpprb"} for key in ("whole", "batches", "steps")},
            "chunks 10": ADDED,
            "update": {"numpy assignment", "ours", "ours, the tree alone", "cpprb"},
            "read, uniform": READ,
            "read, prioritized": READ,
            "loop": RATIOS,
        },
        "at most 25 µs",
    ),
    "remote-write": (
        "--seconds 0.02 --trajectories 512 --writers 2 --peers PEERS",
        {key: {"carrier", "ours"} for key in ("whole", "batches", "steps", "commits")},
        "left out: Reverb: ",
    ),
    "remote-sample": (
        "--threads 1 --trajectories 300 --batch 64 --writers 1 --beside slow,lying --peers PEERS",
        {key: {"carrier", "ours", *BESIDE} for key in ("W1", "transitions")},
        "left out: Reverb, gRPC: ",
    ),
    "checkpoint": (
        "--threads 1 --trajectories 100 --peers PEERS --folder HERE",
        {
            **{key: {"write", "ours", "torch.save", "cpprb"} for key in ("save", "save again")},
            **dict.fromkeys(("load", "load, cold"), LOADED),
        },
        "seconds until it returns",
    ),
    "exhaustion": (
        "--threads 1 --trajectories 200 --shares 25 --batches 1 --no-limited --folder HERE",
        {
            "fill": {"write", "ours"},
            "uniform": {"fits", "ours", "preadv"},
            "prioritized": {"fits", "ours", "preadv"},
        },
        "filled to 4 times its memory",
    ),
    "memory": (
        "--payload 4 --peers PEERS",
        {"uniform 1-512": {"ours", "ours, named", "fixed rows", "list of tensors", "cpprb"}},
        "bytes resident / byte of payload",
    ),
    "overlap": ("--batches 8 --trajectories 50 --threads 1", {"step": FED}, "slowdown"),
    "multi-server": (
        "--carriers socket --nodes 2 --worlds 2 --trajectories 64 --seconds 0.01 --local 0.5",
        {
            "W1": {"bare", "ours"},
            "selection": {"ours", "all_to_all"},
            "all_to_all": {"all_to_all"},
        },
        "Targets",
    ),
    "transitions": (
        "--threads 1 --peers PEERS",
        {
            **TRANSITIONS,
            "append 1": APPENDED,
            "append 8": APPENDED,
            "append 64": {"ours, ReplayBuffer"},
            "append 4096": {"ours, ReplayBuffer"},
        },
        "left out: SB3",
    ),
    "simulator": (
        "--threads 1 --envs 3,8",
        {"append": {"ring", "ours", "ours, episodes", "ours, without device"}},
        "8 environments",
    ),
    "packed": (
        "--threads 1 --columns 1,2",
        {
            **{f"{n} columns": {"plain torch", "plain torch, cat", "pad_sequence", "ours"} for n in (1, 2)},
            "training step": {"padded", "packed"},
        },
        "2 columns, 16,384 tokens",
    ),
    "values": (
        "--threads 1",
        {
            "images": {"ours", "DataLoader, files", "ours, no codec", "torch.save, decoded"},
            "tokens": {"ours", "plain torch", "torch.nested"},
            "video": {"ours"},
            **{f"{part}: PSS of 4 readers": {"ours"} for part in ("images", "tokens", "video")},
            **{f"{part}: bytes stored": {"ours"} for part in ("images", "tokens", "video")},
        },
        "left out: LeRobot, PyAV: there is no environment lerobot",
    ),
    "data": (
        "--threads 1 --parts pusht,d4rl,texts,bucket",
        {
            "d4rl": {"ours", "DataLoader, in memory", "Hugging Face"},
            "texts": {"ours", "Hugging Face"},
            "bucket": {"ours", "ours, in the background"},
            **{f"{part}: PSS of readers": {"ours"} for part in ("d4rl", "texts")},
        },
        "left out: pusht, images, which lerobot makes: there is no environment lerobot",
    ),
    "graph": (
        "--threads 1 --nodes 500 --seconds 0.1",
        {
            "sampling": {"plain torch", "ours"},
            "serving": {"plain torch", "ours"},
            "cache": (cached := {"by access probability", "by degree", "oracle", "LRU", "no cache"}),
            "cache bytes": cached,
        },
        "p99 at half of that rate",
    ),
    "train": (
        "--threads 1 --episodes 12",
        {
            "steps": {"ours", "batch ready", "DataLoader, map-style"},
            "return": {"ours", "DataLoader, map-style"},
        },
        "training until the return",
    ),
}
FAST = ("overlap",)


def in_memory() -> set[str]:
    return {name for name in os.listdir(shared_memory.DIRECTORY) if "bench-" in name}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)
def test_a_quick_run_has_all_rows_and_leaves_nothing_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    told, expected, text = RUNS[name]
    if name == "train":
        pytest.importorskip("mujoco")
        monkeypatch.setenv("GEAR_LOADER_PEERS", "")
        loaders = ("ours", "batch ready", "DataLoader, map-style", "TorchRL")
        monkeypatch.setattr(train, "_QUICK", {**train._QUICK, "loaders": loaders, "horizon": 50, "goal": 0.0})
    if "PEERS" in told:
        told = told.replace("PEERS", shlex.quote(str(request.getfixturevalue("environments"))))
    (tmp_path / "disk").mkdir()
    told = told.replace("HERE", str(tmp_path / "disk"))
    out, before = tmp_path / "new" / "rows.jsonl", in_memory()
    done = call(name, "--quick", "--repeats", "1", *shlex.split(told), "--out", str(out))
    assert done.exit_code == 0, done.output
    rows, reasons = rows_of(out), reasons_of(out)
    for row in rows:
        check_row(row, name)
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["workload"], set()).add(row["variant"])
    assert {workload: names & found[workload] for workload, names in expected.items()} == expected
    assert set(found) == set(expected)
    assert text in done.stdout
    assert f"{len(rows)} rows appended" in done.stdout
    assert in_memory() <= before
    assert not list((tmp_path / "disk").iterdir())
    LOOK.get(name, lambda *_: None)(rows, reasons)
    if name in ("online", "select", "multi-server"):
        report = call("report", str(out), "--out", str(tmp_path / "report"))
        assert report.exit_code == 0, report.output
        assert (tmp_path / "report" / f"{name}-cpu.png").read_bytes().startswith(b"\x89PNG")


def single_server(rows: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    mine = {row["variant"]: row for row in rows if row["workload"] == "W1"}
    assert (mine["ours"]["targets"], set(mine["ours"]["ratios"])) == ({"cpprb": 2.3}, {"cpprb"})
    assert mine["ours"]["parameters"]["prefetch"] == 0
    assert mine["cpprb"]["parameters"]["peer"]["versions"]["cpprb"] == "11.0.0"
    assert mine["DataLoader, map-style"]["parameters"]["draws"] == "uniform"
    assert "there is no environment torchrl" in reasons["TorchRL, W1"]
    assert {"Reverb, in process, W1", "TorchRL, slices, W2", "Reverb, W2", "cpprb, W2"} <= set(reasons)
    assert {row["parameters"]["mode"] for row in rows if row["workload"] == "insert"} == {"whole", "batches"}


def batch_size(rows: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    assert reasons["cpprb, W1, batch 13"] == "RuntimeError: thirteen"
    for row in rows:
        assert set(row["ratios"]) == ({"cpprb"} if row["parameters"]["batch"] == 8 else set())


def online(rows: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    extras = {(row["workload"], row["variant"]): row["extras"] for row in rows}
    assert extras["read, uniform", "0 writers"] == {}
    assert all(value > 0 for value in extras["read, uniform", "2 writers"].values())
    waiting = {"trajectories_per_s", "rows_per_trajectory", "writers_waiting", "reader_waiting"}
    assert set(extras["loop", "no limit"]) == waiting


def memory(rows: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    ours, named = ({row["variant"]: row for row in rows}[name] for name in ("ours", "ours, named"))
    assert (ours["at_most"], named["parameters"]["named"]) == (1.05, True)
    for row in (ours, named):
        extras = row["extras"]
        assert extras["stats"] == pytest.approx(1 + extras["ends"] + extras["padding"] + extras["index"])


def multi_server(rows: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    targets = {row["parameters"]["request"]: row["targets"] for row in rows if row["targets"]}
    assert targets == {1 << 16: {"bare": 0.7}, 1 << 20: {"bare": 0.9}}
    for row in rows:  # what is computed of the messages is what was sent
        if row["parameters"]["part"] == "select" and row["variant"] == "ours":
            each = scaling.message_bytes(row["parameters"]["selector"], 2, row["parameters"]["batch"])["all"]
            assert row["extras"]["exchanges"] == 1
            assert row["extras"]["sent_bytes"] == pytest.approx(each, rel=0.2)


def training(rows: list[dict[str, Any]], reasons: dict[str, str]) -> None:
    assert "benchmarks/peers/make.sh" in reasons["TorchRL"]
    for row in rows:
        if row["workload"] == "return":
            ((seconds, achieved),) = row["parameters"]["curve"]
            assert seconds == row["amount"]["p50"] > 0
            assert achieved >= row["parameters"]["return"] == 0


LOOK: dict[str, Any] = {
    "single-server": single_server,
    "batch-size": batch_size,
    "online": online,
    "memory": memory,
    "multi-server": multi_server,
    "train": training,
}


@pytest.mark.parametrize(
    ("told", "left"),
    [
        pytest.param("collect --trajectories 130", "W2, batch 128", marks=pytest.mark.long),
        ("batch-size --trajectories 40 --batches 8", "W1, batch 8"),
        ("select --device cpu --sizes 500,3e3", "3,000 items"),
        ("online --trajectories 512 --writers 1", "single steps, 1 writer"),
        ("checkpoint", "1,000 trajectories"),
        ("memory", "uniform 1-512, columns of W2"),
        pytest.param("overlap --trajectories 50", "transformer, batch 32", marks=pytest.mark.long),
    ],
)
def test_without_time_it_says_what_it_left_out(
    told: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEAR_LOADER_PEERS", "")
    out = tmp_path / "rows.jsonl"
    done = call(*told.split(), "--quick", "--minutes", "0", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert f"left out for lack of time: {left}" in done.stdout
    assert not out.exists() or not rows_of(out)
    if told.startswith("select"):
        assert (
            "left out: cpprb: there is no environment cpprb: GEAR_LOADER_PEERS is empty (benchmarks/peers/make.sh)"
            in done.stdout
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("collect", {"cudaMemcpyAsync", "kernel, default", "dataset, prefetch 2", "staged, index_select"}),
        ("single-server", {"cudaMemcpyAsync", "ours", "plain torch"}),
        ("overlap", {"alone", "cudaMemcpyAsync", "kernel, 8 programs", "ours, prefetch 2"}),
        ("select", {"ours, graph", "ours, eager", "ours, dataset", "cumsum, graph", "cumsum, eager"}),
    ],
)
def test_quick_on_a_gpu(name: str, variants: set[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = call(name, "--device", "cuda", "--quick", "--repeats", "2", "--out", str(out))
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    for row in rows:
        check_row(row, name)
    assert variants <= {row["variant"] for row in rows}
