"""What `benchmarks.online` measures: groups of writers in processes of their own, tables in shared memory, readers."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks import machine
from benchmarks.harness import Incorrect
from benchmarks.online_workers import PATIENCE
from benchmarks.peers import online_peers
from benchmarks.peers.environments import first
from benchmarks.peers.online_peers import PEERS, Source, item_of
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.workloads import Workload
from gear_loader.errors import RateLimitError, RegionError
from gear_loader.storage.limiters import RateLimiter
from gear_loader.storage.shared_memory import region_path

__all__ = ["Crew", "Group", "Reader", "TableCache", "peer_crews", "specify"]

SOURCES = 128
_LEAD = 0.03  # seconds between telling writers to start and their start

_SWEEP = """
import contextlib, os, sys
paths = []
for line in sys.stdin:
    paths.append(line.rstrip("\\n"))
for path in paths:
    with contextlib.suppress(OSError):
        os.unlink(path)
"""


def specify(workload: Workload, *, batch: int, seed: int) -> dict[str, Any]:
    """What writers are told about what they write; see `online_peers.Source`."""
    return {
        "columns": {name: list(shape) for name, shape in workload.columns},
        "steps": workload.steps,
        "trajectories": workload.trajectories,
        "sources": min(SOURCES, workload.trajectories // 2),
        "batch": min(batch, workload.trajectories // 4),
        "seed": seed,
    }


class TableCache:
    """Tables in shared memory, whose names are gone afterwards, even if this process is killed.

    A process in a session of its own waits for the end of this one, to remove what is left.
    """

    def __init__(self) -> None:
        self._sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SWEEP],
            stdin=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )

    def __enter__(self) -> TableCache:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        self._sweeper.wait()

    @contextlib.contextmanager
    def table(
        self, workload: Workload, *, block_steps: int, limiter: RateLimiter | None = None
    ) -> Iterator[gear.Table]:
        """An empty table that evicts the oldest trajectories, for so many of the workload's.

        A tenth more blocks and places than these need lets writers go on while a reader keeps evicted ones.
        """
        name = f"bench-online-{os.getpid()}-{secrets.token_hex(4)}"
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.write(region_path(name) + "\n")
        self._sweeper.stdin.flush()
        places = workload.trajectories + workload.trajectories // 10
        lengths = np.full(places, workload.steps)
        table = gear.Table.create(
            workload.schema,
            max_steps=workload.trajectories * workload.steps,
            max_trajectories=places,
            block_steps=block_steps,
            max_blocks=gear.Table.required_blocks(lengths, block_steps),
            name=name,
            on_full="evict_oldest",
            rate_limiter=limiter,
            timeout=10.0 if limiter is None else PATIENCE,
        )
        try:
            yield table
        finally:
            with contextlib.suppress(RegionError):
                table.unlink()
            table.close()


# ---------------------------------------------------------------- writers


class Crew:
    """Processes of one kind, started when they are needed and kept for everything that follows.

    Args:
        name: what is started: of `online_workers.WORKERS` or `online_peers.PEERS`.
        python: an interpreter with the library; None for this one and this project's own.
        patience: seconds that an answer may take.
    """

    def __init__(self, name: str, python: Path | None = None, patience: float = 300.0) -> None:
        self.name, self._patience = name, patience
        self._folder = machine.ROOT if python is None else None
        own = [sys.executable, "-m", "benchmarks.online_workers"]
        self._command = own if python is None else [str(python), "-I", online_peers.__file__]
        self._processes: list[PeerProcess] = []

    def start(self, count: int = 1) -> Sequence[PeerProcess]:
        """The first `count` processes.

        Raises:
            PeerFailed: one cannot be started.
        """
        while len(self._processes) < count:
            command = [*self._command, self.name, "1"]
            self._processes.append(PeerProcess(command, patience=self._patience, folder=self._folder))
        return self._processes[:count]

    @property
    def about(self) -> dict[str, Any]:
        """What the processes say about themselves."""
        return self.start()[0].about

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.close()
        self._processes.clear()


class Group:
    """Writers that add at the same time, each in its process.

    Args:
        crew: whose processes.
        spec, mode: what they add, and how.
        writers: how many.
        table: where to, if they are this project's; others make their own store.
        target: the table that yardsticks copy into.
        fill: make the store full first.

    Raises:
        PeerFailed: they cannot.
    """

    def __init__(
        self,
        crew: Crew,
        spec: Mapping[str, Any],
        mode: str,
        writers: int,
        *,
        table: gear.Table | None = None,
        target: gear.Table | None = None,
        fill: bool = True,
    ) -> None:
        self._crew, self._spec, self._mode, self._table = crew, spec, mode, table
        self._processes = crew.start(writers)
        place = table if table is not None else target
        address: Any = None if place is None else place.name
        for number, process in enumerate(self._processes):
            arguments = {"spec": spec, "mode": mode, "number": number, "of": writers, "address": address}
            address = process.ask("build", **arguments)["address"]
        if fill:
            self._together("fill")

    def start(self, seconds: float) -> float:
        """Tell all of them to add for so many seconds, and return when they start, on the monotonic clock."""
        begin = time.monotonic() + _LEAD
        for process in self._processes:
            process.send("run", begin=begin, seconds=seconds)
        return begin

    def rate(self) -> float:
        """Wait until they are ready: items a second, of all of them together."""
        return _rate(self._answers())

    def measure(self, seconds: float) -> float:
        """Seconds that an item takes, of those that all of them add in so many seconds.

        Raises:
            Incorrect: the table has not received as many as were added.
        """
        before = self._inserted()
        self.start(seconds)
        answers = self._answers()
        items = sum(answer["items"] for answer in answers)
        if self._table is not None:
            expected = items // (1 if item_of(self._mode) == "trajectory" else self._spec["steps"])
            arrived = self._inserted() - before
            if arrived != expected:
                raise Incorrect(f"{arrived} trajectories have arrived, of {expected}")
        return 1 / _rate(answers)

    def check(self) -> None:
        """Raise `Incorrect` unless what they add is what the store has."""
        if self._table is None:
            try:
                for process in self._processes:  # in turn: each counts what arrives
                    process.ask("check")
            except PeerFailed as error:
                raise Incorrect(str(error)) from error
            return
        self.measure(0.05)
        table, spec = self._table, self._spec
        table.check_valid()
        if len(table) < spec["trajectories"] - len(self._processes):  # each writer may hold a place
            raise Incorrect(f"the table holds {len(table)} trajectories instead of {spec['trajectories']}")
        newest = table.indices()[-4 * SOURCES :]
        rows = [table[int(index)] for index in newest]
        source = Source(spec, 0)
        try:
            source.verify({name: np.stack([row[name].numpy() for row in rows]) for name in spec["columns"]})
        except ValueError as error:
            raise Incorrect(str(error)) from error

    def close(self) -> None:
        """Give back what they hold; the processes stay."""
        with contextlib.suppress(PeerFailed):
            self._together("close")

    def _inserted(self) -> int:
        return 0 if self._table is None else self._table.stats().num_inserted

    def _together(self, what: str) -> None:
        for process in self._processes:
            process.send(what)
        self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        # All of them, before the first error is raised: an answer that is left would be taken for the next one's.
        answers, failed = [], None
        for process in self._processes:
            try:
                answers.append(process.receive())
            except PeerFailed as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return answers


def _rate(answers: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(answer["items"] / answer["seconds"] for answer in answers))


def peer_crews(pythons: Sequence[Path]) -> Iterator[tuple[str, Crew | None, str]]:
    """For each peer its processes, started, or None and why not."""
    for name, peer in PEERS.items():

        def made(python: Path, name: str = name) -> Crew:
            crew = Crew(name, python)
            crew.start()
            return crew

        try:
            yield name, first(pythons, made, environment=peer.environment), ""
        except PeerFailed as error:
            yield name, None, str(error)


# ---------------------------------------------------------------- readers


class Reader:
    """`ReplayDataset.sample` of whole trajectories, in this process.

    Args:
        table: what writers of `spec` write into.
        writers: how many of them have written at most.
    """

    def __init__(
        self, table: gear.Table, spec: Mapping[str, Any], selector: Any, *, batch: int, writers: int
    ) -> None:
        self.batch = batch
        self.dataset = gear.ReplayDataset(
            table,
            batch_size=batch,
            windows=gear.Window(length=spec["steps"]),
            anchor="first",
            selector=selector,
            seed=spec["seed"],
            device="cpu",
            prefetch=0,
        )
        sources = [Source(spec, number) for number in range(writers)]
        self._mark = sources[0].mark
        self._expected = {
            name: torch.from_numpy(np.concatenate([source.stacked[name] for source in sources]))
            for name in spec["columns"]
        }

    def read(self) -> Mapping[str, torch.Tensor]:
        """One batch."""
        return self.dataset.sample()

    def verify(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Raise `Incorrect` if a row is torn, or none that was written."""
        marks = batch[self._mark].reshape(self.batch, -1)[:, 0].long()
        most = len(self._expected[self._mark])
        if int(marks.min()) < 0 or int(marks.max()) >= most:
            raise Incorrect("a row begins with what marks no trajectory")
        for name, values in self._expected.items():
            if not torch.equal(batch[name], values[marks]):
                wrong = (batch[name] != values[marks]).reshape(self.batch, -1).any(1)
                raise Incorrect(f"{name}: {int(wrong.sum())} of {self.batch} rows are torn or mixed up")

    def until(self, end: float, *, look: bool = False, patient: bool = False) -> int:
        """Read batches, at least try one, until a time of the monotonic clock; returns how many.

        Args:
            look: verify each of them.
            patient: add up every column, as a stand-in for training, and put up with the rate limiter's refusal.
        """
        count = 0
        while True:
            with contextlib.suppress(*([RateLimitError] if patient else [])):
                batch = self.read()
                count += 1
                if look:
                    self.verify(batch)
                if patient:
                    for name in self._expected:
                        batch[name].numpy().sum()  # in one thread: torch's several would wait for their turns
            if time.monotonic() >= end:
                return count
