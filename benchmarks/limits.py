"""Control groups that limit the memory of processes, page cache included, and a swap file. Both need to be root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MemoryGroup", "Unlimited", "memory_limited", "swap_file"]

_numbers = itertools.count()


class Unlimited(Exception):
    """Why memory cannot be limited here, or no swap file be used."""


class MemoryGroup:
    """A control group of processes.

    procs: file into which its processes write their ids. limit: file with the most bytes that they may use together.
    """

    def __init__(self, folder: Path, limit: str) -> None:
        self.procs, self._limit = folder / "cgroup.procs", folder / limit

    def allow(self, size: int) -> None:
        """Limit the memory of the processes, page cache included, to so many bytes."""
        self._limit.write_text(str(size))


@contextlib.contextmanager
def memory_limited() -> Iterator[MemoryGroup]:
    """A control group without a limit yet; it ends when its processes have.

    Raises:
        Unlimited: the kernel has none, or this process may not make one.
    """
    root = Path("/sys/fs/cgroup")
    kinds = ((root / "memory", "memory.limit_in_bytes"), (root, "memory.max"))
    group: Path | None = None
    try:
        for base, file in kinds:
            if (base / "cgroup.procs").exists():
                if file == "memory.max" and "memory" not in (base / "cgroup.subtree_control").read_text():
                    (base / "cgroup.subtree_control").write_text("+memory")
                group = base / f"gear-loader-{os.getpid()}-{next(_numbers)}"
                group.mkdir()
                break
    except OSError as error:
        raise Unlimited(f"no control group can be made: {error}") from None
    if group is None:
        raise Unlimited(f"{root} has no control groups for memory")
    try:
        yield MemoryGroup(group, file)
    finally:
        for _ in range(100):  # until its processes have ended
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


@contextlib.contextmanager
def swap_file(path: Path, size: int) -> Iterator[None]:
    """Use a new file of so many bytes for swapping, and remove it at the end.

    Raises:
        Unlimited: it cannot be used.
    """
    try:
        with open(path, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            os.posix_fallocate(file.fileno(), 0, size)
        for command in (["mkswap", str(path)], ["swapon", str(path)]):
            subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        path.unlink(missing_ok=True)
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise Unlimited(f"no swap file can be used: {why}") from None
    try:
        yield
    finally:
        subprocess.run(["swapoff", str(path)], check=False, capture_output=True)
        path.unlink(missing_ok=True)
