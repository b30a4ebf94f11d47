"""Episodes of an RLDS data set, as tensorflow-datasets writes it; read without TensorFlow."""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError, SourceError
from gear_loader.sources.arrow_episodes import per_trajectory as once_of
from gear_loader.sources.episodes import (
    Columns,
    Episode,
    EpisodeReader,
    column_of,
    converted,
    is_finite_role,
    listing,
    plan_dtype,
    requested,
    select,
)
from gear_loader.sources.tfrecord import Feature, Records, features_of
from gear_loader.storage.codecs import image_codec
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import shown
from gear_loader.utils.lazy_torch import torch
from gear_loader.utils.paths import local_path

_MOST_BYTES = 2**26  # of a file of metadata
_DEPTH = 16
_TEXT_DTYPES = ("string", "object", "str", "str_")
_SHARD = re.compile(r".*-(\d{5,})-of-(\d{5,})")


@dataclasses.dataclass(frozen=True)
class StoredFeature:
    """A feature that becomes a column.

    Attributes:
        key: in the records. name: of the column. step: whether each step has a value. kind: ``"number"``, ``"str"``,
            ``"bytes"``, ``"image"``, or the reason why no column holds it. dtype: of a number. shape: of a value, None
            for an extent that varies. varies: whether it is a list of such values, of any length. encoding: ``"none"``,
            ``"bytes"`` or ``"zlib"`` of a number; ``"jpeg"`` or ``"png"`` of an image.
    """

    key: str
    name: str
    step: bool
    kind: str
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    varies: bool = False
    encoding: str = "none"


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
        path: the directory with ``features.json``, or one above it that holds one data set.
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
        _folder(local_path(path, SourceError)),
        split,
        columns,
        per_trajectory,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
    )


def _folder(path: str) -> str:
    """The directory with ``features.json``."""
    for depth in ("", "*/", "*/*/"):
        found = sorted(glob.glob(os.path.join(glob.escape(path), f"{depth}features.json")))
        if len(found) > 1:
            raise SourceError(
                f"{path!r} holds {len(found)} data sets; expected the directory of one, such as "
                f"{os.path.dirname(found[-1])!r}."
            )
        if found:
            return os.path.dirname(found[0])
    raise SourceError(
        f"{path!r} is no RLDS data set: it holds no features.json. Expected a directory that tensorflow-datasets wrote."
    )


