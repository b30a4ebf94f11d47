"""Paths that users give."""

from __future__ import annotations

import os
import re

from gear_loader.errors import CheckpointError, GearError
from gear_loader.utils.arrays import shown

# Path("s3://bucket/x") is "s3:/bucket/x", and fsspec chains schemes: "simplecache::s3://bucket/x".
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.:\-]*:/")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.:\-]*://")
_LOCAL = re.compile(r"(?:file|local):", re.IGNORECASE)


def is_address(path: object) -> bool:
    """Whether this is ``scheme://...``, which `gear_loader.utils.addresses` opens; not ``file://...``."""
    return isinstance(path, str) and _ADDRESS.match(path) is not None and _LOCAL.match(path) is None


def path_or_address(path: str | os.PathLike[str]) -> str:
    """Return an address as it is, and else what `local_path` returns."""
    return str(path) if is_address(path) else local_path(path)


def local_path(
    path: str | os.PathLike[str], error: type[GearError] = CheckpointError, what: str = "The path"
) -> str:
    """Return the path of a local file or directory as a string that the file system can encode.

    Args:
        error: raised for anything else, also for ``scheme://...``, which the system takes for a local directory.
        what: name of the path in the error.
    """
    try:
        text = os.fspath(path)
        fits = isinstance(text, str) and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):
        fits = False
    if not fits:
        raise error(
            f"{what} {shown(path)} was received; expected the path of a local file or directory, a string without NUL "
            "that the file system can encode."
        )
    if _SCHEME.match(text):
        raise error(
            f"{what} {text!r} has a scheme; expected the path of a local file or directory. Mount the remote store, or "
            f"copy between it and a local directory with its own tool. (A local directory of this name: './{text}'.)"
        )
    return text
