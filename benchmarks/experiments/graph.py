"""``python -m benchmarks graph``: sampled neighbourhoods with features, and a GraphSAGE that is served.

A skewed random graph of the size of the example's call graph: 117,000 nodes, 7 neighbours each, features of 64 float32,
fan-outs 10 and 10. Batches of seeds are sampled and their features gathered by ours (one thread, and all), by plain
torch, which is the yardstick, and by PyTorch Geometric's NeighborLoader, if this interpreter has it and one of its
samplers (pyg-lib or torch-sparse). Every way is checked first: seeds first, edges of the graph, as many as the fan-out
asks for, the right features.

Serving: requests for one node each come at random times in this process, and are batched by `RequestBatcher`, sampled,
gathered and classified, by the same model for all ways. The rate is raised until the 99th percentile of the latency,
counted from when a request was due, passes 50 ms; the latency is that at half of the highest rate that kept it, and at
half of the lowest of these rates, in turn.

With ``--device cuda`` batches end on the GPU: sampled by the CPU or by the GPU, with features by zero copy, or as a
router chooses; beside plain torch on the CPU, copied. No serving and no caches then.

Caches: the reads of single requests, by (rank + 1) ** -0.9, that a cache of a tenth of the rows serves, and the bytes
that a request reads past it, if its rows are chosen by access probability, by out-degree, by what is read (an oracle),
or change by LRU.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import typer
from torch import nn

import gear_loader as gear
from benchmarks import graphs
from benchmarks.caches import Cache
from benchmarks.graphs import Data, Way
from benchmarks.harness import Amount, Session, Variant
from benchmarks.options import experiment
from benchmarks.peers.source import undisturbed
from gear_loader.errors import OverloadError

FANOUTS = [10, 10]
BATCHES, QUICK_BATCHES = (1, 16, 256, 1024), (1, 16)
YARDSTICK = "plain torch"
PYG = "PyG NeighborLoader"
LIMIT = 0.05  # seconds of the 99th percentile


class Sage(nn.Module):
    """Two layers with mean aggregation."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * size, 64) for size in (inputs, 64))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        sources, targets = edge_index
        for layer in self.layers:
            total = torch.zeros_like(x).index_add_(0, targets, x[sources])
            count = torch.bincount(targets, minlength=len(x)).clamp(min=1)
            x = layer(torch.cat((x, total / count[:, None]), 1)).relu()
        return x


@experiment("graph", repeats=(2, 9))
def command(
    session: Session,
    nodes: Annotated[int | None, typer.Option(min=100, help="Of the graph: 117,000 by default.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of load at each rate.")] = 2.0,
) -> None:
    """Neighbour sampling with features, and serving, beside PyG and plain torch."""
    if not session.cuda:
        graphs.use_sampler_of_peer(session.peers)
    size, degree, width = nodes or (3000 if session.quick else 117_000), 7, 64
    session.configure(nodes=size, degree=degree, features=width, fanouts=FANOUTS)
    data = Data.of(size, degree, width, seed=1)
    schema = {"x": gear.Column(torch.float32, (width,))}
    with gear.Table.create(schema, max_steps=size, max_trajectories=1) as table:
        table.add({"x": data.x})
        batches = QUICK_BATCHES if session.quick else BATCHES
        if session.cuda:
            device = torch.device("cuda", torch.cuda.current_device())
            found = graphs.on_device(data, table, FANOUTS, device)
            for batch in session.each("graph", batches, "{} seeds".format):
                _sampling(session, data, found, batch)
            return
        ways: dict[str, Way] = {
            "ours": graphs.ours(data, table, FANOUTS, 1),
            YARDSTICK: graphs.plain(data, FANOUTS),
        }
        if session.threads > 1:
            ways["ours, threads"] = graphs.ours(data, table, FANOUTS, session.threads)
        if (peer := session.attempt(PYG, functools.partial(graphs.pyg, data, FANOUTS))) is not None:
            ways[PYG] = peer
        for batch in session.each("graph", batches, lambda batch: f"{batch} seeds"):
            _sampling(session, data, ways, batch)
        _serving(session, data, ways, 0.3 if session.quick else seconds)
    _caching(session, data)


