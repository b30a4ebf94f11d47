"""The command line; each command is a module of its own that is registered here."""

from __future__ import annotations

import typer

from benchmarks import (
    collect,
    multi_server,
    multi_server_plot,
    online,
    online_plot,
    scaling_simulation,
    select,
    select_plot,
)

app = typer.Typer(
    help="Benchmarks of Gear Loader.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("collect")(collect.command)
app.command("select")(select.command)
app.command("select-plot")(select_plot.command)
app.command("online")(online.command)
app.command("online-plot")(online_plot.command)
app.command("multi-server")(multi_server.command)
app.command("multi-server-plot")(multi_server_plot.command)
app.command("scaling")(scaling_simulation.command)


@app.callback()
def _main() -> None:
    """Benchmarks of Gear Loader."""


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
