"""The environment of tests that start Ray."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def ray_directory() -> Iterator[str]:
    """A new directory as the home of Ray, which reports nothing; its path is short, because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # it kills workers for memory that others have
        yield folder
