"""What `single-server` and `batch-size` share: batches as a user gets them, ours and others', checked and timed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

import gear_loader as gear
from benchmarks.batches_store import BLOCK_STEPS, SEED, Store
from benchmarks.collect import Trajectories, close, iterated, memcpy
from benchmarks.harness import Comparison, Left, Session, Variant
from benchmarks.online_parts import measured
from benchmarks.peers import batches_peers
from benchmarks.peers.batches_peers import ALPHA, BETA, PEERS
from benchmarks.peers.environments import start
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.workloads import PlainTrajectories, PlainWindows, Rows, poison

__all__ = [
    "DRAWS",
    "PREFETCH",
    "QUICK_DRAWS",
    "TARGETS",
    "TARGET_BATCH",
    "Others",
    "Way",
    "compared",
    "count_of",
    "dataset",
    "drawing",
    "loader",
    "map_style",
    "plain",
    "variant",
]

PREFETCH = (0, 2)
"""Batches ahead: what "ours" has, and the other."""
DRAWS, QUICK_DRAWS = 1 << 13, 1 << 11
"""Draws whose frequencies are looked at."""
TARGETS = {
    "W1": {"Reverb, gRPC": 15.0, "Reverb, in process": 8.0, "TorchRL": 2.5, "cpprb": 1.7},
    "W2": {"TorchRL, slices": 4.0},
}
"""Throughput over that of others, of batches of `TARGET_BATCH`."""
TARGET_BATCH = 256
_MOST_BYTES = (
    2_560_000_000  # of a measurement, a fifth of a second: after a pause processors are slow for some 20 ms
)


# ---------------------------------------------------------------- ours, and what is in this process


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of getting batches in this process.

    Attributes:
        name: how rows and tables call it.
        start: begin to iterate over batches: mappings of columns ``[B, L, *shape]``, with ``priority_weight``.
        parameters: for the rows.
        prioritized: whether it draws by priority; None if the store's batches are.
        cost: how many times longer it takes about than the others: it gets fewer batches.
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
    """The way, checked with so many draws, and timed.

    Args:
        synchronize: waits for the device that batches are on.
    """
    prioritized = store.prioritized if way.prioritized is None else way.prioritized

    def check() -> None:
        iterator = way.start()
        positions, weights = [], []
        try:
            for _ in range(max(4, draws // batch)):
                found = next(iterator)
                positions.append(store.verify(found, batch))
                if prioritized:
                    weights.append(found["priority_weight"].double().cpu().numpy().copy())
                poison({name: found[name] for name in store.source.columns})  # it may come again
        finally:
            close(iterator)
        store.check_draws(np.stack(positions), weights or None, prioritized=prioritized)

    count = max(2, batches // way.cost)
    measure = iterated(way.start, count, synchronize)
    return Variant(way.name, measure, check, batch * store.workload.row_bytes, count, way.parameters)


def dataset(
    store: Store, batch: int, prefetch: int, device: torch.device | str = "cpu"
) -> gear.ReplayDataset:
    """Ours: by priority, or windows that end at any step.

    Without prefetching on the CPU a batch is valid until the next one is asked for, as a plain loop needs it: so all
    batches lie in the same memory, which stays in the cache.
    """
    return gear.ReplayDataset(
        store.table,
        batch_size=batch,
        windows=store.workload.window,
        anchor=store.workload.anchor,
        selector=gear.Prioritized(ALPHA, BETA) if store.prioritized else gear.Uniform(),
        seed=SEED,
        device=device,
        prefetch=prefetch,
        keep=_keep(prefetch, device),
        batches_per_epoch=math.inf,
    )


def loader(store: Store, name: str, batch: int, prefetch: int, device: torch.device | str = "cpu") -> Way:
    """Ours through `DataLoader`."""
    batches = DataLoader(dataset(store, batch, prefetch, device), batch_size=None)
    parameters = {"block_steps": BLOCK_STEPS, "prefetch": prefetch, "keep": _keep(prefetch, device)}
    return Way(name, lambda: iter(batches), parameters)


def _keep(prefetch: int, device: torch.device | str) -> int:
    """How many batches stay valid: one, or two, which is the default."""
    return 1 if prefetch == 0 and torch.device(device).type == "cpu" else 2


def _sample(store: Store, batch: int) -> Way:
    batches = dataset(store, batch, 0)
    return Way("ours, sample", lambda: iter(batches.sample, None), {"block_steps": BLOCK_STEPS})


def plain(store: Store, batch: int) -> Way:
    """The fastest that plain torch does in ten lines, into buffers that are kept; see `workloads.Plain`."""
    way = (
        PlainTrajectories(store.data, batch)
        if store.prioritized
        else PlainWindows(store.data, batch, "strided")
    )
    draw = drawing(store, batch)

    def start() -> Iterator[Any]:
        while True:
            rows, weights = draw()
            way.gather(rows)
            yield {**way.batch, **weights}

    return Way("plain torch", start)


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


def map_style(store: Store, batch: int, workers: int, *, pin: bool = False) -> DataLoader[Any]:
    """`DataLoader` over a map-style dataset of whole trajectories, drawn uniformly, without end."""
    trajectories = Trajectories(store.data)
    order = RandomSampler(trajectories, replacement=True, num_samples=1 << 40, generator=store.data.generator)
    context = "fork" if workers else None  # what is forked need not be copied to the workers
    return DataLoader(
        trajectories,
        batch_size=batch,
        sampler=order,
        num_workers=workers,
        multiprocessing_context=context,
        pin_memory=pin,
    )


def _map_styles(store: Store, batch: int) -> Iterator[Way]:
    for workers, name in ((0, "DataLoader, map-style"), (2, "DataLoader, map-style, 2 workers")):
        batches = map_style(store, batch, workers)
        start = functools.partial(iter, batches)
        yield Way(name, start, {"workers": workers, "draws": "uniform"}, prioritized=False, cost=8)


# ---------------------------------------------------------------- peers


class Others:
    """Peers, each environment's in one process, which is started when it is needed.

    Args:
        left: where it is noted why peers are missing.
        pythons: of `environments.interpreters`.
        threads: that peers may use.
    """

    def __init__(self, left: Left, pythons: Sequence[Path], threads: int) -> None:
        self._left, self._pythons, self._threads = left, pythons, threads
        self._processes: dict[str, PeerProcess | str] = {}

    def __enter__(self) -> Others:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started():
            process.close()

    @contextlib.contextmanager
    def filled(self, store: Store) -> Iterator[dict[str, PeerProcess]]:
        """Those that have batches of the store's workload, with the same trajectories in theirs."""
        found = {}
        for name, peer in PEERS.items():
            if peer.workload != store.workload.name:
                continue
            process = self._process(peer.environment)
            try:
                if isinstance(process, str):
                    raise PeerFailed(process)
                process.ask("build", name=name, spec=store.spec)
            except PeerFailed as error:
                self._left.add(f"{name}, {store.workload.name}", str(error))
                continue
            found[name] = process
        try:
            yield found
        finally:
            for process in self._started():
                with contextlib.suppress(PeerFailed):
                    process.ask("close")

    def _process(self, environment: str) -> PeerProcess | str:
        """The one of that environment, or why there is none."""
        if environment not in self._processes:
            script = batches_peers.__file__
            try:
                self._processes[environment] = start(
                    self._pythons, script, environment, self._threads, environment=environment
                )
            except PeerFailed as error:
                self._processes[environment] = str(error)
        return self._processes[environment]

    def _started(self) -> list[PeerProcess]:
        return [process for process in self._processes.values() if isinstance(process, PeerProcess)]


