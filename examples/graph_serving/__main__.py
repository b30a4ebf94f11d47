"""Train a small GraphSAGE of PyTorch Geometric on the call graph of the installed Python sources, then serve it.

It learns from which package a function comes, by its name and by the functions that it calls and that call it. Then a
server answers requests by HTTP, a client sends them at random times and rising rates, most of them for popular nodes,
and the served scores are compared with those computed offline.

    python examples/graph_serving            # minutes; the first run also reads all sources
    python examples/graph_serving --quick    # a part of the sources, few requests

It needs pip install '.[graph]'. Latencies and throughput go to `results.json` and `latency.png` in the folder of --out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gear_loader as gear

try:
    import aiohttp  # noqa: F401 - the server and the client do
    import torch_geometric  # noqa: F401 - the model does
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[graph]', in a clone of Gear Loader.")

from callgraph import CLASSES, FEATURES, CallGraph, load
from load import Load, popular_nodes, send
from model import Sage
from serving import FANOUTS

RATES = (50, 100, 200, 400, 800, 1600)  # requests a second
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part of the sources, few requests")
    parser.add_argument("--seconds", type=float, default=4.0, help="of load at each rate")
    parser.add_argument("--out", type=Path, default=Path("results/graph-serving"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    calls = load(400 if arguments.quick else None)
    graph = gear.graph.Graph.from_edge_index(calls.edge_index, num_nodes=len(calls.y))
    degrees = np.sort(graph.out_degrees())[::-1]
    share = degrees[: len(degrees) // 10].sum() / degrees.sum()
    print(f"Call graph: {graph}; the top tenth has {share:.0%} of the edges ({seconds(began)}).")

    name = f"graph-serving.{os.getpid()}"
    schema = {"x": gear.Column(torch.float32, (FEATURES,))}
    sizes = {"max_steps": graph.num_nodes, "max_trajectories": 1}
    with gear.Table.create(schema, name=name, **sizes) as table:
        try:
            table.add({"x": calls.x})
            features = gear.Features(table, "x")
            model = trained(calls, graph, features, epochs=1 if arguments.quick else 2)
            placement(graph, arguments.quick)
            rates = RATES[:2] if arguments.quick else RATES
            duration = 1.0 if arguments.quick else arguments.seconds
            with tempfile.TemporaryDirectory() as folder, served(folder, graph, model, name) as url:
                check(url, graph, features, model)
                loads = [at_rate(url, graph, rate, duration) for rate in rates]
                shown = json.loads(urllib.request.urlopen(f"{url}/stats", timeout=60).read())
                print(f"The server's account: {shown}")
        finally:
            table.unlink()
    write(arguments.out, loads)
    print(f"Done in {seconds(began)}; {arguments.out} has the results.")


def seconds(began: float) -> str:
    return f"{time.perf_counter() - began:.0f} s"


def trained(calls: CallGraph, graph: gear.graph.Graph, features: gear.Features, epochs: int) -> Sage:
    """A model that was trained on half of the nodes; prints its accuracy on a tenth of the others."""
    began = time.perf_counter()
    order, y = np.random.default_rng(0).permutation(graph.num_nodes), torch.from_numpy(calls.y)
    half, tenth = graph.num_nodes // 2, graph.num_nodes // 20
    model = Sage(FEATURES, 64, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = gear.graph.NeighborLoader(
        graph, FANOUTS, batch_size=512, seeds=order[:half], features=features, shuffle=True
    )
    for _ in range(epochs):
        losses = []
        for batch in loader:
            scores = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = nn.functional.cross_entropy(scores, y[batch.n_id[: batch.batch_size]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {loader.epoch}: {len(losses)} batches, loss {np.mean(losses):.3f} ({seconds(began)})")
    others = order[half : half + tenth]
    right = 0
    with torch.inference_mode():
        for batch in gear.graph.NeighborLoader(
            graph, FANOUTS, batch_size=512, seeds=others, features=features
        ):
            scores = model(batch.x, batch.edge_index)[: batch.batch_size]
            right += int((scores.argmax(1) == y[batch.n_id[: batch.batch_size]]).sum())
    most = np.bincount(calls.y).max() / len(calls.y)
    print(
        f"Accuracy on {len(others):,} other nodes: {right / len(others):.1%}; the largest class has {most:.1%}."
    )
    return model


def placement(graph: gear.graph.Graph, quick: bool) -> None:
    """Print how many reads a cache of a tenth of the rows serves, by what the rows are chosen."""
    weights = np.bincount(popular_nodes(graph.out_degrees(), 20_000, seed=1), minlength=graph.num_nodes)
    requests = np.minimum(weights / weights.sum(), 1.0)
    sampler = gear.graph.NeighborSampler(graph, FANOUTS, seed=9)
    nodes = popular_nodes(graph.out_degrees(), 200 if quick else 2000, seed=2)
    reads = np.zeros(graph.num_nodes)
    for step, node in enumerate(nodes.tolist()):
        reads[sampler.sample([node], step=step).n_id.numpy()] += 1
    rows = graph.num_nodes // 10
    chosen = {
        "access probability": gear.graph.access_probability(graph, FANOUTS, requests, drawing="new"),
        "degree": graph.out_degrees(),
        "chance": np.random.default_rng(0).random(graph.num_nodes),
        "what is read (oracle)": reads,
    }
    for way, scores in chosen.items():
        share = gear.graph.place(scores, capacity=rows).shares(reads)["local"]
        print(f"A cache of a tenth of the rows by {way}: {share:.1%} of the reads.")


@contextlib.contextmanager
def served(folder: str, graph: gear.graph.Graph, model: Sage, table: str) -> Iterator[str]:
    """A server process; its URL."""
    torch.save([graph.indptr, graph.indices], Path(folder) / "graph.pt")
    torch.save(model.state_dict(), Path(folder) / "model.pt")
    command = [sys.executable, str(HERE / "serving.py"), folder, "--table", table]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            if not port:
                sys.exit("The server did not start; its error is above.")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()


def ask(url: str, nodes: list[int]) -> list[list[float]]:
    """The server's scores of nodes."""
    body = json.dumps({"nodes": nodes}).encode()
    request = urllib.request.Request(f"{url}/predict", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[list[float]] = json.loads(answer.read())["scores"]
    return found


def check(url: str, graph: gear.graph.Graph, features: gear.Features, model: Sage) -> None:
    """Compare served scores with those of each node by itself; ask for a node that there is not."""
    nodes = np.random.default_rng(3).integers(0, graph.num_nodes, 100).tolist()
    served = torch.tensor(ask(url, nodes))
    sampler = gear.graph.NeighborSampler(graph, FANOUTS)
    with torch.inference_mode():
        found = [sampler.sample([node]) for node in nodes]
        offline = torch.cat([model(features[each.n_id], each.edge_index)[:1] for each in found])
    torch.testing.assert_close(served, offline, rtol=1e-4, atol=1e-4)
    try:
        ask(url, [graph.num_nodes])
        status = 200
    except urllib.error.HTTPError as error:
        status = error.code
    if status != 404:
        sys.exit(f"A node that the graph does not have got status {status}; expected 404.")
    print(
        f"Checked: the served scores of {len(nodes)} nodes are those computed offline; an unknown node is 404."
    )


def at_rate(url: str, graph: gear.graph.Graph, rate: float, duration: float) -> Load:
    nodes = popular_nodes(graph.out_degrees(), max(1, int(rate * duration)), seed=int(rate))
    load = asyncio.run(send(url, nodes, rate, seed=int(rate)))
    p50, p99 = np.quantile(load.seconds, [0.5, 0.99]) * 1e3 if len(load.seconds) else (np.nan, np.nan)
    print(
        f"{rate:,} requests/s: p50 {p50:.1f} ms, p99 {p99:.1f} ms, {load.throughput:,.0f} answers/s, "
        f"{load.refused:,} refused"
    )
    return load


def write(folder: Path, loads: list[Load]) -> None:
    """`results.json`, and `latency.png` if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for each in loads:
        p50, p90, p99 = (np.quantile(each.seconds, [0.5, 0.9, 0.99]) * 1e3).round(3).tolist()
        latencies = {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99}
        rows.append({"rate": each.rate, "throughput": each.throughput, "refused": each.refused, **latencies})
    (folder / "results.json").write_text(json.dumps(rows, indent=1))
    try:
        import matplotlib
    except ImportError:
        print("No plot: matplotlib is not installed.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rates = [row["rate"] for row in rows]
    for key in ("p50_ms", "p90_ms", "p99_ms"):
        left.loglog(rates, [row[key] for row in rows], marker="o", label=key.partition("_")[0])
    left.set(xlabel="requests/s", ylabel="latency, ms")
    left.legend()
    right.loglog(rates, rates, color="0.8")
    right.loglog(rates, [row["throughput"] for row in rows], marker="o")
    right.set(xlabel="requests/s", ylabel="answers/s")
    for axis in (left, right):
        axis.set_xticks(rates, [f"{rate:,}" for rate in rates])
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    figure.savefig(folder / "latency.png", dpi=150)


if __name__ == "__main__":
    main()
