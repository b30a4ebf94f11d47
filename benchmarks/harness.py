"""How every benchmark measures: correctness first, variants in turn, quantiles, one JSON line a measurement."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.showing import grid, quantiles, size, standard_console, verdict

__all__ = [
    "RESULTS",
    "Amount",
    "Comparison",
    "Deadline",
    "Incorrect",
    "Left",
    "Result",
    "Session",
    "Variant",
    "grid",
    "per_batch",
    "quantiles",
    "size",
    "verdict",
]

RESULTS = Path(__file__).resolve().parent / "results"
_MIRRORED = {"p10": "p90", "p50": "p50", "p90": "p10"}  # the slow end of times is the low end of rates


class Incorrect(Exception):
    """A variant's result is not the expected one: nothing of it is timed."""


@dataclasses.dataclass
class Variant:
    """One way of doing the work that a comparison is about.

    Attributes:
        name: how rows and tables call it.
        measure: do `batches` batches on inputs it has not seen before, and return the seconds they took.
        check: raise `Incorrect` unless it gives the right result.
        amount: useful bytes of a batch, or its rows: whatever the comparison counts in.
        batches: batches of one measurement.
        parameters: what sets it apart, beside the comparison's parameters.
        targets: name of another variant -> the least ratio of throughputs aimed for.
        extras: further figures, asked for after the last measurement.
        limit: seconds that a batch should take at most.
    """

    name: str
    measure: Callable[[], float]
    check: Callable[[], None]
    amount: int
    batches: int
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    extras: Callable[[], Mapping[str, float]] | None = None
    limit: float | None = None


@dataclasses.dataclass
class Comparison:
    """Variants that are measured in turn and compared with a yardstick among them.

    Attributes:
        experiment, workload: names, for the rows.
        label: how tables call it.
        variants: the yardstick and the references are among them.
        yardstick: the variant that ratios are relative to.
        references: further variants that ratios are relative to.
        parameters: what all variants share.
        unit: what amounts are counted in; only bytes have a rate in GB/s.
    """

    experiment: str
    workload: str
    label: str
    variants: Sequence[Variant]
    yardstick: str
    references: Sequence[str] = ()
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unit: Literal["bytes", "rows"] = "bytes"


@dataclasses.dataclass
class Result:
    """What was measured of one variant.

    Attributes:
        variant, comparison: of what; without what was needed to measure it.
        seconds: float64 [repeats], of one batch.
        ratios: name of another variant -> float64 [repeats]: this one's throughput over that one's in the same
            turn, so that a disturbance which lasts longer than a turn cancels out.
        extras: the variant's further figures.
    """

    variant: Variant
    comparison: Comparison
    seconds: np.ndarray
    ratios: dict[str, np.ndarray]
    extras: dict[str, float]

    @property
    def gb_per_s(self) -> float:
        """Median throughput in 10^9 bytes a second."""
        return self.variant.amount / float(np.median(self.seconds)) / 1e9

    def ratio(self, name: str) -> float:
        """Median ratio to another variant."""
        return float(np.median(self.ratios[name]))

    def row(self) -> dict[str, Any]:
        """The measurement's own part of its JSON line."""
        variant, comparison, seconds = self.variant, self.comparison, quantiles(self.seconds)
        amount: dict[str, Any] = {comparison.unit: variant.amount}
        if comparison.unit == "bytes":
            rates = {name: variant.amount / seconds[other] / 1e9 for name, other in _MIRRORED.items()}
            amount["gb_per_s"] = rates
        return {
            "experiment": comparison.experiment,
            "workload": comparison.workload,
            "label": comparison.label,
            "variant": variant.name,
            "parameters": {**comparison.parameters, **variant.parameters},
            "repeats": len(self.seconds),
            "batches_per_repeat": variant.batches,
            "seconds": seconds,
            **amount,
            "yardstick": comparison.yardstick,
            "ratio": quantiles(self.ratios[comparison.yardstick]),
            "ratios": {name: quantiles(self.ratios[name]) for name in comparison.references},
            "targets": dict(variant.targets),
            **({} if variant.limit is None else {"limit": variant.limit}),
            "extras": self.extras,
        }


@dataclasses.dataclass
class Amount:
    """Figures that are no times of batches: memory, a return, a slowdown.

    Attributes:
        experiment, workload, label, variant: as in a `Comparison`.
        values: one a repeat.
        unit: what they count, such as ``"bytes in use / byte of payload"``.
        parameters: what sets it apart.
        at_most, at_least: what is aimed for.
        extras: further figures.
    """

    experiment: str
    workload: str
    label: str
    variant: str
    values: Sequence[float]
    unit: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    at_most: float | None = None
    at_least: float | None = None
    extras: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The measurement's own part of its JSON line."""
        goals = {"at_most": self.at_most, "at_least": self.at_least}
        return {
            "experiment": self.experiment,
            "workload": self.workload,
            "label": self.label,
            "variant": self.variant,
            "parameters": dict(self.parameters),
            "repeats": len(self.values),
            "amount": quantiles(np.array(self.values, dtype=np.float64)),
            "unit": self.unit,
            **{name: goal for name, goal in goals.items() if goal is not None},
            "extras": dict(self.extras),
        }


