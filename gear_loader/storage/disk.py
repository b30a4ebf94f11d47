"""Options and statistics of tables that are written to a disk while they are used, and the tier that lies there."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal, Protocol

from gear_loader.errors import CheckpointError, SchemaError
from gear_loader.storage.source import Source
from gear_loader.storage.table_rules import check_seconds
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import byte_count, one_of
from gear_loader.utils.paths import is_address, local_path

_MANIFEST_NAME = "manifest.json"
Keep = Literal["auto", "newest", "oldest", "priority"]
_KEEPS = ("auto", "newest", "oldest", "priority")


@dataclasses.dataclass(frozen=True)
class Disk:
    """A directory into which a table is written in the background; see `Table.create`.

    The directory is a valid checkpoint at every moment. `Table.recover` restores the table and goes on writing into it;
    `Table.load` makes a copy. One table at a time can use it. If a table is dropped without `close`, its thread still
    writes the rest; `Table.create` and `Table.recover` of the same process wait for that.

    Attributes:
        path: a directory that is empty or to be created; it may be a symbolic link to one. Use a disk that outlives
            the machine's memory, not a tmpfs.
        sync_seconds: seconds between two writes. A trajectory is on disk at most this long after its commit, plus the
            duration of two writes: the one under way and its own (`DiskStats.write_seconds`). A write has the new
            steps, and 72 bytes for each trajectory that was added, removed, drawn or given a priority since the last
            one; trajectories with overwritten values are written again. Draws and priorities alone begin no write: they
            are on disk after the next one that trajectories need, `Table.save` or `Table.close`.
        size: makes the disk a tier below the memory: trajectories that do not fit into the table's `memory` are on disk
            only. The most bytes of steps in its files, an int or a text such as ``"500GiB"``. A write needs more room,
            because the files of the two writes before it stay until it is complete. None: everything is in memory, and
            the disk has a copy.
        keep: with `size`, which trajectories stay in memory: the ``"newest"``, the ``"oldest"``, or those of the
            highest ``"priority"``: the latest given to a dataset's or the table's `update_priority`, or else to
            `Table.add` (those without one rank highest); if steps have priorities, their mean. ``"auto"`` keeps what
            the sampler of the most recent dataset in any process draws most: the highest priorities for `Prioritized`
            and `TopK`, the oldest for `Fifo`, else the newest. For uniform draws the choice makes no difference.

        archive: address of an object store (``"s3://bucket/prefix"``, of fsspec), a tier below the disk, with `size`:
            when the files reach three quarters of `size`, segments with the coldest trajectories are uploaded, and
            their files removed after the objects have been read back and named by two manifests. Their rows are read by
            range. So `max_steps` alone limits the table. While the store fails, a full disk is treated as without one.
            Objects belong to this directory: a copy of it reads the same ones.

    Raises:
        CheckpointError: a path that is invalid, or not local (``s3://...``); an archive that is no address.
        SchemaError: other invalid values; an archive without `size`.
    """

    path: str | os.PathLike[str]
    sync_seconds: float = 1.0
    size: int | str | None = None
    keep: Keep = "auto"
    archive: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(local_path(self.path)))
        object.__setattr__(self, "sync_seconds", check_seconds("sync_seconds", self.sync_seconds))
        if self.size is not None:
            object.__setattr__(self, "size", byte_count("size", self.size))
        one_of("keep", self.keep, _KEEPS)
        if self.archive is None:
            return
        if not is_address(self.archive):
            raise CheckpointError(
                f"archive={shown(self.archive)} was received; expected the address of an object store, such as "
                "'s3://bucket/prefix'."
            )
        if self.size is None:
            raise SchemaError(
                "archive= was received without size=; expected both: size is how many bytes stay in the directory."
            )

    def tier(self) -> Tier | None:
        """The tier below the memory; None without `size`."""
        return None if self.size is None else Tier(str(self.path), int(self.size))

    def exists(self) -> bool:
        """Whether a table has been written there: then use `Table.recover` instead of `Table.create`."""
        return os.path.lexists(os.path.join(self.path, _MANIFEST_NAME))


@dataclasses.dataclass(frozen=True)
class Tier:
    """Where a table's trajectories beyond its memory lie; part of its header, so that all its processes read them.

    Attributes:
        path: absolute path of the directory. size: most bytes of its files.
    """

    path: str
    size: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; the path's bytes in hexadecimal digits, because they need not be text."""
        return {"path": os.fsencode(self.path).hex(), "size": self.size}

    @classmethod
    def from_json(cls, fields: Any) -> Tier:
        """The inverse of `to_json`. Raises SchemaError for anything else."""
        try:
            path, count = os.fsdecode(bytes.fromhex(fields["path"])), fields["size"]
            if (
                len(fields) == 2
                and os.path.isabs(path)
                and "\0" not in path
                and type(count) is int
                and count > 0
            ):
                return cls(path, count)
        except (KeyError, TypeError, ValueError):
            pass
        raise SchemaError(f"tier is {fields!r}; expected an absolute path and a positive size")


class LostRowsError(CheckpointError):
    """Trajectories that lie on disk only cannot be read; the message names the first file and id.

    Attributes:
        slots, generations: int64 [n], the trajectories.
    """

    def __init__(self, message: str, slots: Array, generations: Array) -> None:
        super().__init__(message)
        self.slots, self.generations = slots, generations


class TierReader(Source, Protocol):
    """Reads trajectories that lie on disk only, `gear_loader.checkpoint.tier_reader.FileReader`.

    A trajectory that lay on disk only when it was looked at may have come back and grown since: `sizes` and not the
    index says how much of its copy can be read.
    """

    def count_hits(self, rows: int) -> None:
        """Count rows of a batch that were in memory."""

    def flush(self) -> None:
        """Add what this process has counted to the counts of the table."""


class ValueReader(Source, Protocol):
    """Reads ragged values that lie on disk only; a `FileReader` is one too."""

    def read_values(
        self, name: str, slots: Array, tags: Array, first: Array, counts: Array, out: tuple[Array, Array]
    ) -> None:
        """Read ragged values that lie on disk, by their records there; see `gear_loader.storage.disk_records`.

        Args:
            name: of the column. slots, tags, first, counts: int64 [n], as `disk_records.parts_of` has them.
            out: memory, uint8 [bytes], and the byte that each value goes to, int64 [n].

        Raises:
            LostRowsError: values cannot be read. MovedRowsError: they lie elsewhere by now.
        """


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
        error: why the last write, or the last move of trajectories between memory and disk tier, failed; None if it
            was complete. Trajectories that were lost with a damaged file are `TableStats.num_lost`. Also why segments
            could not be moved to the archive.
        archived_bytes: of files that lie in the archive (`Disk.archive`).
    """

    path: str
    unwritten_trajectories: int
    unwritten_seconds: float
    writes: int
    bytes_written: int
    write_seconds: float
    longest_write_seconds: float
    error: str | None
    archived_bytes: int = 0

    def __str__(self) -> str:
        behind = (
            f", {self.unwritten_trajectories:,} trajectories not on disk, {self.unwritten_seconds:,.1f} s"
        )
        return (
            f"{self.writes:,} writes of {self.bytes_written:,} B, at most {self.longest_write_seconds:,.2f} s each"
            f"{behind if self.unwritten_trajectories else ''}"
            f"{f', {self.archived_bytes:,} B in the archive' if self.archived_bytes else ''}"
            f"{f'; {self.error}' if self.error else ''}"
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
