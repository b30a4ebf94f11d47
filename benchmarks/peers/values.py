"""Values of any length as a task: images, video and token sequences that a store has, in batches of random ones.

What is stored lies in a folder that the experiment has made (`Data`). A store is filled there, opened, and gives
batches without end. Memory of readers: so many processes, forked before anything was opened, read a small store and
close it, then all of the large one; the growth of the sum of their PSS in between is the figure, without pages of files
that are not the store's.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Iterator
from multiprocessing import Pipe, Process
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import source

SEED = 3
CHECKED = 3
"""Batches that are compared with what was stored."""


class Data:
    """What a store is filled with.

    ::

        spec.json      kind: "images", "video" or "tokens"; further entries are attributes
        blobs, ends    images: jpegs one after another, and where they end, int64 [count]
        clips.mp4      video: of `clips` with `steps` frames each, at 30 a second; also frames.npy, before encoding
        expected.npy   uint8 [count, h, w, 3]: what they are decoded to
        lengths.npy    tokens: int64 [count]

    Attributes:
        kind: see above. count: images, frames or sequences. payload: their bytes, as they are handed over.
    """

    kind: str
    count: int
    payload: int

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.__dict__.update(json.loads((self.folder / "spec.json").read_text(encoding="utf-8")))
        if self.kind == "tokens":
            self.lengths: np.ndarray = np.load(self.folder / "lengths.npy")
            self.starts = np.cumsum(self.lengths) - self.lengths
        else:
            self.expected = np.load(self.folder / "expected.npy", mmap_mode="r")

    def blobs(self) -> list[bytes]:
        """The jpegs."""
        whole, ends = (self.folder / "blobs").read_bytes(), np.load(self.folder / "ends.npy").tolist()
        return [whole[begin:end] for begin, end in itertools.pairwise([0, *ends])]

    def tokens(self, column: int, number: int) -> np.ndarray:
        """A sequence in one column, int32: the numbers of its steps, counted from that of the column."""
        begin = int(self.starts[number])
        return np.arange(begin, begin + int(self.lengths[number]), dtype=np.int32) + np.int32(column)

    def flat(self, column: int) -> np.ndarray:
        """All sequences of one column, one after another, int32."""
        return np.arange(int(self.lengths.sum()), dtype=np.int32) + np.int32(column)

    def verify(self, number: int, values: list[np.ndarray], slack: float = 0.0) -> None:
        """Compare a value with what was stored.

        Args:
            number: of the image, of the last frame of a window, or of the sequence.
            values: the image or the frames, uint8 [h, w, 3] each; or the sequence in each column.
            slack: mean difference that frames may have, which other code has converted to RGB.
        """
        if not 0 <= number < self.count:
            raise ValueError(f"there is no value {number}")
        if self.kind == "tokens":
            expected = [self.tokens(column, number) for column in range(len(values))]
        elif self.kind == "images":
            expected = [self.expected[number]]
        else:
            first = number - number % self.steps
            before = range(number - len(values) + 1, number + 1)
            expected = [self.expected[max(first, place)] for place in before]
        for wanted, found in zip(expected, values, strict=True):
            if found.dtype != wanted.dtype or found.shape != wanted.shape:
                raise ValueError(f"value {number} is {found.dtype} {found.shape}")
            same = np.array_equal(found, wanted)
            if not same and not (slack and np.abs(found.astype(np.int16) - wanted).mean() <= slack):
                raise ValueError(f"value {number} is not what was stored")


class Subject(source.Subject):
    """A store of values.

    `fill` stores them in `place`, `open` gives batches without end, `rows` the values of a batch.

    Attributes:
        slack: as of `Data.verify`.
    """

    slack = 0.0

    def __init__(self, data: Data, place: Path) -> None:
        self.data, self.place = data, place

    def fill(self) -> None:
        raise NotImplementedError

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        """Batches of so many values, or windows of frames, by so many processes, or this one if 0."""
        raise NotImplementedError

    def rows(self, batch: Any) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Number and values of each row, as `Data.verify` takes them; here of a mapping with "image" and "number"."""
        for number, image in zip(batch["number"].tolist(), batch["image"].numpy(), strict=True):
            yield number, list(image) if image.ndim == 4 else [image]

    def count(self, batch: Any) -> int:
        """Images, frames or tokens of a batch."""
        return sum(len(values) if self.data.kind == "video" else 1 for _, values in self.rows(batch))

    def stored(self) -> int:
        """Bytes that the store takes."""
        files = [self.place] if self.place.is_file() else self.place.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())

    def remove(self) -> None:
        """Remove what is not in the folder."""


