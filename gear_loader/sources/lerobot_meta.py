"""What a LeRobot data set says of itself: the folder ``meta`` of the versions v2.0, v2.1 and v3.0.

===================== ================================================ ==========================================
\\                     v2.0, v2.1                                       v3.0
===================== ================================================ ==========================================
columns, fps, splits  ``info.json``                                    ``info.json``
episodes, their tasks ``episodes.jsonl``                               ``episodes/*/*.parquet``
tasks as text         ``tasks.jsonl``                                  ``tasks.parquet``
statistics            ``stats.json``, ``episodes_stats.jsonl`` in v2.1 ``stats.json``
===================== ================================================ ==========================================
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.arrow_rows import readable
from gear_loader.sources.source_files import SourceFolder
from gear_loader.utils.arrays import shown

_VERSION = re.compile(r"v?([23])\.[0-9]+")
_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")
_LEVEL = re.compile(r"q\d{2}")
_MOST_BYTES = 2**30  # of a file of meta
CHUNK_FILES = 1000
"""Files of a folder, in v3.0."""
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
_VIDEOS = {
    2: "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    3: VIDEO_PATH,
}
_NUMBERS = ("chunk_index", "file_index", "from_timestamp")


def file_place(number: int) -> dict[str, int]:
    """What is put into a path of v3.0 of the n-th file."""
    return {"chunk_index": number // CHUNK_FILES, "file_index": number % CHUNK_FILES}


class Meta:
    """The folder ``meta`` of a LeRobot data set.

    Args:
        folder: the directory of the data set. source: name in errors.

    Attributes:
        version: 2 or 3. fps: frames a second. features: as of ``info.json``, by name. episodes: number of an episode ->
            its entry, with ``tasks`` and ``length``. tasks: number of a task -> its text.
    """

    def __init__(self, folder: SourceFolder, source: str) -> None:
        self._folder, self._source = folder, source
        info = self._json("meta/info.json")
        self._info = self._mapping(info, "meta/info.json")
        found = _VERSION.fullmatch(str(self._info.get("codebase_version")))
        if found is None:
            raise SourceError(
                f"{source} has the codebase_version {shown(self._info.get('codebase_version'))}; expected v2.0, v2.1 "
                "or v3.0. Convert it with LeRobot's scripts."
            )
        self.version = int(found[1])
        self.features: dict[str, Mapping[str, Any]] = {
            name: self._mapping(feature, f"meta/info.json, features, {name!r}")
            for name, feature in self._mapping(self._info.get("features"), "meta/info.json, features").items()
        }
        self.fps = self._number(self._info.get("fps"), "meta/info.json, fps")
        if not self.fps > 0:
            raise SourceError(f"{source}: fps is {shown(self.fps)} in meta/info.json; expected more than 0.")
        read = self._episodes_2 if self.version == 2 else self._episodes_3
        self.episodes: dict[int, Mapping[str, Any]] = {}
        for entry in read():
            number = int(self._number(entry.get("episode_index"), "an episode's episode_index"))
            self.episodes[number] = entry
        self.tasks = dict(self._tasks())

    def split(self, name: str) -> range:
        """The episodes of a split, as ``info.json`` has it."""
        splits = self._mapping(self._info.get("splits", {}), "meta/info.json, splits")
        if name not in splits:
            raise SourceError(f"{self._source} has no split {name!r}; it has {list(splits)}.")
        found = re.fullmatch(r"(\d{1,15}):(\d{1,15})", str(splits[name]))
        if found is None:
            raise SourceError(
                f"{self._source}: the split {name!r} is {shown(splits[name])}; expected a range such as '0:50'."
            )
        return range(int(found[1]), int(found[2]))

    def length(self, number: int) -> int:
        """Steps of an episode."""
        return int(self._number(self.episodes[number].get("length"), f"the length of episode {number}"))

    def episode_tasks(self, number: int) -> list[str]:
        """The texts of the tasks of an episode."""
        tasks = self.episodes[number].get("tasks")
        if not isinstance(tasks, (list, tuple)) or not all(isinstance(task, str) for task in tasks):
            raise SourceError(
                f"{self._source}: the tasks of episode {number} are {shown(tasks)}; expected texts."
            )
        return list(tasks)

    def video(self, number: int, key: str) -> tuple[str, float]:
        """The name of the file with the frames of an episode, and the seconds in it at which they begin."""
        if self.version == 2:
            chunk = int(self._number(self._info.get("chunks_size", 1000), "meta/info.json, chunks_size"))
            values = {"episode_chunk": number // max(chunk, 1), "episode_index": number, "video_key": key}
            return self._video_path(values), 0.0
        entry = self.episodes[number]
        places = [
            self._number(entry.get(f"videos/{key}/{name}"), f"videos/{key}/{name} of episode {number}")
            for name in _NUMBERS
        ]
        values = {"chunk_index": int(places[0]), "file_index": int(places[1]), "video_key": key}
        return self._video_path(values), places[2]

    def _video_path(self, values: Mapping[str, Any]) -> str:
        """A path in the data set: ``video_path`` of ``info.json`` with the values in it."""
        template = str(self._info.get("video_path") or _VIDEOS[self.version])

        def field(found: re.Match[str]) -> str:
            value = values.get(found[1])
            if value is None:
                raise SourceError(
                    f"{self._source}: video_path is {template!r}; expected {list(values)} in it."
                )
            return str(value).zfill(int(found[2] or 0))

        path = os.path.normpath(_FIELD.sub(field, template))
        if os.path.isabs(path) or path.split(os.sep)[0] == os.pardir:
            raise SourceError(f"{self._source}: {path!r} lies outside of the data set.")
        return path

    def _episodes_2(self) -> Iterator[Mapping[str, Any]]:
        for line in self._lines("meta/episodes.jsonl"):
            yield self._mapping(line, "meta/episodes.jsonl, a line")

    def _episodes_3(self) -> Iterator[Mapping[str, Any]]:
        parquet = require("pyarrow.parquet", "Reading a LeRobot data set")
        names = self._folder.matching("meta/episodes/*/*.parquet")
        if not names:
            raise SourceError(f"{self._source} has no files in meta/episodes; expected its episodes there.")
        for name in names:
            with (
                readable(f"The file {self._folder.at(name)!r}"),
                parquet.ParquetFile(self._folder.file_or_path(name)) as file,
            ):
                columns = [each for each in file.schema_arrow.names if not each.startswith("stats/")]
                for batch in file.iter_batches(columns=columns):
                    yield from batch.to_pylist()

    def _tasks(self) -> Iterator[tuple[int, str]]:
        if self.version == 2:
            lines = (
                self._mapping(line, "meta/tasks.jsonl, a line") for line in self._lines("meta/tasks.jsonl")
            )
            found = [(line.get("task_index"), line.get("task")) for line in lines]
        else:
            parquet = require("pyarrow.parquet", "Reading a LeRobot data set")
            name = "meta/tasks.parquet"
            with readable(f"The file {self._folder.at(name)!r}"):
                table = parquet.read_table(self._folder.file_or_path(name))
                text = next(name for name in table.column_names if name != "task_index")
                found = list(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))
        for number, task in found:
            if not isinstance(task, str):
                raise SourceError(f"{self._source}: task {shown(number)} is {shown(task)}; expected text.")
            yield int(self._number(number, "a task's task_index")), task

    def stats(self) -> dict[str, dict[str, np.ndarray]]:
        """Feature -> name of a statistic -> its value, float64; of v2.1 those of all episodes together.

        Raises:
            SourceError: the file of statistics is damaged, or not there.
        """
        if self.version == 2 and self._folder.has("meta/episodes_stats.jsonl"):
            lines = [
                self._mapping(line, "meta/episodes_stats.jsonl, a line")
                for line in self._lines("meta/episodes_stats.jsonl")
            ]
            parts = [self._stats_of(line.get("stats"), "meta/episodes_stats.jsonl") for line in lines]
            names = dict.fromkeys(name for part in parts for name in part)
            return {name: together([part[name] for part in parts if name in part]) for name in names}
        return self._stats_of(self._json("meta/stats.json"), "meta/stats.json")

    def _stats_of(self, given: Any, where: str) -> dict[str, dict[str, np.ndarray]]:
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, values in self._mapping(given, where).items():
            try:
                found[name] = {
                    key: np.asarray(value, dtype=np.float64)
                    for key, value in self._mapping(values, f"{where}, {name!r}").items()
                }
            except (TypeError, ValueError) as error:
                raise SourceError(
                    f"{self._source}: the statistics of {name!r} in {where} are no numbers: {error}."
                ) from error
        return found

    def _bytes(self, name: str) -> bytes:
        try:
            data = self._folder.read(name, _MOST_BYTES + 1)
        except OSError as error:
            raise SourceError(
                f"{self._source} has no readable {name!r} ({error.strerror}); expected the directory of a LeRobot data "
                "set."
            ) from error
        if len(data) > _MOST_BYTES:
            raise SourceError(f"{self._source}: {name!r} has more than {_MOST_BYTES:,} bytes.")
        return data

    def _json(self, name: str) -> Any:
        return self._parsed(self._bytes(name), name)

    def _lines(self, name: str) -> Iterator[Any]:
        for line in self._bytes(name).splitlines():
            if line.strip():
                yield self._parsed(line, name)

    def _parsed(self, data: bytes, name: str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{self._source}: {name!r} is no JSON: {error}. Fetch or write it again."
            ) from error

    def _mapping(self, value: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise SourceError(f"{self._source}: {where} is {shown(value)}; expected a mapping.")
        return value

    def _number(self, value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 2**53:
            raise SourceError(f"{self._source}: {where} is {shown(value)}; expected a number.")
        return value


def together(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Statistics of all steps, of those of parts of them; quantiles as LeRobot has them, means of those of the parts.

    {} if one lacks some.
    """
    needed = ("min", "max", "mean", "std", "count")
    if not all(name in part for part in parts for name in needed):
        return {}
    levels = [name for name in parts[0] if _LEVEL.fullmatch(name) and all(name in part for part in parts)]
    stacked = {name: np.stack([part[name] for part in parts]) for name in (*needed, *levels)}
    count = stacked["count"].reshape(len(parts), *(1,) * (stacked["mean"].ndim - 1))
    mean = (stacked["mean"] * count).sum(0) / count.sum()
    variance = ((stacked["std"] ** 2 + (stacked["mean"] - mean) ** 2) * count).sum(0) / count.sum()
    return {
        "min": stacked["min"].min(0),
        "max": stacked["max"].max(0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": stacked["count"].sum(0),
        **{name: (stacked[name] * count).sum(0) / count.sum() for name in levels},
    }
