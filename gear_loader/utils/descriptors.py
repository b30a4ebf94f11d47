"""Descriptors of open files that no exception of a signal handler can leak."""

from __future__ import annotations

import functools
import os
import select

Descriptor = select.epoll
"""Owns a descriptor of any file, closes it at the end of a ``with`` block or of the object, and does so in C.

An `int` is owned by nobody until the next line has stored it, and a finaliser in Python can be interrupted. Nothing of
epoll is used but `fileno`, `close` and the end of the object, which warns of nothing.
"""


def open_descriptor(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Descriptor:
    """As `os.open`, with an owner from the beginning: both calls are made in C, where no signal handler runs.

    Raises:
        OSError: as `os.open`.
    """
    call = functools.partial(os.open, mode=mode, dir_fd=dir_fd)
    return next(map(Descriptor.fromfd, map(call, (path,), (flags,))))
