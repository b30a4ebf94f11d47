"""Random names of tables and of the saves they were loaded from. They decide which files a save can reuse."""

from __future__ import annotations

import os
import secrets

from gear_loader.storage.counters import IDENTITY
from gear_loader.storage.index import Index
from gear_loader.storage.lock import process_start
from gear_loader.storage.table import Table

__all__ = ["identity", "set_parent"]


def identity(table: Table, index: Index) -> tuple[str, str]:
    """Name of the table, and of the save it was loaded from; 16 hexadecimal digits each."""
    here = _process(table)

    def look() -> tuple[str, str]:
        name, parent, pid, start = index.arrays.counters[IDENTITY].tolist()
        if name == 0 or (pid, start) not in ((0, 0), here):
            name, parent = 1 + secrets.randbelow(2**63 - 1), 0
            index.arrays.counters[IDENTITY] = name, parent, *here
        return f"{name:016x}", f"{parent:016x}"

    return table._engine.region.lock.read(look)


def _process(table: Table) -> tuple[int, int]:
    return (0, 0) if table.name is not None else (os.getpid(), process_start(os.getpid()))


def set_parent(table: Table, index: Index, save: str) -> None:
    """Record that a table was loaded from the save named `save`."""

    def note() -> None:
        index.arrays.counters[IDENTITY] = 1 + secrets.randbelow(2**63 - 1), int(save, 16), *_process(table)

    table._engine.region.lock.run(note)
