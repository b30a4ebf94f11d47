"""Compiles the loops of the CPU path once, in two processes, before the tests' workers would each compile them.

    python tests/tools/compile_loops.py

numba keeps what it has compiled. One process begins with the loops that change a table's index. The other begins with
those of draws and batches, and changes its tables by the twins of the former in Python, so that the two do not compile
the same.
"""

from __future__ import annotations

import multiprocessing
import time

from gear_loader import warmup
from gear_loader.storage.index_arrays import IndexArrays


def changes() -> None:
    """Compile the loops that change an index; then what is left."""
    warmup._adding()
    warmup._writing()
    warmup.warm_up()


def reads() -> None:
    """Compile the loops of draws, batches and checkpoints."""
    operate = IndexArrays.operate
    IndexArrays.operate = lambda index, **_: operate(index, compiled=False)  # type: ignore[method-assign]
    warmup._drawing()
    warmup._packing()
    warmup._prioritizing()
    warmup._sharding()
    warmup._saving()
    warmup._sampling()


def main() -> None:
    began = time.monotonic()
    halves = [multiprocessing.get_context("spawn").Process(target=half) for half in (changes, reads)]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    if any(half.exitcode for half in halves):
        raise SystemExit("A loop could not be compiled or used; the error is above.")
    print(f"Compiled the loops of the CPU path in {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
