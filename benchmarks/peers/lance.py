"""Lance: jpegs in a column of bytes; and Arrow, which it is built on: sequences in columns of lists."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers import data, values

PACKAGES = ("pylance", "pyarrow", "torch", "numpy")
MODULES = ("torch", "pyarrow", "PIL.Image")


def _decoded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of decoded images, by Pillow."""
    import torch
    from PIL import Image

    images = [torch.from_numpy(np.array(Image.open(io.BytesIO(each["image"])))) for each in samples]
    return {"image": torch.stack(images), "number": torch.tensor([each["number"] for each in samples])}


class Images(values.Subject):
    """Random rows by `SafeLanceDataset`, as its documentation has it for `DataLoader`."""

    def fill(self) -> None:
        import lance
        import pyarrow

        blobs = self.data.blobs()
        table = pyarrow.table({"image": pyarrow.array(blobs, pyarrow.binary()), "number": range(len(blobs))})
        lance.write_dataset(table, str(self.place))

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        from lance.torch.data import SafeLanceDataset
        from torch.utils.data import DataLoader, RandomSampler

        rows = SafeLanceDataset(str(self.place))
        given: dict[str, Any] = {"multiprocessing_context": "spawn"} if workers else {}
        given["sampler"] = RandomSampler(rows, replacement=True, num_samples=1 << 40)
        return iter(DataLoader(rows, batch_size=batch, num_workers=workers, collate_fn=_decoded, **given))


class Arrow(values.Subject):
    """Sequences in a mapped IPC file; a batch is what `take` returns, as tensors of values and of offsets."""

    def fill(self) -> None:
        import pyarrow

        ends = np.concatenate(([0], np.cumsum(self.data.lengths)))
        offsets = pyarrow.array(ends, pyarrow.int64())
        columns = {}
        for i in range(self.data.columns):
            columns[f"column{i}"] = pyarrow.LargeListArray.from_arrays(offsets, self.data.flat(i))
        table = pyarrow.table(columns)
        with pyarrow.OSFile(str(self.place), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
            out.write_table(table)

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        import pyarrow
        import torch

        self.store = pyarrow.ipc.open_file(pyarrow.memory_map(str(self.place))).get_batch(0)
        random = np.random.default_rng(values.SEED)
        while True:
            chosen = random.integers(self.data.count, size=batch)
            taken = self.store.take(pyarrow.array(chosen))
            parts = [taken.column(i) for i in range(self.data.columns)]
            views = [(each.values.to_numpy(), each.offsets.to_numpy()) for each in parts]
            yield [tuple(torch.from_numpy(part) for part in each) for each in views], chosen

    def rows(self, batch: Any) -> Iterator[tuple[int, list[np.ndarray]]]:
        columns, chosen = batch
        for place, number in enumerate(chosen.tolist()):
            bounds = [ends[place : place + 2].tolist() for _, ends in columns]
            yield number, [tokens[a:b].numpy() for (tokens, _), (a, b) in zip(columns, bounds, strict=True)]

    def count(self, batch: Any) -> int:
        return len(batch[0][0][0])


class Samples(data.Loaded):
    """Samples of a data set, images as png: random rows by `SafeLanceDataset`, as its documentation has it."""

    def fill(self) -> None:
        import lance
        import pyarrow
        from PIL import Image

        columns: dict[str, Any] = {"number": np.arange(self.data.count)}
        if self.data.kind == "texts":
            columns["prompt"], columns["answer"] = zip(*self.data.texts(), strict=True)
        for name, array in self.data.arrays.items():
            if name in data.CAMERAS:
                blobs = []
                for image in array:
                    memory = io.BytesIO()
                    Image.fromarray(image).save(memory, "png")
                    blobs.append(memory.getvalue())
                columns[name] = pyarrow.array(blobs, pyarrow.binary())
            else:
                flat = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
                columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])
        lance.write_dataset(pyarrow.table(columns), str(self.place))

    def open(self, batch: int, workers: int, passes: int) -> None:
        from lance.torch.data import SafeLanceDataset
        from torch.utils.data import DataLoader, RandomSampler

        rows = SafeLanceDataset(str(self.place))
        given: dict[str, Any] = {}
        if workers:
            given = {"multiprocessing_context": "spawn", "persistent_workers": True}
        given["sampler"] = RandomSampler(rows, num_samples=passes * batch)
        self.store = DataLoader(rows, batch_size=batch, num_workers=workers, collate_fn=_collated, **given)

    def rows(self, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
        values = {name: each if isinstance(each, list) else each.numpy() for name, each in batch.items()}
        return values.pop("number"), values


def _collated(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch: images by Pillow, texts as a list."""
    import torch
    from PIL import Image

    batch: dict[str, Any] = {}
    for name, first in samples[0].items():
        found = [each[name] for each in samples]
        if isinstance(first, bytes):
            images = [torch.from_numpy(np.array(Image.open(io.BytesIO(blob)))) for blob in found]
            batch[name] = torch.stack(images)
        elif isinstance(first, str):
            batch[name] = found
        else:
            batch[name] = torch.from_numpy(np.array(found, dtype=np.float32 if name != "number" else None))
    return batch


KINDS: dict[str, dict[str, Any]] = {
    "values": {"Lance": Images, "Arrow": Arrow},
    "data": {"Lance": Samples},
}
