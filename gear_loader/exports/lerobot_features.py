"""The features of a LeRobot data set: what its columns are, and their values in Arrow."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.exports import lerobot_statistics as statistics
from gear_loader.sources._optional import require
from gear_loader.sources.lerobot import TASK
from gear_loader.storage.codecs import CHANNELS, Codec, Coded
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import Array, shown

_NAMES = ("height", "width", "channels")
_MOST_DIMENSIONS = 5


@dataclasses.dataclass(frozen=True)
class WrittenFeature:
    """A column of the data set.

    Attributes:
        dtype: as LeRobot names it. shape: of a value. once: whether an episode has one value. coded: what encoded
            values of a camera are. kept: whether the table has them encoded.
    """

    dtype: str
    shape: tuple[int, ...] = (1,)
    once: bool = False
    coded: Coded | None = None
    kept: bool = False

    def info(self) -> dict[str, Any]:
        """What ``meta/info.json`` says of it."""
        names = list(_NAMES) if self.coded is not None else None
        return {"dtype": self.dtype, "shape": list(self.shape), "names": names}

    def stats(self, values: Any, name: str) -> dict[str, Array]:
        """Statistics of the values of an episode, those of cameras encoded; {} of text. Errors as of `of_images`."""
        if self.coded is not None:
            return statistics.of_images(self.coded, values, name)
        return {} if self.dtype == "string" else statistics.of_numbers(_numbers(values))

    def of_datasets(self) -> Any:
        """The feature of `datasets`, as LeRobot makes it."""
        datasets = require("datasets", "Writing a LeRobot data set")
        if self.dtype == "image":
            return datasets.Image()
        value = datasets.Value(self.dtype)
        if self.shape == (1,):
            return value
        if len(self.shape) == 1:
            return datasets.Sequence(length=self.shape[0], feature=value)
        return getattr(datasets, f"Array{len(self.shape)}D")(shape=self.shape, dtype=self.dtype)

    def array(self, values: Any, kind: Any) -> Any:
        """Values of all steps of an episode as an Arrow array of this type."""
        pa = require("pyarrow", "Writing a LeRobot data set")
        if self.dtype == "image":
            return pa.array([{"bytes": each, "path": None} for each in values], kind)
        if self.dtype == "string":
            return pa.array(values, kind)
        array = pa.array(_numbers(values).reshape(-1))
        if self.shape == (1,):
            return array
        if len(self.shape) == 1:
            return pa.FixedSizeListArray.from_arrays(array, type=kind)
        for extent in reversed(self.shape):
            bounds = pa.array(np.arange(0, len(array) + 1, extent), pa.int32())
            array = pa.ListArray.from_arrays(bounds, array)
        return pa.ExtensionArray.from_storage(kind, array)


def _numbers(values: Any) -> Array:
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    array: Array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


COUNTED = {
    "timestamp": WrittenFeature("float32"),
    "frame_index": WrittenFeature("int64"),
    "episode_index": WrittenFeature("int64"),
    "index": WrittenFeature("int64"),
    "task_index": WrittenFeature("int64"),
}
"""The features that LeRobot adds to those of a user."""


def features_of(columns: Mapping[str, Column], videos: Any, task: str | None) -> dict[str, WrittenFeature]:
    """The features of a table's columns, by their names there, but for `TASK`, and then `COUNTED`.

    Args:
        videos, task: as of `write_lerobot`.

    Raises:
        SchemaError: as `write_lerobot`.
    """
    if TASK in columns and task is not None:
        raise SchemaError(f"task={task!r} was given, and there is a column {TASK!r}; expected one of them.")
    plain = isinstance(videos, Collection) and not isinstance(videos, (str, bytes))
    if not plain or not all(name in columns for name in videos):
        raise SchemaError(
            f"videos={shown(videos)} was received; expected names of columns of the data set: {list(columns)}."
        )
    wrong = [name for name in columns if "/" in name or name in COUNTED or not name]
    if wrong:
        raise SchemaError(
            f"The columns {wrong} have names that LeRobot does not take, or adds itself; give others: columns={{name "
            "there: name in the table}."
        )
    found: dict[str, WrittenFeature] = {}
    for name, column in columns.items():
        if name != TASK:
            found[name] = _feature(name, column, video=name in videos)
        elif column.ragged is None or column.ragged.kind != "str":
            raise SchemaError(
                f"The column {TASK!r} is {column}; expected text, Column(str): LeRobot's task. Give it another name: "
                "columns={name there: name in the table}."
            )
    return {**found, **COUNTED}


def _feature(name: str, column: Column, *, video: bool) -> WrittenFeature:
    ragged = column.ragged
    if ragged is not None and ragged.kind == "str" and not video:
        return WrittenFeature("string", once=column.trajectory)
    coded = None if ragged is None else ragged.coded
    shape: tuple[int | None, ...] = column.shape if ragged is None else () if coded is None else coded.shape
    dtype = column.dtype_name if coded is None else coded.dtype_name
    if (ragged is not None and coded is None) or None in shape:
        raise SchemaError(
            f"Column {name!r} is {column}, of values of any length, or bytes, which LeRobot does not have; name others "
            "by columns=, or export to parquet."
        )
    sizes = tuple(extent for extent in shape if extent is not None)
    camera = dtype == "uint8" and len(sizes) == 3 and sizes[2] in (1, 3, 4) and 0 not in sizes
    if video and not camera:
        raise SchemaError(f"videos= names {name!r}, which is {column}; expected images, uint8 [h, w, 3].")
    if camera and coded is not None and coded.codec.name == "video":
        return WrittenFeature("video", sizes, coded=coded, kept=True)
    if camera and video:
        return WrittenFeature("video", sizes, column.trajectory, Coded(Codec("video"), dtype, sizes), False)
    if camera:
        encoded = coded is not None and coded.codec.name in CHANNELS
        made = coded if encoded else Coded(Codec("png"), dtype, sizes)
        return WrittenFeature("image", sizes, column.trajectory, made, encoded)
    if 0 in sizes or len(sizes) > _MOST_DIMENSIONS:
        raise SchemaError(
            f"Column {name!r} is {column}, which LeRobot does not have; expected numbers or flags of at most "
            f"{_MOST_DIMENSIONS} dimensions. Name others by columns=."
        )
    return WrittenFeature("float32" if dtype == "bfloat16" else dtype, sizes or (1,), column.trajectory)