class RLDSEpisodes(EpisodeReader):
    """See `read_rlds`."""

    def __init__(
        self,
        folder: str,
        split: str | None,
        columns: Columns,
        once: Collection[str],
        *,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        source = f"The RLDS data set {folder!r}"
        self._nonfinite = allow_nonfinite
        leaves = {leaf.name: leaf for leaf in _walk(_json(folder, "features.json", source), source)}
        if not any(leaf.step for leaf in leaves.values()):
            raise SourceError(f"{source} has no feature 'steps'; expected one, with the steps of an episode.")
        self._paths, counts = _shards(folder, split, source)
        chosen = select(requested(columns, list(leaves)), list(leaves), source)
        self._leaves = {name: leaves[role] for name, role in chosen.items()}
        bad = {leaf.name: leaf.kind for leaf in self._leaves.values() if " " in leaf.kind}
        if bad:
            found = ", ".join(f"{name!r} is {kind}" for name, kind in bad.items())
            raise SourceError(
                f"{source}: {found}; expected numbers, text, images, and lists of numbers in a step. Leave out with "
                f"columns={[name for name in self._leaves if self._leaves[name].name not in bad]!r}."
            )
        self._once = frozenset(once)
        if not all(name in self._leaves and self._leaves[name].step for name in self._once):
            raise SourceError(f"{source}: per_trajectory={sorted(self._once)!r}; expected columns of steps.")
        if all(name in self._once or not leaf.step for name, leaf in self._leaves.items()):
            raise SourceError(f"{source}: no column has a value for each step; expected at least one.")
        # How many steps there are tells the shortest feature.
        fixed = [leaf for leaf in leaves.values() if leaf.step and " " not in leaf.kind and not leaf.varies]
        if not fixed:
            raise SourceError(f"{source} has no feature of steps that tells how many there are.")
        self._counted = min(fixed, key=lambda leaf: (leaf.kind != "number", math.prod(_known(leaf))))
        lengths, payload, formats = self._scan(counts, source)
        schema = {}
        for name, leaf in self._leaves.items():
            column = _column(leaf, formats.get(name, ""), f"{source}: column {leaf.name!r}", keep_float64)
            schema[name] = once_of(column) if name in self._once or not leaf.step else column
        super().__init__(source, lengths, schema, payload=payload)
        self.starts = np.unique([begin for begin in self._begins if begin < len(self)])

    def _scan(self, counts: Sequence[int | None], source: str) -> tuple[np.ndarray, int, dict[str, str]]:
        """Lengths of the episodes, most bytes of values of any length, and the formats of images."""
        lengths: list[int] = []
        payload, formats = 0, dict[str, str]()
        self._begins: list[int] = []  # of the files
        for path, count in zip(self._paths, counts, strict=True):
            before = len(lengths)
            self._begins.append(before)
            with Records(path).opened(check=False) as records:
                for record in records:
                    with _readable(f"{source}, episode {len(lengths)}"):
                        found = features_of(record)
                        lengths.append(_steps(found, self._counted))
                        if lengths[-1] < 1:
                            raise ValueError("it has no steps")
                        for name, leaf in self._leaves.items():
                            payload += _most_bytes(found, leaf)
                            if leaf.kind == "image" and name not in formats and leaf.key in found:
                                formats[name] = image_codec(next(iter(found[leaf.key].blobs()), b""))
                        del found
            if count is not None and len(lengths) - before != count:
                raise SourceError(
                    f"{source}: the file {path!r} holds {len(lengths) - before} episodes, and dataset_info.json says "
                    f"{count}. It was not written to its end: fetch or write it again."
                )
        if not lengths:
            raise SourceError(f"{source} has no episodes; expected at least one.")
        return np.array(lengths, dtype=np.int64), payload, formats

    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        for path, start, end in zip(self._paths, self._begins, [*self._begins[1:], len(self)], strict=True):
            if end <= first or last <= start:
                continue
            number = start
            with Records(path).opened(check=True) as records:
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
                    raw, rows = _numbers(found, leaf, steps)
                    array = converted(raw, dtype, place, finite=finite)
                    array = array.copy() if array.base is not None else array  # not of the file's memory
                    value: Any = array if rows is None else np.split(array, np.cumsum(rows)[:-1])
                else:
                    value = _texts(found, leaf, steps)
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


def _json(folder: str, name: str, source: str) -> Any:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{source}: {name} cannot be read: {error}. Fetch or write it again.") from error


def _shards(folder: str, split: str | None, source: str) -> tuple[list[str], list[int | None]]:
    """The files of a split, and the episodes in each, None if that is not known."""
    info: Any = {}
    if os.path.exists(os.path.join(folder, "dataset_info.json")):
        info = _json(folder, "dataset_info.json", source)
    info = info if isinstance(info, dict) else {}
    if info.get("fileFormat", "tfrecord") != "tfrecord":
        raise SourceError(f"{source} has the file format {shown(info['fileFormat'])}; expected tfrecord.")
    names = os.listdir(folder)
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
    return [os.path.join(folder, name) for name in files], counts


# ---------------------------------------------------------------- features


def _walk(
    node: Any, source: str, key: str = "", name: str = "", step: bool = False, depth: int = 0
) -> Iterator[StoredFeature]:
    """The leaves of a feature as ``features.json`` describes it."""
    if not isinstance(node, dict) or depth > _DEPTH:
        raise SourceError(
            f"{source}: feature {name!r} is {shown(node)} in features.json; expected a mapping."
        )
    if "featuresDict" in node:
        inner = node["featuresDict"].get("features", {}) if isinstance(node["featuresDict"], dict) else None
        if not isinstance(inner, dict):
            raise SourceError(f"{source}: feature {name!r} has no features in features.json.")
        for each, feature in inner.items():
            where = f"{key}/{each}" if key else each
            if not key and each == "steps" and isinstance(feature, dict) and "sequence" in feature:
                yield from _walk(_inner(feature), source, where, "", True, depth + 1)
            else:
                yield from _walk(feature, source, where, f"{name}.{each}" if name else each, step, depth + 1)
    else:
        yield _leaf(node, key, name or key, step)


def _inner(node: Any) -> Any:
    return node["sequence"].get("feature") if isinstance(node["sequence"], dict) else None


def _leaf(node: Mapping[str, Any], key: str, name: str, step: bool) -> StoredFeature:
    varies = False
    if "sequence" in node and isinstance(_inner(node), dict):
        node, varies = _inner(node), True
    leaf = StoredFeature(key, name, step, "a feature that no column holds", varies=varies)
    if "text" in node:
        leaf = dataclasses.replace(leaf, kind="str")
    elif "classLabel" in node:
        leaf = dataclasses.replace(leaf, kind="number", dtype="int64")
    elif "boundingBox" in node:
        leaf = dataclasses.replace(leaf, kind="number", dtype="float32", shape=(4,))
    elif "tensor" in node or "image" in node:
        inner = node.get("tensor", node.get("image"))
        inner = inner if isinstance(inner, dict) else {}
        shape, dtype = _shape(inner.get("shape")), str(inner.get("dtype", "uint8"))
        if shape is None:
            return leaf
        if "image" in node:
            plain = dtype == "uint8" and len(shape) == 3
            encoding = str(inner.get("encodingFormat") or "")
            leaf = dataclasses.replace(
                leaf, kind="image" if plain else "bytes", shape=shape if plain else (), encoding=encoding
            )
        elif dtype in _TEXT_DTYPES:
            leaf = dataclasses.replace(leaf, kind="bytes" if not shape else "a tensor of strings")
        else:
            encoding = str(inner.get("encoding", "none")).lower()
            leaf = dataclasses.replace(leaf, kind="number", dtype=dtype, shape=shape, encoding=encoding)
            if None in shape and (step or varies or shape.index(None) or shape.count(None) > 1):
                leaf = dataclasses.replace(leaf, kind=f"a tensor of shape {list(shape)}")
            elif None in shape:  # of an episode: a list of any length
                leaf = dataclasses.replace(leaf, shape=shape[1:], varies=True)
            elif 0 in shape:
                leaf = dataclasses.replace(leaf, kind=f"a tensor of shape {list(shape)}")
    if leaf.varies and (leaf.kind in ("str", "bytes", "image") or leaf.encoding != "none"):
        leaf = dataclasses.replace(leaf, kind="a list of strings, images or encoded tensors")
    return leaf


def _shape(node: Any) -> tuple[int | None, ...] | None:
    """The shape of a tensor: None for an extent that varies; None if it is not valid."""
    dimensions = node.get("dimensions", []) if isinstance(node, dict) else []
    try:
        extents = [int(each) for each in dimensions]
    except (TypeError, ValueError):
        return None
    return tuple(None if extent < 0 else extent for extent in extents)


def _known(leaf: StoredFeature) -> tuple[int, ...]:
    return tuple(extent for extent in leaf.shape if extent is not None)


def _column(leaf: StoredFeature, found: str, what: str, keep_float64: bool) -> Column:
    if leaf.kind in ("str", "bytes"):
        return Column(str if leaf.kind == "str" else bytes)
    if leaf.kind == "image":
        try:
            return Column(torch.uint8, leaf.shape, codec=found or leaf.encoding)
        except SchemaError:  # other channels, or another format
            return Column(bytes)
    try:
        given = np.dtype(leaf.dtype)
    except TypeError:
        raise SourceError(f"{what} has the dtype {leaf.dtype!r}; expected one of numpy's numbers.") from None
    dtype = plan_dtype(leaf.name, given, what, keep_float64=keep_float64)
    shape = (None, *leaf.shape) if leaf.varies else leaf.shape
    return column_of(dtype, shape, what)


# ---------------------------------------------------------------- values


def _steps(found: Mapping[str, Feature], leaf: StoredFeature) -> int:
    """Steps of an episode, by a feature whose number of values tells it."""
    count = found[leaf.key].length()
    each = 1 if leaf.kind != "number" or leaf.encoding != "none" else math.prod(_known(leaf))
    if count % each:
        raise ValueError(f"{leaf.key!r} has {count:,} numbers; expected a multiple of {each}")
    return count // each


def _most_bytes(found: Mapping[str, Feature], leaf: StoredFeature) -> int:
    """Bytes that the values of any length of a feature take at most."""
    if leaf.kind != "number":
        return len(found[leaf.key].data) if leaf.key in found else 0
    if not leaf.varies:
        return 0
    feature = found.get(leaf.key) or found.get(f"{leaf.key}/ragged_flat_values")
    return 0 if feature is None else len(feature.data) * (2 if feature.kind == "float" else 8)


def _texts(found: Mapping[str, Feature], leaf: StoredFeature, steps: int) -> list[Any]:
    blobs = found[leaf.key].blobs()
    if len(blobs) != steps:
        raise ValueError(f"it has {len(blobs)} values; expected {steps}")
    if leaf.kind == "str":
        return [str(blob, "utf-8") for blob in blobs]
    return [bytes(blob) for blob in blobs]


def _numbers(found: Mapping[str, Feature], leaf: StoredFeature, steps: int) -> tuple[np.ndarray, Any]:
    """The numbers of a feature: [steps, *shape]; or of lists, one after another, and the length of each list."""
    shape = _known(leaf)
    size = math.prod(shape)
    if leaf.encoding != "none":
        blobs = found[leaf.key].blobs()
        if len(blobs) != steps:
            raise ValueError(f"it has {len(blobs)} values; expected {steps}")
        width = size * np.dtype(leaf.dtype).itemsize
        pieces = [_raw(blob, leaf.encoding, width) for blob in blobs]
        return np.frombuffer(b"".join(pieces), dtype=leaf.dtype).reshape(steps, *shape), None
    if leaf.varies and leaf.step:
        rows = found[f"{leaf.key}/ragged_row_lengths_0"].numbers()
        values = found[f"{leaf.key}/ragged_flat_values"].numbers()
        if len(rows) != steps or (rows < 0).any() or int(rows.sum()) * size != len(values):
            raise ValueError(f"it has {len(values):,} numbers in {len(rows)} lists; expected {steps} lists")
        return values.reshape(-1, *shape), rows
    values = found[leaf.key].numbers()
    if leaf.varies:  # one list of an episode
        if len(values) % size:
            raise ValueError(f"it has {len(values):,} numbers; expected a multiple of {size}")
        return values.reshape(-1, *shape), np.array([len(values) // size])
    if len(values) != steps * size:
        raise ValueError(f"it has {len(values):,} numbers; expected {steps} times {list(shape)}")
    return values.reshape(steps, *shape), None


def _raw(blob: memoryview, encoding: str, width: int) -> bytes:
    """The bytes of an encoded tensor, `width` of them."""
    data = bytes(blob)
    if encoding == "zlib":
        data = zlib.decompressobj().decompress(data, width + 1)
    if len(data) != width:
        raise ValueError(f"a tensor has {len(data):,} bytes or more; expected {width:,}")
    return data
