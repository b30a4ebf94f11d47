"""LeRobot: data sets of images, and of video, as its version 3 stores them.

Its own tools write png and AV1. Here the files have the same jpegs, and the same H.264 packets, as ours: these are
replaced in a data set that its tools made of empty frames.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers import data, values

PACKAGES = ("lerobot", "datasets", "torchcodec", "torch", "numpy")
MODULES = ("torch",)
FRAMES_PER_SECOND = 30
CAMERA = "observation.images.camera"


def load(task: str, threads: int) -> None:
    """Import it without a network."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    from lerobot.datasets import lerobot_dataset  # noqa: F401


class Images(values.Subject):
    """Single images by `DataLoader`: float32 [3, h, w] from 0 to 1, which are pixels again only when compared."""

    kind = "image"
    backend: str | None = None

    def fill(self) -> None:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        height, width, _ = shape = self.data.expected.shape[1:]
        features = {CAMERA: {"dtype": self.kind, "shape": shape, "names": ["height", "width", "channels"]}}
        steps = getattr(self.data, "steps", self.data.count)
        given = {"root": self.place, "use_videos": self.kind == "video", "vcodec": "h264"}
        made = LeRobotDataset.create("bench/values", FRAMES_PER_SECOND, features, **given)
        empty = np.zeros((height, width, 3), dtype=np.uint8)
        for _ in range(self.data.count // steps):
            for _ in range(steps):
                made.add_frame({CAMERA: empty, "task": "none"})
            made.save_episode()
        made.finalize()
        self.replace()

    def replace(self) -> None:
        """Put the jpegs in the places of the images."""
        import pyarrow
        from pyarrow import parquet

        (file,) = (self.place / "data").rglob("*.parquet")
        table = parquet.read_table(file)
        place = table.schema.get_field_index(CAMERA)
        blobs = [{"bytes": blob, "path": None} for blob in self.data.blobs()]
        field = table.schema.field(place)
        table = table.set_column(place, field, pyarrow.array(blobs, field.type))
        parquet.write_table(table, file, row_group_size=100, use_dictionary=False)

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        import datasets
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
        from torch.utils.data import DataLoader, RandomSampler

        datasets.config.HF_DATASETS_CACHE = self.place.parent / "cache"
        given: dict[str, Any] = {"root": self.place, "video_backend": self.backend}
        if window > 1:
            given["delta_timestamps"] = {CAMERA: [i / FRAMES_PER_SECOND for i in range(1 - window, 1)]}
        rows = LeRobotDataset("bench/values", **given)
        sampler = RandomSampler(rows, replacement=True, num_samples=1 << 40)
        return iter(DataLoader(rows, batch_size=batch, sampler=sampler, num_workers=workers))

    def rows(self, batch: Any) -> Iterator[tuple[int, list[np.ndarray]]]:
        images = (batch[CAMERA] * 255).round().byte().movedim(-3, -1).numpy()
        for number, image in zip(batch["index"].tolist(), images, strict=True):
            yield number, list(image) if image.ndim == 4 else [image]


class Video(Images):
    """Windows of frames, by torchcodec."""

    kind, backend, slack = "video", "torchcodec", 1.0

    def replace(self) -> None:
        """Put the clips in the place of the file of all episodes."""
        (file,) = (self.place / "videos").rglob("*.mp4")
        file.write_bytes((self.data.folder / "clips.mp4").read_bytes())


class VideoByPyAV(Video):
    """The same by PyAV."""

    backend = "pyav"


class Robot(data.Loaded):
    """A data set of images as its own tools write it, read by its own loader with `DataLoader`."""

    kind = "image"
    backend: str | None = None

    def fill(self) -> None:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        if self.data.made.exists():
            return
        arrays, features = self.data.arrays, dict[str, Any]()
        for name, own in data.CAMERAS.items():
            shape = arrays[name].shape[1:]
            features[own] = {"dtype": self.kind, "shape": shape, "names": ["height", "width", "channels"]}
        for name, own in data.COLUMNS.items():
            features[own] = {"dtype": "float32", "shape": arrays[name].shape[1:], "names": None}
        names = {**data.CAMERAS, **data.COLUMNS}
        given = {"root": self.data.made, "use_videos": self.kind == "video"}
        made = LeRobotDataset.create("bench/data", data.FRAMES_PER_SECOND, features, **given)
        for first, end in self.data.episodes():
            for step in range(first, end):
                frame = {own: np.array(arrays[name][step]) for name, own in names.items()}
                made.add_frame({**frame, "task": "push the T"})
            made.save_episode()
        made.finalize()

    def open(self, batch: int, workers: int, passes: int) -> None:
        import datasets
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
        from torch.utils.data import DataLoader, RandomSampler

        datasets.config.HF_DATASETS_CACHE = self.cache
        rows = LeRobotDataset("bench/data", root=self.data.made, video_backend=self.backend)
        given: dict[str, Any] = {"persistent_workers": True} if workers else {}
        sampler = RandomSampler(rows, num_samples=passes * batch)
        self.store = DataLoader(rows, batch_size=batch, sampler=sampler, num_workers=workers, **given)

    def rows(self, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
        values = {own: batch[name].numpy() for own, name in data.COLUMNS.items()}
        for own, name in data.CAMERAS.items():
            values[own] = (batch[name] * 255).round().byte().movedim(-3, -1).numpy()
        return batch["index"].numpy(), values


class RobotVideo(Robot):
    """The same of video, as its own tools encode it: AV1. Frames by torchcodec."""

    kind, backend = "video", "torchcodec"


class RobotVideoByPyAV(RobotVideo):
    """The same by PyAV."""

    backend = "pyav"


KINDS: dict[str, dict[str, Any]] = {
    "values": {"LeRobot": Images, "LeRobot, torchcodec": Video, "LeRobot, PyAV": VideoByPyAV},
    "data": {"LeRobot": Robot, "LeRobot, torchcodec": RobotVideo, "LeRobot, PyAV": RobotVideoByPyAV},
}
