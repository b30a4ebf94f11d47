"""Opening a checkpoint where the user says: a directory, or the address of a bucket."""

from __future__ import annotations

import contextlib
import os

from gear_loader.checkpoint.bucket import Bucket
from gear_loader.checkpoint.directory import REMEDY, Directory
from gear_loader.checkpoint.files import write_small
from gear_loader.checkpoint.housekeeping import convert_errors
from gear_loader.checkpoint.json_file import read_limited
from gear_loader.checkpoint.names import PART
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


def replace_file(path: str | os.PathLike[str], name: str, data: bytes) -> None:
    """Write a small file beside a checkpoint, or replace it at once."""
    where = place_of(path)
    with convert_errors(where), make_directory(where) as directory:
        with contextlib.suppress(FileNotFoundError):
            directory.remove_file(name + PART)
        write_small(directory, name + PART, data)
        directory.rename(name + PART, name)
        directory.sync()


def read_file(path: str | os.PathLike[str], name: str) -> bytes:
    """The contents of such a file. Raises FileNotFoundError, or CheckpointError if it cannot be read."""
    with open_directory(place_of(path)) as directory:
        return read_limited(directory, name, lambda size: None)


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
