"""What lower rooms offer under their own names although higher ones implement it, such as `Table.save`.

The package's front door registers how each part is found; a part is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_finders: list[Callable[[str], Any]] = []


def provide(find: Callable[[str], Any]) -> None:
    """Register the function that returns a part by its name; called once, by ``gear_loader/__init__.py``."""
    _finders[:] = [find]


def provided(name: str) -> Any:
    """The part of this name; the names are those of ``gear_loader/__init__.py``."""
    return _finders[0](name)
