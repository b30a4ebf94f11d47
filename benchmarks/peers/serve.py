"""One process of a benchmark: does a task with a library, in the interpreter that has it.

    python -I benchmarks/peers/serve.py TASK LIBRARY VARIANT THREADS [FOLDER]

TASK and LIBRARY are modules of this folder: ``batches``, ``checkpoint``, ``learn``, ``memory``, ``online``, ``select``,
``sequences``, ``train`` or ``transitions``; ``reverb``, ``torchrl``, ``cpprb``, ``tianshou``, ``sb3``,
``transferqueue``, or one whose name begins with
``plain`` (torch and numpy alone) or ``gear`` (this project). Only the last import anything of this project from outside
of this folder. FOLDER has the `gear_loader` to use, by default that of this checkout.

The first line of standard output says what was imported, or why it could not be. Each line of standard input is then a
command as JSON, ``{"do": NAME, ...}``: the task's `Worker` has a method of that name, whose arguments are the other
entries; each line of standard output is its answer, ``{"error": ...}`` if it failed. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any


def answer_commands(greet: Any, make: Any) -> None:
    """Answer commands until the input ends."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def done(work: Any, **arguments: Any) -> bool:
        try:
            answer(work(**arguments) or {})
            return True
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            return False

    if not done(greet):
        return
    worker = make()
    for line in sys.stdin:
        command = json.loads(line)
        done(lambda do, **arguments: getattr(worker, do)(**arguments), **command)
    with contextlib.suppress(Exception):
        worker.close()


def serve(task: str, library: str, variant: str, threads: int) -> None:
    """Import what is needed, say so, and answer commands."""
    kinds = importlib.import_module(f"benchmarks.peers.{library}")

    def greet() -> dict[str, Any]:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ[name] = str(threads)
        for module in kinds.MODULES:
            importlib.import_module(module)
        if hasattr(kinds, "load"):
            kinds.load(task, threads)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        return {"versions": {name: importlib.metadata.version(name) for name in kinds.PACKAGES}}

    worker = importlib.import_module(f"benchmarks.peers.{task}").Worker
    answer_commands(greet, lambda: worker(kinds.KINDS[task], variant))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.path[:0] = sys.argv[5:]
    serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
