"""`load_dataset`: a table of a data set by its name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from gear_loader.errors import SourceError
from gear_loader.sources.source_loading import load
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import flag

_KIND = re.compile(r"[a-z][a-z0-9_-]+")
_OPENERS: dict[str, Callable[[str], Any]] = {"minari": lambda name: name}


def register(kind: str, opener: Callable[[str], Any]) -> None:
    """Make names ``kind:...`` known to `gear_loader.load_dataset`, in this process.

    Args:
        kind: lower-case letters, digits, ``-`` and ``_``, at least two.
        opener: gets what follows the colon; returns what `load` takes: a reader, or an iterable of episodes.

    Raises:
        SourceError: an invalid kind, or one that is known already.

    Example: ``gear.sources.register("mine", lambda name: read_episodes(f"/data/{name}"))``, and then
    ``gear.load_dataset("mine:door")``.
    """
    if not isinstance(kind, str) or not _KIND.fullmatch(kind) or not callable(opener):
        raise SourceError(
            f"kind {shown(kind)} and opener {shown(opener)} were received; expected a name such as 'mine', and a "
            "function."
        )
    if kind in _OPENERS:
        raise SourceError(
            f"The kind {kind!r} is known already; expected a new one, other than {list(_OPENERS)}."
        )
    _OPENERS[kind] = opener


def load_dataset(
    source: str | os.PathLike[str], /, table: Table | None = None, *, download: bool = True, **options: Any
) -> Table:
    """Make a table of a data set, or add it to one::

        table = gear.load_dataset("minari:D4RL/door/human-v2")      # fetched if it is not on this machine
        table = gear.load_dataset("hopper_medium.hdf5")             # a file, as `gear_loader.sources.load` takes it
        batch = table.sample(256)

    Args:
        source: ``minari:ID``, another kind that `gear_loader.sources.register` has made known, or the path of a file or
            of the directory of a Minari data set.
        table: the table to add to; None makes one of the source's size.
        download: whether to fetch a Minari data set that is not on this machine.
        options: as for `gear_loader.sources.load`.

    Returns:
        The table.

    Raises:
        SourceError: an unknown kind, or as `gear_loader.sources.load`. The table is as before.
        ImportError: a package that the source needs is not installed.
    """
    flag("download", download)
    if isinstance(source, str) and not os.path.exists(source):
        kind, colon, name = source.partition(":")
        if colon and kind in _OPENERS:
            return load(_OPENERS[kind](name), table, download=download and kind == "minari", **options)
        if colon and _KIND.fullmatch(kind):
            raise SourceError(
                f"The prefix of {source!r} is not known; expected one of {[f'{each}:' for each in _OPENERS]}, or the "
                "path of a file."
            )
    if not isinstance(source, (str, os.PathLike)):
        raise SourceError(
            f"{shown(source)} was received; expected a name such as 'minari:D4RL/door/human-v2', or a path. "
            "gear_loader.sources.load takes readers and episodes."
        )
    return load(source, table, **options)
