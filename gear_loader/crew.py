"""A crew of threads that do parts of one job at the same time, for compiled code that releases the GIL."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable

import torch

__all__ = ["Crew", "crew"]

Job = Callable[[int], None]


class Crew:
    """`size` workers, one of which is the caller.

    Threads of a pool from the standard library would do; this hands over a job in a few microseconds, which counts
    where the job itself takes a hundred.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: list[queue.SimpleQueue[Job]] = [queue.SimpleQueue() for _ in range(size - 1)]
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        for i in range(1, size):
            threading.Thread(target=self._work, args=(i,), name=f"gear-loader-{i}", daemon=True).start()

    def run(self, job: Job) -> None:
        """Call `job(0)` to `job(size - 1)` at once and wait for all; the first exception is raised."""
        with self._turn:
            for jobs in self._jobs:
                jobs.put(job)
            try:
                job(0)
            finally:
                failures = [self._done.get() for _ in self._jobs]
        for failure in failures:
            if failure is not None:
                raise failure

    def _work(self, number: int) -> None:
        jobs = self._jobs[number - 1]
        while True:
            job = jobs.get()
            try:
                job(number)
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)


@functools.cache
def _crew(pid: int, size: int) -> Crew:
    return Crew(size)


def crew() -> Crew:
    """This process's crew: as many threads as torch uses, at most 8."""
    return _crew(os.getpid(), max(1, min(torch.get_num_threads(), 8)))
