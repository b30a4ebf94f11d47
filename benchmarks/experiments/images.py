"""``python -m benchmarks images``: batches of 64 jpegs of 224 x 224, decoded, on the CPU.

The images have the spectrum of photographs (1/f) and are stored as jpegs of quality 90. `DataLoader` with two workers
reads each image from its file and decodes it with Pillow, as torchvision's `ImageFolder` does (LeRobot's image datasets
decode by Pillow too), or with simplejpeg; or reads a tar from its beginning, with a buffer of 256 for shuffling, as
WebDataset does. Ours is a table with ``codec="jpeg"``, whose dataset decodes with as many threads as torch uses. Every
way delivers uint8 [64, 224, 224, 3] and a label.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

import gear_loader as gear
from benchmarks.harness import Incorrect, Session, Variant
from benchmarks.loading import closed
from benchmarks.options import experiment

SIZE, BATCH, WORKERS = 224, 64, 2
IMAGES, QUICK_IMAGES = 1024, 96
BUFFER = 256
AHEAD = 6
"""Batches that are not counted: those that have been made in the turns of others, and more."""
SEED = 3

Decode = Callable[[bytes], np.ndarray]


@experiment("images", repeats=(2, 15), pause=0.005)
def command(session: Session) -> None:
    """Batches of 64 decoded jpegs of 224 x 224, beside DataLoader over files and a tar."""
    count = QUICK_IMAGES if session.quick else IMAGES
    session.configure(images=count, batch=BATCH, size=SIZE, workers=WORKERS, seed=SEED)
    for _ in session.each("images", (1,), lambda _: "jpegs"):
        with tempfile.TemporaryDirectory() as folder:
            _measured(session, Images(count, Path(folder)), 2 if session.quick else 16)


def with_pillow(blob: bytes) -> np.ndarray:
    """Decode by Pillow."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(blob)))


def with_simplejpeg(blob: bytes) -> np.ndarray:
    """Decode by simplejpeg."""
    import simplejpeg

    found: np.ndarray = simplejpeg.decode_jpeg(blob)
    return found


class Images:
    """Jpegs in files, in a tar and in memory."""

    def __init__(self, count: int, folder: Path) -> None:
        import simplejpeg

        made = np.random.default_rng(SEED)
        self.blobs = [
            simplejpeg.encode_jpeg(photograph(made), 90, colorsubsampling="420") for _ in range(count)
        ]
        self.files = [folder / f"{number:06d}.jpg" for number in range(count)]
        self.tar = folder / "images.tar"
        with tarfile.open(self.tar, "w") as tar:
            for file, blob in zip(self.files, self.blobs, strict=True):
                file.write_bytes(blob)
                tar.add(file, file.name)

    def table(self) -> gear.Table:
        """A table of trajectories of 16 images."""
        size = sum(map(len, self.blobs))
        table = gear.Table.create(
            {
                "image": gear.Column(torch.uint8, (SIZE, SIZE, 3), codec="jpeg"),
                "label": gear.Column(torch.int64),
            },
            max_steps=len(self.blobs),
            max_trajectories=len(self.blobs),
            block_steps=16,
            memory=gear.Memory(payload=size + size // 50 + (1 << 16)),
        )
        for first in range(0, len(self.blobs), 16):
            blobs = self.blobs[first : first + 16]
            table.add({"image": blobs, "label": np.arange(first, first + len(blobs))})
        return table


def photograph(made: np.random.Generator) -> np.ndarray:
    """Noise whose amplitude falls as that of photographs does, uint8 [SIZE, SIZE, 3]."""
    rates = np.hypot(np.fft.fftfreq(SIZE)[:, None], np.fft.rfftfreq(SIZE))
    noise = np.fft.rfft2(made.standard_normal((3, SIZE, SIZE))) / np.maximum(rates, 1 / SIZE)
    layers = np.fft.irfft2(noise, s=(SIZE, SIZE))
    mixed = layers[:1] + 0.3 * layers  # colours vary less than brightness
    return np.ascontiguousarray(
        (128 + 50 * mixed / mixed.std()).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    )


class _Files(Dataset[dict[str, Any]]):
    def __init__(self, images: Images, decode: Decode) -> None:
        self._files, self._decode = images.files, decode

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": torch.from_numpy(self._decode(self._files[index].read_bytes()).copy()),
            "label": index,
        }


class _Tar(IterableDataset[dict[str, Any]]):
    """Every worker reads the tar, and decodes its share."""

    def __init__(self, images: Images, decode: Decode) -> None:
        self._tar, self._decode = images.tar, decode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker, buffer = get_worker_info(), list[tuple[int, bytes]]()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while True:
            with tarfile.open(self._tar) as tar:
                for place, member in enumerate(tar):
                    file = tar.extractfile(member) if place % count == number else None
                    if file is not None:
                        buffer.append((int(member.name[:6]), file.read()))
                        if len(buffer) >= BUFFER // count:
                            label, blob = buffer.pop(random.randrange(len(buffer)))
                            yield {"image": torch.from_numpy(self._decode(blob).copy()), "label": label}


def _measured(session: Session, images: Images, batches: int) -> None:
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(images.table())
        options: dict[str, Any] = {"windows": gear.Window(1, squeeze=True), "device": "cpu", "seed": SEED}
        dataset = gear.ReplayDataset(table, batch_size=BATCH, batches_per_epoch=math.inf, **options)

        def loader(data: Any) -> Iterator[Any]:
            sampler = None
            if not isinstance(data, IterableDataset):
                sampler = RandomSampler(data, replacement=True, num_samples=1 << 40)
            given: dict[str, Any] = {
                "num_workers": WORKERS,
                "multiprocessing_context": "fork",
                "sampler": sampler,
            }
            return iter(DataLoader(data, batch_size=BATCH, **given))

        ours = stack.enter_context(closed(dataset))
        targets = {"DataLoader, files, Pillow": 2.0, "DataLoader, tar, Pillow": 2.0}
        variants = [
            _variant("DataLoader, files, Pillow", loader(_Files(images, with_pillow)), images, batches),
            _variant(
                "DataLoader, files, simplejpeg", loader(_Files(images, with_simplejpeg)), images, batches
            ),
            _variant("DataLoader, tar, Pillow", loader(_Tar(images, with_pillow)), images, batches),
            _variant("DataLoader, tar, simplejpeg", loader(_Tar(images, with_simplejpeg)), images, batches),
            _variant("ours", ours, images, batches, targets),
        ]
        told = {"images": len(images.blobs), "batch": BATCH, "item": "image"}
        references = [each.name for each in variants[1:-1]]
        label = f"jpegs of {SIZE} x {SIZE}, batches of {BATCH}"
        session.compare("jpeg", label, variants, variants[0].name, told, references, unit="rows")


def _variant(
    name: str, batches: Iterator[Any], images: Images, count: int, targets: dict[str, float] | None = None
) -> Variant:
    def measure() -> float:
        for _ in itertools.islice(batches, AHEAD):
            pass
        started = time.perf_counter()
        for _ in itertools.islice(batches, count):
            pass
        return time.perf_counter() - started

    def check() -> None:
        for batch in itertools.islice(batches, 2):
            for image, label in zip(batch["image"], batch["label"].tolist(), strict=True):
                expected = torch.from_numpy(with_simplejpeg(images.blobs[label]))
                if image.shape != expected.shape or (image.float() - expected.float()).abs().mean() > 1:
                    raise Incorrect(f"image {label} differs")

    return Variant(name, measure, check, BATCH, count, targets=targets or {})
