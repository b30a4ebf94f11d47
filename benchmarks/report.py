"""``python -m benchmarks report``: one self-contained page and its pictures, from the rows of all experiments.

Of rows that measure the same on the same device and machine, the last one counts. Rows of ``--quick`` are left away
where there are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import RESULTS


def command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of JSON lines: all of benchmarks/results/ by default, but quick.jsonl."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the page and the pictures.")] = Path("report"),
) -> None:
    """Draw what was measured: FOLDER/index.html, which needs no other file, and a PNG for each plot."""
    from benchmarks.reporting.rows import BadRow

    chosen = files or sorted(path for path in RESULTS.glob("*.jsonl") if path.name != "quick.jsonl")
    if not chosen:
        raise typer.BadParameter(f"no rows are in {RESULTS}; run `python -m benchmarks run all` first.")
    for file in chosen:
        if not file.is_file():
            raise typer.BadParameter(f"{file} is not there; run `python -m benchmarks run all` first.")
    try:
        pages = write(chosen, out)
    except BadRow as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise typer.BadParameter(f"{error.filename or out}: {error.strerror}.", param_hint="--out") from error
    for path in pages:
        typer.echo(f"{path}")


def write(files: Sequence[Path], out: Path) -> list[Path]:
    """Make the page and the pictures; the page comes last."""
    from benchmarks.reporting import page, pictures, rows

    read = rows.read(files)
    full = [row for row in read if not (row.get("configuration") or {}).get("quick")]
    chosen = full if any("left_out" not in row for row in full) else read
    found = rows.comparisons(chosen)
    if not found:
        raise rows.BadRow(f"no row of {', '.join(map(str, files))} was measured")
    drawn = pictures.draw_all(found)
    text = page.render(chosen, found, drawn, quick=chosen is not full)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in drawn:
        written.append(out / f"{picture.name}.png")
        written[-1].write_bytes(picture.png)
    written.append(out / "index.html")
    written[-1].write_text(text, encoding="utf-8")
    return written
