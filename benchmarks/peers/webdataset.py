"""WebDataset: samples in tars, which are read from their beginning, with a buffer for shuffling."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers import data, values

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


class Samples(data.Subject):
    """Samples of a data set: images as png, arrays as npy, texts as JSON."""

    def fill(self) -> None:
        import webdataset

        self.place.mkdir()
        arrays, texts = self.data.arrays, self.data.texts() if self.data.kind == "texts" else []
        most = -(-self.data.count // SHARDS)
        with webdataset.ShardWriter(str(self.place / "%d.tar"), maxcount=most, verbose=0) as writer:
            for number in range(self.data.count):
                sample: dict[str, Any] = {"__key__": f"{number:08d}", "cls": number}
                if texts:
                    sample["json"] = texts[number]
                for name, values in arrays.items():
                    kind = "png" if name in data.CAMERAS else "npy"
                    sample[f"{name}.{kind}"] = np.ascontiguousarray(values[number])
                writer.write(sample)

    def open(self, batch: int, workers: int, passes: int) -> None:
        import webdataset

        shards = sorted(map(str, self.place.glob("*.tar")))
        names = [f"{name}.{'png' if name in data.CAMERAS else 'npy'}" for name in self.data.arrays]
        found = webdataset.WebDataset(shards, shardshuffle=SHARDS, nodesplitter=None).repeat()
        found = found.shuffle(BUFFER).decode("rgb8")
        if self.data.kind == "texts":
            found = found.to_tuple("cls", "json").batched(batch, collation_fn=list, partial=False)
        else:
            found = found.to_tuple("cls", *names).batched(batch, partial=False)
        given: dict[str, Any] = {"persistent_workers": True} if workers else {}
        loader = webdataset.WebLoader(found, batch_size=None, num_workers=workers, **given)
        self.store = loader.with_epoch(passes)

    def batches(self) -> Iterator[Any]:
        return iter(self.store)

    def rows(self, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
        if self.data.kind == "texts":
            numbers, texts = zip(*batch, strict=True)
            prompts, answers = zip(*texts, strict=True)
            return np.array(numbers), {"prompt": list(prompts), "answer": list(answers)}
        numbers, *values = (np.asarray(each) for each in batch)
        return numbers, dict(zip(self.data.arrays, values, strict=True))


KINDS: dict[str, dict[str, Any]] = {"values": {"WebDataset": Images}, "data": {"WebDataset": Samples}}