def _sampling(session: Session, data: Data, ways: dict[str, Way], batch: int) -> None:
    count = max(2, (64 if session.quick else 1024) // batch)
    random = np.random.default_rng(batch)

    def seeds() -> np.ndarray:
        return random.choice(data.num_nodes, size=batch, replace=False)

    def measure(way: Way) -> float:
        given = [seeds() for _ in range(count)]
        began = time.perf_counter()
        for each in given:
            way(each)
        return time.perf_counter() - began

    variants = [
        Variant(
            name,
            functools.partial(measure, way),
            functools.partial(graphs.check, data, way, FANOUTS, seeds()),
            amount=batch,
            batches=count,
            required=name != PYG,
        )
        for name, way in ways.items()
    ]
    others = [PYG] if PYG in ways else []
    label = f"sample and gather, {batch:,} seeds"
    session.compare("sampling", label, variants, YARDSTICK, {"batch": batch, "item": "seed"}, others, "rows")


def _caching(session: Session, data: Data) -> None:
    graph = gear.graph.Graph.from_edge_index(data.edge_index, num_nodes=data.num_nodes)
    size, rows = data.num_nodes, data.num_nodes // 10
    weights = np.arange(1, size + 1) ** -0.9
    requests = np.random.default_rng(3).permutation(weights / weights.sum())
    drawn = np.random.default_rng(4).choice(size, size=100 if session.quick else 5000, p=requests)
    sampler = gear.graph.NeighborSampler(graph, FANOUTS)
    reads = [sampler.sample([node], step=step).n_id.numpy() for step, node in enumerate(drawn.tolist())]
    counts = np.bincount(np.concatenate(reads), minlength=size)
    found = {
        "by access probability": gear.graph.access_probability(graph, FANOUTS, requests, drawing="new"),
        "by degree": graph.out_degrees(),
        "oracle": counts,
    }
    shares = {
        name: gear.graph.place(scores, capacity=rows).shares(counts)["local"]
        for name, scores in found.items()
    }
    hits = Cache(rows, lru=True).read(np.concatenate(reads))
    shares |= {"LRU": hits / counts.sum(), "no cache": 0.0}
    row_bytes = data.x.shape[1] * data.x.element_size()
    each = counts.sum() / len(drawn) * row_bytes / 1024
    told = ("graph", "cache", "reads served by a cache of a tenth of the rows")
    past = ("graph", "cache bytes", f"read past a cache of {rows * row_bytes / 2**20:.1f} MiB for a request")
    served = [Amount(*told, name, [100 * share], "%") for name, share in shares.items()]
    missed = [Amount(*past, name, [each * (1 - share)], "KiB") for name, share in shares.items()]
    for amounts in (served, missed):
        session.show_amounts([session.record(amount) for amount in amounts])


# ---------------------------------------------------------------- serving


def _serving(session: Session, data: Data, ways: dict[str, Way], seconds: float) -> None:
    model = Sage(data.x.shape[1]).eval()
    told, serves, best = ("graph", "serving"), {}, {}
    for name, way in ways.items():
        serves[name] = serve = functools.partial(_served, model, way)
        _p99(
            data, serve, 100, seconds / 4
        )  # what is loaded and started by the first requests is not measured
        best[name] = _highest(lambda rate, serve=serve: _p99(data, serve, rate, seconds), session.quick)  # type: ignore[misc]
    rates = [
        Amount(*told, "highest rate with p99 of 50 ms", name, [rate], "requests/s")
        for name, rate in best.items()
    ]
    # A way that serves more has more to do at half of its own rate: so also at one that all of them keep, in turn.
    for label, chosen in (
        ("p99 at half of that rate", {name: rate / 2 for name, rate in best.items()}),
        ("p99 at half of the lowest of these rates", dict.fromkeys(best, min(best.values()) / 2)),
    ):
        found: dict[str, list[float]] = {name: [] for name in best}
        for seed in range(session.repeats):
            for name, rate in chosen.items():
                found[name].append(_p99(data, serves[name], rate, seconds, seed) * 1e3)
        rates += [
            Amount(*told, label, name, found[name], "ms", {"rate": rate}) for name, rate in chosen.items()
        ]
    for label in dict.fromkeys(amount.label for amount in rates):
        session.show_amounts([session.record(amount) for amount in rates if amount.label == label])


@torch.inference_mode()
def _served(model: Sage, way: Way, nodes: np.ndarray) -> torch.Tensor:
    _, edge_index, x = way(nodes)
    scores: torch.Tensor = model(x, edge_index)[: len(nodes)]
    return scores


def _highest(p99: Callable[[float], float], quick: bool) -> float:
    """The highest rate of requests a second with a 99th percentile below `LIMIT`, to about 6%."""
    low, high = 0.0, 50.0
    while p99(high) <= LIMIT and high < (200 if quick else 1e5):
        low, high = high, high * 2
    for _ in range(1 if quick else 4):
        middle = (low + high) / 2
        low, high = (middle, high) if p99(middle) <= LIMIT else (low, middle)
    return low or high / 2


def _p99(
    data: Data, serve: Callable[[np.ndarray], torch.Tensor], rate: float, seconds: float, seed: int = 0
) -> float:
    """99th percentile of the latency in seconds; infinity if a request was refused."""
    random = np.random.default_rng(seed)
    count = max(20, int(rate * seconds))
    due = np.cumsum(random.exponential(1 / rate, count))
    nodes = random.integers(0, data.num_nodes, count)
    done = np.full(count, np.inf)
    # A full garbage collection stops all threads for 150 ms, mostly because of what torch and numba have loaded.
    with (
        undisturbed(),
        gear.graph.RequestBatcher(serve, data.num_nodes, max_wait=0.001, max_waiting=4096) as batcher,
    ):
        began = time.perf_counter()

        def note(number: int, _: object) -> None:
            done[number] = time.perf_counter() - began

        futures = []
        for number, (node, at) in enumerate(zip(nodes.tolist(), due.tolist(), strict=True)):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            try:
                futures.append(batcher.submit([node]))
            except OverloadError:
                return float("inf")
            futures[-1].add_done_callback(functools.partial(note, number))
        for future in futures:
            future.result()
    return float(np.quantile(done - due, 0.99))
