"""The owner of the table of a TransferQueue: an actor of Ray, which writes the disk and serves other machines.

Processes of its machine read and write the shared memory and do not ask it. If it is killed, Ray starts it again, and
it attaches to the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gear_loader.errors import GearError, RegionError, SchemaError
from gear_loader.integrations.transfer_queue_fields import values_of
from gear_loader.integrations.transfer_queue_rows import BLOCK_STEPS, SCHEMA, Rows, Samples
from gear_loader.storage.disk import Disk
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.shared_memory import region_path
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, shown

_STEPS = 2 * BLOCK_STEPS  # room in the index for so many fields of each sample, on average
_SAVED = "gear_loader"


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """The entries of ``backend.GearLoader`` in the configuration of TransferQueue.

    Attributes:
        name: of the table. Runs on one machine at the same time need different ones.
        memory: bytes of the values of all samples, in shared memory; allocated as they are written.
        max_samples: largest number of samples, counted once more for each put of more fields.
        path: directory on a disk, of the owner's machine, or None. With it samples survive the end of the job and of
            the machine, and `transfer_queue.init` brings them back.
        sync_seconds: seconds between two writes to the disk.
        sync: whether a put returns when the sample is on the disk, and not only in shared memory.
        timeout: seconds that a put waits for the table's lock.
        address: where the owner is; filled in.
    """

    name: str = "transfer_queue"
    memory: int | str = "4GiB"
    max_samples: int = 1 << 18
    path: str | None = None
    sync_seconds: float = 1.0
    sync: bool = False
    timeout: float = 60.0
    address: Any = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> BackendOptions:
        """Of a section of the configuration.

        Raises:
            SchemaError: an entry that there is not.
        """
        given = dict(given or {})
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(given).difference(names)):
            raise SchemaError(f"backend.GearLoader has {unknown}; expected some of {names}.")
        made = cls(**given)
        if made.sync and made.path is None:
            raise SchemaError(
                "backend.GearLoader has sync=True without a path; expected the directory of a disk."
            )
        return made


def this_machine() -> str:
    """What processes that share memory have in common, as far as it can be told."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def open_table(options: BackendOptions) -> Table:
    """Create the table, attach to it, or recover it from the disk, whichever there is.

    Raises:
        As `Table.create` and `Table.recover`.
    """
    disk = None if options.path is None else Disk(options.path, sync_seconds=options.sync_seconds)
    sizes: Any = {
        "max_steps": _STEPS * options.max_samples,
        "max_trajectories": options.max_samples,
        "block_steps": BLOCK_STEPS,
    }
    if disk is not None and disk.exists() and not os.path.lexists(region_path(options.name)):
        return Table.recover(disk, schema=SCHEMA, name=options.name, payload=options.memory, **sizes)
    return Table.create(
        SCHEMA,
        **sizes,
        memory=Memory(payload=options.memory),
        name=options.name,
        timeout=options.timeout,
        if_exists="attach",
        disk=disk,
    )


class TableOwner:
    """The actor.

    Args:
        options: of the configuration.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self.table = open_table(options)
        self._rows = Rows(self.table)

    def __ray_shutdown__(self) -> None:
        """Free the memory; what has to stay is on the disk. Ray calls it where the actor ends, not by force."""
        try:
            self.table.close()
        except GearError:
            return  # the memory has what could not be written
        with contextlib.suppress(RegionError), Table.attach(self._options.name) as table:
            table.unlink()

    def machine(self) -> str:
        """`this_machine` of the owner."""
        return this_machine()

    def samples(self) -> list[Samples]:
        """What is in the table; of each sample its name, and the sizes of its values."""
        return [*self._rows.samples()]

    def flush(self) -> None:
        """Return when all that was put is on the disk."""
        if self.table._engine.disk is not None:
            self.table._engine.disk.flush()

    def put(self, rows: Array, fields: Mapping[str, Any], names: Sequence[bytes]) -> None:
        """`Rows.put`, for another machine."""
        self._rows.put(rows, [values_of(name, value) for name, value in fields.items()], names)

    def get(self, rows: Array, names: Sequence[str]) -> dict[str, Any]:
        """`Rows.get`, for another machine."""
        return self._rows.get(rows, names)

    def remove(self, rows: Array) -> None:
        """`Rows.remove`, for another machine."""
        self._rows.remove(rows)

    def save(self, folder: str) -> None:
        """Save the table into a checkpoint of TransferQueue."""
        self.table.save(os.path.join(folder, _SAVED))

    def load(self, folder: str) -> None:
        """Put what `save` has saved in place of what is there.

        Raises:
            CheckpointError: as `Table.load`. Nothing was changed.
        """
        with Table.load(os.path.join(folder, _SAVED), schema=SCHEMA) as saved:
            self.table.clear()
            for slot in saved.indices().tolist():
                self.table.add(saved[slot])


def rows_of(indexes: Sequence[int]) -> Array:
    """Global indexes as int64 [n]."""
    rows: Array = np.asarray(indexes, dtype=np.int64).reshape(-1)
    if (rows < 0).any():
        raise SchemaError(f"Global indexes {shown(indexes)}; expected numbers from 0 on.")
    return rows
