"""Lance: jpegs in a column of bytes; and Arrow, which it is built on: sequences in columns of lists."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers import values

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


KINDS: dict[str, dict[str, Any]] = {"values": {"Lance": Images, "Arrow": Arrow}}
