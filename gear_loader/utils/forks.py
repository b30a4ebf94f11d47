"""What must not be destroyed, in a forked child or at the end of a process."""

from __future__ import annotations

import ctypes


def keep_for_ever(*objects: object) -> None:
    """Never destroy `objects` in this process, not even at exit.

    For a forked child whose parent uses CUDA: memory of the GPU that another stream has used (`Tensor.record_stream`)
    cannot be freed there, and torch ends the process when it is. At exit: memory that a one-sided read may still write.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
