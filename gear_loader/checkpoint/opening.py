"""Opening a checkpoint where the user says: a directory, or the address of a bucket."""

from __future__ import annotations

import os

from gear_loader.checkpoint.bucket import Bucket
from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.errors import CheckpointError
from gear_loader.utils.paths import is_address


def place_of(path: str | os.PathLike[str]) -> str:
    """An address as it is, or the absolute path of a directory."""
    text = os.fspath(path)
    return text if is_address(text) else os.path.abspath(text)


def make_directory(path: str) -> Directory:
    """Open a directory to write into; create it if it does not exist."""
    return Bucket.at_address(path, write=True) if is_address(path) else Directory.make(path)


def open_directory(path: str) -> Directory:
    """Open a directory."""
    return Bucket.at_address(path, write=False) if is_address(path) else Directory.open(path)


def open_to_load(path: str, missing: str) -> Directory:
    """Open the directory of a checkpoint for loading.

    Args:
        missing: text of the error if the directory does not exist.

    Raises:
        CheckpointError: the directory does not exist or cannot be read.
    """
    try:
        return open_directory(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(missing) from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {REMEDY}") from error
