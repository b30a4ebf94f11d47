"""Data sets in Arrow's types: Parquet, Arrow's own files, Hugging Face, data frames, Ray Data."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.arrow_episode_rows import EpisodeRows
from gear_loader.sources.arrow_episodes import StepRows
from gear_loader.sources.arrow_rows import DatasetRows, Rows, arrow_rows, object_rows, parquet_rows, readable
from gear_loader.sources.episodes import Columns, EpisodeReader, listing
from gear_loader.sources.hugging_face_files import hugging_face_rows
from gear_loader.sources.source_files import SourceFolder
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import flag, one_of
from gear_loader.utils.paths import is_address

_Function = TypeVar("_Function", bound=Callable[..., Any])


def read_rows(
    source: Any,
    *,
    episode: str | None = None,
    step: str | None = None,
    rows: Literal["steps", "episodes"] = "steps",
    per_trajectory: Collection[str] = (),
    columns: Columns = None,
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
) -> EpisodeReader:
    """The episodes of an Arrow table, a data frame of pandas or polars, a data set of Hugging Face or Ray Data.

    Which columns of a table the fields become says `gear_loader.sources.arrow_columns`: structs become one for each
    field, ``observation.state``; lists have a shape, or any length; text, bytes and encoded images are kept as they
    are.

    Args:
        source: the table.
        episode: the column, of numbers or text, that says to which episode a row belongs; by default episode_index,
            episode_id or episode, if there is one. Rows of an episode may lie anywhere, but are read fastest if they
            follow each other: what lies between is kept in memory meanwhile, or all rows are read several times.
        step: the column by which the rows of an episode are sorted; by default they keep their order.
        rows: ``"episodes"`` if each row is a whole episode: lists have a value for each step, other columns one for
            the episode.
        per_trajectory: columns with one value in each episode, such as a task, which is then stored once; with
            ``rows="episodes"`` lists that are not of steps.
        columns: names of the columns to take, or {name in the table: name in the source}. None takes all but that of
            the episode.
        keep_float64: keep float64 columns instead of making them float32.
        allow_nonfinite: take NaN and infinite values of the column ``reward``, which otherwise are an error.

    Returns:
        A reader: its column of episodes, and columns of text, bytes or lists without a fixed length have been read
        once, to know the size of the table.

    Raises:
        SourceError: no such file or column, damaged data, values that no column holds; iteration raises it too.
        ImportError: pyarrow is not installed.
    """
    return _episodes(
        object_rows(source),
        episode=episode,
        step=step,
        rows=rows,
        per_trajectory=per_trajectory,
        columns=columns,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
    )


def _episodes(
    source: Rows,
    *,
    episode: str | None,
    step: str | None,
    rows: str,
    per_trajectory: Collection[str],
    columns: Columns,
    keep_float64: bool,
    allow_nonfinite: bool,
) -> EpisodeReader:
    one_of("rows", rows, ("steps", "episodes"), error=SourceError)
    for name, value in (("episode", episode), ("step", step)):
        if value is not None and not isinstance(value, str):
            raise SourceError(f"{name}= is {shown(value)}; expected the name of a column.")
        if value is not None and rows == "episodes":
            raise SourceError(f"{name}={value!r} was given with rows='episodes'; expected one of them.")
    flag("keep_float64", keep_float64)
    flag("allow_nonfinite", allow_nonfinite)
    options: dict[str, Any] = {
        "columns": columns,
        "keep_float64": keep_float64,
        "allow_nonfinite": allow_nonfinite,
    }
    with readable(source.source):
        if rows == "episodes":
            return EpisodeRows(source, per_trajectory, **options)
        return StepRows(source, episode, step, per_trajectory, **options)


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(read_rows).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def _of_rows(function: _Function) -> _Function:
    """Give a function whose options are those of `read_rows` their names."""
    own = inspect.signature(function, eval_str=True)
    named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    named += [
        each
        for name, each in inspect.signature(read_rows, eval_str=True).parameters.items()
        if name in _DEFAULTS
    ]
    function.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
    return function


@_of_rows
def read_parquet(path: str | os.PathLike[str], **options: Any) -> EpisodeReader:
    """The episodes of Parquet files: of a path, a pattern such as ``"data/*.parquet"``, or a directory.

    Args:
        path: files of one schema, read in the order of their names. options: as of `read_rows`.

    Raises:
        SourceError, ImportError: as `read_rows`.
    """
    return _episodes(parquet_rows(path), **{**_DEFAULTS, **options})


@_of_rows
def read_arrow(path: str | os.PathLike[str], **options: Any) -> EpisodeReader:
    """The episodes of Arrow IPC files (Feather), or streams: of a path, a pattern, or a directory.

    Args:
        path: files of one schema, read in the order of their names. options: as of `read_rows`.

    Raises:
        SourceError, ImportError: as `read_rows`.
    """
    return _episodes(arrow_rows(path), **{**_DEFAULTS, **options})


@_of_rows
def read_hf(
    name: str | os.PathLike[str],
    *,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> EpisodeReader:
    """The episodes of a data set of Hugging Face, by the package datasets.

    Args:
        name: a directory that `datasets.Dataset.save_to_disk` wrote; or what `datasets.load_dataset` takes, a name on
            the Hub or a directory of files. Or the address of a directory that `save_to_disk` wrote, or of Parquet
            files named ``<split>-...``, in it or in ``data``; these are read without the package.
        split: such as ``"train"`` or ``"train[:10%]"``; by default the only one.
        config, revision: as for `datasets.load_dataset`.
        options: as of `read_rows`.

    Raises:
        SourceError, ImportError: as `read_rows`.
    """
    if is_address(name):
        for option, value in (("config", config), ("revision", revision)):
            if value is not None:
                raise SourceError(
                    f"{option}={shown(value)} was given with {name}; expected neither with an address."
                )
        return _episodes(hugging_face_rows(SourceFolder(name), split), **{**_DEFAULTS, **options})
    datasets = require("datasets", "Reading a data set of Hugging Face")
    path = os.fspath(name)
    saved = any(os.path.isfile(os.path.join(path, each)) for each in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, config, split=split, revision=revision)
    except ImportError:
        raise
    except Exception as error:
        raise SourceError(
            f"The data set {path!r} cannot be opened: {type(error).__name__}: {error}. Expected a directory of "
            "Dataset.save_to_disk, or what datasets.load_dataset takes."
        ) from error
    if isinstance(found, dict):  # splits
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            raise SourceError(
                f"The data set {path!r} has the splits {listing(found)}, and split={split!r} was given; expected one."
            )
        found = found[split]
    return _episodes(DatasetRows(f"The data set {path!r}", found), **{**_DEFAULTS, **options})
