"""Write the data sets of this folder with the libraries of their owners, and what these read from them.

    python make.py lerobot       # LeRobot 0.4.4, codebase version v3.0
    python make.py lerobot21     # LeRobot 0.3.3, codebase version v2.1
    python make.py rlds          # tensorflow-datasets 4.9

Next to each folder lies what its owner's library reads from it, ``FOLDER.npz``: "EPISODE/KEY" -> values of all steps;
of LeRobot's images every fourth pixel of every fourth line.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
LENGTHS = (5, 3, 4)
TASKS = ("push the block", "öffne die Tür", "push the block")
FPS = 10


def picture(number: int, height: int = 64, width: int = 64) -> np.ndarray[Any, Any]:
    """A smooth picture that tells its number."""
    y, x = np.mgrid[:height, :width]
    planes = [60 + 8 * number + y, 200 - 6 * number - x, np.full_like(x, 20 * number)]
    return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def write_lerobot(root: Path) -> None:
    """Two cameras: one of video, AV1 in v3.0 and H.264 in v2.1, one of images."""
    import lerobot.datasets.lerobot_dataset as owner

    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    for camera, dtype in (("top", "video"), ("wrist", "image")):
        features[f"observation.images.{camera}"] = {
            "dtype": dtype,
            "shape": (64, 64, 3),
            "names": ["height", "width", "channels"],
        }
    shutil.rmtree(root, ignore_errors=True)
    if root.name == "lerobot21":
        owner.encode_video_frames = functools.partial(owner.encode_video_frames, vcodec="h264")
    data = owner.LeRobotDataset.create("made/here", FPS, features, root=root)
    random, number = np.random.default_rng(0), 0
    for length, task in zip(LENGTHS, TASKS, strict=True):
        for step in range(length):
            frame = {
                "observation.state": random.normal(size=3).astype(np.float32),
                "action": random.normal(size=2).astype(np.float32),
                "next.reward": random.normal(size=1).astype(np.float32),
                "next.done": np.array([step == length - 1]),
                "observation.images.top": picture(number),
                "observation.images.wrist": picture(number)[::-1],
            }
            if root.name == "lerobot21":
                data.add_frame(frame, task=task)
            else:
                data.add_frame({**frame, "task": task})
            number += 1
        data.save_episode()
    if hasattr(data, "finalize"):
        data.finalize()
    shutil.rmtree(root / "images", ignore_errors=True)


def read_lerobot(root: Path) -> None:
    """Let LeRobot read it."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    data = LeRobotDataset("made/here", root=root, video_backend="pyav")
    found: dict[str, list[Any]] = {}
    for step in range(len(data)):
        item = data[step]
        for key, value in item.items():
            found.setdefault(f"{int(item['episode_index'])}/{key}", []).append(np.asarray(value))
    for key, values in found.items():  # frames of [0, 1], as the uint8 that they were
        if "images" in key:
            found[key] = [np.round(value[:, ::4, ::4] * 255).astype(np.uint8) for value in values]
    for key, values in data.meta.stats["action"].items():
        found[f"stats/{key}"] = list(np.asarray(values))
    np.savez_compressed(root.with_suffix(".npz"), **{key: np.stack(values) for key, values in found.items()})


