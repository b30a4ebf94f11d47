"""Data sets written to addresses of object stores: made whole on this machine, then uploaded."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from gear_loader.checkpoint.names import WRITABLE
from gear_loader.errors import SchemaError
from gear_loader.utils.addresses import call, file_system, repeated

_THREADS = 8
_LAST = ("meta/info.json",)
"""What readers open first, by its name in the data set; it is uploaded when all else is there."""


@contextlib.contextmanager
def uploaded_place(address: str) -> Iterator[str]:
    """A path in the temporary directory to write to, which is uploaded in the end; after an error nothing is left.

    Raises:
        SchemaError: the store cannot hold it, or there is something at the address already.
        CheckpointError: the store refuses, or fails until the deadline.
    """
    scheme = address.partition("://")[0]
    if scheme not in WRITABLE:
        raise SchemaError(
            f"{address} has the scheme {scheme!r}; expected one of {', '.join(WRITABLE)}. Export to a local place, and "
            "copy it there. Nothing was written."
        )
    system, key = file_system(address, SchemaError)
    key = key.rstrip("/")
    _check_free(system, key, address)
    with tempfile.TemporaryDirectory(prefix="gear-loader-export-") as folder:
        partial = os.path.join(folder, "data")
        yield partial
        _check_free(system, key, address)
        _upload(system, key, address, partial)


def _check_free(system: Any, key: str, address: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        about = repeated(lambda: call(system, "info", key), address, "read")
        if about["type"] == "directory" and not repeated(
            lambda: call(system, "find", key), address, "listed"
        ):
            return
        raise SchemaError(
            f"{address} is there already; expected a place for a new data set. Remove it first. Nothing was written."
        )


def _upload(system: Any, key: str, address: str, path: str) -> None:
    """Upload a file, or the files of a directory; remove all of them after an error."""
    names = [""] if os.path.isfile(path) else sorted(_files_below(path))
    done: list[str] = []

    def put(name: str) -> None:
        local, target = (os.path.join(path, name), f"{key}/{name}") if name else (path, key)
        where = f"{address.rstrip('/')}/{name}" if name else address
        size = os.path.getsize(local)
        done.append(target)
        repeated(
            lambda: call(system, "put_file", local, target, size=size),
            where,
            "written",
            from_failure=True,
        )

    def put_all(some: Sequence[str]) -> None:
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            waiting = [pool.submit(put, name) for name in some]
            try:
                for each in concurrent.futures.as_completed(waiting):
                    each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    try:
        put_all([name for name in names if name not in _LAST])
        put_all([name for name in names if name in _LAST])
    except BaseException:
        for target in done:
            with contextlib.suppress(Exception):  # the store may be out of reach
                call(system, "rm_file", target)
        raise


def _files_below(path: str) -> Iterator[str]:
    for at, _, names in os.walk(path):
        for name in names:
            yield os.path.relpath(os.path.join(at, name), path).replace(os.sep, "/")
