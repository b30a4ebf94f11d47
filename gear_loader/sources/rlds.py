"""Episodes of an RLDS data set, as tensorflow-datasets writes it; read without TensorFlow."""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources.arrow_episodes import per_trajectory as once_of
from gear_loader.sources.episodes import (
    Columns,
    Episode,
    EpisodeReader,
    converted,
    is_finite_role,
    listing,
    requested,
    select,
)
from gear_loader.sources.rlds_features import (
    count_steps,
    feature_column,
    known_shape,
    most_value_bytes,
    read_numbers,
    read_texts,
    stored_features,
)
from gear_loader.sources.source_files import SourceFolder
from gear_loader.sources.tfrecord import Records, features_of
from gear_loader.storage.codecs import image_codec
from gear_loader.utils.arrays import shown

_SHARD = re.compile(r".*-(\d{5,})-of-(\d{5,})")


def read_rlds(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    columns: Columns = None,
    per_trajectory: Collection[str] = (),
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
) -> RLDSEpisodes:
    """The episodes of an RLDS data set in TFRecord files, as tensorflow-datasets and Open X-Embodiment write them.

    Columns have the names of RLDS, with dots for nesting: ``observation.image``, ``action``, ``reward``, ``is_first``,
    ``is_last``, ``is_terminal``, ``language_instruction``; what an episode has once is a column per trajectory, such as
    ``episode_metadata.file_path``. RLDS stores no step after the last: whether the last step has a valid action is up
    to the data set. Images are taken as they are encoded, a column with a codec ``"jpeg"`` or ``"png"``; features of
    the class Text are ``str``, other strings ``bytes``; lists in a step have any length.

    Args:
        path: the directory with ``features.json``, or its address; or one above it that holds one data set.
        split: such as ``"train"``; by default the only one.
        columns: names of the columns to take, or {name in the table: name in the source}. None takes all.
        per_trajectory: names in the table of columns with the same value at all steps of an episode, such as the
            instruction, which is then stored once.
        keep_float64: keep float64 columns instead of making them float32. (Records hold float32.)
        allow_nonfinite: take NaN and infinite values of the column ``reward``, which otherwise are an error.

    Returns:
        A reader. Opening it reads the lengths of the episodes, without the images; iteration reads one episode at a
        time, and compares the CRC of each record.

    Raises:
        SourceError: no such data set or split, missing or damaged files, or features that no column holds. Iteration
            raises it, too, naming the episode and the column.
        ImportError: google-crc32c is not installed.
    """
    return RLDSEpisodes(
        _folder(SourceFolder(path)),
        split,
        columns,
        per_trajectory,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
    )


def _folder(above: SourceFolder) -> SourceFolder:
    """The directory with ``features.json``."""
    for depth in ("", "*/", "*/*/"):
        found = [os.path.dirname(each) for each in above.matching(f"{depth}features.json")]
        if len(found) > 1:
            raise SourceError(
                f"{above.path!r} holds {len(found)} data sets; expected the directory of one, such as "
                f"{above.at(found[-1])!r}."
            )
        if found:
            return SourceFolder(above.at(found[0])) if depth else above
    raise SourceError(
        f"{above.path!r} is no RLDS data set: it holds no features.json. Expected a directory that tensorflow-datasets "
        "wrote."
    )


