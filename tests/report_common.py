"""Made-up rows for tests of the report: every experiment, on a CPU and on a GPU. None of it was measured."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GPU = "NVIDIA H100"
_HEADLINE = {"memcpy": 17.0, "ours": 13.0, "ours, prefetch 2": 9.0, "Reverb, gRPC": 0.8, "cpprb": 7.0}


class Made:
    """Rows of one run, one after another."""

    def __init__(self, run: str, device: str = "cpu", date: str = "2026-11-22", **context: Any) -> None:
        gpu = {"name": device, "driver_version": "580"} if device != "cpu" else None
        cpu = "Made-up CPU" if device == "cpu" else "Another CPU"
        machine = {"cpu": cpu, "cores": 2, "memory_bytes": 1 << 34, "huge_pages": "madvise", "load": 0.1}
        told = {
            "device": device,
            "run": run,
            "date": f"{date}T10:00:00+00:00",
            "machine": {**machine, "gpu": gpu},
        }
        told |= {
            "configuration": {"quick": False, "threads": 2},
            "commit": "0123456789abcdef",
            "dirty": False,
        }
        told |= {"source": "fedcba98", "versions": {"python": "3.11.7", "torch": "2.13.0"}}
        self.context = {**told, **context}
        self.rows: list[dict[str, Any]] = []

    def compare(
        self,
        experiment: str,
        workload: str,
        label: str,
        speeds: Mapping[str, float],
        yardstick: str,
        parameters: Mapping[str, Any],
        unit: str = "bytes",
        own: Mapping[str, Mapping[str, Any]] | None = None,
        **more: Mapping[str, Any],
    ) -> None:
        """A comparison: variant -> amount a second; `more` is for single variants, such as ``ours={"limit": 1}``."""
        amount = 10**9 if unit == "bytes" else 1000
        for variant, speed in speeds.items():
            row = {"experiment": experiment, "workload": workload, "label": label, "variant": variant}
            row |= {"parameters": {**parameters, **(own or {}).get(variant, {})}, "yardstick": yardstick}
            row |= {
                "repeats": 5,
                "batches_per_repeat": 2,
                "ratios": {},
                "targets": {},
                "extras": {},
                unit: amount,
            }
            row |= {"seconds": spread(amount / speed), "ratio": spread(speed / speeds[yardstick])}
            row |= {"gb_per_s": spread(speed / 1e9)} if unit == "bytes" else {}
            self.rows.append({**row, **more.get(variant, {}), **self.context})

    def amount(
        self, experiment: str, workload: str, variant: str, value: float, unit: str, **more: Any
    ) -> None:
        row = {"experiment": experiment, "workload": workload, "label": workload, "variant": variant}
        figures = {"parameters": {}, "repeats": 2, "amount": spread(value), "unit": unit, "extras": {}}
        self.rows.append({**row, **figures, **more, **self.context})

    def leave(self, experiment: str, what: str, why: str) -> None:
        left = {"experiment": experiment, "left_out": what, "why": why, "verdict": "left out"}
        self.rows.append({**left, **self.context})


def spread(value: float) -> dict[str, float]:
    return {"p10": 0.95 * value, "p50": value, "p90": 1.05 * value}


def headline(made: Made, experiment: str = "single-server", batch: int = 256, factor: float = 1e9) -> None:
    speeds = {name: factor * value for name, value in _HEADLINE.items()}
    aims = {"Reverb, gRPC": 15.0, "cpprb": 1.9}
    ratios = {name: spread(_HEADLINE["ours"] / _HEADLINE[name]) for name in aims}
    where = {"batch": batch, "part": "batches", "trajectories": 20000}
    own = {"cpprb": {"peer": {"versions": {"cpprb": "11.0"}, "note": None}}}
    told = {"targets": aims, "ratios": ratios}
    made.compare(experiment, "W1", f"W1, batch {batch}", speeds, "memcpy", where, own=own, ours=told)


def every_experiment(made: Made) -> list[dict[str, Any]]:
    """Rows of all experiments in one run; ours loses to `index_select` by 0.5 and to nothing else."""
    put, here = made.compare, {"batch": 256, "part": "batches"}
    headline(made)
    windows = {"memcpy": 9e9, "ours": 4e9, "TorchRL, slices": 1e9}
    put("single-server", "W2", "W2, batch 256", windows, "memcpy", here)
    adding = {"memcpy": 6e9, "ours": 4e9, "Reverb": 1e9}
    put("single-server", "insert", "adding", adding, "memcpy", {"part": "insert"})
    gathered = {"memcpy": 2e10, "collector, blocks 100": 8e9, "index_select": 1.6e10}
    gathered["DataLoader, map-style"] = 1e9
    own = {"collector, blocks 100": {"block_steps": 100}}
    for batch in (32, 256, 1024):
        headline(made, "batch-size", batch, 1e9 * math.log(batch))
        put("collect", "W1", f"W1, batch {batch}", gathered, "memcpy", {"batch": batch}, own=own)
    for items, batch in itertools.product((10**4, 10**6, 10**8), (32, 1024)):
        speeds = {"ours, tree": 3e6 / math.log(items) * batch / 32, "TorchRL tree": 1e6 / math.log(items)}
        bias = {"TorchRL tree": {"bias": 0.01}} if items == 10**8 else {}
        where = {"items": items, "batch": batch, "operation": "cycle"}
        put("select", "cycle", f"{items:,} items, batch {batch}", speeds, "ours, tree", where, "rows", bias)
    for writers, kind in itertools.product((1, 2, 8), ("whole", "batches", "steps")):
        speeds = {"memcpy": 9e5, "ours": 4e5 * writers**0.5, "Reverb": 1e5}
        limit, where = {"limit": 0.01} if kind == "whole" else {}, {"writers": writers}
        put("online", kind, f"{kind}, {writers} writers", speeds, "memcpy", where, "rows", ours=limit)
    more: dict[str, Any] = {"2 writers": {"extras": {"trajectories_per_s": 30000.0}}}
    for sampler in ("uniform", "prioritized"):
        reading = {"0 writers": 1e6, "2 writers": 4e5}
        put("online", f"read, {sampler}", "reading", reading, "0 writers", {"batch": 256}, "rows", **more)
    for workload, yardstick in (("save", "write"), ("load", "read")):
        speeds = {yardstick: 2e9, "ours": 1.5e9, "Reverb": 3e8}
        put("checkpoint", workload, workload, speeds, yardstick, {"bytes": 1 << 30})
    values = {"ours": 1.03, "fixed rows": 1.9, "TorchRL": 1.2}
    for workload, (name, value) in itertools.product(("uniform 1 to 100", "two lengths"), values.items()):
        goal = {"at_most": 1.05} if name == "ours" else {}
        made.amount("memory", workload, name, value, "bytes resident / byte of payload", **goal)
    writing = {"ring": 5e9, "ours": 4e9, "ours, without device": 1e9}
    put("simulator", "append", "4,096 environments", writing, "ring", {"envs": 4096})
    beside = {"alone": 1000.0, "ours, prefetch 0": 900.0, "plain torch": 700.0}
    put("overlap", "step", "small network, batch 32", beside, "alone", {"batch": 32}, "rows")
    put(
        "overhead",
        "step",
        "a batch of one",
        {"plain torch": 1e5, "uniform": 1.4e5},
        "plain torch",
        {"batch": 1},
        "rows",
    )
    tokens = {"plain torch": 4e8, "ours": 5e8, "pad_sequence": 1e8}
    put("packed", "1 columns", "1 column", tokens, "plain torch", {"columns": 1, "item": "token"}, "rows")
    files = {"LeRobot": 400.0, "ours": 900.0}
    put("values", "images", "jpegs", files, "LeRobot", {"batch": 64, "item": "image"}, "rows")
    robots = {"LeRobot": 200.0, "ours": 900.0}
    put("data", "pusht", "pusht, images", robots, "ours", {"batch": 32, "item": "sample"}, "rows")
    sampled = {"plain torch": 1e5, "ours": 9e5, "PyG NeighborLoader": 2e5}
    put("graph", "sampling", "256 seeds", sampled, "plain torch", {"batch": 256, "item": "seed"}, "rows")
    remote = {"carrier": 3e4, "ours": 1e4, "Reverb": 4e3}
    put("remote-write", "whole", "whole, 1 writer", remote, "carrier", {"writers": 1}, "rows")
    put("remote-sample", "W1", "W1", remote, "carrier", {"batch": 256}, "rows")
    for share in (100, 25):
        reading = {"fits": 4e9, "ours": 4e9 if share == 100 else 3e8, "preadv": 4e8}
        put("exhaustion", "uniform", f"uniform, {share}% in memory", reading, "fits", {"share": share})
    drawing = {"plain torch": 4000.0, "ours": 3000.0, "SB3": 900.0}
    put("transitions", "uniform", "uniform: sample", drawing, "plain torch", {"batch": 256}, "rows")
    for name, value in {"query an event": 0.3, "an operation of torch": 4.0}.items():
        made.amount("device", "a call of the host", name, value, "us")
    for name, seconds in {"ours": 30.0, "SB3": 31.0}.items():
        made.amount("learn", "wall time of training", name, seconds, "s")
    training = {"alone": 1000.0, "ours": 950.0, "Reverb": 500.0}
    put("train", "steps", "steps of training", training, "alone", {"batch": 64}, "rows")
    for name, seconds in {"ours": 20.0, "Reverb": 45.0}.items():
        curve = [[second, 50 * second / seconds] for second in range(0, 60, 5)]
        made.amount("train", "return", name, seconds, "s", parameters={"return": 50, "curve": curve})
    network = {"network": "processes", "ucx_tls": "tcp", "bandwidth_gbit": None, "latency_us": None}
    _multi_server(made, network)
    made.leave("checkpoint", "TorchRL", "no interpreter with it is there")
    return made.rows


def _multi_server(made: Made, network: Mapping[str, Any]) -> None:
    def put(workload: str, label: str, speeds: dict[str, float], *told: str, **where: Any) -> None:
        made.compare(
            "multi-server", workload, label, speeds, told[0], {**network, **where}, *told[1:], **more
        )

    extras = {"extras": {"latency_p50": 0.001, "latency_p95": 0.002}}
    more: dict[str, Any] = {"bare": extras, "ours": extras}
    for nodes, part in itertools.product((1, 2, 3), ("collect", "batches")):
        told = {"part": part, "nodes": nodes, "carrier": "none" if nodes == 1 else "socket", "batch": 256}
        for local in (1.0,) if part == "batches" or nodes == 1 else (0.0, 0.5, 1.0):
            speeds = {"bare": 9e9 / nodes, "ours": 6e9 / nodes * (0.2 + local)}
            put("W1", f"W1, {nodes} nodes, {part}, {local:.0%}", speeds, "bare", **told, local_fraction=local)
    more = {"ours": {"targets": {"bare": 0.9}}}
    for request in (1 << 16, 1 << 20):
        told = {"part": "transport", "carrier": "socket", "request": request, "in_flight": 4}
        speeds = {"bare": 1e9, "ours": 7e8}
        put("W1", f"requests of {request}", speeds, "bare", **told, request_bytes=request)
    more = {}
    for world in (1, 2, 4):
        told = {"world": world, "batch": 256, "selector": "prioritized", "part": "select"}
        put("selection", f"{world} ranks", {"ours": 1e5, "all_to_all": 3e5}, "all_to_all", "rows", **told)
        told = {"part": "all_to_all", "world": world, "each_bytes": 512}
        put("all_to_all", f"{world} ranks", {"all_to_all": 1e8}, "all_to_all", **told)


def on_a_gpu(made: Made) -> list[dict[str, Any]]:
    """What only a GPU's rows have."""
    headline(made, factor=3e9)
    kernels = {f"kernel, {programs} programs": 1e9 * min(programs, 40) for programs in (1, 8, 132)}
    own = {name: {"programs": int(name.split()[1])} for name in kernels}
    speeds = {"cudaMemcpyAsync": 5e10, "cudaMemcpyAsync, table": 4.9e10, **kernels, "kernel, default": 4.5e10}
    for size in (4096, 65536):
        for batch in (32, 256):
            where = {"batch": batch, "row_bytes": size, "step_bytes": 128}
            made.compare(
                "collect", "rows", f"rows of {size}, batch {batch}", speeds, "cudaMemcpyAsync", where, own=own
            )
    for batch in (32, 256):
        there = {**speeds, "dataset, prefetch 2": 4e10, "staged, index_select": 1e10}
        where = {"batch": batch, "block_steps": 100}
        made.compare("collect", "W1", f"W1, batch {batch}", there, "cudaMemcpyAsync", where, own=own)
    beside = {"alone": 1000.0, "kernel, 1 programs": 990.0, "kernel, 32 programs": 800.0}
    programs = {name: {"programs": int(name.split()[1])} for name in beside if name != "alone"}
    where = {"batch": 256, "work": "transformer"}
    made.compare("overlap", "step", "transformer, batch 256", beside, "alone", where, "rows", programs)
    return made.rows


def written(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
