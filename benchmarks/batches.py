"""What `single-server` and `batch-size` share: batches as a user gets them, ours and others', checked and timed.

Every store holds the same trajectories, which each process makes again from a seed (`peers.source.Source`): random
numbers, and one column that numbers all steps, so that every row of every batch says what it has to hold. Before
anything is timed, the rows of many batches are compared with that to the byte, the frequencies of draws with what they
should be, and importance weights with the priorities. On a GPU, a measurement begins and ends with an idle GPU, and the
yardstick is the copy engine; plain torch is `index_select` into one of two pinned buffers and
``copy_(non_blocking=True)``, and draws on the CPU as ours does. How peers' batches get to a GPU is not measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import gear_loader as gear
from benchmarks import loading
from benchmarks.engine import Copies, CudaEngine, Engine
from benchmarks.harness import Incorrect, Session, Variant
from benchmarks.loading import Staged, closed, iterated, map_style, memcpy
from benchmarks.peers.batches import CHUNK
from benchmarks.peers.catalog import peers_of, started
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.select import ALPHA, BETA
from benchmarks.peers.source import Source
from benchmarks.workloads import Data, Rows, Workload, expect, poison

SEED = 3
BLOCK_STEPS = 100
PREFETCH = (0, 2)
"""Batches ahead: what "ours" has on the CPU, and the other; on a GPU it is the other way round."""
DRAWS, QUICK_DRAWS = 1 << 13, 1 << 11
"""Draws whose frequencies are looked at."""
TARGETS = {
    "W1": {"Reverb, gRPC": 20.0, "Reverb, in process": 9.0, "TorchRL": 3.5, "cpprb": 2.3},
    "W2": {"TorchRL, slices": 9.0},
}
"""Throughput over that of others, of batches of `TARGET_BATCH`."""
TARGET_BATCH = 256
WORKERS = (0, 8)  # of a map-style dataset on a GPU
PEERS = peers_of("batches")
_TOLERATED = 0.1  # by which part frequencies may be off, beyond chance
_MOST_BYTES = 2_560_000_000  # of a measurement, a fifth of a second: processors are slow at first


class Store:
    """A workload's trajectories as flat arrays, and as a private table; W1 has a priority for each.

    leaves: float64 [trajectories], the priorities to the power of alpha. spec: what peers are told about it.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload, self.data = workload, Data(workload)
        self.spec = {
            "columns": {name: list(shape) for name, shape in workload.columns},
            "steps": workload.steps,
            "trajectories": workload.trajectories,
            "window": workload.window.length,
            "seed": SEED,
        }
        self.source, stacked = Source(self.spec), self.data.stacked
        for first, columns in self.source.stacked(CHUNK):
            for name, values in columns.items():
                stacked[name][first : first + len(values)] = torch.from_numpy(values)
        self.priorities = self.source.priorities
        self.leaves = self.priorities.astype(np.float64) ** ALPHA
        self.prioritized = workload.anchor == "first"
        self.table = self.data.table(BLOCK_STEPS, priority=self.priorities)

    def close(self) -> None:
        self.table.close()

    def verify(self, found: Mapping[str, Any], batch: int) -> np.ndarray:
        """Compare a batch with what is stored; int64 [batch]: the trajectory of each row."""
        workload, mark = self.workload, found[self.source.mark].cpu()
        if list(mark.shape) != [batch, workload.window.length]:
            raise Incorrect(f"{self.source.mark} has shape {list(mark.shape)}; {batch} rows were expected")
        last = mark[:, -1]
        if not bool(((last >= 0) & (last < workload.trajectories * workload.steps)).all()):
            raise Incorrect("a row ends with what numbers no step")
        positions, steps = last.long() // workload.steps, last.long() % workload.steps
        anchors = torch.zeros_like(steps) if workload.anchor == "first" else steps
        expected = self.data.expected(Rows(positions, anchors))
        expect(found, {name: values for name, values in expected.items() if name in found or name != "mask"})
        return positions.numpy()

    def check_draws(
        self, positions: np.ndarray, weights: Sequence[np.ndarray] | None, *, prioritized: bool
    ) -> None:
        """Compare what was drawn with what should be, and importance weights with the priorities."""
        count = self.workload.trajectories
        leaves = self.leaves if prioritized else np.ones(count)
        bins = {
            "priorities": np.minimum((self.priorities * 16).astype(np.int64), 15),
            "positions": np.arange(count) * 16 // count,
        }
        for what, places in bins.items():
            share = np.bincount(places, weights=leaves, minlength=16) / leaves.sum()
            found = np.bincount(places[positions.ravel()], minlength=16)
            expected = share * found.sum()
            off = np.abs(found - expected) - 5 * np.sqrt(expected)
            if (off > _TOLERATED * expected).any():
                worst = int(np.argmax(off / np.maximum(expected, 1e-9)))
                raise Incorrect(
                    f"{what}: {found[worst]} draws of {found.sum()} are in bin {worst}, {expected[worst]:.0f} expected"
                )
        if not prioritized:
            return
        if weights is None:
            raise Incorrect("there are no importance weights")
        for row, each in zip(positions, weights, strict=True):
            scale = each * self.leaves[row] ** BETA
            if not np.allclose(scale, scale[0], rtol=1e-3):
                raise Incorrect("the importance weights differ from what the priorities say")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of getting batches in this process: mappings of columns ``[B, L, *shape]``, with ``priority_weight``.

    prioritized: whether it draws by priority; None if the store's batches are. cost: how many times longer it takes
    about than the others: it gets fewer batches.
    """

    name: str
    start: Callable[[], Iterator[Any]]
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prioritized: bool | None = None
    cost: int = 1


def variant(
    store: Store,
    way: Way,
    batch: int,
    batches: int,
    draws: int,
    synchronize: Callable[[], object] = lambda: None,
) -> Variant:
    """The way, checked with so many draws, and timed; `synchronize` waits for the device that batches are on."""
    prioritized = store.prioritized if way.prioritized is None else way.prioritized

    def check() -> None:
        positions, weights = [], []
        with closed(way.start()) as iterator:
            for found in itertools.islice(iterator, max(4, draws // batch)):
                positions.append(store.verify(found, batch))
                if prioritized:
                    weights.append(found["priority_weight"].double().cpu().numpy().copy())
                poison({name: found[name] for name in store.source.columns})  # it may come again
        store.check_draws(np.stack(positions), weights or None, prioritized=prioritized)

    count = max(2, batches // way.cost)
    measure = iterated(way.start, count, synchronize)
    return Variant(way.name, measure, check, batch * store.workload.row_bytes, count, way.parameters)


def ours(store: Store, batch: int, prefetch: int, device: torch.device | str = "cpu") -> gear.ReplayDataset:
    """By priority, or windows that end at any step.

    Without prefetching on the CPU a batch is valid until the next one is asked for, as a plain loop needs it: so all
    batches lie in the same memory, which stays in the cache.
    """
    selector = gear.Prioritized(ALPHA, BETA) if store.prioritized else gear.Uniform()
    memory = _memory(prefetch, device)
    options: Any = {"sampler": selector, "seed": SEED, "device": device, "prefetch": prefetch, **memory}
    return loading.dataset(store.data, store.table, batch, **options)


def _memory(prefetch: int, device: torch.device | str) -> dict[str, Any]:
    """How long batches stay valid, in the fastest way for loops that keep none; ahead on the CPU, the defaults."""
    if torch.device(device).type == "cpu":
        return {"copy": False, "keep": 1} if prefetch == 0 else {"copy": None, "keep": 2}
    return {"copy": False, "keep": 2}


def loader(store: Store, name: str, batch: int, prefetch: int, device: torch.device | str = "cpu") -> Way:
    batches = DataLoader(ours(store, batch, prefetch, device), batch_size=None)
    parameters = {"block_steps": BLOCK_STEPS, "prefetch": prefetch, **_memory(prefetch, device)}
    return Way(name, functools.partial(iter, batches), parameters)


def drawing(store: Store, batch: int) -> Callable[[], tuple[Rows, dict[str, torch.Tensor]]]:
    """Drawing rows by plain torch: by priority with importance weights, or uniformly."""
    if not store.prioritized:
        return lambda: (store.data.draw(batch), {})
    leaves, generator = torch.from_numpy(store.leaves).float(), store.data.generator
    shares = leaves * (len(leaves) / leaves.sum())
    first = torch.zeros(batch, dtype=torch.int64)

    def draw() -> tuple[Rows, dict[str, torch.Tensor]]:
        positions = torch.multinomial(leaves, batch, replacement=True, generator=generator)
        weights = shares[positions] ** -BETA
        return Rows(positions, first), {"priority_weight": weights / weights.max()}

    return draw


def cpu_ways(store: Store, batch: int) -> Iterator[Way]:
    """Ours, plain torch, and a map-style dataset on the CPU."""
    best, other = PREFETCH
    yield loader(store, "ours", batch, best)
    yield loader(store, f"ours, prefetch {other}", batch, other)
    sampled = ours(store, batch, 0)
    yield Way("ours, sample", lambda: iter(sampled.sample, None), {"block_steps": BLOCK_STEPS})
    gathered, draw = loading.plain(store.data, batch), drawing(store, batch)

    def plain() -> Iterator[Any]:
        while True:
            rows, weights = draw()
            gathered.gather(rows)
            yield {**gathered.batch, **weights}

    yield Way("plain torch", plain)
    for workers in (0, 2) if store.prioritized else ():
        start = functools.partial(iter, map_style(store.data, batch, workers))
        yield _map_style(workers, start)


def _map_style(workers: int, start: Callable[[], Iterator[Any]]) -> Way:
    name = "DataLoader, map-style" + (f", {workers} workers" if workers else "")
    return Way(name, start, {"workers": workers, "draws": "uniform"}, prioritized=False, cost=8)


def cuda_ways(engine: Engine, store: Store, batch: int, workers: Sequence[int] = WORKERS) -> Iterator[Way]:
    """The same on a GPU."""
    other, best = PREFETCH  # a batch ahead is on its way while the one before is in use
    yield loader(store, "ours", batch, best, engine.device)
    yield loader(store, f"ours, prefetch {other}", batch, other, engine.device)
    staged, draw, stacked = Staged(engine, store.data, batch), drawing(store, batch), store.data.stacked

    def on(host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same on the device, by way of pinned memory; torch keeps that until the copies are done."""
        pinned = {n: engine.pinned(tuple(v.shape), v.dtype).copy_(v) for n, v in host.items()}
        return {name: values.to(engine.device, non_blocking=True) for name, values in pinned.items()}

    def plain() -> Iterator[Any]:
        while True:
            rows, weights = draw()
            yield {**staged.batch(rows), **on(weights)}

    def indexed() -> Iterator[Any]:
        while True:
            rows, weights = draw()
            yield on({**{name: values[rows.positions] for name, values in stacked.items()}, **weights})

    def moved(batches: DataLoader[Any]) -> Iterator[Any]:
        for found in batches:
            yield {name: values.to(engine.device, non_blocking=True) for name, values in found.items()}

    yield Way("plain torch", plain)
    if store.prioritized:
        yield Way("plain torch, x[idx]", indexed)
        for count in workers:
            batches = map_style(store.data, batch, count, pin=engine.device.type == "cuda")
            yield _map_style(count, functools.partial(moved, batches))


