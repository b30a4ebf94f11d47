"""Data sets as a task: from a folder, or an address, to batches of random samples.

The samples lie in a folder that the experiment has made (`Data`), and once more as a data set that the owner of its
format wrote. Stores read that one, or are filled by their own libraries. A pass is so many batches of random samples,
without replacement where a library can. Times count from the moment at which a store is opened, with its library
imported, and nothing cached but by the kernel.

Memory of readers: so many processes, forked before anything was opened, read a small store and close it, then each make
a pass over the large one and look at every value; the growth of the sum of their PSS in between is the figure, without
pages of files that are not the data set's.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe, Process
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import source
from benchmarks.peers.values import _received

SEED = 3
FRAMES_PER_SECOND = 10
COLUMNS = {"state": "observation.state", "action": "action"}
CAMERAS = {"top": "observation.images.top", "wrist": "observation.images.wrist"}
"""Arrays of `Data` -> names in data sets of robots."""


class Data:
    """What is in a data set.

    ::

        spec.json      kind: "robot", "numbers" or "texts"; lengths; further entries are attributes
        NAME.npy       robot: state, action, top and wrist, uint8 [steps, h, w, 3]; numbers: observations, actions
        texts.json     texts: a prompt and an answer of each episode

    Attributes:
        kind, lengths: see above. count: samples: steps, or episodes of text. payload: bytes of all values, decoded.
        made: the data set that the owner of its format wrote. slack: mean difference that frames may have.
    """

    kind: str
    lengths: list[int]
    count: int
    payload: int
    slack: float = 0.0
    cameras: str = ""
    address: str = ""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.__dict__.update(json.loads((self.folder / "spec.json").read_text(encoding="utf-8")))
        self.made = self.folder / "made"
        self.arrays = {file.stem: np.load(file, mmap_mode="r") for file in sorted(self.folder.glob("*.npy"))}

    @functools.cache  # noqa: B019 - a process has two of these at most
    def texts(self) -> list[list[str]]:
        found: list[list[str]] = json.loads((self.folder / "texts.json").read_text(encoding="utf-8"))
        return found

    def episodes(self) -> Iterator[tuple[int, int]]:
        """First step and end of each."""
        return itertools.pairwise([0, *np.cumsum(self.lengths).tolist()])

    def verify(self, numbers: np.ndarray, values: Mapping[str, Any]) -> None:
        """Compare rows with what is stored: the numbers of the samples, and name -> their values."""
        if numbers.min() < 0 or numbers.max() >= self.count:
            raise ValueError(f"there is no sample {numbers.max()}")
        texts = self.texts() if self.kind == "texts" else []
        for name, found in values.items():
            if texts:
                place = ("prompt", "answer").index(name)
                same = list(found) == [texts[number][place] for number in numbers.tolist()]
            else:
                expected, given = self.arrays[name][numbers], np.asarray(found)
                if given.shape != expected.shape or given.dtype != expected.dtype:
                    raise ValueError(f"{name} is {given.dtype} {given.shape}; expected {expected.shape}")
                same = np.array_equal(given, expected)
                if not same and self.slack and name in CAMERAS:
                    same = np.abs(given.astype(np.int16) - expected).mean() <= self.slack
            if not same:
                raise ValueError(f"{name} is not what was stored")


class Subject(source.Subject):
    """A store of a data set.

    Attributes:
        data: what is in it. place: where its own files are, kept; `cache`: where those are that the first reader makes.
        together: whether readers wait for each other when they open it.
    """

    together = False

    def __init__(self, data: Data, place: Path) -> None:
        self.data, self.place, self.cache = data, place, place.with_name(f"{place.name}-cache")

    def fill(self) -> None:
        """Write its own files, if it does not read the data set that there is."""

    def open(self, batch: int, workers: int, passes: int) -> None:
        """Open it for passes of so many batches, made by so many processes, or this one if 0."""
        raise NotImplementedError

    def join(self, rank: int, world: int) -> None:
        """Called before `open` in one of several processes that read the same; rank 0 opens first."""

    def batches(self) -> Iterator[Any]:
        """A pass."""
        raise NotImplementedError

    def rows(self, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """The numbers of the samples of a batch and their values, as `Data.verify` takes them."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        gc.collect()
        shutil.rmtree(self.cache, ignore_errors=True)


class Loaded(Subject):
    """One that a `DataLoader` reads: `store`."""

    def batches(self) -> Iterator[Any]:
        return iter(self.store)


