"""``python -m benchmarks collect``: gathering batches, against a copy of as many bytes and against plain torch.

On the CPU, of workloads W1 (whole trajectories) and W2 (windows), see `benchmarks.workloads`. The yardstick is one
``torch.Tensor.copy_`` of as many bytes as the batch's columns have, in one piece from a random place of a range as
large as the table into a buffer that is kept. `Collector.collect` and `index_select` (for W2 in three ways, see
`PlainWindows`) write the same buffers again and again, rows drawn beforehand; ``x[idx]`` takes fresh memory; `dataset`
goes from the draw to the batch. All use as many threads; all but `DataLoader` give the same columns and mask.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import DataLoader

import gear_loader as gear
from benchmarks import machine
from benchmarks.experiments import collect_cuda
from benchmarks.harness import Session, Variant, per_batch
from benchmarks.loading import check_dataset, check_map_style, dataset, iterated, map_style, memcpy
from benchmarks.options import command as as_command
from benchmarks.showing import size
from benchmarks.workloads import W1, W2, Data, Plain, PlainTrajectories, PlainWindows, Rows, expect, poison
from gear_loader.collection.collector import Collector
from gear_loader.storage.rows import SelectedRows

BATCHES = (32, 256, 1024)
QUICK_BATCHES = (32, 128)
BLOCK_STEPS = (100, 64)
PREFETCH = (0, 2)


@as_command("collect", repeats=(3, 15, 7), pause=0.005)
def command(
    session: Session,
    trajectories: Annotated[int | None, typer.Option(min=1, help="Of W1 and W2, 20,000 by default.")] = None,
) -> None:
    """Gathering batches, against a plain copy of as many bytes and against plain torch."""
    count = trajectories or (300 if session.quick else W1.trajectories)
    batches = QUICK_BATCHES if session.quick else BATCHES
    if count < max(batches):
        message = f"{count} is less than the largest batch, {max(batches)}."
        raise typer.BadParameter(message, param_hint="--trajectories")
    if session.cuda:
        collect_cuda.measured(session, trajectories=count)
        return
    cache = machine.cache_bytes() or 0
    for workload in (W1.of(count), W2.of(count)):
        if workload.table_bytes < 4 * cache:
            session.warn(
                f"{workload.name} has {size(workload.table_bytes)}, the largest cache {size(cache)}: figures are of "
                "memory that is partly in the cache, the yardstick's too. --trajectories makes it larger."
            )
        data = Data(workload)
        with contextlib.ExitStack() as stack, session.progress(workload.name, len(batches)):
            tables = {steps: stack.enter_context(data.table(steps)) for steps in BLOCK_STEPS}
            for batch in batches:
                if not session.late(f"{workload.name}, batch {batch}"):
                    _compare(session, data, tables, batch)


def _compare(session: Session, data: Data, tables: dict[int, gear.Table], batch: int) -> None:
    workload = data.workload
    count = batch * workload.row_bytes
    batches = 3 if session.quick else max(4, min(64, 256_000_000 // count))
    plain: dict[str, Plain] = {}
    if workload.anchor == "first":
        plain["index_select"] = PlainTrajectories(data, batch)
    else:
        ways = {"": "zero row", " masked": "masked", " strided": "strided"}
        plain |= {f"index_select{name}": PlainWindows(data, batch, way) for name, way in ways.items()}  # type: ignore[arg-type]
    references = tuple(name for name in plain if name != "index_select masked")  # slower than the others
    goals = {} if workload.anchor == "uniform" else {"memcpy": 0.8 if batch < 256 else 1.0}
    goals |= dict.fromkeys(references, 1.0)
    made = functools.partial(Variant, amount=count)
    variants = [memcpy(data, count, batches)]

    def gathered(
        name: str,
        work: Callable[[Any], Any],
        kept: dict[str, Any] | None,
        request: Any = lambda rows: rows,
        **more: Any,
    ) -> Variant:
        """Into buffers that are kept, or into fresh memory. request: of rows, what `work` takes."""

        def check() -> None:
            rows = data.draw(batch)
            # Plain torch leaves the mask of whole trajectories as it is.
            same = ("mask",) if workload.anchor == "first" and name in plain else ()
            poison({key: value for key, value in (kept or {}).items() if key not in same})
            found, expected = work(request(rows)), data.expected(rows)
            expect(kept or found, {key: v for key, v in expected.items() if kept or key in found})

        measure = per_batch(lambda: request(data.draw(batch)), work, batches)
        return made(name, measure, check, batches=batches, **more)

    def collector(steps: int, table: gear.Table) -> Variant:
        windows = dict.fromkeys(workload.schema, workload.window)
        found = Collector(table, windows, batch_size=batch, device=torch.device("cpu"))
        buffers, slots = found.buffers(), table.indices()
        generations = table.reader().slot_states()[1][slots]

        def request(rows: Rows) -> tuple[Any, Any, Any]:
            positions = rows.positions.numpy()
            return slots[positions], rows.anchors.numpy(), generations[positions]

        def work(rows: tuple[Any, Any, Any]) -> None:
            found.gather(buffers, SelectedRows(*rows))

        told: dict[str, Any] = {"parameters": {"block_steps": steps}, "targets": goals}
        return gathered(f"collector, blocks {steps}", work, buffers.batch, request, **told)

    def ours(
        name: str, steps: int, prefetch: int, through: Callable[[Any], Any] = lambda source: source
    ) -> Variant:
        found = dataset(data, tables[steps], batch, device="cpu", prefetch=prefetch)
        source = through(found)
        check = functools.partial(check_dataset, data, found, source)
        told = {"block_steps": steps, "prefetch": prefetch}
        return made(name, iterated(lambda: iter(source), batches), check, batches=batches, parameters=told)

    def map_styled() -> Variant:
        loader, few = map_style(data, batch, numbered=True), max(2, batches // 8)
        check = functools.partial(check_map_style, data, loader)
        return made("DataLoader, map-style", iterated(lambda: iter(loader), few), check, batches=few)

    variants += [collector(steps, table) for steps, table in tables.items()]
    for steps, prefetch in itertools.product(tables, PREFETCH):
        variants.append(ours(f"dataset, blocks {steps}, prefetch {prefetch}", steps, prefetch))
    for name, way in plain.items():
        variants.append(gathered(name, way.gather, way.batch))
    if workload.anchor == "first":
        stacked = data.stacked
        fancy = lambda rows: {name: values[rows.positions] for name, values in stacked.items()}  # noqa: E731
        variants += [gathered("x[idx]", fancy, None), map_styled()]
    through = functools.partial(DataLoader, batch_size=None)
    variants.append(ours("DataLoader, dataset", BLOCK_STEPS[0], PREFETCH[-1], through))
    parameters = {"batch": batch, "trajectories": workload.trajectories}
    label = f"{workload.name}, batch {batch}"
    session.compare(workload.name, label, variants, "memcpy", parameters, references)
