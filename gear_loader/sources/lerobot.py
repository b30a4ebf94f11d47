"""Episodes of a LeRobot data set, v2.0 to v3.0."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.arrow_columns import features_of, leaves_of
from gear_loader.sources.arrow_episodes import StepRows
from gear_loader.sources.arrow_rows import parquet_rows
from gear_loader.sources.episodes import Columns, Episode, EpisodeReader, listing, requested, select
from gear_loader.sources.lerobot_meta import Meta
from gear_loader.sources.source_files import SourceFolder
from gear_loader.sources.video_files import Frames, video_column
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import finite
from gear_loader.utils.notices import notice
from gear_loader.utils.paths import is_address, local_path

_COUNTED = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_EPISODE, _TASK, _TIME = "\nepisode", "\ntask", "\ntime"  # no names of columns
TASK = "task"
"""The column of the text of a task."""


def read_lerobot(
    path: str | os.PathLike[str],
    *,
    columns: Columns = None,
    split: str | None = None,
    episodes: Collection[int] | None = None,
    tolerance_s: float = 1e-4,
    revision: str | None = None,
    per_trajectory: Collection[str] = (),
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
    download: bool = False,
) -> LeRobotEpisodes:
    """The episodes of a LeRobot data set.

    Columns have LeRobot's names, such as ``observation.state``, ``observation.images.top``, ``action`` and
    ``next.reward``, and its dtypes and shapes; a feature of shape ``(1,)`` is a scalar, as LeRobot reads it. `task` is
    the text of the task: a column per trajectory, or of each step if some episode has several. Cameras:

    - Of images in Parquet the encoded bytes are taken as they are: a column with a codec.
    - Of videos (H.264, H.265, AV1) the packets are taken as they are: a column uint8 ``[h, w, 3]`` with
      ``codec="video"``. An episode that cannot be cut out of its file without decoding (frames that refer to later
      ones, a first frame that is no key frame, frames left out) is decoded and encoded anew as H.264, which loses
      quality: a notice is given once, and `reencoded` counts them.

    What ``delta_timestamps`` is there, is here a window: ``Window(at=[-0.1, 0.0], fps=10, pad="edge")``.

    Args:
        path: the directory of the data set, or its address; or its name, ``user/name``: looked for in LeRobot's folder
            (``HF_LEROBOT_HOME``), then fetched from the Hub if `download`.
        columns: names of the columns to take, or {name in the table: name in the source}. None takes all but
            timestamp, frame_index, episode_index, index and task_index.
        split: of ``meta/info.json``, such as ``"train"``; by default all episodes.
        episodes: numbers of the episodes to take, in any order; they come in the order of the data set.
        tolerance_s: seconds by which a frame of a video may differ from its step.
        per_trajectory: columns with one value in each episode, which is then stored once; names in the table.
        revision: of a data set on the Hub, a branch, a tag or a commit.
        keep_float64: keep float64 columns instead of making them float32.
        allow_nonfinite: take NaN and infinite values of the column ``reward``, which otherwise are an error.
        download: fetch a data set that is not on this machine.

    Returns:
        A reader. Opening it reads ``meta``, the numbers of episodes, and images once, to know their format; iteration
        reads one episode of videos at a time.

    Raises:
        SourceError: no such data set, damaged metadata, or columns that do not fit. Iteration raises it, too, naming
            the episode, the column and the step.
        ImportError: pyarrow is not installed, or PyAV for a video.
    """
    if not finite(tolerance_s) or not tolerance_s > 0:
        raise SourceError(f"tolerance_s={shown(tolerance_s)}; expected seconds, more than 0.")
    if split is not None and episodes is not None:
        raise SourceError(f"split={split!r} and episodes= were given; expected one of them.")
    folder = SourceFolder(path if is_address(path) else _root(path, revision, download))
    source = f"The LeRobot data set {os.fspath(path)!r}"
    meta = Meta(folder, source)
    wanted = None if split is None else set(meta.split(split))
    if episodes is not None:
        wanted = _numbers(episodes, meta, source)
    return LeRobotEpisodes(
        folder,
        meta,
        source,
        columns,
        wanted,
        float(tolerance_s),
        per_trajectory,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
    )


def _root(path: Any, revision: str | None, download: bool) -> str:
    """The directory of a data set."""
    name = local_path(path, SourceError)
    hub = os.environ.get("HF_HOME", os.path.join(os.path.expanduser("~"), ".cache", "huggingface"))
    home = os.environ.get("HF_LEROBOT_HOME", os.path.join(hub, "lerobot"))
    if revision is None:
        for root in (name, os.path.join(home, name)):
            if os.path.isfile(os.path.join(root, "meta", "info.json")):
                return root
    if os.path.exists(name) or name.count("/") != 1 or not download:
        raise SourceError(
            f"{name!r} is no LeRobot data set on this machine: neither it nor {os.path.join(home, name)!r} holds "
            "meta/info.json. Expected its directory; or its name on the Hub, user/name, with download=True."
        )
    hub_client = require("huggingface_hub", "Fetching a LeRobot data set")
    try:
        return str(hub_client.snapshot_download(name, repo_type="dataset", revision=revision))
    except Exception as error:  # of the network, and of several libraries below
        raise SourceError(
            f"The data set {name!r} cannot be fetched from the Hub: {type(error).__name__}: {error}"
        ) from error


def _numbers(episodes: Any, meta: Meta, source: str) -> set[int]:
    plain = isinstance(episodes, Collection) and not isinstance(episodes, (str, bytes))
    found = list(episodes) if plain else []
    if not found or not all(isinstance(n, (int, np.integer)) and int(n) in meta.episodes for n in found):
        raise SourceError(
            f"episodes={shown(episodes)}; expected numbers of episodes of {source}, which has "
            f"{len(meta.episodes)}."
        )
    return {int(number) for number in found}


class LeRobotEpisodes(EpisodeReader):
    """See `read_lerobot`.

    Attributes:
        fps: frames a second.
        reencoded: videos of episodes that were decoded and encoded anew in the last iteration.
    """

    def __init__(
        self,
        folder: SourceFolder,
        meta: Meta,
        source: str,
        columns: Columns,
        wanted: set[int] | None,
        tolerance: float,
        once: Collection[str],
        *,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        self._folder, self._meta, self._tolerance = folder, meta, tolerance
        self.fps, self.reencoded = meta.fps, 0
        rows = parquet_rows(folder.at("data"))
        stored = leaves_of(rows.schema, features_of(rows.schema))
        videos = [name for name, feature in meta.features.items() if feature.get("dtype") == "video"]
        available = [*dict.fromkeys([*meta.features, *stored]), TASK]
        available = [name for name in available if name in stored or name in videos or name == TASK]
        default = [name for name in available if name not in _COUNTED]
        chosen = select(requested(columns, default), available, source)
        self._videos = {name: role for name, role in chosen.items() if role in videos}
        self._task = next((name for name, role in chosen.items() if role == TASK), None)
        inner = {name: role for name, role in chosen.items() if role in stored and role != TASK}
        hidden = {_EPISODE: "episode_index", _TASK: "task_index", _TIME: "timestamp"}
        self._rows = StepRows(
            rows,
            "episode_index",
            None,
            once,
            columns=inner | hidden,
            keep_float64=keep_float64,
            allow_nonfinite=allow_nonfinite,
        )
        self._numbers = self._order(rows)
        for number, length in zip(self._numbers, self._rows.lengths.tolist(), strict=True):
            if number not in meta.episodes or meta.length(number) != length:
                known = f"{meta.length(number)} steps" if number in meta.episodes else "no such episode"
                raise SourceError(
                    f"{source}: data has {length} steps of episode {number}, and meta has {known}. The data set was "
                    "not written to its end, or files are missing: fetch it again."
                )
        missing = [n for n in (meta.episodes if wanted is None else wanted) if n not in set(self._numbers)]
        if missing:
            raise SourceError(
                f"{source}: data lacks the episodes {listing(map(str, missing))}, which meta has."
            )
        self._taken = np.array([wanted is None or number in wanted for number in self._numbers])
        if not self._taken.any():
            raise SourceError(f"{source} has no episodes to take; expected at least one.")
        payload = self._rows.payload
        schema = {}
        for name, role in chosen.items():
            if name in self._videos:
                schema[name] = self._video_column(role, source)
            elif name == self._task:
                texts = [meta.episode_tasks(number) for number in meta.episodes]
                one = all(len(tasks) <= 1 for tasks in texts)
                schema[name] = Column(str, per="trajectory" if one else "step")
            else:
                schema[name] = self._rows.schema[name]
        if payload is not None and self._task is not None:
            longest = max((len(text.encode(errors="replace")) for text in meta.tasks.values()), default=0)
            one = schema[self._task].trajectory
            payload += longest * (len(self._numbers) if one else self._rows.num_steps)
        super().__init__(
            source,
            self._rows.lengths[self._taken],
            schema,
            payload=None if self._videos else payload,
        )
        starts = (np.cumsum(self._taken) - self._taken)[self._rows.starts]
        self.starts = np.unique(starts[starts < len(self)])

    def stats(self) -> dict[str, dict[str, np.ndarray]]:
        """LeRobot's statistics: feature -> ``"mean"``, ``"std"``, ``"min"``, ``"max"``, ``"count"``, and quantiles if
        the data set has them -> float64. Those of images are ``[channels, 1, 1]``, of values from 0 to 1.

        Raises:
            SourceError: their file is damaged, or not there.
        """
        return self._meta.stats()

    def _order(self, rows: Any) -> list[int]:
        """The numbers of the episodes, in the order in which `StepRows` gives them."""
        last: dict[int, int] = {}
        row = 0
        for batch in rows.batches(["episode_index"]):
            for number in batch.column(0).to_pylist():
                last[int(number)] = row
                row += 1
        return sorted(last, key=lambda number: last[number])

    def _video_column(self, key: str, source: str) -> Column:
        av = require("av", "Reading the videos of a LeRobot data set")
        number = self._numbers[int(np.argmax(self._taken))]
        name, _ = self._meta.video(number, key)
        return video_column(av, self._folder, name, f"{source}, episode {number}, column {key!r}")

    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order; see `EpisodeReader`."""
        self.reencoded = 0
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        taken = np.flatnonzero(self._taken)[first:last]
        begin, end = (int(taken[0]), int(taken[-1]) + 1) if len(taken) else (0, 0)
        for position, inner in enumerate(self._rows.between(begin, end), begin):
            number = self._numbers[position]
            if not self._taken[position]:
                continue
            inner.pop(_EPISODE)
            tasks, times = inner.pop(_TASK), inner.pop(_TIME)
            values: dict[str, Any] = {}
            for name, column in self.schema.items():
                if name in self._videos:
                    values[name] = self._frames(number, name, times)
                elif name == self._task:
                    values[name] = self._texts(number, tasks, once=column.trajectory)
                else:
                    values[name] = inner[name]
            yield Episode(values)

    def _texts(self, number: int, tasks: np.ndarray, *, once: bool) -> Any:
        known = self._meta.tasks
        strange = [task for task in np.unique(tasks).tolist() if task not in known]
        if strange:
            raise SourceError(
                f"{self.source}, episode {number}: task_index is {strange[0]}; expected one of the {len(known)} tasks "
                "of meta."
            )
        if not once:
            return [known[task] for task in tasks.tolist()]
        if (tasks != tasks[0]).any():
            raise SourceError(
                f"{self.source}, episode {number}, step {int(np.argmax(tasks != tasks[0]))}: it has another task than "
                "step 0, and meta has one task of it."
            )
        return known[int(tasks[0])]

    def _frames(self, number: int, name: str, times: np.ndarray) -> list[bytes]:
        av = require("av", "Reading the videos of a LeRobot data set")
        key = self._videos[name]
        video, begin = self._meta.video(number, key)
        times = begin + times.astype(np.float64)
        where = f"{self.source}, episode {number}, column {key!r}"
        if not np.isfinite(times).all() or (np.diff(times) < 0).any():
            raise SourceError(
                f"{where}: timestamp falls, or is no finite number; expected ascending seconds."
            )
        frames = Frames(av, self._folder, video, times, self._tolerance, where)
        values, kept = frames.packets(self.schema[name])
        if not kept:
            self.reencoded += 1
            if self.reencoded == 1:
                notice(
                    f"re-encoded {self.source}",
                    f"{where}: its frames cannot be cut out of the file without decoding; such videos are decoded and "
                    "encoded anew as H.264.",
                )
        return values