class Worker(source.Worker):
    """Batches of one variant."""

    def build(self, folder: str, place: str, fill: bool = True) -> dict[str, Any]:
        """Fill a store, or take one that is there."""
        self.close()
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        self.held = self.kind(Data(folder), Path(place))
        if fill:
            self.subject.fill()
        self._batches: dict[tuple[int, ...], Iterator[Any]] = {}
        data = self.subject.data
        mean = float(data.lengths.mean()) if data.kind == "tokens" else 1.0
        return {"stored": self.subject.stored(), "payload": data.payload, "mean": mean}

    def close(self) -> dict[str, Any]:
        self._batches = {}
        return super().close()

    def remove(self) -> None:
        """See `Subject.remove`."""
        self.subject.remove()

    def _opened(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        key = batch, window, workers
        if key not in self._batches:
            self._batches[key] = self.subject.open(*key)
        return self._batches[key]

    def check(self, batch: int, window: int, workers: int) -> dict[str, Any]:
        """Compare some batches with what was stored."""
        for one in itertools.islice(self._opened(batch, window, workers), CHECKED):
            rows = list(self.subject.rows(one))
            if len(rows) != batch:
                raise ValueError(f"a batch of {batch} has {len(rows)} rows")
            for number, values in rows:
                self.subject.data.verify(number, values, self.subject.slack)
        return {}

    def measure(self, batch: int, window: int, workers: int, count: int, ahead: int) -> dict[str, Any]:
        """Seconds of so many batches, and their images, frames or tokens; those before, `ahead`, are left away."""
        subject, batches = self.subject, self._opened(batch, window, workers)
        for _ in itertools.islice(batches, ahead):
            pass
        tokens, items = subject.data.kind == "tokens", 0
        with source.undisturbed():
            started = time.perf_counter()
            for one in itertools.islice(batches, count):
                items += subject.count(one) if tokens else 0
            seconds = time.perf_counter() - started
        return {"seconds": seconds, "items": items or count * batch * window}

    def readers(
        self, count: int, small: list[str], large: list[str], batch: int, window: int
    ) -> dict[str, Any]:
        """Growth of the sum of PSS of so many processes, bytes; folder and place of both stores."""
        gc.collect()
        gc.freeze()
        pipes = [Pipe() for _ in range(count)]
        readers = [
            Process(target=_reader, args=(self.kind, far, small, large, batch, window)) for _, far in pipes
        ]
        try:
            for reader in readers:
                reader.start()
            seen = []
            for _ in range(2):
                for near, _ in pipes:
                    answer = _received(near)
                    if answer != "read":
                        raise ValueError(answer)
                for near, _ in pipes:
                    near.send("tell")
                seen.append(sum(_received(near) for near, _ in pipes))
                for near, _ in pipes:
                    near.send("go on")
            return {"bytes": seen[1] - seen[0]}
        finally:
            for reader in readers:
                reader.kill()
                reader.join()


def _received(pipe: Any, patience: float = 240.0) -> Any:
    if not pipe.poll(patience):
        raise ValueError(f"a reader took {patience:.0f} s")
    return pipe.recv()


def _reader(kind: Any, pipe: Any, small: list[str], large: list[str], batch: int, window: int) -> None:
    """Read two stores; after each, say so, and tell one's PSS when all have."""
    for folder, place in (small, large):
        try:
            subject = kind(Data(folder), Path(place))
            batches = subject.open(batch, window, 0)
            most = -(-subject.data.count // (batch * window))
            for one in itertools.islice(batches, most):
                for _, values in subject.rows(one):
                    for each in values:  # which could be a view of a file
                        each.sum()
            del one, each, values
            source.give_back()
            pipe.send("read")
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            return
        pipe.recv()
        pipe.send(source.memory_with(subject.data.folder))
        pipe.recv()
        if place != large[1]:
            del batches
            subject.close()
            gc.collect()
