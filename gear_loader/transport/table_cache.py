"""The tables of a server: attached by name at their first use, and detached after their removal."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from gear_loader.errors import LockTimeoutError, RegionError, SchemaError
from gear_loader.native.serving import serve
from gear_loader.storage.counters import DIRTY
from gear_loader.storage.index import Index
from gear_loader.storage.reader import TableReader
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Schema
from gear_loader.storage.shared_memory import Key, region_path
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.transport.stored_once import StoredOnce
from gear_loader.utils.arrays import Array

_LOCK_TIMEOUT = 10.0  # seconds; a change takes far less than a millisecond
_UNDER_LOCK = 1 << 17  # largest reply that is gathered while the lock is held


class AttachedTable:
    """An attached table, mapped until the last reference to it is released.

    Args:
        timeout: seconds that stores wait for free space.

    Attributes:
        table, engine: the table, and its internals.
        at_once: an index whose calls never wait, neither for the lock nor for space.
        extent, block_ids, block_steps: the index, as the compiled gather takes it.
        stored_once, filled_once, set_once, advanced_once: execute a request that is sent again once.
        memory: number of what these remember.
        is_dirty: whether the next lock holder must repair the index, which can take long.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self._path = region_path(name)
        self.table, self._key = _attach(name, self._path, timeout)
        self.engine = self.table._engine
        region = self.engine.region
        self.at_once = Index(region, lock_timeout=0.0)
        self.at_once.admission.timeout = 0.0
        self._readers = Index(region, lock_timeout=_LOCK_TIMEOUT).reader, self.at_once.reader
        self.block_steps = region.layout.block_steps
        self.extent, self.block_ids = self.engine.reader().index_arrays()
        self._state, self._generation, _ = self.engine.reader().slot_states()
        self._index = self._state, READY, self._generation, self.extent, self.block_ids, self.block_steps
        self.stored_once = StoredOnce(self.engine.index.slots_of)
        # Values are compared where an earlier process may have written them.
        self.filled_once = StoredOnce(lambda ids: ids[:0])
        self.set_once = StoredOnce(lambda ids: ids[:0])
        self.advanced_once = StoredOnce(lambda ids: ids[:0])
        self.memory = 1 + secrets.randbelow((1 << 64) - 1)
        self._fits: Schema | None = None

    @property
    def schema(self) -> Schema:
        return self.table.schema

    @property
    def is_dirty(self) -> bool:
        return bool(self.at_once.reader.arrays.counters[DIRTY])

    @property
    def is_current(self) -> bool:
        """Whether the name still refers to this table."""
        return _key(self._path) == self._key

    def reader(self, at_once: bool) -> TableReader:
        """The reader whose calls wait for the lock, or with `at_once` raise LockTimeoutError if it is held."""
        return self._readers[at_once]

    def serve(
        self, columns: Array, rows: Array, most: int, out: Array, status: int, gaps: Array, *, at_once: bool
    ) -> int:
        """Fill a reply by `gear_loader.native.serving.serve`, which has the same arguments, and return its result.

        Small replies are gathered under the lock; else a read ticket keeps trajectories that are live from being
        overwritten.

        Args:
            at_once: do not wait for the lock.

        Raises:
            LockTimeoutError: the lock is held.
        """
        given = columns, rows, most, *self._index, out, status, gaps
        if len(out) <= _UNDER_LOCK:
            return self._readers[at_once].under_lock(lambda: int(serve(*given)))
        reader, slots = self._readers[at_once], rows[0]
        if reader.arrays.edit_unit:
            slots = np.clip(slots, 0, reader.arrays.num_slots - 1)
        with self.reading(at_once=at_once):
            return reader.read_whole(slots, lambda: int(serve(*given)))

    @contextlib.contextmanager
    def reading(self, *, at_once: bool) -> Iterator[None]:
        """Hold a read ticket: trajectories that are live now or later are not overwritten inside the block.

        Args:
            at_once: do not wait for the lock.

        Raises:
            LockTimeoutError: the lock is held.
        """
        ticket = Ticket()
        try:
            self.reader(at_once).begin_read(ticket)
            yield
        finally:
            ticket.end()

    def live(self, slots: Array, generations: Array) -> Array:
        """Whether each slot holds a live trajectory of its generation; bool [n]. To be called inside `reading`."""
        served: Array = slots.view(np.uint64) < len(self._state)
        # In this order: a slot that is READY under a read ticket keeps its blocks and generation.
        served &= self._state.take(slots, mode="clip") == READY
        served &= self._generation.take(slots, mode="clip") == generations
        return served

    def check_schema(self, schema: Schema, *, added: bool = False) -> None:
        """Check that the requester expects the schema of the table.

        Args:
            added: whether it is that of the columns that are given when a trajectory is added.

        Raises:
            SchemaError: it does not; the message has both schemas.
        """
        if added and schema is self._fits:
            return
        mine = self.schema.added if added else self.schema
        if schema.to_json() != mine.to_json():
            raise SchemaError(
                f"Table {self.name!r} has the columns {_columns(mine)}; the requester expects "
                f"{_columns(schema)}. Create the tables of all nodes with the same schema."
            )
        if added:
            self._fits = schema  # messages with the same text have the same object


