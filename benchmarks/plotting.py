"""What the plots of all experiments have in common: which rows count, and where the picture goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import RESULTS

__all__ = ["Out", "Row", "Rows", "last_of_each", "parsed", "picture"]

Row = Mapping[str, Any]
Rows = Annotated[
    list[Path] | None,
    typer.Argument(help="Files of JSON lines: the experiment's file in results/ by default."),
]
Out = Annotated[Path | None, typer.Option(help="The picture: by default beside the first file.")]


def picture(
    experiment: str,
    rows: Sequence[Path] | None,
    out: Path | None,
    read: Callable[[Iterable[str]], list[Row]],
    draw: Callable[[Sequence[Row], Path], None],
) -> None:
    """Draw an experiment's rows.

    Args:
        rows, out: as given on the command line.
        read: the rows that count, of the lines of all files.
        draw: into a PNG file.
    """
    files = rows or [RESULTS / f"{experiment}.jsonl"]
    for file in files:
        if not file.is_file():
            raise typer.BadParameter(f"{file} is not there; run `python -m benchmarks {experiment}` first.")
    found = read(line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    if not found:
        raise typer.BadParameter(f"there are no rows of `{experiment}` in it.")
    target = out or files[0].with_suffix(".png")
    draw(found, target)
    typer.echo(f"{target}")


def last_of_each(rows: Iterator[Row], key: Callable[[Row], Hashable]) -> list[Row]:
    """Of rows that measure the same the last one, in the order of the file."""
    found: dict[Hashable, Row] = {}
    for row in rows:
        name = key(row)
        found.pop(name, None)
        found[name] = row
    return list(found.values())


def parsed(lines: Iterable[str], experiment: str) -> Iterator[Row]:
    """The rows of one experiment that were measured."""
    for line in lines:
        row = json.loads(line)
        if row["experiment"] == experiment and "left_out" not in row:
            yield row
