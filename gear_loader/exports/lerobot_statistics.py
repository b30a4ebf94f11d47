"""Statistics of an episode, as LeRobot keeps them: feature -> name -> values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from gear_loader.storage.codecs import Coded
from gear_loader.storage.coders import video_of
from gear_loader.storage.decoding import Group, decoded, decoded_frames
from gear_loader.utils.arrays import Array

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_AT_ONCE = 64 << 20  # bytes of decoded images
_SMALL, _LARGE = 150, 300  # extents to which, and from which on, LeRobot takes pixels of images


def of_numbers(values: Array) -> dict[str, Array]:
    """Of each element of a value; of values of two dimensions or more over all but the last one.

    Args:
        values: ``[T, *shape]``, T at least 1.
    """
    rows = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        found: dict[str, Array] = {
            "min": rows.min(0),
            "max": rows.max(0),
            "mean": rows.mean(0),
            "std": rows.std(0),
            "count": np.array([len(values)]),
        }
        levels = np.quantile(rows, QUANTILES, axis=0, method="inverted_cdf")
    return found | {f"q{round(q * 100):02d}": level for q, level in zip(QUANTILES, levels, strict=True)}


def of_images(coded: Coded, blobs: Sequence[bytes], name: str) -> dict[str, Array]:
    """Of encoded images or frames of video, for red, green and blue ``[3, 1, 1]``, from 0 to 1; of those steps, and of
    large ones of those pixels, that LeRobot takes.

    Args:
        name: of the column and the episode, in errors.

    Raises:
        CodecError: an image is damaged.
    """
    count = len(blobs)
    taken = max(min(100, count), min(int(count**0.75), 10_000))
    steps: Array = np.round(np.linspace(0, count - 1, taken)).astype(np.int64)
    levels: Array = np.arange(256)
    counts: Array = np.zeros((3, 256), dtype=np.int64)
    for frames in _decoded(coded, blobs, steps, name):
        for channel in range(3):
            plane = frames[..., channel if frames.shape[-1] > 1 else 0]
            counts[channel] += np.bincount(plane.reshape(-1), minlength=256)
    total = counts[0].sum()
    mean = counts @ levels / total
    spread = (counts * np.square(levels - mean[:, None])).sum(1) / total
    ranks = counts.cumsum(1)
    found = {
        "min": (counts > 0).argmax(1),
        "max": 255 - (counts[:, ::-1] > 0).argmax(1),
        "mean": mean,
        "std": np.sqrt(spread),
    }
    found |= {f"q{round(q * 100):02d}": (ranks >= q * total).argmax(1) for q in QUANTILES}
    scaled = {key: value.reshape(3, 1, 1) / 255 for key, value in found.items()}
    return scaled | {"count": np.array([taken])}


def _decoded(coded: Coded, blobs: Sequence[bytes], steps: Array, name: str) -> Iterator[Array]:
    """Images of steps, uint8 ``[n, h, w, c]``, a part at a time."""
    height, width, _ = coded.row_shape
    longer = max(height, width)
    every = longer // _SMALL if longer >= _LARGE else 1
    most = max(1, _AT_ONCE // coded.row_bytes)
    for first in range(0, len(steps), most):
        part = steps[first : first + most].tolist()

        def named(i: int, part: list[int] = part) -> str:
            return f"{name}, step {part[i]},"

        if coded.codec.name != "video":
            found = decoded(coded, [memoryview(blobs[i]) for i in part], (len(part),), name=named).numpy()
        else:
            found = decoded_frames(
                coded, _groups(coded, blobs, part), {}, len(part), (len(part),), name=named
            )[1]
        yield found[:, ::every, ::every]


def _groups(coded: Coded, blobs: Sequence[bytes], steps: list[int]) -> list[Group]:
    """The groups of a video that hold these steps."""
    video, places = video_of(coded), defaultdict[int, defaultdict[int, list[int]]](lambda: defaultdict(list))
    for place, step in enumerate(steps):
        distance = video.distance(memoryview(blobs[step]))
        places[step - distance][distance].append(place)
    return [
        Group([memoryview(blob) for blob in blobs[first : first + max(each) + 1]], each)
        for first, each in places.items()
    ]
