"""Waiting until something holds, and processes that are stopped and go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

# Times as long are waited for: where instructions are translated, a library takes half a minute to start.
SLOWER = float(os.environ.get("GEAR_LOADER_SLOWER", 1))
PATIENCE = 60.0 * SLOWER  # seconds for what takes milliseconds: the machine may be busy with other things


def wait_until(
    condition: Callable[[], object], what: str = "", *, patience: float = PATIENCE, pause: float = 5e-3
) -> None:
    """Wait until something holds, which it does soon; look every `pause` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience:g} s for {what or condition}"
        time.sleep(pause)


def stop_process(pid: int) -> None:
    """Stop a process by SIGSTOP, and wait until all its threads stand still: until then it may answer."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    states = lambda: {(task / "stat").read_text().rpartition(") ")[2][0] for task in tasks.iterdir()}  # noqa: E731
    wait_until(lambda: states() <= {"T", "t"}, f"process {pid} to stop", pause=1e-3)


def go_on(pid: int) -> None:
    """Let a stopped process go on; nothing for one that runs."""
    os.kill(pid, signal.SIGCONT)
