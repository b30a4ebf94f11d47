"""The loop of a peer's script: commands come in as lines of JSON, answers go out the same way.

Scripts of this folder run alone under a peer's interpreter (``python -I``), so they add this folder to the path and
import this module by its bare name. It imports nothing of this project, and of other packages only numpy.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["serve"]


def serve(kind: Any, threads: int, worker: Callable[[Any], Any]) -> None:
    """Say what was imported, or why it could not be; then answer commands until the input ends.

    A command ``{"do": name, ...}`` calls the worker's method of that name with the other entries. What goes wrong is
    answered by ``{"error": ...}``. A worker's `close`, if there is one, is called in the end.

    Args:
        kind: has `load`, which imports what it needs and returns a note or None, and `packages`, whose versions are
            told.
        threads: that libraries may use.
        worker: makes what does the work, of `kind`.
    """
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    try:
        note = kind.load()
        versions = {name: importlib.metadata.version(name) for name in kind.packages}
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    answer({"versions": versions, "note": note})
    made = worker(kind)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(getattr(made, command.pop("do"))(**command))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
    with contextlib.suppress(Exception):
        made.close()
