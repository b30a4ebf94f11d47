"""How every benchmark measures: correctness first, variants in turn, quantiles, one JSON line a measurement."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import json
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.reporting.findings import targets
from benchmarks.reporting.rows import comparisons
from benchmarks.showing import grid, number, quantiles, size, spread, standard_console

RESULTS = Path(__file__).resolve().parent / "results"
_COLOURS = {"met": "green", "missed": "red", "noisy": "yellow"}
_MIRRORED = {"p10": "p90", "p50": "p50", "p90": "p10"}  # the slow end of times is the low end of rates


class Incorrect(Exception):
    """A variant's result is not the expected one: nothing of it is timed."""


class Unmeasured(Exception):
    """A variant's result is right, but it cannot be timed here: it is left out, whether required or not."""


@dataclasses.dataclass
class Variant:
    """One way of doing the work that a comparison is about; `Incorrect` from `check` means that it does not.

    measure: does `batches` batches on inputs it has not seen before, and returns the seconds they took. amount: useful
    bytes of a batch, or its rows. targets: name of another variant -> the least ratio of throughputs aimed for. extras:
    further figures, asked for after the last measurement. limit: seconds that a batch should take at most. required:
    whether its failure ends the run; other libraries are left out, with the reason.
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
    required: bool = True


@dataclasses.dataclass
class Comparison:
    """Variants that are measured in turn; ratios are relative to the yardstick and the references among them.

    label: how tables call it. unit: what amounts are counted in; only bytes have a rate in GB/s.
    """

    experiment: str
    workload: str
    label: str
    variants: Sequence[Variant]
    yardstick: str
    references: Sequence[str] = ()
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unit: Literal["bytes", "rows"] = "bytes"


class Medians(dict[str, list[float]]):
    """Figures that are noted at each measurement; called, their medians."""

    def note(self, **figures: float) -> None:
        for name, value in figures.items():
            self.setdefault(name, []).append(value)

    def __call__(self) -> dict[str, float]:
        return {name: float(np.median(values)) for name, values in self.items()}


@dataclasses.dataclass
class Result:
    """What was measured of one variant, without what was needed to measure it.

    seconds: float64 [repeats], of one batch. ratios: name of another variant -> float64 [repeats]: this one's
    throughput over that one's in the same turn, so that a disturbance which lasts longer than a turn cancels out.
    """

    variant: Variant
    comparison: Comparison
    seconds: np.ndarray
    ratios: dict[str, np.ndarray]
    extras: dict[str, float]

    def row(self) -> dict[str, Any]:
        """The measurement's own part of its JSON line."""
        variant, comparison, seconds = self.variant, self.comparison, quantiles(self.seconds)
        amount: dict[str, Any] = {comparison.unit: variant.amount}
        if comparison.unit == "bytes":
            rates = {name: variant.amount / seconds[other] / 1e9 for name, other in _MIRRORED.items()}
            amount["gb_per_s"] = rates
        return {
            **_names(comparison, variant.name, {**comparison.parameters, **variant.parameters}),
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
    """Figures that are no times of batches, one a repeat: memory, a return, a slowdown; what is aimed for."""

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
            **_names(self, self.variant, dict(self.parameters)),
            "repeats": len(self.values),
            "amount": quantiles(np.array(self.values, dtype=np.float64)),
            "unit": self.unit,
            **{name: goal for name, goal in goals.items() if goal is not None},
            "extras": dict(self.extras),
        }


def _names(of: Comparison | Amount, variant: str, parameters: dict[str, Any]) -> dict[str, Any]:
    told = {"experiment": of.experiment, "workload": of.workload, "label": of.label}
    return {**told, "variant": variant, "parameters": parameters}


