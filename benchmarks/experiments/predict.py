"""``python -m benchmarks predict``: what the gather kernel should reach on a GPU, by a model of the bus; not measured.

A batch takes as long as the slowest of four, plus a launch:

bus        all bytes at the rate of the link, where each request of 128 bytes carries a header;
programs   each program has a ring of tiles under way, and requests the lines of a tile before it stores another. The
           first waits for the loads that lead to a line's address too;
requests   the bytes that the GPU may have outstanding, once in each latency;
rows       each row lies on a page of its own, whose address is translated first.

Counted: the tiles and requests of a batch. Emulated: the time of a program for a tile, beside the bus (`WORK`).
Assumed: what `BUSES` states, and the latencies of tests/tools/emulation/timing.py. Fitted to what a H100 on PCIe 5.0
measured (benchmarks/results/collect-cuda.jsonl) with tiles of 16 KiB, two of them under way: `LAUNCH`, `WALK`, `ROW`.
`PUBLISHED` holds figures that others have measured, which the model has to reproduce within a fifth.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.showing import grid, standard_console
from gear_loader.kernels.gather import launch_options

LINE = 128
HEADER = 24
"""Bytes of a completion beside its payload: header, sequence number, checksum and framing."""

WORK = {(16, 256): 1.6e-6, (16, 128): 1.35e-6, (4, 128): 2.0e-6, (1, 128): 3.9e-6}
"""Seconds of a program for a tile of 256 units beside the wait for its lines, by word size and bytes of a unit: its
instructions, issued in order."""

CHAIN = 3 * 0.35e-6
"""Seconds of three loads from the GPU's memory, one after another, before the first line's address is known."""

LAUNCH = 2e-6
"""Seconds of a launch within a CUDA graph."""

WALK = 2.6e-6
"""Seconds that a tile waits longer than for a read of host memory, because its rows' pages have to be found."""

ROW = 18e-9
"""Seconds of a row's page, one after another."""

COPY_SETUP, COPY_RATE = 0.6e-6, 9.5e9
"""Seconds that a copy engine takes for each piece of a batched copy, and its bytes a second within one; fitted to two
published figures, for pieces of 4 to 16 KiB on Gen5 alone: a large copy fills the link."""


@dataclasses.dataclass(frozen=True)
class Bus:
    """What is assumed of a bus.

    Attributes:
        rate: bytes a second of the link. latency: seconds of a read of host memory.
        outstanding: requests of 128 bytes that the GPU may have under way.
    """

    rate: float
    latency: float
    outstanding: int

    def reads(self, request: int = LINE) -> float:
        """Bytes a second of requests of this size, as many as may be outstanding."""
        return min(self.rate * request / (request + HEADER), self.outstanding * request / self.latency)


BUSES = {"Gen4": Bus(31.5e9, 1.4e-6, 768), "Gen5": Bus(63e9, 1.4e-6, 1024)}


