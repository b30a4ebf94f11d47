"""`gear-loader top`: what goes into tables and out of them, again and again, in a terminal."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

from gear_loader.errors import GearError
from gear_loader.storage import counters as at
from gear_loader.storage import shared_memory
from gear_loader.storage.layout import read_counters
from gear_loader.storage.tier_state import TierState
from gear_loader.transport.remote_table import RemoteTable, connect
from gear_loader.utils.formatting import printable

__all__ = ["CounterSample", "read_file", "sources", "watch"]

Source = Callable[[], "CounterSample"]


@dataclasses.dataclass(frozen=True)
class CounterSample:
    """The counters of a table at one time.

    Attributes:
        time: seconds, of `time.monotonic`. trajectories, steps: live ones.
        most_steps: steps that the table may hold.
        inserted, sampled, removed: trajectories added, rows drawn, and trajectories evicted or expired, so far.
        writing: trajectories being written.
        insert_wait, sample_wait: seconds that writers and readers of all processes have waited so far.
        disk: trajectories on disk only, rows of batches in memory and read from disk, and bytes read, so far; None
            without a disk tier.
    """

    time: float
    trajectories: int
    steps: int
    most_steps: int
    inserted: int
    sampled: int
    removed: int
    writing: int
    insert_wait: float
    sample_wait: float
    disk: tuple[int, int, int, int] | None = None


def read_file(path: str) -> CounterSample:
    """The counters of a table in shared memory, without attaching to it and without its lock.

    Raises:
        RegionError: the file is no table. OSError: it cannot be read.
    """
    with shared_memory.opened(path) as file:
        layout, values = read_counters(file.fd, file.info.st_size)
        tier = TierState.read(file.fd, layout, values)
    return CounterSample(
        time.monotonic(),
        values[at.NUM_READY],
        values[at.NUM_STEPS],
        layout.max_steps,
        values[at.NEXT_SEQUENCE] - values[at.FIRST_SEQUENCE],
        values[at.NUM_SAMPLED],
        values[at.NUM_EVICTED] + values[at.NUM_EXPIRED] + values[at.NUM_OUTDATED],
        values[at.NUM_WRITING],
        values[at.INSERT_WAIT] / 1e9,
        values[at.SAMPLE_WAIT] / 1e9,
        None if tier is None else (tier.spilled, tier.hits, tier.misses, tier.read_bytes),
    )


def _read_remote(table: RemoteTable) -> CounterSample:
    report = table.report()
    found = report.stats
    return CounterSample(
        time.monotonic(),
        found.num_trajectories,
        found.num_steps,
        report.max_steps,
        found.num_inserted,
        found.num_sampled,
        found.num_evicted + found.num_expired + found.num_outdated,
        found.num_writing,
        found.insert_wait,
        found.sample_wait,
        (found.num_spilled, found.num_hits, found.num_misses, found.miss_bytes) if report.has_disk else None,
    )


def sources(
    names: Iterable[str], path_of: Callable[[str], str], *, secret_file: str | None
) -> dict[str, Source]:
    """What reads each table: a file of shared memory by its name, or a server's table by its address.

    Raises:
        GearError: a server cannot be reached, or refuses.
    """
    found: dict[str, Source] = {}
    for name in names:
        if "://" in name:
            table = connect(name, secret_file=secret_file, timeout=10.0)
            found[name] = functools.partial(_read_remote, table)
        else:
            found[name] = functools.partial(read_file, path_of(name))
    return found


def watch(look: Callable[[], dict[str, Source]], *, interval: float, count: int | None) -> None:
    """Show the tables until interrupted, or `count` times.

    In a terminal each display replaces the one before; in a file or a pipe they follow each other. Rates are since the
    display before, so the first one has none.

    Args:
        look: what reads each table; called for every display, so that tables may come and go.
        interval: seconds between displays.
    """
    console = Console()
    displays = _displays(look, interval, count)
    try:
        if not console.is_terminal:
            console = Console(width=160)
            for display in displays:
                console.print(display)
            return
        with Live(console=console, auto_refresh=False, transient=False) as live:
            for display in displays:
                live.update(display, refresh=True)
    except KeyboardInterrupt:
        return


def _displays(look: Callable[[], dict[str, Source]], interval: float, count: int | None) -> Iterator[Group]:
    before: dict[str, CounterSample] = {}
    number = 0
    while True:
        now: dict[str, CounterSample] = {}
        problems: dict[str, str] = {}
        for name, read in look().items():
            try:
                now[name] = read()
            except FileNotFoundError:
                problems[name] = "it is not there"
            except (GearError, OSError) as error:
                problems[name] = " ".join(str(error).split())
        yield _display(now, before, problems)
        number += 1
        if number == count:
            return
        before = now
        time.sleep(interval)


def _display(
    now: dict[str, CounterSample], before: dict[str, CounterSample], problems: dict[str, str]
) -> Group:
    """A line for each table, one for each disk tier, and one for each problem; narrow terminals fold the names."""
    grid = _grid("TRAJECT.", "STEPS", "FULL", "ADDED/s", "DRAWN/s", "GONE/s", "WRITING", "WAITING")
    tiers = _grid("ON DISK", "HITS", "READ B/s")
    for name, reading in now.items():
        grid.add_row(Text(printable(name)), *map(Text, _cells(reading, before.get(name))))
        if reading.disk is not None:
            tiers.add_row(Text(printable(name)), *map(Text, _disk_cells(reading, before.get(name))))
    if not now and not problems:
        grid.add_row(Text("no tables"))
    lines = (f"{printable(name)}: {printable(problem, 500)}" for name, problem in problems.items())
    grids = [grid, tiers] if tiers.row_count else [grid]
    return Group(*grids, *(Text(line, style="yellow") for line in lines))


def _grid(*titles: str) -> Grid:
    """A grid without lines: names, and numbers under these titles."""
    grid = Grid(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    grid.add_column("TABLE", overflow="fold", min_width=8)
    for title in titles:
        grid.add_column(title, justify="right", no_wrap=True)
    return grid


def _cells(now: CounterSample, before: CounterSample | None) -> tuple[str, ...]:
    counts = (_short(now.trajectories), _short(now.steps), f"{now.steps / now.most_steps:.0%}")
    if before is None or now.inserted < before.inserted or now.time <= before.time:
        return (*counts, "-", "-", "-", str(now.writing), "-")
    seconds = now.time - before.time

    def rate(attribute: str) -> float:
        return (getattr(now, attribute) - getattr(before, attribute)) / seconds  # type: ignore[no-any-return]

    rates = (_short(rate(name)) for name in ("inserted", "sampled", "removed"))
    # Seconds waited a second: how many wait at the same time, on average.
    waiting = f"{rate('insert_wait'):.1f}+{rate('sample_wait'):.1f}"
    return (*counts, *rates, str(now.writing), waiting)


def _disk_cells(now: CounterSample, before: CounterSample | None) -> tuple[str, str, str]:
    """Trajectories on disk only, share of the rows that were in memory, and bytes read a second."""
    assert now.disk is not None, "the table has a disk tier"
    spilled, hits, misses, size = now.disk
    if before is None or before.disk is None or size < before.disk[3] or now.time <= before.time:
        return _short(spilled), "-", "-"
    hits, misses, size = hits - before.disk[1], misses - before.disk[2], size - before.disk[3]
    rate = f"{hits / (hits + misses):.0%}" if hits + misses else "-"
    return _short(spilled), rate, _short(size / (now.time - before.time))


def _short(value: float) -> str:
    """A number in at most six characters: 999, 12.3k, 4.56M."""
    for power, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power * 0.99995:
            return f"{value / power:.3g}{unit}"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
