"""`load_dataset`: a table of a data set by its name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import listing
from gear_loader.sources.source_loading import load
from gear_loader.sources.source_opening import Named
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import flag
from gear_loader.utils.registry import Registry, option_names

_HERE = "gear_loader.sources"
registry = Registry(
    "gear_loader.sources",
    "opener",
    SourceError,
    {
        "arrow": f"{_HERE}.arrow_sources:read_arrow",
        "hdf5": f"{_HERE}.hdf5:read_hdf5",
        "hf": f"{_HERE}.arrow_sources:read_hf",
        "lerobot": f"{_HERE}.lerobot:read_lerobot",
        "minari": f"{_HERE}.minari:read_minari",
        "npz": f"{_HERE}.npz_episodes:read_npz",
        "parquet": f"{_HERE}.arrow_sources:read_parquet",
        "rlds": f"{_HERE}.rlds:read_rlds",
        "robomimic": f"{_HERE}.robomimic:read_robomimic",
        "webdataset": f"{_HERE}.webdataset:read_webdataset",
        "zarr": f"{_HERE}.replay_zarr:read_zarr",
    },
    {
        ".arrow": "arrow",
        ".feather": "arrow",
        ".h5": "hdf5",
        ".hdf5": "hdf5",
        ".npz": "npz",
        ".parquet": "parquet",
        ".tar": "webdataset",
        ".zarr": "zarr",
    },
)
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
    registry.register(kind, opener)


def _named(kind: str, opener: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Named:
    """A source of this name; `options`: of the opener alone."""
    own, any_option = option_names(opener, 1)
    unknown = [option for option in options if option not in own]
    if unknown and not any_option:
        most = sorted({*own, *_LOAD} - _HIDDEN)
        raise SourceError(f"'{kind}:' does not know the option {unknown[0]!r}; it has {listing(most, 40)}.")
    return Named(opener, name, dict(options), _SHARED & set(own))


_HIDDEN = frozenset({"download"})


def load_dataset(
    source: str | os.PathLike[str],
    /,
    table: Table | Sequence[Table] | Any | None = None,
    *,
    download: bool = True,
    **options: Any,
) -> Table:
    """Make a table of a data set, or add it to one::

        table = gear.load_dataset("minari:D4RL/door/human-v2")      # fetched if it is not on this machine
        table = gear.load_dataset("hopper_medium.hdf5")             # a file, by its suffix
        batch = table.sample(256)

    Args:
        source: ``kind:name``, of a kind that the page docs/data.md lists or that `gear_loader.sources.register` or an
            installed package has made known; or the path or address of a file, or of the directory of a Minari data
            set.
        table: the table to add to; None makes one of the source's size. Several tables, or
            `gear_loader.distributed.Shards`: as for `gear_loader.sources.load`.
        download: whether to fetch a data set that is not on this machine.
        options: as for `gear_loader.sources.load`, and those of the kind, such as ``split=``.

    Returns:
        The table; the first one of several.

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
        kind, name = registry.split(source)
    if not kind:
        kind, download = registry.by_suffix(str(name)) or "minari", False
    opener = registry.function(kind)
    if opener is None:
        raise SourceError(
            f"The prefix of {source!r} is not known; expected one of {[f'{each}:' for each in registry.kinds()]}, or "
            "the path of a file."
        )
    known = {option: value for option, value in options.items() if option in _LOAD}
    own = {option: value for option, value in options.items() if option not in _LOAD}
    opening = _named(kind, opener, str(name), own)
    return load(opening, table, download=download and "download" in opening.shared, **known)
