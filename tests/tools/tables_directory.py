"""The directory of a run's named tables, and those that runs have left behind which were ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

__all__ = ["make_directory"]

PREFIX = "gear-loader-tests-"
LOCK = "lock"
OLD = 24 * 3600  # seconds after which a directory without a lock is no run's that is about to begin
_held: list[int] = []  # locks of this process: they are open until it ends


def make_directory(parent: str | os.PathLike[str]) -> Path:
    """Make a directory that others remove when this process has ended, and its forks too.

    Its file `LOCK` is locked by `flock`, which the system releases. A number of a process would not tell: it may be
    used again, or belong to another container.
    """
    _remove_left(Path(parent))
    made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    lock = os.open(made / "new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(made / "new", made / LOCK)  # nobody sees the lock free
    _held.append(lock)
    return made


def _remove_left(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not (path / LOCK).exists() and time.time() - path.stat().st_mtime > OLD:
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # no lock yet, locked, or another user's
            lock = os.open(path / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
