"""``--device cuda`` of `single-server` and `batch-size`: batches on the GPU, from the draw to the batch.

=============================== ==============================================================================
cudaMemcpyAsync                 the yardstick: the copy engine, on pinned memory in one piece
ours                            ``DataLoader(ReplayDataset(..., device="cuda"), batch_size=None)``: the kernel reads
                                the table's pinned memory itself; with 2 batches ahead, and without
plain torch                     `index_select` into one of two pinned buffers, and ``copy_(non_blocking=True)``
plain torch, x[idx]             indexing, then ``pin_memory()``, then ``to("cuda", non_blocking=True)``
DataLoader, map-style           ``pin_memory=True``, then ``to("cuda", non_blocking=True)``; also with 8 workers
=============================== ==============================================================================

Plain torch draws on the CPU as ours does, by priority or uniformly. A measurement begins and ends with an idle GPU.
Peers' processes stay on the CPU: how they get there from batches of theirs is not measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.batches import (
    DRAWS,
    PREFETCH,
    QUICK_DRAWS,
    Way,
    count_of,
    drawing,
    loader,
    map_style,
    variant,
)
from benchmarks.batches_store import Store
from benchmarks.engine import YARDSTICK, Copies, CudaEngine, Engine
from benchmarks.harness import Comparison, Incorrect, Left, Session
from benchmarks.peers.batches_peers import PEERS
from benchmarks.staged import Staged
from benchmarks.workloads import Workload

__all__ = ["cuda"]

WORKERS = (0, 8)


def cuda(
    session: Session,
    left: Left,
    workloads: Sequence[Workload],
    batches: Sequence[int],
    *,
    experiment: str,
    quick: bool,
    engine: Engine | None = None,
    copy_bytes: int | None = None,
    workers: Sequence[int] = WORKERS,
) -> None:
    """Measure batches of these sizes, as the CPU's side does.

    Args:
        engine: the device; tests bring one that is none.
        copy_bytes: of a yardstick's copy.
        workers: of `DataLoader` over a map-style dataset.
    """
    engine = CudaEngine() if engine is None else engine
    copies = Copies.fresh(engine, copy_bytes or (32 << 20 if quick else 256 << 20))
    for name, peer in PEERS.items():
        if peer.workload in [workload.name for workload in workloads]:
            left.add(f"{name}, {peer.workload}", "peers are measured on the CPU alone (--device cpu)")
    for workload in workloads:
        with contextlib.closing(Store(workload)) as store, session.progress(workload.name, len(batches)):
            if engine.device.type == "cuda" and not store.table.region.pin():
                raise Incorrect(
                    "the table could not be pinned (see the notice): there is no kernel to measure"
                )
            draws: int | None = QUICK_DRAWS if quick else DRAWS
            for batch in batches:
                label = f"{workload.name}, batch {batch}"
                if session.deadline.passed(label):
                    continue
                count = count_of(store, batch, quick=quick)
                comparison = Comparison(
                    experiment=experiment,
                    workload=workload.name,
                    label=label,
                    variants=[
                        copies.variant(),
                        *(
                            variant(store, way, batch, count, draws or 0, engine.synchronize)
                            for way in _ways(engine, store, batch, workers)
                        ),
                    ],
                    yardstick=YARDSTICK,
                    references=["plain torch"],
                    parameters={"batch": batch, "part": "batches", "trajectories": workload.trajectories},
                )
                session.show(session.run(comparison))
                draws = None  # frequencies do not depend on the size: later, a few batches will do


def _ways(engine: Engine, store: Store, batch: int, workers: Sequence[int]) -> Iterator[Way]:
    other, best = PREFETCH  # on a GPU a batch ahead is on its way while the one before is in use
    yield loader(store, "ours", batch, best, engine.device)
    yield loader(store, f"ours, prefetch {other}", batch, other, engine.device)
    yield _staged(engine, store, batch)
    if not store.prioritized:
        return
    yield _indexed(engine, store, batch)
    for count in workers:
        name = "DataLoader, map-style" + (f", {count} workers" if count else "")
        batches = map_style(store, batch, count, pin=engine.device.type == "cuda")
        parameters = {"workers": count, "draws": "uniform"}
        yield Way(name, _moved(engine, batches), parameters, prioritized=False, cost=8)


def _staged(engine: Engine, store: Store, batch: int) -> Way:
    staged, draw = Staged(engine, store.data, batch), drawing(store, batch)

    def start() -> Iterator[Any]:
        while True:
            rows, weights = draw()
            found = staged.batch(rows)
            yield {**found, **_on(engine, weights)}

    return Way("plain torch", start)


def _indexed(engine: Engine, store: Store, batch: int) -> Way:
    stacked, draw = store.data.stacked, drawing(store, batch)

    def start() -> Iterator[Any]:
        while True:
            rows, weights = draw()
            yield _on(
                engine, {**{name: values[rows.positions] for name, values in stacked.items()}, **weights}
            )

    return Way("plain torch, x[idx]", start)


def _on(engine: Engine, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same on the device, by way of pinned memory; torch keeps that until the copies are done."""
    moved = {}
    for name, values in host.items():
        pinned = engine.pinned(tuple(values.shape), values.dtype).copy_(values)
        moved[name] = pinned.to(engine.device, non_blocking=True)
    return moved


def _moved(engine: Engine, batches: DataLoader[Any]) -> Callable[[], Iterator[Any]]:
    def start() -> Iterator[Any]:
        for found in batches:
            yield {name: values.to(engine.device, non_blocking=True) for name, values in found.items()}

    return start
