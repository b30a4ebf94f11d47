"""Values of any length in tables of this project: encoded images, video and ragged columns."""

from __future__ import annotations

import itertools
import math
import os
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.peers import values
from gear_loader.storage.shared_memory import region_path

PACKAGES = MODULES = ("torch", "numpy")
STEPS = 16  # images, or sequences, of a trajectory


class _Named(values.Subject):
    """A named table, whose name is in the file `place`."""

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        """Batches that this process draws; it decodes in as many threads as torch uses."""
        self.store = self.store or gear.Table.attach(self.place.read_text(encoding="ascii"))
        given = {"device": "cpu", "seed": values.SEED, "batches_per_epoch": math.inf, **self.options(window)}
        return iter(gear.ReplayDataset(self.store, batch_size=batch, **given))

    def options(self, window: int) -> dict[str, Any]:
        """What a dataset is given."""
        windows = {"number": gear.Window(1, squeeze=True), "image": self.windowed(window)}
        return {"windows": windows}

    def windowed(self, window: int) -> gear.Window:
        """The window of images."""
        return gear.Window(1, squeeze=True)

    def create(self, columns: dict[str, Any], payload: int, **options: Any) -> gear.Table:
        name = f"bench-values-{os.getpid()}-{secrets.token_hex(4)}"
        options.setdefault("max_steps", self.data.count)
        options.setdefault("max_trajectories", options["max_steps"] // options["block_steps"])
        room = payload + payload // 64 + (1 << 16) if payload else None
        blocks = -(-options["max_steps"] // options["block_steps"])  # no trajectory ends within one
        memory = gear.Memory(payload=room, max_blocks=blocks)
        self.store = gear.Table.create(columns, name=name, memory=memory, **options)
        self.place.write_text(name, encoding="ascii")
        return self.store

    def stored(self) -> int:
        return os.stat(region_path(self.place.read_text(encoding="ascii"))).st_blocks * 512

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        super().close()

    def remove(self) -> None:
        gear.Table.attach(self.place.read_text(encoding="ascii")).unlink()


class Jpegs(_Named):
    """Encoded images, of which a batch has the decoded ones."""

    codec: Any = "jpeg"

    def fill(self) -> None:
        blobs, shape = self.data.blobs(), self.data.expected.shape[1:]
        image = gear.Column(torch.uint8, shape, codec=self.codec)
        columns = {"image": image, "number": gear.Column(torch.int64)}
        payload = sum(map(len, blobs)) if self.codec else 0
        table = self.create(columns, payload, block_steps=STEPS)
        for first in range(0, len(blobs), STEPS):
            numbers = np.arange(first, first + STEPS)
            images = blobs[first : first + STEPS]
            if self.codec is None:
                images = np.array(self.data.expected[first : first + STEPS])
            table.add({"image": images, "number": numbers})


class Pixels(Jpegs):
    """Images that are stored decoded."""

    codec = None


class Video(Jpegs):
    """Clips as H.264: a clip is a trajectory, and its frames are encoded when they are added."""

    def fill(self) -> None:
        frames = np.load(self.data.folder / "frames.npy", mmap_mode="r")
        codec = gear.Codec("video", key_frames=self.data.key_frames, crf=self.data.crf)
        columns = {
            "image": gear.Column(torch.uint8, frames.shape[1:], codec=codec),
            "number": gear.Column(torch.int64),
        }
        steps = self.data.steps
        table = self.create(columns, self.data.payload + 8 * len(frames), block_steps=steps)
        for first in range(0, len(frames), steps):
            numbers = np.arange(first, first + steps)
            table.add({"image": np.asarray(frames[first : first + steps]), "number": numbers})

    def windowed(self, window: int) -> gear.Window:
        return gear.Window(window, 1 - window, pad="edge")


class Tokens(_Named):
    """A step for each sequence, with a ragged column for each of its columns."""

    def fill(self) -> None:
        columns = {f"column{i}": gear.Column(torch.int32, (None,)) for i in range(self.data.columns)}
        table = self.create(columns, self.data.payload, block_steps=STEPS)
        for first in range(0, self.data.count, STEPS):
            numbers = range(first, first + STEPS)
            table.add(
                {
                    f"column{i}": [self.data.tokens(i, number) for number in numbers]
                    for i in range(self.data.columns)
                }
            )

    def options(self, window: int) -> dict[str, Any]:
        windows = {f"column{i}": gear.Window(1, squeeze=True) for i in range(self.data.columns)}
        return {"windows": windows}

    def rows(self, batch: Any) -> Iterator[tuple[int, list[np.ndarray]]]:
        parts = []
        for column in range(self.data.columns):
            ragged = batch[f"column{column}"]
            ends = ragged.offsets.tolist()
            parts.append([ragged.values[a:b].numpy() for a, b in itertools.pairwise(ends)])
        for row in zip(*parts, strict=True):
            yield int(np.searchsorted(self.data.starts, row[0][0])), list(row)

    def count(self, batch: Any) -> int:
        return len(batch["column0"].values)


KINDS: dict[str, dict[str, Any]] = {
    "values": {"ours": Jpegs, "ours, no codec": Pixels, "ours, video": Video, "ours, tokens": Tokens}
}
