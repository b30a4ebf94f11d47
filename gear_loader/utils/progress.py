"""A progress bar on standard error, in bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(
    description: str, total: int, *, enabled: bool
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Silent where `enabled` is False, standard error is neither a terminal nor a notebook, or `rich` is missing.

    Yields:
        A function that moves the bar on by so many bytes, and one that adds so many to the total.
    """
    if enabled:
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
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
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal or console.is_jupyter),
    )
    with bar:
        task = bar.add_task(description, total=total)

        def extend(amount: int) -> None:
            nonlocal total
            total += amount
            bar.update(task, total=total)

        yield lambda amount: bar.advance(task, amount), extend


def _ignore(amount: int) -> None:
    del amount
