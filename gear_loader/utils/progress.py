"""A progress bar on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    description: str, total: int | None, *, enabled: bool, unit: str | None = None
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show a progress bar for as long as the block runs.

    Nothing is shown if `enabled` is False, standard error is neither a terminal nor a notebook, or `rich` is not
    installed.

    Args:
        description: text before the bar.
        total: expected amount, or None if it is not known.
        unit: name of the counted items, such as "steps"; None counts bytes and shows the transfer speed.

    Yields:
        Two functions: one advances the bar by an amount, one adds an amount to the total.
    """
    if enabled:
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
        except ImportError:
            enabled = False
    if not enabled:
        yield _ignore, _ignore
        return
    console = Console(stderr=True)
    amounts = (
        (DownloadColumn(), TransferSpeedColumn())
        if unit is None
        else (MofNCompleteColumn(), TextColumn(unit))
    )
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *amounts,
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal or console.is_jupyter),
    )
    with bar:
        task = bar.add_task(description, total=total)

        def extend(amount: int) -> None:
            nonlocal total
            total = (total or 0) + amount
            bar.update(task, total=total)

        yield lambda amount: bar.advance(task, amount), extend


def _ignore(amount: int) -> None:
    del amount