def seconds(bus: Bus, row_bytes: int, batch: int, programs: int, *, step_bytes: int = LINE) -> float:
    """Seconds of a batch of rows of adjacent lines, with a grid of so many programs."""
    word = 16 if step_bytes % 16 == 0 else 4 if step_bytes % 4 == 0 else 1
    unit = 2 * LINE if word == 16 and row_bytes > 4 * LINE else LINE
    lines = batch * -(-row_bytes // LINE)
    tiles = -(-lines * LINE // (launch_options(word, unit)["TILE"] * unit))
    first = CHAIN + bus.latency + WALK + WORK[word, unit]
    by_programs = first + (-(-tiles // min(programs, tiles)) - 1) * a_tile(bus, word, unit)
    return LAUNCH + max(lines * LINE / bus.reads(), by_programs, batch * ROW)


def a_tile(bus: Bus, word: int, unit: int, walk: float = WALK) -> float:
    """Seconds of a program from tile to tile, on a bus that is idle: by its instructions, or by Little's law."""
    return max(WORK[word, unit], (bus.latency + walk) / (launch_options(word, unit)["STAGES"] - 1))


def predicted(bus: Bus, row_bytes: int, batch: int, programs: int, *, step_bytes: int = LINE) -> float:
    """Bytes a second of useful rows."""
    return row_bytes * batch / seconds(bus, row_bytes, batch, programs, step_bytes=step_bytes)


def copied(piece_bytes: int) -> float:
    """Bytes a second of cudaMemcpyBatchAsync with pieces of 4 to 16 KiB, one after another, on Gen5."""
    return piece_bytes / (COPY_SETUP + piece_bytes / COPY_RATE)


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure of others: GB/s, lowest and highest, and what the model says of the same."""

    what: str
    low: float
    high: float
    model: float

    @property
    def ratio(self) -> float:
        """The model's figure over the nearest published one."""
        return self.model / min(max(self.model, self.low), self.high)


PUBLISHED = (
    Published("DGL, zero-copy gather, Gen4, whole grid", 23.9, 25.6, BUSES["Gen4"].reads() / 1e9),
    Published("one block with 64 KB in flight (GB300)", 48.0, 48.0, 64 * 1024 / BUSES["Gen5"].latency / 1e9),
    Published("cudaMemcpyBatchAsync, pieces of 4 KiB (H100)", 4.0, 4.0, copied(4 << 10) / 1e9),
    Published("cudaMemcpyBatchAsync, pieces of 16 KiB (H100)", 7.0, 7.0, copied(16 << 10) / 1e9),
)


def command(
    bus: Annotated[str, typer.Option(help="Gen4 or Gen5.")] = "Gen5",
    beside: Annotated[
        Path | None, typer.Option(help="Rows that a GPU has measured, to compare with.")
    ] = None,
) -> None:
    """Predict the gather's GB/s by row size, batch and programs, or compare predictions with measured rows."""
    if bus not in BUSES:
        raise typer.BadParameter(f"bus is {bus!r}; expected one of {', '.join(BUSES)}.")
    if beside is not None and not beside.is_file():
        raise typer.BadParameter(f"{beside} is not there.")
    console = standard_console()
    if beside is not None:
        rows = [json.loads(line) for line in beside.read_text(encoding="utf-8").splitlines()]
        console.print(_beside(BUSES[bus], bus, rows))
        return
    for table in _tables(bus):
        console.print(table)


def _tables(bus: str) -> Iterable[Table]:
    sizes = (128, 512, 2048, 8192, 42_000)
    batches, programs = (32, 256, 1024, 4096), (1, 2, 4, 8, 16, 32, 132)
    for batch in batches:
        lines = [
            [f"{size:,}", *(f"{predicted(BUSES[bus], size, batch, count) / 1e9:.1f}" for count in programs)]
            for size in sizes
        ]
        title = f"Predicted, not measured: GB/s on {bus}, batch {batch:,}, by programs"
        yield grid(title, ["row bytes", *map(str, programs)], lines)
    yield grid(
        "Figures of others, GB/s",
        ["what", "published", "model", "ratio"],
        [
            [each.what, f"{each.low:g} to {each.high:g}", f"{each.model:.1f}", f"{each.ratio:.2f}"]
            for each in PUBLISHED
        ],
    )


def _beside(bus: Bus, name: str, rows: Iterable[dict[str, Any]]) -> Table:
    """Measured rows of the kernel, and what the model says of them."""
    lines = []
    for row in rows:
        told = row.get("parameters", {})
        if not (row.get("variant", "").startswith("kernel") and told.get("programs") and "row_bytes" in told):
            continue
        sizes = told["row_bytes"], told["batch"], told["programs"]
        model = predicted(bus, *sizes, step_bytes=told.get("step_bytes", LINE)) / 1e9
        found = row["gb_per_s"]["p50"]
        lines.append(
            [row["label"], str(told["programs"]), f"{found:.2f}", f"{model:.2f}", f"{found / model:.2f}"]
        )
    heads = ["rows", "programs", "measured", "predicted", "measured / predicted"]
    return grid(f"Measured, and predicted for {name}: GB/s", heads, lines)