class Worker(source.Worker):
    """Batches of one variant."""

    def build(self, folder: str, place: str) -> dict[str, Any]:
        """Fill a store."""
        self.open(folder, place)
        self.subject.fill()
        return {}

    def open(self, folder: str, place: str) -> dict[str, Any]:
        """Take one that is filled."""
        self.close()
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        self.held = self.kind(Data(folder), Path(place))
        return {}

    def _passed(self, batch: int, passes: int) -> float:
        """Seconds of a pass."""
        started = time.perf_counter()
        count = sum(1 for _ in self.subject.batches())
        seconds = time.perf_counter() - started
        if count != passes:
            raise ValueError(f"a pass has {count} batches of {batch}; expected {passes}")
        return seconds

    def check(self, batch: int, workers: int, passes: int) -> dict[str, Any]:
        """Compare a pass with what is stored."""
        subject = self.subject
        subject.close()
        subject.open(batch, workers, passes)
        for one in subject.batches():
            numbers, values = subject.rows(one)
            if len(numbers) != batch:
                raise ValueError(f"a batch of {batch} has {len(numbers)} rows")
            subject.data.verify(numbers, values)
        subject.close()
        return {}

    def measure(self, batch: int, workers: int, passes: int, later: int) -> dict[str, Any]:
        """Seconds from opening to the first batch and to the end of the first pass; then of so many passes.

        And processor time of the first pass, opening included, and of those passes.
        """
        subject = self.subject
        subject.close()
        with source.undisturbed():
            before, started = _processor_seconds(), time.perf_counter()
            subject.open(batch, workers, passes)
            batches = subject.batches()
            next(batches)
            first_batch = time.perf_counter() - started
            for _ in batches:
                pass
            first = time.perf_counter() - started
            busy = _processor_seconds()
            seconds = sum(self._passed(batch, passes) for _ in range(later))
            used = {"processor": _processor_seconds() - busy, "processor_first": busy - before}
        subject.close()
        return {"first_batch": first_batch, "first": first, "seconds": seconds, **used}

    def readers(self, count: int, small: list[str], batch: int, passes: int) -> dict[str, Any]:
        """Growth of the sum of PSS of so many processes, bytes. small: folder and place of what they read before."""
        subject = self.subject
        subject.close()
        gc.collect()
        gc.freeze()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        subjects = [self.kind(Data(small[0]), Path(small[1])), subject]
        pipes = [Pipe() for _ in range(count)]
        readers = [
            Process(target=_reader, args=(subjects, rank, count, far, batch, (4, passes)))
            for rank, (_, far) in enumerate(pipes)
        ]
        near = [one for one, _ in pipes]
        try:
            for reader in readers:
                reader.start()
            return {"bytes": -_read(near, subject.together) + _read(near, subject.together)}
        finally:
            for reader in readers:
                reader.kill()
                reader.join()
            for each in subjects:
                each.close()


def _read(pipes: list[Any], together: bool) -> int:
    """Let processes open and read a store; the sum of their PSS when all have."""
    pipes[0].send("open")
    if not together:  # the others open what the first one has loaded
        _answer(pipes[0])
    for pipe in pipes[1:]:
        pipe.send("open")
    for pipe in pipes[not together :]:
        _answer(pipe)
    for what in ("read", "tell"):
        for pipe in pipes:
            pipe.send(what)
        taken = sum(map(_answer, pipes))
    for pipe in pipes:
        pipe.send("close")
    for pipe in pipes:
        _answer(pipe)
    return taken


def _processor_seconds() -> float:
    """Processor time of this process and its children, which are there before and after."""
    taken, ticks = time.process_time(), os.sysconf("SC_CLK_TCK")
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text(encoding="ascii").split():
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            taken += (int(fields[11]) + int(fields[12])) / ticks
    return taken


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answer(pipe: Any) -> int:
    answer = _received(pipe)
    if isinstance(answer, str):
        raise ValueError(answer)
    return int(answer)


def _reader(
    subjects: list[Any], rank: int, world: int, pipe: Any, batch: int, passes: tuple[int, int]
) -> None:
    """Read stores, one after the other; each step when it is told to."""
    try:
        for subject, most in zip(subjects, passes, strict=True):
            pipe.recv()
            subject.join(rank, world)
            subject.open(batch, 0, most)
            pipe.send(0)
            pipe.recv()
            for one in subject.batches():
                _, values = subject.rows(one)
                for each in values.values():  # which could be views of a file
                    _ = each.sum() if isinstance(each, np.ndarray) else sum(map(len, each))
                del one, values, each
            source.give_back()
            pipe.send(0)
            pipe.recv()
            pipe.send(source.memory_with(subject.data.folder))
            pipe.recv()
            subject.close()
            pipe.send(0)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        for subject in subjects:
            subject.close()
    pipe.recv()
