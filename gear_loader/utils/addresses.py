"""Addresses of object stores (``s3://``, ``gs://``, ``hf://``, ``memory://``, ``http://``), by fsspec; with retries.

Credentials, endpoints and other options are fsspec's: its configuration files and variables such as
``FSSPEC_S3_ENDPOINT_URL``, and those of each store, such as ``AWS_PROFILE``.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gear_loader.errors import CheckpointError, GearError
from gear_loader.utils.arrays import shown
from gear_loader.utils.paths import is_address

DEADLINE_SECONDS = 60.0
"""A request that fails is repeated for this long."""
REQUEST_SECONDS = 30.0
"""Most that one try takes, besides the time of its bytes."""
_SLOWEST = 1 << 20  # bytes a second of a store that works
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 8.0

_ANSWERS = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_FINAL = {errno.EACCES, errno.EINVAL, errno.EPERM, errno.ENOTSUP, errno.ENOSPC, errno.EDQUOT}
_LATER = (408, 425, 429)  # below 500, these alone are repeated
# What lies below the stores' file systems raises errors that are no OSError: aiohttp, botocore, requests, gcsfs, Azure.
_OF_CONNECTIONS = {
    "ClientError",
    "ConnectionError",
    "HTTPClientError",
    "HTTPException",
    "HttpError",
    "IncompleteRead",
    "RequestException",
    "ResponseParserError",
    "ServiceRequestError",
    "TimeoutError",
}
_Result = TypeVar("_Result")
_most_seconds: contextvars.ContextVar[float] = contextvars.ContextVar("most_seconds", default=math.inf)


class UnreachableError(CheckpointError):
    """A store has refused a request, or failed until the deadline."""


def is_of_store(error: BaseException) -> bool:
    """Whether an error is a store's, which may pass: it has failed, or says that there is no such object."""
    missing = error.__cause__
    return isinstance(error, UnreachableError) or (
        isinstance(missing, FileNotFoundError) and is_address(missing.filename)
    )


def file_system(address: str, error: type[GearError] = CheckpointError) -> tuple[Any, str]:
    """The file system of an address, which keeps no listings, and the path in it.

    Raises:
        error: fsspec or the package of the scheme is not installed, or there is no such scheme.
    """
    if not is_address(address):
        raise error(f"The address {shown(address)} was received; expected scheme://... as of fsspec.")
    try:
        import fsspec
    except ImportError as missing:
        raise error(
            f"{address} needs fsspec, which is not installed. Install it, with the package of your store: "
            "pip install '.[buckets]' (in a clone of Gear Loader)"
        ) from missing
    try:
        system, path = fsspec.url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as problem:
        raise error(f"{address} cannot be opened: {problem}") from problem
    return system, str(path)


@contextlib.contextmanager
def shorter_deadline(seconds: float) -> Iterator[None]:
    """Let requests of this context end, and be repeated, within so many seconds, if that is less than else."""
    before = _most_seconds.set(seconds)
    try:
        yield
    finally:
        _most_seconds.reset(before)


def repeated(
    attempt: Callable[[], _Result],
    address: str,
    what: str,
    error: type[GearError] = UnreachableError,
    *,
    from_failure: bool = False,
) -> _Result:
    """Make a request, again for `DEADLINE_SECONDS` while the store fails or is busy.

    Args:
        attempt: makes the request; called with nothing.
        what: what is done with the address, such as "read", for the error.
        from_failure: whether the time counts from the first failure on, of what takes long.

    Raises:
        FileNotFoundError: there is nothing at the address.
        error: it was refused, or the deadline has passed.
    """
    began, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            return attempt()
        except FileNotFoundError as problem:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address) from problem
        except GearError:
            raise
        except Exception as problem:
            if from_failure and tries == 1:
                began = time.monotonic()
            seconds = time.monotonic() - began
            pause = min(_FIRST_PAUSE * 2 ** (tries - 1), _LONGEST_PAUSE) * random.uniform(0.5, 1)
            if not _is_transient(problem):
                raise error(
                    f"{address} cannot be {what}: the store answered {_shown(problem)}. Check the address and its "
                    "permissions, and what fsspec is told of credentials and the endpoint."
                ) from problem
            if seconds + pause >= min(DEADLINE_SECONDS, _most_seconds.get()):
                raise error(
                    f"{address} cannot be {what}: {tries} tries in {seconds:.0f} s failed, the last with "
                    f"{_shown(problem)}. Try again when the store works."
                ) from problem
        time.sleep(pause)


def call(system: Any, method: str, *given: Any, size: int = 0, **options: Any) -> Any:
    """Call a method of a file system; where it is asynchronous, a TimeoutError ends it.

    Args:
        size: bytes that it moves, for which it has more time.
    """
    if not getattr(system, "async_impl", False):
        return getattr(system, method)(*given, **options)
    from fsspec.asyn import sync

    timeout = min(REQUEST_SECONDS + size / _SLOWEST, _most_seconds.get())
    return sync(system.loop, getattr(system, f"_{method}"), *given, timeout=timeout, **options)


def _shown(problem: BaseException) -> str:
    # Where a file name was set on an OSError without a number, str() shows nothing else.
    text = str(problem.args[0]) if len(problem.args) == 1 else str(problem)
    return f"{type(problem).__name__} ({text})" if text else type(problem).__name__


def _is_transient(problem: BaseException) -> bool:
    """Whether a request that failed so may succeed later."""
    if isinstance(problem, _ANSWERS) or (isinstance(problem, OSError) and problem.errno in _FINAL):
        return False
    status = getattr(problem, "status", None) or getattr(problem, "code", None)
    status = status or getattr(getattr(problem, "response", None), "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _LATER
    names = {kind.__name__ for kind in type(problem).__mro__}
    return isinstance(problem, OSError) or not names.isdisjoint(_OF_CONNECTIONS)