@dataclasses.dataclass(eq=False)
class Session:
    """One run of a command: measures comparisons, appends their rows to a file and shows them.

    configuration: the command's options, for the rows; see `configure`. repeats: turns that each variant gets. minutes:
    after which no comparison is started. pause: seconds before each measurement, in which the threads of the variant
    before it go to sleep. peers: folder of the environments of other libraries. cuda: whether batches are wanted on a
    GPU. rows, amounts: what was measured. reasons: what was not, and why.
    """

    out: Path
    _: dataclasses.KW_ONLY
    experiment: str = ""
    configuration: dataclasses.InitVar[Mapping[str, Any]]
    device: str
    repeats: int
    minutes: dataclasses.InitVar[float | None] = None
    pause: float = 0.0
    quick: bool = False
    threads: int = 1
    peers: Path | None = None

    def __post_init__(self, configuration: Mapping[str, Any], minutes: float | None) -> None:
        self.cuda, self.console = self.device != "cpu", standard_console()
        self.rows: list[Mapping[str, Any]] = []
        self.amounts: list[Amount] = []
        self.reasons: list[str] = []
        self._end = math.inf if minutes is None else time.monotonic() + minutes * 60
        self._late: list[str] = []
        self._context = {
            "configuration": dict(configuration),
            "device": self.device,
            "machine": machine.describe(),
            "versions": machine.versions(),
            **machine.code(),
            "run": uuid.uuid4().hex[:12],
        }
        self._advance: Callable[[], None] = lambda: None

    def configure(self, **options: Any) -> None:
        """Note further options of the command for the rows."""
        self._context["configuration"].update(options)

    def late(self, what: str) -> bool:
        """Whether there is no time left to measure `what`; then that is shown at the end."""
        late = time.monotonic() > self._end
        self._late += [what] * late
        return late

    def each(self, what: str, settings: Sequence[Any], label: Callable[[Any], str]) -> Iterator[Any]:
        """The settings that there is time for, each for one comparison; on a terminal with a progress bar."""
        with self.progress(what, len(settings)):
            for setting in settings:
                if not self.late(label(setting)):
                    yield setting

    # ---------------------------------------------------------------- measuring

    def run(self, comparison: Comparison) -> list[Result]:
        """Check every variant, then measure them in turn; append the rows.

        A variant that is not `required` and fails, or that is `Unmeasured`, is left out with the reason.
        """
        variants = list(comparison.variants)
        names = [variant.name for variant in variants]
        missing = {comparison.yardstick, *comparison.references} - set(names)
        assert not missing, missing
        assert len(set(names)) == len(names), names
        variants = [variant for variant in variants if self.checked(variant, comparison.label)]
        while (seconds := self._measured(variants, comparison.label)) is None:
            pass
        names = [variant.name for variant in variants]
        references = [name for name in comparison.references if name in names]
        rates = {v.name: v.amount / np.array(seconds[v.name]) for v in variants}
        # A variant can hold gigabytes: results keep its description only.
        bare = dataclasses.replace(comparison, variants=(), references=references)
        results = []
        for v in variants:
            targets = {name: target for name, target in v.targets.items() if name in names}
            described = dataclasses.replace(v, measure=_over, check=_over, extras=None, targets=targets)
            ratios = {n: rates[v.name] / rates[n] for n in (comparison.yardstick, *references)}
            extras = dict(v.extras()) if v.extras is not None else {}
            results.append(Result(described, bare, np.array(seconds[v.name]), ratios, extras))
            self._append(results[-1].row())
        return results

    def compare(
        self,
        workload: str,
        label: str,
        variants: Sequence[Variant],
        yardstick: str,
        parameters: Mapping[str, Any],
        references: Sequence[str] = (),
        unit: Literal["bytes", "rows"] = "bytes",
    ) -> None:
        """Measure and show a comparison of this session's experiment; see `Comparison` and `run`."""
        names = (self.experiment, workload, label)
        self.show(self.run(Comparison(*names, variants, yardstick, references, parameters, unit)))

    def attempt(self, what: str, work: Callable[[], Any], *, required: bool = False) -> Any:
        """What `work` gives; None if it fails, which is noted. What is required ends the run instead."""
        try:
            return work()
        except Exception as error:
            if not required or isinstance(error, Unmeasured):
                self.leave(what, reason(error))
                return None
            if isinstance(error, (Incorrect, PeerFailed)):
                kind = PeerFailed if isinstance(error, PeerFailed) else Incorrect
                raise kind(f"{what}: {error}") from error
            raise

    @contextmanager
    def processes(
        self, launches: Mapping[str, Callable[[], PeerProcess]], required: Collection[str] = ()
    ) -> Iterator[dict[str, PeerProcess]]:
        """Processes by name, which end in the end; why one that is not `required` cannot be had is noted."""
        with ExitStack() as stack:
            found: dict[str, PeerProcess] = {}
            for name, launch in launches.items():
                if (process := self.attempt(name, launch, required=name in required)) is not None:
                    stack.callback(process.close)
                    found[name] = process
            yield found

    def checked(self, variant: Variant, label: str) -> bool:
        """Whether it gives the right result; another library that does not is noted as left out."""
        done = self.attempt(f"{variant.name}, {label}", lambda: (variant.check(),), required=variant.required)
        return done is not None

    def _measured(self, variants: list[Variant], label: str) -> dict[str, list[float]] | None:
        """Seconds of a batch, of each turn; None if one has failed, and been left out: then all start again."""
        seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
        gc.collect()
        gc.disable()
        try:
            for _ in range(self.repeats):
                for variant in variants:
                    time.sleep(self.pause)
                    try:
                        seconds[variant.name].append(variant.measure() / variant.batches)
                    except Exception as error:
                        if variant.required and not isinstance(error, Unmeasured):
                            raise
                        self.leave(f"{variant.name}, {label}", reason(error))
                        variants.remove(variant)
                        return None
                self._advance()
        finally:
            gc.enable()
        return seconds

    def record(self, amount: Amount) -> Amount:
        """Append a figure that is no time."""
        self._append(amount.row())
        self.amounts.append(amount)
        return amount

    def leave(self, what: str, why: str, verdict: str = "left out") -> None:
        """Note that something is not measured, or not what it should be: now, at the end, and in the rows."""
        self._append({"experiment": self.experiment, "left_out": what, "why": why, "verdict": verdict})
        self.reasons.append(f"{verdict}: {what}: {why}")
        self.warn(self.reasons[-1])

    def _append(self, row: Mapping[str, Any]) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.out.parent.mkdir(parents=True, exist_ok=True)
        row = {**row, **self._context, "date": now}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if "left_out" not in row:
            self.rows.append(row)

    # ---------------------------------------------------------------- showing

    def warn(self, text: str) -> None:
        self.console.print(text, style="yellow", highlight=False, markup=False)

    @contextmanager
    def progress(self, what: str, comparisons: int) -> Iterator[None]:
        """A progress bar over the turns of that many comparisons; on a terminal only."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        silent = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=silent) as bar:
            task = bar.add_task(what, total=comparisons * self.repeats)
            self._advance = lambda: bar.advance(task)
            try:
                yield
            finally:
                self._advance = lambda: None

    def show_machine(self) -> None:
        """Print what is measured on, with what."""
        about, context = self._context["machine"], self._context
        memory, cache = (about[name] for name in ("memory_bytes", "last_level_cache_bytes"))
        dirty = {True: " with changes", False: "", None: " as the environment says"}[context["dirty"]]
        parts = [
            f"{about['cpu']}, {about['cores']} cores, {size(memory)} memory, largest cache "
            f"{size(cache) if cache else 'unknown'}, huge pages {about['huge_pages']}, load {about['load']}",
            ", ".join(f"{key} {value}" for key, value in (about["gpu"] or {}).items()),
            ", ".join(f"{key} {value or 'missing'}" for key, value in context["versions"].items()),
            f"commit {(context['commit'] or 'unknown')[:12]}{dirty}, source {context['source']}, "
            f"{self.repeats} repeats",
        ]
        for part in filter(None, parts):
            self.console.print(part, style="dim", highlight=False)
        if about["load"] > 0.25 * about["cores"]:
            text = f"Other programs are running (load {about['load']}, {about['cores']} cores): figures will be off."
            self.warn(text)

    def show(self, results: Sequence[Result]) -> None:
        """Print a comparison as a table: times, rates, ratios, further figures."""
        if not results:
            return
        comparison = results[0].comparison
        others, counted = (comparison.yardstick, *comparison.references), comparison.unit == "bytes"
        item = comparison.parameters.get("item", None if counted else "row")
        lines = []
        for result in results:
            name, amount = result.variant.name, result.variant.amount
            inexact = " *" if "bias" in result.variant.parameters else ""  # draws not quite in proportion
            median = float(np.median(result.seconds))
            cells = [name + inexact, *spread(result.seconds * 1e6)]
            cells += [f"{amount / median / 1e9:.2f}"] if counted else []
            cells += [number((1 if counted else amount) / median)] if item else []
            lines.append([*cells, *(f"{np.median(result.ratios[other]):.3g}" for other in others)])
        heads = ["variant", "batch, µs", "p10 – p90", *(["GB/s"] if counted else [])]
        heads += [*([f"{item}/s"] if item else []), *(f"× {name}" for name in others)]
        self._print(comparison.label, heads, lines, [result.extras for result in results])

    def show_amounts(self, amounts: Sequence[Amount]) -> None:
        """Print figures of one label that are no times."""
        if amounts:
            heads = ["variant", amounts[0].unit, "p10 – p90"]
            lines = [[amount.variant, *spread(np.array(amount.values))] for amount in amounts]
            self._print(amounts[0].label, heads, lines, [amount.extras for amount in amounts])

    def _print(
        self,
        title: str,
        heads: list[str],
        lines: Sequence[list[str]],
        extras: Sequence[Mapping[str, float]],
    ) -> None:
        """Print a table, with a column for each of the further figures."""
        names = list(dict.fromkeys(name for each in extras for name in each))
        rows = [
            line + [_extra(name, each) for name in names] for line, each in zip(lines, extras, strict=True)
        ]
        self.console.print(grid(title, heads + [name.replace("_", " ") for name in names], rows))

    def finish(self) -> None:
        """Print targets, what was left out and why, and where the rows are."""
        lines = [
            [aim.label, aim.variant, aim.aim, aim.reached, f"[{_COLOURS[aim.verdict]}]{aim.verdict}[/]"]
            for aim in targets(comparisons(self.rows))
        ]
        if lines:
            heads = ("comparison", "variant", "target", "median (p10 – p90)", "")
            self.console.print(grid("Targets", heads, lines, texts=2))
        for text in (*self.reasons, *(f"left out for lack of time: {what}" for what in self._late)):
            self.warn(text)
        text = f"{len(self.rows)} rows appended to {self.out}"
        self.console.print(text, highlight=False, soft_wrap=True)


def reason(error: Exception) -> str:
    """An error as rows give it: errors of our own by their message alone."""
    known = isinstance(error, (Incorrect, Unmeasured, PeerFailed))
    return str(error) if known else f"{type(error).__name__}: {error}"


def _extra(key: str, extras: Mapping[str, float]) -> str:
    if key not in extras:
        return "–"
    return f"{extras[key]:.1%}" if key.endswith("waiting") else number(extras[key])


def per_batch(
    draw: Callable[[], Any],
    work: Callable[[Any], object],
    batches: int,
    synchronize: Callable[[], object] = lambda: None,
) -> Callable[[], float]:
    """A `Variant.measure` that draws inputs beforehand, does one batch untimed and times the others together."""

    def measure() -> float:
        first, *inputs = [draw() for _ in range(batches + 1)]
        work(first)
        synchronize()
        start = time.perf_counter()
        for item in inputs:
            work(item)
        synchronize()
        return time.perf_counter() - start

    return measure


def _over() -> Any:
    raise AssertionError("this comparison is over")
