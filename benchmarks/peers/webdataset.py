"""WebDataset: jpegs in tars, which are read from their beginning, with a buffer for shuffling."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers import values

PACKAGES = ("webdataset", "torch", "numpy")
MODULES = ("torch", "webdataset", "PIL.Image")
SHARDS, BUFFER = 8, 256


class Images(values.Subject):
    """Pipelines as its documentation has them: shards are split among workers, images decoded by Pillow."""

    def fill(self) -> None:
        self.place.mkdir()
        for shard in range(SHARDS):
            with tarfile.open(self.place / f"{shard}.tar", "w") as tar:
                for number, blob in enumerate(self.data.blobs()):
                    if number % SHARDS == shard:
                        for name, content in (("jpg", blob), ("cls", str(number).encode())):
                            entry = tarfile.TarInfo(f"{number:06d}.{name}")
                            entry.size = len(content)
                            tar.addfile(entry, io.BytesIO(content))

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        import webdataset

        shards = [str(self.place / f"{shard}.tar") for shard in range(SHARDS)]
        found = webdataset.WebDataset(shards, shardshuffle=SHARDS, nodesplitter=None).repeat().shuffle(BUFFER)
        found = found.decode("rgb8").to_tuple("jpg", "cls").batched(batch, partial=False)
        return iter(webdataset.WebLoader(found, batch_size=None, num_workers=workers))

    def rows(self, batch: Any) -> Iterator[tuple[int, list[np.ndarray]]]:
        images, numbers = batch
        for number, image in zip(np.asarray(numbers).tolist(), np.asarray(images), strict=True):
            yield number, [image]


KINDS: dict[str, dict[str, Any]] = {"values": {"WebDataset": Images}}