class RLDSEpisodes(EpisodeReader):
    """See `read_rlds`."""

    def __init__(
        self,
        folder: SourceFolder,
        split: str | None,
        columns: Columns,
        once: Collection[str],
        *,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        source = f"The RLDS data set {folder.path!r}"
        self._folder, self._nonfinite = folder, allow_nonfinite
        leaves = {leaf.name: leaf for leaf in stored_features(folder.json("features.json", source), source)}
        if not any(leaf.step for leaf in leaves.values()):
            raise SourceError(f"{source} has no feature 'steps'; expected one, with the steps of an episode.")
        self._shards, counts = _shards(folder, split, source)
        chosen = select(requested(columns, list(leaves)), list(leaves), source)
        self._leaves = {name: leaves[role] for name, role in chosen.items()}
        bad = {leaf.name: leaf.kind for leaf in self._leaves.values() if " " in leaf.kind}
        if bad:
            found = ", ".join(f"{name!r} is {kind}" for name, kind in bad.items())
            raise SourceError(
                f"{source}: {found}; expected numbers, text, images, and lists of numbers in a step. Leave out with "
                f"columns={[name for name in self._leaves if self._leaves[name].name not in bad]!r}."
            )
        if not all(name in self._leaves for name in once):
            raise SourceError(
                f"{source}: per_trajectory={sorted(once)!r}; expected some of {listing(self._leaves)}."
            )
        self._once = frozenset(name for name in once if self._leaves[name].step)
        if all(name in self._once or not leaf.step for name, leaf in self._leaves.items()):
            raise SourceError(f"{source}: no column has a value for each step; expected at least one.")
        # How many steps there are tells the shortest feature.
        fixed = [leaf for leaf in leaves.values() if leaf.step and " " not in leaf.kind and not leaf.varies]
        if not fixed:
            raise SourceError(f"{source} has no feature of steps that tells how many there are.")
        self._counted = min(fixed, key=lambda leaf: (leaf.kind != "number", math.prod(known_shape(leaf))))
        lengths, payload, formats = self._scan(counts, source)
        schema = {}
        for name, leaf in self._leaves.items():
            column = feature_column(
                leaf, formats.get(name, ""), f"{source}: column {leaf.name!r}", keep_float64
            )
            schema[name] = once_of(column) if name in self._once or not leaf.step else column
        super().__init__(source, lengths, schema, payload=payload)
        self.starts = np.unique([begin for begin in self._begins if begin < len(self)])

    def _scan(self, counts: Sequence[int | None], source: str) -> tuple[np.ndarray, int, dict[str, str]]:
        """Lengths of the episodes, most bytes of values of any length, and the formats of images."""
        lengths: list[int] = []
        payload, formats = 0, dict[str, str]()
        self._begins: list[int] = []  # of the files
        for shard, count in zip(self._shards, counts, strict=True):
            before = len(lengths)
            self._begins.append(before)
            with Records(self._folder, shard).opened(check=False) as records:
                for record in records:
                    with _readable(f"{source}, episode {len(lengths)}"):
                        found = features_of(record)
                        lengths.append(count_steps(found, self._counted))
                        if lengths[-1] < 1:
                            raise ValueError("it has no steps")
                        for name, leaf in self._leaves.items():
                            payload += most_value_bytes(found, leaf)
                            if leaf.kind == "image" and name not in formats and leaf.key in found:
                                formats[name] = image_codec(next(iter(found[leaf.key].blobs()), b""))
                        del found
            if count is not None and len(lengths) - before != count:
                raise SourceError(
                    f"{source}: the file {self._folder.at(shard)!r} holds {len(lengths) - before} episodes, and "
                    f"dataset_info.json says {count}. It was not written to its end: fetch or write it again."
                )
        if not lengths:
            raise SourceError(f"{source} has no episodes; expected at least one.")
        return np.array(lengths, dtype=np.int64), payload, formats

    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        for shard, start, end in zip(self._shards, self._begins, [*self._begins[1:], len(self)], strict=True):
            if end <= first or last <= start:
                continue
            number = start
            with Records(self._folder, shard).opened(check=True) as records:
                for record in records:
                    if number >= end:
                        raise SourceError(f"{self.source} has more episodes than before; expected the same.")
                    if number >= first:
                        yield self._episode(number, record)
                    number += 1
                    if number == last < end:
                        return
            if number < end:
                raise SourceError(f"{self.source} has fewer episodes than before; expected the same.")

    def _episode(self, number: int, record: memoryview) -> Episode:
        values: dict[str, Any] = {}
        with _readable(f"{self.source}, episode {number}"):
            found = features_of(record)
        for name, leaf in self._leaves.items():
            steps = int(self.lengths[number]) if leaf.step else 1

            def place(step: int | None, role: str = leaf.name) -> str:
                at = "" if step is None else f", step {step}"
                return f"{self.source}, episode {number}{at}: column {role!r}"

            with _readable(f"{self.source}, episode {number}, column {leaf.name!r}"):
                column = self.schema[name]
                if leaf.kind == "number":
                    dtype = column.dtype if column.ragged is None else column.ragged.dtype
                    finite = is_finite_role(leaf.name, self._nonfinite)
                    raw, rows = read_numbers(found, leaf, steps)
                    array = converted(raw, dtype, place, finite=finite)
                    array = array.copy() if array.base is not None else array  # not of the file's memory
                    value: Any = array if rows is None else np.split(array, np.cumsum(rows)[:-1])
                else:
                    value = read_texts(found, leaf, steps)
                if not leaf.step:
                    value = value[0]
                elif name in self._once:
                    if any(not np.array_equal(value[0], other) for other in value[1:]):
                        raise ValueError("its values differ, and per_trajectory= names it")
                    value = value[0]
            values[name] = value
        return Episode(values)


class _readable:
    """Turns what damaged records raise into a SourceError."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, (ValueError, IndexError, KeyError, MemoryError, zlib.error)) and not isinstance(
            error, SourceError
        ):
            raise SourceError(
                f"{self._where} cannot be read: {error}. Fetch or write the data set again."
            ) from error


def _shards(folder: SourceFolder, split: str | None, source: str) -> tuple[list[str], list[int | None]]:
    """The files of a split, and the episodes in each, None if that is not known."""
    info: Any = {}
    if folder.has("dataset_info.json"):
        info = folder.json("dataset_info.json", source)
    info = info if isinstance(info, dict) else {}
    if info.get("fileFormat", "tfrecord") != "tfrecord":
        raise SourceError(f"{source} has the file format {shown(info['fileFormat'])}; expected tfrecord.")
    names = folder.matching("*")
    splits = sorted(
        {name.partition(".tfrecord")[0].rpartition("-")[2] for name in names if ".tfrecord" in name}
    )
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        raise SourceError(
            f"{source} has the splits {listing(splits)}, and split={shown(split)} was given; expected one of them."
        )
    files = sorted(
        name
        for name in names
        if name.partition(".tfrecord")[0].rpartition("-")[2] == split and ".tfrecord" in name
    )
    numbers = [_SHARD.fullmatch(name) for name in files]
    shards = [(int(found[1]), int(found[2])) for found in numbers if found is not None]
    if shards and shards != [(i, shards[0][1]) for i in range(shards[0][1])]:
        raise SourceError(
            f"{source} has {len(files)} of {shards[0][1]} files of the split {split!r}; expected all. Fetch the others."
        )
    counts: list[int | None] = [None] * len(files)
    for each in info.get("splits", []) if isinstance(info.get("splits"), list) else []:
        known = each.get("shardLengths") if isinstance(each, dict) and each.get("name") == split else None
        if isinstance(known, list) and len(known) == len(files) and all(str(n).isdigit() for n in known):
            counts = [int(n) for n in known]
    return files, counts
