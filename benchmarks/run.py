"""``python -m benchmarks list`` and ``run``: which experiments there are, and several of them in one go."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.experiments import EXPERIMENTS, Experiment, named
from benchmarks.harness import RESULTS
from benchmarks.options import SHARED, parameters
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
    given = {name: getattr(value, "value", value) for name, value in shared.items() if value}
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
command.__signature__ = inspect.Signature([_OWN, *parameters(list(SHARED))])  # type: ignore[attr-defined]
command.__annotations__ = {"experiments": Names, **SHARED}


def _run(console: Console, experiment: Experiment, given: dict[str, Any]) -> bool:
    console.rule(f"[bold]{experiment.name}", align="left")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(experiment.command)
    click = typer.main.get_command(app)
    options = {parameter.name: parameter for parameter in click.params}
    arguments: list[str] = []
    for name, value in given.items():
        if value is None:
            continue
        if name == "device" and value not in experiment.devices:
            text = f"{experiment.name} is not measured on {value}: left out"
            console.print(text, style="yellow", highlight=False)
            return True
        if name not in options:
            if name != "device":
                console.print(f"{experiment.name} has no --{name}", style="dim", highlight=False)
            continue
        for one in value if isinstance(value, list) else [value]:
            arguments += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    try:
        code = click.main(arguments, prog_name=experiment.name, standalone_mode=False)
    except typer.Exit as ended:
        code = ended.exit_code
    except Exception as error:  # one experiment's failure is no reason to lose the others
        if type(error).__module__.startswith(("click", "typer")):
            raise
        console.print_exception()
        return False
    return not code
