"""Short tables of what ``collect --device cuda`` measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.copies_gpu import BATCHED, SINGLE
from benchmarks.engine import YARDSTICK
from benchmarks.harness import Result, Session, grid, size, verdict

__all__ = ["best", "show_copies", "show_programs", "show_sweep", "show_verdict", "show_workload"]


def _kernels(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if "programs" in result.variant.parameters]


def best(results: Sequence[Result]) -> dict[tuple[int, int], Result]:
    """(row bytes, batch) -> the result with the program count that gave the highest ratio."""
    found: dict[tuple[int, int], Result] = {}
    for result in _kernels(results):
        key = result.comparison.parameters["row_bytes"], result.comparison.parameters["batch"]
        if key not in found or result.ratio(YARDSTICK) > found[key].ratio(YARDSTICK):
            found[key] = result
    return found


def _matrix(
    session: Session,
    title: str,
    corner: str,
    rows: Sequence[Any],
    columns: Sequence[Any],
    cell: Callable[[Any, Any], str],
) -> None:
    table = grid(title)
    table.add_column(corner, no_wrap=True)
    for head in columns:
        table.add_column(str(head), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row), *(cell(row, column) for column in columns))
    session.console.print(table)


def show_workload(session: Session, results: Sequence[Result]) -> None:
    """Variants by batch and block size: GB/s and share of the copy engine's rate; the host's time a batch."""
    found = {}
    for result in results:
        parameters = result.comparison.parameters
        found[result.variant.name, (parameters["batch"], parameters["block_steps"])] = result
    names = list(dict.fromkeys(name for name, _ in found))
    columns = sorted({column for _, column in found})

    def cell(name: str, column: tuple[int, int]) -> str:
        result = found.get((name, column))
        if result is None:
            return "-"
        host = result.extras.get("host_seconds", result.extras.get("launch_seconds"))
        time = f" {host * 1e6:.0f}µs" if host is not None else ""
        return f"{result.gb_per_s:.1f} {result.ratio(YARDSTICK):.2f}{time}"

    if results:
        title = f"{results[0].comparison.workload}: GB/s, share of {YARDSTICK}, host time a batch"
        _matrix(session, title, "variant \\ batch, block steps", names, columns, cell)


def show_sweep(session: Session, results: Sequence[Result], what: str) -> None:
    """Rows by batch: GB/s, share of the copy engine's rate and number of programs, at the best number of them."""
    chosen = best(results)

    def cell(row: int, batch: int) -> str:
        result = chosen.get((row, batch))
        if result is None:
            return "-"
        return f"{result.gb_per_s:.1f} {result.ratio(YARDSTICK):.2f} p{result.variant.parameters['programs']}"

    rows, batches = (sorted({key[i] for key in chosen}) for i in range(2))
    if rows:
        title = f"Kernel, {what}: GB/s, share of {YARDSTICK}, programs"
        _matrix(session, title, "row, B \\ batch", rows, batches, cell)


def show_programs(session: Session, results: Sequence[Result]) -> None:
    """Programs by rows, for the largest batch: share of the copy engine's rate."""
    kernels = _kernels(results)
    if not kernels:
        return
    largest = max(result.comparison.parameters["batch"] for result in kernels)
    ratios = {}
    for result in kernels:
        if result.comparison.parameters["batch"] == largest:
            place = result.variant.parameters["programs"], result.comparison.parameters["row_bytes"]
            ratios[place] = result.ratio(YARDSTICK)
    programs, rows = (sorted({key[i] for key in ratios}) for i in range(2))
    title = f"Kernel, batch {largest}: share of {YARDSTICK}"
    _matrix(session, title, "programs \\ row, B", programs, rows, lambda p, row: f"{ratios[p, row]:.2f}")


def show_copies(session: Session, results: Sequence[Result]) -> None:
    """Rows by batch: the kernel's rate over that of the driver's copies, with its best number of programs."""
    chosen = best(results)
    keys = [(r.comparison.parameters["row_bytes"], r.comparison.parameters["batch"]) for r in results]
    copies = {(r.variant.name, key): r for key, r in zip(keys, results, strict=True)}

    def cell(row: int, batch: int) -> str:
        parts = []
        for name in (BATCHED, SINGLE):
            result = copies.get((name, (row, batch)))
            parts.append("-" if result is None else f"{chosen[row, batch].gb_per_s / result.gb_per_s:.2f}")
        return " ".join(parts)

    found = [key for name, key in copies if name in (BATCHED, SINGLE)]
    rows, batches = (sorted({key[i] for key in found}) for i in range(2))
    if rows:
        title = f"Kernel, rate over that of {BATCHED}, and of {SINGLE}"
        _matrix(session, title, "row, B \\ batch", rows, batches, cell)


def show_verdict(session: Session, results: Sequence[Result]) -> None:
    """For each row size with a target: the best share among program counts, for the largest batch."""
    chosen = best(results)
    largest = max((batch for _, batch in chosen), default=0)
    for (row, batch), result in sorted(chosen.items()):
        if batch == largest and result.variant.targets:
            ratio, target = result.ratio(YARDSTICK), result.variant.targets[YARDSTICK]
            what = f"rows of {size(row)}, batch {batch}, {result.variant.name}"
            text = f"{what}: {ratio:.3f}, target {target:.2f}: {verdict(result.ratios[YARDSTICK], target)}"
            session.console.print(text, highlight=False)
