"""What the sources need beyond the library itself: optional packages and a progress bar."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["progress_bar", "require"]


def require(module: str, purpose: str) -> Any:
    """Import an optional package on first use.

    Raises:
        ImportError: it is not installed; the message names what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs the package {module!r}, which cannot be imported ({error}). "
            "Install it: pip install '.[sources]' (in a clone of Gear Loader)",
            name=module,
        ) from error


@contextlib.contextmanager
def progress_bar(
    description: str, total: int | None, unit: str, *, enabled: bool
) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error for as long as the block runs.

    Silent where `enabled` is False, standard error is neither a terminal nor a notebook, or `rich` is
    missing.

    Yields:
        A function that moves the bar on by so many units.
    """
    if not enabled:
        yield _ignore
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _ignore
        return
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal or console.is_jupyter),
    )
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)


def _ignore(amount: int) -> None:
    del amount