def _peer(store: Store, name: str, process: PeerProcess, batch: int, batches: int, draws: int) -> Variant:
    """A peer, in the setting that is the fastest for batches of that size.

    Raises:
        PeerFailed: it has none.
    """
    setting = process.ask("prepare", name=name, batch=batch)["setting"]
    batches = max(2, batches // PEERS[name].cost)

    def check() -> None:
        answer = process.ask("check", name=name, times=max(4, draws // batch))
        positions = np.array(answer["steps"]) // store.workload.steps
        weights = answer["weights"]
        each = None if weights is None else [np.array(row) for row in weights]
        store.check_draws(positions, each, prioritized=store.prioritized)

    return Variant(
        name,
        lambda: float(process.ask("measure", name=name, batches=batches)["seconds"]),
        check,
        batch * store.workload.row_bytes,
        batches,
        {"peer": {**process.about, "setting": setting}},
    )


# ---------------------------------------------------------------- comparing


def count_of(store: Store, batch: int, *, quick: bool) -> int:
    """Batches of a measurement."""
    return 3 if quick else max(8, min(1024, _MOST_BYTES // (batch * store.workload.row_bytes)))


def compared(
    session: Session,
    left: Left,
    store: Store,
    processes: Mapping[str, PeerProcess],
    batch: int,
    *,
    experiment: str,
    quick: bool,
    draws: int | None = None,
) -> None:
    """Measure batches of one size in all ways; rows and results are the session's.

    Args:
        processes: of `Others.filled`.
        draws: to look at the frequencies of; `DRAWS` by default.
    """
    workload, batches = store.workload, count_of(store, batch, quick=quick)
    label = f"{workload.name}, batch {batch}"
    draws = (QUICK_DRAWS if quick else DRAWS) if draws is None else draws
    best, other = PREFETCH
    ways = [
        loader(store, "ours", batch, best),
        loader(store, f"ours, prefetch {other}", batch, other),
        _sample(store, batch),
        plain(store, batch),
        *(_map_styles(store, batch) if store.prioritized else ()),
    ]
    variants = [memcpy(store.data, batch * workload.row_bytes, batches)]
    variants += [variant(store, way, batch, batches, draws) for way in ways]
    mine = {found.name for found in variants}
    for name, process in processes.items():
        try:
            variants.append(_peer(store, name, process, batch, batches, draws))
        except PeerFailed as error:
            left.add(f"{name}, {label}", str(error))
    there = [name for name in processes if name in {found.name for found in variants}]
    goals = TARGETS[workload.name] if batch == TARGET_BATCH else {}
    targets = {name: goal for name, goal in goals.items() if name in there}
    comparison = Comparison(
        experiment=experiment,
        workload=workload.name,
        label=label,
        variants=[
            dataclasses.replace(found, targets=targets) if found.name == "ours" else found
            for found in variants
        ],
        yardstick="memcpy",
        references=there,
        parameters={"batch": batch, "part": "batches", "trajectories": workload.trajectories},
    )
    before = len(session.results)
    measured(session, left.add, comparison, mine)
    session.show(session.results[before:])
