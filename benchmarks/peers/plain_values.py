"""Values of any length in plain torch: one tensor in a file, files in a folder, sequences one after another or in a
list."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from benchmarks.peers import values

PACKAGES = MODULES = ("torch", "numpy")


class Saved(values.Subject):
    """Decoded images in one tensor, by `torch.save`; a batch is an index into the mapped file."""

    def fill(self) -> None:
        torch.save(torch.from_numpy(np.array(self.data.expected)), self.place)

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        self.store = torch.load(self.place, mmap=True, weights_only=True)
        random = torch.Generator().manual_seed(values.SEED)
        while True:
            chosen = torch.randint(len(self.store), (batch,), generator=random)
            yield {"image": self.store[chosen], "number": chosen}


class _Files(Dataset[dict[str, Any]]):
    def __init__(self, data: Any, place: Any) -> None:
        self._data, self._place = data, place

    def __len__(self) -> int:
        return int(self._data.count)

    def __getitem__(self, number: int) -> dict[str, Any]:
        from PIL import Image

        blob = (self._place / f"{number:06d}.jpg").read_bytes()
        return {"image": torch.from_numpy(np.array(Image.open(io.BytesIO(blob)))), "number": number}


class Files(values.Subject):
    """A file for each jpeg, by `DataLoader` and Pillow, as torchvision's `ImageFolder`."""

    def fill(self) -> None:
        self.place.mkdir()
        for number, blob in enumerate(self.data.blobs()):
            (self.place / f"{number:06d}.jpg").write_bytes(blob)

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        files = _Files(self.data, self.place)
        sampler = RandomSampler(files, replacement=True, num_samples=1 << 40)
        given: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
        return iter(DataLoader(files, batch_size=batch, sampler=sampler, num_workers=workers, **given))


class Flat(values.Subject):
    """Sequences one after another in a tensor for each column; a batch joins slices of them."""

    def fill(self) -> None:
        self.place.mkdir()
        torch.save(
            [torch.from_numpy(self.data.flat(i)) for i in range(self.data.columns)], self.place / "flat"
        )

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        self.store = torch.load(self.place / "flat", mmap=True, weights_only=True)
        random, lengths, starts = np.random.default_rng(values.SEED), self.data.lengths, self.data.starts
        while True:
            chosen = random.integers(len(lengths), size=batch)
            yield self.batch(starts[chosen].tolist(), lengths[chosen].tolist()), chosen

    def batch(self, begins: list[int], lengths: list[int]) -> Any:
        """Values of all columns, and where they end."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        slices = [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
        return [torch.cat([column[part] for part in slices]) for column in self.store], ends

    def rows(self, batch: Any) -> Iterator[tuple[int, list[np.ndarray]]]:
        (columns, ends), chosen = batch
        for number, begin, end in zip(chosen.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            yield number, [column[begin:end].numpy() for column in columns]

    def count(self, batch: Any) -> int:
        return len(batch[0][0][0])


class Nested(Flat):
    """A tensor for each sequence and column, in lists; a batch is a nested tensor for each column."""

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        flat, lengths = torch.load(self.place / "flat", weights_only=True), self.data.lengths
        self.store = [[part.clone() for part in column.split(lengths.tolist())] for column in flat]
        del flat
        random = np.random.default_rng(values.SEED)
        while True:
            chosen = random.integers(len(lengths), size=batch).tolist()
            yield (
                [
                    torch.nested.as_nested_tensor([column[i] for i in chosen], layout=torch.jagged)
                    for column in self.store
                ],
                chosen,
            )

    def rows(self, batch: Any) -> Iterator[tuple[int, list[np.ndarray]]]:
        columns, chosen = batch
        for number, row in zip(
            chosen, zip(*(column.unbind() for column in columns), strict=True), strict=True
        ):
            yield number, [part.numpy() for part in row]

    def count(self, batch: Any) -> int:
        return len(batch[0][0].values())


KINDS: dict[str, dict[str, Any]] = {
    "values": {
        "torch.save, decoded": Saved,
        "DataLoader, files": Files,
        "plain torch": Flat,
        "torch.nested": Nested,
    }
}
