"""Calls in a forked child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked process, or "Error: message"; "signal n" if that died."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(theirs, answer.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        answer = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return answer if status == 0 else f"signal {signal.Signals(-status).name}"
