"""Data sets of Hugging Face at addresses, by their files: what `Dataset.save_to_disk` writes, or Parquet."""

from __future__ import annotations

from typing import Any

from gear_loader.errors import SourceError
from gear_loader.sources.arrow_rows import Rows, arrow_rows, parquet_rows
from gear_loader.sources.episodes import listing
from gear_loader.sources.source_files import SourceFolder
from gear_loader.utils.arrays import shown


def hugging_face_rows(folder: SourceFolder, split: str | None) -> Rows:
    """The rows of a data set.

    Raises:
        SourceError: there is none, or no such split, or the store refuses.
    """
    source = f"The data set {folder.path!r}"
    below = ""
    if folder.has("dataset_dict.json"):
        splits = _json(folder, "dataset_dict.json", source).get("splits")
        plain = isinstance(splits, list) and all(isinstance(each, str) for each in splits)
        below = f"{_chosen(splits if isinstance(splits, list) and plain else [], split, source)}/"
    state = f"{below}state.json"
    if folder.has(state):
        return arrow_rows(folder.files(_data_files(_json(folder, state, source), below, source)))
    names = [*folder.matching("*.parquet"), *folder.matching("data/*.parquet")]
    found = {name: name.rpartition("/")[2].partition("-")[0].partition(".")[0] for name in names}
    if below or not found:
        raise SourceError(
            f"{source} has neither {state!r} nor Parquet files; expected the address of a directory that "
            "Dataset.save_to_disk wrote, or of Parquet files named <split>-....parquet, in it or in 'data'."
        )
    wanted = _chosen(sorted(set(found.values())), split, source)
    return parquet_rows(folder.files([name for name in names if found[name] == wanted]))


def _chosen(splits: list[str], split: str | None, source: str) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        raise SourceError(
            f"{source} has the splits {listing(splits)}, and split={shown(split)} was given; expected one of them."
        )
    return str(split)


def _json(folder: SourceFolder, name: str, source: str) -> dict[str, Any]:
    found = folder.json(name, source)
    return found if isinstance(found, dict) else {}


def _data_files(state: dict[str, Any], below: str, source: str) -> list[str]:
    """The names of the files of Arrow that a saved data set has."""
    files = state.get("_data_files")
    names = (
        [each.get("filename") for each in files or () if isinstance(each, dict)]
        if isinstance(files, list)
        else []
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise SourceError(
            f"{source}: state.json names no files; expected what Dataset.save_to_disk writes. Fetch or write it again."
        )
    return [f"{below}{name}" for name in names]
