"""`load_dataset`: a table of a data set by its name."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import listing
from gear_loader.sources.source_loading import Named, load
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import flag

GROUP = "gear_loader.sources"
"""The entry points by which a package adds kinds of names."""

_KIND = re.compile(r"[a-z][a-z0-9_-]+")
# Kinds -> openers, or where these are: imported on first use.
_OPENERS: dict[str, Callable[..., Any] | str] = {
    "arrow": "arrow_sources:read_arrow",
    "hdf5": "hdf5:read_hdf5",
    "hf": "arrow_sources:read_hf",
    "lerobot": "lerobot:read_lerobot",
    "minari": "minari:read_minari",
    "npz": "npz_episodes:read_npz",
    "parquet": "arrow_sources:read_parquet",
    "rlds": "rlds:read_rlds",
    "robomimic": "robomimic:read_robomimic",
    "webdataset": "webdataset:read_webdataset",
    "zarr": "replay_zarr:read_zarr",
}
_SUFFIXES = {
    ".arrow": "arrow",
    ".feather": "arrow",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".npz": "npz",
    ".parquet": "parquet",
    ".tar": "webdataset",
    ".zarr": "zarr",
}
_LOAD = frozenset(inspect.signature(load).parameters) - {"source", "table"}
_SHARED = frozenset(
    {"columns", "keep_float64", "allow_nonfinite", "max_trajectories", "download", "per_trajectory"}
)


def register(kind: str, opener: Callable[..., Any]) -> None:
    """Make names ``kind:...`` known to `gear_loader.load_dataset`, in this process.

    A package makes its kinds known to every process by entry points of the group ``gear_loader.sources``, whose names
    are the kinds, and which name the openers; they are imported on first use::

        [project.entry-points."gear_loader.sources"]
        mine = "my_package:read_mine"

    Args:
        kind: lower-case letters, digits, ``-`` and ``_``, at least two.
        opener: called as ``opener(name, **options)`` with what follows the colon, and those options of `load_dataset`
            that `load` does not know; one that the opener does not name either is an error. Of the options of `load`
            an opener gets ``columns``, ``keep_float64``, ``allow_nonfinite``, ``max_trajectories``, ``download`` and
            ``per_trajectory`` (names in the table), if it names them; with ``columns`` it selects and renames them
            itself. Returns what `load` takes: an `EpisodeReader`, or an iterable of episodes.

    Raises:
        SourceError: an invalid kind, or one that is known already.

    Example: ``gear.sources.register("mine", lambda name, *, split="train": read_episodes(f"/data/{name}/{split}"))``,
    and then ``gear.load_dataset("mine:door", split="test")``.
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


def _opener(kind: str) -> Callable[..., Any] | None:
    """What opens names of a kind; None if it is not known."""
    found = _OPENERS.get(kind)
    if isinstance(found, str):
        module, _, name = found.partition(":")
        found = getattr(importlib.import_module(f"gear_loader.sources.{module}"), name)
    if found is None:
        for point in importlib.metadata.entry_points(group=GROUP, name=kind):
            found = point.load()
            if not callable(found):
                raise SourceError(
                    f"The entry point {point.value!r} of the kind {kind!r} is {shown(found)}; expected a function."
                )
            break
    return found


def _named(kind: str, opener: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Named:
    """A source of this name; `options`: of the opener alone."""
    try:
        parameters = inspect.signature(opener).parameters
    except (TypeError, ValueError):  # a function in C without a signature
        parameters = inspect.signature(lambda name, **options: None).parameters
    any_option = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    own = [each.name for each in list(parameters.values())[1:] if each.kind in _BY_NAME]
    unknown = [option for option in options if option not in own]
    if unknown and not any_option:
        most = sorted({*own, *_LOAD} - _HIDDEN)
        raise SourceError(f"'{kind}:' does not know the option {unknown[0]!r}; it has {listing(most, 40)}.")
    return Named(opener, name, dict(options), _SHARED & set(own))


_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_HIDDEN = frozenset({"download"})


def kinds() -> list[str]:
    """The kinds of names that are known, those of installed packages too."""
    return sorted({*_OPENERS, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def load_dataset(
    source: str | os.PathLike[str], /, table: Table | None = None, *, download: bool = True, **options: Any
) -> Table:
    """Make a table of a data set, or add it to one::

        table = gear.load_dataset("minari:D4RL/door/human-v2")      # fetched if it is not on this machine
        table = gear.load_dataset("hopper_medium.hdf5")             # a file, by its suffix
        batch = table.sample(256)

    Args:
        source: ``kind:name``, of a kind that the page docs/data.md lists or that `gear_loader.sources.register` or an
            installed package has made known; or the path of a file, or of the directory of a Minari data set.
        table: the table to add to; None makes one of the source's size.
        download: whether to fetch a data set that is not on this machine.
        options: as for `gear_loader.sources.load`, and those of the kind, such as ``split=``.

    Returns:
        The table.

    Raises:
        SourceError: an unknown kind or option, or as `gear_loader.sources.load`. The table is as before.
        ImportError: a package that the source needs is not installed.
    """
    flag("download", download)
    if not isinstance(source, (str, os.PathLike)):
        raise SourceError(
            f"{shown(source)} was received; expected a name such as 'minari:D4RL/door/human-v2', or a path. "
            "gear_loader.sources.load takes readers and episodes."
        )
    kind, name = "", os.fspath(source)
    if isinstance(source, str) and not os.path.exists(source):
        kind, colon, rest = source.partition(":")
        if not colon or not _KIND.fullmatch(kind) or rest.startswith("//"):
            kind = ""
        elif _opener(kind) is None:
            raise SourceError(
                f"The prefix of {source!r} is not known; expected one of {[f'{each}:' for each in kinds()]}, or the "
                "path of a file."
            )
        else:
            name = rest
    if not kind:
        kind = _SUFFIXES.get(os.path.splitext(str(name))[1].lower(), "minari")
        download = False
    opener = _opener(kind)
    assert opener is not None
    known = {option: value for option, value in options.items() if option in _LOAD}
    own = {option: value for option, value in options.items() if option not in _LOAD}
    opening = _named(kind, opener, str(name), own)
    return load(opening, table, download=download and "download" in opening.shared, **known)
