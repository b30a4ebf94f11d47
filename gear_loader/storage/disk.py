"""Options and statistics of tables that are written to a disk while they are used."""

from __future__ import annotations

import dataclasses
import os
from typing import Protocol

from gear_loader.errors import CheckpointError
from gear_loader.storage.rules import check_seconds

__all__ = ["Disk", "DiskStats", "DiskWriter", "checked_path"]

_MANIFEST_NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Disk:
    """A directory into which a table is written in the background; see `Table.create`.

    The directory is a checkpoint at every moment: `Table.recover` brings the table back and goes on writing into it,
    `Table.load` copies it. Use it with one table at a time.

    Attributes:
        path: a directory that is empty or to be created; it may be a symbolic link to one. Use a disk that outlives
            the machine's memory, not a tmpfs.
        sync_seconds: seconds between two writes. A trajectory is on disk at most this long after its commit, plus the
            duration of the write under way then and of its own (`DiskStats.write_seconds`). Each write takes 68 bytes
            a live trajectory beside the new steps; raise it for tables of millions of short ones.

    Raises:
        CheckpointError: an invalid path. SchemaError: invalid seconds.
    """

    path: str | os.PathLike[str]
    sync_seconds: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(checked_path(self.path)))
        object.__setattr__(self, "sync_seconds", check_seconds("sync_seconds", self.sync_seconds))

    def exists(self) -> bool:
        """Whether a table has been written there, so that `Table.recover` is to be used and not `Table.create`."""
        return os.path.lexists(os.path.join(self.path, _MANIFEST_NAME))


@dataclasses.dataclass(frozen=True)
class DiskStats:
    """State of a table's copy on disk.

    Attributes:
        path: directory.
        unwritten_trajectories: live trajectories committed after the last write began; a crash of the machine now
            would lose them.
        unwritten_seconds: seconds since the first of them was committed; 0.0 without any.
        writes: number of complete writes of this process.
        bytes_written: bytes of their files.
        write_seconds, longest_write_seconds: duration of the last complete write and of the longest one.
        error: why the last write failed; None if it was complete.
    """

    path: str
    unwritten_trajectories: int
    unwritten_seconds: float
    writes: int
    bytes_written: int
    write_seconds: float
    longest_write_seconds: float
    error: str | None

    def __str__(self) -> str:
        behind = (
            f", {self.unwritten_trajectories:,} trajectories not on disk, {self.unwritten_seconds:,.1f} s"
        )
        return (
            f"{self.writes:,} writes of {self.bytes_written:,} B, at most {self.longest_write_seconds:,.2f} s each"
            f"{behind if self.unwritten_trajectories else ''}{f'; {self.error}' if self.error else ''}"
        )


class DiskWriter(Protocol):
    """The background writer of a table, `gear_loader.checkpoint.behind.WriteBehind`."""

    def writes_to(self, path: str) -> bool:
        """Whether this process writes the table into the directory `path`."""

    def flush(self) -> None:
        """Write everything that is committed now."""

    def stats(self) -> DiskStats | None:
        """State of the copy on disk; None in a forked child, which does not write."""

    def close(self) -> None:
        """Write the rest and end; idempotent."""


def checked_path(path: str | os.PathLike[str]) -> str:
    """Return the path of a checkpoint as a string that the file system can encode."""
    try:
        text = os.fspath(path)
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return text
    except (TypeError, UnicodeEncodeError):
        pass
    raise CheckpointError(
        f"The path {path!r} was received; expected the path of a directory, a string without NUL that the file "
        "system can encode."
    )