@contextlib.contextmanager
def filled(session: Session, store: Store) -> Iterator[dict[str, PeerProcess]]:
    """Peers that have batches of the store's workload, with the same trajectories in theirs."""
    found: dict[str, PeerProcess] = {}
    with contextlib.ExitStack() as stack:

        def built(name: str) -> PeerProcess:
            process = started(session.peers, "batches", name, session.threads)
            stack.callback(process.close)
            process.ask("build", spec=store.spec)
            return process

        for name, peer in PEERS.items():
            if peer.workload == store.workload.name:
                what = f"{name}, {store.workload.name}"
                if (process := session.attempt(what, functools.partial(built, name))) is not None:
                    found[name] = process
        yield found


def _peer(store: Store, name: str, process: PeerProcess, batch: int, batches: int, draws: int) -> Variant:
    """A peer, in the setting that is the fastest for batches of that size."""
    setting = process.ask("prepare", batch=batch)["setting"]
    batches = max(2, batches // PEERS[name].cost)

    def check() -> None:
        answer = process.ask("check", times=max(4, draws // batch))
        positions = np.array(answer["steps"]) // store.workload.steps
        weights = answer["weights"]
        each = None if weights is None else [np.array(row) for row in weights]
        store.check_draws(positions, each, prioritized=store.prioritized)

    return Variant(
        name,
        lambda: float(process.ask("measure", batches=batches)["seconds"]),
        check,
        batch * store.workload.row_bytes,
        batches,
        {"peer": {**process.about, "setting": setting}},
        required=False,
    )


def measured(
    session: Session,
    workloads: Sequence[Workload],
    sizes: Sequence[int],
    *,
    engine: Engine | None = None,
    copy_bytes: int | None = None,
    workers: Sequence[int] = WORKERS,
) -> None:
    """Measure batches of these sizes in all ways."""
    if session.cuda and engine is None:
        engine = CudaEngine()
    copies = None
    if engine is not None:
        copies = Copies.fresh(engine, copy_bytes or (32 << 20 if session.quick else 256 << 20))
    for workload in workloads:
        label = f"{workload.name}, batch {{}}".format
        if session.late(label(sizes[0])):
            continue
        with contextlib.closing(Store(workload)) as store, contextlib.ExitStack() as stack:
            processes: dict[str, PeerProcess] = {}
            if engine is None:
                processes = stack.enter_context(filled(session, store))
            elif engine.device.type == "cuda" and not store.table._engine.region.pin():
                raise Incorrect("the table could not be pinned (see the notice): no kernel can be measured")
            else:
                why = "peers are measured on the CPU alone (--device cpu)"
                for name in (name for name, peer in PEERS.items() if peer.workload == workload.name):
                    session.leave(f"{name}, {workload.name}", why)
            draws = QUICK_DRAWS if session.quick else DRAWS
            for batch in session.each(workload.name, sizes, label):
                count = 3 if session.quick else max(8, min(1024, _MOST_BYTES // (batch * workload.row_bytes)))
                if engine is None or copies is None:
                    ways, wait = cpu_ways(store, batch), lambda: None
                    yardstick = memcpy(store.data, batch * workload.row_bytes, count)
                else:
                    ways, wait = cuda_ways(engine, store, batch, workers), engine.synchronize
                    yardstick = copies.variant()
                mine = [variant(store, way, batch, count, draws, wait) for way in ways]
                if batch == TARGET_BATCH and engine is None:
                    mine[0].targets = TARGETS[workload.name]
                others = []
                for name, process in processes.items():
                    made = functools.partial(_peer, store, name, process, batch, count, draws)
                    if (found := session.attempt(f"{name}, {label(batch)}", made)) is not None:
                        others.append(found)
                beside = [one.name for one in others] + ["plain torch"] * (engine is not None)
                parameters = {"batch": batch, "part": "batches", "trajectories": workload.trajectories}
                variants = [yardstick, *mine, *others]
                session.compare(workload.name, label(batch), variants, yardstick.name, parameters, beside)
                draws = 0  # frequencies do not depend on the size: from now on a few batches will do
