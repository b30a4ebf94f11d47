"""``python -m benchmarks list`` and ``run``: which experiments there are, and several of them in one go."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.experiments import EXPERIMENTS, Experiment, named
from benchmarks.harness import RESULTS
from benchmarks.options import SHARED, Device, signature
from benchmarks.showing import grid, standard_console

ALL = "all"
Names = Annotated[list[str], typer.Argument(help="Names, see `list`; or all.", metavar="EXPERIMENT...")]


def show() -> None:
    """List the experiments."""
    console = standard_console()
    lines = []
    for one in EXPERIMENTS:
        paper = f"\nthe paper's experiment {one.paper}" if one.paper else ""
        lines.append([one.name, one.summary + paper, ", ".join(one.devices), ", ".join(one.peers) or "–"])
    console.print(grid("Experiments", ("name", "what is measured", "device", "beside"), lines, texts=4))
    console.print(
        "python -m benchmarks run NAME... (or all) [--quick]; python -m benchmarks NAME --help for all options of one; "
        "then python -m benchmarks report.",
        style="dim",
        highlight=False,
    )


def command(experiments: Names, **shared: Any) -> None:
    """Run experiments one after another with the options that they share; what one has not, it is not given.

    Rows are appended to benchmarks/results/NAME.jsonl, or to --out. A failure does not keep the others away; the exit
    status is then 1.
    """
    names = [experiment.name for experiment in EXPERIMENTS]
    unknown = [name for name in experiments if name not in (*names, ALL)]
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(unknown)}; expected some of {', '.join(names)}, or {ALL}.", param_hint="EXPERIMENT"
        )
    chosen = [named(name) for name in (names if ALL in experiments else dict.fromkeys(experiments))]
    given = {name: value for name, value in shared.items() if value}
    console = standard_console()
    failed = [experiment.name for experiment in chosen if not _run(console, experiment, given)]
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="bold red", highlight=False)
        raise typer.Exit(1)
    if not shared.get("quick"):
        where = shared.get("out") or Path(RESULTS.name)
        text = f"python -m benchmarks report draws what lies in {where}."
        console.print(text, style="dim", highlight=False)


_OWN = inspect.Parameter("experiments", inspect.Parameter.KEYWORD_ONLY, annotation=Names)
command.__signature__ = signature([_OWN], SHARED)  # type: ignore[attr-defined]
command.__annotations__ = {"experiments": Names, **SHARED}


def _run(console: Console, experiment: Experiment, given: dict[str, Any]) -> bool:
    """Whether it went well."""
    console.rule(f"[bold]{experiment.name}", align="left")
    if given.get("device") is Device.cuda and "cuda" not in experiment.devices:
        console.print(f"{experiment.name} is not measured on cuda: left out", style="yellow", highlight=False)
        return True
    known = inspect.signature(experiment.command)
    for name in given:
        if name not in known.parameters and name != "device":
            console.print(f"{experiment.name} has no --{name}", style="dim", highlight=False)
    bound = known.bind(**{name: value for name, value in given.items() if name in known.parameters})
    bound.apply_defaults()
    try:
        experiment.command(**bound.arguments)
    except typer.BadParameter:
        raise
    except typer.Exit as ended:
        return not ended.exit_code
    except Exception:  # one experiment's failure is no reason to lose the others
        console.print_exception()
        return False
    return True