class Deadline:
    """A point in time after which no new measurement is started; infinitely far away by default."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + minutes * 60
        self.left_out: list[str] = []

    def passed(self, what: str) -> bool:
        """Whether it is too late to start `what`, which is then noted as left out."""
        late = self._end is not None and time.monotonic() > self._end
        if late:
            self.left_out.append(what)
        return late


class Session:
    """One run of a command: measures comparisons, appends their rows to a file and shows them.

    Args:
        out: file to append to; its folder is made.
        experiment: whose run this is.
        configuration: the command's options, for the rows.
        device: name of the device that is measured.
        repeats: turns that each variant gets.
        console: where to; by default standard output.
        deadline: when to stop starting comparisons.
        pause: seconds before each measurement, in which the threads of the variant before it go to sleep.
    """

    def __init__(
        self,
        out: Path,
        *,
        experiment: str = "",
        configuration: Mapping[str, Any],
        device: str,
        repeats: int,
        console: Console | None = None,
        deadline: Deadline | None = None,
        pause: float = 0.0,
    ) -> None:
        self.out, self.experiment = out, experiment
        self.console = console if console is not None else standard_console()
        self.deadline = deadline if deadline is not None else Deadline(None)
        self.repeats = repeats
        self.results: list[Result] = []
        self.amounts: list[Amount] = []
        self._pause = pause
        self._description = machine.describe()
        self._context = {
            "configuration": dict(configuration),
            "device": device,
            "machine": self._description,
            "versions": machine.versions(),
            **machine.code(),
            "run": uuid.uuid4().hex[:12],
        }
        self._advance: Callable[[], None] = lambda: None

    # ---------------------------------------------------------------- measuring

    def run(self, comparison: Comparison) -> list[Result]:
        """Check every variant, then measure them in turn; append the rows.

        Raises:
            Incorrect: naming the variant; nothing was timed.
        """
        names = [variant.name for variant in comparison.variants]
        missing = {comparison.yardstick, *comparison.references} - set(names)
        assert not missing, missing
        assert len(set(names)) == len(names), names
        for variant in comparison.variants:
            try:
                variant.check()
            except Incorrect as error:
                raise Incorrect(f"{variant.name}, {comparison.label}: {error}") from error
        seconds: dict[str, list[float]] = {name: [] for name in names}
        gc.collect()
        gc.disable()
        try:
            for _ in range(self.repeats):
                for variant in comparison.variants:
                    time.sleep(self._pause)
                    seconds[variant.name].append(variant.measure() / variant.batches)
                self._advance()
        finally:
            gc.enable()
        rates = {v.name: v.amount / np.array(seconds[v.name]) for v in comparison.variants}
        others = (comparison.yardstick, *comparison.references)
        # A variant can hold gigabytes: results keep its description only.
        bare = dataclasses.replace(comparison, variants=())
        results = [
            Result(
                dataclasses.replace(v, measure=_over, check=_over, extras=None),
                bare,
                np.array(seconds[v.name]),
                {name: rates[v.name] / rates[name] for name in others},
                dict(v.extras()) if v.extras is not None else {},
            )
            for v in comparison.variants
        ]
        for result in results:
            self._append(result.row())
        self.results.extend(results)
        return results

    def record(self, amount: Amount) -> Amount:
        """Append a figure that is no time."""
        self._append(amount.row())
        self.amounts.append(amount)
        return amount

    def leave(self, what: str, why: str, verdict: str = "left out") -> None:
        """Append that something is not measured, or not what it should be, and why: reports say so too."""
        self._append({"experiment": self.experiment, "left_out": what, "why": why, "verdict": verdict})

    def _append(self, row: Mapping[str, Any]) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **self._context, "date": now}) + "\n")

    # ---------------------------------------------------------------- showing

    @contextmanager
    def progress(self, what: str, comparisons: int) -> Iterator[None]:
        """A progress bar over the turns of that many comparisons; on a terminal only."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        ) as bar:
            task = bar.add_task(what, total=comparisons * self.repeats)
            self._advance = lambda: bar.advance(task)
            try:
                yield
            finally:
                self._advance = lambda: None

    def show_machine(self) -> None:
        """Print what is measured on, with what."""
        about, context = self._description, self._context
        cache = about["last_level_cache_bytes"]
        parts = [
            f"{about['cpu']}, {about['cores']} cores, {size(about['memory_bytes'])} memory, "
            f"largest cache {size(cache) if cache else 'unknown'}, huge pages {about['huge_pages']}, "
            f"load {about['load']}",
        ]
        if about["gpu"]:
            parts.append(", ".join(f"{key} {value}" for key, value in about["gpu"].items()))
        parts.append(", ".join(f"{key} {value or 'missing'}" for key, value in context["versions"].items()))
        dirty = {True: " with changes", False: "", None: " as the environment says"}[context["dirty"]]
        commit = f"{context['commit'][:12]}{dirty}" if context["commit"] else "unknown"
        parts.append(f"commit {commit}, source {context['source']}, {self.repeats} repeats")
        for part in parts:
            self.console.print(part, style="dim", highlight=False)
        if about["load"] > 0.25 * about["cores"]:
            text = f"Other programs are running (load {about['load']}, {about['cores']} cores): figures will be off."
            self.console.print(text, style="yellow", highlight=False)

    def show(self, results: Sequence[Result]) -> None:
        """Print a comparison as a table."""
        comparison = results[0].comparison
        others = (comparison.yardstick, *comparison.references)
        table = grid(comparison.label)
        table.add_column("variant", no_wrap=True)
        rate = ("GB/s",) if comparison.unit == "bytes" else ()
        for head in ("batch, µs", "p10 – p90", *rate, *(f"× {name}" for name in others)):
            table.add_column(head, justify="right")
        for result in results:
            low, mid, high = (value * 1e6 for value in quantiles(result.seconds).values())
            cells = [f"{mid:,.0f}", f"{low:,.0f} – {high:,.0f}", *(f"{result.gb_per_s:.2f}" for _ in rate)]
            table.add_row(
                escape(result.variant.name), *cells, *(f"{result.ratio(name):.2f}" for name in others)
            )
        self.console.print(table)

    def show_targets(self) -> None:
        """Print the ratios that have a target; then the times that have a limit."""
        table = grid("Targets")
        table.add_column("comparison")
        for head in ("variant", "relative to"):
            table.add_column(head, no_wrap=True)
        for head in ("ratio", "p10 – p90", "target", ""):
            table.add_column(head, justify="right", no_wrap=True)
        for result in self.results:
            for name, target in result.variant.targets.items():
                low, mid, high = quantiles(result.ratios[name]).values()
                names = (escape(text) for text in (result.comparison.label, result.variant.name, name))
                table.add_row(
                    *names,
                    f"{mid:.2f}",
                    f"{low:.2f} – {high:.2f}",
                    f"{target:.2f}",
                    verdict(result.ratios[name], target),
                )
        if table.row_count:
            self.console.print(table)
        table = grid("Targets")
        for head in ("comparison", "variant"):
            table.add_column(head, no_wrap=True)
        for head in ("µs", "p10 – p90", "at most", ""):
            table.add_column(head, justify="right", no_wrap=True)
        for result in self.results:
            limit = result.variant.limit
            if limit is not None:
                low, mid, high = (value * 1e6 for value in quantiles(result.seconds).values())
                table.add_row(
                    escape(result.comparison.label),
                    escape(result.variant.name),
                    f"{mid:.1f}",
                    f"{low:.1f} – {high:.1f}",
                    f"{limit * 1e6:.0f}",
                    verdict(limit / result.seconds, 1.0),
                )
        if table.row_count:
            self.console.print(table)

    def finish(self) -> None:
        """Print what was left out, and where the rows are."""
        for what in self.deadline.left_out:
            self.console.print(f"left out for lack of time: {what}", style="yellow", highlight=False)
        self.console.print(
            f"{len(self.results) + len(self.amounts)} rows appended to {self.out}",
            highlight=False,
            soft_wrap=True,
        )


def per_batch(draw: Callable[[], Any], work: Callable[[Any], object], batches: int) -> Callable[[], float]:
    """A `Variant.measure` that draws inputs beforehand, does one batch untimed and times the others together."""

    def measure() -> float:
        first, *inputs = [draw() for _ in range(batches + 1)]
        work(first)
        start = time.perf_counter()
        for item in inputs:
            work(item)
        return time.perf_counter() - start

    return measure


def _over() -> Any:
    raise AssertionError("this comparison is over")


class Left:
    """What is left out and why: said at once, and again at the end; the rows have it too."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.reasons: list[str] = []

    def add(self, what: str, why: str, verdict: str = "left out") -> None:
        """Note that something is left out, or not what it should be."""
        self._session.leave(what, why, verdict)
        self.reasons.append(f"{verdict}: {what}: {why}")
        self._print(self.reasons[-1])

    def show(self) -> None:
        """Say all of it again."""
        for reason in self.reasons:
            self._print(reason)

    def _print(self, text: str) -> None:
        self._session.console.print(text, style="yellow", highlight=False, markup=False)