def write_rlds(root: Path) -> None:
    """Two shards; steps with nested observations, encoded images, text, and lists of any length."""
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        {
            "steps": tfds.features.Dataset(
                {
                    "observation": tfds.features.FeaturesDict(
                        {
                            "image": tfds.features.Image(shape=(16, 24, 3), encoding_format="jpeg"),
                            "wrist": tfds.features.Image(shape=(16, 24, 3), encoding_format="png"),
                            "state": tfds.features.Tensor(shape=(2, 3), dtype=np.float32),
                            "marks": tfds.features.Sequence(
                                tfds.features.Tensor(shape=(2,), dtype=np.float32)
                            ),
                        }
                    ),
                    "action": tfds.features.Tensor(shape=(7,), dtype=np.float32),
                    "depth": tfds.features.Tensor(shape=(4, 5), dtype=np.uint16, encoding="zlib"),
                    "count": tfds.features.Scalar(dtype=np.int32),
                    "reward": tfds.features.Scalar(dtype=np.float32),
                    "discount": tfds.features.Scalar(dtype=np.float64),
                    "is_first": tfds.features.Scalar(dtype=np.bool_),
                    "is_last": tfds.features.Scalar(dtype=np.bool_),
                    "is_terminal": tfds.features.Scalar(dtype=np.bool_),
                    "language_instruction": tfds.features.Text(),
                    "kind": tfds.features.ClassLabel(names=["push", "pull"]),
                }
            ),
            "episode_metadata": tfds.features.FeaturesDict(
                {
                    "file_path": tfds.features.Text(),
                    "offset": tfds.features.Tensor(shape=(3,), dtype=np.int64),
                }
            ),
        }
    )

    def episodes(seed: int) -> Any:
        random = np.random.default_rng(seed)
        for number, (length, task) in enumerate(zip(LENGTHS, TASKS, strict=True)):
            steps = [
                {
                    "observation": {
                        "image": picture(number + step, 16, 24),
                        "wrist": picture(2 * step, 16, 24),
                        "state": random.normal(size=(2, 3)).astype(np.float32),
                        "marks": random.normal(size=((number + step) % 3, 2)).astype(np.float32),
                    },
                    "action": random.normal(size=7).astype(np.float32),
                    "depth": random.integers(0, 60000, (4, 5)).astype(np.uint16),
                    "count": -step,
                    "reward": random.normal(),
                    "discount": 0.5,
                    "is_first": step == 0,
                    "is_last": step == length - 1,
                    "is_terminal": step == length - 1 and number == 1,
                    "language_instruction": task,
                    "kind": step % 2,
                }
                for step in range(length)
            ]
            metadata = {"file_path": f"{seed}/{number}.npy", "offset": [number, -1, 2**40]}
            yield number, {"steps": steps, "episode_metadata": metadata}

    class Made(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager: Any) -> Any:
            return {"train": episodes(0), "val": itertools.islice(episodes(1), 2)}

        def _generate_examples(self, **_: Any) -> Any:
            raise NotImplementedError

    shutil.rmtree(root, ignore_errors=True)
    config = tfds.download.DownloadConfig(num_shards=2)
    Made(data_dir=str(root)).download_and_prepare(download_config=config)


def read_rlds(root: Path) -> None:
    """Let tensorflow-datasets read it, with images as they are encoded."""
    import tensorflow_datasets as tfds

    found: dict[str, Any] = {}

    def put(name: str, values: Any) -> None:
        if isinstance(values, dict):
            for key, value in values.items():
                put(f"{name}.{key}" if "." in name or name[-1:] != "/" else f"{name}{key}", value)
        else:
            found.setdefault(name, []).append(np.asarray(values))

    builder = tfds.builder_from_directory(str(next(root.glob("*/*/features.json")).parent))
    kept = tfds.decode.SkipDecoding()
    decoders = {"steps": {"observation": {"image": kept, "wrist": kept}}}
    for split in ("train", "val"):
        for number, episode in enumerate(builder.as_dataset(split=split, decoders=decoders)):
            for step in episode["steps"]:
                put(f"{split}/{number}/", {key: _arrays(value) for key, value in step.items()})
            found[f"{split}/{number}/metadata"] = [
                np.asarray(episode["episode_metadata"]["file_path"].numpy()),
            ]
            found[f"{split}/{number}/offset"] = [episode["episode_metadata"]["offset"].numpy()]
    flat = {}
    for name, values in found.items():
        if name.endswith("marks"):
            flat[f"{name}.rows"] = np.array([len(value) for value in values])
            flat[name] = np.concatenate(values)
        else:
            flat[name] = np.stack([value.astype("S") if value.dtype == object else value for value in values])
    np.savez_compressed(root.with_suffix(".npz"), **flat)


def _arrays(value: Any) -> Any:
    return {key: _arrays(each) for key, each in value.items()} if isinstance(value, dict) else value.numpy()


def main() -> None:
    """Write what the arguments name."""
    for name in sys.argv[1:]:
        kinds = {
            "lerobot": (write_lerobot, read_lerobot),
            "lerobot21": (write_lerobot, read_lerobot),
            "rlds": (write_rlds, read_rlds),
        }
        if name not in kinds:
            raise SystemExit(__doc__)
        for step in kinds[name]:
            step(HERE / name)


if __name__ == "__main__":
    main()
