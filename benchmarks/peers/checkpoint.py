"""Saving and loading as a task.

A store is filled and saved; more is added, and it is saved again into the same folder. What was saved is dropped from
the page cache and loaded; then it is read once, so that the page cache has it, and loaded again. What was loaded last
is compared with what was stored. A save takes until everything is on the disk, whether the library waits or not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.peers import source
from benchmarks.peers.source import Source, Steps

UNIT = 20
"""Trajectories that are made, stored and compared at a time."""


class Subject(source.Subject):
    """A store of the trajectories of a source, which saves into a folder.

    `open` makes it empty, with room for all, `add(first, rows)` stores `UNIT` trajectories, `save` saves it, `restore`
    makes a store of what was saved, `everything` gives it in order: (number of the first, name -> values of `UNIT`).
    synced: whether its save waits until everything is on the disk.
    """

    synced = False
    save: Callable[[], object]
    restore: Callable[[], None]
    everything: Callable[[], Iterator[tuple[int, Mapping[str, Any]]]]

    def __init__(self, source: Source, folder: str) -> None:
        self.source, self.folder = source, folder

    def path(self, name: str) -> str:
        """A file or folder that it saves to."""
        return os.path.join(self.folder, name)

    def open(self) -> None:
        """A yardstick has no store."""

    def add(self, first: int, rows: Steps) -> None:
        """Nor anything to add to."""

    def check(self) -> None:
        """Raise `ValueError` unless the store has what was added, in order."""
        place = 0
        for first, rows in self.everything():
            found = self.source.verify(rows)
            if first != place or (found != self.source.begins[first : first + len(found)]).any():
                raise ValueError(f"trajectory {first} comes after {place}, or another in its place")
            place += len(found)
        if place != len(self.source):
            raise ValueError(f"{place} trajectories were loaded; expected {len(self.source)}")


class Worker(source.Worker):
    """Goes all the way with one variant."""

    def journey(self, spec: dict[str, Any], folder: str) -> dict[str, Any]:
        """Seconds of each part; what is known further under "extras"."""
        first = int(spec["trajectories"])
        trajectories = Source({**spec, "trajectories": first + int(spec["more"])})
        found: dict[str, Any] = {"extras": {}}
        with contextlib.closing(self.kind(trajectories, folder)) as subject:
            subject.open()
            for name, begin, end in (("save", 0, first), ("save again", first, len(trajectories))):
                for number, rows in trajectories.stacked(UNIT, begin, end):
                    subject.add(number, rows)
                returned, extras = peak_beyond(subject.save)
                found[name] = returned + timed(lambda: _each(folder, os.O_RDWR, os.fsync))
                found["extras"][name] = {**extras, "seconds until it returns": returned}
            subject.close()
            found["extras"]["save again"]["bytes on disk"] = sum(map(os.path.getsize, _files(folder)))
            _each(folder, os.O_RDONLY, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
            found["load, cold"] = timed(subject.restore)
            subject.close()
            _each(folder, os.O_RDONLY, _read)
            found["load"] = timed(subject.restore)
            subject.check()
            return {**found, "synced": subject.synced}


def timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _files(folder: str) -> list[str]:
    return [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]


def _each(folder: str, how: int, work: Any) -> None:
    """Do something with all files below a folder."""
    for path in _files(folder):
        fd = os.open(path, how)
        work(fd)
        os.close(fd)


def _read(fd: int) -> None:
    while os.read(fd, 1 << 22):
        pass


def peak_beyond(work: Any) -> tuple[float, dict[str, float]]:
    """Seconds that it takes; the most bytes of memory that this process had beyond what it began with, if known."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # resets the peak
    except OSError:
        return timed(work), {}
    before = _status("VmRSS")
    return timed(work), {"peak bytes": _status("VmHWM") - before}


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
