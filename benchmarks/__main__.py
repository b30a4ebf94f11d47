"""The command line: `list`, `run`, `report`, `compare`, and each experiment with all its own options."""

from __future__ import annotations

import typer

from benchmarks import compare, report, run
from benchmarks.experiments import EXPERIMENTS, predict, scaling

app = typer.Typer(
    help="Benchmarks of Gear Loader.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(run.show)
app.command("run")(run.command)
app.command("report")(report.command)
app.command("compare")(compare.command)
for experiment in EXPERIMENTS:
    app.command(experiment.name, rich_help_panel="Experiments, with all their options")(experiment.command)
app.command("scaling", rich_help_panel="Simulations")(scaling.command)
app.command("predict", rich_help_panel="Simulations")(predict.command)


@app.callback()
def _main() -> None:
    """Benchmarks of Gear Loader."""


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
