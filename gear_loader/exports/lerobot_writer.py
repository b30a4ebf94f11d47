"""Trajectories as a LeRobot data set, codebase version v3.0, which ``LeRobotDataset`` reads and the Hub takes.

::

    data/chunk-000/file-000.parquet                  a row for each step
    videos/<camera>/chunk-000/file-000.mp4           frames of many episodes, one after another
    meta/info.json, stats.json, tasks.parquet        features, fps; statistics of all steps; texts of tasks
    meta/episodes/chunk-000/file-000.parquet         of each episode: length, tasks, files, statistics
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.exports.exported import (
    Trajectory,
    chosen_columns,
    compression_of,
    most_bytes,
    new_place,
    trajectories,
)
from gear_loader.exports.lerobot_features import WrittenFeature, features_of
from gear_loader.exports.lerobot_videos import VideoFiles
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import Columns
from gear_loader.sources.lerobot import TASK
from gear_loader.sources.lerobot_meta import CHUNK_FILES, DATA_PATH, VIDEO_PATH, file_place, together
from gear_loader.storage.decoding import encoded
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import at_least

_PURPOSE = "Writing a LeRobot data set"
_EPISODES_AT_ONCE = 500
_STATS = "stats"


def write_lerobot(
    table: Table,
    place: str,
    *,
    fps: int | None = None,
    columns: Columns = None,
    task: str | None = None,
    videos: Collection[str] = (),
    robot_type: str | None = None,
    compression: str = "snappy",
    file_bytes: int | str = "100MiB",
    video_bytes: int | str = "200MiB",
) -> str:
    """Write a folder that ``LeRobotDataset(name, root=folder)`` reads, of version v3.0.

    Columns of numbers, flags and text are features of the same name, dtype and shape, ``(1,)`` for ``[]``. bfloat16
    becomes float32, and columns per trajectory or group have their value in each row. LeRobot's names are
    ``observation.state``, ``observation.images.<camera>``, ``action``, ``next.reward``: give them by
    ``columns={"observation.state": "obs"}``. The column ``task``, text, has the tasks. Timestamps are
    ``frame_index / fps``. Values after the last step (``final=True``) are left out: LeRobot has none.

    Columns of uint8 ``[h, w, 1, 3 or 4]`` are images:

    - With ``codec="video"`` their packets go into MP4 files as they are: H.264, H.265 or AV1.
    - Those that are encoded go into Parquet as they are; others as PNG, without loss.
    - Those named in `videos` are encoded as ``Codec("video")`` does, H.264, which loses quality.

    Statistics, of each episode and of all steps, are LeRobot's: quantiles of all steps are means of those of episodes,
    and images are decoded for them, of an episode as many as LeRobot takes (all of up to 100).

    Args:
        fps: steps a second, at least 1. It has to be given.
        task: of all episodes, for a table without a column ``task``; by default an empty text.
        videos: names there of columns of images ``[h, w, 3]``, h and w even.
        robot_type: noted in ``meta/info.json``.
        compression: of Parquet, as for ``parquet:``.
        file_bytes, video_bytes: about the most bytes of a file of data, not compressed, and of a file of video; each
            ends with an episode.

    Returns:
        The folder.

    Raises:
        SchemaError: as `Table.export`; no `fps`, a table without trajectories, or a column that LeRobot does not have:
            bytes, values of any length, images of several sizes, more than 5 dimensions.
        CodecError: an image or frame is damaged.
        ImportError: datasets is not installed, or PyAV for video.
    """
    if fps is None:
        raise SchemaError("fps= was not given; expected steps a second, such as fps=30.")
    fps = at_least("fps", fps)
    if not isinstance(robot_type, str | None) or not isinstance(task, str | None):
        raise SchemaError(
            f"robot_type={shown(robot_type)} and task={shown(task)} were received; expected text, or None."
        )
    sizes = most_bytes("file_bytes", file_bytes), most_bytes("video_bytes", video_bytes)
    compression, chosen = compression_of(compression), chosen_columns(table, columns, video=True)
    schema = {role: table.schema[name] for role, name in chosen.items()}
    features = features_of(schema, videos, task)
    kept = frozenset(role for role, each in features.items() if each.kept)
    with new_place(place) as partial, _DataSet(partial, features, fps, sizes, compression) as data:
        for each in trajectories(table, chosen, encoded=kept):
            data.add(each, task or "")
        data.finish(robot_type)
    return place


class _DataSet(contextlib.ExitStack):
    """A data set that is being written; its files are closed when it is left."""

    def __init__(
        self,
        root: str,
        features: Mapping[str, WrittenFeature],
        fps: int,
        sizes: tuple[int, int],
        compression: str,
    ) -> None:
        super().__init__()
        self._root, self._features, self._fps, self._sizes = root, features, fps, sizes
        stored = {name: each for name, each in features.items() if each.dtype != "video"}
        datasets, self._pa = require("datasets", _PURPOSE), require("pyarrow", _PURPOSE)
        self._schema = datasets.Features({n: each.of_datasets() for n, each in stored.items()}).arrow_schema
        self._rows = _Rows(root, DATA_PATH, compression, sizes[0])
        self._entries = _Rows(root, f"meta/episodes/{DATA_PATH.partition('/')[2]}", compression, None)
        self._videos = {
            name: VideoFiles(root, name, fps, sizes[1])
            for name, each in features.items()
            if each.dtype == "video"
        }
        for close in (self._rows.close, self._entries.close, *(each.close for each in self._videos.values())):
            self.callback(close)
        self._tasks: dict[str, int] = {}
        self._episodes = self._steps = 0
        self._waiting: list[dict[str, Any]] = []  # entries of episodes, with their statistics
        self._stats: dict[str, dict[str, Array]] = {}

    def add(self, each: Trajectory, task: str) -> None:
        """Write a trajectory; `task`: that of all, without a column of it."""
        length, number = each.length, self._episodes
        texts = each.values.get(TASK, task)
        texts = [texts] * length if isinstance(texts, str) else list(texts)
        frames = np.arange(length)
        counted = {
            "timestamp": (frames / self._fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, number),
            "index": self._steps + frames,
            "task_index": np.array([self._tasks.setdefault(text, len(self._tasks)) for text in texts]),
        }
        arrays, stats, videos = [], {}, dict[str, Any]()
        for name, feature in self._features.items():
            where = f"Episode {number}, column {name!r}"
            values: Any = counted.get(name)
            if values is None:
                values = _stepped(feature, each.values[name], length, where)
            stats[name] = feature.stats(values, where)
            if feature.dtype == "video":
                videos |= self._videos[name].add(values)
            else:
                arrays.append(feature.array(values, self._schema.field(name).type))
        place = self._rows.add(self._pa.Table.from_arrays(arrays, schema=self._schema))
        entry = {
            "episode_index": number,
            "tasks": list(dict.fromkeys(texts)),
            "length": length,
            **{f"data/{key}": value for key, value in place.items()},
            "dataset_from_index": self._steps,
            "dataset_to_index": self._steps + length,
            **videos,
            **{f"meta/episodes/{key}": value for key, value in file_place(0).items()},
            _STATS: {name: found for name, found in stats.items() if found},
        }
        self._waiting.append(entry)
        self._episodes, self._steps = number + 1, self._steps + length
        if len(self._waiting) == _EPISODES_AT_ONCE:
            self._write_entries()

    def _write_entries(self) -> None:
        """Write what is known of episodes, and add their statistics to those of all."""
        parts = [entry.pop(_STATS) for entry in self._waiting]
        for entry, part in zip(self._waiting, parts, strict=True):
            entry |= {
                f"{_STATS}/{n}/{key}": v.tolist() for n, found in part.items() for key, v in found.items()
            }
        self._entries.add(self._pa.Table.from_pylist(self._waiting))
        self._waiting.clear()
        before = [self._stats] if self._stats else []
        self._stats = {name: together([each[name] for each in before + parts]) for name in parts[0]}

    def finish(self, robot_type: str | None) -> None:
        """Write the rest, and the ends of all files.

        Raises:
            SchemaError: there is no episode.
        """
        if not self._episodes:
            raise SchemaError("The table has no trajectories; expected one at least. Nothing was written.")
        if self._waiting:
            self._write_entries()
        self.close()
        pandas, meta = require("pandas", _PURPOSE), os.path.join(self._root, "meta")
        tasks = pandas.DataFrame({"task_index": range(len(self._tasks))}, index=list(self._tasks))
        tasks.to_parquet(os.path.join(meta, "tasks.parquet"))
        stats = {n: {key: v.tolist() for key, v in found.items()} for n, found in self._stats.items()}
        features = {name: each.info() for name, each in self._features.items()}
        for name, files in self._videos.items():
            features[name]["info"] = files.info
        info = {
            "codebase_version": "v3.0",
            "robot_type": robot_type,
            "total_episodes": self._episodes,
            "total_frames": self._steps,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK_FILES,
            "data_files_size_in_mb": max(1, self._sizes[0] >> 20),
            "video_files_size_in_mb": max(1, self._sizes[1] >> 20),
            "fps": self._fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._videos else None,
            "features": features,
        }
        for name, content in (("stats", stats), ("info", info)):
            with open(os.path.join(meta, f"{name}.json"), "w", encoding="utf-8") as file:
                json.dump(content, file, indent=4)


class _Rows:
    """Parquet files of one schema, a row group a call.

    Args:
        path: of a file in the data set. most: about the most bytes of one, not compressed; None: of any size.
    """

    def __init__(self, root: str, path: str, compression: str, most: int | None) -> None:
        self._root, self._path, self._compression, self._most = root, path, compression, most
        self._writer: Any = None
        self._number, self._bytes = -1, 0

    def add(self, rows: Any) -> dict[str, int]:
        """Write rows; return the numbers of their file."""
        if self._most is not None and self._bytes + rows.nbytes > self._most:
            self.close()
        if self._writer is None:
            self._number, self._bytes = self._number + 1, 0
            path = os.path.join(self._root, self._path.format(**file_place(self._number)))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            parquet = require("pyarrow.parquet", _PURPOSE)
            self._writer = parquet.ParquetWriter(path, rows.schema, compression=self._compression)
        self._writer.write_table(rows)
        self._bytes += rows.nbytes
        return file_place(self._number)

    def close(self) -> None:
        """Write the end of the file that is open."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _stepped(feature: WrittenFeature, values: Any, length: int, where: str) -> Any:
    """Values of a column for each step, those of cameras encoded."""
    if feature.once:
        values = (
            values.expand(length, *values.shape) if isinstance(values, torch.Tensor) else [values] * length
        )
    if feature.coded is None or feature.kept:
        return values
    return encoded(feature.coded, values, where, once=False, whole=True)
