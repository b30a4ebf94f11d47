"""``python -m benchmarks list`` and ``run``: which experiments there are, and several of them in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.experiments import EXPERIMENTS, Experiment, named
from benchmarks.harness import RESULTS
from benchmarks.options import Device, Minutes, Out, Peers, Quick, Repeats, Threads
from benchmarks.showing import grid, standard_console

__all__ = ["command", "show"]

ALL = "all"


def show() -> None:
    """List the experiments."""
    console = standard_console()
    table = grid("Experiments")
    table.add_column("name", no_wrap=True)
    for head in ("what is measured", "device", "beside"):
        table.add_column(head)
    for experiment in EXPERIMENTS:
        paper = f"\nthe paper's experiment {experiment.paper}" if experiment.paper else ""
        table.add_row(
            experiment.name,
            escape(experiment.summary) + f"[dim]{paper}[/]",
            ", ".join(experiment.devices),
            ", ".join(experiment.peers) or "–",
        )
    console.print(table)
    console.print(
        "python -m benchmarks run NAME... (or all) [--quick]; python -m benchmarks NAME --help for all options of one; "
        "then python -m benchmarks report.",
        style="dim",
        highlight=False,
    )


def command(
    experiments: Annotated[
        list[str], typer.Argument(help="Names, see `list`; or all.", metavar="EXPERIMENT...")
    ],
    quick: Quick = False,
    device: Annotated[
        Device | None, typer.Option(help="Where batches are wanted: cpu by default.", show_default=False)
    ] = None,
    peers: Peers = None,
    repeats: Repeats = None,
    out: Out = None,
    threads: Threads = None,
    minutes: Minutes = None,
) -> None:
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
    given: dict[str, Any] = {
        "quick": quick or None,
        "device": device.value if device is not None else None,
        "peers": [str(path) for path in peers] if peers else None,
        "repeats": repeats,
        "out": str(out) if out is not None else None,
        "threads": threads,
        "minutes": minutes,
    }
    console = standard_console()
    failed = [experiment.name for experiment in chosen if not _run(console, experiment, given)]
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="bold red", highlight=False)
        raise typer.Exit(1)
    if not quick:
        where = out or Path(RESULTS.name)
        console.print(
            f"python -m benchmarks report draws what lies in {where}.", style="dim", highlight=False
        )


def _run(console: Console, experiment: Experiment, given: dict[str, Any]) -> bool:
    """Whether it came to its end."""
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