def _attach(name: str, path: str, timeout: float) -> tuple[Table, Key]:
    """Attach a table; returns it and the identity of its file."""
    while True:
        before = _key(path)
        table = Table.attach(name, timeout=timeout)
        if before is not None and _key(path) == before:
            return table, before
        table.close()


def _key(path: str) -> Key | None:
    try:
        info = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _columns(schema: Schema) -> str:
    listed = [f"{name} {column.dtype_name}{list(column.shape)}" for name, column in schema.items()]
    more = [f"and {len(listed) - 40} more"] if len(listed) > 40 else []
    return "{" + ", ".join(listed[:40] + more) + "}"


class TableCache:
    """Attached tables by name; thread-safe. A table is attached by the first request for it.

    Args:
        tables: names of the tables that may be served.
        timeout: seconds that stores wait for free space.
    """

    def __init__(self, tables: Sequence[str], timeout: float) -> None:
        self._names = frozenset(tables)
        self._timeout = timeout
        self._attached: dict[str, AttachedTable] = {}
        self._attempts: dict[str, Future[AttachedTable]] = {}  # attaches in progress
        self._guard = threading.Lock()  # protects both dictionaries; never held while waiting for a table
        self._closed = False
        for name in tables:
            region_path(name)

    def check(self, name: str) -> None:
        """Raise RegionError if this table is not served."""
        if name not in self._names:
            raise RegionError(
                f"Table {name!r} is not served here; this server has {', '.join(sorted(self._names)) or 'none'}. "
                "Start it with that name too."
            )

    def open(self, name: str, *, at_once: bool = False) -> AttachedTable:
        """Return the attached table. May wait for its lock; concurrent calls share one attach.

        Raises:
            RegionError: the table is not served or does not exist. LockTimeoutError: its lock is held; or, with
                `at_once`, it has to be attached or repaired first.
        """
        if at_once:
            with self._guard:
                found = self._attached.get(name)
            if found is None or not found.is_current or found.is_dirty:
                raise LockTimeoutError(f"Table {name!r} has to be attached or repaired first.")
            return found
        self.check(name)
        with self._guard:
            attached = self._attached.get(name)
            if attached is not None and attached.is_current:
                return attached
            self._attached.pop(name, None)
            attached = None
            attempt = self._attempts.get(name)
            others = attempt is not None
            if attempt is None:
                attempt = self._attempts[name] = Future()
        return attempt.result() if others else self._attach(name, attempt)

    def _attach(self, name: str, attempt: Future[AttachedTable]) -> AttachedTable:
        try:
            attached = AttachedTable(name, self._timeout)
        except BaseException as error:
            with self._guard:
                del self._attempts[name]
            attempt.set_exception(error)
            raise
        with self._guard:
            del self._attempts[name]
            if not self._closed:
                self._attached[name] = attached
        attempt.set_result(attached)
        return attached

    def sweep(self) -> list[str]:
        """Detach tables whose names were removed or replaced, so that their memory is freed; returns the names."""
        with self._guard:
            gone = [name for name, attached in self._attached.items() if not attached.is_current]
            for name in gone:
                del self._attached[name]
        return gone

    def close(self) -> None:
        """Detach all tables."""
        with self._guard:
            self._closed = True
            self._attached.clear()
